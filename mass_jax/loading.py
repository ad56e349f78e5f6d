"""`load`: the parameters of a run, ready for a notebook."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mass_jax import checkpoint
from mass_jax.archive import ArchiveError, read_archive
from mass_jax.config import OWN, ConfigError, from_flat
from mass_jax.data import Normalisation
from mass_jax.experiment import method_of, network_builder
from mass_jax.method import BuildNetwork
from mass_jax.model import ModelParams
from mass_jax.own_network import own_network, same_architecture


class StoredRun(NamedTuple):
    """A run as a workdir or an archive keeps it.

    Attributes:
      arrays: parameters by name.
      config: checked.
      input_shape: of one example.
      num_classes: ``K``.
      normalisation: of the training data; ``None`` in checkpoints of older versions.
      steps: taken.
      results: empty unless the run is finished.
      digest: of the checkpoint or archive.
    """

    arrays: dict[str, np.ndarray]
    config: ConfigDict
    input_shape: tuple[int, ...]
    num_classes: int
    normalisation: Normalisation | None
    steps: int
    results: dict[str, Any]
    digest: str


def load(path: str | Path, network: Any = None, params: Any = None) -> ModelParams:
    """Parameters of a run, as `cdi_loss` takes them.

    Args:
      path: a workdir of ``python -m mass_jax.main`` or `mass_jax.fit` (its newest good
        checkpoint is read), or a file by ``python -m experiments.export``. Every digest is
        checked; nothing in it is executed.
      network: the network given to `mass_jax.fit`, if it was not one by name.
      params: any parameters of it, if it is a function: they tell the structure.

    Returns:
      The model with its architecture, mixtures and running statistics. A SoftmaxCE run
      has no mixtures: fit some with `mass_jax.fit_class_mixtures`. To predict from inputs as
      they are, see `mass_jax.load_fitted`.

    Example:
      >>> import flax.linen as nn, mass_jax, numpy as np
      >>> x = np.random.default_rng(0).normal(size=(80, 3))
      >>> fitted = mass_jax.fit(nn.Dense(2), x, (x[:, 0] > 0).astype(int), steps=1, quiet=True)
      >>> load(fitted.workdir, nn.Dense(2)).q.means.shape  # classes, components, representation
      (2, 4, 2)

    Raises:
      CheckpointError, ArchiveError: one line, if there is nothing good to load.
    """
    run = read_run(path)
    return params_of(run, network_of(run, network, params))


def read_run(path: str | Path) -> StoredRun:
    """Reads and checks a workdir or an archive."""
    path = Path(path)
    if path.is_file():
        archive = read_archive(path)
        try:
            return _stored(
                archive.arrays, archive.config, archive.model, archive.results, "archive"
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ArchiveError(f"{path}: describes no model ({reason}); not loaded") from None
    if not path.exists():
        raise checkpoint.CheckpointError(f"{path}: no such workdir or archive")
    found = checkpoint.restore_latest(path / "checkpoints")
    if found is None:
        raise checkpoint.CheckpointError(
            f"{path}: no good checkpoint to load; is it the workdir of a finished run?"
        )
    arrays = {name: leaf for name, leaf in found.arrays.items() if name.startswith("params.")}
    try:
        results = json.loads((path / "results.json").read_text())
    except (OSError, ValueError):
        results = {}  # not finished
    meta = {**found.meta, "steps": found.step}
    return _stored(arrays, found.meta["config"], meta, results, found.digest)


def _stored(
    arrays: dict[str, np.ndarray],
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    results: dict[str, Any],
    digest: str,
) -> StoredRun:
    shape = tuple(model["input_shape"])
    numbers = (*shape, model["num_classes"], model["steps"])
    if not shape or any(type(n) is not int or not 0 < n < 2**31 for n in numbers):
        raise ValueError(f"input_shape, num_classes and steps are {numbers}")
    normalisation = None
    if model.get("normalisation") is not None:
        mean, std = (
            np.asarray(model["normalisation"][name], np.float32) for name in ("mean", "std")
        )
        if mean.shape != shape[-1:] or std.shape != shape[-1:] or not (std > 0).all():
            raise ValueError("normalisation does not fit the input shape")
        normalisation = Normalisation(mean, std)
    return StoredRun(
        arrays,
        from_flat(config),
        shape,
        model["num_classes"],
        normalisation,
        model["steps"],
        results,
        digest,
    )


def network_of(run: StoredRun, network: Any = None, params: Any = None) -> BuildNetwork:
    """The network of a stored run, by name or as given."""
    if run.config.network != OWN:
        if network is not None:
            raise ConfigError(f"the run's network is {run.config.network}; leave network= out")
        return network_builder(run.config)
    if network is None:
        raise ConfigError("the run trained a network of somebody's own; pass it as network=")
    found = own_network(network, run.input_shape, params)
    if not same_architecture(found.digest, run.config.network_digest):
        raise ConfigError(
            f"network= is not the one of the run: its digest is {found.digest}, the run's "
            f"{run.config.network_digest}; pass the network that was trained"
        )
    return lambda output_dim: found.network


def params_of(run: StoredRun, build_network: BuildNetwork) -> ModelParams:
    """The parameters of a stored run in the structure of its network and method."""
    # Only the structure is needed: "mle" would look at training data.
    config = run.config.copy_and_resolve_references()
    config.initialisation = "zeros"
    method = method_of(config, run.num_classes)
    template = jax.eval_shape(
        lambda key: method.init(key, build_network, run.input_shape), jax.random.key(0)
    )
    loaded = checkpoint.into_tree({"params": template}, run.arrays)["params"]
    return jax.tree.map(jnp.asarray, loaded)
