"""Figure 2: terms from checkpoints, and the picture."""

import json

import numpy as np
import pytest

from experiments import figure2
from mass_jax.config import apply_overrides, default_config, resolve
from mass_jax.data import load_dataset
from mass_jax.training import train


@pytest.mark.parametrize("method", figure2.METHODS)
def test_curves_of_a_run(method, tmp_path, monkeypatch):
    """Oracle: the run's own results at the last step, and one point per checkpoint."""
    monkeypatch.setattr(figure2, "_JACOBIAN_EXAMPLES", 20)
    changes = {
        "method": method, "beta": "0" if method == "softmax_ce" else "1e-3", "steps": "40",
        "checkpoint_every": "20", "keep_checkpoints": "100", "batch_norm": "false",
        "steps_per_dispatch": "20",
    }  # fmt: skip
    config = resolve(apply_overrides(default_config(), changes))
    dataset = load_dataset("digits")
    results = train(config, dataset, tmp_path, quiet=True)
    curves = figure2.estimate(config, dataset, tmp_path)
    assert curves["step"] == [20.0, 40.0]
    assert curves["accuracy"][-1] == pytest.approx(100 * results["accuracy"])
    assert all(np.isfinite(curves[term]).all() for term in figure2.TERMS)
    assert max(curves["cross_entropy"]) < np.log(8)  # better than guessing


def test_the_picture_shows_means_and_bands():
    """Oracle: means of the given curves, by hand."""
    runs = [
        {
            "method": method,
            "curves": {"step": [0.0, 1.0]} | {term: [seed, seed + 2.0] for term in figure2.TERMS},
        }
        for method in figure2.METHODS
        for seed in (0.0, 1.0)
    ]
    for axis in figure2.draw(runs).axes:
        assert len(axis.lines) == len(figure2.METHODS)
        np.testing.assert_allclose(axis.lines[0].get_ydata(), [0.5, 2.5])
        assert axis.get_ylabel()


def test_plot_only_needs_records(tmp_path, capsys):
    """Oracle: one line that says what to do; with records, a file."""
    arguments = ["--plot_only", f"--results={tmp_path}", f"--out={tmp_path / 'figure.png'}"]
    assert figure2.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error:")
    curves = {"step": [1.0]} | {term: [1.0] for term in figure2.TERMS}
    record = {"figure": 2, "method": "mass", "curves": curves}
    (tmp_path / "figure2-mass-seed0.json").write_text(json.dumps(record))
    assert figure2.main(arguments) == 0
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_records_of_other_lengths_stay_apart(tmp_path):
    """Oracle: what was put in."""
    for name in ("figure2-mass-seed0", "figure2-mass-seed1-steps20", "figure2-mass-seed10-steps2"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    assert figure2.records(tmp_path) == [{"name": "figure2-mass-seed0"}]
    assert figure2.records(tmp_path, 2) == [{"name": "figure2-mass-seed10-steps2"}]
