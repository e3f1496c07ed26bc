"""A saved state comes back byte for byte, on any mesh; what cannot come back is named."""

import dataclasses
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.checkpoint import DivergedError, NotFiniteError, orbax_tree
from jaxpar.checkpoint.manifest import PrngKey
from tests.support.oracle import assert_same_bits, cast
from tests.support.tiny_state import at_step, make_state, newest_verified
from tests.support.waiting import WAIT_SECONDS


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}, marks=pytest.mark.full),
        pytest.param({"data": 8}, {}, marks=pytest.mark.full),
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

    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, target
    )


def test_a_run_restores_without_making_a_first_state(tmp_path):
    mesh, optimizer = jaxpar.make_mesh(data=2, tensor=2), optax.sgd(0.1, momentum=0.9)
    state = make_state(mesh, optimizer=optimizer)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state)
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    params = jaxpar.fetch(state.params)
    abstract = jaxpar.abstract_state(
        lambda key: params, jax.random.key(0), optimizer, mesh, shardings
    )
    assert jax.tree.map(lambda x: x.sharding, abstract) == jax.tree.map(lambda x: x.sharding, state)
    assert_same_bits(manager.restore(abstract), state)


@pytest.mark.parametrize(
    "rate", [0.25, np.float32(0.25), jnp.float32(0.25)], ids=["float", "numpy", "jax"]
)
def test_a_number_that_a_script_puts_into_the_state_is_saved(tmp_path, rate):
    mesh, optimizer = (
        jaxpar.make_mesh(data=2),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
    )
    state = make_state(mesh, optimizer=optimizer)
    changed = dataclasses.replace(
        state, opt_state=optax.tree.set(state.opt_state, learning_rate=rate)
    )
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(changed)
    restored = manager.restore(state)
    assert float(optax.tree.get(restored.opt_state, "learning_rate")) == 0.25
    assert_same_bits(restored.params, state.params)


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
    assert_same_bits(manager.restore(make_state(mesh)), make_state(mesh, seed=1))


def test_a_run_goes_on_only_with_its_own_config(tmp_path):
    mesh = jaxpar.make_mesh()
    state = make_state(mesh)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state, config={"learning_rate": 0.1, "features": ("area", "rooms")})
    manager.restore(state, config={"features": ("area", "rooms"), "learning_rate": 0.1})
    manager.restore(state)
    message = (
        "a run must continue with the config that it was saved with; got learning_rate=0.2 (saved: 0.1), seed=1 "
        f"(saved: not given) for step 0 in {tmp_path}. Give the saved values, none where none was given, allow these to "
        "change (allow_change="
        "('learning_rate', 'seed') of a Run's flags, or allow=('learning_rate', 'seed') of restore), or start "
        "a run in another folder."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        manager.restore(
            state, config={"learning_rate": 0.2, "features": ["area", "rooms"], "seed": 1}
        )
    manager.restore(
        state, config={"learning_rate": 0.2, "seed": 1}, allow=["learning_rate", "features", "seed"]
    )


def test_restoring_from_a_folder_without_checkpoints_is_refused_and_makes_no_folder(tmp_path):
    mesh = jaxpar.make_mesh()
    message = f"restoring needs a checkpoint; got none in {tmp_path / 'none'}. Name the folder that a run saved to, "
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        jaxpar.CheckpointManager(tmp_path / "none", mesh).restore(make_state(mesh))
    assert not (tmp_path / "none").exists()


def test_a_step_that_was_not_saved_is_refused(tmp_path):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(at_step(make_state(mesh), 5))
    with pytest.raises(
        ValueError, match=r"needs a saved step; got step=4, saved 5\. Choose one of these\."
    ):
        manager.restore(make_state(mesh), step=4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 16}, "got float32[16] for params/bias, saved float32[8], in step 0"),
        ({"optimizer": optax.sgd(0.1)}, "got none for opt_state/0/count, saved int32[], in step 0"),
        (
            {"optimizer": optax.adam(optax.constant_schedule(0.1))},
            "got int32[] for opt_state/1/count, saved none, in",
        ),
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
        TypeError,
        match="every leaf of a restore's target must have a NamedSharding; got NoneType for step",
    ):
        manager.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def test_a_target_on_another_mesh_is_refused(tmp_path):
    mesh = jaxpar.make_mesh(data=2)
    jaxpar.CheckpointManager(tmp_path, mesh).save(make_state(mesh))
    message = "must be on the manager's mesh, {'data': 2, 'stage': 1, 'tensor': 1}; got {'data': 4, 'stage': 1, 'tensor': 1}"
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxpar.CheckpointManager(tmp_path, mesh).restore(make_state(jaxpar.make_mesh(data=4)))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"keep": 0}, "keep must be at least 1; got 0"),
        ({"keep_every": -5}, "keep_every must be 0 or more; got -5"),
    ],
)
def test_what_is_kept_must_make_sense(tmp_path, keep, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.CheckpointManager(tmp_path, jaxpar.make_mesh(), **keep)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        pytest.param({"keep": 1}, (12,), marks=pytest.mark.full),
        pytest.param({"keep": 2, "keep_every": 4}, (4, 8, 10, 12), marks=pytest.mark.full),
        pytest.param({"keep": 1, "keep_best": "test_loss"}, (6, 12), marks=pytest.mark.full),
        ({"keep": 1, "keep_best": "-accuracy"}, (2, 12)),
    ],
    ids=str,
)
def test_the_newest_some_between_and_the_best_are_kept(tmp_path, keep, left):
    mesh = jaxpar.make_mesh()
    manager, state = jaxpar.CheckpointManager(tmp_path, mesh, **keep), make_state(mesh)
    losses = {2: 0.9, 4: np.nan, 6: 0.3, 8: 0.5, 10: np.inf, 12: 0.4}
    for step, test_loss in losses.items():
        manager.save(
            at_step(state, step),
            metrics={"test_loss": np.float32(test_loss), "accuracy": test_loss},
        )
    assert manager.steps() == left


