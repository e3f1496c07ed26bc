"""Checks by pydantic: nothing is converted, and a message has the path of the field, the rule, the value and the remedy."""

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field

from jaxpar import fields
from tests.support.waiting import WAIT_SECONDS


@dataclass(frozen=True)
class Point:
    x: int
    tags: tuple[str, ...]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


def test_json_becomes_the_dataclass():
    assert fields.read(
        Point, {"x": 3, "tags": ["a"], "weight": 2}, "a point", "Write it."
    ) == Point(3, ("a",), 2.0)
    assert fields.read_json(list[Point], b'[{"x": 3, "tags": []}]', "points", "Write them.") == [
        Point(3, ())
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": "3", "tags": []}, 'x of a point must be an integer; got "3". Write it.'),
        ({"x": 3.0, "tags": []}, "x of a point must be an integer; got 3.0. Write it."),
        ({"x": True, "tags": []}, "x of a point must be an integer; got true. Write it."),
        ({"x": 3, "tags": ["a", 1]}, "tags[1] of a point must be a string; got 1. Write it."),
        ({"x": 3, "tags": [], "weight": 0}, "weight of a point must be above 0; got 0. Write it."),
        (
            {"x": 3, "tags": [], "weight": float("nan")},
            "weight of a point must be a finite number; got NaN. Write it.",
        ),
        ({"tags": []}, "a point must have the field 'x'; got 'tags'. Write it."),
        ([0] * 9, "a point must be an object; got an array of 9. Write it."),
        (
            {"x": "\x1b[2J" + "a" * 100, "tags": []},
            r'x of a point must be an integer; got "\u001b[2J',
        ),
    ],
)
def test_what_is_wrong_is_said(value, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        fields.read(Point, value, "a point", "Write it.")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 200


def test_text_that_is_no_json_is_said():
    with pytest.raises(
        ValueError, match=r"^a point must be JSON: key must be a string .* Write it\.$"
    ):
        fields.read_json(Point, "{x", "a point", "Write it.")


def test_the_fields_of_a_dataclass_are_checked_as_they_are():
    fields.check(Point(3, ("a",), 2), "Give others.")
    with pytest.raises(ValueError, match=r"^tags must be a string; got 1. Give others\.$"):
        fields.check(Point(3, (1,)), "Give others.")  # pyright: ignore[reportArgumentType]


def test_jaxpar_is_imported_without_pydantic():
    code = "import sys; sys.modules['pydantic'] = None; import jaxpar, jaxpar.fields"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_SECONDS)
