"""Oracle: the plain product, JAX's own differentiation of it, and training without turning."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mass_jax import layers, turned_kernel
from mass_jax.config import apply_overrides, resolve
from mass_jax.data import dataset_from_arrays
from mass_jax.experiment import TrainState, make_experiment
from mass_jax.methods import make_method
from mass_jax.networks import SmallMLP, TrainContext, dense_first_layer
from mass_jax.options import CONFIG_DIR, load_config
from mass_jax.train_step import Batch, make_runner, make_train_step
from mass_jax.turned_kernel import (
    trained_product,
    trained_product_of_tangent,
    turned,
    turned_product,
    turning_is_faster,
)
from tests.conftest import Tolerance


def test_product_and_both_gradients(tolerance: Tolerance) -> None:
    x = jax.random.normal(jax.random.key(0), (5, 48))
    kernel = jax.random.normal(jax.random.key(1), (48, 32))

    def value_and_gradients(multiply):
        value = lambda x, kernel: jnp.sum(jnp.sin(multiply(x, kernel)))
        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(x, kernel)

    ours, theirs = value_and_gradients(trained_product), value_and_gradients(jnp.matmul)
    chex.assert_trees_all_close(ours, theirs, rtol=tolerance.exact, atol=50 * tolerance.exact)
    by_transposes = jax.jit(turned_product)(x, kernel)
    chex.assert_trees_all_close(by_transposes, x @ kernel, atol=50 * tolerance.exact)


@pytest.mark.parametrize("rows", [1, 2, 5])  # outer products up to four
def test_transpose_of_a_tangent(rows: int, tolerance: Tolerance) -> None:
    x = jax.random.normal(jax.random.key(0), (rows, 32))
    cotangent = jax.random.normal(jax.random.key(1), (rows, 16))
    back = jax.linear_transpose(lambda t: trained_product_of_tangent(x, t), jnp.zeros((32, 16)))
    chex.assert_trees_all_close(back(cotangent)[0], x.T @ cotangent, atol=50 * tolerance.exact)


@pytest.mark.parametrize("shape", [(3072, 400), (401, 3072), (64, 32), (3, 3, 512, 512), (2**20,)])
def test_only_large_matrices_are_turned(shape: tuple[int, ...]) -> None:
    leaf = np.arange(np.prod(shape)).reshape(shape)
    is_large = shape in ((3072, 400), (401, 3072))
    assert turning_is_faster(leaf) == is_large
    assert turned(leaf).shape == (shape[::-1] if is_large else shape)
    np.testing.assert_array_equal(turned(turned(leaf)), leaf)


@pytest.mark.parametrize(
    ("method", "parallel"),
    [("softmax_ce", "pmap"), ("vib", "shard_map"), ("mass", "pmap"), ("mass", "shard_map")],
)
def test_training_is_the_same_without_turning(method, parallel, monkeypatch) -> None:
    """SmallMLP's first kernel and Adam's moments of it, placed, trained and fetched."""
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    dataset = dataset_from_arrays(images, np.arange(40) % 10, images[:10], np.arange(10))
    changes = {"train_size": "30", "data.validation_size": "5", "batch_size": "8"}
    file = load_config(str(CONFIG_DIR / f"{method}_small_mlp.py"))
    experiment = make_experiment(resolve(apply_overrides(file, changes)), dataset)
    rows = np.random.default_rng(1).integers(0, 30, (1, 3, 8)).astype(np.int32)
    start = jax.device_get(experiment.initial_state())

    def trained() -> TrainState:
        step = make_train_step(experiment, dataset.normalisation)
        runner = make_runner(step, parallel)
        data = runner.place_data(Batch(*map(jnp.asarray, dataset.train)))
        state = runner.place_state(start)
        chex.assert_trees_all_equal(runner.fetch_state(state), start)
        chex.assert_trees_all_equal_shapes_and_dtypes(runner.fetch_state(state), start)
        return runner.fetch_state(runner.run(state, data, rows, 3, experiment.keys.step)[0])

    ours = trained()
    monkeypatch.setattr(turned_kernel, "turning_is_faster", lambda kernel: False)
    monkeypatch.setattr(layers, "turning_is_faster", lambda kernel: False)
    theirs = trained()
    kernel = lambda state: state.params.network["linear_0"]["kernel"]
    assert kernel(ours).shape == kernel(start).shape
    assert not np.array_equal(kernel(ours), kernel(start))
    # Moments, not weights: of gradients that are rounding only, Adam makes steps of full size.
    moments = ours.opt_state, theirs.opt_state
    scale = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(moments[1]) if leaf.ndim)
    chex.assert_trees_all_close(*moments, rtol=0, atol=1e-3 * float(scale))


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


def test_evaluation_takes_the_plain_product() -> None:
    params = SmallMLP(3).init(jax.random.key(0), jnp.zeros((1, 3072)), TrainContext())["params"]
    x = jnp.zeros((2, 3072))
    assert not dense_first_layer(SmallMLP(3), params, x).turned
    assert dense_first_layer(SmallMLP(3), params, x, turned=True).turned
