"""Which steps stay and which are set aside: a run that goes back leaves a branch, and only whole checkpoints count."""

import os
import shutil

import pytest

import jaxpar
from tests.support.oracle import assert_same_bits
from tests.support.tiny_state import at_step, make_state, newest_verified


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of steps 5 and 10."""
    folder, mesh = tmp_path_factory.mktemp("saved"), jaxpar.make_mesh()
    manager = jaxpar.CheckpointManager(folder, mesh)
    for step in (5, 10):
        manager.save(at_step(make_state(mesh, seed=1), step))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def open_folder(folder, **options):
    return jaxpar.CheckpointManager(folder, jaxpar.make_mesh(), **options)


def new_state(manager, step):
    return at_step(make_state(manager.mesh, seed=2), step)


def damage(folder, step, file="_CHECKPOINT_METADATA"):
    path = folder / str(step) / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    "new",
    [
        pytest.param((6, 7, 8, 10), marks=pytest.mark.full),
        (12,),
        pytest.param((10,), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_run_that_goes_back_to_a_step_sets_the_later_ones_aside(folder, new):
    said = []
    manager = open_folder(folder, keep=100, say=said.append)
    manager.restore(make_state(manager.mesh), step=5)
    for step in new:
        manager.save(new_state(manager, step))
    assert set(os.listdir(folder)) == {*map(str, (5, *new)), "10.abandoned"}
    again = open_folder(folder)
    assert_same_bits(
        again.restore(make_state(again.mesh)),
        new_state(again, new[-1]),
        message="the new branch wins",
    )
    assert said == [
        f"set aside step 10 as 10.abandoned: the run resumed from an older step, and saves step {new[0]} now. "
        "Delete it if it is not wanted."
    ]


def test_a_manager_that_goes_back_behind_its_own_saves_sets_them_aside(tmp_path):
    manager = open_folder(tmp_path)
    for step in (5, 10):
        manager.save(at_step(make_state(manager.mesh, seed=1), step))
    manager.restore(make_state(manager.mesh), step=5)
    for step in (6, 10):
        manager.save(new_state(manager, step))
    assert sorted(os.listdir(tmp_path)) == ["10", "10.abandoned", "5", "6"]
    assert_same_bits(manager.restore(make_state(manager.mesh)), new_state(manager, 10))


def test_a_branch_that_is_left_twice_overwrites_nothing(folder):
    for number in (1, 2):
        manager = open_folder(folder)
        manager.restore(make_state(manager.mesh), step=5)
        manager.save(new_state(manager, 10 + number))
    assert sorted(os.listdir(folder)) == ["10.abandoned", "11.abandoned", "12", "5"]
    manager = open_folder(folder)
    manager.restore(make_state(manager.mesh), step=5)
    manager.save(at_step(make_state(manager.mesh, seed=3), 11))
    manager = open_folder(folder)
    manager.restore(make_state(manager.mesh), step=5)
    manager.save(at_step(make_state(manager.mesh, seed=4), 11))
    assert sorted(os.listdir(folder)) == [
        "10.abandoned",
        "11",
        "11.abandoned",
        "11.abandoned-2",
        "12.abandoned",
        "5",
    ]


def test_a_run_that_looks_back_while_it_trains_leaves_no_branch(folder):
    manager = open_folder(folder)
    manager.restore(make_state(manager.mesh))
    manager.save(new_state(manager, 12))
    manager.restore(make_state(manager.mesh), step=5)
    manager.save(new_state(manager, 14))
    assert manager.steps() == (10, 12, 14)


def test_a_step_of_another_branch_gives_way_and_one_of_the_same_values_stays(folder):
    manager = open_folder(folder)
    manager.save(at_step(make_state(manager.mesh, seed=1), 10))
    assert manager.num_saved == 0
    manager.save(new_state(manager, 10))
    assert sorted(os.listdir(folder)) == ["10", "10.abandoned", "5"]
    assert_same_bits(manager.restore(make_state(manager.mesh)), new_state(manager, 10))


def test_a_step_that_is_done_again_to_the_same_values_stays_on_the_branch(folder):
    manager = open_folder(folder)
    manager.restore(make_state(manager.mesh), step=5)
    manager.save(at_step(make_state(manager.mesh, seed=1), 10))
    manager.save(new_state(manager, 12))
    assert sorted(os.listdir(folder)) == ["10", "12", "5"]


@pytest.mark.parametrize("step", [7, 10, 12])
def test_a_save_after_a_fall_back_survives_a_keep_of_one(folder, step):
    damage(folder, 10)
    said = []
    manager = open_folder(folder, keep=1, say=said.append)
    assert int(manager.restore(make_state(manager.mesh)).step) == 5
    manager.save(new_state(manager, step))
    assert sorted(os.listdir(folder)) == sorted([str(step), "10.bad"]), said
    assert newest_verified(manager) == step


def test_damaged_steps_take_no_place_of_whole_ones(folder):
    for step in (20, 30, 40):
        shutil.copytree(folder / "10", folder / str(step))
    manager = open_folder(folder, keep=2)
    assert int(manager.restore(make_state(manager.mesh)).step) == 10
    manager.save(new_state(manager, 11))
    assert manager.steps() == (10, 11)
    (folder / "10" / "_CHECKPOINT_METADATA").unlink()
    manager.save(new_state(manager, 12))
    manager.save(new_state(manager, 13))
    assert manager.steps() == (10, 12, 13), (
        "what is not whole does not count, and is left to look at"
    )


def test_the_step_just_saved_stays_whatever_is_kept(tmp_path):
    manager = open_folder(tmp_path, keep=1, keep_best="loss")
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.3)):
        manager.save(new_state(manager, step), metrics={"loss": loss})
        assert manager.steps() == tuple(sorted({1, step}))
