"""The watchdog: ends what hangs, leaves alone what lives."""

import subprocess
import sys

from mass_jax.watchdog import EXIT_CODE

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


LIVES = """
import time
from mass_jax.watchdog import watchdog
with watchdog(0.5 / 60) as show_life:
    for _ in range(20):
        time.sleep(0.05)
        show_life()
with watchdog(None):
    time.sleep(0.1)
time.sleep(0.8)
print("still here")
"""


def test_what_lives_or_has_ended_is_left_alone():
    """Oracle: a process that shows life for twice the limit, then leaves, ends by itself."""
    done = subprocess.run(
        [sys.executable, "-c", LIVES], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "still here\n", "")
