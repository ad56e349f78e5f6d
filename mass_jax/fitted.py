"""`Fitted`: a trained model that takes inputs as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import ArrayLike

from mass_jax.archive import ArchiveError
from mass_jax.data import DataError, Normalisation
from mass_jax.evaluation import (
    Evaluate,
    Predictions,
    make_log_jacobian,
    make_predictor,
    make_representer,
)
from mass_jax.experiment import keys_of, method_of
from mass_jax.loading import network_of, params_of, read_run
from mass_jax.model import ModelParams


@dataclass(frozen=True, repr=False)
class Fitted:
    """What `mass_jax.fit` returns.

    Inputs are in the units and shape of the training examples; they are normalised by the
    statistics of those.

    Attributes:
      params: the model; it sees normalised inputs, as in ``cdi_loss(params, fitted.normalise(x))``.
      results: of the evaluation, as ``results.json`` has them.
      config: the whole configuration.
      input_shape: of one example.
      num_classes: ``K``.
      normalisation: of inputs.
      workdir: where logs and checkpoints are; a temporary one lives as long as this object.

    Example:
      >>> import flax.linen as nn, mass_jax, numpy as np
      >>> x = np.random.default_rng(0).normal(size=(80, 3))
      >>> fitted = mass_jax.fit(nn.Dense(2), x, (x[:, 0] > 0).astype(int), steps=1, quiet=True)
      >>> sorted(fitted.ood_scores(x))
      ['entropy', 'max_log_q']
    """

    params: ModelParams
    results: Mapping[str, Any]
    config: ConfigDict
    input_shape: tuple[int, ...]
    num_classes: int
    normalisation: Normalisation
    workdir: Path | None = None

    def __repr__(self) -> str:
        """One line: a cell of a notebook that ends with a model should not print its weights."""
        config = self.config
        return (
            f"Fitted(method={config.method!r}, network={config.network!r}, beta={config.beta}, "
            f"input_shape={self.input_shape}, num_classes={self.num_classes}, "
            f"representation_dim={config.representation_dim})"
        )

    def predict(self, x: ArrayLike) -> np.ndarray:
        """The most probable class ``[N]`` of examples ``[N, ...]``."""
        return np.argmax(self.predict_proba(x), axis=-1)

    def predict_proba(self, x: ArrayLike) -> np.ndarray:
        """Class probabilities ``[N, K]`` of examples ``[N, ...]``."""
        # Softmax in float32 sums to one within 1e-6; users compare with less.
        probs = np.exp(np.asarray(self._predictions(x).log_probs, np.float64))
        return probs / probs.sum(axis=-1, keepdims=True)

    def ood_scores(self, x: ArrayLike) -> dict[str, np.ndarray]:
        """Named scores ``[N]`` of examples ``[N, ...]``; higher = more out-of-distribution."""
        return dict(self._predictions(x).ood_scores)

    def representation(self, x: ArrayLike) -> np.ndarray:
        """Outputs ``f(x)`` ``[N, R]`` of the network for examples ``[N, ...]``."""
        outputs: np.ndarray = self._represent(self.params, self._examples(x), self.normalisation)
        return outputs

    def log_jacobian(self, x: ArrayLike) -> np.ndarray:
        """``log J_f(x)`` ``[N]`` of examples ``[N, ...]``, exact, by the input the network sees."""
        values: np.ndarray = self._log_jacobian(self.params, self._examples(x), self.normalisation)
        return values

    def normalise(self, x: ArrayLike) -> np.ndarray:
        """Examples ``[N, ...]`` as the network sees them, float32."""
        examples = self._examples(x).astype(np.float32)
        normalised: np.ndarray = (examples - self.normalisation.mean) / self.normalisation.std
        return normalised

    def _predictions(self, x: ArrayLike) -> Predictions:
        found: Predictions = self._predict(self.params, self._examples(x), self.normalisation)
        return found

    def _examples(self, x: ArrayLike) -> np.ndarray:
        examples = np.asarray(x)
        if (*examples.shape[1:], 1) == self.input_shape:
            examples = examples[..., None]  # as fit itself does with images without channels
        if examples.shape[1:] != self.input_shape or len(examples) == 0:
            raise DataError(
                f"x has shape {np.shape(x)}; need (N, ...) with examples {self.input_shape}, N > 0"
            )
        if examples.dtype != np.uint8:
            examples = examples.astype(np.float32)
            if not np.isfinite(examples).all():
                raise DataError("x holds NaN or infinity")
        return examples

    # Compiled programs are made when first needed and stay behind when this is pickled.
    @cached_property
    def _predict(self) -> Evaluate:
        method = method_of(self.config, self.num_classes)
        key = keys_of(self.config.seed).evaluation
        return make_predictor(method, key, self.config.eval_batch_size)

    @cached_property
    def _represent(self) -> Evaluate:
        return make_representer(self.config.eval_batch_size)

    @cached_property
    def _log_jacobian(self) -> Evaluate:
        return make_log_jacobian(self.config.eval_batch_size)

    def __getstate__(self) -> dict[str, Any]:
        compiled = ("_predict", "_represent", "_log_jacobian")
        return {name: value for name, value in self.__dict__.items() if name not in compiled}


def load_fitted(path: str | Path, network: Any = None, params: Any = None) -> Fitted:
    """A trained model from a workdir or an archive, ready to predict.

    Args:
      path, network, params: as in `mass_jax.load`.

    Returns:
      As `mass_jax.fit` returned it, but for a SoftmaxCE run, whose density is fitted to
      training data: without them, ``ood_scores`` has ``entropy`` only.

    Example:
      >>> import flax.linen as nn, mass_jax, numpy as np
      >>> x = np.random.default_rng(0).normal(size=(80, 3))
      >>> fitted = mass_jax.fit(nn.Dense(2), x, (x[:, 0] > 0).astype(int), steps=1, quiet=True)
      >>> again = load_fitted(fitted.workdir, network=nn.Dense(2))
      >>> np.array_equal(again.predict_proba(x), fitted.predict_proba(x))
      True
    """
    run = read_run(path)
    if run.normalisation is None:
        raise ArchiveError(f"{path}: made before runs kept their normalisation; use mass_jax.load")
    loaded = params_of(run, network_of(run, network, params))
    return Fitted(
        loaded,
        run.results,
        run.config,
        run.input_shape,
        run.num_classes,
        run.normalisation,
        Path(path) if Path(path).is_dir() else None,
    )
