"""What a run leaves for people: metric rows, TensorBoard, progress, environment."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from mass_jax.progress import SECONDS_BETWEEN_LINES, time_left

_SECONDS_TO_FIRST_RATE = 2.0
METRICS_FILE = "metrics.jsonl"
# Metrics of a step that are not loss terms, in the order in which a cause should be named.
NOT_LOSS_TERMS = ("accuracy", "learning_rate", "loss", "gradient_norm", "parameter_norm")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scikit-learn")


class RunLog:
    """Writes ``metrics.jsonl`` and TensorBoard files, and shows progress.

    Rows after ``start_step`` are of a continuation that was lost; they are cut off,
    so that the file reads as if the run had never stopped.
    """

    def __init__(self, workdir: Path, start_step: int, total_steps: int, quiet: bool) -> None:
        path = workdir / METRICS_FILE
        _keep_rows_until(path, start_step)
        self._stream = path.open("a")
        self._workdir, self._start_step = workdir, start_step
        self._board: Any = None  # tensorboardX.SummaryWriter, from the first row on
        console = Console(stderr=True)
        self._total, self._quiet = total_steps, quiet
        self._next_line = 0.0
        self._is_first_block = True  # whose time is mostly compilation
        self._bar = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=console,
            )
            self._task = self._bar.add_task(
                "training", total=total_steps, completed=start_step, status=""
            )

    def __enter__(self) -> "RunLog":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._stream.close()
        if self._board is not None:
            self._board.close()

    def row(self, row: dict[str, Any]) -> None:
        """Appends one row; it is on disk when this returns."""
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        board = self._opened_board()
        for name, value in row.items():
            if name != "step":
                board.add_scalar(name, value, row["step"])

    def _opened_board(self) -> Any:
        if self._board is None:
            # Imported here: where PyTorch is installed it comes along, which takes a second.
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(
                str(self._workdir / "tensorboard"),
                purge_step=self._start_step + 1,
                write_to_disk=True,
            )
        return self._board

    def progress(self, step: int, loss: float, steps_per_second: float) -> None:
        """Moves the bar, or prints a line now and then where there is no terminal."""
        digits = ",.0f" if steps_per_second >= 100 else ".3g"
        status = f"loss {loss:.4f}  {steps_per_second:{digits}} steps/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif not self._quiet and (time.monotonic() >= self._next_line or step == self._total):
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            rest = status
            if self._is_first_block and step < self._total:
                rest = f"loss {loss:.4f}  compiled"
                self._next_line = time.monotonic() + _SECONDS_TO_FIRST_RATE
            elif step < self._total:
                rest += f"  {time_left((self._total - step) / max(steps_per_second, 1e-9))}"
            print(f"step {step:,}/{self._total:,}  {rest}", file=sys.stderr, flush=True)
        self._is_first_block = False


def _keep_rows_until(path: Path, step: int) -> None:
    """Drops rows after ``step`` and a last line that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # half a line
    write_atomically(path, "".join(f"{line}\n" for line in kept))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step: readers see the old content or the new."""
    scratch = path.with_name(f".{path.name}.writing")
    with scratch.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(scratch, path)


def environment() -> dict[str, Any]:
    """Versions, devices, commit and command of this process."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "processes": jax.process_count(),
        "cpu_count": os.cpu_count(),
        "commit": _git_commit(),
        "command": _typed_command(),
    }


def _typed_command() -> list[str]:
    """This process's command as somebody typed it, but for the directory of its program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:  # python -m: argv[0] has become the file of the module
        return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    program = Path(sys.argv[0]).name
    return [*(["python"] if program.endswith(".py") else []), program, *sys.argv[1:]]


def _git_commit() -> str | None:
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None  # an installed wheel, maybe inside somebody else's repository
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git
    return done.stdout.strip()
