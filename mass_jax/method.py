"""The interface of a training method: four pure functions on `ModelParams`.

A method is a file in `mass_jax/methods/` with a function ``method(**options)``
that returns a `Method`; nothing else needs to know of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from mass_jax.model import ModelParams, PyTree
from mass_jax.networks import Network, TrainContext

Prediction = TypeVar("Prediction", covariant=True)
BuildNetwork = Callable[[int], Network]  # output dimension -> network


class PerExample(NamedTuple):
    """A loss term before its mean.

    Attributes:
      values: ``[n]``.
      weights: ``[n]`` zeros and ones, zero for padding; ``None`` counts all.
    """

    values: jax.Array
    weights: jax.Array | None = None

    def mean(self, axis_name: str | None = None) -> jax.Array:
        """Mean over the rows that count, of all devices if they share an axis."""
        if self.weights is None and axis_name is None:
            return jnp.mean(self.values)
        weights = jnp.ones_like(self.values) if self.weights is None else self.weights
        # Padding may hold anything, even infinities: drop it before multiplying.
        total = jnp.sum(jnp.where(weights > 0, self.values, 0.0))
        count = jnp.sum(weights)
        if axis_name is not None:
            total, count = jax.lax.psum((total, count), axis_name)
        return total / count


class Loss(NamedTuple):
    """A method's verdict on one minibatch.

    Attributes:
      terms: named terms, not yet multiplied.
      coefficients: what each term is multiplied by in the objective.
      log_probs: ``[B, K]``, class log-probabilities of the minibatch.
      batch_stats: running BatchNorm statistics after this minibatch.
    """

    terms: dict[str, PerExample]
    coefficients: Mapping[str, float | jax.Array]
    log_probs: jax.Array
    batch_stats: PyTree

    def objective(self, axis_name: str | None = None) -> jax.Array:
        """The scalar to minimise."""
        weighted = [
            self.coefficients[name] * self.terms[name].mean(axis_name) for name in self.terms
        ]
        return jnp.sum(jnp.stack(weighted))


class Examples(NamedTuple):
    """Training data an initialisation may look at: ``x`` ``[N, ...]``, ``labels`` ``[N]``."""

    x: jax.Array
    labels: jax.Array


class InitFn(Protocol):
    """Makes the parameters; ``examples`` only where the initialisation fits data."""

    def __call__(
        self,
        key: jax.Array,
        build_network: BuildNetwork,
        input_shape: Sequence[int],
        examples: Examples | None = None,
    ) -> ModelParams: ...


class LossFn(Protocol):
    """Loss of ``x`` ``[B, ...]`` and ``labels`` ``[B]``; context: keys, device axis."""

    def __call__(
        self, params: ModelParams, x: jax.Array, labels: jax.Array, context: TrainContext
    ) -> Loss: ...


class PredictFn(Protocol[Prediction]):
    """Prediction for ``x`` ``[B, ...]``; ``keys`` ``[B]``, one PRNG key per example."""

    def __call__(
        self, params: ModelParams, x: jax.Array, keys: jax.Array | None = None
    ) -> Prediction: ...


class Method(NamedTuple):
    """A training method.

    Attributes:
      init: initial parameters.
      loss: terms of the objective on a minibatch.
      log_probs: class log-probabilities ``[B, K]``.
      ood_scores: named ``[B]`` scores, higher = more out-of-distribution.
    """

    init: InitFn
    loss: LossFn
    log_probs: PredictFn[jax.Array]
    ood_scores: PredictFn[dict[str, jax.Array]]


def predictive_entropy(log_probs: jax.Array) -> jax.Array:
    """Entropy of each row of ``log_probs`` ``[B, K]`` in nats, ``0 log 0 = 0``: ``[B]``.

    Example:
      >>> import jax.numpy as jnp
      >>> f"{predictive_entropy(jnp.log(jnp.array([[0.5, 0.5]])))[0]:.3f}"  # log 2
      '0.693'
    """
    probs = jnp.exp(log_probs)
    return -jnp.sum(
        jnp.where(probs > 0, probs * jnp.where(probs > 0, log_probs, 0.0), 0.0), axis=-1
    )


def with_weight_decay(loss: Loss, network: PyTree, weight_decay: float) -> Loss:
    """Adds ``weight_decay * 1/2 ||theta||^2``: L2 decay added to the gradient.

    Args:
      loss: without it.
      network: the weights that decay.
      weight_decay: coefficient; zero leaves the loss as it is.
    """
    if weight_decay == 0:
        return loss
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(network)]
    term = PerExample(0.5 * jnp.sum(jnp.stack(squares))[None])
    return loss._replace(
        terms=loss.terms | {"half_squared_norm": term},
        coefficients={**loss.coefficients, "half_squared_norm": weight_decay},
    )


def negative_log_likelihood(log_probs: jax.Array, labels: jax.Array) -> jax.Array:
    """``-log p(y | x)`` ``[B]`` of ``log_probs`` ``[B, K]`` and ``labels`` ``[B]``."""
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
