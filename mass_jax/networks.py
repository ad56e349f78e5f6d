"""The paper's two networks, SmallMLP and ResNet20, in functional Flax.

A network is a Flax module plus two pure functions on explicit variables:

* `apply` evaluates with *given* BatchNorm statistics: examples do not interact;
* `apply_train` normalises with the statistics of the batch at hand and returns
  them, so that a caller may hold them fixed (`apply` again) or fold them into
  the running estimate (`update_running`).

Randomness is per example: ``keys`` is a ``[B]`` array of PRNG keys, so the same
example meets the same dropout mask on one device or on eight.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from mass_jax.layers import (
    EVALUATION,
    KAIMING_NORMAL,
    BatchNorm,
    Conv3x3,
    Dropout,
    Linear,
    TrainContext,
    elu,
)
from mass_jax.turned_kernel import turning_is_faster

__all__ = [
    "EVALUATION",
    "NETWORKS",
    "BatchNorm",
    "Dropout",
    "FirstLayer",
    "Linear",
    "Network",
    "ResNet20",
    "SmallMLP",
    "TrainContext",
    "apply",
    "apply_train",
    "dense_first_layer",
    "init_variables",
    "make_network",
    "update_running",
]

PyTree = Any
Variables = dict[str, Any]

BATCH_NORM_MOMENTUM = 0.1  # weight of the new value in the running estimate, as in PyTorch


class Network(Protocol):
    """What a model needs of ``f``: every Flax module has it, your own may be wrapped.

    ``init(key, x)`` gives variables; ``apply(variables, x, context)`` gives ``[B, R]``,
    and with ``mutable=[...]`` the changed collections beside it.
    """

    def init(self, rngs: Any, /, *args: Any) -> Any: ...

    def apply(self, variables: Any, /, *args: Any, mutable: Any = False) -> Any: ...


class SmallMLP(nn.Module):
    """Two hidden layers of 400 and 200 elu units, BatchNorm before each.

    Attributes:
      output_dim: size of the output ``f(x)``.
      hidden: widths of the hidden layers.
      nonlinearity: any elementwise function.
      dropout_rate: after each nonlinearity, in training.
      batch_norm: the paper's Figure 2 goes without.
      scale_init: of BatchNorm's scales.
      dtype: of the computation; parameters stay float32 and so does the output.

    Example:
      >>> import jax
      >>> network = SmallMLP(output_dim=15)
      >>> variables = init_variables(jax.random.key(0), network, (8, 8, 1))
      >>> network.apply(variables, jax.numpy.ones((2, 8, 8, 1))).shape
      (2, 15)
    """

    output_dim: int
    hidden: tuple[int, ...] = (400, 200)
    nonlinearity: Callable[[jax.Array], jax.Array] = elu
    dropout_rate: float = 0.0
    batch_norm: bool = True
    scale_init: Callable[..., jax.Array] = nn.initializers.ones
    dtype: Any = None

    @property
    def first_dense(self) -> str:
        """The layer whose output may be given as ``TrainContext.first``."""
        return "linear_0"

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext = EVALUATION) -> jax.Array:
        output_dtype = x.dtype
        x = x.reshape(x.shape[0], -1).astype(self.dtype or x.dtype)
        for index, width in enumerate(self.hidden):
            if index == 0 and context.first is not None:
                x = context.first
            else:
                x = Linear(width, turned=context.reverse_only, name=f"linear_{index}")(x)
            if self.batch_norm:
                x = BatchNorm(self.scale_init, name=f"norm_{index}")(x, context)
            x = self.nonlinearity(x)
            x = Dropout(self.dropout_rate, index, name=f"dropout_{index}")(x, context)
        return Linear(self.output_dim, name="output")(x).astype(output_dtype)


class ResidualBlock(nn.Module):
    """Basic block of He et al. with a parameter-free shortcut."""

    features: int
    stride: int
    nonlinearity: Callable[[jax.Array], jax.Array]
    scale_init: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        y = Conv3x3(self.features, self.stride, name="conv_0")(x, context)
        y = self.nonlinearity(BatchNorm(self.scale_init, name="norm_0")(y, context))
        y = Conv3x3(self.features, name="conv_1")(y, context)
        y = BatchNorm(self.scale_init, name="norm_1")(y, context)
        return self.nonlinearity(y + _shortcut(x, self.features, self.stride))


def _shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
    """Subsample in space, zero-pad channels evenly on both sides."""
    missing = features - x.shape[-1]
    before = missing // 2
    return jnp.pad(
        x[:, ::stride, ::stride, :], ((0, 0), (0, 0), (0, 0), (before, missing - before))
    )


class ResNet20(nn.Module):
    """The 20-layer residual network of He et al. for 32x32 images.

    Attributes:
      output_dim: size of the output ``f(x)``.
      widths: channels of the three stages.
      blocks: residual blocks per stage.
      nonlinearity: any elementwise function.
      scale_init: of BatchNorm's scales.
      dtype: of the computation; parameters stay float32 and so does the output.

    Example:
      >>> import jax
      >>> x, build = jax.numpy.ones((2, 32, 32, 3)), ResNet20(output_dim=15).init_with_output
      >>> outputs, variables = jax.eval_shape(build, jax.random.key(0), x)
      >>> outputs.shape, sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
      ((2, 15), 270047)

    References:
      He et al., arXiv:1512.03385, section 4.2, with parameter-free shortcuts.
    """

    output_dim: int
    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 3
    nonlinearity: Callable[[jax.Array], jax.Array] = nn.relu
    scale_init: Callable[..., jax.Array] = nn.initializers.ones
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext = EVALUATION) -> jax.Array:
        if x.ndim != 4:
            raise ValueError(
                f"ResNet20 needs images (batch, height, width, channels), got {x.shape}"
            )
        output_dtype = x.dtype
        x = Conv3x3(self.widths[0], name="conv")(x.astype(self.dtype or x.dtype), context)
        x = self.nonlinearity(BatchNorm(self.scale_init, name="norm")(x, context))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage_{stage}_block_{block}"
                block_of = ResidualBlock(
                    width, stride, self.nonlinearity, self.scale_init, name=name
                )
                x = block_of(x, context)
        x = jnp.mean(x, axis=(1, 2)).astype(output_dtype)
        return Linear(self.output_dim, kernel_init=KAIMING_NORMAL, name="output")(x)


NETWORKS: dict[str, Callable[..., nn.Module]] = {"small_mlp": SmallMLP, "resnet20": ResNet20}


def make_network(name: str, output_dim: int, **options: Any) -> nn.Module:
    """A network of `NETWORKS` by name.

    Args:
      name: ``"small_mlp"`` or ``"resnet20"``.
      output_dim: ``R``.
      **options: its other attributes.

    Returns:
      A Flax module.

    Example:
      >>> make_network("small_mlp", 15).hidden
      (400, 200)
    """
    if name not in NETWORKS:
        raise ValueError(f"network={name!r}: choose one of {sorted(NETWORKS)}")
    return NETWORKS[name](output_dim=output_dim, **options)


def init_variables(key: jax.Array, module: Network, input_shape: Sequence[int]) -> Variables:
    """Weights under ``"params"`` and BatchNorm statistics under ``"batch_stats"``.

    Args:
      key: PRNG key.
      module: a network.
      input_shape: of one example, without the batch axis.

    Returns:
      Both collections.

    Example:
      >>> import jax
      >>> sorted(init_variables(jax.random.key(0), SmallMLP(2, hidden=(3,)), (4,)))
      ['batch_stats', 'params']
    """
    # Compiled as one program: op by op, a ResNet20 takes seconds to initialise.
    variables = jax.jit(module.init)(key, jnp.zeros((1, *input_shape)))
    return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}


class FirstLayer(NamedTuple):
    """A dense first layer.

    Attributes:
      kernel: ``[D, width]``.
      output: ``[B, width]``, what it gives for a batch.
      turned: whether training has it by `trained_product`.

    Example:
      >>> import jax.numpy as jnp
      >>> FirstLayer(kernel=jnp.ones((4, 3)), output=jnp.ones((5, 3))).output.shape
      (5, 3)
    """

    kernel: jax.Array
    output: jax.Array
    turned: bool = False


def dense_first_layer(
    module: Network, params: PyTree, x: jax.Array, turned: bool = False
) -> FirstLayer | None:
    """The first layer, where it is dense: its output is for ``TrainContext.first``.

    Args:
      module: a network; one with such a layer names it by a property ``first_dense``.
      params: its weights.
      x: ``[B, ...]``.
      turned: by `trained_product`, where `turning_is_faster`.

    Returns:
      The layer and its output; ``None`` for other networks.

    Example:
      >>> import jax
      >>> network, x = SmallMLP(2, hidden=(3,)), jax.numpy.ones((5, 4))
      >>> params = init_variables(jax.random.key(0), network, (4,))["params"]
      >>> dense_first_layer(network, params, x).output.shape
      (5, 3)
    """
    name = getattr(module, "first_dense", None)
    if name is None:
        return None
    kernel = params[name]["kernel"]
    flat = x.reshape(x.shape[0], -1).astype(getattr(module, "dtype", None) or x.dtype)
    output: Any = Linear(kernel.shape[1], turned=turned).apply({"params": params[name]}, flat)
    return FirstLayer(kernel, output, turned and turning_is_faster(kernel))


def apply(
    module: Network,
    params: PyTree,
    batch_stats: PyTree,
    x: jax.Array,
    keys: jax.Array | None = None,
    reverse_only: bool = False,
    first: jax.Array | None = None,
) -> jax.Array:
    """``f(x)`` with given BatchNorm statistics; examples do not interact.

    Args:
      module: a network.
      params: its weights.
      batch_stats: running statistics, or the moments of a batch held fixed.
      x: ``[B, ...]``.
      keys: ``[B]`` PRNG keys of dropout; ``None`` switches it off.
      reverse_only, first: see `TrainContext`.

    Returns:
      ``[B, R]``.

    Example:
      >>> import jax
      >>> network = SmallMLP(2, hidden=(3,))
      >>> variables = init_variables(jax.random.key(0), network, (4,))
      >>> apply(network, **variables, x=jax.numpy.ones((5, 4))).shape
      (5, 2)
    """
    context = TrainContext(
        keys=keys, use_batch_moments=False, reverse_only=reverse_only, first=first
    )
    variables = {"params": params, "batch_stats": batch_stats}
    return module.apply(variables, x, context)


def apply_train(
    module: Network, params: PyTree, batch_stats: PyTree, x: jax.Array, context: TrainContext
) -> tuple[jax.Array, PyTree]:
    """``f(x)`` in training mode, and the batch moments it normalised with.

    Args:
      module: a network.
      params: its weights.
      batch_stats: running statistics; only their structure matters here.
      x: ``[B, ...]``.
      context: keys, padding and device axis.

    Returns:
      ``[B, R]`` and the moments (``mean``, biased ``var``, ``count`` per layer).

    Example:
      >>> import jax
      >>> network, x = SmallMLP(2, hidden=(3,)), jax.numpy.ones((5, 4))
      >>> variables = init_variables(jax.random.key(0), network, (4,))
      >>> _, moments = apply_train(network, **variables, x=x, context=TrainContext())
      >>> float(moments["norm_0"]["count"])
      5.0
    """
    outputs, state = module.apply(
        {"params": params, "batch_stats": batch_stats}, x, context, mutable=["batch_moments"]
    )
    return outputs, state.get("batch_moments", {})


def update_running(batch_stats: PyTree, moments: PyTree) -> PyTree:
    """Running statistics after one more batch, as PyTorch keeps them.

    The running variance takes the unbiased variance of the batch.

    Args:
      batch_stats: ``mean`` and ``var`` per BatchNorm layer.
      moments: ``mean``, biased ``var`` and ``count`` per BatchNorm layer.

    Returns:
      ``mean`` and ``var`` per BatchNorm layer, a tenth of the way to the batch's.

    Example:
      >>> import jax.numpy as jnp
      >>> moments = {"mean": jnp.ones(1), "var": jnp.ones(1), "count": jnp.array(2.0)}
      >>> after = update_running({"mean": jnp.zeros(1), "var": jnp.ones(1)}, moments)
      >>> f"{after['mean'][0]:.1f} {after['var'][0]:.1f}"
      '0.1 1.1'
    """
    if "count" not in moments:
        return {name: update_running(batch_stats[name], moments[name]) for name in batch_stats}
    unbiased = moments["var"] * moments["count"] / jnp.maximum(moments["count"] - 1.0, 1.0)
    keep = 1.0 - BATCH_NORM_MOMENTUM
    return {
        "mean": keep * batch_stats["mean"] + BATCH_NORM_MOMENTUM * moments["mean"],
        "var": keep * batch_stats["var"] + BATCH_NORM_MOMENTUM * unbiased,
    }
