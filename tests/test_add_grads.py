"""Gradients added to sums: equal to the sum of both, rows of a lookup without an array of the table's size."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.backward.add_grads import add_grads
from jaxpar.backward.graph import trace
from tests.support import tiny

ROWS, WIDTH = 50, 6


@pytest.fixture
def rng():
    return np.random.default_rng(tiny.fresh_seed())


@pytest.fixture
def table(rng):
    return jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)


def grads_of(function, *params):
    """``(params, ids) -> gradients``, as a list."""
    return lambda params, ids: jax.grad(lambda params: function(*params, ids))(params)


def lookup(table, ids):
    return jnp.sum(jnp.sin(table[ids]))


def arrays_of(function, *args):
    graph = trace(function, *args)
    return [graph.avals[number] for node in graph.nodes for number in node.outputs]


def test_rows_of_a_lookup_are_added_to_the_sum_with_no_other_array_of_its_size(table, rng, x64):
    table, sums = table.astype(jnp.float64), [jnp.asarray(rng.normal(size=table.shape))]
    ids = jnp.asarray([3, 7, 3, 3, ROWS - 1, -1])
    added = lambda sums, params, ids: add_grads(sums, grads_of(lookup), params, ids)
    want = sums[0] + grads_of(lookup)([table], ids)[0]
    np.testing.assert_allclose(
        added(sums, [table], ids)[0], want, rtol=1e-12, atol=1e-12
    )  # terms may cancel
    assert [each.shape for each in arrays_of(added, sums, [table], ids)].count(table.shape) == 1, (
        "the new sum"
    )
    assert [each.shape for each in arrays_of(grads_of(lookup), [table], ids)].count(
        table.shape
    ) == 2, "zeros, gradient"


def test_ids_outside_the_table_add_nothing(table):
    take = lambda table, ids: jnp.sum(jnp.take(table, ids, axis=0, mode="fill", fill_value=0))
    (added,) = add_grads([jnp.zeros_like(table)], grads_of(take), [table], jnp.asarray([ROWS, 2]))
    np.testing.assert_array_equal(added, jnp.zeros_like(table).at[2].set(1))


def test_rows_of_16_bits_are_added_in_the_32_of_the_sum(table):
    ids = jnp.zeros(300, int)
    (added,) = add_grads(
        [jnp.zeros(table.shape)],
        grads_of(lambda table, ids: jnp.sum(table[ids])),
        [table.astype(jnp.bfloat16)],
        ids,
    )
    assert added.dtype == jnp.float32
    np.testing.assert_array_equal(added[0], 300)  # 256 in bfloat16, whose ones beyond it are lost


def test_gradients_that_are_no_plain_lookup_are_added_whole(table, rng):
    def function(table, bias, ids):
        return jnp.sum(jnp.tanh(table[ids] @ table[:WIDTH] + bias)) + lookup(table, ids[::2])

    params, ids = (
        [table, jnp.asarray(rng.normal(size=(1, WIDTH)), jnp.float32)],
        jnp.asarray([1, 4, 4]),
    )
    sums = [jnp.ones_like(p) for p in params]
    added = jax.jit(partial(add_grads, sums, grads_of(function)))(params, ids)
    for new, old, grad in zip(added, sums, jax.jit(grads_of(function))(params, ids), strict=True):
        np.testing.assert_allclose(new, old + grad, rtol=1e-6, atol=1e-6)


def test_what_is_added_is_selected_first(table):
    nothing = lambda arrays: [jnp.where(False, a, 0) for a in arrays]
    function = lambda table, ids: lookup(jnp.full_like(table, jnp.nan) * table, ids)
    (added,) = add_grads([table], grads_of(function), [table], jnp.asarray([1, 2]), select=nothing)
    np.testing.assert_array_equal(added, table)
    (added,) = add_grads(
        [table], grads_of(lookup), [table * jnp.nan], jnp.asarray([1, 2]), select=nothing
    )
    np.testing.assert_array_equal(added, table)
