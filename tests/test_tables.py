"""The paper's tables with ours: right numbers in the right place, in every format."""

import csv
import html
import io
import json
import re
import shutil
import subprocess

import pytest
from test_report import BROWSER, Page, browse

from experiments import cells, comparison, table_formats, tables
from experiments.variants import VARIANTS
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


def csv_lines(made):
    return list(csv.DictReader(io.StringIO(table_formats.as_csv(made))))


def numbers_of(made, **wanted):
    """The one line of the CSV form that has these values; plain MASS of Table 1 by default."""
    wanted = {
        "table": "1", "method": "MASS", "beta": "0.001", "dropout": "0.0", "steps": "100000",
        "batch_stats": "paper", "train_size": "2500", "metric": "accuracy",
    } | wanted  # fmt: skip
    (found,) = [line for line in csv_lines(made) if wanted.items() <= line.items()]
    return found


@pytest.mark.parametrize("path", tables.GENERATED, ids=lambda path: path.parent.name or "root")
def test_the_readmes_show_the_records(path):
    """Oracle: the command that writes them; run `python -m experiments.tables --write`."""
    assert tables.renewed(path) == path.read_text()


def test_the_first_table_shows_the_longest_runs():
    """Oracle: what was put in."""
    runs = [run(0.1, steps=2000), run(0.2), run(0.3, seed=1), run(0.4, batch_stats="frozen")]
    runs += [run(0.5, steps=2000, beta=0.0), run(0.6, steps=1000, beta=0.0)]
    rows = [line.split(" | ") for line in tables.what_was_run(runs).splitlines()[4:]]
    assert [row[2] for row in rows] == ["MASS, beta=0.001", "MASS, beta=0, 2,000 steps"]
    assert rows[0][4].startswith("25.0 ± 5.0 (n=2")
    assert rows[1][4] == "50.0 (n=1)"


def test_a_run_with_another_setting_is_in_no_row(tmp_path):
    """Oracle: a record of a cell, and the same with the hash of a variant."""
    record = json.loads((cells.RESULTS / f"{CELL.name}.json").read_text())
    (tmp_path / "cell.json").write_text(json.dumps(record))
    (tmp_path / "variant.json").write_text(json.dumps(record | {"config_hash": "0" * 12}))
    assert list(cells.records_by_name(tmp_path)) == ["cell"]


@pytest.mark.parametrize("path", sorted(cells.RESULTS.rglob("*.json")), ids=lambda p: p.stem)
def test_no_record_tells_where_files_lay(path):
    assert not re.search(r'["=]/', path.read_text())


@pytest.mark.parametrize(
    "path",
    sorted([*cells.RESULTS.glob("*-seed*.json"), *VARIANTS.glob("*.json")]),
    ids=lambda p: p.stem,
)
def test_every_record_can_be_made_again(path):
    """Oracle: the configuration its command resolves to."""
    record = json.loads(path.read_text())
    of_figure = path.stem.startswith("figure2")
    command, digest = ("made_by", "hash") if of_figure else ("command", "config_hash")
    options, overrides = parse(record[command].split()[3:])
    config = resolve(apply_overrides(load_config(options.config), overrides))
    assert config_hash(config) == record[digest]


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
    found = numbers_of(made)
    assert (found["paper_mean"], found["paper_std"], found["n"]) == ("32.7", "0.8", "2")
    assert float(found["our_mean"]) == pytest.approx(33.0)
    assert float(found["our_std"]) == pytest.approx(1.0)
    assert float(found["difference_in_standard_errors"]) == pytest.approx(0.369, abs=5e-4)


def test_one_seed_borrows_the_papers_deviation():
    """Oracle: by hand, (33.5 - 32.7) / (0.8 sqrt(1/4 + 1)) = 0.894."""
    seen = comparison.Comparison((32.7, 0.8), (33.5,), 1)
    assert seen.difference == pytest.approx(0.894, abs=5e-4)
    assert seen.ours_text() == "33.5 (n=1, +0.9 SE)"


