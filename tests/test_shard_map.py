"""Code inside ``jax.shard_map``: one layer out of a stack that lies on several stages."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.inspect import inspect_step
from jaxpar.shard_map import _take_from_owner, take_layer


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec("stage"),
        PartitionSpec("stage", "tensor", "data"),
        PartitionSpec(("stage", "data"), "tensor"),
        PartitionSpec(None, "tensor"),
        PartitionSpec(),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_is_taken_bit_for_bit_wherever_it_lies(spec, dtype):
    host = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(np.float32)
    host[:, 0, 0], host[3, 1, 1] = -0.0, np.nan
    host = np.asarray(jax.numpy.asarray(host, dtype))
    stacked = jaxpar.shard(host, NamedSharding(jaxpar.make_mesh(data=2, stage=2, tensor=2), spec))
    for layer in range(8):
        got = take_layer(stacked, layer)
        assert np.asarray(got).tobytes() == host[layer].tobytes()
        assert got.sharding.is_equivalent_to(
            NamedSharding(stacked.sharding.mesh, PartitionSpec(*spec[1:])), 2
        )


def test_only_one_layer_travels():
    mesh = jaxpar.make_mesh(stage=4, tensor=2)
    stacked = jaxpar.shard(
        np.ones((8, 4, 6), np.float32), NamedSharding(mesh, PartitionSpec("stage", "tensor"))
    )
    report = inspect_step(_take_from_owner.lower(stacked, 5, stacked.sharding).compile(), mesh=mesh)
    assert [(each.kind, each.payload_bytes) for each in report.collectives] == [
        ("all-reduce", 2 * 6 * 4)
    ], report.render()
