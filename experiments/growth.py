"""``python -m experiments.growth --json=FILE``: how the cost of a MASS step grows.

One number at a time is varied around SmallMLP as the paper has it: the examples ``n`` of the
Jacobian term (each Jacobian exact), the dimension ``r`` of the representation, the batch ``B``,
and the hidden layers. FLOPs are XLA's count; all steps are timed interleaved in one process, as in
`experiments.benchmark`: only ratios within one run mean anything on a shared machine.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from ml_collections import ConfigDict

from experiments.cost import matmul_gflops, step_flops
from experiments.provenance import recorded
from mass_jax.command_line import Parser
from mass_jax.config import apply_overrides, resolve
from mass_jax.data import Dataset, dataset_from_arrays
from mass_jax.experiment import make_experiment
from mass_jax.method import BuildNetwork
from mass_jax.networks import SmallMLP
from mass_jax.options import CONFIG_DIR, load_config
from mass_jax.plots import BLUE, GREY, VERMILLION
from mass_jax.run_log import environment, write_atomically
from mass_jax.train_step import Batch, make_runner, make_train_step
from mass_jax.working_memory import keep_working_memory, run_in_main_thread

_STEPS = 4  # per call, as the trainer dispatches several
_WIDTHS = (400, 200)  # of the first hidden layer, and of all later ones
_TRAIN_SIZE = 2000
_LABELS = {
    "n": "Jacobian examples n",
    "r": "representation dimension r",
    "B": "batch size B",
    "depth": "hidden layers",
}


class Size(NamedTuple):
    """What the cost depends on; the defaults are the paper's SmallMLP.

    Attributes:
      n: examples in the Jacobian term.
      r: outputs of the network.
      B: batch size.
      depth: hidden layers.
    """

    n: int = 17
    r: int = 15
    B: int = 256
    depth: int = 2


Axis = dict[str, list[int]]  # name of a number in `Size` to the values it takes
THOROUGH: Axis = {
    "n": [1, 2, 4, 8, 17, 32, 64, 128, 256],
    "r": [2, 4, 8, 15, 32, 64],
    "B": [32, 64, 128, 256, 512, 1024],
    "depth": [1, 2, 4, 8, 16],
}
QUICK: Axis = {"n": [2, 17, 64], "r": [4, 15, 32], "B": [64, 256, 512], "depth": [1, 2, 8]}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers are written")
    parser.add_argument("--plot", type=Path, help="default: beside the JSON, as PNG")
    options = parser.parse_args(argv)
    run_in_main_thread()
    keep_working_memory()
    made = measure(QUICK if options.quick else THOROUGH, repeats=5 if options.quick else 15)
    print(as_text(made), flush=True)
    made["environment"] = recorded(environment())
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(made, indent=2) + "\n")
    draw(made).savefig(options.plot or options.json.with_suffix(".png"), dpi=150)
    return 0


def measure(
    axes: Mapping[str, Sequence[int]],
    repeats: int,
    base: Size | None = None,
    image: tuple[int, ...] = (32, 32, 3),
    widths: tuple[int, int] = _WIDTHS,
) -> dict[str, Any]:
    """FLOPs and milliseconds of a step at every size.

    Args:
      axes: values of each number that is varied, the others as in ``base``.
      repeats: of the timed round over all sizes.
      base: the paper's SmallMLP unless given.
      image: shape of an example.
      widths: of the first and of later hidden layers.
    """
    base = base or Size()
    dataset = _random_dataset(image)
    sizes = {
        (axis, value): base._replace(**{axis: value})
        for axis, values in axes.items()
        for value in values
    }
    distinct = list(dict.fromkeys(sizes.values()))  # the base itself is on every axis
    calls = {size: _call(size, dataset, widths) for size in distinct}
    seconds: dict[Size, list[float]] = {size: [] for size in distinct}
    for _ in range(repeats):
        for size, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[size].append((time.perf_counter() - began) / _STEPS)
    points = {size: _point(size, dataset, widths, seconds[size]) for size in distinct}
    return {
        "base": base._asdict(),
        "matmul_gflops": matmul_gflops(),
        "axes": {
            axis: [{"value": value, **points[sizes[axis, value]]} for value in values]
            for axis, values in axes.items()
        },
    }


def _point(
    size: Size, dataset: Dataset, widths: tuple[int, int], seconds: Sequence[float]
) -> dict[str, Any]:
    config, network = _config(size), _network(size, widths)
    low, middle, high = np.percentile(seconds, [25, 50, 75]) * 1e3
    without = resolve(apply_overrides(config, {"beta": "0"}))
    return {
        "flops": step_flops(config, dataset, network),
        "flops_without_term": step_flops(without, dataset, network),
        "ms": float(middle),
        "ms_quartiles": [float(low), float(high)],
    }


def _random_dataset(image: tuple[int, ...]) -> Dataset:
    """Noise: a step takes as long on it as on anything."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (_TRAIN_SIZE + 10, *image), np.uint8)
    labels = generator.integers(0, 10, _TRAIN_SIZE + 10)
    return dataset_from_arrays(images, labels, images[:10], labels[:10], num_classes=10)


