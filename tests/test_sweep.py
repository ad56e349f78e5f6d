"""The sweep: the right cells, each run once, whatever stops it."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from experiments import cells, cost, running, sweep, sweep_report
from mass_jax.config import config_hash

SHORT = ["--network=small_mlp", "--train_sizes=2500", "--seeds=0", "--regularised=no"]


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(sweep, "minutes_by_cell", lambda chosen: dict.fromkeys(chosen, 1.0))


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Training that takes a moment and writes what the real one would; counts its starts."""
    script = tmp_path / "stand_in.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "workdir, value = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "workdir.mkdir(parents=True, exist_ok=True)\n"
        "(workdir / 'starts').open('a').write('x')\n"
        "if value == 'fail': sys.exit('no luck')\n"
        "time.sleep(float(sys.argv[3]))\n"
        "(workdir / 'environment.json').write_text(json.dumps(dict.fromkeys(\n"
        "    ['python', 'packages', 'devices', 'cpu_count', 'commit'])))\n"
        "(workdir / 'metrics.jsonl').write_text('')\n"
        "(workdir / 'results.json').write_text(json.dumps(\n"
        "    {'accuracy': 0.5, 'nll': 1.0, 'train_seconds': 1, 'config_hash': value}))\n"
    )

    def command(cell, workdir, data_dir):
        value = "fail" if cell.method == "vib" else config_hash(cell.config())
        return [sys.executable, str(script), str(workdir), value, "0"]

    monkeypatch.setattr(running, "command", command)
    monkeypatch.setattr(sweep, "load_dataset", lambda *arguments: None)


def arguments(tmp_path):
    return [*SHORT, f"--workdir={tmp_path / 'work'}", f"--results={tmp_path / 'results'}"]


def test_cells_are_those_of_the_tables():
    """Oracle: counted in the paper: 17 and 9 rows, 3 sizes, 4 seeds."""
    for network, rows in (("small_mlp", 17), ("resnet20", 9)):
        found = cells.paper_cells(network)
        assert len(found) == len(set(found)) == rows * 3 * 4
        assert len({cell.name for cell in found}) == len(found)


def test_most_telling_first():
    """Oracle: the order asked for: both sizes of the four plain rows, then the rest."""
    first = cells.paper_cells("small_mlp")[:8]
    assert {cell.train_size for cell in first[:4]} == {2500}
    assert {cell.train_size for cell in first[4:]} == {40_000}
    assert {(cell.method, cell.beta) for cell in first} == {
        ("softmax_ce", 0.0), ("vib", 1e-3), ("mass", 1e-3), ("mass", 0.0),
    }  # fmt: skip


@pytest.mark.parametrize("network", ["small_mlp", "resnet20"])
def test_cells_make_the_configurations_they_name(network):
    """Oracle: the fields of the cell itself."""
    for cell in cells.paper_cells(network)[::7]:
        config = cell.config()
        assert (config.network, config.method, config.beta) == (network, cell.method, cell.beta)
        assert (config.train_size, config.seed) == (cell.train_size, cell.seed)
        assert (config.dropout_rate > 0, config.weight_decay > 0) == (
            cell.dropout, cell.weight_decay,
        )  # fmt: skip


def test_one_failure_does_not_stop_the_rest_and_nothing_runs_twice(stand_in, tmp_path, capsys):
    """Oracle: the number of starts of each run."""
    assert sweep.main(arguments(tmp_path)) == 1  # the vib cells fail
    results = {path.stem for path in (tmp_path / "results").iterdir()}
    wanted = sweep._chosen(sweep._parser().parse_args(arguments(tmp_path)))
    assert results == {cell.name for cell in wanted if cell.method != "vib"}
    assert "no luck" in capsys.readouterr().err
    assert sweep.main(arguments(tmp_path)) == 1
    starts = {c.name: (tmp_path / "work" / c.name / "starts").read_text() for c in wanted}
    assert {name: len(s) for name, s in starts.items()} == {
        cell.name: 2 if cell.method == "vib" else 1 for cell in wanted
    }


