r"""Per-example Jacobians and their log-determinants.

Notation: ``f`` maps one example of size ``D`` to a representation of size
``R``; ``J`` is its ``[R, D]`` Jacobian; ``J_f = sqrt(det(J J^T))`` is the
Jacobian determinant of MASS (arXiv:1905.07822, the display below Eq. (1)).

Batch elements must not interact for a Jacobian to be "per example". Networks
with BatchNorm in training mode do interact; `summed_jacobian` names what the
authors compute there, and `information.py` offers both definitions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

ExampleFn = Callable[[jax.Array], jax.Array]  # one example [...] -> [R]
BatchFn = Callable[[jax.Array], tuple[jax.Array, Any]]  # a batch [B, ...] -> [B, R], and more
JacobianMode = Literal["auto", "forward", "reverse"]
SingularPolicy = Literal["floor", "-inf"]

_HIGHEST = jax.lax.Precision.HIGHEST  # TPUs would multiply in bfloat16 otherwise


def per_example_jacobian(
    f: ExampleFn,
    x: jax.Array,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
) -> jax.Array:
    """Jacobian of ``f`` at every example of a batch.

    Cost: ``R`` backward passes per example in reverse mode, ``D`` tangent
    passes in forward mode. ``"auto"`` takes the cheaper one, reverse when
    ``R <= D``.

    Args:
      f: maps one example ``[...]`` (``D`` numbers) to ``[R]``.
      x: ``[B, ...]``.
      mode: ``"auto"``, ``"forward"`` (`jax.jacfwd`) or ``"reverse"``
        (`jax.jacrev`).
      chunk_size: examples worked on at once; bounds memory. ``None`` takes all.

    Returns:
      ``[B, R, D]``, trailing input axes flattened.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0]])
      >>> per_example_jacobian(lambda v: jnp.stack([v[0] * v[1]]), x).tolist()
      [[[2.0, 1.0]]]
    """
    output_dim, input_dim = _example_dims(f, x)
    check_mode(mode)
    forward = mode == "forward" or (mode == "auto" and output_dim > input_dim)
    jacobian = jax.jacfwd(f) if forward else jax.jacrev(f)
    return map_examples(lambda v: jacobian(v).reshape(output_dim, input_dim), x, chunk_size)


def half_log_det_jjt(
    f: ExampleFn,
    x: jax.Array,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
    singular: SingularPolicy = "floor",
) -> jax.Array:
    r"""``log J_f(x) = 1/2 log det(J J^T)`` of every example, in nats.

    Args:
      f: maps one example ``[...]`` to ``[R]``.
      x: ``[B, ...]``.
      mode, chunk_size: as in `per_example_jacobian`. With a chunk size the
        backward pass recomputes each chunk, so memory stays bounded there too.
      singular: see `half_log_det_gram`.

    Returns:
      ``[B]``.

    Raises:
      ValueError: at trace time, if ``R > D`` (``J J^T`` is then singular for
        every ``f``).

    Example:
      >>> import jax.numpy as jnp
      >>> value = half_log_det_jjt(lambda v: 3.0 * v, jnp.ones((1, 2)))
      >>> f"{value[0]:.3f}"  # 2 log 3
      '2.197'

    References:
      MASS, arXiv:1905.07822, definition of ``J_f`` below Eq. (1).
    """
    output_dim, input_dim = _example_dims(f, x)
    check_not_expanding(output_dim, input_dim)

    def one(v: jax.Array) -> jax.Array:
        return half_log_det_gram(per_example_jacobian(f, v[None], mode), singular)[0]

    return map_examples(one, x, chunk_size)


def summed_jacobian(
    f: BatchFn, x: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, Any]:
    """Outputs of a batch function and its Jacobian summed over the outputs.

    Row ``b`` of the result is ``sum_b' w_b' d f(x)_b' / d x_b``, obtained by
    ``R`` backward passes with a batch-wide one-hot cotangent. Where examples do
    not interact this is the per-example Jacobian; where they do (BatchNorm in
    training mode) it is the quantity the authors differentiate.

    Args:
      f: maps ``[B, ...]`` to ``[B, R]`` and anything else it wants to return.
      x: ``[B, ...]``.
      weights: ``[B]`` zeros and ones; rows of weight zero are padding.

    Returns:
      ``f(x)`` as ``[B, R]``, the Jacobian as ``[B, R, D]``, and what else ``f``
      returned.

    Example:
      >>> import jax.numpy as jnp
      >>> centre = lambda v: (v - v.mean(0, keepdims=True), None)
      >>> outputs, jacobian, _ = summed_jacobian(centre, jnp.eye(2))
      >>> float(abs(jacobian).max())  # subtracting the batch mean forgets the mean
      0.0
    """
    outputs, pullback, auxiliary = jax.vjp(f, x, has_aux=True)
    batch, output_dim = outputs.shape
    one_hot = jnp.eye(output_dim, dtype=outputs.dtype)[:, None, :]  # [R, 1, R]
    cotangents = jnp.broadcast_to(one_hot, (output_dim, batch, output_dim))
    if weights is not None:
        cotangents = cotangents * weights.astype(outputs.dtype)[None, :, None]
    (rows,) = jax.vmap(pullback)(cotangents)  # [R, B, ...]
    return outputs, jnp.moveaxis(rows.reshape(output_dim, batch, -1), 0, 1), auxiliary


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def half_log_det_gram(jacobian: jax.Array, singular: SingularPolicy = "floor") -> jax.Array:
    r"""``1/2 log det(J J^T)`` of given Jacobians, sound in float32.

    Rows of ``J`` are first divided by their norms, so the Cholesky factors are of
    correlation-like matrices whatever the scale of the network; two passes of
    Cholesky QR keep the error proportional to the condition of ``J``, not to its
    square. Products are taken in the highest matmul precision. The derivative is
    the closed form ``(J J^T)^-1 J``, itself differentiable.

    A Jacobian is treated as rank deficient when, after the first pass, a pivot
    falls to rounding error. Its defined answer is then

    * ``"floor"``: the log-determinant of the scaled matrix with a ridge of ``8 R``
      rounding errors in each pass, finite, with the finite gradient of that;
    * ``"-inf"``: minus infinity, with gradient zero.

    An all-zero row counts with the smallest positive number of the dtype as
    its norm and has gradient zero.

    Args:
      jacobian: ``[..., R, D]``.
      singular: ``"floor"`` or ``"-inf"``.

    Returns:
      ``[...]``, nats.

    Example:
      >>> import jax.numpy as jnp
      >>> f"{half_log_det_gram(2.0 * jnp.eye(2, 3)):.3f}"  # 2 log 2
      '1.386'
    """
    return _half_log_det_and_pseudo_inverse(jacobian, singular)[0]


@half_log_det_gram.defjvp
def _half_log_det_gram_jvp(
    singular: SingularPolicy, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    value, gradient = _half_log_det_and_pseudo_inverse(primals[0], singular)
    return value, jnp.sum(gradient * tangents[0], axis=(-2, -1))


def half_log_det_slogdet(jacobian: jax.Array) -> jax.Array:
    """`half_log_det_gram` by LU factorisation: the slow, plain reference.

    Args:
      jacobian: ``[..., R, D]``.

    Returns:
      ``[...]``, nats.
    """
    return 0.5 * jnp.linalg.slogdet(_gram(jacobian)).logabsdet


def _half_log_det_and_pseudo_inverse(
    jacobian: jax.Array, singular: SingularPolicy
) -> tuple[jax.Array, jax.Array]:
    """``1/2 log det(J J^T)`` ``[...]`` and its gradient ``[..., R, D]``."""
    if singular not in ("floor", "-inf"):
        raise ValueError(f"singular={singular!r}: choose 'floor' or '-inf'")
    check_not_expanding(*jacobian.shape[-2:])
    dtype = jnp.promote_types(jacobian.dtype, jnp.float32)  # bfloat16 is too coarse here
    jacobian = jacobian.astype(dtype)
    # Two-stage norm: entries near the largest float must not overflow when squared. A
    # zero row is divided by one; dividing by tiny numbers instead invites 0 / 0, since XLA
    # may turn a / b / c into a / (b c).
    largest = jnp.max(jnp.abs(jacobian), axis=-1, keepdims=True)
    is_zero = largest == 0
    largest = jnp.where(is_zero, 1.0, largest)
    shrunk = jacobian / largest
    squared = jnp.sum(shrunk * shrunk, axis=-1, keepdims=True)  # [..., R, 1], 0 or in [1, D]
    norm = jnp.sqrt(jnp.where(is_zero, 1.0, squared))
    unit_rows = shrunk / norm

    # Cholesky QR in two passes. The Gram matrix squares the condition of J; orthogonalising
    # with its (shifted) factor first leaves a second Gram matrix near the identity, and
    # det(J J^T) = det(L1)^2 det(Q1 Q1^T) holds exactly for any factor L1.
    shift = 8.0 * jacobian.shape[-2] * jnp.finfo(dtype).eps
    gram = _gram(unit_rows)
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=dtype), gram.shape)
    first = _cholesky_or_more_shift(gram + shift * identity, shift)
    first_inverse = inverse_lower(first)
    nearly_orthonormal = _product(first_inverse, unit_rows)
    gram = _gram(nearly_orthonormal)
    pivots = jnp.square(_diagonal(jnp.linalg.cholesky(gram)))
    # A failed Cholesky gives NaN pivots: deficient. A NaN in J itself must stay one.
    is_nan = jnp.isnan(jnp.sum(gram, axis=(-2, -1)))
    deficient = ~(jnp.min(pivots, axis=-1) > shift) & ~is_nan
    second = _cholesky_or_more_shift(gram + shift * deficient[..., None, None] * identity, shift)

    log_scale = jnp.log(largest) + jnp.log(norm)
    log_scale = jnp.where(is_zero, jnp.log(jnp.finfo(dtype).tiny), log_scale)[..., 0]  # [..., R]
    value = jnp.sum(jnp.log(_diagonal(first)) + jnp.log(_diagonal(second)) + log_scale, axis=-1)

    inverse = _product(inverse_lower(second), first_inverse)
    solved = _product(jnp.swapaxes(inverse, -1, -2), _product(inverse, unit_rows))
    gradient = solved / norm / largest
    if singular == "-inf":
        value = jnp.where(deficient, -jnp.inf, value)
        gradient = jnp.where(deficient[..., None, None], 0.0, gradient)
    return value, gradient


def _cholesky_or_more_shift(matrices: jax.Array, shift: float | jax.Array) -> jax.Array:
    """Cholesky factors, with a thousand shifts more where rounding made one fail."""
    factor = jnp.linalg.cholesky(matrices)
    failed = jnp.isnan(jnp.sum(factor, axis=(-2, -1), keepdims=True))
    identity = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    # A NaN in the matrix itself fails again, and stays one.
    rescued = jnp.linalg.cholesky(matrices + jnp.where(failed, 1000.0 * shift, 0.0) * identity)
    return jnp.where(failed, rescued, factor)


def _gram(rows: jax.Array) -> jax.Array:
    return jnp.einsum("...rd,...sd->...rs", rows, rows, precision=_HIGHEST)


_product = partial(jnp.matmul, precision=_HIGHEST)


@jax.custom_jvp
def inverse_lower(factor: jax.Array) -> jax.Array:
    """Inverse of small lower-triangular matrices.

    The right-hand side is the identity and the derivative is a product of
    inverses: wide batched triangular solves and their gradients can hang XLA's
    CPU backend.

    Args:
      factor: ``[..., R, R]``; what stands above the diagonal is ignored.

    Returns:
      ``[..., R, R]``, lower triangular.
    """
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return jax.lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)


@inverse_lower.defjvp
def _inverse_lower_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = inverse_lower(primals[0])
    return inverse, -_product(_product(inverse, jnp.tril(tangents[0])), inverse)


class JacobianEstimator(NamedTuple):
    """How ``E[log J_f(X)]`` is estimated from a minibatch.

    The minibatch is shuffled, so its first ``num_examples(B, R)`` rows are a
    random sub-batch, and the mean of their exact values is unbiased for the
    mean over the batch.
    """

    num_examples: Callable[[int, int], int]


def authors_sub_batch_size(batch_size: int, representation_dim: int) -> int:
    """``n = max(R // 2, B // R)``, at most ``B``: the authors' sub-batch.

    Example:
      >>> authors_sub_batch_size(256, 15), authors_sub_batch_size(128, 20)
      (17, 10)
    """
    size = max(representation_dim // 2, batch_size // representation_dim, 1)
    return min(size, batch_size)


# Cost per step in backward passes over one example: exact R * B, sub_batch R * n.
JACOBIAN_ESTIMATORS: dict[str, JacobianEstimator] = {
    "exact": JacobianEstimator(num_examples=lambda batch_size, representation_dim: batch_size),
    "sub_batch": JacobianEstimator(num_examples=authors_sub_batch_size),
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


def check_mode(mode: str) -> None:
    """Refuses a mode of differentiation that does not exist."""
    if mode not in get_args(JacobianMode):
        raise ValueError(f"mode={mode!r}: choose one of {sorted(get_args(JacobianMode))}")


def check_not_expanding(output_dim: int, input_dim: int) -> None:
    """Refuses ``R > D``, where ``J J^T`` is singular for every ``f``."""
    if output_dim > input_dim:
        raise ValueError(
            f"J_f is undefined for a representation of {output_dim} numbers from an input of "
            f"{input_dim}: J J^T is singular; use representation_dim <= {input_dim}"
        )


def map_examples(f: Callable[[Any], jax.Array], x: Any, chunk_size: int | None) -> jax.Array:
    """``vmap(f)(x)``, at most ``chunk_size`` examples at a time.

    Args:
      f: works on one example.
      x: an array, or any pytree of arrays, with a leading batch axis.
      chunk_size: at least 1, or ``None`` for the whole batch at once.
    """
    if chunk_size is None or chunk_size >= jax.tree.leaves(x)[0].shape[0]:
        return jax.vmap(f)(x)
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1, or None for no chunks")
    # Without the checkpoint, the backward pass would keep every chunk's residuals.
    return jax.lax.map(jax.checkpoint(f), x, batch_size=chunk_size)


def _example_dims(f: ExampleFn, x: jax.Array) -> tuple[int, int]:
    """``(R, D)`` of ``f`` on one example of ``x``."""
    example = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    output = jax.eval_shape(f, example)
    if output.ndim != 1:
        raise ValueError(
            f"f must map one example {x.shape[1:]} to a vector (R,), "
            f"but returned shape {output.shape}"
        )
    return output.size, example.size


def _diagonal(matrices: jax.Array) -> jax.Array:
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)
