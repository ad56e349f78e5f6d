"""``python -m mass_jax.data.prepare``: success, mistakes, kills.

Oracles: stock TFDS reading what was written, the arrays it was written from, and the
file system after a failure.
"""

import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow_datasets as tfds
from PIL import Image
from test_archives import (
    CIFAR10_FORMATS,
    NUM_TEST,
    binary_archive,
    changed,
    declare_known,
    flipped,
    grid,
    label_lines,
    npz,
    npz_file,
    png,
    put,
    synthetic_arrays,
    tar_gz,
    with_label,
)

import mass_jax
from mass_jax.data import prepare, tfds_source

ROOT = Path(mass_jax.__file__).parents[1]


@pytest.fixture
def arrays(monkeypatch):
    data = synthetic_arrays()
    declare_known(monkeypatch, data)
    return data


@pytest.fixture
def source(arrays, tmp_path):
    return put(tmp_path, "cifar10.npz", npz_file(arrays))


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "tfds"


def run(*arguments, **flags):
    return prepare.main([*arguments, *(f"--{name}={value}" for name, value in flags.items())])


def prepare_cifar10(source, data_dir, *more):
    return run("cifar10", *more, **{"from": source, "data_dir": data_dir})


def assert_one_line(capsys, message):
    """Exactly one line on stderr, ``error: ...``, that says what it should."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert re.search(f"^error: .*{message}", lines[0]), lines[0]


def assert_nothing_prepared(data_dir, name="cifar10"):
    assert tfds_source.prepared_directory(name, data_dir) is None
    assert not list(data_dir.glob(".preparing-*"))
    assert not list(data_dir.glob("**/*.array_record*"))


def assert_reads_back(data_dir, name, expected):
    """Stock TFDS finds the arrays, byte for byte, under ids that count from zero."""
    width = {"cifar10": 5, "svhn_cropped": 6}[name]
    for split, (images, labels) in expected.items():
        found = tfds.data_source(name, split=split, data_dir=data_dir)
        assert len(found) == len(images)
        examples = sorted(found, key=lambda example: example["id"])
        identities = [example["id"] for example in examples]
        assert identities == [f"{split}_{i:0{width}d}".encode() for i in range(len(images))]
        for example, image, label in zip(examples, images, labels, strict=True):
            assert example["image"].tobytes() == image.tobytes()
            assert example["label"] == label


# --- Success ----------------------------------------------------------------------


@pytest.mark.parametrize("form", CIFAR10_FORMATS)
def test_stock_tfds_reads_what_was_prepared(form, arrays, tmp_path, data_dir, capsys):
    """Oracle: ``tfds.data_source`` and the arrays; the verified digests are printed."""
    name, build = CIFAR10_FORMATS[form]
    assert prepare_cifar10(put(tmp_path, name, build(arrays)), data_dir) == 0
    assert_reads_back(data_dir, "cifar10", arrays)
    output = capsys.readouterr()
    assert output.err == ""
    for splits in prepare.KNOWN_SPLITS["cifar10"].values():
        assert splits.images in output.out
        assert splits.labels in output.out
    assert str(tfds_source.prepared_directory("cifar10", data_dir)) in output.out
    assert not list(data_dir.glob(".preparing-*"))


def test_cifar10_classes_have_their_official_names(source, data_dir):
    """Oracle: the ten names on the dataset's page, in label order."""
    assert prepare_cifar10(source, data_dir) == 0
    label = tfds.builder("cifar10", data_dir=data_dir).info.features["label"]
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    assert [label.int2str(i) for i in range(10)] == names.split()


@pytest.mark.parametrize(("official_size", "prefixes"), [(2 * NUM_TEST, ["test"]), (NUM_TEST, [])])
def test_an_svhn_grid_is_recorded_as_a_prefix(
    official_size, prefixes, arrays, tmp_path, data_dir, monkeypatch
):
    """Oracle: the record file; 20 images are a prefix of 40 and the whole of 20."""
    declare_known(monkeypatch, arrays, svhn_size=official_size)
    images, labels = arrays["test"]
    tiles = put(tmp_path, "grid.png", png(grid(images)))
    lines = put(tmp_path, "labels.txt", label_lines(labels))
    assert run("svhn_cropped", **{"from": tiles, "labels": lines, "data_dir": data_dir}) == 0
    assert_reads_back(data_dir, "svhn_cropped", {"test": arrays["test"]})
    directory = tfds_source.prepared_directory("svhn_cropped", data_dir)
    record = json.loads((directory / "mass_jax_preparation.json").read_text())
    known = prepare.KNOWN_SPLITS["svhn_cropped"]["test"]
    assert record == {
        "source": ["grid.png"],
        "sha256": {"test": {"images": known.images, "labels": known.labels}},
        "examples": {"test": NUM_TEST},
        "prefix_of_split": prefixes,
    }


