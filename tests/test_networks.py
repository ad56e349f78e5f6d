"""SmallMLP, ResNet20 and their layers.

Oracles: parameter counts by hand, NumPy and SciPy forward passes, flax.linen.BatchNorm,
PyTorch's running update by hand, and invariances (padding, devices, company in the batch).
"""

import math
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.signal import correlate2d

from mass_jax import networks
from mass_jax.config import apply_overrides, resolve
from mass_jax.experiment import network_builder
from mass_jax.layers import elu
from mass_jax.networks import BatchNorm, Dropout, ResNet20, SmallMLP, TrainContext
from mass_jax.options import load_config

# XLA spends nearly all the time of these tests in optimising: leave that out.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
quick_jit = partial(jax.jit, compiler_options=QUICK)
TINY_MLP = SmallMLP(3, hidden=(6, 5))
DROPOUT_MLP = TINY_MLP.clone(dropout_rate=0.5)
TINY_RESNET = ResNet20(3, widths=(4, 6), blocks=1)
NETWORKS = {
    "small_mlp": (DROPOUT_MLP, (3, 2, 2)),
    "resnet20": (TINY_RESNET, (6, 5, 2)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]


def variables_and_batch(module, input_shape, batch=12):
    """Weights, statistics and a batch from NumPy: every leaf off its default, quick to draw."""
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        if path[-1].key == "kernel":
            return jnp.asarray(
                generator.normal(size=leaf.shape) / math.prod(leaf.shape[:-1]) ** 0.5, float
            )
        return jnp.asarray(generator.uniform(0.5, 1.5, leaf.shape), float)

    shapes = jax.eval_shape(lambda: networks.init_variables(jax.random.key(0), module, input_shape))
    variables = jax.tree.map_with_path(draw, shapes)
    x = jnp.asarray(generator.normal(0.3, 1.0, (batch, *input_shape)), float)
    return variables["params"], variables["batch_stats"], x


def make_keys(count):
    """Keys without `jax.random.split`, whose compilation takes longer than most tests here."""
    data = np.random.default_rng(1).integers(2**32, size=(count, 2), dtype=np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data))


@partial(quick_jit, static_argnums=0)
def train(module, params, stats, x, keys=None, weights=None):
    return networks.apply_train(module, params, stats, x, TrainContext(keys, weights))


def assert_trees_close(ours, theirs, rtol):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


# --- Size and initialisation ------------------------------------------------------


def linear_count(fan_in, fan_out):
    return fan_in * fan_out + fan_out


RESNET20_COUNT = (
    (9 * 3 * 16 + 2 * 16)
    + 6 * (9 * 16 * 16 + 2 * 16)
    + (9 * 16 * 32 + 5 * 9 * 32 * 32 + 6 * 2 * 32)
    + (9 * 32 * 64 + 5 * 9 * 64 * 64 + 6 * 2 * 64)
    + linear_count(64, 10)
)
SMALL_MLP_COUNT = (
    linear_count(3072, 400) + 2 * 400 + linear_count(400, 200) + 2 * 200 + linear_count(200, 15)
)


@pytest.mark.parametrize(
    ("module", "expected"),
    [(SmallMLP(15), SMALL_MLP_COUNT), (ResNet20(10), RESNET20_COUNT), (ResNet20(10), 269_722)],
)
def test_parameter_count(module, expected, key):
    """Oracle: layers counted by hand; He et al. print 0.27M for their ResNet20."""
    variables = jax.eval_shape(lambda k: networks.init_variables(k, module, (32, 32, 3)), key)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"])) == expected


@pytest.mark.parametrize("output_dim", [1, 4])
@pytest.mark.parametrize(
    ("name", "options", "input_shape"),
    [
        ("small_mlp", {"hidden": (6, 5)}, (7,)),
        ("small_mlp", {"hidden": ()}, ()),
        ("small_mlp", {"hidden": (6,), "batch_norm": False}, (2, 3, 1, 2)),
        ("resnet20", {"widths": (4, 8, 16), "blocks": 1}, (5, 7, 1)),
        ("resnet20", {"widths": (3, 4), "blocks": 1}, (4, 4, 5)),
    ],
)
def test_output_shape_of_any_input_shape(name, options, input_shape, output_dim):
    module = networks.make_network(name, output_dim, **options)
    params, stats, x = variables_and_batch(module, input_shape, batch=2)
    outputs = jax.eval_shape(partial(networks.apply, module), params, stats, x)
    assert outputs.shape == (2, output_dim)


