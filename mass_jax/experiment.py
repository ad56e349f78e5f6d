"""From a configuration to the pure pieces of an experiment."""

import inspect
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from ml_collections import ConfigDict

from mass_jax.config import ConfigError, flatten
from mass_jax.data import BatchOrder, Dataset, Subset, draw_subset, normalise
from mass_jax.estimators import JACOBIAN_ESTIMATORS
from mass_jax.layers import BATCH_NORM_STARTS
from mass_jax.method import BuildNetwork, Examples, Method
from mass_jax.methods import METHODS, make_method
from mass_jax.model import ModelParams, PyTree
from mass_jax.networks import make_network


class TrainState(struct.PyTreeNode):
    """Everything that changes during training.

    Attributes:
      step: steps taken, int32.
      params: the model, with q and running BatchNorm statistics.
      opt_state: of the optimiser.
    """

    step: jax.Array
    params: ModelParams
    opt_state: PyTree


class Keys(NamedTuple):
    """The four keys of a run; nothing else makes keys."""

    init: jax.Array
    data: jax.Array
    step: jax.Array
    evaluation: jax.Array


def keys_of(seed: int) -> Keys:
    """Keys by `fold_in` from the seed."""
    root = jax.random.key(seed)
    return Keys(*(jax.random.fold_in(root, index) for index in range(4)))


class Experiment(NamedTuple):
    """An experiment that is ready to start.

    Attributes:
      method: loss and predictions.
      optimizer: updates of all parameters.
      schedule: learning rate of the network by step.
      subset: rows of the training split.
      order: of batches over the subset.
      keys: of randomness.
      initial_state: makes the state at step 0.
    """

    method: Method
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    subset: Subset
    order: BatchOrder
    keys: Keys
    initial_state: Any


def make_experiment(
    config: ConfigDict, dataset: Dataset, build_network: BuildNetwork | None = None
) -> Experiment:
    """Builds method, optimiser, data order and initial state.

    Args:
      config: resolved.
      dataset: what to train on.
      build_network: of a ``config.network`` that has no name.
    """
    size = 1
    for extent in dataset.input_shape:
        size *= extent
    if config.method == "mass" and config.representation_dim > size:
        raise ConfigError(
            f"config.representation_dim={config.representation_dim}: must be at most {size}, the "
            "size of an example"
        )
    keys = keys_of(config.seed)
    subset = draw_subset(
        jax.random.fold_in(keys.data, 0),
        len(dataset.train.labels),
        config.train_size,
        config.data.validation_size,
    )
    order = BatchOrder(jax.random.fold_in(keys.data, 1), config.train_size, config.batch_size)
    method = method_of(config, dataset.num_classes)
    schedule = _schedule(config, config.optimizer.learning_rate, order.steps_per_epoch)
    optimizer = _optimizer(config, order.steps_per_epoch)
    build_network = build_network or network_builder(config)

    def initial_state() -> TrainState:
        examples = None
        if config.method == "mass" and config.initialisation == "mle":
            rows = subset.train[: config.density_examples]
            examples = Examples(
                normalise(jnp.asarray(dataset.train.images[rows]), dataset.normalisation),
                jnp.asarray(dataset.train.labels[rows]),
            )
        params = method.init(keys.init, build_network, dataset.input_shape, examples)
        # One program for all its zeros, not one for every shape.
        opt_state = jax.jit(optimizer.init)(params)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state)

    return Experiment(method, optimizer, schedule, subset, order, keys, initial_state)


def method_of(config: ConfigDict, num_classes: int) -> Method:
    """The method of a configuration; each takes the fields it names."""
    by_leaf = {key.split(".")[-1]: value for key, value in flatten(config).items()}
    by_leaf["num_classes"] = num_classes
    wanted = inspect.signature(METHODS[config.method]).parameters
    return make_method(config.method, **{k: v for k, v in by_leaf.items() if k in wanted})


def jacobian_cycle(config: ConfigDict) -> int:
    """Every how many steps there is a Jacobian term; one where all or none have it."""
    if config.method != "mass" or config.beta == 0:
        return 1
    return JACOBIAN_ESTIMATORS[config.jacobian.estimator].every


def network_builder(config: ConfigDict) -> BuildNetwork:
    """The network of a configuration, still to be told its output dimension."""
    options: dict[str, Any] = {
        "dtype": {"float32": None, "bfloat16": jnp.bfloat16}[config.dtype],
        "scale_init": BATCH_NORM_STARTS[config.batch_norm_start],
    }
    if config.network == "small_mlp":
        options |= {"dropout_rate": config.dropout_rate, "batch_norm": config.batch_norm}
    return partial(make_network, config.network, **options)


def _schedule(config: ConfigDict, rate: float, steps_per_epoch: int) -> optax.Schedule:
    boundaries = {
        epoch * steps_per_epoch: config.optimizer.decay_factor
        for epoch in config.optimizer.decay_epochs
    }
    return optax.piecewise_constant_schedule(rate, boundaries)


def _optimizer(config: ConfigDict, steps_per_epoch: int) -> optax.GradientTransformation:
    """One rule for the network, one for the method's own parameters, none for statistics."""

    def rule(rate: float) -> optax.GradientTransformation:
        schedule = _schedule(config, rate, steps_per_epoch)
        if config.optimizer.name == "adam":
            return optax.adam(schedule)
        return optax.sgd(schedule, momentum=config.optimizer.momentum)

    network_rate = config.optimizer.learning_rate
    head_rate = config.optimizer.q_learning_rate
    rules = {
        "network": rule(network_rate),
        "head": rule(network_rate if head_rate is None else head_rate),
        "statistics": optax.set_to_zero(),
    }

    def labels(params: ModelParams) -> ModelParams:
        def label(name: str, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda _: name, tree)

        return params.replace(
            network=label("network", params.network),
            head=label("head", params.head),
            batch_stats=label("statistics", params.batch_stats),
        )

    per_group = optax.multi_transform(rules, labels)
    if config.optimizer.clip_norm is None:
        return per_group
    return optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), per_group)
