"""Which example is in which batch.

Oracles: the definition of a permutation, invariance (to call order, to the number of
devices, to the process), and counting.
"""

import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from test_dataset import one_line

import mass_jax
from mass_jax.data import BatchOrder, DataError, device_rows, draw_subset, evaluation_batches

ROOT = Path(mass_jax.__file__).parents[1]

sizes = st.integers(1, 60)
batch_sizes = st.integers(1, 150)  # often more than an epoch, or several
seeds = st.integers(0, 2**32 - 1)
steps = st.integers(0, 2_000)


def order_of(seed, num_examples, batch_size):
    return BatchOrder(jax.random.key(seed), num_examples, batch_size)


# --- BatchOrder -------------------------------------------------------------------


@hypothesis.given(seed=seeds, num_examples=sizes, batch_size=batch_sizes)
def test_every_epoch_is_a_permutation(seed, num_examples, batch_size):
    """Oracle: the definition; batches laid end to end fall into permutations of 0 to N-1."""
    order = order_of(seed, num_examples, batch_size)
    batches = [order.batch(step) for step in range(-(-3 * num_examples // batch_size))]
    assert {batch.shape for batch in batches} == {(batch_size,)}
    assert {batch.dtype for batch in batches} == {np.dtype(np.int32)}
    visited = np.concatenate(batches)
    for epoch in range(3):
        rows = visited[epoch * num_examples : (epoch + 1) * num_examples]
        np.testing.assert_array_equal(np.sort(rows), np.arange(num_examples))


def test_epochs_are_shuffled_afresh():
    """Oracle: chance; two of 8 random permutations of 50 agree with probability 1e-63."""
    order = order_of(0, 50, 50)
    epochs = {tuple(order.batch(step).tolist()) for step in range(8)}
    assert len(epochs) == 8
    assert tuple(range(50)) not in epochs


@hypothesis.given(
    seed=seeds, num_examples=sizes, batch_size=batch_sizes, asked=st.lists(steps, max_size=12)
)
def test_batch_depends_on_nothing_but_seed_and_step(seed, num_examples, batch_size, asked):
    """Oracle: a fresh order asked one step only; history and vandalism must not show."""
    order = order_of(seed, num_examples, batch_size)
    for step in asked:
        order.batch(step)[:] = -1  # whoever gets the array may write to it
    for step in reversed(asked):
        fresh = order_of(seed, num_examples, batch_size).batch(step)
        np.testing.assert_array_equal(order.batch(step), fresh)
        assert fresh.min() >= 0


def test_another_process_sees_the_same_batches():
    """Oracle: this process; a resumed run or a second host must visit the same examples."""
    script = (
        "import jax; from mass_jax.data import BatchOrder, draw_subset\n"
        "key = jax.random.key(7)\n"
        "print([BatchOrder(key, 50, 8).batch(step).tolist() for step in (11, 3)])\n"
        "print([part.tolist() for part in draw_subset(key, 90, 50, 20)])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    key = jax.random.key(7)
    here = [
        [BatchOrder(key, 50, 8).batch(step).tolist() for step in (11, 3)],
        [part.tolist() for part in draw_subset(key, 90, 50, 20)],
    ]
    assert result.stdout.splitlines() == [str(line) for line in here]


@hypothesis.given(seed=seeds, other=seeds)
def test_different_seeds_give_different_orders(seed, other):
    """Oracle: chance; two random permutations of 50 agree with probability 3e-65."""
    hypothesis.assume(seed != other)
    assert not np.array_equal(order_of(seed, 50, 50).batch(0), order_of(other, 50, 50).batch(0))
    first, second = (draw_subset(jax.random.key(s), 50, 40, 10) for s in (seed, other))
    assert not np.array_equal(first.train, second.train)


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "expected"),
    [(2500, 128, 20), (2560, 128, 20), (2561, 128, 21), (128, 128, 1), (5, 128, 1), (7, 1, 7)],
)
def test_steps_per_epoch(num_examples, batch_size, expected):
    """Oracle: counted by hand; 2,500 / 128 = 19.5 makes 20."""
    assert order_of(0, num_examples, batch_size).steps_per_epoch == expected


# --- draw_subset ------------------------------------------------------------------


@hypothesis.given(seed=seeds, train=st.integers(1, 40), validation=st.integers(0, 40), rest=sizes)
def test_train_and_validation_are_disjoint_and_in_range(seed, train, validation, rest):
    """Oracle: the definition of disjoint subsets of the training split."""
    total = train + validation + rest - 1
    subset = draw_subset(jax.random.key(seed), total, train, validation)
    assert (len(subset.train), len(subset.validation)) == (train, validation)
    rows = np.concatenate(subset)
    assert len(set(rows.tolist())) == train + validation
    assert rows.min() >= 0
    assert rows.max() < total


@hypothesis.given(seed=seeds, validation=st.integers(0, 40))
def test_validation_size_does_not_move_the_training_subset(seed, validation):
    """Oracle: invariance; runs with and without validation train on the same examples."""
    key = jax.random.key(seed)
    alone, with_validation = draw_subset(key, 70, 30, 0), draw_subset(key, 70, 30, validation)
    np.testing.assert_array_equal(alone.train, with_validation.train)


@pytest.mark.parametrize(("train", "validation"), [(81, 0), (80, 1), (1, 80), (0, 5), (5, -1)])
def test_subsets_that_do_not_fit_are_refused(train, validation):
    """Oracle: 80 examples hold at most 80 rows, of which at least one is for training."""
    with pytest.raises(DataError, match=one_line(f"train_size={train} .*={validation}: .*80")):
        draw_subset(jax.random.key(0), 80, train, validation)


# --- device_rows ------------------------------------------------------------------


@hypothesis.given(
    seed=seeds,
    step=steps,
    per_device=st.integers(1, 6),
    devices=st.sampled_from([1, 2, 8]),
    trailing=st.sampled_from([(), (3,), (2, 4)]),
)
def test_devices_share_one_global_batch(seed, step, per_device, devices, trailing):
    """Oracle: row ``i`` of device ``d`` is global row ``i D + d``, written as two loops."""
    rows = order_of(seed, 100, 8 * per_device).batch(step)
    batch = np.arange(100 * np.prod(trailing, dtype=int)).reshape(100, *trailing)[rows]
    dealt = device_rows(batch, devices)
    assert dealt.shape == (devices, len(rows) // devices, *trailing)
    for device in range(devices):
        for row in range(len(rows) // devices):
            np.testing.assert_array_equal(dealt[device, row], batch[row * devices + device])
    np.testing.assert_array_equal(np.sort(dealt.ravel()), np.sort(batch.ravel()))


@pytest.mark.parametrize(("size", "devices"), [(6, 4), (7, 2), (4, 8), (1, 2)])
def test_batches_that_do_not_divide_are_refused(size, devices):
    """Oracle: arithmetic; the line names both numbers."""
    with pytest.raises(DataError, match=one_line(f"batch_size={size} .*{devices} devices")):
        device_rows(np.arange(size), devices)


# --- evaluation_batches -----------------------------------------------------------


@hypothesis.given(num_examples=st.integers(0, 200), batch_size=batch_sizes)
def test_evaluation_covers_every_example_once(num_examples, batch_size):
    """Oracle: counting; masked rows are 0 to N-1 in order, all rows are valid, one shape."""
    batches = list(evaluation_batches(num_examples, batch_size))
    assert all(b.rows.shape == b.mask.shape == (batch_size,) for b in batches)
    assert all(b.rows.min() >= 0 and b.rows.max() < num_examples for b in batches)
    assert len(batches) == -(-num_examples // batch_size)
    covered = [row for b in batches for row in b.rows[b.mask].tolist()]
    assert covered == list(range(num_examples))
