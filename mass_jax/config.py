"""Configurations: made of the schema, overridden, checked, told apart.

`default_config` is the bundled digits experiment. Files in `configs/` derive from
it; ``--config.key=value`` overrides a field; `resolve` checks the whole before any
data is touched. `ml_collections` alone accepts most wrong values, so both parsing and
checking go through `mass_jax.schema` and `mass_jax.config_checks`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from mass_jax.config_checks import (
    check_combinations,
    checked_value,
    known_key,
    parse,
    what_is_allowed,
)
from mass_jax.schema import ARRAYS, OPERATIONAL, OWN, SCHEMA, ConfigError

__all__ = ["ARRAYS", "OWN", "SCHEMA", "ConfigError"]


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
            _set(config, known_key(key), parse(key, text))
    return config


def from_flat(flat: Mapping[str, Any]) -> ConfigDict:
    """A checked configuration from fields by dotted name, as a checkpoint keeps them."""
    config = default_config()
    with config.unlocked():
        for key, value in flat.items():
            _set(config, known_key(key), value)
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
        known_key(key)
    missing = [key for key in SCHEMA if key not in flat]
    if missing:
        raise ConfigError(
            f"config.{missing[0]} is missing; derive your config from configs/base.py"
        )
    resolved = default_config()
    with resolved.unlocked():
        for key, value in flat.items():
            _set(resolved, key, checked_value(key, value))
    check_combinations(flatten(resolved))
    return resolved


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

    Not of a run by `mass_jax.fit`: no command line can name what lives in somebody's program.

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
        f"  --config.{key}={_shown(field.default)}  {field.meaning}; {what_is_allowed(field)}"
        for key, field in SCHEMA.items()
    ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
