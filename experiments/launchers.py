"""Where the cells of a sweep run: one after another here, on a Ray cluster, or by Slurm.

Every launcher runs the same command for a cell (`experiments.running.command`, in the process of
`experiments.cell_process`) and records it by the same function (`experiments.running.settle`).
"""

import argparse
import itertools
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from experiments import cell_process, running
from experiments.cells import Cell
from experiments.running import duration
from experiments.sweep_state import failure_file, log_file
from mass_jax.run_log import write_atomically
from mass_jax.signals import StopSignal

SLURM_SCRIPT = "sweep.sbatch"
# How a training ends that was asked to stop; negative if that came before its handlers.
_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}
_RETRIES_AFTER_LOST_WORKERS = 10
_ATTEMPTS_TO_START = 4  # Ray gives its own processes 30 s, too few on a busy machine
# Ray cancels a running task by an interrupt, which was seen to get lost once in many times.
_SECONDS_FOR_RAY_TO_CANCEL = 10.0
_STOP_FILE = ".stop"  # in the workdir, which all machines see
_OBJECT_STORE_BYTES = 100 * 1024**2  # exit codes are all that travels
# Variables a training on another machine must see as ours would.
_PASSED_ON = ("JAX_", "XLA_", "TFDS_", "PYTHONPATH")


class LauncherError(Exception):
    """The cells cannot be started; says why in one line."""


class Outcome(NamedTuple):
    """How a launch ended.

    Attributes:
      failed: cells whose training failed.
      signum: the signal that stopped it, or zero.
    """

    failed: list[Cell]
    signum: int


class Pace:
    """How long cells take beside what was expected of them, learnt from those that ended.

    Example:
      >>> pace = Pace()
      >>> pace.add(expected=10.0, taken=15.0)
      >>> pace.corrected(20.0)
      30.0
    """

    def __init__(self) -> None:
        self._expected = self._taken = 0.0

    def add(self, expected: float, taken: float) -> None:
        """Counts a cell, in minutes."""
        self._expected += expected
        self._taken += taken

    def corrected(self, minutes: float) -> float:
        """An expectation, by what the others took."""
        return minutes * self._taken / self._expected if self._expected else minutes


def run_here(cells: list[Cell], minutes: dict[Cell, float], options: argparse.Namespace) -> Outcome:
    """Runs cell after cell on this machine."""
    with StopSignal() as stop, stop.deferred():
        deadline = _deadline(options)
        is_stop_asked = lambda: bool(stop.signum) or time.monotonic() >= deadline
        failed = []
        pace = Pace()
        for index, cell in enumerate(cells):
            if is_stop_asked():
                break
            remaining = sum(minutes[later] for later in cells[index:])
            print(
                f"[{index + 1}/{len(cells)}] {cell.name}: about "
                f"{duration(pace.corrected(minutes[cell]))}, "
                f"all in about {duration(pace.corrected(remaining))}",
                flush=True,
            )
            failure_file(cell, options.workdir).unlink(missing_ok=True)
            is_new, began = not (options.workdir / cell.name).exists(), time.monotonic()
            code = cell_process.run(_command(cell, options), _log(cell, options), is_stop_asked)
            if code in _STOPPED and is_stop_asked():
                break
            if not running.settle(cell, code, options.workdir, options.results):
                failed.append(cell)
            elif is_new:  # one that resumed tells nothing of what a whole one takes
                pace.add(minutes[cell], (time.monotonic() - began) / 60)
        else:
            return Outcome(failed, stop.signum)
        if not stop.signum:
            print(f"{options.max_minutes:g} minutes are over; {len(cells) - index} cells left")
        return Outcome(failed, stop.signum)


def run_on_ray(
    cells: list[Cell], minutes: dict[Cell, float], options: argparse.Namespace
) -> Outcome:
    """Runs cells on a Ray cluster, as many at a time as fit.

    A cell whose worker or node is lost starts again elsewhere, from its checkpoint: all
    machines see the same ``--workdir``.
    """
    ray = _connected_ray(options)
    try:
        # Only now: Ray has taken the signals for itself when it connected.
        with StopSignal() as stop, stop.deferred():
            return Outcome(_run_tasks(ray, cells, minutes, options, stop), stop.signum)
    finally:
        ray.shutdown()


def _connected_ray(options: argparse.Namespace) -> ModuleType:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import: no telemetry
    try:
        import ray
    except ImportError:
        raise LauncherError("--launcher=ray needs Ray: pip install 'mass-jax[ray]'") from None
    is_own = options.ray_address == "local"
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    for attempt in reversed(range(_ATTEMPTS_TO_START if is_own else 1)):
        try:
            more = own if is_own else {}
            ray.init(options.ray_address, log_to_driver=False, logging_level=logging.ERROR, **more)
            break
        except Exception as error:  # Ray raises bare ones, too
            ray.shutdown()
            if attempt == 0:
                reason = " ".join(str(error).split())
                raise LauncherError(f"--ray_address={options.ray_address}: {reason}") from None
    needed = {"CPU": options.cpus_per_cell, "GPU": options.gpus_per_cell}
    if not any(
        all(node["Resources"].get(kind, 0) >= amount for kind, amount in needed.items())
        for node in ray.nodes()
        if node["Alive"]
    ):
        words = f"no machine of the cluster has {needed['CPU']:g} CPUs and {needed['GPU']:g} GPUs"
        if is_own:
            ray.shutdown()
            raise LauncherError(words)
        print(f"{words}; waiting for one to join", file=sys.stderr, flush=True)
    return ray


def _run_tasks(
    ray: ModuleType,
    cells: list[Cell],
    minutes: dict[Cell, float],
    options: argparse.Namespace,
    stop: StopSignal,
) -> list[Cell]:
    """One Ray task per cell; returns the cells that failed."""
    task = ray.remote(
        num_cpus=options.cpus_per_cell,
        num_gpus=options.gpus_per_cell,
        max_retries=_RETRIES_AFTER_LOST_WORKERS,
    )(cell_process.run)
    passed_on = {name: text for name, text in os.environ.items() if name.startswith(_PASSED_ON)}
    stop_file = options.workdir / _STOP_FILE
    stop_file.unlink(missing_ok=True)
    unfinished = {}
    for cell in cells:
        failure_file(cell, options.workdir).unlink(missing_ok=True)
        reference = task.options(name=cell.name).remote(
            _command(cell, options),
            _log(cell, options),
            is_stop_asked=partial(os.path.exists, str(stop_file)),
            environment=passed_on,
            directory=os.getcwd(),
        )
        unfinished[reference] = cell
    print(f"{len(cells)} cells, {_places(ray, options)} at a time", flush=True)
    deadline, failed, is_cancelled, last_resort = _deadline(options), [], False, float("inf")
    finished = itertools.count(1)
    while unfinished:
        if not is_cancelled and (stop.signum or time.monotonic() >= deadline):
            is_cancelled, last_resort = True, time.monotonic() + _SECONDS_FOR_RAY_TO_CANCEL
            for reference in unfinished:
                ray.cancel(reference)  # waiting ones are dropped, running ones save and stop
        if time.monotonic() >= last_resort:
            stop_file.touch()  # Ray's word has not reached all of them; this they look at, too
        for reference in ray.wait(list(unfinished), timeout=0.5)[0]:
            cell = unfinished.pop(reference)
            try:
                code, reason = ray.get(reference), ""
            except ray.exceptions.TaskCancelledError:
                continue
            except ray.exceptions.RayError as error:
                code, reason = 1, " ".join(str(error).split())[:300]
            if code in _STOPPED and is_cancelled:
                continue
            waiting = [minutes[later] for later in unfinished.values()]
            left = max(sum(waiting) / _places(ray, options), *waiting, 0.0)
            print(
                f"[{next(finished)}/{len(cells)}] {cell.name} ended; "
                f"the others in about {duration(left)}",
                flush=True,
            )
            if reason:
                running.settle_failure(cell, reason, options.workdir)
            if reason or not running.settle(cell, code, options.workdir, options.results):
                failed.append(cell)
    stop_file.unlink(missing_ok=True)
    return failed


def _places(ray: ModuleType, options: argparse.Namespace) -> int:
    """How many cells the cluster can run at a time, now."""
    total = ray.cluster_resources()
    needed = {"CPU": options.cpus_per_cell, "GPU": options.gpus_per_cell}
    fitting = [int(total.get(kind, 0) // n) for kind, n in needed.items() if n > 0]
    return max(1, min(fitting, default=1))


def write_slurm_script(
    cells: list[Cell], minutes: dict[Cell, float], options: argparse.Namespace
) -> Outcome:
    """Writes a Slurm job array, one task per cell, and says how to submit it.

    The cells stand in the script itself, which Slurm copies when it is submitted: another
    sweep cannot change what a task that still waits will run.
    """
    del minutes
    if "\n" in options.slurm_options:
        raise LauncherError("--slurm_options: must be one line")
    workdir = options.workdir
    one_cell = [
        sys.executable,
        *("-m", "experiments.sweep"),
        f"--network={options.network}",
        f"--batch_stats={options.batch_stats}",
        *([] if options.steps is None else [f"--steps={options.steps}"]),
        *([] if options.data_dir is None else [f"--data_dir={options.data_dir}"]),
        f"--workdir={workdir}",
        f"--results={options.results}",
    ]
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=mass_jax",
        f"#SBATCH --array=0-{len(cells) - 1}",
        "#SBATCH --ntasks=1",
        f"#SBATCH --output={shlex.quote(str(workdir))}/slurm-%A_%a.log",
        "#SBATCH --open-mode=append",
        "# Preempted tasks come back and resume; before the time is over there is some to save.",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",
        *([f"#SBATCH {options.slurm_options}"] if options.slurm_options else []),
        "set -euo pipefail",
        "cells=(",
        *(f"  {cell.name}" for cell in cells),
        ")",
        f"cd {shlex.quote(os.getcwd())}",
        "# In place of this shell, so that Slurm's signals reach it.",
        f'exec {shlex.join(one_cell)} --cell="${{cells[$SLURM_ARRAY_TASK_ID]}}"',
        "",
    ]
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(workdir / SLURM_SCRIPT, "\n".join(lines))
    print(f"{len(cells)} cells in {workdir / SLURM_SCRIPT}; submit them by")
    print(shlex.join(["sbatch", str(workdir / SLURM_SCRIPT)]))
    return Outcome([], 0)


def _command(cell: Cell, options: argparse.Namespace) -> list[str]:
    return running.command(cell, options.workdir / cell.name, options.data_dir)


def _log(cell: Cell, options: argparse.Namespace) -> Path:
    return log_file(cell, options.workdir)


def _deadline(options: argparse.Namespace) -> float:
    """On the monotonic clock."""
    minutes = float("inf") if options.max_minutes is None else options.max_minutes
    return time.monotonic() + 60 * minutes


LAUNCHERS: dict[str, Callable[[list[Cell], dict[Cell, float], argparse.Namespace], Outcome]] = {
    "local": run_here,
    "ray": run_on_ray,
    "slurm": write_slurm_script,
}
