"""Somebody's own network: what it must be, and a digest that tells it from others."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError

from mass_jax import networks
from mass_jax.config import ConfigError
from mass_jax.networks import EVALUATION, Network, TrainContext

PyTree = Any
_REMEDY = (
    "use layers without state: nn.LayerNorm, nn.GroupNorm, or mass_jax.networks.BatchNorm and "
    "Dropout in a module with __call__(self, x, context)"
)


@dataclass(frozen=True)
class ModuleWithContext:
    """A Flax module with ``__call__(x, context)``, whose context need not have a default."""

    module: nn.Module

    def init(self, rngs: Any, /, *args: Any) -> Any:
        return self.module.init(rngs, args[0], EVALUATION)

    def apply(self, variables: Any, /, *args: Any, mutable: Any = False) -> Any:
        return self.module.apply(variables, *args, mutable=mutable)


@dataclass(frozen=True)
class PlainModule:
    """A Flax module with ``__call__(x)``, where a `Network` is called with a context too."""

    module: nn.Module

    def init(self, rngs: Any, /, *args: Any) -> Any:
        return self.module.init(rngs, args[0])

    def apply(self, variables: Any, /, *args: Any, mutable: Any = False) -> Any:
        outputs = self.module.apply({"params": variables["params"]}, args[0])
        return outputs if mutable is False else (outputs, {})


@dataclass(frozen=True)
class PureFunction:
    """``apply_fn(params, x)`` with initial ``params``, as a `Network`."""

    apply_fn: Callable[[PyTree, jax.Array], jax.Array]
    initial: PyTree = field(compare=False, repr=False)  # arrays have no hash

    def init(self, rngs: Any, /, *args: Any) -> Any:
        del rngs, args  # it brings its own
        return {"params": jax.tree.map(jnp.asarray, self.initial)}

    def apply(self, variables: Any, /, *args: Any, mutable: Any = False) -> Any:
        outputs = self.apply_fn(variables["params"], args[0])
        return outputs if mutable is False else (outputs, {})


class OwnNetwork(NamedTuple):
    """A network that was looked at and found good.

    Attributes:
      network: as the methods take it.
      output_dim: the size of its output.
      digest: of architecture, operations and shapes, twelve hexadecimal digits; of a
        function also, after a hyphen, of its initial parameters.
    """

    network: Network
    output_dim: int
    digest: str


def own_network(network: Any, input_shape: Sequence[int], params: PyTree = None) -> OwnNetwork:
    """Wraps a Flax module or a pure function, or says in one line what is wrong with it.

    Args:
      network: a Flax linen module with ``__call__(x)`` (or ``__call__(x, context)``, to use
        `mass_jax.networks.BatchNorm` and ``Dropout``), or ``apply_fn(params, x)``; on batches
        ``[B, ...]``, to ``[B, R]``.
      input_shape: of one example.
      params: initial parameters of a function.

    Example:
      >>> import flax.linen as nn
      >>> own_network(nn.Dense(3), input_shape=(8,)).output_dim
      3
    """
    wrapped = _wrapped(network, params)
    x = jax.ShapeDtypeStruct((2, *input_shape), jnp.float32)
    variables = _abstractly(wrapped.init, jax.random.key(0), x)
    other = sorted(set(variables) - {"params", "batch_stats"})
    if isinstance(wrapped, PlainModule):
        other = sorted(set(variables) - {"params"})
    if other:
        raise ConfigError(f"the network keeps state of its own ({', '.join(other)}); {_REMEDY}")
    trained = variables.get("params", {})
    if not jax.tree.leaves(trained):
        raise ConfigError("the network has no parameters to train")
    for leaf in jax.tree.leaves(trained):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(f"the network has parameters of type {leaf.dtype}; need floats")
    statistics = variables.get("batch_stats", {})

    def evaluate(weights: PyTree, inputs: jax.Array) -> Any:
        return networks.apply(wrapped, weights, statistics_of(statistics), inputs)

    output = _abstractly(evaluate, trained, x)
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != 2 or shape[1] < 1:
        raise ConfigError(
            f"the network maps (2, {', '.join(map(str, input_shape))}) to {shape}; it must map a "
            "batch (B, ...) to (B, R)"
        )
    _check_statistics(wrapped, trained, statistics, x)
    return OwnNetwork(wrapped, shape[1], _digest(wrapped, evaluate, trained, x))


def statistics_of(shapes: PyTree) -> PyTree:
    """Zeros in the shape of running statistics, to trace with."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _wrapped(network: Any, params: PyTree) -> Network:
    if isinstance(network, nn.Module):
        if params is not None:
            raise ConfigError("a Flax module makes its own parameters; leave params= out")
        takes_context = "context" in inspect.signature(type(network).__call__).parameters
        return ModuleWithContext(network) if takes_context else PlainModule(network)
    if isinstance(network, type):
        raise ConfigError(f"network={network.__name__} is a class; pass {network.__name__}(...)")
    if not callable(network):
        raise ConfigError(
            f"network={network!r}: must be one of {sorted(networks.NETWORKS)}, a Flax linen module "
            "or a function apply_fn(params, x)"
        )
    if params is None:
        raise ConfigError("a function apply_fn(params, x) needs its initial parameters: params=")
    return PureFunction(network, params)