def test_an_svhn_train_split_is_prepared_from_its_official_file(
    arrays, tmp_path, data_dir, monkeypatch
):
    """Oracle: the arrays; two --from, of which one split has no digests of its own."""
    pairs = []

    def read(paths, labels):
        pairs.append((paths, labels))
        return arrays

    monkeypatch.setattr(prepare, "read_svhn", read)
    paths = [tmp_path / "train_32x32.mat", tmp_path / "test_32x32.mat"]
    flags = [f"--from={path}" for path in paths]
    assert run("svhn_cropped", *flags, data_dir=data_dir) == 0
    assert pairs == [(paths, None)]
    assert_reads_back(data_dir, "svhn_cropped", arrays)


def test_data_dir_defaults_to_the_environment(source, data_dir, monkeypatch):
    """Oracle: ``TFDS_DATA_DIR``, as TFDS users expect."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert run("cifar10", **{"from": source}) == 0
    assert tfds_source.prepared_directory("cifar10", data_dir) is not None


def test_overwrite_replaces_and_only_on_request(arrays, source, tmp_path, data_dir, capsys):
    """Oracle: modification times; refused without the flag, written anew with it."""
    assert prepare_cifar10(source, data_dir) == 0
    directory = tfds_source.prepared_directory("cifar10", data_dir)
    stamp = lambda: {p.name: p.stat().st_mtime_ns for p in directory.iterdir()}
    before = stamp()
    capsys.readouterr()
    assert prepare_cifar10(source, data_dir) == 2
    assert_one_line(capsys, f"{re.escape(str(directory))}: already prepared; add --overwrite")
    assert stamp() == before
    other = put(tmp_path, "binary.tar.gz", binary_archive(arrays))
    assert prepare_cifar10(other, data_dir, "--overwrite") == 0
    assert before.keys() == stamp().keys()
    assert all(stamp()[name] > before[name] for name in before)
    record = json.loads((directory / "mass_jax_preparation.json").read_text())
    assert record["source"] == ["binary.tar.gz"]
    assert_reads_back(data_dir, "cifar10", arrays)


def test_a_failed_overwrite_keeps_what_was_there(arrays, source, tmp_path, data_dir, capsys):
    """Oracle: the first preparation still reads back."""
    assert prepare_cifar10(source, data_dir) == 0
    wrong = put(tmp_path, "wrong.npz", npz_file(synthetic_arrays(seed=1)))
    capsys.readouterr()
    assert prepare_cifar10(wrong, data_dir, "--overwrite") == 2
    assert_one_line(capsys, "sha256 .*expected")
    assert_reads_back(data_dir, "cifar10", arrays)


# --- Mistakes ---------------------------------------------------------------------

NO_LABELS = lambda a: npz(x_train=a["train"][0], y_train=a["train"][1])
# What is wrong: (file name, bytes or None for no file, what the line must say)
MISTAKES = {
    "missing file": ("none.tar.gz", None, r"none\.tar\.gz: no such file"),
    "empty file": ("empty.tar.gz", lambda a: b"", r"empty\.tar\.gz"),
    "truncated archive": ("short.tar.gz", lambda a: binary_archive(a)[:99_999], r"short\.tar\.gz"),
    "flipped byte": ("flip.tar.gz", lambda a: flipped(binary_archive(a), 99_999), ""),
    "flipped byte in npz": ("flip.npz", lambda a: flipped(npz_file(a), 99_999), r"flip\.npz"),
    "wrong file": ("wrong.tar.gz", lambda a: tar_gz({"README": b"hello"}), "expected cifar-10-bin"),
    "text": ("page.tar.gz", lambda a: b"<html>\n" * 100, r"page\.tar\.gz"),
    "other images": (
        "other.npz",
        lambda a: npz_file(synthetic_arrays(seed=1)),
        r"cifar10 train images: sha256 [0-9a-f]{16}\.\.\..* expected [0-9a-f]{16}",
    ),
    "other labels": (
        "other.npz",
        lambda a: npz_file(changed(a, "test", labels=lambda y: y[::-1])),
        "cifar10 test labels: sha256 .* expected",
    ),
    "splits exchanged": (
        "other.npz",
        lambda a: npz_file({"train": a["test"], "test": a["train"]}),
        "cifar10 train: 20 examples, expected 60",
    ),
    "label 10": (
        "ten.tar.gz",
        lambda a: binary_archive(changed(a, "test", labels=with_label(10))),
        "labels",
    ),
    "label 10 in npz": (
        "ten.npz",
        lambda a: npz_file(changed(a, "test", labels=with_label(10))),
        "labels run from 0 to 10",
    ),
    "wrong shape": (
        "shape.npz",
        lambda a: npz_file(changed(a, "train", lambda x: x[:, 2:30, 2:30])),
        r"shape\.npz: x_train is uint8 \(60, 28, 28, 3\)",
    ),
    "fewer labels": (
        "fewer.npz",
        lambda a: npz_file(changed(a, "train", labels=lambda y: y[:-1])),
        "60 images but 59 labels",
    ),
    "train only": ("train.npz", NO_LABELS, "needs both x_train, y_train and x_test, y_test"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_files_are_refused_in_one_line(mistake, arrays, tmp_path, data_dir, capsys):
    """Oracle: exit code 2, one line on stderr, an untouched data directory."""
    name, build, message = MISTAKES[mistake]
    path = tmp_path / name if build is None else put(tmp_path, name, build(arrays))
    assert prepare_cifar10(path, data_dir) == 2
    assert_one_line(capsys, message)
    assert not data_dir.exists()


def test_a_directory_as_source_is_refused_in_one_line(tmp_path, data_dir, capsys):
    """Oracle: exit code 2, one line on stderr, an untouched data directory."""
    assert prepare_cifar10(tmp_path, data_dir) == 2
    assert_one_line(capsys, "no such file")
    assert not data_dir.exists()


@pytest.mark.parametrize("change", ["no labels", "short labels", "missing labels"])
def test_wrong_grids_are_refused_in_one_line(change, arrays, tmp_path, data_dir, capsys):
    """Oracle: exit code 2, one line on stderr, an untouched data directory."""
    images, labels = arrays["test"]
    flags = {"from": put(tmp_path, "grid.png", png(grid(images))), "data_dir": data_dir}
    if change == "short labels":
        flags["labels"] = put(tmp_path, "labels.txt", label_lines(labels[:-1]))
    elif change == "missing labels":
        flags["labels"] = tmp_path / "none.txt"
    assert run("svhn_cropped", **flags) == 2
    messages = {
        "no labels": "add --labels=FILE",
        "short labels": "20 images but 19 labels",
        "missing labels": r"none\.txt: no such file",
    }
    assert_one_line(capsys, messages[change])
    assert not data_dir.exists()


def test_other_datasets_have_no_local_files(source, data_dir, capsys):
    """Oracle: the line names the two that have and the function for the rest."""
    assert run("mnist", **{"from": source, "data_dir": data_dir}) == 2
    assert_one_line(capsys, "mnist: .*cifar10, svhn_cropped; .*dataset_from_arrays")


def test_tfrecord_without_tensorflow_names_what_to_install(source, data_dir, capsys, monkeypatch):
    """Oracle: only TensorFlow writes tfrecord files."""
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    assert prepare_cifar10(source, data_dir, "--file_format=tfrecord") == 2
    assert_one_line(capsys, "pip install tensorflow")
    assert not data_dir.exists()


@pytest.mark.parametrize("place", ["file", "below a file", "file in the way of the dataset"])
def test_unwritable_places_are_refused_in_one_line(place, source, tmp_path, capsys):
    """Oracle: a file in the way; the same for root as for anybody."""
    if place == "file in the way of the dataset":
        data_dir = tmp_path / "tfds"
        data_dir.mkdir()
        put(data_dir, "cifar10", b"")
    else:
        blocker = put(tmp_path, "blocker", b"")
        data_dir = blocker if place == "file" else blocker / "tfds"
    assert prepare_cifar10(source, data_dir) == 2
    assert_one_line(capsys, re.escape(str(data_dir)))
    if data_dir.is_dir():
        assert [path.name for path in data_dir.iterdir()] == ["cifar10"]


def test_a_disk_that_fills_up_is_one_line(source, data_dir, capsys):
    """Oracle: a limit on file sizes, at which the operating system refuses to write on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code = prepare_cifar10(source, data_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
        assert_nothing_prepared(data_dir)
    assert code == 2
    assert_one_line(capsys, "too large")


def test_an_error_while_writing_leaves_nothing(source, data_dir, capsys, monkeypatch):
    """Oracle: the file system; the 30th image cannot be encoded for want of space."""
    encoded = []
    save = Image.Image.save

    def failing(self, *arguments, **keywords):
        encoded.append(self)
        if len(encoded) == 30:
            raise OSError(28, "No space left on device")
        save(self, *arguments, **keywords)

    monkeypatch.setattr(Image.Image, "save", failing)
    assert prepare_cifar10(source, data_dir) == 2
    assert_one_line(capsys, "preparing cifar10 failed .*No space left")
    assert_nothing_prepared(data_dir)


def test_what_was_written_wrongly_is_not_kept(source, data_dir, capsys, monkeypatch):
    """Oracle: reading back; one pixel of the 30th image is changed on its way to the file."""
    encoded = []
    save = Image.Image.save

    def wrong(self, *arguments, **keywords):
        encoded.append(self)
        if len(encoded) == 30:
            self.putpixel((3, 4), tuple(255 - v for v in self.getpixel((3, 4))))
        save(self, *arguments, **keywords)

    monkeypatch.setattr(Image.Image, "save", wrong)
    assert prepare_cifar10(source, data_dir) == 2
    assert_one_line(capsys, "what was written differs from what was read")
    assert_nothing_prepared(data_dir)


# --- TFDS's own download ----------------------------------------------------------


def both_ways(data_dir):
    command = re.escape(f"python -m mass_jax.data.prepare cifar10 --data_dir={data_dir}")
    return f"pip install tensorflow and run {command}; or .*{command} --from=FILE"


def test_download_without_tensorflow_names_both_ways(data_dir, capsys, monkeypatch):
    """Oracle: the two ways of the requirements, as commands to copy."""
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    assert run("cifar10", data_dir=data_dir) == 2
    assert_one_line(capsys, both_ways(data_dir))


def test_download_without_a_network_names_the_host_and_both_ways(data_dir, capsys, monkeypatch):
    """Oracle: a name that does not resolve; TFDS, which would retry, is never asked."""
    monkeypatch.setattr(prepare, "find_spec", lambda name: object())
    refuse = lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-3, "no name server"))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(tfds, "builder", lambda *_, **__: pytest.fail("TFDS was asked"))
    assert run("cifar10", data_dir=data_dir) == 2
    assert_one_line(capsys, rf"www\.cs\.toronto\.edu cannot be reached.*{both_ways(data_dir)}")


