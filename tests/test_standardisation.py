"""Oracle: JAX's own differentiation through mean and variance."""

import chex
import jax
import jax.numpy as jnp
import pytest

from mass_jax.standardisation import standardised
from tests.conftest import Tolerance

EPSILON = 1e-5
SHAPES = {"dense": (6, 3), "images": (4, 3, 2, 3)}


def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - 1))
    variance = jnp.var(x, axis=axes, keepdims=True)
    return jnp.mean(x, axis=axes, keepdims=True), jax.lax.rsqrt(variance + EPSILON)


def by_jax(x: jax.Array) -> jax.Array:
    mean, inverse_deviation = moments(x)
    return (x - mean) * inverse_deviation


def by_rule(x: jax.Array) -> jax.Array:
    return standardised(x, *moments(x))


def jacobian_of_layer(normalise, x: jax.Array, weights: jax.Array) -> jax.Array:
    """As training takes it: rows of a pullback through a layer on both sides of BatchNorm."""

    def layer(inputs: jax.Array) -> jax.Array:
        bent = jnp.sin(inputs * weights[0].reshape((1,) * (x.ndim - 1) + (-1,)))
        hidden = jnp.tanh(normalise(bent))
        return hidden.reshape(len(x), -1, 3).sum(1) @ weights

    outputs, pullback = jax.vjp(layer, x)
    rows = jnp.broadcast_to(jnp.eye(3)[:, None, :], (3, *outputs.shape))
    return jax.vmap(pullback)(rows)[0]


@pytest.fixture(params=sorted(SHAPES))
def batch(request: pytest.FixtureRequest, tolerance: Tolerance) -> tuple[jax.Array, jax.Array]:
    x = 2.0 + 3.0 * jax.random.normal(jax.random.key(0), SHAPES[request.param])
    return x, jax.random.normal(jax.random.key(1), (3, 3))


def assert_same(ours, theirs, tolerance: Tolerance) -> None:
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(theirs))
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=tolerance.exact * scale)


def test_plain_gradient(batch, tolerance: Tolerance) -> None:
    """One cotangent: the single row that is summed on its own."""
    x, _ = batch
    gradient = lambda normalise: jax.jit(jax.grad(lambda b: jnp.sum(jnp.cos(normalise(b)))))(x)
    assert_same(gradient(by_rule), gradient(by_jax), tolerance)


def test_value_and_jacobian(batch, tolerance: Tolerance) -> None:
    x, weights = batch
    assert_same(by_rule(x), by_jax(x), tolerance)
    ours = jacobian_of_layer(by_rule, x, weights)
    assert_same(ours, jacobian_of_layer(by_jax, x, weights), tolerance)


def test_gradient_of_a_jacobian(batch, tolerance: Tolerance) -> None:
    def gradient(normalise):
        value = lambda x, weights: jnp.sum(jnp.sin(jacobian_of_layer(normalise, x, weights)))
        return jax.jit(jax.grad(value, argnums=(0, 1)))(*batch)

    assert_same(gradient(by_rule), gradient(by_jax), tolerance)


def test_many_batches_at_once(batch, tolerance: Tolerance) -> None:
    """``vmap`` over batches, not over cotangents of one, takes the rule row by row."""
    x, _ = batch
    batches = jnp.stack([x, x[::-1] ** 2])

    def gradients(normalise) -> jax.Array:
        return jax.vmap(jax.grad(lambda b: jnp.sum(jnp.cos(normalise(b)))))(batches)

    assert_same(gradients(by_rule), gradients(by_jax), tolerance)


def test_a_batch_of_equal_examples_has_finite_gradients() -> None:
    constant = jnp.full((4, 2), 7.0)
    assert bool(jnp.all(jnp.isfinite(jax.grad(lambda x: jnp.sum(by_rule(x) ** 3))(constant))))
