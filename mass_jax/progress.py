"""Progress of what takes longer than a moment, where somebody wants to know.

Progress is information: it is shown where the logging level lets information through, which
``--quiet`` does not, and libraries by default do not either.
"""

import logging
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 10.0


def time_left(seconds: float) -> str:
    """Time that remains: seconds under two minutes, then minutes.

    Example:
      >>> time_left(41.6), time_left(200.0)
      ('42 s left', '3.3 min left')
    """
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:,.1f} min left"


def track(items: Collection[Item], what: str) -> Iterator[Item]:
    """The items, with a bar and the time left on a terminal, a line now and then elsewhere.

    Args:
      items: to go through.
      what: is done with them, for people.

    Returns:
      The same items.

    Example:
      >>> list(track("abc", "spelling"))
      ['a', 'b', 'c']
    """
    if not logging.getLogger().isEnabledFor(logging.INFO):
        yield from items
        return
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            yield from bar.track(items)
        return
    began = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            left = time_left((now - began) / done * (len(items) - done))
            logging.info("%s %s/%s  %s", what, done, len(items), left)
        yield item
