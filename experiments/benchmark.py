"""``python -m experiments.benchmark --json=FILE``: what a training step costs.

All variants run in one process, interleaved (A B C A B C ...), so that noise hits all alike.
Times are medians; only ratios within one run mean anything on a shared machine.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.cost import matmul_gflops, step_flops
from experiments.provenance import recorded
from mass_jax.command_line import Parser
from mass_jax.config import apply_overrides, resolve
from mass_jax.data import Dataset, dataset_from_arrays
from mass_jax.evaluation import make_log_jacobian, make_predictor
from mass_jax.experiment import jacobian_cycle, make_experiment
from mass_jax.mixture_fitting import fit_class_mixtures
from mass_jax.options import CONFIG_DIR, load_config
from mass_jax.run_log import environment, write_atomically
from mass_jax.train_step import Batch, make_runner, make_train_step
from mass_jax.working_memory import keep_working_memory, run_in_main_thread

# What each variant changes in the config of its method.
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "softmax_ce": ("softmax_ce", {}),
    "vib": ("vib", {}),
    "mass_beta0": ("mass", {"beta": "0"}),
    "mass_exact": ("mass", {"jacobian.batch_stats": "frozen"}),
    "mass_exact_paper_bn": ("mass", {"jacobian.batch_stats": "paper"}),
    "mass_fast": ("mass", {"jacobian.batch_stats": "frozen", "jacobian.estimator": "fast"}),
    "mass_few": ("mass", {"jacobian.batch_stats": "frozen", "jacobian.estimator": "few"}),
    "mass_probe": ("mass", {"jacobian.batch_stats": "frozen", "jacobian.estimator": "probe"}),
    "mass_lazy": ("mass", {"jacobian.batch_stats": "frozen", "jacobian.estimator": "lazy"}),
    "mass_exact_full_batch": (
        "mass",
        {"jacobian.batch_stats": "frozen", "jacobian.estimator": "exact"},
    ),
}
# A dense first layer allows the exact full batch in Gram form.
_FULL_BATCH = {"small_mlp": "gram", "resnet20": "exact"}
_REPEATS = {"small_mlp": (9, 25), "resnet20": (3, 7)}  # at least and at most
_QUICK_SECONDS = 45.0  # of repeats; --quick takes no more than the least from then on
_LONG = ("mass_lazy", "mass_exact_full_batch")  # of ResNet20: minutes each, not for --quick
_PEAK_REPEATS = 5  # products of which the fastest counts
_SMALL = {"train_size": "1000", "data.validation_size": "100"}  # fits `_random_dataset`
# The peer's step that does the same work.
_PEERS = {
    "softmax_ce": "softmax_ce",
    "vib": "vib",
    "mass_beta0": "mass_beta0",
    "mass_exact": "mass_exact_paper_bn",
    "mass_exact_paper_bn": "mass_exact_paper_bn",
}


class Subject(NamedTuple):
    """Something to be timed.

    Attributes:
      call: takes ``steps`` training steps.
      steps: per call.
      flops: of one step by XLA's count, or ``None``.
      compile_s: seconds of tracing and compilation.
      peak_mb: what the program needs at once by XLA's plan: arguments, results and working memory.
    """

    call: Callable[[], None]
    steps: int
    flops: float | None
    compile_s: float | None = None
    peak_mb: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.benchmark", description=__doc__)
    parser.add_argument("--network", choices=sorted(_REPEATS), help="default: both")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: under 10 minutes")
    parser.add_argument("--peer", choices=["torch"], help="the same steps in plain PyTorch")
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        help="where the table is written; the other network's is kept",
    )
    options = parser.parse_args(argv)
    run_in_main_thread()  # as the trainer does
    if not options.json.absolute().parent.is_dir() or options.json.is_dir():
        parser.error(f"--json={options.json}: no such directory, or itself one")
    peer = options.peer == "torch"
    if peer and importlib.util.find_spec("torch") is None:
        print("--peer=torch: PyTorch is not installed (pip install torch); skipped")
        peer = False
    try:
        outcome = json.loads(options.json.read_text()) if options.json.exists() else {}
        # Numbers of what is not measured now stay, with their own commit.
        outcome = dict(outcome) | {"environment": dict(outcome.get("environment", {}))}
    except (ValueError, TypeError):
        parser.error(f"--json={options.json}: exists and holds no benchmark; name another file")
    here = recorded(environment()) | {"quick": options.quick}
    for network in [options.network] if options.network else sorted(_REPEATS, reverse=True):
        outcome[network], peak = measure(network, options.quick, peer)
        outcome["environment"][network] = here | {"matmul_gflops": peak}
        print(as_text(network, outcome[network], peak), flush=True)
        write_atomically(options.json, json.dumps(outcome, indent=2) + "\n")
    if options.network != "resnet20":
        outcome["evaluation"] = measure_evaluation()
        outcome["environment"]["evaluation"] = here
        print(*(f"{name}: {s:.1f} s" for name, s in outcome["evaluation"].items()), sep="\n")
        write_atomically(options.json, json.dumps(outcome, indent=2) + "\n")
    return 0


def measure(network: str, quick: bool, peer: bool) -> tuple[dict[str, dict[str, Any]], float]:
    """Numbers of every variant of a network in one interleaved run, and the matmul peak.

    The peak is taken anew before every measurement: a shared machine's speed doubles and halves
    within seconds, and a share of a peak from another moment says nothing.
    """
    dataset = _random_dataset()
    subjects = {
        name: _subject(network, name, dataset)
        for name in VARIANTS
        if not (quick and network == "resnet20" and name in _LONG)
    }
    if peer:
        for name in sorted(set(_PEERS.values())):
            subjects[f"torch {name}"] = _torch_subject(network, name)
    keep_working_memory()
    # Twenty times a step, and gigabytes that stay with the process: twice, when all else is done.
    seldom = "mass_exact_full_batch" if network == "resnet20" else None
    for name, subject in subjects.items():
        if name != seldom:
            subject.call()  # untimed: takes from the system the memory that is kept from now on
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    peaks: dict[str, list[float]] = {name: [] for name in subjects}
    least, most = _REPEATS[network]
    start = time.perf_counter()
    for repeat in range(most):
        if quick and repeat >= least and time.perf_counter() - start > _QUICK_SECONDS:
            break
        for name, subject in subjects.items():
            if name == seldom and repeat < most - 2:
                continue
            peaks[name].append(matmul_gflops(_PEAK_REPEATS))
            began = time.perf_counter()
            subject.call()
            seconds[name].append((time.perf_counter() - began) / subject.steps)
    table = {}
    for name, subject in subjects.items():
        if name.startswith("torch "):
            continue
        ms = 1e3 * float(np.median(seconds[name]))
        low, high = np.percentile(seconds[name], [25, 75])
        base = subjects["softmax_ce"]
        work_at_peak = float(np.median(1e9 * np.multiply(seconds[name], peaks[name])))
        ratios = (
            np.asarray(seconds[name]) / np.asarray(seconds["softmax_ce"])[-len(seconds[name]) :]
        )
        table[name] = {
            "ms": ms,
            "ms_quartiles": [1e3 * float(low), 1e3 * float(high)],
            "ratio": float(np.median(ratios)),
            "flops": subject.flops,
            "flops_ratio": _quotient(subject.flops, base.flops),
            "peak_share": _quotient(subject.flops, work_at_peak),
            "peak_mb": subject.peak_mb,
            "compile_s": subject.compile_s,
        }
        if peer and name in _PEERS:
            theirs = seconds[f"torch {_PEERS[name]}"]
            table[name]["torch_ms"] = 1e3 * float(np.median(theirs))
            table[name]["vs_torch"] = float(
                np.median(np.asarray(seconds[name]) / np.asarray(theirs))
            )
    return table, float(np.median(np.concatenate([*peaks.values()])))


def measure_evaluation() -> dict[str, float]:
    """Seconds of what follows training: SmallMLP on 10,000 images, mixtures of 40,000 outputs."""
    file = load_config(str(CONFIG_DIR / "mass_small_mlp.py"))
    config = resolve(apply_overrides(file, _SMALL))
    dataset = _random_dataset()
    experiment = make_experiment(config, dataset)
    params = experiment.initial_state().params
    images = np.resize(dataset.train.images, (10_000, 32, 32, 3))
    predict = make_predictor(experiment.method, experiment.keys.evaluation, config.eval_batch_size)
    log_jacobian = make_log_jacobian(config.eval_batch_size)
    outputs = np.random.default_rng(2).normal(size=(40_000, 10))
    labels = np.arange(40_000) % 10
    work = {
        "predictions_and_densities_10000": lambda: predict(params, images, dataset.normalisation),
        "log_jacobians_10000": lambda: log_jacobian(params, images, dataset.normalisation),
        "mixtures_of_40000_outputs": lambda: fit_class_mixtures(outputs, labels, 10, 10),
    }
    seconds = {}
    for name, call in work.items():
        began = time.perf_counter()
        call()  # with its compilation, once
        seconds[name] = time.perf_counter() - began
    return seconds


def _quotient(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _random_dataset() -> Dataset:
    """Noise in the shape of CIFAR-10: a step takes as long on it as on anything."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (2000, 32, 32, 3), np.uint8)
    labels = generator.integers(0, 10, 2000)
    return dataset_from_arrays(images, labels, images[:10], labels[:10])


