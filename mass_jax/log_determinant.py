"""``1/2 log det(J J^T)`` of small wide matrices: sound in float32, on any backend."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SingularPolicy = Literal["floor", "-inf"]

_HIGHEST = jax.lax.Precision.HIGHEST  # TPUs would multiply in bfloat16 otherwise
_WIDTH = 8  # XLA's CPU backend is faster at rows of whole vectors


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def half_log_det_gram(jacobian: jax.Array, singular: SingularPolicy = "floor") -> jax.Array:
    r"""``1/2 log det(J J^T)`` of given Jacobians, sound in float32.

    Rows of ``J`` are first divided by their norms, so the Cholesky factors are of
    correlation-like matrices whatever the scale of the network. Where an example's rows
    are far from independent, two passes of Cholesky QR keep the error proportional to the
    condition of ``J``, not to its square. Products are taken in the highest matmul
    precision. The derivative is the closed form ``(J J^T)^-1 J``, itself differentiable.

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
    return half_log_det_and_gradient(jacobian, singular)[0]


@half_log_det_gram.defjvp
def _half_log_det_gram_jvp(
    singular: SingularPolicy, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    value, gradient = half_log_det_and_gradient(primals[0], singular)
    return value, jnp.sum(gradient * tangents[0], axis=(-2, -1))


def half_log_det_slogdet(jacobian: jax.Array) -> jax.Array:
    """`half_log_det_gram` by LU factorisation: the slow, plain reference.

    Args:
      jacobian: ``[..., R, D]``.

    Returns:
      ``[...]``, nats.
    """
    return 0.5 * jnp.linalg.slogdet(_gram(jacobian)).logabsdet


def half_log_det_and_gradient(
    jacobian: jax.Array, singular: SingularPolicy
) -> tuple[jax.Array, jax.Array]:
    """``1/2 log det(J J^T)`` ``[...]`` and its gradient ``(J J^T)^-1 J`` ``[..., R, D]``."""
    value, (gradient,) = half_log_det_and_solved(jacobian, (jacobian,), singular)
    return value, gradient


# Compiled here, or every call outside of `jit` would compile both branches anew.
@partial(jax.jit, static_argnames="singular")
def half_log_det_and_solved(
    jacobian: jax.Array, right_sides: tuple[jax.Array, ...], singular: SingularPolicy
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """``1/2 log det(J J^T)`` ``[...]`` and ``(J J^T)^-1`` times each of ``[..., R, K]``."""
    if singular not in ("floor", "-inf"):
        raise ValueError(f"singular={singular!r}: choose 'floor' or '-inf'")
    check_not_expanding(*jacobian.shape[-2:])
    dtype = jnp.promote_types(jacobian.dtype, jnp.float32)  # bfloat16 is too coarse here
    rows = _scaled_rows(jacobian.astype(dtype))
    shrunk = tuple(side.astype(dtype) / rows.largest for side in right_sides)
    plain = half_log_det_of_gram(rows.gram)

    def one_pass() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value = plain.value + jnp.sum(jnp.log(rows.largest), axis=(-2, -1))
        small_before_large = plain.precision / rows.largest
        return value, tuple(product(small_before_large, side) for side in shrunk)

    def two_passes() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return _two_pass_cholesky_qr(rows, shrunk, singular)

    return jax.lax.cond(jnp.all(plain.is_sound), one_pass, two_passes)


class GramLogDet(NamedTuple):
    """From Gram matrices as they are; not to be used where one is not sound."""

    value: jax.Array  # [...], half the log-determinant
    precision: jax.Array  # [..., R, R], the inverse
    is_sound: jax.Array  # [...]


def half_log_det_of_gram(gram: jax.Array) -> GramLogDet:
    """``1/2 log det(G)`` and ``G^-1`` of ``G = J J^T`` ``[..., R, R]`` by one Cholesky pass."""
    limits = jnp.finfo(gram.dtype)
    squared = _diagonal(gram)[..., None]
    norm = jnp.sqrt(squared)
    between = norm * jnp.swapaxes(norm, -1, -2)
    factor = jnp.linalg.cholesky(gram / between)
    inverse = inverse_lower(factor)
    # Products of rows neither overflow nor vanish, and one pass loses eps * trace(C^-1) of
    # relative precision. A failed Cholesky (NaN) makes both comparisons false.
    in_range = (squared > limits.tiny / limits.eps) & (squared < limits.max * limits.eps)
    lost = jnp.sum(jnp.square(inverse), axis=(-2, -1))
    is_sound = jnp.all(in_range, axis=(-2, -1)) & (lost < limits.eps ** (-1 / 3))
    value = jnp.sum(jnp.log(_diagonal(factor)) + jnp.log(norm[..., 0]), axis=-1)
    precision = product(jnp.swapaxes(inverse, -1, -2), inverse) / between
    return GramLogDet(value, precision, is_sound)


class _ScaledRows(NamedTuple):
    """``J = largest * shrunk``, and the rows' correlations."""

    largest: jax.Array  # [..., R, 1], one where a row is zero
    shrunk: jax.Array  # [..., R, D], entries in [-1, 1]
    gram: jax.Array  # [..., R, R], of the shrunk rows
    norm: jax.Array  # [..., R, 1], of the shrunk rows
    correlation: jax.Array  # [..., R, R]
    log_scale: jax.Array  # [..., R], log of the rows' norms


def _scaled_rows(jacobian: jax.Array) -> _ScaledRows:
    # Two-stage norm: entries near the largest float must not overflow when squared. A
    # zero row is divided by one; dividing by tiny numbers instead invites 0 / 0, since XLA
    # may turn a / b / c into a / (b c).
    largest = jnp.max(jnp.abs(jacobian), axis=-1, keepdims=True)
    is_zero = largest == 0
    largest = jnp.where(is_zero, 1.0, largest)
    shrunk = jacobian / largest
    gram = _gram(shrunk)
    squared = _diagonal(gram)[..., None]  # 0 or in [1, D]
    norm = jnp.sqrt(jnp.where(is_zero, 1.0, squared))
    log_scale = jnp.log(largest) + jnp.log(norm)
    log_scale = jnp.where(is_zero, jnp.log(jnp.finfo(jacobian.dtype).tiny), log_scale)[..., 0]
    correlation = gram / (norm * jnp.swapaxes(norm, -1, -2))
    return _ScaledRows(largest, shrunk, gram, norm, correlation, log_scale)


def _two_pass_cholesky_qr(
    rows: _ScaledRows, right_sides: tuple[jax.Array, ...], singular: SingularPolicy
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Value and ``(J J^T)^-1`` times the right sides where the rows are nearly dependent.

    The Gram matrix squares the condition of J; orthogonalising with its (shifted)
    factor first leaves a second Gram matrix near the identity, and
    ``det(J J^T) = det(L1)^2 det(Q1 Q1^T)`` holds exactly for any factor ``L1``.
    """
    dtype = rows.correlation.dtype
    shift = float(8.0 * rows.correlation.shape[-1] * jnp.finfo(dtype).eps)
    identity = jnp.broadcast_to(
        jnp.eye(rows.correlation.shape[-1], dtype=dtype), rows.correlation.shape
    )
    unit_rows = rows.shrunk / rows.norm
    first = _cholesky_or_more_shift(rows.correlation + shift * identity, shift)
    first_inverse = inverse_lower(first)
    nearly_orthonormal = product(first_inverse, unit_rows)
    gram = _gram(nearly_orthonormal)
    pivots = jnp.square(_diagonal(jnp.linalg.cholesky(gram)))
    # A failed Cholesky gives NaN pivots: deficient. A NaN in J itself must stay one.
    is_nan = jnp.isnan(jnp.sum(gram, axis=(-2, -1)))
    deficient = ~(jnp.min(pivots, axis=-1) > shift) & ~is_nan
    second = _cholesky_or_more_shift(gram + shift * deficient[..., None, None] * identity, shift)
    log_diagonals = jnp.log(_diagonal(first)) + jnp.log(_diagonal(second))
    value = jnp.sum(log_diagonals + rows.log_scale, axis=-1)

    second_inverse = inverse_lower(second)
    inverse = product(second_inverse, first_inverse)
    back = product(jnp.swapaxes(inverse, -1, -2), second_inverse)  # small before large
    solved = tuple(
        product(back, product(first_inverse, side / rows.norm)) / rows.norm / rows.largest
        for side in right_sides
    )
    if singular == "-inf":
        value = jnp.where(deficient, -jnp.inf, value)
        solved = tuple(jnp.where(deficient[..., None, None], 0.0, side) for side in solved)
    return value, solved


def _cholesky_or_more_shift(matrices: jax.Array, shift: float) -> jax.Array:
    """Cholesky factors, with a thousand shifts more where rounding made one fail."""
    factor = jnp.linalg.cholesky(matrices)
    failed = jnp.isnan(jnp.sum(factor, axis=(-2, -1), keepdims=True))
    identity = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    # A NaN in the matrix itself fails again, and stays one.
    rescued = jnp.linalg.cholesky(matrices + jnp.where(failed, 1000.0 * shift, 0.0) * identity)
    return jnp.where(failed, rescued, factor)


def _gram(rows: jax.Array) -> jax.Array:
    return jnp.einsum("...rd,...sd->...rs", rows, rows, precision=_HIGHEST)


product = partial(jnp.matmul, precision=_HIGHEST)


def inverse_lower(factor: jax.Array) -> jax.Array:
    """Inverse of small lower-triangular matrices.

    Blocks along the diagonal are inverted in pairs, ``[[A, 0], [B, C]]`` to
    ``[[A^-1, 0], [-C^-1 B A^-1, C^-1]]``, from single numbers up: a few products. A batched
    triangular solve can hang XLA's CPU backend, and its BLAS threads get in the way of XLA's.

    Args:
      factor: ``[..., R, R]``; what stands above the diagonal is ignored.

    Returns:
      ``[..., R, R]``, lower triangular.
    """
    dim = factor.shape[-1]
    more = -dim % _WIDTH
    padded = jnp.pad(factor, [(0, 0)] * (factor.ndim - 2) + [(0, more), (0, more)])
    ones = jnp.diag((jnp.arange(dim + more) >= dim).astype(factor.dtype))
    return _inverse_lower(padded + jnp.broadcast_to(ones, padded.shape))[..., :dim, :dim]


@jax.custom_jvp
def _inverse_lower(factor: jax.Array) -> jax.Array:
    dim = factor.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(dim, dtype=factor.dtype), factor.shape)

    def below(width: int) -> jax.Array:
        block = np.arange(dim) // width
        is_second_by_first = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
        return jnp.where(np.broadcast_to(is_second_by_first, factor.shape), factor, 0.0)

    diagonal = _diagonal(factor)
    # Of single numbers the products go entry by entry.
    inverse = (identity - below(1) / diagonal[..., :, None]) / diagonal[..., None, :]
    width = 2
    while width < dim:
        inverse = inverse - product(product(inverse, below(width)), inverse)
        width *= 2
    return inverse


@_inverse_lower.defjvp
def _inverse_lower_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse_lower(primals[0])
    # By the transpose as it is: the transpose of this rule then has no product that contracts
    # leading axes, at which XLA's CPU backend is three times slower.
    transpose = jax.lax.optimization_barrier(jnp.swapaxes(inverse, -1, -2))
    by_tangent = jnp.einsum(
        "...ki,...kj->...ij", transpose, jnp.tril(tangents[0]), precision=_HIGHEST
    )
    return inverse, -product(by_tangent, inverse)


def check_not_expanding(output_dim: int, input_dim: int) -> None:
    """Refuses ``R > D``, where ``J J^T`` is singular for every ``f``."""
    if output_dim > input_dim:
        raise ValueError(
            f"J_f is undefined for a representation of {output_dim} numbers from an input of "
            f"{input_dim}: J J^T is singular; use representation_dim <= {input_dim}"
        )


def _diagonal(matrices: jax.Array) -> jax.Array:
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)
