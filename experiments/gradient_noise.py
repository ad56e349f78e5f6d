"""Bias and variance of stochastic gradients, and the gradients of the MASS terms to apply it to.

A draw is one value of a stochastic gradient at fixed parameters. An estimator that works every
``k``-th step has *cycles* of ``k`` draws; all others have cycles of one. Cycles are independent,
the draws of a cycle need not be.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from ml_collections import ConfigDict

from mass_jax.config import apply_overrides, resolve
from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.experiment import method_of
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext

# (params, x [B, ...], labels [B], key, step) -> gradient by the network's weights [P]
GradientFn = Callable[[ModelParams, jax.Array, jax.Array, jax.Array, int], np.ndarray]
_LARGEST_PIECE = 32  # Jacobian examples at once in the exact gradient: bounds memory


class Measured(NamedTuple):
    """What draws tell of a stochastic gradient, in units of the reference's squared norm.

    Attributes:
      cycles: independent ones that were drawn.
      bias: of the component along the reference, as a share of it (signed).
      bias_error: standard error of `bias`.
      distance: ``|mean of the draws - reference| / |reference|``.
      distance_by_chance: what an unbiased gradient of that variance is expected to show.
      variance: trace of the covariance of one draw.
      variance_error: standard error of `variance`.
      long_run_variance: draws in a cycle times the variance of the mean of a cycle: what is
        left of the noise in the long run. The same as `variance` where cycles have one draw.
    """

    cycles: int
    bias: float
    bias_error: float
    distance: float
    distance_by_chance: float
    variance: float
    variance_error: float
    long_run_variance: float


def measure(cycles: Iterable[Sequence[np.ndarray]], reference: np.ndarray) -> Measured:
    """Bias and variance from draws, one pass, without keeping them.

    Args:
      cycles: of draws ``[P]``, all of one length; at least two.
      reference: the true gradient ``[P]``, or any vector that sets the scale of deviations
        from a truth of zero: see `paired`.

    Example: draws that alternate between 0 and 2 g have no bias, and no noise in the long run.
      >>> import numpy as np
      >>> g = np.ones(3)
      >>> seen = measure([[0 * g, 2 * g]] * 4, g)
      >>> seen.bias, seen.distance, seen.variance, seen.long_run_variance
      (0.0, 0.0, 1.0, 0.0)
    """
    reference = np.asarray(reference, np.float64)
    scale = float(reference @ reference)
    total = np.zeros_like(reference)
    along, squares, squares_of_means, every = [], [], [], 1
    for cycle in cycles:
        deviations = [np.asarray(draw, np.float64) - reference for draw in cycle]
        every = len(deviations)
        mean = np.sum(deviations, axis=0) / every
        total += mean
        along.append(float(mean @ reference) / scale)
        squares.append(float(np.mean([d @ d for d in deviations])) / scale)
        squares_of_means.append(float(mean @ mean) / scale)
    count = len(along)
    if count < 2:
        raise ValueError(f"{count} cycles: a variance needs at least 2")
    squared_distance = float(total @ total) / count**2 / scale
    of_mean = max(float(np.mean(squares_of_means)) - squared_distance, 0.0) * count / (count - 1)
    # The squared distance of the sample mean holds, beside the bias, the noise of that mean.
    squared_bias = squared_distance - of_mean / count
    return Measured(
        cycles=count,
        bias=float(np.mean(along)),
        bias_error=_standard_error(along),
        distance=squared_distance**0.5,
        distance_by_chance=(of_mean / count) ** 0.5,
        variance=max(float(np.mean(squares)) - squared_bias, 0.0),
        variance_error=_standard_error(squares),
        long_run_variance=every * of_mean,
    )


def paired(
    cycles: Iterable[Sequence[np.ndarray]],
    truths: Iterable[np.ndarray],
    reference: np.ndarray,
) -> Measured:
    """`measure` where every cycle has a truth of its own: the exact gradient of its batch.

    The noise that the batch itself brings drops out of bias and variance.

    Args:
      cycles: of draws ``[P]``.
      truths: one per cycle, ``[P]``.
      reference: mean of the truths; it sets the scale.
    """
    pairs = zip(cycles, truths, strict=True)
    return measure(([draw - truth + reference for draw in c] for c, truth in pairs), reference)


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def with_estimator(config: ConfigDict, estimator: str, sub_batch: int | None = None) -> ConfigDict:
    """The configuration with another estimator and the per-example (frozen) Jacobian.

    With frozen statistics of the whole batch an example's ``log J_f`` does not depend on which
    others are in the Jacobian sub-batch, so sub-batches are unbiased; in the authors'
    definition (``"paper"``) a sub-batch is normalised by itself, and there is no such truth.
    """
    changes = {
        "jacobian.estimator": estimator,
        "jacobian.batch_stats": "frozen",
        "jacobian.sub_batch": str(sub_batch),
    }
    return resolve(apply_overrides(config, changes))


def jacobian_gradient(config: ConfigDict, num_classes: int) -> GradientFn:
    """Gradient of ``-E[log J_f]`` as the training step of ``config`` takes it, without beta."""
    estimator = JACOBIAN_ESTIMATORS[config.jacobian.estimator]
    if estimator.every == 1:
        return _gradient(config, num_classes, lambda name: name == "jacobian", config.beta)
    # Without a step the loss has the term always, with weight one: no conditional to compile,
    # and steps that are not due cost nothing here.
    always = _gradient(
        config, num_classes, lambda name: name == "jacobian", config.beta, with_step=False
    )

    def gradient(
        params: ModelParams, x: jax.Array, labels: jax.Array, key: jax.Array, step: int
    ) -> np.ndarray:
        if estimator.is_due(step):
            return estimator.every * always(params, x, labels, key, step)
        return np.zeros(sum(leaf.size for leaf in jax.tree.leaves(params.network)), np.float32)

    return gradient


def rest_gradient(config: ConfigDict, num_classes: int) -> GradientFn:
    """Gradient of all other terms, as the training step weighs them."""
    return _gradient(config, num_classes, lambda name: name != "jacobian", 1.0)


def _gradient(
    config: ConfigDict,
    num_classes: int,
    is_wanted: Callable[[str], bool],
    divisor: float,
    with_step: bool = True,
) -> GradientFn:
    method = method_of(config, num_classes)

    @jax.jit
    def compiled(
        params: ModelParams, x: jax.Array, labels: jax.Array, key: jax.Array, step: jax.Array
    ) -> jax.Array:
        keys = jax.random.split(key, x.shape[0])
        context = TrainContext(keys=keys, reverse_only=True, step=step if with_step else None)

        def wanted(network: jax.Array) -> jax.Array:
            loss = method.loss(params.replace(network=network), x, labels, context)
            terms = [
                loss.coefficients[name] * term.mean()
                for name, term in loss.terms.items()
                if is_wanted(name)
            ]
            return jnp.sum(jnp.stack(terms)) / divisor

        return ravel_pytree(jax.grad(wanted)(params.network))[0]

    def gradient(
        params: ModelParams, x: jax.Array, labels: jax.Array, key: jax.Array, step: int
    ) -> np.ndarray:
        return np.asarray(compiled(params, x, labels, key, jnp.asarray(step)))

    return gradient


def exact_gradient(config: ConfigDict, num_classes: int) -> GradientFn:
    """Gradient of ``-E[log J_f]`` over every example of the batch, in pieces to save memory.

    The statistics of the batch do not depend on the order of its rows, so the mean over
    pieces that take turns in front is the gradient over all rows.
    """
    batch = config.batch_size
    piece = max(size for size in range(1, _LARGEST_PIECE + 1) if batch % size == 0)
    of_piece = jacobian_gradient(with_estimator(config, "sub_batch", piece), num_classes)

    def gradient(
        params: ModelParams, x: jax.Array, labels: jax.Array, key: jax.Array, step: int
    ) -> np.ndarray:
        total = np.zeros(1)
        for start in range(0, batch, piece):
            rolled = jnp.roll(x, -start, axis=0), jnp.roll(labels, -start)
            total = total + of_piece(params, *rolled, key, step).astype(np.float64)
        return total * (piece / batch)

    return gradient


def estimators_of(params: ModelParams) -> list[str]:
    """The registered estimators that differ on this network, `"exact"` first."""
    dense = getattr(params.module, "first_dense", None) is not None
    # "auto" is "sub_batch" in the cheaper of two exact forms: the same draws.
    return [name for name in JACOBIAN_ESTIMATORS if name != "auto" and (dense or name != "gram")]