def test_a_deviation_printed_as_zero_is_half_its_last_digit():
    """Oracle: by hand: 0.02 of a standard error sqrt(0.005^2 / 4 + 0.005^2)."""
    seen = comparison.Comparison((0.62, 0.0), (0.6,), 2)
    assert seen.difference == pytest.approx(-3.578, abs=5e-4)
    assert seen.is_far
    assert seen.deviations_text() == "0.60 (-2.8)"  # 0.02 / (0.005 sqrt 2)


def test_detectors_do_not_mix():
    """Oracle: the record itself."""
    record = run(0.3)
    record["ood"]["svhn_cropped"]["max_log_q"] = {"auroc": 0.9, "apr_in": 0.8, "apr_out": 0.7}
    made = tables.all_tables([record])
    by = lambda detector: numbers_of(made, table="11", metric="auroc", detector=detector)
    assert float(by("max_log_q")["our_mean"]) == 0.9
    assert float(by("entropy")["our_mean"]) == 0.5


def test_other_lengths_and_jacobians_have_rows_of_their_own():
    """Oracle: they must not enter the paper's row."""
    made = tables.all_tables([run(0.3, steps=2000), run(0.31, batch_stats="frozen")])
    labels = [row.label for row in made[0].rows]
    assert "MASS, beta=0.001, 2,000 steps" in labels
    assert "MASS, beta=0.001, frozen Jacobian" in labels
    assert (numbers_of(made)["our_mean"], numbers_of(made)["n"]) == ("", "0")
    assert numbers_of(made, steps="2000")["our_mean"] == "30.0"
    assert numbers_of(made, batch_stats="frozen")["our_mean"] == "31.0"


def test_a_data_frame_can_read_the_csv():
    """Oracle: the csv module and float; 1,014 numbers of the paper; one seed has no deviation."""
    made = tables.all_tables([run(0.32), run(0.34, 1), run(0.3, train_size=40_000)])
    header, *lines = csv.reader(io.StringIO(table_formats.as_csv(made)))
    assert {len(line) for line in lines} == {len(header)} == {len(set(header))}
    text = {"subject", "network", "method", "batch_stats", "detector", "metric"}
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    numbers = {
        name: [float(value) for value in values if value]
        for name, values in columns.items()
        if name not in text
    }
    assert len(numbers["paper_mean"]) == len(numbers["paper_std"]) == 1014
    assert set(numbers["table"]) == set(range(1, 15))
    assert set(numbers["dropout"]) == {0.0, cells.DROPOUT_RATE}
    assert set(numbers["weight_decay"]) == {0.0, cells.WEIGHT_DECAY}
    for line in csv_lines(made):
        assert (line["our_mean"] != "") == (int(line["n"]) > 0)
        assert (line["our_std"] != "") == (int(line["n"]) > 1)
        assert (line["beta"] == "") == (line["method"] == "SoftmaxCE")
        assert (line["batch_stats"] == "") == (line["method"] != "MASS")
        assert (line["detector"] != "") == ("detection" in line["subject"])
    assert {1, 2} <= set(numbers["n"])


def test_formats_say_the_same(tmp_path):
    """Oracle: each other; every number of the Markdown form is in the LaTeX and HTML forms."""
    made = tables.all_tables([run(0.3217)])
    numbers = lambda text: sorted(re.findall(r"\d+\.\d+", text))
    body = re.sub(r"Table \d+\.", "", table_formats.as_markdown(made))
    assert "32.2 (n=1" in body
    assert numbers(table_formats.as_latex(made)) == numbers(body)
    (tmp_path / "tables.html").write_text(table_formats.as_html(made))
    page = Page(tmp_path / "tables.html")
    assert len(page.all("table")) == 14
    assert numbers(page.text) == numbers(body)


@pytest.mark.parametrize("name", sorted(set(table_formats.FORMATS) - {"csv"}))
def test_abbreviations_are_explained(name):
    """Oracle: the rates of the rows marked D and WD; once, before the first table."""
    made = table_formats.FORMATS[name](tables.all_tables([]))
    words = "D: dropout 0.5; WD: weight decay 0.01."
    before = made[: made.index("Test accuracy, SmallMLP")]
    assert made.count(words) == before.count(words) == 1
    assert "standard errors (SE)" in before
    assert "n in ours" in before


