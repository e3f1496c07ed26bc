"""What is damaged or foreign is named, and the checkpoint before it used; nothing in a checkpoint leads out of it."""

import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.checkpoint import BadCheckpointError, restore
from tests.support import tiny
from tests.support.oracle import assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_state import at_step, make_state, newest_verified


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of two steps, 5 and 10, saved on four devices."""
    folder, mesh = tmp_path_factory.mktemp("saved"), jaxpar.make_mesh(data=2, tensor=2)
    manager = jaxpar.CheckpointManager(folder, mesh)
    for step in (5, 10):
        manager.save(at_step(make_state(mesh, seed=step), step), config={"seed": 1})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture
def said():
    return []


@pytest.fixture
def manager(folder, said):
    return jaxpar.CheckpointManager(folder, jaxpar.make_mesh(data=2), say=said.append)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def restored_step(manager):
    return int(manager.restore(make_state(manager.mesh)).step)


@pytest.mark.full
def test_each_of_200_flipped_bits_is_found_and_its_file_named(folder, manager):
    assert manager.verify(10) == []
    seed = tiny.fresh_seed()
    print(f"seed {seed}")  # shown where the test fails
    random, files = np.random.default_rng(seed), files_of(folder / "10")
    assert len(files) >= 6, "the manifest, Orbax's own, and the arrays"
    for number in range(200):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = int(random.integers(len(content))), int(random.integers(8))
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        problems = manager.verify(10)
        name = path.relative_to(folder / "10").as_posix()
        assert len(problems) == 1, f"bit {bit} of byte {place} of {name}: {problems}"
        assert name in problems[0]
        assert "damaged" in problems[0]
        path.write_bytes(content)
    assert manager.verify(10) == []


@pytest.mark.parametrize("which", quick(range(6), 0, 3, 5))
def test_a_flipped_bit_makes_a_restore_use_the_step_before_and_say_so(folder, manager, said, which):
    path = files_of(folder / "10")[which]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert restored_step(manager) == 5
    assert newest_verified(manager) == 5
    [line] = said
    assert line.startswith("NOT USED: checkpoint of step 10: ")
    assert path.relative_to(folder / "10").as_posix() in line


def truncate(step):
    path = next(
        path
        for path in files_of(step)
        if path.stat().st_size > 100 and path.name != "manifest.json"
    )
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.relative_to(step).as_posix()} has {path.stat().st_size} bytes, not {path.stat().st_size + 1}"


def lose(step):
    (step / "_CHECKPOINT_METADATA").unlink()
    return "_CHECKPOINT_METADATA is missing"


def lose_manifest(step):
    (step / "manifest.json").unlink()
    return "it has no manifest.json: unfinished, or not a checkpoint of jaxpar"


def add(step):
    (step / "state" / "extra").write_text("?")
    return "state/extra is foreign to it"


def link(step):
    path = step / "_CHECKPOINT_METADATA"
    path.rename(step.parent / "elsewhere")
    path.symlink_to(step.parent / "elsewhere")
    return "_CHECKPOINT_METADATA is not a plain file"


def link_whole(step):
    step.rename(step.parent / "elsewhere")
    step.symlink_to(step.parent / "elsewhere")
    return "it is a link, which could lead anywhere"


def empty(step):
    shutil.rmtree(step)
    step.mkdir()
    return "it has no manifest.json: unfinished, or not a checkpoint of jaxpar"


def be_a_file(step):
    shutil.rmtree(step)
    step.write_text("?")
    return "it has no manifest.json: unfinished, or not a checkpoint of jaxpar"


def be_another_step(step):
    shutil.rmtree(step)
    shutil.copytree(step.parent / "5", step)
    return "its manifest is that of step 5"


@pytest.mark.parametrize(
    "harm",
    [truncate, lose, lose_manifest, add, link, link_whole, empty, be_a_file, be_another_step],
)
def test_harm_is_named_and_the_step_before_used(folder, manager, said, harm):
    problem = harm(folder / "10")
    assert restored_step(manager) == 5
    assert said == [f"NOT USED: checkpoint of step 10: {problem}"]


def test_what_is_no_step_is_never_the_latest(folder, manager):
    (folder / "999").mkdir()
    (folder / "saving-1000").mkdir()
    shutil.copytree(folder / "10", folder / "saving-1001")
    shutil.copytree(folder / "10", folder / "010")
    (folder / "notes.txt").write_text("?")
    assert manager.latest() == 10
    assert manager.steps() == (5, 10)
    assert newest_verified(manager) == 10


def test_an_unfinished_save_is_discarded_and_named_at_the_next(folder, manager, said):
    (folder / "saving-20").mkdir()
    (folder / "saving-30.orbax-checkpoint-tmp-7" / "state").mkdir(parents=True)
    manager.save(at_step(make_state(manager.mesh), 40))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "40", "5"]
    assert said == [
        "discarded saving-20: an unfinished save, which is no checkpoint",
        "discarded saving-30.orbax-checkpoint-tmp-7: an unfinished save, which is no checkpoint",
    ]


@pytest.mark.parametrize("where", [".", "10", "10/state"])
def test_what_systems_leave_in_folders_is_ignored_by_its_name(folder, manager, said, where):
    place = folder / where
    for name in (".DS_Store", "._10", ".nfs000000000123abcd00000001"):
        (place / name).write_text("?")
    (place / "lost+found" / "5").mkdir(parents=True)
    (place / "lost+found" / "link").symlink_to("/etc")
    assert manager.verify(10) == []
    assert restored_step(manager) == 10
    manager.save(at_step(make_state(manager.mesh), 11))
    assert manager.steps() == (5, 10, 11)
    assert said == []


def test_a_folder_that_may_not_be_read_is_one_message(folder, manager):
    folder.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        for look in (manager.latest, manager.has_any, lambda: restored_step(manager)):
            with pytest.raises(
                PermissionError,
                match=r"must be one that this user may read; got .*checkpoints: Perm",
            ):
                look()
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.fixture
def open_folder(saved):
    """A copy of the steps where a user without rights of root may get to it."""
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(saved, Path(place, "checkpoints"))
        for each in (Path(place), folder):
            each.chmod(0o755)
        yield folder


def test_params_that_may_not_be_read_are_read_once_the_user_has_the_right(open_folder):
    manager = jaxpar.CheckpointManager(open_folder, jaxpar.make_mesh(data=2), say=lambda _: None)
    parts = [open_folder / step / "state" for step in ("5", "10")]
    for part in parts:
        part.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(
            BadCheckpointError,
            match=r"none of which is: step 10: .*Permission denied.*\. Give this user the right to",
        ):
            restored_step(manager)
        if is_root:
            os.seteuid(0)
        for part in parts:
            part.chmod(0o755)
        if is_root:
            os.seteuid(65534)
        assert restored_step(manager) == 10
    finally:
        if is_root:
            os.seteuid(0)


def test_with_no_step_whole_nothing_is_restored(folder, manager):
    lose(folder / "10")
    add(folder / "5")
    message = (
        r"restoring needs an intact checkpoint; got 2 in .*checkpoints, none of which is: step 10: "
        r"_CHECKPOINT_METADATA is missing \| step 5: state/extra is foreign to it\. Restore a backup"
    )
    with pytest.raises(BadCheckpointError, match=message):
        restored_step(manager)
    assert newest_verified(manager) is None


def test_a_step_asked_for_by_number_is_not_swapped_for_another(folder, manager):
    lose(folder / "10")
    message = (
        r"restoring needs an intact checkpoint; got step=10 in .*checkpoints, which is not one: _CHECKPOINT_METADATA is missing"
        r"\. Give step=5, which is intact, or leave out step for the newest that is\."
    )
    with pytest.raises(BadCheckpointError, match=message):
        manager.restore(make_state(manager.mesh), step=10)
    assert (
        int(manager.restore(make_state(manager.mesh), step=5).step) == restored_step(manager) == 5
    )
    add(folder / "5")
    with pytest.raises(
        BadCheckpointError, match=r"got 2 in .*step 5: .* \| step 10: .* missing\. Restore a backup"
    ):
        manager.restore(make_state(manager.mesh), step=5)
    with pytest.raises(BadCheckpointError, match=r"checkpoint of step 7 in .*: it has no manifest"):
        manager.manifest(7)


def test_a_damaged_step_is_saved_again_and_put_aside(folder, manager):
    state = make_state(manager.mesh, seed=3)
    (folder / "10" / "state" / "extra").write_text("?")
    manager.restore(state)
    manager.save(at_step(state, 10))
    assert newest_verified(manager) == 10
    assert sorted(path.name for path in folder.iterdir()) == ["10", "10.bad", "5"]
    assert_same_bits(manager.restore(state), at_step(state, 10))


def test_values_that_are_not_those_saved_are_found_after_reading(manager, said, monkeypatch):
    read = restore.read_arrays

    def wrong(folder, abstract):
        state = read(folder, abstract)
        state.params["bias"] = state.params["bias"].at[2].add(1e-6 if folder.name == "10" else 0.0)
        return state

    monkeypatch.setattr(restore, "read_arrays", wrong)
    assert restored_step(manager) == 5
    assert said == [
        "NOT USED: checkpoint of step 10: the values of params/bias are not those that were saved"
    ]


def test_arrays_that_cannot_be_read_are_named(manager, said, monkeypatch):
    read = restore.read_arrays

    def fail(folder, abstract):
        if folder.name == "10":
            raise KeyError("a tree of another kind")
        return read(folder, abstract)

    monkeypatch.setattr(restore, "read_arrays", fail)
    assert restored_step(manager) == 5
    assert said == [
        "NOT USED: checkpoint of step 10: it cannot be read: KeyError: 'a tree of another kind'"
    ]


def test_a_manifest_larger_than_any_is_not_read(folder, manager, said):
    with (folder / "10" / "manifest.json").open("r+b") as file:
        os.truncate(file.fileno(), 65 << 20)
    assert restored_step(manager) == 5
    assert "more than a manifest may have" in said[0]


def test_a_manifest_of_another_model_is_refused_before_anything_is_read(
    folder, manager, monkeypatch
):
    monkeypatch.setattr(restore, "read_arrays", lambda *_: pytest.fail("read"))
    other = jax.tree.map(lambda x: x, make_state(manager.mesh, width=16))
    with pytest.raises(ValueError, match="must hold the arrays of the target"):
        manager.restore(other)
