"""Reading prepared TFDS directories, the cache of decoded arrays, and `load_dataset`.

Oracles: the arrays that were prepared, stock TFDS, and the decoder against its cache.
"""

import io
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from test_archives import declare_known, flipped, npz_file, put, synthetic_arrays
from test_dataset import one_line

import mass_jax
from mass_jax.data import DataError, load_dataset, prepare, sources, tfds_source
from mass_jax.data.known import CIFAR10_NORMALISATION, SVHN_NORMALISATION

ROOT = Path(mass_jax.__file__).parents[1]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """CIFAR-10 and SVHN made of noise, prepared once; tests work on copies."""
    folder = tmp_path_factory.mktemp("template")
    arrays = synthetic_arrays()
    with pytest.MonkeyPatch.context() as patch:
        declare_known(patch, arrays)
        source = put(folder, "arrays.npz", npz_file(arrays))
        for name in ("cifar10", "svhn_cropped"):
            prepare.prepare_from_files(name, [source], folder / "tfds")
    return arrays, folder / "tfds"


@pytest.fixture
def arrays(template, monkeypatch):
    declare_known(monkeypatch, template[0])
    return template[0]


@pytest.fixture
def data_dir(template, tmp_path):
    return shutil.copytree(template[1], tmp_path / "tfds")


@pytest.fixture
def directory(data_dir):
    return tfds_source.prepared_directory("cifar10", data_dir)


def cache_of(data_dir, split="train"):
    (cache,) = data_dir.glob(f".mass_jax_cache/cifar10/*/{split}")
    return cache


def assert_split(found, expected):
    images, labels = expected
    assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(found.images, images)
    np.testing.assert_array_equal(found.labels, labels)


@pytest.fixture
def decodings(monkeypatch):
    """The list of splits that were decoded rather than taken from the cache."""
    decoded = []
    decode = tfds_source.decode_split

    def counted(directory, split):
        decoded.append(split)
        return decode(directory, split)

    monkeypatch.setattr(tfds_source, "decode_split", counted)
    return decoded


# --- Decoding ---------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "test"])
def test_splits_come_in_the_order_of_their_ids(split, arrays, data_dir):
    """Oracle: the arrays that were prepared, and stock TFDS sorted by id; files are shuffled."""
    found = tfds_source.read_split("cifar10", split, data_dir)
    assert_split(found, arrays[split])
    stock = list(tfds.data_source("cifar10", split=split, data_dir=data_dir))
    assert [example["label"] for example in stock] != arrays[split][1].tolist()
    stock.sort(key=lambda example: example["id"])
    np.testing.assert_array_equal(found.images, np.stack([e["image"] for e in stock]))


def test_the_newest_version_is_taken(data_dir, directory):
    """Oracle: version numbers as numbers, not as text."""
    for version in ("3.0.10", "3.0.9", "10.0.0"):
        shutil.copytree(directory, directory.with_name(version))
    assert tfds_source.prepared_directory("cifar10", data_dir).name == "10.0.0"
    shutil.rmtree(directory.with_name("10.0.0"))
    assert tfds_source.prepared_directory("cifar10", data_dir).name == "3.0.10"


def test_other_data_under_a_known_name_is_refused(arrays, data_dir, monkeypatch):
    """Oracle: digests of other arrays; nothing is cached of what was refused."""
    declare_known(monkeypatch, synthetic_arrays(seed=1))
    with pytest.raises(DataError, match=one_line("cifar10 train images: sha256 .* expected")):
        tfds_source.read_split("cifar10", "train", data_dir)
    assert not list(data_dir.rglob("*.npy"))


def test_a_missing_split_is_named(arrays, data_dir):
    """Oracle: CIFAR-10 has train and test only."""
    with pytest.raises(DataError, match=one_line("no validation split, only .*train")):
        tfds_source.read_split("cifar10", "validation", data_dir)


