"""Reading prepared TFDS directories into memory, without TensorFlow.

The first read decodes every image and leaves a verified copy of the decoded
arrays beside the data; later starts read that copy in a fraction of a second.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from google.protobuf.json_format import ParseError
from google.protobuf.message import DecodeError
from PIL import Image

from mass_jax.data.dataset import Split
from mass_jax.data.errors import DataError
from mass_jax.data.known import KNOWN_SPLITS, verify_split
from mass_jax.data.tf_example import parse_image_example

_CACHE = ".mass_jax_cache"
_CHUNK = 5_000


def resolve_data_dir(data_dir: str | Path | None) -> Path:
    """The TFDS data directory: given, or ``TFDS_DATA_DIR``, or TFDS's default."""
    chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(chosen).expanduser().absolute()


def prepared_directory(name: str, data_dir: Path) -> Path | None:
    """Where ``name`` is prepared (newest version), or ``None``.

    Args:
      name: a TFDS name, ``dataset`` or ``dataset/config``.
      data_dir: TFDS data directory.
    """
    versions = (data_dir / name.strip("/")).glob("*/dataset_info.json") if name.strip("/.") else ()
    found = sorted(
        (p.parent for p in versions if re.fullmatch(r"\d+\.\d+\.\d+", p.parent.name)),
        key=lambda path: [int(part) for part in path.name.split(".")],
    )
    return found[-1] if found else None


def read_split(name: str, split: str, data_dir: Path) -> Split:
    """A split of a prepared dataset, from the cache if there is a good one.

    Known datasets are verified against their digests whichever way they come.

    Args:
      name: a prepared TFDS dataset.
      split: ``"train"`` or ``"test"``.
      data_dir: TFDS data directory.
    """
    directory = prepared_directory(name, data_dir)
    if directory is None:
        raise DataError(f"{name} is not prepared in {data_dir}")
    cache = data_dir / _CACHE / name / directory.name / split
    fingerprint = _fingerprint(directory)
    cached = _read_cache(cache, fingerprint)
    if cached is not None:
        return cached
    decoded = decode_split(directory, split)
    if split in KNOWN_SPLITS.get(name, {}):
        verify_split(name, split, decoded.images, decoded.labels.astype(np.uint8))
    _write_cache(cache, decoded, fingerprint)
    return decoded


def decode_split(directory: Path, split: str) -> Split:
    """Decodes a split of a prepared directory, in the order of its ids.

    Args:
      directory: ``<data_dir>/<name>/<version>``.
      split: a split the directory has.
    """
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(directory)
        if split not in builder.info.splits:
            raise DataError(f"{directory}: has no {split} split, only {list(builder.info.splits)}")
        if builder.info.file_format.value == "tfrecord":
            return _decode_with_tensorflow(builder, directory, split)
        records = ArrayRecordDataSource(
            [os.fspath(path) for path in builder.info.splits[split].filepaths]
        )
        identities: list[bytes] = []
        labels: list[int] = []
        images: list[np.ndarray] = []
        for start in range(0, len(records), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(records)))
            for record in records.__getitems__(chunk):
                identity, encoded, label = parse_image_example(record)
                identities.append(identity)
                images.append(np.asarray(Image.open(io.BytesIO(encoded))))
                labels.append(label)
        return _in_order(identities, images, labels)
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        RuntimeError,
        TypeError,
        SyntaxError,  # Pillow's word for a broken PNG
        DecodeError,
        ParseError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{directory}: cannot be read ({reason}); prepare it again") from None


def _decode_with_tensorflow(builder: Any, directory: Path, split: str) -> Split:
    import tensorflow_datasets as tfds

    if find_spec("tensorflow") is None:
        raise DataError(
            f"{directory}: prepared as tfrecord, which only TensorFlow reads; "
            "pip install tensorflow or prepare it again as array_record"
        )
    examples = list(tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False)))
    return _in_order(
        [example.get("id", b"") for example in examples],
        [example["image"] for example in examples],
        [example["label"] for example in examples],
    )


def _in_order(identities: list[bytes], images: list[np.ndarray], labels: list[int]) -> Split:
    """Files are shuffled; ids, where a dataset has them, give the official order."""
    # Stable, so that examples without ids stay in the order of the files.
    order = sorted(range(len(images)), key=identities.__getitem__)
    shapes = {image.shape for image in images}
    if len(shapes) != 1:
        raise DataError(f"images of {len(shapes)} different shapes; need one shape")
    stacked = np.stack([images[index] for index in order])
    return Split(
        stacked[..., None] if stacked.ndim == 3 else stacked,
        np.array([labels[index] for index in order], np.int32),
    )


# --- The cache --------------------------------------------------------------------


def _fingerprint(directory: Path) -> str:
    """Changes whenever the prepared files do."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    stamp = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stamp).encode()).hexdigest()


def _read_cache(cache: Path, fingerprint: str) -> Split | None:
    """The cached split, if it is of these files and every byte is as it was written."""
    try:
        manifest = json.loads((cache / "manifest.json").read_text())
        if manifest["fingerprint"] != fingerprint:
            return None
        stored = [(cache / f"{part}.npy").read_bytes() for part in Split._fields]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if [hashlib.sha256(d).hexdigest() for d in stored] != [manifest.get(p) for p in Split._fields]:
        logging.warning("%s: cached copy is damaged; decoding again", cache)
        return None
    return Split(*(np.load(io.BytesIO(d), allow_pickle=False) for d in stored))


def _write_cache(cache: Path, split: Split, fingerprint: str) -> None:
    """Best effort: a read-only data directory works, it only starts slower."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{cache.name}-", dir=cache.parent))
    except OSError as error:
        logging.warning("no cache of decoded images in %s (%s)", cache.parent, error.strerror)
        return
    try:
        manifest = {"fingerprint": fingerprint}
        for part, array in zip(Split._fields, split, strict=True):
            np.save(scratch / f"{part}.npy", array)
            manifest[part] = hashlib.sha256((scratch / f"{part}.npy").read_bytes()).hexdigest()
        (scratch / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(cache, ignore_errors=True)
        os.replace(scratch, cache)
    except OSError as error:  # a full disk, or another process was quicker
        logging.warning("no cache of decoded images in %s (%s)", cache.parent, error.strerror)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
