"""The watchdog: ends what hangs, leaves alone what lives."""

import subprocess
import sys
import time

from mass_jax.watchdog import EXIT_CODE, watchdog

HANGS = """
import time
from mass_jax.watchdog import watchdog
with watchdog(0.2 / 60) as show_life:
    for _ in range(4):
        show_life()
        time.sleep(0.05)
    print("alive", flush=True)
    time.sleep(60)
"""


def test_a_hang_ends_the_process_with_a_word():
    """Oracle: the documented exit code and line, and where it hung; not before it hung."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == EXIT_CODE
    assert done.stdout == "alive\n"
    assert done.stderr.startswith("error: no progress for")
    assert "run the same command to go on" in done.stderr
    assert "line 9" in done.stderr  # the traceback of the sleep


def test_what_lives_or_has_ended_is_left_alone():
    """Oracle: this process is still here."""
    with watchdog(0.1 / 60) as show_life:
        for _ in range(5):
            time.sleep(0.03)
            show_life()
    with watchdog(None):
        pass
    time.sleep(0.3)
