"""``python -m experiments.records``: the runs in ``results/`` beside the paper, as Markdown.

``--write`` puts the table between the markers in ``experiments/README.md``.
"""

import sys
from pathlib import Path
from typing import Any

from experiments.cells import METHODS, paper_tables, records

README = Path(__file__).parent / "README.md"
MARKERS = ("<!-- records -->\n", "<!-- end of records -->")
_OWN_DETECTOR = {"softmax_ce": "max_log_q", "mass": "max_log_q", "vib": "rate"}


def paper_value(record: dict[str, Any], metric: str) -> str:
    """The paper's mean and deviation of a metric of the same cell, at full length."""
    for table in paper_tables():
        if table["network"].lower() != record["network"].replace("_", ""):
            continue
        for row in table["rows"]:
            same = (
                METHODS[row["method"]] == record["method"]
                and (row["beta"] or 0.0) == record["beta"]
                and bool(row["weight_decay"]) == (record["weight_decay"] > 0)
                and bool(row["dropout"]) == (record["dropout_rate"] > 0)
            )
            value = row.get(metric)
            if table["train_size"] is None and isinstance(value, dict):
                value = value.get(str(record["train_size"]))
            elif table["train_size"] != record["train_size"]:
                value = None
            if same and isinstance(value, dict) and "mean" in value:
                return f"{value['mean']} ± {value['std']}"
    return "-"


def table() -> str:
    """One row per recorded run."""
    lines = [
        "| run | examples | steps | accuracy % | paper | NLL | paper | Brier | AUROC | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records():
        (ood,) = record["ood"].values()
        beta = "" if record["method"] == "softmax_ce" else f", beta {record['beta']:g}"
        cells = [
            f"{record['method']} {record['network']}{beta}",
            f"{record['train_size']:,}",
            f"{record['steps']:,}",
            f"{100 * record['accuracy']:.1f}",
            paper_value(record, "accuracy"),
            f"{record['nll']:.2f}",
            paper_value(record, "nll"),
            f"{record['brier']:.4f}",
            f"{ood[_OWN_DETECTOR[record['method']]]['auroc']:.3f}",
            f"{record['train_seconds'] / 60:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The text with the current table between the markers."""
    before, rest = text.split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    return before + MARKERS[0] + table() + MARKERS[1] + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_table(README.read_text()))
    else:
        print(table(), end="")
