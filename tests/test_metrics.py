"""Metrics of predictions and detectors.

Every test names its oracle: scikit-learn, a case worked by hand, closed form, or invariance.
"""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    log_loss,
    roc_auc_score,
    roc_curve,
)

from mass_jax import metrics

seeds = st.integers(0, 2**31 - 1)


def random_predictions(seed=0, examples=60, classes=4, decimals=None):
    """Log-probabilities ``[N, K]`` and labels; few decimals make many ties in confidence."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), examples)
    if decimals is not None:
        probs = np.round(probs, decimals) + 10.0**-decimals
        probs /= probs.sum(axis=1, keepdims=True)
    return np.log(probs), rng.integers(classes, size=examples)


def random_scores(seed=0, num_in=50, num_out=30, decimals=None):
    """Overlapping scores of both kinds; few decimals make many ties."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(0.0, 1.0, num_in), rng.normal(0.7, 1.5, num_out)
    return scores if decimals is None else tuple(np.round(s, decimals) for s in scores)


# --- classification_metrics --------------------------------------------------------


@pytest.mark.parametrize("decimals", [None, 1])
def test_proper_scores_agree_with_scikit_learn(decimals):
    """Oracle: scikit-learn; Brier and entropy written out example by example."""
    log_probs, labels = random_predictions(decimals=decimals)
    probs = np.exp(log_probs)
    actual = metrics.classification_metrics(log_probs, labels)
    squares = [
        sum((p - (k == label)) ** 2 for k, p in enumerate(row))
        for row, label in zip(probs, labels, strict=True)
    ]
    expected = {
        "accuracy": accuracy_score(labels, probs.argmax(1)),
        "nll": log_loss(labels, probs, labels=range(4)),
        "brier_sum": np.mean(squares),
        "brier": np.mean(squares) / 4,
        "entropy": np.mean([-sum(p * np.log(p) for p in row) for row in probs]),
    }
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_all_metrics_worked_by_hand():
    """Oracle: by hand; two bins hold (0.9, 0.9), right and wrong, and 0.6, right."""
    log_probs = np.log([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    actual = metrics.classification_metrics(log_probs, [0, 1, 1])
    assert actual == pytest.approx(
        {
            "accuracy": 2 / 3,
            "nll": -np.log(0.9 * 0.1 * 0.6) / 3,
            "brier": (0.01 + 0.81 + 0.16) / 3,
            "brier_sum": 2 * (0.01 + 0.81 + 0.16) / 3,
            "entropy": -(2 * (0.9 * np.log(0.9) + 0.1 * np.log(0.1)) + 0.4 * np.log(0.4)
                         + 0.6 * np.log(0.6)) / 3,
            "ece": (abs(1 - 1.8) + abs(1 - 0.6)) / 3,
            # Fifteen bins of at most one example; the tied ones are half right each.
            "ece_adaptive": (0.4 + 0.4 + 0.4) / 3,
            "aurc": (0.5 + 0.5 + 1 / 3) / 3,
            "e_aurc": (0.5 + 0.5 + 1 / 3) / 3 - (0 + 0 + 1 / 3) / 3,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "accuracy", "nll", "brier_sum", "ece"),
    [([0, 1], 1.0, 0.0, 0.0, 0.0), ([0, 0], 0.5, np.inf, 1.0, 0.5)],
)
def test_certain_predictions(labels, accuracy, nll, brier_sum, ece):
    """Oracle: by hand; ``0 log 0 = 0`` in the entropy, infinite loss when certain and wrong."""
    with np.errstate(divide="ignore"):
        log_probs = np.log([[1.0, 0.0], [0.0, 1.0]])
    actual = metrics.classification_metrics(log_probs, labels)
    expected = {"accuracy": accuracy, "nll": nll, "brier_sum": brier_sum, "ece": ece, "entropy": 0}
    assert {name: actual[name] for name in expected} == expected
    assert not any(np.isnan(value) for value in actual.values())


def test_entropy_extremes():
    """Oracle: closed form, ``log K`` for uniform and zero for certain rows."""
    rows = np.stack([np.full(4, -np.log(4)), [0.0, -np.inf, -np.inf, -np.inf]])
    np.testing.assert_allclose(metrics.entropies(rows), [np.log(4), 0.0], atol=1e-15)


@pytest.mark.parametrize(
    ("log_probs", "labels", "message"),
    [
        (np.zeros((2, 3)), [0], r"\(2, 3\) and labels \(1,\)"),
        (np.zeros(3), [0, 1, 2], "need"),
        (np.zeros((2, 3, 1)), [0, 1], "need"),
        (np.zeros((2, 3)), [[0], [1]], "need"),
        (np.zeros((0, 3)), [], "N > 0"),
        ([[0.0, np.nan]], [0], "NaN"),
    ],
)
def test_bad_predictions_are_refused(log_probs, labels, message):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=message):
        metrics.classification_metrics(log_probs, labels)


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_outside_the_classes_are_refused(label):
    """Oracle: the documented contract, integers in ``[0, K)``: none may be scored silently."""
    with pytest.raises((ValueError, IndexError)):
        metrics.classification_metrics(np.log([[0.9, 0.1]]), [label])


@hypothesis.given(seed=seeds, decimals=st.sampled_from([1, None]))
def test_order_of_examples_is_irrelevant(seed, decimals):
    """Oracle: invariance, with and without ties."""
    log_probs, labels = random_predictions(seed, decimals=decimals)
    order = np.random.default_rng(seed + 1).permutation(len(labels))
    expected = metrics.classification_metrics(log_probs, labels)
    assert metrics.classification_metrics(log_probs[order], labels[order]) == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


# --- Calibration -------------------------------------------------------------------


def loop_calibration_error(confidence, correct, num_bins):
    """Expected calibration error bin by bin, straight from its definition."""
    total = 0.0
    for b in range(num_bins):
        upper = np.inf if b == num_bins - 1 else (b + 1) / num_bins
        inside = (confidence >= b / num_bins) & (confidence < upper)
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            total += inside.mean() * gap
    return total


@pytest.mark.parametrize("num_bins", [1, 2, 15])
def test_calibration_error_by_definition(num_bins):
    """Oracle: other implementation, a loop over the bins of the definition."""
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.0, 1.0, 200)
    correct = rng.uniform(size=200) < confidence**2
    actual = metrics.expected_calibration_error(confidence, correct, num_bins)
    assert actual == pytest.approx(loop_calibration_error(confidence, correct, num_bins))
    assert actual > 0.05


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "expected"),
    [
        ([1.0, 0.75], [True, False], 2, 0.375),  # 1.0 shares the last bin: |1 - 1.75| / 2
        ([1.0, 1.0], [True, False], 15, 0.5),
        ([0.5, 0.25], [True, False], 2, 0.375),  # 0.5 opens the second bin: (0.5 + 0.25) / 2
        ([0.75, 0.25], [False, True], 1, 0.0),  # one bin: the gaps cancel
        ([0.75, 0.25], [False, True], 2, 0.75),
    ],
)
def test_calibration_error_by_hand(confidence, correct, num_bins, expected):
    """Oracle: by hand."""
    confidence, correct = np.asarray(confidence), np.asarray(correct)
    actual = metrics.expected_calibration_error(confidence, correct, num_bins)
    assert actual == pytest.approx(expected)


