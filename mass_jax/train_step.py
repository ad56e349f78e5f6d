"""One pure training step for all methods, and how it runs on devices."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mass_jax.data import Normalisation, normalise
from mass_jax.experiment import Experiment, TrainState
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext
from mass_jax.turned_kernel import turned

AXIS = "devices"

Metrics = dict[str, Any]  # scalars of a step, or their history
StepFn = Callable[["TrainState", "Batch", jax.Array], tuple["TrainState", Metrics]]


class Batch(NamedTuple):
    """This device's rows: ``images`` ``[b, ...]`` as stored, ``labels`` ``[b]``."""

    images: jax.Array
    labels: jax.Array


def make_train_step(
    experiment: Experiment, normalisation: Normalisation, reverse_only: bool = True
) -> StepFn:
    """``train_step(state, batch, key)``, to be run under the device axis `AXIS`.

    Its states are `turned`.

    Row ``i`` of device ``d`` of ``D`` is row ``i D + d`` of the global batch, and its
    randomness depends on that position only: one device or eight draw the same.

    Args:
      experiment: what to train.
      normalisation: of the images.
      reverse_only: see `TrainContext`; ``False`` is the same step by JAX's own rules alone.
    """
    method, optimizer = experiment.method, experiment.optimizer

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        images = normalise(batch.images, normalisation)
        position = jnp.arange(images.shape[0]) * jax.lax.axis_size(AXIS) + jax.lax.axis_index(AXIS)
        step_key = jax.random.fold_in(key, state.step)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, position)
        # One device needs no collectives, and without them XLA fuses more.
        axis_name = AXIS if jax.lax.axis_size(AXIS) > 1 else None
        context = TrainContext(
            keys=keys, axis_name=axis_name, reverse_only=reverse_only, step=state.step
        )

        def objective(params: ModelParams) -> tuple[jax.Array, Any]:
            loss = method.loss(turned(params), images, batch.labels, context)
            return loss.objective(axis_name), loss

        (value, loss), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
        correct = jnp.argmax(loss.log_probs, axis=-1) == batch.labels
        accuracy = jnp.mean(correct.astype(jnp.float32))
        if axis_name is not None:
            # `objective` is already the global mean, differentiated through its sums:
            # the mean of the devices' gradients is the gradient of that mean.
            gradient, accuracy = jax.lax.pmean((gradient, accuracy), axis_name)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params = params.replace(batch_stats=turned(loss.batch_stats))
        metrics = {
            "loss": value,
            **{name: term.mean(axis_name) for name, term in loss.terms.items()},
            "accuracy": accuracy,
            "learning_rate": jnp.asarray(experiment.schedule(state.step), jnp.float32),
            "gradient_norm": optax.tree.norm(_apart((gradient.network, gradient.head))),
            # NaN or infinity anywhere in the state makes this non-finite.
            "parameter_norm": optax.tree.norm(params),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def _apart(tree: Any) -> Any:
    """The same numbers, whose squares XLA does not take for those the optimiser has squared.

    Sharing them, it would write them all to memory, and read them again, in every step.
    """
    return jax.lax.optimization_barrier(tree)


class Runner(NamedTuple):
    """A train step spread over devices, several steps per call.

    Attributes:
      place_state: host state to devices, `turned`.
      fetch_state: devices to a host state (NumPy leaves), in its plain shapes again.
      place_data: resident training arrays to devices.
      run: ``(state, data, rows, count, key)`` to the state ``count`` steps on, and
        metrics ``[K]`` each; compiled once.
      lower: takes the same, and gives the program for inspection.
    """

    place_state: Callable[[TrainState], TrainState]
    fetch_state: Callable[[TrainState], TrainState]
    place_data: Callable[[Batch | None], Batch | None]
    run: Callable[..., tuple[TrainState, Metrics]]
    lower: Callable[..., jax.stages.Lowered]


def make_runner(train_step: StepFn, parallel: str) -> Runner:
    """Runs ``train_step`` on all devices by ``"pmap"`` or ``"shard_map"``.

    ``rows`` given to ``run`` are ``[D, K, b]`` positions in the resident data for this
    process's ``D`` devices, or a `Batch` of ``[D, K, b, ...]`` arrays where nothing is
    resident; only the first ``count`` of the ``K`` steps are taken.
    """
    return {"pmap": _pmap_runner, "shard_map": _shard_map_runner}[parallel](train_step)


def _steps(
    train_step: StepFn, state: TrainState, data: Batch | None, rows: Any, count: Any, key: jax.Array
) -> tuple[TrainState, Metrics]:
    """``count`` steps on one device; a dynamic count, so one compilation serves all."""

    def batch_at(index: Any) -> Batch:
        chosen = jax.tree.map(lambda leaf: leaf[index], rows)
        if data is None:
            return chosen
        return Batch(data.images[chosen], data.labels[chosen])

    def body(index: Any, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
        state, history = carry
        state, metrics = train_step(state, batch_at(index), key)
        return state, {name: history[name].at[index].set(metrics[name]) for name in history}

    length = jax.tree.leaves(rows)[0].shape[0]
    if length == 1:
        # A single step needs no loop.
        state, metrics = train_step(state, batch_at(0), key)
        return state, {name: value[None] for name, value in metrics.items()}
    shapes = jax.eval_shape(lambda s: train_step(s, batch_at(0), key)[1], state)
    history = {name: jnp.zeros(length, value.dtype) for name, value in shapes.items()}
    return jax.lax.fori_loop(0, count, body, (state, history))


def _on_host(state: TrainState) -> TrainState:
    return jax.tree.map(partial(np.asarray, order="C"), turned(jax.device_get(state)))


def _pmap_runner(train_step: StepFn) -> Runner:
    run = jax.pmap(
        partial(_steps, train_step),
        axis_name=AXIS,
        in_axes=(0, 0, 0, None, None),
        donate_argnums=0,
    )

    # Placed as pmap itself places its outputs, or the second call would compile again.
    mesh = Mesh(np.asarray(jax.local_devices()), (AXIS,))
    over_devices = NamedSharding(mesh, PartitionSpec(AXIS))

    def replicate(tree: Any) -> Any:
        def copies(leaf: Any) -> jax.Array:
            leaf = np.asarray(leaf)
            shape = (jax.local_device_count(), *leaf.shape)
            return jax.device_put(np.broadcast_to(leaf, shape), over_devices)

        return jax.tree.map(copies, tree)

    def run_and_unreplicate(*arguments: Any) -> tuple[TrainState, Metrics]:
        state, metrics = run(*arguments)
        return state, jax_utils.unreplicate(metrics)

    return Runner(
        place_state=lambda state: replicate(turned(state)),
        fetch_state=lambda state: _on_host(jax_utils.unreplicate(state)),
        place_data=lambda data: None if data is None else replicate(data),
        run=run_and_unreplicate,
        lower=run.lower,
    )


def _shard_map_runner(train_step: StepFn) -> Runner:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec(AXIS))

    def local(
        state: TrainState, data: Batch | None, rows: Any, count: Any, key: jax.Array
    ) -> tuple[TrainState, Metrics]:
        rows = jax.tree.map(lambda leaf: leaf[0], rows)  # this device's only row of [D, K, b]
        return _steps(train_step, state, data, rows, count, key)

    none, split = PartitionSpec(), PartitionSpec(AXIS)
    # With the default check, gradients of replicated parameters are already summed
    # over devices, and the step's own mean would count them again.
    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(none, none, split, none, none),
            out_specs=(none, none),
            check_vma=False,
        ),
        donate_argnums=0,
    )

    def place(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree
        )

    return Runner(
        place_state=lambda state: place(turned(state), replicated),
        fetch_state=_on_host,
        place_data=lambda data: None if data is None else place(data, replicated),
        run=lambda state, data, rows, *more: run(state, data, place(rows, sharded), *more),
        lower=lambda state, data, rows, *more: run.lower(state, data, place(rows, sharded), *more),
    )
