"""The base of all experiments: every field with its default (the digits demo).

`mass_jax/schema.py` documents each field; derived files change a few of them.
"""

from ml_collections import ConfigDict

from mass_jax.config import default_config


def get_config() -> ConfigDict:
    return default_config()