def test_an_unprepared_name_is_refused(data_dir):
    """Oracle: nothing of that name was prepared."""
    with pytest.raises(DataError, match=one_line("mnist is not prepared in")):
        tfds_source.read_split("mnist", "train", data_dir)


RECORDS = "cifar10-train.array_record-00000-of-00001"
MANGLE = {
    "flipped in the middle": lambda data: flipped(data, len(data) // 2),
    "flipped early": lambda data: flipped(data, 70_000),
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "of another kind": lambda data: b"<html>\n" * 1000,
}


@pytest.mark.parametrize("how", MANGLE)
@pytest.mark.parametrize("name", [RECORDS, "dataset_info.json", "features.json"])
def test_damaged_preparations_are_one_line(name, how, arrays, data_dir, directory):
    """Oracle: the undamaged directory reads well above; the line says what to do."""
    path = directory / name
    data = path.read_bytes()
    if len(data) < 70_000 and how == "flipped early":
        path.write_bytes(flipped(data, 0))  # the opening brace
    else:
        path.write_bytes(MANGLE[how](data))
    with pytest.raises(DataError, match=one_line(f"{directory.name}.*prepare it again")):
        tfds_source.read_split("cifar10", "train", data_dir)


@pytest.mark.parametrize("name", [RECORDS, "features.json"])
def test_missing_files_of_a_preparation_are_one_line(name, arrays, data_dir, directory):
    """Oracle: the whole directory reads well above."""
    (directory / name).unlink()
    with pytest.raises(DataError, match=one_line("prepare it again")):
        tfds_source.read_split("cifar10", "train", data_dir)


def test_tfrecord_without_tensorflow_names_both_ways(arrays, data_dir, directory, monkeypatch):
    """Oracle: only TensorFlow reads tfrecord files; the other way is to prepare again."""
    info = directory / "dataset_info.json"
    text = info.read_text()
    assert "array_record" in text
    info.write_text(text.replace("array_record", "tfrecord"))
    monkeypatch.setattr(tfds_source, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=one_line("pip install tensorflow .* as array_record")):
        tfds_source.read_split("cifar10", "train", data_dir)


# --- The cache --------------------------------------------------------------------


def test_a_cached_split_equals_the_decoded_one(arrays, data_dir, monkeypatch):
    """Oracle: the first reading; the second must not decode."""
    first = tfds_source.read_split("cifar10", "train", data_dir)
    monkeypatch.setattr(tfds_source, "decode_split", lambda *_: pytest.fail("decoded again"))
    assert_split(tfds_source.read_split("cifar10", "train", data_dir), first)
    assert_split(first, arrays["train"])


def test_a_later_start_does_not_import_tensorflow_datasets(arrays, data_dir):
    """Oracle: ``sys.modules`` of a fresh process."""
    tfds_source.read_split("cifar10", "train", data_dir)
    script = (
        "import sys; from pathlib import Path; from mass_jax.data.tfds_source import read_split\n"
        f"print(read_split('cifar10', 'train', Path({str(data_dir)!r})).labels.tolist())\n"
        "print('tensorflow_datasets' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == [str(arrays["train"][1].tolist()), "False"]


def cache_damages(data):
    """Every byte of the header (bits and whole), and some of the rest; truncations."""
    for position in [*range(130), *np.linspace(130, len(data) - 1, 8).astype(int)]:
        if position < len(data):
            yield from (flipped(data, position, mask) for mask in (0x02, 0x08, 0xFF))
    yield from (data[:length] for length in (0, 5, 100, len(data) - 1))


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "manifest.json"])
def test_a_damaged_cache_is_never_believed(name, arrays, data_dir, monkeypatch):
    """Oracle: the arrays; wherever the damage is, the split is right and nothing escapes.

    Bit 2 turns the header's ``<i4`` into ``>i4``: the same bytes, other labels.
    """
    good = tfds_source.read_split("cifar10", "train", data_dir)
    monkeypatch.setattr(tfds_source, "decode_split", lambda *_: good)
    monkeypatch.setattr(tfds_source, "verify_split", lambda *_: None)
    monkeypatch.setattr(tfds_source.logging, "warning", lambda *_: None)
    path = cache_of(data_dir) / name
    data = path.read_bytes()
    failures = set()
    for damaged in cache_damages(data):
        path.write_bytes(damaged)
        try:
            assert_split(tfds_source.read_split("cifar10", "train", data_dir), good)
        except Exception as error:
            failures.add(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    assert not failures


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "manifest.json"])
def test_a_damaged_cache_is_decoded_again_and_repaired(name, arrays, data_dir, decodings):
    """Oracle: the number of decodings; one after the damage, none after the repair."""
    tfds_source.read_split("cifar10", "train", data_dir)
    path = cache_of(data_dir) / name
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) - 40))
    for count in (2, 2):
        assert_split(tfds_source.read_split("cifar10", "train", data_dir), arrays["train"])
        assert len(decodings) == count
    assert path.read_bytes() == data


