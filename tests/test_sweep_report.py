"""The page of a sweep: states and numbers as the files say, safe, and alive in a browser."""

import html
import itertools
import json
import re

import pytest
from test_report import BROWSER, EVIL, Page, browse
from test_tables import run

from experiments import cells, sweep_report
from experiments.comparison import Column, Comparison, Row, Table, TableRow
from experiments.sweep_state import failure_file, log_file, remember, state
from mass_jax.config import config_hash

CELLS = [cells.Cell("small_mlp", "mass", 1e-3, False, False, 2500, seed) for seed in range(4)] + [
    cells.Cell("resnet20", "vib", 1e-3, False, False, 40_000, 0)
]


@pytest.fixture
def swept(tmp_path):
    """A sweep with a cell in every state: two done, one failed, one started, one waiting."""
    work, results = tmp_path / "work", tmp_path / "results"
    results.mkdir()
    remember(CELLS, work)
    environment = {
        "python": "3.11.2", "packages": {"jax": "0.10"}, "devices": ["cpu:cpu"], "cpu_count": 2,
        "commit": "c" * 40,
    }  # fmt: skip
    for cell, accuracy in zip(CELLS[:2], (0.9, 0.92), strict=True):
        known = {"config_hash": config_hash(cell.config()), "train_seconds": 600.0}
        record = run(accuracy, cell.seed, environment=environment, **known)
        (results / f"{cell.name}.json").write_text(json.dumps(record))
        (work / cell.name).mkdir()
        (work / cell.name / "report.html").touch()
    failure_file(CELLS[2], work).write_text(f"(1): {EVIL}\n")
    log_file(CELLS[3], work).touch()
    return work, results


def test_states_are_read_from_files(swept):
    """Oracle: the fixture."""
    found = [state(cell, *swept) for cell in CELLS]
    assert found == ["done", "done", "failed", "started", "waiting"]
    remember(CELLS[:2], swept[0])  # again: nothing is there twice


def test_the_page_tells_what_the_files_say(swept):
    """Oracle: by hand: Table 1 has 32.7 ± 0.8; (91 - 32.7) / sqrt(0.8^2/4 + 1/2) = 71.8."""
    page = Page(sweep_report.write_report(*swept))
    for words in (
        "5 runs asked for. SmallMLP: MASS on 2,500 examples, seeds 0, 1, 2, 3; ResNet20: VIB",
        "2 recorded 1 failed 1 running, or broken off 1 waiting",
        "32.7 ± 0.8 91.0 ± 1.0 (n=2) +71.8", "D: dropout 0.5; WD: weight decay 0.01.",
        "not run", "Table 14.", "cccccccccccc 2 3.11.2 cpu:cpu 2 jax 0.10",
    ):  # fmt: skip
        assert words in page.text, words
    parts = [page.text.index(f" {name} ") for name in ("Progress", "Runs", "Paper and ours")]
    assert parts == sorted(parts)
    for link in page.all("a"):
        assert (swept[0] / link["href"]).is_file()
    links = sorted(link["href"] for link in page.all("a"))
    names = [cell.name for cell in CELLS]
    assert links == sorted(
        [f"../results/{name}.json" for name in names[:2]]
        + [f"{name}/report.html" for name in names[:2]]
        + [f"{names[3]}.log"]
    )


def test_no_runs_are_said(tmp_path):
    """Oracle: an empty directory; "nothing matches" would blame the filters."""
    page = Page(sweep_report.write_report(tmp_path, tmp_path))
    assert "No run was asked for, and none is recorded." in page.text
    assert {"id": "runs"} not in page.all("div")


def test_one_is_not_many(tmp_path):
    """Oracle: English."""
    remember(CELLS[:1], tmp_path)
    page = Page(sweep_report.write_report(tmp_path, tmp_path))
    assert "1 run asked for. SmallMLP: MASS on 2,500 examples, seed 0." in page.text


@pytest.mark.parametrize(("run_rows", "is_ticked"), [(0, False), (2, True), (5, False)])
def test_what_was_not_run_is_hidden_where_it_is_most(run_rows, is_ticked):
    """Oracle: by hand, of ten rows; with none run, the page would be empty."""
    setting = Row("mass", 0.0, False, False, "paper", 1)
    rows = [
        TableRow("MASS", "MASS", setting, None, (Comparison(None, (1.0,) * (i < run_rows), 1),))
        for i in range(10)
    ]
    table = Table(1, "", "SmallMLP", (Column("", "nll", 1),), tuple(rows))
    assert sweep_report._few_were_run([table]) == is_ticked


