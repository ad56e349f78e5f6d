"""VIB (full covariance) on CIFAR-10 with SmallMLP.

    python -m mass_jax.main --config=configs/vib_small_mlp.py --config.train_size=2500

Cost: 6 to 33 milliseconds a step on 2 CPU cores, by the machine: 100,000 take 10 to 55 minutes.
Expected: test accuracy 35.6 / 44.6 / 51.8 % at 2,500 / 10,000 / 40,000 examples and beta
1e-3 (arXiv:1905.07822, Tables 1 and 3 to 5; mean over 4 seeds).
Other rows: --config.beta=1e-1, 1e-2; --config.dropout_rate=0.5.
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    return cifar10.small_mlp("vib", beta=1e-3)
