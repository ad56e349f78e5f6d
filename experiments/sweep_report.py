"""``python -m experiments.sweep_report``: a sweep as one page, ``report.html`` in its workdir.

Every sweep writes it when it ends or is stopped; the command makes it at any time, also while
cells run elsewhere. Numbers are those of `experiments.tables`.
"""

import argparse
import collections
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experiments import sweep_page
from experiments.cells import METHODS, NETWORKS, RESULTS, TRAIN_SIZES, Cell, records_by_name
from experiments.comparison import PAPER_STEPS, Row, Table
from experiments.running import duration
from experiments.sweep_page import SortableCell
from experiments.sweep_state import (
    STATES,
    SweepStateError,
    failure_file,
    log_file,
    remembered,
    state,
)
from experiments.tables import HEADINGS, all_tables, row_of_run
from mass_jax.command_line import Parser
from mass_jax.report_page import Html, element, joined, page, table
from mass_jax.run_log import write_atomically

REPORT = "report.html"
_NETWORK_TITLES = {name: title for title, name in NETWORKS.items()}
_METHOD_TITLES = {name: title for title, name in METHODS.items()}
_MEANING = {
    "done": "recorded",
    "failed": "failed",
    "started": "running, or broken off",
    "waiting": "waiting",
}
_RUN_HEADER = (
    "run", "network", "examples", "seed", "steps", "state", "accuracy %", "NLL", "training",
    "files",
)  # fmt: skip


def write_report(workdir: Path, results: Path = RESULTS, out: Path | None = None) -> Path:
    """Writes the page; returns where it is.

    Args:
      workdir: of the sweep.
      results: its records.
      out: the file to write; ``report.html`` in the workdir by default.
    """
    out = out or workdir / REPORT
    out.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(out):
        cells = remembered(workdir)
        found = records_by_name(results)
        write_atomically(out, _page(cells, found, workdir, results, out.parent))
    return out


def report_if_possible(workdir: Path, results: Path) -> None:
    """Writes the page, or says in one line why not: the sweep is good without one."""
    try:
        print(f"report: {write_report(workdir, results)}", flush=True)
    except Exception as error:  # a record somebody else wrote may be anything
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"no report (python -m experiments.sweep_report): {reason}", file=sys.stderr)


@contextlib.contextmanager
def _one_at_a_time(out: Path) -> Iterator[None]:
    """Cells that end together on several machines write one after the other; the last sees all."""
    with out.with_name(f".{out.name}.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _page(
    cells: Sequence[Cell],
    found: dict[str, dict[str, Any]],
    workdir: Path,
    results: Path,
    here: Path,
) -> str:
    states = {cell: state(cell, workdir, results) for cell in cells}
    tables = all_tables(list(found.values()))
    title = "MASS Learning: a sweep, and the paper's tables"
    choices = {
        "network": {name: name for name in NETWORKS},
        "method": {name: name for name in METHODS},
        "size": {str(size): f"{size:,}" for size in sorted(TRAIN_SIZES)},
        "metric": HEADINGS,
    }
    return page(
        title,
        [
            element("h1", title),
            element("p", _what_was_asked(cells), class_="soft"),
            *(_progress(states, workdir) if states else []),
            sweep_page.filters(choices, only_run=_few_were_run(tables)),
            element("h2", "Runs"),
            _runs(states, found, workdir, results, here),
            *sweep_page.comparison_heading(),
            sweep_page.filtered("tables", map(sweep_page.comparison_section, tables)),
            element("h2", "Environment"),
            _environments(found),
        ],
        style=sweep_page.STYLE,
        script=sweep_page.SCRIPT,
    )


def _few_were_run(tables: Sequence[Table]) -> bool:
    """Whether some rows were run, but less than half of them: the others would bury those."""
    were_run = [any(c.ours for c in row.comparisons) for table in tables for row in table.rows]
    return 0 < sum(were_run) < len(were_run) / 2


def _what_was_asked(cells: Sequence[Cell]) -> str:
    """The cells of the sweep in words."""
    if not cells:
        return "No sweep was started in this directory; the tables show what is recorded."
    listed = lambda values: ", ".join(map(str, values))
    parts = []
    for network in dict.fromkeys(cell.network for cell in cells):
        mine = [cell for cell in cells if cell.network == network]
        methods = dict.fromkeys(_METHOD_TITLES[cell.method] for cell in mine)
        sizes = [f"{size:,}" for size in sorted({cell.train_size for cell in mine})]
        seeds = sorted({cell.seed for cell in mine})
        parts.append(
            f"{_NETWORK_TITLES[network]}: {listed(methods)} on {listed(sizes)} examples, "
            f"{'seed' if len(seeds) == 1 else 'seeds'} {listed(seeds)}"
        )
    runs = "1 run" if len(cells) == 1 else f"{len(cells)} runs"
    return f"{runs} asked for. {'; '.join(parts)}."


