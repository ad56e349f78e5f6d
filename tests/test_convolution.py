"""Convolutions: PyTorch-free oracles, and closed derivative rules against JAX's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.signal import correlate

from mass_jax import ResNet20, make_method
from mass_jax.convolution import conv3x3, conv3x3_closed
from mass_jax.networks import TrainContext

# Strides and sizes of images, odd and even; and features, of which the library for convolutions
# takes 32, with all examples in one wide image.
CASES = [(1, 6, 4), (2, 6, 4), (2, 5, 4), (1, 5, 32), (2, 6, 32), (2, 5, 33)]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def jacobian_loss(convolve, x, first, second, stride):
    """A loss that contains a Jacobian, as MASS does: two layers, then all of its rows."""

    def f(v):
        hidden = jnp.tanh(convolve(v, first, stride))
        return jnp.tanh(convolve(hidden, second, 1)).sum((1, 2))

    z, pullback = jax.vjp(f, x)
    one_hot = jnp.eye(z.shape[1])[:, None, :]
    (rows,) = jax.vmap(pullback)(jnp.broadcast_to(one_hot, (z.shape[1], *z.shape)))
    return jnp.sum(jnp.square(rows) * (1 + rows)) + jnp.sum(z)


@pytest.mark.parametrize("convolve", [conv3x3, conv3x3_closed])
@pytest.mark.parametrize(("stride", "size", "features"), CASES)
def test_value(convolve, stride, size, features, tolerance):
    """Oracle: scipy's correlation, channel by channel, then every stride-th pixel."""
    x, kernel = normal(2, size, size, 3), normal(3, 3, 3, features, seed=1)
    expected = np.zeros((2, size, size, features))
    for b, f, c in np.ndindex(2, features, 3):
        expected[b, :, :, f] += correlate(
            np.asarray(x[b, :, :, c]), np.asarray(kernel[:, :, c, f]), mode="same"
        )
    np.testing.assert_allclose(
        jax.jit(convolve, static_argnums=2)(x, kernel, stride),
        expected[:, ::stride, ::stride],
        rtol=tolerance.exact,
        atol=tolerance.exact,
    )


@pytest.mark.parametrize(("stride", "size", "features"), CASES)
def test_gradient_through_a_jacobian(stride, size, features, tolerance):
    """Oracle: JAX's own rules for the plain convolution, differentiated the same way."""
    # 18 examples: more than a piece of the kernel gradient.
    first, second = normal(3, 3, 2, features, seed=1), normal(3, 3, features, 2, seed=2)
    arguments = normal(18, size, size, 2), first, second
    theirs, ours = (
        jax.jit(jax.grad(lambda *a: jacobian_loss(convolve, *a, stride), argnums=(0, 1, 2)))  # noqa: B023
        for convolve in (conv3x3, conv3x3_closed)
    )
    for expected, actual in zip(theirs(*arguments), ours(*arguments), strict=True):
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(actual / scale, expected / scale, atol=tolerance.exact)


@pytest.mark.parametrize("tolerance", ["float64"], indirect=True)
@pytest.mark.parametrize(("stride", "size", "features"), CASES)
def test_first_derivatives(stride, size, features, tolerance):
    """Oracle: finite differences."""
    x, kernel = normal(2, size, size, 2), normal(3, 3, 2, features, seed=1)
    check_grads(
        lambda *a: jnp.sin(conv3x3_closed(*a, stride)),
        (x, kernel),
        order=1,
        modes=["rev"],
        rtol=tolerance.finite_difference,
    )


def test_vmap_over_kernels_too(tolerance):
    """Oracle: one kernel after another; nobody needs it, but it must not be wrong."""
    x, kernels = normal(2, 4, 4, 2), normal(3, 3, 3, 2, 2, seed=1)
    gradient = jax.grad(lambda k, v: jnp.sum(jnp.sin(conv3x3_closed(v, k, 2))), argnums=(0, 1))
    together = jax.vmap(gradient, in_axes=(0, None))(kernels, x)
    apart = [gradient(kernel, x) for kernel in kernels]
    for index in (0, 1):
        np.testing.assert_allclose(
            together[index], np.stack([g[index] for g in apart]), atol=10 * tolerance.exact
        )


@pytest.mark.parametrize(
    ("batch_stats", "estimator"),
    [("paper", "sub_batch"), ("frozen", "sub_batch"), ("frozen", "probe")],
)
def test_mass_loss_does_not_depend_on_the_rules(batch_stats, estimator, tolerance):
    """Oracle: the plain rules, in the whole loss of a small residual network."""
    method = make_method(
        "mass",
        representation_dim=3,
        num_components=2,
        batch_stats=batch_stats,
        estimator=estimator,
    )
    build = lambda outputs: ResNet20(outputs, widths=(2, 3), blocks=1, nonlinearity=jnp.tanh)
    params = method.init(jax.random.key(0), build, (6, 6, 3))
    x, labels = normal(20, 6, 6, 3), jnp.arange(20) % 10

    @partial(jax.jit, static_argnums=1)
    def gradient(params, reverse_only):
        keys = jax.random.split(jax.random.key(1), len(x))
        context = TrainContext(keys=keys, reverse_only=reverse_only)
        return jax.grad(lambda p: method.loss(p, x, labels, context).objective())(params)

    for closed, plain in zip(
        *(jax.tree.leaves(gradient(params, rules)) for rules in (True, False)), strict=True
    ):
        scale = max(1.0, float(jnp.max(jnp.abs(plain))))
        np.testing.assert_allclose(closed / scale, plain / scale, atol=tolerance.exact)
