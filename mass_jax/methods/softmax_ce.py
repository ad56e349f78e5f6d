"""SoftmaxCE: ordinary training by softmax cross-entropy, the first baseline."""

from collections.abc import Sequence

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


def method(*, num_classes: int = 10, weight_decay: float = 0.0) -> Method:
    """Minimises ``-log softmax(f(x))_y``; the network has ``K`` outputs.

    Its density detector needs mixtures fitted to training outputs
    (`mass_jax.fit_class_mixtures`) put in place by ``params.replace(head=q)``.

    Args:
      num_classes: ``K``.
      weight_decay: L2 coefficient on all weights.

    References:
      MASS, arXiv:1905.07822, section 5.
    """

    def init(
        key: jax.Array,
        build_network: BuildNetwork,
        input_shape: Sequence[int],
        examples: Examples | None = None,
    ) -> ModelParams:
        del examples  # nothing is fitted
        module = build_network(num_classes)
        variables = networks.init_variables(key, module, input_shape)
        return ModelParams(variables["params"], (), variables["batch_stats"], module)

    def loss(params: ModelParams, x: jax.Array, labels: jax.Array, context: TrainContext) -> Loss:
        logits, moments = networks.apply_train(
            params.module, params.network, params.batch_stats, x, context
        )
        log_probs = jax.nn.log_softmax(logits)
        terms = {"cross_entropy": PerExample(negative_log_likelihood(log_probs, labels))}
        coefficients = {"cross_entropy": 1.0}
        running = networks.update_running(params.batch_stats, moments)
        undecayed = Loss(terms, coefficients, log_probs, running)
        return with_weight_decay(undecayed, params.network, weight_decay)

    def log_probs(params: ModelParams, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        del keys  # nothing is random
        return jax.nn.log_softmax(params.representation(x))

    def ood_scores(
        params: ModelParams, x: jax.Array, keys: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        del keys  # nothing is random
        logits = params.representation(x)
        scores = {"entropy": predictive_entropy(jax.nn.log_softmax(logits))}
        if isinstance(params.head, GaussianMixture):
            class_log_prob = gaussian_mixture.log_prob(params.head, logits)
            scores["max_log_q"] = -jnp.max(class_log_prob, axis=-1)
        return scores

    return Method(init, loss, log_probs, ood_scores)
