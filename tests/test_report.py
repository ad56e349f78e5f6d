"""The report of a run: right numbers, well-formed, self-contained, safe, never in the way."""

import io
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mass_jax import predictions, report
from mass_jax.data import load_dataset
from mass_jax.main import main
from mass_jax.metrics import classification_metrics, detection_metrics

STEPS = [
    "--quiet", "--config.train_size=150", "--config.batch_size=32", "--config.steps=24",
    "--config.log_every=3", "--config.eval_every=8", "--config.weight_decay=1e-4",
]  # fmt: skip
FILES = ("results.json", "config.json", "environment.json", "metrics.jsonl", "predictions.npz")
EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """Elements of a page with their attributes, text of each, and errors of nesting."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.words, self._open = [], [], []
        self.feed(path.read_text())
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if data.strip() and "style" not in self._open:
            self.words.append(data.strip())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The one training run of this file."""
    workdir = tmp_path_factory.mktemp("report") / "run"
    assert main([*STEPS, f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of what a report is made from, to be damaged."""
    for name in FILES:
        shutil.copy(finished / name, tmp_path / name)
    return tmp_path


def command(workdir, capsys):
    """Exit code and lines on standard error."""
    capsys.readouterr()
    code = report.main([str(workdir)])
    return code, capsys.readouterr().err.splitlines()


def test_the_predictions_give_the_results(finished):
    """Oracle: results.json, computed from the arrays before they went to the file."""
    results = json.loads((finished / "results.json").read_text())
    seen = predictions.load(finished / "predictions.npz")
    dataset = load_dataset("digits")
    np.testing.assert_array_equal(seen.test.labels, dataset.test.labels)
    np.testing.assert_array_equal(
        seen.ood["digits_8_9"].labels, dataset.ood["digits_8_9"][0].labels
    )
    again = classification_metrics(seen.test.log_probs, seen.test.labels)
    assert {name: results[name] for name in again} == again
    assert seen.ood.keys() == results["ood"].keys()
    for name, split in seen.ood.items():
        assert split.log_probs.shape == (354, 8)
        assert results["ood"][name] == {
            detector: detection_metrics(seen.test.scores[detector], scores)
            for detector, scores in split.scores.items()
        }


def test_mistakes_are_the_extremes_of_the_wrong_ones(finished):
    """Oracle: sorting all test examples in Python, and the dataset's own images."""
    seen = predictions.load(finished / "predictions.npz")
    images = load_dataset("digits").test.images
    probs = np.exp(seen.test.log_probs.astype(float))
    wrong = [
        (probs[row].max(), row)
        for row, label in enumerate(seen.test.labels)
        if probs[row].argmax() != label
    ]
    assert len(wrong) > 8
    for mistakes, expected in (
        (seen.most_confident_mistakes, sorted(wrong, reverse=True)[:8]),
        (seen.least_confident_mistakes, sorted(wrong)[:8]),
    ):
        np.testing.assert_allclose(mistakes.confidence, [c for c, _ in expected])
        assert mistakes.images.dtype == np.uint8
        np.testing.assert_array_equal(mistakes.images, images[mistakes.rows])
        np.testing.assert_array_equal(mistakes.labels, seen.test.labels[mistakes.rows])
        np.testing.assert_array_equal(mistakes.predicted, probs[mistakes.rows].argmax(-1))


def synthetic(images, labels, name="other/set", detector="entropy"):
    """Predictions of class 0 everywhere, with confidence 0.9."""
    log_probs = np.log(np.tile([[0.9, 0.1]], (len(labels), 1)))
    split = predictions.SplitPredictions(
        np.asarray(labels), log_probs, {detector: np.arange(len(labels), dtype=float)}
    )
    return predictions.collect(split, {name: split}, images)


def test_float_images_fill_the_bytes():
    """Oracle: by hand; -1 is black, 1 is white, 0 in the middle."""
    images = np.array([-1.0, 0.0, 1.0]).reshape(3, 1, 1, 1)
    made = synthetic(images, [1, 1, 1])
    assert made.most_confident_mistakes.images.ravel().tolist() == [0, 128, 255]
    flat = synthetic(np.zeros((3, 1, 1, 1)), [1, 1, 1])
    assert flat.most_confident_mistakes.images.ravel().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("mistakes", "galleries", "pictures"), [(3, 1, 3), (10, 2, 10), (20, 2, 16)]
)
def test_no_mistake_is_shown_twice(mistakes, galleries, pictures):
    """Oracle: by hand; eight of each kind at most."""
    labels = np.array([1] * mistakes + [0] * (20 - mistakes))
    confidence = np.linspace(0.6, 0.9, 20)
    log_probs = np.log(np.stack([confidence, 1.0 - confidence], axis=1))
    split = predictions.SplitPredictions(labels, log_probs, {"entropy": confidence})
    made = predictions.collect(split, {}, np.zeros((20, 4, 4, 3), np.uint8))
    page = "".join(map(str, report._mistake_galleries(made)))
    assert page.count("<h3") == galleries
    assert page.count("<img") == pictures


def test_saving_and_loading(tmp_path):
    """Oracle: what was saved; a name with a slash, and NumPy's own reader without pickles."""
    made = synthetic(np.zeros((3, 4, 4, 3), np.uint8), [0, 1, 0])
    predictions.save(tmp_path / "p.npz", made)
    loaded = predictions.load(tmp_path / "p.npz")
    assert list(loaded.ood) == ["other/set"]
    np.testing.assert_array_equal(loaded.test.log_probs, made.test.log_probs)
    np.testing.assert_array_equal(loaded.least_confident_mistakes.rows, [1])
    with np.load(tmp_path / "p.npz", allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


@pytest.mark.parametrize(
    ("shape", "labels", "words"),
    [
        ((3, 5), [0, 1, 0], "row 1: true 1, predicted 0"),
        ((3, 4, 4, 2), [0, 1, 0], "1 of 3 test examples are misclassified"),
        ((3, 4, 4, 3), [0, 1, 0], "1 of 3 test examples are misclassified"),
        ((3, 4, 4, 1), [0, 0, 0], "None in 3 test examples"),
    ],
    ids=["vectors", "two channels", "colour", "no mistakes"],
)
def test_inputs_of_every_shape(shape, labels, words, copy):
    predictions.save(copy / "predictions.npz", synthetic(np.zeros(shape, np.uint8), labels))
    assert words in Page(report.write_report(copy)).text


def test_the_page_is_well_formed_and_accessible(finished):
    """Oracle: the rules of HTML that a parser can check; every picture has its words."""
    page = Page(finished / "report.html")  # checks nesting
    assert len(page.all("main")) == len(page.all("h1")) == len(page.all("title")) == 1
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    viewport = [meta for meta in page.all("meta") if meta.get("name") == "viewport"]
    assert "width=device-width" in viewport[0]["content"]
    assert page.all("html") == [{"lang": "en"}]
    images = page.all("img")
    assert len({image["alt"] for image in images}) >= len(images) - 16  # mistakes can be in both
    assert all(len(image["alt"]) > 10 for image in images)
    assert len(images) == 11 + 16  # plots and mistakes


def test_the_page_is_self_contained(finished):
    """Oracle: the policy in the page itself, and all that it refers to."""
    page = Page(finished / "report.html")
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert {link["href"] for link in page.all("a")} == {*FILES, "plots/"}
    assert all((finished / link["href"]).exists() for link in page.all("a"))
    assert "default-src 'none'" in page.all("meta")[1]["content"]


def test_the_page_tells_what_the_files_say(finished):
    """Oracle: the files, formatted here."""
    text = Page(finished / "report.html").text
    results = json.loads((finished / "results.json").read_text())
    environment = json.loads((finished / "environment.json").read_text())
    assert f"{results['accuracy']:.2%}" in text
    assert f"{results['nll']:.4f} NLL (nats)" in text
    for detector, scores in results["ood"]["digits_8_9"].items():
        assert f"digits_8_9 by {detector} {scores['auroc']:.4f} {scores['apr_out']:.4f}" in text
    assert f"packages.jax {environment['packages']['jax']}" in text
    assert results["command"] in text
    for name in ("cross_entropy", "entropy", "jacobian", "half_squared_norm"):
        assert f"{name} {report._LOSS_TERMS[name]}" in text
    assert report._LOSS_TERMS["rate"] not in text  # no term of this run
    assert "150 training examples, beta 0.001, 24 steps in" in text
    seen = predictions.load(finished / "predictions.npz").test
    for label in range(8):
        right = [p == label for p in seen.predicted[seen.labels == label]]
        assert f"{label} {len(right)} {np.mean(right):.4f}" in text


def test_detectors_below_chance_are_named(copy):
    """Oracle: the numbers in the file; terms are explained where they stand, and only there."""
    results = json.loads((copy / "results.json").read_text())
    for auroc, warned in ((0.49, True), (0.5, False)):
        results["ood"] = {"far": {"entropy": {"auroc": auroc}, "max_log_q": {"auroc": 0.9}}}
        results |= {"aurc": 0.00046828, "steps": 1500}
        (copy / "results.json").write_text(json.dumps(results))
        text = Page(report.write_report(copy)).text
        words = "AUROC below 0.5: takes strangers for more familiar than test examples"
        assert (f"{words} (far by entropy)." in text) == warned
        assert "AP (average precision): " in text
        assert "FPR95: " in text
        assert "4.68e-4 AURC" in text
        assert "1,500 steps" in text
    (copy / "results.json").write_text(json.dumps(results | {"ood": {}}))
    assert "FPR95" not in Page(report.write_report(copy)).text


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0.0000"), (0.97772, "0.9777"), (-4.6828e-4, "-4.68e-4"), (2.5e7, "2.50e7"),
     (float("inf"), "inf"), (3, "3"), ("-", "-")],
)  # fmt: skip
def test_numbers_fit_their_cards(value, words):
    assert report._shown(value) == words


