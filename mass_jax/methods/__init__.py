"""Training methods by name: one file each, found by being here."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from mass_jax.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").method
    for module in pkgutil.iter_modules(__path__)
}


def make_method(name: str, **options: Any) -> Method:
    """The method called ``name``; ``options`` go to its ``method`` function."""
    if name not in METHODS:
        raise ValueError(f"method={name!r}: choose one of {sorted(METHODS)}")
    return METHODS[name](**options)
