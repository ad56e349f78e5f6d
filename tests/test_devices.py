"""Many devices and two processes against one device: the same run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mass_jax import checkpoint

STEPS = 50
COMMAND = [
    sys.executable, "-m", "mass_jax.main", "--quiet",
    f"--config.steps={STEPS}",
    "--config.steps_per_dispatch=10",
    "--config.eval_every=25",
    "--config.dropout_rate=0.2",
    "--config.jacobian.sub_batch=5",  # not a multiple of any device count
]  # fmt: skip
ROOT = Path(__file__).parent.parent
METHODS = {
    "mass_paper": ["--config.jacobian.batch_stats=paper"],
    "mass_frozen": ["--config.jacobian.batch_stats=frozen"],
    "vib": ["--config.method=vib"],
}

# A bias in front of BatchNorm has no effect, so its gradient is rounding noise, which Adam
# turns into steps of full size, here 50 of 1e-3 at most; the running mean follows it.
NULL_DIRECTION = STEPS * 1e-3
TOLERANCE = 2e-3  # relative to the largest entry, or to one


def start(workdir, arguments, devices=1, cluster=()):
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} "  # of conftest.py: compile fast
        f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        [*COMMAND, f"--workdir={workdir}", *arguments, *cluster],
        env=environment,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(*processes):
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error


def arrays_of(workdir):
    found = checkpoint.restore_latest(workdir / "checkpoints")
    assert found.step == STEPS
    return found.arrays


def assert_same_run(workdir, expected):
    ours, theirs = arrays_of(workdir), arrays_of(expected)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if not name.startswith("params."):
            continue
        null = name.endswith(".mean") or (".linear_" in name and name.endswith(".bias"))
        error = np.abs(array - theirs[name]).max() / max(1.0, np.abs(theirs[name]).max())
        assert error <= (NULL_DIRECTION if null else TOLERANCE), (name, error)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one_device")
    for name, arguments in METHODS.items():
        finish(start(directory / name, arguments))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "parallel"),
    [
        ("mass_paper", 2, "pmap"),
        ("mass_paper", 8, "pmap"),
        ("mass_paper", 8, "shard_map"),
        ("mass_frozen", 8, "pmap"),
        ("vib", 8, "pmap"),
    ],
)
def test_devices(name, devices, parallel, one_device, tmp_path):
    """Oracle: one device. The same batches exactly, parameters to the stated tolerance."""
    arguments = [*METHODS[name], f"--config.parallel={parallel}"]
    finish(start(tmp_path, arguments, devices))
    assert_same_run(tmp_path, one_device / name)


def two_processes(workdir, arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        start(
            workdir,
            arguments,
            cluster=[f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={i}"],
        )
        for i in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["pmap", "shard_map"])
def test_two_processes(parallel, one_device, tmp_path):
    """Oracle: one process. Only process 0 writes, both end well."""
    arguments = [*METHODS["mass_paper"], f"--config.parallel={parallel}"]
    finish(*two_processes(tmp_path, arguments))
    assert_same_run(tmp_path, one_device / "mass_paper")


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    process = start(tmp_path, ["--config.batch_size=33"], devices=2)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "multiple of the 2 devices" in error
