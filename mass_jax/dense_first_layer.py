"""``log J_f`` of a network whose first layer is dense: few passes over input-sized arrays.

With ``h = x W + b`` and ``A = dz/dh``, ``[R, H]`` an example, the Jacobian is ``J = A W^T``. Its
log-determinant and both derivatives need no more of the input's ``D`` numbers than three products
with ``J``, or two with ``W^T W`` where that is cheaper. ``J J^T`` itself is had as ``(J W) A^T``.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from mass_jax.log_determinant import (
    GramLogDet,
    SingularPolicy,
    half_log_det_and_solved,
    half_log_det_of_gram,
    product,
)
from mass_jax.turned_gradient import turned_product_of_tangent

DenseForm = Literal["rows", "turned", "gram"]
_MOST_OUTER_PRODUCTS = 4


def gram_is_cheaper(num_examples: int, output_dim: int, input_dim: int, width: int) -> bool:
    """Whether ``W^T W`` costs less than it saves, for ``W`` ``[input_dim, width]``.

    By the products of value and gradient: three of all rows with ``W``, or ``W^T W``, its
    gradient, and two of all rows with them.

    Example:
      >>> gram_is_cheaper(17, 15, 3072, 400), gram_is_cheaper(256, 15, 3072, 400)
      (False, True)
    """
    rows = num_examples * output_dim
    return 3 * rows * input_dim * width > 2 * input_dim * width**2 + 2 * rows * width**2


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def half_log_det_behind(
    rows: jax.Array,
    kernel: jax.Array,
    noise: jax.Array | None,
    form: DenseForm,
    singular: SingularPolicy,
) -> jax.Array:
    """``1/2 log det(J J^T)`` of ``J = A W^T``.

    Args:
      rows: ``A``, ``[n, R, H]``.
      kernel: ``W``, ``[D, H]``.
      noise: standard normal ``[n, D]`` for a one-probe gradient (`half_log_det_by_probe`);
        ``None``: the exact one.
      form: ``"rows"`` by ``J`` itself; ``"turned"`` too, beside another `turned_product` by the
        same kernel; ``"gram"`` by ``A (W^T W) A^T``, for ``H < D`` and the exact
        gradient.
      singular: see `half_log_det_gram`.

    Returns:
      ``[n]``, nats. Its derivative is a closed form and is not differentiated again.
    """
    return _with_gradients(rows, kernel, noise, form, singular).value


class _WithGradients(NamedTuple):
    """The derivative is ``<by_rows, dA> + <right, left dW>``; for ``"gram"`` left is ``A W^T``."""

    value: jax.Array  # [n]
    by_rows: jax.Array  # [n, R, H]
    left: jax.Array  # [n, P, D]; [n, R, H] for "gram"
    right: jax.Array  # [n, P, H], P = R, or 1 for a probe


@half_log_det_behind.defjvp
def _half_log_det_behind_jvp(
    form: DenseForm,
    singular: SingularPolicy,
    primals: tuple[jax.Array, jax.Array, jax.Array | None],
    tangents: tuple[jax.Array, jax.Array, jax.Array | None],
) -> tuple[jax.Array, jax.Array]:
    (rows, kernel, noise), (rows_tangent, kernel_tangent, _) = primals, tangents
    made = _with_gradients(rows, kernel, noise, form, singular)
    # d(W^T W) is W^T dW and its transpose; A^T (J J^T)^-1 A is symmetric, so one counts twice.
    by_kernel = product(kernel.T, kernel_tangent) if form == "gram" else kernel_tangent
    through = _through(made.left, by_kernel, form)
    along_rows = jnp.sum(made.by_rows * rows_tangent, axis=(-2, -1))
    return made.value, along_rows + jnp.sum(made.right * through, axis=(-2, -1))


def _through(left: jax.Array, kernel_tangent: jax.Array, form: DenseForm) -> jax.Array:
    """``left`` times a tangent of the kernel, so that its transpose is the kernel's gradient.

    A few rows as outer products: XLA adds them up inside the optimiser's update, where a product
    would first write a matrix as large as the kernel.
    """
    if form == "turned":
        flat = turned_product_of_tangent(left.reshape(-1, left.shape[-1]), kernel_tangent)
        return flat.reshape(*left.shape[:-1], -1)
    if left.shape[0] * left.shape[1] > _MOST_OUTER_PRODUCTS:
        return _flat_product(left, kernel_tangent)
    rows = [jnp.sum(row[:, None] * kernel_tangent, axis=0) for example in left for row in example]
    return jnp.stack(rows).reshape(*left.shape[:-1], -1)


@partial(jax.jit, static_argnames=("form", "singular"))
def _with_gradients(
    rows: jax.Array,
    kernel: jax.Array,
    noise: jax.Array | None,
    form: DenseForm,
    singular: SingularPolicy,
) -> _WithGradients:
    dtype = jnp.promote_types(rows.dtype, jnp.float32)  # bfloat16 is too coarse here
    rows, kernel = rows.astype(dtype), kernel.astype(dtype)
    if form == "gram":
        return _by_gram(rows, kernel, singular)
    return _by_rows(rows, kernel, noise, singular)


def _by_rows(
    rows: jax.Array, kernel: jax.Array, noise: jax.Array | None, singular: SingularPolicy
) -> _WithGradients:
    jacobian = _flat_product(rows, kernel.T, "highest")
    if noise is not None:
        return _by_probe(jacobian, rows, kernel, noise, singular)
    through = _flat_product(jacobian, kernel, "highest")
    plain = _log_det_between(through, rows)
    value, (by_rows, right) = _solved(plain, jacobian, (through, rows), singular)
    return _WithGradients(value, by_rows, jacobian, right)


def _by_probe(
    jacobian: jax.Array,
    rows: jax.Array,
    kernel: jax.Array,
    noise: jax.Array,
    singular: SingularPolicy,
) -> _WithGradients:
    """The gradient of ``1/2 |J^T v|^2`` at fixed ``v = (J J^T)^-1 J e``, with ``u = J^T v``."""
    gram = jnp.einsum("nrd,nsd->nrs", jacobian, jacobian, precision="highest")
    along_noise = jnp.einsum("nrd,nd->nr", jacobian, noise)[:, :, None]  # J e, [n, R, 1]
    value, (probe,) = _solved(half_log_det_of_gram(gram), jacobian, (along_noise,), singular)
    along = jnp.sum(probe * jacobian, axis=1, keepdims=True)  # u, [n, 1, D]
    behind = jnp.sum(probe * rows, axis=1, keepdims=True)  # A^T v, [n, 1, H]
    return _WithGradients(value, probe * _flat_product(along, kernel), along, behind)


def _solved(
    plain: GramLogDet,
    jacobian: jax.Array,
    right_sides: tuple[jax.Array, ...],
    singular: SingularPolicy,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`half_log_det_and_solved`, by the Gram matrices alone where they are sound."""
    return jax.lax.cond(
        jnp.all(plain.is_sound),
        lambda: (plain.value, tuple(product(plain.precision, side) for side in right_sides)),
        lambda: half_log_det_and_solved(jacobian, right_sides, singular),
    )


