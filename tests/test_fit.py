"""`mass_jax.fit`: own networks, own data, the one training loop; what is refused and how."""

import json
import os
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import roc_auc_score

import mass_jax
from mass_jax import checkpoint, networks, training
from mass_jax.config import ConfigError
from mass_jax.data import DataError
from mass_jax.own_network import own_network
from mass_jax.training import TrainingDiverged

RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (120, 6))
Y = (X[:, 0] + X[:, 1] > 6.0).astype(int)
QUICK = {"quiet": True, "steps": 12, "config": {"batch_size": 16, "steps_per_dispatch": 6}}


class Net(nn.Module):
    """A network of somebody who knows nothing of this project."""

    size: int = 2
    nonlinearity: object = nn.elu

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(self.size)(self.nonlinearity(nn.LayerNorm()(nn.Dense(16)(x))))


class WithBatchNorm(nn.Module):
    """Uses the project's BatchNorm and dropout, through the context."""

    @nn.compact
    def __call__(self, x, context):
        x = networks.BatchNorm()(nn.Dense(8)(x), context)
        return nn.Dense(2)(networks.Dropout(0.1, 0)(nn.elu(x), context))


def pure(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


def pure_params(seed=0, width=8):
    draw = np.random.default_rng(seed)
    return {"first": draw.normal(size=(6, width)), "second": draw.normal(size=(width, 2))}


def leaves_equal(one, other):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_a_module_learns_and_everything_comes_along(tmp_path):
    """Oracles: a rule a line separates; scikit-learn's AUROC of the scores; the files of a run."""
    fitted = mass_jax.fit(
        Net(),
        X[:80],
        Y[:80],
        X[80:],
        Y[80:],
        ood={"far": X + 60.0},
        steps=200,
        workdir=tmp_path / "run",
        quiet=True,
        config={"optimizer.learning_rate": 1e-2, "data.validation_size": 10},
    )
    assert fitted.results["accuracy"] > 0.85
    assert "evaluated_on" not in fitted.results
    proba = fitted.predict_proba(X)
    np.testing.assert_allclose(proba.sum(axis=1), 1.0, rtol=1e-9)
    assert np.mean(proba[80:].argmax(axis=1) == Y[80:]) == fitted.results["accuracy"]
    scores = [fitted.ood_scores(v)["max_log_q"] for v in (X[80:], X + 60.0)]
    auroc = roc_auc_score(np.repeat([0, 1], [40, 120]), np.concatenate(scores))
    np.testing.assert_allclose(fitted.results["ood"]["far"]["max_log_q"]["auroc"], auroc)
    assert fitted.representation(X).shape == (120, 2)
    # The loss sees normalised inputs, and its gradient reaches network and mixtures.
    normal = fitted.normalise(X)
    np.testing.assert_allclose(normal[:80].mean(axis=0), 0.0, atol=1e-5)
    gradient = jax.grad(mass_jax.cdi_loss)(fitted.params, normal)
    assert float(optax.tree.norm(gradient.network)) > 0
    for name in ("metrics.jsonl", "config.json", "results.json", "environment.json"):
        assert (tmp_path / "run" / name).is_file()
    # The call as it was made: with what was evaluated on, without what follows from the rest.
    call = (
        "mass_jax.fit(network, x_train, y_train, x_test, y_test, ood={'far': ...}, steps=200, "
        "config={'optimizer.learning_rate': 0.01, 'data.validation_size': 10})"
    )
    assert fitted.results["command"] == call
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == fitted.results
    # The weights are the module's own: it can be used without this project.
    direct = Net().apply({"params": fitted.params.network}, normal)
    np.testing.assert_allclose(direct, fitted.representation(X), rtol=1e-4, atol=1e-5)
    # The same call returns what is finished, and the run loads with its network.
    loaded = mass_jax.load_fitted(tmp_path / "run", network=Net())
    np.testing.assert_array_equal(loaded.predict_proba(X), proba)
    assert leaves_equal(mass_jax.load(tmp_path / "run", network=Net()), fitted.params)
    with pytest.raises(ConfigError, match="pass it as network="):
        mass_jax.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not the one of the run"):
        mass_jax.load(tmp_path / "run", network=Net(nonlinearity=nn.tanh))


def test_a_resumed_fit_ends_where_an_unbroken_one_does(tmp_path):
    """Oracle: the same fit without a break; bit for bit."""
    whole = mass_jax.fit(WithBatchNorm(), X, Y, workdir=tmp_path / "whole", **QUICK)
    mass_jax.fit(WithBatchNorm(), X, Y, workdir=tmp_path / "parts", **(QUICK | {"steps": 5}))
    parts = mass_jax.fit(WithBatchNorm(), X, Y, workdir=tmp_path / "parts", **QUICK)
    assert checkpoint.steps(tmp_path / "parts" / "checkpoints") == [5, 12]
    assert leaves_equal(parts.params, whole.params)
    assert float(jnp.abs(whole.params.batch_stats["BatchNorm_0"]["mean"]).max()) > 0
    # Another network, other data or other initial parameters in that workdir are refused.
    message = r"another configuration.*network_digest.*use another workdir or"
    with pytest.raises(ConfigError, match=message):
        mass_jax.fit(Net(), X, Y, workdir=tmp_path / "whole", **QUICK)
    with pytest.raises(ConfigError, match=r"other data \(test/images, train/images differ\)"):
        mass_jax.fit(WithBatchNorm(), X + 1.0, Y, workdir=tmp_path / "whole", **QUICK)
    with pytest.raises(ConfigError, match=r"other data \(far/images, far/labels differ\)"):
        mass_jax.fit(WithBatchNorm(), X, Y, ood={"far": X}, workdir=tmp_path / "whole", **QUICK)


def test_a_pure_function_with_its_parameters(tmp_path):
    """Oracle: the function itself at the returned parameters."""
    workdir = tmp_path / "run"
    fitted = mass_jax.fit(pure, X, Y, params=pure_params(), workdir=workdir, **QUICK)
    assert fitted.results["evaluated_on"] == "training examples"
    call = "mass_jax.fit(network, x_train, y_train, params=params, steps=12, config={'batch_size': "
    assert fitted.results["command"] == f"{call}16}})"
    direct = pure(fitted.params.network, fitted.normalise(X))
    np.testing.assert_allclose(direct, fitted.representation(X), rtol=1e-4, atol=1e-5)
    assert not np.array_equal(fitted.params.network["first"], pure_params()["first"])
    loaded = mass_jax.load(workdir, network=pure, params=pure_params(seed=5))
    assert leaves_equal(loaded, fitted.params)
    with pytest.raises(ConfigError, match="network_digest"):
        mass_jax.fit(pure, X, Y, params=pure_params(seed=1), workdir=workdir, **QUICK)


@pytest.mark.parametrize("method", ["softmax_ce", "vib"])
def test_the_baselines(method):
    """Oracle: shapes and probabilities; VIB's five outputs are a mean and covariance in 2-D."""
    fitted = mass_jax.fit(Net(2 if method == "softmax_ce" else 5), X, Y, method=method, **QUICK)
    np.testing.assert_allclose(fitted.predict_proba(X).sum(axis=1), 1.0, rtol=1e-9)
    names = {"softmax_ce": {"entropy", "max_log_q"}, "vib": {"entropy", "rate"}}[method]
    assert set(fitted.ood_scores(X)) == names
    if method == "softmax_ce":
        assert np.isfinite(mass_jax.cdi_loss(fitted.params, fitted.normalise(X)))
    else:
        assert fitted.config.representation_dim == 2


def test_named_networks_and_grey_images():
    """Oracle: NumPy's statistics of all pixels; the temporary workdir goes with its object."""
    images = RNG.integers(0, 256, (40, 4, 5)).astype(np.uint8)
    labels = np.arange(40) % 3
    named = mass_jax.fit("small_mlp", images, labels, beta=0.0, **QUICK)
    own = mass_jax.fit(Net(3), images, labels, beta=0.0, **QUICK)
    assert (named.input_shape, own.input_shape) == ((4, 5, 1), (4, 5))
    for fitted in (named, own):
        np.testing.assert_allclose(fitted.normalisation.mean, images.mean(), rtol=1e-5)
        np.testing.assert_allclose(fitted.normalisation.std, images.std(), rtol=1e-4)
        assert fitted.predict_proba(images).shape == (40, 3)
    workdir = own.workdir
    assert json.loads((workdir / "results.json").read_text())["network"] == "own"
    del own, fitted
    assert not workdir.exists()


def test_a_tfds_name_trains_too():
    """Oracle: the bundled dataset, which brings its out-of-distribution set."""
    fitted = mass_jax.fit("small_mlp", "digits", beta=0.0, **QUICK)
    assert fitted.config.data.name == "digits"
    assert fitted.results["command"].startswith("mass_jax.fit('small_mlp', 'digits', beta=0.0, ")
    assert fitted.results["ood"]
    assert fitted.num_classes == 8


class FlaxBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


class FlaxBatchNormWithContext(nn.Module):
    @nn.compact
    def __call__(self, x, context):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(nn.Dense(8)(x)))


class FlaxDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x)))


class TrainSwitch(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


class LooksAcross(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x - x.mean(axis=0, keepdims=True))


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[:, 0]


REFUSED = {
    "flax BatchNorm": (FlaxBatchNorm(), {}, r"state of its own \(batch_stats\); .*LayerNorm"),
    "flax BatchNorm, context": (FlaxBatchNormWithContext(), {}, r"\(batch_stats\); .*LayerNorm"),
    "flax dropout": (FlaxDropout(), {}, r"dropout keys.*mass_jax.networks.BatchNorm and Dropout"),
    "a train argument": (TrainSwitch(), {}, r"cannot be called .* __call__\(self, x, context\)"),
    "across the batch": (LooksAcross(), {}, "depends on the other examples"),
    "no output axis": (Flat(), {}, r"must map a batch \(B, ...\) to \(B, R\)"),
    "a class": (Net, {}, r"pass Net\(...\)"),
    "an unknown name": ("smallmlp", {}, "'small_mlp'"),
    "a number": (3, {}, "must be one of"),
    "no params": (pure, {}, "initial parameters: params="),
    "whole-number params": (pure, {"params": {"first": 1, "second": 2}}, "need floats"),
    "params of a module": (Net(), {"params": {}}, "leave params= out"),
    "softmax size": (Net(3), {"method": "softmax_ce"}, "has 3 outputs; .* needs 2, one per class"),
    "vib size": (Net(4), {"method": "vib"}, "needs as many .*: 2, 5, 9"),
    "too many outputs": (Net(7), {}, "must be at most 6"),
    "other dimension": (Net(), {"config": {"representation_dim": 3}}, "the network gives 2"),
    "unknown field": (Net(), {"config": {"learning_rate": 1.0}}, "did you mean"),
    "network in config": (Net(), {"config": {"network": "resnet20"}}, "follows from the arguments"),
    "dropout of ours": (Net(), {"config": {"dropout_rate": 0.5}}, "build them into your own"),
    "no labels": (Net(), {"y_train": None}, "every x needs its y"),
    "test without labels": (Net(), {"x_test": X}, "every x needs its y"),
    "classes from one": (Net(), {"y_train": Y + 1}, "no example of class 0"),
    "a gap in the classes": (
        Net(),
        {"y_train": 1000 * Y},
        "no example of class 1, but one of 1000",
    ),
    "nan": (Net(), {"x_train": np.where(X > 5, np.nan, X)}, "NaN"),
    "ood is an array": (Net(), {"ood": X}, "must be a dictionary"),
    "name and arrays": (Net(), {"x_train": "digits"}, "leave out y_train"),
    "train size": (Net(), {"config": {"train_size": 500}}, "has 120 examples"),
}


@pytest.mark.parametrize(("network", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_one_line_with_the_remedy(network, changes, message, tmp_path):
    """Oracle: the message; and nothing is left behind."""
    arguments = {"x_train": X, "y_train": Y, "workdir": tmp_path / "run", "quiet": True} | changes
    with pytest.raises((ConfigError, DataError), match=message) as refusal:
        mass_jax.fit(network, **arguments)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "results.json").exists()


def test_divergence_is_named():
    with pytest.raises(TrainingDiverged, match="is not finite"):
        mass_jax.fit(
            lambda params, x: jnp.log(params * x[:, :2]), X, Y, params=np.float32(-1.0), **QUICK
        )


def test_a_model_shows_itself_in_a_line_and_refuses_other_shapes():
    fitted = mass_jax.fit(Net(), X, Y, beta=0.0, **QUICK)
    shown = repr(fitted)
    assert "\n" not in shown
    assert all(part in shown for part in ("'mass'", "'own'", "(6,)", "num_classes=2"))
    for wrong in (X[:, :5], X[0], X[:0], np.full_like(X, np.nan)):
        with pytest.raises(DataError, match="x "):
            fitted.predict_proba(wrong)


@pytest.mark.parametrize(
    ("name", "error"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", SystemExit)]
)
def test_signals_end_a_fit_as_they_end_programs(name, error, tmp_path, monkeypatch):
    """Oracle: what Python itself makes of them, after a checkpoint from which fit goes on."""
    check = training._check_finite

    def check_and_signal(*arguments):
        os.kill(os.getpid(), getattr(signal, name))
        return check(*arguments)

    arguments = (Net(), X, Y)
    with monkeypatch.context() as patch:
        patch.setattr(training, "_check_finite", check_and_signal)
        with pytest.raises(error):
            mass_jax.fit(*arguments, workdir=tmp_path / "stopped", **QUICK)
    assert checkpoint.restore_latest(tmp_path / "stopped" / "checkpoints") is not None
    resumed = mass_jax.fit(*arguments, workdir=tmp_path / "stopped", **QUICK)
    whole = mass_jax.fit(*arguments, **QUICK)
    np.testing.assert_array_equal(resumed.predict_proba(X), whole.predict_proba(X))


def test_digests_tell_networks_apart():
    """Oracle: networks that differ by one thing each."""
    digest = lambda network, **more: own_network(network, (6,), **more).digest
    same = [Net(), Net(2), Net(2, nn.elu)]
    assert len({digest(network) for network in same}) == 1
    others = [Net(), Net(3), Net(2, nn.tanh), Net(2, lambda x: 0.1 * x), Net(2, lambda x: 0.2 * x)]
    assert len({digest(network) for network in others}) == len(others)
    functions = [pure_params(), pure_params(seed=1), pure_params(width=9)]
    digests = [digest(pure, params=params) for params in functions]
    assert len(set(digests)) == 3
    assert digests[0].split("-")[0] == digests[1].split("-")[0] != digests[2].split("-")[0]


BAD_LABELS = {
    "below zero": (Y[:16] - 1, "labels run from -1 to 0; q has 2"),
    "too large": (Y[:16] + 1, "labels run from 1 to 2; q has 2"),
    "too few": (Y[:15], r"shape \(15,\)"),
    "a column": (Y[:16, None], r"shape \(16, 1\)"),
    "words": (["a"] * 16, "integers, one per example"),
    "fractions": (Y[:16] / 2, "float64; need"),
}


@pytest.mark.parametrize(("labels", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
def test_mass_loss_refuses_labels_it_cannot_use(labels, message, key):
    q = mass_jax.INITIALISATIONS["zeros"](key, 2, 1, 3)
    with pytest.raises(ValueError, match=message):
        mass_jax.mass_loss(1.0, q, X[:16], labels, 0.1, apply_fn=lambda scale, x: scale * x[:3])


def test_mass_loss_is_the_method_s_objective(key):
    """Oracle: the loss of `methods.mass`, and `cdi_loss` as the slope in beta."""
    params = mass_jax.init(
        key,
        input_shape=(6,),
        network_options={"hidden": (8,)},
        representation_dim=3,
        num_classes=2,
        num_components=2,
    )
    x, labels = jnp.asarray(X[:16], jnp.float32), jnp.asarray(Y[:16])
    method = mass_jax.make_method(
        "mass",
        num_classes=2,
        representation_dim=3,
        beta=0.1,
        estimator="exact",
        batch_stats="running",
    )
    expected = method.loss(params, x, labels, networks.EVALUATION).objective()
    value, terms = jax.jit(mass_jax.mass_loss)(params, None, x, labels, 0.1)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert [term.shape for term in terms] == [(16,)] * 3
    f = lambda model, v: model.representation(v)
    by_function, _ = mass_jax.mass_loss(params, params.q, x, labels, 0.1, apply_fn=f)
    np.testing.assert_allclose(by_function, expected, rtol=1e-5)
    without, _ = mass_jax.mass_loss(params, None, x, labels, 0.0)
    np.testing.assert_allclose((value - without) / 0.1, mass_jax.cdi_loss(params, x), rtol=1e-3)
    loss = lambda params, q: mass_jax.mass_loss(params, q, x, labels, 0.1)[0]
    by_params, by_q = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, params.q)
    assert float(optax.tree.norm(by_params.network)) > 0
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in by_q)
    with pytest.raises(ValueError, match="pass q="):
        mass_jax.mass_loss({}, None, x, labels, 0.1, apply_fn=lambda p, v: v)
