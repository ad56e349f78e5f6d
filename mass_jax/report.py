"""``python -m mass_jax.report WORKDIR``: a finished run as one page, ``report.html``.

Every training run writes it at its end. It reads only what the run left in its directory,
holds its pictures itself, and writes them as ``plots/*.png`` as well.
"""

import io
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from mass_jax import plots, predictions
from mass_jax.command_line import Parser
from mass_jax.config import SCHEMA, default_config, flatten
from mass_jax.predictions import Mistakes, RunPredictions, SplitPredictions
from mass_jax.report_page import Html, element, joined, page, picture, table
from mass_jax.run_files import RunFiles, RunFilesError, read_run
from mass_jax.run_log import METRICS_FILE, write_atomically

REPORT = "report.html"
PLOTS = "plots"
_RAW_FILES = {
    "results.json": "every number of the evaluation",
    METRICS_FILE: "one row per logged step",
    "config.json": "the whole configuration",
    "environment.json": "versions, devices, commit, command",
    predictions.PREDICTIONS: "labels, log-probabilities and scores of every example (NumPy)",
}
_LOSS_TERMS = {
    "cross_entropy": "-log q(y | f(x)) in nats: how surprised the classifier is by the true label; "
    "it enters the loss as it is.",
    "entropy": "-log q(f(x)) in nats, on average an upper bound of H(f(X)): how widely the "
    "representation spreads (MASS; multiplied by beta).",
    "jacobian": "-log J_f(x) in nats, with J_f = sqrt(det(D Dᵀ)) for the Jacobian matrix D of f at "
    "x: the less f contracts volume around x, the lower it is (MASS; multiplied by beta).",
    "rate": "log p(z | x) - log r(z) in nats, on average KL(p(z | x) ‖ r(z)): how much the sampled "
    "code z tells about x (VIB; multiplied by beta).",
    "half_squared_norm": "half the sum of the network's squared weights, without a unit: what "
    "weight decay makes small (multiplied by weight_decay).",
}
_HEADLINES = {
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "ECE, 15 bins",
    "aurc": "AURC",
    "entropy": "mean entropy (nats)",
}
_DETECTION_TERMS = (
    "AUROC: the chance that a stranger scores above a test example; 0.5 is blind. "
    "AP (average precision): the share of positives among the highest scores, averaged over "
    "thresholds from the strictest on; 1 is perfect. "
    "FPR95: the share of negatives that pass for positive where 95% of the positives are found; "
    "0 is perfect. "
    "Positive are the strangers (out) or the test examples (in)."
)
_DETECTION = ("auroc", "apr_out", "apr_in", "fpr95_out_positive", "fpr95_in_positive")


class Plot(NamedTuple):
    """A figure with the name of its file and its words."""

    name: str
    figure: Figure
    alt: str
    caption: str = ""


def write_report(workdir: Path) -> Path:
    """Writes ``report.html`` and ``plots/*.png`` into a finished run's directory.

    Raises:
      RunFilesError: a file of the run is missing or damaged.
    """
    run = read_run(workdir)
    sections = {
        "Training": _training_plots(run),
        "Calibration and selective prediction": _confidence_plots(run.predictions.test),
    }
    if run.predictions.ood:
        sections["Out-of-distribution detection"] = _detection_plots(run.predictions)
    (workdir / PLOTS).mkdir(exist_ok=True)
    shown = {}
    for heading, drawn in sections.items():
        pictures = []
        for plot in drawn:
            content = plots.as_png(plot.figure)
            write_atomically(workdir / PLOTS / f"{plot.name}.png", content)
            pictures.append(picture(content, plot.alt, plot.caption))
        shown[heading] = element("div", joined(pictures), class_="figures")
    write_atomically(workdir / REPORT, _page(workdir, run, shown))
    return workdir / REPORT


def _training_plots(run: RunFiles) -> list[Plot]:
    made = []
    for name, figure in plots.training_curves(run.rows).items():
        values = [row[name] for row in run.rows if name in row]
        label = name.replace("_", " ")
        alt = f"Training curve of {label}: {len(values)} points"
        if values:
            alt += f", from {_shown(values[0])} to {_shown(values[-1])}"
        made.append(Plot(f"training_{_file_name(name)}", figure, alt))
    return made


def _confidence_plots(test: SplitPredictions) -> list[Plot]:
    count = f"{len(test.labels):,} test examples"
    return [
        Plot(
            "reliability",
            plots.reliability_diagram(test.confidence, test.correct),
            f"Reliability diagram: accuracy against confidence in bins of {count}",
            "Bars on the diagonal are calibrated; below it, the model is too sure of itself. "
            "Underneath, how many examples each bin holds (logarithmic).",
        ),
        Plot(
            "risk_coverage",
            plots.risk_coverage(test.confidence, test.correct),
            f"Risk-coverage curve of {count}: error rate among the most confident ones",
            "If only the most confident predictions are accepted, how many of them are wrong.",
        ),
    ]


