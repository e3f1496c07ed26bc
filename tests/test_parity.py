"""The proof: every parallel run gives the numbers of ``jax.value_and_grad`` on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from tests.support import tiny
from tests.support.covering import covering
from tests.support.oracle import assert_same
from tests.support.tiers import quick

MESHES = [(data, tensor) for data in (1, 2, 4, 8) for tensor in (1, 2, 4, 8) if data * tensor <= 8]
LARGEST = [(data, tensor) for data, tensor in MESHES if data * tensor == 8]
SMALLER = [mesh for mesh in MESHES if mesh not in LARGEST]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("data", "tensor", "num_microbatches"),
    quick(
        [(*mesh, num_microbatches) for mesh in LARGEST for num_microbatches in (1, 4)]
        + [
            pytest.param(*mesh, 1, marks=() if mesh[0] == mesh[1] else pytest.mark.slow)
            for mesh in SMALLER
        ],
        7,
    ),
)
def test_loss_and_gradients_equal_one_device_in_float64(x64, data, tensor, num_microbatches):
    seed = tiny.fresh_seed()
    mesh = jaxpar.make_mesh(data=data, tensor=tensor)
    params, batch = tiny.make_params(seed), tiny.make_batch(seed, np.float64)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, num_microbatches=num_microbatches
    )
    got = jax.jit(value_and_grad)(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, tiny.reference(params, batch), message=f"seed {seed}")


def three_steps(mesh, optimizer, params, batches, *, num_microbatches=2):
    """The state after a step a batch on a mesh, the losses on the way, and the params of the same steps on one device."""
    constant = lambda _: jax.tree.map(
        jnp.asarray, params
    )  # how values are drawn is tested in test_train.py
    state = jaxpar.init_state(
        constant, jax.random.key(0), optimizer, mesh, tiny.shardings(mesh, params)
    )
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, num_microbatches=num_microbatches
    )
    train_step = jaxpar.make_train_step(value_and_grad, optimizer)
    update = jax.jit(optimizer.update)
    opt_state = optimizer.init(params)
    losses, reference_losses = [], []
    for batch in batches:
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        losses.append(float(metrics["loss"]))
        value, grads = tiny.reference(params, batch)
        reference_losses.append(float(value))
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return state, losses, params, reference_losses


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": tiny.ADAM,
}
EACH_ONCE = zip(("adam", "sgd", "momentum", "adam"), LARGEST, strict=True)


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(("name", "sizes"), covering(EACH_ONCE, OPTIMIZERS, LARGEST))
def test_parameters_after_three_steps_equal_one_device_in_float64(x64, name, sizes):
    seed, optimizer = tiny.fresh_seed(), OPTIMIZERS[name]
    mesh = jaxpar.make_mesh(data=sizes[0], tensor=sizes[1])
    batches = [tiny.make_batch(seed + step, np.float64) for step in range(3)]
    state, losses, params, want = three_steps(mesh, optimizer, tiny.make_params(seed), batches)
    assert_same(state.params, params, within=1e-10, message=f"seed {seed}")
    assert_same(losses, want, within=1e-6, message=f"seed {seed}")  # metrics are float32


@pytest.mark.full
@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (2, 4)])
def test_loss_and_sgd_parameters_equal_one_device_in_float32(data, tensor):
    seed = tiny.fresh_seed()
    mesh = jaxpar.make_mesh(data=data, tensor=tensor)
    batches = [tiny.make_batch(seed + step) for step in range(3)]
    state, losses, params, want = three_steps(mesh, optax.sgd(0.1), tiny.make_params(seed), batches)
    assert_same(losses, want, within=1e-5, message=f"seed {seed}")
    assert_same(state.params, params, within=1e-5, message=f"seed {seed}")
