"""SIGTERM and SIGINT as a request to save and stop; a second one stops at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """A signal stopped the run; ``signum`` says which."""

    def __init__(self, signum: int, what: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {what}")
        self.signum = signum


class StopSignal:
    """While active, the first signal is noted in ``signum`` and the second ends the process.

    Outside `deferred`, the first one also raises `Interrupted` in the main thread, as soon
    as Python gets a word in. The second must not wait for that (XLA may be compiling), so
    a thread of its own hears every signal the moment it comes.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            heard, spoken = os.pipe()
            os.set_blocking(spoken, False)
            self._pipe = (heard, spoken)
            self._previous_wakeup = signal.set_wakeup_fd(spoken, warn_on_full_buffer=False)
            for signum in _SIGNALS:
                self._previous[signum] = signal.signal(signum, self._in_main_thread)
            threading.Thread(target=self._listen, args=(heard,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous:
            for signum, previous in self._previous.items():
                signal.signal(signum, previous)
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._pipe[1])  # ends the listener

    @contextlib.contextmanager
    def deferred(self, defer: bool = True) -> Iterator[None]:
        """While active, the caller looks at ``signum`` when it suits; or no longer does."""
        before, self._deferred = self._deferred, defer
        try:
            if self.signum and not defer:
                raise Interrupted(self.signum, "")
            yield
        finally:
            self._deferred = before

    def _listen(self, heard: int) -> None:
        count = 0
        with open(heard, "rb", buffering=0) as stream:
            while received := stream.read(1):
                if received[0] in _SIGNALS:
                    count += 1
                    self.signum = self.signum or received[0]
                    if count > 1:
                        os._exit(128 + received[0])  # the last good checkpoint is complete

    def _in_main_thread(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.signum = self.signum or signum
        if not self._deferred:
            raise Interrupted(signum, "before anything was lost; run the same command to go on")
