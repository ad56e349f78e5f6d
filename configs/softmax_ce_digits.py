"""SoftmaxCE on the bundled digits.

    python -m mass_jax.main --config=configs/softmax_ce_digits.py

Cost: a quarter of a minute on 2 CPU cores, most of it compilation.
Expected: test accuracy at least 0.98 (asserted in tests/test_training.py).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.method = "softmax_ce"
    config.beta = 0.0
    return config
