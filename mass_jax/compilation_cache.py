"""Compiled programs on disk, so that a re-run or resume starts in seconds."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

_CANNOT_BE_READ = "Error reading persistent compilation cache entry"  # how JAX warns of it


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Keeps compiled programs in the user's cache directory, and that directory in order.

    JAX never replaces an entry. One that a kill left half-written would cost its compilation
    and a warning at every start from then on, so the directory is emptied when one is met; what
    this run compiles then fills it again. A directory the user has named stays as it is.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mass_jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    # The small programs too, which JAX would compile anew at every start: there are dozens.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_or_mend(message: Warning | str, *details: Any, **more: Any) -> None:
            if not str(message).startswith(_CANNOT_BE_READ):
                show(message, *details, **more)
            elif _empty(cache):
                logging.info("emptied the compilation cache: an entry was damaged")

        warnings.showwarning = show_or_mend
        yield


def _empty(cache: Path) -> bool:
    """Removes all entries; whether there were any."""
    entries = list(cache.glob("*-cache"))
    for entry in entries:
        entry.unlink(missing_ok=True)
    return bool(entries)
