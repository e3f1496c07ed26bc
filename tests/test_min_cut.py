"""The stored values are the cheapest set that allows recomputing the rest: checked against all sets, on small random graphs."""

from itertools import combinations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxpar.backward.graph import trace
from jaxpar.backward.min_cut import ELEMENTWISE, cheapest_to_store

DTYPES = (jnp.float32, jnp.float16, jnp.int8)
OPS = {
    "sin": lambda a, b: jnp.sin(a.astype(jnp.float32)),
    "add": lambda a, b: jax.lax.add(a.astype(jnp.float32), b.astype(jnp.float32)),
    "halve": lambda a, b: a.astype(jnp.float16),
    "positive": lambda a, b: a > b.astype(a.dtype),
    "reverse": lambda a, b: jax.lax.rev(a, (0,)),
    "product": lambda a, b: jax.lax.dot(a.astype(jnp.float32), b.astype(jnp.float32)),
    "spread": lambda a, b: jnp.broadcast_to(a[:1], a.shape),
    "rows": lambda a, b: jnp.take(a, np.array([2, 0, 3, 0]), axis=0, mode="clip"),
    "constant": lambda a, b: jax.lax.mul(a.astype(jnp.float32), np.float32(2)),
}


def program(steps):
    """A function of a few arrays in which each step applies an operation to two earlier values."""

    def run(*inputs):
        values = list(inputs)
        for name, first, second in steps:
            values.append(OPS[name](values[first % len(values)], values[second % len(values)]))
        return values[len(inputs) :]

    return run


def num_bytes(graph, values):
    return sum(graph.avals[i].size * graph.avals[i].dtype.itemsize for i in values)


def can_be_had(graph, stored, free):
    """All values that elementwise operations, and lookups of rows, give from what is stored."""
    had = {*stored, *free, *graph.constants}
    for node in graph.nodes:
        is_lookup = node.name == "gather" and node.inputs[0] not in free
        if (node.name in ELEMENTWISE or is_lookup) and had.issuperset(node.inputs):
            had.update(node.outputs)
    return had


def cheapest_of_all(graph, needed, among, free):
    sets = (
        set(chosen)
        for size in range(len(among) + 1)
        for chosen in combinations(sorted(among), size)
    )
    return min(num_bytes(graph, s) for s in sets if needed <= can_be_had(graph, s, free))


index = st.integers(0, 9)


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(OPS)), index, index), min_size=1, max_size=5),
    data=st.data(),
)
def test_what_is_stored_costs_least_of_all_sets_that_suffice(steps, data):
    inputs = [jax.ShapeDtypeStruct((4, 4), dtype) for dtype in DTYPES]
    graph = trace(program(steps), *inputs)
    free = {graph.inputs[0]}
    among = set(graph.avals) - free - set(graph.constants)
    needed = set(data.draw(st.lists(st.sampled_from(sorted(among)), min_size=1), label="needed"))
    stored = cheapest_to_store(graph, needed, among, free)
    assert stored <= among
    assert needed <= can_be_had(graph, stored, free), f"stored {stored}, needed {needed}"
    if len(among) <= 12:
        assert num_bytes(graph, stored) == cheapest_of_all(graph, needed, among, free)


def test_of_equally_cheap_sets_the_one_nearest_to_the_need_is_stored():
    graph = trace(lambda x: jnp.sin(jnp.cos(x)), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert cheapest_to_store(graph, graph.outputs, set(graph.avals), ()) == set(graph.outputs)


def test_a_cast_and_a_mask_are_stored_narrow_and_a_broadcast_before_it_spreads():
    def narrow(x, row):
        return (
            x.astype(jnp.float16).astype(jnp.float32),
            (x > 0).astype(jnp.float32),
            jnp.broadcast_to(row, x.shape),
        )

    shapes = (jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((1, 4), jnp.float32))
    for i, (dtype, shape) in enumerate(
        [(jnp.float16, (8, 4)), (jnp.bool_, (8, 4)), (jnp.float32, (1, 4))]
    ):
        graph = trace(lambda *args, i=i: narrow(*args)[i], *shapes)
        (stored,) = cheapest_to_store(
            graph, graph.outputs, set(graph.avals) - set(graph.constants), ()
        )
        assert (graph.avals[stored].dtype, graph.avals[stored].shape) == (dtype, shape)


def test_nothing_is_stored_where_nothing_is_needed_or_all_is_free():
    graph = trace(lambda x: jnp.sin(x), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert cheapest_to_store(graph, (), set(graph.avals), ()) == set()
    assert cheapest_to_store(graph, graph.outputs, set(graph.outputs), graph.inputs) == set()
    assert cheapest_to_store(graph, graph.inputs, set(graph.outputs), ()) == set()


ACTIVATIONS = (
    "celu elu gelu hard_sigmoid hard_swish hard_tanh leaky_relu log_sigmoid mish relu relu6 selu sigmoid silu soft_sign "
    "softplus sparse_plus squareplus tanh"
)


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_activations_and_their_derivatives_are_elementwise_with_this_jax(name):
    activation = getattr(jax.nn, name)
    graph = trace(
        lambda x, ct: jax.vjp(activation, x)[1](ct), *[jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    )
    unknown = (
        {node.name for node in graph.nodes if not node.name.startswith("custom_")}
        - ELEMENTWISE
        - {"add_any"}
    )
    assert not unknown, (
        f"JAX {jax.__version__} computes jax.nn.{name} by {unknown}: add what is elementwise to ELEMENTWISE"
    )


def test_rows_of_an_activation_are_looked_up_again_and_rows_of_params_are_not():
    rows, table = (
        jax.ShapeDtypeStruct((4, 4), jnp.float32),
        jax.ShapeDtypeStruct((4, 4), jnp.float32),
    )
    twice = lambda table, x, i: (jnp.take(x, i, 0, mode="clip"), jnp.take(table, i, 0, mode="clip"))
    graph = trace(twice, table, rows, jax.ShapeDtypeStruct((9,), jnp.int32))
    of_table, of_x, _ = graph.inputs
    stored = cheapest_to_store(
        graph, graph.outputs, set(graph.avals) - {of_table, *graph.constants}, {of_table}
    )
    assert of_x in stored
    assert graph.outputs[0] not in stored
    assert graph.outputs[1] in stored
