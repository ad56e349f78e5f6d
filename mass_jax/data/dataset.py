"""What the trainer is fed: arrays in memory, their statistics and their digests."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mass_jax.data.errors import DataError


class Split(NamedTuple):
    """Images and labels, in a fixed order.

    Attributes:
      images: ``[N, H, W, C]`` (or ``[N, D]``), uint8 or float32, as stored.
      labels: ``[N]`` int32.

    Example:
      >>> from mass_jax.data import digits
      >>> digits().test.images.shape, digits().test.labels.shape
      ((343, 8, 8, 1), (343,))
    """

    images: np.ndarray
    labels: np.ndarray


class Normalisation(NamedTuple):
    """Per-channel statistics in the units of the stored images.

    Attributes:
      mean: ``[C]``.
      std: ``[C]``, above 0.

    Example:
      >>> import numpy as np
      >>> half = Normalisation(np.array([127.5]), np.array([127.5]))
      >>> normalise(np.array([[0.0], [255.0]]), half).tolist()
      [[-1.0], [1.0]]
    """

    mean: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A classification problem with its out-of-distribution sets.

    Attributes:
      name: for logs and results.
      train, test: in-distribution splits; training and validation are drawn from
        the first by seed (`mass_jax.data.batches.draw_subset`).
      num_classes: labels run from 0 to ``num_classes - 1``.
      normalisation: of the in-distribution images.
      ood: named out-of-distribution splits, each with its own statistics.

    Example:
      >>> from mass_jax.data import digits
      >>> digits().name, digits().num_classes, digits().input_shape, list(digits().ood)
      ('digits', 8, (8, 8, 1), ['digits_8_9'])
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    normalisation: Normalisation
    ood: Mapping[str, tuple[Split, Normalisation]] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return self.train.images.shape[1:]

    def checksums(self) -> dict[str, str]:
        """sha256 of every array, by name."""
        splits = {"train": self.train, "test": self.test}
        splits |= {name: split for name, (split, _) in self.ood.items()}
        return {
            f"{name}/{part}": sha256_of_array(getattr(split, part))
            for name, split in splits.items()
            for part in Split._fields
        }


def dataset_from_arrays(
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
    *,
    name: str = "arrays",
    num_classes: int | None = None,
    normalisation: Normalisation | None = None,
    ood: Mapping[str, np.ndarray] | None = None,
    ood_normalisations: Mapping[str, Normalisation] | None = None,
    keep_shape: bool = False,
) -> Dataset:
    """A dataset the trainer accepts, from your own arrays.

    Args:
      train_images: ``[N, H, W, C]``, ``[N, H, W]`` or ``[N, D]``; uint8 or float.
      train_labels: ``[N]`` integers from 0.
      test_images, test_labels: likewise.
      name: for logs and results.
      num_classes: default: the largest training label plus one.
      normalisation: default: computed per channel from the training images.
      ood: images of out-of-distribution sets by name; normalised by their own
        statistics, as the paper does.
      ood_normalisations: those statistics, where they are known; default: computed.
      keep_shape: examples of any shape, and ``[N, H, W]`` gets no channel axis.

    Returns:
      The checked dataset, with its statistics.

    Example:
      >>> import numpy as np
      >>> images, labels = np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 1, 0, 1])
      >>> dataset_from_arrays(images, labels, images, labels).num_classes
      2
    """
    train = _checked_split(train_images, train_labels, "training", None, keep_shape)
    classes = int(train.labels.max()) + 1 if num_classes is None else num_classes
    train = _checked_split(train_images, train_labels, "training", classes, keep_shape)
    test = _checked_split(test_images, test_labels, "test", classes, keep_shape)
    if classes < 2:
        raise DataError(f"{name}: training labels have {classes} class; need at least 2")
    others: dict[str, tuple[Split, Normalisation]] = {}
    for other, images in (ood or {}).items():
        split = _checked_split(images, np.zeros(len(images), int), other, None, keep_shape)
        known = (ood_normalisations or {}).get(other)
        others[other] = (split, known or statistics_of(split.images))
    shapes = {"test": test.images.shape[1:]}
    shapes |= {other: split.images.shape[1:] for other, (split, _) in others.items()}
    noun = _noun(train.images, keep_shape)
    for other, shape in shapes.items():
        if shape != train.images.shape[1:]:
            raise DataError(
                f"{name}: {other} {noun} have shape {shape}, training {noun} "
                f"{train.images.shape[1:]}; they must agree"
            )
    statistics = normalisation or statistics_of(train.images)
    for used in (statistics, *(theirs for _, theirs in others.values())):
        _check_normalisation(used, train.images.shape[-1])
    return Dataset(name, train, test, classes, statistics, others)


def _check_normalisation(normalisation: Normalisation, channels: int) -> None:
    mean, std = (np.asarray(part) for part in normalisation)
    if mean.shape != (channels,) or std.shape != (channels,):
        raise DataError(
            f"normalisation has shapes {mean.shape} and {std.shape}; need ({channels},), a value "
            "per channel"
        )
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
        raise DataError("normalisation must be finite, with std above 0")


def _noun(images: np.ndarray, keep_shape: bool) -> str:
    """What messages call the rows: tables and arrays of any shape need not be images."""
    return "images" if images.ndim == 4 and not keep_shape else "examples"


def _checked_split(
    images: np.ndarray, labels: np.ndarray, what: str, num_classes: int | None, keep_shape: bool
) -> Split:
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3 and not keep_shape:
        images = images[..., None]
    noun = _noun(images, keep_shape)
    if images.ndim < 2 or (images.ndim not in (2, 4) and not keep_shape) or 0 in images.shape:
        needed = "(N, ...)" if keep_shape else "(N, H, W, C), (N, H, W) or (N, D)"
        raise DataError(f"{what} {noun} have shape {images.shape}; need {needed}, N > 0")
    if images.dtype != np.uint8:
        if not np.issubdtype(images.dtype, np.number) or np.iscomplexobj(images):
            raise DataError(f"{what} {noun} have type {images.dtype}; need uint8 or float")
        with np.errstate(over="ignore"):  # found and named in the next line
            images = images.astype(np.float32)
        bad_rows = np.flatnonzero(~np.isfinite(images.reshape(len(images), -1)).all(axis=1))
        if bad_rows.size:
            raise DataError(
                f"{what} {noun} hold NaN or infinity (as float32), first in row {bad_rows[0]}; "
                "fill the gaps or leave such rows out"
            )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{what} labels have shape {labels.shape}; need ({len(images)},), one per example"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{what} labels have type {labels.dtype}; need integers, as "
            "numpy.unique(labels, return_inverse=True)[1] makes them"
        )
    if labels.min() < 0 or (num_classes is not None and labels.max() >= num_classes):
        raise DataError(
            f"{what} labels run from {labels.min()} to {labels.max()}; need whole numbers from 0"
            + ("" if num_classes is None else f" to {num_classes - 1}")
        )
    return Split(np.ascontiguousarray(images), labels.astype(np.int32))


def statistics_of(images: np.ndarray) -> Normalisation:
    """Mean and standard deviation of the last axis; constant channels get deviation 1."""
    channels = images.reshape(-1, images.shape[-1])
    # Chunked float64 sums: a float64 copy of CIFAR-10 would take 1.2 GB.
    total = np.zeros(channels.shape[1])
    squares = np.zeros(channels.shape[1])
    for start in range(0, len(channels), 1_000_000):
        part = channels[start : start + 1_000_000].astype(np.float64)
        total += part.sum(axis=0)
        squares += np.square(part).sum(axis=0)
    mean = total / len(channels)
    variance = np.maximum(squares / len(channels) - mean**2, 0.0)
    std = np.sqrt(variance)
    std[std <= 1e-6 * np.maximum(np.abs(mean), 1.0)] = 1.0
    return Normalisation(mean.astype(np.float32), std.astype(np.float32))


def normalise(images: jax.Array, normalisation: Normalisation) -> jax.Array:
    """``(images - mean) / std`` per channel in float32, on the device.

    Args:
      images: ``[B, ..., C]`` as stored.
      normalisation: per-channel statistics.

    Returns:
      ``[B, ..., C]``, float32.

    Example:
      >>> import numpy as np
      >>> statistics = Normalisation(np.array([2.0]), np.array([4.0]))
      >>> normalise(np.array([[6]], np.uint8), statistics).tolist()
      [[1.0]]
    """
    # In rows as long as an example, by one over std: XLA's CPU backend is five times slower with
    # rows of channels and divisions.
    positions = math.prod(images.shape[1:-1])
    rows = images.reshape(-1, positions * images.shape[-1]).astype(jnp.float32)
    by_position = (
        jnp.tile(vector, positions) for vector in (normalisation.mean, 1 / normalisation.std)
    )
    mean, scale = jax.lax.optimization_barrier(tuple(by_position))
    return ((rows - mean[None]) * scale[None]).reshape(images.shape)


def sha256_of_array(array: np.ndarray) -> str:
    """sha256 of the bytes of an array in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()
