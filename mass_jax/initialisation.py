"""`init`: a model in one line, for notebooks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from mass_jax.method import Examples
from mass_jax.methods import make_method
from mass_jax.model import ModelParams
from mass_jax.networks import make_network


def init(
    key: jax.Array,
    network: str = "small_mlp",
    input_shape: Sequence[int] = (32, 32, 3),
    method: str = "mass",
    network_options: dict[str, Any] | None = None,
    examples: Examples | None = None,
    **method_options: Any,
) -> ModelParams:
    """Initial parameters of a network and a method, as `cdi_loss` takes them.

    Args:
      key: PRNG key.
      network: ``"small_mlp"`` or ``"resnet20"``.
      input_shape: of one example: ``(height, width, channels)``, or any for SmallMLP.
      method: ``"mass"``, ``"vib"`` or ``"softmax_ce"``.
      network_options: attributes of the network, such as ``{"dropout_rate": 0.5}``.
      examples: training data, needed for ``initialisation="mle"`` only.
      **method_options: ``representation_dim``, ``num_classes``, ``num_components``,
        ``initialisation``, ... of the method's ``method`` function.

    Returns:
      A pytree that knows its architecture.

    Example:
      >>> import jax
      >>> params = init(jax.random.key(0), input_shape=(8, 8, 1), representation_dim=4)
      >>> params.q.means.shape  # classes, components, representation
      (10, 10, 4)
    """
    build_network = partial(make_network, network, **(network_options or {}))
    return make_method(method, **method_options).init(key, build_network, input_shape, examples)
