"""The bundled dataset: 1,797 real handwritten digits from scikit-learn's wheel.

Digits 0 to 7 are in distribution, 8 and 9 are the out-of-distribution set; the
test split is fixed. No download.
"""

import numpy as np

from mass_jax.data.dataset import Dataset, dataset_from_arrays

NUM_KNOWN_CLASSES = 8
NUM_TEST = 343
_SPLIT_SEED = 0


def digits() -> Dataset:
    """8x8 grey images with values 0 to 16, stored as uint8.

    Returns:
      1,100 training and 343 test images of digits 0 to 7; 354 images of 8 and 9
      as the out-of-distribution set ``digits_8_9``.

    Example:
      >>> data = digits()
      >>> len(data.train.labels), len(data.test.labels), len(data.ood["digits_8_9"][0].labels)
      (1100, 343, 354)
    """
    from sklearn.datasets import load_digits  # others start seconds earlier without it

    bundled = load_digits()
    images = bundled.images.astype(np.uint8)[..., None]
    labels = bundled.target
    known = labels < NUM_KNOWN_CLASSES
    order = np.random.default_rng(_SPLIT_SEED).permutation(np.flatnonzero(known))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return dataset_from_arrays(
        images[train],
        labels[train],
        images[test],
        labels[test],
        name="digits",
        num_classes=NUM_KNOWN_CLASSES,
        ood={"digits_8_9": images[~known]},
    )