def leaves_named(tree, name):
    found = [leaf for path, leaf in jax.tree.flatten_with_path(tree)[0] if path[-1].key == name]
    assert found
    return found


def initial_weights(key):
    """Network, path, value and fan-in of every parameter; few layers, for compilation time."""
    for module in (SmallMLP(20, hidden=(400,)), ResNet20(10, widths=(16,), blocks=1)):
        variables = networks.init_variables(key, module, (8, 8, 3))
        params = variables["params"]
        assert all((leaf == 0).all() for leaf in leaves_named(variables["batch_stats"], "mean"))
        assert all((leaf == 1).all() for leaf in leaves_named(variables["batch_stats"], "var"))
        for path, leaf in jax.tree.flatten_with_path(params)[0]:
            layer = params
            for part in path[:-1]:
                layer = layer[part.key]
            fan_in = math.prod(layer["kernel"].shape[:-1]) if "kernel" in layer else None
            yield type(module), [part.key for part in path], np.asarray(leaf), fan_in


def test_initial_ranges(key):
    """Oracle: PyTorch's defaults and He et al.'s normal, by their closed-form moments.

    The relative standard error of a sample standard deviation is at most ``1/sqrt(2 n)``
    for both laws; four of them are allowed.
    """
    seen = set()
    for module, path, leaf, fan_in in initial_weights(key):
        deviations = 4 / math.sqrt(2 * leaf.size)
        if "norm" in path[-2]:
            assert (leaf == {"scale": 1.0, "bias": 0.0}[path[-1]]).all()
        elif module is ResNet20 and path[-1] == "kernel":
            seen.add("kaiming")
            np.testing.assert_allclose(leaf.std(), math.sqrt(2 / fan_in), rtol=deviations)
            assert abs(leaf.mean()) < 4 * math.sqrt(2 / fan_in / leaf.size)
        else:
            seen.add(path[-1])
            bound = 1 / math.sqrt(fan_in)
            assert np.abs(leaf).max() <= bound
            np.testing.assert_allclose(leaf.std(), bound / math.sqrt(3), rtol=deviations)
            assert np.abs(leaf).max() > bound * (1 - 10 / leaf.size)
    assert seen == {"kaiming", "kernel", "bias"}


# --- Forward passes ---------------------------------------------------------------


def numpy_norm(x, params, stats):
    standardised = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
    return standardised * params["scale"] + params["bias"]


def numpy_mlp(module, params, stats, x, nonlinearity):
    x = x.reshape(len(x), -1)
    for index in range(len(module.hidden)):
        layer = params[f"linear_{index}"]
        x = x @ layer["kernel"] + layer["bias"]
        if module.batch_norm:
            x = numpy_norm(x, params[f"norm_{index}"], stats[f"norm_{index}"])
        x = nonlinearity(x)
    return x @ params["output"]["kernel"] + params["output"]["bias"]


def scipy_conv(x, kernel, stride):
    """Zero-padded 3x3 correlation by SciPy, one pair of channels at a time."""
    channels_in, channels_out = kernel.shape[2:]
    same = [
        [
            sum(
                correlate2d(image[..., c], kernel[..., c, f], mode="same")
                for c in range(channels_in)
            )
            for f in range(channels_out)
        ]
        for image in x
    ]
    return np.moveaxis(np.array(same), 1, -1)[:, ::stride, ::stride]


