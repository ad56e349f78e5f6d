"""Which example is in which batch: pure functions of (key, step).

Resuming needs no iterator state, and any number of devices or hosts sees the
same global batch.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np

from mass_jax.data.errors import DataError

_SUBSET_TAG = 2**32 - 1


class Subset(NamedTuple):
    """Disjoint rows of the training split.

    Attributes:
      train: ``[n]`` int32.
      validation: ``[m]`` int32.

    Example:
      >>> import jax
      >>> draw_subset(jax.random.key(0), 10, 6, 4).validation.shape
      (4,)
    """

    train: np.ndarray
    validation: np.ndarray


def draw_subset(key: jax.Array, num_examples: int, train_size: int, validation_size: int) -> Subset:
    """Draws the training subset and a disjoint validation set by the key.

    Args:
      key: PRNG key.
      num_examples: rows of the training split.
      train_size, validation_size: how many to draw.

    Returns:
      Rows of both.

    Example:
      >>> import jax
      >>> subset = draw_subset(jax.random.key(0), 10, 6, 4)
      >>> sorted([*subset.train.tolist(), *subset.validation.tolist()]) == list(range(10))
      True
    """
    if train_size < 1 or validation_size < 0 or train_size + validation_size > num_examples:
        raise DataError(
            f"train_size={train_size} and validation_size={validation_size}: the training split "
            f"has {num_examples} examples; the two must fit into it"
        )
    order = _permutation(key, num_examples)
    return Subset(order[:train_size], order[train_size : train_size + validation_size])


class BatchOrder(NamedTuple):
    """The order in which a training subset is visited.

    Epochs are permutations laid end to end, so a batch may straddle two of them
    and every batch is full.

    Attributes:
      key: PRNG key of the order.
      num_examples: size of the subset.
      batch_size: ``B``, of the global batch.

    Example:
      >>> import jax
      >>> BatchOrder(jax.random.key(0), num_examples=6, batch_size=4).steps_per_epoch
      2
    """

    key: jax.Array
    num_examples: int
    batch_size: int

    def batch(self, step: int) -> np.ndarray:
        """Positions ``[B]`` in the subset of the examples of batch ``step``.

        Example:
          >>> import jax
          >>> order = BatchOrder(jax.random.key(0), num_examples=6, batch_size=3)
          >>> sorted(order.batch(0).tolist() + order.batch(1).tolist())
          [0, 1, 2, 3, 4, 5]
        """
        start = step * self.batch_size
        positions = np.arange(start, start + self.batch_size)
        epochs, offsets = np.divmod(positions, self.num_examples)
        rows = np.empty(self.batch_size, np.int32)
        seed = tuple(np.asarray(jax.random.key_data(self.key)).tolist())
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            rows[here] = _epoch_permutation(seed, epoch, self.num_examples)[offsets[here]]
        return rows

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, a last partial one counted: the unit of schedules."""
        return -(-self.num_examples // self.batch_size)


def device_rows(rows: np.ndarray, num_devices: int) -> np.ndarray:
    """A global batch dealt out like cards: row ``i`` of device ``d`` is row ``i D + d``.

    The first ``n`` rows (the Jacobian sub-batch) are so spread over all devices.

    Args:
      rows: ``[B, ...]``.
      num_devices: ``D``, a divisor of ``B``.

    Returns:
      ``[D, B / D, ...]``.

    Example:
      >>> import numpy as np
      >>> device_rows(np.arange(6), 2).tolist()
      [[0, 2, 4], [1, 3, 5]]
    """
    if len(rows) % num_devices:
        raise DataError(
            f"batch_size={len(rows)} does not divide over {num_devices} devices; "
            f"use a multiple of {num_devices}"
        )
    return np.swapaxes(rows.reshape(-1, num_devices, *rows.shape[1:]), 0, 1)


class EvaluationBatch(NamedTuple):
    """Rows ``[B]`` of a split and a mask ``[B]``: False where a row only fills up."""

    rows: np.ndarray
    mask: np.ndarray


def evaluation_batches(num_examples: int, batch_size: int) -> Iterator[EvaluationBatch]:
    """Covers a whole split in batches of one shape.

    Args:
      num_examples: of the split.
      batch_size: ``B``.

    Returns:
      Batches of ``rows`` ``[B]`` and ``mask`` ``[B]``, False where a row only fills up.

    Example:
      >>> [int(batch.mask.sum()) for batch in evaluation_batches(5, 2)]
      [2, 2, 1]
    """
    for start in range(0, num_examples, batch_size):
        rows = np.arange(start, start + batch_size, dtype=np.int32)
        yield EvaluationBatch(np.minimum(rows, num_examples - 1), rows < num_examples)


def _permutation(key: jax.Array, size: int) -> np.ndarray:
    seed = tuple(np.asarray(jax.random.key_data(key)).tolist())
    # NumPy pads seeds with zeros: the tag keeps this apart from epoch 0 of the same key.
    return np.random.default_rng((*seed, _SUBSET_TAG)).permutation(size).astype(np.int32)


@lru_cache(maxsize=4)
def _epoch_permutation(seed: tuple[int, ...], epoch: int, size: int) -> np.ndarray:
    # Shuffled on the host: a device sort of 40,000 rows in every step would cost
    # a fifth of a SmallMLP step; this costs one shuffle per epoch.
    return np.random.default_rng((*seed, epoch)).permutation(size).astype(np.int32)
