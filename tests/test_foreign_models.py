"""Models as others write them: Python numbers, empty arrays, host callbacks and constraints work, or are refused plainly."""

import ast
import re

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._compat import EMPTY_ARRAYS_CRASH
from tests.support.oracle import assert_same

RNG = np.random.default_rng(0)
NUM_ROWS, WIDTH, NUM_LAYERS = 8, 4, 2
LAYERS = {"w": RNG.normal(size=(NUM_LAYERS, WIDTH, WIDTH)) / 2}
PARAMS = {
    "outer": {"w": RNG.normal(size=(3, WIDTH)), "out": RNG.normal(size=(WIDTH, 2))},
    "layers": LAYERS,
}
BATCH = {
    "x": RNG.normal(size=(NUM_ROWS, 3)),
    "y": RNG.normal(size=(NUM_ROWS, 2)),
    "weight": RNG.uniform(size=NUM_ROWS),
}

RUNS = {
    "replicas": ({"data": 2}, {"num_microbatches": 2}),
    "1f1b": ({"stage": 2}, {"num_microbatches": 2}),
    "mpmd": ({"stage": 2}, {"num_microbatches": 2, "executor": "mpmd"}),
    "zero 3": ({"data": 2, "stage": 2}, {"num_microbatches": 2, "zero": 3}),
}


def embed(outer, batch):
    return batch["x"] @ outer["w"]


def layer(params, x):
    return jnp.tanh(x @ params["w"])


def head(outer, x):
    return x @ outer["out"]


def loss(outputs, batch):
    return jaxpar.losses.squared_error(outputs, batch["y"], batch["weight"])


MODEL = jaxpar.LayeredModel(embed, layer, head)


def run(model, run, params=PARAMS, loss=loss):
    axes, settings = RUNS[run] if isinstance(run, str) else run
    return jaxpar.value_and_grad(model, loss, jaxpar.make_mesh(**axes), **settings)(params, BATCH)


def reference(model, params=PARAMS, loss=loss):
    return jax.jit(
        jax.value_and_grad(lambda params: jnp.divide(*loss(model.apply(params, BATCH), BATCH)))
    )(params)


# --- what works -------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "mpmd"])
def test_python_numbers_may_travel_between_layers(x64, name):
    model = jaxpar.LayeredModel(
        lambda outer, batch: {"h": embed(outer, batch), "penalty": 0.0, "depth": 0},
        lambda params, x: {
            "h": layer(params, x["h"]),
            "penalty": x["penalty"] + jnp.sum(params["w"] ** 2),
            "depth": x["depth"] + 1,
        },
        lambda outer, x: (head(outer, x["h"]) * x["depth"], x["penalty"]),
    )

    def penalised(outputs, batch):
        loss_sum, weight_sum = loss(outputs[0], batch)
        return loss_sum + 0.1 * outputs[1] * weight_sum, weight_sum

    assert_same(run(model, name, loss=penalised), reference(model, loss=penalised))


@pytest.mark.parametrize("name", ["1f1b", "zero 3"])
def test_arrays_without_elements_have_gradients_without_elements(x64, name):
    layers = LAYERS | {"none": np.zeros((NUM_LAYERS, 0, WIDTH))}
    outer = PARAMS["outer"] | {"rows": np.zeros((0, WIDTH)), "unread": np.zeros((0, 0))}
    model = jaxpar.LayeredModel(
        lambda outer, batch: embed(outer, batch) + outer["rows"].sum(0)[None],
        lambda params, x: layer(params, x + params["none"].sum(0)[None]),
        head,
    )
    params = {"outer": outer, "layers": layers}
    if EMPTY_ARRAYS_CRASH:
        with pytest.raises(
            ValueError,
            match=r"without elements.*got layers/none of shape \(2, 0, 4\), outer/rows of .*, outer/unread of .*Leave them",
        ):
            run(model, name, params)
    else:
        assert_same(run(model, name, params), reference(model, params))


