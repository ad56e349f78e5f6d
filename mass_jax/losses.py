"""`cdi_loss` and `mass_loss`: one call each, for any network and any training loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from mass_jax import gaussian_mixture, jacobian
from mass_jax.estimators import JACOBIAN_ESTIMATORS, num_jacobian_examples
from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.information import LogDensity, LossTerms, mass_loss_terms, mass_objective
from mass_jax.jacobian import ExampleFn, JacobianMode
from mass_jax.log_determinant import SingularPolicy, half_log_det_gram
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext
from mass_jax.representation import BatchStats, represent

PyTree = Any
ApplyFn = Callable[[PyTree, jax.Array], jax.Array]


def cdi_loss(
    params: PyTree,
    x: jax.Array,
    *,
    apply_fn: ApplyFn | None = None,
    q: GaussianMixture | LogDensity | None = None,
    log_prior: jax.Array | None = None,
    estimator: str = "exact",
    sub_batch: int | None = None,
    batch_stats: BatchStats = "running",
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
    singular: SingularPolicy = "floor",
) -> jax.Array:
    """Conserved Differential Information of a network on a batch, as a loss.

    ``-mean log q(f(x)) - mean log J_f(x)``, an upper bound on ``C(X, f(X))`` up
    to sampling; differentiable by ``params``, jittable.

    Args:
      params: from `mass_jax.init` or a loaded run; with ``apply_fn``, any pytree.
      x: ``[B, ...]``.
      apply_fn: your own ``f(params, x)``, on one example (``[...] -> [R]``) or on a
        batch (``[B, ...] -> [B, R]``) whose examples do not interact.
      q: density of ``f(X)``: class mixtures (one leading class axis), one mixture,
        or a function of ``z`` ``[B, R]``. Default: the mixtures in ``params``; with
        ``apply_fn``, the Gaussian fitted to ``f(x)``, which has the largest entropy
        of all densities with that mean and covariance.
      log_prior: ``[K]``, ``log p(y)`` of class mixtures; ``None`` is uniform.
      estimator: ``"exact"``, ``"sub_batch"`` or ``"few"``; of a model also ``"gram"`` and
        ``"auto"``. The others of `mass_jax.JACOBIAN_ESTIMATORS` need a training loop.
      sub_batch: examples in the Jacobian term, the first ones of ``x``; the
        estimate is unbiased if ``x`` is in random order.
      batch_stats: what ``J_f`` means under BatchNorm, see `representation.represent`.
      mode, chunk_size, singular: see `mass_jax.half_log_det_jjt`.

    Returns:
      A scalar, nats.

    Example:
      >>> import jax, mass_jax
      >>> key = jax.random.key(0)
      >>> params = mass_jax.init(
      ...     key, network="small_mlp", input_shape=(4, 4, 1), representation_dim=3
      ... )
      >>> x = jax.random.normal(key, (8, 4, 4, 1))
      >>> jax.jit(mass_jax.cdi_loss)(params, x).shape
      ()

    References:
      MASS, arXiv:1905.07822, Eq. (1) and section 3.1.
    """
    z, half_log_det = _seen(
        params, x, apply_fn, estimator, sub_batch, batch_stats, mode, chunk_size, singular
    )
    if q is None:
        q = params.q if apply_fn is None else _gaussian_fit(z)
    return -jnp.mean(_log_density(q, log_prior)(z)) - jnp.mean(half_log_det)


def mass_loss(
    params: PyTree,
    q: GaussianMixture | None,
    x: jax.Array,
    labels: jax.Array,
    beta: float | jax.Array,
    *,
    apply_fn: ApplyFn | None = None,
    log_prior: jax.Array | None = None,
    estimator: str = "exact",
    sub_batch: int | None = None,
    batch_stats: BatchStats = "running",
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
    singular: SingularPolicy = "floor",
) -> tuple[jax.Array, LossTerms]:
    """The MASS objective of a minibatch in one call, for a training loop of your own.

    Differentiable by ``params`` and by ``q``, jittable.

    Args:
      params: of ``apply_fn``, any pytree; or from `mass_jax.init` or a loaded run.
      q: class mixtures with leading axes ``[K, M]``, such as
        ``mass_jax.INITIALISATIONS["random"](key, K, M, R)``; ``None``: those in ``params``.
      x: ``[B, ...]``, shuffled where ``sub_batch`` is used.
      labels: ``[B]`` integers.
      beta: weight of minimality against sufficiency.
      apply_fn: as in `cdi_loss`.
      log_prior, estimator, sub_batch, batch_stats, mode, chunk_size, singular: as in
        `cdi_loss`.

    Returns:
      The scalar to minimise, and its three terms per example, for logs.

    Example: three steps of optax.
      >>> import jax, optax, mass_jax
      >>> x = jax.random.normal(jax.random.key(0), (32, 4))
      >>> labels = (x[:, 0] > 0).astype(int)
      >>> f = lambda weights, x: jax.numpy.tanh(x @ weights)
      >>> draw = mass_jax.INITIALISATIONS["zeros"]
      >>> model = (jax.random.normal(jax.random.key(1), (4, 2)), draw(jax.random.key(2), 2, 1, 2))
      >>> loss = lambda model: mass_loss(*model, x, labels, beta=0.01, apply_fn=f)
      >>> step = jax.jit(jax.value_and_grad(loss, has_aux=True))
      >>> optimizer = optax.adam(0.05)
      >>> state, values = optimizer.init(model), []
      >>> for _ in range(3):
      ...     (value, terms), gradient = step(model)
      ...     updates, state = optimizer.update(gradient, state)
      ...     model = optax.apply_updates(model, updates)
      ...     values.append(float(value))
      >>> values[0] > values[1] > values[2]
      True

    References:
      MASS, arXiv:1905.07822, Eq. (2) and section 3.1.
    """
    x = jnp.asarray(x)
    z, half_log_det = _seen(
        params, x, apply_fn, estimator, sub_batch, batch_stats, mode, chunk_size, singular
    )
    if q is None:
        if not isinstance(params, ModelParams):
            raise ValueError("q=None takes the mixtures in params, and these have none: pass q=")
        q = params.q
    class_log_prob = gaussian_mixture.log_prob(q, z)
    if class_log_prob.ndim != 2:
        raise ValueError("q must be one mixture per class, with leading axes [K, M]")
    labels = _checked_labels(labels, *class_log_prob.shape)
    terms = mass_loss_terms(class_log_prob, labels, half_log_det, log_prior)
    return mass_objective(terms, beta), terms


def _checked_labels(labels: ArrayLike, batch_size: int, num_classes: int) -> jax.Array:
    if not isinstance(labels, jax.Array):
        labels = np.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.shape != (batch_size,):
        raise ValueError(
            f"labels have shape {labels.shape} and type {labels.dtype}; need ({batch_size},) "
            "integers, one per example of x"
        )
    if not isinstance(labels, jax.core.Tracer):  # whose values nobody knows yet
        values = np.asarray(labels)
        if np.any((values < 0) | (values >= num_classes)):
            raise ValueError(
                f"labels run from {values.min()} to {values.max()}; q has {num_classes} classes, "
                f"so they must be from 0 to {num_classes - 1}"
            )
    return jnp.asarray(labels)


def _seen(
    params: PyTree,
    x: jax.Array,
    apply_fn: ApplyFn | None,
    estimator: str,
    sub_batch: int | None,
    batch_stats: BatchStats,
    mode: JacobianMode,
    chunk_size: int | None,
    singular: SingularPolicy,
) -> tuple[jax.Array, jax.Array]:
    """``f(x)`` ``[B, R]`` and ``log J_f`` ``[n]`` by a user's function or by a model."""
    if estimator in JACOBIAN_ESTIMATORS:
        chosen = JACOBIAN_ESTIMATORS[estimator]
        if chosen.gradient == "probe" or chosen.every > 1:
            raise ValueError(
                f"estimator={estimator!r} needs the keys and steps of a training loop "
                "(mass_jax.fit); choose 'exact', 'sub_batch' or 'few' here"
            )
        if apply_fn is not None and chosen.form == "gram":
            raise ValueError("estimator='gram' needs a network with a dense first layer")
    if apply_fn is not None:
        f = _example_fn(apply_fn, params, x)
        size = jax.eval_shape(f, x[0]).size
        n = num_jacobian_examples(estimator, x.shape[0], size, sub_batch)
        half_log_det = jacobian.half_log_det_jjt(f, x[:n], mode, chunk_size, singular)
        return jacobian.map_examples(f, x, chunk_size), half_log_det
    if not isinstance(params, ModelParams):
        raise ValueError(
            "params must come from mass_jax.init or a loaded run; "
            "for your own network pass apply_fn=f with f(params, x)"
        )
    # Running statistics are state: a gradient step on params must leave them alone.
    params = params.replace(batch_stats=jax.lax.stop_gradient(params.batch_stats))
    size = jax.eval_shape(params.representation, x).shape[-1]
    n = num_jacobian_examples(estimator, x.shape[0], size, sub_batch)
    context = TrainContext(use_batch_moments=batch_stats != "running")
    seen = represent(
        params,
        x,
        n,
        batch_stats=batch_stats,
        estimator=JACOBIAN_ESTIMATORS[estimator],
        context=context,
        mode=mode,
        chunk_size=chunk_size,
        singular=singular,
    )
    return seen.z, seen.half_log_det


