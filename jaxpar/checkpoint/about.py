"""What a manifest says of the run beside its arrays: the key that it draws from, the libraries that it ran on."""

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
    """Returns the versions of Python, jaxpar and the libraries whose change may change a run."""
    return {
        "jaxpar": sys.modules["jaxpar"].__version__,  # an import would point up the tree
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }
