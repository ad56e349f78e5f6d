"""``python -m mass_jax.main``: train and evaluate one experiment.

A config file is Python code and is executed: run only files you trust.
"""

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from mass_jax import options as command_line
from mass_jax import reporting
from mass_jax.checkpoint import CheckpointError
from mass_jax.compilation_cache import compilation_cache
from mass_jax.config import ConfigError, apply_overrides, resolve
from mass_jax.data import DataError, load_dataset
from mass_jax.signals import Interrupted, StopSignal
from mass_jax.training import (
    TrainingDiverged,
    check_same_run,
    evaluate,
    finished_results,
    train,
)
from mass_jax.workdir import locked, run_name
from mass_jax.working_memory import run_in_main_thread

_SHOWN = ("accuracy", "nll", "brier", "entropy", "ece", "aurc")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    run_in_main_thread()
    with StopSignal() as stop:
        return _main(sys.argv[1:] if argv is None else argv, stop)


def _main(argv: list[str], stop: StopSignal) -> int:
    try:
        options, overrides = command_line.parse(argv)
        level = logging.WARNING if options.quiet else logging.INFO
        logging.basicConfig(format="%(message)s", level=level)
        for library in ("absl", "asyncio", "jax", "matplotlib", "orbax"):
            # What they call an error comes to us as an exception, and is said in one line.
            logging.getLogger(library).setLevel(logging.CRITICAL)
        config = resolve(apply_overrides(command_line.load_config(options.config), overrides))
        _join_cluster(options)
        workdir = Path(options.workdir) if options.workdir else Path("runs") / run_name(config)
        with compilation_cache():
            results = _run(config, workdir, options, stop)
    except (ConfigError, DataError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingDiverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = " ".join(str(error).split())[:300]
        print(
            f"error: lost contact with another process ({reason}); start all again with the "
            "same command to go on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # leaving politely would wait for the lost one
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 128 + error.signum
    if jax.process_index() == 0:
        print(summary(results, workdir))
    return 0


def _run(
    config: ConfigDict, workdir: Path, options: argparse.Namespace, stop: StopSignal
) -> dict[str, Any]:
    check_same_run(config, workdir)
    finished = finished_results(config, workdir)
    if finished is not None and options.mode == "train":
        print(f"finished before: {workdir}")
        return finished
    dataset = load_dataset(config.data.name, config.data.dir, tuple(config.data.ood))
    # Only process 0 writes, so only process 0 keeps others out.
    with locked(workdir) if jax.process_index() == 0 else contextlib.nullcontext():
        if options.mode == "evaluate":
            return evaluate(config, dataset, workdir)
        results = train(config, dataset, workdir, stop=stop, quiet=options.quiet)
        if jax.process_index() == 0:
            with stop.deferred():  # the run is complete; a signal finds nothing to save
                reporting.report_if_possible(workdir)
        return results


def _join_cluster(options: argparse.Namespace) -> None:
    # JAX's preemption service would take SIGTERM away from `StopSignal`.
    jax.config.update("jax_enable_preemption_service", False)
    explicit = (options.coordinator, options.num_processes, options.process_id)
    if any(value is not None for value in explicit):
        if any(value is None for value in explicit):
            raise ConfigError("--coordinator, --num_processes and --process_id go together")
        jax.distributed.initialize(*explicit)
    elif options.distributed or _is_one_of_many():
        jax.distributed.initialize()
    else:
        return
    # Now, while all are here: CPU processes wait only seconds for each other's connection, and
    # the first step comes after a compilation that may take one of them much longer.
    multihost_utils.sync_global_devices("started")


def _is_one_of_many() -> bool:
    """Whether Slurm or a TPU slice says that this process has companions."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return (tasks.isdecimal() and int(tasks) > 1) or "," in hosts


def summary(results: dict[str, Any], workdir: Path) -> str:
    """Results as a short table, and where everything is."""
    lines = [f"{name:<12}{results[name]:>10.4f}" for name in _SHOWN if name in results]
    for name, detectors in results.get("ood", {}).items():
        for detector, scores in detectors.items():
            lines.append(f"{'auroc':<12}{scores['auroc']:>10.4f}  {name} by {detector}")
    lines += [f"{path}" for path in sorted(workdir.iterdir()) if not path.name.startswith(".")]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