def _detection_plots(seen: RunPredictions) -> list[Plot]:
    made = []
    for ood_set, split in seen.ood.items():
        made.append(
            Plot(
                f"roc_{_file_name(ood_set)}",
                plots.roc(seen.test.scores, split.scores, ood_set),
                f"ROC curves of {', '.join(split.scores)} for {ood_set} against the test split",
                f"Detectors of {ood_set} ({len(split.labels):,} examples).",
            )
        )
        made += [
            Plot(
                f"scores_{_file_name(ood_set)}_{_file_name(detector)}",
                plots.score_histogram(seen.test.scores[detector], scores, detector, ood_set),
                f"Histograms of {detector} on the test split and on {ood_set}",
                f"Scores by {detector}; the outermost bins hold all that lies beyond.",
            )
            for detector, scores in split.scores.items()
        ]
    return made


def _file_name(name: str) -> str:
    """Letters, digits and underscores: names come from files and must stay in ``plots/``."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)[:80]


def _page(workdir: Path, run: RunFiles, shown: Mapping[str, Html]) -> str:
    fact = lambda name: run.results.get(name, "?")
    count = lambda name: f"{fact(name):,.0f}" if isinstance(fact(name), int | float) else fact(name)
    title = f"{fact('method')} on {fact('dataset')}: {fact('network')}, seed {fact('seed')}"
    body: list[object] = [
        element("h1", title),
        element(
            "p",
            f"{count('train_size')} training examples, beta {fact('beta')}, {count('steps')} steps "
            f"in {count('train_seconds')} s; run {workdir.resolve().name}",
            class_="soft",
        ),
        element("h2", "Results"),
        *_headlines(run),
        *_command(workdir, run),
    ]
    for heading, figures in shown.items():
        body += [element("h2", heading), figures]
        if heading == "Training":
            body += [element("h3", "The terms of the loss, before multiplication"), _terms(run)]
    return page(
        title,
        [
            *body,
            element("h2", "Classes"),
            _class_table(run.predictions.test),
            element("h2", "Mistakes"),
            *_mistake_galleries(run.predictions),
            element("h2", "Configuration"),
            *_configuration(run),
            element("h2", "Environment"),
            table("Environment", ("fact", "value"), _environment_rows(run.environment)),
            element("h2", "Raw files"),
            _raw_files(),
        ],
    )


def _headlines(run: RunFiles) -> list[Html]:
    count = len(run.predictions.test.labels)
    accuracy = run.results.get("accuracy")
    cards = [(_shown(accuracy), f"accuracy on {count:,} test examples")]
    if isinstance(accuracy, float) and 0 <= accuracy <= 1:
        error = math.sqrt(accuracy * (1 - accuracy) / count)
        cards = [(f"{accuracy:.2%}", f"accuracy, {count:,} test examples (s.e. {error:.2%})")]
    cards += [
        (_shown(run.results[name]), label)
        for name, label in _HEADLINES.items()
        if name in run.results
    ]
    items = [
        element("li", joined([element("b", value), element("span", label)]))
        for value, label in cards
    ]
    evaluated_on = run.results.get("evaluated_on")
    warning = f"No test examples were given: these numbers are of the {evaluated_on}."
    return [
        *([element("p", warning)] if evaluated_on else []),
        element("ul", joined(items), class_="cards"),
        *_detection(run.results.get("ood", {})),
    ]


def _detection(ood: Mapping[str, Any]) -> list[Html]:
    """The detectors' numbers and what they mean; nothing without out-of-distribution sets."""
    detections = [
        (f"{ood_set} by {detector}", *(_shown(_field(scores, name)) for name in _DETECTION))
        for ood_set, detectors in ood.items()
        for detector, scores in detectors.items()
    ]
    if not detections:
        return []
    header = (
        "out-of-distribution set", "AUROC", "AP, out positive", "AP, in positive",
        "FPR95, out positive", "FPR95, in positive",
    )  # fmt: skip
    misled = [
        f"{ood_set} by {detector}"
        for ood_set, detectors in ood.items()
        for detector, scores in detectors.items()
        if isinstance(auroc := _field(scores, "auroc"), float) and auroc < 0.5
    ]
    warning = (
        "AUROC below 0.5: takes strangers for more familiar than test examples "
        f"({', '.join(misled)})."
    )
    return [
        table("Out-of-distribution detection", header, detections),
        *([element("p", warning)] if misled else []),
        element("p", _DETECTION_TERMS, class_="soft"),
    ]


def _command(workdir: Path, run: RunFiles) -> list[Html]:
    command, kind = str(run.results.get("command", "?")), "command"
    if command.startswith("mass_jax.fit("):
        # The call in the file has no paths, so that it holds anywhere; this page is of a place.
        command = f"{command.removesuffix(')')}, workdir={str(workdir)!r})"
        kind = "call"
    return [
        element("p", f"The {kind} that computes this run:"),
        element("pre", element("code", command)),
    ]


