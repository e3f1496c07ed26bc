"""A picture of the layers of pyproject.toml's import contract; the colour of a part is that of its row in architecture.md."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxpar"
PAGE = ROOT / "docs" / "architecture.md"
BOX, ROW, GAP = 0.5, 0.66, 0.2
COLOURS = (
    "#8ab4e0",
    "#f2b45c",
    "#e8d36a",
    "#8fca8b",
    "#bfaede",
    "#e59a84",
    "#8fd0cc",
    "#dfa6c6",
    "#c9c9c9",
)


def layers() -> list[list[str]]:
    """Returns the parts of each layer of the import contract, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    lines = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [re.findall(r"\w+", line) for line in lines]


def groups() -> dict[str, list[str]]:
    """Returns the rows of the page's table of folders: what they are for, and their parts."""
    rows = re.findall(r"^\| (\[.*?) \| (.*?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    found = {
        re.split("[:;]", what)[0]: re.findall(r"\[`(\w+)(?:/|\.py)`\]", links)
        for links, what in rows
    }
    missing = sorted(
        {part for row in layers() for part in row}
        - {part for parts in found.values() for part in parts}
    )
    assert not missing, (
        f"the table of docs/architecture.md must have each part of the contract; it lacks {missing}"
    )
    return found


def draw(panel: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """Draws the layers as rows of boxes, and below them what their colours mean; returns the limits of x and y."""
    from matplotlib.patches import Rectangle

    rows, of_group = layers(), groups()
    colours = {
        part: colour
        for parts, colour in zip(of_group.values(), COLOURS, strict=True)
        for part in parts
    }
    name_of = lambda part: f"{part}/" if (PACKAGE / part).is_dir() else f"{part}.py"
    size_of = lambda part: 0.3 + 0.105 * len(name_of(part))
    length_of = lambda row: sum(map(size_of, row)) + GAP * (len(row) - 1)
    bottom, width = ROW * (len(rows) - 1), max(map(length_of, rows))
    for level, row in enumerate(rows):
        x, y = (width - length_of(row)) / 2, bottom - ROW * level
        for part in row:
            size = size_of(part)
            panel.add_patch(Rectangle((x, y), size, BOX, color=colours[part], ec="white"))
            panel.text(x + size / 2, y + BOX / 2, name_of(part), ha="center", va="center", size=10)
            x += size + GAP
    panel.annotate(
        "",
        (-0.35, 0.0),
        (-0.35, bottom + BOX),
        arrowprops={"arrowstyle": "->", "color": "0.35", "lw": 1.5},
    )
    panel.text(
        -0.5, bottom / 2, "imports", rotation=90, ha="right", va="center", color="0.35", size=11
    )
    lines = -(-len(of_group) // 3)
    for at, (name, colour) in enumerate(zip(of_group, COLOURS, strict=True)):
        x, y = (0.0, 3.5, 10.2)[at // lines], -0.65 - 0.42 * (at % lines)
        panel.add_patch(Rectangle((x, y), 0.28, 0.28, color=colour))
        panel.text(x + 0.4, y + 0.13, name, va="center", size=9.5)
    return (-0.9, width + 0.3), (-0.75 - 0.42 * lines, bottom + BOX + 0.1)
