"""Layers of the networks: BatchNorm with its statistics as data, dropout by example.

Everything a layer needs beside its input travels in a `TrainContext`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mass_jax.convolution import conv3x3, conv3x3_closed
from mass_jax.standardisation import standardised
from mass_jax.turned_kernel import trained_product, turning_is_faster

BATCH_NORM_EPSILON = 1e-5
KAIMING_NORMAL = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
# What BatchNorm's scales may start from. PyTorch drew them from U(0, 1) up to version 1.1, which
# was the newest when the paper appeared (pytorch/pytorch#12259), and starts at one since.
BATCH_NORM_STARTS: dict[str | None, nn.initializers.Initializer] = {
    None: nn.initializers.ones,
    "uniform": nn.initializers.uniform(1.0),
}


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
      first: ``[B, width]``, what the network's dense first layer gives for ``x``, where it is
        known already; the derivative by it is the Jacobian behind that layer.
      reverse_only: the result will be differentiated in reverse mode only, and not mapped over
        models, which lets layers use rules that are faster on CPUs.

    Example:
      >>> import jax
      >>> TrainContext(keys=jax.random.split(jax.random.key(0), 4)).use_batch_moments
      True
    """

    keys: jax.Array | None = None
    weights: jax.Array | None = None
    axis_name: str | None = None
    use_batch_moments: bool = True
    step: jax.Array | None = None
    first: jax.Array | None = None
    reverse_only: bool = False


EVALUATION = TrainContext(use_batch_moments=False)


class BatchNorm(nn.Module):
    """BatchNorm whose batch statistics are data: given, or computed and returned.

    As its context says, normalises by the (weighted, device-synchronised) moments
    of the batch and stores them in the ``batch_moments`` collection, or uses the
    ``batch_stats`` collection. Both hold a ``mean`` and a ``var``.

    Attributes:
      scale_init: what its scales start from.

    Example: a batch is centred by its own mean.
      >>> import jax, jax.numpy as jnp
      >>> x, norm = jnp.array([[1.0], [3.0]]), BatchNorm()
      >>> variables = norm.init(jax.random.key(0), x, EVALUATION)
      >>> y, moments = norm.apply(variables, x, TrainContext(), mutable=["batch_moments"])
      >>> y.round(3).tolist(), moments["batch_moments"]["mean"].tolist()
      ([[-1.0], [1.0]], [2.0])
    """

    scale_init: Callable[..., jax.Array] = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        features = x.shape[-1]
        scale = self.param("scale", self.scale_init, (features,))
        bias = self.param("bias", nn.initializers.zeros, (features,))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (features,))
        running_var = self.variable("batch_stats", "var", jnp.ones, (features,))
        if context.use_batch_moments:
            mean, var, count = _batch_moments(x, context)
            for name, value in (("mean", mean), ("var", var), ("count", count)):
                self.put_variable("batch_moments", name, value)
        else:
            mean, var = running_mean.value, running_var.value
        inverse_deviation = jax.lax.rsqrt(var + BATCH_NORM_EPSILON)
        if context.use_batch_moments and _has_closed_rules(context) and mean.dtype == x.dtype:
            row = lambda vector: _as_row(vector.astype(x.dtype), x.ndim)
            return standardised(x, row(mean), row(inverse_deviation)) * row(scale) + row(bias)
        multiplier = scale * inverse_deviation
        # Centring before scaling keeps precision when |mean| >> sqrt(var).
        centred = x - _as_row(mean.astype(x.dtype), x.ndim)
        return centred * _as_row(multiplier.astype(x.dtype), x.ndim) + _as_row(
            bias.astype(x.dtype), x.ndim
        )


def _has_closed_rules(context: TrainContext) -> bool:
    """Whether `standardised` may stand for the plain formula: every row of one device counts."""
    return context.reverse_only and context.weights is None and context.axis_name is None


