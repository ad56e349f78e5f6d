"""Plots: what is drawn is what was measured, read back from the figures' own artists."""

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from sklearn.metrics import roc_auc_score

from mass_jax import plots

ROWS = [
    {
        "step": step,
        "loss": 2.0 / step,
        "accuracy": 1 - 1 / step,
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "parameter_norm": 9.0,
        "examples_per_second": 100.0,
        "cross_entropy": 1.0 / step,
        "entropy": 20.0 - step,
        "half_squared_norm": 3.0 * step,
    }
    | ({"validation_accuracy": 0.5 + step / 100, "validation_nll": 0.3} if step % 10 == 0 else {})
    for step in range(1, 31)
]


@pytest.fixture(scope="module")
def predictions():
    """Confidences of which about as many are right as they say, with ties."""
    generator = np.random.default_rng(0)
    confidence = np.round(generator.uniform(0.2, 1.0, 500), 2)
    return confidence, generator.uniform(size=500) < confidence


def every_figure(confidence, correct):
    scores = {"entropy": confidence, "max_log_q": confidence**2}
    return [
        *plots.training_curves(ROWS).values(),
        plots.reliability_diagram(confidence, correct),
        plots.risk_coverage(confidence, correct),
        plots.roc(scores, scores, "svhn"),
        plots.score_histogram(confidence, confidence + 1, "max_log_q", "svhn"),
    ]


def test_every_loss_term_has_its_curve_and_nothing_else_has():
    """Oracle: the rows themselves."""
    figures = plots.training_curves(ROWS)
    expected = ["loss", "cross_entropy", "entropy", "half_squared_norm", "accuracy"]
    assert list(figures) == expected
    for name, figure in figures.items():
        line = figure.axes[0].lines[0]
        np.testing.assert_allclose(line.get_xydata(), [(r["step"], r[name]) for r in ROWS])


def test_validation_is_drawn_at_the_steps_that_have_it():
    """Oracle: the rows themselves; 3 of the 30 have a validation."""
    accuracy = plots.training_curves(ROWS)["accuracy"].axes[0].lines[1]
    np.testing.assert_allclose(accuracy.get_xydata(), [(10, 0.6), (20, 0.7), (30, 0.8)])
    without = [{k: v for k, v in row.items() if "validation" not in k} for row in ROWS]
    assert len(plots.training_curves(without)["accuracy"].axes[0].lines) == 1


def test_reliability_bars_and_counts(predictions):
    """Oracle: a loop over examples."""
    confidence, correct = predictions
    upper, lower = plots.reliability_diagram(confidence, correct).axes
    hits, counts = [0] * 15, [0] * 15
    for value, right in zip(confidence, correct, strict=True):
        which = min(int(value * 15), 14)
        counts[which] += 1
        hits[which] += int(right)
    drawn = {round(bar.get_x() * 15): bar.get_height() for bar in upper.patches}
    assert drawn == pytest.approx({i: hits[i] / n for i, n in enumerate(counts) if n})
    assert [bar.get_height() for bar in lower.patches] == counts
    assert [text.get_text() for text in lower.texts] == [str(n) for n in counts if n]


@pytest.mark.parametrize(
    ("count", "words"), [(9999, "9999"), (26_032, "26k"), (999_499, "999k"), (2_000_000, "2M")]
)
def test_large_counts_are_short(count, words):
    assert plots._short(count) == words


def test_risk_coverage_curve(predictions):
    """Oracle: the mean over every order of tied examples, by 2,000 random orders."""
    confidence, correct = predictions
    by_confidence, best = plots.risk_coverage(confidence, correct).axes[0].lines
    generator = np.random.default_rng(1)
    sampled = np.zeros(len(correct))
    for _ in range(2000):
        order = np.lexsort((generator.uniform(size=len(correct)), -confidence))
        sampled += np.cumsum(~correct[order]) / np.arange(1, len(correct) + 1) / 2000
    # The first points are means of few examples: three standard errors of 2,000 draws.
    np.testing.assert_allclose(by_confidence.get_ydata(), sampled, atol=0.035)
    assert np.all(best.get_ydata() <= by_confidence.get_ydata() + 1e-12)
    assert best.get_ydata()[-1] == pytest.approx(np.mean(~correct))


