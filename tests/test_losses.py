"""`cdi_loss`, its keywords and the three meanings of ``J_f`` under BatchNorm.

Oracles: the definition ``-mean log q(f(x)) - mean log J_f(x)`` put together by hand from
explicit Jacobians and `slogdet`, closed-form entropies, and finite differences.
"""

from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mass_jax
from mass_jax import gaussian_mixture, networks
from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.losses import cdi_loss
from mass_jax.model import ModelParams
from mass_jax.networks import ResNet20, SmallMLP, TrainContext
from mass_jax.representation import BATCH_STATS, represent

# XLA spends nearly all the time of these tests in optimising: leave that out.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
quick_jit = partial(jax.jit, compiler_options=QUICK)
float64 = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)

BATCH, DIM, CLASSES = 8, 3, 4
NETWORKS = {
    "small_mlp": (partial(SmallMLP, hidden=(7, 6)), (4, 4, 1)),
    "resnet20": (partial(ResNet20, widths=(4, 8), blocks=1), (6, 6, 1)),
    "without batch_norm": (partial(SmallMLP, hidden=(7, 6), batch_norm=False), (4, 4, 1)),
}


def model(name="small_mlp", **options):
    """Parameters of the right shapes from NumPy; `init` spends seconds compiling its draws."""
    generator = np.random.default_rng(0)
    build_network, shape = NETWORKS[name]
    method = mass_jax.make_method(
        "mass", representation_dim=DIM, num_classes=CLASSES, num_components=2
    )
    init = lambda: method.init(jax.random.key(0), partial(build_network, **options), shape)

    def draw(path, leaf):
        name = getattr(path[-1], "key", getattr(path[-1], "name", None))
        if name == "kernel":
            values = generator.normal(size=leaf.shape) / np.prod(leaf.shape[:-1]) ** 0.5
        elif name == "scale_tril":
            values = generator.normal(size=leaf.shape) * 0.1 + np.eye(DIM)
        else:
            values = generator.uniform(0.5, 1.5, leaf.shape)
        return jnp.asarray(values, float)

    params = jax.tree.map_with_path(draw, jax.eval_shape(init))
    x = jnp.asarray(generator.normal(size=(BATCH, *shape)), float)
    return params, x


def half_log_dets(jacobians):
    """``1/2 log det(J J^T)`` by NumPy's LU factorisation, of ``[n, R, ...]``."""
    rows = np.asarray(jacobians, np.float64)
    rows = rows.reshape(*rows.shape[:2], -1)
    return 0.5 * np.linalg.slogdet(rows @ rows.swapaxes(1, 2))[1]


def mean_entropy(q, z):
    """``-mean log q(z)`` with uniform classes."""
    by_class = quick_jit(gaussian_mixture.log_prob)(q, z)
    return -float(jnp.mean(jax.nn.logsumexp(by_class, axis=-1) - jnp.log(by_class.shape[-1])))


def representations(params, x):
    return quick_jit(ModelParams.representation)(params, x)


def per_example_jacobians(f, x):
    """One `jacfwd` of a batch of one per example."""
    return quick_jit(jax.vmap(jax.jacfwd(lambda v: f(v[None])[0])))(x)


# --- The definition ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["small_mlp", "resnet20"])
def test_two_arguments_are_enough(name, key):
    """The call of the docstring, on fresh parameters; jit = eager; statistics stay."""
    options = {"small_mlp": {"hidden": (5,)}, "resnet20": {"widths": (3,), "blocks": 1}}[name]
    params = mass_jax.init(
        key,
        network=name,
        input_shape=(4, 4, 1),
        representation_dim=2,
        initialisation="zeros",
        network_options=options,
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, 4, 4, 1)), float)
    jitted = quick_jit(mass_jax.cdi_loss)(params, x)
    assert jitted.shape == ()
    np.testing.assert_allclose(mass_jax.cdi_loss(params, x), jitted, rtol=2e-4)
    gradient = quick_jit(jax.grad(mass_jax.cdi_loss))(params, x)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient.batch_stats))
    assert all(leaf.any() for leaf in jax.tree.leaves(gradient.network["output"]["kernel"]))


