"""A mesh of one axis, and functions of each device's vector on it, for tests of collectives."""

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

ROWS = PartitionSpec("data")


def mesh_of(size):
    return jax.make_mesh(
        (size,), ("data",), devices=jax.devices()[:size], axis_types=(AxisType.Auto,)
    )


def on_devices(function, size, check_vma=False):
    """Returns ``function`` as a map from all devices' vectors, [size, n], to all results, [size, ...]."""
    one = lambda x: function(x[0])[None]
    return jax.jit(
        jax.shard_map(one, mesh=mesh_of(size), in_specs=ROWS, out_specs=ROWS, check_vma=check_vma)
    )


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape)