def _example_fn(apply_fn: ApplyFn, params: PyTree, x: jax.Array) -> ExampleFn:
    """``f`` on one example, from a function of one example or of a batch."""

    def on_example(v: jax.Array) -> jax.Array:
        return apply_fn(params, v)

    def on_batch_of_one(v: jax.Array) -> jax.Array:
        return apply_fn(params, v[None])[0]

    for candidate in (on_example, on_batch_of_one):
        try:
            output = jax.eval_shape(candidate, x[0])
        except Exception as error:  # the user's function meets a shape it was not made for
            problem = f"{type(error).__name__}: {error}"
            continue
        if getattr(output, "ndim", None) == 1:
            return candidate
        problem = f"it returned {output}"
    raise ValueError(
        f"apply_fn(params, x) must map one example {x.shape[1:]} to (R,) "
        f"or a batch to (B, R); {problem}"
    )


def _gaussian_fit(z: jax.Array) -> LogDensity:
    """The maximum-likelihood Gaussian of a batch, as a mixture of one."""
    batch, dim = z.shape
    if batch <= dim:
        raise ValueError(
            f"a Gaussian in {dim} dimensions needs more than {dim} examples, got {batch}; "
            "pass more or pass q="
        )
    mean = jnp.mean(z, axis=0)
    centred = z - mean[None, :]
    # In whitened coordinates the mean squared distance is exactly R: only the
    # log-determinant, the part that depends on the parameters, is left to compute.
    log_det = half_log_det_gram(centred.T / jnp.sqrt(float(batch)))
    log_2_pi_e = jnp.log(2.0 * jnp.pi) + 1.0
    return lambda points: jnp.full(points.shape[0], -0.5 * dim * log_2_pi_e - log_det)


def _log_density(q: GaussianMixture | LogDensity, log_prior: jax.Array | None) -> LogDensity:
    """``z [B, R] -> log q(z) [B]`` from class mixtures, one mixture or a function."""
    if not isinstance(q, GaussianMixture):
        return q
    if q.logits.ndim == 1:
        return lambda z: gaussian_mixture.log_prob(q, z)
    return lambda z: gaussian_mixture.log_marginal(gaussian_mixture.log_prob(q, z), log_prior)
