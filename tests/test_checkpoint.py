"""A saved state comes back byte for byte, on any mesh; what cannot come back is named."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jaxpar
from jaxpar.sharding import path_string
from jaxpar.train import TrainState, optimizer_shardings

SPECS = {"w_up": jaxpar.column_parallel(), "w_down": jaxpar.row_parallel(), "bias": jaxpar.replicated()}
ADAM = optax.adam(1e-3)


def make_state(mesh, *, width=8, optimizer=ADAM, seed=0):
    """A TrainState of random bits, put on the mesh without compiling anything."""
    random = np.random.default_rng(seed)
    shapes = {"w_up": (4, width), "w_down": (width, 4), "bias": (width,)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    state = TrainState(np.int32(0), params, optimizer.init(params), np.int32(2))
    state = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype) if x.ndim else np.asarray(x), state)
    whole = NamedSharding(mesh, jaxpar.replicated())
    shardings = jaxpar.shardings_from_paths(params, mesh, SPECS)
    moments = optimizer_shardings(optimizer, jax.eval_shape(lambda: params), shardings, whole)
    return jaxpar.shard(state, TrainState(whole, shardings, moments, whole))


def at_step(state, step):
    return dataclasses.replace(state, step=state.step + step)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}),
        ({"data": 8}, {}),
        ({}, {"data": 4, "tensor": 2}),
    ],
    ids=str,
)
def test_a_state_restored_on_another_mesh_has_the_same_bytes(tmp_path, before, after):
    mesh = jaxpar.make_mesh(**before)
    saved = at_step(make_state(mesh, seed=3), 7)
    assert jaxpar.CheckpointManager(tmp_path, mesh).save(saved) == 7

    mesh = jaxpar.make_mesh(**after)
    target = make_state(mesh)
    restored = jaxpar.CheckpointManager(tmp_path, mesh).restore(target)

    assert jax.tree.structure(restored) == jax.tree.structure(target)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(jaxpar.fetch(restored)), jax.tree.leaves(jaxpar.fetch(saved)), strict=True
    ):
        assert got.tobytes() == want.tobytes(), path_string(path)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)


def test_a_run_restores_without_making_a_first_state(tmp_path):
    mesh, optimizer = jaxpar.make_mesh(data=2, tensor=2), optax.sgd(0.1, momentum=0.9)
    state = make_state(mesh, optimizer=optimizer)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state)
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    params = jaxpar.fetch(state.params)
    abstract = jaxpar.abstract_state(lambda key: params, jax.random.key(0), optimizer, mesh, shardings)
    assert jax.tree.map(lambda x: x.sharding, abstract) == jax.tree.map(lambda x: x.sharding, state)
    assert np.array_equal(manager.restore(abstract).params["w_up"], state.params["w_up"])


def test_the_newest_checkpoints_are_kept_and_any_can_be_restored(tmp_path):
    mesh = jaxpar.make_mesh(data=2)
    manager = jaxpar.CheckpointManager(tmp_path, mesh, keep=2)
    assert manager.latest() is None
    state = make_state(mesh)
    for step in (5, 10, 15):
        manager.save(at_step(state, step))
    assert manager.steps() == (10, 15)
    assert manager.latest() == jaxpar.CheckpointManager(tmp_path, mesh).latest() == 15
    assert int(manager.restore(state).step) == 15
    assert int(manager.restore(state, step=10).step) == 10


def test_a_step_that_is_saved_already_stays_as_it_is(tmp_path):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(make_state(mesh, seed=1))
    manager.save(make_state(mesh, seed=2))
    kept, first = manager.restore(make_state(mesh)), make_state(mesh, seed=1)
    assert np.array_equal(kept.params["w_down"], first.params["w_down"])


def test_a_run_goes_on_only_with_its_own_config(tmp_path):
    mesh = jaxpar.make_mesh()
    state = make_state(mesh)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state, config={"learning_rate": 0.1, "features": ("area", "rooms")})
    manager.restore(state, config={"features": ("area", "rooms"), "learning_rate": 0.1})
    manager.restore(state)
    message = (
        "a run must go on with the config that it was saved with; got learning_rate=0.2 (saved: 0.1), seed=1 (saved: None) "
        f"for step 0 in {tmp_path}. Give the saved values, or begin a run in another folder."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        manager.restore(state, config={"learning_rate": 0.2, "features": ["area", "rooms"], "seed": 1})


def test_restoring_from_a_folder_without_checkpoints_is_refused_and_makes_no_folder(tmp_path):
    mesh = jaxpar.make_mesh()
    message = f"restoring needs a checkpoint; got none in {tmp_path / 'none'}. Name the folder that a run saved to."
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        jaxpar.CheckpointManager(tmp_path / "none", mesh).restore(make_state(mesh))
    assert not (tmp_path / "none").exists()


def test_a_step_that_was_not_saved_is_refused(tmp_path):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(at_step(make_state(mesh), 5))
    with pytest.raises(ValueError, match=r"needs a saved step; got step=4, saved 5\. Choose one of these\."):
        manager.restore(make_state(mesh), step=4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 16}, "got float32[16] for params/bias, saved float32[8], in step 0"),
        ({"optimizer": optax.sgd(0.1)}, "got none for opt_state/0/count, saved int32[], in step 0"),
        ({"optimizer": optax.adam(optax.constant_schedule(0.1))}, "got int32[] for opt_state/1/count, saved none, in"),
    ],
    ids=["width", "fewer arrays", "more arrays"],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, other, message):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(make_state(mesh))
    with pytest.raises(ValueError, match=re.escape(message)):
        manager.restore(make_state(mesh, **other))


def test_a_target_without_shardings_is_refused(tmp_path):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    state = make_state(mesh)
    manager.save(state)
    with pytest.raises(
        TypeError, match="every leaf of a restore's target must have a NamedSharding; got NoneType for step"
    ):
        manager.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def test_a_target_on_another_mesh_is_refused(tmp_path):
    mesh = jaxpar.make_mesh(data=2)
    jaxpar.CheckpointManager(tmp_path, mesh).save(make_state(mesh))
    message = (
        "must lie on the manager's mesh, {'data': 2, 'stage': 1, 'tensor': 1}; got {'data': 4, 'stage': 1, 'tensor': 1}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpar.CheckpointManager(tmp_path, mesh).restore(make_state(jaxpar.make_mesh(data=4)))


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1; got 0"):
        jaxpar.CheckpointManager(tmp_path, jaxpar.make_mesh(), keep=0)
