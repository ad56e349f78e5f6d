"""Progress: on terminals a bar, elsewhere lines, nothing where nobody asked."""

import itertools
import logging

import pytest
from rich.console import Console

from mass_jax import progress


@pytest.fixture
def clock(monkeypatch):
    """Six seconds pass between two looks at it."""
    monkeypatch.setattr(progress.time, "monotonic", itertools.count(0, 6).__next__)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_lines_only_where_information_is_wanted(clock, caplog, level):
    """Oracle: the clock: an item takes 6 seconds, a line comes every 10."""
    with caplog.at_level(level):
        assert list(progress.track(range(4), "counting")) == [0, 1, 2, 3]
    lines = ["counting 1/4  36 s left", "counting 3/4  8 s left"]
    assert [r.getMessage() for r in caplog.records] == (lines if level == logging.INFO else [])


def test_bar_on_a_terminal(caplog, monkeypatch, capsys):
    terminal = lambda stderr: Console(stderr=stderr, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", terminal)
    with caplog.at_level(logging.INFO):
        assert list(progress.track("ab", "spelling")) == ["a", "b"]
    assert "spelling" in capsys.readouterr().err


def test_no_colour_where_none_is_wanted(caplog, monkeypatch, capsys):
    """Oracle: https://no-color.org; a bar has escape codes of movement, not of colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    test_bar_on_a_terminal(caplog, monkeypatch, capsys)
    terminal = Console(force_terminal=True)
    assert terminal.no_color
