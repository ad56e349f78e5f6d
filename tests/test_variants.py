"""Runs beside the paper's cells: recorded whole, tabled with the right row of the paper."""

import json

import pytest

from experiments import variants

RUN = {
    "network": "small_mlp",
    "method": "mass",
    "beta": 0.0,
    "train_size": 2500,
    "steps": 7,
    "accuracy": 0.25,
    "nll": 3.0,
    "brier": 0.1,
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
    """Oracle: the run's files; Table 5 of arXiv:1905.07822 read by eye (34.1, 33.60, 0.1285)."""
    results = tmp_path / "variants"
    assert variants.main([str(workdir), "--name=q-rate", f"--results={results}"]) == 0
    assert "nll 3.0000" in capsys.readouterr().out
    record = json.loads((results / "q-rate.json").read_text())
    assert record["validation"][0]["validation_nll"] == 4
    assert "command" not in record["environment"]
    assert variants.beside_the_paper(results).splitlines()[2] == (
        "| q-rate | small_mlp, mass, n=2,500, beta=0 | 7 | 25.0 | 34.1 ± 0.6 "
        "| 3.00 | 33.60 ± 1.34 | 0.1000 | 0.1285 ± 0.0012 |"
    )


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
