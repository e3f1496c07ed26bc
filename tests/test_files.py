"""Files that are written whole, or not at all."""

import pytest

from jaxpar.runtime.files import write_atomically, write_whole


def test_a_file_is_replaced_by_the_new_text(tmp_path):
    for text in ("old", "新\n"):
        write_whole(tmp_path / "a.json", text)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "新\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("an error of a library")], ids=["os", "other"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path, error):
    (tmp_path / "a.json").write_text("old")

    def write(path):
        path.write_text("ne")
        raise error

    with pytest.raises(type(error), match=str(error)):
        write_atomically(tmp_path / "a.json", write)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}
