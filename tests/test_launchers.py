"""Launchers: cells lose their workers, their parents and their time, and are recorded once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import cells, launchers, running, sweep

ROOT = cells.HERE.parent
CELL = "small_mlp-softmax_ce-n900-seed0-steps3000"
FAILING = "small_mlp-vib-beta0.001-n900-seed0-steps3000"
# A sweep of two cells on digits, one of which has no luck.
TINY_SWEEP = """
import sys
from experiments import cells, running, sweep
chosen = [
    cells.Cell('small_mlp', 'softmax_ce', 0.0, False, False, 900, 0, steps=3000),
    cells.Cell('small_mlp', 'vib', 1e-3, False, False, 900, 0, steps=3000),
]
cells.Cell.config_file = 'configs/softmax_ce_digits.py'
train = running.command
fail = [sys.executable, '-c', 'raise SystemExit("no luck")']
running.command = lambda cell, *places: fail if cell.method == 'vib' else train(cell, *places)
sweep.paper_cells = lambda *arguments: chosen
sweep.minutes_by_cell = lambda waiting: dict.fromkeys(waiting, 1.0)
sys.exit(sweep.main(sys.argv[1:]))
"""


class Sweep:
    """A sweep of real processes in a directory of its own."""

    def __init__(self, directory, *options, ray_directory=None):
        self.work, self.results = directory / "work", directory / "results"
        self.run, self.output = self.work / CELL, directory / "output.txt"
        self.command = [
            sys.executable, "-c", TINY_SWEEP, "--network=small_mlp", f"--workdir={self.work}",
            f"--results={self.results}", *options,
        ]  # fmt: skip
        self.environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if ray_directory is not None:
            self.environment |= {"RAY_TMPDIR": ray_directory}
        directory.mkdir(exist_ok=True)

    def start(self, command=None):
        with self.output.open("a") as log:
            return subprocess.Popen(
                command or self.command, cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )

    def rows(self):
        path = self.run / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_rows(self, count, process):
        """Until the training has logged as many; returns the process that trains."""
        wait_until(lambda: len(self.rows()) >= count or process.poll() is not None)
        assert process.poll() is None, self.output.read_text()
        return int((self.run / ".lock").read_text().split()[1])

    def record(self):
        return json.loads((self.results / f"{CELL}.json").read_text())


def wait_until(is_so, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_mentioning(text):
    """Process ids by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(path.parent.name)] if text in path.read_text() else []
        except OSError:
            continue  # it has ended meanwhile
    return found


def assert_same_results(record, other):
    for key in ("accuracy", "nll", "ood", "config_hash", "data_sha256"):
        assert record[key] == other[key]


def assert_rows_once(rows):
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3000


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record of the same sweep, run here from beginning to end."""
    made = Sweep(tmp_path_factory.mktemp("undisturbed") / "sweep")
    process = made.start()
    assert process.wait(180) == 1, made.output.read_text()  # one cell has no luck
    return made.record()


@pytest.fixture
def ray_directory():
    """A short path, because Ray's sockets are in it; nothing of Ray may be left at the end."""
    directory = tempfile.mkdtemp(prefix="ray")
    yield directory
    wait_until(lambda: not processes_mentioning(directory), seconds=30)
    shutil.rmtree(directory)