@pytest.mark.parametrize("masks", [True, False])
def test_activations_and_columns_without_elements_travel_through_a_pipeline(x64, masks):
    """Where idle ops are masked, stages share the head, and each takes a part of what it reads."""
    carries = lambda params, x: {"h": layer(params, x["h"]), "none": x["none"]}
    model = jaxpar.LayeredModel(
        lambda outer, batch: {"h": embed(outer, batch), "none": batch["none"]},
        carries,
        lambda outer, x: head(outer, x["h"] + x["none"].sum(-1, keepdims=True)),
    )
    mesh = jaxpar.make_mesh(stage=2, devices=jax.devices()[:2])
    shardings = jaxpar.shardings_from_paths(PARAMS, mesh, {"**": jaxpar.replicated()})
    pipeline = jaxpar.Pipeline(num_microbatches=2, mask_idle_ops=masks)
    step = jaxpar.value_and_grad(model, loss, jaxpar.Parallel(mesh, shardings), pipeline)
    batch = BATCH | {
        "none": np.zeros((len(jax.tree.leaves(BATCH)[0]), 0)),
        "unread": np.zeros((len(jax.tree.leaves(BATCH)[0]), 0)),
    }
    got = jax.jit(step)(jaxpar.shard(PARAMS, shardings), jaxpar.shard_batch(batch, mesh))
    whole = lambda params: (lambda sums: sums[0] / sums[1])(loss(model.apply(params, batch), batch))
    assert_same(got, jax.value_and_grad(whole)(PARAMS))


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "zero 3" else n
        for n in (*RUNS, "layer by layer")
    ],
)
def test_strict_promotion_and_leak_checks_find_nothing(x64, name):
    chosen = (
        ({"data": 2}, {"num_microbatches": 2, "overlap_grad_reduce": True})
        if name == "layer by layer"
        else name
    )
    want = reference(MODEL)
    with jax.numpy_dtype_promotion("strict"), jax.checking_leaks():
        assert_same(run(MODEL, chosen), want)


@pytest.mark.full
@pytest.mark.parametrize("constrains", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ["1f1b", "mpmd"])
def test_a_mesh_may_be_set_around_the_call(x64, name, constrains):
    (axes, settings), spec = RUNS[name], P(None, "tensor")
    constrained = lambda params, x: layer(params, jax.lax.with_sharding_constraint(x, spec))
    model = jaxpar.LayeredModel(embed, constrained if constrains else layer, head)
    with jax.set_mesh(jaxpar.make_mesh(**axes, tensor=2)):
        assert_same(run(model, (axes | {"tensor": 2}, settings)), reference(MODEL))


@pytest.mark.parametrize(
    "name",
    [
        "replicas",
        pytest.param("1f1b", marks=pytest.mark.full),
        pytest.param("mpmd", marks=pytest.mark.full),
        pytest.param("zero 3", marks=pytest.mark.slow),
    ],
)
def test_a_host_callback_runs_where_tensor_is_1(name):
    def calling(params, x):
        h = layer(params, x)
        sign = jax.pure_callback(
            np.sign, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h)
        )
        return h + sign * h

    plain = jaxpar.LayeredModel(
        embed, lambda params, x: (h := layer(params, x)) + jnp.sign(h) * h, head
    )
    assert_same(run(jaxpar.LayeredModel(embed, calling, head), name), reference(plain), within=1e-5)


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_list_of_layers_may_be_cut_over_data(x64, zero):
    layers = [{"w": w} for w in LAYERS["w"]]
    params = PARAMS | {"layers": layers}
    assert_same(
        run(MODEL, ({"data": 2}, {"num_microbatches": 2, "zero": zero}), params),
        reference(MODEL, params),
    )


# --- what is refused --------------------------------------------------------------------------------------------------


