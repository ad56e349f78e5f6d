"""3x3 convolutions, and derivative rules that keep XLA's CPU backend on its fast paths.

A convolution is bilinear, and its three forms (forward, input gradient, kernel gradient)
are one trilinear form seen from three sides: each one's derivatives are the other two.
`conv3x3_closed` is built on that, so that differentiating twice meets only
these three, each written as a plain NHWC convolution. XLA's CPU backend brings others into that
form by itself, but not inside loops, where they ran ten times slower; its own second
derivatives of strided convolutions, and its kernel gradients over large batches, are slow
everywhere. On accelerators, and for forward-mode differentiation, `conv3x3` is right; both
compute the same.
"""

from functools import partial

import jax
import jax.numpy as jnp

_LAYOUT = ("NHWC", "HWIO", "NHWC")
_PADDING = ((1, 1), (1, 1))
# From so many features on, XLA's CPU backend hands a convolution to a library that divides the
# work among threads along the width and the features only, and small images are not wide.
_FEATURES_OF_LIBRARY = 32
# Examples of one step of the kernel gradient, which copies all patches. The steps are a loop,
# because written out they took most of the compiler's time and memory; two at a time, so that one
# is copied while the other is multiplied.
_KERNEL_GRADIENT_PIECE = 16
_KERNEL_GRADIENT_PIECES_AT_ONCE = 2

Shape = tuple[int, ...]


def conv3x3(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """3x3 convolution, one pixel of zero padding, NHWC, no bias.

    Args:
      x: ``[B, H, W, C]``.
      kernel: ``[3, 3, C, F]``.
      stride: in both directions.

    Returns:
      ``[B, ceil(H / stride), ceil(W / stride), F]``.
    """
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=_PADDING,
        dimension_numbers=_LAYOUT,
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv3x3_closed(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """`conv3x3` for CPUs, for the two ways training differentiates.

    Once in reverse mode; or rows of a Jacobian (``vmap`` of a pullback), and these once more.
    """
    batch, height, width, channels = x.shape
    if kernel.shape[3] < _FEATURES_OF_LIBRARY:
        return conv3x3(x, kernel, stride)
    # All examples side by side in one wide image: empty columns keep neighbours apart, and every
    # example starts at a multiple of the stride.
    outputs = -(-width // stride)
    columns = stride * (outputs + 1)
    apart = jnp.pad(x.swapaxes(0, 1), ((0, 0), (0, 0), (0, columns - width), (0, 0)))
    image = conv3x3(apart.reshape(1, height, batch * columns, channels), kernel, stride)
    apart = image.reshape(-1, batch, outputs + 1, kernel.shape[3])
    return apart[:, :, :outputs].swapaxes(0, 1)


def _spread(count: int, stride: int) -> int:
    """Pixels from the first to the last of ``count`` that lie ``stride`` apart."""
    return (count - 1) * stride + 1


def _forward(
    x: jax.Array, kernel: jax.Array, stride: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return conv3x3_closed(x, kernel, stride), (x, kernel)


def _backward(
    stride: int, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    return (
        _input_gradient_of_rows(cotangent, kernel, stride, x.shape),
        _kernel_gradient(x, cotangent, stride),
    )


conv3x3_closed.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _input_gradient(
    cotangent: jax.Array, kernel: jax.Array, stride: int, shape: Shape
) -> jax.Array:
    """Derivative by the input (of ``shape``), contracted with a cotangent of the output."""
    # Cotangents `stride` apart, correlated with the kernel turned by half a turn.
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    if stride == 1:
        return conv3x3_closed(cotangent, turned, 1)
    padding = [
        (1, extent + 1 - _spread(out, stride))
        for extent, out in zip(shape[1:3], cotangent.shape[1:3], strict=True)
    ]
    return jax.lax.conv_general_dilated(
        cotangent,
        turned,
        window_strides=(1, 1),
        padding=padding,
        lhs_dilation=(stride, stride),
        dimension_numbers=_LAYOUT,
    )


def _backward_of_input_gradient(
    stride: int, shape: Shape, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    cotangent, kernel = residuals
    return conv3x3_closed(g, kernel, stride), _kernel_gradient(g, cotangent, stride)


_input_gradient.defvjp(
    lambda cotangent, kernel, stride, shape: (
        _input_gradient(cotangent, kernel, stride, shape),
        (cotangent, kernel),
    ),
    _backward_of_input_gradient,
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kernel_gradient(x: jax.Array, cotangent: jax.Array, stride: int) -> jax.Array:
    """Derivative by the kernel, contracted with a cotangent of the output, in pieces."""
    # Examples take the place of channels: inputs [C, H, W, n], correlated with [h, w, n, F].
    padding = [
        (1, 1 + _spread(out, stride) - extent)
        for extent, out in zip(x.shape[1:3], cotangent.shape[1:3], strict=True)
    ]

    def of_piece(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        gradient = jax.lax.conv_general_dilated(
            x.transpose(3, 1, 2, 0),
            cotangent.transpose(1, 2, 0, 3),
            window_strides=(1, 1),
            padding=padding,
            rhs_dilation=(stride, stride),
            dimension_numbers=_LAYOUT,
        )
        return gradient.transpose(1, 2, 0, 3)

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        # Cut out here, not beforehand: that would copy both arrays once more.
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=index * size, slice_size=size)
        return total + of_piece(cut(x), cut(cotangent))

    size = min(_KERNEL_GRADIENT_PIECE, x.shape[0])
    pieces, rest = divmod(x.shape[0], size)
    total = jnp.zeros((3, 3, x.shape[3], cotangent.shape[3]), jnp.result_type(x, cotangent))
    total = jax.lax.fori_loop(0, pieces, add, total, unroll=_KERNEL_GRADIENT_PIECES_AT_ONCE)
    return total + of_piece(x[-rest:], cotangent[-rest:]) if rest else total


def _backward_of_kernel_gradient(
    stride: int, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, cotangent = residuals
    return _input_gradient(cotangent, g, stride, x.shape), conv3x3_closed(x, g, stride)


_kernel_gradient.defvjp(
    lambda x, cotangent, stride: (_kernel_gradient(x, cotangent, stride), (x, cotangent)),
    _backward_of_kernel_gradient,
)


def _input_gradient_of_rows(
    cotangent: jax.Array, kernel: jax.Array, stride: int, shape: Shape
) -> jax.Array:
    """`_input_gradient`, whose ``vmap`` over cotangents is one larger batch.

    A Jacobian is one pullback ``vmap``-ed over its rows. Left to itself, ``vmap`` would also
    map the rule for the kernel's derivative, and make a slow grouped convolution of it.
    """

    @jax.custom_batching.custom_vmap
    def gradient(cotangent: jax.Array, kernel: jax.Array) -> jax.Array:
        return _input_gradient(cotangent, kernel, stride, shape)

    @gradient.def_vmap
    def over_rows(
        axis_size: int, is_mapped: list[bool], cotangent: jax.Array, kernel: jax.Array
    ) -> tuple[jax.Array, bool]:
        if is_mapped[1]:
            axes = [0 if mapped else None for mapped in is_mapped]
            return jax.vmap(gradient.fun, axes)(cotangent, kernel), True
        rows = cotangent.reshape(-1, *cotangent.shape[2:])
        merged = _input_gradient(rows, kernel, stride, shape)
        return merged.reshape(axis_size, -1, *merged.shape[1:]), True

    return gradient(cotangent, kernel)