def test_roc_encloses_the_area_it_names():
    """Oracle: scikit-learn's area, out-of-distribution positive."""
    generator = np.random.default_rng(2)
    inside = {"entropy": generator.normal(size=80), "rate": generator.integers(0, 4, 80) * 1.0}
    outside = {"entropy": generator.normal(1, 1, 60), "rate": generator.integers(0, 4, 60) * 1.0}
    axes = plots.roc(inside, outside, "svhn").axes[0]
    assert "svhn" in axes.get_ylabel()
    for line, name in zip(axes.lines[1:], inside, strict=True):
        labels = np.repeat([0, 1], [80, 60])
        expected = roc_auc_score(labels, np.concatenate([inside[name], outside[name]]))
        x, y = line.get_data()
        assert np.trapezoid(y, x) == pytest.approx(expected)
        assert line.get_label() == f"{name}, AUROC {expected:.3f}"


@pytest.mark.parametrize(
    "outside",
    [
        np.linspace(0, 9, 50),
        np.array([1.0, 1e30, -1e30]),
        np.array([np.inf, -np.inf, 3.0]),
        np.full(5, np.inf),
        np.zeros(4),
        np.full(3, 1e12),
    ],
    ids=["plain", "tails", "infinite", "all infinite", "constant", "large"],
)
@pytest.mark.parametrize("inside", [np.linspace(0, 1, 200), np.zeros(7)], ids=["spread", "zero"])
def test_histograms_count_every_example(inside, outside):
    """Oracle: shares of a whole sum to one, however wild the scores are."""
    axes = plots.score_histogram(inside, outside, "entropy", "svhn").axes[0]
    for stairs in axes.patches:
        data = stairs.get_data()
        assert np.isfinite(data.edges).all()
        assert np.all(np.diff(data.edges) > 0)
        assert data.values.sum() == pytest.approx(1.0)


def test_axes_have_names_units_and_safe_colours(predictions):
    """Oracle: the palette of Okabe and Ito (2008), and greys."""
    okabe_ito = {
        "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#000000",
    }  # fmt: skip
    for figure in every_figure(*predictions):
        assert figure.axes[-1].get_xlabel()
        for axes in figure.axes:
            assert axes.get_ylabel()
            for line in axes.lines:
                colour = to_hex(line.get_color())
                assert colour in okabe_ito or colour[1:3] == colour[3:5] == colour[5:7]
    curves = plots.training_curves(ROWS)
    assert "nats" in curves["entropy"].axes[0].get_ylabel()
    assert "nats" not in curves["half_squared_norm"].axes[0].get_ylabel()


@pytest.mark.parametrize("scores", [np.zeros(9), np.arange(9.0)], ids=["below chance", "chance"])
def test_legends_cover_no_data(predictions, scores):
    """Oracle: the drawn boxes; a legend that shares no point with any axes hides nothing."""
    low = plots.roc({"entropy": scores + 1}, {"entropy": scores}, "svhn")
    for figure in [low, *every_figure(*predictions)]:
        plots.as_png(figure)  # lays it out
        assert not any(axes.get_legend() for axes in figure.axes)
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_drawing_is_pure(predictions):
    """Oracle: the same bytes whatever the user's settings, which stay as they are."""
    render = lambda: [plots.as_png(figure) for figure in every_figure(*predictions)]
    plain = render()
    with matplotlib.rc_context({"font.size": 40, "axes.labelsize": 30, "text.color": "red"}):
        settings = dict(matplotlib.rcParams)
        assert render() == plain
        assert dict(matplotlib.rcParams) == settings
    assert all(png.startswith(b"\x89PNG\r\n\x1a\n") for png in plain)


def test_names_are_not_mathematics():
    """Oracle: a formula Matplotlib would refuse is drawn as it is written."""
    scores = {"$\\frac{": np.arange(3.0)}
    figure = plots.roc(scores, scores, "$x^$")
    assert plots.as_png(figure)
    assert figure.axes[0].lines[1].get_label().startswith("$\\frac{")


def test_no_global_figure_state():
    """Oracle: the modules a fresh interpreter has loaded."""
    code = "import sys, mass_jax.report; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
