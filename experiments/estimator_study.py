"""``python -m experiments.estimator_study --json=FILE``: noise and cost of the Jacobian estimators.

``--part=gradients`` (the default): bias and variance of the gradient of the Jacobian term by
every registered estimator, at initialisation and after training, against the exact gradient over
all examples of the batch; its share in the noise of the whole gradient; FLOPs of a step.
``--part=training``: whole runs with the authors' number of Jacobian examples and with the two
cheapest estimators, as paired differences over seeds. Stop and start at will: runs resume.

All with frozen BatchNorm statistics, the per-example Jacobian: see `gradient_noise`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments import gradient_noise as noise
from experiments.cost import step_flops
from experiments.provenance import recorded
from experiments.study_report import draw, gradient_text, training_text
from mass_jax.checkpoint import CheckpointError
from mass_jax.command_line import Parser, comma_separated
from mass_jax.config import ConfigError, apply_overrides, as_command, resolve
from mass_jax.data import DataError, Dataset, load_dataset, normalise
from mass_jax.estimators import JACOBIAN_ESTIMATORS, num_jacobian_examples
from mass_jax.experiment import Experiment, make_experiment
from mass_jax.loading import load, read_run
from mass_jax.losses import mass_loss
from mass_jax.model import ModelParams
from mass_jax.options import CONFIG_DIR, load_config
from mass_jax.run_log import environment, write_atomically
from mass_jax.signals import Interrupted
from mass_jax.training import train
from mass_jax.workdir import locked
from mass_jax.working_memory import run_in_main_thread

BASELINE = "sub_batch"  # the authors'
CANDIDATES = ("fast", "few")
METRICS = ("accuracy", "nll", "brier", "cross_entropy", "entropy_term", "jacobian_term")
_TRAINED_STEPS = {"small_mlp": 2000, "resnet20": 100}
_TERM_EXAMPLES = 500  # training examples in the loss terms of a finished run


class Draws(NamedTuple):
    """How much is drawn: cycles on one batch, and batches of one cycle each."""

    on_one_batch: int
    batches: int


_DRAWS = {"small_mlp": Draws(100, 50), "resnet20": Draws(20, 8)}
_QUICK = Draws(8, 4)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    run_in_main_thread()
    study, as_text = {
        "gradients": (gradients, gradient_text),
        "training": (training, training_text),
    }[options.part]
    try:
        for made in study(options):
            _record(options.json, options.part, options.network, made)
    except (ConfigError, DataError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"{error}; the same command goes on from here", file=sys.stderr)
        return 128 + error.signum
    print(as_text(options.network, made), flush=True)
    recorded = json.loads(options.json.read_text())
    if recorded.get("gradients"):
        picture = options.plot or options.json.with_suffix(".png")
        draw(recorded["gradients"]).savefig(picture, dpi=150)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m experiments.estimator_study", description=__doc__)
    parser.add_argument("--part", choices=["gradients", "training"], default="gradients")
    parser.add_argument("--network", choices=sorted(_DRAWS), default="small_mlp")
    parser.add_argument("--quick", action="store_true", help="fewer draws: a look, not a record")
    parser.add_argument("--draws", type=int, help="on one batch")
    parser.add_argument("--batches", type=int, help="random batches")
    parser.add_argument("--trained", type=Path, help="take the network of this run's workdir")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"of training; default: {_TRAINED_STEPS} for gradients, the paper's for training",
    )
    parser.add_argument(
        "--seeds", type=comma_separated(int, "0,1"), default=(0, 1, 2, 3), help="of --part=training"
    )
    parser.add_argument("--train_size", type=int, default=2500)
    parser.add_argument("--data_dir", help="as --config.data.dir")
    parser.add_argument("--workdir", type=Path, default=Path("runs/estimator_study"))
    parser.add_argument("--json", type=Path, required=True, help="other results in it are kept")
    parser.add_argument("--plot", type=Path, help="default: beside the JSON, as PNG")
    return parser


def _record(path: Path, part: str, network: str, made: dict[str, Any]) -> None:
    """Puts a result among those that are in the file already."""
    known = json.loads(path.read_text()) if path.exists() else {}
    made = made | {"environment": recorded(environment())}
    known.setdefault(part, {})[network] = made
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known, indent=2) + "\n")


# Part A: gradients


def gradients(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The gradients of one network, as data; what is known after each of its two states."""
    draws = _QUICK if options.quick else _DRAWS[options.network]
    draws = Draws(options.draws or draws.on_one_batch, options.batches or draws.batches)
    steps = options.steps or _TRAINED_STEPS[options.network]
    config = study_config(options, BASELINE, seed=0, steps=steps)
    if options.trained is not None:
        config = read_run(options.trained).config
        if config.method != "mass" or config.network != options.network or config.beta == 0:
            raise ConfigError(f"--trained={options.trained}: no MASS run of {options.network}")
        changes = {} if options.data_dir is None else {"data.dir": options.data_dir}
        config = resolve(apply_overrides(config, changes))
    dataset = load_dataset(config.data.name, config.data.dir, tuple(config.data.ood))
    experiment = make_experiment(config, dataset)
    trained = options.trained or run(config, dataset, options.workdir)
    states = {"init": (0, experiment.initial_state().params)}
    states["trained"] = (read_run(trained).steps, load(trained))
    made: dict[str, Any] = {
        "beta": config.beta,
        "train_size": config.train_size,
        "batch_size": config.batch_size,
        "trained_by": as_command(config),
        "draws": draws._asdict(),
        "flops": flops(config, dataset, noise.estimators_of(states["init"][1])),
        "states": {},
    }
    functions = gradient_functions(config, dataset.num_classes, [*made["flops"]][1:])
    batches = [_batch(config, dataset, experiment, index) for index in range(draws.batches + 1)]
    for name, (step, params) in states.items():
        print(f"{options.network}, step {step:,}", flush=True)
        seen = study_state(config, params, functions, batches, draws.on_one_batch)
        made["states"][name] = {"step": step, **seen}
        yield made


