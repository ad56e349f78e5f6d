"""Oracle: the plain product, and JAX's own differentiation of it."""

import chex
import jax
import jax.numpy as jnp
import pytest

from mass_jax.methods import make_method
from mass_jax.networks import SmallMLP, TrainContext, dense_first_layer
from mass_jax.turned_gradient import (
    turned_product,
    turned_product_of_tangent,
    turning_is_faster,
)
from tests.conftest import Tolerance


def test_product_and_both_gradients(tolerance: Tolerance) -> None:
    x = jax.random.normal(jax.random.key(0), (5, 48))
    kernel = jax.random.normal(jax.random.key(1), (48, 32))

    def value_and_gradients(multiply):
        value = lambda x, kernel: jnp.sum(jnp.sin(multiply(x, kernel)))
        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(x, kernel)

    ours, theirs = value_and_gradients(turned_product), value_and_gradients(jnp.matmul)
    chex.assert_trees_all_close(ours, theirs, rtol=tolerance.exact, atol=50 * tolerance.exact)


def test_transpose_of_a_tangent(tolerance: Tolerance) -> None:
    x = jax.random.normal(jax.random.key(0), (5, 32))
    cotangent = jax.random.normal(jax.random.key(1), (5, 16))
    back = jax.linear_transpose(lambda t: turned_product_of_tangent(x, t), jnp.zeros((32, 16)))
    chex.assert_trees_all_close(back(cotangent)[0], x.T @ cotangent, atol=50 * tolerance.exact)


@pytest.mark.parametrize("shape", [(3072, 400), (3072, 401), (3073, 400), (64, 32)])
def test_only_large_kernels_that_fit_the_tiles(shape: tuple[int, int]) -> None:
    assert turning_is_faster(jnp.zeros(shape)) == (shape == (3072, 400))


@pytest.mark.parametrize(
    ("batch_stats", "estimator"),
    [
        *(("frozen", name) for name in ("sub_batch", "few", "gram", "probe", "lazy")),
        *(("paper", name) for name in ("sub_batch", "gram", "auto")),
    ],
)
def test_training_meets_the_same_gradients(batch_stats, estimator, tolerance: Tolerance) -> None:
    """SmallMLP as it is trained, by these rules and by JAX's own alone."""
    method = make_method(
        "mass",
        representation_dim=3,
        num_components=2,
        estimator=estimator,
        batch_stats=batch_stats,
    )
    params = method.init(jax.random.key(0), SmallMLP, (32, 32, 3))
    x = jax.random.normal(jax.random.key(1), (24, 32, 32, 3))
    labels = jnp.arange(24) % 10

    def gradient(reverse_only: bool):
        keys = jax.random.split(jax.random.key(2), 24)
        context = TrainContext(keys=keys, reverse_only=reverse_only, step=jnp.array(7))  # lazy: due
        value = lambda p: method.loss(p, x, labels, context).objective()
        return jax.jit(jax.grad(value))(params).network

    ours, theirs = gradient(True), gradient(False)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=20 * tolerance.exact * scale)


def test_where_two_gradients_are_added() -> None:
    """A single turned gradient would cost time: only the layer that is asked to gives one."""
    params = SmallMLP(3).init(jax.random.key(0), jnp.zeros((1, 3072)), TrainContext())["params"]
    x = jnp.zeros((2, 3072))
    assert not dense_first_layer(SmallMLP(3), params, x).turned
    assert dense_first_layer(SmallMLP(3), params, x, turned=True).turned
