"""The directory of a run: its name, its lock, whether it can hold the run."""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from mass_jax.config import ConfigError, config_hash

_LOCK = ".lock"


def run_name(config: ConfigDict) -> str:
    """A readable name that tells runs apart, the same for the same configuration.

    Example:
      >>> from mass_jax.config import default_config
      >>> run_name(default_config()).rsplit("-", 1)[0]
      'mass_small_mlp_digits_n900_beta0.001_seed0'
    """
    beta = "" if config.method == "softmax_ce" else f"_beta{config.beta:g}"
    dropout = f"_dropout{config.dropout_rate:g}" if config.dropout_rate else ""
    decay = f"_wd{config.weight_decay:g}" if config.weight_decay else ""
    name = f"{config.method}_{config.network}_{config.data.name}".replace("/", "_")
    return (
        f"{name}_n{config.train_size}{beta}{dropout}{decay}_seed{config.seed}-{config_hash(config)}"
    )


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes the directory and keeps other processes out of it.

    The lock is the operating system's: it ends with the process, however it ends.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=workdir):
            pass
        stream = (workdir / _LOCK).open("a+")
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir}: cannot write there ({error.strerror}); choose another"
        ) from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise ConfigError(
                f"--workdir={workdir}: {holder} is writing to it; wait, or choose another"
            ) from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        yield


def is_locked(workdir: Path) -> bool:
    """Whether a process is writing to the directory."""
    try:
        stream = (workdir / _LOCK).open("a+")
    except OSError:
        return False  # nobody was ever there, or it is not ours to write to
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def check_free_space(workdir: Path, bytes_needed: int) -> None:
    """Refuses to start where two checkpoints would not fit.

    Args:
      workdir: an existing directory.
      bytes_needed: of one checkpoint.
    """
    free = shutil.disk_usage(workdir).free
    if free < 2 * bytes_needed:
        raise ConfigError(
            f"--workdir={workdir}: {free / 1e6:.0f} MB free, but two checkpoints need "
            f"{2 * bytes_needed / 1e6:.0f} MB; free some or choose another"
        )
