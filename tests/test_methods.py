"""The methods' common interface and what is particular to each.

Oracles: closed forms, SciPy densities, finite differences, XLA's own count of operations,
and invariances: company in the batch, number of devices.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import mass_jax
from mass_jax import gaussian_mixture, methods, networks
from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.method import Examples
from mass_jax.methods import vib
from mass_jax.networks import SmallMLP, TrainContext
from mass_jax.representation import BATCH_STATS

# XLA spends nearly all the time of these tests in optimising: leave that out.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
quick_jit = partial(jax.jit, compiler_options=QUICK)
float64 = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)

SHAPE, CLASSES, DIM, BATCH = (3, 3, 1), 3, 2, 12
OPTIONS = {
    "mass": {"representation_dim": DIM, "num_components": 2, "sub_batch": 5},
    "vib": {"representation_dim": DIM, "num_components": 2},
    "softmax_ce": {},
}
# Without dropout where it is not the point: every draw takes XLA a second to compile.
build_network = partial(SmallMLP, hidden=(6, 5))


def make(name, **options):
    return mass_jax.make_method(name, **{"num_classes": CLASSES, **OPTIONS[name], **options})


def parameters(method, build_network=build_network):
    """Parameters of the right shapes from NumPy; `init` spends seconds compiling its draws."""
    generator = np.random.default_rng(0)
    init = lambda: method.init(jax.random.key(0), build_network, SHAPE)
    shapes = jax.eval_shape(init)

    def draw(leaf):
        return jnp.asarray(generator.uniform(0.1, 1.0, leaf.shape), float)

    def signed(leaf):
        return jnp.asarray(generator.normal(size=leaf.shape) / leaf.shape[0] ** 0.5, float)

    params = jax.tree.map(draw, shapes)
    return params.replace(
        network=jax.tree.map(signed, params.network), head=jax.tree.map(draw, params.head)
    )


def batch():
    """Images, labels and one key per image."""
    generator = np.random.default_rng(1)
    x = jnp.asarray(generator.normal(size=(BATCH, *SHAPE)), float)
    labels = jnp.asarray(generator.integers(CLASSES, size=BATCH))
    data = generator.integers(2**32, size=(BATCH, 2), dtype=np.uint32)
    return x, labels, jax.random.wrap_key_data(jnp.asarray(data))


def assert_trees_close(ours, theirs, rtol):
    """Relative to the largest entry of each array."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * (1e-3 + np.abs(b).max(initial=0)))


@pytest.fixture(params=OPTIONS)
def name(request):
    return request.param


# --- Registry ---------------------------------------------------------------------


def test_registry_is_the_folder():
    """Oracle: the files themselves."""
    files = {path.stem for path in Path(methods.__file__).parent.glob("[!_]*.py")}
    assert set(mass_jax.METHODS) == files == {"mass", "vib", "softmax_ce"}


def test_a_fourth_file_is_a_fourth_method(tmp_path, monkeypatch):
    """The registry's own source, run as a package over one more folder."""
    (tmp_path / "fourth.py").write_text(
        "from mass_jax.methods.softmax_ce import method as softmax_ce\n"
        "def method(*, sharpness):\n    return softmax_ce(num_classes=sharpness)\n"
    )
    spec = importlib.util.spec_from_file_location(
        "four_methods",
        methods.__file__,
        submodule_search_locations=[*methods.__path__, str(tmp_path)],
    )
    package = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", sys.modules | {"four_methods": package})
        spec.loader.exec_module(package)
    assert set(package.METHODS) == {*mass_jax.METHODS, "fourth"}
    params = jax.eval_shape(
        lambda: package.make_method("fourth", sharpness=7).init(
            jax.random.key(0), build_network, SHAPE
        )
    )
    assert params.network["output"]["bias"].shape == (7,)
    assert "fourth" not in mass_jax.METHODS


