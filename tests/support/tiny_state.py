"""A small training state on a mesh, for tests of checkpoints."""

import dataclasses

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

import jaxpar
from jaxpar.train import TrainState, optimizer_shardings

SPECS = {
    "w_up": jaxpar.column_parallel(),
    "w_down": jaxpar.row_parallel(),
    "bias": jaxpar.replicated(),
}
ADAM = optax.adam(1e-3)


def make_state(mesh, *, width=8, optimizer=ADAM, seed=0):
    """A TrainState of random bits, put on the mesh without compiling anything."""
    random = np.random.default_rng(seed)
    shapes = {"w_up": (4, width), "w_down": (width, 4), "bias": (width,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    state = TrainState(np.int32(0), params, optimizer.init(params), np.int32(2))
    state = jax.tree.map(
        lambda x: random.normal(size=x.shape).astype(x.dtype) if x.ndim else np.asarray(x), state
    )
    whole = NamedSharding(mesh, jaxpar.replicated())
    shardings = jaxpar.shardings_from_paths(params, mesh, SPECS)
    moments = optimizer_shardings(optimizer, jax.eval_shape(lambda: params), shardings, whole)
    return jaxpar.shard(state, TrainState(whole, shardings, moments, whole))


def at_step(state, step):
    return dataclasses.replace(state, step=state.step + step)


def newest_verified(manager):
    """The newest step whose files are all as they were saved; None if there is none."""
    return next((step for step in reversed(manager.steps()) if not manager.verify(step)), None)
