"""What runs cost on this machine, scaled from a recorded benchmark by its matmul speed."""

import json
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from ml_collections import ConfigDict

from experiments.cells import RESULTS, Cell
from mass_jax.config import apply_overrides, resolve
from mass_jax.data import Dataset
from mass_jax.experiment import jacobian_cycle, make_experiment
from mass_jax.method import BuildNetwork
from mass_jax.train_step import AXIS, Batch, make_train_step
from mass_jax.turned_kernel import turned

BENCHMARK = RESULTS / "benchmark.json"
_SIZE = 1024  # of the square matrices whose product is timed


def largest_memory_mb() -> float:
    """Most memory this process has had at once.

    Linux keeps it by program. `getrusage`, which has to do elsewhere, starts from the memory of
    the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / 2**20 if sys.platform == "darwin" else largest / 1024  # bytes, kilobytes


def matmul_gflops(repeats: int = 20) -> float:
    """Best speed of a float32 matrix product here and now, in GFLOP/s."""
    square = jnp.ones((_SIZE, _SIZE))
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        product(square, square).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best / 1e9


def step_flops(
    config: ConfigDict, dataset: Dataset, build_network: BuildNetwork | None = None
) -> float:
    """Of one training step, by XLA's own count of the program before optimisation.

    The same on any machine; nothing is compiled or run. Of a lazy estimator the mean over its
    cycle.

    Args:
      config: resolved.
      dataset: tells shape and type of an example.
      build_network: see `make_experiment`.
    """
    every = jacobian_cycle(config)
    due = _flops_when_due(config, dataset, build_network)
    if every == 1:
        return due
    without = resolve(apply_overrides(config, {"beta": "0"}))
    return (due + (every - 1) * _flops_when_due(without, dataset, build_network)) / every


def _flops_when_due(
    config: ConfigDict, dataset: Dataset, build_network: BuildNetwork | None
) -> float:
    """Of a step that has the Jacobian term, and finds every Jacobian sound."""
    experiment = make_experiment(config, dataset, build_network)
    # Of a loop XLA counts a single pass, and our rules for convolutions have loops.
    step = make_train_step(experiment, dataset.normalisation, reverse_only=False)

    def on_one_device(leaf: Any, count: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *count, *leaf.shape), leaf.dtype)

    state = jax.tree.map(on_one_device, jax.eval_shape(lambda: turned(experiment.initial_state())))
    rows = (config.batch_size,)
    parts: Any = [on_one_device(part[0], rows) for part in dataset.train]
    mapped = jax.pmap(step, axis_name=AXIS, in_axes=(0, 0, None))
    arguments = (state, Batch(*parts), experiment.keys.step)
    counted = _flops(mapped.lower(*arguments))
    return counted - _flops_not_taken(jax.make_jaxpr(mapped)(*arguments).jaxpr)


def _flops(lowered: Any) -> float:
    return float(lowered.cost_analysis()["flops"])


def _flops_not_taken(jaxpr: Any) -> float:
    """What XLA counts too much where there are conditionals: the larger branch, taken or not.

    Ours take their first branch but for a rare remedy (`jax.lax.cond` keeps it last: the branches
    are in the order of their predicate's values).
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            *rare, taken = map(_flops_of_branch, equation.params["branches"])
            total += max(*rare, taken) - taken
            total += _flops_not_taken(equation.params["branches"][-1].jaxpr)
        else:
            total += sum(map(_flops_not_taken, jaxprs_in_params(equation.params)))
    return total


def _flops_of_branch(branch: Any) -> float:
    operands = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in branch.in_avals]
    return _flops(jax.jit(jaxpr_as_fun(branch)).lower(*operands))


def minutes_by_cell(cells: Iterable[Cell]) -> dict[Cell, float]:
    """Expected minutes of each run, training alone."""
    recorded = json.loads(BENCHMARK.read_text())
    here = matmul_gflops()
    minutes = {}
    for cell in cells:
        slower = recorded["environment"][cell.network]["matmul_gflops"] / here
        ms = slower * recorded[cell.network][step_variant(cell)]["ms"]
        minutes[cell] = ms * cell.config().steps / 60_000
    return minutes


def step_variant(cell: Cell) -> str:
    """The benchmark's name for the step of a cell."""
    if cell.method != "mass":
        return cell.method
    if cell.beta == 0:
        return "mass_beta0"
    return {"paper": "mass_exact_paper_bn", "frozen": "mass_exact"}[cell.batch_stats]
