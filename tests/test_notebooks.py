"""The notebooks run as a user runs them, and what is committed is what they print.

Oracles: their own asserts (closed forms, the data processing inequality, accuracies); the
committed files, which hold no error, no warning and no path of the machine that made them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from experiments import run_notebooks

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(run_notebooks.FOLDER.glob("*.ipynb"))
MOST_BYTES = 300_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def assert_clean(notebook):
    """No error, nothing on stderr, no path of a machine; pictures count only as pictures."""
    for output in outputs(notebook):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text
        shown = {k: v for k, v in output.get("data", {}).items() if k != "image/png"}
        text = output.get("text", "") + str(shown)
        assert not re.search(r"(?<![\w.])/(home|tmp|root|Users|private|var|work)/", text), text
        assert "Warning" not in text


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def test_there_are_three():
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3"]


@every_notebook
def test_committed_as_executed_and_readable(path):
    """Oracle: nbformat's schema, and the order a fresh kernel gives to cells."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert path.stat().st_size < MOST_BYTES
    opening = notebook.cells[0]
    assert opening.cell_type == "markdown"
    assert opening.source.startswith("# ")
    assert opening.source.splitlines()[2] == "**What you will learn**"
    assert "**To run it:**" in opening.source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(not cell.metadata for cell in notebook.cells)
    assert any("assert " in cell.source for cell in code)
    assert pictures(notebook) >= 2
    assert_clean(notebook)


def python(*arguments, folder=ROOT):
    """A process of its own: nbclient leaves sockets to the garbage collector, which warns."""
    # XLA's usual optimisation: conftest's flags are for many small programs.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True
    )


def run(path, *options):
    return python("-m", "experiments.run_notebooks", str(path), *options)


@pytest.mark.slow
@every_notebook
def test_runs_to_its_end(path, tmp_path):
    """Oracle: the notebook's own asserts; and as many outputs as are committed."""
    process = run(path, f"--out_dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    executed = nbformat.read(tmp_path / path.name, as_version=4)
    assert_clean(executed)
    committed = nbformat.read(path, as_version=4)
    assert pictures(executed) == pictures(committed)
    assert len(outputs(executed)) == len(outputs(committed))


@every_notebook
@pytest.mark.parametrize("folder", [ROOT, run_notebooks.FOLDER], ids=["root", "own folder"])
def test_first_cell_finds_the_repository(path, folder):
    """Oracle: the file that is imported."""
    notebook = nbformat.read(path, as_version=4)
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    found = "import importlib.util; print(importlib.util.find_spec('experiments').origin)"
    process = python("-I", "-c", f"{first}\n{found}", folder=folder)
    assert process.stdout.strip() == str(ROOT / "experiments" / "__init__.py"), process.stderr


def test_the_kernel_is_of_this_interpreter(tmp_path):
    """Oracle: sys.executable, whatever kernels a user has installed under the same name."""
    path = tmp_path / "probe.ipynb"
    cells = [nbformat.v4.new_code_cell("import sys\nprint(sys.executable)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    process = run(path)
    assert process.returncode == 0, process.stderr
    (output,) = outputs(nbformat.read(path, as_version=4))
    assert output.text.strip() == sys.executable


def test_a_cell_that_raises_is_an_error_of_the_command(tmp_path):
    path = tmp_path / "broken.ipynb"
    cells = [nbformat.v4.new_code_cell("raise ValueError('as expected')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    before = path.read_bytes()
    process = run(path)
    assert process.returncode == 1
    assert "as expected" in process.stderr
    assert path.read_bytes() == before