def test_reliability_bins_by_hand():
    """Oracle: by hand; bin edges belong to the upper bin, 1.0 to the last."""
    bins = metrics.reliability_bins(
        np.asarray([0.0, 0.25, 0.5, 0.75, 1.0]), np.asarray([1, 0, 1, 1, 0], bool), 4
    )
    np.testing.assert_array_equal(bins["count"], [1, 1, 1, 2])
    np.testing.assert_array_equal(bins["confidence"], [0.0, 0.25, 0.5, 1.75])
    np.testing.assert_array_equal(bins["correct"], [1, 0, 1, 1])


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "expected"),
    [
        # Pairs by rising confidence: |1 - 0.75| and |1 - 1.5|, over four.
        ([0.25, 0.5, 0.75, 0.75], [1, 0, 1, 0], 2, 0.1875),
        # Five in two bins are three and two: |2 - 1.5| and |0 - 1.75|, over five.
        ([0.25, 0.5, 0.75, 0.75, 1.0], [1, 1, 0, 0, 0], 2, 0.45),
        # A tie across the edge is shared: half right each, (0.25 + 0.25) / 2.
        ([0.75, 0.75], [1, 0], 2, 0.25),
        ([0.75, 0.25], [0, 1], 1, 0.0),
    ],
)
def test_adaptive_calibration_error_by_hand(confidence, correct, num_bins, expected):
    """Oracle: by hand; bins of equal mass."""
    confidence, correct = np.asarray(confidence), np.asarray(correct, bool)
    actual = metrics.adaptive_calibration_error(confidence, correct, num_bins)
    assert actual == pytest.approx(expected)


