"""``python -m experiments.variants WORKDIR --name=NAME``: record a run beside the paper's cells.

Where ours and the paper's numbers differ, a run with one setting changed tells whether that
setting could be the reason. ``python -m mass_jax.main`` trains it; this copies what a finished
one found to ``experiments/results/variants/``; ``experiments.tables`` puts it beside the paper.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cells import METHODS, NETWORKS, RESULTS, paper_tables
from experiments.running import collect
from mass_jax.command_line import Parser

VARIANTS = RESULTS / "variants"
_METRICS = (("accuracy", 100, "{:.1f}"), ("nll", 1, "{:.2f}"), ("brier", 1, "{:.4f}"))


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
    print(f"{file}: " + ", ".join(f"{name} {record[name]:.4f}" for name, _, _ in _METRICS))
    return 0


def beside_the_paper(directory: Path = VARIANTS) -> str:
    """The recorded variants and the paper's rows, as Markdown."""
    lines = [
        "| variant | cell | steps | accuracy % | paper | NLL | paper | Brier | paper |",
        "|" + "---|" * 9,
    ]
    for path in sorted(directory.glob("*.json")):
        record = json.loads(path.read_text())
        theirs = _paper_row(record)
        of_cell = f"{record['network']}, {record['method']}, n={record['train_size']:,}"
        of_cell += f", beta={record['beta']:g}" if record["method"] != "softmax_ce" else ""
        numbers = []
        for name, scale, form in _METRICS:
            mean, deviation = theirs[name]["mean"], theirs[name]["std"]
            numbers += [
                form.format(scale * record[name]),
                f"{form.format(mean)} ± {form.format(deviation)}",
            ]
        lines.append(
            "| " + " | ".join([path.stem, of_cell, f"{record['steps']:,}", *numbers]) + " |"
        )
    return "\n".join(lines) + "\n"


def _paper_row(record: dict[str, Any]) -> dict[str, Any]:
    """The paper's numbers for the cell a variant departs from, without dropout or decay."""
    (row,) = (
        row
        for table in paper_tables()
        if NETWORKS[table["network"]] == record["network"]
        and table["train_size"] == record["train_size"]
        for row in table["rows"]
        if "nll" in row
        and METHODS[row["method"]] == record["method"]
        and (row["beta"] or 0.0) == record["beta"]
        and not row["dropout"]
        and not row["weight_decay"]
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