def test_metrics_of_any_kind_of_number_are_kept_as_floats_that_are_read_again(tmp_path):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh, keep_best="clipped")
    given = {
        "clipped": jnp.bool_(True),
        "good": True,
        "rows": np.int64(3),
        "wide": np.longdouble(2),
    }
    manager.save(at_step(make_state(mesh), 3), metrics=given)
    assert manager.manifest(3).metrics == {"clipped": 1.0, "good": 1.0, "rows": 3.0, "wide": 2.0}
    assert manager.steps() == (3,)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    with pytest.raises(ValueError, match=r"samples of manifest.json must be"):
        manager.save(at_step(make_state(mesh), 3), samples=-1)
    assert manager.steps() == ()


def test_a_checkpoint_says_of_what_run_it_is(tmp_path):
    mesh = jaxpar.make_mesh(data=2, tensor=2)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(
        at_step(make_state(mesh), 3), samples=48, key=jax.random.key(7), config={"seed": 7}
    )
    manifest = manager.manifest(3)
    assert (manifest.step, manifest.samples, manifest.config) == (3, 48, {"seed": 7})
    assert manifest.prng_key == PrngKey("threefry2x32", (0, 7))
    assert manifest.mesh == {"data": 2, "stage": 1, "tensor": 2}
    assert manifest.versions["jax"] == jax.__version__
    assert str(manifest.arrays["params/w_up"]) == "float32[4, 8]"


@pytest.mark.parametrize(
    ("about", "other", "message"),
    [
        (
            {"samples": 8},
            {"samples": 16},
            "agree on their samples before they save; got 16 on proc",
        ),
        ({"key": 0}, {"key": ["threefry2x32", 0, 1]}, "agree on their key before"),
        ({"config": {"a": 1}}, {"config a": 2}, "agree on their config a before they save; got 2"),
        ({"metrics": {"test_loss": 0.5}}, {"test_loss": 0.25}, "agree on their test_loss before"),
        ({"metrics": {"test_loss": 0.5}}, {"test_loss": None}, "agree on their test_loss before"),
    ],
)
def test_what_processes_save_beside_a_state_is_the_same(
    tmp_path, monkeypatch, about, other, message
):
    others = lambda _, mine: [mine, {name: other.get(name, mine[name]) for name in mine}]
    monkeypatch.setattr("jaxpar.runtime.coordination.exchange", others)
    mesh = jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(tmp_path, mesh, keep_best="test_loss")
    about = about | {name: jax.random.key(seed) for name, seed in about.items() if name == "key"}
    with pytest.raises(ValueError, match=message):
        manager.save(make_state(mesh), **about)
    assert manager.steps() == ()


def test_only_a_prng_key_is_saved_as_one(tmp_path):
    mesh = jaxpar.make_mesh()
    with pytest.raises(
        TypeError, match=r"key must be a PRNG key; got uint32\. Make it with jax\.random\.key"
    ):
        jaxpar.CheckpointManager(tmp_path, mesh).save(make_state(mesh), key=jax.random.PRNGKey(0))


def test_the_step_goes_on_while_a_save_is_on_its_way(tmp_path, monkeypatch):
    mesh, hold = jaxpar.make_mesh(data=2), threading.Event()
    begin = orbax_tree.save_async

    def slow(folder, tree, seconds):
        written = begin(folder, tree, seconds)
        return lambda: (hold.wait(WAIT_SECONDS), written())[1]

    monkeypatch.setattr(orbax_tree, "save_async", slow)
    manager, state = jaxpar.CheckpointManager(tmp_path, mesh), make_state(mesh)
    before = jaxpar.fetch(state)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    manager.save_async(state)
    for _ in range(
        3
    ):  # the buffers that are saved are donated to steps that end while the save is on its way
        state = advance(state)
    jax.block_until_ready(state)
    assert manager.saving == 0
    assert int(state.step) == 3
    hold.set()
    manager.wait()
    assert manager.saving is None
    assert_same_bits(
        manager.restore(state), before, message="what was saved is the step's own state"
    )


