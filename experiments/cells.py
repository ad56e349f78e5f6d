"""The cells of the paper's tables: which runs they need, in which order, and what was run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mass_jax.config import apply_overrides, config_hash, resolve
from mass_jax.options import CONFIG_DIR, load_config

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NETWORKS = {"SmallMLP": "small_mlp", "ResNet20": "resnet20"}
METHODS = {"SoftmaxCE": "softmax_ce", "VIB": "vib", "MASS": "mass"}
SEEDS = (0, 1, 2, 3)
TRAIN_SIZES = (2500, 40_000, 10_000)  # the most telling first
DROPOUT_RATE = 0.5
WEIGHT_DECAY = 0.01


class Cell(NamedTuple):
    """One run: a row of the paper's tables, a training set size and a seed.

    Attributes:
      network, method: names in the configuration.
      beta: zero for SoftmaxCE.
      dropout, weight_decay: the rows marked D and WD.
      train_size: examples.
      seed: of the run.
      batch_stats: definition of the Jacobian; the paper's rows are ``"paper"``.
      steps: ``None`` is the paper's number.
    """

    network: str
    method: str
    beta: float
    dropout: bool
    weight_decay: bool
    train_size: int
    seed: int
    batch_stats: str = "paper"
    steps: int | None = None

    @property
    def name(self) -> str:
        """The file its result has.

        Example:
          >>> Cell("small_mlp", "mass", 1e-3, False, False, 2500, 0).name
          'small_mlp-mass-beta0.001-n2500-seed0'
        """
        parts = [self.network, self.method]
        parts += [f"beta{self.beta:g}"] if self.method != "softmax_ce" else []
        parts += ["dropout"] if self.dropout else []
        parts += ["wd"] if self.weight_decay else []
        parts += [self.batch_stats] if self.batch_stats != "paper" else []
        parts += [f"n{self.train_size}", f"seed{self.seed}"]
        parts += [f"steps{self.steps}"] if self.steps is not None else []
        return "-".join(parts)

    @property
    def overrides(self) -> dict[str, str]:
        """What the cell changes in its config file."""
        changed = {
            "train_size": str(self.train_size),
            "seed": str(self.seed),
            "beta": f"{self.beta:g}",
        }
        if self.dropout:
            changed["dropout_rate"] = str(DROPOUT_RATE)
        if self.weight_decay:
            changed["weight_decay"] = str(WEIGHT_DECAY)
        if self.method == "mass":
            changed["jacobian.batch_stats"] = self.batch_stats
        if self.steps is not None:
            changed["steps"] = str(self.steps)
        return changed

    @property
    def config_file(self) -> str:
        return str(CONFIG_DIR / f"{self.method}_{self.network}.py")

    def config(self) -> ConfigDict:
        """Its whole configuration."""
        return resolve(apply_overrides(load_config(self.config_file), self.overrides))


def paper_tables() -> list[dict[str, Any]]:
    """The paper's 14 tables."""
    return json.loads((HERE / "paper_tables.json").read_text())


def paper_cells(network: str, steps: int | None = None, batch_stats: str = "paper") -> list[Cell]:
    """All runs the paper's tables of a network need, most informative first.

    First one seed of the rows everything is compared with, on few and on all
    examples; then the other rows, the middle size, and the other seeds.
    """
    rows = {
        (
            METHODS[row["method"]],
            row["beta"] or 0.0,
            bool(row["dropout"]),
            bool(row["weight_decay"]),
        )
        for table in paper_tables()
        if NETWORKS[table["network"]] == network
        for row in table["rows"]
    }
    telling = _TELLING[network]

    def importance(cell: Cell) -> tuple[Any, ...]:
        plain = not cell.dropout and not cell.weight_decay
        is_telling = plain and (cell.method, cell.beta) in telling
        rank = telling.index((cell.method, cell.beta)) if is_telling else len(telling)
        size = TRAIN_SIZES.index(cell.train_size)
        return cell.seed, cell.train_size == 10_000, not is_telling, size, not plain, rank, cell

    cells = [
        Cell(network, *row, train_size, seed, batch_stats if row[0] == "mass" else "paper", steps)
        for row in rows
        for train_size in TRAIN_SIZES
        for seed in SEEDS
    ]
    return sorted(cells, key=importance)


# The rows everything is compared with.
_TELLING = {
    "small_mlp": [("softmax_ce", 0.0), ("mass", 1e-3), ("vib", 1e-3), ("mass", 0.0)],
    "resnet20": [("softmax_ce", 0.0), ("mass", 1e-4), ("vib", 1e-3), ("mass", 0.0)],
}


def records_by_name(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All recorded runs by the name of their cell, in a stable order.

    A run with any other setting changed is none of a cell: see `experiments.variants`.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    runs = {name: record for name, record in found.items() if _is_of_a_cell(record)}
    order = ("network", "method", "beta", "train_size", "seed")
    return dict(sorted(runs.items(), key=lambda item: [item[1][field] for field in order]))


def _is_of_a_cell(record: Any) -> bool:
    if not isinstance(record, dict) or "config_hash" not in record:
        return False
    cell = Cell(
        record["network"],
        record["method"],
        record["beta"],
        record["dropout_rate"] > 0,
        record["weight_decay"] > 0,
        record["train_size"],
        record["seed"],
        record["batch_stats"] or "paper",
        record["steps"],
    )
    return config_hash(cell.config()) == record["config_hash"]


def records(directory: Path = RESULTS) -> list[dict[str, Any]]:
    """All recorded runs, in a stable order."""
    return list(records_by_name(directory).values())


def is_done(cell: Cell, directory: Path = RESULTS) -> bool:
    """Whether its result is there, and of the same configuration."""
    try:
        record = json.loads((directory / f"{cell.name}.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("config_hash") == config_hash(cell.config())
