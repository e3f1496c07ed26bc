"""Gradients summed layer by layer inside the backward pass: the same numbers, as many bytes, and when they travel."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.inspect import inspect_step
from tests.support import tiny
from tests.support.covering import covering
from tests.support.oracle import assert_same
from tests.support.tiers import quick


def both(mesh, **settings):
    """Returns the function that reduces layer by layer, and the one that reduces once a step."""
    settings["shardings"] = tiny.shardings(mesh, tiny.make_params())
    return [
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, overlap_grad_reduce=when, **settings)
        for when in (True, False)
    ]


def is_cut(array):
    return "data" in jax.tree.leaves(tuple(array.sharding.spec))


@pytest.mark.parametrize(
    ("num_microbatches", "remat"),
    quick(covering([(1, False), (2, False), (4, True)], (1, 2, 4), (False, True)), 2),
)
def test_gradients_reduced_layer_by_layer_equal_one_device(x64, num_microbatches, remat):
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    params, batch = tiny.make_params(), tiny.make_batch(dtype=np.float64)
    by_layer, _ = both(mesh, num_microbatches=num_microbatches, remat=remat)
    got = by_layer(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, tiny.reference(params, batch))


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("zero", "num_microbatches", "remat"),
    covering([(1, 1, True), (2, 4, False)], (1, 2), (1, 4), (False, True)),
)
def test_sharded_gradients_and_params_after_steps_equal_one_device(
    x64, zero, num_microbatches, remat
):
    mesh, optimizer = jaxpar.make_mesh(data=4, tensor=2), optax.adam(1e-2)
    params = tiny.make_params()
    shardings = tiny.shardings(mesh, params)
    state = jaxpar.init_state(
        lambda _: params, jax.random.key(0), optimizer, mesh, shardings, zero=zero
    )
    by_layer, _ = both(mesh, zero=zero, num_microbatches=num_microbatches, remat=remat)
    batches = [tiny.make_batch(seed, np.float64) for seed in range(3)]
    got = by_layer(state.params, jaxpar.shard_batch(batches[0], mesh))
    assert_same(got, tiny.reference(params, batches[0]))
    layers = got[1]["layers"]
    assert {name for name, grad in layers.items() if is_cut(grad)} == {
        "w_up",
        "w_down",
        "b_down",
    }, "b_up is over tensor"
    step, opt_state = jaxpar.make_train_step(by_layer, optimizer), optimizer.init(params)
    update = jax.jit(optimizer.update)
    for batch in batches:
        state, _ = step(state, jaxpar.shard_batch(batch, mesh))
        updates, opt_state = update(tiny.reference(params, batch)[1], opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_same(state.params, params, within=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("zero", "dtype"),
    covering(
        [(1, jnp.bfloat16), (2, jnp.float32)],
        (0, 1, 2),
        (jnp.float32, jnp.bfloat16),
    ),
)
def test_gradients_keep_the_dtype_of_their_params_and_are_added_in_float32(zero, dtype):
    mesh = jaxpar.make_mesh(data=4)
    params, batch = jax.tree.map(lambda a: a.astype(dtype), tiny.make_params()), tiny.make_batch()
    rows = jaxpar.shard_batch(batch, mesh)
    layer, step = (f(params, rows) for f in both(mesh, zero=zero, num_microbatches=4))
    assert_same(layer, step, within=1e-6, message="rounded once, at the end")
    assert {grad.dtype for grad in jax.tree.leaves(layer[1])} == {jnp.dtype(dtype)}


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(x64, zero):
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    params, batch = tiny.make_params(), tiny.make_batch(dtype=np.float64)
    by_layer, _ = both(mesh, zero=zero, num_microbatches=2, grad_reduce_dtype=jnp.float32)
    got = by_layer(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))[1]
    want = tiny.reference(params, batch)[1]
    assert_same(got, want, within=1e-6)
    with pytest.raises(AssertionError, match="w_up"):
        assert_same(got["layers"], want["layers"], within=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("zero", "is_listed"), covering([(0, False), (1, True), (2, True)], (0, 1, 2), (False, True))
)
def test_tied_embeddings_are_reduced_with_outer(x64, zero, is_listed):
    """A lookup and a head of one table, and layers of an odd vector too, which no axis divides."""
    mesh, rng = jaxpar.make_mesh(data=4), np.random.default_rng(0)
    layers = {"w": rng.normal(size=(3, 8, 8)) / 3, "b": rng.normal(size=(3, 7))}
    if is_listed:
        layers = [{"w": layers["w"][n], "b": layers["b"][n]} for n in range(3)]
    params = {"outer": {"table": rng.normal(size=(12, 8))}, "layers": layers}
    batch = {"tokens": rng.integers(0, 12, (16, 5)), "targets": rng.integers(0, 12, (16, 5))}
    model = jaxpar.LayeredModel(
        lambda outer, batch: outer["table"][batch["tokens"]],
        lambda layer, x: x + jnp.tanh(x @ layer["w"]) * layer["b"].sum(),
        lambda outer, x: x @ outer["table"].T,
    )
    loss = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])
    of_mesh = jaxpar.value_and_grad(
        model, loss, mesh, zero=zero, num_microbatches=2, overlap_grad_reduce=True
    )
    mean = lambda params: jnp.divide(*loss(model.apply(params, batch), batch))
    assert_same(
        of_mesh(params, jaxpar.shard_batch(batch, mesh)), jax.jit(jax.value_and_grad(mean))(params)
    )


@pytest.mark.parametrize(
    ("zero", "num_microbatches"), quick(covering([(0, 1), (1, 2), (2, 1)], (0, 1, 2), (1, 2)), 4)
)
def test_layers_of_a_list_are_reduced_too(x64, zero, num_microbatches):
    mesh = jaxpar.make_mesh(data=2)
    stacked, batch = tiny.make_params(), tiny.make_batch(dtype=np.float64)
    model = jaxpar.LayeredModel(
        tiny.MODEL.embed, [tiny.MODEL.layer] * tiny.NUM_LAYERS, tiny.MODEL.head
    )
    listed = lambda tree: (
        tree
        | {"layers": [{k: a[n] for k, a in tree["layers"].items()} for n in range(tiny.NUM_LAYERS)]}
    )
    by_layer = jaxpar.value_and_grad(
        model,
        tiny.loss,
        mesh,
        num_microbatches=num_microbatches,
        zero=zero,
        overlap_grad_reduce=True,
    )
    value, grads = tiny.reference(stacked, batch)
    got = by_layer(listed(stacked), jaxpar.shard_batch(batch, mesh))
    assert_same(got, (value, listed(grads)))
    assert all(is_cut(grad) for grad in jax.tree.leaves(got[1]["layers"])) == (zero > 0)


@cache
def reports(zero, num_microbatches):
    """The params, and the reports of both programs over eight replicas."""
    mesh = jaxpar.make_mesh(data=8)
    params, batch = tiny.make_params(), jaxpar.shard_batch(tiny.make_batch(), mesh)
    functions = both(mesh, zero=zero, num_microbatches=num_microbatches)
    return params, *(inspect_step(f, params, batch, mesh=mesh) for f in functions)


@pytest.mark.full
@pytest.mark.parametrize(("zero", "num_microbatches"), covering([(1, 4), (2, 4)], (1, 2), (1, 4)))
def test_as_many_bytes_travel_in_a_reduce_scatter_for_each_leaf_of_a_layer(zero, num_microbatches):
    params, layer, step = reports(zero, num_microbatches)
    scatters = num_microbatches if zero == 2 else 1
    of_outer = 2  # w_in and w_out; b_out has five elements and is reduced with the loss
    of_layer = len(params["layers"])
    assert step.count("reduce-scatter", "data") == (of_outer + of_layer) * scatters
    assert (
        layer.count("reduce-scatter", "data") == (of_outer + of_layer * tiny.NUM_LAYERS) * scatters
    )
    assert layer.count("all-reduce", "data") == step.count("all-reduce", "data") == 2, (
        "the weight; loss and b_out"
    )
    for kind in ("reduce-scatter", "all-reduce"):
        assert layer.bytes_moved(kind, "data") == step.bytes_moved(kind, "data") > 0


@pytest.mark.full
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_as_many_bytes_travel_in_an_all_reduce_a_layer_and_one(num_microbatches):
    _, layer, step = reports(0, num_microbatches)
    assert step.count("all-reduce", "data") == 2, "one of the weight, one of the gradients"
    assert layer.count("all-reduce", "data") == 2 + tiny.NUM_LAYERS, "not one a microbatch"
    assert layer.bytes_moved("all-reduce", "data") == step.bytes_moved("all-reduce", "data")


def test_a_layer_s_gradients_travel_in_its_own_turn_of_the_backward_loop():
    """In the compiled program: the reduction stands in the loop over layers, so it is under way before the layer below runs."""
    params, layer, step = reports(0, 1)
    in_loop = [each for each in layer.collectives if each.times == tiny.NUM_LAYERS]
    (reduction,) = in_loop
    assert re.search(r"transpose\(.*\)/while/body", reduction.op_name), reduction.op_name
    assert not any("while/body" in each.op_name for each in step.collectives)
    one_layer = sum(leaf[0].nbytes for leaf in jax.tree.leaves(params["layers"]))
    assert reduction.payload_bytes == one_layer, "the bucket is one layer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"zero": 3},
            "overlap_grad_reduce=True needs zero=0, 1 or 2; got zero=3. Use overlap_grad_reduce=False; zero=3 overlaps",
        ),
        ({"model": tiny.MODEL.apply}, "overlap_grad_reduce=True needs a LayeredModel; got method"),
        (
            {"stage": 2},
            "on one stage alone, since those of a pipeline are complete in its last tick; got overlap_grad_reduce=True and "
            "stage=2. Use overlap_grad_reduce=False, or stage=1.",
        ),
        ({"stage": 2, "executor": "mpmd"}, "got overlap_grad_reduce=True and stage=2."),
    ],
)
def test_what_cannot_be_reduced_so_is_refused(changes, message):
    mesh = jaxpar.make_mesh(data=2, stage=changes.pop("stage", 1))
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpar.value_and_grad(
            changes.pop("model", tiny.MODEL),
            tiny.loss,
            mesh,
            **{"overlap_grad_reduce": True, **changes},
        )


def test_a_setting_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match=r"overlap_grad_reduce must be a bool; got 'layer'"):
        jaxpar.value_and_grad(
            tiny.MODEL, tiny.loss, jaxpar.make_mesh(data=2), overlap_grad_reduce="layer"
        )