def test_the_call_of_fit_is_told_with_its_workdir(copy):
    """Oracle: by hand; and numbers of training examples are called so."""
    results = json.loads((copy / "results.json").read_text())
    results |= {"command": "mass_jax.fit(network, x_train, y_train)"}
    for evaluated_on in ({}, {"evaluated_on": "training examples"}):
        (copy / "results.json").write_text(json.dumps(results | evaluated_on))
        text = Page(report.write_report(copy)).text
        assert f"mass_jax.fit(network, x_train, y_train, workdir='{copy}')" in text
        warned = "No test examples were given: these numbers are of the training examples." in text
        assert warned == bool(evaluated_on)


def test_changed_fields_come_first(finished):
    """Oracle: the command line of the run."""
    text = Page(finished / "report.html").text
    changed, folded = text[text.index("Configuration") :].split("fields at their default")
    for name, value, default in (("steps", 24, 1500), ("weight_decay", 0.0001, 0.0)):
        assert f"{name} {value} {default}" in changed
    assert "representation_dim 8" in folded
    assert "representation_dim" not in changed
    assert "data.ood none" in folded


def test_plots_are_files_too(finished):
    """Oracle: one for every picture that is not of a mistake, and the magic bytes."""
    made = sorted(path.name for path in (finished / "plots").iterdir())
    assert len(made) == 11
    assert {"reliability.png", "risk_coverage.png", "roc_digits_8_9.png"} <= set(made)
    assert {"training_jacobian.png", "scores_digits_8_9_max_log_q.png"} <= set(made)
    assert all((finished / "plots" / n).read_bytes().startswith(b"\x89PNG") for n in made)


