"""`load`: the parameters of a run, ready for a notebook."""

from pathlib import Path

import jax
import jax.numpy as jnp

from mass_jax import checkpoint
from mass_jax.config import from_flat
from mass_jax.experiment import method_of, network_builder
from mass_jax.model import ModelParams


def load(workdir: str | Path) -> ModelParams:
    """Parameters of the newest good checkpoint of a run, as `cdi_loss` takes them.

    Args:
      workdir: of ``python -m mass_jax.main``.

    Returns:
      The model with its architecture, mixtures and running statistics. A SoftmaxCE run
      has no mixtures: fit some with `mass_jax.fit_class_mixtures`.

    Raises:
      CheckpointError: one line, if there is no good checkpoint.
    """
    found = checkpoint.restore_latest(Path(workdir) / "checkpoints")
    if found is None:
        raise checkpoint.CheckpointError(f"{workdir}: no good checkpoint to load")
    # Only the structure is needed: "mle" would look at training data.
    config = from_flat(found.meta["config"] | {"initialisation": "zeros"})
    method = method_of(config, found.meta["num_classes"])
    template = jax.eval_shape(
        lambda key: method.init(key, network_builder(config), found.meta["input_shape"]),
        jax.random.key(0),
    )
    loaded = checkpoint.into_tree({"params": template}, found.arrays)["params"]
    return jax.tree.map(jnp.asarray, loaded)