@pytest.fixture
def online(monkeypatch):
    """As if TensorFlow were installed and every host answered."""
    monkeypatch.setattr(prepare, "find_spec", lambda name: object())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: io.BytesIO())


@pytest.mark.usefixtures("online")
def test_download_asks_tfds_for_array_record(data_dir, capsys, monkeypatch):
    """Oracle: the recorded call of ``tfds.builder``; array_record is read without TensorFlow."""
    calls = []

    class Builder:
        def __init__(self, *arguments, **keywords):
            calls.append((arguments, keywords))

        def download_and_prepare(self):
            calls.append("prepared")

    monkeypatch.setattr(tfds, "builder", Builder)
    assert run("mnist", data_dir=data_dir) == 0
    keywords = {"data_dir": data_dir, "file_format": "array_record"}
    assert calls == [(("mnist",), keywords), "prepared"]
    assert str(data_dir) in capsys.readouterr().out


@pytest.mark.usefixtures("online")
def test_a_name_tfds_does_not_know_is_one_line(data_dir, capsys):
    """Oracle: TFDS's own registry."""
    assert run("no_such_dataset", data_dir=data_dir) == 2
    assert_one_line(capsys, "no_such_dataset")


# --- As a command, and killed -----------------------------------------------------


def test_the_command_itself(tmp_path, data_dir):
    """Oracle: a real process; exit code 2, nothing on stdout, one line on stderr."""
    path = put(tmp_path, "wrong.tar.gz", tar_gz({"README": b"hello"}))
    command = [sys.executable, "-m", "mass_jax.data.prepare", "cifar10"]
    result = subprocess.run(
        [*command, f"--from={path}", f"--data_dir={data_dir}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"error: .*wrong\.tar\.gz: expected cifar-10.*\n", result.stderr)
    assert not data_dir.exists()


KILLED = """
import hashlib, os, signal, sys
from pathlib import Path
import numpy as np
from PIL import Image
from mass_jax.data import known, prepare, tfds_source

source, data_dir, moment = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
with np.load(source) as archive:
    for split in ("train", "test"):
        x, y = (archive[f"{part}_{split}"] for part in "xy")
        digests = [hashlib.sha256(array.tobytes()).hexdigest() for array in (x, y)]
        known.KNOWN_SPLITS["cifar10"][split] = known.KnownSplit(len(y), len(y), *digests)

calls = 0
def killing(function, at):
    def wrapped(*arguments, **keywords):
        global calls
        calls += 1
        if calls == at:
            os.write(2, b"killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    return wrapped

if moment == "writing":
    Image.Image.save = killing(Image.Image.save, 30)
elif moment == "reading back":
    tfds_source.decode_split = killing(tfds_source.decode_split, 2)
else:
    prepare.os.replace = killing(os.replace, 1)
prepare.prepare_from_files("cifar10", [source], data_dir)
"""


@pytest.mark.parametrize("moment", ["writing", "reading back", "renaming"])
def test_a_killed_preparation_leaves_nothing_that_looks_prepared(moment, arrays, source, data_dir):
    """Oracle: SIGKILL, after which the next run succeeds and clears the leftovers away."""
    result = subprocess.run(
        [sys.executable, "-c", KILLED, source, data_dir, moment],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert result.stderr == "killed"
    assert list(data_dir.glob(".preparing-*"))  # it was in the middle of it
    assert tfds_source.prepared_directory("cifar10", data_dir) is None
    assert prepare_cifar10(source, data_dir) == 0
    assert [path.name for path in data_dir.iterdir()] == ["cifar10"]
    assert_reads_back(data_dir, "cifar10", arrays)


class Killed(BaseException):
    """Ends the process at a chosen moment, as far as files can tell."""


class Listing(list):
    """What ``os.scandir`` returns, in an order of our choice."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("deleted", range(1, 6))
def test_a_killed_overwrite_leaves_a_whole_dataset_or_none(
    deleted, arrays, source, data_dir, monkeypatch
):
    """Oracle: reading it; killed after some files of the old preparation were deleted.

    A file system lists files in any order; here the one that makes a directory look
    prepared comes last.
    """
    assert prepare_cifar10(source, data_dir) == 0
    directory = tfds_source.prepared_directory("cifar10", data_dir)
    old = {path.stat().st_ino for path in directory.iterdir()}
    assert len(old) == 6
    unlink, scandir = os.unlink, os.scandir
    gone = []

    def worst_order(path):
        with scandir(path) as entries:
            return Listing(sorted(entries, key=lambda entry: entry.name == "dataset_info.json"))

    def dying(path, *, dir_fd=None):
        if len(gone) == deleted:
            raise Killed
        if os.stat(path, dir_fd=dir_fd).st_ino in old:
            gone.append(path)
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", dying)
        patch.setattr(os, "scandir", worst_order)
        with pytest.raises(Killed):
            prepare_cifar10(source, data_dir, "--overwrite")
    if tfds_source.prepared_directory("cifar10", data_dir) is not None:
        assert_reads_back(data_dir, "cifar10", arrays)
    assert prepare_cifar10(source, data_dir, "--overwrite") == 0
    assert_reads_back(data_dir, "cifar10", arrays)
    assert [path.name for path in data_dir.iterdir()] == ["cifar10"]


def test_a_killed_download_of_tfds_does_not_look_prepared(source, data_dir):
    """Oracle: TFDS's own name of an unfinished directory, which it renames at the end."""
    assert prepare_cifar10(source, data_dir) == 0
    directory = tfds_source.prepared_directory("cifar10", data_dir)
    with tfds.core.utils.incomplete_dir(directory) as unfinished:
        unfinished = Path(unfinished)
        shutil.rmtree(unfinished)
        shutil.copytree(directory, unfinished)
        shutil.rmtree(directory)
        assert unfinished.parent == directory.parent
        assert tfds_source.prepared_directory("cifar10", data_dir) is None