def test_making_it_again_gives_the_same_bytes(finished, capsys):
    before = (finished / "report.html").read_bytes()
    (finished / "report.html").unlink()
    assert command(finished, capsys) == (0, [])
    assert (finished / "report.html").read_bytes() == before


def test_hostile_files_inject_nothing(copy):
    """Oracle: an HTML parser finds no element or attribute that the author did not write."""
    honest = Page(report.write_report(copy))
    shutil.rmtree(copy / "plots")
    results = json.loads((copy / "results.json").read_text())
    hostile = {name: EVIL if isinstance(value, str) else value for name, value in results.items()}
    scores = {name: EVIL for name in results["ood"]["digits_8_9"]["entropy"]}
    hostile |= {"accuracy": EVIL, "nll": [EVIL], "ood": {EVIL: {EVIL: scores, "entropy": EVIL}}}
    (copy / "results.json").write_text(json.dumps(hostile))
    for name in ("config.json", "environment.json"):
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**content, EVIL: {EVIL: EVIL}, "seed": EVIL}))
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, f"../../{EVIL}": 1.0}) for row in rows]
    (copy / "metrics.jsonl").write_text("\n".join(lines))
    images = np.zeros((3, 4, 4, 3), np.uint8)
    made = synthetic(images, [0, 1, 0], name=f"../{EVIL}", detector=EVIL)
    predictions.save(copy / "predictions.npz", made)

    page = Page(report.write_report(copy))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in honest.elements}
    allowed = {name for _, attributes in honest.elements for name in attributes}
    assert {name for _, attributes in page.elements for name in attributes} <= allowed
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    assert page.text.count("<script>alert(1)</script>") > 10  # as text it may be read
    written = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert {name for name in written if not name.startswith("plots/")} == {*FILES, "report.html"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "directory", "noise"])
