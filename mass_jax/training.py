"""The loop: dispatch steps, check, log, validate, save; never lose work."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from mass_jax import checkpoint
from mass_jax.config import ConfigError, as_command, config_hash, differences, flatten
from mass_jax.data import Dataset, device_rows
from mass_jax.evaluation import evaluate_run, make_predictor, validate
from mass_jax.experiment import Experiment, TrainState, jacobian_cycle, make_experiment
from mass_jax.method import BuildNetwork
from mass_jax.predictions import PREDICTIONS
from mass_jax.run_log import NOT_LOSS_TERMS, RunLog, environment, write_atomically
from mass_jax.signals import Interrupted, StopSignal
from mass_jax.train_step import Batch, make_runner, make_train_step
from mass_jax.watchdog import watchdog
from mass_jax.workdir import check_free_space
from mass_jax.working_memory import keep_working_memory

CHECKPOINTS = "checkpoints"
RESULTS = "results.json"
CONFIG = "config.json"
_RESIDENT_LIMIT = 2 * 1024**3


class TrainingDiverged(RuntimeError):
    """NaN or infinity in a term, gradient or parameter; nothing of it was saved."""


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
      state: initial, or from a checkpoint.
      seconds: spent to get there.
      unvalidated_row: the metric row of that step, if a signal came before its validation.
    """

    state: TrainState
    seconds: float = 0.0
    unvalidated_row: dict[str, Any] | None = None


