"""Collectives against their definition as linear maps on all devices' arrays: forward, and gradients as the transposed map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import collectives
from jaxpar.inspect import inspect_step
from tests.support.one_axis import ROWS, mesh_of, numbers, on_devices

SIZES = (2, 3, 4, 8)
PER_DEVICE = 24  # elements; divisible by 2, 3, 4 and 8


def masked(y, group, root):
    return np.stack(
        [y[place] if place == root else np.zeros_like(y[place]) for place in range(len(group))]
    )


# What each gives the members of one group, from their arrays [members, n].
DEFINITIONS = {
    "shift": lambda x: np.roll(x, 1, axis=0),
    "broadcast": lambda x: np.stack([x[1]] * len(x)),
    "reduce": lambda x: masked(np.stack([x.sum(0)] * len(x)), x, 1),
    "all_reduce": lambda x: np.stack([x.sum(0)] * len(x)),
    "mean": lambda x: np.stack([x.mean(0)] * len(x)),
    "gather": lambda x: masked(np.stack([x.reshape(-1)] * len(x)), x, 1),
    "all_gather": lambda x: np.stack([x.reshape(-1)] * len(x)),
    "scatter": lambda x: x[1].reshape(len(x), -1),
    "reduce_scatter": lambda x: x.sum(0).reshape(len(x), -1),
    "all_to_all": lambda x: x.reshape(len(x), len(x), -1).swapaxes(0, 1).reshape(len(x), -1),
    "barrier": lambda x: x,
}
CALLS = {
    "shift": lambda x, groups: collectives.shift(x, "data", groups=groups),
    "broadcast": lambda x, groups: collectives.broadcast(x, "data", root=1, groups=groups),
    "reduce": lambda x, groups: collectives.reduce(x, "data", root=1, groups=groups),
    "all_reduce": lambda x, groups: collectives.all_reduce(x, "data", groups=groups),
    "mean": lambda x, groups: collectives.all_reduce(x, "data", op="mean", groups=groups),
    "gather": lambda x, groups: collectives.gather(x, "data", root=1, groups=groups),
    "all_gather": lambda x, groups: collectives.all_gather(x, "data", groups=groups),
    "scatter": lambda x, groups: collectives.scatter(x, "data", root=1, groups=groups),
    "reduce_scatter": lambda x, groups: collectives.reduce_scatter(x, "data", groups=groups),
    "all_to_all": lambda x, groups: collectives.all_to_all(x, "data", groups=groups),
    "barrier": lambda x, groups: collectives.barrier(x, "data", groups=groups),
}


def defined(name, x, groups):
    """Returns the definition's results for all devices, group by group."""
    results = [None] * len(x)
    for group in groups or [range(len(x))]:
        for member, row in zip(group, DEFINITIONS[name](x[list(group)]), strict=True):
            results[member] = row
    return np.stack(results)


def transposed(name, x, groups, cotangents):
    """Returns the transposed map of the definition, from its matrix."""
    columns = [defined(name, unit.reshape(x.shape), groups).reshape(-1) for unit in np.eye(x.size)]
    return (np.stack(columns) @ cotangents.reshape(-1)).reshape(x.shape)


@functools.cache
def results(size, length, groups, check_vma):
    """The arrays, and for each collective its results, their cotangents and what these give: all in one compiled program."""
    x, given = numbers(size, length), {}

    def run(x):
        found = {}
        for name, call in CALLS.items():
            y, back = jax.vjp(
                on_devices(lambda row, call=call: call(row, groups), size, check_vma), x
            )
            given[name] = numbers(*y.shape)
            found[name] = y, back(jnp.asarray(given[name]))[0]
        return found

    found = jax.device_get(jax.jit(run)(x))
    assert x.dtype == np.float64 == found["shift"][0].dtype
    return x, {name: (y, given[name], back) for name, (y, back) in found.items()}


def check_against_definition(name, size, groups, check_vma, length=PER_DEVICE):
    x, found = results(size, length, groups, check_vma)
    y, cotangents, back = found[name]
    near = {"rtol": 1e-12, "atol": 1e-14}
    np.testing.assert_allclose(y, defined(name, x, groups), err_msg=f"{name} forward", **near)
    wanted = transposed(name, x, groups, cotangents)
    np.testing.assert_allclose(back, wanted, err_msg=f"{name} gradient", **near)


@pytest.mark.parametrize("check_vma", [False, True], ids=["", "check_vma"])
@pytest.mark.parametrize("name", CALLS)
def test_collective_and_its_gradient_are_those_of_the_definition(x64, name, check_vma):
    check_against_definition(name, 4, None, check_vma)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("name", CALLS)
def test_collective_is_right_on_any_number_of_devices(x64, name, size):
    check_against_definition(name, size, None, False, length=2 * size)


