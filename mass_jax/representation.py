"""A minibatch seen through ``f``: representations and log Jacobian determinants."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mass_jax import jacobian, networks
from mass_jax.dense_first_layer import DenseForm, gram_is_cheaper, half_log_det_behind
from mass_jax.estimators import (
    JACOBIAN_ESTIMATORS,
    JacobianEstimator,
    half_log_det_by_probe,
    probe_noise,
)
from mass_jax.jacobian import JacobianMode
from mass_jax.log_determinant import SingularPolicy, half_log_det_gram
from mass_jax.model import ModelParams
from mass_jax.networks import FirstLayer, TrainContext

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
    log_det: bool = True,
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
      log_det: ``False`` leaves the determinants out (their logarithms are given as zero); what
        ``"paper"`` makes of a minibatch is left.
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
        if estimator.per_example:
            raise ValueError(
                "batch_stats='paper' couples the examples; this estimator needs 'frozen'"
            )
        return _represent_in_two_parts(
            params, x, num_jacobian, log_det, estimator, context, singular
        )

    in_one_piece = mode != "forward" and chunk_size is None
    dense = networks.dense_first_layer(params.module, params.network, x, context.reverse_only)
    first = None if dense is None else dense.output
    if batch_stats == "running":
        statistics = running = params.batch_stats
        z = networks.apply(params.module, params.network, statistics, x, context.keys, first=first)
    else:
        z, statistics = networks.apply_train(
            params.module, params.network, params.batch_stats, x, context._replace(first=first)
        )
        running = networks.update_running(params.batch_stats, statistics)
    num_jacobian = num_jacobian if log_det else 0
    rows = _sub_batch_rows(num_jacobian, context.axis_name)
    if num_jacobian == 0:
        return Representation(z, z[:0, 0], rows.weights, running)

    def f(images: jax.Array, keys: jax.Array | None, first: jax.Array | None = None) -> jax.Array:
        reverse_only = context.reverse_only and mode != "forward"
        return networks.apply(
            params.module, params.network, statistics, images, keys, reverse_only, first
        )

    images, keys = x[: rows.maybe], _first(context.keys, rows.maybe)
    probe_keys = None
    if estimator.gradient == "probe":
        if keys is None or not in_one_piece:
            raise ValueError("the probe needs keys, mode='auto' or 'reverse', and no chunk_size")
        probe_keys = jax.vmap(lambda key: jax.random.fold_in(key, _PROBE))(keys)
    if in_one_piece and dense is not None:
        behind = lambda hidden: (f(images, keys, hidden), None)
        layer = dense._replace(output=dense.output[: rows.maybe])
        _, half_log_det, _ = _behind_dense(behind, layer, None, estimator, probe_keys, singular)
        return Representation(z, half_log_det, rows.weights, running)
    _check_form(estimator, dense)
    if probe_keys is not None:
        by_probe = half_log_det_by_probe(lambda v: f(v, keys), images, probe_keys, singular)
        return Representation(z, by_probe, rows.weights, running)

    def of_one(example: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        image, key = example
        one = lambda v: f(v[None], None if key is None else key[None])[0]
        return jacobian.half_log_det_jjt(one, image[None], mode, singular=singular)[0]

    def of_many(examples: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        # Examples do not interact here, so one batched backward pass per output is enough.
        images, keys = examples
        _, rows_of_j, _ = jacobian.summed_jacobian(lambda v: (f(v, keys), None), images)
        return half_log_det_gram(rows_of_j, singular)

    if mode == "forward":
        values = jacobian.map_examples(of_one, (images, keys), chunk_size)
    else:
        values = jacobian.map_chunks(of_many, (images, keys), chunk_size)
    return Representation(z, values, rows.weights, running)


def _check_form(estimator: JacobianEstimator, dense: FirstLayer | None) -> None:
    if estimator.form == "gram" and dense is None:
        raise ValueError("estimator='gram' needs a network with a dense first layer")


def _behind_dense(
    f: jacobian.BatchFn,
    layer: FirstLayer,
    weights: jax.Array | None,
    estimator: JacobianEstimator,
    probe_keys: jax.Array | None,
    singular: SingularPolicy,
) -> tuple[jax.Array, jax.Array, Any]:
    """Outputs, ``log J_f`` and what else ``f`` returns, of ``f`` behind a dense first layer.

    Args:
      f: maps what the layer gives, ``[n, width]``, to outputs ``[n, R]`` and whatever else.
      layer: of the same ``n`` examples.
      weights: see `jacobian.summed_jacobian`.
      estimator: its gradient and form.
      probe_keys: ``[n]``, for a probe.
      singular: see `half_log_det_gram`.
    """
    outputs, rows, auxiliary = jacobian.summed_jacobian(f, layer.output, weights)
    input_dim, width = layer.kernel.shape
    by_gram = estimator.form == "gram" or (
        estimator.form == "auto" and gram_is_cheaper(len(rows), rows.shape[1], input_dim, width)
    )
    form: DenseForm = "rows"
    if by_gram and rows.shape[1] <= width < input_dim:  # else nothing is gained
        form = "gram"
    elif layer.turned:
        form = "turned"
    noise = None if probe_keys is None else probe_noise(probe_keys, input_dim, outputs.dtype)
    return outputs, half_log_det_behind(rows, layer.kernel, noise, form, singular), auxiliary


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
    log_det: bool,
    estimator: JacobianEstimator,
    context: TrainContext,
    singular: SingularPolicy,
) -> Representation:
    """The ``"paper"`` definition: sub-batch and rest forwarded apart, in that order."""
    surely, maybe, weights = _sub_batch_rows(num_jacobian, context.axis_name)

    dense = networks.dense_first_layer(params.module, params.network, x, context.reverse_only)
    _check_form(estimator, dense)

    def part_context(keep: slice, part_weights: jax.Array) -> TrainContext:
        return context._replace(
            keys=None if context.keys is None else context.keys[keep],
            # Weights only where some row can be padding: the plain path is the fast one.
            weights=None if surely == maybe else part_weights,
            first=None if dense is None else dense.output[keep],
        )

    def forward(part: jax.Array, part_context: TrainContext) -> tuple[jax.Array, PyTree]:
        return networks.apply_train(
            params.module, params.network, params.batch_stats, part, part_context
        )

    sub_context = part_context(slice(0, maybe), weights)
    if not log_det:
        z_sub, moments = forward(x[:maybe], sub_context)
        half_log_det = jnp.zeros(maybe)
    elif dense is None:
        z_sub, rows_of_j, moments = jacobian.summed_jacobian(
            lambda part: forward(part, sub_context), x[:maybe], sub_context.weights
        )
        half_log_det = half_log_det_gram(rows_of_j, singular)
    else:
        z_sub, half_log_det, moments = _behind_dense(
            lambda hidden: forward(x[:maybe], sub_context._replace(first=hidden)),
            dense._replace(output=dense.output[:maybe]),
            sub_context.weights,
            estimator,
            None,
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
