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
REFUSED = (
    r"must not slice, split, pad or flip a dim that the tensor axis cuts: .* got (split|slice)"
)


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


def make_step(layer, shape, spec, executor="spmd", num_layers=2, **options):
    """A step on two stages of two shards, its state, and a batch."""
    mesh, optimizer, layout = (
        jaxpar.make_mesh(stage=2, tensor=2),
        optax.sgd(1e-2),
        jaxpar.LayerLayout(num_layers, 2),
    )
    first = init(shape, layout)
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(first, KEY), mesh, {"layers/qkv": spec})
    state = jaxpar.init_state(first, KEY, optimizer, mesh, shardings)
    options |= {"num_microbatches": 2, "executor": executor, "layout": layout}
    value_and_grad = jaxpar.value_and_grad(model_of(layer), loss, mesh, **options)
    batch = {"x": np.random.default_rng(0).normal(size=(4, WIDTH))}
    return jaxpar.make_train_step(value_and_grad, optimizer), state, jaxpar.shard_batch(batch, mesh)


FUSED = (in_one_dim, (WIDTH, 3 * WIDTH), PartitionSpec(None, "tensor"))
APART = (in_two_dims, (WIDTH, 3, WIDTH), PartitionSpec(None, None, "tensor"))


@pytest.mark.full
def test_a_fused_projection_that_is_split_over_tensor_is_refused(x64):
    step, state, batch = make_step(*FUSED)
    with pytest.raises(ValueError, match=REFUSED):
        step(state, batch)
    with pytest.raises(ValueError, match=REFUSED):
        check_permutes(step.lower(state, batch).compile())


@pytest.mark.full
def test_so_is_one_in_a_layer_that_one_stage_alone_has(x64):
    """Masked ticks have no branches, but the loop over the third layer is one that the other stage leaves earlier."""
    step, state, batch = make_step(*FUSED, num_layers=3, mask_idle_ops=True)
    with pytest.raises(ValueError, match=REFUSED):
        step(state, batch)


@pytest.mark.full
def test_where_all_stages_take_part_it_is_no_fault(x64):
    step, state, batch = make_step(*FUSED, mask_idle_ops=True)
    other, same, _ = make_step(*FUSED, executor="mpmd")
    oracle.assert_same(
        float(step(state, batch)[1]["loss"]), float(other(same, batch)[1]["loss"]), within=1e-6
    )


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


def test_a_permutation_of_a_line_search_is_not_told_as_one_of_a_layer():
    name = "jit(step)/while/body/cond/branch_0_fun/add"
    line = f'%permute = f32[4] collective-permute(%sum), metadata={{op_name="{name}"}}'
    with pytest.raises(ValueError, match=r"a line search, must not .* got add\. Use stage=1 or"):
        check_permutes(types.SimpleNamespace(as_text=lambda: line))
    inner = line.replace("branch_0_fun", "branch_0_fun/shard_map/while/cond")
    with pytest.raises(ValueError, match=r"a layer, head or loss must not .* got add\. Cut"):
        check_permutes(types.SimpleNamespace(as_text=lambda: f"{line}\n{inner}"))