def _log_det_between(through: jax.Array, rows: jax.Array) -> GramLogDet:
    """Of ``J J^T = (J W) A^T``, both factors ``[n, R, H]``.

    An entry is rounded relative to ``|J W| |A| <= |J| |W| |A|``: the bound to which ``J = A W^T``
    has been rounded already.
    """
    return half_log_det_of_gram(jnp.einsum("nrh,nsh->nrs", through, rows, precision="highest"))


def _by_gram(rows: jax.Array, kernel: jax.Array, singular: SingularPolicy) -> _WithGradients:
    through = _flat_product(rows, product(kernel.T, kernel), "highest")
    plain = _log_det_between(through, rows)

    def by_jacobian() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        jacobian = _flat_product(rows, kernel.T, "highest")
        sides = (_flat_product(jacobian, kernel, "highest"), rows)
        return half_log_det_and_solved(jacobian, sides, singular)

    value, (by_rows, solved) = jax.lax.cond(
        jnp.all(plain.is_sound),
        lambda: (plain.value, tuple(product(plain.precision, side) for side in (through, rows))),
        by_jacobian,
    )
    return _WithGradients(value, by_rows, rows, solved)


def _flat_product(
    rows: jax.Array, matrix: jax.Array, precision: Literal["highest"] | None = None
) -> jax.Array:
    """``[n, R, H]`` by ``[H, K]`` as one large product."""
    flat = rows.reshape(-1, rows.shape[-1])
    return jnp.matmul(flat, matrix, precision=precision).reshape(*rows.shape[:-1], -1)