def flops(config: ConfigDict, dataset: Dataset, estimators: Sequence[str]) -> dict[str, float]:
    """Of a training step by estimator (mean over its cycle); ``"none"``: without the term."""
    without = resolve(apply_overrides(config, {"beta": "0"}))
    counted = {"none": step_flops(without, dataset)}
    for name in estimators:
        counted[name] = step_flops(noise.with_estimator(config, name), dataset)
    return counted


def gradient_functions(
    config: ConfigDict, num_classes: int, estimators: Sequence[str]
) -> dict[str, noise.GradientFn]:
    """Gradients by estimator, and of the ``"rest"`` of the objective; each compiles once."""
    functions = {"rest": noise.rest_gradient(noise.with_estimator(config, BASELINE), num_classes)}
    for name in estimators:
        chosen = noise.with_estimator(config, name)
        functions[name] = noise.jacobian_gradient(chosen, num_classes)
    # In pieces: as a whole it would take gigabytes.
    return functions | {"exact": noise.exact_gradient(config, num_classes)}


def study_state(
    config: ConfigDict,
    params: ModelParams,
    functions: Mapping[str, noise.GradientFn],
    batches: Sequence[tuple[jax.Array, jax.Array]],
    draws_on_one_batch: int,
) -> dict[str, Any]:
    """Bias and variance of every estimator at fixed parameters.

    On the first batch the truth is the exact gradient of that batch. Over the others it is
    the mean of their exact gradients; each draw is compared with the exact gradient of its own
    batch for the bias, and with that mean for the whole variance.

    Args:
      config: of the run.
      params: the model.
      functions: of `gradient_functions`.
      batches: ``x`` ``[B, ...]`` and ``labels`` ``[B]`` each; three or more.
      draws_on_one_batch: cycles on the first.
    """
    first, others = batches[0], batches[1:]
    exact, rest = functions["exact"], functions["rest"]
    key = jax.random.key(config.seed)
    truth = exact(params, *first, key, 0)
    truths = [exact(params, *batch, key, 0) for batch in others]
    rests = [rest(params, *batch, key, 0) for batch in others]
    mean_truth = np.mean(np.asarray(truths), axis=0)
    mean_rest = np.mean(np.asarray(rests), axis=0)
    mean_total = mean_rest + config.beta * mean_truth

    def total_noise(cycles: Sequence[Sequence[np.ndarray]]) -> float:
        """Variance of the whole gradient of a step, each batch with its other terms."""
        totals = (
            [r + config.beta * draw for draw in cycle]
            for r, cycle in zip(rests, cycles, strict=True)
        )
        return noise.measure(totals, mean_total).variance

    exact_noise = total_noise([[gradient] for gradient in truths])
    squared_norm = float(mean_truth @ mean_truth)
    rest_variance = noise.measure([[r] for r in rests], mean_rest).variance
    rest_variance *= float(mean_rest @ mean_rest)
    table = {}
    for name in [name for name in functions if name != "rest"]:
        gradient, every = functions[name], JACOBIAN_ESTIMATORS[name].every
        n = num_jacobian_examples(name, config.batch_size, config.representation_dim)
        # Over all examples of one batch only the order of summation is left to chance.
        on_one_batch = 2 if n == config.batch_size else draws_on_one_batch
        over_batches = [[exactly] for exactly in truths]
        if name != "exact":
            over_batches = [
                [gradient(params, *batch, jax.random.fold_in(key, index), s) for s in range(every)]
                for index, batch in enumerate(others)
            ]
        whole = noise.measure(over_batches, mean_truth)
        jacobian_noise = config.beta**2 * whole.variance * squared_norm
        table[name] = {
            "num_examples": n,
            "every": every,
            "one_batch": noise.measure(
                _on_one_batch(gradient, params, first, key, on_one_batch, every), truth
            )._asdict(),
            "random_batches": whole._asdict(),
            "against_own_batch": noise.paired(over_batches, truths, mean_truth)._asdict(),
            "noise_share": jacobian_noise / (jacobian_noise + rest_variance),
            "total_noise_over_exact": total_noise(over_batches) / exact_noise,
        }
        print(f"  {name} measured", flush=True)
    return {
        "jacobian_gradient_norm": squared_norm**0.5,
        "rest_gradient_norm": float(np.linalg.norm(mean_rest)),
        "rest_variance": rest_variance,
        "estimators": table,
    }


