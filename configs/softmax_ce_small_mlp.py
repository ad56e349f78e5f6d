"""SoftmaxCE on CIFAR-10 with SmallMLP.

    python -m mass_jax.main --config=configs/softmax_ce_small_mlp.py --config.train_size=2500

Cost: 5 to 30 milliseconds a step on 2 CPU cores, by the machine: 100,000 take 8 to 50 minutes.
Expected: test accuracy 34.2 / 44.6 / 52.7 % at 2,500 / 10,000 / 40,000 examples
(arXiv:1905.07822, Tables 1 and 3 to 5; mean over 4 seeds).
Rows WD and D of the tables: --config.weight_decay=0.01, --config.dropout_rate=0.5.
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    return cifar10.small_mlp("softmax_ce", beta=0.0)
