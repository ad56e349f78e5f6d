"""`fit`: MASS, or a baseline, on somebody's own network and data."""

import dataclasses
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import ArrayLike

from mass_jax import reporting
from mass_jax.config import ARRAYS, OWN, ConfigError, flatten, from_flat
from mass_jax.data import (
    DataError,
    Dataset,
    Normalisation,
    dataset_from_arrays,
    load_dataset,
    normalise,
)
from mass_jax.evaluation import with_fitted_density
from mass_jax.experiment import make_experiment, network_builder
from mass_jax.fitted import Fitted
from mass_jax.loading import params_of, read_run
from mass_jax.method import BuildNetwork
from mass_jax.methods.vib import num_outputs
from mass_jax.networks import NETWORKS
from mass_jax.own_network import OwnNetwork, check_examples_do_not_interact, own_network
from mass_jax.schema import OPERATIONAL
from mass_jax.signals import Interrupted
from mass_jax.training import check_same_data, check_same_run, finished_results, train
from mass_jax.workdir import locked

_SET_BY_ARGUMENTS = ("network", "network_digest", "data.name", "data.ood")
_BATCH_SIZE = 64


def fit(
    network: Any,
    x_train: ArrayLike | str,
    y_train: ArrayLike | None = None,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    ood: Mapping[str, ArrayLike] | Sequence[str] | None = None,
    params: Any = None,
    method: str | None = None,
    beta: float | None = None,
    steps: int | None = None,
    seed: int | None = None,
    workdir: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Fitted:
    """Trains a network on data by the project's own loop, and evaluates it.

    Args:
      network: ``"small_mlp"``, ``"resnet20"``; or any Flax linen module with ``__call__(x)``
        that maps a batch ``[B, ...]`` to ``[B, R]``; or a function ``apply_fn(params, x)`` that
        does. Its output size is the representation's: MASS takes any ``R`` up to the size of
        an example, SoftmaxCE the number of classes, VIB what parametrises its encoder
        (``R + R (R + 1) / 2`` outputs). Layers with state of their own are refused.
      x_train: ``[N, ...]``, uint8 or float, normalised per channel (last axis) by their own
        statistics; or the name of a TFDS dataset.
      y_train: ``[N]`` integers from 0.
      x_test, y_test: likewise; without them ``results`` are of the training examples, and
        say so under ``evaluated_on``.
      ood: out-of-distribution examples by name, normalised as the training examples; with a
        TFDS dataset, names of others.
      params: initial parameters of a function.
      method: ``"mass"`` (default), ``"vib"`` or ``"softmax_ce"``.
      beta: weight of minimality; default 1e-3.
      steps, seed: of training.
      workdir: holds logs, checkpoints and results; the same call again resumes, or returns
        what is finished. Default: a temporary one.
      config: other fields by dotted name, as ``--config.KEY=VALUE`` has them, such as
        ``{"optimizer.learning_rate": 1e-3}``. The learning rate does not decay unless
        ``optimizer.decay_epochs`` says so.
      quiet: no progress.

    Returns:
      The trained model with its results; it predicts from inputs as they are.

    Raises:
      ConfigError, DataError: one line, before anything is trained.
      KeyboardInterrupt, SystemExit: by SIGINT and SIGTERM, after a checkpoint; with a
        ``workdir`` the same call goes on from there.

    Example:
      >>> import flax.linen as nn, numpy as np
      >>> x = np.random.default_rng(0).normal(size=(80, 3))
      >>> y = (x[:, 0] > 0).astype(int)
      >>> fitted = fit(nn.Dense(2), x, y, steps=20, quiet=True)
      >>> fitted.predict_proba(x[:5]).shape, fitted.representation(x[:5]).shape
      ((5, 2), (5, 2))
    """
    fields = dict(flatten(config or {}))
    others = {key: value for key, value in fields.items() if key not in OPERATIONAL}
    for key in _SET_BY_ARGUMENTS:
        if key in fields:
            raise ConfigError(f"config.{key} follows from the arguments of fit; leave it out")
    by_argument = {"method": method, "beta": beta, "steps": steps, "seed": seed}
    given = {key: value for key, value in by_argument.items() if value is not None}
    fields |= given
    if isinstance(network, str) and network not in NETWORKS:
        raise ConfigError(f"network={network!r}: must be one of {sorted(NETWORKS)}, or a network")
    if isinstance(x_train, str):
        dataset = _named_dataset(x_train, (y_train, x_test, y_test), ood, fields)
    else:
        keep_shape = not isinstance(network, str)
        dataset = _own_dataset(x_train, y_train, x_test, y_test, ood, keep_shape)
        fields["data.name"] = ARRAYS
    build_network: BuildNetwork | None = None
    if isinstance(network, str):
        fields["network"] = network
    else:
        own = own_network(network, dataset.input_shape, params)
        _check_per_example(own, dataset)
        fields |= _fields_of_network(own, fields, dataset.num_classes)
        build_network = lambda output_dim: own.network
    resolved = from_flat(_defaults(fields, dataset) | fields)
    call = _call(network, x_train, x_test is not None, ood, params is not None, given, others)
    if workdir is not None:
        return _fit_in(Path(workdir), resolved, dataset, build_network, call, quiet)
    temporary = Path(tempfile.mkdtemp(prefix="mass_jax_"))
    try:
        fitted = _fit_in(temporary, resolved, dataset, build_network, call, quiet, report=False)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    weakref.finalize(fitted, shutil.rmtree, temporary, ignore_errors=True)
    return fitted


def _fit_in(
    workdir: Path,
    config: ConfigDict,
    dataset: Dataset,
    build_network: BuildNetwork | None,
    call: str,
    quiet: bool,
    report: bool = True,
) -> Fitted:
    check_same_run(config, workdir)
    finished = finished_results(config, workdir)
    if finished is not None:
        check_same_data(finished.get("data_sha256"), dataset.checksums(), workdir)
    with locked(workdir):
        try:
            results = train(
                config, dataset, workdir, quiet=quiet, build_network=build_network, command=call
            )
        except Interrupted as error:  # as Python programs end by these signals: 130 and 143
            if error.signum == signal.SIGINT:
                raise KeyboardInterrupt(f"{error}; the same call goes on") from None
            raise SystemExit(128 + error.signum) from None
        if report:
            reporting.report_if_possible(workdir)
            if not quiet and (workdir / "report.html").exists():
                print(f"report: {workdir / 'report.html'}", file=sys.stderr)
    experiment = make_experiment(config, dataset, build_network)
    run = read_run(workdir)
    trained = params_of(run, build_network or network_builder(config))
    if config.method == "softmax_ce":
        trained = with_fitted_density(config, experiment, dataset, trained)
    return Fitted(
        trained,
        results,
        config,
        dataset.input_shape,
        dataset.num_classes,
        dataset.normalisation,
        workdir,
    )


def _call(
    network: Any,
    x_train: Any,
    has_test: bool,
    ood: Any,
    has_params: bool,
    given: Mapping[str, Any],
    others: Mapping[str, Any],
) -> str:
    """The call of `fit`, with names for what lives in somebody's program, and without paths."""
    arguments = [repr(network) if isinstance(network, str) else "network"]
    arguments += [repr(x_train)] if isinstance(x_train, str) else ["x_train", "y_train"]
    arguments += ["x_test", "y_test"] if has_test else []
    if isinstance(ood, Mapping) and ood:
        arguments.append(f"ood={{{', '.join(f'{str(name)!r}: ...' for name in ood)}}}")
    elif ood:
        arguments.append(f"ood={ood!r}")
    arguments += ["params=params"] if has_params else []
    arguments += [f"{name}={value!r}" for name, value in given.items()]
    arguments += [f"config={dict(others)!r}"] if others else []
    return f"mass_jax.fit({', '.join(arguments)})"


def _defaults(fields: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """What differs from the bundled experiment: its sizes are of its own data."""
    held_out = fields.get("data.validation_size", 0)
    left = len(dataset.train.labels) - (held_out if isinstance(held_out, int) else 0)
    devices = jax.device_count()
    size = int(np.prod(dataset.input_shape))
    return {
        "beta": 0.0 if fields.get("method") == "softmax_ce" else 1e-3,
        "train_size": max(left, 1),
        "data.validation_size": 0,
        "batch_size": -(-_BATCH_SIZE // devices) * devices,
        "representation_dim": min(8, size),
        "optimizer.decay_epochs": (),
    }


def _named_dataset(name: str, arrays: tuple[Any, ...], ood: Any, fields: dict[str, Any]) -> Dataset:
    if any(array is not None for array in arrays):
        raise DataError(f"x_train={name!r} names a dataset; leave out y_train, x_test and y_test")
    if isinstance(ood, Mapping):
        raise DataError(f"x_train={name!r} names a dataset; ood must be names too")
    others = (ood,) if isinstance(ood, str) else tuple(ood or ())
    fields |= {"data.name": name, "data.ood": others}
    return load_dataset(name, fields.get("data.dir"), others)


def _own_dataset(
    x_train: ArrayLike,
    y_train: ArrayLike | None,
    x_test: ArrayLike | None,
    y_test: ArrayLike | None,
    ood: Any,
    keep_shape: bool,
) -> Dataset:
    if y_train is None or (x_test is None) != (y_test is None):
        raise DataError("every x needs its y: pass y_train, and both x_test and y_test or neither")
    if ood is not None and not isinstance(ood, Mapping):
        raise DataError("ood must be a dictionary: examples by the name of their set")
    images = np.asarray(x_train)
    _check_every_class_occurs(np.asarray(y_train))
    dataset = dataset_from_arrays(
        images,
        np.asarray(y_train),
        images if x_test is None else np.asarray(x_test),
        np.asarray(y_train if y_test is None else y_test),
        name=ARRAYS,
        ood={str(name): np.asarray(examples) for name, examples in (ood or {}).items()},
        keep_shape=keep_shape,
    )
    statistics = dataset.normalisation
    if keep_shape and images.dtype == np.uint8 and images.ndim == 3:
        # Images without channels: their columns are no features with scales of their own.
        width = images.shape[-1]
        mean, std = np.float32(images.mean()), np.float32(images.std() or 1.0)
        statistics = Normalisation(np.full(width, mean), np.full(width, std))
    return dataclasses.replace(
        dataset,
        test=dataset.train if x_test is None else dataset.test,
        normalisation=statistics,
        # A detector in use does not know the statistics of what is strange.
        ood={name: (split, statistics) for name, (split, _) in dataset.ood.items()},
    )


def _check_every_class_occurs(labels: np.ndarray) -> None:
    """A class without an example would get its share of every prediction."""
    if not np.issubdtype(labels.dtype, np.integer) or labels.size == 0 or labels.min() < 0:
        return  # has an error of its own
    absent = np.setdiff1d(np.arange(min(labels.max(), labels.size) + 1), labels)
    if absent.size:
        raise DataError(
            f"y_train has no example of class {absent[0]}, but one of {labels.max()}; number the "
            "classes from 0 without gaps, as numpy.unique(y, return_inverse=True)[1] does"
        )


def _check_per_example(own: OwnNetwork, dataset: Dataset) -> None:
    first = dataset.train.images[:1]
    other = dataset.train.images[-1:]
    two = np.concatenate([first, other]) if len(dataset.train.images) > 1 else first
    check_examples_do_not_interact(own, normalise(jnp.asarray(two), dataset.normalisation))


def _fields_of_network(
    own: OwnNetwork, fields: Mapping[str, Any], num_classes: int
) -> dict[str, Any]:
    """Identity and representation size of an own network, or what is wrong with the latter."""
    method = fields.get("method", "mass")
    dim = own.output_dim
    if method == "softmax_ce" and dim != num_classes:
        raise ConfigError(
            f"the network has {dim} outputs; method=softmax_ce needs {num_classes}, one per class"
        )
    if method == "vib":
        covariance = fields.get("vib.covariance", "full")
        sizes = [num_outputs(r, covariance) for r in range(1, dim + 1)]
        if dim not in sizes:
            shown = ", ".join(map(str, sizes[:6]))
            raise ConfigError(
                f"the network has {dim} outputs; method=vib with vib.covariance={covariance} needs "
                f"as many as its encoder has parameters: {shown}, ..."
            )
        dim = sizes.index(dim) + 1
    asked = fields.get("representation_dim", dim)
    if asked != dim and method != "softmax_ce":
        raise ConfigError(
            f"config.representation_dim={asked}: the network gives {dim}; leave the field out"
        )
    return {"network": OWN, "network_digest": own.digest, "representation_dim": dim}
