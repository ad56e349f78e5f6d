"""Variational Information Bottleneck (Alemi et al., 2016), the second baseline."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from mass_jax import gaussian_mixture, networks
from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.method import (
    BuildNetwork,
    Examples,
    Loss,
    Method,
    PerExample,
    negative_log_likelihood,
    predictive_entropy,
    with_weight_decay,
)
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext

Covariance = Literal["full", "diagonal"]
_LOG_2PI = 1.8378770664093453  # log(2 pi)


class VibHead(NamedTuple):
    """What VIB trains beside the network.

    Attributes:
      decoder: linear map to class logits: ``kernel`` ``[R, K]``, ``bias`` ``[K]``.
      marginal: one mixture of ``M`` Gaussians, the variational ``r(z)``.
    """

    decoder: dict[str, jax.Array]
    marginal: GaussianMixture


class Encoding(NamedTuple):
    """``p(z | x)``: ``mean`` ``[B, R]`` and lower-triangular ``scale`` ``[B, R, R]``."""

    mean: jax.Array
    scale: jax.Array


class Bottleneck(NamedTuple):
    """An encoding sampled and decoded.

    Attributes:
      samples: ``[S, B, R]``.
      cross_entropy: ``[B]``, mean over samples of ``-log p(y | z)``; ``None``
        without labels.
      log_probs: ``[B, K]``, the decoder at the mean of the samples.
      rate: ``[B]``, Monte-Carlo ``KL(p(z|x) || r(z))``, nats.
    """

    samples: jax.Array
    cross_entropy: jax.Array | None
    log_probs: jax.Array
    rate: jax.Array


def num_outputs(representation_dim: int, covariance: Covariance) -> int:
    """Network outputs that parametrise one encoding."""
    if covariance == "diagonal":
        return 2 * representation_dim
    return representation_dim + representation_dim * (representation_dim + 1) // 2


def encode(outputs: jax.Array, representation_dim: int, covariance: Covariance) -> Encoding:
    """Encoder distribution from network outputs.

    Args:
      outputs: ``[B, num_outputs]``: ``R`` means, ``R`` diagonal entries before
        softplus, then the entries below the diagonal row by row (full only).
      representation_dim: ``R``.
      covariance: ``"full"`` or ``"diagonal"``.
    """
    mean = outputs[:, :representation_dim]
    positive = jax.nn.softplus(outputs[:, representation_dim : 2 * representation_dim])
    scale = positive[:, :, None] * jnp.eye(representation_dim, dtype=outputs.dtype)[None]
    if covariance == "full":
        rows, columns = jnp.tril_indices(representation_dim, k=-1)
        scale = scale.at[:, rows, columns].set(outputs[:, 2 * representation_dim :])
    return Encoding(mean, scale)


def bottleneck(
    encoding: Encoding, head: VibHead, noise: jax.Array, labels: jax.Array | None = None
) -> Bottleneck:
    """Samples an encoding with given noise and measures both VIB terms.

    Args:
      encoding: ``p(z | x)``.
      head: decoder and marginal.
      noise: ``[S, B, R]`` standard normal.
      labels: ``[B]``.
    """
    num_samples, batch, dim = noise.shape
    samples = encoding.mean[None] + jnp.einsum("brs,nbs->nbr", encoding.scale, noise)
    flat = samples.reshape(num_samples * batch, dim)
    diagonal = jnp.diagonal(encoding.scale, axis1=-2, axis2=-1)  # [B, R]
    # At its own samples the encoder's log-density needs only the noise.
    log_encoder = (
        -0.5 * jnp.sum(jnp.square(noise), axis=-1)
        - jnp.sum(jnp.log(diagonal), axis=-1)[None]
        - 0.5 * dim * _LOG_2PI
    )  # [S, B]
    log_marginal = gaussian_mixture.log_prob(head.marginal, flat).reshape(num_samples, batch)
    cross_entropy = None
    if labels is not None:
        repeated = jnp.tile(labels, num_samples)
        losses = negative_log_likelihood(_decode(head, flat), repeated)
        cross_entropy = jnp.mean(losses.reshape(num_samples, batch), axis=0)
    return Bottleneck(
        samples=samples,
        cross_entropy=cross_entropy,
        log_probs=_decode(head, jnp.mean(samples, axis=0)),
        rate=jnp.mean(log_encoder - log_marginal, axis=0),
    )


def _decode(head: VibHead, z: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(z @ head.decoder["kernel"] + head.decoder["bias"][None])


def method(
    *,
    num_classes: int = 10,
    representation_dim: int = 15,
    beta: float = 1e-3,
    num_components: int = 10,
    covariance: Covariance = "full",
    train_samples: int = 5,
    test_samples: int = 10,
    weight_decay: float = 0.0,
) -> Method:
    """Minimises ``E[-log p(y|z)] + beta KL(p(z|x) || r(z))`` over ``z ~ p(z|x)``.

    Args:
      num_classes: ``K``.
      representation_dim: ``R``.
      beta: weight of the rate.
      num_components: ``M``, Gaussians in the marginal ``r(z)``.
      covariance: of the encoder: ``"full"`` (SmallMLP) or ``"diagonal"`` (ResNet20).
      train_samples, test_samples: encoder samples per example.
      weight_decay: L2 coefficient on the network's weights.

    References:
      MASS, arXiv:1905.07822, section 5 and supplement; Alemi et al.,
      arXiv:1612.00410, Eq. (17).
    """
    if covariance not in ("full", "diagonal"):
        raise ValueError(f"covariance={covariance!r}: choose 'full' or 'diagonal'")

    def init(
        key: jax.Array,
        build_network: BuildNetwork,
        input_shape: Sequence[int],
        examples: Examples | None = None,
    ) -> ModelParams:
        del examples  # nothing is fitted
        network_key, decoder_key, marginal_key = jax.random.split(key, 3)
        module = build_network(num_outputs(representation_dim, covariance))
        variables = networks.init_variables(network_key, module, input_shape)
        decoder = networks.Linear(num_classes).init(decoder_key, jnp.zeros((1, representation_dim)))
        marginal = GaussianMixture(
            logits=jnp.zeros(num_components),
            means=jax.random.uniform(
                marginal_key, (num_components, representation_dim), minval=-0.1, maxval=0.1
            ),
            scale_tril=jnp.tile(jnp.eye(representation_dim)[None], (num_components, 1, 1)),
        )
        head = VibHead(dict(decoder["params"]), marginal)
        return ModelParams(variables["params"], head, variables["batch_stats"], module)

    def draw_noise(keys: jax.Array | None, num_samples: int, dtype: jnp.dtype) -> jax.Array:
        if keys is None:
            raise ValueError("VIB samples its encoder: pass keys, one PRNG key per example")
        shape = (num_samples, representation_dim)
        noise = jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)  # [B, S, R]
        return jnp.swapaxes(noise, 0, 1)

    def loss(params: ModelParams, x: jax.Array, labels: jax.Array, context: TrainContext) -> Loss:
        outputs, moments = networks.apply_train(
            params.module, params.network, params.batch_stats, x, context
        )
        encoding = encode(outputs, representation_dim, covariance)
        noise = draw_noise(context.keys, train_samples, outputs.dtype)
        seen = bottleneck(encoding, params.head, noise, labels)
        assert seen.cross_entropy is not None
        terms = {"cross_entropy": PerExample(seen.cross_entropy), "rate": PerExample(seen.rate)}
        coefficients = {"cross_entropy": 1.0, "rate": beta}
        running = networks.update_running(params.batch_stats, moments)
        undecayed = Loss(terms, coefficients, seen.log_probs, running)
        return with_weight_decay(undecayed, params.network, weight_decay)

    def predict(params: ModelParams, x: jax.Array, keys: jax.Array | None) -> Bottleneck:
        outputs = params.representation(x)
        encoding = encode(outputs, representation_dim, covariance)
        return bottleneck(encoding, params.head, draw_noise(keys, test_samples, outputs.dtype))

    def log_probs(params: ModelParams, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        return predict(params, x, keys).log_probs

    def ood_scores(
        params: ModelParams, x: jax.Array, keys: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        seen = predict(params, x, keys)
        return {"entropy": predictive_entropy(seen.log_probs), "rate": seen.rate}

    return Method(init, loss, log_probs, ood_scores)