def test_unknown_method_lists_the_choices():
    with pytest.raises(ValueError, match=r"'ib'.*\['mass', 'softmax_ce', 'vib'\]"):
        mass_jax.make_method("ib")


# --- What every method does -------------------------------------------------------

HEAD_SHAPES = {
    "mass": GaussianMixture((CLASSES, 2), (CLASSES, 2, DIM), (CLASSES, 2, DIM, DIM)),
    "vib": vib.VibHead(
        {"kernel": (DIM, CLASSES), "bias": (CLASSES,)},
        GaussianMixture((2,), (2, DIM), (2, DIM, DIM)),
    ),
    "softmax_ce": (),
}
OUTPUTS = {"mass": DIM, "vib": DIM + DIM * (DIM + 1) // 2, "softmax_ce": CLASSES}


def test_initial_shapes(name):
    """Oracle: the paper's description, by hand."""
    params = jax.eval_shape(lambda: make(name).init(jax.random.key(0), build_network, SHAPE))
    assert jax.tree.map(lambda leaf: leaf.shape, params.head) == HEAD_SHAPES[name]
    assert params.network["output"]["kernel"].shape == (5, OUTPUTS[name])
    assert params.module == build_network(OUTPUTS[name])


def test_public_init_draws_the_same(key):
    """Oracle: the method's own `init`, and the range of the paper's marginal means."""
    options = {"num_classes": CLASSES, **OPTIONS["vib"]}
    params = mass_jax.init(
        key, input_shape=(2,), method="vib", network_options={"hidden": ()}, **options
    )
    own = make("vib").init(key, partial(SmallMLP, hidden=()), (2,))
    assert_trees_close(params, own, 0.0)
    marginal = params.head.marginal
    assert 0 < np.abs(marginal.means).max() <= 0.1
    np.testing.assert_array_equal(marginal.scale_tril, np.tile(np.eye(DIM), (2, 1, 1)))
    assert not marginal.logits.any()


@float64
def test_objective_and_its_descent(name, tolerance):
    """Oracles: the weighted sum by hand; a short step lowers it by ``rate |gradient|^2``."""
    method = make(name, weight_decay=0.1)
    params, (x, labels, keys) = parameters(method), batch()

    @quick_jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(trained):
        own = params.replace(network=trained[0], head=trained[1])
        loss = method.loss(own, x, labels, TrainContext(keys=keys))
        return loss.objective(), loss

    trained = (params.network, params.head)
    (value, loss), gradient = run(trained)
    coefficients = loss_of_coefficients(method, params, x, labels, keys)
    assert set(coefficients) == set(loss.terms)
    by_hand = sum(coefficients[term] * np.mean(loss.terms[term].values) for term in loss.terms)
    assert np.isfinite(value)
    np.testing.assert_allclose(value, by_hand, rtol=tolerance.exact)
    np.testing.assert_allclose(np.exp(loss.log_probs).sum(-1), 1.0, rtol=tolerance.exact)
    assert jax.tree.structure(loss.batch_stats) == jax.tree.structure(params.batch_stats)

    rate = 1e-7
    stepped = jax.tree.map(lambda leaf, slope: leaf - rate * slope, trained, gradient)
    squared = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient))
    lowered = value - run(stepped)[0][0]
    np.testing.assert_allclose(lowered / (rate * squared), 1.0, rtol=1e-2)


def loss_of_coefficients(method, params, x, labels, keys):
    """Coefficients are Python numbers: read them while tracing."""
    seen = {}

    def trace(params):
        loss = method.loss(params, x, labels, TrainContext(keys=keys))
        seen.update(loss.coefficients)
        return loss.objective()

    jax.eval_shape(trace, params)
    return seen


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mass", {"cross_entropy": 1.0, "entropy": 0.25, "jacobian": 0.25}),
        ("vib", {"cross_entropy": 1.0, "rate": 0.25}),
        ("softmax_ce", {"cross_entropy": 1.0}),
    ],
)
@pytest.mark.parametrize("decay", [{}, {"half_squared_norm": 0.5}])
def test_coefficients(name, expected, decay):
    """Oracle: Eq. (2) of the paper and Eq. (17) of Alemi et al."""
    beta = {} if name == "softmax_ce" else {"beta": 0.25}
    method = make(name, weight_decay=decay.get("half_squared_norm", 0.0), **beta)
    x, labels, keys = batch()
    found = loss_of_coefficients(method, parameters(method), x, labels, keys)
    assert found == expected | decay


