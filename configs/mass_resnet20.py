"""MASS on CIFAR-10 with ResNet20.

    python -m mass_jax.main --config=configs/mass_resnet20.py --config.train_size=2500

Cost: 5 to 7 seconds a step on 2 CPU cores; full length needs an accelerator.
Expected: test accuracy 49.9 / 66.6 / 80.6 % at 2,500 / 10,000 / 40,000 examples and beta
1e-4 (arXiv:1905.07822, Tables 2 and 6 to 8; mean over 4 seeds).
Other rows: --config.beta=1e-3, 1e-5, 0.
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    return cifar10.resnet20("mass", beta=1e-4)
