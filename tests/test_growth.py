"""Growth of a step's cost: the right counts at the right sizes, and the picture."""

import json

import numpy as np
import pytest

from experiments import growth

TINY = growth.Size(n=2, r=3, B=8, depth=2)
IMAGE, WIDTHS = (4, 4, 1), (6, 5)


def test_flops_grow_with_the_jacobian_examples_as_the_cost_model_says():
    """Oracle: at the paper's sizes each Jacobian example costs 3 r + 1 forward passes of the
    network (46 of them), whose FLOPs are 2 (3072 400 + 400 200 + 200 15); small terms (Cholesky,
    BatchNorm) add a few per cent."""
    dataset = growth._random_dataset((32, 32, 3))

    def flops(n):
        size = growth.Size(n=n)
        network = growth._network(size, growth._WIDTHS)
        return growth.step_flops(growth._config(size), dataset, network)

    forward = 2 * (3072 * 400 + 400 * 200 + 200 * 15)
    per_example = (flops(20) - flops(10)) / 10
    assert per_example / forward == pytest.approx(46, rel=0.1)


def test_every_size_is_measured_and_drawn(tmp_path, monkeypatch, capsys):
    """Oracle: the axes asked for; the base is one step wherever it appears; lines and points
    of the picture are the numbers of the file."""
    axes = {"n": [2, 8], "r": [3, 4], "B": [8], "depth": [2]}
    small = lambda asked, repeats: measure(axes, 2, TINY, IMAGE, WIDTHS)
    measure = growth.measure
    monkeypatch.setattr(growth, "measure", small)
    assert growth.main(["--quick", f"--json={tmp_path / 'growth.json'}"]) == 0
    made = json.loads((tmp_path / "growth.json").read_text())
    assert "of peak" in capsys.readouterr().out
    assert {name: [p["value"] for p in points] for name, points in made["axes"].items()} == axes
    base = [made["axes"][name][0] for name in axes]
    assert len({point["ms"] for point in base}) == 1  # timed once, shown four times
    few, many = (point["flops"] for point in made["axes"]["n"])
    assert few < many
    assert made["axes"]["n"][0]["flops_without_term"] == made["axes"]["n"][1]["flops_without_term"]
    assert made["axes"]["n"][0]["flops_without_term"] < few
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    panel = growth.draw(made).axes[0]
    expected = [point["flops"] / made["matmul_gflops"] / 1e6 for point in made["axes"]["n"]]
    np.testing.assert_allclose(panel.lines[0].get_ydata(), expected)
    assert "/" not in json.dumps(made["environment"])  # no paths of this machine


def test_depth_two_is_the_paper_network():
    """Oracle: the default widths of SmallMLP."""
    assert growth._network(growth.Size(), growth._WIDTHS)(15).hidden == (400, 200)
    assert growth._network(growth.Size(depth=4), growth._WIDTHS)(15).hidden == (400, 200, 200, 200)
