"""Tab completion. Oracle: bash itself, by its completion variables and at a terminal."""

import os
import pty
import re
import select
import subprocess
import time

import pytest

from mass_jax.completion import main, script
from mass_jax.options import config_names
from mass_jax.schema import SCHEMA

# Outside of a keystroke compopt has nothing to act on.
ASK = 'compopt() { :; }; COMP_LINE="$LINE"; COMP_POINT=${#LINE}; $FUNCTION; echo "${COMPREPLY[@]}"'


def replies(line, cwd, function="_mass_jax"):
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script()}\n{ASK}"],
        env=os.environ | {"LINE": line, "FUNCTION": function},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mass-jax --config=mass_s", ["mass_small_mlp"]),
        ("mass-jax --config.optimizer.n", ["--config.optimizer.name="]),
        ("mass-jax --config.optimizer.name=", ["adam", "sgd"]),
        ("mass-jax --quiet --config.method=soft", ["softmax_ce"]),
        ("mass-jax --config.jacobian.singular=-", ["-inf"]),
        ("mass-jax --config.batch_norm=", ["True", "False"]),
        ("mass-jax --mode=e", ["evaluate"]),
        ("mass-jax --q", ["--quiet"]),
        ("mass-jax --config.no_such_field=", []),
    ],
)
def test_words(tmp_path, line, expected):
    assert replies(line, tmp_path) == expected


def test_all_configs_and_own_files(tmp_path):
    (tmp_path / "mine.py").touch()
    assert replies("mass-jax --config=", tmp_path) == [*config_names(), "mine.py"]
    assert "mass_digits" in config_names()
    assert "cifar10" not in config_names()  # shared settings, not an experiment


def test_every_field_of_the_schema(tmp_path):
    assert replies("mass-jax --config.", tmp_path) == [f"--config.{key}=" for key in SCHEMA]


def test_python_only_when_it_runs_this_module(tmp_path):
    ask = lambda line: replies(line, tmp_path, "_mass_jax_python")
    assert ask("python -m mass_jax.main --config.optimizer.n") == ["--config.optimizer.name="]
    assert ask("python -m another.main --config.optimizer.n") == []
    assert ask("python --v") == []


def test_at_a_terminal(tmp_path):
    """Oracle: what stands on the line after real Tabs."""
    (tmp_path / "script.sh").write_text(script())
    (tmp_path / "runs").mkdir()
    terminal, inside = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=tmp_path,
        **dict.fromkeys(("stdin", "stdout", "stderr"), inside),
        start_new_session=True,
    )
    os.close(inside)
    try:
        os.write(terminal, b"bind 'set enable-bracketed-paste off'; source script.sh\n")
        typed = "mass-jax --config=mass_s\t --config.optimizer.n\tad\t --workdir=ru\tx; echo done\n"
        os.write(terminal, typed.encode())
        seen, until = "", time.monotonic() + 30
        while "done\r\n" not in seen.partition("echo done")[2] and time.monotonic() < until:
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode()
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
    plain = re.sub(r"\s+|\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    wanted = "--config=mass_small_mlp --config.optimizer.name=adam --workdir=runs/x".replace(
        " ", ""
    )
    assert wanted in plain


def test_command_prints_the_script(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == script()
