"""Arrays on disk: what their own files say is not believed, and what is missing is not read as zeros."""

import resource
import shutil

import numpy as np
import pytest

import jaxpar
from jaxpar.checkpoint import BadCheckpointError
from jaxpar.checkpoint.array_file import ArrayFile, chunk_shape
from jaxpar.checkpoint.stored_params import open_stored_params
from tests.support import crafted_checkpoint as crafted
from tests.support.tiny_state import at_step, make_state

FLOAT32 = np.dtype("float32")
MOST_BYTES = 1 << 30  # that memory may grow by, where a chunk claims 4 GiB or more


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a step whose "w_up" has two chunks, and its "bias" one."""
    folder, mesh = tmp_path_factory.mktemp("saved"), jaxpar.make_mesh(tensor=2)
    jaxpar.CheckpointManager(folder, mesh).save(at_step(make_state(mesh), 5))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def regular(*shape):
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def test_the_parts_of_an_array_are_those_of_the_whole(folder):
    file = ArrayFile(folder / "5", "params/w_up", (4, 8), FLOAT32)
    assert file.chunk_shape == (4, 4)
    whole = file.read((slice(None), slice(None)))
    chunks = list(file.chunks())
    np.testing.assert_array_equal(
        np.concatenate([file.read(chunk) for chunk in chunks], axis=1), whole
    )
    assert np.any(whole)
    scalar = ArrayFile(folder / "5", "step", (), np.dtype("int32"))
    assert [scalar.read(chunk) for chunk in scalar.chunks()] == [5]


@pytest.mark.parametrize("shape", [(2**40,), (9,), (0,), (-1,), (8, 1), (True,), ("8",)], ids=str)
def test_chunks_larger_than_their_array_are_refused_before_anything_is_allocated(folder, shape):
    crafted.change_metadata(folder / "5", "params.bias", chunk_grid=regular(*shape))
    with pytest.raises(
        BadCheckpointError, match=r"chunks must be no larger than the array, \[8\]; got \["
    ):
        open_stored_params(folder)


def test_a_chunk_larger_than_memory_is_refused_although_the_array_is_as_large():
    raw = b'{"chunk_grid": {"configuration": {"chunk_shape": [1099511627776]}}, "codecs": [{"name": "bytes"}]}'
    with pytest.raises(
        ValueError, match=r"memory must have room for it; got 4,398,046,511,104 bytes for w"
    ):
        chunk_shape(raw, "w", (2**40,), FLOAT32)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b" " * (2 << 20), "must be small; got 2097152 bytes"),
        (b"[" * 100_000, "must be as Orbax writes it"),
        (b"{}", "must be as Orbax writes it"),
        (b"\xff", "must be as Orbax writes it"),
        (
            b'{"chunk_grid": {"configuration": {"chunk_shape": [8]}}, "codecs": [{"name": "blosc"}]}',
            r"got \['blosc'\]",
        ),
        (b'{"chunk_grid": {"configuration": {"chunk_shape": [8]}}, "codecs": []}', r"got \[\]"),
    ],
)
def test_other_metadata_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        chunk_shape(raw, "w", (8,), FLOAT32)


@pytest.mark.parametrize("says", [None, 32, 34_000 * crafted.BLOCK_BYTES % 2**32])
def test_a_small_chunk_that_unpacks_to_4_gib_is_refused_before_it_is_allocated(folder, says):
    crafted.replace_chunk(folder / "5", "params.bias", crafted.bomb(34_000, says=says))
    params, _ = open_stored_params(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadCheckpointError, match=r"params/bias of step 5 in .*: ValueError: "):
        np.asarray(params["bias"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_BYTES >> 10


def test_an_array_of_another_shape_or_none_is_named(folder):
    with pytest.raises(
        ValueError,
        match=r"must be that of its manifest; got float32\[8\] for params/bias in .*int8\[8\]",
    ):
        ArrayFile(folder / "5", "params/bias", (8,), np.dtype("int8"))
    with pytest.raises(
        ValueError, match="must hold each array of its manifest; got none for params/other"
    ):
        ArrayFile(folder / "5", "params/other", (8,), FLOAT32)


def test_a_missing_chunk_is_an_error_on_every_way_to_its_values(folder):
    crafted.lose_chunks(folder / "5", "params.w_up")
    params, _ = open_stored_params(folder)
    for read in (lambda: params["w_up"][0], lambda: np.asarray(params["w_up"])):
        with pytest.raises(BadCheckpointError, match=r"params/w_up of step 5 .* is missing"):
            read()
    manager = jaxpar.CheckpointManager(folder, jaxpar.make_mesh(), say=lambda text: None)
    with pytest.raises(BadCheckpointError, match=r"step 5: it cannot be read: .* is missing"):
        manager.restore(make_state(manager.mesh))
