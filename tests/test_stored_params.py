"""Params that are read from a checkpoint, beside a run that saves and deletes: they are those that were saved, or an error."""

import dataclasses
import shutil

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

import jaxpar
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint import BadCheckpointError, restore, stored_params
from jaxpar.checkpoint.array_file import ArrayFile
from jaxpar.checkpoint.folder import Folder
from jaxpar.checkpoint.manifest import read_manifest
from jaxpar.checkpoint.restore import DeletedError
from jaxpar.checkpoint.stored_params import choosing_again, open_stored_params
from tests.support import crafted_checkpoint as crafted
from tests.support import model_folders
from tests.support.oracle import assert_same_bits
from tests.support.tiny_state import at_step, make_state


@pytest.fixture
def manager(tmp_path):
    return jaxpar.CheckpointManager(tmp_path / "checkpoints", jaxpar.make_mesh(tensor=2), keep=1)


def save(manager, step):
    state = at_step(make_state(manager.mesh, seed=step), step)
    manager.save(state)
    return state


def once(action):
    """Returns a function that acts at its first call alone."""
    left = [action]
    return lambda: left.pop()() if left else None


def test_stored_params_are_those_that_were_saved_as_a_whole_and_by_row(manager):
    state = save(manager, 5)
    params, manifest = open_stored_params(manager.directory)
    want = jaxpar.fetch(state.params)
    assert manifest.step == 5
    assert_same_bits({name: np.asarray(array) for name, array in params.items()}, want)
    assert_same_bits(np.stack([params["w_up"][row] for row in range(4)]), want["w_up"])
    assert_same_bits(params["w_up"][-1], want["w_up"][-1])
    assert_same_bits(params["w_down"][2:4, 1:], want["w_down"][2:4, 1:])
    with pytest.raises(IndexError):
        params["w_up"][4]


def test_a_damaged_newest_step_is_named_where_the_one_before_is_read(tmp_path, capfd):
    manager = jaxpar.CheckpointManager(tmp_path / "checkpoints", jaxpar.make_mesh(), keep=2)
    for step in (5, 6):
        save(manager, step)
    (manager.directory / "6/manifest.json").write_text("{")
    _, manifest = open_stored_params(manager.directory)
    assert manifest.step == 5
    assert "NOT USED: checkpoint of step 6: " in capfd.readouterr().err


def test_a_step_that_is_deleted_while_it_is_read_gives_no_value(manager):
    save(manager, 5)
    params, _ = open_stored_params(manager.directory)
    params["w_up"][0]
    shutil.rmtree(manager.directory / "5")
    for read in (
        lambda: params["w_up"][1],
        lambda: params["w_down"][0],
        lambda: np.asarray(params["bias"]),
    ):
        with pytest.raises(
            DeletedError,
            match=r"must stay while it is read; got params/\w+ of step 5 in .*checkpoints, which",
        ):
            read()


def test_a_step_that_is_saved_anew_while_it_is_read_is_not_mixed_with_it(manager):
    save(manager, 5)
    params, _ = open_stored_params(manager.directory)
    params["w_up"][0]
    shutil.rmtree(manager.directory / "5")
    other = jaxpar.CheckpointManager(manager.directory, manager.mesh)
    other.save(at_step(make_state(manager.mesh, seed=6), 5))
    with pytest.raises(DeletedError):
        params["w_up"][1]


@pytest.mark.parametrize("read", [np.asarray, lambda array: array[0]], ids=["whole", "row"])
def test_values_that_are_not_those_saved_are_refused(manager, read):
    save(manager, 5)
    step = manager.directory / "5"
    arrays = dict(read_manifest(step).arrays)
    arrays["params/w_up"] = dataclasses.replace(
        arrays["params/w_up"], checksum=arrays["params/w_up"].checksum ^ 1
    )
    crafted.seal(step, arrays=arrays)
    params, _ = open_stored_params(manager.directory)
    with pytest.raises(
        BadCheckpointError,
        match=r"must be those that were saved; got params/w_up of step 5 .*its values are",
    ):
        read(params["w_up"])
    read(params["w_down"])


def test_a_row_that_is_read_otherwise_than_when_all_were_checked_is_refused(manager, monkeypatch):
    save(manager, 5)
    params, _ = open_stored_params(manager.directory)
    params["w_up"][0]
    read = ArrayFile.read
    monkeypatch.setattr(ArrayFile, "read", lambda self, index: 0 * read(self, index))
    with pytest.raises(BadCheckpointError, match="its values are not those that were saved"):
        params["w_up"][1]


# -- the next step is chosen --------------------------------------------------------------------------------------------


