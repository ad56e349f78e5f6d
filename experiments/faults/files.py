"""Faults of files: damaged and malicious checkpoints and results."""

import contextlib
import io
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.faults.runs import (
    ROOT,
    Leftover,
    Outcome,
    Verdict,
    compare,
    leftover,
    outcome,
    rerun,
    run,
)
from mass_jax import checkpoint

_WHOLE_PROCESS_EVERY = 25  # trials; the others only restore


def corruption(where: Path, trials: int, generator: random.Random) -> Outcome:
    """3: a flipped bit, a truncated file, a deleted file in the newest checkpoint.

    Every trial restores; every 25th also runs the process to its end, which must be
    equal to the bit.
    """
    control = run(where / "whole")[0] == 0
    whole = leftover(where / "whole")
    _unfinish(where / "whole", where / "unfinished")
    good = checkpoint.restore_latest(where / "unfinished" / "checkpoints")
    assert good is not None
    verdicts = []
    for trial in range(trials):
        kind = (_flip, _truncate, _delete)[trial % 3]
        workdir = where / f"damaged{trial}"
        shutil.copytree(where / "unfinished", workdir)
        case = f"{kind.__name__[1:]} {kind(_newest(workdir), generator)}"
        verdict = _restored(workdir, case, good)
        if not verdict.problem and trial % _WHOLE_PROCESS_EVERY == 0:
            verdict = rerun(workdir, whole, case)
        verdicts.append(verdict)
        shutil.rmtree(workdir)
    return outcome(verdicts, control)


def _unfinish(workdir: Path, copy: Path) -> None:
    """A run that stopped before its evaluation."""
    shutil.copytree(workdir, copy)
    (copy / "results.json").unlink()


def _newest(workdir: Path) -> Path:
    directory = workdir / "checkpoints"
    return directory / str(max(checkpoint.steps(directory)))


def _some_file(path: Path, generator: random.Random, with_content: bool) -> Path:
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return generator.choice([p for p in files if not with_content or p.stat().st_size > 0])


def _flip(path: Path, generator: random.Random) -> str:
    file = _some_file(path, generator, with_content=True)
    content = bytearray(file.read_bytes())
    position = generator.randrange(8 * len(content))
    content[position // 8] ^= 1 << position % 8
    file.write_bytes(content)
    return f"bit {position} of {file.name}"


def _truncate(path: Path, generator: random.Random) -> str:
    file = _some_file(path, generator, with_content=True)
    size = generator.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} to {size}"


def _delete(path: Path, generator: random.Random) -> str:
    file = _some_file(path, generator, with_content=False)
    file.unlink()
    return file.name


@contextlib.contextmanager
def _said() -> Iterator[io.StringIO]:
    """What the checkpoint code logs."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(stream)]
    try:
        yield stream
    finally:
        root.handlers = handlers


def _restored(workdir: Path, case: str, newest: checkpoint.Checkpoint) -> Verdict:
    """The damage is said in one line and an older checkpoint taken, whole."""
    with _said() as said:
        found = checkpoint.restore_latest(workdir / "checkpoints")
    lines = said.getvalue().strip().splitlines()
    if found is None:
        return Verdict(f"{case}: no checkpoint left")
    if found.step == newest.step:
        return Verdict(f"{case}: not noticed", silent=True)
    if len(lines) != 1:
        return Verdict(f"{case}: said {lines}")
    return Verdict()


class _Payload:
    """Unpickling this makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (open, (str(self.target), "w"))


def malicious(where: Path, trials: int, generator: random.Random) -> Outcome:
    """11: pickles, path tricks, links and import strings in checkpoints and results."""
    control = run(where / "whole")[0] == 0
    whole = leftover(where / "whole")
    _unfinish(where / "whole", where / "unfinished")
    verdicts = []
    tricks = (_pickle_file, _pickled_array, _path_trick, _link, _import_string, _foreign_results)
    for trial in range(trials):
        workdir, canary = where / f"malicious{trial}", where / f"canary{trial}"
        shutil.copytree(where / "unfinished", workdir)
        trick = tricks[trial % len(tricks)]
        trick(workdir, canary, generator)
        verdicts.append(_resisted(workdir, canary, trick.__name__[1:], whole))
        shutil.rmtree(workdir)
    return outcome(verdicts, control)


def _resisted(workdir: Path, canary: Path, case: str, whole: Leftover) -> Verdict:
    code, text = run(workdir)
    if canary.exists():
        return Verdict(f"{case}: was executed", silent=True)
    if code == 0:
        return compare(workdir, whole, case)
    return Verdict() if "Traceback" not in text else Verdict(f"{case}: {text[-200:]}")


def _signed(path: Path) -> None:
    """Makes the manifest agree with what is there: the attacker can, too."""
    step = int(path.name)
    files = {n: checkpoint._sha256(path / n) for n in checkpoint._files_below(path)}
    files.pop("manifest.json", None)
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": files}))


def _pickle_file(workdir: Path, canary: Path, generator: random.Random) -> None:
    (_newest(workdir) / "state" / "extra.pkl").write_bytes(pickle.dumps(_Payload(canary)))
    _signed(_newest(workdir))


def _pickled_array(workdir: Path, canary: Path, generator: random.Random) -> None:
    file = _some_file(_newest(workdir) / "state", generator, with_content=True)
    file.write_bytes(pickle.dumps(_Payload(canary)))
    _signed(_newest(workdir))


def _path_trick(workdir: Path, canary: Path, generator: random.Random) -> None:
    manifest = _newest(workdir) / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"][f"../../../{canary.name}"] = "0" * 64
    manifest.write_text(json.dumps(content))


def _link(workdir: Path, canary: Path, generator: random.Random) -> None:
    meta = _newest(workdir) / "meta.json"
    elsewhere = workdir / "elsewhere.json"
    shutil.move(meta, elsewhere)
    meta.symlink_to(elsewhere)


def _import_string(workdir: Path, canary: Path, generator: random.Random) -> None:
    meta = _newest(workdir) / "meta.json"
    content = json.loads(meta.read_text())
    code = f"open({str(canary)!r}, 'w')"
    content["config"] = {"network": code, "__import__": "os", "method": f"!!python/object {code}"}
    meta.write_text(json.dumps(content))
    _signed(_newest(workdir))


def _foreign_results(workdir: Path, canary: Path, generator: random.Random) -> None:
    tricks = (pickle.dumps(_Payload(canary)), b"[]", b'{"config_hash": ["x"]}', b"\xff\xfe", b"")
    (workdir / "results.json").write_bytes(generator.choice(tricks))


def tables_resist(where: Path) -> bool:
    """Whether the tables pass over foreign files in the results."""
    (where / "foreign").mkdir()
    for index, content in enumerate((b"[]", b"{}", b'"x"', b'{"accuracy": 1}')):
        (where / "foreign" / f"{index}.json").write_bytes(content)
    code = f"from experiments.cells import *; print(records(Path({str(where / 'foreign')!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.strip() == "[]"
