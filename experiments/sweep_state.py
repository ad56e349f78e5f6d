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


def log_file(cell: Cell, workdir: Path) -> Path:
    """What its training printed, the last time."""
    return workdir / f"{cell.name}.log"


def failure_file(cell: Cell, workdir: Path) -> Path:
    """There while its last attempt failed, with the reason."""
    return workdir / f"{cell.name}.failed"


def remember(cells: Iterable[Cell], workdir: Path) -> None:
    """Adds cells to those the sweeps of this directory were asked for."""
    known = remembered(workdir)
    added = [cell for cell in cells if cell not in known]
    if added:  # the tasks of a Slurm array have nothing to add, and do not get in each other's way
        workdir.mkdir(parents=True, exist_ok=True)
        listed = [cell._asdict() for cell in (*known, *added)]
        write_atomically(workdir / CELLS_FILE, json.dumps(listed, indent=1) + "\n")


def remembered(workdir: Path) -> list[Cell]:
    """The cells all sweeps of this directory were asked for, in the order of asking."""
    path = workdir / CELLS_FILE
    return [Cell(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


def state(cell: Cell, workdir: Path, results: Path) -> str:
    """One of `STATES`; ``started`` is running now, or broken off and to be resumed."""
    if is_done(cell, results):
        return "done"
    if failure_file(cell, workdir).exists():
        return "failed"
    return "started" if log_file(cell, workdir).exists() else "waiting"
