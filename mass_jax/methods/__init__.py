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
    """The method called ``name``.

    Args:
      name: of `METHODS`.
      **options: of its ``method`` function, such as ``beta`` or ``num_classes``.

    Returns:
      Four functions: ``init``, ``loss``, ``log_probs``, ``ood_scores``.

    Example:
      >>> make_method("mass", beta=1e-3, representation_dim=8)._fields
      ('init', 'loss', 'log_probs', 'ood_scores')
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r}: choose one of {sorted(METHODS)}")
    return METHODS[name](**options)
