"""Arrays in memory: statistics, normalisation, checks, digests and the bundled digits.

Oracles: NumPy in float64, hashlib, scikit-learn's own arrays, digests recorded once.
"""

import hashlib
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

from mass_jax.data import DataError, Normalisation, dataset_from_arrays, digits, normalise
from mass_jax.data.dataset import statistics_of

SHAPES = {"colour": (12, 5, 4, 3), "grey": (12, 5, 4), "vectors": (12, 7)}
LABELS = np.arange(12) % 3


def one_line(pattern: str) -> str:
    """For ``pytest.raises(match=...)``: ``pattern`` in a message of a single line."""
    return rf"\A[^\n]*{pattern}[^\n]*\Z"


def random_images(shape, dtype=np.uint8, seed=0):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 256, shape).astype(dtype)
    return rng.normal(3.0, 2.0, shape).astype(dtype)


# --- Statistics -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(12, 5, 4, 3), (12, 7), (1_100, 32, 32, 1)])
def test_statistics_are_numpys(shape, dtype):
    """Oracle: NumPy's mean and std in float64; the last shape needs a second chunk."""
    images = random_images(shape, dtype)
    axes = tuple(range(len(shape) - 1))
    found = statistics_of(images)
    exact = images.astype(np.float64)
    np.testing.assert_allclose(found.mean, exact.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(found.std, exact.std(axes), rtol=1e-6)
    assert found.mean.dtype == found.std.dtype == np.float32


@pytest.mark.parametrize("value", [0.0, 0.1, 7.0, 1e6])
def test_constant_channels_get_deviation_one(value):
    """Oracle: closed form; (x - mean) / 1 is 0 for a constant, never NaN."""
    images = random_images((12, 5, 4, 2), np.float32)
    images[..., 1] = value
    found = statistics_of(images)
    assert found.std[1] == 1.0
    np.testing.assert_allclose(found.mean[1], value, rtol=1e-6)
    assert abs(found.std[0] - 2.0) < 0.3  # the other channel is left alone


@pytest.mark.parametrize("shape", [(12, 5, 4, 3), (12, 7)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_normalise_is_numpys(shape, dtype):
    """Oracle: (x - mean) / std in NumPy's float64, and mean 0, deviation 1 as the definition."""
    images = random_images(shape, dtype)
    statistics = statistics_of(images)
    found = normalise(jnp.asarray(images), statistics)
    assert found.dtype == jnp.float32
    exact = (images.astype(np.float64) - statistics.mean) / statistics.std
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    axes = tuple(range(len(shape) - 1))
    np.testing.assert_allclose(np.mean(found, axes), 0.0, atol=1e-5)
    np.testing.assert_allclose(np.std(found, axes), 1.0, rtol=1e-5)


# --- dataset_from_arrays ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_accepts_the_documented_arrays(shape, dtype):
    """Oracle: the input itself; grey images gain a channel, all but uint8 become float32."""
    images, other = random_images(shape, dtype), random_images(shape, dtype, seed=1)
    data = dataset_from_arrays(
        images, LABELS, other[:6], LABELS[:6].astype(np.uint8), ood={"noise": other[6:]}
    )
    stored_shape = (*shape, 1) if len(shape) == 3 else shape
    stored_type = np.uint8 if dtype == np.uint8 else np.float32
    assert data.input_shape == stored_shape[1:]
    assert data.num_classes == 3
    for split, expected in (
        (data.train, images),
        (data.test, other[:6]),
        (data.ood["noise"][0], other[6:]),
    ):
        assert split.images.dtype == stored_type
        assert split.labels.dtype == np.int32
        np.testing.assert_array_equal(
            split.images, expected.reshape(-1, *stored_shape[1:]).astype(stored_type)
        )
    np.testing.assert_array_equal(data.train.labels, LABELS)
    np.testing.assert_array_equal(data.test.labels, LABELS[:6])
    np.testing.assert_array_equal(data.normalisation.mean, statistics_of(data.train.images).mean)
    np.testing.assert_array_equal(
        data.ood["noise"][1].std, statistics_of(data.ood["noise"][0].images).std
    )


def test_given_statistics_and_classes_are_kept():
    """Oracle: the arguments."""
    images = random_images((12, 5, 4, 3))
    given = Normalisation(np.array([1.0, 2.0, 3.0], "f"), np.array([4.0, 5.0, 6.0], "f"))
    data = dataset_from_arrays(
        *(images, LABELS, images, LABELS),
        name="mine",
        num_classes=10,
        normalisation=given,
        ood={"known": images, "unknown": images},
        ood_normalisations={"known": given},
    )
    assert (data.name, data.num_classes) == ("mine", 10)
    assert data.normalisation is given
    assert data.ood["known"][1] is given
    np.testing.assert_array_equal(data.ood["unknown"][1].mean, statistics_of(images).mean)


def with_value(value, dtype=np.float32):
    images = random_images((12, 5, 4, 3), dtype)
    images[3, 2, 1, 0] = value
    return images


IMAGES = random_images((12, 5, 4, 3))
MISTAKES = {
    # what is changed in a good call: (arguments, what the line must say)
    "train label negative": ({"train_labels": LABELS - 1}, "training labels .*-1"),
    "train label too large": (
        {"train_labels": LABELS + 8, "num_classes": 10},
        r"training labels run from 8 to 10",
    ),
    "test label too large": ({"test_labels": LABELS + 1}, r"test labels run from 1 to 3"),
    "label beyond int32": ({"train_labels": LABELS + 2**32}, "training labels"),
    "fewer labels": ({"train_labels": LABELS[:-1]}, r"training labels have shape \(11,\).*\(12,\)"),
    "one-hot labels": ({"train_labels": np.eye(3, dtype=int)[LABELS]}, r"labels have shape"),
    "float labels": ({"test_labels": LABELS.astype(float)}, "test labels have type float64"),
    "text labels": ({"train_labels": LABELS.astype(str)}, "training labels have type"),
    "one class": ({"train_labels": LABELS * 0, "test_labels": LABELS * 0}, "1 class.* at least 2"),
    "num_classes=1": ({"train_labels": LABELS * 0, "num_classes": 1}, "labels"),
    "five axes": ({"train_images": IMAGES[None]}, r"training examples have shape \(1, 12, 5, 4"),
    "one axis": ({"test_images": IMAGES[:, 0, 0, 0]}, r"test examples have shape \(12,\)"),
    "no training images": (
        {"train_images": IMAGES[:0], "train_labels": LABELS[:0]},
        r"training images have shape \(0, 5, 4, 3\)",
    ),
    "no test images": (
        {"test_images": IMAGES[:0], "test_labels": LABELS[:0]},
        "test images have shape",
    ),
    "no pixels": ({"train_images": IMAGES[:, :0]}, "training images have shape"),
    "test images of another size": ({"test_images": IMAGES[:, 1:]}, r"test images.*\(4, 4, 3\)"),
    "ood images of another size": ({"ood": {"noise": IMAGES[:, :, 1:]}}, r"noise images.*\(5, 3,"),
    "ood images empty": ({"ood": {"noise": IMAGES[:0]}}, r"noise images"),
    "text images": ({"train_images": IMAGES.astype(str)}, "training images have type <U"),
    "complex images": ({"test_images": IMAGES.astype(complex)}, "test images have type complex"),
    "boolean images": ({"train_images": IMAGES > 9}, "training images have type bool"),
    "NaN": (
        {"train_images": with_value(np.nan)},
        "training images hold NaN or infinity .*first in row 3; fill the gaps or leave",
    ),
    "NaN in a table": (
        {"train_images": with_value(np.nan).reshape(12, 60), "test_images": IMAGES.reshape(12, 60)},
        "training examples hold NaN or infinity .*first in row 3;",
    ),
    "tables of two widths": (
        {"train_images": IMAGES[:, 0, 0], "test_images": IMAGES[:, 0, 0, 1:]},
        r"test examples have shape \(2,\), training examples \(3,\)",
    ),
    "infinity": ({"test_images": with_value(-np.inf)}, "test images hold NaN or infinity"),
    "infinite in float32": (
        {"test_images": with_value(1e300, np.float64)},
        "test images hold NaN or infinity",
    ),
    "NaN in ood": ({"ood": {"noise": with_value(np.nan)}}, "noise images hold NaN or infinity"),
    # One-channel statistics would broadcast silently, three-channel ones fail far from here.
    "statistics of another size": (
        {"normalisation": Normalisation(np.zeros(1, "f"), np.ones(1, "f"))},
        "normalisation",
    ),
    "ood statistics of another size": (
        {
            "ood": {"noise": IMAGES},
            "ood_normalisations": {"noise": Normalisation(np.zeros(1, "f"), np.ones(1, "f"))},
        },
        "normalisation",
    ),
    "deviation zero": (
        {"normalisation": Normalisation(np.zeros(3, "f"), np.zeros(3, "f"))},
        "normalisation",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_clear_line(change, message):
    """Oracle: the same call without the change is accepted."""
    good = {
        "train_images": IMAGES,
        "train_labels": LABELS,
        "test_images": IMAGES,
        "test_labels": LABELS,
    }
    dataset_from_arrays(**good)
    with pytest.raises(DataError, match=one_line(message)):
        dataset_from_arrays(**(good | change))


# --- Digests ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_checksums_are_hashlibs(dtype):
    """Oracle: hashlib over the bytes in C order, whatever the memory order of the input."""
    images = np.asfortranarray(random_images((12, 5, 4, 3), dtype))
    data = dataset_from_arrays(images, LABELS, images[:6], LABELS[:6], ood={"noise": images[6:]})
    digest = lambda array: hashlib.sha256(array.tobytes(order="C")).hexdigest()
    labels = LABELS.astype(np.int32)
    assert data.checksums() == {
        "train/images": digest(images),
        "train/labels": digest(labels),
        "test/images": digest(images[:6]),
        "test/labels": digest(labels[:6]),
        "noise/images": digest(images[6:]),
        "noise/labels": digest(np.zeros(6, np.int32)),
    }


def test_checksums_see_one_changed_pixel():
    """Oracle: collision resistance; exactly the digest of the changed array differs."""
    changed = IMAGES.copy()
    changed[5, 4, 3, 2] ^= 1
    before = dataset_from_arrays(IMAGES, LABELS, IMAGES, LABELS).checksums()
    after = dataset_from_arrays(IMAGES, LABELS, changed, LABELS).checksums()
    assert [name for name in before if before[name] != after[name]] == ["test/images"]


# --- digits -----------------------------------------------------------------------


def test_digits_are_sklearns_once_each():
    """Oracle: scikit-learn's arrays as a multiset; so splits are disjoint and nothing is lost."""
    bundled = load_digits()
    data = digits()
    ood, _ = data.ood["digits_8_9"]

    def count(images, labels):
        return Counter(
            (image.astype(np.uint8).tobytes(), int(label))
            for image, label in zip(images, labels, strict=True)
        )

    known = bundled.target < 8
    assert count(*data.train) + count(*data.test) == count(
        bundled.images[known], bundled.target[known]
    )
    assert count(ood.images, ood.labels * 0) == count(
        bundled.images[~known], bundled.target[~known] * 0
    )


def test_digits_sizes_and_classes():
    """Oracle: 1,797 images, of which 174 eights and 180 nines (scikit-learn's description)."""
    data = digits()
    sizes = len(data.train.labels), len(data.test.labels), len(data.ood["digits_8_9"][0].labels)
    assert sizes == (1_797 - 174 - 180 - 343, 343, 174 + 180)
    assert data.num_classes == 8
    assert data.input_shape == (8, 8, 1)
    for split in (data.train, data.test):
        assert set(split.labels.tolist()) == set(range(8))
        assert split.images.dtype == np.uint8
        assert split.images.max() == 16


def test_digits_are_the_same_on_every_machine():
    """Oracle: digests recorded when the split was first drawn."""
    assert digits().checksums() == {
        "train/images": "99edd7a15717146c2d1b8b3d030098c16e1e6c35403ea5ed33c4822c0a6b3f2d",
        "train/labels": "72e7b79002c8803e45b02553e28fe5d1902382daaa806ff0963759ceae159a54",
        "test/images": "d02247742ecdbc3a9a2bdf66007ebe3ed08aeec9cb3759d06652dbfeb0e2bb69",
        "test/labels": "f858d43945fae02b62958850f9c5850babadee0f47eeb0ffc85aad06cbeb9055",
        "digits_8_9/images": "635d5936775bd4d186db1fd263c115c89ef03565c4127c2f11fcd796876ef1d6",
        "digits_8_9/labels": "12c2a7c3c67ca82ef4f5ac701b5ec4891bac3a5b354cfbb0694a54eada5f09bc",
    }
