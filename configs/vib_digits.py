"""VIB on the bundled digits.

    python -m mass_jax.main --config=configs/vib_digits.py

Cost: @@
Expected: @@
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.method = "vib"
    config.beta = 1e-3
    return config
