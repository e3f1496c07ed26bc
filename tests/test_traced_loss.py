"""What is traced of a loss: its weight, from which the backward pass starts as on one device, and what cannot run on a mesh."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar._compat import equations
from jaxpar.models import mlp
from jaxpar.params import init_params
from jaxpar.step.traced_loss import trace_loss
from tests.support import tiny
from tests.support.oracle import assert_same, distance
from tests.support.tiers import quick

BOUND = 1e-3
DEEP = mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=8)


@jax.custom_vjp
def clip_cotangent(x):
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -BOUND, BOUND),))

CLIPPING = jaxpar.LayeredModel(
    lambda outer, batch: clip_cotangent(tiny.MODEL.embed(outer, batch)),
    lambda params, x: clip_cotangent(tiny.MODEL.layer(params, clip_cotangent(x))),
    lambda outer, x: clip_cotangent(tiny.MODEL.head(outer, x)),
)

RUNS = {
    "one device": ((1, 1, 1), {}),
    "replicas": ((2, 1, 2), {"num_microbatches": 4}),
    "layer by layer": ((2, 1, 1), {"num_microbatches": 2, "overlap_grad_reduce": True}),
    "zero 3": ((2, 1, 1), {"zero": 3, "num_microbatches": 2}),
    "1f1b": ((2, 2, 1), {"num_microbatches": 4}),
    "zb-h1, recomputing": ((1, 2, 2), {"num_microbatches": 4, "schedule": "zb-h1", "remat": True}),
    "mpmd": ((2, 2, 1), {"num_microbatches": 4, "executor": "mpmd"}),
}


@partial(jax.jit, static_argnums=(0, 1))
def reference(model, loss, params, batch):
    """The loss and gradients of one device."""
    return jax.value_and_grad(lambda params: jnp.divide(*loss(model.apply(params, batch), batch)))(
        params
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("run", quick(RUNS))
def test_a_backward_pass_that_clips_cotangents_gives_the_gradients_of_one_device(x64, run):
    (data, stage, tensor), settings = RUNS[run]
    mesh, params, batch = (
        jaxpar.make_mesh(data=data, stage=stage, tensor=tensor),
        tiny.make_params(3),
        batch_of(3),
    )
    value_and_grad = jaxpar.value_and_grad(CLIPPING, tiny.loss, mesh, **settings)
    got = value_and_grad(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    want = reference(CLIPPING, tiny.loss, params, batch)
    assert_same(got, want)
    assert distance(want[1], tiny.reference(params, batch)[1]) > 0.1, (
        "the bound must clip, or nothing is tested"
    )


def batch_of(seed):
    return tiny.make_batch(seed, np.float64)


# --- where a weight may come from --------------------------------------------------------------------------------------

CARRYING = jaxpar.LayeredModel(
    lambda outer, batch: {"h": tiny.MODEL.embed(outer, batch), "weight": jnp.sqrt(batch["weight"])},
    lambda params, x: x | {"h": tiny.MODEL.layer(params, x["h"])},
    lambda outer, x: {"logits": tiny.MODEL.head(outer, x["h"]), "weight": x["weight"] ** 2},
)


def loss_of_carried(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs["logits"], batch["label"], outputs["weight"])


@pytest.mark.parametrize(
    "model",
    [pytest.param(CARRYING, marks=pytest.mark.full), CARRYING.apply],
    ids=["layered", "plain"],
)
def test_a_weight_may_travel_through_the_model(x64, model):
    mesh, params, batch = jaxpar.make_mesh(data=2), tiny.make_params(1), batch_of(1)
    value_and_grad = jaxpar.value_and_grad(model, loss_of_carried, mesh, num_microbatches=2)
    want = reference(CARRYING, loss_of_carried, params, batch)
    assert_same(value_and_grad(params, batch), want)


@pytest.mark.full
def test_a_weight_travels_through_a_pipeline_of_packed_layers(x64):
    mesh, params, batch = jaxpar.make_mesh(stage=2), tiny.make_params(1), batch_of(1)
    value_and_grad = jaxpar.value_and_grad(CARRYING, loss_of_carried, mesh, num_microbatches=4)
    want = reference(CARRYING, loss_of_carried, params, batch)
    assert_same(value_and_grad(params, batch), want)


@pytest.mark.parametrize(
    "confidence",
    [
        lambda logits: jax.lax.stop_gradient(jax.nn.softmax(logits).max(-1)),
        lambda logits: jnp.argmax(logits, -1) > 1,
    ],
    ids=["stop_gradient", "counted"],
)
@pytest.mark.parametrize("model", [tiny.MODEL, tiny.MODEL.apply], ids=["layered", "plain"])
def test_a_weight_that_depends_on_the_outputs_is_refused(model, confidence):
    def loss(outputs, batch):
        return jaxpar.losses.softmax_cross_entropy(
            outputs, batch["label"], batch["weight"] * confidence(outputs)
        )

    value_and_grad = jaxpar.value_and_grad(model, loss, jaxpar.make_mesh(data=2))
    with pytest.raises(
        ValueError,
        match=r"batch alone.*got a loss whose weight_sum depends on the outputs. Compute it",
    ):
        value_and_grad(tiny.make_params(), tiny.make_batch())


@pytest.mark.parametrize(
    "weigh",
    [
        lambda o, b: 3.0,
        lambda o, b: jnp.float32(o.size),
        lambda o, b: jnp.sum(jnp.ones_like(o)),
        lambda o, b: b["weight"].sum(),
    ],
    ids=["constant", "size", "ones_like", "batch"],
)
def test_a_weight_that_reads_no_output_is_accepted(weigh):
    params, batch = tiny.make_params(), tiny.make_batch()
    traced = trace_loss(
        tiny.MODEL,
        lambda o, b: (o.sum(), weigh(o, b)),
        jaxpar.make_mesh(data=1),
        1,
        "spmd",
        params,
        batch,
    )
    assert_same(
        np.float32(traced.weight_of_rows(batch)),
        np.float32(weigh(jnp.ones((32, 5)), batch)),
        within=1e-6,
    )


def test_the_weight_runs_nothing_of_the_model():
    params, batch = tiny.make_params(), tiny.make_batch()
    traced = trace_loss(tiny.MODEL, tiny.loss, jaxpar.make_mesh(data=1), 1, "spmd", params, batch)
    names = {
        equation.primitive.name
        for equation in equations(jax.make_jaxpr(traced.weight_of_rows)(batch))
    }
    assert "reduce_sum" in names
    assert names.isdisjoint({"dot_general", "exp", "log", "max", "scan"})


# --- losses and weights in 16 bits --------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        ("replicas", jnp.float16),
        ("layer by layer", jnp.float16),
        ("zero 3", jnp.bfloat16),
        ("1f1b", jnp.float16),
        ("mpmd", jnp.bfloat16),
    ],
)
def test_a_total_weight_that_16_bits_cannot_hold_leaves_the_gradients_right(run, dtype):
    (data, stage, _), settings = RUNS[run]
    mesh = jaxpar.make_mesh(data=data, stage=stage)
    narrow = lambda tree: jax.tree.map(
        lambda a: np.asarray(a, dtype) if a.dtype == np.float32 else a, tree
    )
    params, batch = narrow(tiny.make_params(5)), narrow(tiny.make_batch(5))
    batch["weight"] = (128 * (8 + np.arange(tiny.NUM_ROWS))).astype(dtype)
    assert (
        batch["weight"].astype(np.float32).sum()
        > 65_504
        > batch["weight"].astype(np.float32)[-8:].sum()
    )

    def loss(outputs, batch):
        each = jax.nn.log_softmax(outputs)[jnp.arange(len(outputs)), batch["label"]].astype(
            np.float32
        )
        return -jnp.sum(each * batch["weight"]), jnp.sum(batch["weight"])

    value_and_grad = jaxpar.value_and_grad(tiny.MODEL, loss, mesh, **settings)
    value, grads = value_and_grad(params, batch)
    wide = lambda tree: jax.tree.map(
        lambda a: np.asarray(a, np.float32) if a.dtype == dtype else a, tree
    )
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, params), (
        "gradients are like params"
    )
    want = reference(tiny.MODEL, loss, wide(params), wide(batch))
    within = 0.1 if dtype == jnp.bfloat16 else 0.02
    assert_same(wide((value, grads)), wide(jaxpar.fetch(want)), within=within)


def reductions(jaxpr):
    """The dtype and shape of each value that an explicit reduction over the mesh adds up."""
    for equation in equations(jaxpr):
        if (
            equation.primitive.name.startswith("psum")
            or equation.primitive.name == "reduce_scatter"
        ):
            yield from ((v.aval.dtype, v.aval.shape) for v in equation.invars)


SIXTEEN_BIT_RUNS = [
    pytest.param(mesh, zero, settings, marks=marks)
    for mesh, zero, settings, marks in (
        ((2, 2, 2), 0, {}, pytest.mark.slow),
        ((2, 2, 2), 3, {"schedule": "zb-h1"}, []),
        ((4, 1, 2), 3, {}, []),
        ((2, 1, 1), 0, {"overlap_grad_reduce": True}, []),
        ((2, 1, 2), 1, {"overlap_grad_reduce": True}, []),
        ((4, 1, 1), 2, {"remat": True}, []),
        ((2, 2, 2), 1, {"schedule": "zb-v"}, pytest.mark.slow),
        ((2, 2, 2), 2, {"schedule": "interleaved"}, pytest.mark.slow),
        ((2, 4, 1), 3, {"remat": True}, pytest.mark.slow),
    )
]


def sixteen_bit_step(mesh, zero, settings):
    mesh = jaxpar.make_mesh(**dict(zip(("data", "stage", "tensor"), mesh, strict=True)))
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), deep_params())
    shardings = tiny.shardings(mesh, params)
    step = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, zero=zero, shardings=shardings, num_microbatches=4, **settings
    )
    return mesh, step, jaxpar.shard(params, shardings), jaxpar.shard_batch(tiny.make_batch(), mesh)


def deep_params():
    return jaxpar.fetch(init_params(DEEP, jax.random.key(0)))


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(("mesh", "zero", "settings"), SIXTEEN_BIT_RUNS)
def test_no_step_reduces_in_16_bits(mesh, zero, settings):
    mesh, step, params, batch = sixteen_bit_step(mesh, zero, settings)
    found = list(reductions(jax.make_jaxpr(step)(params, batch).jaxpr))
    assert len(found) > 2, "gradients are reduced"
    assert {dtype.itemsize for dtype, _ in found} == {4}, found
    compiled = jax.jit(step).lower(params, batch).compile()
    value, grads = compiled(
        params, batch
    )  # XLA's CPU backend aborts the process on a reduction in 16 bits
    assert not re.search(
        r"= \(?(bf16|f16)\[[^=]*(all-reduce|reduce-scatter)(-start)?\(", compiled.as_text()
    )
    assert np.isfinite(np.float32(value)), grads


def test_gradients_travel_in_16_bits_where_they_are_told_to(monkeypatch):
    monkeypatch.setattr(
        "jaxpar.step.settings.check_reduce_dtype", lambda dtype, mesh: None
    )  # compiles nothing here
    by_layer = {"overlap_grad_reduce": True}
    runs = (
        ((2, 2, 2), {}),
        ((4, 1, 1), by_layer),
        ((4, 1, 2), by_layer | {"zero": 1}),
        ((4, 1, 2), {"zero": 3}),
    )
    for mesh, settings in runs:
        zero = settings.pop("zero", 0)
        mesh, step, params, batch = sixteen_bit_step(
            mesh, zero, settings | {"grad_reduce_dtype": jnp.bfloat16}
        )
        found = list(reductions(jax.make_jaxpr(step)(params, batch).jaxpr))
        assert {dtype.itemsize for dtype, shape in found if shape == ()} == {4}, (
            "loss and weight stay in 32 bits"
        )
        over_data = [dtype for dtype, shape in found if shape]
        assert jnp.dtype(jnp.bfloat16) in over_data


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16"])
def test_a_reduction_in_16_bits_is_refused_on_cpu(dtype):
    with pytest.raises(
        ValueError,
        match=r"CPU backend cannot reduce in fewer than 32 bits; got grad_reduce_dtype=.*float16 on",
    ):
        jaxpar.value_and_grad(
            tiny.MODEL, tiny.loss, jaxpar.make_mesh(data=2), grad_reduce_dtype=dtype
        )


@pytest.mark.parametrize(
    ("dtype", "named"), [(jnp.int32, "int32"), ("half a float", "'half a float'")]
)
def test_a_reduction_in_what_is_no_float_is_refused(dtype, named):
    with pytest.raises(
        ValueError,
        match=f"must be a floating-point dtype; got {named}. Use jnp.bfloat16, or leave it out",
    ):
        jaxpar.value_and_grad(
            tiny.MODEL, tiny.loss, jaxpar.make_mesh(data=2), grad_reduce_dtype=dtype
        )
