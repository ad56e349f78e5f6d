"""The paper's two networks, SmallMLP and ResNet20, in functional Flax.

A network is a Flax module plus two pure functions on explicit variables:

* `apply` evaluates with *given* BatchNorm statistics: examples do not interact;
* `apply_train` normalises with the statistics of the batch at hand and returns
  them, so that a caller may hold them fixed (`apply` again) or fold them into
  the running estimate (`update_running`).

Randomness is per example: ``keys`` is a ``[B]`` array of PRNG keys, so the same
example meets the same dropout mask on one device or on eight.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from mass_jax.convolution import conv3x3, conv3x3_closed

PyTree = Any
Variables = dict[str, Any]

BATCH_NORM_EPSILON = 1e-5
BATCH_NORM_MOMENTUM = 0.1  # weight of the new value in the running estimate, as in PyTorch


class Network(Protocol):
    """What a model needs of ``f``: every Flax module has it, your own may be wrapped.

    ``init(key, x)`` gives variables; ``apply(variables, x, context)`` gives ``[B, R]``,
    and with ``mutable=[...]`` the changed collections beside it.
    """

    def init(self, rngs: Any, /, *args: Any) -> Any: ...

    def apply(self, variables: Any, /, *args: Any, mutable: Any = False) -> Any: ...


class TrainContext(NamedTuple):
    """What a training-mode forward pass needs beside the batch.

    Attributes:
      keys: ``[B]`` PRNG keys, one per example; ``None`` switches dropout off.
      weights: ``[B]`` zeros and ones; rows of weight zero are padding and do
        not enter batch statistics. ``None`` counts every row.
      axis_name: device axis over which batch statistics are synchronised.
      use_batch_moments: normalise by the moments of the batch, not by given
        statistics.
      step: of training, for what happens only now and then.
      shift: ``[B, width]``, added to what a dense first layer gives; its derivative
        is the Jacobian behind that layer.
      reverse_only: the result will be differentiated in reverse mode only, which
        lets convolutions use rules that are faster on CPUs.
    """

    keys: jax.Array | None = None
    weights: jax.Array | None = None
    axis_name: str | None = None
    use_batch_moments: bool = True
    step: jax.Array | None = None
    shift: jax.Array | None = None
    reverse_only: bool = False


EVALUATION = TrainContext(use_batch_moments=False)


class BatchNorm(nn.Module):
    """BatchNorm whose batch statistics are data: given, or computed and returned.

    As its context says, normalises by the (weighted, device-synchronised) moments
    of the batch and stores them in the ``batch_moments`` collection, or uses the
    ``batch_stats`` collection. Both hold a ``mean`` and a ``var``.
    """

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        features = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (features,))
        bias = self.param("bias", nn.initializers.zeros, (features,))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (features,))
        running_var = self.variable("batch_stats", "var", jnp.ones, (features,))
        if context.use_batch_moments:
            mean, var, count = _batch_moments(x, context)
            for name, value in (("mean", mean), ("var", var), ("count", count)):
                self.put_variable("batch_moments", name, value)
        else:
            mean, var = running_mean.value, running_var.value
        multiplier = scale * jax.lax.rsqrt(var + BATCH_NORM_EPSILON)
        # Centring before scaling keeps precision when |mean| >> sqrt(var).
        centred = x - _as_row(mean.astype(x.dtype), x.ndim)
        return centred * _as_row(multiplier.astype(x.dtype), x.ndim) + _as_row(
            bias.astype(x.dtype), x.ndim
        )


def _batch_moments(x: jax.Array, context: TrainContext) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and count over all axes but the last."""
    rows = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(x.shape[0], -1, x.shape[-1])
    weights = jnp.ones(x.shape[0]) if context.weights is None else context.weights
    weights = weights.astype(rows.dtype)
    count = _sum_over_devices(jnp.sum(weights), context.axis_name) * rows.shape[1]
    # An all-padding batch has no statistics; dividing by one keeps it finite.
    divisor = jnp.maximum(count, 1.0)
    if context.weights is None and context.axis_name is None:
        mean = jnp.mean(rows, axis=(0, 1))
        return mean, jnp.mean(jnp.square(rows - _as_row(mean, 3)), axis=(0, 1)), count
    total = jnp.einsum("b,bpc->c", weights, rows)
    mean = _sum_over_devices(total, context.axis_name) / divisor
    deviation = jnp.einsum("b,bpc->c", weights, jnp.square(rows - _as_row(mean, 3)))
    return mean, _sum_over_devices(deviation, context.axis_name) / divisor, count