def test_results_of_another_configuration_do_not_count(tmp_path):
    """Oracle: a record whose hash is not the cell's."""
    cell = cells.paper_cells("small_mlp")[0]
    (tmp_path / f"{cell.name}.json").write_text(json.dumps({"config_hash": "0" * 12}))
    assert not cells.is_done(cell, tmp_path)
    (tmp_path / f"{cell.name}.json").write_text("half a fi")
    assert not cells.is_done(cell, tmp_path)


def test_time_limit_ends_the_sweep(stand_in, tmp_path, capsys):
    """Oracle: no minutes, no runs."""
    assert sweep.main([*arguments(tmp_path), "--max_minutes=0"]) == 0
    assert "0 minutes are over" in capsys.readouterr().out
    assert not list((tmp_path / "work").glob("*/starts"))


def test_nothing_to_run_is_an_error(tmp_path, capsys):
    beta_of_vib = ["--methods=mass", "--betas=0.1"]
    assert sweep.main([*arguments(tmp_path), *beta_of_vib]) == 2
    assert "no cell" in capsys.readouterr().err


def test_what_cannot_be_recorded_fails_alone(stand_in, tmp_path, capsys, monkeypatch):
    """Oracle: one cell without its metrics has a reason in its file; the others have records."""
    of_cell = running.collect

    def collect(workdir, file):
        if "beta0-" in workdir.name:
            (workdir / "metrics.jsonl").unlink()
        return of_cell(workdir, file)

    monkeypatch.setattr(running, "collect", collect)
    assert sweep.main([*arguments(tmp_path), "--methods=softmax_ce,mass"]) == 1
    assert "after training: FileNotFoundError" in capsys.readouterr().err
    (failed,) = (tmp_path / "work").glob("*.failed")
    assert failed.stem == "small_mlp-mass-beta0-n2500-seed0"
    assert len(list((tmp_path / "results").iterdir())) == 4


@pytest.mark.parametrize("content", ["half a fi", '[{"colour": "red"}]'])
def test_a_damaged_list_of_cells_is_one_line(content, stand_in, tmp_path, capsys):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "cells.json").write_text(content)
    assert sweep.main(arguments(tmp_path)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cells.json: damaged; remove it" in line
    assert sweep_report.main([f"--workdir={tmp_path / 'work'}"]) == 2


def test_a_workdir_that_is_a_file_is_one_line(stand_in, tmp_path, capsys):
    (tmp_path / "work").write_text("")
    assert sweep.main(arguments(tmp_path)) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'work'}: ")