@float64
def test_weight_decay_adds_theta_to_the_gradient(name, tolerance):
    """Oracle: ``gradient + weight_decay * theta``; heads do not decay."""
    x, labels, keys = batch()
    params = parameters(make(name))

    @quick_jit
    def gradients(params):
        return [
            jax.grad(
                lambda p, method=method: method.loss(
                    p, x, labels, TrainContext(keys=keys)
                ).objective()
            )(params)
            for method in (make(name), make(name, weight_decay=0.3))
        ]

    plain, decayed = gradients(params)
    expected = jax.tree.map(lambda g, theta: g + 0.3 * theta, plain.network, params.network)
    assert_trees_close(decayed.network, expected, tolerance.exact)
    assert_trees_close(decayed.head, plain.head, tolerance.exact)


SCORES = {
    "mass": {"entropy", "max_log_q"},
    "vib": {"entropy", "rate"},
    "softmax_ce": {"entropy"},
}


def predictions(method):
    return quick_jit(lambda *args: (method.log_probs(*args), method.ood_scores(*args)))


def test_predictions(name, tolerance):
    """Oracles: normalisation, the entropy by hand, and each example predicted alone."""
    method = make(name)
    params, (x, _, keys) = parameters(method), batch()
    log_probs, scores = predictions(method)(params, x, keys)
    assert log_probs.shape == (BATCH, CLASSES)
    probs = np.exp(np.asarray(log_probs))
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=tolerance.exact)
    assert set(scores) == SCORES[name]
    by_hand = -(probs * np.asarray(log_probs)).sum(-1)
    np.testing.assert_allclose(
        scores["entropy"], by_hand, rtol=tolerance.exact, atol=tolerance.exact
    )
    alone = quick_jit(
        lambda params, x, keys: jax.lax.map(
            lambda example: jax.tree.map(
                lambda leaf: leaf[0],
                (
                    method.log_probs(params, example[0][None], example[1][None]),
                    method.ood_scores(params, example[0][None], example[1][None]),
                ),
            ),
            (x, keys),
        )
    )
    assert_trees_close(alone(params, x, keys), (log_probs, scores), tolerance.exact)


@pytest.mark.parametrize("name", ["mass", "softmax_ce"])
def test_max_log_q(name, tolerance):
    """Oracles: SciPy's densities; an input far away is more out-of-distribution."""
    method = make(name)
    params, (x, _, _) = parameters(method), batch()
    z = np.asarray(params.representation(x))
    q = mass_jax.fit_class_mixtures(z, np.arange(BATCH) % CLASSES, CLASSES, 1)
    params = params.replace(head=q)
    _, scores = predictions(method)(params, x)
    assert set(scores) == {"entropy", "max_log_q"}
    by_class = [
        stats.multivariate_normal(mean[0], scale[0] @ scale[0].T).logpdf(z)
        for mean, scale in zip(np.asarray(q.means), np.asarray(q.scale_tril), strict=True)
    ]
    # Both sides lose digits to the conditioning of the covariances.
    np.testing.assert_allclose(
        scores["max_log_q"], -np.max(by_class, 0), rtol=10 * tolerance.golden
    )
    _, far = predictions(method)(params, 100.0 * x)
    assert (far["max_log_q"] > scores["max_log_q"].max()).all()


# --- Several devices --------------------------------------------------------------

SHARDED = {
    "vib": ("vib", {}),
    "softmax_ce": ("softmax_ce", {}),
    **{f"mass {kind}": ("mass", {"beta": 0.2, "batch_stats": kind}) for kind in BATCH_STATS},
}


