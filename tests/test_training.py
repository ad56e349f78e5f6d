"""The training command in one process: accuracy, resume, logs, refusals."""

import json
import shutil
import signal

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import mass_jax
from mass_jax import checkpoint, training
from mass_jax.config import default_config, resolve
from mass_jax.data import load_dataset, normalise
from mass_jax.experiment import make_experiment
from mass_jax.main import main
from mass_jax.train_step import Batch

METHODS = {
    "mass": [],
    "vib": ["--config.method=vib"],
    "softmax_ce": ["--config.method=softmax_ce", "--config.beta=0"],
}
# Small and awkward: events that do not divide each other, batches across epochs, dropout.
SMALL = [
    "--quiet",
    "--config.train_size=150",
    "--config.batch_size=32",
    "--config.dropout_rate=0.1",
    "--config.steps_per_dispatch=5",
    "--config.log_every=3",
    "--config.eval_every=7",
    "--config.checkpoint_every=4",
    "--config.jacobian.batch_stats=paper",
    "--config.density_components=2",
]


def run(workdir, *arguments):
    return main([*SMALL, f"--workdir={workdir}", *arguments])


def rows_of(workdir):
    """Metric rows without the speed, which no two runs share."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.pop("examples_per_second") > 0
    return rows


def state_of(workdir):
    return checkpoint.restore_latest(workdir / "checkpoints")


def assert_same_end(one, other):
    first, second = state_of(one), state_of(other)
    assert first.step == second.step
    assert first.arrays.keys() == second.arrays.keys()
    for name, array in first.arrays.items():
        assert array.tobytes() == second.arrays[name].tobytes(), name
    assert rows_of(one) == rows_of(other)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Runs of 24 steps without interruption, by method."""
    directory = tmp_path_factory.mktemp("unbroken")
    for name, arguments in METHODS.items():
        assert run(directory / name, "--config.steps=24", *arguments) == 0
    return directory


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("first", [10, 16])
def test_resuming_is_bitwise_the_unbroken_run(name, first, unbroken, tmp_path):
    """Oracle: the same run without a stop; state, optimiser, statistics, metric rows."""
    assert run(tmp_path, f"--config.steps={first}", *METHODS[name]) == 0
    assert run(tmp_path, "--config.steps=24", *METHODS[name]) == 0
    # The shorter run also validated at its last step; the longer one did not.
    rows = [row for row in rows_of(tmp_path) if row["step"] != first]
    assert rows == [row for row in rows_of(unbroken / name) if row["step"] != first]
    one, other = state_of(tmp_path), state_of(unbroken / name)
    assert {k: v.tobytes() for k, v in one.arrays.items()} == {
        k: v.tobytes() for k, v in other.arrays.items()
    }


def test_rows_have_what_people_expect(unbroken):
    for name, terms in {
        "mass": {"cross_entropy", "entropy", "jacobian"},
        "vib": {"cross_entropy", "rate"},
        "softmax_ce": {"cross_entropy"},
    }.items():
        rows = rows_of(unbroken / name)
        common = {"step", "loss", "learning_rate", "gradient_norm", "accuracy", "parameter_norm"}
        assert all(common | terms <= row.keys() for row in rows)
        steps = [row["step"] for row in rows]
        assert steps == sorted({*range(3, 25, 3), 7, 14, 21, 24})
        validated = [row["step"] for row in rows if "validation_accuracy" in row]
        assert validated == [7, 14, 21, 24]


def test_the_loss_is_the_weighted_sum_of_its_terms(unbroken):
    row = rows_of(unbroken / "mass")[-1]
    expected = row["cross_entropy"] + 1e-3 * (row["entropy"] + row["jacobian"])
    np.testing.assert_allclose(row["loss"], expected, rtol=1e-5)


