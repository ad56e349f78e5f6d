"""``python -m experiments.sweep``: run the cells of the paper's tables that are not done.

Stop it at any moment and start it again: finished cells are skipped, a broken-off one
resumes from its checkpoint. Each finished run becomes one file in ``experiments/results/``.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cells import RESULTS, SEEDS, TRAIN_SIZES, Cell, is_done, paper_cells
from experiments.cost import minutes_by_cell
from mass_jax.run_log import write_atomically
from mass_jax.signals import StopSignal

_RECORDED_ENVIRONMENT = ("python", "packages", "devices", "cpu_count", "commit")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    cells = _chosen(options)
    if not cells:
        print("error: no cell of the paper's tables fits these options", file=sys.stderr)
        return 2
    waiting = [cell for cell in cells if not is_done(cell, options.results)]
    print(f"{len(cells)} cells, {len(cells) - len(waiting)} done")
    minutes = minutes_by_cell(waiting)
    if options.dry_run:
        for cell in waiting:
            print(f"{cell.name:<60} {_duration(minutes[cell])}")
        print(f"{'all of them, one after another':<60} {_duration(sum(minutes.values()))}")
        return 0
    with StopSignal() as stop, stop.deferred():
        failed = _run_all(waiting, minutes, options, stop)
    if stop.signum:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + stop.signum
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep", description=__doc__, allow_abbrev=False
    )
    numbers = lambda kind: lambda text: tuple(kind(part) for part in text.split(","))
    parser.add_argument("--network", choices=["small_mlp", "resnet20"], required=True)
    parser.add_argument("--methods", type=numbers(str), help="e.g. softmax_ce,vib,mass")
    parser.add_argument("--betas", type=numbers(float), help="e.g. 0,1e-3")
    parser.add_argument("--train_sizes", type=numbers(int), help=f"of {TRAIN_SIZES}")
    parser.add_argument("--seeds", type=numbers(int), help=f"of {SEEDS}")
    parser.add_argument(
        "--batch_stats",
        choices=["paper", "frozen"],
        default="paper",
        help="definition of the Jacobian in MASS cells; the paper's rows are 'paper'",
    )
    parser.add_argument(
        "--regularised",
        choices=["yes", "no"],
        help="only the rows with dropout or weight decay, or only those without",
    )
    parser.add_argument("--steps", type=int, help="fewer than the paper's, recorded as such")
    parser.add_argument("--max_minutes", type=float, help="stop then; run again to go on")
    parser.add_argument("--data_dir", help="as --config.data.dir")
    parser.add_argument("--workdir", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dry_run", action="store_true", help="only print cells and costs")
    return parser


def _chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells asked for. A seed or size beyond the paper's is no mistake of the user's."""
    wanted = {
        "method": options.methods,
        "beta": options.betas,
        "train_size": options.train_sizes,
        "seed": options.seeds,
    }
    return [
        cell
        for cell in paper_cells(options.network, options.steps, options.batch_stats)
        if all(
            allowed is None or getattr(cell, field) in allowed for field, allowed in wanted.items()
        )
        and options.regularised in (None, "yes" if cell.dropout or cell.weight_decay else "no")
        and (options.batch_stats == "paper" or (cell.method == "mass" and cell.beta != 0))
    ]


def _run_all(
    cells: list[Cell], minutes: dict[Cell, float], options: argparse.Namespace, stop: StopSignal
) -> list[Cell]:
    """Runs cell after cell; returns those that failed."""
    began, failed = time.monotonic(), []
    for index, cell in enumerate(cells):
        spent = (time.monotonic() - began) / 60
        left = None if options.max_minutes is None else options.max_minutes - spent
        if left is not None and left <= 0:
            print(f"{options.max_minutes:g} minutes are over; {len(cells) - index} cells left")
            break
        remaining = sum(minutes[later] for later in cells[index:])
        print(
            f"[{index + 1}/{len(cells)}] {cell.name}: about {_duration(minutes[cell])}, "
            f"all in about {_duration(remaining)}",
            flush=True,
        )
        code = _run(cell, options, stop, left)
        if stop.signum:
            break
        if code == 0:
            record = collect(cell, options.workdir / cell.name, options.results)
            print(
                f"    accuracy {100 * record['accuracy']:.1f} %, NLL {record['nll']:.3f}, "
                f"{_duration(record['train_seconds'] / 60)}",
                flush=True,
            )
        elif code != 128 + signal.SIGTERM:  # ours, when the minutes are over
            failed.append(cell)
            log = options.workdir / f"{cell.name}.log"
            lines = log.read_text().strip().splitlines() or ["no output"]
            print(f"    failed ({code}): {lines[-1]}; see {log}", file=sys.stderr, flush=True)
    return failed


def _run(
    cell: Cell, options: argparse.Namespace, stop: StopSignal, max_minutes: float | None
) -> int:
    """One training command, in a process of its own; its exit code."""
    options.workdir.mkdir(parents=True, exist_ok=True)
    with (options.workdir / f"{cell.name}.log").open("w") as log:
        process = subprocess.Popen(
            command(cell, options.workdir / cell.name, options.data_dir),
            stdout=log,
            stderr=None if sys.stderr.isatty() else log,
        )
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        while True:
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if stop.signum or (deadline is not None and time.monotonic() > deadline):
                    process.send_signal(signal.SIGTERM)  # it saves and stops
                    return process.wait()


def command(cell: Cell, workdir: Path, data_dir: str | None) -> list[str]:
    """The training command of a cell."""
    overrides = cell.overrides | ({} if data_dir is None else {"data.dir": data_dir})
    return [
        sys.executable,
        *("-m", "mass_jax.main"),
        f"--config={cell.config_file}",
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in overrides.items()),
    ]


def collect(cell: Cell, workdir: Path, results: Path) -> dict[str, Any]:
    """Copies a finished run's results, with what it ran on, to one small file."""
    record = json.loads((workdir / "results.json").read_text())
    environment = json.loads((workdir / "environment.json").read_text())
    record["environment"] = {key: environment[key] for key in _RECORDED_ENVIRONMENT}
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(results / f"{cell.name}.json", json.dumps(record, indent=2) + "\n")
    return record


def _duration(minutes: float) -> str:
    if minutes < 90:
        return f"{minutes:.0f} minutes"
    return f"{minutes / 60:.1f} hours" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"


if __name__ == "__main__":
    sys.exit(main())
