"""SIGTERM and SIGINT as a request to save and stop; a second one stops at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """While active, the first signal is noted in ``signum``; the second exits."""

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.signum:
            os._exit(128 + signum)  # the last good checkpoint is already complete on disk
        self.signum = signum