def train(
    config: ConfigDict,
    dataset: Dataset,
    workdir: Path,
    *,
    stop: StopSignal | None = None,
    quiet: bool = False,
    build_network: BuildNetwork | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Trains (or goes on training) in ``workdir`` and evaluates at the end.

    Args:
      config: resolved.
      dataset: what to train on.
      workdir: holds everything the run leaves.
      stop: active already; ``None`` listens to signals from here on.
      quiet: no progress.
      build_network: see `make_experiment`.
      command: that computes this run, for the results; ``None``: the one of the command line.

    Returns:
      What ``results.json`` holds.
    """
    finished = finished_results(config, workdir)
    if finished is not None:
        return finished
    writes = jax.process_index() == 0
    if config.batch_size % jax.device_count():
        raise ConfigError(
            f"config.batch_size={config.batch_size}: must be a multiple of the "
            f"{jax.device_count()} devices"
        )
    experiment = make_experiment(config, dataset, build_network)
    checksums = dataset.checksums()
    start = _start(config, experiment, workdir, checksums)
    if writes:
        check_free_space(workdir, sum(leaf.nbytes for leaf in jax.tree.leaves(start.state)))
        write_atomically(workdir / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")
        write_atomically(workdir / "environment.json", json.dumps(environment(), indent=2) + "\n")
    if writes and not quiet and start.state.step > 0:
        print(f"going on from step {int(start.state.step):,}", file=sys.stderr, flush=True)
    with StopSignal() if stop is None else contextlib.nullcontext(stop) as stop:
        with stop.deferred():
            state, seconds, digest = _run_steps(
                config, experiment, dataset, workdir, start, stop, quiet or not writes, checksums
            )
            stopping = _any_process(stop.signum)
        if stopping:  # during the last save, or just before
            raise Interrupted(stopping, "after the last step; checkpoint saved")
        return _results(
            config,
            experiment,
            dataset,
            workdir,
            state,
            {
                "command": as_command(config) if command is None else command,
                "config_hash": config_hash(config),
                "data_sha256": checksums,
                "checkpoint_sha256": digest,
                "train_seconds": seconds,
            },
        )


def _results(
    config: ConfigDict,
    experiment: Experiment,
    dataset: Dataset,
    workdir: Path,
    state: TrainState,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Evaluates the trained model; what is written in ``results.json``."""
    began = time.monotonic()
    writes = jax.process_index() == 0
    predictions_file = workdir / PREDICTIONS if writes else None
    results = {
        "method": config.method,
        "network": config.network,
        "beta": config.beta,
        "train_size": config.train_size,
        "seed": config.seed,
        "steps": config.steps,
        "dataset": config.data.name,
        "dropout_rate": config.dropout_rate,
        "weight_decay": config.weight_decay,
        "batch_stats": config.jacobian.batch_stats if config.method == "mass" else None,
        # Somebody without test examples must not take these numbers for test results.
        **({"evaluated_on": "training examples"} if dataset.test is dataset.train else {}),
        **evaluate_run(config, experiment, dataset, state.params, predictions_file),
        **provenance,
        "evaluation_seconds": time.monotonic() - began,
    }
    if writes:
        write_atomically(workdir / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def evaluate(config: ConfigDict, dataset: Dataset, workdir: Path) -> dict[str, Any]:
    """Evaluates the newest good checkpoint of ``workdir``, which stays as it is."""
    found = checkpoint.restore_latest(workdir / CHECKPOINTS)
    if found is None:
        raise checkpoint.CheckpointError(f"{workdir}: no good checkpoint to evaluate; train first")
    experiment = make_experiment(config, dataset)
    state = checkpoint.into_tree(experiment.initial_state(), found.arrays)
    return {"steps": found.step, **evaluate_run(config, experiment, dataset, state.params)}


def finished_results(config: ConfigDict, workdir: Path) -> dict[str, Any] | None:
    """The results of a finished run of this configuration, or ``None``."""
    try:
        results = json.loads((workdir / RESULTS).read_text())
    except (OSError, ValueError):
        return None
    same = isinstance(results, dict) and results.get("config_hash") == config_hash(config)
    return results if same else None


def check_same_run(config: ConfigDict, workdir: Path) -> None:
    """Refuses a workdir of another configuration, naming the differences."""
    try:
        saved = json.loads((workdir / CONFIG).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError):
        raise ConfigError(f"{workdir / CONFIG} cannot be read; use another workdir") from None
    changed = differences(json.loads(json.dumps(saved)), config.to_dict())
    if changed:
        raise ConfigError(
            f"{workdir} holds a run of another configuration ({'; '.join(changed)}); "
            "use another workdir or the same configuration"
        )


def check_same_data(saved: dict[str, str] | None, now: dict[str, str], workdir: Path) -> None:
    """Refuses a workdir of other data, naming what differs."""
    saved = saved or {}
    changed = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    if changed:
        raise ConfigError(
            f"{workdir}: holds a run on other data ({', '.join(changed)} differ); give the same "
            "data or another workdir"
        )


def _start(
    config: ConfigDict, experiment: Experiment, workdir: Path, checksums: dict[str, str]
) -> Start:
    state = experiment.initial_state()
    found = checkpoint.restore_latest(workdir / CHECKPOINTS)
    if found is None:
        return Start(state)
    check_same_data(found.meta.get("data_sha256"), checksums, workdir)
    if found.step > config.steps:
        raise ConfigError(
            f"{workdir}: its checkpoint is at step {found.step}, beyond config.steps={config.steps}"
        )
    logging.info("resuming at step %d", found.step)
    return Start(
        checkpoint.into_tree(state, found.arrays),
        float(found.meta["seconds"]),
        found.meta.get("unvalidated_row"),
    )


def _run_steps(
    config: ConfigDict,
    experiment: Experiment,
    dataset: Dataset,
    workdir: Path,
    start: Start,
    stop: StopSignal,
    quiet: bool,
    checksums: dict[str, str],
) -> tuple[TrainState, float, str]:
    """Runs to ``config.steps``; returns the state, seconds spent and checkpoint digest."""
    runner = make_runner(make_train_step(experiment, dataset.normalisation), config.parallel)
    predict = make_predictor(experiment.method, experiment.keys.evaluation, config.eval_batch_size)
    source, cycle = _TrainingRows(config, experiment, dataset), jacobian_cycle(config)
    data = runner.place_data(source.resident)
    state, step = runner.place_state(start.state), int(start.state.step)
    writes = jax.process_index() == 0
    began = time.monotonic() - start.seconds
    digest = ""

    def validation_now() -> dict[str, float]:
        params = jax.tree.map(jnp.asarray, runner.fetch_state(state).params)
        return validate(config, experiment, dataset, predict, params)

    def save(validation: dict[str, float], unvalidated_row: dict[str, Any] | None) -> str:
        meta = {
            "seconds": time.monotonic() - began,
            "unvalidated_row": unvalidated_row,
            "data_sha256": checksums,
            "config": flatten(config.to_dict()),
            "input_shape": list(dataset.input_shape),
            "num_classes": dataset.num_classes,
            "normalisation": {
                name: np.asarray(values).tolist()
                for name, values in dataset.normalisation._asdict().items()
            },
            **validation,
        }
        host_state = runner.fetch_state(state)
        if not writes:
            return ""
        written = checkpoint.save(workdir / CHECKPOINTS, step, host_state, meta)
        checkpoint.prune(workdir / CHECKPOINTS, config.keep_checkpoints)
        return written

    with contextlib.ExitStack() as stack:
        # Every process computes the same rows; only process 0 writes them down.
        log = stack.enter_context(RunLog(workdir, step, config.steps, quiet)) if writes else None
        if start.unvalidated_row is not None:
            row = {**start.unvalidated_row, **validation_now()}
            if log is not None:
                log.row(row)
        show_life = stack.enter_context(watchdog(config.watchdog_minutes))
        for count, rows in source.blocks(step):
            show_life()
            block_began = time.monotonic()
            state, history = runner.run(state, data, rows, count, experiment.keys.step)
            history = {name: np.asarray(values)[:count] for name, values in history.items()}
            if step == start.state.step:  # all is compiled
                keep_working_memory()
            rate = count / (time.monotonic() - block_began)
            _check_finite(history, step)
            first, step = step, step + count
            stopping = _any_process(stop.signum)
            to_validate = _is_due(step, config.eval_every, config.steps)
            due = {s for s in range(first + 1, step + 1) if s % config.log_every == 0}
            table = [
                {"step": at}
                | {
                    name: float(values[at - first - 1])
                    for name, values in history.items()
                    if name != "jacobian" or at % cycle == 0  # else that step had no such term
                }
                | {"examples_per_second": rate * config.batch_size}
                for at in sorted(due | {step} if to_validate else due)
            ]
            validation: dict[str, float] = {}
            unvalidated_row = None
            if to_validate and stopping and step < config.steps:
                # A signal does not wait for validation: the next start makes up for it.
                unvalidated_row = table.pop()
            elif to_validate:
                try:
                    with stop.deferred(step == config.steps):
                        validation = validation_now()
                    table[-1] |= validation
                except Interrupted:
                    unvalidated_row = table.pop()
                stopping = _any_process(stop.signum)
            if log is not None:
                for row in table:
                    log.row(row)
                log.progress(step, float(history["loss"][-1]), rate)
            if stopping or _is_due(step, config.checkpoint_every, config.steps):
                digest = save(validation, unvalidated_row)
            if stopping and step < config.steps:
                raise Interrupted(stopping, f"at step {step}; checkpoint saved")
    if writes and not digest:  # the checkpoint was already at the last step
        found = checkpoint.restore_latest(workdir / CHECKPOINTS)
        digest = "" if found is None else found.digest
    host_state = runner.fetch_state(state)
    host_state = host_state.replace(params=jax.tree.map(jnp.asarray, host_state.params))
    return host_state, time.monotonic() - began, digest


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _any_process(signum: int) -> int:
    """The signal any process received; all agree, so all stop at the same step."""
    if jax.process_count() == 1:
        return signum
    return int(np.max(multihost_utils.process_allgather(np.asarray(signum))))


def _check_finite(history: dict[str, np.ndarray], first_step: int) -> None:
    """Stops at the first non-finite value and names the step and the term."""
    bad = {name: np.flatnonzero(~np.isfinite(values)) for name, values in history.items()}
    bad = {name: where for name, where in bad.items() if len(where)}
    if not bad:
        return
    earliest = min(int(where[0]) for where in bad.values())
    names = [name for name, where in bad.items() if int(where[0]) == earliest]
    terms = [name for name in names if name not in NOT_LOSS_TERMS]
    named = terms or [name for name in NOT_LOSS_TERMS if name in names]
    values = ", ".join(f"{name}={history[name][earliest]}" for name in named)
    raise TrainingDiverged(
        f"step {first_step + earliest + 1}: {values} is not finite; nothing after the last "
        "checkpoint was saved; try a smaller learning rate or beta"
    )


class _TrainingRows:
    """Blocks of batch rows for this process's devices."""

    def __init__(self, config: ConfigDict, experiment: Experiment, dataset: Dataset) -> None:
        self._config, self._order = config, experiment.order
        images = dataset.train.images[experiment.subset.train]
        labels = dataset.train.labels[experiment.subset.train]
        keep = config.data.resident
        fits = keep == "always" or (keep == "auto" and images.nbytes <= _RESIDENT_LIMIT)
        self._host = Batch(images, labels)
        self.resident = Batch(images, labels) if fits else None
        mine = [d.process_index == jax.process_index() for d in jax.devices()]
        self._my_devices = np.flatnonzero(mine)

    def blocks(self, step: int) -> Iterator[tuple[int, Any]]:
        """``(count, rows)`` until the last step; prepared ahead while the device works."""
        with ThreadPoolExecutor(1) as worker:
            ahead = None
            while step < self._config.steps:
                count = self._count(step)
                block = ahead.result() if ahead is not None else self._block(step, count)
                step += count
                if step < self._config.steps:
                    ahead = worker.submit(self._block, step, self._count(step))
                yield count, block

    def _count(self, step: int) -> int:
        """Steps until the next event, at most one dispatch."""
        cadences = (self._config.eval_every, self._config.checkpoint_every)
        until = [every - step % every for every in cadences if every > 0]
        return min(self._config.steps_per_dispatch, self._config.steps - step, *until)

    def _block(self, step: int, count: int) -> Any:
        """Rows ``[D, K, b]`` of ``count`` steps; the rest of the K repeats the last one."""
        length = self._config.steps_per_dispatch
        wanted = [step + min(i, count - 1) for i in range(length)]
        rows = np.stack([self._order.batch(s) for s in wanted])  # [K, B]
        dealt = np.swapaxes(device_rows(rows.T, jax.device_count()), 1, 2)  # [D, K, b]
        mine = np.ascontiguousarray(dealt[self._my_devices])
        if self.resident is not None:
            return mine
        return Batch(self._host.images[mine], self._host.labels[mine])
