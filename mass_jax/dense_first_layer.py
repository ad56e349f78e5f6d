"""``log J_f`` of a network whose first layer is dense: few passes over input-sized arrays.

With ``h = x W + b`` and ``A = dz/dh``, ``[R, H]`` an example, the Jacobian is ``J = A W^T``. Its
log-determinant and both derivatives need no more of the input's ``D`` numbers than three products
with ``J``, or two with ``W^T W`` where that is cheaper. ``J J^T`` itself is had as ``(J W) A^T``.
"""

from collections.abc import Callable
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
from mass_jax.turned_kernel import trained_product_of_tangent, turned_product

DenseForm = Literal["rows", "turned", "gram"]
_ROWS = 8  # XLA's CPU backend takes a fifth longer for 255 rows than for 256


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
      form: ``"rows"`` by ``J`` itself; ``"turned"`` too, for a kernel that is trained turned
        (`turned_kernel`); ``"gram"`` by ``A (W^T W) A^T``, for ``H < D`` and the exact
        gradient.
      singular: see `half_log_det_gram`.

    Returns:
      ``[n]``, nats. Its derivative is a closed form and is not differentiated again.
    """
    return _with_gradients(rows, kernel, noise, form, singular).value


class _WithGradients(NamedTuple):
    """The derivative is ``<by_rows, dA> + <right, left dW>``; ``W^T dW`` for ``dW`` in ``"gram"``.

    Rows of ``left`` and ``right`` are P of every example, P = R or 1 for a probe, and zeros.
    """

    value: jax.Array  # [n]
    by_rows: jax.Array  # [n, R, H]
    left: jax.Array  # [N, D]; [N, H] for "gram"
    right: jax.Array  # [N, H]


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
    multiply = trained_product_of_tangent if form == "turned" else jnp.matmul
    # Their product by the tangent: its transpose is the kernel's gradient.
    through = multiply(made.left, by_kernel.astype(made.left.dtype))
    count = len(rows) * (rows.shape[1] if noise is None else 1)
    along_kernel = jnp.sum(made.right * through, axis=-1)[:count].reshape(len(rows), -1)
    along_rows = jnp.sum(made.by_rows * rows_tangent, axis=(-2, -1))
    return made.value, along_rows + jnp.sum(along_kernel, axis=-1)


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
    by_kernel = turned_product if form == "turned" else product
    if noise is not None:
        return _by_probe(rows, kernel, noise, by_kernel, singular)
    jacobian = product(_flat(rows), kernel.T)  # [N, D]
    through = _by_example(by_kernel(jacobian, kernel), rows)
    value, (by_rows, right) = _solved(
        _log_det_between(through, rows),
        (through, rows),
        lambda: half_log_det_and_solved(_by_example(jacobian, rows), (through, rows), singular),
    )
    return _WithGradients(value, by_rows, jacobian, _flat(right))


def _by_probe(
    rows: jax.Array,
    kernel: jax.Array,
    noise: jax.Array,
    by_kernel: Callable[[jax.Array, jax.Array], jax.Array],
    singular: SingularPolicy,
) -> _WithGradients:
    """The gradient of ``1/2 |J^T v|^2`` at fixed ``v = (J J^T)^-1 J e``, with ``u = J^T v``."""
    jacobian = _by_example(product(_flat(rows), kernel.T), rows)
    gram = jnp.einsum("nrd,nsd->nrs", jacobian, jacobian, precision="highest")
    along_noise = jnp.einsum("nrd,nd->nr", jacobian, noise)[:, :, None]  # J e, [n, R, 1]
    value, (probe,) = _solved(
        half_log_det_of_gram(gram),
        (along_noise,),
        lambda: half_log_det_and_solved(jacobian, (along_noise,), singular),
    )
    along = jnp.sum(probe * jacobian, axis=1)  # u, [n, D]
    behind = jnp.sum(probe * rows, axis=1)  # A^T v, [n, H]
    return _WithGradients(value, probe * by_kernel(along, kernel)[:, None], along, behind)


def _by_gram(rows: jax.Array, kernel: jax.Array, singular: SingularPolicy) -> _WithGradients:
    flat = _flat(rows)
    through = _by_example(product(flat, product(kernel.T, kernel)), rows)

    def by_jacobian() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        jacobian = product(flat, kernel.T)
        sides = (_by_example(product(jacobian, kernel), rows), rows)
        return half_log_det_and_solved(_by_example(jacobian, rows), sides, singular)

    plain = _log_det_between(through, rows)
    value, (by_rows, right) = _solved(plain, (through, rows), by_jacobian)
    return _WithGradients(value, by_rows, flat, _flat(right))


def _solved(
    plain: GramLogDet,
    right_sides: tuple[jax.Array, ...],
    by_jacobian: Callable[[], tuple[jax.Array, tuple[jax.Array, ...]]],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`half_log_det_and_solved`, by the Gram matrices alone where they are sound."""
    return jax.lax.cond(
        jnp.all(plain.is_sound),
        lambda: (plain.value, tuple(product(plain.precision, side) for side in right_sides)),
        by_jacobian,
    )


def _log_det_between(through: jax.Array, rows: jax.Array) -> GramLogDet:
    """Of ``J J^T = (J W) A^T``, both factors ``[n, R, H]``.

    An entry is rounded relative to ``|J W| |A| <= |J| |W| |A|``: the bound to which ``J = A W^T``
    has been rounded already.
    """
    return half_log_det_of_gram(jnp.einsum("nrh,nsh->nrs", through, rows, precision="highest"))


def _flat(rows: jax.Array) -> jax.Array:
    """``[n, R, H]`` as ``[N, H]``, with zeros to a multiple of `_ROWS`."""
    flat = rows.reshape(-1, rows.shape[-1])
    return jnp.pad(flat, ((0, -len(flat) % _ROWS), (0, 0)))


def _by_example(flat: jax.Array, rows: jax.Array) -> jax.Array:
    """``[N, K]`` as ``[n, R, K]``, the inverse of `_flat` for rows ``[n, R, H]``."""
    return flat[: rows.shape[0] * rows.shape[1]].reshape(*rows.shape[:2], -1)
