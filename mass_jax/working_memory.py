"""Working memory that stays with the process from one training step to the next.

XLA's CPU backend allocates the working memory of a program at every call. By default glibc asks
the system for it, gives it back, and every page is faulted in and zeroed again: a step of
ResNet20 meets 70,000 to 170,000 such faults.
"""

import ctypes
import os
import sys

import jax

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h, see mallopt(3)
_SETTINGS = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}


def run_in_main_thread() -> None:
    """Lets programs run in the thread that calls them: what `keep_working_memory` needs.

    Call it before the first use of JAX. Training waits for every program anyway. Programs on
    several devices, and on accelerators, run as ever.

    Example: in a notebook that trains on a CPU, before anything else
      >>> run_in_main_thread()
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def keep_working_memory() -> bool:
    """Lets this process keep the memory it frees from now on; whether that could be had.

    Call it when all is compiled, for a compiler leaves more memory than is worth keeping. Nothing
    happens without `run_in_main_thread`, since glibc has large blocks to keep for that thread
    only; nor where the environment (``GLIBC_TUNABLES``, ``MALLOC_*_``) says how to allocate, or
    on other systems than Linux with glibc.

    Example:
      >>> kept = keep_working_memory()
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    if jax.config.read("jax_cpu_enable_async_dispatch") or chosen or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in _SETTINGS.items())
