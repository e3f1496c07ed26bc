"""The MPMD executor: the numbers of one device, no more memory than the schedule says, layers of any kind."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import tiny_gpt
from oracle import assert_same, assert_same_bits, cast

import jaxpar
from jaxpar.pipeline.mpmd import executor as mpmd
from jaxpar.pipeline.mpmd.submeshes import RestSharding, submeshes
from jaxpar.schedule import Schedule, make_schedule, simulate

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


# What a step costs.


class Bookkeeping(mpmd._Step):
    """A step that only keeps its books: each op makes names in place of arrays."""

    def __init__(self, schedule):
        self.pipeline = types.SimpleNamespace(schedule=schedule)
        self.arrived, self.stored = {}, [{} for _ in range(schedule.num_stages)]
        self.ran, self.most = [[] for _ in self.stored], [0 for _ in self.stored]

    def run_op(self, stage, op):
        super().run_op(stage, op)
        self.ran[stage].append(op)
        self.most[stage] = max(self.most[stage], len(self.stored[stage]))

    def call(self, op, part, stage, own):
        schedule = self.pipeline.schedule
        last = part == schedule.num_virtual_stages - 1
        stored = {"residuals_b": [op], "residuals_w": [op]}
        needs = {
            "F": {"x"} if part else set(),
            "R": {"x"} if part else set(),
            "B": {"ct", "residuals_b", "residuals_w"},
            "W": {"residuals_w", "cotangents_w"},
        }
        assert set(own) == needs[op.kind], f"{op} of part {part} reads {set(own)}"
        made = {
            "F": ({"ct": [op]} if last else {"x": [op]}) | ({} if schedule.recomputes else stored),
            "R": stored,
            "B": ({"ct": [op]} if part else {}) | ({"cotangents_w": [op]} if schedule.splits_backward else {}),
            "W": {},
        }
        return made[op.kind]

    def send(self, name, arrays, part, to, microbatch):
        self.arrived[name, to, microbatch] = arrays


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_stage_stores_what_the_schedule_says_in_its_order_and_lets_go_of_all(name, remat):
    schedule = make_schedule(name, 4, 8, 2 if name in ("interleaved", "zb-v") else 1, remat=remat)
    step = Bookkeeping(schedule)
    step.walk()
    assert tuple(step.most) == simulate(schedule).peak_residuals
    assert [tuple(order) for order in step.ran] == [schedule.order(stage) for stage in range(4)]
    assert not step.arrived
    assert not any(step.stored)


def test_live_arrays_do_not_grow_with_microbatches_and_a_second_step_compiles_nothing(monkeypatch):
    compiled, live = [], []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    run_op = mpmd._Step.run_op

    def count(step, stage, op):
        run_op(step, stage, op)
        live.append(len(jax.live_arrays()))

    monkeypatch.setattr(mpmd._Step, "run_op", count)
    mesh, params = jaxpar.make_mesh(stage=2), make_params(2, dtype=np.float32)
    peaks = {}
    for num_microbatches in (4, 8):
        batch = make_batch(rows=2 * num_microbatches, dtype=np.float32)
        value_and_grad = mpmd_value_and_grad(mesh, schedule="zb-h1", num_microbatches=num_microbatches)
        first = value_and_grad(params, batch)
        so_far, before = len(compiled), len(jax.live_arrays())
        live.clear()
        second = value_and_grad(params, batch)
        assert len(compiled) == so_far > 0, "the second step compiled again"
        assert_same_bits(second, first, message="the same step twice must give the same bits")
        peaks[num_microbatches] = max(live) - before
        del first, second, value_and_grad
    assert peaks[4] == peaks[8], f"live arrays at most, by microbatches: {peaks}"


def test_ops_reduce_nothing_over_data_and_each_stage_reduces_once_a_step(monkeypatch):
    texts = {}
    call = mpmd._Step.call

    def record(step, op, part, stage, own):
        sums = {name: step.sums[stage][name] for name in step.pipeline.virtual_stages[part].changes(op.kind)}
        whole = step.whole[stage] | {"index": step.pipeline.indices[stage][op.microbatch]}
        lowered = step.pipeline.ops[part, op.kind].lower(sums, whole, step.rows.get(part), own)
        texts.setdefault((part, op.kind), lowered.compile().as_text())
        return call(step, op, part, stage, own)

    monkeypatch.setattr(mpmd._Step, "call", record)
    reductions, jit_grads = [], mpmd.jit_grads

    def counting(*args):
        run = jit_grads(*args)

        def grads(*sums):
            reductions.append(run.lower(*sums).compile().as_text().count("all-reduce("))
            return run(*sums)

        return grads

    monkeypatch.setattr(mpmd, "jit_grads", counting)
    mesh, params = jaxpar.make_mesh(data=2, stage=2), make_params(2, dtype=np.float32)
    mpmd_value_and_grad(mesh, num_microbatches=1)(params, make_batch(dtype=np.float32))
    assert set(texts) == {(0, "F"), (0, "B"), (1, "F"), (1, "B")}
    for which, text in texts.items():
        assert "all-reduce" not in text, f"{which} reduces"
        assert "input_output_alias" in text, f"{which} does not add to its sums in place"
    assert reductions == [1, 1], "all-reduces of the two stages"


def test_params_at_rest_are_used_where_they_lie():
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    rest = RestSharding(jax.NamedSharding(mesh, jax.P("stage", None, "tensor")))
    array = jax.device_put(np.arange(32.0).reshape(4, 2, 4), rest.given)
    pieces = rest.pieces(array)
    assert [piece.sharding.mesh for piece in pieces] == list(submeshes(mesh))
    for stage, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, np.asarray(array)[2 * stage : 2 * stage + 2])
    where = lambda a: {shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards}
    assert where(pieces[0]) | where(pieces[1]) == where(array) == where(rest.join(pieces))


@pytest.mark.parametrize(
    "spec", [("stage", "tensor"), (("stage", "tensor"),), (("tensor", "stage"),), (None, "tensor")]
)
def test_what_is_gathered_on_a_stage_and_scattered_again_is_the_same(spec):
    rest = RestSharding(jax.NamedSharding(jaxpar.make_mesh(data=2, stage=2, tensor=2), jax.P(*spec)))
    host = np.arange(24.0).reshape(4, 6)
    whole = rest.gather(host, 1)
    np.testing.assert_array_equal(whole, host)
    assert whole.sharding.mesh == submeshes(rest.given.mesh)[1]
    back = rest.scatter(whole, 1)
    np.testing.assert_array_equal(back, host)
    assert back.sharding == rest.given


# What is refused.


def test_a_call_under_jit_is_refused():
    value_and_grad = mpmd_value_and_grad(jaxpar.make_mesh(stage=2))
    with pytest.raises(TypeError, match=r'executor="mpmd" dispatches .* got a traced argument.*Call it directly'):
        jax.jit(value_and_grad)(make_params(2), make_batch())


def test_a_mesh_over_several_processes_is_refused():
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(process_index=i) for i in (0, 1)]))
    told = r'drives all devices from one process; got .* processes \[0, 1\]. Use executor="spmd"'
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=told):
        mpmd._check_one_process(mesh)


def test_unlike_layers_are_refused_by_the_one_program_executor():
    params, batch = make_cnn()
    told = r'so their layers must be equal and stacked .*; got a list of 5 layers. Use executor="mpmd", or stage=1'
    mesh = jaxpar.make_mesh(stage=2)
    with pytest.raises(ValueError, match=told):
        jaxpar.value_and_grad(CNN, loss, mesh)
    model = jaxpar.LayeredModel(CNN.embed, lambda p, x: x, lambda outer, x: x["h"].reshape(ROWS, -1)[:, :CLASSES])
    with pytest.raises(ValueError, match=told):
        jaxpar.value_and_grad(model, loss, mesh)(params, batch)


@pytest.mark.parametrize(
    ("layer", "layers", "message"),
    [
        ([layer] * 3, [{}] * 2, "must have as many functions as params; got 3 functions and params for 2 layers. Give"),
        (
            [layer] * 2,
            {"w": np.ones((2, 3))},
            "must have a list of params under 'layers'.*got 2 functions and dict. Unstack",
        ),
        ([layer] * 2, [], 'every leaf under "layers" must have the same leading dim'),
    ],
)
def test_functions_and_params_of_unlike_layers_that_do_not_fit_are_refused(layer, layers, message):
    model = jaxpar.LayeredModel(embed, layer, head)
    with pytest.raises(ValueError, match=message):
        mpmd_value_and_grad(jaxpar.make_mesh(stage=2), model=model)(
            make_params(2) | {"layers": layers}, make_batch(dtype=np.float32)
        )


def test_rows_that_microbatches_do_not_divide_and_a_layout_of_other_layers_are_refused():
    mesh, params = jaxpar.make_mesh(stage=2), make_params(2)
    with pytest.raises(ValueError, match="must be divisible by the data axis times num_microbatches; got 10 rows"):
        mpmd_value_and_grad(mesh)(params, make_batch(rows=10))
    layout = jaxpar.LayerLayout(4, num_stages=2)
    with pytest.raises(ValueError, match=r"a layout must fit .* got layers=4 in the layout and 2 in the run"):
        mpmd_value_and_grad(mesh, layout=layout)(params, make_batch())


def test_an_order_that_breaks_a_dependency_is_refused():
    good = make_schedule("1f1b", 2, 2)
    bad = Schedule("backwards", 2, 2, 1, good.ops[::-1])
    with pytest.raises(ValueError, match="an op must come after what it needs"):
        mpmd_value_and_grad(jaxpar.make_mesh(stage=2), schedule=bad, num_microbatches=2)
