"""Every hyperparameter: its default, its meaning, what it may be.

The defaults are the bundled digits experiment.
"""

import math
from typing import Any, NamedTuple

from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.gaussian_mixture import INITIALISATIONS
from mass_jax.layers import BATCH_NORM_STARTS
from mass_jax.methods import METHODS
from mass_jax.networks import NETWORKS
from mass_jax.representation import BATCH_STATS

OWN = "own"  # the network of a run that mass_jax.fit was given
ARRAYS = "arrays"  # the data of such a run


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line with the fix."""


class Field(NamedTuple):
    """One field of the configuration.

    Attributes:
      default: its value in the digits experiment.
      kind: ``int``, ``float``, ``bool``, ``str``, or a tuple kind ``"ints"``, ``"strs"``.
      meaning: one line for ``--help``.
      choices: allowed values of a string.
      low, high: closed range of numbers (of each entry of a tuple).
      positive: zero is not allowed.
      optional: may be None.
    """

    default: Any
    kind: type | str
    meaning: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    positive: bool = False
    optional: bool = False


SCHEMA: dict[str, Field] = {
    "method": Field("mass", str, "training method", tuple(sorted(METHODS))),
    "network": Field(
        "small_mlp", str, "architecture; own: one given to mass_jax.fit", (*sorted(NETWORKS), OWN)
    ),
    "network_digest": Field(None, str, "of an own network, by mass_jax.fit", optional=True),
    "seed": Field(0, int, "of initialisation, data order, noise and evaluation", high=2**31 - 1),
    "steps": Field(1500, int, "training steps", positive=True, high=10**9),
    "train_size": Field(900, int, "training examples drawn by the seed", positive=True),
    "batch_size": Field(64, int, "global batch", low=2, high=10**6),
    "beta": Field(1e-3, float, "weight of minimality (MASS) or rate (VIB)", high=1e6),
    "representation_dim": Field(
        8, int, "r, size of f(x) in MASS and VIB", positive=True, high=4096
    ),
    "num_components": Field(4, int, "Gaussians per class mixture", positive=True, high=1000),
    "initialisation": Field("zeros", str, "of q in MASS", (*INITIALISATIONS, "mle")),
    "dropout_rate": Field(0.0, float, "after each hidden nonlinearity (small_mlp)", high=0.99),
    "batch_norm": Field(True, bool, "BatchNorm in small_mlp"),
    "batch_norm_start": Field(
        None,
        str,
        "of its scales; uniform: U(0, 1), PyTorch's until 2019; None: ones",
        tuple(start for start in BATCH_NORM_STARTS if start),
        optional=True,
    ),
    "weight_decay": Field(0.0, float, "L2, added to the gradient", high=1e3),
    "dtype": Field("float32", str, "of the network's arithmetic", ("float32", "bfloat16")),
    "optimizer.name": Field("adam", str, "update rule", ("adam", "sgd")),
    "optimizer.learning_rate": Field(1e-3, float, "of the network", positive=True, high=1e3),
    "optimizer.q_learning_rate": Field(
        1e-2, float, "of the method's own parameters; None: the network's", high=1e3, optional=True
    ),
    "optimizer.momentum": Field(0.9, float, "of sgd", high=0.9999),
    "optimizer.clip_norm": Field(
        None, float, "largest norm of a gradient; None: any", positive=True, optional=True
    ),
    "optimizer.decay_epochs": Field(
        (60, 90), "ints", "epochs of the training subset at which the rates are multiplied", low=1
    ),
    "optimizer.decay_factor": Field(
        0.1, float, "what they are multiplied by", positive=True, high=1
    ),
    "jacobian.estimator": Field(
        "sub_batch", str, "of E[log J_f]", tuple(sorted(JACOBIAN_ESTIMATORS))
    ),
    "jacobian.sub_batch": Field(
        None, int, "its examples; None: the estimator's choice", positive=True, optional=True
    ),
    "jacobian.batch_stats": Field("frozen", str, "what J_f means under BatchNorm", BATCH_STATS),
    "jacobian.always_split": Field(
        None, bool, "batch_stats=paper: sub-batch normalised apart at beta=0 too", optional=True
    ),
    "jacobian.mode": Field("auto", str, "of differentiation", ("auto", "forward", "reverse")),
    "jacobian.chunk_size": Field(
        None, int, "examples at once, bounds memory; None: all", positive=True, optional=True
    ),
    "jacobian.singular": Field("floor", str, "value at rank deficiency", ("floor", "-inf")),
    "vib.covariance": Field("full", str, "of the encoder", ("full", "diagonal")),
    "vib.train_samples": Field(5, int, "encoder samples in training", positive=True, high=1000),
    "vib.test_samples": Field(10, int, "encoder samples in evaluation", positive=True, high=1000),
    "data.name": Field("digits", str, "digits, cifar10 or another TFDS name"),
    "data.ood": Field((), "strs", "TFDS names of out-of-distribution sets (digits brings its own)"),
    "data.dir": Field(
        None, str, "TFDS directory; None: TFDS_DATA_DIR or TFDS's default", optional=True
    ),
    "data.validation_size": Field(200, int, "validation examples, disjoint from training"),
    "data.resident": Field(
        "auto", str, "training images kept on the device", ("auto", "always", "never")
    ),
    "density_examples": Field(
        25_600, int, "training outputs the SoftmaxCE density is fitted to", positive=True
    ),
    "density_components": Field(10, int, "Gaussians per class in it", positive=True, high=1000),
    "eval_batch_size": Field(500, int, "of evaluation", positive=True, high=10**6),
    "parallel": Field("pmap", str, "how the step runs on devices", ("pmap", "shard_map")),
    "steps_per_dispatch": Field(50, int, "steps per call of the device", positive=True, high=10**5),
    "log_every": Field(50, int, "steps between metric rows", positive=True),
    "eval_every": Field(500, int, "steps between validations; 0: only at the end"),
    "checkpoint_every": Field(500, int, "steps between checkpoints; 0: only at the end"),
    "keep_checkpoints": Field(
        2, int, "newest ones kept, beside the best", positive=True, high=1000
    ),
    "watchdog_minutes": Field(
        60.0, float, "without progress end the process", positive=True, optional=True
    ),
}

# Fields that change how a run is carried out, not what it computes: they may change on
# resume and do not enter the run's identity. `steps` may grow.
OPERATIONAL = (
    "data.dir",
    "data.resident",
    "eval_batch_size",
    "parallel",
    "steps_per_dispatch",
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "watchdog_minutes",
)
