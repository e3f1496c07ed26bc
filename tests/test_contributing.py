"""The files that a new schedule, family, callback, code, op kind or axis takes are those that CONTRIBUTING.md names."""

import ast
import re
from pathlib import Path

import pytest

from tests.support import doc_pages

ROOT = Path(__file__).parents[1]
TABLES = ("jaxpar/models/transformer/presets.toml", "jaxpar/huggingface/families.json")
ROW = re.compile(
    r"^\| (?P<what>[^|]*) \| `(?P<example>[^|]*)` \| (?P<count>\d+) \| (?P<files>[^|]*) \|$",
    re.MULTILINE,
)
ROWS = [match.groupdict() for match in ROW.finditer((ROOT / "CONTRIBUTING.md").read_text())]


def names_in(path: Path) -> set[str]:
    """Returns the names and whole strings of a module's code, or the words of a table of data, in lower case."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"[\w-]+", text.lower()))
    found = set()
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "attr", "arg", "value"):
            value = getattr(node, field, None)
            found |= {value} if isinstance(value, str) else set()
    return {name if len(name) == 1 else name.lower() for name in found}


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    """The names in each file of the package and the recipes."""
    folders = [(ROOT / folder).rglob("*") for folder in ("jaxpar", "recipes")]
    paths = [path for folder in folders for path in folder if path.suffix == ".py"]
    paths += [ROOT / table for table in TABLES]
    return {str(path.relative_to(ROOT)): names_in(path) for path in paths}


def test_the_page_has_all_six():
    assert [row["example"] for row in ROWS] == [
        "zb-v",
        "olmo2",
        "tensorboard",
        "nf4-dq",
        "R",
        "replica",
    ]


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_the_files_with_the_name_of_an_example_are_those_of_the_page(names, row):
    told = doc_pages.LINK.findall(row["files"])
    has_it = [path for path, found in names.items() if row["example"] in found]
    assert sorted(told) == sorted(has_it), (
        f"of {row['example']} in CONTRIBUTING.md, and in the code"
    )
    assert int(row["count"]) == len(told)
