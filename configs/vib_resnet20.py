"""VIB (diagonal covariance) on CIFAR-10 with ResNet20.

    python -m mass_jax.main --config=configs/vib_resnet20.py --config.train_size=2500

Cost: about that of softmax_ce_resnet20.py, 0.2 to 1.6 seconds a step on 2 CPU cores.
Expected: test accuracy 49.5 / 66.9 / 81.0 % at 2,500 / 10,000 / 40,000 examples and beta
1e-3 (arXiv:1905.07822, Tables 2 and 6 to 8; mean over 4 seeds).
Other rows: --config.beta=1e-4, 1e-5, 0.
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    return cifar10.resnet20("vib", beta=1e-3)
