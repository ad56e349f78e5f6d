"""The fault campaign, short: every fault that needs no minutes, each with its control."""

import gc
import json
import random
import socket

import pytest

from experiments.faults import files, inputs, processes, runs
from experiments.faults.__main__ import FAULTS, main
from mass_jax.main import main as train

TRIALS = {
    "kill": 1,
    "signals": 1,
    "corruption": 9,
    "numerics": 1,
    "overrides": 200,
    "data": 30,
    "disks": 2,
    "workdir": 2,
    "companions": 2,  # one killed, one asked to stop
    "malicious": 3,
}  # devices: tests/test_devices.py; environment: .ci/run itself


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_every_trial_survives(name, tmp_path, capsys):
    """Oracle: the run without a fault, equal to the bit."""
    report = tmp_path / "faults.json"
    code = main([f"--only={name}", f"--trials={TRIALS[name]}", "--seed=7", f"--json={report}"])
    row = json.loads(report.read_text())["faults"][name]
    assert row["control"], row
    assert row["problems"] == []
    assert (row["silent"], row["survived"]) == (0, row["trials"])
    assert row["trials"] >= TRIALS[name]
    assert code == 0
    assert name in capsys.readouterr().out


@pytest.mark.slow
def test_a_signal_during_the_last_save_is_not_lost(tmp_path):
    """Oracle: the unbroken run; the campaign once found this position ignored."""
    assert runs.run(tmp_path / "whole")[0] == 0
    whole = runs.leftover(tmp_path / "whole")
    verdict = processes._signalled(tmp_path, "last_save", "SIGTERM", "", whole)
    assert verdict == runs.Verdict()


def test_the_list_is_whole():
    """Oracle: twelve faults, at least the trials asked for in the long campaign."""
    assert [fault.number for fault in FAULTS] == list(range(1, 13))
    trials = {fault.name: fault.trials for fault in FAULTS}
    assert trials["kill"] >= 50
    assert trials["corruption"] >= 300
    assert trials["overrides"] >= 1000


# Reading garbage leaves futures of tensorstore behind that complain when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_silent_failure_would_be_seen(tmp_path, monkeypatch):
    """Oracle: a campaign against a product that does not verify must report it."""
    monkeypatch.setattr(files.checkpoint, "verify", lambda path, step: "unchecked")
    trial = files.corruption(tmp_path, 6, random.Random(0))
    gc.collect()  # here, where it is expected
    assert trial.silent > 0


def test_a_bad_override_that_is_accepted_would_be_seen(monkeypatch):
    """Oracle: a validation that lets everything pass."""
    monkeypatch.setattr(inputs, "resolve", lambda config: config)
    verdict = inputs._verdict(inputs.Override(("--config.beta=-1",), False), False)
    assert verdict.silent


def test_rows_of_other_invocations_are_kept(tmp_path, capsys):
    """Oracle: what was in the file before."""
    report = tmp_path / "faults.json"
    kill = {"number": 1, "trials": 50, "survived": 50, "silent": 0, "control": True}
    report.write_text(json.dumps({"faults": {"kill": kill}}))
    assert main(["--only=data", "--trials=2", f"--json={report}"]) == 0
    rows = json.loads(report.read_text())["faults"]
    assert list(rows) == ["kill", "data"]
    assert rows["kill"] == kill
    assert {"seed", "commit"} < rows["data"].keys()
    report.write_text("[]")
    assert main(["--only=data", "--trials=2", f"--json={report}"]) == 2
    assert "holds no outcome" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--only=earthquake"], ["--trials=0"]])
def test_nonsense_is_refused(arguments, tmp_path, capsys):
    assert main([*arguments, f"--json={tmp_path / 'x.json'}"]) == 2
    assert capsys.readouterr().err.startswith("error:")


def test_foreign_files_in_the_results_are_passed_over(tmp_path):
    """Oracle: no record comes of them, and no error."""
    assert files.tables_resist(tmp_path)


def test_training_needs_no_network(tmp_path, monkeypatch):
    """Oracle: every attempt to connect fails, and the run does not notice."""

    def refuse(*arguments):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert train(["--quiet", *runs.SMALL, "--config.steps=5", f"--workdir={tmp_path}"]) == 0


def test_vib_without_rate_trains_or_names_the_cause(tmp_path, capsys):
    """VIB at beta = 0 on SmallMLP, which the authors could not train."""
    code = train(
        ["--quiet", "--config.method=vib", "--config.beta=0", "--config.steps=300",
         "--config.optimizer.q_learning_rate=None", f"--workdir={tmp_path}"]
    )  # fmt: skip
    if code == 0:
        assert json.loads((tmp_path / "results.json").read_text())["accuracy"] > 0.9
    else:
        assert code == 1
        assert "is not finite" in capsys.readouterr().err
