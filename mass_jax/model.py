"""What `init` returns, a checkpoint holds and every method works on."""

from typing import Any

import jax
from flax import struct

from mass_jax import networks
from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.networks import Network

PyTree = Any


class ModelParams(struct.PyTreeNode):
    """A model as one pytree; its architecture travels as static metadata.

    Attributes:
      network: weights of ``f``.
      head: the method's own parameters: the mixtures ``q(z | y)`` of MASS, decoder
        and marginal of VIB, nothing for SoftmaxCE until a density is fitted.
      batch_stats: running BatchNorm statistics; state, not trained.
      module: the Flax module of ``f``, or your own network wrapped; not a leaf.

    Example:
      >>> import jax, mass_jax
      >>> key = jax.random.key(0)
      >>> params = mass_jax.init(key, input_shape=(8, 8, 1), representation_dim=4)
      >>> params.representation(jax.numpy.ones((2, 8, 8, 1))).shape
      (2, 4)
    """

    network: PyTree
    head: PyTree
    batch_stats: PyTree
    module: Network = struct.field(pytree_node=False)

    @property
    def q(self) -> GaussianMixture:
        """The class-conditional mixtures ``q(z | y)``."""
        if not isinstance(self.head, GaussianMixture):
            raise ValueError(
                "these parameters have no mixture q(z|y): fit one with "
                "mass_jax.fit_class_mixtures and use params.replace(head=q), or pass q="
            )
        return self.head

    def representation(self, x: jax.Array) -> jax.Array:
        """``f(x)`` ``[B, R]`` of ``x`` ``[B, ...]`` with running statistics."""
        return networks.apply(self.module, self.network, self.batch_stats, x)
