"""The examples in docstrings, of every module that has any; the other modules are not imported for it."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
TEXTS = {path: path.read_text() for path in sorted((ROOT / "jaxpar").rglob("*.py"))}
WITH_EXAMPLES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): len(found)
    for path, text in TEXTS.items()
    if (found := EXAMPLE.findall(text))
}


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_show(module, capsys):
    found = doctest.testmod(
        importlib.import_module(module), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert found.failed == 0, capsys.readouterr().out
    assert found.attempted == WITH_EXAMPLES[module], (
        "an example stands where doctest does not look for it"
    )


def test_there_are_examples():
    assert len(WITH_EXAMPLES) > 15, WITH_EXAMPLES
