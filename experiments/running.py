"""One cell: the command that trains it, and what becomes of its result. All launchers use it."""

import json
import sys
from pathlib import Path
from typing import Any

from experiments.cells import Cell
from experiments.provenance import recorded
from experiments.sweep_state import failure_file, log_file
from mass_jax.run_log import write_atomically

_VALIDATION = ("validation_accuracy", "validation_nll", "validation_brier")


def command(cell: Cell, workdir: Path, data_dir: str | None) -> list[str]:
    """The training command of a cell."""
    overrides = cell.overrides | ({} if data_dir is None else {"data.dir": data_dir})
    return [
        sys.executable,
        *("-m", "experiments.cell_process"),
        f"--config={cell.config_file}",
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in overrides.items()),
    ]


def settle(cell: Cell, code: int, workdir: Path, results: Path) -> bool:
    """Records the result of a cell whose training ended by itself; whether it is a good one.

    Args:
      cell: that ran.
      code: exit code of its training.
      workdir: of the sweep.
      results: where records go.
    """
    if code != 0:
        log = log_file(cell, workdir)
        lines = log.read_text().strip().splitlines() or ["no output"]
        settle_failure(cell, f"({code}): {lines[-1]}; see {log}", workdir)
        return False
    try:
        record = collect(workdir / cell.name, results / f"{cell.name}.json")
    except (OSError, ValueError, KeyError) as error:
        reason = f"after training: {error!r}; the same command tries again"
        settle_failure(cell, reason, workdir)
        return False
    failure_file(cell, workdir).unlink(missing_ok=True)
    print(
        f"    accuracy {100 * record['accuracy']:.1f} %, NLL {record['nll']:.3f}, "
        f"{duration(record['train_seconds'] / 60)}",
        flush=True,
    )
    return True


def settle_failure(cell: Cell, reason: str, workdir: Path) -> None:
    """Says why a cell has no result, and leaves the reason in a file."""
    print(f"    failed {reason}", file=sys.stderr, flush=True)
    write_atomically(failure_file(cell, workdir), f"{reason}\n")


def collect(workdir: Path, file: Path) -> dict[str, Any]:
    """Copies a finished run's results, with what it ran on, to one small file."""
    record = json.loads((workdir / "results.json").read_text())
    environment = json.loads((workdir / "environment.json").read_text())
    record["environment"] = recorded(environment)
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    record["validation"] = [
        {key: row[key] for key in ("step", *_VALIDATION)} for row in rows if _VALIDATION[0] in row
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(record, indent=2) + "\n")
    return record


def duration(minutes: float) -> str:
    """Minutes as a person would say them."""
    if minutes < 90:
        return "1 minute" if round(minutes) == 1 else f"{minutes:.0f} minutes"
    return f"{minutes / 60:.1f} hours" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"
