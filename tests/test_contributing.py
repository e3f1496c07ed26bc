"""The files that a new schedule, family, callback, code, op kind or axis takes are those that CONTRIBUTING.md names.

The names of all schedules, families and flags of monitoring are where a user looks for them.
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from jaxpar.huggingface.families import FAMILIES
from jaxpar.run.flags import MonitoringFlags
from jaxpar.schedule import SCHEDULES
from tests.support import doc_pages

ROOT = Path(__file__).parents[1]
TABLES = ("jaxpar/models/transformer/presets.toml", "jaxpar/huggingface/families.json")
ROW = re.compile(
    r"^\| (?P<what>[^|]*) \| `(?P<example>[^|]*)` \| (?P<count>\d+) \| (?P<files>[^|]*) \| (?P<tests>[^|]*) \|$",
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


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_the_tests_to_check_with_are_there(row):
    tests = re.findall(r"`(\w+)`", row["tests"])
    assert tests
    assert [name for name in tests if not (ROOT / "tests" / f"{name}.py").exists()] == []


def lines_with(word: str, path: str) -> str:
    """The lines of a file with a word, and each with the line after it, where the help of a flag may be."""
    lines = (ROOT / path).read_text().splitlines()
    return "\n".join("\n".join(lines[at : at + 2]) for at, line in enumerate(lines) if word in line)


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("schedule: str", "recipes/gpt.py"),
        ("schedule: str", "recipes/digits.py"),
        ("schedule: str", "recipes/bloom.py"),
        ("schedule: Fixes", "jaxpar/commands/plan_flags.py"),
        ("name: gpipe", "jaxpar/schedule/orders.py"),
        ("`--schedule", "docs/cheatsheet.md"),
        ("`--schedule", "docs/zh/cheatsheet.md"),
    ],
)
def test_the_help_of_a_schedule_and_the_cheat_sheets_name_each(word, path):
    told = lines_with(word, path)
    assert [name for name in SCHEDULES if not re.search(rf"\b{name}\b", told)] == [], path


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_the_page_on_pretrained_models_has_each_family(folder):
    page = (ROOT / folder / "pretrained.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_each_flag_of_monitoring_is_on_a_page(folder):
    pages = "".join(
        (ROOT / folder / f"{name}.md").read_text() for name in ("watching", "cheatsheet")
    )
    flags = [f"--{each.name.replace('_', '-')}" for each in dataclasses.fields(MonitoringFlags)]
    assert [flag for flag in flags if not re.search(rf"{flag}\b(?!-)", pages)] == []
