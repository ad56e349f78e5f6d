"""What the paper's datasets are, to the byte.

Digests are sha256 of decoded arrays: images uint8 ``[N, 32, 32, 3]``, labels uint8.
"""

from typing import NamedTuple

import numpy as np

from mass_jax.data.dataset import Normalisation, sha256_of_array
from mass_jax.data.errors import DataError

CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer",
    "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

# The statistics the authors normalised with, in units of 0 to 255.
CIFAR10_NORMALISATION = Normalisation(
    np.float32(255) * np.array([0.4912, 0.4818, 0.4460], np.float32),
    np.float32(255) * np.array([0.2470, 0.2434, 0.2614], np.float32),
)
SVHN_NORMALISATION = Normalisation(
    np.float32(255) * np.array([0.4377, 0.4438, 0.4728], np.float32),
    np.float32(255) * np.array([0.1980, 0.2010, 0.1970], np.float32),
)


class KnownSplit(NamedTuple):
    """Size and digests of a split, or of its first ``verified`` examples."""

    size: int
    verified: int
    images: str
    labels: str


KNOWN_SPLITS: dict[str, dict[str, KnownSplit]] = {
    "cifar10": {
        "train": KnownSplit(
            50_000,
            50_000,
            "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        ),
        "test": KnownSplit(
            10_000,
            10_000,
            "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        ),
    },
    "svhn_cropped": {
        "test": KnownSplit(
            26_032,
            10_000,
            "8158838bf8df734f0d02585aa5edb2c38ed95f96ee012486015b47716777f9b3",
            "7fe9bcc87dca833901548fff86f3af5d1dccf069e726ecef367b4a1476542ddf",
        ),
    },
}

# sha256 of the official SVHN files, as TFDS records them.
SVHN_FILES = {
    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8": "train",
    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b": "test",
}


def verify_split(name: str, split: str, images: np.ndarray, labels: np.ndarray) -> dict[str, str]:
    """Compares a split with its known digests.

    Args:
      name: dataset.
      split: ``"train"`` or ``"test"``.
      images: ``[N, 32, 32, 3]`` uint8; SVHN may be a prefix of the official order,
        of the verified length or the whole split.
      labels: ``[N]`` uint8.

    Returns:
      The digests of the verified arrays, by part.
    """
    known = KNOWN_SPLITS[name][split]
    if len(images) not in (known.verified, known.size):
        allowed = " or ".join(f"{n:,}" for n in sorted({known.verified, known.size}))
        raise DataError(f"{name} {split}: {len(images):,} examples, expected {allowed}")
    found = {}
    for part, array in (("images", images), ("labels", labels)):
        found[part] = sha256_of_array(array[: known.verified])
        expected = getattr(known, part)
        if found[part] != expected:
            raise DataError(
                f"{name} {split} {part}: sha256 {found[part][:16]}... of the decoded array, "
                f"expected {expected[:16]}...; the file is damaged or not {name}"
            )
    return found
