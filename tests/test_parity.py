"""The proof: every parallel run gives the numbers of ``jax.value_and_grad`` on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import mlp
from jaxpar.params import init_params

MESHES = [(data, tensor) for data in (1, 2, 4, 8) for tensor in (1, 2, 4, 8) if data * tensor <= 8]
RULES = {
    "layers/w_up": jaxpar.column_parallel(),
    "layers/b_up": jaxpar.column_parallel(ndim=1),
    "layers/w_down": jaxpar.row_parallel(),
    "layers/b_down": jaxpar.replicated(),
    "outer/*": jaxpar.replicated(),
}
NUM_ROWS, NUM_FEATURES, NUM_CLASSES = 32, 6, 5
TABLE = mlp.param_table(NUM_FEATURES, NUM_CLASSES, width=8, num_hidden=4)


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["label"], batch["weight"])


def make_batch(seed: int, dtype) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "features": rng.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(dtype),
        "label": rng.integers(0, NUM_CLASSES, NUM_ROWS).astype(np.int32),
        "weight": rng.uniform(0, 2, NUM_ROWS).astype(dtype) * (rng.uniform(size=NUM_ROWS) < 0.7),
    }


@jax.jit
def reference(params, batch):
    """The loss and gradients of one device."""

    def mean(params):
        total, weight = loss(mlp.MODEL.apply(params, batch), batch)
        return total / weight

    return jax.value_and_grad(mean)(params)


def on_mesh(mesh, params):
    return jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, RULES))


def relative(got, want) -> float:
    """The largest relative L2 difference over the leaves."""
    got, want = jaxpar.fetch(got), jaxpar.fetch(want)
    differences = jax.tree.map(
        lambda g, w: float(np.linalg.norm(g - w) / max(np.linalg.norm(w), np.finfo(w.dtype).tiny)), got, want
    )
    return max(jax.tree.leaves(differences))


def fresh_seed() -> int:
    return int(np.random.SeedSequence().entropy % 2**31)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(("data", "tensor"), MESHES)
def test_loss_and_gradients_equal_one_device_in_float64(x64, data, tensor, num_microbatches):
    seed = fresh_seed()
    mesh = jaxpar.make_mesh(data=data, tensor=tensor)
    params, batch = init_params(TABLE, jax.random.key(seed), jnp.float64), make_batch(seed, np.float64)
    value_and_grad = jaxpar.value_and_grad(mlp.MODEL, loss, mesh, num_microbatches=num_microbatches)
    got = jax.jit(value_and_grad)(on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert relative(got, reference(params, batch)) <= 1e-12, f"seed {seed}"


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(1e-2)],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_parameters_after_three_steps_equal_one_device_in_float64(x64, data, tensor, optimizer):
    seed = fresh_seed()
    mesh = jaxpar.make_mesh(data=data, tensor=tensor)
    init = lambda key: init_params(TABLE, key, jnp.float64)
    key = jax.random.key(seed)
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, key), mesh, RULES)
    state = jaxpar.init_state(init, key, optimizer, mesh, shardings)
    train_step = jaxpar.make_train_step(jaxpar.value_and_grad(mlp.MODEL, loss, mesh, num_microbatches=2), optimizer)
    params = init(key)
    opt_state = optimizer.init(params)
    for step in range(3):
        batch = make_batch(seed + step, np.float64)
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        value, grads = reference(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6, err_msg=f"seed {seed} step {step}")
    assert relative(state.params, params) <= 1e-10, f"seed {seed}"
