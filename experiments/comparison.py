"""A number of the paper and ours, and tables of such pairs."""

import math
from typing import NamedTuple

import numpy as np

from experiments.cells import DROPOUT_RATE, METHODS, WEIGHT_DECAY

PAPER_SEEDS = 4
PAPER_STEPS = {"small_mlp": 100_000, "resnet20": 70_000}
ABBREVIATIONS = f"D: dropout {DROPOUT_RATE}; WD: weight decay {WEIGHT_DECAY}."
LEGEND = (
    f"Mean ± standard deviation over seeds: {PAPER_SEEDS} in the paper, n in ours. The difference "
    "is ours minus the paper's in standard errors (SE) of both means combined, deviation over root "
    "of seeds each; one seed borrows the paper's deviation, and a deviation printed as zero counts "
    f"as half its last digit. {ABBREVIATIONS}"
)


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
        theirs, own = self._deviations(self.paper[1])
        error = math.sqrt(theirs**2 / PAPER_SEEDS + own**2 / len(self.ours))
        return (float(np.mean(self.ours)) - self.paper[0]) / error

    def _deviations(self, printed: float) -> tuple[float, float]:
        """The paper's, of which zero is rounded and counts as half its last digit; and ours."""
        theirs = max(printed, 0.5 * 10**-self.digits)
        return theirs, float(np.std(self.ours)) if len(self.ours) > 1 else theirs

    def deviations_text(self) -> str:
        """Ours, and in parentheses ours minus the paper's in both deviations combined."""
        if self.paper is None or not self.ours:
            return self.mean_text()
        both = math.hypot(*self._deviations(self.paper[1]))
        difference = (float(np.mean(self.ours)) - self.paper[0]) / both
        return f"{self.mean_text()} ({difference:+z.1f})"

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


class Row(NamedTuple):
    """What is compared: a method as the paper's tables name it, or a variant of ours.

    Attributes:
      method, beta, weight_decay, dropout: as in the paper.
      batch_stats: definition of the Jacobian of our MASS runs, else ``None``.
      steps: of our runs.
    """

    method: str
    beta: float
    weight_decay: bool
    dropout: bool
    batch_stats: str | None
    steps: int

    def label(self, network: str) -> str:
        """As shown in a table."""
        shown = {name: title for title, name in METHODS.items()}[self.method]
        parts = [shown]
        parts += [f"beta={self.beta:g}"] if self.method != "softmax_ce" else []
        parts += ["WD"] if self.weight_decay else []
        parts += ["D"] if self.dropout else []
        parts += [f"{self.batch_stats} Jacobian"] if self.batch_stats == "frozen" else []
        if self.steps != PAPER_STEPS[network]:
            parts.append(f"{self.steps:,} steps")
        return ", ".join(parts)


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
      label: as shown.
      method: as the paper calls it.
      setting: what was trained.
      detector: of out-of-distribution examples, in the tables about them.
      comparisons: one per column.
    """

    label: str
    method: str
    setting: Row
    detector: str | None
    comparisons: tuple[Comparison, ...]


class Table(NamedTuple):
    """A table of the paper, with ours.

    Attributes:
      number: in the paper.
      subject: what it is about.
      network: as the paper calls it.
      columns: the compared numbers.
      rows: of methods and their variants.
    """

    number: int
    subject: str
    network: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]

    @property
    def title(self) -> str:
        """Number and subject."""
        return f"Table {self.number}. {self.subject}"