def _config(size: Size) -> ConfigDict:
    changes = {
        "train_size": str(_TRAIN_SIZE),
        "data.validation_size": "10",
        "jacobian.batch_stats": "frozen",
        "jacobian.sub_batch": str(size.n),
        "representation_dim": str(size.r),
        "batch_size": str(size.B),
    }
    base = load_config(str(CONFIG_DIR / "mass_small_mlp.py"))
    return resolve(apply_overrides(base, changes))


def _network(size: Size, widths: tuple[int, int]) -> BuildNetwork:
    first, later = widths
    return partial(SmallMLP, hidden=(first, *[later] * (size.depth - 1)))


def _call(size: Size, dataset: Dataset, widths: tuple[int, int]) -> Callable[[], None]:
    """A few training steps as the trainer runs them, compiled."""
    config = _config(size)
    experiment = make_experiment(config, dataset, _network(size, widths))
    runner = make_runner(make_train_step(experiment, dataset.normalisation), "pmap")
    held = [runner.place_state(jax.device_get(experiment.initial_state()))]
    data = runner.place_data(Batch(*map(jax.numpy.asarray, dataset.train)))
    generator = np.random.default_rng(1)
    rows = generator.integers(0, _TRAIN_SIZE, (1, _STEPS, size.B)).astype(np.int32)

    def call() -> None:
        held[0], history = runner.run(held[0], data, rows, _STEPS, experiment.keys.step)
        jax.block_until_ready(history)

    call()
    return call


def as_text(made: Mapping[str, Any]) -> str:
    """The table for people."""
    peak = made["matmul_gflops"]
    lines = [
        f"{peak:.0f} GFLOP/s in a matrix product; otherwise {made['base']}",
        f"{'':<8}{'value':>6}{'GFLOP':>9}{'without term':>14}{'ms':>9}{'of peak':>9}",
    ]
    for axis, points in made["axes"].items():
        for point in points:
            lines.append(
                f"{axis:<8}{point['value']:>6}{point['flops'] / 1e9:>9.2f}"
                f"{point['flops_without_term'] / 1e9:>14.2f}{point['ms']:>9.1f}"
                f"{point['flops'] / (1e6 * point['ms'] * peak):>9.0%}"
            )
    return "\n".join(lines)


def draw(made: Mapping[str, Any]) -> Figure:
    """A panel per number that is varied: FLOPs as lines, measured times as points."""
    figure = Figure(figsize=(9.5, 7.2), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).ravel()
    for axis, (name, points) in zip(panels, made["axes"].items(), strict=True):
        _panel(axis, points, made["matmul_gflops"])
        others = {key: value for key, value in made["base"].items() if key != name}
        axis.set_xlabel(_LABELS[name])
        axis.set_title(", ".join(f"{key} = {value}" for key, value in others.items()), fontsize=10)
    for axis in panels[::2]:
        axis.set_ylabel("ms per step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _panel(axis: Axes, points: Sequence[Mapping[str, Any]], peak_gflops: float) -> None:
    values = [point["value"] for point in points]

    def at_peak(key: str) -> list[float]:
        return [point[key] / (1e6 * peak_gflops) for point in points]

    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.plot(values, at_peak("flops"), color=BLUE, label="FLOPs at matmul peak")
    axis.plot(
        values,
        at_peak("flops_without_term"),
        "--",
        color=GREY,
        label="without the Jacobian term (beta = 0)",
    )
    middle = np.asarray([point["ms"] for point in points])
    low, high = np.asarray([point["ms_quartiles"] for point in points]).T
    bars = np.stack([middle - low, high - middle])
    axis.errorbar(
        values, middle, bars, fmt="o", color=VERMILLION, capsize=3, label="measured, quartiles"
    )
    axis.set_xticks(values, [str(value) for value in values])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    sys.exit(main())