def test_the_readmes_explain_abbreviations():
    """Oracle: the words, where the tables are."""
    for path in tables.GENERATED:
        assert path.read_text().count("D: dropout 0.5; WD: weight decay 0.01.") == 1


def test_latex_numbers_its_tables_itself():
    """Oracle: "Table 1: Table 1." is what a caption with a number of its own makes."""
    made = table_formats.as_latex(tables.all_tables([]))
    assert made.startswith("% needs \\usepackage{booktabs,graphicx}\n")
    captions = re.findall(r"\\caption\{(.*)\}", made)
    assert len(captions) == 14
    assert captions[0] == "Test accuracy, SmallMLP"
    assert not any("Table" in caption for caption in captions)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex installed")
def test_latex_fits_its_page(tmp_path):
    """Oracle: pdflatex, which tells of every box too wide, with the packages that we name."""
    made = table_formats.as_latex(tables.all_tables([run(0.32), run(0.34, 1)]))
    packages = re.match("% needs (.*)", made)[1]
    lines = [r"\documentclass{article}", packages, r"\begin{document}", made, r"\end{document}"]
    (tmp_path / "page.tex").write_text("\n".join(lines))
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout


# Scrolls a wide table to its middle and writes down where things are.
MEASURE = """<script>
  const box = [...document.querySelectorAll(".scroll")].find(b => b.scrollWidth > b.clientWidth);
  const label = box.querySelector("tbody th"), heading = box.previousElementSibling;
  const edge = () => label.getBoundingClientRect().left;
  const before = edge();
  box.scrollLeft = 100;
  parent.postMessage(JSON.stringify({
    moved: edge() - before, scrolled: box.scrollLeft,
    page: document.documentElement.scrollWidth,
    heading: heading.scrollWidth - heading.clientWidth,
    groups: [...box.querySelectorAll("thead tr:first-child th")].map(th => th.textContent.trim()),
    below: [...box.querySelectorAll("thead tr:last-child th")].map(th => th.textContent.trim()),
    paper: getComputedStyle(document.body).backgroundColor,
  }), "*");
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium installed (apt-get install chromium)")
@pytest.mark.parametrize(("scheme", "paper"), [(0, "rgb(22, 24, 27)"), (1, "rgb(255, 255, 255)")])
def test_a_phone_shows_the_tables(scheme, paper, tmp_path):
    """Oracle: Chromium's layout at the width of a phone; dark (0) and light (1) as it is told."""
    made = table_formats.as_html(tables.all_tables([run(0.32)]))
    made = re.sub(r"<meta http-equiv[^>]*>", "", made)  # it forbids the measuring script
    (tmp_path / "page.html").write_text(made.replace("</body>", MEASURE))
    (tmp_path / "frame.html").write_text(
        """<!DOCTYPE html><body><iframe src="page.html" style="width: 390px; border: 0"></iframe>
        <script>onmessage = m => { document.body.dataset.seen = m.data; };</script></body>"""
    )
    told = f"--blink-settings=preferredColorScheme={scheme}"
    document, console = browse((tmp_path / "frame.html").as_uri(), told, tmp_path=tmp_path)
    assert console == []
    seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', document)[1]))
    assert (seen["moved"], seen["scrolled"]) == (0, 100)
    assert seen["page"] <= 390
    assert seen["heading"] == 0
    assert seen["groups"] == ["method"] + [
        f"{size} examples · accuracy %" for size in ("2,500", "10,000", "40,000")
    ]
    assert seen["below"] == ["paper", "ours", "difference"] * 3
    assert seen["paper"] == paper


@pytest.mark.parametrize("name", table_formats.FORMATS)
def test_command(name, capsys):
    """Oracle: every table of the paper is printed."""
    assert tables.main([f"--format={name}"]) == 0
    printed = capsys.readouterr().out
    for table in tables.all_tables():
        shown = {"csv": f"\n{table.number},", "latex": f"{{{table.subject}}}"}
        assert shown.get(name, table.title) in printed
