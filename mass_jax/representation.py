"""A minibatch seen through ``f``: representations and log Jacobian determinants."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mass_jax import jacobian, networks
from mass_jax.estimators import (
    JACOBIAN_ESTIMATORS,
    JacobianEstimator,
    gram_is_cheaper,
    half_log_det_behind_dense,
    half_log_det_by_probe,
)
from mass_jax.jacobian import JacobianMode
from mass_jax.log_determinant import SingularPolicy, half_log_det_gram
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext

PyTree = Any
BatchStats = Literal["running", "frozen", "paper"]
BATCH_STATS: tuple[BatchStats, ...] = ("running", "frozen", "paper")
_PROBE = 1_000_000  # folded into an example's key; layers with dropout fold in their index


class Representation(NamedTuple):
    """A minibatch seen through ``f``.

    Attributes:
      z: ``[B, R]``.
      half_log_det: ``[n]``, ``log J_f(x)`` of the Jacobian sub-batch.
      weights: ``[n]``, zero where a row is padding, as several devices need it.
      batch_stats: running BatchNorm statistics after this minibatch.
    """

    z: jax.Array
    half_log_det: jax.Array
    weights: jax.Array
    batch_stats: PyTree


def represent(
    params: ModelParams,
    x: jax.Array,
    num_jacobian: int,
    *,
    batch_stats: BatchStats,
    estimator: JacobianEstimator = JACOBIAN_ESTIMATORS["exact"],
    context: TrainContext = networks.EVALUATION,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
    singular: SingularPolicy = "floor",
) -> Representation:
    """Representations of a minibatch and log Jacobian determinants of its first rows.

    ``batch_stats`` says what ``J_f`` means where BatchNorm ties examples together:

    * ``"running"``: running statistics everywhere, the function used at test time;
    * ``"frozen"``: the statistics of the whole minibatch, held fixed while
      differentiating by ``x``: the per-example Jacobian of the paper's definition;
    * ``"paper"``: what the authors' code computes. The sub-batch is forwarded on
      its own and row ``b`` is ``sum_b' d z_b' / d x_b`` (`jacobian.summed_jacobian`).

    All three agree for networks without BatchNorm. Across devices, row ``i`` of
    device ``d`` of ``D`` is row ``i D + d`` of the global minibatch.

    Args:
      params: the model.
      x: ``[B, ...]``, this device's rows.
      num_jacobian: ``n`` of the global minibatch, possibly 0.
      batch_stats: the definition.
      estimator: how values and gradients are had; its number of examples is not used.
      context: keys and device axis; its weights are not used.
      mode, chunk_size, singular: see `mass_jax.half_log_det_jjt`; ``"paper"``
        couples the examples and so takes neither forward mode nor chunks.
    """
    jacobian.check_mode(mode)
    if batch_stats not in BATCH_STATS:
        raise ValueError(f"batch_stats={batch_stats!r}: choose one of {list(BATCH_STATS)}")
    if num_jacobian > 0 and batch_stats == "paper":
        if mode == "forward" or chunk_size is not None:
            raise ValueError("batch_stats='paper' needs mode='auto' or 'reverse' and no chunk_size")
        if estimator.gradient == "probe":
            raise ValueError("batch_stats='paper' couples the examples; the probe needs 'frozen'")
        return _represent_in_two_parts(params, x, num_jacobian, estimator, context, singular)

    if batch_stats == "running":
        statistics = running = params.batch_stats
        z = networks.apply(params.module, params.network, statistics, x, context.keys)
    else:
        z, statistics = networks.apply_train(
            params.module, params.network, params.batch_stats, x, context
        )
        running = networks.update_running(params.batch_stats, statistics)
    rows = _sub_batch_rows(num_jacobian, context.axis_name)
    if num_jacobian == 0:
        return Representation(z, z[:0, 0], rows.weights, running)

    # Chunks are mapped by `vmap` inside a loop, where only the plain rules work.
    in_one_piece = mode != "forward" and chunk_size is None

    def f(images: jax.Array, keys: jax.Array | None, shift: jax.Array | None = None) -> jax.Array:
        reverse_only = context.reverse_only and in_one_piece
        return networks.apply(
            params.module, params.network, statistics, images, keys, reverse_only, shift
        )

    images, keys = x[: rows.maybe], _first(context.keys, rows.maybe)
    kernel = _dense_kernel(params, estimator, rows.maybe, z.shape[-1])
    if estimator.gradient == "probe":
        if keys is None or not in_one_piece:
            raise ValueError("the probe needs keys, mode='auto' or 'reverse', and no chunk_size")
        probe_keys = jax.vmap(lambda key: jax.random.fold_in(key, _PROBE))(keys)
        by_probe = half_log_det_by_probe(lambda v: f(v, keys), images, probe_keys, singular)
        return Representation(z, by_probe, rows.weights, running)
    if kernel is not None and in_one_piece:
        shift = jnp.zeros((rows.maybe, kernel.shape[1]), images.dtype)
        _, behind, _ = half_log_det_behind_dense(
            lambda s: (f(images, keys, s), None), shift, kernel, None, singular
        )
        return Representation(z, behind, rows.weights, running)
    if in_one_piece:
        # Examples do not interact here, so one batched backward pass per output is enough.
        _, rows_of_j, _ = jacobian.summed_jacobian(lambda v: (f(v, keys), None), images)
        return Representation(z, half_log_det_gram(rows_of_j, singular), rows.weights, running)

    def half_log_det(example: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        image, key = example
        one = lambda v: f(v[None], None if key is None else key[None])[0]
        return jacobian.half_log_det_jjt(one, image[None], mode, singular=singular)[0]

    values = jacobian.map_examples(half_log_det, (images, keys), chunk_size)
    return Representation(z, values, rows.weights, running)


def _dense_kernel(
    params: ModelParams, estimator: JacobianEstimator, num_examples: int, output_dim: int
) -> jax.Array | None:
    """The first layer's kernel, where the Jacobian is better taken behind it."""
    name = getattr(params.module, "first_dense", None)
    if estimator.form == "rows" or name is None:
        if estimator.form == "gram":
            raise ValueError("estimator='gram' needs a network with a dense first layer")
        return None
    kernel = params.network[name]["kernel"]
    input_dim, width = kernel.shape
    if width >= input_dim:
        return None  # nothing to be gained, and W^T W would be singular
    if estimator.form == "auto" and not gram_is_cheaper(num_examples, output_dim, input_dim, width):
        return None
    return kernel


