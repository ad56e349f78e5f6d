"""The estimator study: its statistics against closed forms, its commands end to end."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import estimator_study as study
from experiments import gradient_noise as noise
from experiments import study_report
from mass_jax.config import apply_overrides, default_config, resolve
from mass_jax.data import load_dataset
from mass_jax.experiment import make_experiment, method_of, network_builder
from mass_jax.networks import EVALUATION

BATCH = 12


class Quadratic(nn.Module):
    """f(x) = a x + b x^2 / 2 on numbers: log J_f = log |a + b x|, gradients by hand."""

    output_dim: int = 1

    @nn.compact
    def __call__(self, x, context=EVALUATION):
        a = self.param("a", nn.initializers.constant(2.0), ())
        b = self.param("b", nn.initializers.constant(0.5), ())
        return a * x + b * jnp.square(x) / 2


@pytest.fixture
def quadratic():
    """Parameters, a batch, the per-example gradients [B, 2] and a maker of estimators."""
    changes = {"batch_size": str(BATCH), "representation_dim": "1", "beta": "0.5"}
    config = resolve(apply_overrides(default_config(), changes))
    params = method_of(config, 2).init(jax.random.key(0), Quadratic, (1,))
    x = np.linspace(-1.0, 1.0, BATCH)
    slope = 2.0 + 0.5 * x
    by_hand = -np.stack([1 / slope, x / slope], axis=1)  # of -log (a + b x)
    batch = jnp.asarray(x)[:, None], jnp.asarray(np.arange(BATCH) % 2)
    return config, params, batch, by_hand


def cycles(config, params, batch, estimator, count, sub_batch=None):
    chosen = noise.with_estimator(config, estimator, sub_batch)
    gradient = noise.jacobian_gradient(chosen, 2)
    every = noise.JACOBIAN_ESTIMATORS[estimator].every
    return study._on_one_batch(gradient, params, batch, jax.random.key(1), count, every)


def without_replacement(by_hand, n):
    """Trace of the covariance of the mean of n of B vectors, over the squared norm of the mean."""
    truth = by_hand.mean(axis=0)
    spread = np.sum(np.square(by_hand - truth)) / (len(by_hand) - 1)
    return spread / n * (1 - n / len(by_hand)) / (truth @ truth)


def test_exact_gradient_is_the_mean_by_hand(tolerance, quadratic):
    """Oracle: the derivative of -log (a + b x), and no variance given the batch."""
    config, params, batch, by_hand = quadratic
    exact = noise.exact_gradient(config, 2)
    np.testing.assert_allclose(
        exact(params, *batch, jax.random.key(0), 0), by_hand.mean(axis=0), rtol=tolerance.exact
    )
    seen = noise.measure(cycles(config, params, batch, "exact", 3), by_hand.mean(axis=0))
    assert seen.variance <= tolerance.exact**2
    assert abs(seen.bias) <= tolerance.exact


@pytest.mark.parametrize("n", [1, 4, 11])
def test_sub_batches_follow_sampling_without_replacement(quadratic, n):
    """Oracle: the closed form of finite populations; five standard errors."""
    config, params, batch, by_hand = quadratic
    drawn = cycles(config, params, batch, "sub_batch", 400, sub_batch=n)
    seen = noise.measure(drawn, by_hand.mean(axis=0))
    expected = without_replacement(by_hand, n)
    assert abs(seen.variance - expected) <= 5 * seen.variance_error
    assert seen.variance_error < 0.2 * expected
    assert abs(seen.bias) <= 5 * seen.bias_error
    assert seen.distance <= 3 * seen.distance_by_chance
    assert seen.long_run_variance == pytest.approx(seen.variance)


def test_few_is_the_sub_batch_of_its_size(quadratic):
    """Oracle: the same draws with the number given by hand."""
    config, params, batch, by_hand = quadratic
    truth = by_hand.mean(axis=0)
    n = noise.JACOBIAN_ESTIMATORS["few"].num_examples(BATCH, 1)
    few = noise.measure(cycles(config, params, batch, "few", 20), truth)
    assert few == noise.measure(cycles(config, params, batch, "sub_batch", 20, n), truth)


def test_lazy_pays_by_step_and_not_in_the_long_run(quadratic):
    """Oracle: k V + (k - 1) |g|^2 of one step and k V in the long run, V that of sub_batch."""
    config, params, batch, by_hand = quadratic
    n, every = 4, noise.JACOBIAN_ESTIMATORS["lazy"].every
    drawn = cycles(config, params, batch, "lazy", 300, sub_batch=n)
    seen = noise.measure(drawn, by_hand.mean(axis=0))
    expected = without_replacement(by_hand, n)
    assert abs(seen.bias) <= 5 * seen.bias_error
    assert seen.long_run_variance == pytest.approx(every * expected, rel=0.3)
    assert seen.variance == pytest.approx(every * expected + every - 1, rel=0.05)


@pytest.mark.parametrize("step", [0, 7, 8])
def test_lazy_is_drawn_as_it_is_trained(quadratic, step):
    """Oracle: the gradient of the loss with its conditional on the step."""
    config, params, batch, _ = quadratic
    lazy = noise.with_estimator(config, "lazy")
    trained = noise._gradient(lazy, 2, lambda name: name == "jacobian", config.beta)
    arguments = (params, *batch, jax.random.key(0), step)
    np.testing.assert_allclose(
        noise.jacobian_gradient(lazy, 2)(*arguments), trained(*arguments), rtol=1e-5
    )


def test_a_biased_gradient_is_found_out():
    """Oracle: normal draws around 1.2 g, with known variance."""
    generator = np.random.default_rng(0)
    truth = np.full(50, 2.0)
    draws = 1.2 * truth + generator.normal(size=(500, 50))
    seen = noise.measure([[draw] for draw in draws], truth)
    assert seen.bias == pytest.approx(0.2, abs=5 * seen.bias_error)
    assert seen.bias_error == pytest.approx(1 / np.linalg.norm(truth) / 500**0.5, rel=0.2)
    assert seen.distance == pytest.approx(0.2, rel=0.05)
    assert seen.variance == pytest.approx(50 / (truth @ truth), rel=0.1)
    assert seen.distance_by_chance == pytest.approx((seen.variance / 500) ** 0.5)


def test_pairs_take_the_batch_out():
    """Oracle: draws that differ from their own truth by a constant have only bias."""
    truths = np.random.default_rng(0).normal(size=(20, 5)) + 3.0
    mean = truths.mean(axis=0)
    seen = noise.paired([[truth + 0.1 * mean] for truth in truths], truths, mean)
    assert seen.bias == pytest.approx(0.1)
    assert seen.variance == pytest.approx(0.0, abs=1e-12)


@pytest.fixture
def digits_study(monkeypatch, tmp_path):
    """The command on the bundled digits in place of CIFAR-10, tiny."""
    changes = {"batch_size": "16", "steps_per_dispatch": "8", "representation_dim": "5"}
    config = resolve(apply_overrides(default_config(), changes))
    monkeypatch.setattr(study, "load_config", lambda path: config)
    monkeypatch.setattr(study, "_TERM_EXAMPLES", 20)
    return [
        f"--json={tmp_path / 'study.json'}",
        f"--workdir={tmp_path}",
        "--train_size=200",
        "--steps=8",
    ]


def test_gradients_end_to_end(digits_study, tmp_path, capsys, monkeypatch):
    """Oracle: what must be so: exact means exact, the shares are shares, costs are ordered.

    Some estimators stand for all: each takes seconds to compile.
    """
    some = ["exact", "sub_batch", "gram", "lazy"]
    monkeypatch.setattr(noise, "estimators_of", lambda params: some)
    assert study.main([*digits_study, "--quick", "--draws=3", "--batches=2"]) == 0
    made = json.loads((tmp_path / "study.json").read_text())["gradients"]["small_mlp"]
    assert "at equal cost" in capsys.readouterr().out
    assert [seen["step"] for seen in made["states"].values()] == [0, 8]
    assert made["flops"]["none"] < made["flops"]["lazy"] < made["flops"]["sub_batch"]
    assert made["flops"]["sub_batch"] < made["flops"]["exact"]
    for seen in made["states"].values():
        table = seen["estimators"]
        assert table.keys() == set(some)
        for name in ("exact", "gram"):
            assert table[name]["one_batch"]["variance"] < 1e-6
            assert table[name]["against_own_batch"]["distance"] < 1e-3
            assert table[name]["total_noise_over_exact"] == pytest.approx(1.0, abs=1e-3)
        assert table["sub_batch"]["one_batch"]["variance"] > 0.01
        assert all(0 < row["noise_share"] < 1 for row in table.values())
    assert (tmp_path / "study.png").stat().st_size > 10_000
    assert str(tmp_path) not in (tmp_path / "study.json").read_text()


def test_training_end_to_end_and_again(digits_study, tmp_path, capsys, monkeypatch):
    """Oracle: differences by hand from the runs; the second time nothing is trained."""
    monkeypatch.setattr(study, "CANDIDATES", ("few",))
    arguments = [*digits_study, "--part=training", "--seeds=0,1"]
    assert study.main(arguments) == 0
    text = (tmp_path / "study.json").read_text()
    made = json.loads(text)["training"]["small_mlp"]
    assert made["steps"] == 8
    assert "few - sub_batch" in capsys.readouterr().out
    pairs = [
        made["runs"]["few"][seed]["nll"] - made["runs"]["sub_batch"][seed]["nll"] for seed in "01"
    ]
    seen = made["differences"]["few"]["nll"]
    assert seen["mean"] == pytest.approx(np.mean(pairs))
    assert seen["error"] == pytest.approx(abs(pairs[0] - pairs[1]) / 2)
    rows = len(list(study_report._training_rows("small_mlp", made)))
    assert rows == len(study.CANDIDATES)
    assert study.main(arguments) == 0
    assert (tmp_path / "study.json").read_text() == text


def test_a_run_of_something_else_is_refused(digits_study, tmp_path, capsys):
    """Oracle: one line that names the option."""
    config = study.study_config(study._parser().parse_args(digits_study), "few", 0, 8)
    config = resolve(apply_overrides(config, {"method": "softmax_ce", "beta": "0"}))
    place = study.run(config, load_dataset("digits"), tmp_path)
    assert study.main([*digits_study, f"--trained={place}"]) == 2
    assert capsys.readouterr().err.startswith("error: --trained=")


def test_every_registered_estimator_is_studied():
    """Oracle: the registry; "auto" draws what "sub_batch" draws, "gram" needs a dense layer."""
    registered = set(noise.JACOBIAN_ESTIMATORS) - {"auto"}
    for network, expected in (("small_mlp", registered), ("resnet20", registered - {"gram"})):
        config = resolve(apply_overrides(default_config(), {"network": network}))
        build, method = network_builder(config), method_of(config, 3)
        initial = lambda key, build=build, method=method: method.init(key, build, (8, 8, 1))
        params = jax.eval_shape(initial, jax.random.key(0))
        assert set(noise.estimators_of(params)) == expected


def test_equal_cost_is_variance_times_cost():
    """Oracle: by hand: twice the variance at half the cost is as good."""
    row = lambda variance: {"random_batches": {"long_run_variance": variance}}
    made = {
        "flops": {"none": 10.0, "sub_batch": 14.0, "few": 12.0, "probe": 14.0},
        "states": {
            "init": {"estimators": {"sub_batch": row(1.0), "few": row(2.0), "probe": row(3.0)}}
        },
    }
    assert study_report.equal_cost(made, "init", "few") == 1.0
    assert study_report.equal_cost(made, "init", "probe") == 3.0


def test_shapes_of_batches():
    """Oracle: rows of the training subset only, no row twice in a batch."""
    config = resolve(apply_overrides(default_config(), {"batch_size": "16", "train_size": "20"}))
    dataset = load_dataset("digits")
    experiment = make_experiment(config, dataset)
    x, labels = study._batch(config, dataset, experiment, 3)
    assert x.shape == (16, 8, 8, 1)
    assert len(np.unique(np.asarray(x).reshape(16, -1), axis=0)) == 16
    allowed = dataset.train.labels[experiment.subset.train]
    assert set(np.asarray(labels).tolist()) <= set(allowed.tolist())