def _batch_moments(x: jax.Array, context: TrainContext) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and count over all axes but the last."""
    rows = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(x.shape[0], -1, x.shape[-1])
    weights = jnp.ones(x.shape[0]) if context.weights is None else context.weights
    weights = weights.astype(rows.dtype)
    count = _sum_over_devices(jnp.sum(weights), context.axis_name) * rows.shape[1]
    # An all-padding batch has no statistics; dividing by one keeps it finite.
    divisor = jnp.maximum(count, 1.0)
    if context.weights is None and context.axis_name is None:
        x, axes = x.astype(rows.dtype), tuple(range(x.ndim - 1))
        mean = jnp.mean(x, axis=axes)
        return mean, jnp.mean(jnp.square(x - _as_row(mean, x.ndim)), axis=axes), count
    total = jnp.einsum("b,bpc->c", weights, rows)
    mean = _sum_over_devices(total, context.axis_name) / divisor
    deviation = jnp.einsum("b,bpc->c", weights, jnp.square(rows - _as_row(mean, 3)))
    return mean, _sum_over_devices(deviation, context.axis_name) / divisor, count


def _sum_over_devices(value: jax.Array, axis_name: str | None) -> jax.Array:
    return value if axis_name is None else jax.lax.psum(value, axis_name)


def _as_row(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


@jax.custom_jvp
def elu(x: jax.Array) -> jax.Array:
    """``x`` where it is positive, else ``exp(x) - 1``; its slope is had from its value.

    Flax's, as JAX differentiates it, passes over the batch twice as often.

    Args:
      x: any shape.

    Returns:
      As ``x``.

    Example:
      >>> import jax.numpy as jnp
      >>> elu(jnp.array([1.0, -100.0])).tolist()
      [1.0, -1.0]
    """
    return jnp.where(x > 0, x, jnp.expm1(jnp.minimum(x, 0)))


@elu.defjvp
def _elu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    value = elu(primals[0])
    return value, jnp.where(value > 0, 1, value + 1) * tangents[0]


class Dropout(nn.Module):
    """Dropout with one key per example.

    Attributes:
      rate: share of the units that are zero.
      index: separates the layers of a network.

    Example: evaluation keeps everything.
      >>> import jax.numpy as jnp
      >>> Dropout(rate=0.5, index=0).apply({}, jnp.ones((1, 2)), EVALUATION).tolist()
      [[1.0, 1.0]]
    """

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
    """Affine layer starting from PyTorch's default, uniform in +-1/sqrt(fan_in).

    Attributes:
      features: outputs.
      kernel_init: of the weights, instead of that.
      turned: by `trained_product` if large, the same for training.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> Linear(3).init_with_output(jax.random.key(0), jnp.ones((2, 5)))[0].shape
      (2, 3)
    """

    features: int
    kernel_init: Callable[..., jax.Array] | None = None
    turned: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fan_in = x.shape[-1]

        def uniform(key: jax.Array, shape: Sequence[int], dtype: Any = float) -> jax.Array:
            return _uniform_fan_in(key, shape, dtype, fan_in)

        kernel = self.param("kernel", self.kernel_init or uniform, (fan_in, self.features))
        bias = self.param("bias", uniform, (self.features,))
        turned = self.turned and x.ndim == 2 and turning_is_faster(kernel)
        multiply = trained_product if turned else jnp.matmul
        return multiply(x, kernel.astype(x.dtype)) + _as_row(bias.astype(x.dtype), x.ndim)


class Conv3x3(nn.Module):
    """3x3 convolution with a Kaiming-normal kernel."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, context: TrainContext) -> jax.Array:
        kernel = self.param("kernel", KAIMING_NORMAL, (3, 3, x.shape[-1], self.features))
        closed = context.reverse_only and jax.default_backend() == "cpu"
        convolve = conv3x3_closed if closed else conv3x3
        return convolve(x, kernel.astype(x.dtype), self.stride)
