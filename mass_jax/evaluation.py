"""Predictions over whole splits, and the metrics of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mass_jax import predictions
from mass_jax.data import Dataset, Normalisation, evaluation_batches, normalise
from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.experiment import Experiment
from mass_jax.method import Method
from mass_jax.metrics import classification_metrics, detection_metrics
from mass_jax.mixture_fitting import fit_class_mixtures
from mass_jax.model import ModelParams
from mass_jax.predictions import SplitPredictions
from mass_jax.progress import track
from mass_jax.representation import represent


class Predictions(NamedTuple):
    """Per-example arrays of a split.

    Attributes:
      log_probs: ``[N, K]``.
      ood_scores: ``[N]`` by detector, higher = more out-of-distribution.
    """

    log_probs: Any
    ood_scores: dict[str, Any]


_JACOBIANS_AT_ONCE = 64  # a ResNet20 keeps 15 MB for each

Evaluate = Callable[[ModelParams, np.ndarray, Normalisation], Any]


def make_predictor(
    method: Method, key: jax.Array, batch_size: int, what: str | None = None
) -> Evaluate:
    """``predict(params, images, normalisation)``: `Predictions` for ``images`` ``[N, ...]``.

    Randomness depends on an example's row, so nothing depends on the batch size. Progress is
    shown under the name ``what``.
    """

    def predict(params: ModelParams, images: jax.Array, rows: jax.Array) -> Predictions:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
        return Predictions(
            method.log_probs(params, images, keys), method.ood_scores(params, images, keys)
        )

    return _over_split(predict, batch_size, what)


def make_representer(batch_size: int, what: str | None = None) -> Evaluate:
    """``represent(params, images, normalisation)``: network outputs ``[N, R]``."""
    return _over_split(lambda params, images, rows: params.representation(images), batch_size, what)


def make_log_jacobian(batch_size: int) -> Evaluate:
    """``log_jacobian(params, images, normalisation)``: exact ``log J_f`` ``[N]``, nats."""

    def per_batch(params: ModelParams, images: jax.Array, rows: jax.Array) -> jax.Array:
        return represent(
            params,
            images,
            len(rows),
            batch_stats="running",
            estimator=JACOBIAN_ESTIMATORS["auto"],
        ).half_log_det

    return _over_split(per_batch, min(batch_size, _JACOBIANS_AT_ONCE), None)


def _over_split(per_batch: Callable[..., Any], batch_size: int, what: str | None) -> Evaluate:
    @jax.jit
    def compiled(
        params: ModelParams, images: jax.Array, rows: jax.Array, normalisation: Normalisation
    ) -> Any:
        return per_batch(params, normalise(images, normalisation), rows)

    def over_split(params: ModelParams, images: np.ndarray, normalisation: Normalisation) -> Any:
        parts = []
        size = min(batch_size, len(images))
        batches = list(evaluation_batches(len(images), size))
        for rows, mask in batches if what is None else track(batches, what):
            outputs = compiled(params, jnp.asarray(images[rows]), jnp.asarray(rows), normalisation)
            parts.append(jax.tree.map(lambda leaf: np.asarray(leaf)[mask], outputs))  # noqa: B023
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    return over_split


def evaluate_run(
    config: ConfigDict,
    experiment: Experiment,
    dataset: Dataset,
    params: ModelParams,
    predictions_file: Path | None = None,
) -> dict[str, Any]:
    """Metrics of a trained model on the test split and the out-of-distribution sets.

    Args:
      config: resolved.
      experiment: made from it.
      dataset: what it was trained on.
      params: the trained model, on the host or a device.
      predictions_file: where the per-example arrays go; ``None``: nowhere.

    Returns:
      The flat classification metrics, and ``ood`` by set and detector.
    """
    if config.method == "softmax_ce":
        params = with_fitted_density(config, experiment, dataset, params)
    predict = make_predictor(
        experiment.method, experiment.keys.evaluation, config.eval_batch_size, "evaluating"
    )
    inside = predict(params, dataset.test.images, dataset.normalisation)
    results: dict[str, Any] = classification_metrics(inside.log_probs, dataset.test.labels)
    results["ood"] = {}
    ood: dict[str, SplitPredictions] = {}
    for name, (split, normalisation) in dataset.ood.items():
        outside = predict(params, split.images, normalisation)
        ood[name] = SplitPredictions(split.labels, *outside)
        results["ood"][name] = {
            detector: detection_metrics(inside.ood_scores[detector], outside.ood_scores[detector])
            for detector in inside.ood_scores
        }
    if predictions_file is not None:
        test = SplitPredictions(dataset.test.labels, *inside)
        predictions.save(predictions_file, predictions.collect(test, ood, dataset.test.images))
    return results


def with_fitted_density(
    config: ConfigDict, experiment: Experiment, dataset: Dataset, params: ModelParams
) -> ModelParams:
    """SoftmaxCE with class mixtures fitted to its outputs on training data."""
    rows = experiment.subset.train[: config.density_examples]
    represent = make_representer(config.eval_batch_size, "outputs of the training examples")
    outputs = represent(params, dataset.train.images[rows], dataset.normalisation)
    q = fit_class_mixtures(
        outputs, dataset.train.labels[rows], dataset.num_classes, config.density_components
    )
    return params.replace(head=q)


def validate(
    config: ConfigDict,
    experiment: Experiment,
    dataset: Dataset,
    predict: Evaluate,
    params: ModelParams,
) -> dict[str, float]:
    """Accuracy and NLL on the validation rows; empty without any."""
    rows = experiment.subset.validation
    if len(rows) == 0:
        return {}
    seen = predict(params, dataset.train.images[rows], dataset.normalisation)
    scores = classification_metrics(seen.log_probs, dataset.train.labels[rows])
    return {f"validation_{name}": scores[name] for name in ("accuracy", "nll", "brier", "ece")}
