"""`MassClassifier`: scikit-learn's own checks, and what they do not look at."""

import pickle

import flax.linen as nn
import jax
import numpy as np
import pytest
from sklearn.datasets import load_iris, make_blobs
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks

import mass_jax
from mass_jax import MassClassifier

# Checks that cannot pass, each with its reason. There are none: what scikit-learn skips here
# (pandas and array-API inputs) it skips because those packages are not installed.
EXPECTED_FAILURES: dict[str, str] = {}

# The checks are of the interface: beta=0 leaves out the Jacobian, the costly term to compile.
QUICK = MassClassifier(hidden=(16,), beta=0.0, steps=60, learning_rate=2e-2)


@pytest.fixture(autouse=True, scope="module")
def keep_compiled_programs():
    """Many fits of the same few shapes: even programs that compile fast are worth keeping."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@parametrize_with_checks([QUICK], expected_failed_checks=lambda estimator: EXPECTED_FAILURES)
def test_scikit_learns_own_checks(estimator, check):
    """Oracle: scikit-learn's estimator checks."""
    check(estimator)


def test_any_labels_scores_and_pickles():
    """Oracles: the labels given; blobs a linear rule separates; the estimator before pickling."""
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = MassClassifier(hidden=(16,), steps=150, learning_rate=1e-2, random_state=0)
    model.fit(x, names)
    assert model.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert model.score(x, names) > 0.93
    np.testing.assert_array_equal(
        model.predict(x), model.classes_[model.predict_proba(x).argmax(axis=1)]
    )
    far = x + 30.0
    scores = np.concatenate([model.score_samples(x), model.score_samples(far)])
    inside = np.repeat([1, 0], [len(x), len(far)])
    assert roc_auc_score(inside, scores) > 0.99  # higher = more in-distribution
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))
    params = again.fitted_.params
    assert np.isfinite(mass_jax.cdi_loss(params, model.fitted_.normalise(x)))


def test_own_network_and_one_class():
    x, y = make_blobs(60, centers=2, n_features=3, random_state=0)
    model = MassClassifier(nn.Dense(2), beta=0.0, steps=60, learning_rate=5e-2, random_state=0)
    assert model.fit(x, y).fitted_.representation(x).shape == (60, 2)
    with pytest.raises(ValueError, match="at least 2 classes"):
        model.fit(x, np.zeros(60, int))