def loop_shortcut(x, features, stride):
    batch, height, width, channels = x.shape
    y = np.zeros((batch, -(-height // stride), -(-width // stride), features))
    before = (features - channels) // 2
    for i in range(y.shape[1]):
        for j in range(y.shape[2]):
            for c in range(channels):
                y[:, i, j, before + c] = x[:, i * stride, j * stride, c]
    return y


def numpy_resnet(module, params, stats, x, nonlinearity):
    x = nonlinearity(
        numpy_norm(scipy_conv(x, params["conv"]["kernel"], 1), params["norm"], stats["norm"])
    )
    for stage, width in enumerate(module.widths):
        for block in range(module.blocks):
            name, stride = f"stage_{stage}_block_{block}", 2 if stage and not block else 1
            own, moments = params[name], stats[name]
            y = scipy_conv(x, own["conv_0"]["kernel"], stride)
            y = nonlinearity(numpy_norm(y, own["norm_0"], moments["norm_0"]))
            y = scipy_conv(y, own["conv_1"]["kernel"], 1)
            y = numpy_norm(y, own["norm_1"], moments["norm_1"])
            x = nonlinearity(y + loop_shortcut(x, width, stride))
    return x.mean((1, 2)) @ params["output"]["kernel"] + params["output"]["bias"]


NUMPY_NONLINEARITIES = [
    (nn.elu, lambda v: np.where(v > 0, v, np.expm1(np.minimum(v, 0)))),
    (nn.relu, lambda v: np.maximum(v, 0)),
    (jnp.tanh, np.tanh),
]


@pytest.mark.parametrize(("nonlinearity", "in_numpy"), NUMPY_NONLINEARITIES)
@pytest.mark.parametrize(
    ("module", "input_shape", "forward"),
    [
        (TINY_MLP, (3, 2, 2), numpy_mlp),
        (TINY_MLP.clone(batch_norm=False), (3, 2, 2), numpy_mlp),
        (ResNet20(3, widths=(2, 3, 6), blocks=1), (5, 6, 2), numpy_resnet),
    ],
)
def test_forward_pass(module, input_shape, forward, nonlinearity, in_numpy, tolerance):
    """Oracle: NumPy, SciPy's correlate2d and plain loops."""
    module = module.clone(nonlinearity=nonlinearity)
    params, stats, x = variables_and_batch(module, input_shape, batch=3)
    ours = quick_jit(partial(networks.apply, module))(params, stats, x)
    to_numpy = partial(jax.tree.map, lambda leaf: np.asarray(leaf, np.float64))
    theirs = forward(module, *to_numpy((params, stats, x)), in_numpy)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance.exact, atol=tolerance.exact)


@pytest.mark.parametrize("derivative", [0, 1, 2])
def test_elu_and_its_derivatives(derivative, tolerance):
    """Oracle: Flax's elu, differentiated by JAX in reverse mode, then forward."""
    x = jnp.array([-80.0, -3.0, -1e-3, -0.0, 0.0, 1e-3, 2.0])
    ours, theirs = elu, nn.elu
    for mode in (jax.grad, lambda f: lambda v: jax.jvp(f, (v,), (jnp.ones_like(v),))[1])[
        :derivative
    ]:
        ours, theirs = mode(ours), mode(theirs)
    chex.assert_trees_all_close(jax.vmap(ours)(x), jax.vmap(theirs)(x), atol=tolerance.exact)


def test_default_nonlinearities():
    """Oracle: the paper: elu in SmallMLP, ReLU in ResNet20."""
    assert SmallMLP(1).nonlinearity is elu
    assert ResNet20(1).nonlinearity is nn.relu


@pytest.mark.parametrize(
    ("module", "input_shape"), [(TINY_MLP, (3, 2, 2)), (TINY_RESNET, (6, 5, 2))]
)
def test_bfloat16_computes_coarsely_but_returns_float32(module, input_shape):
    """Oracle: the float32 network, to some ten roundings of 2^-8."""
    half = module.clone(dtype=jnp.bfloat16)
    params, stats, x = variables_and_batch(half, input_shape)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    full = quick_jit(partial(networks.apply, module))(params, stats, x)
    coarse = quick_jit(partial(networks.apply, half))(params, stats, x)
    assert coarse.dtype == jnp.float32
    error = np.abs(coarse - full).max() / np.abs(full).max()
    assert 1e-5 < error < 10 * 2**-8


# --- BatchNorm --------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(9, 4), (3, 2, 5, 4)])
def test_batch_norm_against_flax(training, shape, tolerance):
    """Oracle: flax.linen.BatchNorm."""
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(5.0, 2.0, shape), float)
    context = TrainContext(use_batch_moments=training)
    four = lambda: jnp.asarray(generator.uniform(0.5, 1.5, 4), float)
    variables = {
        "params": {"scale": four(), "bias": four()},
        "batch_stats": {"mean": four(), "var": four()},
    }
    theirs = nn.BatchNorm(use_running_average=not training, epsilon=1e-5, use_fast_variance=False)
    expected, _ = theirs.apply(variables, x, mutable=["batch_stats"])
    ours, _ = BatchNorm().apply(variables, x, context, mutable=["batch_moments"])
    np.testing.assert_allclose(ours, expected, rtol=tolerance.exact, atol=tolerance.exact)


@pytest.mark.parametrize("name", ["small_mlp", "resnet20"])
@pytest.mark.parametrize("start", [None, "uniform"])
def test_what_the_scales_start_from(name, start):
    """Oracle: PyTorch's source, by version: U(0, 1) until 1.1, ones since.

    Of U(0, 1), the mean of n scales lies within five standard errors, 5 / sqrt(12 n), of 1/2, and
    layers differ.
    """
    changes = {"network": name, "batch_norm_start": str(start)}
    config = resolve(apply_overrides(load_config(None), changes))
    shapes = {"small_mlp": (4,), "resnet20": (8, 8, 1)}
    variables = networks.init_variables(jax.random.key(0), network_builder(config)(2), shapes[name])
    leaves = jax.tree.leaves_with_path(variables["params"])
    scales = [np.asarray(leaf) for path, leaf in leaves if path[-1].key == "scale"]
    together = np.concatenate(scales)
    if start is None:
        assert np.all(together == 1)
    else:
        assert together.min() >= 0
        assert together.max() < 1
        assert abs(together.mean() - 0.5) < 5 / math.sqrt(12 * together.size)
        assert not np.array_equal(scales[-1][:16], scales[-2][:16])


@pytest.mark.parametrize("shape", [(9, 4), (3, 2, 5, 4), (1, 4)])
def test_running_update_as_pytorch(shape, tolerance):
    """Oracle: PyTorch by hand: momentum 0.1, unbiased variance (biased for one row)."""
    x = jnp.asarray(np.random.default_rng(0).normal(5.0, 2.0, shape), float)
    stats = {"mean": jnp.arange(4.0), "var": jnp.arange(1.0, 5.0)}
    params = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    _, state = BatchNorm().apply(
        {"params": params, "batch_stats": stats}, x, TrainContext(), mutable=["batch_moments"]
    )
    ours = networks.update_running({"norm": stats}, {"norm": state["batch_moments"]})["norm"]
    rows = np.asarray(x, np.float64).reshape(-1, 4)
    expected = {
        "mean": 0.9 * np.arange(4.0) + 0.1 * rows.mean(0),
        "var": 0.9 * np.arange(1.0, 5.0) + 0.1 * rows.var(0, ddof=min(1, len(rows) - 1)),
    }
    assert_trees_close(ours, expected, tolerance.exact)


def test_padding_is_as_good_as_absent(network, tolerance):
    """Oracle: the batch without the padded rows."""
    module, shape = network
    params, stats, x = variables_and_batch(module, shape)
    keys = make_keys(len(x))
    kept = np.array([0, 1, 3, 4, 8, 10])
    weights = jnp.zeros(len(x)).at[kept].set(1.0)
    spoilt = jnp.where(weights.reshape(-1, *(1,) * len(shape)) > 0, x, 1e3)
    z, moments = train(module, params, stats, spoilt, keys=keys, weights=weights)
    expected = train(module, params, stats, x[kept], keys=keys[kept])
    assert_trees_close((z[kept], moments), expected, tolerance.exact)


def test_batch_of_padding_stays_finite(network):
    module, shape = network
    params, stats, x = variables_and_batch(module, shape, batch=2)
    z, moments = train(module, params, stats, x, weights=jnp.zeros(2))
    running = networks.update_running(stats, moments)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((z, moments, running)))


