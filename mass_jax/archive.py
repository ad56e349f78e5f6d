"""A finished run as one file that can be handed on: a zip without pickles.

``arrays/0000.npy`` ... hold the parameters; ``model.json`` their names and what prediction
needs; ``config.json``, ``results.json``, ``metrics.jsonl`` the run; ``README.md`` the model
card; ``manifest.json`` the sha256 of all others. The zip's comment, its last bytes, is the
sha256 of everything before it, so no bit of the file can change unnoticed.

Whoever opens an archive need not trust it: names are never paths, members are stored
uncompressed (no bombs), arrays are bounded by their bytes, nothing is executed. Digests tell
damage, not authors: a forger can write a consistent archive of bad parameters.
"""

import hashlib
import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MANIFEST, _MODEL, _CARD = "manifest.json", "model.json", "README.md"
_DOCUMENTS = (_MODEL, "config.json", "results.json", "metrics.jsonl", _CARD)
_ARRAY = re.compile(r"arrays/[0-9]{4}\.npy")
_COMMENT = b"sha256:"
_DIGEST_LENGTH = 64
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same run gives the same bytes
_LARGEST_FILE = 4 * 1024**3
_LARGEST_DOCUMENT = 64 * 1024**2


class ArchiveError(RuntimeError):
    """A file that is no archive, or is damaged, or tries something; one line."""


class Archive(NamedTuple):
    """What an archive holds.

    Attributes:
      arrays: parameters by name.
      model: input shape, number of classes, normalisation, steps.
      config: fields by dotted name.
      results: as in ``results.json``.
      metrics: text of ``metrics.jsonl``.
      card: Markdown.
    """

    arrays: dict[str, np.ndarray]
    model: dict[str, Any]
    config: dict[str, Any]
    results: dict[str, Any]
    metrics: str
    card: str


def write_archive(path: Path, archive: Archive) -> str:
    """Writes, reads back and compares; returns the sha256 of the file's contents.

    Args:
      path: replaced in one step.
      archive: what to pack.
    """
    members: dict[str, bytes] = {}
    for index, array in enumerate(archive.arrays.values()):
        stream = io.BytesIO()
        contiguous = np.ascontiguousarray(array).reshape(np.shape(array))
        np.lib.format.write_array(stream, contiguous, version=(1, 0), allow_pickle=False)
        members[f"arrays/{index:04}.npy"] = stream.getvalue()
    members[_MODEL] = _json({**archive.model, "arrays": list(archive.arrays)})
    members["config.json"] = _json(archive.config)
    members["results.json"] = _json(archive.results)
    members["metrics.jsonl"] = archive.metrics.encode()
    members[_CARD] = archive.card.encode()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    members[_MANIFEST] = _json({"format": 1, "sha256": digests})

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name, _EPOCH), data)
        file.comment = _COMMENT + b"0" * _DIGEST_LENGTH
    body = stream.getvalue()[:-_DIGEST_LENGTH]
    digest = hashlib.sha256(body).hexdigest()
    scratch = path.with_name(f".{path.name}.writing")
    try:
        with scratch.open("wb") as out:
            out.write(body + digest.encode())
            out.flush()
            os.fsync(out.fileno())
        read_archive(scratch)
        os.replace(scratch, path)
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        scratch.unlink(missing_ok=True)
    return digest


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def read_archive(path: Path) -> Archive:
    """Reads an archive after checking every byte of it.

    Args:
      path: of a file by `write_archive`.

    Raises:
      ArchiveError: one line.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ArchiveError(f"{path}: larger than {_LARGEST_FILE >> 30} GB; not read")
        data = path.read_bytes()
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from None
    _check_whole(path, data)
    try:
        members = _members(data)
        documents = {name: _document(name, members.pop(name)) for name in _DOCUMENTS}
        model = documents[_MODEL]
        names = model.pop("arrays")
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ArchiveError(f"{_MODEL}: its arrays have no names")
        if len(set(names)) != len(names) or len(names) != len(members):
            raise ArchiveError(f"{_MODEL} names {len(names)} arrays; there are {len(members)}")
        arrays = {
            name: _array(member, members[member])
            for name, member in zip(names, sorted(members), strict=True)
        }
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}; not loaded") from None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArchiveError(f"{path}: damaged ({reason}); get a new copy") from None
    return Archive(
        arrays,
        model,
        documents["config.json"],
        documents["results.json"],
        documents["metrics.jsonl"],
        documents[_CARD],
    )


def _check_whole(path: Path, data: bytes) -> None:
    if not data.startswith(b"PK\x03\x04"):
        raise ArchiveError(f"{path}: not an archive made by python -m experiments.export")
    body, digest = data[:-_DIGEST_LENGTH], data[-_DIGEST_LENGTH:]
    if not body.endswith(_COMMENT):
        raise ArchiveError(
            f"{path}: cut short, or not made by python -m experiments.export; get a new copy"
        )
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ArchiveError(
            f"{path}: damaged, its sha256 is not the one it ends with; get a new copy"
        )


def _members(data: bytes) -> dict[str, bytes]:
    """All members by name, each as the manifest says."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries = file.infolist()
        for entry in entries:
            if entry.filename not in (*_DOCUMENTS, _MANIFEST) and not _ARRAY.fullmatch(
                entry.filename
            ):
                raise ArchiveError(f"member {entry.filename[:80]!r} does not belong in an archive")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits:
                raise ArchiveError(f"member {entry.filename!r} is compressed or encrypted")
            if not entry.filename.startswith("arrays/") and entry.file_size > _LARGEST_DOCUMENT:
                raise ArchiveError(f"member {entry.filename!r} is too large")
        if len({entry.filename for entry in entries}) != len(entries):
            raise ArchiveError("two members have one name")
        # Stored members that overlap could still add up to more than the file.
        if sum(entry.file_size for entry in entries) > len(data):
            raise ArchiveError("its members are larger than itself")
        members = {entry.filename: file.read(entry) for entry in entries}
    if _MANIFEST not in members:
        raise ArchiveError(f"{_MANIFEST} is missing")
    manifest = _document(_MANIFEST, members.pop(_MANIFEST))
    if manifest.get("format") != 1 or not isinstance(manifest.get("sha256"), dict):
        raise ArchiveError(f"{_MANIFEST} is of an unknown format")
    digests = manifest["sha256"]
    for name in sorted({*digests, *members, *_DOCUMENTS}):
        if name not in members or name not in digests:
            raise ArchiveError(f"member {name[:80]!r} is missing or not in the manifest")
        if hashlib.sha256(members[name]).hexdigest() != digests[name]:
            raise ArchiveError(f"member {name!r}: its sha256 is not the one in the manifest")
    return members


def _document(name: str, data: bytes) -> Any:
    text = data.decode()
    if not name.endswith(".json"):
        return text
    try:
        document = json.loads(text)
    except RecursionError:
        raise ArchiveError(f"member {name!r} is nested too deeply") from None
    if not isinstance(document, dict):
        raise ArchiveError(f"member {name!r} is not a JSON object")
    return document


def _array(name: str, data: bytes) -> np.ndarray:
    """An ``.npy`` of plain numbers whose header claims exactly the bytes that follow."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ArchiveError(f"member {name!r} is of another .npy version")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or dtype.kind not in "fiub" or fortran_order:
        raise ArchiveError(f"member {name!r} holds {dtype}, not plain numbers")
    count = 1
    for extent in shape:
        count *= int(extent)
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(data) - stream.tell():
        raise ArchiveError(f"member {name!r} is not as large as its header says")
    return np.frombuffer(data, dtype, count, stream.tell()).reshape(shape).copy()
