"""MASS on CIFAR-10 with SmallMLP.

    python -m mass_jax.main --config=configs/mass_small_mlp.py --config.train_size=2500

Cost: 11 to 80 milliseconds a step on 2 CPU cores, by the machine: 100,000 take 18 to 140 minutes.
Expected: test accuracy 32.7 / 41.5 / 47.8 % at 2,500 / 10,000 / 40,000 examples and beta
1e-3 (arXiv:1905.07822, Tables 1 and 3 to 5; mean over 4 seeds).
Other rows: --config.beta=1e-2, 1e-4, 0; --config.dropout_rate=0.5. The per-example Jacobian
instead of the authors': --config.jacobian.batch_stats=frozen.
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    return cifar10.small_mlp("mass", beta=1e-3)
