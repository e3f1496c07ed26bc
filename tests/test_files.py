"""Files that are written whole, or not at all."""

import errno
import os
import stat

import numpy as np
import pytest

from jaxpar.checkpoint.export import export_safetensors
from jaxpar.runtime.output import write_atomically, write_whole


def test_a_file_is_replaced_by_the_new_text(tmp_path):
    for text in ("old", "新\n"):
        write_whole(tmp_path / "a.json", text)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "新\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)], ids=oct
)
def test_a_file_that_a_library_creates_for_its_owner_has_the_permissions_of_the_umask(
    tmp_path, umask, mode
):
    before = os.umask(umask)
    try:
        tmp_path.joinpath("a.part").touch(0o400)  # left behind by a process that was killed
        write_atomically(
            tmp_path / "a", lambda part: os.replace(make_private(tmp_path / "b"), part)
        )
        export_safetensors(tmp_path / "c", {"w": np.zeros(2)})
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "a": mode,
        "c": mode,
    }


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")  # as /dev/stdout is
    for name in ("pipe", "link"):
        with pytest.raises(FileExistsError, match="exists and is no regular file"):
            write_whole(tmp_path / name, "new")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def make_private(path):
    """Makes a file as tempfile does."""
    path.touch(0o600)
    return path


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the source of a copy"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["copy", "safetensors"],
)
def test_a_full_disk_is_named_by_the_file_that_is_written(tmp_path, error):
    def write(path):
        raise error

    with pytest.raises(OSError, match="No space left") as raised:
        write_atomically(tmp_path / "a", write)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))


@pytest.mark.parametrize(
    "error", [OSError("full"), RuntimeError("an error of a library")], ids=["os", "other"]
)
def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path, error):
    (tmp_path / "a.json").write_text("old")

    def write(path):
        path.write_text("ne")
        raise error

    with pytest.raises(type(error), match=str(error)):
        write_atomically(tmp_path / "a.json", write)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}