@float64
@pytest.mark.parametrize(
    ("case", "device_counts", "dropout_rate"),
    [
        *((case, (2, 4), 0.0) for case in SHARDED),
        ("mass paper", (2,), 0.3),
        ("mass frozen", (4,), 0.3),
    ],
)
def test_devices_compute_what_one_would(case, device_counts, dropout_rate, tolerance):
    """Oracle: one device. Five Jacobian rows: no number of devices here divides that.

    Row ``i`` of device ``d`` is row ``i D + d`` of the minibatch. The gradient of a
    synchronised objective is the mean over devices, as the train step takes it.
    """
    name, options = SHARDED[case]
    method = make(name, weight_decay=0.01, **options)
    # Wide enough that no dropout mask leaves a singular Jacobian.
    params = parameters(method, partial(SmallMLP, hidden=(12, 10), dropout_rate=dropout_rate))
    rows = batch()

    def run(params, x, labels, keys, axis_name=None):
        def objective(params):
            context = TrainContext(keys=keys, axis_name=axis_name)
            loss = method.loss(params, x, labels, context)
            return loss.objective(axis_name), (loss.log_probs, loss.batch_stats)

        return jax.value_and_grad(objective, has_aux=True)(params)

    (value, (log_probs, running)), gradient = quick_jit(run)(params, *rows)
    trained = lambda g: (g.network, g.head)
    on_devices = quick_jit(
        jax.vmap(partial(run, axis_name="devices"), in_axes=(None, 0, 0, 0), axis_name="devices")
    )
    for devices in device_counts:
        shards = [v.reshape(-1, devices, *v.shape[1:]).swapaxes(0, 1) for v in rows]
        (values, (sharded_log_probs, runnings)), gradients = on_devices(params, *shards)
        np.testing.assert_allclose(values, np.full(devices, value), rtol=tolerance.exact)
        together = sharded_log_probs.swapaxes(0, 1).reshape(log_probs.shape)
        assert_trees_close(together, log_probs, tolerance.exact)
        first = jax.tree.map(lambda leaf: leaf[0], runnings)
        assert_trees_close(first, running, tolerance.exact)
        mean = jax.tree.map(lambda leaf: leaf.mean(0), gradients)
        assert_trees_close(trained(mean), trained(gradient), 100 * tolerance.exact)


# --- MASS -------------------------------------------------------------------------


def operations(f, *args):
    return quick_jit(f).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("batch_stats", BATCH_STATS)
def test_beta_zero_has_no_jacobian(batch_stats):
    """Oracle: XLA's operation count of the network, the mixtures and their gradient alone."""
    x, labels, _ = batch()
    params = parameters(make("mass"))

    def step(beta):
        method = make("mass", beta=beta, batch_stats=batch_stats)
        loss = lambda params: method.loss(params, x, labels, TrainContext())
        return loss, lambda params: jax.value_and_grad(lambda p: loss(p).objective())(params)

    def plain(params):
        if batch_stats == "running":
            z = params.representation(x)
        else:
            args = (params.module, params.network, params.batch_stats, x, TrainContext())
            z, _ = networks.apply_train(*args)
        log_probs = gaussian_mixture.log_posterior(gaussian_mixture.log_prob(params.q, z))
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=-1))

    loss, without = step(0.0)
    _, with_jacobian = step(1e-3)
    assert set(jax.eval_shape(lambda p: loss(p).terms, params)) == {"cross_entropy"}
    assert "cholesky" not in str(jax.make_jaxpr(without)(params))
    assert "cholesky" in str(jax.make_jaxpr(with_jacobian)(params))
    reference = operations(jax.value_and_grad(plain), params)
    assert operations(without, params) <= 1.02 * reference
    assert operations(with_jacobian, params) > 1.3 * reference


