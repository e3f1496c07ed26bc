"""Ring all-reduce and parameter servers: the native result, and the traffic of textbook formulas, counted in the program."""

import functools
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
from tests.support.tiers import quick

SIZES = [2, 3, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5, 6, 7))]
ARCHITECTURES = {
    "ring": partial(collectives.ring_all_reduce, axis="data"),
    "ring both ways": partial(collectives.ring_all_reduce, axis="data", bidirectional=True),
    "ring in buckets": partial(
        collectives.ring_all_reduce, axis="data", bucket_bytes=160, bidirectional=True
    ),
    "1 server": lambda x: collectives.parameter_server(x, "data")[0],
    "2 servers": lambda x: collectives.parameter_server(x, "data", num_servers=2)[0],
    "all serve": lambda x: collectives.parameter_server(
        x, "data", num_servers=jax.lax.axis_size("data")
    )[0],
}


@functools.cache
def results(size, names, check_vma):
    """What the architectures of these names and the native sum give, and the gradients, all in one compiled program."""
    runs = {name: ARCHITECTURES[name] for name in names} | {
        "native": lambda x: jax.lax.psum(x, "data")
    }

    def run(x):
        found = {}
        for name, function in runs.items():
            y, back = jax.vjp(on_devices(function, size, check_vma), x)
            found[name] = y, back(jnp.asarray(numbers(*y.shape)))[0]
        return found

    return jax.device_get(jax.jit(run)(numbers(size, 37)))


def check_against_native(name, size, check_vma=False, names=tuple(ARCHITECTURES)):
    found = results(size, names, check_vma)
    assert found["native"][0].dtype == np.float64
    assert_same(found[name], found["native"])


FEW = ("ring", "2 servers")


@pytest.mark.parametrize(
    ("size", "name"),
    quick(
        covering(
            [*((2, name) for name in FEW), *((4, name) for name in ARCHITECTURES)],
            (2, 4, 8),
            ARCHITECTURES,
        ),
        4,
        7,
        8,
        9,
        10,
        11,
    ),
)
def test_architecture_and_its_gradient_are_the_native_ones(x64, name, size):
    check_against_native(
        name, size, names=FEW if size == 2 and name in FEW else tuple(ARCHITECTURES)
    )


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


@pytest.mark.parametrize("size", quick(SIZES, 2))
def test_a_ring_puts_two_times_n_minus_1_over_n_of_the_bytes_on_each_link(size):
    links, num_bytes = traffic("ring", size, 840)
    assert set(links) == {(d, (d + 1) % size) for d in range(size)}, "neighbours alone talk"
    assert set(links.values()) == {Fraction(2 * (size - 1), size) * num_bytes}


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.full), 8])
def test_a_ring_both_ways_halves_what_a_link_carries_one_way(size):
    links, num_bytes = traffic("ring both ways", size, 1680)
    assert len(links) == 2 * size
    assert set(links.values()) == {Fraction(size - 1, size) * num_bytes}


@pytest.mark.parametrize("size", SIZES)
def test_one_server_s_line_carries_two_times_n_minus_1_of_the_bytes(size):
    links, num_bytes = traffic("1 server", size, 840)
    assert line_bytes(links) == {0: 2 * (size - 1) * num_bytes} | dict.fromkeys(
        range(1, size), 2 * num_bytes
    )


@pytest.mark.parametrize("size", quick(SIZES, 2))
def test_as_many_servers_as_workers_have_the_traffic_of_a_ring(size):
    links, num_bytes = traffic("all serve", size, 840)
    assert set(line_bytes(links).values()) == {2 * Fraction(2 * (size - 1), size) * num_bytes}


def test_the_gradient_of_a_ring_travels_as_cheaply():
    x = np.zeros((8, 840), np.float32)
    run = on_devices(ARCHITECTURES["ring"], 8)
    back = jax.jit(lambda x, given: jax.vjp(run, x)[1](given)[0])
    links = link_bytes(inspect_step(back, x, x).collectives, 8)
    assert set(links.values()) == {Fraction(14, 8) * 4 * 840}


def training(size, optimizer, num_steps=3):
    """Returns a function that trains inside shard_map, of a regression whose rows lie over ``data``, and gives the params."""

    def loss(params, rows, targets):
        return jnp.mean(jnp.square(rows @ params["w"] + params["b"][None] - targets))

    def run(params, rows, targets):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, rows, targets), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=num_steps)[0][0]

    whole, cut = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        run, mesh=mesh_of(size), in_specs=(whole, cut, cut), out_specs=whole, check_vma=False
    )


@pytest.mark.parametrize(
    "base",
    [optax.sgd(0.1, momentum=0.9), pytest.param(optax.adamw(0.01), marks=pytest.mark.full)],
    ids=["sgd", "adamw"],
)
def test_training_ends_at_the_params_of_all_reduce_and_of_one_device(x64, base):
    made = {
        "all-reduce": collectives.distributed_optimizer(base),
        "ring": collectives.distributed_optimizer(
            base, reduce=partial(collectives.ring_all_reduce, mean=True)
        ),
        "1 server": collectives.server_optimizer(base, num_servers=1),
        "4 servers": collectives.server_optimizer(base, num_servers=4),
    }
    args = {"w": jnp.asarray(numbers(5, 1)), "b": jnp.zeros(1)}, numbers(24, 5), numbers(24, 1)
    one = jax.jit(training(1, base))(*args)
    runs = {name: training(4, optimizer) for name, optimizer in made.items()}
    found = jax.jit(lambda *args: {name: run(*args) for name, run in runs.items()})(*args)
    for name, params in found.items():
        assert_same(params, one, within=1e-11, message=name)


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
