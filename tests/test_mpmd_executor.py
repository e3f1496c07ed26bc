"""The MPMD executor: the numbers of one device, no more memory than the schedule says, layers of any kind."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from tests.support import tiny, tiny_gpt
from tests.support.oracle import assert_same, cast

ROWS, WIDTH, CLASSES = 16, 8, 4


# A cheap model with what a pipeline must carry: tied weights, integers and scalars in x, rows of uneven weight, an outer
# param that nothing reads.


def embed(outer, batch):
    return {
        "h": outer["table"][batch["token"]] + outer["start"][None],
        "row": batch["row"],
        "scale": outer["start"].sum(),
    }


def layer(p, x):
    h = jnp.tanh(x["h"] @ p["w_up"] + p["b_up"][None]) @ p["w_down"]
    return x | {"h": x["h"] * x["scale"] + jnp.where(x["row"] % 2 == 0, 1, 0.5)[:, None] * h}


def head(outer, x):
    return x["h"] @ outer["table"].T


MODEL = jaxpar.LayeredModel(embed, layer, head)
RULES = {
    "layers/w_up": jaxpar.column_parallel(),
    "layers/b_up": jaxpar.column_parallel(ndim=1),
    "layers/w_down": jaxpar.row_parallel(),
    "outer/*": jaxpar.replicated(),
}


def make_params(num_layers, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (0.5 * rng.normal(size=shape)).astype(dtype)
    up, down = draw(num_layers, WIDTH, WIDTH), draw(num_layers, WIDTH, WIDTH)
    return {
        "outer": {"table": draw(CLASSES, WIDTH), "start": draw(WIDTH), "unread": draw(4, 4)},
        "layers": {"w_up": up, "b_up": draw(num_layers, WIDTH), "w_down": down},
    }


def make_batch(seed=0, rows=ROWS, dtype=np.float64):
    rng = np.random.default_rng(seed)
    token, label = rng.integers(0, CLASSES, (2, rows)).astype(np.int32)
    weight = (rng.uniform(0, 2, rows) * (rng.uniform(size=rows) < 0.7) + 1e-3).astype(dtype)
    return {"token": token, "label": label, "weight": weight, "row": np.arange(rows, dtype=np.int32)}


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["label"], batch["weight"])


@functools.cache
def reference(model):
    def mean(params, batch):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))


def mpmd_value_and_grad(mesh, *, num_microbatches=4, model=MODEL, loss=loss, **settings):
    return jaxpar.value_and_grad(model, loss, mesh, num_microbatches=num_microbatches, executor="mpmd", **settings)


def on_mesh(mesh, params, batch, rules=RULES):
    shardings = jaxpar.shardings_from_paths(params, mesh, rules)
    return jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)


def lie_like(grads, params):
    return all(jax.tree.leaves(jax.tree.map(lambda g, p: g.sharding == p.sharding, grads, params)))


@pytest.mark.parametrize(
    ("sizes", "schedule", "num_chunks", "num_layers", "remat"),
    [
        ((1, 8, 1), "zb-h1", 1, 8, False),
        ((2, 4, 1), "1f1b", 1, 4, True),
        ((1, 4, 2), "interleaved", 2, 9, True),
        ((4, 2, 1), "zb-v", 2, 5, False),
        ((2, 2, 2), "gpipe", 1, 2, jax.checkpoint_policies.dots_saveable),
        ((1, 2, 4), "zb-h1", 1, 3, True),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_one_device_in_float64(x64, sizes, schedule, num_chunks, num_layers, remat):
    data, stage, tensor = sizes
    mesh, seed = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor), tiny.fresh_seed()
    params, batch = make_params(num_layers, seed), make_batch(seed)
    value_and_grad = mpmd_value_and_grad(mesh, schedule=schedule, num_chunks=num_chunks, remat=remat)
    want = reference(MODEL)(params, batch)
    if num_layers % stage:  # layers that stage does not divide come from the host
        got = value_and_grad(params, batch)
    else:
        params, batch = on_mesh(mesh, params, batch)
        got = value_and_grad(params, batch)
        assert lie_like(got[1], params)
    assert_same(got, want, message=f"seed {seed}")


def test_attention_dropout_keys_and_tied_weights_on_three_axes(x64):
    mesh, seed = jaxpar.make_mesh(data=2, stage=2, tensor=2), tiny.fresh_seed()
    params, batch = tiny_gpt.make_params(num_layers=2, seed=seed), tiny_gpt.make_batch(seed=seed)
    want = tiny_gpt.reference(params, batch)
    value_and_grad = mpmd_value_and_grad(mesh, model=tiny_gpt.MODEL, loss=tiny_gpt.loss, num_microbatches=2)
    got = value_and_grad(tiny_gpt.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, want, message=f"seed {seed}")


def test_params_that_lie_packed_give_packed_gradients(x64):
    mesh, params, batch = jaxpar.make_mesh(stage=2), make_params(3), make_batch()
    layout = jaxpar.LayerLayout(3, num_stages=2, layers_per_virtual_stage=(1, 2))
    packed = params | {"layers": layout.pack(params["layers"])}
    at_rest, rows = on_mesh(mesh, packed, batch)
    value, grads = mpmd_value_and_grad(mesh, layout=layout)(at_rest, rows)
    assert lie_like(grads, at_rest)
    assert not any(leaf[1].any() for leaf in jax.tree.leaves(grads["layers"])), "position 1 is padding"
    got = value, grads | {"layers": layout.unpack(grads["layers"])}
    assert_same(got, reference(MODEL)(params, batch))


def test_layers_replicated_over_stage_or_cut_over_data_too_keep_their_sharding(x64):
    mesh, params, batch = jaxpar.make_mesh(data=2, stage=2), make_params(4), make_batch()
    place = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))
    shardings = {
        "layers": {"w_up": place(), "b_up": place("stage", "data"), "w_down": place("stage", None, "data")},
        "outer": {"table": place("data", "stage"), "start": place(("data", "stage")), "unread": place()},
    }
    at_rest = jaxpar.shard(params, shardings)
    got = mpmd_value_and_grad(mesh)(at_rest, jaxpar.shard_batch(batch, mesh))
    assert_same(got, reference(MODEL)(params, batch))
    assert lie_like(got[1], at_rest)


def test_float32_params_have_float32_gradients_and_so_have_bfloat16_ones():
    mesh = jaxpar.make_mesh(stage=2, tensor=2)
    params, batch = make_params(2, dtype=np.float32), make_batch(dtype=np.float32)
    mixed = params | {"outer": params["outer"] | {"table": params["outer"]["table"].astype(jnp.bfloat16)}}
    value, grads = mpmd_value_and_grad(mesh)(mixed, batch)
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, mixed)
    wide = lambda tree: cast(tree, np.float32)
    assert_same(wide((value, grads)), wide(reference(MODEL)(params, batch)), within=2e-2)


# Layers that are unlike each other: a CNN whose x changes shape and structure on its way.


def conv(p, x):
    h = jax.lax.conv_general_dilated(x["h"], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x | {"h": jnp.tanh(h)}


def pool(p, x):
    return x | {"h": jax.lax.reduce_window(x["h"], 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")}


def flatten(p, x):
    return x["h"].reshape(len(x["h"]), -1), x["row"]


def dense(p, x):
    h, row = x
    return jnp.tanh(h @ p["w"] + p["b"][None]) * p["scale"], row


CNN = jaxpar.LayeredModel(
    lambda outer, batch: {"h": batch["image"] * outer["gain"], "row": batch["row"]},
    [conv, pool, flatten, dense, dense],
    lambda outer, x: x[0] @ outer["w"] * outer["gain"],
)


def make_cnn(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: 0.5 * rng.normal(size=shape)
    layers = [
        {"kernel": draw(3, 3, 1, 2)},
        {},
        {},
        {"w": draw(8, 6), "b": draw(6), "scale": draw()},
        {"w": draw(6, 4), "b": draw(4), "scale": draw()},
    ]
    batch = {"image": draw(ROWS, 4, 4, 1), "row": np.arange(ROWS, dtype=np.int32)}
    batch |= {"label": rng.integers(0, CLASSES, ROWS).astype(np.int32), "weight": rng.uniform(0.5, 2, ROWS)}
    return {"outer": {"gain": draw(), "w": draw(4, CLASSES)}, "layers": layers}, batch


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
    rules = {"layers/3/w": jaxpar.column_parallel(), "layers/4/w": jaxpar.row_parallel(), "**": jaxpar.replicated()}
    at_rest, rows = on_mesh(mesh, params, batch, rules)
    got = mpmd_value_and_grad(mesh, model=CNN, **settings)(at_rest, rows)
    assert_same(got, reference(CNN)(params, batch), message=f"seed {seed}")


def test_one_function_may_serve_layers_of_varying_width(x64):
    rng = np.random.default_rng(0)
    widths = [3, 7, 5, 4]
    layers = [rng.normal(size=shape) for shape in itertools.pairwise(widths)]
    model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], lambda w, x: jnp.tanh(x @ w), lambda outer, x: x)
    params, batch = {"outer": {}, "layers": layers}, make_batch() | {"x": rng.normal(size=(ROWS, 3))}
    layout = jaxpar.LayerLayout(3, num_stages=2, layers_per_virtual_stage=(1, 2))
    got = mpmd_value_and_grad(jaxpar.make_mesh(stage=2), model=model, schedule="zb-h1", layout=layout)(params, batch)
    assert_same(got, reference(model)(params, batch))


def test_a_list_of_layers_lies_over_stage_at_rest_like_outer_params():
    params, _ = make_cnn()
    shardings = jaxpar.shardings_from_paths(params, jaxpar.make_mesh(stage=2), {"**": jaxpar.replicated()})
    assert shardings["layers"][3]["w"].spec == jax.P(None, "stage")
    assert shardings["layers"][3]["b"].spec == jax.P()


def test_training_steps_equal_those_of_one_device(x64):
    mesh, optimizer, seed = jaxpar.make_mesh(data=2, stage=2), optax.adam(1e-2), tiny.fresh_seed()
    params, batch = make_cnn(seed)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    state = jaxpar.init_state(
        lambda _: jax.tree.map(jnp.asarray, params), jax.random.key(0), optimizer, mesh, shardings
    )
    train_step = jaxpar.make_train_step(mpmd_value_and_grad(mesh, model=CNN, num_microbatches=2), optimizer)
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(3):
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        value, grads = reference(CNN)(params, batch)
        assert_same(metrics["loss"], cast(value, np.float32), within=1e-6, message=f"seed {seed}")
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_same(state.params, params, within=1e-10, message=f"seed {seed}")
    with pytest.raises(ValueError, match="only a step that is one program can be lowered"):
        train_step.lower(state, batch)