# --- Selective risk ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "correct", "aurc", "e_aurc"),
    [
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0], (1 / 3 + 1 / 2) / 4, 0.0),  # perfect ranking
        ([0.6, 0.7, 0.8, 0.9], [1, 1, 0, 0], (1 + 1 + 2 / 3 + 1 / 2) / 4, (7 / 3) / 4),
        ([0.5, 0.5, 0.5, 0.5], [1, 0, 1, 1], 0.25, 0.25 - 0.25 / 4),  # constant: the error rate
        ([0.9, 0.8], [1, 1], 0.0, 0.0),
        ([0.9, 0.8], [0, 0], 1.0, 0.0),
        ([0.9, 0.5, 0.5], [1, 1, 0], (0 + 0.25 + 1 / 3) / 3, 0.25 / 3),  # a tie is shared
    ],
)
def test_selective_risk_by_hand(confidence, correct, aurc, e_aurc):
    """Oracle: by hand, cumulative error rates by falling confidence."""
    actual = metrics.selective_risk(np.asarray(confidence), np.asarray(correct, bool))
    assert actual == pytest.approx({"aurc": aurc, "e_aurc": e_aurc}, abs=1e-12)


def test_risk_coverage_curve_by_hand():
    """Oracle: by hand; the last point is the error rate of all examples."""
    coverage, risk = metrics.risk_coverage_curve(
        np.asarray([0.5, 0.9, 0.7, 0.8]), np.asarray([1, 0, 0, 1], bool)
    )
    np.testing.assert_allclose(coverage, [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(risk, [1.0, 0.5, 2 / 3, 0.5])


def test_shared_ties_are_the_mean_over_orders():
    """Oracle: Monte Carlo over 4,000 random orders of the tied examples, 4 standard errors."""
    rng = np.random.default_rng(0)
    confidence = rng.integers(3, size=12) / 4
    correct = rng.uniform(size=12) < 0.6
    jittered = [
        metrics.selective_risk(confidence + rng.uniform(0, 0.01, 12), correct)["aurc"]
        for _ in range(4000)
    ]
    error = np.std(jittered) / np.sqrt(len(jittered))
    assert error > 0
    actual = metrics.selective_risk(confidence, correct)["aurc"]
    assert abs(actual - np.mean(jittered)) < 4 * error


# --- detection_metrics -------------------------------------------------------------


def scikit_learn_fpr(positive, negative, wanted):
    """False positive rate at the first threshold, falling, that reaches the wanted recall."""
    is_positive = np.r_[np.ones(len(positive)), np.zeros(len(negative))]
    fpr, tpr, _ = roc_curve(is_positive, np.r_[positive, negative], drop_intermediate=False)
    return fpr[np.argmax(tpr >= wanted)]


@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize(("num_in", "num_out"), [(50, 30), (1, 40), (95, 5)])
def test_detection_agrees_with_scikit_learn(decimals, num_in, num_out):
    """Oracle: scikit-learn, from no ties to mostly ties, balanced or not."""
    scores_in, scores_out = random_scores(1, num_in, num_out, decimals)
    scores = np.r_[scores_in, scores_out]
    is_out = np.r_[np.zeros(num_in), np.ones(num_out)]
    expected = {
        "auroc": roc_auc_score(is_out, scores),
        "apr_out": average_precision_score(is_out, scores),
        "apr_in": average_precision_score(1 - is_out, -scores),
        "fpr95_out_positive": scikit_learn_fpr(scores_out, scores_in, 0.95),
        "fpr95_in_positive": scikit_learn_fpr(-scores_in, -scores_out, 0.95),
    }
    assert metrics.detection_metrics(scores_in, scores_out) == pytest.approx(expected, rel=1e-9)


CASES_BY_HAND = {
    "perfect": (range(20), range(20, 40), (1.0, 1.0, 1.0, 0.0, 0.0)),
    "constant": ([3.0] * 19, [3.0], (0.5, 1 / 20, 19 / 20, 1.0, 1.0)),
    "reversed": ([2.0, 2.0], [1.0, 1.0], (0.0, 0.5, 0.5, 1.0, 1.0)),
    # Pairs won by the out-score: 1 + 2 of 4. Falling: out, in, out, in.
    "mixed": ([0.0, 2.0], [1.0, 3.0], (0.75, (1 + 2 / 3) / 2, (1 + 2 / 3) / 2, 0.5, 0.5)),
    "infinite": ([0.0, 1.0], [np.inf, 2.0], (1.0, 1.0, 1.0, 0.0, 0.0)),
    # 19 of 20 out-scores beat every in-score: recall is 0.95 exactly, no false positive. The other
    # way the last out-score is below both in-scores, and both are needed for recall 0.95.
    "exactly 95%": (
        [10.0, 11.0],
        [*range(20, 39), 0.0],
        (0.95, 0.95 + 0.05 * 20 / 22, (1 / 2 + 2 / 3) / 2, 0.0, 0.05),
    ),
}


@pytest.mark.parametrize("name", CASES_BY_HAND)
def test_detection_by_hand(name):
    """Oracle: by hand; a constant detector has AUROC 1/2 and the prevalence as precision."""
    scores_in, scores_out, expected = CASES_BY_HAND[name]
    names = ("auroc", "apr_out", "apr_in", "fpr95_out_positive", "fpr95_in_positive")
    actual = metrics.detection_metrics(list(scores_in), list(scores_out))
    assert actual == pytest.approx(dict(zip(names, expected, strict=True)), abs=1e-12)


@pytest.mark.parametrize(
    ("positive_side", "scores_in", "scores_out", "expected"),
    [
        # To flag 95% of the out-scores the threshold falls to 0: all in-scores are flagged.
        ("out", [1.0, 2.0], [*range(5, 14), 0.0], 1.0),
        # To accept 95% of the in-scores the threshold rises to 9: 4 of 8 out-scores accepted.
        ("in", [*range(9), 9.0], [5.5, 6.5, 7.5, 8.5, 20, 21, 22, 23], 0.5),
    ],
)
def test_the_two_false_positive_rates_differ(positive_side, scores_in, scores_out, expected):
    """Oracle: by hand; the positive class is the one in the name."""
    actual = metrics.detection_metrics(scores_in, scores_out)
    assert actual[f"fpr95_{positive_side}_positive"] == pytest.approx(expected)
    other = {"in": "out", "out": "in"}[positive_side]
    assert actual[f"fpr95_{other}_positive"] != pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores_in", "scores_out", "message"),
    [
        ([], [1.0], "both sides"),
        ([1.0], [], "both sides"),
        ([np.nan, 1.0], [1.0], "NaN"),
        ([1.0], [np.nan], "NaN"),
        ([[1.0], [2.0]], [[1.0]], None),
    ],
)
def test_bad_scores_are_refused(scores_in, scores_out, message):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=message):
        metrics.detection_metrics(scores_in, scores_out)