def _subject(network: str, variant: str, dataset: Dataset) -> Subject:
    """A variant's training step as the trainer runs it, compiled."""
    method, changes = VARIANTS[variant]
    if variant == "mass_exact_full_batch":
        changes = changes | {"jacobian.estimator": _FULL_BATCH[network]}
    changes = changes | _SMALL
    config = resolve(
        apply_overrides(load_config(str(CONFIG_DIR / f"{method}_{network}.py")), changes)
    )
    experiment = make_experiment(config, dataset)
    step = make_train_step(experiment, dataset.normalisation)
    runner = make_runner(step, "pmap")
    cycle = jacobian_cycle(config)  # of a lazy estimator, whole ones
    steps = -(-config.steps_per_dispatch // cycle) * cycle
    state = runner.place_state(jax.device_get(experiment.initial_state()))
    data = runner.place_data(Batch(*map(jax.numpy.asarray, dataset.train)))
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 1000, (1, steps, config.batch_size)).astype(np.int32)
    held, more = [state], (data, rows, steps, experiment.keys.step)
    began = time.perf_counter()
    run = runner.lower(state, *more).compile()
    compile_s = time.perf_counter() - began
    plan: Any = run.memory_analysis()
    bytes_at_once = plan.argument_size_in_bytes + plan.output_size_in_bytes
    bytes_at_once += plan.temp_size_in_bytes - plan.alias_size_in_bytes

    def call() -> None:
        held[0], history = run(held[0], *more)
        jax.block_until_ready(history)

    return Subject(call, steps, step_flops(config, dataset), compile_s, bytes_at_once / 1e6)