def test_preparing_again_invalidates_the_cache(template, data_dir, tmp_path, monkeypatch):
    """Oracle: other arrays under the same name and version."""
    declare_known(monkeypatch, template[0])
    tfds_source.read_split("cifar10", "train", data_dir)
    other = synthetic_arrays(seed=1)
    declare_known(monkeypatch, other)
    source = put(tmp_path, "other.npz", npz_file(other))
    prepare.prepare_from_files("cifar10", [source], data_dir, overwrite=True)
    assert_split(tfds_source.read_split("cifar10", "train", data_dir), other["train"])


@pytest.mark.parametrize("blocked", [".mass_jax_cache", ".mass_jax_cache/cifar10"])
def test_no_place_for_a_cache_is_no_obstacle(blocked, arrays, data_dir, decodings, caplog):
    """Oracle: the arrays; a file where the cache would be, and a warning that says so."""
    blocker = data_dir / blocked
    blocker.parent.mkdir(exist_ok=True)
    blocker.write_bytes(b"")
    for count in (1, 2):
        assert_split(tfds_source.read_split("cifar10", "train", data_dir), arrays["train"])
        assert len(decodings) == count
    assert "no cache of decoded images" in caplog.text
    assert blocker.is_file()


def test_an_interrupted_cache_leaves_no_scratch(arrays, data_dir, monkeypatch, caplog):
    """Oracle: the file system; the disk is full when the second array is saved."""
    saved = []
    save = np.save

    def failing(path, array):
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(path)
        save(path, array)

    monkeypatch.setattr(tfds_source.np, "save", failing)
    assert_split(tfds_source.read_split("cifar10", "train", data_dir), arrays["train"])
    assert "No space left" in caplog.text
    assert not [path for path in (data_dir / ".mass_jax_cache").rglob("*") if path.is_file()]


# --- load_dataset -----------------------------------------------------------------


def test_load_dataset_brings_the_papers_problem(arrays, data_dir):
    """Oracle: the arrays, and the authors' statistics."""
    data = load_dataset("cifar10", data_dir)
    assert (data.name, data.num_classes, data.input_shape) == ("cifar10", 10, (32, 32, 3))
    assert_split(data.train, arrays["train"])
    assert_split(data.test, arrays["test"])
    assert data.normalisation is CIFAR10_NORMALISATION
    svhn, statistics = data.ood["svhn_cropped"]
    assert_split(svhn, arrays["test"])
    assert statistics is SVHN_NORMALISATION


def test_out_of_distribution_sets_are_cut_to_size(arrays, data_dir, monkeypatch):
    """Oracle: the first examples of the official order."""
    monkeypatch.setattr(sources, "NUM_OOD", 7)
    svhn, _ = load_dataset("cifar10", data_dir).ood["svhn_cropped"]
    assert_split(svhn, [array[:7] for array in arrays["test"]])


