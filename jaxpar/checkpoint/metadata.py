"""The parts of a manifest that describe the run rather than its arrays: its PRNG key and the versions of its libraries."""

import platform
import sys
from importlib import metadata

import jax
import numpy as np

from jaxpar.checkpoint.manifest import PrngKey
from jaxpar.dtypes import is_key

LIBRARIES = ("jax", "jaxlib", "orbax-checkpoint", "optax", "numpy")


def plain_key(key: jax.Array) -> PrngKey:
    """Returns a PRNG key as plain data."""
    if not is_key(key):
        raise TypeError(f"key must be a PRNG key; got {key.dtype}. Make it with jax.random.key(seed).")
    return PrngKey(str(jax.random.key_impl(key)), tuple(map(int, np.ravel(jax.random.key_data(key)))))


def versions() -> dict[str, str]:
    """Returns the versions of Python, jaxpar and the libraries that affect the results of a run."""
    return {
        "jaxpar": sys.modules["jaxpar"].__version__,  # an import would violate the package's import order
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }
