"""MASS on the bundled digits: the demonstration that README's first command runs.

    python -m mass_jax.main --config=configs/mass_digits.py

Cost: half a minute on 2 CPU cores, most of it compilation.
Expected: test accuracy at least 0.98, above a linear classifier's 0.977
(tests/test_training.py asserts it for every method). Accuracy and the `entropy` detector hold
over seeds; `max_log_q` varies with the seed at this beta. With --config.beta=1e-2 it is
dependable (digits 8 and 9 are told apart almost surely) and accuracy about a point lower.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    return base.get_config()