def test_expected_minutes_follow_what_cells_took(stand_in, tmp_path, capsys, monkeypatch):
    """Oracle: stand-ins take moments where minutes were expected: nothing remains after one."""
    monkeypatch.setattr(sweep, "minutes_by_cell", lambda chosen: dict.fromkeys(chosen, 10.0))
    assert sweep.main([*arguments(tmp_path), "--methods=softmax_ce,mass"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert said[0].endswith("about 10 minutes, all in about 50 minutes")
    assert said[1].endswith("about 0 minutes, all in about 0 minutes")


def test_missing_data_are_said_once(tmp_path, capsys, monkeypatch):
    """Oracle: one line, and no cell started."""
    monkeypatch.setattr("mass_jax.data.sources.find_spec", lambda name: None)  # no downloads
    data = f"--data_dir={tmp_path}"
    assert sweep.main([*arguments(tmp_path), data]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert "cifar10" in line
    assert not (tmp_path / "work").exists()


def test_a_reader_who_has_enough_is_no_error():
    """Oracle: what ``| head`` does to a program: a pipe without a reader, and silence."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.sweep", "--network=small_mlp", "--dry_run"],
        cwd=cells.HERE.parent, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("minutes", "words"),
    [(0.2, "0 minutes"), (0.7, "1 minute"), (1.4, "1 minute"), (1.6, "2 minutes"),
     (89, "89 minutes"), (90, "1.5 hours"), (48 * 60, "2 days")],
)  # fmt: skip
def test_durations_are_said_as_a_person_would(minutes, words):
    assert running.duration(minutes) == words


def test_costs_follow_the_benchmark_and_the_machine(monkeypatch, tmp_path):
    """Oracle: by hand: 100,000 steps of 30 ms are 50 minutes; half the speed, twice as long."""
    recorded = tmp_path / "benchmark.json"
    recorded.write_text(
        '{"small_mlp": {"mass_exact_paper_bn": {"ms": 30}},'
        ' "environment": {"small_mlp": {"matmul_gflops": 50}}}'
    )
    monkeypatch.setattr(cost, "BENCHMARK", recorded)
    monkeypatch.setattr(cost, "matmul_gflops", lambda: 25.0)
    cell = cells.Cell("small_mlp", "mass", 1e-3, False, False, 2500, 0)
    assert cost.minutes_by_cell([cell]) == {cell: pytest.approx(100.0)}


@pytest.mark.slow
def test_a_sweep_killed_at_random_loses_and_repeats_nothing(tmp_path):
    """Oracle: the digits runs of the same command, unbroken: equal results, metric rows once.

    A real sweep process with two real trainings ends six times, by SIGTERM or SIGKILL, wherever it
    is: while it imports, compiles, trains, saves, evaluates, or between its cells.
    """
    script = (
        "import sys\n"
        "from experiments import cells, sweep\n"
        "chosen = [\n"
        "    cells.Cell('small_mlp', 'softmax_ce', 0.0, False, False, 900, seed, steps=2000)\n"
        "    for seed in (0, 1)\n"
        "]\n"
        "cells.Cell.config_file = 'configs/softmax_ce_digits.py'\n"
        "sweep.paper_cells = lambda *arguments: chosen\n"
        "sweep.minutes_by_cell = lambda chosen: dict.fromkeys(chosen, 1.0)\n"
        "sys.exit(sweep.main(sys.argv[1:]))\n"
    )
    root = cells.HERE.parent

    def start(name):
        where = [f"--workdir={tmp_path / name}", f"--results={tmp_path / name / 'results'}"]
        environment = os.environ | {"PYTHONPATH": str(root)}
        with (tmp_path / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-c", script, "--network=small_mlp", *where],
                cwd=root, env=environment, stdout=log, stderr=log,
            )  # fmt: skip

    def output(name):
        return (tmp_path / f"{name}.log").read_text()

    def times_of_records():
        return {p.name: p.stat().st_mtime_ns for p in (tmp_path / "broken" / "results").glob("*")}

    began = time.monotonic()
    process = start("whole")
    assert process.wait(300) == 0, output("whole")
    duration = time.monotonic() - began

    chance, recorded = random.Random(0), {}
    for _ in range(6):
        process = start("broken")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, duration))
        process.send_signal(chance.choice((signal.SIGTERM, signal.SIGKILL)))
        assert process.wait(60) in (0, 143, -signal.SIGTERM, -signal.SIGKILL), output("broken")
        assert recorded.items() <= times_of_records().items()
        recorded = times_of_records()
    process = start("broken")
    assert process.wait(300) == 0, output("broken")
    assert recorded.items() <= times_of_records().items()

    for seed in (0, 1):
        name = f"small_mlp-softmax_ce-n900-seed{seed}-steps2000"
        broken, whole = (
            json.loads((tmp_path / run / "results" / f"{name}.json").read_text())
            for run in ("broken", "whole")
        )
        for key in ("accuracy", "nll", "ood", "config_hash", "data_sha256", "validation"):
            assert broken[key] == whole[key]
        assert broken["validation"][-1]["step"] == 2000
        rows = (tmp_path / "broken" / name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in rows]
        assert steps == sorted(set(steps))
        assert steps[-1] == 2000
