"""The notebook for researchers prints what it shows, and has what a notebook needs to open anywhere."""

import contextlib
import io
import json
from pathlib import Path

import pytest

import jaxpar
from tests.support import doc_pages

NOTEBOOK = json.loads((Path(__file__).parents[1] / "docs" / "your_model.ipynb").read_text())


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(monkeypatch):
    monkeypatch.setattr(jaxpar, "use_fake_devices", lambda num_devices: None)  # they are here
    names, num_shown = {}, 0
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert bool(shown) == bool(printed.getvalue()), cell["source"]
        doc_pages.check_quoted(shown, printed.getvalue(), numbers=True)
        num_shown += bool(shown)
    assert num_shown == 3
    assert (
        max(abs(one - eight) for one, eight in zip(names["on_one"], names["on_eight"], strict=True))
        < 1e-5
    )


def test_the_notebook_has_the_form_of_version_4():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in NOTEBOOK["cells"]:
        needed = {"cell_type", "id", "metadata", "source"}
        needed |= {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == needed
    counts = [cell["execution_count"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "the cells were run in order"
