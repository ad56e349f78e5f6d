"""Whole runs in PyTorch beside ours: the right numbers side by side, and clear refusals."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import peer_training
from experiments.cells import RESULTS, records_by_name
from mass_jax import half_log_det_jjt
from mass_jax.gaussian_mixture import GaussianMixture, log_prob

CELL = "small_mlp-softmax_ce-n40000-seed0"


def test_the_table_has_both(tmp_path):
    """Oracle: the numbers written into the two files."""
    peer = {"accuracy": 0.25, "nll": 1.5, "brier": 0.125}
    ours = json.loads((RESULTS / f"{CELL}.json").read_text())
    ours |= {"accuracy": 0.5, "nll": 2.5, "brier": 0.0625}
    (tmp_path / "peers.json").write_text(json.dumps({CELL: peer}))
    (tmp_path / f"{CELL}.json").write_text(json.dumps(ours))
    table = peer_training.beside_ours(tmp_path / "peers.json", tmp_path)
    assert f"| {CELL} | 25.0 | 50.0 | 1.50 | 2.50 | 0.1250 | 0.0625 |" in table


def test_recorded_pairs_are_of_equal_length():
    """Oracle: the steps in our record of the same cell."""
    ours = records_by_name(RESULTS)
    for name, peer in json.loads(peer_training.PEERS.read_text()).items():
        assert peer["steps"] == ours[name]["steps"]


@pytest.mark.parametrize(
    ("cell", "is_installed", "file", "words"),
    [
        ("small_mlp-softmax_ce-dropout-n2500-seed0", True, "p.json", "neither dropout nor weight"),
        (CELL, False, "p.json", "pip install torch"),
        (CELL, True, "none/p.json", "no such directory"),
    ],
)
def test_refusals(cell, is_installed, file, words, monkeypatch, capsys, tmp_path):
    """Oracle: one line, exit code 2, no file."""
    monkeypatch.setattr(
        peer_training.importlib.util, "find_spec", lambda name: object() if is_installed else None
    )
    with pytest.raises(SystemExit) as ended:
        peer_training.main([cell, f"--json={tmp_path / file}"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
    assert not (tmp_path / file).exists()


def test_batches_are_those_of_a_loader():
    """Oracle: PyTorch's own DataLoader."""
    torch = pytest.importorskip("torch")
    batches = peer_training._batches(10, 4)
    epoch = [next(batches) for _ in range(3)]
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_size=4, shuffle=True)
    assert [len(batch) for batch in epoch] == [len(batch) for batch in loader]
    assert sorted(torch.cat(epoch).tolist()) == list(range(10))


def test_the_peers_mixtures_and_log_determinants_are_ours():
    """Oracle: our own code, at the same parameters."""
    torch = pytest.importorskip("torch")
    from experiments import torch_peer

    torch.manual_seed(0)
    theirs, z = torch_peer.Mixtures(3, "random", classes=2, components=4), torch.randn(5, 3)
    parts = (theirs.logits, theirs.means, theirs.scale_tril)
    q = GaussianMixture(*(jnp.asarray(part.detach().numpy()) for part in parts))
    expected = theirs.log_prob(z).detach().numpy()
    np.testing.assert_allclose(log_prob(q, jnp.asarray(z.numpy())), expected, rtol=1e-4)

    x, weights = torch.randn(5, 7, requires_grad=True), torch.randn(7, 3)
    expected = torch_peer.half_log_det(x, torch.sin(x @ weights)).detach().numpy()
    f = lambda v: jnp.sin(v @ jnp.asarray(weights.numpy()))
    ours = half_log_det_jjt(f, jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