def test_a_restore_takes_the_next_step_where_one_is_deleted_before_it_is_verified(
    manager, monkeypatch
):
    said, mesh = [], manager.mesh
    reader = jaxpar.CheckpointManager(manager.directory, mesh, say=said.append)
    save(manager, 5)
    look, newer = Folder.look, once(lambda: save(manager, 10))

    def slow(self, step):
        if self is reader._folder:
            newer()
        return look(self, step)

    monkeypatch.setattr(Folder, "look", slow)
    assert int(reader.restore(make_state(mesh)).step) == 10
    assert said == [], "a step that is deleted is not damaged"


def test_a_restore_takes_the_next_step_where_one_is_deleted_while_it_is_read(manager, monkeypatch):
    said, mesh = [], manager.mesh
    reader = jaxpar.CheckpointManager(manager.directory, mesh, say=said.append)
    save(manager, 5)
    start, newer = ArrayFile.start_reading, once(lambda: save(manager, 10))

    def slow(self, index):
        newer()
        return start(self, index)

    monkeypatch.setattr(ArrayFile, "start_reading", slow)
    restored = reader.restore(make_state(mesh))
    assert_same_bits(restored, at_step(make_state(mesh, seed=10), 10))
    assert said == []
    with pytest.raises(ValueError, match=r"needs a saved step; got step=5, saved 10\. Choose"):
        reader.restore(make_state(mesh), step=5)


def test_a_restore_gives_up_where_every_step_is_deleted_in_turn(manager, monkeypatch):
    save(manager, 5)
    monkeypatch.setattr(restore, "_is_gone", lambda *args: True)
    monkeypatch.setattr(restore, "_look_and_verify", lambda folder, step: ("gone", ["gone"]))
    message = r"needs a checkpoint that stays while it is read; got 20 in .*checkpoints .*by keep or keep_every"
    with pytest.raises(DeletedError, match=message):
        manager.restore(make_state(manager.mesh))


def test_processes_that_see_other_steps_for_a_moment_look_again(tmp_path, monkeypatch):
    answers = [[[5], [10]], [[5, 10], [10]], [[10], [10]]]
    monkeypatch.setattr(restore, "exchange", lambda name, value: answers.pop(0))
    monkeypatch.setattr(restore, "SECONDS_BETWEEN_LISTS", 0.0)
    assert restore._agreed_steps(Folder(tmp_path)) == [10]


def test_a_deleted_step_is_chosen_again_unless_it_was_asked_for():
    said, reads = [], []

    def read():
        reads.append(1)
        if len(reads) < 3:
            raise DeletedError("gone.")
        return "read"

    assert choosing_again(None, read, say=said.append) == "read"
    assert said == ["gone. The newest step is read now."] * 2
    reads.clear()
    with pytest.raises(DeletedError):
        choosing_again(5, read)
    assert len(reads) == 1

    def never():
        reads.append(1)
        raise DeletedError("gone.")

    with pytest.raises(DeletedError):
        choosing_again(None, never, say=said.append)
    assert len(reads) == 1 + stored_params.MOST_READ


def test_an_export_beside_a_run_that_deletes_the_step_is_of_the_next_one(
    tmp_path, monkeypatch, capsys
):
    source = model_folders.GOLDEN / "llama"
    params = model_folders.read_params(source, model_folders.read_config(source))
    run, mesh, optimizer = tmp_path / "run", jaxpar.make_mesh(), optax.sgd(0.1)
    shutil.copytree(source, run / "model")
    manager = jaxpar.CheckpointManager(run / "checkpoints", mesh, keep=1)
    whole = jax.sharding.NamedSharding(mesh, jaxpar.replicated())

    def save_model(step, factor):
        on_mesh = jaxpar.shard(
            jax.tree.map(lambda x: np.asarray(x) * np.float32(factor), params), whole
        )
        manager.save(
            jaxpar.TrainState(
                jaxpar.shard(np.int32(step), whole), on_mesh, optimizer.init(on_mesh), None
            )
        )

    reads, read = [], ArrayFile.read

    def slow(self, index):
        reads.append(1)
        if len(reads) == 20:
            save_model(20, 2.0)
        return read(self, index)

    save_model(10, 1.0)
    monkeypatch.setattr(ArrayFile, "read", slow)
    assert jaxpar_main(["export", str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    printed = capsys.readouterr()
    assert "step 20 of" in printed.out
    assert "which another process has deleted or replaced meanwhile" in printed.err
    exported = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert_same_bits(
        exported,
        {
            name: 2 * tensor.astype(np.float32)
            for name, tensor in model_folders.all_tensors(source).items()
        },
    )