def test_beta_zero_may_keep_the_sub_batch_of_the_paper():
    """Oracle: the terms of a positive beta, whose sub-batch is normalised by itself."""
    x, labels, _ = batch()
    params = parameters(make("mass"))

    def loss(beta, **options):
        method = make("mass", beta=beta, batch_stats="paper", **options)
        return quick_jit(lambda p: method.loss(p, x, labels, TrainContext()))(params)

    split, plain, positive = loss(0.0, always_split=True), loss(0.0), loss(1e-3)
    assert set(split.terms) == {"cross_entropy"}
    seen = lambda loss: (loss.terms["cross_entropy"], loss.log_probs, loss.batch_stats)
    assert_trees_close(seen(split), seen(positive), 1e-6)
    assert not np.allclose(split.log_probs, plain.log_probs, rtol=1e-3)
    method = make("mass", beta=0.0, batch_stats="paper", always_split=True)
    step = jax.make_jaxpr(lambda p: method.loss(p, x, labels, TrainContext()))(params)
    assert "cholesky" not in str(step)


def test_mle_initialisation(key):
    """Oracle: `fit_class_mixtures` on the untrained network's outputs."""
    x, labels, _ = batch()
    method = make("mass", initialisation="mle")
    plain = partial(SmallMLP, hidden=())
    params = method.init(key, plain, SHAPE, Examples(x, labels))
    z = np.asarray(params.representation(x))
    expected = mass_jax.fit_class_mixtures(z, np.asarray(labels), CLASSES, 2)
    assert_trees_close(params.head, expected, 1e-6)
    with pytest.raises(ValueError, match=r"mle.*pass examples="):
        method.init(key, plain, SHAPE)


def test_unknown_initialisation_lists_the_choices():
    with pytest.raises(ValueError, match=r"'ones'.*zeros.*random.*standard_basis.*mle"):
        make("mass", initialisation="ones")


def test_representation_larger_than_the_input_is_refused(key):
    with pytest.raises(ValueError, match="representation_dim <= 1"):
        make("mass").init(key, build_network, (1,))


def test_class_prior(tolerance):
    """Oracle: Bayes' rule on SciPy's densities; in predictions and in the loss."""
    prior = np.array([0.2, 0.7, 0.1])
    method = make("mass", log_prior=np.log(prior), beta=0.5, batch_stats="running")
    params, (x, labels, _) = parameters(method), batch()
    z = np.asarray(params.representation(x), np.float64)
    q = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params.q)
    weights = np.exp(q.logits) / np.exp(q.logits).sum(-1, keepdims=True)
    tril = np.tril(q.scale_tril)
    density = np.stack(
        [
            sum(
                weights[k, m]
                * stats.multivariate_normal(q.means[k, m], tril[k, m] @ tril[k, m].T).pdf(z)
                for m in range(2)
            )
            for k in range(CLASSES)
        ],
        axis=-1,
    )
    joint = density * prior
    posterior = np.log(joint / joint.sum(-1, keepdims=True))
    log_probs, _ = predictions(method)(params, x)
    # Relative to a few nats.
    np.testing.assert_allclose(log_probs, posterior, rtol=tolerance.exact, atol=tolerance.exact)
    loss = quick_jit(lambda p: method.loss(p, x, labels, TrainContext()).terms)(params)
    np.testing.assert_allclose(
        loss["entropy"].values, -np.log(joint.sum(-1)), rtol=tolerance.exact, atol=tolerance.exact
    )


