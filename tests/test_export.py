"""Archives of finished runs: what goes in comes out; nothing else is let in."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

import mass_jax
from experiments import export
from mass_jax.archive import Archive, ArchiveError, read_archive, write_archive
from mass_jax.checkpoint import CheckpointError
from mass_jax.config import ConfigError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5))
Y = (X[:, 0] > 0).astype(int)
QUICK = {"quiet": True, "steps": 6, "config": {"batch_size": 16, "steps_per_dispatch": 6}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished fit of a named network, and its archive."""
    workdir = tmp_path_factory.mktemp("export") / "run"
    fitted = mass_jax.fit("small_mlp", X, Y, ood={"far": X + 9}, workdir=workdir, **QUICK)
    path = workdir.parent / "model.zip"
    assert export.main([str(workdir), f"--out={path}"]) == 0
    return fitted, workdir, path


def test_the_archive_is_the_run(run):
    """Oracle: the fitted model itself, and the files of its workdir."""
    fitted, workdir, path = run
    loaded = mass_jax.load(path)
    jax.tree.map(np.testing.assert_array_equal, loaded, fitted.params)
    jax.tree.map(np.testing.assert_array_equal, loaded, mass_jax.load(workdir))
    normal = fitted.normalise(X)
    assert mass_jax.cdi_loss(loaded, normal) == mass_jax.cdi_loss(fitted.params, normal)
    model = mass_jax.load_fitted(path)
    np.testing.assert_array_equal(model.predict_proba(X), fitted.predict_proba(X))
    for name, scores in fitted.ood_scores(X).items():
        np.testing.assert_array_equal(model.ood_scores(X)[name], scores)
    assert model.results == json.loads((workdir / "results.json").read_text())
    archive = read_archive(path)
    assert archive.metrics == (workdir / "metrics.jsonl").read_text()
    # Parameters only, no optimiser state: the file is little more than its numbers.
    numbers = sum(leaf.nbytes for leaf in jax.tree.leaves(fitted.params))
    assert path.stat().st_size < numbers + 60_000


def test_the_model_card_says_what_made_it(run):
    """Oracle: results.json of the run."""
    fitted, _, path = run
    card = read_archive(path).card
    assert fitted.results["command"] in card
    assert f"| accuracy | {fitted.results['accuracy']:.4f} |" in card
    assert fitted.results["data_sha256"]["train/images"] in card
    assert "Measured on training examples" in card
    assert "far by max_log_q" in card
    assert "## Limits" in card


def test_the_same_run_gives_the_same_bytes(run):
    _, workdir, path = run
    again = path.with_name("again.zip")
    export.export(workdir, again)
    assert again.read_bytes() == path.read_bytes()


def test_an_own_network_is_needed_again(tmp_path):
    """Oracle: the run before it was packed; another network is refused."""
    fitted = mass_jax.fit(nn.Dense(2), X, Y, workdir=tmp_path / "run", **QUICK)
    export.export(tmp_path / "run", tmp_path / "model.zip")
    model = mass_jax.load_fitted(tmp_path / "model.zip", network=nn.Dense(2))
    np.testing.assert_array_equal(model.predict_proba(X), fitted.predict_proba(X))
    with pytest.raises(ConfigError, match="network="):
        mass_jax.load(tmp_path / "model.zip")
    with pytest.raises(ConfigError, match="not the one of the run"):
        mass_jax.load(tmp_path / "model.zip", network=nn.Dense(2, use_bias=False))


def test_unfinished_and_absent_runs_are_refused(run, tmp_path, capsys):
    _, workdir, _ = run
    assert export.main([str(tmp_path), f"--out={tmp_path / 'x.zip'}"]) == 2
    assert "no good checkpoint to load; is it the workdir of a finished run?" in (
        capsys.readouterr().err
    )
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(workdir), str(copy)], check=True)
    (copy / "results.json").unlink()
    assert export.main([str(copy), f"--out={tmp_path / 'x.zip'}"]) == 2
    assert "not a finished run" in capsys.readouterr().err
    assert export.main([str(workdir), f"--out={tmp_path / 'absent' / 'x.zip'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.zip"))
    with pytest.raises(CheckpointError, match="no such workdir or archive"):
        mass_jax.load(tmp_path / "nowhere")


def refused(tmp_path, data, message):
    path = tmp_path / "bad.zip"
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match=message) as refusal:
        mass_jax.load(path)
    assert "\n" not in str(refusal.value)
    path.unlink()


