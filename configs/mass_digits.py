"""MASS on the bundled digits: the demonstration that README's first command runs.

    python -m mass_jax.main --config=configs/mass_digits.py

Cost: @@
Expected: @@
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    return base.get_config()
