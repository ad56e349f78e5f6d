"""Checkpoints that cannot lie.

``<workdir>/checkpoints/<step>/`` holds the arrays (orbax, under ``state/``),
``meta.json`` and, written last, ``manifest.json`` with the sha256 of every other file.
A checkpoint counts only if every byte is as the manifest says; nothing in it is
imported or executed.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

_MANIFEST = "manifest.json"
_META = "meta.json"
_STATE = "state"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or of another model; one line."""


class Checkpoint(NamedTuple):
    """A verified checkpoint, read.

    Attributes:
      step: where it was taken.
      arrays: by name.
      meta: what was saved beside them.
      digest: sha256 of its manifest.
    """

    step: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    digest: str


def save(directory: Path, step: int, tree: Any, meta: dict[str, Any]) -> str:
    """Writes beside the final place, verifies, then renames; returns the digest.

    Args:
      directory: ``<workdir>/checkpoints``.
      step: names the checkpoint.
      tree: pytree of host arrays.
      meta: JSON-compatible facts to keep with it.
    """
    scratch, final = directory / f".saving-{step}", directory / str(step)
    try:
        digest = _write_and_verify(scratch, step, tree, meta)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step, if any
        os.replace(scratch, final)
        _fsync(directory)
    except (OSError, ValueError, CheckpointError) as error:  # orbax reports a full disk as either
        shutil.rmtree(scratch, ignore_errors=True)
        reason = " ".join(str(error).split())[:200]
        kept = (
            f"that of step {max(steps(directory))} is kept" if steps(directory) else "none is kept"
        )
        raise CheckpointError(
            f"cannot save a checkpoint in {directory} ({reason}); {kept}; make room and run the "
            "same command to go on"
        ) from None
    return digest


def _write_and_verify(scratch: Path, step: int, tree: Any, meta: dict[str, Any]) -> str:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # A disk that is full anyway: orbax would leave its threads' tracebacks on the terminal.
    needed = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))
    if shutil.disk_usage(scratch).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with _checkpointer() as checkpointer:
        checkpointer.save((scratch / _STATE).absolute(), _named_leaves(tree))
    (scratch / _META).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")
    files = {name: _sha256(scratch / name) for name in _files_below(scratch)}
    (scratch / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n")
    for name in (*files, _MANIFEST):
        _fsync(scratch / name)
    return verify(scratch, step)


def verify(path: Path, step: int) -> str:
    """Checks every byte of a checkpoint; returns the sha256 of its manifest."""
    try:
        text = (path / _MANIFEST).read_bytes()
        manifest = json.loads(text)
        files = dict(manifest["files"])
        if manifest["step"] != step:
            raise CheckpointError(f"{path}: its manifest is of step {manifest['step']}")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: has no {_MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST}: cannot be read ({error})") from None
    # Names come from walking the directory, never from the manifest: no path tricks.
    present = _files_below(path)
    for name in sorted(files.keys() | set(present)):
        if name == _MANIFEST:
            continue
        if name not in present:
            raise CheckpointError(f"{path / Path(name).name}: is missing")
        if name not in files:
            raise CheckpointError(f"{path / name}: does not belong to the checkpoint")
        if _sha256(path / name) != files[name]:
            raise CheckpointError(f"{path / name}: its sha256 is not the one in the manifest")
    return hashlib.sha256(text).hexdigest()


def restore_latest(directory: Path) -> Checkpoint | None:
    """The newest good checkpoint; damaged ones are named and passed over."""
    for step in sorted(steps(directory), reverse=True):
        try:
            return restore(directory, step)
        except CheckpointError as error:
            logging.warning("damaged checkpoint: %s; trying an older one", error)
    return None


def restore(directory: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, verified."""
    path = directory / str(step)
    digest = verify(path, step)
    try:
        meta = json.loads((path / _META).read_text())
        with _checkpointer() as checkpointer:
            arrays = checkpointer.restore((path / _STATE).absolute())
        named = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: cannot be read ({reason})") from None
    return Checkpoint(step, named, meta, digest)


def steps(directory: Path) -> list[int]:
    """Steps that have a checkpoint, good or not."""
    if not directory.is_dir():
        return []
    return [int(path.name) for path in directory.iterdir() if path.name.isdecimal()]


def prune(directory: Path, keep_last: int) -> None:
    """Removes all but the newest ``keep_last`` and the best by validation accuracy."""
    found = sorted(steps(directory))
    scores = {}
    for step in found:
        try:
            meta = json.loads((directory / str(step) / _META).read_text())
            scores[step] = float(meta["validation_accuracy"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not validated at that step
    best = max(scores, key=lambda step: (scores[step], step), default=None)
    for step in found[:-keep_last]:
        if step != best:
            shutil.rmtree(directory / str(step), ignore_errors=True)


def into_tree(template: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The arrays of a checkpoint in the structure of ``template``.

    Args:
      template: pytree of arrays or shapes.
      arrays: from a `Checkpoint`.
    """
    paths, structure = jax.tree.flatten_with_path(template)
    leaves = []
    for path, like in paths:
        name = _name(path)
        found = arrays.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            have = "nothing" if found is None else f"{found.dtype} {found.shape}"
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {have}, "
                f"expected {like.dtype} {like.shape}"
            )
        leaves.append(found)
    return jax.tree.unflatten(structure, leaves)


def _named_leaves(tree: Any) -> dict[str, np.ndarray]:
    paths, _ = jax.tree.flatten_with_path(tree)
    return {_name(path): np.asarray(leaf) for path, leaf in paths}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _checkpointer() -> ocp.StandardCheckpointer:
    """Only this process takes part: the state is the same on all of them."""
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me} if jax.process_count() > 1 else None,
        barrier_sync_key_prefix=f"process{me}" if jax.process_count() > 1 else None,
    )
    return ocp.StandardCheckpointer(multiprocessing_options=options)


def _files_below(path: Path) -> list[str]:
    """Relative names of all files; a link is not a file of a checkpoint."""
    names = []
    for root, directories, files in os.walk(path):
        for entry in (*directories, *files):
            if (Path(root) / entry).is_symlink():
                raise CheckpointError(f"{Path(root) / entry}: is a symbolic link")
        names += [(Path(root) / name).relative_to(path).as_posix() for name in files]
    return sorted(names)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
