"""Every hyperparameter: its default, its meaning, what it may be.

`default_config` is the bundled digits experiment. Files in `configs/` derive from
it; ``--config.key=value`` overrides a field; `resolve` checks the whole before any
data is touched. `ml_collections` alone accepts most wrong values, so both parsing and
checking go through the schema here.
"""

import ast
import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.gaussian_mixture import INITIALISATIONS
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


def default_config() -> ConfigDict:
    """The bundled digits experiment, as a locked `ConfigDict`.

    Example:
      >>> default_config().optimizer.name
      'adam'
    """
    config = ConfigDict()
    for key, field in SCHEMA.items():
        *groups, leaf = key.split(".")
        node = config
        for group in groups:
            if group not in node:
                node[group] = ConfigDict()
            node = node[group]
        # convert_dict=False and a plain assignment: types are checked by the schema.
        node[leaf] = field.default
    return config.lock()


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted name; lists become tuples."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = tuple(value) if isinstance(value, list) else value
    return flat


def apply_overrides(config: ConfigDict, overrides: Mapping[str, str]) -> ConfigDict:
    """A copy with text values parsed and set, as from ``--config.key=value``.

    Args:
      config: to start from.
      overrides: text by dotted name.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked():
        for key, text in overrides.items():
            _set(config, _known_key(key), _parse(key, text))
    return config


def from_flat(flat: Mapping[str, Any]) -> ConfigDict:
    """A checked configuration from fields by dotted name, as a checkpoint keeps them."""
    config = default_config()
    with config.unlocked():
        for key, value in flat.items():
            _set(config, _known_key(key), value)
    return resolve(config)


def _set(config: ConfigDict, key: str, value: Any) -> None:
    *groups, leaf = key.split(".")
    for group in groups:
        config = config[group]
    with config.ignore_type():
        config[leaf] = value


def resolve(config: Mapping[str, Any]) -> ConfigDict:
    """The configuration, checked: keys, types, ranges, choices, combinations.

    Args:
      config: nested or from `default_config`.

    Raises:
      ConfigError: one line, with the allowed values or the nearest name.
    """
    flat = flatten(config)
    for key in flat:
        _known_key(key)
    missing = [key for key in SCHEMA if key not in flat]
    if missing:
        raise ConfigError(
            f"config.{missing[0]} is missing; derive your config from configs/base.py"
        )
    checked = default_config()
    with checked.unlocked():
        for key, value in flat.items():
            _set(checked, key, _checked(key, value))
    _check_combinations(flatten(checked))
    return checked


def _known_key(key: str) -> str:
    if key in SCHEMA:
        return key
    near = difflib.get_close_matches(key, SCHEMA, n=1, cutoff=0.5)
    near = near or [name for name in SCHEMA if name.endswith(f".{key}")][:1]
    if any(name.startswith(f"{key}.") for name in SCHEMA):
        hint = "it is a group; set one of " + ", ".join(
            n for n in SCHEMA if n.startswith(f"{key}.")
        )
    elif near:
        hint = f"did you mean config.{near[0]}?"
    else:
        hint = "python -m mass_jax.main --help lists the fields"
    raise ConfigError(f"config.{key}: unknown field; {hint}")


def _parse(key: str, text: str) -> Any:
    """Text to the kind of the field; `_checked` does the rest."""
    field = SCHEMA[key]
    if field.optional and text in ("None", "none", ""):
        return None
    parsers: dict[type | str, Callable[[str], Any]] = {
        int: _parse_int,
        float: float,
        bool: lambda t: {"true": True, "false": False, "1": True, "0": False}[t.lower()],
        str: str,
        "ints": _parse_ints,
        "strs": lambda t: tuple(
            part.strip() for part in t.strip("()[]").split(",") if part.strip()
        ),
    }
    try:
        return parsers[field.kind](text)
    except (ValueError, KeyError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ConfigError(f"config.{key}={text!r}: {_allowed(field)}") from None


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(text)
    return int(text)


def _parse_ints(text: str) -> tuple[int, ...]:
    value = ast.literal_eval(text) if text.strip() else ()
    return (value,) if isinstance(value, int) else tuple(value)


def _checked(key: str, value: Any) -> Any:
    field = SCHEMA[key]
    problem = ConfigError(f"config.{key}={value!r}: {_allowed(field)}")
    if value is None:
        if field.optional:
            return None
        raise problem
    if field.kind in ("ints", "strs"):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise problem
        kind: type = int if field.kind == "ints" else str
        one = field._replace(kind=kind)
        return tuple(_checked_scalar(entry, one, problem) for entry in value)
    return _checked_scalar(value, field, problem)


def _checked_scalar(value: Any, field: Field, problem: ConfigError) -> Any:
    if field.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not field.kind:
        raise problem
    if field.kind is str:
        if not value or (field.choices and value not in field.choices):
            raise problem
        return value
    if isinstance(value, int | float) and (
        not math.isfinite(value)
        or not field.low <= value <= field.high
        or (field.positive and value == 0)
    ):
        raise problem
    return value


def _allowed(field: Field) -> str:
    if field.choices:
        allowed = "one of " + ", ".join(field.choices)
    elif field.kind in (int, float, "ints"):
        noun = {int: "a whole number", float: "a number", "ints": "whole numbers"}[field.kind]
        low = f"above {field.low:g}" if field.positive and field.low == 0 else f"from {field.low:g}"
        high = "" if field.high == math.inf else f" to {field.high:g}"
        allowed = f"{noun} {low}{high}"
    else:
        allowed = {bool: "true or false", str: "a name", "strs": "names, separated by commas"}[
            field.kind
        ]
    return f"must be {allowed}" + (" or None" if field.optional else "")


def _check_combinations(flat: dict[str, Any]) -> None:
    """Values that are fine alone and contradict each other."""
    rules = [
        (
            flat["method"] == "softmax_ce" and flat["beta"] != 0,
            "beta has no meaning for method=softmax_ce; set config.beta=0",
        ),
        (
            (flat["network"] == OWN) != (flat["network_digest"] is not None),
            "config.network=own and network_digest are set by mass_jax.fit, which is given the "
            "network itself",
        ),
        (
            flat["network"] == OWN
            and (flat["dropout_rate"] > 0 or not flat["batch_norm"] or flat["dtype"] != "float32"),
            "config.dropout_rate, batch_norm and dtype are of the bundled networks; build them "
            "into your own",
        ),
        (
            flat["network"] == "resnet20" and flat["dropout_rate"] > 0,
            "resnet20 has no dropout; set config.dropout_rate=0",
        ),
        (
            flat["network"] == "resnet20" and not flat["batch_norm"],
            "resnet20 always has BatchNorm; set config.batch_norm=true",
        ),
        (
            (flat["jacobian.sub_batch"] or 0) > flat["batch_size"],
            f"config.jacobian.sub_batch must be at most batch_size={flat['batch_size']}",
        ),
        (
            flat["method"] == "mass"
            and flat["beta"] != 0
            and flat["jacobian.batch_stats"] == "paper"
            and (flat["jacobian.mode"] == "forward" or flat["jacobian.chunk_size"] is not None),
            "config.jacobian.batch_stats=paper needs jacobian.mode=auto or reverse and no "
            "jacobian.chunk_size",
        ),
        (
            flat["method"] == "mass"
            and flat["jacobian.estimator"] == "probe"
            and flat["jacobian.batch_stats"] == "paper",
            "config.jacobian.estimator=probe takes one example at a time; set "
            "config.jacobian.batch_stats=frozen",
        ),
        (
            flat["method"] == "mass"
            and flat["jacobian.estimator"] == "gram"
            and flat["network"] != "small_mlp",
            "config.jacobian.estimator=gram needs a dense first layer: config.network=small_mlp",
        ),
        (
            flat["method"] == "mass"
            and flat["jacobian.estimator"] in ("probe", "gram")
            and (flat["jacobian.mode"] == "forward" or flat["jacobian.chunk_size"] is not None),
            "config.jacobian.estimator=probe and gram need jacobian.mode=auto or reverse and no "
            "jacobian.chunk_size",
        ),
        (
            len(set(flat["optimizer.decay_epochs"])) != len(flat["optimizer.decay_epochs"]),
            "config.optimizer.decay_epochs must differ from each other",
        ),
        (
            flat["data.name"] == "digits" and flat["data.ood"] != (),
            "digits brings its own out-of-distribution set; set config.data.ood=()",
        ),
    ]
    for broken, message in rules:
        if broken:
            raise ConfigError(message)


def config_hash(config: Mapping[str, Any]) -> str:
    """Identity of what a run computes: twelve hexadecimal digits.

    A field that is None has no say, so that a new optional field leaves old runs theirs.
    """
    flat = {
        key: value
        for key, value in flatten(config).items()
        if key not in OPERATIONAL and value is not None
    }
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:12]


def as_command(config: Mapping[str, Any]) -> str:
    """A command that computes the same run anywhere: no paths, no operational fields.

    Example:
      >>> as_command(default_config())
      'python -m mass_jax.main'
    """
    usual = flatten(default_config())
    changed = {
        key: value
        for key, value in flatten(config).items()
        if value != usual[key] and key not in OPERATIONAL
    }
    if config["network"] == OWN or config["data"]["name"] == ARRAYS:
        # No command line can name a network or arrays that live in somebody's program.
        network = "network" if config["network"] == OWN else repr(config["network"])
        data = "x_train, y_train" if config["data"]["name"] == ARRAYS else config["data"]["name"]
        given = ("network", "network_digest", "data.name")
        fields = {key: value for key, value in changed.items() if key not in given}
        return f"mass_jax.fit({network}, {data}, config={fields})"
    return " ".join(
        [
            "python -m mass_jax.main",
            *(f"--config.{key}={_shown(value)}" for key, value in changed.items()),
        ]
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Fields whose change would make a resumed run another one, as readable lines."""
    before, after = flatten(old), flatten(new)
    return [
        f"config.{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and key not in OPERATIONAL
        and not (key == "steps" and after.get(key, 0) >= before.get(key, 0))
    ]


def help_text() -> str:
    """Every field with default and meaning, one line each."""
    lines = [
        f"  --config.{key}={_shown(field.default)}  {field.meaning}; {_allowed(field)}"
        for key, field in SCHEMA.items()
    ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
