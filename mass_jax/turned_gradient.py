"""A product whose gradient by a large kernel is had as the kernel's transpose, and turned.

XLA's CPU backend takes half as long again for ``x^T g``, where many examples are contracted
into a large matrix, as for ``g^T x``. So that is made, and turned in tiles. It pays where two such
gradients are added: XLA turns both in the pass that adds them. A single one it turns anew in
every pass of the optimiser. On accelerators the plain product is right.
"""

import jax
import jax.numpy as jnp

_TILE = 16
_LARGE = 2**19  # numbers in a kernel; of smaller ones nothing is gained


def turning_is_faster(kernel: jax.Array) -> bool:
    """Whether the gradients by this kernel, two of them, are had faster this way.

    Example:
      >>> turning_is_faster(jnp.zeros((64, 32)))
      False
    """
    fits = all(extent % _TILE == 0 for extent in kernel.shape)
    return jax.default_backend() == "cpu" and fits and kernel.size >= _LARGE


@jax.custom_vjp
def turned_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel``, for reverse mode.

    Args:
      x: ``[B, D]``.
      kernel: ``[D, H]``, extents multiples of 16.
    """
    return x @ kernel


turned_product.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)),
    lambda residuals, g: (g @ residuals[1].T, turned_gradient(residuals[0], g)),
)


def turned_product_of_tangent(x: jax.Array, tangent: jax.Array) -> jax.Array:
    """`turned_product` inside a rule for tangents: to be transposed, not differentiated."""
    return jax.custom_derivatives.linear_call(
        lambda rows, linear: rows @ linear, turned_gradient, x, tangent
    )


def turned_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """``x^T g`` ``[D, H]`` by way of ``g^T x``.

    Example:
      >>> x, g = jnp.ones((3, 32)), jnp.ones((3, 16))
      >>> turned_gradient(x, g).shape
      (32, 16)
    """
    as_it_is = jax.lax.optimization_barrier  # or XLA writes it as the product it is slow at
    transpose = as_it_is(as_it_is(g.T) @ x)
    tiles = transpose.reshape(g.shape[1] // _TILE, _TILE, x.shape[1] // _TILE, _TILE)
    turned = as_it_is(jnp.transpose(tiles, (2, 3, 0, 1)))
    return as_it_is(turned.reshape(x.shape[1], g.shape[1]))
