"""The process of one cell: a training command that never outlives who started it.

Whoever starts a cell holds the other end of its standard input. However that one ends, by
``kill -9`` as well, the operating system closes the pipe and the training ends too: nobody
is left holding the directory of a cell that is started again elsewhere.

Ray imports this file in every worker: it must not import JAX, which takes seconds and memory.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_PREDECESSOR = 60.0


def run(
    command: Sequence[str],
    log: Path,
    is_stop_asked: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
) -> int:
    """Runs a training command to its end; returns its exit code.

    Args:
      command: the program and its arguments.
      log: gets what it prints.
      is_stop_asked: asked twice a second; once true, the training saves and stops.
      environment: variables it sees besides ours.
      directory: where it runs; ours by default.

    Raises:
      KeyboardInterrupt: is how Ray cancels a task; the training has saved and stopped.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=None if sys.stderr.isatty() else stream,
            env={**os.environ, **(environment or {})},
            cwd=directory,
            # Ctrl-C in a terminal is for us; the training would take ours for a second one.
            start_new_session=True,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=_SECONDS_BETWEEN_LOOKS)
                if is_stop_asked():
                    return _stop(process)
        except KeyboardInterrupt:
            _stop(process)
            raise
        finally:
            if process.stdin is not None:
                process.stdin.close()


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Lets it save; a second interrupt ends us, and with us the training."""
    process.send_signal(signal.SIGTERM)
    return process.wait()


def _end_with_parent() -> None:
    """Ends this process, as ``kill -9`` would, when standard input is closed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(128 + signal.SIGTERM)  # the last checkpoint is complete

    threading.Thread(target=watch, daemon=True).start()


def main(argv: list[str]) -> int:
    """``mass_jax.main`` that ends with its parent; returns the exit code."""
    _end_with_parent()
    # Only now, because it takes seconds in which the parent may end.
    from mass_jax import main as training
    from mass_jax.options import parse
    from mass_jax.workdir import is_locked

    # The one before us may need a moment to notice that its parent is gone.
    workdir, deadline = Path(parse(argv)[0].workdir), time.monotonic() + _SECONDS_FOR_PREDECESSOR
    while is_locked(workdir) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
