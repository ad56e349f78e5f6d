"""Every command: --help explains it, bad input is one line with exit code 2."""

import subprocess
import sys
from importlib import import_module

import pytest

COMMANDS = [
    "experiments.api_page",
    "experiments.benchmark",
    "experiments.estimator_study",
    "experiments.export",
    "experiments.faults.__main__",
    "experiments.figure1",
    "experiments.figure2",
    "experiments.growth",
    "experiments.peer_training",
    "experiments.run_notebooks",
    "experiments.sweep",
    "experiments.sweep_report",
    "experiments.tables",
    "mass_jax.completion",
    "mass_jax.data.prepare",
    "mass_jax.main",
    "mass_jax.report",
]


@pytest.mark.parametrize("module", COMMANDS)
def test_help(module, capsys):
    with pytest.raises(SystemExit) as stopped:
        import_module(module).main(["--help"])
    assert stopped.value.code == 0
    name = module.removesuffix(".__main__")
    assert f"usage: python -m {name}" in " ".join(capsys.readouterr().out.split())


BAD = [
    ("experiments.export", ["none", "--out=x.zip"], "none"),
    ("experiments.faults.__main__", ["--json=f.json", "--only=rain"], "choose of kill"),
    ("experiments.faults.__main__", ["--json=none/f.json"], "no such directory"),
    ("experiments.figure1", ["--out_dir=taken"], "--out_dir=taken"),
    ("experiments.figure2", ["--seeds=a"], "config.seed"),
    ("experiments.figure2", ["--data_dir=absent", "--results=none"], "absent: with a network"),
    ("experiments.figure2", ["--plot_only", "--results=none"], "without --plot_only"),
    ("experiments.sweep", ["--network=small_mlp", "--methods=mass", "--betas=0.1"], "no cell"),
    ("experiments.sweep", ["--network=resnet20", "--cell=x"], "no cell"),
    ("mass_jax.data.prepare", ["cifar10", "--from=none.npz"], "no such file"),
    ("mass_jax.main", ["--config=none"], "mass_digits"),
    ("mass_jax.main", ["--steps=5"], "did you mean --config.steps?"),
    ("mass_jax.main", ["--learning_rate=1"], "did you mean --config.optimizer.learning_rate?"),
    ("mass_jax.main", ["--wrokdir=x"], "did you mean --workdir?"),
    ("mass_jax.main", ["--zzz"], "--help lists all"),
    ("mass_jax.report", ["none"], "is none a finished run?"),
]


BAD_ARGUMENTS = [
    ("experiments.benchmark", ["--json=none/b.json"], "no such directory"),
    ("experiments.peer_training", ["lenet", "--json=p.json"], "'lenet': no such cell"),
    ("experiments.benchmark", ["--json=."], "or itself one"),
    ("experiments.estimator_study", ["--json=s.json", "--seeds=a"], "'a' must be like 0,1"),
    ("experiments.figure2", ["--every=0"], "must be a positive integer"),
    ("experiments.figure2", ["--steps=-1"], "must be a positive integer"),
    ("experiments.sweep", ["--network=lenet"], "invalid choice: 'lenet'"),
    ("experiments.sweep", ["--network=resnet20", "--methods=mass,x"], "x: resnet20 has mass, so"),
    ("experiments.sweep", ["--network=resnet20", "--seeds=0,99"], "99: resnet20 has 0, 1, 2, 3"),
    ("experiments.sweep", ["--network=resnet20", "--max_minutes=nan"], "of at least zero"),
    ("experiments.sweep", ["--network=resnet20", "--max_minutes=-1"], "of at least zero"),
    ("experiments.sweep", ["--network=resnet20", "--results=taken"], "is not a directory"),
    ("experiments.sweep", ["--network=small_mlp", "--betas=x"], "'x' must be like 0,1e-3"),
    ("experiments.sweep", ["--network=small_mlp", "--steps=-3"], "must be a positive integer"),
    ("experiments.tables", ["--format=pdf"], "invalid choice: 'pdf'"),
    ("mass_jax.main", ["--process_id=x"], "invalid int value: 'x'"),
]


@pytest.mark.parametrize(("module", "arguments", "words"), BAD_ARGUMENTS)
def test_bad_arguments_are_one_line(module, arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file where a directory should be")
    with pytest.raises(SystemExit) as stopped:
        import_module(module).main(arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.parametrize(("module", "arguments", "words"), BAD)
def test_bad_input_is_one_line(module, arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mass_jax.data.sources.find_spec", lambda name: None)  # no downloads
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "datasets"))  # nothing is prepared
    (tmp_path / "taken").write_text("a file where a directory should be")
    assert import_module(module).main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_training_starts_without_what_it_does_not_need():
    """Oracle: the interpreter's list of modules; each of these takes a second or more to import."""
    slow = {"matplotlib", "scipy", "sklearn", "tensorboardX"}
    script = f"import sys, mass_jax.main; print({slow} & {{*sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
