"""``python -m experiments.faults --json=FILE``: break everything that can break, and look.

Every fault has a control without one. The short form (``--trials=N`` for all) is part of the
tests; the long one takes about an hour on 2 cores.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.faults import files, inputs, processes
from experiments.faults.runs import Outcome
from experiments.provenance import recorded
from mass_jax.command_line import Parser
from mass_jax.run_log import environment, write_atomically


class Fault(NamedTuple):
    """A row of the list: its number, its name, how to try it, trials of the long campaign."""

    number: int
    name: str
    attempt: Callable[[Path, int, random.Random], Outcome]
    trials: int


FAULTS = (
    Fault(1, "kill", processes.kill, 50),
    Fault(2, "signals", processes.signals, 48),
    Fault(3, "corruption", files.corruption, 300),
    Fault(4, "numerics", processes.numerics, 12),
    Fault(5, "overrides", inputs.overrides, 1000),
    Fault(6, "data", inputs.data, 100),
    Fault(7, "disks", processes.disks, 12),
    Fault(8, "workdir", processes.wrong_workdir, 12),
    Fault(9, "devices", processes.devices, 4),
    Fault(10, "companions", processes.companions, 6),
    Fault(11, "malicious", files.malicious, 24),
    Fault(12, "environment", processes.clean_environment, 1),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    names = [fault.name for fault in FAULTS]
    parser = Parser(prog="python -m experiments.faults", description=__doc__)
    parser.add_argument("--trials", type=int, help="of every fault; default: the long campaign")
    parser.add_argument("--only", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, required=True, help="gets the outcome; other rows in it are kept"
    )
    options = parser.parse_args(argv)
    if not options.json.parent.is_dir():  # better now than after an hour
        print(f"error: --json={options.json}: there is no such directory", file=sys.stderr)
        return 2
    wanted = options.only.split(",")
    unknown = sorted(set(wanted) - set(names))
    if unknown or (options.trials is not None and options.trials < 1):
        what = f"--only={unknown[0]}" if unknown else f"--trials={options.trials}"
        print(f"error: {what}: choose of {', '.join(names)}, at least one trial", file=sys.stderr)
        return 2
    try:
        kept = dict(json.loads(options.json.read_text())["faults"]) if options.json.exists() else {}
    except (OSError, ValueError, KeyError, TypeError):
        print(f"error: --json={options.json}: holds no outcome of this command", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    made_on = recorded(environment())
    print(f"{'fault':<14}{'trials':>8}{'survived':>10}{'silent':>8}  control  seconds")
    for fault in FAULTS:
        if fault.name not in wanted:
            continue
        began = time.monotonic()
        # Each fault has a generator of its own: --only repeats what the whole did.
        generator = random.Random(1000 * options.seed + fault.number)
        with tempfile.TemporaryDirectory() as scratch:
            found = fault.attempt(Path(scratch), options.trials or fault.trials, generator)
        seconds = time.monotonic() - began
        control = "passed" if found.control else "FAILED"
        print(
            f"{fault.name:<14}{found.trials:>8}{found.survived:>10}{found.silent:>8}  "
            f"{control:<8}{seconds:>8.0f}",
            flush=True,
        )
        for problem in found.problems:
            print(f"    {problem}", flush=True)
        rows[fault.name] = {"number": fault.number, **found._asdict(), "seconds": seconds}
        rows[fault.name] |= {"seed": options.seed, "commit": made_on["commit"]}
        in_order = {f.name: (kept | rows)[f.name] for f in FAULTS if f.name in kept | rows}
        made = {"faults": in_order, "environment": made_on}
        write_atomically(options.json, json.dumps(made, indent=2) + "\n")
    good = all(row["control"] and row["survived"] == row["trials"] for row in rows.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