def test_devices_share_batch_statistics(network, tolerance):
    """Oracle: the whole batch on one device; the rows of several are interleaved."""
    module, shape = network
    params, stats, x = variables_and_batch(module, shape)
    keys = make_keys(len(x))
    devices = 3
    shards = lambda v: v.reshape(-1, devices, *v.shape[1:]).swapaxes(0, 1)

    @partial(jax.vmap, axis_name="devices")
    def on_device(x, keys):
        context = TrainContext(keys=keys, axis_name="devices")
        return networks.apply_train(module, params, stats, x, context)

    z, moments = quick_jit(on_device)(shards(x), shards(keys))
    whole, expected = train(module, params, stats, x, keys=keys)
    together = z.swapaxes(0, 1).reshape(whole.shape)
    np.testing.assert_allclose(together, whole, rtol=tolerance.exact, atol=tolerance.exact)
    for device in range(devices):
        own = jax.tree.map(lambda leaf, device=device: leaf[device], moments)
        assert_trees_close(own, expected, tolerance.exact)


def test_training_output_from_its_moments(network, tolerance):
    """Oracle: `apply_train`; `apply` with the moments it returned must agree."""
    module, shape = network
    params, stats, x = variables_and_batch(module, shape)
    keys = make_keys(len(x))
    z, moments = train(module, params, stats, x, keys=keys)
    again = quick_jit(partial(networks.apply, module))(params, moments, x, keys)
    np.testing.assert_allclose(again, z, rtol=tolerance.exact, atol=tolerance.exact)
    running = quick_jit(partial(networks.apply, module))(params, stats, x, keys)
    assert np.abs(running - z).max() > 1e-2


