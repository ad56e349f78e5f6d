"""``python -m experiments.tables``: the paper's 14 tables with our runs beside them.

Ours are the records in ``experiments/results/``. ``--write`` renews the tables in
``README.md`` and ``experiments/README.md``.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import start_up
from experiments.cells import METHODS, NETWORKS, RESULTS, TRAIN_SIZES, paper_tables, records
from experiments.comparison import (
    ABBREVIATIONS,
    PAPER_STEPS,
    Column,
    Comparison,
    Row,
    Table,
    TableRow,
)
from experiments.peer_training import beside_ours
from experiments.study_report import gradients_markdown, training_markdown
from experiments.table_formats import FORMATS, as_markdown
from experiments.variants import beside_the_paper
from mass_jax.command_line import Parser

ROOT = Path(__file__).parent.parent
_COLUMNS = {
    "uncertainty": ("accuracy", "entropy", "nll", "brier"),
    "ood": ("accuracy", "auroc", "apr_in", "apr_out"),
}
HEADINGS = {
    "accuracy": "accuracy %",
    "entropy": "entropy",
    "nll": "NLL",
    "brier": "Brier",
    "auroc": "AUROC",
    "apr_in": "APR in",
    "apr_out": "APR out",
}
_DIGITS = {"accuracy": 1, "entropy": 3, "nll": 2, "brier": 4, "auroc": 2, "apr_in": 2, "apr_out": 2}
_OWN_DETECTOR = {"softmax_ce": "max_log_q", "mass": "max_log_q", "vib": "rate"}


def all_tables(runs: Sequence[dict[str, Any]] | None = None) -> list[Table]:
    """The paper's tables in its order.

    Args:
      runs: records; by default those in ``experiments/results/``.
    """
    runs = records() if runs is None else runs
    return [_table(number, paper, runs) for number, paper in enumerate(paper_tables(), 1)]


def _table(number: int, paper: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Table:
    network = NETWORKS[paper["network"]]
    mine = [run for run in runs if run["network"] == network and run["dataset"] == "cifar10"]
    if paper["kind"] == "accuracy":
        columns = [
            Column(f"{size:,} examples · accuracy %", "accuracy", size)
            for size in sorted(TRAIN_SIZES)
        ]
        subject = f"Test accuracy, {paper['network']}"
    else:
        columns = [
            Column(HEADINGS[metric], metric, paper["train_size"])
            for metric in _COLUMNS[paper["kind"]]
        ]
        kind = {"uncertainty": "Uncertainty", "ood": "Out-of-distribution detection (SVHN)"}
        subject = f"{kind[paper['kind']]}, {paper['network']}, {paper['train_size']:,} examples"
    rows = []
    for printed in paper["rows"]:
        usual = _row_of_paper(printed, network)
        for row in _variants(usual, mine, {column.train_size for column in columns}):
            detector = printed.get("detector")
            label = row.label(network) + (f", by {detector}" if detector else "")
            comparisons = tuple(
                Comparison(
                    _paper_value(printed, metric, size) if row == usual else None,
                    _our_values(mine, row, size, metric, detector),
                    _DIGITS[metric],
                )
                for _, metric, size in columns
            )
            rows.append(TableRow(label, printed["method"], row, detector, comparisons))
    return Table(number, subject, paper["network"], tuple(columns), tuple(rows))


def _row_of_paper(printed: dict[str, Any], network: str) -> Row:
    method = METHODS[printed["method"]]
    beta = printed["beta"] or 0.0
    return Row(
        method,
        beta,
        bool(printed["weight_decay"]),
        bool(printed["dropout"]),
        "paper" if method == "mass" else None,
        PAPER_STEPS[network],
    )


def row_of_run(run: dict[str, Any]) -> Row:
    """The row a record belongs to."""
    return Row(
        run["method"],
        run["beta"],
        run["weight_decay"] > 0,
        run["dropout_rate"] > 0,
        run["batch_stats"],
        run["steps"],
    )


def _variants(usual: Row, runs: Iterable[dict[str, Any]], sizes: set[int]) -> list[Row]:
    """The paper's row, and ours of other length or Jacobian."""
    found = {row_of_run(run) for run in runs if run["train_size"] in sizes}
    others = {row for row in found if row[:4] == usual[:4]} - {usual}
    return [usual, *sorted(others, key=lambda row: (row.batch_stats or "", row.steps))]


def _paper_value(printed: dict[str, Any], metric: str, size: int) -> tuple[float, float] | None:
    value = printed.get(metric)
    if isinstance(value, dict) and "mean" not in value:
        value = value.get(str(size))
    return None if value is None else (value["mean"], value["std"])