@hypothesis.given(seed=seeds, decimals=st.sampled_from([0, 1, None]))
def test_order_of_scores_is_irrelevant(seed, decimals):
    """Oracle: invariance to order and to any increasing transformation of the score."""
    rng = np.random.default_rng(seed + 1)
    scores = random_scores(seed, decimals=decimals)
    expected = metrics.detection_metrics(*scores)
    shuffled = metrics.detection_metrics(*(rng.permutation(s) for s in scores))
    assert shuffled == pytest.approx(expected, rel=1e-9)
    assert metrics.detection_metrics(*(2 * s + 1 for s in scores)) == pytest.approx(expected)


@hypothesis.given(seed=seeds, decimals=st.sampled_from([0, None]))
def test_exchanging_the_sides_exchanges_the_names(seed, decimals):
    """Oracle: invariance, in- and out-of-distribution exchanged and scores negated."""
    scores_in, scores_out = random_scores(seed, decimals=decimals)
    actual = metrics.detection_metrics(-scores_out, -scores_in)
    expected = metrics.detection_metrics(scores_in, scores_out)
    exchanged = {
        "auroc": expected["auroc"],
        "apr_out": expected["apr_in"],
        "apr_in": expected["apr_out"],
        "fpr95_out_positive": expected["fpr95_in_positive"],
        "fpr95_in_positive": expected["fpr95_out_positive"],
    }
    assert actual == pytest.approx(exchanged, rel=1e-9)
