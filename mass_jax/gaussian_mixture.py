"""Mixtures of full-covariance Gaussians, batched over any leading axes.

A class-conditional mixture ``q(z | y)`` is one `GaussianMixture` with a leading
class axis: ``K`` classes, ``M`` components, ``R`` dimensions. All logarithms are
natural; densities are with respect to Lebesgue measure on ``R^R``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mass_jax.log_determinant import inverse_lower

_HIGHEST = jax.lax.Precision.HIGHEST
_LOG_2PI = 1.8378770664093453  # log(2 pi)


class GaussianMixture(NamedTuple):
    """Parameters of mixtures; leading axes ``...`` index mixtures.

    Attributes:
      logits: ``[..., M]`` unnormalised log-weights.
      means: ``[..., M, R]``.
      scale_tril: ``[..., M, R, R]``, the covariance is ``L L^T`` with ``L`` the
        lower triangle. The diagonal may have either sign: the covariance does
        not care, and the density takes its absolute value.

    Example: one mixture of two components in three dimensions.
      >>> import jax.numpy as jnp
      >>> q = GaussianMixture(jnp.zeros(2), jnp.zeros((2, 3)), jnp.stack([jnp.eye(3)] * 2))
      >>> log_prob(q, jnp.zeros((5, 3))).shape
      (5,)

    References:
      MASS, arXiv:1905.07822, section 3.1.
    """

    logits: jax.Array
    means: jax.Array
    scale_tril: jax.Array


def log_prob(mixture: GaussianMixture, z: jax.Array) -> jax.Array:
    """Log-density of every mixture at every point.

    Inverse factors and one contraction instead of triangular solves: faster,
    and batched solves can hang XLA's CPU backend.

    Args:
      mixture: leading axes ``...`` (``[K]`` for class-conditional mixtures).
      z: ``[B, R]``.

    Returns:
      ``[B, ...]``: ``[B, K]`` for class-conditional mixtures, ``[B]`` for one.

    Example:
      >>> import jax.numpy as jnp
      >>> standard = GaussianMixture(jnp.zeros(1), jnp.zeros((1, 2)), jnp.eye(2)[None])
      >>> f"{log_prob(standard, jnp.zeros((1, 2)))[0]:.3f}"  # -log(2 pi)
      '-1.838'
    """
    dim = mixture.means.shape[-1]
    if z.ndim != 2 or z.shape[-1] != dim:
        raise ValueError(f"z has shape {z.shape}; this mixture needs (batch, {dim})")
    inverse = inverse_lower(jnp.tril(mixture.scale_tril)).reshape(-1, dim, dim)  # [C, R, R]
    means = mixture.means.reshape(-1, dim)  # [C, R], C = all components of all mixtures
    # L^-1 (z - mu) is [L^-1, -L^-1 mu] [z, 1]: one large matrix product for all components, and
    # another for each gradient. It cancels when z and mu are far from the origin, so both are
    # measured from the mean of all means, on which the density does not depend. Examples come
    # last: XLA's CPU backend takes half as long again where short rows of R numbers do.
    origin = jax.lax.stop_gradient(jnp.mean(means, axis=0, keepdims=True))
    shift = jnp.einsum("cs,crs->cr", means - origin, inverse, precision=_HIGHEST)
    affine = jnp.concatenate([inverse, -shift[:, :, None]], axis=-1).reshape(-1, dim + 1)
    extended = jnp.concatenate([(z - origin).T, jnp.ones((1, len(z)), z.dtype)])  # [R + 1, B]
    whitened = jnp.matmul(affine, extended, precision=_HIGHEST)  # [C R, B]
    distance = jnp.sum(jnp.square(whitened.reshape(len(means), dim, len(z))), axis=1)  # [C, B]
    diagonal = jnp.diagonal(mixture.scale_tril, axis1=-2, axis2=-1)  # [..., M, R]
    log_det = jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1)
    log_weight = jax.nn.log_softmax(mixture.logits, axis=-1)
    offset = (log_weight - log_det - 0.5 * dim * _LOG_2PI).reshape(-1, 1)
    component = (offset - 0.5 * distance).reshape(*mixture.logits.shape, len(z))  # [..., M, B]
    return jnp.moveaxis(jax.nn.logsumexp(component, axis=-2), -1, 0)


def log_marginal(class_log_prob: jax.Array, log_prior: jax.Array | None = None) -> jax.Array:
    """``log q(z) = log sum_y q(z | y) p(y)``.

    Args:
      class_log_prob: ``[B, K]``, ``log q(z | y)``.
      log_prior: ``[K]``, ``log p(y)``; ``None`` is the uniform prior.

    Returns:
      ``[B]``.

    References:
      MASS, arXiv:1905.07822, section 3.1.
    """
    return jax.nn.logsumexp(_log_joint(class_log_prob, log_prior), axis=-1)


def log_posterior(class_log_prob: jax.Array, log_prior: jax.Array | None = None) -> jax.Array:
    """``log q(y | z)`` by Bayes' rule.

    Args:
      class_log_prob: ``[B, K]``, ``log q(z | y)``.
      log_prior: ``[K]``, ``log p(y)``; ``None`` is the uniform prior.

    Returns:
      ``[B, K]``; each row is a log-probability vector.

    Example:
      >>> import jax.numpy as jnp
      >>> posterior = jnp.exp(log_posterior(jnp.log(jnp.array([[1.0, 3.0]]))))
      >>> f"{posterior[0, 0]:.3f} {posterior[0, 1]:.3f}"
      '0.250 0.750'

    References:
      MASS, arXiv:1905.07822, section 3.1.
    """
    return jax.nn.log_softmax(_log_joint(class_log_prob, log_prior), axis=-1)


def _log_joint(class_log_prob: jax.Array, log_prior: jax.Array | None) -> jax.Array:
    num_classes = class_log_prob.shape[-1]
    if log_prior is None:
        return class_log_prob - jnp.log(jnp.asarray(num_classes, class_log_prob.dtype))
    if log_prior.shape != (num_classes,):
        raise ValueError(f"log_prior has shape {log_prior.shape}; need ({num_classes},)")
    return class_log_prob + jax.nn.log_softmax(log_prior)[None, :]


def sample(key: jax.Array, mixture: GaussianMixture, num_samples: int) -> jax.Array:
    """Draws from every mixture.

    Args:
      key: PRNG key.
      mixture: leading axes ``...``.
      num_samples: ``N``.

    Returns:
      ``[N, ..., R]``.
    """
    lead, dim = mixture.logits.shape[:-1], mixture.means.shape[-1]
    component_key, noise_key = jax.random.split(key)
    component = jax.random.categorical(component_key, mixture.logits, shape=(num_samples, *lead))
    noise = jax.random.normal(noise_key, (num_samples, *lead, dim), mixture.means.dtype)
    chosen = jax.nn.one_hot(component, mixture.logits.shape[-1], dtype=noise.dtype)
    # A one-hot contraction, not a gather: it batches over any leading axes.
    spread = jnp.einsum(
        "n...m,...mrs,n...s->n...r",
        chosen,
        jnp.tril(mixture.scale_tril),
        noise,
        precision=_HIGHEST,
    )
    return spread + jnp.einsum("n...m,...mr->n...r", chosen, mixture.means, precision=_HIGHEST)


def init_zeros(key: jax.Array, num_classes: int, num_components: int, dim: int) -> GaussianMixture:
    """Means uniform(-0.001, 0.001), unit covariances: the ResNet20 experiments."""
    shape = (num_classes, num_components, dim)
    means = jax.random.uniform(key, shape, minval=-0.001, maxval=0.001)
    return GaussianMixture(jnp.zeros(shape[:-1]), means, _identities(shape))


def init_random(key: jax.Array, num_classes: int, num_components: int, dim: int) -> GaussianMixture:
    """Means uniform(-10, 10), random correlations: the SmallMLP experiments."""
    logits_key, means_key, scale_key = jax.random.split(key, 3)
    shape = (num_classes, num_components, dim)
    below = jnp.tril(jax.random.uniform(scale_key, (*shape, dim), minval=-1.0, maxval=1.0), k=-1)
    return GaussianMixture(
        logits=jax.random.uniform(logits_key, shape[:-1], minval=-0.1, maxval=0.1),
        means=jax.random.uniform(means_key, shape, minval=-10.0, maxval=10.0),
        scale_tril=below + _identities(shape),
    )


def init_standard_basis(
    key: jax.Array, num_classes: int, num_components: int, dim: int
) -> GaussianMixture:
    """Class ``i`` along axis ``i``: first mean at ``10 e_i``, others uniform(-5, 5) on it.

    Classes beyond the number of dimensions have means uniform(-10, 10).
    """
    axis_key, rest_key = jax.random.split(key)
    shape = (num_classes, num_components, dim)
    along = jax.random.uniform(axis_key, shape[:-1], minval=-5.0, maxval=5.0).at[:, 0].set(10.0)
    on_axis = along[:, :, None] * jnp.eye(num_classes, dim)[:, None, :]
    anywhere = jax.random.uniform(rest_key, shape, minval=-10.0, maxval=10.0)
    has_axis = (jnp.arange(num_classes) < dim)[:, None, None]
    means = jnp.where(has_axis, on_axis, anywhere)
    return GaussianMixture(jnp.zeros(shape[:-1]), means, _identities(shape))


# "mle" fits to data instead of drawing, so it lives in mixture_fitting.py.
INITIALISATIONS = {
    "zeros": init_zeros,
    "random": init_random,
    "standard_basis": init_standard_basis,
}


def _identities(shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(shape[-1]), (*shape, shape[-1]))