def _field(scores: Any, name: str) -> Any:
    return scores.get(name, "-") if isinstance(scores, dict) else "-"


def _terms(run: RunFiles) -> Html:
    entries = []
    for name in plots.loss_terms(run.rows):
        entries.append(element("dt", name))
        entries.append(element("dd", _LOSS_TERMS.get(name, "A term of the method's own.")))
    return element("dl", joined(entries))


def _class_table(test: SplitPredictions) -> Html:
    rows = []
    for label in range(test.log_probs.shape[1]):
        here = test.labels == label
        count = int(here.sum())
        means = [
            f"{np.mean(v[here]):.4f}" if count else "-" for v in (test.correct, test.confidence)
        ]
        rows.append((label, f"{count:,}", *means))
    return table("Results by class", ("class", "examples", "accuracy", "mean confidence"), rows)


def _mistake_galleries(seen: RunPredictions) -> list[Html]:
    wrong = int((~seen.test.correct).sum())
    if wrong == 0:
        return [element("p", f"None in {len(seen.test.labels):,} test examples.")]
    both = (seen.most_confident_mistakes, seen.least_confident_mistakes)
    # One scale for all: digits are stored as 0 to 16, photographs as 0 to 255.
    brightest = max(int(part.images.max(initial=1)) for part in both)
    parts = [
        element("p", f"{wrong:,} of {len(seen.test.labels):,} test examples are misclassified.")
    ]
    shown: set[int] = set()
    for heading, mistakes in zip(("Most confident", "Least confident"), both, strict=True):
        new = [number for number, row in enumerate(mistakes.rows) if int(row) not in shown]
        if not new:
            continue  # so few that they all stand above
        shown |= {int(row) for row in mistakes.rows}
        figures = [_mistake(mistakes, number, brightest) for number in new]
        parts += [element("h3", heading), element("div", joined(figures), class_="mistakes")]
    return parts


def _mistake(mistakes: Mistakes, number: int, brightest: int) -> Html:
    row, label, predicted = (
        int(part[number]) for part in (mistakes.rows, mistakes.labels, mistakes.predicted)
    )
    confidence = f"confidence {float(mistakes.confidence[number]):.3f}"
    words = f"true {label}, predicted {predicted}, {confidence}"
    image = mistakes.images[number]
    if image.ndim != 3:
        return element("figure", element("figcaption", f"row {row}: {words}"))
    if image.shape[-1] not in (1, 3):  # not a picture a screen knows: its mean over channels
        image = image.mean(axis=-1, keepdims=True)
    bright = np.round(image * (255.0 / max(brightest, 1))).clip(0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(bright[..., 0] if bright.shape[-1] == 1 else bright).save(content, "png")
    return picture(
        content.getvalue(), f"Test image {row}: {words}",
        joined([f"true {label}", Html("<br>"), f"predicted {predicted}", Html("<br>"), confidence]),
    )  # fmt: skip


def _configuration(run: RunFiles) -> list[Html]:
    usual, used = flatten(default_config()), flatten(run.config)
    meaning = lambda key: SCHEMA[key].meaning if key in SCHEMA else ""
    changed = [
        (key, _listed(value), _listed(usual.get(key, "-")), meaning(key))
        for key, value in used.items()
        if key not in usual or usual[key] != value
    ]
    same = [
        (key, _listed(value), meaning(key))
        for key, value in used.items()
        if key in usual and usual[key] == value
    ]
    first = element("p", "Every field has its default.")
    if changed:
        header = ("field", "value", "default", "meaning")
        first = table("Fields that differ from the default", header, changed)
    rest = table("Fields at their default", ("field", "value", "meaning"), same)
    summary = element("summary", f"{len(same)} fields at their default")
    return [first, element("details", joined([summary, rest]))]


def _environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _listed(value, " ")) for name, value in flatten(environment).items()]


def _raw_files() -> Html:
    items = [
        element("li", joined([element("a", name, href=name), f"- {meaning}"]))
        for name, meaning in _RAW_FILES.items()
    ]
    items.append(element("li", joined([element("a", f"{PLOTS}/", href=f"{PLOTS}/"), "- as PNG"])))
    return element("ul", joined(items))


def _listed(value: Any, separator: str = ", ") -> str:
    """A value as the file has it, a list by its entries."""
    if not isinstance(value, tuple):
        return str(value)
    return separator.join(map(str, value)) or "none"


def _shown(value: Any) -> str:
    """A measured number with four decimals (three digits, if small or large); else its text."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4f}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"  # 4.68e-4: a card is too narrow for more


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser("python -m mass_jax.report", description="Writes WORKDIR/report.html.")
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="of a finished run")
    workdir = parser.parse_args(argv).workdir
    try:
        print(write_report(workdir))
    except (RunFilesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
