"""``python -m experiments.figure1`` as a user runs it.

Oracles: CDI of the identity and of the tent map on a uniform X in closed form; the magic
bytes of the file formats.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments):
    command = [sys.executable, "-m", "experiments.figure1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("figure") / "made" / "on demand"
    return out_dir, run(f"--out_dir={out_dir}")


def test_table_is_right_and_aligned(finished):
    _, process = finished
    assert process.returncode == 0, process.stderr
    header, *rows = process.stdout.splitlines()[:3]
    values = {name: [float(v) for v in numbers] for name, *numbers in map(str.split, rows)}
    for name, expected in {"f1": 0.0, "f2": -math.log(2)}.items():
        assert values[name] == pytest.approx([expected, expected], abs=1e-2)
    assert {len(row) for row in rows} == {len(header)}


@pytest.mark.parametrize(("name", "magic"), [("png", b"\x89PNG\r\n\x1a\n"), ("pdf", b"%PDF-")])
def test_files(finished, name, magic):
    out_dir, process = finished
    path = out_dir / f"figure1.{name}"
    content = path.read_bytes()
    assert content.startswith(magic)
    assert len(content) > 5000
    assert str(path) in process.stdout.splitlines()


def test_a_file_in_the_way_is_one_clear_line(tmp_path):
    (tmp_path / "taken").write_text("mine")
    process = run(f"--out_dir={tmp_path / 'taken'}")
    assert process.returncode != 0
    (line,) = process.stderr.strip().splitlines()
    assert "--out_dir" in line
    assert str(tmp_path / "taken") in line
    assert (tmp_path / "taken").read_text() == "mine"