def test_results_and_files(unbroken):
    workdir = unbroken / "mass"
    results = json.loads((workdir / "results.json").read_text())
    facts = {"method": "mass", "network": "small_mlp", "beta": 1e-3, "train_size": 150}
    assert facts.items() <= results.items()
    assert results["checkpoint_sha256"] == state_of(workdir).digest
    assert 0 <= results["ood"]["digits_8_9"]["max_log_q"]["auroc"] <= 1
    environment = json.loads((workdir / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__
    assert any((workdir / "tensorboard").iterdir())
    assert json.loads((workdir / "config.json").read_text())["train_size"] == 150


@pytest.mark.parametrize("name", METHODS)
def test_loading_a_run(name, unbroken):
    """Oracle: the arrays of its checkpoint, and predictions that need nothing else."""
    params = mass_jax.load(unbroken / name)
    arrays = state_of(unbroken / name).arrays
    np.testing.assert_array_equal(
        params.network["output"]["kernel"], arrays["params.network.output.kernel"]
    )
    dataset = load_dataset("digits")
    x = normalise(dataset.test.images[:20], dataset.normalisation)
    assert params.representation(x).shape[0] == 20
    if name == "mass":
        assert np.isfinite(mass_jax.cdi_loss(params, x))
    else:
        with pytest.raises(ValueError, match="no mixture"):
            mass_jax.cdi_loss(params, x)


def test_loading_nothing(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no good checkpoint"):
        mass_jax.load(tmp_path)


def test_a_finished_run_says_so_and_repeats_its_results(unbroken, capsys):
    before = (unbroken / "vib" / "results.json").read_bytes()
    assert run(unbroken / "vib", "--config.steps=24", *METHODS["vib"]) == 0
    printed = capsys.readouterr().out
    assert "finished before" in printed
    assert "accuracy" in printed
    assert (unbroken / "vib" / "results.json").read_bytes() == before


def test_evaluation_alone_gives_the_same_numbers(unbroken, capsys):
    """Oracle: the evaluation at the end of training."""
    assert run(unbroken / "mass", "--config.steps=24", "--mode=evaluate") == 0
    printed = capsys.readouterr().out
    expected = json.loads((unbroken / "mass" / "results.json").read_text())
    assert f"{expected['accuracy']:.4f}" in printed


def test_evaluating_nothing_is_refused(tmp_path, capsys):
    assert run(tmp_path, "--mode=evaluate") == 2
    assert "train first" in capsys.readouterr().err


def test_a_changed_configuration_is_refused_with_the_difference(unbroken, capsys):
    assert run(unbroken / "mass", "--config.steps=24", "--config.beta=0.01") == 2
    error = capsys.readouterr().err
    assert "config.beta: 0.001 -> 0.01" in error
    assert error.count("\n") == 1


def test_lost_rows_are_cut_and_written_again(unbroken, tmp_path):
    """Oracle: the unbroken run; as after a kill between a row and a checkpoint."""
    workdir = tmp_path / "run"
    shutil.copytree(unbroken / "mass", workdir)
    (workdir / "results.json").unlink()
    shutil.rmtree(workdir / "checkpoints" / "24")
    with (workdir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 30, "loss"')
    assert run(workdir, "--config.steps=24") == 0
    assert_same_end(workdir, unbroken / "mass")


def test_a_damaged_checkpoint_is_passed_over(unbroken, tmp_path, caplog):
    """Oracle: the unbroken run."""
    workdir = tmp_path / "run"
    shutil.copytree(unbroken / "softmax_ce", workdir)
    (workdir / "results.json").unlink()
    newest = workdir / "checkpoints" / "24"
    largest = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(bytes(data))
    assert run(workdir, "--config.steps=24", *METHODS["softmax_ce"]) == 0
    assert "damaged checkpoint" in caplog.text
    assert_same_end(workdir, unbroken / "softmax_ce")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_run_goes_on(signum, unbroken, tmp_path, monkeypatch):
    """Oracle: the unbroken run, and the exit codes of the shell."""
    batches = []
    deal = training._TrainingRows._block

    def block_then_signal(self, step, count):
        batches.append(step)
        if len(batches) == 3:
            signal.raise_signal(signum)
        return deal(self, step, count)

    monkeypatch.setattr(training, "ThreadPoolExecutor", ImmediateExecutor)
    monkeypatch.setattr(training._TrainingRows, "_block", block_then_signal)
    assert run(tmp_path, "--config.steps=24") == 128 + signum
    assert 0 < state_of(tmp_path).step < 24
    assert run(tmp_path, "--config.steps=24") == 0
    assert_same_end(tmp_path, unbroken / "mass")


class ImmediateExecutor:
    """Prepares blocks in the main thread, where signals can be raised."""

    def __init__(self, workers):
        self.workers = workers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, function, *arguments):
        value = function(*arguments)
        return type("Done", (), {"result": staticmethod(lambda: value)})


def test_divergence_stops_before_saving_and_names_the_step(tmp_path, capsys):
    """Oracle: a step size no descent survives."""
    wild = ["--config.optimizer.name=sgd", "--config.optimizer.learning_rate=1000"]
    assert run(tmp_path, "--config.steps=400", "--config.checkpoint_every=0", *wild) == 1
    error = capsys.readouterr().err
    assert "error: step " in error
    assert "not finite" in error
    assert error.count("\n") == 1
    assert state_of(tmp_path) is None


def test_the_first_bad_term_is_named():
    """Oracle: a history made by hand."""
    history = {
        "loss": np.array([1.0, np.nan, np.nan]),
        "jacobian": np.array([1.0, np.inf, np.nan]),
        "cross_entropy": np.array([1.0, 1.0, np.nan]),
        "gradient_norm": np.array([1.0, np.nan, np.nan]),
    }
    with pytest.raises(training.TrainingDiverged, match="step 12: jacobian=inf is not finite"):
        training._check_finite(history, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.train_size=5000"], "must fit into it"),
        (["--config.representation_dim=65"], "at most 64"),
        (["--config=absent.py"], "no such file"),
        (["--config=mass_digit"], "did you mean mass_digits?"),
        (["--config.data.name=cifar10", "--config.data.dir=absent"], "not prepared"),
        (["--coordinator=localhost:1"], "go together"),
        (["--config.betta=1"], "did you mean config.beta?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, message, tmp_path, capsys):
    assert run(tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_file_in_the_way_of_the_workdir(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "run") == 2
    assert "cannot write there" in capsys.readouterr().err


def test_two_processes_on_one_workdir(tmp_path, capsys):
    from mass_jax.workdir import locked

    with locked(tmp_path):
        assert run(tmp_path) == 2
    assert "is writing to it" in capsys.readouterr().err


def test_a_full_disk_is_refused_before_training(tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("mass_jax.workdir.shutil.disk_usage", lambda path: usage)
    assert run(tmp_path) == 2
    assert "two checkpoints need" in capsys.readouterr().err


def test_streaming_from_the_host_equals_resident_data(unbroken, tmp_path):
    """Oracle: the run with resident data; another program, so equal up to rounding."""
    assert run(tmp_path, "--config.steps=24", "--config.data.resident=never") == 0
    ours, theirs = rows_of(tmp_path), rows_of(unbroken / "mass")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-3)


def test_shard_map_equals_pmap(unbroken, tmp_path):
    """Oracle: the other way to run the same step."""
    assert run(tmp_path, "--config.steps=24", "--config.parallel=shard_map") == 0
    assert_same_end(tmp_path, unbroken / "mass")


def test_the_step_is_compiled_once(tmp_path, monkeypatch):
    """Oracle: counting; blocks of every length run the same program."""
    traced = []
    make = training.make_train_step

    def counting(experiment, normalisation):
        step = make(experiment, normalisation)

        def counted(state, batch: Batch, key):
            traced.append(batch.labels.shape)
            return step(state, batch, key)

        return counted

    monkeypatch.setattr(training, "make_train_step", counting)
    assert run(tmp_path, "--config.steps=24", *METHODS["softmax_ce"]) == 0
    assert len(traced) == 2  # once for the shapes of the metrics, once for the program


def test_bfloat16_trains(tmp_path):
    """Oracle: the float32 run, loosely; parameters themselves stay float32."""
    assert run(tmp_path, "--config.steps=24", "--config.dtype=bfloat16") == 0
    arrays = state_of(tmp_path).arrays
    assert {a.dtype.name for a in arrays.values()} == {"float32", "int32"}
    rows = rows_of(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_lazy_term_is_logged_where_it_was_computed(tmp_path):
    """Oracle: by hand: every eighth step; a row is of the step it ends with."""
    lazy = ["--config.jacobian.estimator=lazy", "--config.jacobian.batch_stats=frozen"]
    assert run(tmp_path, "--config.steps=24", "--config.log_every=4", *lazy) == 0
    rows = [row for row in rows_of(tmp_path) if row["step"] % 4 == 0]
    assert [row["step"] for row in rows if "jacobian" in row] == [8, 16, 24]
    assert all(row["jacobian"] != 0 for row in rows if "jacobian" in row)
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24]


def test_learning_rates_drop_by_epoch_of_the_subset(tmp_path):
    """Oracle: by hand; 150 examples in batches of 32 are 5 steps an epoch."""
    drops = ["--config.optimizer.decay_epochs=(2,3)", "--config.log_every=1"]
    assert run(tmp_path, "--config.steps=24", *METHODS["softmax_ce"], *drops) == 0
    rates = [row["learning_rate"] for row in rows_of(tmp_path)]
    np.testing.assert_allclose(rates, [1e-3] * 10 + [1e-4] * 5 + [1e-5] * 9, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_digits_above_a_linear_classifier(name, tmp_path):
    """Oracle: scikit-learn's logistic regression on the same examples (0.977)."""
    assert main(["--quiet", f"--workdir={tmp_path}", *METHODS[name]]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    dataset, config = load_dataset("digits"), resolve(default_config())
    rows = make_experiment(config, dataset).subset.train
    flat = lambda images: np.asarray(normalise(images, dataset.normalisation)).reshape(
        len(images), -1
    )
    linear = LogisticRegression(max_iter=5000)
    linear.fit(flat(dataset.train.images[rows]), dataset.train.labels[rows])
    baseline = linear.score(flat(dataset.test.images), dataset.test.labels)
    assert results["accuracy"] >= 0.98 > baseline