def _abstractly(function: Callable[..., Any], *arguments: Any) -> Any:
    """Shapes of a call; whatever the user's code raises becomes one line."""
    try:
        return jax.eval_shape(function, *arguments)
    except (FlaxError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        remedy = ""
        switches = ("rng", "deterministic", "running_average", "required positional argument")
        if any(switch in reason.lower() for switch in switches):
            remedy = f"; it needs dropout keys or a training switch: {_REMEDY}"
        raise ConfigError(
            f"the network cannot be called on a batch ({type(error).__name__}: {reason[:200]})"
            f"{remedy}"
        ) from None


def _check_statistics(network: Network, params: PyTree, statistics: PyTree, x: Any) -> None:
    """Running statistics must be those of `mass_jax.networks.BatchNorm`, layer by layer."""

    def moments(weights: PyTree, inputs: jax.Array) -> Any:
        context = TrainContext(keys=jax.random.split(jax.random.key(0), 2))
        _, found = networks.apply_train(
            network, weights, statistics_of(statistics), inputs, context
        )
        return found

    found = _abstractly(moments, params, x)
    layers = {_layer(path) for path, _ in jax.tree.leaves_with_path(statistics)}
    if layers != {_layer(path) for path, _ in jax.tree.leaves_with_path(found)}:
        raise ConfigError(f"the network keeps state of its own (batch_stats); {_REMEDY}")


def _layer(path: Any) -> str:
    return jax.tree_util.keystr(path[:-1])


def _digest(network: Network, evaluate: Callable[..., Any], params: PyTree, x: Any) -> str:
    """What the network computes, not where it lives in memory or what it is called."""
    traced = jax.make_jaxpr(evaluate)(params, x)
    lines = [
        # An attribute such as the rate of dropout shows in no operation of an evaluation.
        "" if isinstance(network, PureFunction) else re.sub(r" at 0x[0-9a-f]+", "", repr(network)),
        *(
            f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}"
            for path, leaf in _leaves(params)
        ),
        *_operations(traced.jaxpr),
        *(hashlib.sha256(np.asarray(constant).tobytes()).hexdigest() for constant in traced.consts),
    ]
    digest = _short("\n".join(lines).encode())
    if isinstance(network, PureFunction):
        values = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(network.initial))
        return f"{digest}-{_short(values)}"
    return digest


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(tree)


def _operations(jaxpr: Any) -> Iterator[str]:
    """Primitive operations in order, with shapes and literal numbers; calls are looked into.

    Not the printed jaxpr: its layout changes from one version of JAX to the next.
    """
    for equation in jaxpr.eqns:
        values = jax.tree.leaves(list(equation.params.values()))  # branches come as tuples
        inner = [getattr(value, "jaxpr", value) for value in values]
        inner = [value for value in inner if hasattr(value, "eqns")]
        for value in inner:
            yield from _operations(value)
        if not inner:
            literals = [str(v.val) for v in equation.invars if hasattr(v, "val")]
            shapes = [str(v.aval.shape) for v in equation.outvars]
            yield " ".join([equation.primitive.name, *literals, *shapes])


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def same_architecture(one: str, other: str) -> bool:
    """Whether two digests are of one architecture, whatever its initial parameters."""
    return one.split("-")[0] == other.split("-")[0]


def check_examples_do_not_interact(network: OwnNetwork, x: jax.Array) -> None:
    """Refuses a network that looks across its batch: its Jacobian is not per example.

    Args:
      network: to be tried with random parameters.
      x: ``[2, ...]``, two different examples.
    """
    variables = jax.eval_shape(network.network.init, jax.random.key(0), x)
    draw = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0.0, 0.1, leaf.shape), leaf.dtype),
        variables["params"],
    )
    ones = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), variables.get("batch_stats", {})
    )
    apply = lambda inputs: networks.apply(network.network, weights, ones, inputs)
    together, alone = np.asarray(apply(x)), np.asarray(apply(x[:1]))
    scale = float(np.abs(np.nan_to_num(together)).max())
    if not np.allclose(together[:1], alone, rtol=1e-2, atol=1e-3 * scale, equal_nan=True):
        raise ConfigError(
            "the network's output for an example depends on the other examples of the batch, so "
            f"its Jacobian is not defined per example; {_REMEDY}"
        )