@pytest.mark.parametrize("name", NETWORKS)
def test_definition(name, tolerance):
    """Oracle: both means by hand with running statistics."""
    params, x = model(name)
    z = representations(params, x)
    expected = (
        mean_entropy(params.q, z)
        - half_log_dets(per_example_jacobians(params.representation, x)).mean()
    )
    np.testing.assert_allclose(quick_jit(cdi_loss)(params, x), expected, rtol=tolerance.exact)


@pytest.mark.parametrize("batch_stats", BATCH_STATS)
def test_gradient_leaves_statistics_alone(batch_stats):
    params, x = model()
    gradient = quick_jit(jax.grad(partial(cdi_loss, batch_stats=batch_stats)))(params, x)
    assert len(jax.tree.leaves(gradient.batch_stats)) == 4
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient.batch_stats))


@float64
@pytest.mark.parametrize("batch_stats", BATCH_STATS)
def test_gradient_against_finite_differences(batch_stats, tolerance):
    """Oracle: central differences along a random direction of network and mixtures."""
    params, x = model()
    generator = np.random.default_rng(3)
    direction = jax.tree.map(lambda leaf: generator.normal(size=leaf.shape), params)
    direction = direction.replace(batch_stats=jax.tree.map(jnp.zeros_like, params.batch_stats))
    value_and_grad = quick_jit(
        jax.value_and_grad(partial(cdi_loss, batch_stats=batch_stats, sub_batch=5))
    )
    _, gradient = value_and_grad(params, x)
    along = sum(
        float(jnp.sum(g * d))
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    at = lambda h: value_and_grad(jax.tree.map(lambda p, d: p + h * d, params, direction), x)[0]
    step = 1e-5
    slope = (at(step) - at(-step)) / (2 * step)
    np.testing.assert_allclose(along, slope, rtol=tolerance.finite_difference)


# --- Keywords ---------------------------------------------------------------------


WAYS_TO_COMPUTE = [
    {"mode": "forward"},
    {"mode": "reverse"},
    {"chunk_size": 3},
    {"chunk_size": BATCH},
    {"mode": "forward", "chunk_size": 1},
]


@float64
@pytest.mark.parametrize("batch_stats", ["running", "frozen"])
def test_how_it_is_computed_does_not_matter(batch_stats, tolerance):
    """Oracle: the default, one batched backward pass per output."""
    params, x = model()
    plain, *others = quick_jit(
        lambda params, x: [
            cdi_loss(params, x, batch_stats=batch_stats, **options)
            for options in ({}, *WAYS_TO_COMPUTE)
        ]
    )(params, x)
    np.testing.assert_allclose(others, [plain] * len(WAYS_TO_COMPUTE), rtol=tolerance.exact)


ROWS_IN_THE_JACOBIAN_TERM = [
    ({"sub_batch": 1}, 1),
    ({"sub_batch": 5}, 5),
    ({"estimator": "sub_batch"}, 2),  # max(R // 2, B // R)
    ({"estimator": "sub_batch", "sub_batch": 3}, 3),
    ({"estimator": "exact"}, BATCH),
]


@float64
def test_sub_batch_is_the_first_rows(tolerance):
    """Oracle: entropy of the whole batch, Jacobians of its first rows, by hand."""
    params, x = model()
    entropy = mean_entropy(params.q, representations(params, x))
    log_dets = half_log_dets(per_example_jacobians(params.representation, x))
    expected = [entropy - log_dets[:count].mean() for _, count in ROWS_IN_THE_JACOBIAN_TERM]
    losses = quick_jit(
        lambda params, x: [
            cdi_loss(params, x, **options) for options, _ in ROWS_IN_THE_JACOBIAN_TERM
        ]
    )(params, x)
    np.testing.assert_allclose(losses, expected, rtol=tolerance.exact)


@float64
@pytest.mark.parametrize("sub_batch", [5, BATCH])
def test_paper_definition(sub_batch, tolerance):
    """Oracle: the explicit ``[n, R, n, D]`` Jacobian of the sub-batch, summed over outputs."""
    params, x = model()

    def train(part):
        args = (params.module, params.network, params.batch_stats, part, TrainContext())
        return networks.apply_train(*args)[0]

    parts = [part for part in (x[:sub_batch], x[sub_batch:]) if len(part)]
    z = jnp.concatenate([quick_jit(train)(part) for part in parts])
    explicit = quick_jit(jax.jacfwd(train))(x[:sub_batch])  # [n, R, n, ...]
    summed = np.asarray(explicit).sum(0).reshape(DIM, sub_batch, -1).swapaxes(0, 1)
    expected = mean_entropy(params.q, z) - half_log_dets(summed).mean()
    loss = quick_jit(partial(cdi_loss, batch_stats="paper", sub_batch=sub_batch))(params, x)
    np.testing.assert_allclose(loss, expected, rtol=tolerance.exact)


@float64
@pytest.mark.parametrize("dropout_rate", [0.0, 0.1])
def test_frozen_definition(dropout_rate, tolerance):
    """Oracle: `networks.apply` with the batch's moments fixed, example by example."""
    params, x = model(hidden=(12, 10), dropout_rate=dropout_rate)
    data = np.random.default_rng(1).integers(2**32, size=(BATCH, 2), dtype=np.uint32)
    context = TrainContext(keys=jax.random.wrap_key_data(jnp.asarray(data)))
    z, moments = quick_jit(
        lambda x: networks.apply_train(
            params.module, params.network, params.batch_stats, x, context
        )
    )(x)

    def one(image, key):
        args = (params.module, params.network, moments, image[None], key[None])
        return networks.apply(*args)[0]

    expected = half_log_dets(quick_jit(jax.vmap(jax.jacfwd(one)))(x, context.keys)[:6])
    for options in ({}, {"chunk_size": 4}):
        seen = quick_jit(
            partial(
                represent,
                num_jacobian=6,
                batch_stats="frozen",
                context=context,
                **options,
            )
        )(params, x)
        np.testing.assert_allclose(seen.z, z, rtol=tolerance.exact, atol=tolerance.exact)
        np.testing.assert_allclose(
            seen.half_log_det, expected, rtol=tolerance.exact, atol=tolerance.exact
        )
    if dropout_rate == 0:
        loss = quick_jit(partial(cdi_loss, batch_stats="frozen", sub_batch=6))(params, x)
        by_hand = mean_entropy(params.q, z) - expected.mean()
        np.testing.assert_allclose(loss, by_hand, rtol=tolerance.exact)


@pytest.mark.parametrize(("name", "agree"), [("without batch_norm", True), ("small_mlp", False)])
def test_definitions_differ_through_batch_norm_only(name, agree, tolerance):
    """Oracle: each other."""
    params, x = model(name)
    losses = quick_jit(
        lambda params, x: [cdi_loss(params, x, batch_stats=kind) for kind in BATCH_STATS]
    )(params, x)
    gaps = np.abs(np.subtract.outer(losses, losses))[np.triu_indices(3, k=1)]
    assert (gaps < tolerance.exact * np.abs(losses).max() if agree else gaps > 1e-2).all()


@pytest.mark.parametrize("batch_stats", BATCH_STATS)
def test_one_trace_per_shape(batch_stats):
    """New values of a known shape must not compile again."""
    chex.clear_trace_counter()  # it counts by name, over all tests

    def loss(params, x):
        return cdi_loss(params, x, batch_stats=batch_stats)

    params, x = model()
    traced_twice = quick_jit(chex.assert_max_traces(loss, n=2))
    for batch in (x, x + 1.0, x[:5], x[:5] * 2.0, x):
        traced_twice(params, batch)
    with pytest.raises(AssertionError, match="traced > 2 times"):
        traced_twice(params, x[:4])


# --- q ----------------------------------------------------------------------------


def standard_normal(z):
    return jax.scipy.stats.norm.logpdf(z).sum(-1)


ONE_MIXTURE = lambda: GaussianMixture(jnp.zeros(1), jnp.zeros((1, DIM)), jnp.eye(DIM)[None])
CLASS_MIXTURES = lambda: jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), ONE_MIXTURE())


