"""``python -m experiments.start_up --json=FILE``: seconds from the command to the first step.

Trains MASS with ResNet20 as a user would, with an empty compilation cache (cold) and with the one
that run left (warm), for both definitions of the Jacobian, and stops each run after its first
step. On CIFAR-10 where it is prepared, else on the digits that ship with scikit-learn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cells import RESULTS
from experiments.provenance import recorded
from mass_jax.command_line import Parser, positive
from mass_jax.data import DataError, load_dataset
from mass_jax.options import CONFIG_DIR
from mass_jax.run_log import environment, write_atomically

START_UP = RESULTS / "start_up.json"
_CONFIG = str(CONFIG_DIR / "mass_resnet20.py")
_FIRST_STEP = "step "  # how the first line of progress begins
_DIGITS = ("data.name=digits", "data.ood=", "train_size=900", "data.validation_size=100")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.start_up", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=3, help="warm starts of each")
    parser.add_argument("--data_dir", help="as --config.data.dir")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    if not options.json.absolute().parent.is_dir():
        parser.error(f"--json={options.json}: no such directory")
    data, changes = _data(options.data_dir)
    made: dict[str, Any] = {"data": data, "environment": recorded(environment())}
    for definition in ("frozen", "paper"):
        made[definition] = measure(
            [*changes, f"jacobian.batch_stats={definition}"], options.repeats
        )
        cold, warm = made[definition]["cold_s"], made[definition]["warm_s"]
        print(f"{definition}: first step after {cold:.1f} s cold, {warm:.1f} s warm", flush=True)
    write_atomically(options.json, json.dumps(made, indent=2) + "\n")
    return 0


def _data(data_dir: str | None) -> tuple[str, list[str]]:
    """What to train on here, and what that changes in the config."""
    try:
        load_dataset("cifar10", data_dir, ())  # also decodes it once, which a start does not
    except DataError:
        return "digits", [*_DIGITS]
    return "cifar10", ["data.ood="] + ([] if data_dir is None else [f"data.dir={data_dir}"])


def measure(changes: Sequence[str], repeats: int, config: str = _CONFIG) -> dict[str, Any]:
    """Seconds to the first step: once from nothing, then with everything compiled.

    Args:
      changes: ``key=value`` of the config.
      repeats: warm starts, of which the median counts.
      config: its file.
    """
    with tempfile.TemporaryDirectory() as cache:
        cold = _seconds_to_first_step(changes, config, cache)
        warm = [_seconds_to_first_step(changes, config, cache) for _ in range(repeats)]
    return {"cold_s": cold, "warm_s": statistics.median(warm), "warm_all_s": warm}


def _seconds_to_first_step(changes: Sequence[str], config: str, cache: str) -> float:
    set_here = {"XDG_CACHE_HOME": cache}
    inherited = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *(sys.executable, "-m", "mass_jax.main", f"--config={config}"),
            f"--workdir={scratch}/run",
            *(f"--config.{change}" for change in changes),
        ]
        began = time.perf_counter()
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | set_here,
        ) as process:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith(_FIRST_STEP):
                    seconds = time.perf_counter() - began
                    process.kill()
                    return seconds
    raise RuntimeError(f"training ended before its first step: {''.join(said).strip()}")


def as_markdown(file: Path = START_UP) -> str:
    """The recorded seconds, as Markdown."""
    made = json.loads(file.read_text())
    rows = [
        f"| {definition} | {made[definition]['cold_s']:.1f} | {made[definition]['warm_s']:.1f} |"
        for definition in ("frozen", "paper")
    ]
    head = ["| Jacobian | s, nothing compiled | s, everything compiled |", "|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