def test_without_batch_norm_there_is_no_state():
    module = TINY_MLP.clone(batch_norm=False)
    params, stats, x = variables_and_batch(module, (4,))
    z, moments = networks.apply_train(module, params, stats, x, TrainContext())
    assert stats == moments == networks.update_running(stats, moments) == {}
    np.testing.assert_array_equal(z, networks.apply(module, params, stats, x))


# --- Dropout ----------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_dropout_keeps_the_expectation(rate):
    """Oracle: each unit is ``x / keep`` with probability ``keep``, else zero.

    The standard error over ``n`` keys is ``|x| sqrt(rate / keep / n)``; five are allowed,
    as the largest of eight is taken.
    """
    keep, n = 1 - rate, 4000
    row = jnp.arange(1.0, 9.0)
    x = jnp.broadcast_to(row, (n, 8))
    out = Dropout(rate, 0).apply({}, x, TrainContext(keys=make_keys(n)))
    ratio = np.asarray(out / x)
    assert ((ratio == 0) | (np.abs(ratio * keep - 1) < 1e-6)).all()
    np.testing.assert_allclose(ratio.mean(0), 1.0, atol=5 * math.sqrt(rate / keep / n))


def test_dropout_masks_differ_between_layers_units_and_examples():
    """Oracle: independent fair masks agree on half of the entries, here within 6 sigma."""
    n, units = 40, 100
    context = TrainContext(keys=make_keys(n))
    first, second = (
        np.asarray(Dropout(0.5, index).apply({}, jnp.ones((n, units)), context)) > 0
        for index in (0, 1)
    )
    six_sigma = 6 * 0.5 / math.sqrt(n * units)
    for other in (second, np.roll(first, 1, axis=0), np.roll(first, 1, axis=1)):
        assert abs((first == other).mean() - 0.5) < six_sigma


def test_dropout_follows_the_example_not_the_batch(key):
    """Oracle: the same example alone; its key alone decides its mask."""
    params, stats, x = variables_and_batch(DROPOUT_MLP, (5,))
    keys = make_keys(len(x))
    run = quick_jit(partial(networks.apply, DROPOUT_MLP, params, stats))
    z = run(x, keys)
    order = np.array([7, 2, 11])
    np.testing.assert_allclose(run(x[order], keys[order]), z[order], rtol=1e-5, atol=1e-6)
    assert np.abs(run(x, keys[::-1]) - z).max() > 1e-2


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_without_keys(training):
    """Oracle: the same network without dropout."""
    params, stats, x = variables_and_batch(DROPOUT_MLP, (5,))
    context = TrainContext(use_batch_moments=training)
    ours, theirs = (
        networks.apply_train(module, params, stats, x, context)
        for module in (DROPOUT_MLP, TINY_MLP)
    )
    assert_trees_close(ours, theirs, 0.0)


# --- Errors -----------------------------------------------------------------------


def test_unknown_network_lists_the_choices():
    with pytest.raises(ValueError, match=r"'vgg'.*\['resnet20', 'small_mlp'\]"):
        networks.make_network("vgg", 10)


def test_resnet_on_flat_input_names_the_shape(key):
    with pytest.raises(ValueError, match=r"ResNet20 needs images .*\(1, 12\)"):
        networks.init_variables(key, TINY_RESNET, (12,))
