"""MASS Learning (Cvitkovic & Koliander, ICML 2019)."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from mass_jax import gaussian_mixture, networks
from mass_jax.estimators import JACOBIAN_ESTIMATORS, num_jacobian_examples
from mass_jax.information import mass_loss_terms
from mass_jax.jacobian import JacobianMode
from mass_jax.log_determinant import SingularPolicy, check_not_expanding
from mass_jax.method import (
    BuildNetwork,
    Examples,
    Loss,
    Method,
    PerExample,
    predictive_entropy,
    with_weight_decay,
)
from mass_jax.mixture_fitting import fit_class_mixtures
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext
from mass_jax.representation import BatchStats, Representation, represent


def method(
    *,
    num_classes: int = 10,
    representation_dim: int = 15,
    beta: float = 1e-3,
    num_components: int = 10,
    initialisation: str = "random",
    estimator: str = "sub_batch",
    sub_batch: int | None = None,
    batch_stats: BatchStats = "frozen",
    always_split: bool | None = None,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
    singular: SingularPolicy = "floor",
    log_prior: Sequence[float] | None = None,
    weight_decay: float = 0.0,
) -> Method:
    """Minimises ``H(Y|f(X)) + beta H(f(X)) - beta E[log J_f(X)]``.

    With ``beta = 0`` neither the entropy nor the Jacobian term is computed.

    Args:
      num_classes: ``K``.
      representation_dim: ``R``, the network's output.
      beta: weight of minimality against sufficiency.
      num_components: ``M``, Gaussians per class in ``q(z | y)``.
      initialisation: of ``q``: a name in `gaussian_mixture.INITIALISATIONS`, or
        ``"mle"`` to fit the untrained network's outputs on training data.
      estimator, sub_batch: of the Jacobian term, see
        `mass_jax.estimators`.
      batch_stats: meaning of ``J_f`` under BatchNorm, see `representation.represent`.
      always_split: with ``batch_stats="paper"`` and ``beta = 0``, the sub-batch is still
        normalised by itself.
      mode, chunk_size, singular: see `mass_jax.half_log_det_jjt`.
      log_prior: ``log p(y)``; ``None`` is uniform.
      weight_decay: L2 coefficient on the network's weights.

    References:
      MASS, arXiv:1905.07822, Eq. (2) and section 3.1.
    """
    names = [*gaussian_mixture.INITIALISATIONS, "mle"]
    if initialisation not in names:
        raise ValueError(f"initialisation={initialisation!r}: choose one of {names}")
    prior = None if log_prior is None else np.asarray(log_prior, np.float64)

    def init(
        key: jax.Array,
        build_network: BuildNetwork,
        input_shape: Sequence[int],
        examples: Examples | None = None,
    ) -> ModelParams:
        check_not_expanding(representation_dim, int(np.prod(input_shape)))
        network_key, q_key = jax.random.split(key)
        module = build_network(representation_dim)
        variables = networks.init_variables(network_key, module, input_shape)
        params = ModelParams(variables["params"], None, variables["batch_stats"], module)
        if initialisation != "mle":
            draw = gaussian_mixture.INITIALISATIONS[initialisation]
            return params.replace(head=draw(q_key, num_classes, num_components, representation_dim))
        if examples is None:
            raise ValueError("initialisation='mle' fits training data: pass examples=")
        z = np.asarray(params.representation(examples.x))
        labels = np.asarray(examples.labels)
        return params.replace(head=fit_class_mixtures(z, labels, num_classes, num_components))

    def loss(params: ModelParams, x: jax.Array, labels: jax.Array, context: TrainContext) -> Loss:
        devices = 1 if context.axis_name is None else jax.lax.axis_size(context.axis_name)
        n = 0
        if beta != 0 or (always_split and batch_stats == "paper"):
            n = num_jacobian_examples(
                estimator, x.shape[0] * devices, representation_dim, sub_batch
            )
        chosen = JACOBIAN_ESTIMATORS[estimator]
        see = partial(
            represent,
            params,
            x,
            batch_stats=batch_stats,
            log_det=beta != 0,
            estimator=chosen,
            context=context,
            mode=mode,
            chunk_size=chunk_size,
            singular=singular,
        )
        jacobian_weight: float | jax.Array = beta
        if chosen.every == 1 or context.step is None or n == 0:
            seen = see(num_jacobian=n)
        else:
            is_due = chosen.is_due(context.step)
            seen = jax.lax.cond(is_due, lambda: see(num_jacobian=n), lambda: _without(see, n))
            jacobian_weight = jnp.where(is_due, beta * chosen.every, 0.0)
        class_log_prob = gaussian_mixture.log_prob(params.q, seen.z)
        by_term = mass_loss_terms(class_log_prob, labels, seen.half_log_det, _prior(prior))
        terms = {"cross_entropy": PerExample(by_term.cross_entropy)}
        coefficients: dict[str, float | jax.Array] = {"cross_entropy": 1.0}
        if beta != 0:
            terms["entropy"] = PerExample(by_term.entropy)
            terms["jacobian"] = PerExample(by_term.jacobian, seen.weights)
            coefficients |= {"entropy": beta, "jacobian": jacobian_weight}
        log_probs = gaussian_mixture.log_posterior(class_log_prob, _prior(prior))
        undecayed = Loss(terms, coefficients, log_probs, seen.batch_stats)
        return with_weight_decay(undecayed, params.network, weight_decay)

    def log_probs(params: ModelParams, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        del keys  # nothing is random
        class_log_prob = gaussian_mixture.log_prob(params.q, params.representation(x))
        return gaussian_mixture.log_posterior(class_log_prob, _prior(prior))

    def ood_scores(
        params: ModelParams, x: jax.Array, keys: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        del keys  # nothing is random
        class_log_prob = gaussian_mixture.log_prob(params.q, params.representation(x))
        posterior = gaussian_mixture.log_posterior(class_log_prob, _prior(prior))
        return {
            "entropy": predictive_entropy(posterior),
            "max_log_q": -jnp.max(class_log_prob, axis=-1),
        }

    return Method(init, loss, log_probs, ood_scores)


def _without(see: Callable[..., Representation], num_jacobian: int) -> Representation:
    """A step that leaves the Jacobian term out, in the shape of one that does not."""
    skipped, asked = see(num_jacobian=0), jax.eval_shape(lambda: see(num_jacobian=num_jacobian))
    return skipped._replace(
        half_log_det=jnp.zeros(asked.half_log_det.shape), weights=jnp.ones(asked.weights.shape)
    )


def _prior(prior: np.ndarray | None) -> jax.Array | None:
    return None if prior is None else jnp.asarray(prior, float)