def _sum_over_devices(value: jax.Array, axis_name: str | None) -> jax.Array:
    return value if axis_name is None else jax.lax.psum(value, axis_name)


def _as_row(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


class Dropout(nn.Module):
    """Dropout with one key per example; ``index`` separates the layers."""

    rate: float
    index: int

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        if context.keys is None or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate

        def mask(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, self.index), keep, x.shape[1:])

        return jnp.where(jax.vmap(mask)(context.keys), x / keep, 0.0)


def _uniform_fan_in(key: jax.Array, shape: Sequence[int], dtype: Any, fan_in: int) -> jax.Array:
    bound = fan_in**-0.5
    return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)


class Linear(nn.Module):
    """Affine layer starting from PyTorch's default, uniform in +-1/sqrt(fan_in)."""

    features: int
    kernel_init: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fan_in = x.shape[-1]

        def uniform(key: jax.Array, shape: Sequence[int], dtype: Any = float) -> jax.Array:
            return _uniform_fan_in(key, shape, dtype, fan_in)

        kernel = self.param("kernel", self.kernel_init or uniform, (fan_in, self.features))
        bias = self.param("bias", uniform, (self.features,))
        return x @ kernel.astype(x.dtype) + _as_row(bias.astype(x.dtype), x.ndim)


class SmallMLP(nn.Module):
    """Two hidden layers of 400 and 200 elu units, BatchNorm before each.

    Attributes:
      output_dim: size of the output ``f(x)``.
      hidden: widths of the hidden layers.
      nonlinearity: any elementwise function.
      dropout_rate: after each nonlinearity, in training.
      batch_norm: the paper's Figure 2 goes without.
      dtype: of the computation; parameters stay float32 and so does the output.
    """

    output_dim: int
    hidden: tuple[int, ...] = (400, 200)
    nonlinearity: Callable[[jax.Array], jax.Array] = nn.elu
    dropout_rate: float = 0.0
    batch_norm: bool = True
    dtype: Any = None

    @property
    def first_dense(self) -> str:
        """The layer that takes ``TrainContext.shift``."""
        return "linear_0"

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext = EVALUATION) -> jax.Array:
        output_dtype = x.dtype
        x = x.reshape(x.shape[0], -1).astype(self.dtype or x.dtype)
        for index, width in enumerate(self.hidden):
            x = Linear(width, name=f"linear_{index}")(x)
            if index == 0 and context.shift is not None:
                x = x + context.shift.astype(x.dtype)
            if self.batch_norm:
                x = BatchNorm(name=f"norm_{index}")(x, context)
            x = self.nonlinearity(x)
            x = Dropout(self.dropout_rate, index, name=f"dropout_{index}")(x, context)
        return Linear(self.output_dim, name="output")(x).astype(output_dtype)


_KAIMING_NORMAL = nn.initializers.variance_scaling(2.0, "fan_in", "normal")


