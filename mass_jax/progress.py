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
            minutes = (now - began) / done * (len(items) - done) / 60
            logging.info("%s %s/%s  %.1f minutes left", what, done, len(items), minutes)
        yield item
