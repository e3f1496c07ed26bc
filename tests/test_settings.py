"""The settings said once: what the objects refuse, and that they are the keywords of before."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from jaxpar import Parallel, Pipeline
from tests.support import tiny
from tests.support.oracle import assert_same


@pytest.fixture(scope="module")
def mesh():
    return jaxpar.make_mesh(data=2, stage=2)


def gradients(*settings, **keywords):
    params, batch = tiny.make_params(), tiny.make_batch()
    mesh = jaxpar.make_mesh(data=2, stage=2)
    return jax.jit(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, *settings, **keywords))(
        tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh)
    )


@pytest.mark.full
def test_objects_are_their_settings(mesh):
    shardings = tiny.shardings(mesh, tiny.make_params())
    settings = {"zero": 1, "schedule": "zb-h1", "num_microbatches": 4, "remat": True}
    want = gradients(mesh, shardings=shardings, **settings)
    got = gradients(
        Parallel(mesh, shardings, zero=1), Pipeline("zb-h1", num_microbatches=4, remat="full")
    )
    assert_same(jaxpar.fetch(got), jaxpar.fetch(want), within=0)
    assert jax.tree.map(lambda g: g.sharding, got) == jax.tree.map(lambda g: g.sharding, want)


def test_a_state_takes_the_same_object(mesh):
    shardings, optimizer, key = (
        tiny.shardings(mesh, tiny.make_params()),
        optax.adam(1e-3),
        jax.random.key(0),
    )
    parallel = Parallel(
        mesh, shardings, zero=3, trainable=("layers/**",), overlap_grad_reduce=False
    )
    want = jaxpar.abstract_state(
        tiny.init, key, optimizer, mesh, shardings, zero=3, trainable=("layers/**",)
    )
    assert jaxpar.abstract_state(tiny.init, key, optimizer, parallel) == want
    assert jaxpar.abstract_state(tiny.init, key, optimizer, mesh=parallel, zero=3) == want
    state = jaxpar.init_state(tiny.init, key, optimizer, parallel)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, want
    )


def test_checkpoints_take_the_same_object(mesh, tmp_path):
    layout = jaxpar.LayerLayout(4, 2, 2)
    checkpoints = jaxpar.CheckpointManager(tmp_path, Parallel(mesh, layout=layout), keep=2)
    assert (checkpoints.mesh, checkpoints.layout) == (mesh, layout)


@pytest.mark.parametrize(
    ("objects", "keywords", "message"),
    [
        ({"zero": 1}, {"zero": 0}, "got zero=0 and zero=1 in jaxpar.Parallel. Leave zero out beside the Parallel"),
        ({}, {"layout": jaxpar.LayerLayout(4, 2)}, "and layout=None in jaxpar.Parallel, its default. Give it to the Parallel"),
        ({}, {"zero": 1}, "instead: jaxpar.Parallel(..., zero=1), or dataclasses.replace(parallel, zero=1)."),
        ({}, {"trainable": ["a"]}, "trainable=None in jaxpar.Parallel, its default. Give it to the Parallel instead: "),
        ({}, {"schedule": "gpipe"}, "or dataclasses.replace(pipeline, schedule='gpipe')."),
        ({"num_microbatches": 4}, {"num_microbatches": 1}, "got num_microbatches=1 and num_microbatches=4 in jaxpar.Pipeline"),
        ({}, {"remat": True}, "got remat='full' and remat='none' in jaxpar.Pipeline"),
    ],
)  # fmt: skip
def test_a_keyword_that_contradicts_an_object_is_refused(mesh, objects, keywords, message):
    ours = Pipeline(**objects) if objects.keys() & {"num_microbatches"} else Pipeline()
    parallel = Parallel(mesh, **({} if objects.keys() & {"num_microbatches"} else objects))
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, parallel, ours, **keywords)


def test_uneven_layers_are_packed_beside_a_parallel_as_each_message_says():
    mesh, outer = jaxpar.make_mesh(stage=2), {"w": jnp.ones((2, 1))}
    params = {"outer": outer, "layers": {"w": jnp.ones((5, 2, 2))}}
    model = jaxpar.LayeredModel(
        lambda _, batch: batch["x"], lambda p, x: jnp.tanh(x @ p["w"]), lambda o, x: x @ o["w"]
    )
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["x"][:, :1])
    rules, batch = {"**": jaxpar.replicated()}, {"x": jnp.ones((4, 2))}
    with pytest.raises(ValueError, match=r"Pack them.*jaxpar\.Parallel\(mesh, shardings, layout="):
        jaxpar.shardings_from_paths(params, mesh, rules)
    layout = jaxpar.LayerLayout(5, 2)
    packed = layout.pack_params(params)
    parallel = Parallel(mesh, jaxpar.shardings_from_paths(packed, mesh, rules))
    given = functools.partial(jaxpar.value_and_grad, model, loss, num_microbatches=2)
    with pytest.raises(ValueError, match=r"dataclasses\.replace\(parallel, layout=layout\)"):
        given(parallel, layout=layout)
    with pytest.raises(TypeError, match=r"packed them: jaxpar\.Parallel\(mesh, shardings, layout="):
        jax.eval_shape(given(parallel), packed, batch)
    for followed in (
        given(dataclasses.replace(parallel, layout=layout)),
        given(Parallel(mesh, parallel.shardings, layout=layout)),
        given(mesh, layout=layout),
    ):
        jax.eval_shape(followed, packed, batch)


def test_a_keyword_that_agrees_is_taken(mesh):
    pipeline = Pipeline(num_microbatches=2)
    jaxpar.value_and_grad(
        tiny.MODEL,
        tiny.loss,
        Parallel(mesh, zero=1),
        pipeline,
        zero=1,
        remat=False,
        mask_idle_ops=None,
    )


def test_two_shardings_that_differ_are_refused(mesh):
    shardings = tiny.shardings(mesh, tiny.make_params())
    whole = jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, jaxpar.replicated()), shardings)
    with pytest.raises(
        ValueError, match=r"got two shardings\. Leave shardings out beside the Parallel"
    ):
        jaxpar.init_state(
            tiny.init, jax.random.key(0), optax.sgd(0.1), Parallel(mesh, shardings), whole
        )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda mesh: Parallel(None), TypeError, r"mesh must be a jax.sharding.Mesh; got NoneType"),
        (lambda mesh: Parallel(mesh, tiny.shardings(jaxpar.make_mesh(data=4), tiny.make_params())), ValueError,
            r"shardings must be those of the mesh; got layers/b_down on .*'data': 4, .* and a mesh of .*'data': 2"),
        (lambda mesh: Parallel(mesh, zero=5), ValueError, "zero must be a ZeRO level, 0 to 3; got 5"),
        (lambda mesh: Parallel(mesh, trainable="a/b"), TypeError, "trainable must be a sequence of patterns of paths"),
        (lambda mesh: Parallel(mesh, grad_reduce_dtype=jnp.int32), ValueError, "grad_reduce_dtype must be a floating"),
        (lambda mesh: Parallel(mesh, zero=3, overlap_grad_reduce=True), ValueError, "needs zero=0, 1 or 2; got zero=3"),
        (lambda mesh: Pipeline("1f2b"), ValueError, "schedule must be one of gpipe, 1f1b"),
        (lambda mesh: Pipeline(num_microbatches=0), ValueError, "num_microbatches must be positive; got 0"),
        (lambda mesh: Pipeline(executor="both"), ValueError, "executor must be"),
        (lambda mesh: Pipeline(remat="yes"), TypeError, r"remat must be one of 'none', 'full', 'dots', or .* got 'yes'"),
        (lambda mesh: Pipeline(mask_idle_ops=2), TypeError, 'mask_idle_ops must be True, False or "auto"; got 2'),
        (lambda mesh: jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, "zb-h1"), TypeError,
            r"pipeline must be a jaxpar.Pipeline; got 'zb-h1'. Write jaxpar.Pipeline\('zb-h1'\)"),
        (lambda mesh: jaxpar.abstract_state(tiny.init, jax.random.key(0), optax.sgd(1.0), Parallel(mesh)), TypeError,
            r"a state needs the sharding of each param; got none. Pass shardings, or a jaxpar.Parallel with them"),
    ],
)  # fmt: skip
def test_an_object_checks_itself_when_it_is_made(mesh, make, error, message):
    with tiny.signatures_unchecked(), pytest.raises(error, match=message):
        make(mesh)


def test_remat_has_one_vocabulary():
    assert Pipeline(remat=False) == Pipeline(remat="none") == Pipeline()
    assert Pipeline(remat=True) == Pipeline(remat="full")
    save = jax.checkpoint_policies.dots_saveable
    assert (Pipeline(remat=save).policy, Pipeline(remat="full").policy) == (save, True)
    assert callable(Pipeline(remat="dots").policy)
