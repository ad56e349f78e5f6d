"""Whether values are what the schema allows, alone and together."""

import ast
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.schema import OWN, SCHEMA, ConfigError, Field


def known_key(key: str) -> str:
    """The key, if the schema has it; else an error with the nearest one."""
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


def parse(key: str, text: str) -> Any:
    """Text to the kind of the field; `checked_value` does the rest."""
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
        raise ConfigError(f"config.{key}={text!r}: {what_is_allowed(field)}") from None


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(text)
    return int(text)


def _parse_ints(text: str) -> tuple[int, ...]:
    value = ast.literal_eval(text) if text.strip() else ()
    return (value,) if isinstance(value, int) else tuple(value)


def checked_value(key: str, value: Any) -> Any:
    """The value of a field, if it is of its kind and in its range."""
    field = SCHEMA[key]
    problem = ConfigError(f"config.{key}={value!r}: {what_is_allowed(field)}")
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


def what_is_allowed(field: Field) -> str:
    """What a field may be, in words."""
    if field.choices:
        allowed = "one of " + ", ".join(field.choices)
    elif field.kind in (int, float, "ints"):
        noun = {int: "a whole number", float: "a number", "ints": "whole numbers"}[field.kind]
        low = f"above {field.low:g}" if field.positive and field.low == 0 else f"from {field.low:g}"
        high = "" if field.high == math.inf else f" to {field.high:,.12g}"
        allowed = f"{noun} {low}{high}"
    else:
        allowed = {bool: "true or false", str: "a name", "strs": "names, separated by commas"}[
            field.kind
        ]
    return f"must be {allowed}" + (" or None" if field.optional else "")


def check_combinations(flat: dict[str, Any]) -> None:
    """Values that are fine alone and contradict each other."""
    has_sub_batch = flat["beta"] != 0 or bool(flat["jacobian.always_split"])
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
            flat["batch_norm_start"] is not None
            and (flat["network"] == OWN or not flat["batch_norm"]),
            "config.batch_norm_start is of the BatchNorm of the bundled networks; set it to None",
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
            and has_sub_batch
            and flat["jacobian.batch_stats"] == "paper"
            and (flat["jacobian.mode"] == "forward" or flat["jacobian.chunk_size"] is not None),
            "config.jacobian.batch_stats=paper needs jacobian.mode=auto or reverse and no "
            "jacobian.chunk_size",
        ),
        (
            flat["method"] == "mass"
            and has_sub_batch
            and JACOBIAN_ESTIMATORS[flat["jacobian.estimator"]].per_example
            and flat["jacobian.batch_stats"] == "paper",
            f"config.jacobian.estimator={flat['jacobian.estimator']} needs per-example Jacobians; "
            "set config.jacobian.batch_stats=frozen",
        ),
        (
            flat["method"] == "mass"
            and flat["jacobian.estimator"] == "gram"
            and flat["network"] != "small_mlp",
            "config.jacobian.estimator=gram needs a dense first layer: config.network=small_mlp",
        ),
        (
            flat["method"] == "mass"
            and flat["beta"] != 0
            and flat["jacobian.estimator"] in ("probe", "fast", "gram")
            and (flat["jacobian.mode"] == "forward" or flat["jacobian.chunk_size"] is not None),
            "config.jacobian.estimator=probe, fast and gram need jacobian.mode=auto or reverse and "
            "no jacobian.chunk_size",
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
