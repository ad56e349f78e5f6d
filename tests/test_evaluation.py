"""Evaluation of whole splits: no dependence on batch size, fitted density of SoftmaxCE."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import mass_jax
from mass_jax.config import apply_overrides, default_config, resolve
from mass_jax.data import load_dataset
from mass_jax.data import normalise as normalised
from mass_jax.evaluation import evaluate_run, make_log_jacobian, make_predictor, validate
from mass_jax.experiment import make_experiment

METHODS = {
    "mass": {},
    "vib": {"method": "vib"},
    "softmax_ce": {"method": "softmax_ce", "beta": "0", "density_components": "2"},
}


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("digits")


@pytest.fixture(scope="module", params=METHODS)
def case(request, dataset):
    config = resolve(apply_overrides(default_config(), METHODS[request.param]))
    experiment = make_experiment(config, dataset)
    return config, experiment, experiment.initial_state().params


def test_predictions_do_not_depend_on_the_batch_size(case, dataset):
    """Oracle: invariance; 343 examples in batches that do and do not divide them."""
    _, experiment, params = case
    seen = [
        make_predictor(experiment.method, experiment.keys.evaluation, size)(
            params, dataset.test.images, dataset.normalisation
        )
        for size in (343, 100, 7, 1000)
    ]
    for other in seen[1:]:
        for ours, theirs in zip(jax.tree.leaves(seen[0]), jax.tree.leaves(other), strict=True):
            assert ours.shape[0] == 343
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_log_jacobians_over_a_split(dataset):
    """Oracle: the Jacobian of one example after the other; 70 examples are more than one batch."""
    config = resolve(apply_overrides(default_config(), {"network": "small_mlp"}))
    params = make_experiment(config, dataset).initial_state().params
    images = dataset.test.images[:70]
    actual = make_log_jacobian(1000)(params, images, dataset.normalisation)
    x = normalised(images, dataset.normalisation)
    f = lambda image: params.representation(image[None])[0]
    np.testing.assert_allclose(actual, mass_jax.half_log_det_jjt(f, x), rtol=1e-4)


def test_log_jacobian_of_a_fitted_linear_map():
    """Oracle: 1/2 log det(W^T W), at every point."""
    x = np.random.default_rng(0).normal(size=(80, 3))
    labels = (x[:, 0] > 0).astype(int)
    fitted = mass_jax.fit(nn.Dense(2), x, labels, steps=1, quiet=True)
    kernel = np.asarray(fitted.params.network["kernel"], np.float64)
    expected = 0.5 * np.linalg.slogdet(kernel.T @ kernel)[1]
    np.testing.assert_allclose(fitted.log_jacobian(x), np.full(80, expected), rtol=1e-4)


def test_results_name_every_detector(case, dataset):
    """Oracle: the table of conventions, which detectors each method has."""
    config, experiment, params = case
    results = evaluate_run(config, experiment, dataset, params)
    detectors = {"mass": "max_log_q", "softmax_ce": "max_log_q", "vib": "rate"}
    assert results["ood"]["digits_8_9"].keys() == {"entropy", detectors[config.method]}
    assert 0 <= results["accuracy"] <= 1
    for scores in results["ood"]["digits_8_9"].values():
        assert {"auroc", "apr_in", "apr_out", "fpr95_in_positive"} <= scores.keys()


def test_validation_uses_the_validation_rows_only(case, dataset):
    """Oracle: accuracy by hand on exactly those rows."""
    config, experiment, params = case
    predict = make_predictor(experiment.method, experiment.keys.evaluation, 100)
    plain = validate(config, experiment, dataset, predict, params)
    assert plain["validation_accuracy"] == pytest.approx(
        np.mean(
            predict(
                params,
                dataset.train.images[experiment.subset.validation],
                dataset.normalisation,
            ).log_probs.argmax(-1)
            == dataset.train.labels[experiment.subset.validation]
        )
    )


def test_no_validation_rows_no_validation(dataset):
    config = resolve(apply_overrides(default_config(), {"data.validation_size": "0"}))
    experiment = make_experiment(config, dataset)
    assert validate(config, experiment, dataset, lambda *_: None, None) == {}


def test_initialisation_by_maximum_likelihood(dataset):
    """Oracle: the density of the training outputs, far above that of the random q."""
    from mass_jax import cdi_loss
    from mass_jax.data import normalise

    losses = {}
    for name in ("mle", "random"):
        config = resolve(apply_overrides(default_config(), {"initialisation": name}))
        params = make_experiment(config, dataset).initial_state().params
        x = normalise(dataset.train.images[:200], dataset.normalisation)
        losses[name] = float(cdi_loss(params, x, sub_batch=4))
    assert losses["mle"] < losses["random"] - 10
