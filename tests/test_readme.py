"""README: its commands are the ones CI runs, its example runs as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mass_jax.config import resolve
from mass_jax.options import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def blocks(language):
    return [text for name, text in BLOCKS if name == language]


def test_ci_runs_the_test_command_word_for_word():
    command = next(text for text in blocks("bash") if "-m pytest" in text).strip()
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def run_example(number, most_lines):
    example = blocks("python")[number]
    assert len(example.strip().splitlines()) <= most_lines
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=120
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
    assert len(blocks("python")) == 2


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
