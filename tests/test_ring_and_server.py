"""Ring all-reduce and parameter servers: the native result, and the traffic of textbook formulas, counted in the program."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxpar import collectives
from jaxpar.inspect import inspect_step, line_bytes, link_bytes
from tests.support.covering import covering
from tests.support.one_axis import mesh_of, numbers, on_devices
from tests.support.oracle import assert_same

SIZES = [2, 3, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5, 6, 7))]
ARCHITECTURES = {
    "ring": partial(collectives.ring_all_reduce, axis="data"),
    "ring both ways": partial(collectives.ring_all_reduce, axis="data", bidirectional=True),
    "ring in buckets": partial(collectives.ring_all_reduce, axis="data", bucket_bytes=80, bidirectional=True),
    "1 server": lambda x: collectives.parameter_server(x, "data")[0],
    "2 servers": lambda x: collectives.parameter_server(x, "data", num_servers=2)[0],
    "all serve": lambda x: collectives.parameter_server(x, "data", num_servers=jax.lax.axis_size("data"))[0],
}


def check_against_native(name, size, check_vma=False):
    x = numbers(size, 37)
    run, native = (on_devices(f, size, check_vma) for f in (ARCHITECTURES[name], lambda x: jax.lax.psum(x, "data")))
    (y, back), (expected, native_back) = jax.vjp(run, x), jax.vjp(native, x)
    cotangents = jnp.asarray(numbers(*y.shape))
    assert_same((y, back(cotangents)), (expected, native_back(cotangents)))


@pytest.mark.parametrize(
    ("size", "name"),
    covering([(2, "ring"), (2, "2 servers"), *((4, name) for name in ARCHITECTURES)], (2, 4, 8), ARCHITECTURES),
)
def test_architecture_and_its_gradient_are_the_native_ones(x64, name, size):
    check_against_native(name, size)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_runs_under_check_vma(x64, name):
    check_against_native(name, 3, check_vma=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("size", SIZES)
def test_architecture_is_right_on_any_number_of_devices(x64, name, size):
    check_against_native(name, size)


def traffic(name, size, num_elements):
    """Returns the bytes of each link and the size of the vector."""
    x = np.zeros((size, num_elements), np.float32)
    report = inspect_step(on_devices(ARCHITECTURES[name], size), x)
    assert {each.kind for each in report.collectives} == {"collective-permute"}
    return link_bytes(report.collectives, size), 4 * num_elements


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_puts_two_times_n_minus_1_over_n_of_the_bytes_on_each_link(size):
    links, num_bytes = traffic("ring", size, 840)
    assert set(links) == {(d, (d + 1) % size) for d in range(size)}, "neighbours alone talk"
    assert set(links.values()) == {Fraction(2 * (size - 1), size) * num_bytes}


@pytest.mark.parametrize("size", [3, 8])
def test_a_ring_both_ways_halves_what_a_link_carries_one_way(size):
    links, num_bytes = traffic("ring both ways", size, 1680)
    assert len(links) == 2 * size
    assert set(links.values()) == {Fraction(size - 1, size) * num_bytes}


@pytest.mark.parametrize("size", SIZES)
def test_one_server_s_line_carries_two_times_n_minus_1_of_the_bytes(size):
    links, num_bytes = traffic("1 server", size, 840)
    assert line_bytes(links) == {0: 2 * (size - 1) * num_bytes} | dict.fromkeys(range(1, size), 2 * num_bytes)


@pytest.mark.parametrize("size", SIZES)
def test_as_many_servers_as_workers_have_the_traffic_of_a_ring(size):
    links, num_bytes = traffic("all serve", size, 840)
    assert set(line_bytes(links).values()) == {2 * Fraction(2 * (size - 1), size) * num_bytes}


def test_the_gradient_of_a_ring_travels_as_cheaply():
    x = np.zeros((8, 840), np.float32)
    run = on_devices(ARCHITECTURES["ring"], 8)
    back = jax.jit(lambda x, given: jax.vjp(run, x)[1](given)[0])
    links = link_bytes(inspect_step(back, x, x).collectives, 8)
    assert set(links.values()) == {Fraction(14, 8) * 4 * 840}


def train(size, optimizer, num_steps=3):
    """Returns the params after training inside shard_map, of a regression whose rows lie over ``data``."""
    rows, targets = numbers(24, 5), numbers(24, 1)
    params = {"w": jnp.asarray(numbers(5, 1)), "b": jnp.zeros(1)}

    def loss(params, rows, targets):
        return jnp.mean(jnp.square(rows @ params["w"] + params["b"][None] - targets))

    def run(params, rows, targets):
        state = optimizer.init(params)
        for _ in range(num_steps):
            updates, state = optimizer.update(jax.grad(loss)(params, rows, targets), state, params)
            params = optax.apply_updates(params, updates)
        return params

    whole, cut = PartitionSpec(), PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh_of(size), in_specs=(whole, cut, cut), out_specs=whole, check_vma=False)
    return jax.jit(sharded)(params, rows, targets)


@pytest.mark.parametrize(
    "made",
    [
        lambda o: collectives.distributed_optimizer(o, reduce=partial(collectives.ring_all_reduce, mean=True)),
        lambda o: collectives.server_optimizer(o, num_servers=1),
        lambda o: collectives.server_optimizer(o, num_servers=4),
    ],
    ids=["ring", "1 server", "4 servers"],
)
@pytest.mark.parametrize("base", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.01)], ids=["sgd", "adamw"])
def test_training_ends_at_the_params_of_all_reduce_and_of_one_device(x64, base, made):
    one = train(1, base)
    for trained in (train(4, collectives.distributed_optimizer(base)), train(4, made(base))):
        assert_same(trained, one, within=1e-11)


def test_distributed_optimizer_reduces_all_gradients_at_once():
    optimizer = collectives.distributed_optimizer(optax.sgd(0.1))
    grads = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    run = jax.shard_map(
        lambda g: optimizer.update(g, optimizer.init(g))[0],
        mesh=mesh_of(4),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert inspect_step(jax.jit(run), grads).count("all-reduce") == 1
