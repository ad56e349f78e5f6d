"""Checkpoints: what is saved comes back to the bit, and damage is never believed."""

import json
import logging
import os
import random

import jax.numpy as jnp
import numpy as np
import pytest

from mass_jax import checkpoint
from mass_jax.checkpoint import CheckpointError

TREE = {
    "weights": np.arange(12, dtype=np.float32).reshape(3, 4),
    "step": np.asarray(7, np.int32),
    "nested": {"half": jnp.ones((2, 2), jnp.bfloat16)},
}


def saved(directory, step=7, tree=TREE, **meta):
    return checkpoint.save(directory, step, tree, meta)


def assert_same(tree, again):
    flat, expected = checkpoint._named_leaves(again), checkpoint._named_leaves(tree)
    assert flat.keys() == expected.keys()
    for name in flat:
        assert flat[name].dtype == expected[name].dtype
        assert flat[name].tobytes() == expected[name].tobytes()


def test_round_trip_is_bitwise(tmp_path):
    digest = saved(tmp_path, seconds=1.5)
    found = checkpoint.restore_latest(tmp_path)
    assert (found.step, found.meta, found.digest) == (7, {"seconds": 1.5}, digest)
    assert_same(TREE, checkpoint.into_tree(TREE, found.arrays))


def test_nothing_to_restore(tmp_path):
    assert checkpoint.restore_latest(tmp_path / "absent") is None
    assert checkpoint.restore_latest(tmp_path) is None


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip_bit(file, generator):
    data = bytearray(file.read_bytes())
    position = generator.randrange(len(data) * 8)
    data[position // 8] ^= 1 << position % 8
    file.write_bytes(bytes(data))


def truncate(file, generator):
    data = file.read_bytes()
    file.write_bytes(data[: generator.randrange(len(data))])


DAMAGE = {"flip": flip_bit, "truncate": truncate, "delete": lambda file, _: file.unlink()}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_previous_one_used(tmp_path, kind, caplog):
    """Oracle: every file of the newest checkpoint damaged in turn, several times."""
    saved(tmp_path, 1)
    saved(tmp_path, 2, {**TREE, "step": np.asarray(9, np.int32)})
    newest = tmp_path / "2"
    generator = random.Random(0)
    for file in files_of(newest) * 3:
        original = file.read_bytes()
        if not original and kind != "delete":
            continue
        DAMAGE[kind](file, generator)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = checkpoint.restore_latest(tmp_path)
        assert found.step == 1, file
        assert_same(TREE, checkpoint.into_tree(TREE, found.arrays))
        assert len(caplog.records) == 1
        assert "\n" not in caplog.records[0].getMessage()
        file.write_bytes(original)
    assert checkpoint.restore_latest(tmp_path).step == 2  # the control: no damage


def test_additional_files_links_and_wrong_steps_are_refused(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "1"
    (path / "state" / "extra").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="does not belong"):
        checkpoint.verify(path, 1)
    (path / "state" / "extra").unlink()
    (path / "link").symlink_to(path / "meta.json")
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.verify(path, 1)
    (path / "link").unlink()
    os.rename(path, tmp_path / "5")
    with pytest.raises(CheckpointError, match="step 1"):
        checkpoint.verify(tmp_path / "5", 5)


def test_path_tricks_in_a_manifest_are_not_followed(tmp_path):
    saved(tmp_path / "checkpoints", 1)
    outside = tmp_path / "secret"
    outside.write_bytes(b"secret")
    manifest = tmp_path / "checkpoints" / "1" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["../../secret"] = checkpoint._sha256(outside)
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.verify(tmp_path / "checkpoints" / "1", 1)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"step": 1, "files": 3}', "\x80\x04}", ""],
    ids=["list", "empty object", "no files", "pickle", "empty"],
)
def test_malformed_manifests_are_refused(tmp_path, text):
    saved(tmp_path, 1)
    (tmp_path / "1" / "manifest.json").write_text(text)
    assert checkpoint.restore_latest(tmp_path) is None


def test_an_unfinished_save_is_invisible_and_replaced(tmp_path):
    """Oracle: a directory as a kill in the middle of a save leaves it."""
    (tmp_path / ".saving-7" / "state").mkdir(parents=True)
    assert checkpoint.restore_latest(tmp_path) is None
    saved(tmp_path)
    assert checkpoint.restore_latest(tmp_path).step == 7
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_saving_over_a_damaged_step_repairs_it(tmp_path):
    saved(tmp_path)
    (tmp_path / "7" / "meta.json").write_text("{}")
    saved(tmp_path)
    assert checkpoint.restore_latest(tmp_path).step == 7


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.2, 0.4], start=1):
        saved(tmp_path, step, validation_accuracy=accuracy)
    saved(tmp_path, 6)  # not validated
    checkpoint.prune(tmp_path, keep_last=2)
    assert sorted(checkpoint.steps(tmp_path)) == [2, 5, 6]


@pytest.mark.parametrize(
    "other",
    [
        {**TREE, "weights": np.zeros((4, 3), np.float32)},
        {**TREE, "weights": np.zeros((3, 4), np.float64)},
        {**TREE, "more": np.zeros(1, np.float32)},
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, other):
    saved(tmp_path)
    found = checkpoint.restore_latest(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.into_tree(other, found.arrays)
