"""Ends a process that makes no progress: a hang must not cost a night."""

import faulthandler
import os
import sys
import threading
from types import TracebackType

EXIT_CODE = 70


class Watchdog:
    """Ends the process when `alive` was not called for some minutes.

    XLA's CPU backend has been seen to hang in a batched triangular solve, and collectives hang
    when a companion dies unnoticed; the last good checkpoint is complete in both cases.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self._alive, self._over = threading.Event(), False

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        self._alive.set()

    def alive(self) -> None:
        """Says that there is progress."""
        self._alive.set()

    def _watch(self) -> None:
        assert self._seconds is not None
        while self._alive.wait(self._seconds):
            if self._over:
                return
            self._alive.clear()
        print(
            f"error: no progress for {self._seconds / 60:g} minutes (config.watchdog_minutes); the "
            "last checkpoint is good, run the same command to go on",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback()
        os._exit(EXIT_CODE)
