"""`MassClassifier`: MASS as a scikit-learn estimator."""

from typing import Any, Self

import flax.linen as nn
import jax
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from mass_jax.fitted import Fitted
from mass_jax.fitting import fit
from mass_jax.networks import SmallMLP

_LARGEST_SEED = 2**31 - 1


class Perceptron(nn.Module):
    """`SmallMLP` without BatchNorm; holds no function, so that it can be pickled."""

    output_dim: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return SmallMLP(self.output_dim, hidden=self.hidden, batch_norm=False, name="mlp")(x)


class MassClassifier(ClassifierMixin, BaseEstimator):
    """MASS Learning with scikit-learn's interface: classifier and novelty score in one.

    Args:
      network: a Flax linen module that maps ``[B, D]`` to ``[B, R]``; ``None``: a multilayer
        perceptron of ``hidden`` elu units.
      hidden: widths of its hidden layers.
      representation_dim: ``R`` of it, at most ``D``; ``None``: the number of classes, at
        most ``D``.
      beta: weight of minimality.
      num_components: Gaussians per class in ``q(z | y)``.
      steps: of training.
      batch_size: examples per step.
      learning_rate: of the network; ``q`` learns at ten times that.
      random_state: ``None``, an int, or a ``numpy.random.RandomState``.

    Attributes:
      classes_: ``[K]``, the labels seen.
      n_features_in_: ``D``.
      fitted_: the `mass_jax.Fitted` underneath; its ``params`` go into ``mass_jax.cdi_loss``.

    Example:
      >>> from sklearn.datasets import load_iris
      >>> X, y = load_iris(return_X_y=True)
      >>> model = MassClassifier(steps=100, random_state=0).fit(X, y)
      >>> bool(model.score(X, y) > 0.9)
      True
      >>> bool(model.score_samples(X + 100.0).max() < model.score_samples(X).min())
      True

    References:
      MASS, arXiv:1905.07822.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        hidden: tuple[int, ...] = (100,),
        representation_dim: int | None = None,
        beta: float = 1e-3,
        num_components: int = 1,
        steps: int = 500,
        batch_size: int = 64,
        learning_rate: float = 3e-3,
        random_state: Any = None,
    ) -> None:
        self.network = network
        self.hidden = hidden
        self.representation_dim = representation_dim
        self.beta = beta
        self.num_components = num_components
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Trains on ``X`` ``[N, D]`` and labels ``y`` ``[N]`` of any type."""
        X, y = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has 1 class; a classifier needs at least 2 classes")
        seed = int(check_random_state(self.random_state).randint(_LARGEST_SEED))
        # Temporary workdir: an estimator leaves nothing on the disk but what it is pickled to.
        self.fitted_ = fit(
            self._module(X.shape[1]),
            X,
            labels,
            beta=self.beta,
            steps=self.steps,
            seed=seed,
            quiet=True,
            config={
                # Classes start apart: from "zeros" accuracy depends on the seed's luck.
                "initialisation": "standard_basis",
                "num_components": self.num_components,
                "batch_size": self.batch_size,
                "optimizer.learning_rate": self.learning_rate,
                "optimizer.q_learning_rate": 10 * self.learning_rate,
            },
        )
        self.n_iter_ = self.steps
        return self

    def _module(self, num_features: int) -> nn.Module:
        if self.network is not None:
            return self.network
        dim = self.representation_dim or min(len(self.classes_), num_features)
        return Perceptron(dim, tuple(self.hidden))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``[N, K]`` in the order of ``classes_``."""
        return self._fitted().predict_proba(self._examples(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row, ``[N]``."""
        probabilities = self.predict_proba(X)
        labels: np.ndarray = self.classes_[np.argmax(probabilities, axis=-1)]
        return labels

    def score_samples(self, X: Any) -> np.ndarray:
        """``max_y log q(f(x) | y)`` ``[N]``: higher = more like the training data."""
        return -self._fitted().ood_scores(self._examples(X))["max_log_q"]

    def _fitted(self) -> Fitted:
        check_is_fitted(self)
        fitted: Fitted = self.fitted_
        return fitted

    def _examples(self, X: Any) -> np.ndarray:
        examples: np.ndarray = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        return examples