def _on_one_batch(
    gradient: noise.GradientFn,
    params: ModelParams,
    batch: tuple[jax.Array, jax.Array],
    key: jax.Array,
    count: int,
    every: int,
) -> Iterator[list[np.ndarray]]:
    """Cycles on one batch in ever new order: its first rows are a random sub-batch."""
    generator = np.random.default_rng(0)
    for index in range(count):
        order = generator.permutation(len(batch[1]))
        x, labels = batch[0][order], batch[1][order]
        draw_key = jax.random.fold_in(key, index)
        yield [gradient(params, x, labels, draw_key, step) for step in range(every)]


def _batch(
    config: ConfigDict, dataset: Dataset, experiment: Experiment, index: int
) -> tuple[jax.Array, jax.Array]:
    """A random minibatch of the training subset, drawn without regard to epochs."""
    generator = np.random.default_rng((config.seed, index))
    rows = generator.choice(experiment.subset.train, config.batch_size, replace=False)
    x = normalise(jnp.asarray(dataset.train.images[rows]), dataset.normalisation)
    return x, jnp.asarray(dataset.train.labels[rows])


# Part B: training


def study_config(
    options: argparse.Namespace, estimator: str, seed: int, steps: int | None
) -> ConfigDict:
    """The paper's experiment with another estimator, and frozen statistics."""
    changes = {"train_size": str(options.train_size), "seed": str(seed)}
    changes |= {} if steps is None else {"steps": str(steps)}
    changes |= {} if options.data_dir is None else {"data.dir": options.data_dir}
    base = load_config(str(CONFIG_DIR / f"mass_{options.network}.py"))
    return noise.with_estimator(apply_overrides(base, changes), estimator)


def run(config: ConfigDict, dataset: Dataset, workdir: Path) -> Path:
    """Trains to the end, or goes on, or finds it done; the directory of the run."""
    name = f"{config.network}-{config.jacobian.estimator}-n{config.train_size}-seed{config.seed}"
    place = workdir / f"{name}-steps{config.steps}"
    print(place.name, flush=True)
    with locked(place):
        train(config, dataset, place, quiet=True)
    return place


def training(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains estimator by estimator and seed by seed; what is known after each run."""
    runs: dict[str, dict[str, Any]] = {}
    dataset: Dataset | None = None
    for seed in options.seeds:
        for estimator in (BASELINE, *CANDIDATES):
            config = study_config(options, estimator, seed, options.steps)
            if dataset is None:
                dataset = load_dataset(config.data.name, config.data.dir, tuple(config.data.ood))
            place = run(config, dataset, options.workdir)
            results = json.loads((place / "results.json").read_text())
            runs.setdefault(estimator, {})[str(seed)] = results | loss_terms(config, dataset, place)
            yield {
                "steps": config.steps,
                "train_size": config.train_size,
                "differences": {name: differences(runs, name) for name in CANDIDATES},
                "runs": runs,
            }


def loss_terms(config: ConfigDict, dataset: Dataset, workdir: Path) -> dict[str, float]:
    """The three terms of a trained model, by running statistics, in nats per example.

    Over training examples, every Jacobian exact: the same yardstick for all estimators, whose own
    logs are noisier the cheaper they are.
    """
    params = load(workdir)
    rows = make_experiment(config, dataset).subset.train[:_TERM_EXAMPLES]
    x = normalise(jnp.asarray(dataset.train.images[rows]), dataset.normalisation)
    labels = jnp.asarray(dataset.train.labels[rows])
    chunk = min(50, len(rows))
    loss = jax.jit(lambda v, y: mass_loss(params, None, v, y, config.beta, chunk_size=chunk)[1])
    terms = loss(x, labels)
    return {
        "cross_entropy": float(jnp.mean(terms.cross_entropy)),
        "entropy_term": float(jnp.mean(terms.entropy)),
        "jacobian_term": float(jnp.mean(terms.jacobian)),
    }


def differences(runs: dict[str, dict[str, Any]], candidate: str) -> dict[str, dict[str, Any]]:
    """Candidate minus the authors', seed by seed: mean, standard error and number of pairs."""
    seeds = [seed for seed in runs[BASELINE] if seed in runs.get(candidate, {})]
    table: dict[str, dict[str, Any]] = {}
    for metric in METRICS if seeds else ():
        pairs = [runs[candidate][seed][metric] - runs[BASELINE][seed][metric] for seed in seeds]
        error = float(np.std(pairs, ddof=1) / len(pairs) ** 0.5) if len(pairs) > 1 else None
        table[metric] = {"mean": float(np.mean(pairs)), "error": error, "seeds": len(pairs)}
    return table


if __name__ == "__main__":
    sys.exit(main())
