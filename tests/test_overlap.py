"""Gradients summed layer by layer inside the backward pass: the same numbers, as many bytes, and when they travel."""

import re

import jax
import numpy as np
import pytest
import tiny
from oracle import assert_same

import jaxpar
from jaxpar.inspect import inspect_step


def both(mesh, **settings):
    """Returns the function that reduces layer by layer, and the one that reduces once a step."""
    return [
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, overlap_grad_reduce=when, **settings)
        for when in (True, False)
    ]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_gradients_reduced_layer_by_layer_equal_one_device(x64, num_microbatches, remat):
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    params, batch = tiny.make_params(), tiny.make_batch(dtype=np.float64)
    by_layer, _ = both(mesh, num_microbatches=num_microbatches, remat=remat)
    got = by_layer(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, tiny.reference(params, batch))


def test_layers_of_a_list_are_reduced_too(x64):
    mesh = jaxpar.make_mesh(data=2)
    stacked, batch = tiny.make_params(), tiny.make_batch(dtype=np.float64)
    model = jaxpar.LayeredModel(tiny.MODEL.embed, [tiny.MODEL.layer] * tiny.NUM_LAYERS, tiny.MODEL.head)
    listed = lambda tree: (
        tree | {"layers": [{k: a[n] for k, a in tree["layers"].items()} for n in range(tiny.NUM_LAYERS)]}
    )
    by_layer = jaxpar.value_and_grad(model, tiny.loss, mesh, overlap_grad_reduce=True)
    value, grads = tiny.reference(stacked, batch)
    assert_same(by_layer(listed(stacked), jaxpar.shard_batch(batch, mesh)), (value, listed(grads)))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_as_many_bytes_travel_in_an_all_reduce_a_layer_and_one(num_microbatches):
    mesh = jaxpar.make_mesh(data=8)
    params, batch = tiny.make_params(), jaxpar.shard_batch(tiny.make_batch(), mesh)
    layer, step = (inspect_step(f, params, batch, mesh=mesh) for f in both(mesh, num_microbatches=num_microbatches))
    assert step.count("all-reduce", "data") == 2, "one of the weight, one of the gradients"
    assert layer.count("all-reduce", "data") == 2 + tiny.NUM_LAYERS, "not one a microbatch"
    assert layer.bytes_moved("all-reduce", "data") == step.bytes_moved("all-reduce", "data")


def test_a_layer_s_gradients_travel_in_its_own_turn_of_the_backward_loop():
    """In the compiled program: the reduction stands in the loop over layers, so it is under way before the layer below runs."""
    mesh = jaxpar.make_mesh(data=8)
    params, batch = tiny.make_params(), jaxpar.shard_batch(tiny.make_batch(), mesh)
    layer, step = (inspect_step(f, params, batch, mesh=mesh) for f in both(mesh))
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
            {"zero": 1},
            "overlap_grad_reduce=True needs a LayeredModel, one stage and zero=0; got LayeredModel, stage=1, zero=1",
        ),
        ({"stage": 2}, "got LayeredModel, stage=2, zero=0"),
        ({"model": tiny.MODEL.apply}, "got method, stage=1, zero=0"),
    ],
)
def test_what_cannot_be_reduced_so_is_refused(changes, message):
    mesh = jaxpar.make_mesh(data=2, stage=changes.pop("stage", 1))
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpar.value_and_grad(
            changes.pop("model", tiny.MODEL), tiny.loss, mesh, **{"overlap_grad_reduce": True, **changes}
        )


def test_a_setting_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match=r"overlap_grad_reduce must be a bool; got 'layer'"):
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, jaxpar.make_mesh(data=2), overlap_grad_reduce="layer")