def test_the_page_is_well_formed_and_safe(swept):
    """Oracle: an HTML parser; the one script is ours, and what a log says is text."""
    page = Page(sweep_report.write_report(*swept))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert all("onerror" not in attributes for _, attributes in page.elements)
    assert EVIL in page.text
    policy = page.all("meta")[1]["content"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_command(tmp_path, capsys):
    """Oracle: without a sweep, the records of the repository; a broken record is one line."""
    out = tmp_path / "page.html"
    assert sweep_report.main([f"--workdir={tmp_path}", f"--out={out}"]) == 0
    assert "No sweep was started" in Page(out).text
    (tmp_path / "bad.json").write_text("half a fi")
    assert sweep_report.main([f"--workdir={tmp_path}", f"--results={tmp_path}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--results", "--workdir"])
def test_a_mistyped_directory_is_an_error(option, tmp_path, capsys):
    """Oracle: one line that names it, exit code 2, and nothing written."""
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stopped:
        sweep_report.main([f"{option}={tmp_path / 'nope'}", f"--out={out}"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: argument {option}: there is no directory")
    assert "nope" in line
    assert not out.exists()


# Does what a person would, with the keyboard's own events, and writes down what is to be seen.
USE = """<script>
const seen = selector => [...document.querySelectorAll(selector)].filter(e => e.offsetParent);
const first = seen("section")[0], report = {ticked: seen("section").length};
seen("button.all")[0].click();
report.hash = location.hash;
const column = () => [...first.querySelectorAll("tbody tr")].map(r => r.cells[2].dataset.sort);
report.before = seen("section").length;
const button = first.querySelectorAll("thead button")[2];
button.focus();
report.focused = document.activeElement === button;
button.click();
report.ascending = [button.parentElement.getAttribute("aria-sort"), column()[0]];
first.querySelectorAll("thead button")[1].click();
report.paper = [...first.querySelectorAll("tbody tr")].map(r => r.cells[1].dataset.sort);
report.reset = button.parentElement.getAttribute("aria-sort");
const choose = (name, value) => {
  const field = document.forms[0].elements[name];
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new Event("change", {bubbles: true}));
};
choose("network", "SmallMLP"); report.network = seen("section").length;
choose("metric", "nll"); report.metric = seen("section").length;
report.columns = seen("section thead tr:last-child th").length;
choose("size", "2500"); report.size = seen("section h3").map(h => h.textContent);
choose("method", "MASS"); choose("run", true);
report.rows = seen("section tbody th").map(h => h.textContent);
report.runs = seen("#runs tbody tr").length;
report.told = document.querySelector("output").textContent;
report.address = location.hash;
choose("network", "ResNet20"); choose("size", "10000");
report.nothing = seen(".nothing").map(p => p.textContent.trim().split(/\\s+/).join(" "));
seen(".nothing button")[0].click();
report.nothing.push(seen(".nothing").length);
report.after = seen("section").length;
report.page = document.documentElement.scrollWidth;
const box = node => node.getBoundingClientRect(), style = node => getComputedStyle(node);
const textTop = node => {
  const range = document.createRange();
  range.selectNodeContents(node.querySelector("button") ?? node);
  return box(range).top;
};
report.headers = [...new Set(seen("#runs thead th").map(textTop))].length;
report.heights = [...new Set(seen(".sortable tbody tr").map(row => box(row).height % 1))];
report.broken = seen("section tbody th").filter(th => box(th).height > 33).length;
report.split = seen("tbody th span").filter(span => span.getClientRects().length > 1).length;
const wide = seen(".scroll").filter(node => node.scrollWidth > node.clientWidth);
report.shades = [...new Set(wide.map(node => style(node).backgroundAttachment))];
report.main = box(document.querySelector("main")).width;
parent.postMessage(JSON.stringify(report), "*");
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium installed (apt-get install chromium)")
def test_a_browser_filters_and_sorts(swept, tmp_path):
    """Oracle: Chromium's console and layout; the paper's Table 1 for order and counts."""
    path = sweep_report.write_report(*swept)
    document, console = browse(path.as_uri(), tmp_path=tmp_path)
    assert console == []
    assert "Shown: 4 runs, 3 tables with 4 rows." in document  # our script may run
    kept = f"{path.as_uri()}#network=ResNet20&method=nonsense&run=all"  # what a reload reads
    document, console = browse(kept, tmp_path=tmp_path)
    assert console == []
    assert re.search(r"Shown: 1 run, 7 tables with \d\d+ rows\.", document)
    page = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text())  # so may the test's, in a copy
    (tmp_path / "used.html").write_text(page.replace("</body>", USE))
    for width in (390, 1280):
        frame = f"""<iframe src="used.html" style="width: {width}px; border: 0"></iframe>
          <script>onmessage = m => {{ document.body.dataset.seen = m.data; }};</script>"""
        (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><body>{frame}</body>")
        document, console = browse((tmp_path / "frame.html").as_uri(), tmp_path=tmp_path)
        assert console == []
        seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', document)[1]))
        assert seen["focused"]
        assert (seen["before"], seen["after"]) == (14, 14)
        assert seen["ascending"] == ["ascending", "91.0"]  # the one that was run; others come last
        paper = [float(value) for value in seen["paper"] if value]
        assert paper == sorted(paper)
        assert seen["reset"] == "none"
        assert seen["network"] == 7
        assert seen["metric"] == 3
        assert seen["columns"] == 3 * 3
        assert len(seen["size"]) == 1
        assert "Uncertainty, SmallMLP, 2,500" in seen["size"][0]
        assert seen["rows"] == ["MASS, beta=0.001"]
        assert seen["runs"] == 4  # not the one that waits
        assert seen["told"] == "Shown: 4 runs, 1 table with 1 row."
        assert (seen["ticked"], seen["hash"]) == (3, "#run=all")
        assert seen["address"] == "#network=SmallMLP&method=MASS&size=2500&metric=nll"
        assert seen["nothing"] == ["Nothing matches. Show all"] * 2 + [0]
        assert seen["headers"] == 1  # one line, with and without a button
        assert seen["heights"] == [0]  # no fractions, which a fixed column rounds in another way
        assert (seen["broken"] == 0) == (width > 390)
        assert seen["split"] == 0
        assert seen["shades"] == ["local, scroll"]
        assert seen["main"] >= width - 15  # all of the window but its scrollbar
        assert seen["page"] <= width  # tables scroll in their own box, not the page
