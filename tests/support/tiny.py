"""A small model and its batches, which many tests share. The reference is one device, plain JAX."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import config as jaxtyping_config

import jaxpar
from jaxpar.models import mlp
from jaxpar.params import abstract_params, init_params
from tests.support.seeds import fresh_seed as fresh_seed

RULES = {
    "layers/w_up": jaxpar.column_parallel(),
    "layers/b_up": jaxpar.column_parallel(ndim=1),
    "layers/w_down": jaxpar.row_parallel(),
    "layers/b_down": jaxpar.replicated(),
    "outer/*": jaxpar.replicated(),
}
NUM_ROWS, NUM_FEATURES, NUM_CLASSES, NUM_LAYERS = 32, 6, 5, 2
TABLE = mlp.param_table(NUM_FEATURES, NUM_CLASSES, width=8, num_hidden=2 * NUM_LAYERS)
MODEL = mlp.MODEL
# At Adam's usual eps, 1e-8, a gradient of 1e-9 moves its param by a share of the rate that rounding of the gradient
# changes: of drawn params and batches, one in forty differed by more than 1e-12 after three steps.
ADAM = optax.adam(1e-2, eps=1e-3)


def init(key):
    """The first params, float64 where JAX has it."""
    return init_params(TABLE, key, jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)


def make_params(seed: int = 0) -> dict:
    """Params on the host, float64 where JAX has it."""
    return draw_params(NUM_LAYERS, seed, np.float64 if jax.config.jax_enable_x64 else np.float32)


def draw_params(num_layers: int, seed: int = 0, dtype=np.float64) -> dict:
    """Params of any number of layers, drawn on the host, where nothing is compiled; biases are not zero either."""
    rng = np.random.default_rng(seed)
    shapes = abstract_params(
        mlp.param_table(NUM_FEATURES, NUM_CLASSES, width=8, num_hidden=2 * num_layers)
    )
    return jax.tree.map(lambda leaf: (0.2 * rng.normal(size=leaf.shape)).astype(dtype), shapes)


def make_batch(seed: int = 0, dtype=np.float32) -> dict:
    """Rows of uneven weight, so that no two parts of the batch weigh the same."""
    rng = np.random.default_rng(seed)
    return {
        "features": rng.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(dtype),
        "label": rng.integers(0, NUM_CLASSES, NUM_ROWS).astype(np.int32),
        "weight": rng.uniform(0, 2, NUM_ROWS).astype(dtype) * (rng.uniform(size=NUM_ROWS) < 0.7),
    }


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["label"], batch["weight"])


@jax.jit
def reference(params, batch):
    """The loss and gradients of one device."""

    def mean(params):
        total, weight = loss(MODEL.apply(params, batch), batch)
        return total / weight

    return jax.value_and_grad(mean)(params)


@functools.cache
def update_on_one_device(optimizer):
    """An update as one program: ``update(grads, opt_state, params)`` returns the new params and state of the optimizer."""

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update


def shardings(mesh, params):
    return jaxpar.shardings_from_paths(params, mesh, RULES)


def on_mesh(mesh, params, rules=RULES):
    """Params sharded by rules; layers that the stages do not divide are replicated on each stage."""
    num_stages = mesh.shape["stage"]
    if len(jax.tree.leaves(params["layers"])[0]) % num_stages == 0:
        return jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, rules))
    one_each = lambda leaf: jax.ShapeDtypeStruct((num_stages, *leaf.shape[1:]), leaf.dtype)
    even = params | {"layers": jax.tree.map(one_each, params["layers"])}
    where = jaxpar.shardings_from_paths(even, mesh, rules)
    off_stage = lambda sharding: NamedSharding(mesh, PartitionSpec(None, *sharding.spec[1:]))
    return jaxpar.shard(params, where | {"layers": jax.tree.map(off_stage, where["layers"])})


@contextlib.contextmanager
def signatures_unchecked():
    """Calls go through as they do for users, without the check of signatures that tests run with."""
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", False)