def test_a_damaged_file_is_one_line_and_exit_2(name, damage, copy, capsys):
    """Oracle: the contract of the command line; the file is named, nothing is written."""
    path = copy / name
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        halves = {"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xff\x00" * 50}
        path.write_bytes(halves[damage])
    code, lines = command(copy, capsys)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert name in lines[0]
    assert not (copy / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", "[]"),
        ("results.json", '{"ood": []}'),
        ("results.json", '{"ood": {"set": 3}}'),
        ("results.json", "[" * 100_000),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}'),
        ("metrics.jsonl", '{"loss": 1.0}'),
        ("metrics.jsonl", '{"step": 1' + "0" * 5000 + ', "loss": 1.0}'),
        ("metrics.jsonl", '{"step": NaN, "loss": 1.0}'),
    ],
)
def test_valid_json_of_the_wrong_kind(name, content, copy, capsys):
    (copy / name).write_text(content)
    code, lines = command(copy, capsys)
    assert (code, len(lines)) == (2, 1)
    assert name in lines[0]


def changed_archive(path, changes):
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files} | changes
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())


class Bomb:
    """Leaves a trace if somebody unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "changes",
    [
        {"test/labels": np.zeros(3, int)},
        {"test/labels": np.full(343, 8)},
        {"test/labels": np.zeros(343)},
        {"test/log_probs": np.full((343, 8), np.nan)},
        {"test/scores/entropy": np.array(["a"] * 343)},
        {"detectors": np.array(["absent"])},
        {"ood_sets": np.array(["absent"])},
        {"mistakes/most_confident/images": np.zeros((8, 8, 8, 1))},
        {"mistakes/least_confident/confidence": np.array(["a"] * 8)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_arrays_that_do_not_fit_together(changes, copy, capsys):
    changed_archive(copy / "predictions.npz", changes)
    code, lines = command(copy, capsys)
    assert (code, len(lines)) == (2, 1)
    assert "predictions.npz is damaged" in lines[0]


def test_pickles_are_never_executed(copy, capsys):
    """Oracle: the trace that executing it would leave."""
    trace = copy / "executed"
    changed_archive(copy / "predictions.npz", {"detectors": np.array([Bomb(trace)], object)})
    assert command(copy, capsys)[0] == 2
    assert not trace.exists()


def again(finished, tmp_path, *, arguments=()):
    """The training command on a copy that lacks only its results."""
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    for name in ("results.json", "predictions.npz", "report.html"):
        (workdir / name).unlink()
    return workdir, main([*STEPS, f"--workdir={workdir}", *arguments])


def test_a_report_that_fails_does_not_fail_the_run(finished, tmp_path, monkeypatch, caplog, capsys):
    """Oracle: exit code 0, the results of the unhurt run, one line of warning."""

    def fail(workdir):
        raise RuntimeError("no ink\nat all")

    monkeypatch.setattr(report, "write_report", fail)
    with caplog.at_level(logging.WARNING):
        workdir, code = again(finished, tmp_path)
    assert code == 0
    messages = [r.getMessage() for r in caplog.records if "report" in r.getMessage()]
    assert len(messages) == 1
    assert messages[0].endswith("no ink at all")
    both = [json.loads((d / "results.json").read_text()) for d in (finished, workdir)]
    assert both[0]["nll"] == both[1]["nll"]
    assert not (workdir / "report.html").exists()


def test_predictions_come_before_results(finished, tmp_path, monkeypatch, capsys):
    """Oracle: a disk that is full when predictions are written leaves no results."""

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(predictions, "write_atomically", full)
    workdir, code = again(finished, tmp_path)
    assert code == 2
    assert "No space left" in capsys.readouterr().err
    assert not (workdir / "results.json").exists()


def test_evaluation_alone_writes_nothing(finished):
    """Oracle: the bytes and times of all files."""
    stamps = lambda: {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.name != ".lock"}
    before = stamps()
    assert main([*STEPS, f"--workdir={finished}", "--mode=evaluate"]) == 0
    after = {path: stamp for path, stamp in stamps().items() if path != finished}
    assert after == {path: stamp for path, stamp in before.items() if path != finished}


def browse(url, *options, tmp_path):
    """Runs the browser on a page; the document after loading, and its console."""
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
            "--virtual-time-budget=5000", *options, "--dump-dom", url,
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium installed (apt-get install chromium)")
def test_a_browser_shows_it(finished, tmp_path):
    """Oracle: Chromium's console, and its layout at the width of a phone and of a desk."""
    _, console = browse((finished / "report.html").as_uri(), tmp_path=tmp_path)
    assert console == []
    # A measuring script, which the page's own policy rightly forbids: in a copy without it.
    page = (finished / "report.html").read_text()
    page = re.sub(r"<meta http-equiv[^>]*>", "", page)
    measure = """<script>
      const images = [...document.images];
      parent.postMessage(JSON.stringify({
        broken: images.filter(i => i.naturalWidth === 0).length, images: images.length,
        page: document.documentElement.scrollWidth, window: window.innerWidth,
        cut: [...document.querySelectorAll(".scroll, pre")].filter(
          box => box.scrollWidth > box.clientWidth).map(box => box.ariaLabel)}), "*");
      console.log("heard");
    </script></body>"""
    (tmp_path / "measured.html").write_text(page.replace("</body>", measure))
    for width in (390, 1280):
        # In a frame, because no window of Chromium is as narrow as a phone.
        frame = f"""<iframe src="measured.html" style="width: {width}px; border: 0"></iframe>
          <script>onmessage = m => {{ document.body.dataset.measured = m.data; }};</script>"""
        (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><body>{frame}</body>")
        document, console = browse((tmp_path / "frame.html").as_uri(), tmp_path=tmp_path)
        assert len(console) == 1  # the console is heard, so its silence above means something
        measured = re.search(r'data-measured="([^"]*)"', document).group(1)
        measured = json.loads(measured.replace("&quot;", '"'))
        assert measured["broken"] == 0
        assert measured["images"] == 27
        assert measured["window"] == width
        assert measured["page"] <= width  # tables scroll in their own box, not the page
        wide = {"Out-of-distribution detection", "Fields that differ from the default"}
        wide |= {"Fields at their default"}
        assert set(measured["cut"]) <= (wide if width == 390 else set())
