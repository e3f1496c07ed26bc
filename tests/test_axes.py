"""The axis `replica`: ZeRO inside groups of replicas (HSDP), with the numbers of one device."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.mesh import num_replicas, sizes_text
from jaxpar.models import mlp
from jaxpar.params import init_params
from tests.support import tiny
from tests.support.covering import covering
from tests.support.oracle import assert_same

# Every matrix has a dim that data divides, and there is a layer for each stage.
TABLE = mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=4)


def make_run(mesh, zero=0, trainable=None, **settings):
    init = lambda key: jax.tree.map(jnp.asarray, tiny.draw_params(2))
    shardings = tiny.shardings(mesh, jax.eval_shape(init, jax.random.key(0)))
    parallel = jaxpar.Parallel(mesh, shardings, zero=zero, trainable=trainable)
    state = jaxpar.init_state(init, jax.random.key(0), optax.adam(1e-2), parallel)
    return state, jaxpar.value_and_grad(
        mlp.MODEL, tiny.loss, parallel, num_microbatches=2, **settings
    )


def collectives(step, *args):
    """How often a step runs each kind of collective, by its axes."""
    found = Counter()
    for each in jaxpar.inspect_step(step, *args).collectives:
        found[each.kind, "+".join(each.axes)] += each.known_times
    return dict(found)


RUNS = [
    ({"replica": 2, "data": 2, "tensor": 2}, 0, {}),
    pytest.param(
        {"replica": 2, "data": 2, "stage": 2}, 0, {"schedule": "zb-h1"}, marks=pytest.mark.slow
    ),
    pytest.param({"replica": 2, "data": 2, "tensor": 2}, 1, {}, marks=pytest.mark.slow),
    pytest.param(
        {"replica": 2, "data": 2, "stage": 2}, 1, {"mask_idle_ops": True}, marks=pytest.mark.slow
    ),
    ({"replica": 2, "data": 4}, 2, {}),
    pytest.param(
        {"replica": 2, "data": 2, "stage": 2}, 2, {"schedule": "1f1b"}, marks=pytest.mark.slow
    ),
    pytest.param({"replica": 4, "data": 2}, 3, {}, marks=pytest.mark.slow),
    ({"replica": 2, "data": 2, "stage": 2}, 3, {"schedule": "zb-h1", "mask_idle_ops": True}),
]


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(("axes", "zero", "settings"), RUNS)
def test_groups_of_replicas_have_the_numbers_of_one_device(x64, axes, zero, settings):
    mesh, optimizer = jaxpar.make_mesh(**axes), optax.adam(1e-2)
    state, value_and_grad = make_run(mesh, zero, **settings)
    params = jaxpar.fetch(state.params)
    train_step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=0.5)
    clipping = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    opt_state, update = clipping.init(params), tiny.update_on_one_device(clipping)
    for step in range(3):
        batch = tiny.make_batch(step, np.float64)
        loss, grads = tiny.reference(params, batch)
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        norm = np.sqrt(
            sum(np.sum(np.square(grad)) for grad in jax.tree.leaves(jaxpar.fetch(grads)))
        )
        assert_same(
            {name: metrics[name] for name in ("loss", "grad_norm")},
            {"loss": np.float32(loss), "grad_norm": np.float32(norm)},
            within=1e-6,
        )
        params, opt_state = update(grads, opt_state, params)
    assert_same(state.params, params, within=1e-10)


@pytest.mark.parametrize(
    ("axes", "zero", "settings"),
    [
        pytest.param(
            {"replica": 2, "data": 2, "tensor": 2},
            1,
            {"overlap_grad_reduce": True},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"replica": 2, "data": 2, "stage": 2},
            2,
            {"mask_idle_ops": True},
            marks=pytest.mark.full,
        ),
        ({"replica": 2, "data": 4}, 3, {"grad_reduce_dtype": jnp.float64}),
        pytest.param(
            {"replica": 2, "data": 2, "stage": 2}, 0, {"executor": "mpmd"}, marks=pytest.mark.full
        ),
    ],
)
def test_gradients_reduced_in_other_ways_equal_those_of_one_device(x64, axes, zero, settings):
    mesh, batch = jaxpar.make_mesh(**axes), tiny.make_batch(0, np.float64)
    params = tiny.draw_params(2)
    shardings = tiny.shardings(mesh, params)
    value_and_grad = jaxpar.value_and_grad(
        mlp.MODEL, tiny.loss, mesh, zero=zero, shardings=shardings, num_microbatches=2, **settings
    )
    got = value_and_grad(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    assert_same(jaxpar.fetch(got), tiny.reference(params, batch))


@pytest.mark.full
@pytest.mark.parametrize(("zero", "stage"), covering([(1, 2), (2, 1), (3, 2)], (1, 2, 3), (1, 2)))
def test_zero_stays_inside_a_group_and_one_all_reduce_joins_the_groups(zero, stage):
    mesh = jaxpar.make_mesh(replica=2, data=2, stage=stage)
    parallel = jaxpar.Parallel(mesh, tiny.shardings(mesh, TABLE_SHAPES), zero=zero)
    optimizer = optax.adam(1e-2)
    init = lambda key: init_params(TABLE, key)
    state = jaxpar.abstract_state(init, jax.random.key(0), optimizer, parallel)
    step = jaxpar.make_train_step(
        jaxpar.value_and_grad(mlp.MODEL, tiny.loss, parallel, num_microbatches=2),
        optimizer,
        max_grad_norm=1.0,
    )
    found = collectives(step, state, jaxpar.abstract_batch(tiny.make_batch(), mesh))
    gathers = {axes for kind, axes in found if kind in ("all-gather", "reduce-scatter")}
    assert gathers <= {"data", "stage"}, "what ZeRO gathers and scatters must stay inside a group"
    assert "data" in gathers, "ZeRO must shard"
    assert found["all-reduce", "replica"] == 1, found
    assert found["all-reduce", "replica+data"] == 1, "that of the weight"


def test_without_zero_one_all_reduce_is_over_all_replicas():
    mesh, params, batch = jaxpar.make_mesh(replica=2, data=4), tiny.make_params(), tiny.make_batch()
    step = jax.jit(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh))
    args = tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh)
    assert collectives(step, *args) == {("all-reduce", "replica+data"): 2}, (
        "of the weight, and of gradients and loss"
    )


def test_rows_are_split_over_groups_and_then_over_the_replicas_of_each():
    mesh = jaxpar.make_mesh(replica=2, data=2, stage=2)
    rows = jaxpar.shard_batch(np.arange(8), mesh)
    held = {shard.device.id: shard.data.tolist() for shard in rows.addressable_shards}
    assert held == {
        0: [0, 1],
        1: [2, 3],
        2: [0, 1],
        3: [2, 3],
        4: [4, 5],
        5: [6, 7],
        6: [4, 5],
        7: [6, 7],
    }
    local = lambda *ids: jaxpar.local_rows(
        8, mesh, devices=[jax.devices()[i] for i in ids]
    ).tolist()
    assert local(4, 6) == [4, 5]
    assert local(0, 5) == [0, 1, 6, 7]
    assert num_replicas(mesh) == 4


def test_errors_name_both_axes():
    mesh = jaxpar.make_mesh(replica=2, data=2)
    message = "divisible by the replica axis times the data axis; got 6 rows, replica=2, data=2. Use 8 rows"
    with pytest.raises(ValueError, match=message):
        jaxpar.shard_batch(np.ones((6, 2)), mesh)
    with pytest.raises(ValueError, match=message):
        jaxpar.local_rows(6, mesh)


def test_axes_of_size_one_are_not_shown():
    assert sizes_text(jaxpar.make_mesh(data=2).shape) == "data=2, stage=1, tensor=1"
    assert (
        sizes_text(jaxpar.make_mesh(replica=2, data=2).shape)
        == "replica=2, data=2, stage=1, tensor=1"
    )


TABLE_SHAPES = jax.eval_shape(lambda key: init_params(TABLE, key), jax.random.key(0))
