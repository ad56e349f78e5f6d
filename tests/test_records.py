"""The table of recorded runs: made by its command, whole, and of real runs."""

import json

import pytest

from experiments import records
from mass_jax.config import apply_overrides, config_hash, resolve
from mass_jax.options import load_config, parse


def test_the_readme_shows_the_records():
    """Oracle: the command that writes it; run `python -m experiments.records --write`."""
    text = records.README.read_text()
    assert records.with_table(text) == text


@pytest.mark.parametrize(
    "path", sorted((records.HERE / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_every_record_can_be_made_again(path):
    """Oracle: the configuration its command resolves to."""
    record = json.loads(path.read_text())
    options, overrides = parse(record["command"].split()[3:])
    config = resolve(apply_overrides(load_config(options.config), overrides))
    assert config_hash(config) == record["config_hash"]


def test_paper_values():
    """Oracle: Table 1 of arXiv:1905.07822, read by eye."""
    cell = {
        "network": "small_mlp", "method": "mass", "beta": 1e-3, "train_size": 2500,
        "weight_decay": 0.0, "dropout_rate": 0.0,
    }  # fmt: skip
    assert records.paper_value(cell, "accuracy") == "32.7 ± 0.8"
    assert records.paper_value(cell | {"train_size": 7}, "accuracy") == "-"