def _torch_subject(network: str, variant: str) -> Subject:
    import torch

    from experiments.torch_peer import make_peer

    torch.manual_seed(0)
    beta, n, batch = (1e-3, 17, 256) if network == "small_mlp" else (1e-4, 10, 128)
    step = make_peer(network, variant, beta, n).step
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    step(x, y)

    def call() -> None:
        step(x.clone(), y)

    return Subject(call, 1, None)


def as_text(network: str, table: dict[str, dict[str, Any]], peak: float) -> str:
    """The table for people."""
    lines = [
        f"{network} ({peak:.0f} GFLOP/s in a matrix product)",
        f"{'variant':<24}{'ms':>9}{'ratio':>8}{'FLOPs':>8}{'of peak':>9}{'MB':>8}{'compile':>9}"
        f"{'vs torch':>10}",
    ]
    number = lambda value, form: "-" if value is None else format(value, form)
    for name, row in table.items():
        lines.append(
            f"{name:<24}{row['ms']:>9.1f}{row['ratio']:>8.2f}{number(row['flops_ratio'], '.2f'):>8}"
            f"{number(row['peak_share'], '.0%'):>9}{row['peak_mb']:>8.0f}{row['compile_s']:>8.1f}s"
            f"{number(row.get('vs_torch'), '.2f'):>10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
