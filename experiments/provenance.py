"""What every record says of where it was made; paths of that machine are not among it."""

from collections.abc import Mapping
from typing import Any

_RECORDED = ("python", "packages", "devices", "cpu_count", "commit")


def recorded(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `mass_jax.run_log.environment` that goes into a record.

    Example:
      >>> seen = dict(python="3.12.0", packages={}, devices=["cpu:cpu"], cpu_count=2, commit=None)
      >>> recorded(seen | {"command": ["python", "/home/me/train.py"]}) == seen
      True
    """
    return {name: environment[name] for name in _RECORDED}
