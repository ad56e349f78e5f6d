"""Metrics of predictions and of out-of-distribution detectors.

NumPy on the host in float64, over whole splits: no metric depends on a batch
size. Ties never depend on the order of the examples. Scores are
out-of-distribution scores everywhere: higher = more out-of-distribution.
"""

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "adaptive_calibration_error",
    "average_precision",
    "classification_metrics",
    "detection_metrics",
    "entropies",
    "expected_calibration_error",
    "reliability_bins",
    "risk_coverage_curve",
    "roc_curve",
    "selective_risk",
]

NUM_CALIBRATION_BINS = 15


def classification_metrics(log_probs: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Accuracy, proper scores, calibration and selective risk.

    Args:
      log_probs: ``[N, K]``, natural logarithms.
      labels: ``[N]`` integers in ``[0, K)``.

    Returns:
      ``accuracy`` (fraction); ``nll`` (nats); ``brier`` (mean over examples *and*
      classes, the paper's scale); ``brier_sum`` (sum over classes); ``entropy``
      (mean predictive entropy, nats); ``ece`` and ``ece_adaptive``; ``aurc`` and
      ``e_aurc``.

    Example:
      >>> import numpy as np
      >>> scores = classification_metrics(np.log([[0.9, 0.1], [0.4, 0.6]]), [0, 0])
      >>> round(scores["accuracy"], 3), round(scores["brier"], 3)
      (0.5, 0.185)
    """
    log_probs = np.asarray(log_probs, np.float64)
    labels = np.asarray(labels)
    if log_probs.ndim != 2 or labels.shape != log_probs.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"log_probs {log_probs.shape} and labels {labels.shape}: need (N, K) and (N,), N > 0"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels have type {labels.dtype}; need integers")
    if labels.min() < 0 or labels.max() >= log_probs.shape[1]:
        raise ValueError(
            f"labels run from {labels.min()} to {labels.max()}; need 0 to {log_probs.shape[1] - 1}"
        )
    if np.isnan(log_probs).any():
        raise ValueError("log_probs hold NaN")
    probs = np.exp(log_probs)
    confidence = probs.max(axis=-1)
    correct = log_probs.argmax(axis=-1) == labels
    brier_sum = float(np.mean(np.sum((probs - np.eye(probs.shape[-1])[labels]) ** 2, axis=-1)))
    return {
        "accuracy": float(np.mean(correct)),
        "nll": float(-np.mean(log_probs[np.arange(len(labels)), labels])),
        "brier": brier_sum / probs.shape[-1],
        "brier_sum": brier_sum,
        "entropy": float(np.mean(entropies(log_probs))),
        "ece": expected_calibration_error(confidence, correct),
        "ece_adaptive": adaptive_calibration_error(confidence, correct),
        **selective_risk(confidence, correct),
    }


def entropies(log_probs: np.ndarray) -> np.ndarray:
    """Predictive entropy of each row in nats, ``0 log 0 = 0``.

    Args:
      log_probs: ``[N, K]``, natural logarithms.

    Returns:
      ``[N]``.

    Example:
      >>> entropies(np.array([[0.0, -np.inf], [np.log(0.5), np.log(0.5)]])).round(3).tolist()
      [-0.0, 0.693]
    """
    probs = np.exp(log_probs)
    return -np.sum(np.where(probs > 0, probs * np.where(probs > 0, log_probs, 0.0), 0.0), axis=-1)


def reliability_bins(
    confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_CALIBRATION_BINS
) -> dict[str, np.ndarray]:
    """Equal-width bins of confidence; confidence 1.0 falls in the last one.

    Args:
      confidence: ``[N]`` in ``[0, 1]``.
      correct: ``[N]`` booleans.
      num_bins: number of bins.

    Returns:
      ``count``, summed ``confidence`` and summed ``correct`` per bin ``[num_bins]``.

    Example:
      >>> bins = reliability_bins(np.array([0.6, 0.9, 1.0]), np.array([True, False, True]), 2)
      >>> bins["count"].tolist(), bins["correct"].tolist()
      ([0, 3], [0.0, 2.0])
    """
    which = np.minimum((np.asarray(confidence) * num_bins).astype(int), num_bins - 1)
    return {
        "count": np.bincount(which, minlength=num_bins),
        "confidence": np.bincount(which, confidence, minlength=num_bins),
        "correct": np.bincount(which, np.asarray(correct, float), minlength=num_bins),
    }


def expected_calibration_error(
    confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_CALIBRATION_BINS
) -> float:
    """``sum_bins share * |accuracy - mean confidence|`` over equal-width bins.

    Args:
      confidence, correct, num_bins: as in `reliability_bins`.

    Returns:
      A number in ``[0, 1]``.

    Example: always sure, right half of the time.
      >>> expected_calibration_error(np.ones(2), np.array([True, False]))
      0.5
    """
    bins = reliability_bins(confidence, correct, num_bins)
    return float(np.sum(np.abs(bins["correct"] - bins["confidence"])) / len(confidence))


def adaptive_calibration_error(
    confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_CALIBRATION_BINS
) -> float:
    """`expected_calibration_error` over bins of (nearly) equal mass.

    Args:
      confidence, correct, num_bins: as in `reliability_bins`.

    Returns:
      A number in ``[0, 1]``.

    Example:
      >>> adaptive_calibration_error(np.ones(2), np.array([True, False]), num_bins=1)
      0.5
    """
    order = np.argsort(confidence, kind="stable")
    hits = _average_over_ties(confidence, np.asarray(correct, float))
    gaps = (hits - confidence)[order]
    return float(sum(abs(part.sum()) for part in np.array_split(gaps, num_bins)) / len(gaps))


def selective_risk(confidence: np.ndarray, correct: np.ndarray) -> dict[str, float]:
    """Area under the risk-coverage curve, and its excess over the best possible.

    Args:
      confidence, correct: as in `risk_coverage_curve`.

    Returns:
      ``aurc`` and ``e_aurc``.

    Example: the error is the least confident: nothing is better.
      >>> selective_risk(np.array([0.9, 0.6]), np.array([True, False]))
      {'aurc': 0.25, 'e_aurc': 0.0}
    """
    _, risk = risk_coverage_curve(confidence, correct)
    wrong = np.sort(~np.asarray(correct, bool))  # a perfect ranking leaves errors for last
    best = np.cumsum(wrong) / np.arange(1, len(wrong) + 1)
    return {"aurc": float(risk.mean()), "e_aurc": float(risk.mean() - best.mean())}


def risk_coverage_curve(
    confidence: np.ndarray, correct: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Error rate among the most confident examples, for every coverage.

    Args:
      confidence: ``[N]``.
      correct: ``[N]`` booleans.

    Returns:
      Coverage ``1/N ... 1`` and risk, both ``[N]``. Equally confident examples
      share their errors evenly.

    Example:
      >>> coverage, risk = risk_coverage_curve(np.array([0.9, 0.6]), np.array([True, False]))
      >>> coverage.tolist(), risk.tolist()
      ([0.5, 1.0], [0.0, 0.5])
    """
    errors = _average_over_ties(confidence, 1.0 - np.asarray(correct, float))
    kept = np.arange(1, len(errors) + 1)
    order = np.argsort(-np.asarray(confidence), kind="stable")
    return kept / len(errors), np.cumsum(errors[order]) / kept


def _average_over_ties(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each value replaced by the mean of all values with the same key."""
    _, group, size = np.unique(keys, return_inverse=True, return_counts=True)
    return (np.bincount(group, values) / size)[group]


def detection_metrics(scores_in: ArrayLike, scores_out: ArrayLike) -> dict[str, float]:
    """How well a score tells out-of-distribution from in-distribution examples.

    Args:
      scores_in: ``[N]``, scores of in-distribution examples.
      scores_out: ``[M]``, scores of out-of-distribution examples.

    Returns:
      ``auroc``; average precision ``apr_out`` (out-of-distribution positive) and
      ``apr_in`` (in-distribution positive, negated scores), step-wise;
      ``fpr95_out_positive`` and ``fpr95_in_positive``.

    Example:
      >>> scores = detection_metrics([0.0, 1.0], [2.0, 3.0])
      >>> scores["auroc"], scores["apr_out"], scores["fpr95_in_positive"]
      (1.0, 1.0, 0.0)
    """
    scores_in, scores_out = np.asarray(scores_in, np.float64), np.asarray(scores_out, np.float64)
    if scores_in.ndim != 1 or scores_out.ndim != 1:
        raise ValueError(
            f"scores have shapes {scores_in.shape}, {scores_out.shape}; need (N,), (M,)"
        )
    if scores_in.size == 0 or scores_out.size == 0:
        raise ValueError("detection needs examples on both sides")
    if np.isnan(scores_in).any() or np.isnan(scores_out).any():
        raise ValueError("out-of-distribution scores hold NaN")
    fpr, tpr = roc_curve(scores_out, scores_in)
    return {
        "auroc": float(np.sum(np.diff(fpr) * 0.5 * (tpr[1:] + tpr[:-1]))),
        "apr_out": average_precision(scores_out, scores_in),
        "apr_in": average_precision(-scores_in, -scores_out),
        "fpr95_out_positive": _fpr_at_tpr(scores_out, scores_in, 0.95),
        "fpr95_in_positive": _fpr_at_tpr(-scores_in, -scores_out, 0.95),
    }


def roc_curve(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every threshold, from ``(0, 0)`` to ``(1, 1)``.

    Args:
      positive: ``[N]``, scores that should be high.
      negative: ``[M]``, scores that should be low.

    Returns:
      Both rates, one entry more than there are distinct scores.

    Example:
      >>> false_rate, true_rate = roc_curve(np.array([2.0]), np.array([1.0]))
      >>> false_rate.tolist(), true_rate.tolist()
      ([0.0, 0.0, 1.0], [0.0, 1.0, 1.0])
    """
    hits, alarms = _counts_above(positive, negative)
    return (
        np.concatenate([[0.0], alarms / len(negative)]),
        np.concatenate([[0.0], hits / len(positive)]),
    )


def average_precision(positive: np.ndarray, negative: np.ndarray) -> float:
    """``sum_t (recall_t - recall_{t-1}) precision_t``, thresholds falling.

    Args:
      positive: ``[N]``, scores that should be high.
      negative: ``[M]``, scores that should be low.

    Returns:
      A number in ``[0, 1]``.

    Example:
      >>> average_precision(np.array([3.0, 1.0]), np.array([2.0, 0.0]))  # 1/2 1 + 1/2 2/3
      0.8333333333333333
    """
    hits, alarms = _counts_above(positive, negative)
    recall_steps = np.diff(hits, prepend=0) / len(positive)
    return float(np.sum(recall_steps * hits / (hits + alarms)))


def _fpr_at_tpr(positive: np.ndarray, negative: np.ndarray, wanted: float) -> float:
    fpr, tpr = roc_curve(positive, negative)
    return float(fpr[np.argmax(tpr >= wanted)])


def _counts_above(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positives and negatives with score >= t, for every distinct score t, falling."""
    scores = np.concatenate([positive, negative])
    is_positive = np.arange(len(scores)) < len(positive)
    _, group = np.unique(-scores, return_inverse=True)
    size = group.max() + 1
    hits = np.cumsum(np.bincount(group, is_positive, minlength=size))
    alarms = np.cumsum(np.bincount(group, ~is_positive, minlength=size))
    return hits, alarms
