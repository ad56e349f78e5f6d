"""A number of the paper and ours, and tables of such pairs."""

import math
from typing import NamedTuple

import numpy as np

PAPER_SEEDS = 4


class Comparison(NamedTuple):
    """One number of the paper and ours.

    Attributes:
      paper: mean and deviation over 4 seeds, or ``None`` where the paper has no such row.
      ours: one value per seed.
      digits: shown after the point.
    """

    paper: tuple[float, float] | None
    ours: tuple[float, ...]
    digits: int

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in standard errors of both means combined.

        One seed has no deviation of its own; the paper's stands in for it.
        """
        if self.paper is None or not self.ours:
            return None
        mean, deviation = self.paper
        own = float(np.std(self.ours)) if len(self.ours) > 1 else deviation
        error = math.sqrt(deviation**2 / PAPER_SEEDS + own**2 / len(self.ours))
        return (float(np.mean(self.ours)) - mean) / error if error > 0 else None

    def paper_text(self) -> str:
        """``mean ± deviation`` of the paper."""
        if self.paper is None:
            return "-"
        return f"{self.paper[0]:.{self.digits}f} ± {self.paper[1]:.{self.digits}f}"

    def mean_text(self) -> str:
        """``mean ± deviation`` of ours; or that it was not run."""
        if not self.ours:
            return "not run"
        text = f"{np.mean(self.ours):.{self.digits}f}"
        return text + (f" ± {np.std(self.ours):.{self.digits}f}" if len(self.ours) > 1 else "")

    def difference_text(self) -> str:
        """The difference with its sign, or nothing."""
        return "" if self.difference is None else f"{self.difference:+z.1f}"

    def ours_text(self) -> str:
        """Ours, the number of seeds and the difference; or that it was not run."""
        if not self.ours:
            return self.mean_text()
        difference = f", {self.difference_text()} SE" if self.difference_text() else ""
        return f"{self.mean_text()} (n={len(self.ours)}{difference})"

    @property
    def is_far(self) -> bool:
        """Whether ours is more than two standard errors from the paper's."""
        return self.difference is not None and abs(self.difference) > 2


class Column(NamedTuple):
    """What is compared in a column: a metric of runs on ``train_size`` examples."""

    heading: str
    metric: str
    train_size: int


class TableRow(NamedTuple):
    """A row: its label, the method as the paper calls it, one comparison per column."""

    label: str
    method: str
    comparisons: tuple[Comparison, ...]


class Table(NamedTuple):
    """A table of the paper, with ours.

    Attributes:
      title: says which.
      network: as the paper calls it.
      columns: the compared numbers.
      rows: of methods and their variants.
    """

    title: str
    network: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
