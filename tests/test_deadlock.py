"""A step that would wait for ever is refused once it is compiled, before it runs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.pipeline import check_permutes
from tests.support import oracle

WIDTH = 4
KEY = jax.random.key(0)
OPTIMIZER = optax.sgd(1e-2)
FULL = pytest.mark.full
REFUSED = r"must not slice, split, pad or flip a dim that is cut over tensor, .* got (split|slice)"


def in_one_dim(params, h):
    q, k, v = jnp.split(h @ params["qkv"], 3, axis=-1)
    return h + jnp.tanh(q * k + v)


def in_two_dims(params, h):
    q, k, v = jnp.einsum("bd,dnh->nbh", h, params["qkv"])
    return h + jnp.tanh(q * k + v)


def init(shape, layout):
    layers = lambda key: {"qkv": jax.random.normal(key, (layout.num_layers, *shape), jnp.float64)}
    return lambda key: layout.pack_params({"outer": {}, "layers": layers(key)})


def loss(outputs, batch):
    return jnp.sum(outputs**2), jnp.float64(len(outputs))


def model_of(layer):
    return jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, lambda outer, h: h)


def make_gradients(
    layer,
    shape,
    spec,
    executor="spmd",
    *,
    num_layers=2,
    optimizer=OPTIMIZER,
    num_chunks=1,
    **options,
):
    """The gradients on two stages of two shards, a state, and a batch."""
    mesh = jaxpar.make_mesh(stage=2, tensor=2)
    layout = jaxpar.LayerLayout(num_layers, 2, num_chunks)
    first = init(shape, layout)
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(first, KEY), mesh, {"layers/qkv": spec})
    parallel = jaxpar.Parallel(mesh, shardings, layout=layout)
    state = jaxpar.init_state(first, KEY, optimizer, parallel)
    options |= {"num_microbatches": 2, "executor": executor}
    pipeline = jaxpar.Pipeline(num_chunks=num_chunks if num_chunks > 1 else None, **options)
    value_and_grad = jaxpar.value_and_grad(model_of(layer), loss, parallel, pipeline)
    batch = {"x": np.random.default_rng(0).normal(size=(4, WIDTH))}
    return value_and_grad, state, jaxpar.shard_batch(batch, mesh)


def make_step(*given, **options):
    """A step of them, its state, and a batch."""
    value_and_grad, state, batch = make_gradients(*given, **options)
    return jaxpar.make_train_step(value_and_grad, OPTIMIZER), state, batch


FUSED = (in_one_dim, (WIDTH, 3 * WIDTH), PartitionSpec(None, "tensor"))
APART = (in_two_dims, (WIDTH, 3, WIDTH), PartitionSpec(None, None, "tensor"))
SKIPPING = {"schedule": "zb-h1"}  # in which a stage computes gradients of weights while others wait


@pytest.mark.full
def test_a_fused_projection_that_is_split_over_tensor_is_refused_where_stages_skip_ops(x64):
    step, state, batch = make_step(*FUSED, **SKIPPING)
    with pytest.raises(ValueError, match=REFUSED):
        step(state, batch)
    with pytest.raises(ValueError, match=REFUSED):
        check_permutes(step.lower(state, batch).compile())


@pytest.mark.parametrize("wrap", [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.full)])
def test_so_it_is_in_a_step_of_ones_own(x64, wrap):
    value_and_grad, state, batch = make_gradients(*FUSED, **SKIPPING)
    with pytest.raises(ValueError, match=REFUSED):
        wrap(value_and_grad)(state.params, batch)


@pytest.mark.full
def test_so_it_is_beside_a_side_effect_which_idle_stages_skip(x64):
    def layer(params, h):
        jax.debug.callback(lambda row: None, h[0])
        return in_one_dim(params, h)

    value_and_grad, state, batch = make_gradients(layer, *FUSED[1:])
    with pytest.raises(ValueError, match=REFUSED):
        jax.jit(value_and_grad)(state.params, batch)


@pytest.mark.full
def test_so_is_one_in_a_layer_that_one_stage_alone_has(x64):
    """Masked ticks have no branches, but the loop over the third layer is one that the other stage leaves earlier."""
    value_and_grad, state, batch = make_gradients(*FUSED, num_layers=3)
    with pytest.raises(ValueError, match=REFUSED):
        jax.jit(value_and_grad)(state.params, batch)
    step = jaxpar.make_train_step(value_and_grad, OPTIMIZER)
    with pytest.raises(ValueError, match=REFUSED):
        step(state, batch)


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(each, marks=FULL) for each in ("gpipe", "interleaved"))]
)
def test_where_all_stages_take_part_gradients_are_those_of_one_device(x64, schedule):
    chunks = 2 if schedule == "interleaved" else 1
    given = {"num_layers": 4, "num_chunks": chunks}
    value_and_grad, state, batch = make_gradients(*FUSED, schedule=schedule, **given)
    alone, rows = init(FUSED[1], jaxpar.LayerLayout(4, 1))(KEY), jaxpar.fetch(batch)
    mean = lambda params: loss(model_of(in_one_dim).apply(params, rows), rows)[0] / 4
    want, want_grads = jax.value_and_grad(mean)(alone)
    value, grads = jax.jit(value_and_grad)(state.params, batch)
    oracle.assert_same(float(value), float(want), within=1e-12)
    packed = jaxpar.LayerLayout(4, 2, chunks).pack_params(want_grads)
    oracle.assert_same(jaxpar.fetch(grads), jaxpar.fetch(packed), within=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(("form", "executor"), [(APART, "spmd"), (FUSED, "mpmd")])
def test_what_the_message_names_gives_the_loss_of_one_device(x64, form, executor):
    layer, shape, _ = form
    step, state, batch = make_step(*form, executor)
    params, rows = init(shape, jaxpar.LayerLayout(2, 1))(KEY), jaxpar.fetch(batch)
    want = loss(model_of(layer).apply(params, rows), rows)[0] / 4
    _, metrics = step(state, batch)
    oracle.assert_same(float(metrics["loss"]), float(want), within=1e-6)


@pytest.mark.full
def test_a_step_is_checked_once(x64, monkeypatch):
    checks = []
    monkeypatch.setattr("jaxpar.train.check_permutes", checks.append)
    step, state, batch = make_step(*APART)
    for _ in range(3):
        state, _ = step(state, batch)
    assert len(checks) == 1


@pytest.mark.full
def test_a_line_search_has_the_params_of_one_device(x64):
    """Its branches permute too: those of optax.lbfgs around the pipeline, which all devices take together."""
    optimizer = optax.lbfgs(memory_size=2)
    value_and_grad, state, batch = make_gradients(*APART, optimizer=optimizer)
    step = jaxpar.make_train_step(value_and_grad, optimizer)
    rows, alone = jaxpar.fetch(batch), init(APART[1], jaxpar.LayerLayout(2, 1))(KEY)
    mean = lambda params: loss(model_of(in_two_dims).apply(params, rows), rows)[0] / 4
    opt_state = optimizer.init(alone)
    for _ in range(3):
        state, _ = step(state, batch)
        value, grads = jax.value_and_grad(mean)(alone)
        further = {"value": value, "grad": grads, "value_fn": mean}
        updates, opt_state = optimizer.update(grads, opt_state, alone, **further)
        alone = optax.apply_updates(alone, updates)
    oracle.assert_same(jaxpar.fetch(state.params)["layers"], alone["layers"], within=1e-12)


def test_a_branch_around_the_pipeline_is_not_one_that_stages_skip():
    name = "jit(step)/while/body/cond/branch_0_fun/add"
    line = f'%permute = f32[4] collective-permute(%sum), metadata={{op_name="{name}"}}'
    check_permutes(types.SimpleNamespace(as_text=lambda: line))
    for inside in ("jit(step)/cond/shard_map/while/cond/add", "while/body/cond/add"):
        stuck = line.replace(name, inside)
        with pytest.raises(ValueError, match=r"a layer, head or loss must not .* got add\. Use"):
            check_permutes(types.SimpleNamespace(as_text=lambda stuck=stuck: stuck))