@float64
@pytest.mark.parametrize("make_q", [ONE_MIXTURE, CLASS_MIXTURES, lambda: standard_normal])
def test_q_in_every_form(make_q, tolerance):
    """Oracle: the standard normal log-density by hand, given in three ways."""
    params, x = model()
    z = np.asarray(representations(params, x), np.float64)
    entropy = 0.5 * (z**2).sum(-1).mean() + 0.5 * DIM * np.log(2 * np.pi)
    log_dets = half_log_dets(per_example_jacobians(params.representation, x))
    loss = quick_jit(partial(cdi_loss, q=make_q()))(params.replace(head=()), x)
    np.testing.assert_allclose(loss, entropy - log_dets.mean(), rtol=tolerance.exact)


@float64
def test_log_prior(tolerance):
    """Oracle: a prior on one class alone is that class's mixture alone."""
    params, x = model()
    only = jnp.full(CLASSES, -1e3).at[2].set(0.0)
    alone = jax.tree.map(lambda leaf: leaf[2], params.q)
    weighted, expected = quick_jit(
        lambda params, x: (cdi_loss(params, x, log_prior=only), cdi_loss(params, x, q=alone))
    )(params, x)
    np.testing.assert_allclose(weighted, expected, rtol=tolerance.exact)


# --- apply_fn ---------------------------------------------------------------------


class Flattening(nn.Module):
    """What most people's first Flax network looks like: only batches make sense to it."""

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(DIM)(nn.tanh(nn.Dense(7)(x)))


class Pointwise(nn.Module):
    """Works on one example and on a batch alike."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(DIM)(nn.tanh(nn.Dense(7)(x)))


def strict_batch_function(params, x):
    assert x.ndim == 4, x.shape
    return jnp.tanh(x.reshape(x.shape[0], -1)) @ params


def example_function(params, x):
    return jnp.tanh(x.reshape(-1)) @ params


def batch_function(params, x):
    return jnp.tanh(x.reshape(x.shape[0], -1)) @ params


WEIGHTS = np.random.default_rng(5).normal(size=(16, DIM))
APPLY_FNS = {
    "one example": (example_function, (4, 4, 1)),
    "batch": (batch_function, (4, 4, 1)),
    "batch that asserts its rank": (strict_batch_function, (4, 4, 1)),
    "flax pointwise": (Pointwise(), (16,)),
    "flax flattening": (Flattening(), (4, 4, 1)),
}


@pytest.mark.parametrize("name", APPLY_FNS)
def test_apply_fn(name, tolerance):
    """Oracle: Jacobians by hand; entropy of the fitted Gaussian in closed form.

    ``1/2 log det(2 pi e Sigma)`` with ``Sigma`` NumPy's maximum-likelihood covariance.
    """
    generator = np.random.default_rng(0)
    f, shape = APPLY_FNS[name]
    x = jnp.asarray(generator.normal(size=(BATCH, *shape)), float)
    params, apply_fn = jnp.asarray(WEIGHTS, float), f
    if isinstance(f, nn.Module):
        shapes = jax.eval_shape(lambda: f.init(jax.random.key(0), x))
        params = jax.tree.map(
            lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), float), shapes
        )
        apply_fn = f.apply
    on_batch = jax.vmap(partial(f, params)) if name == "one example" else partial(apply_fn, params)
    covariance = np.cov(np.asarray(on_batch(x), np.float64).T, bias=True)
    entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * covariance)[1]
    log_dets = half_log_dets(per_example_jacobians(on_batch, x))
    loss = quick_jit(partial(cdi_loss, apply_fn=apply_fn))
    np.testing.assert_allclose(loss(params, x), entropy - log_dets.mean(), rtol=tolerance.exact)


@float64
@pytest.mark.parametrize(
    "options", [{"mode": "forward"}, {"chunk_size": 3}, {"sub_batch": 5}], ids=str
)
def test_apply_fn_takes_the_same_keywords(options, tolerance):
    """Oracle: the same function as a network of ours, through the other path."""
    params, x = model()
    one_example = lambda params, v: params.representation(v[None])[0]
    ours, wrapped = quick_jit(
        lambda params, x: (
            cdi_loss(params, x, **options),
            cdi_loss(params, x, apply_fn=one_example, q=params.q, **options),
        )
    )(params, x)
    np.testing.assert_allclose(wrapped, ours, rtol=tolerance.exact)


@float64
def test_invariance_of_the_fitted_gaussian(tolerance):
    """Oracle: CDI is unchanged by an invertible linear map after ``f``, fit included."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, 4, 4, 1)), float)
    mixing = np.array([[1.0, 2.0, 0.0], [0.0, 3.0, -1.0], [0.5, 0.0, 1.0]])
    loss = quick_jit(partial(cdi_loss, apply_fn=batch_function))
    losses = [
        loss(jnp.asarray(weights, float), x)
        for weights in (WEIGHTS, WEIGHTS @ mixing, 1e3 * WEIGHTS)
    ]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=tolerance.exact)


