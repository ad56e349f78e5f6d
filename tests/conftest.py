"""Shared settings: CPU, strict shapes, both precisions, fixed keys."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Shared by test workers and by the commands tests start; never the user's own.
CACHE = Path(tempfile.gettempdir()) / f"mass_jax_test_cache_{os.getuid()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))

# Small programs, many of them: compiling fast matters more than running fast.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

from collections.abc import Iterator
from typing import NamedTuple

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# XLA compiles during the first example of a property: no deadline, few examples.
hypothesis.settings.register_profile("mass_jax", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("mass_jax")


class Tolerance(NamedTuple):
    """Relative tolerances by kind of comparison; the one table of the suite."""

    exact: float  # two ways of computing the same thing
    golden: float  # against values stored in float32
    finite_difference: float


TOLERANCES = {
    "float32": Tolerance(exact=2e-4, golden=1e-4, finite_difference=5e-2),
    "float64": Tolerance(exact=1e-9, golden=1e-6, finite_difference=1e-5),
}


@pytest.fixture(params=["float32", "float64"])
def tolerance(request: pytest.FixtureRequest) -> Iterator[Tolerance]:
    """Runs a test in float32 and with x64 enabled, with the tolerance of each."""
    with jax.enable_x64(request.param == "float64"):
        yield TOLERANCES[request.param]


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the tests of training two seconds of drawing each; `test_report.py` has it all."""
    if request.module.__name__.rpartition(".")[2] != "test_report":
        monkeypatch.setattr("mass_jax.reporting.report_if_possible", lambda workdir: None)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Compiled programs of one file are of no use to the next, and take gigabytes."""
    yield
    jax.clear_caches()
