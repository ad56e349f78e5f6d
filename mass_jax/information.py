"""Conserved Differential Information, and the three loss terms of MASS.

Everything is in nats and per example; callers take means.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mass_jax import gaussian_mixture, jacobian
from mass_jax.jacobian import ExampleFn, JacobianMode

LogDensity = Callable[[jax.Array], jax.Array]  # points [B, ...] -> log-density [B]


def conserved_differential_information(
    f: ExampleFn,
    x: jax.Array,
    log_density: LogDensity,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
) -> jax.Array:
    """Per-example ``-log p(f(x)) - log J_f(x)``, whose mean is ``C(X, f(X))``.

    Args:
      f: maps one example ``[...]`` to ``[R]``.
      x: ``[B, ...]``, draws of ``X``.
      log_density: log-density of ``f(X)``; with a variational one the mean is an
        upper bound.
      mode, chunk_size: see `mass_jax.per_example_jacobian`.

    Returns:
      ``[B]``, nats.

    Example: doubling a standard normal is invertible, so CDI is its entropy.
      >>> import jax
      >>> from jax.scipy.stats import norm
      >>> x = jax.random.normal(jax.random.key(0), (10_000, 1))
      >>> density = lambda z: norm.logpdf(z[:, 0], scale=2.0)
      >>> cdi = conserved_differential_information(lambda v: 2.0 * v, x, density)
      >>> f"{cdi.mean():.1f}"  # 1/2 log(2 pi e) = 1.4189...
      '1.4'

    References:
      MASS, arXiv:1905.07822, Eq. (1).
    """
    outputs = jacobian.map_examples(f, x, chunk_size)
    return -log_density(outputs) - jacobian.half_log_det_jjt(f, x, mode, chunk_size)


def conditional_entropy(
    f: ExampleFn,
    x: jax.Array,
    log_density_x: LogDensity,
    log_density_z: LogDensity,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
) -> jax.Array:
    """Per-example values whose mean is ``H(X | f(X)) = H(X) - H(f(X)) + E log J_f``.

    The singular conditional entropy: what ``f`` forgets about ``X``.

    Args:
      f: maps one example ``[...]`` to ``[R]``.
      x: ``[B, ...]``, draws of ``X``.
      log_density_x: log-density of ``X``.
      log_density_z: log-density of ``f(X)``.
      mode, chunk_size: see `mass_jax.per_example_jacobian`.

    Returns:
      ``[B]``, nats.

    Example: the mean of two standard normals forgets one, along the line of equal means.
      >>> import jax, jax.numpy as jnp
      >>> from jax.scipy.stats import norm
      >>> x = jax.random.normal(jax.random.key(0), (10_000, 2))
      >>> joint = lambda v: norm.logpdf(v).sum(axis=-1)
      >>> mean = lambda z: norm.logpdf(z[:, 0], scale=0.5**0.5)
      >>> lost = conditional_entropy(lambda v: jnp.mean(v)[None], x, joint, mean)
      >>> f"{lost.mean():.1f}"  # 1/2 log(2 pi e)
      '1.4'

    References:
      MASS, arXiv:1905.07822, Eqs. (19) and (21).
    """
    conserved = conserved_differential_information(f, x, log_density_z, mode, chunk_size)
    return -log_density_x(x) - conserved


class LossTerms(NamedTuple):
    """The three terms of the MASS objective, per example, without ``beta``.

    Attributes:
      cross_entropy: ``[B]``, ``-log q(y | f(x))``.
      entropy: ``[B]``, ``-log q(f(x))``.
      jacobian: ``[n]``, ``-log J_f(x)`` of the examples in the Jacobian term.

    Example:
      >>> import jax.numpy as jnp
      >>> LossTerms(jnp.zeros(4), jnp.zeros(4), jacobian=jnp.zeros(2)).jacobian.shape
      (2,)

    References:
      MASS, arXiv:1905.07822, Eq. (2).
    """

    cross_entropy: jax.Array
    entropy: jax.Array
    jacobian: jax.Array


def mass_loss_terms(
    class_log_prob: jax.Array,
    labels: jax.Array,
    half_log_det: jax.Array,
    log_prior: jax.Array | None = None,
) -> LossTerms:
    """Loss terms from densities, labels and log Jacobian determinants.

    Args:
      class_log_prob: ``[B, K]``, ``log q(f(x) | y)``.
      labels: ``[B]`` integers.
      half_log_det: ``[n]``, ``log J_f(x)``.
      log_prior: ``[K]``, ``log p(y)``; ``None`` is the uniform prior.

    Returns:
      The terms ``[B]``, ``[B]`` and ``[n]``.

    Example:
      >>> import jax.numpy as jnp
      >>> terms = mass_loss_terms(jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([0]), jnp.ones(1))
      >>> [f"{term[0]:.3f}" for term in terms]  # log 2, log 2, -1
      ['0.693', '0.693', '-1.000']

    References:
      MASS, arXiv:1905.07822, section 3.1, the empirical bound on Eq. (2).
    """
    log_posterior = gaussian_mixture.log_posterior(class_log_prob, log_prior)
    return LossTerms(
        cross_entropy=-jnp.take_along_axis(log_posterior, labels[:, None], axis=-1)[:, 0],
        entropy=-gaussian_mixture.log_marginal(class_log_prob, log_prior),
        jacobian=-half_log_det,
    )


def mass_objective(terms: LossTerms, beta: float | jax.Array) -> jax.Array:
    """``H(Y|f(X)) + beta H(f(X)) - beta E[log J_f(X)]``, each estimated by its mean.

    Args:
      terms: per example.
      beta: weight of minimality against sufficiency.

    Returns:
      A scalar, nats.

    Example:
      >>> import jax.numpy as jnp
      >>> terms = LossTerms(jnp.array([1.0, 3.0]), jnp.array([4.0, 6.0]), jnp.array([-1.0]))
      >>> float(mass_objective(terms, beta=0.5))
      4.0

    References:
      MASS, arXiv:1905.07822, Eq. (2).
    """
    cross_entropy, entropy, jacobian_term = (jnp.mean(term) for term in terms)
    return cross_entropy + beta * (entropy + jacobian_term)
