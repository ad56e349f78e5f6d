"""README: its commands are the ones CI runs, its examples run as written."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import mass_jax
from mass_jax import main, options
from mass_jax.config import apply_overrides, resolve
from mass_jax.data import prepare
from mass_jax.options import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


# Every `python -m ...` of ours, wherever it stands: module and arguments.
FOUND = re.findall(r"python -m ((?:mass_jax|experiments)[\w.]*)([^`\n#')]*)", README)
COMMANDS = sorted({(module, arguments.strip()) for module, arguments in FOUND})
TRAINING = [arguments for module, arguments in COMMANDS if module == "mass_jax.main"]
PREPARING = [arguments for module, arguments in COMMANDS if module == "mass_jax.data.prepare"]
# These run here as written, in an empty directory, with what makes them short.
SHORT = {
    "experiments.export": "",
    "experiments.figure1": "",
    "experiments.sweep": "--dry_run",
    "experiments.sweep_report": "--out=report.html",
    "experiments.tables": "",
    "mass_jax.completion": "",
    "mass_jax.report": "",
}
# These take minutes to hours: tests/test_benchmark.py and tests/test_faults.py run parts of them.
LONG = ("experiments.benchmark", "experiments.faults", "experiments.run_notebooks")
# The paper's experiment on the data at hand.
SMALL = "--config.data.name=digits --config.train_size=900 --config.data.validation_size=100"
SMALL += " --config.data.ood= --config.steps=2 --config.batch_size=32 --quiet"


def blocks(language):
    return [text for name, text in BLOCKS if name == language]


def test_ci_runs_the_test_command_word_for_word():
    command = next(text for text in blocks("bash") if "-m pytest" in text).strip()
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def run_example(number, most_lines):
    example = blocks("python")[number]
    assert len(example.strip().splitlines()) <= most_lines
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_as_written():
    """Oracle: its own output; fifteen lines at most."""
    printed = run_example(0, most_lines=15)
    assert "CDI of the network, nats:" in printed
    assert "(100, 5, 64)" in printed


def test_own_network_and_data_in_about_ten_lines():
    """Oracle: the accuracy it prints, on wines a linear rule tells apart."""
    printed = run_example(1, most_lines=11)
    assert float(re.search(r"test accuracy: ([0-9.]+)", printed)[1]) > 0.9
    assert "CDI, nats:" in printed


def test_own_network_with_batch_norm_and_dropout():
    """Oracle: it trains, on two clouds a line tells apart."""
    defined = {}
    exec(blocks("python")[2], defined)
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    fitted = mass_jax.fit(defined["Net"](), x, y, steps=60, quiet=True)
    assert np.mean(fitted.predict(x) == y) > 0.8
    assert len(blocks("python")) == 3


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/(\w+\.py)", README))))
def test_configs_named_exist_and_resolve(name):
    assert resolve(load_config(str(ROOT / "configs" / name)))


def test_files_named_exist():
    for name in re.findall(r"\]\(([\w/]+\.\w+)\)", README):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"requirements[-\w]*\.txt", README):
        assert (ROOT / name).is_file(), name


def test_every_pin_has_a_hash():
    """Oracle: pip's own rule for --require-hashes, applied to the text of the locks."""
    for lock in ROOT.glob("requirements*.txt"):
        text = re.sub(r"\\\n\s*", " ", lock.read_text())
        pins = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert len(pins) > 50
        assert all("==" in pin and "--hash=sha256:" in pin for pin in pins), lock.name


def test_every_command_is_tried_by_a_test_below():
    modules = {module for module, _ in COMMANDS}
    assert modules == {"mass_jax.main", "mass_jax.data.prepare", *SHORT, *LONG}


@pytest.mark.parametrize("arguments", TRAINING)
def test_training_commands_are_understood(arguments):
    """Oracle: the parser and the checks the command itself starts with."""
    flags, overrides = options.parse(shlex.split(arguments.replace("...", "")))
    assert resolve(apply_overrides(load_config(flags.config), overrides))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A workdir by the command of the section on experiments, made small."""
    workdir = tmp_path_factory.mktemp("readme") / "WORKDIR"
    command = next(text for text in blocks("bash") if "configs/mass_small_mlp.py" in text)
    arguments = command.partition("mass_jax.main")[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main.main(shlex.split(f"{arguments} {SMALL} --workdir={workdir}")) == 0
    return workdir


@pytest.mark.parametrize("module", SHORT)
def test_short_commands_run(module, finished_run, monkeypatch):
    monkeypatch.chdir(finished_run.parent)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for arguments in {found for name, found in COMMANDS if name == module}:
        command = shlex.split(f"{sys.executable} -m {module} {arguments} {SHORT[module]}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("module", LONG)
def test_long_commands_are_understood(module, capsys):
    """Oracle: --help of the command lists every flag README gives it."""
    with pytest.raises(SystemExit):
        import_module(f"{module}.__main__" if module.endswith("faults") else module).main(
            ["--help"]
        )
    explained = capsys.readouterr().out
    for name, arguments in COMMANDS:
        if name == module:
            assert all(flag in explained for flag in re.findall(r"--\w+", arguments))


@pytest.mark.parametrize("arguments", PREPARING)
def test_preparing_commands_are_understood(arguments, tmp_path, monkeypatch, capsys):
    """Oracle: all that is missing is what README says it needs: TensorFlow, or the file."""
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert prepare.main([*shlex.split(arguments), f"--data_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert ("no such file" if "--from" in arguments else "pip install tensorflow") in error
