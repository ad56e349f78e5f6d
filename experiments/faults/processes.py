"""Faults of running processes: kills, signals, numerics, disks, devices, companions."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from experiments.faults.injection import POSITIONS
from experiments.faults.runs import (
    ROOT,
    STEPS,
    Leftover,
    Outcome,
    Verdict,
    compare,
    failure,
    finish,
    is_one_line,
    leftover,
    outcome,
    rerun,
    run,
    start,
    wait_until,
)
from mass_jax import checkpoint


def kill(where: Path, trials: int, generator: random.Random) -> Outcome:
    """1: kill -9 at random moments, several per run; the same command again."""
    began = time.monotonic()
    control = run(where / "whole")[0] == 0
    whole, seconds = leftover(where / "whole"), time.monotonic() - began
    verdicts: list[Verdict] = []
    while len(verdicts) < trials:
        workdir = where / f"killed{len(verdicts)}"
        pending = 0
        # Up to four kills, then it may finish; a run that finishes early ends the round.
        for _ in range(4):
            process = start(workdir)
            time.sleep(generator.uniform(0, 0.9 * seconds))
            if process.poll() is None:
                process.kill()
                pending += 1
            if finish(process)[0] == 0:
                break
        verdicts += [rerun(workdir, whole, "kill -9")] * pending
        shutil.rmtree(workdir, ignore_errors=True)
    return outcome(verdicts, control)


def signals(where: Path, trials: int, generator: random.Random) -> Outcome:
    """2: SIGTERM and SIGINT at every position of a run, once and twice."""
    control = run(where / "whole")[0] == 0
    whole = leftover(where / "whole")
    cases = [
        (position, name, twice)
        for position in POSITIONS
        for name in ("SIGTERM", "SIGINT")
        for twice in ("", ":twice")
    ]
    if trials < len(cases):
        cases = generator.sample(cases, trials)
    return outcome([_signalled(where, *case, whole) for case in cases], control)


def _signalled(where: Path, position: str, name: str, twice: str, whole: Leftover) -> Verdict:
    case = f"{name} at {position}{twice}"
    workdir = where / case.replace(" ", "_").replace(":", "_")
    code, text = run(workdir, inject=f"signal:{position}:{name}{twice}")
    if code != 128 + getattr(signal, name) or "Traceback" in text:
        return failure(case, code, text)
    started = position not in ("load", "initialise", "log")
    if started and not twice and checkpoint.restore_latest(workdir / "checkpoints") is None:
        return Verdict(f"{case}: no checkpoint was saved")
    return rerun(workdir, whole, case)


def numerics(where: Path, trials: int, generator: random.Random) -> Outcome:
    """4: NaN in parameters, q, statistics or optimiser: stops, names it, saves nothing of it."""
    control = run(where / "whole")[0] == 0
    verdicts = []
    for trial in range(trials):
        part = ("network", "head", "batch_stats", "opt_state")[trial % 4]
        step = generator.randrange(1, STEPS + 1)
        workdir = where / f"nan{trial}"
        code, text = run(workdir, inject=f"nan:{part}:{step}")
        case = f"NaN in {part} at step {step}"
        found = checkpoint.restore_latest(workdir / "checkpoints")
        arrays = [] if found is None else list(found.arrays.values())
        if not all(np.isfinite(a).all() for a in arrays if a.dtype.kind == "f"):
            verdicts.append(Verdict(f"{case}: was saved", silent=True))
        elif code != 1 or f"step {step}:" not in text or not is_one_line(text):
            verdicts.append(failure(case, code, text))
        else:
            verdicts.append(Verdict())
    return outcome(verdicts, control)


def disks(where: Path, trials: int, generator: random.Random) -> Outcome:
    """7: an unwritable workdir; a disk that fills up in the middle of the run."""
    control = run(where / "whole")[0] == 0
    whole = leftover(where / "whole")
    verdicts = []
    for trial in range(trials):
        workdir = where / f"disk{trial}"
        kind = trial % 3
        if kind == 0:  # root may write anywhere, but not into a file
            workdir.write_text("not a directory")
            code, text = run(workdir / "run")
            good = code == 2 and is_one_line(text) and workdir.read_text() == "not a directory"
            verdicts.append(Verdict() if good else failure("unwritable", code, text))
            continue
        inject = f"full:{generator.randint(2, 5)}" if kind == 1 else "limit:20000"
        code, text = run(workdir, inject=inject)
        # Where writing fails inside orbax, its threads print tracebacks around our line.
        ours = [line for line in text.splitlines() if line.startswith("error:")]
        if code == 0 or not is_one_line("\n".join(ours) if kind == 2 else text):
            verdicts.append(failure(inject, code, text))
            continue
        if kind == 1 and checkpoint.restore_latest(workdir / "checkpoints") is None:
            verdicts.append(Verdict(f"{inject}: the good checkpoint is gone"))
            continue
        verdicts.append(rerun(workdir, whole, inject))  # there is room again
    return outcome(verdicts, control)


def wrong_workdir(where: Path, trials: int, generator: random.Random) -> Outcome:
    """8: another configuration in the same workdir; two processes in one."""
    workdir = where / "whole"
    control = run(workdir)[0] == 0
    whole = leftover(workdir)
    changes = [f"--config.{change}" for change in ("seed=1", "beta=0.5", "batch_size=16")]
    verdicts = []
    for trial in range(trials):
        if trial % 2 == 0:
            change = generator.choice(changes)
            code, text = run(workdir, change)
            key = change.split("=")[0].lstrip("-")
            good = code == 2 and is_one_line(text) and key in text
            verdicts.append(
                compare(workdir, whole, change) if good else failure(change, code, text)
            )
            continue
        shared = where / f"shared{trial}"
        first = start(shared)
        wait_until(lambda d=shared: (d / "metrics.jsonl").exists(), first)
        os.kill(first.pid, signal.SIGSTOP)  # it holds the lock, and is not done
        code, text = run(shared)
        os.kill(first.pid, signal.SIGCONT)
        refused = code == 2 and is_one_line(text) and "is writing to it" in text
        ended = finish(first)[0]
        if not refused or ended != 0:
            verdicts.append(failure(f"two writers, the first ended with {ended}", code, text))
        else:
            verdicts.append(compare(shared, whole, "two writers"))
    return outcome(verdicts, control)


_DEVICES = "--xla_force_host_platform_device_count="
_TOLERANCE = 2e-3  # relative to the largest entry, or to one
_NULL_DIRECTION = STEPS * 1e-3  # biases in front of BatchNorm: full Adam steps of pure rounding


def devices(where: Path, trials: int, generator: random.Random) -> Outcome:
    """9: 1, 2 and 8 devices, same seed: the same run to a stated tolerance."""
    del generator
    control = run(where / "one")[0] == 0
    one = checkpoint.restore_latest(where / "one" / "checkpoints")
    assert one is not None
    verdicts = []
    for trial in range(min(trials, 4)):
        count, parallel = (2, 8)[trial % 2], ("pmap", "shard_map")[trial // 2]
        workdir = where / f"{parallel}{count}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}{count}"
        process = start(workdir, [f"--config.parallel={parallel}"], None, {"XLA_FLAGS": flags})
        code, text = finish(process)
        many = checkpoint.restore_latest(workdir / "checkpoints")
        if code != 0 or many is None:
            verdicts.append(failure(f"{count} devices", code, text))
            continue
        worst = max(
            float(np.max(np.abs(many.arrays[name] - a)) / max(1.0, np.max(np.abs(a))))
            / (_NULL_DIRECTION if name.endswith((".mean", ".bias")) else _TOLERANCE)
            for name, a in one.arrays.items()
            if name.startswith("params.")
        )
        problem = f"{count} devices, {parallel}: {worst:.2g} times the tolerance"
        verdicts.append(Verdict() if worst <= 1 else Verdict(problem, silent=True))
    return outcome(verdicts, control)


# What happens to one of two processes, and to which.
_COMPANIONS = [
    (signal.SIGKILL, 0),
    (signal.SIGTERM, 1),
    (signal.SIGKILL, 1),
    (signal.SIGINT, 0),
    (signal.SIGTERM, 0),
    (signal.SIGINT, 1),
]


def companions(where: Path, trials: int, generator: random.Random) -> Outcome:
    """10: one of two processes is killed: the other ends. One is asked to stop: both do."""
    ends = [finish(process) for process in _two_processes(where / "whole")]
    control = all(code == 0 for code, _ in ends)
    whole = leftover(where / "whole")
    verdicts = []
    for trial in range(trials):
        signum, victim = _COMPANIONS[trial % len(_COMPANIONS)]
        case = f"{signum.name} to process {victim} of two"
        workdir = where / f"lost{trial}"
        processes = _two_processes(workdir)
        rows = workdir / "metrics.jsonl"
        wanted = generator.randint(1, 20)  # of 40: still some way to go
        wait_until(
            lambda r=rows, n=wanted: r.exists() and r.read_text().count("\n") >= n, processes[0]
        )
        processes[victim].send_signal(signum)
        left = finish(processes[1 - victim], 150), finish(processes[victim], 150)
        problem = _wrong_end_of_companions(signum, *left)
        if problem:
            ended_well = 0 in (left[0][0], left[1][0])
            verdicts.append(Verdict(f"{case}: {problem}", silent=ended_well))
            continue
        ends = [finish(process) for process in _two_processes(workdir)]
        if any(code != 0 for code, _ in ends):
            verdicts.append(failure(f"{case}, resumed", *max(ends)))
        else:
            verdicts.append(compare(workdir, whole, case))
    return outcome(verdicts, control)


def _two_processes(workdir: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [start(workdir, [*cluster, f"--process_id={i}"]) for i in range(2)]


def _wrong_end_of_companions(
    signum: signal.Signals, other: tuple[int, str], victim: tuple[int, str]
) -> str:
    """What is wrong with how both ended; nothing, where nothing is."""
    if signum == signal.SIGKILL:  # 1000 is ours: it had to be ended
        return f"the other one ended with {other[0]}: {other[1]}" if other[0] in (0, 1000) else ""
    if {other[0], victim[0]} != {128 + signum}:
        return f"exit codes {other[0]} and {victim[0]}: {other[1]} {victim[1]}"
    stops = {
        tuple(re.findall(r"(at step \d+|after the last step); checkpoint saved", text))
        for _, text in (other, victim)
    }
    return "" if len(stops) == 1 and stops != {()} else f"stopped {stops}"


def clean_environment(where: Path, trials: int, generator: random.Random) -> Outcome:
    """12: a new environment from the lock, hashes required, runs the bundled experiment."""
    del generator
    verdicts = []
    for trial in range(min(trials, 1)):
        venv = where / f"venv{trial}"
        steps = [
            [sys.executable, "-m", "venv", str(venv)],
            [
                f"{venv}/bin/pip",
                "install",
                "-q",
                "--no-deps",
                "--require-hashes",
                "-r",
                "requirements.txt",
            ],
            [
                f"{venv}/bin/python",
                "-m",
                "mass_jax.main",
                f"--workdir={where}/run{trial}",
            ],
        ]
        for step in steps:
            done = subprocess.run(step, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                verdicts.append(Verdict(f"{step[1:4]}: {done.stderr[-300:]}"))
                break
        else:
            results = json.loads((where / f"run{trial}" / "results.json").read_text())
            good = results["accuracy"] > 0.97
            verdicts.append(Verdict() if good else Verdict("does not learn", silent=True))
    # The control: a tampered lock must be refused. All hashes: one that fits is enough for pip.
    lock = (ROOT / "requirements.txt").read_text()
    bad = where / "tampered.txt"
    bad.write_text(re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", lock))
    refused = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes",
         "-d", str(where / "wheels"), "-r", str(bad)],
        capture_output=True, check=False,
    )  # fmt: skip
    return outcome(verdicts, refused.returncode != 0)
