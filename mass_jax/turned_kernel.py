"""Large kernels of dense layers, trained as their transposes on CPUs.

For a kernel ``[D, H]`` of many inputs ``D`` XLA's CPU backend is half as fast again at the gradient
``g^T x`` as at ``x^T g``, and by a fifth at ``(K^T x^T)^T`` as at ``x K``. So a training state on
devices holds large matrices, and what the optimiser keeps of them, turned. Only the loss sees them
in their plain shape, by transposes that XLA takes into its products. Accelerators turn nothing.
"""

from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")

_LARGE = 2**19  # numbers in a kernel; of smaller ones nothing is gained
_FEW = 4  # rows


def turned(tree: Tree) -> Tree:
    """A pytree with its large matrices turned, on CPUs; twice is the same tree again.

    Example:
      >>> tree = turned({"kernel": jnp.zeros((2048, 512)), "bias": jnp.zeros(512)})
      >>> tree["kernel"].shape, turned(tree)["kernel"].shape
      ((512, 2048), (2048, 512))
    """
    return jax.tree.map(lambda leaf: leaf.T if turning_is_faster(leaf) else leaf, tree)


def turning_is_faster(kernel: jax.Array) -> bool:
    """Whether a leaf is a matrix that is trained as its transpose.

    Example:
      >>> turning_is_faster(jnp.zeros((64, 32)))
      False
    """
    return jax.default_backend() == "cpu" and kernel.ndim == 2 and kernel.size >= _LARGE


@jax.custom_vjp
def trained_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel``, for reverse mode, with the gradient that is fast for a turned kernel.

    Args:
      x: ``[B, D]``.
      kernel: ``[D, H]``.
    """
    return x @ kernel


trained_product.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)),
    lambda residuals, g: (g @ residuals[1].T, turned_gradient(residuals[0], g)),
)


def trained_product_of_tangent(x: jax.Array, tangent: jax.Array) -> jax.Array:
    """`trained_product` inside a rule for tangents: to be transposed, no more.

    It has no rule for `jax.vmap`.
    """
    return jax.custom_derivatives.linear_call(
        lambda rows, linear: rows @ linear, turned_gradient, x, tangent
    )


def turned_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel`` as the transpose of ``K^T x^T``: faster if few read it, for it is turned.

    Example:
      >>> turned_product(jnp.ones((3, 32)), jnp.ones((32, 16))).shape
      (3, 16)
    """
    return _as_it_is(kernel.T @ x.T).T


def turned_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """``x^T g`` ``[D, H]`` as the transpose of ``g^T x``.

    A few rows as outer products: XLA adds them up inside the optimiser's update, where a product
    would first write a matrix as large as the kernel.

    Example:
      >>> x, g = jnp.ones((3, 32)), jnp.ones((3, 16))
      >>> turned_gradient(x, g).shape
      (32, 16)
    """
    if 0 < len(x) <= _FEW:
        return reduce(
            jnp.add, [of_g[:, None] * row[None] for of_g, row in zip(g, x, strict=True)]
        ).T
    return _as_it_is(_as_it_is(g.T) @ x).T


# Or XLA writes the product as the one it is slow at.
_as_it_is = jax.lax.optimization_barrier