def test_load_dataset_reads_the_environment(arrays, data_dir, monkeypatch):
    """Oracle: ``TFDS_DATA_DIR``, as TFDS users expect."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert_split(load_dataset("cifar10", ood=()).test, arrays["test"])


def test_digits_need_no_directory(tmp_path):
    """Oracle: the bundled dataset's own name and size."""
    data = load_dataset("digits", tmp_path / "nowhere")
    assert (data.name, len(data.train.labels)) == ("digits", 1_100)


@pytest.mark.parametrize("missing", ["cifar10", "svhn_cropped"])
def test_an_unprepared_dataset_fails_at_once_with_both_ways(missing, data_dir, monkeypatch):
    """Oracle: the clock, and the two commands of the requirements."""
    shutil.rmtree(data_dir / missing)
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    command = f"python -m mass_jax.data.prepare {missing} --data_dir={data_dir}"
    start = time.perf_counter()
    with pytest.raises(DataError) as caught:
        load_dataset("cifar10", data_dir)
    assert time.perf_counter() - start < 5.0
    message = str(caught.value)
    assert "\n" not in message
    assert f"pip install tensorflow and run {command}" in message
    assert f"{command} --from=FILE" in message


def test_an_unprepared_dataset_is_downloaded_where_tensorflow_is(data_dir, arrays, monkeypatch):
    """Oracle: the call; preparing is left to TFDS, reading goes on."""
    moved = shutil.move(data_dir / "cifar10", data_dir.with_name("elsewhere"))
    monkeypatch.setattr(sources, "find_spec", lambda name: object())
    monkeypatch.setattr(prepare, "download", lambda name, place: shutil.move(moved, place / name))
    assert_split(load_dataset("cifar10", data_dir).train, arrays["train"])


@pytest.mark.parametrize("name", ["", "/", "/etc", "..", "no such name", "cifar10/nothing"])
def test_odd_names_are_one_line(name, data_dir, monkeypatch):
    """Oracle: nothing of that name is prepared."""
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=one_line("is not prepared in")):
        load_dataset(name, data_dir)


class GreyNoise(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A TFDS dataset like MNIST: one channel, no ids."""

    VERSION = tfds.core.Version("1.0.0")
    name = "grey_noise"
    side = 28

    def _info(self):
        image = tfds.features.Image(shape=(None, None, 1))
        label = tfds.features.ClassLabel(num_classes=4)
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(30), "test": self._generate_examples(12)}

    def _generate_examples(self, size):
        rng = np.random.default_rng(size)
        for index in range(size):
            side = self.side if index else 28
            stream = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (side, side), np.uint8)).save(stream, "PNG")
            stream.seek(0)
            yield index, {"image": stream, "label": index % 4}


def test_any_tfds_image_classification_name_loads(data_dir, arrays):
    """Oracle: stock TFDS in its own order; statistics by NumPy."""
    GreyNoise(data_dir=data_dir, file_format="array_record").download_and_prepare()
    data = load_dataset("grey_noise", data_dir, ood=())
    builder = tfds.builder_from_directory(tfds_source.prepared_directory("grey_noise", data_dir))
    for split, found in (("train", data.train), ("test", data.test)):
        stock = list(builder.as_data_source(split=split))
        assert_split(found, [np.stack([e[key] for e in stock]) for key in ("image", "label")])
    assert (data.num_classes, data.input_shape, data.ood) == (4, (28, 28, 1), {})
    np.testing.assert_allclose(data.normalisation.mean, [data.train.images.mean()], rtol=1e-6)
    with pytest.raises(DataError, match=one_line(r"svhn_cropped images have shape \(32, 32, 3\)")):
        load_dataset("grey_noise", data_dir)


def test_images_of_several_sizes_are_refused(data_dir):
    """Oracle: one image of 28 by 28 among images of 20 by 20."""

    class Uneven(GreyNoise, skip_registration=True):
        name = "uneven"
        side = 20

    Uneven(data_dir=data_dir, file_format="array_record").download_and_prepare()
    with pytest.raises(DataError, match=one_line("2 different shapes")):
        load_dataset("uneven", data_dir, ood=())
