"""Whole runs in PyTorch beside ours: the right numbers side by side, and clear refusals."""

import json

import pytest

from experiments import peer_training
from experiments.cells import RESULTS, records_by_name

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


def test_the_peers_mixtures():
    """Oracle: PyTorch's own distributions."""
    torch = pytest.importorskip("torch")
    from torch import distributions

    from experiments.torch_peer import Mixtures

    torch.manual_seed(0)
    mixtures, z = Mixtures(3, "random", classes=2, components=4), torch.randn(5, 3)
    normal = distributions.MultivariateNormal(mixtures.means, scale_tril=mixtures.scale_tril)
    weights = distributions.Categorical(logits=mixtures.logits)
    expected = distributions.MixtureSameFamily(weights, normal).log_prob(z[:, None])
    torch.testing.assert_close(mixtures.log_prob(z), expected)
