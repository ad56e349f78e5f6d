"""`load_dataset`: a dataset by name."""

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mass_jax.data import tfds_source
from mass_jax.data.dataset import (
    Dataset,
    Normalisation,
    Split,
    dataset_from_arrays,
    statistics_of,
)
from mass_jax.data.digits import digits
from mass_jax.data.known import CIFAR10_NORMALISATION, SVHN_NORMALISATION

NUM_OOD = 10_000  # as many SVHN images as there are CIFAR-10 test images

_NORMALISATIONS: dict[str, Normalisation] = {
    "cifar10": CIFAR10_NORMALISATION,
    "svhn_cropped": SVHN_NORMALISATION,
}


def load_dataset(
    name: str, data_dir: str | Path | None = None, ood: Sequence[str] = ("svhn_cropped",)
) -> Dataset:
    """The bundled ``"digits"``, or any TFDS image-classification dataset.

    Args:
      name: ``"digits"``, ``"cifar10"`` or another TFDS name with ``train`` and
        ``test`` splits of one image size.
      data_dir: TFDS data directory; default ``TFDS_DATA_DIR`` or TFDS's own.
      ood: TFDS names of out-of-distribution sets; the first 10,000 images of
        their test splits are used. ``"digits"`` brings its own.

    Returns:
      The dataset in memory.

    Raises:
      DataError: not prepared, or damaged; one line with the command that prepares it.

    Example:
      >>> load_dataset("digits").train.images.shape
      (1100, 8, 8, 1)
    """
    if name == "digits":
        return digits()
    if isinstance(ood, str):
        ood = (ood,)
    directory = tfds_source.resolve_data_dir(data_dir)
    for needed in (name, *ood):
        _ensure_prepared(needed, directory)
    train = tfds_source.read_split(name, "train", directory)
    test = tfds_source.read_split(name, "test", directory)
    others = {other: tfds_source.read_split(other, "test", directory) for other in ood}
    dataset = dataset_from_arrays(
        *train,
        *test,
        name=name,
        normalisation=_NORMALISATIONS.get(name),
        ood={other: split.images[:NUM_OOD] for other, split in others.items()},
        ood_normalisations={
            other: _NORMALISATIONS.get(other) or statistics_of(split.images)
            for other, split in others.items()
        },
    )
    labelled = {
        other: (Split(images.images, others[other].labels[:NUM_OOD].astype(np.int32)), statistics)
        for other, (images, statistics) in dataset.ood.items()
    }
    return dataclasses.replace(dataset, ood=labelled)


def _ensure_prepared(name: str, data_dir: Path) -> None:
    """Refuses an unprepared dataset at once, or has TFDS prepare it where it can."""
    if tfds_source.prepared_directory(name, data_dir) is not None:
        return
    from mass_jax.data import prepare

    if find_spec("tensorflow") is None:
        raise prepare.DataError(
            f"{name} is not prepared in {data_dir}: {prepare.ways_to_get(name, data_dir)}"
        )
    prepare.download(name, data_dir)
