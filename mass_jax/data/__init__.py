"""Datasets: the bundled digits, the paper's CIFAR-10 and SVHN, your own."""

from mass_jax.data.batches import BatchOrder, Subset, device_rows, draw_subset, evaluation_batches
from mass_jax.data.dataset import Dataset, Normalisation, Split, dataset_from_arrays, normalise
from mass_jax.data.digits import digits
from mass_jax.data.errors import DataError
from mass_jax.data.sources import load_dataset

__all__ = [
    "BatchOrder",
    "DataError",
    "Dataset",
    "Normalisation",
    "Split",
    "Subset",
    "dataset_from_arrays",
    "device_rows",
    "digits",
    "draw_subset",
    "evaluation_batches",
    "load_dataset",
    "normalise",
]
