"""The wheel: built, installed elsewhere, run outside the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import mass_jax
from mass_jax.options import config_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.slow


class Installed(NamedTuple):
    """An environment that has the wheel, and a directory far from the repository."""

    wheel: Path
    bin: Path
    elsewhere: Path

    def run(self, *command):
        """Runs a program of the environment there; what it prints."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Built from a copy, since building writes beside the sources; without a network."""
    scratch = tmp_path_factory.mktemp("wheel")
    for name in ("mass_jax", "configs"):
        shutil.copytree(
            ROOT / name, scratch / "source" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, scratch / "source")
    quietly = {"check": True, "capture_output": True, "text": True, "timeout": 600}
    build = ["build", "--wheel", "--no-isolation", f"--outdir={scratch}", scratch / "source"]
    subprocess.run([sys.executable, "-m", *build], **quietly)
    (wheel,) = scratch.glob("*.whl")
    venv.create(scratch / "venv", symlinks=True)
    (site,) = (scratch / "venv" / "lib").glob("python*/site-packages")
    # Dependencies come from the environment of the tests; its own packages go first.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = scratch / "venv" / "bin" / "python"
    pip = ["pip", f"--python={python}", "install", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, "-m", *pip], **quietly)
    (scratch / "elsewhere").mkdir()
    return Installed(wheel, python.parent, scratch / "elsewhere")


def test_holds_the_package_and_its_configs_and_nothing_else(installed):
    """Oracle: the directories of the repository."""
    names = {
        name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name
    }
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "mass_jax").rglob("*.py")}
    configs = {
        f"mass_jax/installed/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")
    }
    assert names == ours | configs


def test_is_what_is_imported_and_finds_its_configs(installed):
    """Oracle: paths, the repository's list of configs, and an own file that derives from ours."""
    own = "from configs import base\n\ndef get_config():\n    return base.get_config()\n"
    (installed.elsewhere / "own.py").write_text(own)
    look = """
import mass_jax
from mass_jax.options import config_names, load_config
print(mass_jax.__file__, mass_jax.__version__)
print(*[name for name in config_names() if load_config(f"configs/{name}.py")])
print(load_config("own.py").method)
"""
    where, configs, method = installed.run("python", "-c", look).splitlines()
    path, version = where.split()
    assert Path(path).is_relative_to(installed.bin.parent)
    assert version == mass_jax.__version__
    assert f"-{version}-" in installed.wheel.name
    assert configs.split() == config_names()
    assert method == "mass"


def test_trains_digits(installed):
    flags = ("--config.steps=5", "--config.eval_every=0", "--workdir=run", "--quiet")
    printed = installed.run("mass-jax", "--config=configs/mass_digits.py", *flags)
    assert "accuracy" in printed
    assert json.loads((installed.elsewhere / "run" / "results.json").read_text())["nll"] > 0
    environment = json.loads((installed.elsewhere / "run" / "environment.json").read_text())
    assert environment["commit"] is None  # whatever repository it is installed in


def test_the_notebook_and_fit_of_the_readme(installed):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = installed.run("python", "-c", "\n".join(examples))
    assert "(100, 5, 64)" in printed
    assert "test accuracy" in printed
