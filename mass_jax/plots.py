"""Pictures of a run: pure functions from arrays to Matplotlib figures.

One small panel per figure, so that the same picture is readable on a phone and several fit
beside each other on a desk. Figures are objects; `pyplot` and its global state stay out, and
a user's own ``matplotlibrc`` has no say. Scores are out-of-distribution scores: higher = more
out-of-distribution.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from mass_jax.metrics import (
    NUM_CALIBRATION_BINS,
    detection_metrics,
    expected_calibration_error,
    reliability_bins,
    risk_coverage_curve,
    roc_curve,
    selective_risk,
)
from mass_jax.run_log import NOT_LOSS_TERMS

# Okabe and Ito's colours, told apart by any eye.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#666666"
_LINES = ((BLUE, "-"), (VERMILLION, "--"), (GREEN, "-."), (PURPLE, ":"), (ORANGE, "-"), (SKY, "--"))
_LOOK = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "text.parse_math": False,  # names come from files; a dollar sign is a dollar sign
}
_SIZE = (4.8, 3.5)  # inches
_NUM_HISTOGRAM_BINS = 40
_NO_TERMS = {"step", "examples_per_second", *NOT_LOSS_TERMS}
DETECTOR_LABELS = {
    "entropy": "predictive entropy (nats)",
    "max_log_q": "-max log q(f(x) | y) over y (nats)",
    "rate": "rate log p(z | x) - log r(z) (nats)",
}

_styled = style.context(["default", _LOOK])


def loss_terms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the loss terms in rows of ``metrics.jsonl``, in their order there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [n for n in names if n not in _NO_TERMS and not n.startswith("validation_")]


@_styled
def training_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """The loss, each of its terms before multiplication, and accuracy, by step.

    Args:
      rows: of ``metrics.jsonl``; validation is in some of them only.

    Returns:
      Figures by the name of what they show: ``loss``, the terms, ``accuracy``.
    """
    minibatch = "training minibatch"
    figures = {"loss": _curves(rows, {"loss": minibatch}, "loss (nats)")}
    for name in loss_terms(rows):
        unit = "" if name == "half_squared_norm" else " (nats)"
        lines = {name: minibatch}
        if name == "cross_entropy":
            lines["validation_nll"] = "validation NLL"
        figures[name] = _curves(rows, lines, f"{name.replace('_', ' ')}{unit}")
    lines = {"accuracy": minibatch, "validation_accuracy": "validation"}
    figures["accuracy"] = _curves(rows, lines, "accuracy (fraction)")
    return figures


def _curves(rows: Sequence[Mapping[str, Any]], lines: Mapping[str, str], ylabel: str) -> Figure:
    figure, axes = _panel("step", ylabel)
    shown = {name: label for name, label in lines.items() if any(name in row for row in rows)}
    for (name, label), (colour, _) in zip(shown.items(), _LINES, strict=False):
        points = np.array([(row["step"], row[name]) for row in rows if name in row], float)
        # A few points need a mark each; many noisy ones would make a band of a thick line.
        look = {"marker": "o", "markersize": 3} if len(points) <= 40 else {"linewidth": 1.0}
        axes.plot(*points.T, color=colour, label=label, **look)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    _legend_below(figure)
    return figure


@_styled
def reliability_diagram(confidence: np.ndarray, correct: np.ndarray) -> Figure:
    """Accuracy against confidence in bins, with the number of examples in each below.

    Args:
      confidence: ``[N]``, probability of the predicted class.
      correct: ``[N]`` booleans.
    """
    bins = reliability_bins(confidence, correct)
    count, filled = bins["count"], bins["count"] > 0
    edges = np.linspace(0.0, 1.0, NUM_CALIBRATION_BINS + 1)
    width = 1.0 / NUM_CALIBRATION_BINS
    accuracy = bins["correct"][filled] / count[filled]
    figure = Figure(figsize=(_SIZE[0], 4.7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    upper.bar(
        edges[:-1][filled], accuracy, width, align="edge", color=SKY, edgecolor="white",
        label="accuracy in the bin",
    )  # fmt: skip
    mean_confidence = bins["confidence"][filled] / count[filled]
    upper.plot(
        mean_confidence, accuracy, "o", color=BLUE, markersize=4, clip_on=False,
        label="at mean confidence",
    )  # fmt: skip
    upper.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1.2, label="calibrated")
    upper.set(xlim=(0, 1), ylim=(0, 1.03), ylabel="accuracy (fraction)")
    upper.set_title(f"ECE {expected_calibration_error(confidence, correct):.4f}", loc="left")
    lower.bar(edges[:-1], count, width, align="edge", color=GREY, edgecolor="white", log=True)
    lower.set(xlabel="confidence (probability)", ylabel="examples")
    lower.set_ylim(0.7, max(count.max(), 1) * 6.0)
    # Plain numbers: Matplotlib would write powers of ten in mathematics, which is off here.
    lower.yaxis.set_major_formatter(lambda number, _: _short(int(number)) if number >= 1 else "")
    lower.yaxis.set_minor_locator(NullLocator())
    lower.grid(visible=False)
    for left, number in zip(edges[:-1], count, strict=True):
        if number:
            at = (left + width / 2, number)
            lower.annotate(
                _short(int(number)), at, (0, 1), textcoords="offset points", ha="center",
                fontsize=7,
            )  # fmt: skip
    _legend_below(figure)
    return figure


def _short(count: int) -> str:
    """``count`` in at most four characters, so that bins' numbers do not overlap."""
    if count < 10_000:
        return str(count)
    return f"{count / 1000:.0f}k" if count < 1_000_000 else f"{count / 1_000_000:.0f}M"