def _our_values(
    runs: Iterable[dict[str, Any]], row: Row, size: int, metric: str, detector: str | None
) -> tuple[float, ...]:
    values = []
    for run in runs:
        if run["train_size"] != size or row_of_run(run) != row:
            continue
        if metric == "accuracy":
            values.append(100 * run["accuracy"])
        elif detector is not None:
            values.append(run["ood"]["svhn_cropped"][detector][metric])
        else:
            values.append(run[metric])
    return tuple(values)


def what_was_run(runs: Sequence[dict[str, Any]] | None = None) -> str:
    """The longest run of every row of the paper, with the numbers that matter most, as Markdown."""
    runs = records() if runs is None else runs
    lines = [
        ABBREVIATIONS,
        "",
        "| network | examples | method | accuracy %: paper | ours | NLL: paper | ours "
        "| Brier: paper | ours | AUROC: paper | ours |",
        "|" + "---|" * 11,
    ]
    for paper in paper_tables():
        if paper["kind"] != "uncertainty":
            continue
        network, size = NETWORKS[paper["network"]], paper["train_size"]
        mine = [run for run in runs if run["network"] == network and run["dataset"] == "cifar10"]
        was_run = {row_of_run(run) for run in mine if run["train_size"] == size}
        for printed in paper["rows"]:
            usual = _row_of_paper(printed, network)
            detector = _OWN_DETECTOR[usual.method]
            like_the_paper = {row for row in was_run if row[:5] == usual[:5]}
            for row in sorted(like_the_paper, key=lambda row: row.steps)[-1:]:
                seen = []
                for metric in ("accuracy", "nll", "brier", "auroc"):
                    by = detector if metric == "auroc" else None
                    source = _ood_row(paper, usual, detector) if by else printed
                    theirs = _paper_value(source, metric, size) if row == usual else None
                    ours = _our_values(mine, row, size, metric, by)
                    seen.append(Comparison(theirs, ours, _DIGITS[metric]))
                texts = [text for c in seen for text in (c.paper_text(), c.ours_text())]
                cells = [paper["network"], f"{size:,}", row.label(network), *texts]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ood_row(paper: dict[str, Any], usual: Row, detector: str) -> dict[str, Any]:
    """The row of the same cell in the paper's out-of-distribution table."""
    for table in paper_tables():
        if (table["kind"], table["network"], table["train_size"]) == (
            "ood",
            paper["network"],
            paper["train_size"],
        ):
            for printed in table["rows"]:
                same = _row_of_paper(printed, NETWORKS[paper["network"]]) == usual
                if same and printed["detector"] == detector:
                    return printed
    return {}


def faults_survived() -> str:
    """The recorded fault campaign, as Markdown."""
    lines = [
        "| # | fault | trials | survived | silent failures | control |",
        "|" + "---|" * 6,
    ]
    recorded = json.loads((RESULTS / "faults.json").read_text())
    for name, row in recorded["faults"].items():
        control = "passed" if row["control"] else "failed"
        numbers = [row["number"], name, row["trials"], row["survived"], row["silent"], control]
        lines.append("| " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines) + "\n"


def steps_cost() -> str:
    """The recorded benchmark, as Markdown."""
    lines = [
        "| network | step | ms | / SoftmaxCE | FLOPs / SoftmaxCE | of matmul peak | memory, MB "
        "| compilation, s | / PyTorch |",
        "|" + "---|" * 9,
    ]
    recorded = json.loads((RESULTS / "benchmark.json").read_text())
    for network in NETWORKS.values():
        for name, row in recorded[network].items():
            against = f"{row['vs_torch']:.2f}" if "vs_torch" in row else "-"
            lines.append(
                f"| {network} | {name} | {row['ms']:.1f} | {row['ratio']:.2f} | "
                f"{row['flops_ratio']:.2f} | {row['peak_share']:.0%} | {row['peak_mb']:,.0f} | "
                f"{row['compile_s']:.1f} | {against} |"
            )
    return "\n".join(lines) + "\n"


# What stands between the markers of a file is made by a function.
GENERATED: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"results": what_was_run},
    ROOT / "experiments" / "README.md": {
        "tables": lambda: as_markdown(all_tables()),
        "faults": faults_survived,
        "benchmark": steps_cost,
        "start-up": start_up.as_markdown,
        "peers": beside_ours,
        "variants": beside_the_paper,
        "estimators": gradients_markdown,
        "estimators in training": training_markdown,
    },
}


def renewed(path: Path) -> str:
    """The text of a file with its generated parts made anew."""
    text = path.read_text()
    for name, make in GENERATED[path].items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n{make()}<!-- end of {name} -->{after}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("--format", choices=sorted(FORMATS), default="md")
    parser.add_argument("--write", action="store_true", help="renew the READMEs instead")
    options = parser.parse_args(argv)
    if options.write:
        for path in GENERATED:
            path.write_text(renewed(path))
    else:
        print(FORMATS[options.format](all_tables()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
