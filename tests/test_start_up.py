"""Start-up: measured to the first step; a run that fails is no measurement."""

import json

import pytest

from experiments import start_up
from mass_jax.options import CONFIG_DIR

DIGITS = str(CONFIG_DIR / "mass_digits.py")


def test_a_warm_start_is_timed_to_its_first_step():
    """Oracle: the trainer's own line; importing JAX alone takes a tenth of a second."""
    made = start_up.measure(["steps=1000000"], 1, DIGITS)
    assert made["warm_all_s"] == [made["warm_s"]]
    assert 0.1 < made["warm_s"] < 300
    assert 0.1 < made["cold_s"] < 300


def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match="learning_rate"):
        start_up.measure(["optimizer.learning_rate=fast"], 1, DIGITS)


def test_the_record(tmp_path, monkeypatch, capsys):
    """Oracle: both definitions of the Jacobian, and no paths of this machine."""
    asked = []
    seen = {"cold_s": 2.0, "warm_s": 1.0, "warm_all_s": [1.0]}
    monkeypatch.setattr(start_up, "measure", lambda changes, repeats: asked.append(changes) or seen)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    file = tmp_path / "start_up.json"
    assert start_up.main([f"--json={file}"]) == 0
    made = json.loads(file.read_text())
    assert made["data"] == "digits"
    assert made["frozen"] == made["paper"] == seen
    assert [changes[-1] for changes in asked] == [
        "jacobian.batch_stats=frozen",
        "jacobian.batch_stats=paper",
    ]
    assert str(tmp_path) not in json.dumps(made)
    assert "paper: first step after 2.0 s cold, 1.0 s warm" in capsys.readouterr().out
    assert start_up.as_markdown(file).splitlines()[2:] == [
        "| frozen | 2.0 | 1.0 |",
        "| paper | 2.0 | 1.0 |",
    ]


def test_no_such_directory(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        start_up.main([f"--json={tmp_path / 'none' / 'x.json'}"])
    assert ended.value.code == 2
    assert "no such directory" in capsys.readouterr().err
