"""Memory freed by one step serves the next: counted in page faults of the operating system."""

import os
import subprocess
import sys

import pytest

from mass_jax.working_memory import keep_working_memory, run_in_main_thread

# A program that needs 64 MB, 16,384 pages, for a matrix.
_PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from mass_jax.working_memory import keep_working_memory, run_in_main_thread
if sys.argv[1] == "keep":
    run_in_main_thread()
print(keep_working_memory())
matrix = lambda v: v + jnp.arange(2.0**24).reshape(2**12, 2**12)
program = jax.jit(lambda v: jnp.sum(matrix(v) @ matrix(v)[0]))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for repeat in range(40):  # a few until the process has all the blocks it needs
    if repeat == 30:
        before = faults()
    program(float(repeat)).block_until_ready()
print(faults() - before)
"""


def run(choice: str) -> tuple[str, int]:
    clean = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", _PROGRAM, choice]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_program_called_again_meets_no_page_faults():
    """Oracle: the operating system's count, and the same program without the setting."""
    kept, faults = run("keep")
    assert kept == "True"
    assert faults < 16_384  # by ten calls, less than the pages of one
    kept, faults = run("leave")
    assert kept == "False"
    assert faults > 9 * 16_384


@pytest.mark.parametrize(
    ("name", "value"),
    [("GLIBC_TUNABLES", "glibc.malloc.mmap_max=100"), ("MALLOC_ARENA_MAX", "2")],
)
def test_choices_of_the_user_stay(name, value, monkeypatch):
    run_in_main_thread()
    monkeypatch.setenv(name, value)
    assert not keep_working_memory()
