"""What the commands share: a parser whose complaints are one line, and kinds of values."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that answers bad arguments by one line, not by all its usage.

    Example:
      >>> parser = Parser(prog="count")
      >>> _ = parser.add_argument("--to", type=positive)
      >>> parser.parse_args(["--to=3"]).to
      3
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help explains all\n")


def positive(text: str) -> int:
    """An integer of at least one."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return number


def not_negative(text: str) -> float:
    """A finite number of at least zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least zero")
    return number


def comma_separated(kind: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    """Several values in one argument, such as ``0,1e-3``.

    Args:
      kind: turns one of them from text.
      example: of good text, for the complaint about another.
    """

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be like {example}") from None

    return parse
