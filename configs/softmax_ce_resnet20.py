"""SoftmaxCE on CIFAR-10 with ResNet20.

    python -m mass_jax.main --config=configs/softmax_ce_resnet20.py --config.train_size=2500

Cost: 0.2 to 1.6 seconds a step on 2 CPU cores, by the machine; full length needs an accelerator.
Expected: test accuracy 50.0 / 67.5 / 81.7 % at 2,500 / 10,000 / 40,000 examples
(arXiv:1905.07822, Tables 2 and 6 to 8; mean over 4 seeds).
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    return cifar10.resnet20("softmax_ce", beta=0.0)
