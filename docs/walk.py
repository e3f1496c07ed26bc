"""The walk of a batch through the code in docs/architecture.md, whose lines name a file, a line and a function.

python docs/walk.py    writes the numbers of today's lines into the page
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_STOP = re.compile(r"^( [ \d]  )(\S+\.py):(\d+)( +)(\S+)", re.MULTILINE)


class Stop(NamedTuple):
    """A line of the walk.

    Attributes:
        number: How deep it is; 0 for the way back.
        file: The file, in jaxpar/.
        line: The line of the function.
        function: The function, after its class if it has one.
    """

    number: int
    file: str
    line: int
    function: str


def stops(text: str) -> list[Stop]:
    """Returns the lines of the walk in a text."""
    found = _STOP.findall(text)
    return [
        Stop(int(f"0{number.strip()}"), file, int(line), name)
        for number, file, line, _, name in found
    ]


def line_of(file: str, function: str) -> int:
    """Returns the line of a function, or of a class's method, in a file of jaxpar/."""
    node: ast.AST = ast.parse((ROOT / "jaxpar" / file).read_text())
    for name in function.split("."):
        inside = ast.walk(node)
        node = next(each for each in inside if getattr(each, "name", None) == name)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef), f"{function} is none of them"
    return node.lineno


def renumbered(text: str) -> str:
    """Returns a text with the numbers of today's lines in its walk."""

    def stop(found: re.Match) -> str:
        number, file, line, space, function = found.groups()
        now = str(line_of(file, function))
        room = len(line) + len(space) - len(now)
        return f"{number}{file}:{now}{' ' * room}{function}"

    return _STOP.sub(stop, text)


if __name__ == "__main__":
    PAGE.write_text(renumbered(PAGE.read_text()))
