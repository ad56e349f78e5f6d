"""``python -m experiments.variants WORKDIR --name=NAME``: record a run beside the paper's cells.

Where ours and the paper's numbers differ, a run with one setting changed tells whether that
setting could be the reason. ``python -m mass_jax.main`` trains it; this copies what a finished
one found to ``experiments/results/variants/``; ``experiments.tables`` puts it beside the paper.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cells import METHODS, NETWORKS, RESULTS, paper_tables, records
from experiments.comparison import PAPER_STEPS, Comparison, Row
from experiments.running import collect
from mass_jax.command_line import Parser

VARIANTS = RESULTS / "variants"
_DIGITS = {"accuracy": 1, "nll": 2, "brier": 4, "entropy": 3}  # after the point, as in the paper


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.variants", description=__doc__)
    parser.add_argument("workdir", type=Path, help="of a finished run")
    parser.add_argument("--name", required=True, help="says what was changed: q-rate-5e-4")
    parser.add_argument("--results", type=Path, default=VARIANTS)
    options = parser.parse_args(argv)
    if not (options.workdir / "results.json").exists():
        parser.error(f"{options.workdir}: no finished run (it has no results.json)")
    if Path(options.name).name != options.name:
        parser.error(f"--name={options.name}: must be a plain name, without directories")
    file = options.results / f"{options.name}.json"
    record = collect(options.workdir, file)
    print(f"{file}: " + ", ".join(f"{name} {record[name]:.4f}" for name in _DIGITS))
    return 0


def beside_the_paper(directory: Path = VARIANTS, results: Path = RESULTS) -> str:
    """Our full-length cells and their variants under the paper's rows, as Markdown.

    Further seeds of a variant are named like it, with ``-seed1`` behind, and stand in its row.
    """
    variants: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(directory.glob("*.json")):
        name = re.sub(r"-seed\d+$", "", path.stem)
        run = json.loads(path.read_text())
        like = variants.setdefault(name, [])
        if like and (_setting(run), run["steps"]) != (_setting(like[0]), like[0]["steps"]):
            raise ValueError(f"{path}: not a further seed of {name}: another cell or length")
        like.append(run)
    cells = [run for run in records(results) if run["steps"] == PAPER_STEPS[run["network"]]]
    lines = [
        "| cell | run | steps | accuracy % | NLL | Brier | entropy |",
        "|" + "---|" * 7,
    ]
    for table in paper_tables():
        for row in table["rows"] if table["kind"] == "uncertainty" else ():
            setting = _setting_of_row(table, row)
            of_cell = [run for run in cells if _setting(run) == setting]
            beside = {"ours": of_cell} if of_cell else {}
            beside |= {n: runs for n, runs in variants.items() if _setting(runs[0]) == setting}
            if not beside:
                continue
            steps = PAPER_STEPS[NETWORKS[table["network"]]]
            numbers = [_compared(row, name, ()).paper_text() for name in _DIGITS]
            lines.append(_line(_cell_label(table, row), "paper", steps, numbers))
            for name, runs in beside.items():
                numbers = [_compared(row, metric, runs).deviations_text() for metric in _DIGITS]
                seeds = f" (n={len(runs)})" if len(runs) > 1 else ""
                lines.append(_line("", name + seeds, runs[0]["steps"], numbers))
    return "\n".join(lines) + "\n"


def _line(cell: str, run: str, steps: int, numbers: Sequence[str]) -> str:
    return "| " + " | ".join([cell, run, f"{steps:,}", *numbers]) + " |"


def _compared(row: dict[str, Any], metric: str, runs: Sequence[dict[str, Any]]) -> Comparison:
    scale = 100 if metric == "accuracy" else 1
    paper = (row[metric]["mean"], row[metric]["std"])
    return Comparison(paper, tuple(scale * run[metric] for run in runs), _DIGITS[metric])


def _cell_label(table: dict[str, Any], row: dict[str, Any]) -> str:
    network, method, beta, dropout, decay, size = _setting_of_row(table, row)
    label = Row(method, beta, decay, dropout, None, PAPER_STEPS[network]).label(network)
    return f"{table['network']}, {size:,} examples, {label}"


def _setting_of_row(table: dict[str, Any], row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        NETWORKS[table["network"]],
        METHODS[row["method"]],
        row["beta"] or 0.0,
        bool(row["dropout"]),
        bool(row["weight_decay"]),
        table["train_size"],
    )


def _setting(run: dict[str, Any]) -> tuple[Any, ...]:
    regularised = (run["dropout_rate"] > 0, run["weight_decay"] > 0)
    return (run["network"], run["method"], run["beta"], *regularised, run["train_size"])


if __name__ == "__main__":
    sys.exit(main())
