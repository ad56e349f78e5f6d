"""The paper's tables with ours: right numbers in the right place, in every format."""

import csv
import io
import json
import re

import pytest

from experiments import cells, comparison, table_formats, tables
from mass_jax.config import apply_overrides, config_hash, resolve
from mass_jax.options import load_config, parse

CELL = cells.Cell("small_mlp", "mass", 1e-3, False, False, 2500, 0)


def run(accuracy, seed=0, **changed):
    """A record as the sweep collects it."""
    scores = {"auroc": 0.5, "apr_in": 0.25, "apr_out": 0.75}
    return {
        "network": "small_mlp", "method": "mass", "beta": 1e-3, "train_size": 2500, "seed": seed,
        "steps": 100_000, "dataset": "cifar10", "dropout_rate": 0.0, "weight_decay": 0.0,
        "batch_stats": "paper", "accuracy": accuracy, "nll": 40.0, "brier": 0.13, "entropy": 0.1,
        "ood": {"svhn_cropped": {"entropy": scores, "max_log_q": scores}},
    } | changed  # fmt: skip


def numbers_of(made, title, label, column):
    """Lines of the CSV form."""
    rows = csv.DictReader(io.StringIO(table_formats.as_csv(made)))
    (found,) = [
        r for r in rows if title in r["table"] and r["row"] == label and r["column"] == column
    ]
    return found


@pytest.mark.parametrize("path", tables.GENERATED, ids=lambda path: path.parent.name or "root")
def test_the_readmes_show_the_records(path):
    """Oracle: the command that writes them; run `python -m experiments.tables --write`."""
    assert tables.renewed(path) == path.read_text()


@pytest.mark.parametrize("path", sorted(cells.RESULTS.glob("*-seed*.json")), ids=lambda p: p.stem)
def test_every_record_can_be_made_again(path):
    """Oracle: the configuration its command resolves to."""
    record = json.loads(path.read_text())
    options, overrides = parse(record["command"].split()[3:])
    config = resolve(apply_overrides(load_config(options.config), overrides))
    assert config_hash(config) == record["config_hash"]


def test_all_numbers_of_the_paper_are_there():
    """Oracle: the paper has 14 tables and 1,014 numbers, each a mean with its deviation."""
    made = tables.all_tables([])
    assert len(made) == 14
    numbers = [
        number
        for table in made
        for row in table.rows
        for pair in row.comparisons
        for number in pair.paper or ()
    ]
    assert len(numbers) == 2 * 1014


def test_paper_and_ours_meet():
    """Oracle: Table 1 of arXiv:1905.07822 read by eye (32.7 ± 0.8), the rest by hand:
    (33 - 32.7) / sqrt(0.8^2 / 4 + 1^2 / 2) = 0.369."""
    made = tables.all_tables([run(0.32, 0), run(0.34, 1), run(0.1, train_size=40_000)])
    found = numbers_of(made, "Table 1.", "MASS, beta=0.001", "2,500 examples, accuracy %")
    assert (found["paper_mean"], found["paper_std"], found["seeds"]) == ("32.7", "0.8", "2")
    assert float(found["our_mean"]) == pytest.approx(33.0)
    assert float(found["our_std"]) == pytest.approx(1.0)
    assert float(found["difference_in_standard_errors"]) == pytest.approx(0.369, abs=5e-4)


def test_one_seed_borrows_the_papers_deviation():
    """Oracle: by hand, (33.5 - 32.7) / (0.8 sqrt(1/4 + 1)) = 0.894."""
    seen = comparison.Comparison((32.7, 0.8), (33.5,), 1)
    assert seen.difference == pytest.approx(0.894, abs=5e-4)
    assert seen.ours_text() == "33.5 (n=1, +0.9 SE)"


def test_detectors_do_not_mix():
    """Oracle: the record itself."""
    record = run(0.3)
    record["ood"]["svhn_cropped"]["max_log_q"] = {"auroc": 0.9, "apr_in": 0.8, "apr_out": 0.7}
    made = tables.all_tables([record])
    title = "detection (SVHN), SmallMLP, 2,500"
    by = lambda detector: numbers_of(made, title, f"MASS, beta=0.001, by {detector}", "AUROC")
    assert float(by("max_log_q")["our_mean"]) == 0.9
    assert float(by("entropy")["our_mean"]) == 0.5


def test_other_lengths_and_jacobians_have_rows_of_their_own():
    """Oracle: they must not enter the paper's row."""
    made = tables.all_tables([run(0.3, steps=2000), run(0.31, batch_stats="frozen")])
    labels = [row.label for row in made[0].rows]
    assert "MASS, beta=0.001, 2,000 steps" in labels
    assert "MASS, beta=0.001, frozen Jacobian" in labels
    usual = numbers_of(made, "Table 1.", "MASS, beta=0.001", "2,500 examples, accuracy %")
    assert (usual["our_mean"], usual["seeds"]) == ("not run", "0")


def test_formats_say_the_same():
    """Oracle: each other; every number of the Markdown form is in the LaTeX and HTML forms."""
    made = tables.all_tables([run(0.3217)])
    numbers = lambda text: sorted(re.findall(r"\d+\.\d+", text))
    body = table_formats.as_markdown(made)
    assert "32.2 (n=1" in body
    assert numbers(table_formats.as_latex(made)) == numbers(body)
    page = table_formats.as_html(made)
    assert page.count("<table>") == 14
    assert numbers(page.split("<table>", 1)[1]) == numbers(body)


@pytest.mark.parametrize("name", table_formats.FORMATS)
def test_command(name, capsys):
    """Oracle: every table of the paper is printed."""
    assert tables.main([f"--format={name}"]) == 0
    printed = capsys.readouterr().out
    assert all(f"Table {number}." in printed for number in range(1, 15))