def _progress(states: dict[Cell, str], workdir: Path) -> list[Html]:
    counts = collections.Counter(states.values())
    cards = [
        element(
            "li",
            joined([element("b", counts[name]), element("span", _MEANING[name])]),
            class_=name,
        )
        for name in STATES
    ]
    words = ", ".join(f"{counts[name]} {_MEANING[name]}" for name in STATES)
    bar = [
        element("span", "", class_=name, style=f"flex: {counts[name]} 0 0")
        for name in STATES
        if counts[name]
    ]
    parts = [
        element("h2", "Progress"),
        element("ul", joined(cards), class_="cards"),
        element("div", joined(bar), class_="progress", role="img", aria_label=words),
    ]
    reasons = [
        (cell.name, failure_file(cell, workdir).read_text().strip())
        for cell, name in states.items()
        if name == "failed"
    ]
    if reasons:
        parts += [element("h3", "Failed"), table("Failed", ("run", "reason"), reasons)]
    return parts


def _runs(
    states: dict[Cell, str],
    found: dict[str, dict[str, Any]],
    workdir: Path,
    results: Path,
    here: Path,
) -> Html:
    """Every run asked for, and every one recorded."""
    by_name = {cell.name: cell for cell in states}
    rows = []
    for name in (*by_name, *(name for name in found if name not in by_name)):
        cell = by_name.get(name)
        # A record of another configuration is in the tables as what it is; not as this cell.
        status = "done" if cell is None else states[cell]
        record = found.get(name) if status == "done" else None
        if record is not None:
            row, network = row_of_run(record), record["network"]
            size, seed = record["train_size"], record["seed"]
        else:
            assert cell is not None
            row, network, size, seed = _row(cell), cell.network, cell.train_size, cell.seed
        files = {"record": results / f"{name}.json"} if record is not None else {}
        files |= {"report": workdir / name / REPORT}
        files |= {"log": log_file(cell, workdir)} if cell else {}
        numbers = [SortableCell("not run", "", "number missing")] * 3
        if record is not None:
            spent = duration(record["train_seconds"] / 60)
            numbers = [
                SortableCell(f"{100 * record['accuracy']:.1f}", record["accuracy"], "number"),
                SortableCell(f"{record['nll']:.3f}", record["nll"], "number"),
                SortableCell(spent, record["train_seconds"], "number"),
            ]
        label = row._replace(steps=PAPER_STEPS[network]).label(network)  # steps have a column
        title = _NETWORK_TITLES[network]
        shown = [
            SortableCell(label, label),
            SortableCell(title, title),
            SortableCell(f"{size:,}", size, "number"),
            SortableCell(seed, seed, "number"),
            SortableCell(f"{row.steps:,}", row.steps, "number"),
            SortableCell(status, status, status),
            *numbers,
            SortableCell(_links(files, here), ""),
        ]
        method = _METHOD_TITLES[row.method]
        tags: dict[str, object] = {"data_network": title, "data_method": method}
        rows.append(({**tags, "data_size": size, "data_state": status}, shown))
    if not rows:
        return element("p", "No run was asked for, and none is recorded.")
    return sweep_page.filtered("runs", [sweep_page.sortable_table("Runs", _RUN_HEADER, rows)])


def _row(cell: Cell) -> Row:
    """The row of the tables a cell belongs to."""
    return Row(
        cell.method,
        cell.beta,
        cell.weight_decay,
        cell.dropout,
        cell.batch_stats if cell.method == "mass" else None,
        cell.steps or PAPER_STEPS[cell.network],
    )


def _links(files: dict[str, Path], here: Path) -> Html:
    """Links, relative to the page, to those files that exist."""
    return joined(
        element("a", name, href=quote(os.path.relpath(path, here)))
        for name, path in files.items()
        if path.exists()
    )


def _environments(found: dict[str, dict[str, Any]]) -> Html:
    """What the recorded runs ran on, the most frequent first."""
    counted = collections.Counter(
        json.dumps(record.get("environment"), sort_keys=True) for record in found.values()
    )
    rows = []
    for text, count in counted.most_common():
        seen = json.loads(text) or {}
        value = lambda name, seen=seen: seen.get(name) or "not recorded"
        packages = seen.get("packages") or {}
        devices = seen.get("devices") or []
        rows.append(
            (
                str(value("commit"))[:12],
                count,
                value("python"),
                ", ".join(devices) or "not recorded",
                value("cpu_count"),
                ", ".join(f"{n} {v}" for n, v in packages.items()) or "not recorded",
            )
        )
    header = ("commit", "runs", "Python", "devices", "CPUs", "packages")
    return table("Environment", header, rows)


def _directory(text: str) -> Path:
    """A directory that is there: what was mistyped must not look like an empty sweep."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text!r}")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.sweep_report", description=__doc__)
    parser.add_argument(
        "--workdir", type=_directory, default=Path("runs/sweep"), help="of the sweep"
    )
    parser.add_argument("--results", type=_directory, default=RESULTS, help="its records")
    parser.add_argument("--out", type=Path, help="default: report.html in the workdir")
    options = parser.parse_args(argv)
    try:
        print(write_report(options.workdir, options.results, options.out))
    except (SweepStateError, OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
