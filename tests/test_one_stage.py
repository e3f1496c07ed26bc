"""One stage with layers written out as on GPUs: the numbers of one device, and what a microbatch writes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar._compat import equations
from jaxpar.trainable import trained_part, where_grads
from tests.support import tiny_gpt
from tests.support.oracle import assert_same
from tests.support.tiers import quick

NUM_LAYERS = 2
PARAMS = tiny_gpt.make_params(num_layers=NUM_LAYERS)
SOME = ("layers/w_up", "layers/b_*", "layers/scale_1", "outer/tokens")


def with_counts(outputs, batch):
    """The loss, and how many tokens are right."""
    right = (outputs.argmax(-1) == batch["targets"]) & (batch["weight"] > 0)
    return *tiny_gpt.loss(outputs, batch), {"right": right.sum()}


# Microbatches, size of data, ZeRO, rematerialisation, what is trained, whether the loss has further sums.
CASES = [
    (2, 2, 1, False, SOME, False),
    (1, 4, 2, "dots", None, True),
    (2, 1, 0, True, None, False),
    (2, 2, 0, "dots", None, True),
    (1, 2, 3, True, SOME, False),
    (2, 2, 2, False, None, False),
    (2, 2, 2, True, SOME, False),
    (2, 2, 3, False, SOME, False),
    (2, 4, 3, True, None, False),
    (2, 8, 1, True, SOME, True),
    (1, 8, 0, False, SOME, False),
    (1, 1, 0, True, None, False),
]


def check(num_microbatches, data, zero, remat, trainable, has_aux, *, replica=1, overlaps=False):
    """Holds the microbatches of each replica to one device."""
    mesh, batch = jaxpar.make_mesh(replica=replica, data=data), tiny_gpt.make_batch()
    value_and_grad = jaxpar.value_and_grad(
        tiny_gpt.MODEL,
        with_counts if has_aux else tiny_gpt.loss,
        mesh,
        num_microbatches=num_microbatches,
        zero=zero,
        remat=remat,
        trainable=trainable,
        has_aux=has_aux,
        overlap_grad_reduce=overlaps,
        mask_idle_ops=True,
    )
    value, grads = value_and_grad(tiny_gpt.on_mesh(mesh, PARAMS), jaxpar.shard_batch(batch, mesh))
    want, want_grads = tiny_gpt.reference(PARAMS, batch)
    assert_same(grads, where_grads(trained_part(PARAMS, trainable), want_grads))
    if has_aux:
        count = jax.jit(
            lambda params, batch: with_counts(tiny_gpt.MODEL.apply(params, batch), batch)[2][
                "right"
            ]
        )
        right = count(PARAMS, batch)
        assert_same(value[1]["right"], right / batch["weight"].sum())
    assert_same(value[0] if has_aux else value, want)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("num_microbatches", "data", "zero", "remat", "trainable", "has_aux"), quick(CASES, 0, 1)
)
def test_layers_written_out_have_the_numbers_of_one_device_in_float64(
    x64, num_microbatches, data, zero, remat, trainable, has_aux
):
    check(num_microbatches, data, zero, remat, trainable, has_aux)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("case", [(2, 2, 2, "dots", None, False), (2, 1, 0, True, SOME, True)])
def test_layers_in_a_loop_have_the_numbers_of_one_device_in_float64(x64, monkeypatch, case):
    monkeypatch.setattr("jaxpar.pipeline.one_stage.MOST_WRITTEN_OUT", NUM_LAYERS - 1)
    check(*case)


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("most_written_out", "num_microbatches", "replica", "data", "zero", "remat"),
    [
        *(
            (NUM_LAYERS, *case)
            for case in [
                (2, 1, 4, 0, False),
                (2, 2, 2, 1, True),
                (2, 2, 2, 2, "dots"),
                (1, 2, 2, 1, False),
            ]
        ),
        *(
            (NUM_LAYERS - 1, *case)
            for case in [(2, 2, 2, 0, "dots"), (2, 1, 4, 1, False), (2, 2, 2, 2, True)]
        ),
    ],
)
def test_sums_that_the_last_microbatch_reduces_have_the_numbers_of_one_device_in_float64(
    x64, monkeypatch, most_written_out, num_microbatches, replica, data, zero, remat
):
    monkeypatch.setattr("jaxpar.pipeline.one_stage.MOST_WRITTEN_OUT", most_written_out)
    check(num_microbatches, data, zero, remat, None, has_aux=True, replica=replica, overlaps=True)


SHAPES = {"up": (16, 24), "down": (24, 16)}


def layer(params, x):
    up, down = (params[name].astype(jnp.bfloat16) for name in ("up", "down"))
    return x + jnp.tanh(x @ up) @ down


def step_of_16_bits(**settings):
    """Value and gradients on one device, or as set, of a model that computes in bfloat16."""
    settings = {"mesh": jaxpar.make_mesh(), "num_microbatches": 3, "mask_idle_ops": True} | settings
    embed = lambda outer, batch: outer[batch].astype(jnp.bfloat16)
    model = jaxpar.LayeredModel(embed, layer, lambda outer, x: x @ outer.T.astype(jnp.bfloat16))
    loss = jaxpar.losses.softmax_cross_entropy
    return jaxpar.value_and_grad(model, loss, **settings)


def params_of(num_layers, make):
    layers = {name: make((num_layers, *shape)) for name, shape in SHAPES.items()}
    return {"outer": make((8, 16)), "layers": layers}


def body_of_microbatches(num_layers, dtype=jnp.float32, num_tokens=5, **settings):
    """The equations of the loop over microbatches of a step, on one device or as set."""
    params = params_of(num_layers, lambda shape: jax.ShapeDtypeStruct(shape, dtype))
    batch = jax.ShapeDtypeStruct((12, num_tokens), jnp.int32)
    traced = jax.make_jaxpr(step_of_16_bits(**settings))(params, batch)
    loops = [
        each
        for each in equations(traced)
        if each.primitive.name == "scan" and len(each.outvars) > 3
    ]
    (loop,) = (each for each in loops if each.params["length"] == 3)
    return list(equations(loop.params["jaxpr"]))


def test_a_microbatch_makes_no_stack_of_layers_casts_no_params_and_rounds_no_gradients_of_weights(
    monkeypatch,
):
    monkeypatch.setattr("jaxpar.pipeline.executor.on_gpus", lambda: True)
    body = body_of_microbatches(num_layers=5)
    assert not [each for each in body if any(v.aval.shape[:1] == (5,) for v in each.outvars)], (
        "a stack, or a part of one"
    )
    of_weights = [
        each for each in body if each.outvars and each.outvars[0].aval.shape in SHAPES.values()
    ]
    dtypes = {
        name: {e.outvars[0].aval.dtype for e in of_weights if e.primitive.name == name}
        for name in ("add", "dot_general")
    }
    assert dtypes == {"add": {jnp.dtype("float32")}, "dot_general": {jnp.dtype("float32")}}
    assert not [
        e
        for e in of_weights
        if e.outvars[0].aval.dtype == jnp.bfloat16 and e.primitive.name != "transpose"
    ], "a cast"


def test_params_that_a_step_does_not_cast_are_sliced_out_of_their_stacks_in_the_loop_over_microbatches():
    """Before it they would be a second copy of all of them, for the whole step."""
    stacks = {(5, *shape) for shape in SHAPES.values()}

    def sliced(dtype):
        body = body_of_microbatches(5, dtype)
        return {
            each.invars[0].aval.shape for each in body if each.primitive.name == "slice"
        } & stacks

    assert sliced(jnp.bfloat16) == stacks
    assert sliced(jnp.float32) == set()


@pytest.mark.parametrize(
    ("zero", "num_tokens", "passes"), [(1, 40, 0), (2, 40, 2), (3, 40, 0), (2, 5, 0)]
)
def test_at_zero_2_a_third_of_the_layers_is_cast_in_each_pass_if_copies_take_less_than_what_is_stored(
    zero, num_tokens, passes
):
    mesh = jaxpar.make_mesh(data=2)
    body = body_of_microbatches(6, num_tokens=num_tokens, mesh=mesh, zero=zero)
    casts = [
        each.invars[0].aval.shape
        for each in body
        if each.primitive.name == "convert_element_type"
        and (each.invars[0].aval.dtype, each.outvars[0].aval.dtype) == (jnp.float32, jnp.bfloat16)
    ]
    for shape in SHAPES.values():
        assert casts.count(shape) == 2 * passes


def test_layers_that_are_cast_again_have_the_gradients_of_those_that_are_cast_once():
    rng = np.random.default_rng(1)
    params = params_of(5, lambda shape: rng.normal(size=shape).astype(np.float32) / 4)
    batch = rng.integers(8, size=(12, 40)).astype(np.int32)
    found = {}
    for zero in (1, 2):
        step = step_of_16_bits(mesh=jaxpar.make_mesh(data=2), zero=zero)
        found[zero] = jaxpar.fetch(step(params, batch))
    assert_same(found[2], found[1], within=1e-6)


def test_the_last_microbatch_alone_is_out_of_the_loop_and_reduces_each_layer_by_itself():
    params = params_of(5, lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    batch = jax.ShapeDtypeStruct((12, 5), jnp.int32)
    step = step_of_16_bits(mesh=jaxpar.make_mesh(data=2), zero=1, overlap_grad_reduce=True)
    traced = list(equations(jax.make_jaxpr(step)(params, batch)))
    (loop,) = (
        each for each in traced if each.primitive.name == "scan" and each.params["length"] == 2
    )
    scatters = lambda found: [each for each in found if each.primitive.name == "reduce_scatter"]
    assert not scatters(equations(loop.params["jaxpr"]))
    of_layers = [each.invars[0].aval.shape for each in scatters(traced)]
    assert sorted(of_layers) == sorted([(1, *shape) for shape in SHAPES.values()] * 5 + [(8, 16)])


def test_at_zero_2_no_microbatch_is_apart_since_each_has_reduced_its_gradients():
    params = params_of(1, lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    batch = jax.ShapeDtypeStruct((24, 5), jnp.int32)

    def traced(overlaps, **axes):
        step = step_of_16_bits(mesh=jaxpar.make_mesh(**axes), zero=2, overlap_grad_reduce=overlaps)
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(step)(params, batch)))

    assert traced(True, data=4) == traced(False, data=4)
    assert traced(True, data=2, replica=2) != traced(False, data=2, replica=2), (
        "which is left for the last one"
    )


@pytest.mark.parametrize(("zero", "reduction"), [(0, "psum"), (1, "reduce_scatter")])
def test_the_only_microbatch_reduces_each_layer_by_itself_unasked(zero, reduction):
    params = params_of(5, lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    batch = jax.ShapeDtypeStruct((12, 5), jnp.int32)
    shapes = {}
    for num_microbatches in (1, 3):
        step = step_of_16_bits(
            mesh=jaxpar.make_mesh(data=2), zero=zero, num_microbatches=num_microbatches
        )
        traced = equations(jax.make_jaxpr(step)(params, batch))
        sums = [each for each in traced if each.primitive.name.startswith(reduction)]
        shapes[num_microbatches] = [
            leaf.aval.shape for each in sums for leaf in each.invars if leaf.aval.ndim > 1
        ]
    for shape in SHAPES.values():
        assert shapes[1].count((1, *shape)) == shapes[1].count((5, *shape)) + 5
        assert (1, *shape) not in shapes[3]


def test_more_layers_have_a_loop_so_that_the_time_to_compile_does_not_grow(monkeypatch):
    monkeypatch.setattr("jaxpar.pipeline.one_stage.MOST_WRITTEN_OUT", 36)
    count = {num_layers: len(body_of_microbatches(num_layers)) for num_layers in (36, 37, 100)}
    assert count[36] > 2 * count[37]
    assert count[37] == count[100]


def test_a_step_in_16_bits_is_also_computed_on_cpus():
    rng = np.random.default_rng(0)
    params = params_of(2, lambda shape: rng.normal(size=shape).astype(np.float32))
    batch = rng.integers(8, size=(6, 5)).astype(np.int32)
    loss, grads = step_of_16_bits()(params, batch)
    assert np.isfinite(loss)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(jaxpar.fetch(grads)))
