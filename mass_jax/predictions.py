"""Per-example predictions of a finished run: the file that plots and reports read.

``predictions.npz`` holds plain arrays, no pickles: ``test/...`` and ``ood/SET/...`` with
``labels``, ``log_probs`` and ``scores/DETECTOR``; the names of sets and detectors; and, so
that nobody needs the dataset to look at them, the images of a few mistakes.
"""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mass_jax.run_log import write_atomically

PREDICTIONS = "predictions.npz"
NUM_MISTAKES = 8


class PredictionsError(ValueError):
    """A file of predictions that cannot be read; the message is one line."""


class SplitPredictions(NamedTuple):
    """Per-example arrays of a split.

    Attributes:
      labels: ``[N]`` integers.
      log_probs: ``[N, K]``, natural logarithms.
      scores: ``[N]`` by detector, higher = more out-of-distribution.
    """

    labels: np.ndarray
    log_probs: np.ndarray
    scores: dict[str, np.ndarray]

    @property
    def confidence(self) -> np.ndarray:
        """Probability of the predicted class, ``[N]`` in float64."""
        return np.exp(self.log_probs.astype(np.float64).max(axis=-1))

    @property
    def predicted(self) -> np.ndarray:
        """Most probable class, ``[N]``."""
        return self.log_probs.argmax(axis=-1)

    @property
    def correct(self) -> np.ndarray:
        """Whether that is the label, ``[N]`` booleans."""
        return self.predicted == self.labels


class Mistakes(NamedTuple):
    """A few misclassified test examples, the most telling first.

    Attributes:
      rows: ``[n]``, where in the test split they are.
      images: ``[n, ...]`` uint8.
      labels, predicted: ``[n]`` integers.
      confidence: ``[n]``, probability of the predicted class.
    """

    rows: np.ndarray
    images: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray


class RunPredictions(NamedTuple):
    """What a run predicted on the test split and the out-of-distribution sets."""

    test: SplitPredictions
    ood: dict[str, SplitPredictions]
    most_confident_mistakes: Mistakes
    least_confident_mistakes: Mistakes


def collect(
    test: SplitPredictions, ood: dict[str, SplitPredictions], images: np.ndarray
) -> RunPredictions:
    """Adds the mistakes to the predictions.

    Args:
      test: of the test split.
      ood: by the name of the set.
      images: of the test split, ``[N, ...]``, uint8 or float.
    """
    wrong = np.flatnonzero(~test.correct)
    confidence = test.confidence

    def mistakes(order: np.ndarray) -> Mistakes:
        rows = wrong[np.argsort(order, kind="stable")][:NUM_MISTAKES]
        shown = _as_uint8(images, rows)
        return Mistakes(rows, shown, test.labels[rows], test.predicted[rows], confidence[rows])

    return RunPredictions(test, ood, mistakes(-confidence[wrong]), mistakes(confidence[wrong]))


def _as_uint8(images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Some images as bytes; floats are mapped so that the split fills 0 to 255."""
    if images.dtype == np.uint8:
        return images[rows]
    low, high = float(images.min()), float(images.max())
    scale = 255.0 / (high - low) if high > low else 0.0
    return np.round((images[rows] - low) * scale).astype(np.uint8)


def save(path: Path, predictions: RunPredictions) -> None:
    """Writes the file in one step: readers see the whole of it or the one before."""
    arrays: dict[str, np.ndarray] = {
        "detectors": np.array(sorted(predictions.test.scores), dtype=np.str_),
        "ood_sets": np.array(list(predictions.ood), dtype=np.str_),
        **_split_arrays("test", predictions.test),
    }
    for name, split in predictions.ood.items():
        arrays |= _split_arrays(f"ood/{name}", split)
    for kind in ("most", "least"):
        mistakes = getattr(predictions, f"{kind}_confident_mistakes")
        arrays |= {
            f"mistakes/{kind}_confident/{field}": value
            for field, value in mistakes._asdict().items()
        }
    # Not numpy.savez: names would be its keyword arguments, and it would pickle objects.
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
    write_atomically(path, content.getvalue())


def _split_arrays(prefix: str, split: SplitPredictions) -> dict[str, np.ndarray]:
    return {
        f"{prefix}/labels": split.labels,
        f"{prefix}/log_probs": split.log_probs,
        **{f"{prefix}/scores/{name}": scores for name, scores in split.scores.items()},
    }


def load(path: Path) -> RunPredictions:
    """What `save` wrote.

    Raises:
      PredictionsError: it is not there, is damaged, or its arrays do not fit together.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        detectors = [str(name) for name in arrays["detectors"]]
        ood_sets = [str(name) for name in arrays["ood_sets"]]
        loaded = RunPredictions(
            _split(arrays, "test", detectors),
            {name: _split(arrays, f"ood/{name}", detectors) for name in ood_sets},
            _mistakes(arrays, "most"),
            _mistakes(arrays, "least"),
        )
    except FileNotFoundError:
        raise PredictionsError(
            f"{path} is missing; to make it, remove {path.with_name('results.json')} and start "
            "the training command again (it goes on from the last checkpoint)"
        ) from None
    # What NumPy and zipfile raise for damaged archives of every kind.
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PredictionsError(f"{path} is damaged ({reason[:200]})") from None
    return loaded


def _split(arrays: dict[str, Any], prefix: str, detectors: list[str]) -> SplitPredictions:
    split = SplitPredictions(
        arrays[f"{prefix}/labels"],
        arrays[f"{prefix}/log_probs"],
        {name: arrays[f"{prefix}/scores/{name}"] for name in detectors},
    )
    count = len(split.labels)
    _require(count > 0 and split.log_probs.ndim == 2, f"{prefix} has no predictions")
    _require(_is_a(split.labels, np.integer), f"{prefix}/labels are not integers")
    _require(_is_a(split.log_probs, np.floating), f"{prefix}/log_probs are not numbers")
    _require(not np.isnan(split.log_probs).any(), f"{prefix}/log_probs hold NaN")
    # Labels of out-of-distribution sets are of other classes, and nothing reads them.
    known = split.labels.min() >= 0 and split.labels.max() < split.log_probs.shape[1]
    _require(bool(known) or prefix != "test", f"{prefix}/labels are of unknown classes")
    for name, values in {"log_probs": split.log_probs, **split.scores}.items():
        _require(len(values) == count, f"{prefix}/{name} has another length than labels")
    for name, values in split.scores.items():
        good = values.ndim == 1 and _is_a(values, np.floating) and not np.isnan(values).any()
        _require(bool(good), f"{prefix}/scores/{name} are not numbers")
    return split


def _mistakes(arrays: dict[str, Any], kind: str) -> Mistakes:
    prefix = f"mistakes/{kind}_confident"
    mistakes = Mistakes(*(arrays[f"{prefix}/{field}"] for field in Mistakes._fields))
    _require(mistakes.images.dtype == np.uint8, f"{prefix}/images are not uint8")
    _require(len({len(part) for part in mistakes}) == 1, f"{prefix} has arrays of many lengths")
    for field in ("rows", "labels", "predicted", "confidence"):
        values = getattr(mistakes, field)
        wanted = np.floating if field == "confidence" else np.integer
        _require(values.ndim == 1 and _is_a(values, wanted), f"{prefix}/{field} are not numbers")
    return mistakes


def _is_a(array: np.ndarray, kind: type) -> bool:
    return bool(np.issubdtype(array.dtype, kind))


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