class Conv3x3(nn.Module):
    """3x3 convolution with a Kaiming-normal kernel."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        kernel = self.param("kernel", _KAIMING_NORMAL, (3, 3, x.shape[-1], self.features))
        closed = context.reverse_only and jax.default_backend() == "cpu"
        convolve = conv3x3_closed if closed else conv3x3
        return convolve(x, kernel.astype(x.dtype), self.stride)


class ResidualBlock(nn.Module):
    """Basic block of He et al. with a parameter-free shortcut."""

    features: int
    stride: int
    nonlinearity: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        y = Conv3x3(self.features, self.stride, name="conv_0")(x, context)
        y = self.nonlinearity(BatchNorm(name="norm_0")(y, context))
        y = Conv3x3(self.features, name="conv_1")(y, context)
        y = BatchNorm(name="norm_1")(y, context)
        return self.nonlinearity(y + _shortcut(x, self.features, self.stride))


def _shortcut(x: jax.Array, features: int, stride: int) -> jax.Array:
    """Subsample in space, zero-pad channels evenly on both sides."""
    missing = features - x.shape[-1]
    before = missing // 2
    return jnp.pad(
        x[:, ::stride, ::stride, :], ((0, 0), (0, 0), (0, 0), (before, missing - before))
    )


class ResNet20(nn.Module):
    """The 20-layer residual network of He et al. for 32x32 images.

    Attributes:
      output_dim: size of the output ``f(x)``.
      widths: channels of the three stages.
      blocks: residual blocks per stage.
      nonlinearity: any elementwise function.
      dtype: of the computation; parameters stay float32 and so does the output.
    """

    output_dim: int
    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 3
    nonlinearity: Callable[[jax.Array], jax.Array] = nn.relu
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext = EVALUATION) -> jax.Array:
        if x.ndim != 4:
            raise ValueError(
                f"ResNet20 needs images (batch, height, width, channels), got {x.shape}"
            )
        output_dtype = x.dtype
        x = Conv3x3(self.widths[0], name="conv")(x.astype(self.dtype or x.dtype), context)
        x = self.nonlinearity(BatchNorm(name="norm")(x, context))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage_{stage}_block_{block}"
                x = ResidualBlock(width, stride, self.nonlinearity, name=name)(x, context)
        x = jnp.mean(x, axis=(1, 2)).astype(output_dtype)
        return Linear(self.output_dim, kernel_init=_KAIMING_NORMAL, name="output")(x)


NETWORKS: dict[str, Callable[..., nn.Module]] = {"small_mlp": SmallMLP, "resnet20": ResNet20}


def make_network(name: str, output_dim: int, **options: Any) -> nn.Module:
    """A network of `NETWORKS` by name; ``options`` are its attributes.

    Example:
      >>> make_network("small_mlp", 15).hidden
      (400, 200)
    """
    if name not in NETWORKS:
        raise ValueError(f"network={name!r}: choose one of {sorted(NETWORKS)}")
    return NETWORKS[name](output_dim=output_dim, **options)


def init_variables(key: jax.Array, module: Network, input_shape: Sequence[int]) -> Variables:
    """Weights under ``"params"`` and BatchNorm statistics under ``"batch_stats"``.

    Args:
      key: PRNG key.
      module: a network.
      input_shape: of one example, without the batch axis.
    """
    # Compiled as one program: op by op, a ResNet20 takes seconds to initialise.
    variables = jax.jit(module.init)(key, jnp.zeros((1, *input_shape)))
    return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}


def apply(
    module: Network,
    params: PyTree,
    batch_stats: PyTree,
    x: jax.Array,
    keys: jax.Array | None = None,
    reverse_only: bool = False,
    shift: jax.Array | None = None,
) -> jax.Array:
    """``f(x)`` with given BatchNorm statistics; examples do not interact.

    Args:
      module: a network.
      params: its weights.
      batch_stats: running statistics, or the moments of a batch held fixed.
      x: ``[B, ...]``.
      keys: ``[B]`` PRNG keys of dropout; ``None`` switches it off.
      reverse_only, shift: see `TrainContext`.

    Returns:
      ``[B, R]``.
    """
    context = TrainContext(
        keys=keys, use_batch_moments=False, reverse_only=reverse_only, shift=shift
    )
    variables = {"params": params, "batch_stats": batch_stats}
    return module.apply(variables, x, context)


def apply_train(
    module: Network, params: PyTree, batch_stats: PyTree, x: jax.Array, context: TrainContext
) -> tuple[jax.Array, PyTree]:
    """``f(x)`` in training mode, and the batch moments it normalised with.

    Args:
      module: a network.
      params: its weights.
      batch_stats: running statistics; only their structure matters here.
      x: ``[B, ...]``.
      context: keys, padding and device axis.

    Returns:
      ``[B, R]`` and the moments (``mean``, biased ``var``, ``count`` per layer).
    """
    outputs, state = module.apply(
        {"params": params, "batch_stats": batch_stats}, x, context, mutable=["batch_moments"]
    )
    return outputs, state.get("batch_moments", {})


def update_running(batch_stats: PyTree, moments: PyTree) -> PyTree:
    """Running statistics after one more batch, as PyTorch keeps them.

    The running variance takes the unbiased variance of the batch.

    Args:
      batch_stats: ``mean`` and ``var`` per BatchNorm layer.
      moments: ``mean``, biased ``var`` and ``count`` per BatchNorm layer.
    """
    if "count" not in moments:
        return {name: update_running(batch_stats[name], moments[name]) for name in batch_stats}
    unbiased = moments["var"] * moments["count"] / jnp.maximum(moments["count"] - 1.0, 1.0)
    keep = 1.0 - BATCH_NORM_MOMENTUM
    return {
        "mean": keep * batch_stats["mean"] + BATCH_NORM_MOMENTUM * moments["mean"],
        "var": keep * batch_stats["var"] + BATCH_NORM_MOMENTUM * unbiased,
    }
