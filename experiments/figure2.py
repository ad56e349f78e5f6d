"""``python -m experiments.figure2``: the loss terms during training, SoftmaxCE and MASS.

The paper's question: does SoftmaxCE lower the MASS objective by itself? Both methods train
alike (``configs/figure2.py``); at every 500th step a fresh 10-component maximum-likelihood
mixture per class is fitted to the training outputs, for both, and gives the three terms.
Runs resume; each finished one becomes a file in ``experiments/results/``; with
``--plot_only`` the figure is made from those files.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments.cells import RESULTS
from experiments.provenance import recorded
from mass_jax import checkpoint, gaussian_mixture
from mass_jax.command_line import Parser, positive
from mass_jax.config import ConfigError, apply_overrides, as_command, config_hash, resolve
from mass_jax.data import DataError, Dataset, load_dataset
from mass_jax.evaluation import Evaluate, make_log_jacobian, make_representer
from mass_jax.experiment import Experiment, make_experiment
from mass_jax.information import mass_loss_terms
from mass_jax.mixture_fitting import fit_class_mixtures
from mass_jax.model import ModelParams
from mass_jax.options import CONFIG_DIR, load_config
from mass_jax.progress import track
from mass_jax.run_log import environment, write_atomically
from mass_jax.signals import Interrupted
from mass_jax.training import CHECKPOINTS, TrainingDiverged, train
from mass_jax.workdir import locked
from mass_jax.working_memory import run_in_main_thread

METHODS = {"softmax_ce": "SoftmaxCE", "mass": "MASS"}
TERMS = {
    "cross_entropy": "H(Y | f(X)), nats",
    "entropy": "H(f(X)), nats",
    "jacobian": "- E[log J_f(X)], nats",
    "accuracy": "test accuracy, %",
}
_COLOURS = {"softmax_ce": "#0072B2", "mass": "#D55E00"}  # Okabe and Ito: safe for all eyes
_FITTED_EXAMPLES = 10_000
_JACOBIAN_EXAMPLES = 500
_COMPONENTS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.figure2", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="the paper has 5")
    parser.add_argument("--steps", type=positive, help="fewer than the paper's 50,000")
    parser.add_argument("--every", type=positive, default=500, help="steps between estimates")
    parser.add_argument("--data_dir", help="as --config.data.dir")
    parser.add_argument("--workdir", type=Path, default=Path("runs/figure2"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("runs/figure2/figure2.png"))
    parser.add_argument("--plot_only", action="store_true", help="only draw what was run")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the results")
    options = parser.parse_args(argv)
    run_in_main_thread()
    logging.basicConfig(
        format="%(message)s", level=logging.WARNING if options.quiet else logging.INFO
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        if not options.plot_only:
            for seed in options.seeds.split(","):
                for method in METHODS:
                    _run(method, seed, options)
        runs = records(options.results, options.steps)
        if not runs:
            raise FileNotFoundError(
                f"no figure2-METHOD-seedN{_suffix(options.steps)}.json in {options.results}; "
                "run without --plot_only"
            )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw(runs).savefig(options.out, dpi=150)
    except (ConfigError, DataError, checkpoint.CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingDiverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 128 + error.signum
    print(options.out)
    return 0


def _run(method: str, seed: str, options: argparse.Namespace) -> None:
    """Trains one run, estimates its curves and records them; skips what is done."""
    changes = {"method": method, "seed": seed, "checkpoint_every": str(options.every)}
    changes |= {"keep_checkpoints": "1000", "eval_every": "0"}
    changes |= {"beta": "0"} if method == "softmax_ce" else {}
    changes |= {"steps": str(options.steps)} if options.steps else {}
    changes |= {"data.dir": options.data_dir} if options.data_dir else {}
    config = resolve(apply_overrides(load_config(str(CONFIG_DIR / "figure2.py")), changes))
    name = f"figure2-{method}-seed{seed}{_suffix(options.steps)}"
    record = options.results / f"{name}.json"
    if record.exists() and json.loads(record.read_text()).get("hash") == config_hash(config):
        print(f"{name}: done before")
        return
    dataset = load_dataset(config.data.name, config.data.dir, tuple(config.data.ood))
    workdir = options.workdir / name
    with locked(workdir):
        train(config, dataset, workdir, quiet=options.quiet)
    curves = estimate(config, dataset, workdir)
    made = {"method": method, "hash": config_hash(config), "made_by": as_command(config)}
    options.results.mkdir(parents=True, exist_ok=True)
    content = {"figure": 2, **made, "curves": curves, "environment": recorded(environment())}
    write_atomically(record, json.dumps(content, indent=2) + "\n")


def estimate(config: ConfigDict, dataset: Dataset, workdir: Path) -> dict[str, list[float]]:
    """The curves of a run, from its checkpoints."""
    experiment = make_experiment(config, dataset)
    template = experiment.initial_state()
    represent = make_representer(config.eval_batch_size)
    log_jacobian = make_log_jacobian(config.eval_batch_size)
    curves: dict[str, list[float]] = {name: [] for name in ("step", *TERMS)}
    for step in track(sorted(checkpoint.steps(workdir / CHECKPOINTS)), "estimating the terms"):
        found = checkpoint.restore(workdir / CHECKPOINTS, step)
        params = checkpoint.into_tree(template, found.arrays).params
        params = jax.tree.map(jnp.asarray, params)
        point = _terms(config, experiment, dataset, params, represent, log_jacobian)
        for name, value in {"step": float(step), **point}.items():
            curves[name].append(value)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in point.items())
        logging.info("step %s: %s", f"{step:,}", shown)
    return curves


def _terms(
    config: ConfigDict,
    experiment: Experiment,
    dataset: Dataset,
    params: ModelParams,
    represent: Evaluate,
    log_jacobian: Evaluate,
) -> dict[str, float]:
    """The three terms by a fresh mixture, and the accuracy of its classifier."""
    rows = experiment.subset.train[:_FITTED_EXAMPLES]
    labels = dataset.train.labels[rows]
    outputs = represent(params, dataset.train.images[rows], dataset.normalisation)
    q = fit_class_mixtures(outputs, labels, dataset.num_classes, _COMPONENTS)
    images = dataset.train.images[rows[:_JACOBIAN_EXAMPLES]]
    log_det = jnp.asarray(log_jacobian(params, images, dataset.normalisation))
    density = gaussian_mixture.log_prob(q, jnp.asarray(outputs))
    terms = mass_loss_terms(density, jnp.asarray(labels), log_det)
    tested = represent(params, dataset.test.images, dataset.normalisation)
    guess = tested if config.method == "softmax_ce" else _posterior(params, tested)
    accuracy = float(np.mean(np.argmax(guess, axis=-1) == dataset.test.labels))
    means = {name: float(jnp.mean(value)) for name, value in terms._asdict().items()}
    return {**means, "accuracy": 100 * accuracy}


def _posterior(params: ModelParams, outputs: np.ndarray) -> np.ndarray:
    return np.asarray(gaussian_mixture.log_prob(params.q, jnp.asarray(outputs)))


def records(directory: Path, steps: int | None = None) -> list[dict[str, Any]]:
    """The recorded runs of this figure.

    Args:
      directory: where records are.
      steps: of the wanted ones; ``None`` is the paper's number.
    """
    wanted = re.compile(rf"figure2-\w+-seed\d+{_suffix(steps)}")
    files = [path for path in sorted(directory.glob("*.json")) if wanted.fullmatch(path.stem)]
    return [json.loads(path.read_text()) for path in files]


def _suffix(steps: int | None) -> str:
    return "" if steps is None else f"-steps{steps}"


def draw(runs: Sequence[dict[str, Any]]) -> Figure:
    """Four panels, a line and a band (one deviation over seeds) per method."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).ravel()
    for axis, (term, title) in zip(axes, TERMS.items(), strict=True):
        for method, label in METHODS.items():
            curves = [run["curves"] for run in runs if run["method"] == method]
            if not curves:
                continue
            steps = sorted(set.intersection(*(set(c["step"]) for c in curves)))
            values = np.asarray([[c[term][c["step"].index(s)] for s in steps] for c in curves])
            mean, spread = values.mean(axis=0), values.std(axis=0)
            axis.plot(steps, mean, color=_COLOURS[method], label=f"{label} (n={len(curves)})")
            axis.fill_between(
                steps, mean - spread, mean + spread, color=_COLOURS[method], alpha=0.2, lw=0
            )
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    for axis in axes[2:]:
        axis.set_xlabel("training step")
    axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
