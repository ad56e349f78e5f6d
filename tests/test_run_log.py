"""Logs: rows, their survival, progress without a terminal, atomic files."""

import json
import sys
from types import SimpleNamespace

import pytest

from mass_jax import run_log
from mass_jax.run_log import RunLog, write_atomically


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_rows_survive_and_lost_ones_are_cut(tmp_path):
    """Oracle: by hand; rows 1 to 3, a crash, a resume at step 2."""
    with RunLog(tmp_path, 0, 10, quiet=True) as log:
        for step in (1, 2, 3):
            log.row({"step": step, "loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    with RunLog(tmp_path, 2, 10, quiet=True) as log:
        log.row({"step": 3, "loss": 0.5})
    assert rows_of(tmp_path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 0.5},
    ]


@pytest.mark.parametrize("quiet", [True, False])
def test_progress_lines_without_a_terminal(tmp_path, capsys, quiet, monkeypatch):
    """Oracle: by hand; the rate of the first block is that of the compiler, and not told."""
    clock = SimpleNamespace(now=0.0)
    # The module's own name for the clock, not the clock: other threads read that, too.
    monkeypatch.setattr(run_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with RunLog(tmp_path, 0, 100, quiet=quiet) as log:
        log.progress(10, 1.5, 0.01)
        clock.now = 3.0
        log.progress(20, 1.5, 2.0)
        clock.now = 3.5
        log.progress(21, 1.5, 2.0)  # too soon for another line
        clock.now = 60.0
        log.progress(100, 0.5, 4449.7)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if quiet else 3)
    if not quiet:
        assert lines[0] == "step 10/100  loss 1.5000  compiled"
        assert lines[1] == "step 20/100  loss 1.5000  2 steps/s  40 s left"
        assert lines[2] == "step 100/100  loss 0.5000  4,450 steps/s"


def test_the_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunLog(tmp_path, 0, 100, quiet=False) as log:
        log.progress(60, 1.5, 2.0)
    assert "60/100" in capsys.readouterr().err


def test_replacing_a_file_leaves_one_file(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_environment_names_what_is_needed_to_repeat_a_run(monkeypatch):
    found = run_log.environment()
    assert {"python", "packages", "devices", "commit", "command"} <= found.keys()
    monkeypatch.setattr(run_log.subprocess, "run", raise_missing)
    assert run_log.environment()["commit"] is None


@pytest.mark.parametrize(
    ("spec", "program", "typed"),
    [
        ("mass_jax.main", "/far/mass_jax/main.py", "python -m mass_jax.main --quiet"),
        ("pytest.__main__", "/far/pytest/__main__.py", "python -m pytest --quiet"),
        (None, "/far/train.py", "python train.py --quiet"),
        (None, "/far/bin/mass-jax", "mass-jax --quiet"),
    ],
)
def test_the_command_is_what_was_typed(spec, program, typed, monkeypatch):
    """Oracle: what Python makes of each command line, by its manual."""
    main = SimpleNamespace(__spec__=None if spec is None else SimpleNamespace(name=spec))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [program, "--quiet"])
    assert run_log._typed_command() == typed.split()


def raise_missing(*_, **__):
    raise FileNotFoundError("git")