def _first(keys: jax.Array | None, count: int) -> jax.Array | None:
    return None if keys is None else keys[:count]


class _SubBatchRows(NamedTuple):
    """Which local rows are in the global sub-batch: ``surely``, or with weight one."""

    surely: int
    maybe: int
    weights: jax.Array  # [maybe]


def _sub_batch_rows(num_jacobian: int, axis_name: str | None) -> _SubBatchRows:
    if axis_name is None:
        return _SubBatchRows(num_jacobian, num_jacobian, jnp.ones(num_jacobian))
    devices, device = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    maybe = -(-num_jacobian // devices)
    in_sub_batch = jnp.arange(maybe) * devices + device < num_jacobian
    return _SubBatchRows(num_jacobian // devices, maybe, in_sub_batch.astype(float))


def _represent_in_two_parts(
    params: ModelParams,
    x: jax.Array,
    num_jacobian: int,
    estimator: JacobianEstimator,
    context: TrainContext,
    singular: SingularPolicy,
) -> Representation:
    """The ``"paper"`` definition: sub-batch and rest forwarded apart, in that order."""
    surely, maybe, weights = _sub_batch_rows(num_jacobian, context.axis_name)

    def part_context(keep: slice, part_weights: jax.Array) -> TrainContext:
        keys = None if context.keys is None else context.keys[keep]
        # Weights only where some row can be padding: the plain path is the fast one.
        return context._replace(keys=keys, weights=None if surely == maybe else part_weights)

    def forward(part: jax.Array, part_context: TrainContext) -> tuple[jax.Array, PyTree]:
        return networks.apply_train(
            params.module, params.network, params.batch_stats, part, part_context
        )

    sub_context = part_context(slice(0, maybe), weights)
    kernel = None
    if estimator.form != "rows":
        outputs = jax.eval_shape(lambda part: forward(part, sub_context)[0], x[:maybe])
        kernel = _dense_kernel(params, estimator, maybe, outputs.shape[-1])
    if kernel is None:
        z_sub, rows_of_j, moments = jacobian.summed_jacobian(
            lambda part: forward(part, sub_context), x[:maybe], sub_context.weights
        )
        half_log_det = half_log_det_gram(rows_of_j, singular)
    else:
        z_sub, half_log_det, moments = half_log_det_behind_dense(
            lambda shift: forward(x[:maybe], sub_context._replace(shift=shift)),
            jnp.zeros((maybe, kernel.shape[1]), x.dtype),
            kernel,
            sub_context.weights,
            singular,
        )
    running = networks.update_running(params.batch_stats, moments)
    if x.shape[0] == surely:
        return Representation(z_sub, half_log_det, weights, running)

    # On several devices the last sub-batch row may belong to the rest instead.
    rest_weights = jnp.ones(x.shape[0] - surely).at[: maybe - surely].set(1.0 - weights[surely:])
    rest = slice(surely, x.shape[0])
    z_rest, moments = forward(x[rest], part_context(rest, rest_weights))
    running = networks.update_running(running, moments)
    shared = jnp.where(weights[surely:, None] > 0, z_sub[surely:], z_rest[: maybe - surely])
    z = jnp.concatenate([z_sub[:surely], shared, z_rest[maybe - surely :]])
    return Representation(z, half_log_det, weights, running)