@_styled
def risk_coverage(confidence: np.ndarray, correct: np.ndarray) -> Figure:
    """Error rate among the most confident examples, against how many are kept.

    Args:
      confidence: ``[N]``.
      correct: ``[N]`` booleans.
    """
    figure, axes = _panel("coverage (fraction of examples kept)", "risk (error rate among them)")
    coverage, risk = risk_coverage_curve(confidence, correct)
    wrong = np.sort(~np.asarray(correct, bool))  # no ranking can do better: errors last
    best_risk = np.cumsum(wrong) / np.arange(1, len(wrong) + 1)
    axes.plot(coverage, risk, color=BLUE, label="by confidence")
    axes.plot(coverage, best_risk, color=GREY, linestyle="--", linewidth=1.2, label="best possible")
    axes.set(xlim=(0, 1))
    axes.set_ylim(bottom=0)
    area = selective_risk(confidence, correct)
    axes.set_title(f"AURC {area['aurc']:.4f}, excess {area['e_aurc']:.4f}", loc="left")
    _legend_below(figure)
    return figure


@_styled
def roc(
    scores_in: Mapping[str, np.ndarray], scores_out: Mapping[str, np.ndarray], ood_set: str
) -> Figure:
    """ROC of every detector on one set, out-of-distribution positive.

    Args:
      scores_in: ``[N]`` by detector, of the test split.
      scores_out: ``[M]`` by detector, of the out-of-distribution set.
      ood_set: its name.
    """
    figure, axes = _panel("false positive rate (test split)", f"true positive rate ({ood_set})")
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, label="chance")
    for number, name in enumerate(scores_in):
        colour, dashes = _LINES[number % len(_LINES)]
        area = detection_metrics(scores_in[name], scores_out[name])["auroc"]
        rates = roc_curve(scores_out[name], scores_in[name])
        axes.plot(*rates, color=colour, linestyle=dashes, label=f"{name}, AUROC {area:.3f}")
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    _legend_below(figure)
    return figure


@_styled
def score_histogram(
    scores_in: np.ndarray, scores_out: np.ndarray, detector: str, ood_set: str
) -> Figure:
    """How the scores of one detector are spread on the test split and on one set.

    The outermost bins also hold what lies beyond them (heavy tails would leave the rest
    of the picture empty).

    Args:
      scores_in: ``[N]``, of the test split.
      scores_out: ``[M]``, of the out-of-distribution set.
      detector: name of the score.
      ood_set: name of the set.
    """
    edges = _histogram_edges(scores_in, scores_out)
    figure, axes = _panel(DETECTOR_LABELS.get(detector, detector), "fraction of examples")
    for scores, label, colour, dashes in (
        (scores_in, "test split", BLUE, "-"),
        (scores_out, ood_set, VERMILLION, "--"),
    ):
        share = np.histogram(np.clip(scores, edges[0], edges[-1]), edges)[0] / len(scores)
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.25)
        axes.stairs(share, edges, color=colour, linestyle=dashes, linewidth=1.6, label=label)
    axes.set_ylim(bottom=0)
    _legend_below(figure)
    return figure


def _histogram_edges(*samples: np.ndarray) -> np.ndarray:
    """Bins over the middle 98% of each sample; finite whatever the scores are."""
    finite = [np.asarray(sample, np.float64)[np.isfinite(sample)] for sample in samples]
    ends = [np.quantile(sample, (0.01, 0.99)) for sample in finite if len(sample)]
    low, high = (np.min(ends), np.max(ends)) if ends else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: a bin of some width around it
        low, high = low - max(0.5, abs(low) * 1e-3), high + max(0.5, abs(high) * 1e-3)
    return np.linspace(low, high, _NUM_HISTOGRAM_BINS + 1)


def _panel(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _legend_below(figure: Figure) -> None:
    """Names of the lines under the axes: inside, some run's curve would pass behind them."""
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", ncols=2)


@_styled
def as_png(figure: Figure) -> bytes:
    """A PNG of twice a screen's usual 96 dots per inch: sharp on phones and on paper."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=192)
    return content.getvalue()