def is_pending(pid, signum):
    """Whether a stopped process will meet this signal when it goes on."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"ShdPnd:\s*(\w+)", status)[1], 16) >> (signum - 1) & 1)


@pytest.mark.slow
def test_ray_stops_and_a_killed_worker_is_retried(undisturbed, ray_directory, tmp_path):
    """Oracle: the undisturbed run; one record of the cell, every metric row once.

    First the sweep is ended by SIGTERM, then it goes on and its Ray worker is killed by SIGKILL.
    """
    pytest.importorskip("ray")
    made = Sweep(tmp_path / "sweep", "--launcher=ray", ray_directory=ray_directory)
    process = made.start()
    training = made.wait_for_rows(5, process)
    os.kill(training, signal.SIGSTOP)  # or it might be done before Ray has passed the word on
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: is_pending(training, signal.SIGTERM), seconds=60)
    os.kill(training, signal.SIGCONT)
    assert process.wait(60) == 143, made.output.read_text()
    assert not is_running(training)
    assert list((made.run / "checkpoints").iterdir())  # it saved: the first regular one is later
    assert not made.results.exists()

    process = made.start()
    training = made.wait_for_rows(len(made.rows()) + 15, process)
    os.kill(parent_of(training), signal.SIGKILL)
    wait_until(lambda: not is_running(training), seconds=20)  # no orphan
    assert process.wait(180) == 1, made.output.read_text()
    assert [path.stem for path in made.results.iterdir()] == [CELL]
    assert (made.work / f"{FAILING}.failed").read_text().startswith("(1): no luck")
    assert made.output.read_text().count("accuracy") == 1
    assert int((made.run / ".lock").read_text().split()[1]) != training
    first_step = re.search(r"step ([\d,]+)/", (made.work / f"{CELL}.log").read_text())[1]
    assert int(first_step.replace(",", "")) > 200  # where it was stopped first, at the earliest
    assert_same_results(made.record(), undisturbed)
    assert_rows_once(made.rows())


class DeafRay:
    """What the launcher uses of Ray, with tasks as threads that no cancellation reaches."""

    exceptions = SimpleNamespace(TaskCancelledError=TimeoutError, RayError=OSError)

    def __init__(self):
        self.pool = futures.ThreadPoolExecutor()
        self.asked = threading.Event()

    def remote(self, **resources):
        start = lambda f: lambda *args, **options: self.pool.submit(f, *args, **options)
        return lambda f: SimpleNamespace(options=lambda name: SimpleNamespace(remote=start(f)))

    def cluster_resources(self):
        return {"CPU": 1}

    def cancel(self, reference):
        self.asked.set()

    def wait(self, references, timeout):
        done, waiting = futures.wait(references, timeout, futures.FIRST_COMPLETED)
        return list(done), list(waiting)

    def get(self, reference):
        return reference.result()


def test_tasks_that_ray_does_not_reach_stop_too(tmp_path, monkeypatch):
    """Oracle: the exit code of a process that is asked to stop, and would sleep for an hour."""
    cell = cells.Cell("small_mlp", "softmax_ce", 0.0, False, False, 900, 0)
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    monkeypatch.setattr(running, "command", lambda *arguments: sleep)
    monkeypatch.setattr(launchers, "_SECONDS_FOR_RAY_TO_CANCEL", 0.1)
    options = SimpleNamespace(
        workdir=tmp_path, data_dir=None, cpus_per_cell=1, gpus_per_cell=0, max_minutes=0.001
    )
    ray, stop = DeafRay(), SimpleNamespace(signum=0)
    assert launchers._run_tasks(ray, [cell], {cell: 1.0}, options, stop) == []
    assert ray.asked.is_set()
    assert not (tmp_path / launchers._STOP_FILE).exists()  # the same command can go on


def test_a_killed_sweep_leaves_no_training_behind(undisturbed, tmp_path):
    """Oracle: the undisturbed run, and the process table."""
    made = Sweep(tmp_path / "sweep")
    process = made.start()
    training = made.wait_for_rows(5, process)
    process.kill()
    process.wait()
    process = made.start()  # at once: the old training may still be there
    assert process.wait(180) == 1, made.output.read_text()
    assert not is_running(training)
    assert_same_results(made.record(), undisturbed)
    assert_rows_once(made.rows())


def test_without_ray_one_line_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sweep, "minutes_by_cell", lambda chosen: dict.fromkeys(chosen, 1.0))
    arguments = ["--network=small_mlp", f"--workdir={tmp_path}", f"--results={tmp_path}"]
    assert sweep.main([*arguments, "--launcher=ray"]) == 2
    assert capsys.readouterr().err == (
        "error: --launcher=ray needs Ray: pip install 'mass-jax[ray]'\n"
    )


def slurm_script(tmp_path, monkeypatch, capsys, python, *options):
    """The text and path of the script of a sweep of two cells."""
    chosen = [
        cells.Cell("small_mlp", method, beta, False, False, 900, 0, steps=3000)
        for method, beta in (("softmax_ce", 0.0), ("vib", 1e-3))
    ]
    monkeypatch.setattr(sweep, "paper_cells", lambda *arguments: chosen)
    monkeypatch.setattr(sweep, "minutes_by_cell", lambda waiting: dict.fromkeys(waiting, 1.0))
    monkeypatch.setattr(launchers.sys, "executable", str(python))
    arguments = ["--network=small_mlp", f"--workdir={tmp_path / 'work'}", "--launcher=slurm"]
    assert sweep.main([*arguments, f"--results={tmp_path / 'results'}", *options]) == 0
    monkeypatch.undo()
    path = tmp_path / "work" / "sweep.sbatch"
    assert f"sbatch {path}" in capsys.readouterr().out.splitlines()
    return path


def test_slurm_script_says_what_was_asked(tmp_path, monkeypatch, capsys):
    """Oracle: bash, and the lines Slurm reads."""
    wanted = "--partition=gpu --gres=gpu:1 --time=04:00:00"
    path = slurm_script(
        tmp_path, monkeypatch, capsys, "python", f"--slurm_options={wanted}", "--data_dir=a dir"
    )
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert {f"#SBATCH {wanted}", "#SBATCH --array=0-1", "#SBATCH --requeue"} <= set(lines)
    assert lines[lines.index("cells=(") + 1 : lines.index(")")] == [f"  {CELL}", f"  {FAILING}"]
    assert "'--data_dir=a dir'" in lines[-1]


def test_slurm_options_are_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "minutes_by_cell", lambda chosen: dict.fromkeys(chosen, 1.0))
    arguments = ["--network=small_mlp", f"--workdir={tmp_path}", "--launcher=slurm"]
    assert sweep.main([*arguments, "--slurm_options=--time=1\nrm -r /"]) == 2
    assert "must be one line" in capsys.readouterr().err
    assert not (tmp_path / "sweep.sbatch").exists()


@pytest.mark.slow
def test_a_preempted_slurm_task_resumes(undisturbed, tmp_path, monkeypatch, capsys):
    """Oracle: the undisturbed run. The script is run as Slurm would, with an array index."""
    python = tmp_path / "python"  # the same command, on the tiny sweep
    (tmp_path / "tiny_sweep.py").write_text(TINY_SWEEP)
    python.write_text(f'#!/bin/bash\nexec {sys.executable} {tmp_path}/tiny_sweep.py "${{@:3}}"\n')
    python.chmod(0o755)
    path = slurm_script(tmp_path, monkeypatch, capsys, python)
    made = Sweep(tmp_path)
    made.environment |= {"SLURM_ARRAY_TASK_ID": "0"}
    process = made.start(["bash", str(path)])
    made.wait_for_rows(5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, made.output.read_text()
    process = made.start(["bash", str(path)])
    assert process.wait(180) == 0, made.output.read_text()
    assert [entry.stem for entry in made.results.iterdir()] == [CELL]
    assert_same_results(made.record(), undisturbed)
    assert_rows_once(made.rows())
    assert not (made.work / f"{FAILING}.log").exists()
