"""A step that would wait for ever is refused once it is compiled, before it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.pipeline import check_permutes

WIDTH = 4
KEY = jax.random.key(0)
REFUSED = r"must not slice, split, pad or flip a dim that the tensor axis cuts: .* got (split|slice)"


def in_one_dim(params, h):
    q, k, v = jnp.split(h @ params["qkv"], 3, axis=-1)
    return h + jnp.tanh(q * k + v)


def in_two_dims(params, h):
    q, k, v = jnp.einsum("bd,dnh->nbh", h, params["qkv"])
    return h + jnp.tanh(q * k + v)


def init(shape):
    return lambda key: {"outer": {}, "layers": {"qkv": jax.random.normal(key, (2, *shape), jnp.float64)}}


def loss(outputs, batch):
    return jnp.sum(outputs**2), jnp.float64(len(outputs))


def model_of(layer):
    return jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, lambda outer, h: h)


def make_step(layer, shape, spec, executor):
    """A step on two stages of two shards, its state, a batch, and the step of one device."""
    mesh, optimizer = jaxpar.make_mesh(stage=2, tensor=2), optax.sgd(1e-2)
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(init(shape), KEY), mesh, {"layers/qkv": spec})
    state = jaxpar.init_state(init(shape), KEY, optimizer, mesh, shardings)
    value_and_grad = jaxpar.value_and_grad(model_of(layer), loss, mesh, num_microbatches=2, executor=executor)
    batch = {"x": np.random.default_rng(0).normal(size=(4, WIDTH))}
    return jaxpar.make_train_step(value_and_grad, optimizer), state, jaxpar.shard_batch(batch, mesh)


FUSED = (in_one_dim, (WIDTH, 3 * WIDTH), PartitionSpec(None, "tensor"))
APART = (in_two_dims, (WIDTH, 3, WIDTH), PartitionSpec(None, None, "tensor"))


def test_a_fused_projection_that_is_split_over_tensor_is_refused(x64):
    step, state, batch = make_step(*FUSED, "spmd")
    with pytest.raises(ValueError, match=REFUSED):
        step(state, batch)
    with pytest.raises(ValueError, match=REFUSED):
        check_permutes(step.lower(state, batch).compile())


@pytest.mark.parametrize(("form", "executor"), [(APART, "spmd"), (FUSED, "mpmd")])
def test_what_the_message_names_gives_the_loss_of_one_device(x64, form, executor):
    layer, shape, _ = form
    step, state, batch = make_step(*form, executor)
    want = loss(model_of(layer).apply(init(shape)(KEY), jaxpar.fetch(batch)), jaxpar.fetch(batch))[0] / 4
    _, metrics = step(state, batch)
    oracle.assert_same(float(metrics["loss"]), float(want), within=1e-6)


def test_a_step_is_checked_once(x64, monkeypatch):
    checks = []
    monkeypatch.setattr("jaxpar.train.check_permutes", checks.append)
    step, state, batch = make_step(*APART, "spmd")
    for _ in range(3):
        state, _ = step(state, batch)
    assert len(checks) == 1
