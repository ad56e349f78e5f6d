"""MASS Learning and Conserved Differential Information in JAX/Flax."""

from typing import TYPE_CHECKING, Any

from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.fitted import Fitted, load_fitted
from mass_jax.fitting import fit
from mass_jax.gaussian_mixture import INITIALISATIONS, GaussianMixture
from mass_jax.information import (
    LossTerms,
    conditional_entropy,
    conserved_differential_information,
    mass_loss_terms,
    mass_objective,
)
from mass_jax.initialisation import init
from mass_jax.jacobian import (
    half_log_det_jjt,
    per_example_jacobian,
    summed_jacobian,
)
from mass_jax.loading import load
from mass_jax.log_determinant import half_log_det_gram
from mass_jax.losses import cdi_loss, mass_loss
from mass_jax.methods import METHODS, make_method
from mass_jax.mixture_fitting import fit_class_mixtures
from mass_jax.model import ModelParams
from mass_jax.networks import NETWORKS, ResNet20, SmallMLP

if TYPE_CHECKING:
    from mass_jax.classifier import MassClassifier

__version__ = "0.1.0"

__all__ = [
    "INITIALISATIONS",
    "JACOBIAN_ESTIMATORS",
    "METHODS",
    "NETWORKS",
    "Fitted",
    "GaussianMixture",
    "LossTerms",
    "MassClassifier",
    "ModelParams",
    "ResNet20",
    "SmallMLP",
    "cdi_loss",
    "conditional_entropy",
    "conserved_differential_information",
    "fit",
    "fit_class_mixtures",
    "half_log_det_gram",
    "half_log_det_jjt",
    "init",
    "load",
    "load_fitted",
    "make_method",
    "mass_loss",
    "mass_loss_terms",
    "mass_objective",
    "per_example_jacobian",
    "summed_jacobian",
]


def __getattr__(name: str) -> Any:
    """`MassClassifier` when it is asked for: scikit-learn takes a second or two of every start."""
    if name == "MassClassifier":
        from mass_jax.classifier import MassClassifier

        return MassClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
