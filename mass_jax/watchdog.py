"""Ends a process that makes no progress: a hang must not cost a night."""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_CODE = 70


@contextlib.contextmanager
def watchdog(minutes: float | None) -> Iterator[Callable[[], None]]:
    """Gives a function to call at every sign of life; ends the process when none comes.

    XLA's CPU backend has been seen to hang in a batched triangular solve, and collectives hang
    when a companion dies unnoticed; the last good checkpoint is complete in both cases.

    Args:
      minutes: to wait for a sign; ``None``: forever.
    """
    sign, is_over = threading.Event(), threading.Event()

    def watch(seconds: float) -> None:
        while sign.wait(seconds):
            if is_over.is_set():
                return
            sign.clear()
        print(
            f"error: no progress for {seconds / 60:g} minutes (config.watchdog_minutes); the "
            "last checkpoint is good, run the same command to go on",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback()
        os._exit(EXIT_CODE)

    if minutes is not None:
        threading.Thread(target=watch, args=(60 * minutes,), daemon=True).start()
    try:
        yield sign.set
    finally:
        is_over.set()
        sign.set()
