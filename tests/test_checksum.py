"""A checksum is that of the values, on any mesh; replicas that drifted apart are found."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.checkpoint.checksums import Checked, check_arrays, diverged_replicas, row_sums

SPECS = {
    "w": PartitionSpec("data", "tensor"),
    "b": PartitionSpec(("stage", "data")),
    "n": PartitionSpec(),
}


def values(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(8, 8)).astype(dtype),
        "b": rng.normal(size=8).astype(dtype),
        "n": np.int32(7),
    }


def put(tree, specs=SPECS, **sizes):
    mesh = jaxpar.make_mesh(**sizes)
    return mesh, jaxpar.shard(tree, {name: NamedSharding(mesh, specs[name]) for name in tree})


def checksums(tree, specs=SPECS, **sizes):
    mesh, arrays = put(tree, specs, **sizes)
    return {path: found.checksum for path, found in check_arrays(arrays, mesh).items()}


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(np.float32, marks=pytest.mark.full),
        pytest.param(jnp.bfloat16, marks=pytest.mark.full),
        pytest.param(np.int8, marks=pytest.mark.full),
        np.bool_,
        pytest.param(np.float16, marks=pytest.mark.full),
        pytest.param(np.complex64, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_checksum_is_the_same_on_every_mesh(dtype):
    one = checksums(values(dtype))
    assert (
        one
        == checksums(values(dtype), data=4, tensor=2)
        == checksums(values(dtype), data=2, stage=2, tensor=2)
    )


def test_doubles_have_checksums_of_all_their_bits(x64):
    tree, other = values(np.float64), values(np.float64)
    other["w"][3, 4] = np.nextafter(other["w"][3, 4], 9)
    assert checksums(tree, data=4, tensor=2) == checksums(tree) != checksums(other)


def test_any_bit_that_flips_changes_the_checksum():
    tree, whole = values(), checksums(values())["w"]
    for bit in range(32):
        flipped = tree["w"].copy()
        flipped.view(np.uint32)[5, bit % 8] ^= np.uint32(1 << bit)
        assert checksums({"w": flipped})["w"] != whole, f"bit {bit}"


def test_two_values_that_change_places_change_the_checksum():
    tree, whole = values(), checksums(values())["w"]
    assert checksums({"w": tree["w"][::-1].copy()})["w"] != whole
    assert checksums({"w": tree["w"].T.copy()})["w"] != whole


@pytest.mark.parametrize(
    ("spec", "size"), [(PartitionSpec(), 8), (PartitionSpec("tensor"), 4)], ids=str
)
def test_a_replica_that_drifted_is_found(spec, size):
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    sharding = NamedSharding(mesh, spec)
    parts = [np.ones(size, np.float32) for _ in range(8)]
    parts[5][1] = np.nextafter(np.float32(1), 2)
    pieces = [
        jax.device_put(part, device) for part, device in zip(parts, mesh.devices.flat, strict=True)
    ]
    drifted = jax.make_array_from_single_device_arrays((8,), sharding, pieces)
    whole = jax.device_put(np.ones(8, np.float32), sharding)
    found = check_arrays({"drifted": drifted, "whole": whole}, mesh)
    assert found["drifted"].is_diverged
    assert not found["whole"].is_diverged


def test_values_that_are_not_finite_are_found():
    mesh, arrays = put(
        {"w": np.full((8, 8), 1.0, np.float32), "b": np.array([*[0] * 7, np.nan], np.float32)},
        data=4,
    )
    found = check_arrays(arrays, mesh)
    assert found["w"].is_finite
    assert not found["b"].is_finite


def test_no_arrays_have_no_checksums():
    assert check_arrays({}, jaxpar.make_mesh()) == {}


def test_a_scalar_is_checked_too():
    mesh, arrays = put({"n": np.int32(7)}, data=2)
    assert check_arrays(arrays, mesh)["n"] == Checked(
        checksums({"n": np.int32(7)})["n"], False, True
    )


@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, np.int8, np.bool_, np.float16, np.complex64], ids=str
)
def test_the_host_adds_the_same_checksum_from_any_parts(dtype):
    for name, whole in values(dtype).items():
        want = checksums({name: whole})[name]
        assert (
            int(
                row_sums(np.asarray(whole), (0,) * np.ndim(whole), np.shape(whole)).sum(
                    dtype=np.uint32
                )
            )
            == want
        )


def test_the_host_adds_the_checksum_of_doubles_row_by_row(x64):
    whole = np.random.default_rng(0).normal(size=(3, 5, 7))
    want = checksums({"w": whole}, {"w": PartitionSpec()})["w"]
    sums = np.zeros(3, np.uint32)
    for rows, columns, depth in product(
        [slice(0, 2), slice(2, 3)], [slice(0, 4), slice(4, 5)], [slice(0, 3), slice(3, 7)]
    ):
        part = whole[rows, columns, depth]
        sums[rows] += row_sums(part, (rows.start, columns.start, depth.start), whole.shape)
    assert int(sums.sum(dtype=np.uint32)) == want
    np.testing.assert_array_equal(sums[1], row_sums(whole[1:2], (1, 0, 0), whole.shape)[0])


def test_the_host_mixes_more_than_one_block(monkeypatch):
    whole = np.random.default_rng(0).normal(size=(50, 30)).astype(np.float32)
    want = checksums({"w": whole}, {"w": PartitionSpec()})["w"]
    for most in (7, 64, 1 << 17):
        monkeypatch.setattr(jaxpar.checkpoint.checksums, "HOST_WORDS", most)
        assert int(row_sums(whole, (0, 0), whole.shape).sum(dtype=np.uint32)) == want
    assert row_sums(np.zeros((3, 0), np.float32), (0, 0), (3, 0)).tolist() == [0, 0, 0]


def test_replicas_are_compared_where_there_are_any():
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    parts = lambda sharding, shape: [
        np.ones(sharding.shard_shape(shape), np.float32) for _ in range(8)
    ]

    def put_parts(spec, change):
        sharding = NamedSharding(mesh, spec)
        pieces = parts(sharding, (8, 4))
        pieces[5][0, 1] += change
        placed = [
            jax.device_put(piece, device)
            for piece, device in zip(pieces, mesh.devices.flat, strict=True)
        ]
        return jax.make_array_from_single_device_arrays((8, 4), sharding, placed)

    spoilt = {
        "whole": put_parts(PartitionSpec(), 1.0),
        "columns": put_parts(PartitionSpec(None, "tensor"), 1.0),
        "zero": put_parts(PartitionSpec("data", "tensor"), 1.0),
        "equal": put_parts(PartitionSpec("data"), 0.0),
        "host": np.ones(3),
    }
    assert diverged_replicas(spoilt) == ["columns", "whole"]
    assert diverged_replicas({"zero": spoilt["zero"]}) == []
    half = NamedSharding(jaxpar.make_mesh(data=2, devices=jax.devices()[:2]), PartitionSpec())
    assert diverged_replicas(
        {"half": jax.device_put(np.ones(3), half), "whole": spoilt["whole"]}
    ) == ["whole"]
    assert diverged_replicas({}) == []