# --- Errors -----------------------------------------------------------------------


def rank_two(params, x):
    return jnp.stack([x, x])


ERRORS = {
    "foreign parameters": (
        lambda params, x: cdi_loss({"kernel": x}, x),
        r"params must come from mass_jax\.init .*pass apply_fn=",
    ),
    "unknown batch_stats": (
        lambda params, x: cdi_loss(params, x, batch_stats="train"),
        r"'train': choose one of \['running', 'frozen', 'paper'\]",
    ),
    "unknown estimator": (
        lambda params, x: cdi_loss(params, x, estimator="hutchinson"),
        r"'hutchinson': choose one of \['auto', 'exact', .*'sub_batch'\]",
    ),
    "sub_batch beyond the batch": (
        lambda params, x: cdi_loss(params, x, sub_batch=BATCH + 1),
        "sub_batch=9: must be from 1 to the batch size, 8",
    ),
    "no sub_batch": (
        lambda params, x: cdi_loss(params, x, sub_batch=0),
        "sub_batch=0: must be from 1",
    ),
    "paper in forward mode": (
        lambda params, x: cdi_loss(params, x, batch_stats="paper", mode="forward"),
        "batch_stats='paper' needs mode='auto' or 'reverse'",
    ),
    "paper in chunks": (
        lambda params, x: cdi_loss(params, x, batch_stats="paper", chunk_size=2),
        "batch_stats='paper' needs .* no chunk_size",
    ),
    "unknown mode": (
        lambda params, x: cdi_loss(params, x, mode="backward"),
        r"mode='backward': choose one of",
    ),
    "empty chunks": (
        lambda params, x: cdi_loss(params, x, chunk_size=0),
        "chunk_size=0: must be at least 1",
    ),
    "unknown singular policy": (
        lambda params, x: cdi_loss(params, x, singular="nan"),
        "singular='nan': choose 'floor' or '-inf'",
    ),
    "too few examples to fit": (
        lambda params, x: cdi_loss(jnp.ones((16, 3)), x[:3], apply_fn=batch_function),
        "a Gaussian in 3 dimensions needs more than 3 examples, got 3",
    ),
    "apply_fn of wrong rank": (
        lambda params, x: cdi_loss(params, x, apply_fn=rank_two),
        r"apply_fn\(params, x\) must map one example \(4, 4, 1\) to \(R,\)",
    ),
    "apply_fn returning a pair": (
        lambda params, x: cdi_loss(params, x, apply_fn=lambda p, v: (v, v)),
        "it returned",
    ),
    "no mixture": (
        lambda params, x: cdi_loss(params.replace(head=()), x),
        r"no mixture q\(z\|y\): fit one with mass_jax\.fit_class_mixtures",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_messages(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, *model())
