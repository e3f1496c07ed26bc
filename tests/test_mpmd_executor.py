"""The MPMD executor: the numbers of one device, no more memory than the schedule says, layers of any kind."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from tests.support import tiny, tiny_gpt
from tests.support.oracle import assert_same, cast
from tests.support.tiny_uneven import (
    CNN,
    MODEL,
    ROWS,
    make_batch,
    make_cnn,
    make_params,
    mpmd_value_and_grad,
    on_mesh,
    reference,
)

# Their models have params that nothing reads.
pytestmark = pytest.mark.filterwarnings("ignore:a model's outputs must depend on a param")

# A cheap model with what a pipeline must carry: tied weights, integers and scalars in x, rows of uneven weight, an outer
# param that nothing reads.


def lie_like(grads, params):
    return all(jax.tree.leaves(jax.tree.map(lambda g, p: g.sharding == p.sharding, grads, params)))


@pytest.mark.parametrize(
    ("sizes", "schedule", "num_chunks", "num_layers", "remat"),
    [
        # Of those that are slow, zb-h1 and zb-v are in the tests of unlike layers.
        pytest.param((1, 4, 1), "zb-h1", 1, 4, False, marks=pytest.mark.slow),
        pytest.param((1, 8, 1), "zb-h1", 1, 8, False, marks=pytest.mark.slow),
        pytest.param((2, 4, 1), "1f1b", 1, 4, True, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), "interleaved", 2, 5, True, marks=pytest.mark.full),
        pytest.param((1, 4, 2), "interleaved", 2, 9, True, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), "zb-v", 2, 5, False, marks=pytest.mark.slow),
        pytest.param(
            (2, 2, 2),
            "gpipe",
            1,
            2,
            jax.checkpoint_policies.dots_saveable,
            id="(2, 2, 2)-gpipe-1-2-dots",
        ),
        pytest.param((1, 2, 4), "zb-h1", 1, 3, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_one_device_in_float64(
    x64, sizes, schedule, num_chunks, num_layers, remat
):
    data, stage, tensor = sizes
    mesh, seed = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor), tiny.fresh_seed()
    params, batch = make_params(num_layers, seed), make_batch(seed)
    value_and_grad = mpmd_value_and_grad(
        mesh, schedule=schedule, num_chunks=num_chunks, remat=remat
    )
    want = reference(MODEL)(params, batch)
    if num_layers % stage:  # layers that stage does not divide come from the host
        got = value_and_grad(params, batch)
    else:
        params, batch = on_mesh(mesh, params, batch)
        got = value_and_grad(params, batch)
        assert lie_like(got[1], params)
    assert_same(got, want, message=f"seed {seed}")


@pytest.mark.full
def test_attention_dropout_keys_and_tied_weights_on_three_axes(x64):
    mesh, seed = jaxpar.make_mesh(data=2, stage=2, tensor=2), tiny.fresh_seed()
    params, batch = tiny_gpt.make_params(num_layers=2, seed=seed), tiny_gpt.make_batch(seed=seed)
    want = tiny_gpt.reference(params, batch)
    value_and_grad = mpmd_value_and_grad(
        mesh, model=tiny_gpt.MODEL, loss=tiny_gpt.loss, num_microbatches=2
    )
    got = value_and_grad(tiny_gpt.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, want, message=f"seed {seed}")


@pytest.mark.full
def test_params_that_lie_packed_give_packed_gradients(x64):
    mesh, params, batch = jaxpar.make_mesh(stage=2), make_params(3), make_batch()
    layout = jaxpar.LayerLayout(3, num_stages=2, layers_per_virtual_stage=(1, 2))
    packed = params | {"layers": layout.pack(params["layers"])}
    at_rest, rows = on_mesh(mesh, packed, batch)
    value, grads = mpmd_value_and_grad(mesh, layout=layout)(at_rest, rows)
    assert lie_like(grads, at_rest)
    assert not any(leaf[1].any() for leaf in jax.tree.leaves(grads["layers"])), (
        "position 1 is padding"
    )
    got = value, grads | {"layers": layout.unpack(grads["layers"])}
    assert_same(got, reference(MODEL)(params, batch))


@pytest.mark.full
def test_layers_replicated_over_stage_or_cut_over_data_too_keep_their_sharding(x64):
    mesh, params, batch = jaxpar.make_mesh(data=2, stage=2), make_params(4), make_batch()
    place = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))
    shardings = {
        "layers": {
            "w_up": place(),
            "b_up": place("stage", "data"),
            "w_down": place("stage", None, "data"),
        },
        "outer": {
            "table": place("data", "stage"),
            "start": place(("data", "stage")),
            "unread": place(),
        },
    }
    at_rest = jaxpar.shard(params, shardings)
    got = mpmd_value_and_grad(mesh)(at_rest, jaxpar.shard_batch(batch, mesh))
    assert_same(got, reference(MODEL)(params, batch))
    assert lie_like(got[1], at_rest)


@pytest.mark.full
def test_float32_params_have_float32_gradients_and_so_have_bfloat16_ones():
    mesh = jaxpar.make_mesh(stage=2, tensor=2)
    params, batch = make_params(2, dtype=np.float32), make_batch(dtype=np.float32)
    mixed = params | {
        "outer": params["outer"] | {"table": params["outer"]["table"].astype(jnp.bfloat16)}
    }
    value, grads = mpmd_value_and_grad(mesh)(mixed, batch)
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, mixed)
    wide = lambda tree: cast(tree, np.float32)
    assert_same(wide((value, grads)), wide(reference(MODEL)(params, batch)), within=2e-2)


# Layers that are unlike each other: a CNN whose x changes shape and structure on its way.


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"data": 2, "stage": 2, "tensor": 2}, {"schedule": "zb-v"}),
        ({"data": 2, "stage": 3}, {"schedule": "1f1b", "remat": True}),
        ({"data": 4, "tensor": 2}, {}),
    ],
    ids=str,
)
def test_layers_unlike_each_other_give_the_gradients_of_one_device(x64, sizes, settings):
    mesh, seed = jaxpar.make_mesh(**sizes), tiny.fresh_seed()
    params, batch = make_cnn(seed)
    rules = {
        "layers/3/w": jaxpar.column_parallel(),
        "layers/4/w": jaxpar.row_parallel(),
        "**": jaxpar.replicated(),
    }
    at_rest, rows = on_mesh(mesh, params, batch, rules)
    got = mpmd_value_and_grad(mesh, model=CNN, **settings)(at_rest, rows)
    assert_same(got, reference(CNN)(params, batch), message=f"seed {seed}")


def test_one_function_may_serve_layers_of_varying_width(x64):
    rng = np.random.default_rng(0)
    widths = [3, 7, 5, 4]
    layers = [rng.normal(size=shape) for shape in itertools.pairwise(widths)]
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"], lambda w, x: jnp.tanh(x @ w), lambda outer, x: x
    )
    params, batch = (
        {"outer": {}, "layers": layers},
        make_batch() | {"x": rng.normal(size=(ROWS, 3))},
    )
    layout = jaxpar.LayerLayout(3, num_stages=2, layers_per_virtual_stage=(1, 2))
    got = mpmd_value_and_grad(
        jaxpar.make_mesh(stage=2), model=model, schedule="zb-h1", layout=layout
    )(params, batch)
    assert_same(got, reference(model)(params, batch))


def test_a_list_of_layers_lies_over_stage_at_rest_like_outer_params():
    params, _ = make_cnn()
    shardings = jaxpar.shardings_from_paths(
        params, jaxpar.make_mesh(stage=2), {"**": jaxpar.replicated()}
    )
    assert shardings["layers"][3]["w"].spec == jax.P(None, "stage")
    assert shardings["layers"][3]["b"].spec == jax.P()


@pytest.mark.full
def test_training_steps_equal_those_of_one_device(x64):
    mesh, optimizer, seed = jaxpar.make_mesh(data=2, stage=2), tiny.ADAM, tiny.fresh_seed()
    params, batch = make_cnn(seed)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    state = jaxpar.init_state(
        lambda _: jax.tree.map(jnp.asarray, params), jax.random.key(0), optimizer, mesh, shardings
    )
    train_step = jaxpar.make_train_step(
        mpmd_value_and_grad(mesh, model=CNN, num_microbatches=2), optimizer
    )
    opt_state, update = optimizer.init(params), tiny.update_on_one_device(optimizer)
    for _ in range(3):
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        value, grads = reference(CNN)(params, batch)
        assert_same(metrics["loss"], cast(value, np.float32), within=1e-6, message=f"seed {seed}")
        params, opt_state = update(grads, opt_state, params)
    assert_same(state.params, params, within=1e-10, message=f"seed {seed}")
    with pytest.raises(ValueError, match="only a step that is one program can be lowered"):
        train_step.lower(state, batch)
