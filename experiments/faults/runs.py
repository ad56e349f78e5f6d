"""Training processes the campaign breaks, and what they leave behind."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mass_jax import checkpoint

ROOT = Path(__file__).parent.parent.parent
STEPS = 120
# Small and awkward: events that do not divide each other, and much to be killed in.
SMALL = (
    "--config.train_size=150",
    "--config.batch_size=32",
    f"--config.steps={STEPS}",
    "--config.dropout_rate=0.1",
    "--config.steps_per_dispatch=5",
    "--config.log_every=3",
    "--config.eval_every=30",
    "--config.checkpoint_every=20",
    "--config.eval_batch_size=100",
)


# Everything compiled is kept: hundreds of processes run the same few programs.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


class Outcome(NamedTuple):
    """One row of the campaign.

    Attributes:
      trials: faults injected.
      survived: those that ended as they must.
      silent: those that ended wrong without a word.
      control: whether the same without a fault ended well.
      problems: what went wrong, in words.
    """

    trials: int
    survived: int
    silent: int
    control: bool
    problems: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """What became of one trial: ``""`` is survival."""

    problem: str = ""
    silent: bool = False


def outcome(verdicts: Sequence[Verdict], control: bool) -> Outcome:
    """The verdicts of one fault, counted."""
    problems = tuple(v.problem for v in verdicts if v.problem)
    silent = sum(v.silent for v in verdicts)
    return Outcome(len(verdicts), len(verdicts) - len(problems), silent, control, problems[:20])


class Leftover(NamedTuple):
    """Everything of a run that must be equal to the bit."""

    arrays: dict[str, bytes]
    rows: list[dict[str, Any]]
    results: dict[str, Any]


def leftover(workdir: Path) -> Leftover:
    """Parameters, optimiser state, statistics, metric rows and results; no clock times."""
    found = checkpoint.restore_latest(workdir / "checkpoints")
    if found is None:
        raise FileNotFoundError(f"{workdir}: no good checkpoint")
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["examples_per_second"]
    results = json.loads((workdir / "results.json").read_text())
    for clock in ("train_seconds", "evaluation_seconds", "checkpoint_sha256"):
        del results[clock]
    arrays = {name: np.asarray(a).tobytes() for name, a in found.arrays.items()}
    return Leftover(arrays, rows, results)


def compare(workdir: Path, expected: Leftover, case: str) -> Verdict:
    """Whether a run that says it finished is the unbroken one, bit by bit."""
    try:
        found = leftover(workdir)
    except (OSError, ValueError, KeyError) as error:
        return Verdict(f"{case}: finished without its files: {error}", silent=True)
    for field in Leftover._fields:
        if getattr(found, field) != getattr(expected, field):
            return Verdict(f"{case}: {field} differ from the unbroken run", silent=True)
    return Verdict()


def rerun(workdir: Path, expected: Leftover, case: str) -> Verdict:
    """The same command again, without a fault: it must end as the unbroken run."""
    code, text = run(workdir)
    return compare(workdir, expected, case) if code == 0 else failure(case, code, text)


def failure(case: str, code: int, text: str) -> Verdict:
    """A run that should have ended otherwise; without a word if it says it went well."""
    return Verdict(f"{case}: exit {code}: {text[-200:]}", silent=code == 0)


def start(
    workdir: Path,
    arguments: Iterable[str] = (),
    inject: str | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    """A training process, with a fault injected into it if so wished."""
    module = ("experiments.faults.injection", inject) if inject else ("mass_jax.main",)
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `finish`
    process = subprocess.Popen(
        [sys.executable, "-m", *module, "--quiet", *SMALL, f"--workdir={workdir}", *arguments],
        cwd=ROOT,
        env=os.environ | _ENVIRONMENT | (environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=log,
        text=True,
    )
    process.stderr = log
    return process


def finish(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str]:
    """Exit code (128 + n for signal n, as shells say it) and what it printed."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = 1000
    assert process.stderr is not None
    process.stderr.seek(0)
    text = process.stderr.read()
    process.stderr.close()
    return (code if code >= 0 else 128 - code), text


def run(workdir: Path, *arguments: str, inject: str | None = None) -> tuple[int, str]:
    """A whole training process."""
    return finish(start(workdir, arguments, inject))


def wait_until(condition: Any, process: subprocess.Popen[str]) -> None:
    """Until the condition holds or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)


def is_one_line(text: str) -> bool:
    """An error a user can read: one line that begins with 'error:', and no traceback."""
    lines = [line for line in text.strip().splitlines() if line]
    return "Traceback" not in text and bool(lines) and lines[-1].startswith("error:")
