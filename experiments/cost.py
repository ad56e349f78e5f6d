"""What runs cost on this machine, scaled from a recorded benchmark by its matmul speed."""

import json
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from experiments.cells import RESULTS, Cell

BENCHMARK = RESULTS / "benchmark.json"
_SIZE = 1024  # of the square matrices whose product is timed
_REPEATS = 20


def matmul_gflops() -> float:
    """Best speed of a float32 matrix product here and now, in GFLOP/s."""
    square = jnp.ones((_SIZE, _SIZE))
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        product(square, square).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best / 1e9


def minutes_by_cell(cells: Iterable[Cell]) -> dict[Cell, float]:
    """Expected minutes of each run, training alone."""
    recorded = json.loads(BENCHMARK.read_text())
    slower = recorded["matmul_gflops"] / matmul_gflops()
    return {
        cell: slower * recorded[cell.network][_variant(cell)]["ms"] * cell.config().steps / 60_000
        for cell in cells
    }


def _variant(cell: Cell) -> str:
    """The benchmark's name for the step of a cell."""
    if cell.method != "mass":
        return cell.method
    if cell.beta == 0:
        return "mass_beta0"
    return {"paper": "mass_exact_paper_bn", "frozen": "mass_exact"}[cell.batch_stats]