@pytest.mark.parametrize("check_vma", [False, True], ids=["", "check_vma"])
@pytest.mark.parametrize("name", CALLS)
def test_groups_are_worlds_of_their_own(x64, name, check_vma):
    check_against_definition(name, 8, ((0, 2, 5, 7), (6, 4, 3, 1)), check_vma)


@pytest.mark.parametrize("op", ["max", pytest.param("min", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "check_vma", [pytest.param(False, marks=pytest.mark.full), True], ids=["", "check_vma"]
)
def test_a_maximum_s_gradient_goes_to_those_who_hold_it(x64, op, check_vma):
    x = np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 2.0], [3.0, 0.0, 2.0]])
    x = x if op == "max" else -x
    run = on_devices(lambda row: collectives.all_reduce(row, "data", op=op), 3, check_vma)
    y, back = jax.vjp(run, x)
    np.testing.assert_array_equal(y, np.stack([x.max(0) if op == "max" else x.min(0)] * 3))
    given = np.array([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0], [3.0, 30.0, 300.0]])
    np.testing.assert_allclose(
        back(jnp.asarray(given))[0], [[3, 30, 200], [0, 30, 200], [3, 0, 200]], rtol=1e-12
    )


def test_a_shift_without_wrap_brings_zeros_from_beyond_the_end():
    x = numbers(4, 2).astype(np.float32)
    y = on_devices(lambda row: collectives.shift(row, "data", by=-1, wrap=False), 4)(x)
    np.testing.assert_array_equal(y, np.concatenate([x[1:], np.zeros((1, 2))]))


def test_other_dims_can_be_cut_and_joined(x64):
    x = numbers(4, 8, 3)
    run = on_devices(lambda a: collectives.all_to_all(a, "data", split_dim=0, join_dim=1), 4)
    np.testing.assert_array_equal(
        run(x), np.stack([np.concatenate(list(x[:, 2 * d : 2 * d + 2]), 1) for d in range(4)])
    )
    gathered = on_devices(lambda a: collectives.all_gather(a, "data", dim=1), 4)(x)
    np.testing.assert_array_equal(gathered[2], np.concatenate(list(x), axis=1))


def test_trees_travel_whole():
    tree = {"a": np.ones((4, 2), np.float32), "b": [np.arange(4, dtype=np.int32).reshape(4, 1)]}
    one = lambda tree: jax.tree.map(
        lambda x: x[None], collectives.all_reduce(jax.tree.map(lambda x: x[0], tree), "data")
    )
    total = jax.jit(jax.shard_map(one, mesh=mesh_of(4), in_specs=ROWS, out_specs=ROWS))(tree)
    np.testing.assert_array_equal(total["a"], np.full((4, 2), 4))
    np.testing.assert_array_equal(total["b"][0], np.full((4, 1), 6))


def test_a_barrier_is_in_the_compiled_program():
    report = inspect_step(
        on_devices(lambda x: collectives.barrier(x, "data"), 4), numbers(4, 6).astype(np.float32)
    )
    (only,) = report.collectives
    assert only.kind == "all-reduce"
    assert only.payload_bytes == 4, "one number"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: collectives.reduce_scatter(x, "data"),
            r"got dim 0 of shape \(6,\), 4 devices. Pad it to 8",
        ),
        (
            lambda x: collectives.scatter(x, "data"),
            r"got dim 0 of shape \(6,\), 4 devices. Pad it to 8",
        ),
        (
            lambda x: collectives.all_to_all(x, "data"),
            r"got dim 0 of shape \(6,\), 4 devices. Pad it to 8",
        ),
        (
            lambda x: collectives.all_gather(x, "data", dim=1),
            r"dim must be one of the array's.*got dim=1 for shape \(6,\)",
        ),
        (lambda x: collectives.broadcast(x, "data", root=4), "root must be from 0 to 3, .*; got 4"),
        (
            lambda x: collectives.all_reduce(x, "data", op="or"),
            "op must be one of sum, mean, max, min; got 'or'",
        ),
        (
            lambda x: collectives.reduce_scatter(x, "data", op="max"),
            "op must be one of sum, mean; got 'max'",
        ),
        (
            lambda x: collectives.all_reduce(x, "data", groups=[[0], [1, 2, 3]]),
            r"groups must have one size, .*\[1, 3\]",
        ),
        (
            lambda x: collectives.all_reduce(x, "data", groups=[[0, 1], [1, 2]]),
            "each index of the axis once; got",
        ),
        (
            lambda x: collectives.ring_all_reduce(x, "data", bucket_bytes=0),
            "bucket_bytes must be positive; got 0",
        ),
        (
            lambda x: collectives.parameter_server(x, "data", num_servers=5)[0],
            "got num_servers=5, data=4\\. Choose 4, say",
        ),
        (
            lambda x: collectives.parameter_server(x, "data", num_servers=0)[0],
            "got num_servers=0, data=4\\. Choose 1, say",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(call, message):
    with pytest.raises(ValueError, match=message):
        on_devices(call, 4).lower(np.zeros((4, 6), np.float32))
