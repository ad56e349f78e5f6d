"""Runs beside the paper's cells: recorded whole, tabled with the right row of the paper."""

import json

import pytest

from experiments import cells, variants

RUN = {
    "network": "small_mlp",
    "method": "mass",
    "beta": 0.0,
    "train_size": 2500,
    "steps": 7,
    "dropout_rate": 0.0,
    "weight_decay": 0.0,
    "accuracy": 0.342,
    "nll": 3.0,
    "brier": 0.1302,
    "entropy": 0.061,
}


@pytest.fixture
def workdir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "results.json").write_text(json.dumps(RUN))
    seen = dict(python="3.12.0", packages={}, devices=[], cpu_count=2, commit=None, command=["x"])
    (path / "environment.json").write_text(json.dumps(seen))
    row = {"step": 7, "validation_accuracy": 0.2, "validation_nll": 4, "validation_brier": 0.1}
    (path / "metrics.jsonl").write_text(json.dumps({"step": 5}) + "\n" + json.dumps(row) + "\n")
    return path


def test_recorded_and_beside_the_paper(workdir, tmp_path, capsys):
    """Oracle: the run's files; Table 5 of arXiv:1905.07822 read by eye; differences by hand."""
    results = tmp_path / "variants"
    assert variants.main([str(workdir), "--name=q-rate", f"--results={results}"]) == 0
    assert "nll 3.0000" in capsys.readouterr().out
    record = json.loads((results / "q-rate.json").read_text())
    assert record["validation"][0]["validation_nll"] == 4
    assert "command" not in record["environment"]
    table = variants.beside_the_paper(results, tmp_path).splitlines()[2:]
    assert table == [
        "| SmallMLP, 2,500 examples, MASS, beta=0 | paper | 100,000 | 34.1 ± 0.6 | 33.60 ± 1.34 "
        "| 0.1285 ± 0.0012 | 0.061 ± 0.003 |",
        # 0.1 / (0.6 sqrt 2), (3 - 33.6) / (1.34 sqrt 2), ...
        "|  | q-rate | 7 | 34.2 (+0.1) | 3.00 (-16.1) | 0.1302 (+1.0) | 0.061 (+0.0) |",
    ]


def test_our_cells_stand_with_their_deviation_over_seeds(tmp_path):
    """Oracle: by hand: 8.14 ± 0.84 beside 8 and 10: (9 - 8.14) / sqrt(0.84^2 + 1)."""
    record = json.loads((cells.RESULTS / "small_mlp-softmax_ce-n2500-seed0.json").read_text())
    for name, nll in (("a", 8.0), ("b", 10.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record | {"nll": nll}))
    *_, line = variants.beside_the_paper(tmp_path / "none", tmp_path).splitlines()
    expected = ["100,000", "34.2 ± 0.0 (+0.0)", "9.00 ± 1.00 (+0.7)"]
    assert line.split(" | ")[1:5] == ["ours (n=2)", *expected]
    (tmp_path / "b.json").rename(tmp_path / "a-seed1.json")
    *_, line = variants.beside_the_paper(tmp_path, tmp_path / "none").splitlines()
    assert line.split(" | ")[1:5] == ["a (n=2)", *expected]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nowhere", "--name=x"], "no finished run"), (["", "--name=../x"], "plain name")],
)
def test_nonsense_is_refused(workdir, arguments, words, capsys):
    place = [arguments[0] or str(workdir), *arguments[1:]]
    with pytest.raises(SystemExit) as ended:
        variants.main(place)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