def test_every_flipped_bit_and_every_cut_is_refused(tmp_path):
    """Oracle: one bit of every byte of a small archive, and cuts of every length."""
    path = tmp_path / "small.zip"
    write_archive(path, Archive({"a": np.zeros(2, np.float32)}, {}, {}, {}, "", ""))
    good = path.read_bytes()
    bad = tmp_path / "bad.zip"
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << (position % 8)
        bad.write_bytes(flipped)
        with pytest.raises(ArchiveError):
            read_archive(bad)
    for length in range(len(good)):
        bad.write_bytes(good[:length])
        with pytest.raises(ArchiveError):
            read_archive(bad)
    bad.write_bytes(good + b"\0")
    with pytest.raises(ArchiveError):
        read_archive(bad)
    bad.write_bytes(good)
    assert read_archive(bad).arrays["a"].tolist() == [0.0, 0.0]


def forged(path, changes, compression=zipfile.ZIP_STORED, manifest=True):
    """A self-consistent archive with members changed, as a forger would write it."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    members = {name: data for name, data in (members | changes).items() if data is not None}
    if manifest:
        digests = {
            name: hashlib.sha256(data).hexdigest()
            for name, data in members.items()
            if name != "manifest.json"
        }
        members["manifest.json"] = json.dumps({"format": 1, "sha256": digests}).encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name), data, compression)
        file.comment = b"sha256:" + b"0" * 64
    body = stream.getvalue()[:-64]
    return body + hashlib.sha256(body).hexdigest().encode()


class Weapon:
    """Unpickling it would leave a file behind."""

    def __reduce__(self):
        return (os.system, ("touch /tmp/mass_jax_was_here",))


def npy(array, allow_pickle=False):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def changed_json(path, name, **changes):
    with zipfile.ZipFile(path) as file:
        return json.dumps(json.loads(file.read(name)) | changes).encode()


def test_forged_archives_are_refused(run, tmp_path):
    """Oracle: the archive unchanged loads; each of these differs by one trick."""
    _, _, path = run
    (tmp_path / "good.zip").write_bytes(forged(path, {}))
    mass_jax.load(tmp_path / "good.zip")
    first = "arrays/0000.npy"
    huge = npy(np.zeros(2, np.float32)).replace(b"(2,), }          ", b"(2000000000,), }  ", 1)
    tricks = {
        "../../evil.npy": ({"../../evil.npy": b"x"}, "does not belong"),
        "absolute": ({"/tmp/evil": b"x"}, "does not belong"),
        "pickle": ({"params.pkl": pickle.dumps(Weapon())}, "does not belong"),
        "an array more": ({"arrays/9999.npy": npy(np.zeros(1))}, "names [0-9]+ arrays"),
        "an array less": ({first: None}, "names [0-9]+ arrays"),
        "no model": ({"model.json": None}, "missing"),
        "object array": ({first: npy(np.array([Weapon()]), True)}, "not plain numbers"),
        "a pickle for an array": ({first: pickle.dumps(Weapon())}, "damaged"),
        "a header too large": ({first: huge}, "not as large as its header"),
        "another shape": ({first: npy(np.zeros(3, np.float32))}, "another model"),
        "deep json": ({"model.json": b"[" * 200_000}, "nested too deeply|damaged"),
        "a list": ({"config.json": b"[]"}, "not a JSON object"),
        "an unknown field": (
            {"config.json": changed_json(path, "config.json", evil=1)},
            "describes no model",
        ),
        "a shape that is text": (
            {"model.json": changed_json(path, "model.json", input_shape=["os", 5])},
            "describes no model",
        ),
        "a normalisation of zeros": (
            {
                "model.json": changed_json(
                    path, "model.json", normalisation={"mean": [0] * 5, "std": [0] * 5}
                )
            },
            "describes no model",
        ),
    }
    assert huge != npy(np.zeros(2, np.float32))
    for changes, message in tricks.values():
        data = forged(path, changes)
        if message == "another model":
            (tmp_path / "bad.zip").write_bytes(data)
            with pytest.raises(CheckpointError, match=message):
                mass_jax.load(tmp_path / "bad.zip")
        else:
            refused(tmp_path, data, message)
    bomb = forged(path, {first: bytes(10**7)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 10**7
    refused(tmp_path, bomb, "compressed")
    refused(tmp_path, forged(path, {first: npy(np.ones(1))}, manifest=False), "sha256 is not")
    refused(tmp_path, pickle.dumps(Weapon()), "not an archive")
    refused(tmp_path, b"", "not an archive")
    assert not Path("/tmp/mass_jax_was_here").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.zip"]


def test_the_command_runs_as_a_module(run, tmp_path):
    _, workdir, path = run
    command = [sys.executable, "-m", "experiments.export", str(workdir)]
    root = Path(__file__).parent.parent
    out = tmp_path / "model.zip"
    done = subprocess.run(
        [*command, f"--out={out}"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    assert out.read_bytes() == path.read_bytes()
