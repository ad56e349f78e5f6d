"""MASS Learning and Conserved Differential Information in JAX/Flax."""

from mass_jax.classifier import MassClassifier
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