def test_replicas_that_drifted_apart_are_not_saved(tmp_path):
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    state = make_state(mesh)
    bias = [np.array(shard.data) for shard in state.params["bias"].addressable_shards]
    bias[3][0] += 1
    pieces = [
        jax.device_put(part, device) for part, device in zip(bias, mesh.devices.flat, strict=True)
    ]
    drifted = jax.make_array_from_single_device_arrays((8,), state.params["bias"].sharding, pieces)
    state = dataclasses.replace(state, params=state.params | {"bias": drifted})
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    with pytest.raises(
        DivergedError, match=r"different ones in \['params/bias'\] at step 0\. Nothing was saved"
    ):
        manager.save(state)
    assert manager.steps() == ()


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    mesh = jaxpar.make_mesh(data=2)
    state = make_state(mesh)
    state = dataclasses.replace(
        state, params=state.params | {"bias": state.params["bias"] * np.float32(np.nan)}
    )
    with pytest.raises(NotFiniteError, match=r"NaN or infinity in \['params/bias'\] at step 0"):
        jaxpar.CheckpointManager(tmp_path, mesh).save(state)


@pytest.mark.parametrize(
    ("bias", "got"), [(np.zeros((0, 3)), "float64[0, 3]"), (jnp.zeros(4, jnp.int4), "int4[4]")]
)
def test_an_array_that_cannot_be_stored_is_refused_before_anything_is_written(
    x64, tmp_path, bias, got
):
    mesh = jaxpar.make_mesh(data=2)
    state = make_state(mesh)
    bias = jax.device_put(bias, state.params["bias"].sharding)
    state = dataclasses.replace(state, params=state.params | {"bias": bias})
    with pytest.raises(ValueError, match=re.escape(f"got {got} at params/bias")):
        jaxpar.CheckpointManager(tmp_path, mesh).save_async(state)
    assert not [*tmp_path.iterdir()]


def test_a_save_that_the_disk_has_no_room_for_is_foreseen(tmp_path, monkeypatch, capsys):
    mesh = jaxpar.make_mesh()
    manager, state = jaxpar.CheckpointManager(tmp_path, mesh), make_state(mesh)
    manager.save(state)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    manager.save_async(at_step(state, 1))
    assert "NOT SAVED: checkpoint of step 1: a save needs 1," in capsys.readouterr().err
    with pytest.raises(
        OSError, match=r"step 2: a save needs 1,[0-9]{3} bytes free; got 100 on the disk of"
    ):
        manager.save(at_step(state, 2))
    assert manager.failures[0].startswith("step 1: a save needs")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    monkeypatch.undo()
    assert manager.save(at_step(state, 3)) == 3


def test_a_save_that_fails_on_its_way_leaves_the_others_whole(tmp_path, monkeypatch, capsys):
    mesh = jaxpar.make_mesh()
    manager, state = jaxpar.CheckpointManager(tmp_path, mesh), make_state(mesh)
    manager.save(state)

    def full(folder, tree, seconds):
        def written():
            (folder / "state").mkdir(parents=True)
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

        return written

    monkeypatch.setattr(orbax_tree, "save_async", full)
    manager.save_async(at_step(state, 1))
    manager.wait()
    assert (
        "NOT SAVED: checkpoint of step 1: ValueError: RESOURCE_EXHAUSTED" in capsys.readouterr().err
    )
    assert newest_verified(manager) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0"], "it takes its own leavings away"


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [pytest.param(np.float32, "bfloat16", marks=pytest.mark.full), (np.float32, "float16")],
)
def test_another_dtype_is_refused_unless_a_cast_is_asked_for(tmp_path, saved, wanted):
    mesh = jaxpar.make_mesh(data=2, tensor=2)
    state = make_state(mesh)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state)
    narrow = lambda x: jax.ShapeDtypeStruct(
        x.shape, wanted if x.dtype == saved else x.dtype, sharding=x.sharding
    )
    target = jax.tree.map(narrow, state)
    with pytest.raises(ValueError, match=re.escape(f"got {wanted}[] for".replace("[]", "[8]"))):
        manager.restore(target)
    restored = manager.restore(target, cast=True)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), restored) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), target
    )
    assert_same_bits(restored, cast(state, wanted))


def test_whole_numbers_are_never_cast(tmp_path):
    mesh = jaxpar.make_mesh()
    state = make_state(mesh)
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state)
    target = dataclasses.replace(state, params=jax.tree.map(lambda x: x.astype(int), state.params))
    with pytest.raises(
        ValueError, match=re.escape("got int32[8] for params/bias, saved float32[8]")
    ):
        manager.restore(target, cast=True)