def referring(function):
    def refers(params, x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x
        return function(params, ref[...])

    return refers


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (jaxpar.LayeredModel(embed, referring(layer), head), "replicas"),
        (jaxpar.LayeredModel(embed, layer, referring(head)), "replicas"),
        (jaxpar.LayeredModel(embed, referring(layer), head).apply, "replicas"),
        (jaxpar.LayeredModel(embed, referring(layer), head), "1f1b"),
        (jaxpar.LayeredModel(embed, referring(layer), head), "mpmd"),
    ],
    ids=["layer", "head", "plain", "1f1b", "mpmd"],
)
def test_references_are_refused(model, name):
    with pytest.raises(
        ValueError,
        match=r"must be a pure function.*got one that uses jax.new_ref. Return the new value",
    ):
        run(model, name)


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize("callback", [jax.pure_callback, jax.experimental.io_callback])
def test_a_host_callback_beside_a_tensor_axis_is_refused(callback, executor):
    def calling(params, x):
        h = layer(params, x)
        return h + callback(
            np.sign, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h)
        )

    axes, settings = {"stage": 2, "tensor": 2}, {"num_microbatches": 2, "executor": executor}
    message = rf"no mesh axis is automatic.*got jax.{callback.__name__} and tensor=2. Use a mesh with tensor=1, or"
    with pytest.raises(ValueError, match=message):
        run(jaxpar.LayeredModel(embed, calling, head), (axes, settings))


@pytest.mark.parametrize(
    ("spec", "executor", "message"),
    [
        (
            P("data"),
            "spmd",
            r"must not name data or stage, .* got P.*data.*\. Leave these axes out of the spec",
        ),
        (
            P(("stage", "tensor")),
            "spmd",
            r"must not name data or stage, .* Leave these axes out of the spec",
        ),
        (
            P(None, "tensor"),
            "mpmd",
            r"own devices; got .* on the whole mesh .* PartitionSpec alone, under jax.set_mesh",
        ),
    ],
)
def test_a_constraint_that_a_step_cannot_heed_is_refused(spec, executor, message):
    axes = {"data": 2, "stage": 2, "tensor": 2}
    sharding = NamedSharding(jaxpar.make_mesh(**axes), spec)
    constrained = lambda params, x: layer(params, jax.lax.with_sharding_constraint(x, sharding))
    with pytest.raises(ValueError, match=message):
        run(
            jaxpar.LayeredModel(embed, constrained, head),
            (axes, {"num_microbatches": 2, "executor": executor}),
        )


@pytest.mark.parametrize("name", ["replicas", "1f1b", "mpmd"])
@pytest.mark.parametrize("leaf", [np.arange(NUM_LAYERS, dtype=np.int32), np.ones(NUM_LAYERS, bool)])
def test_params_without_gradients_are_refused(name, leaf):
    params = PARAMS | {"layers": LAYERS | {"leaf": leaf}}
    with pytest.raises(
        TypeError,
        match=rf"floating-point or complex.*got layers/leaf of dtype {leaf.dtype}. Leave it out of trainable=, which then",
    ) as raised:
        run(MODEL, name, params)
    named = re.search(r"shardings, trainable=(\[.*?\])\)", str(raised.value))
    assert named is not None
    trained = jaxpar.trainable.trained_part(params, ast.literal_eval(named[1]))
    assert trained == params | {"layers": params["layers"] | {"leaf": None}}


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_plain_function_may_have_params_named_like_those_of_a_layered_model(x64, zero):
    mesh = jaxpar.make_mesh(data=4)
    shardings = jaxpar.shardings_from_paths(PARAMS, mesh, {"outer/*": P(), "layers/*": P()})
    first = (
        lambda _: jax.tree.map(jnp.asarray, PARAMS),
        jax.random.key(0),
        optax.sgd(0.1),
        mesh,
        shardings,
    )
    params = jaxpar.init_state(*first, zero=zero).params
    value_and_grad = jaxpar.value_and_grad(MODEL.apply, loss, mesh, zero=zero, shardings=shardings)
    assert_same(value_and_grad(params, BATCH), reference(MODEL))


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_plain_function_reads_all_of_a_param_that_zero_cuts(x64, zero):
    """It sums over the layers, which has a value for a part of them too: a part gives a wrong loss rather than an error."""
    model = lambda params, batch: (
        batch["x"] @ params["outer"]["w"] @ params["outer"]["out"] * jnp.sum(params["layers"]["w"])
    )
    assert_same(run(model, ({"data": 4}, {"zero": zero})), reference_of(model))


def reference_of(model):
    return jax.jit(
        jax.value_and_grad(lambda params: jnp.divide(*loss(model(params, BATCH), BATCH)))
    )(PARAMS)
