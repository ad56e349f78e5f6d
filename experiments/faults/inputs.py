"""Faults of what users hand in: configuration overrides and data files."""

import contextlib
import io
import math
import random
import string
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.faults.runs import ROOT, Outcome, Verdict, outcome
from mass_jax import options as command_line
from mass_jax.config import SCHEMA, ConfigError, apply_overrides, resolve
from mass_jax.data import known, prepare
from mass_jax.data.dataset import sha256_of_array

_SECONDS = 3.0
_WHOLE_PROCESS_EVERY = 100  # trials; the others only parse


class Override(NamedTuple):
    """Arguments, and whether they are right by the documentation of the field."""

    arguments: tuple[str, ...]
    valid: bool


def overrides(where: Path, trials: int, generator: random.Random) -> Outcome:
    """5: fuzzed overrides, half of them right: no bad one accepted, no good one rejected."""
    control = _verdict(Override((), True), whole_process=False)
    verdicts = []
    for trial in range(trials):
        case = _good(generator) if trial % 2 else _bad(generator)
        # Only bad ones: a good one would train.
        as_process = trial % _WHOLE_PROCESS_EVERY == 0
        verdicts.append(_verdict(case, as_process))
    return outcome(verdicts, not control.problem)


def _verdict(case: Override, whole_process: bool) -> Verdict:
    began = time.monotonic()
    shown = " ".join(case.arguments)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            options, given = command_line.parse(list(case.arguments))
        resolve(apply_overrides(command_line.load_config(options.config), given))
        accepted, message = True, ""
    except ConfigError as error:
        accepted, message = False, str(error)
    except SystemExit as refusal:  # argparse has its own way
        accepted, message = refusal.code == 0, ""
    except Exception as error:
        return Verdict(f"{shown}: {type(error).__name__}: {error}")
    if time.monotonic() - began > _SECONDS:
        return Verdict(f"{shown}: took {time.monotonic() - began:.1f} s")
    if accepted != case.valid:
        verb = "accepted" if accepted else f"rejected ({message})"
        return Verdict(f"{shown}: {verb}", silent=accepted)
    if "\n" in message:
        return Verdict(f"{shown}: more than one line")
    if whole_process and not case.valid:
        done = subprocess.run(
            [sys.executable, "-m", "mass_jax.main", *case.arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 2 or "Traceback" in done.stderr:
            return Verdict(f"{shown}: exit {done.returncode}: {done.stderr[-200:]}")
    return Verdict()


def _good(generator: random.Random) -> Override:
    """A value the documentation allows."""
    key = generator.choice(
        [k for k in SCHEMA if k not in ("method", "network", "network_digest", "data.ood")]
    )
    field = SCHEMA[key]
    if field.optional and generator.random() < 0.2:
        return Override((f"--config.{key}=None",), True)
    if field.choices:
        value = generator.choice(field.choices)
    elif field.kind is bool:
        value = generator.choice(["true", "false", "True", "False"])
    elif field.kind is str:
        value = "".join(generator.choices(string.ascii_lowercase, k=8))
    elif field.kind == "ints":
        value = ",".join(map(str, generator.sample(range(1, 1000), k=generator.randrange(4))))
    else:
        low = max(field.low, 1) if field.positive and field.kind is int else field.low
        high = min(field.high, 64 if key == "jacobian.sub_batch" else 10**6)
        drawn = generator.uniform(low, high) or high
        value = str(round(drawn)) if field.kind is int else repr(drawn)
        if key == "batch_size":
            value = str(max(64, int(value)))
    return Override((f"--config.{key}={value}",), True)


def _bad(generator: random.Random) -> Override:
    """A mistake of one of the kinds people make."""
    key = generator.choice(list(SCHEMA))
    field = SCHEMA[key]
    is_number = field.kind in (int, float)
    mistakes = {"unknown": f"{_misspelt(key, generator)}=1", "group": "optimizer=1"}
    if is_number or field.kind == "ints" or field.kind is bool:
        mistakes["type"] = f"{key}={generator.choice(['abc', '1,2,x', '--', '1e', '0x1g', '[1'])}"
    if is_number:
        nan = generator.choice(["nan", "inf", "-inf", "NaN"])
        mistakes |= {"nan": f"{key}={nan}", "low": f"{key}={_below(field.low, field.positive)}"}
        if not field.optional:
            mistakes["empty"] = f"{key}="
        if math.isfinite(field.high):
            mistakes["high"] = f"{key}={int(field.high) + 1}"
    if field.kind is int:
        mistakes["fraction"] = f"{key}=1.5"
    if field.choices:
        mistakes["choice"] = f"{key}={generator.choice(field.choices)}x"
    mistakes["contradiction"] = "method=softmax_ce"  # with beta left at 1e-3
    flags = ("--stepz=3", "--mode=fly", "--config=nowhere.py", "train", "--num_processes=two")
    if generator.random() < 0.1:
        return Override((generator.choice(flags),), False)
    return Override((f"--config.{generator.choice(list(mistakes.values()))}",), False)


def _misspelt(key: str, generator: random.Random) -> str:
    position = generator.randrange(len(key))
    wrong = key[:position] + generator.choice("qxz_") + key[position:]
    return wrong if wrong not in SCHEMA else f"{wrong}q"


def _below(low: float, positive: bool) -> str:
    return "0" if positive and low == 0 else str(int(low) - 1)


def data(where: Path, trials: int, generator: random.Random) -> Outcome:
    """6: data that is missing, cut short, of wrong shape, type, label or checksum."""
    arrays = _small_cifar10()
    with _known(arrays):
        source = where / "good.npz"
        np.savez(source, allow_pickle=False, **_named(arrays))
        control = _prepare(source, where / "good")[0] == 0
        verdicts = [
            _refused(where / f"bad{trial}", arrays, source, generator) for trial in range(trials)
        ]
    return outcome(verdicts, control)


Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def _small_cifar10() -> Arrays:
    generator = np.random.default_rng(0)
    return {
        split: (
            generator.integers(0, 256, (n, 32, 32, 3), np.uint8),
            np.arange(n, dtype=np.uint8) % 10,
        )
        for split, n in (("train", 40), ("test", 20))
    }


def _named(arrays: Arrays) -> dict[str, np.ndarray]:
    return {
        "x_train": arrays["train"][0],
        "y_train": arrays["train"][1],
        "x_test": arrays["test"][0],
        "y_test": arrays["test"][1],
    }


@contextlib.contextmanager
def _known(arrays: Arrays):  # type: ignore[no-untyped-def]
    """For the time being these arrays are CIFAR-10."""
    before = dict(known.KNOWN_SPLITS["cifar10"])
    for split, (x, y) in arrays.items():
        digests = sha256_of_array(x), sha256_of_array(y)
        known.KNOWN_SPLITS["cifar10"][split] = known.KnownSplit(len(y), len(y), *digests)
    try:
        yield
    finally:
        known.KNOWN_SPLITS["cifar10"].update(before)


def _prepare(source: Path, data_dir: Path) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = prepare.main(["cifar10", f"--from={source}", f"--data_dir={data_dir}"])
    return code, said.getvalue()


def _refused(where: Path, arrays: Arrays, good: Path, generator: random.Random) -> Verdict:
    where.mkdir()
    source = where / f"source{generator.choice(['.npz', '.tgz', '.tar.gz', '.bin'])}"
    kind = generator.choice(
        ["missing", "empty", "cut", "flipped", "shape", "type", "label", "other", "noise"]
    )
    content = good.read_bytes()
    named = _named(arrays)
    if kind == "empty":
        source.touch()
    elif kind == "cut":
        source.write_bytes(content[: generator.randrange(len(content))])
    elif kind == "flipped":
        _flip_inside(good, source, generator)
    elif kind == "noise":
        source.write_bytes(generator.randbytes(generator.randrange(1, 5000)))
    elif kind != "missing":
        changed = {
            "shape": {"x_train": named["x_train"][:, :-1]},
            "type": {"x_train": named["x_train"].astype(np.float32)},
            "label": {"y_train": np.full_like(named["y_train"], 10)},
            "other": {"x_train": named["x_train"] ^ 1},
        }[kind]
        source = where / "source.npz"
        np.savez(source, allow_pickle=False, **(named | changed))
    code, text = _prepare(source, where / "prepared")
    case = f"{kind} {source.name}"
    if code == 0:
        return Verdict(f"{case}: accepted", silent=True)
    if code != 2 or "Traceback" in text or len(text.strip().splitlines()) != 1:
        return Verdict(f"{case}: exit {code}: {text[-200:]}")
    if list((where / "prepared").rglob("dataset_info.json")):
        return Verdict(f"{case}: left something that looks prepared", silent=True)
    return Verdict()


def _flip_inside(good: Path, bad: Path, generator: random.Random) -> None:
    """One bit of an array's bytes, below the archive's own checksum."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(bad, "w") as new:
        victim = generator.choice(old.namelist())
        for name in old.namelist():
            content = bytearray(old.read(name))
            if name == victim:
                position = generator.randrange(8 * 128, 8 * len(content))
                content[position // 8] ^= 1 << position % 8
            new.writestr(name, bytes(content))
