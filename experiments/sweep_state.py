"""What a sweep's directory tells of its cells: which there are, and how each of them fares.

Nothing here is held in memory or by one process: cells may run on many machines, and the
sweep may be stopped and started again in between.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from experiments.cells import Cell, is_done
from mass_jax.run_log import write_atomically

CELLS_FILE = "cells.json"
STATES = ("done", "failed", "started", "waiting")


class SweepStateError(Exception):
    """What the directory says of its cells cannot be read or written; says why in one line."""


def log_file(cell: Cell, workdir: Path) -> Path:
    """What its training printed, the last time."""
    return workdir / f"{cell.name}.log"


def failure_file(cell: Cell, workdir: Path) -> Path:
    """There while its last attempt failed, with the reason."""
    return workdir / f"{cell.name}.failed"


def remember(cells: Iterable[Cell], workdir: Path) -> None:
    """Adds cells to those the sweeps of this directory were asked for.

    Raises:
      SweepStateError: if it cannot.
    """
    known = remembered(workdir)
    added = [cell for cell in cells if cell not in known]
    if added:  # the tasks of a Slurm array have nothing to add, and do not get in each other's way
        listed = [cell._asdict() for cell in (*known, *added)]
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            write_atomically(workdir / CELLS_FILE, json.dumps(listed, indent=1) + "\n")
        except OSError as error:
            raise SweepStateError(f"{workdir}: {error.strerror}") from None


def remembered(workdir: Path) -> list[Cell]:
    """The cells all sweeps of this directory were asked for, in the order of asking.

    Raises:
      SweepStateError: if the file that lists them is damaged.
    """
    path = workdir / CELLS_FILE
    if not path.exists():
        return []
    try:
        return [Cell(**fields) for fields in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        raise SweepStateError(
            f"{path}: damaged; remove it: it only lists what was asked for, results stay"
        ) from None


def state(cell: Cell, workdir: Path, results: Path) -> str:
    """One of `STATES`; ``started`` is running now, or broken off and to be resumed."""
    if is_done(cell, results):
        return "done"
    if failure_file(cell, workdir).exists():
        return "failed"
    return "started" if log_file(cell, workdir).exists() else "waiting"