# --- VIB --------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_rate_is_the_kl_divergence(covariance):
    """Oracle: ``KL(N(m, L L^T) || N(0, I))`` in closed form, by Monte Carlo.

    A sample's log-ratio is a quadratic form of its noise, ``e^T (A - I) e / 2 + (L^T m) e``
    and a constant, with ``A = L^T L``; its variance is ``|A - I|^2 / 2 + |L^T m|^2``. Four
    standard errors, and one in ten thousand for float32.
    """
    dim, samples, count = 3, 4000, 4
    generator = np.random.default_rng(0)
    outputs = generator.normal(size=(count, vib.num_outputs(dim, covariance)))
    encoding = vib.encode(jnp.asarray(outputs, float), dim, covariance)
    marginal = GaussianMixture(jnp.zeros(1), jnp.zeros((1, dim)), jnp.eye(dim)[None])
    decoder = {"kernel": jnp.zeros((dim, CLASSES)), "bias": jnp.zeros(CLASSES)}
    noise = jnp.asarray(generator.normal(size=(samples, count, dim)), float)
    seen = quick_jit(vib.bottleneck)(encoding, vib.VibHead(decoder, marginal), noise)
    mean, scale = np.asarray(encoding.mean), np.asarray(encoding.scale)
    for i in range(count):
        stretch, tilt = scale[i].T @ scale[i], scale[i].T @ mean[i]
        log_det = np.log(np.diag(scale[i])).sum()
        expected = 0.5 * (np.trace(stretch) + mean[i] @ mean[i] - dim) - log_det
        variance = 0.5 * np.sum((stretch - np.eye(dim)) ** 2) + tilt @ tilt
        error = 4 * np.sqrt(variance / samples) + 1e-4 * abs(expected)
        assert abs(seen.rate[i] - expected) < error


@pytest.mark.parametrize(
    ("dim", "covariance", "expected"),
    [(15, "full", 15 + 120), (20, "diagonal", 40), (1, "full", 2), (1, "diagonal", 2)],
)
def test_number_of_encoder_outputs(dim, covariance, expected):
    """Oracle: means and a triangle, or means and a diagonal, counted by hand."""
    assert vib.num_outputs(dim, covariance) == expected


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_order_of_the_encoder_outputs(covariance):
    """Oracle: the entries placed by hand: means, diagonal, then rows below it."""
    outputs = jnp.arange(1.0, 1.0 + vib.num_outputs(3, covariance))[None]
    below = {"full": (7.0, 8.0, 9.0), "diagonal": (0.0, 0.0, 0.0)}[covariance]
    diagonal = np.log1p(np.exp([4.0, 5.0, 6.0]))
    expected = [
        [diagonal[0], 0.0, 0.0],
        [below[0], diagonal[1], 0.0],
        [below[1], below[2], diagonal[2]],
    ]
    encoding = vib.encode(outputs, 3, covariance)
    np.testing.assert_allclose(encoding.mean[0], [1.0, 2.0, 3.0])
    np.testing.assert_allclose(encoding.scale[0], expected, rtol=1e-6)


@pytest.mark.parametrize("call", ["loss", "log_probs", "ood_scores"])
def test_vib_needs_keys(call):
    method = make("vib")
    params, (x, labels, _) = parameters(method), batch()
    arguments = (labels, TrainContext()) if call == "loss" else ()
    with pytest.raises(ValueError, match="VIB samples its encoder: pass keys"):
        jax.eval_shape(lambda: getattr(method, call)(params, x, *arguments))


def test_vib_refuses_an_unknown_covariance():
    with pytest.raises(ValueError, match=r"'spherical'.*'full' or 'diagonal'"):
        make("vib", covariance="spherical")


def test_vib_sample_counts():
    """Oracle: shapes; more samples at test than in training, as asked."""
    method = make("vib", test_samples=7, train_samples=3)
    params, (x, labels, keys) = parameters(method), batch()
    drawn = lambda f, *args: str(jax.make_jaxpr(f)(params, x, *args))
    in_test = drawn(lambda p, x: method.log_probs(p, x, keys))
    in_training = drawn(lambda p, x: method.loss(p, x, labels, TrainContext(keys=keys)).objective())
    for jaxpr, samples, other in ((in_test, 7, 3), (in_training, 3, 7)):
        assert f"[{samples},{BATCH},{DIM}]" in jaxpr
        assert f"[{other},{BATCH},{DIM}]" not in jaxpr
