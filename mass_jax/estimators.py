"""How ``E[log J_f(X)]`` and its gradient are estimated on a minibatch.

All are unbiased where examples do not interact; `"exact"` is the oracle of the others. Under
the authors' definition (``batch_stats="paper"``), whose Jacobians depend on who is forwarded
together, fewer examples or rarer steps would be another quantity and are refused.

Cost per Jacobian example, in forward passes ``F`` of the network, for ``R`` outputs: ``3 R + 1``
for the exact gradient (a backward pass per output, differentiated), ``R + 5`` for one probe.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mass_jax.jacobian import summed_jacobian
from mass_jax.log_determinant import SingularPolicy, half_log_det_and_gradient


class JacobianEstimator(NamedTuple):
    """A way to estimate the Jacobian term.

    The minibatch is shuffled, so its first ``num_examples(B, R)`` rows are a
    random sub-batch, and the mean of their values is unbiased for the mean over the batch.

    Attributes:
      num_examples: ``(B, R)`` to the examples in the term.
      gradient: ``"exact"``, or by one whitened ``"probe"`` per example.
      form: by the Jacobian itself (``"rows"``), by ``W^T W`` of a dense first layer (``"gram"``),
        or whichever is cheaper by their shapes (``"auto"``); see `dense_first_layer`.
      every: the term is computed every so many steps, with so much more weight.
      per_example: right only where examples do not interact.
    """

    num_examples: Callable[[int, int], int]
    gradient: Literal["exact", "probe"] = "exact"
    form: Literal["rows", "gram", "auto"] = "rows"
    every: int = 1
    per_example: bool = False

    def is_due(self, step: Any) -> Any:
        """Whether the step that follows ``step`` others has the term: the last of each cycle."""
        return (step + 1) % self.every == 0


def authors_sub_batch_size(batch_size: int, representation_dim: int) -> int:
    """``n = max(R // 2, B // R)``, at most ``B``: the authors' sub-batch.

    Example:
      >>> authors_sub_batch_size(256, 15), authors_sub_batch_size(128, 20)
      (17, 10)
    """
    size = max(representation_dim // 2, batch_size // representation_dim, 1)
    return min(size, batch_size)


def _whole_batch(batch_size: int, representation_dim: int) -> int:
    return batch_size


def _few(batch_size: int, representation_dim: int) -> int:
    return max(1, authors_sub_batch_size(batch_size, representation_dim) // 8)


JACOBIAN_ESTIMATORS: dict[str, JacobianEstimator] = {
    # Every example: no noise of its own, and R times the work of a backward pass.
    "exact": JacobianEstimator(_whole_batch),
    # The paper's: the first n examples of the minibatch.
    "sub_batch": JacobianEstimator(authors_sub_batch_size),
    # An eighth of that: the cheapest that needs nothing else. More noise in the term,
    # whose share in the noise of the whole gradient is small at the usual betas.
    "few": JacobianEstimator(_few, per_example=True),
    # The paper's n, Jacobians without gradient, then one backward pass along v = (J J^T)^-1 J e.
    # Saves memory and time where R is large; noisier than fewer examples at the same
    # cost, on SmallMLP untrained and trained (experiments/README.md).
    "probe": JacobianEstimator(authors_sub_batch_size, gradient="probe", per_example=True),
    # One probe for each of the few: the cheapest of all, and unbiased. It trained as well as
    # "sub_batch" over four seeds of 15,000 steps of SmallMLP; on ResNet20, whose mixtures start at
    # zero, it dominates the noise of the first steps, and "few" is the one to take
    # (experiments/README.md).
    "fast": JacobianEstimator(_few, gradient="probe", per_example=True),
    # Every example, for networks with a dense first layer narrower than the input:
    # J J^T = A (W^T W) A^T. Exact, and several times cheaper than "exact".
    "gram": JacobianEstimator(_whole_batch, form="gram"),
    # The paper's n at every eighth step with eight times the weight, as StyleGAN2 does it. Logs
    # show the term at those steps that are multiples of eight, and its weight in their loss.
    "lazy": JacobianEstimator(authors_sub_batch_size, every=8, per_example=True),
    # The paper's n (or yours), in the cheaper of both exact forms.
    "auto": JacobianEstimator(authors_sub_batch_size, form="auto"),
}


def num_jacobian_examples(
    estimator: str, batch_size: int, representation_dim: int, sub_batch: int | None = None
) -> int:
    """Rows of a minibatch that enter the Jacobian term.

    Args:
      estimator: a name in `JACOBIAN_ESTIMATORS`.
      batch_size: ``B``.
      representation_dim: ``R``.
      sub_batch: overrides the estimator's own choice; 1 to ``B``.
    """
    if estimator not in JACOBIAN_ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: choose one of {sorted(JACOBIAN_ESTIMATORS)}")
    if sub_batch is None:
        return JACOBIAN_ESTIMATORS[estimator].num_examples(batch_size, representation_dim)
    if not 1 <= sub_batch <= batch_size:
        raise ValueError(f"sub_batch={sub_batch}: must be from 1 to the batch size, {batch_size}")
    return sub_batch


def probe_noise(keys: jax.Array, size: int, dtype: Any) -> jax.Array:
    """Standard normal ``[n, size]``, one row per key."""
    return jax.vmap(lambda key: jax.random.normal(key, (size,), dtype))(keys)


def half_log_det_by_probe(
    f: Callable[[jax.Array], jax.Array], x: jax.Array, keys: jax.Array, singular: SingularPolicy
) -> jax.Array:
    """``log J_f`` ``[n]``, exact in value, with an unbiased one-probe gradient.

    For ``v = (J J^T)^-1 J e`` with standard normal ``e``, ``E[v v^T] = (J J^T)^-1``, so the
    gradient of ``1/2 |J^T v|^2`` at fixed ``v`` is, in expectation, that of ``log J_f``.

    Args:
      f: maps ``[n, ...]`` to ``[n, R]``; examples do not interact.
      x: ``[n, ...]``.
      keys: ``[n]`` PRNG keys.
      singular: see `half_log_det_gram`.
    """
    _, rows, _ = summed_jacobian(lambda images: (f(images), None), x)
    value, gradient = half_log_det_and_gradient(jax.lax.stop_gradient(rows), singular)
    noise = probe_noise(keys, rows.shape[-1], rows.dtype)
    probe = jnp.einsum("nrd,nd->nr", gradient, noise)
    # As a Jacobian of one row: the closed rules of convolutions differentiate only that.
    _, pullback = jax.vjp(f, x)
    (along,) = jax.vmap(pullback)(jax.lax.stop_gradient(probe)[None])
    surrogate = 0.5 * jnp.sum(jnp.square(along.reshape(x.shape[0], -1)), axis=-1)
    return value + surrogate - jax.lax.stop_gradient(surrogate)
