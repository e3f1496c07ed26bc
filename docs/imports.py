"""Which part of jaxpar imports which, read from the source, and a picture of it in the layers of pyproject.toml's contract."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxpar"
WIDTH = 12.0
COLOURS = ("#5b92d0", "#f2b45c", "#8fca8b", "#bfaede")


def layers() -> list[list[str]]:
    """Returns the parts of each layer of the import contract, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [re.findall(r"\w+", line) for line in lines]


def imports() -> dict[str, set[str]]:
    """Returns for each part the others that its modules import, functions included."""
    parts = {part for layer in layers() for part in layer}
    return {part: _imported(part) & parts - {part} for part in parts}


def direct(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the edges that no longer path implies (the transitive reduction)."""

    def reached(part: str) -> set[str]:
        found, new = set(), {part}
        while new:
            new = set().union(*(edges[each] for each in new)) - found
            found |= new
        return found

    beyond = {part: reached(part) for part in edges}
    return {
        part: {to for to in targets if not any(to in beyond[via] for via in targets - {to} if part not in beyond[via])}
        for part, targets in edges.items()
    }


def draw(panel: Any) -> tuple[float, float]:
    """Draws the layers as rows of boxes, folders blue and modules yellow, with an arrow for each direct import.

    Returns:
        The width and the height of what was drawn.
    """
    from matplotlib.patches import Rectangle

    rows, boxes = layers(), {}
    for level, row in enumerate(rows):
        y, sizes = 1.15 * (len(rows) - 1 - level), [0.55 + 0.085 * len(part) for part in row]
        gap = (WIDTH - sum(sizes)) / (len(row) + 1)
        x = gap
        for part, size in zip(row, sizes, strict=True):
            boxes[part] = (x, y, size)
            x += size + gap
    for part, targets in direct(imports()).items():
        for to in targets:
            (x, y, size), (to_x, to_y, to_size) = boxes[part], boxes[to]
            start, end = (x + size / 2, y), (to_x + to_size / 2, to_y + 0.5)
            if y == to_y:
                start, end = (x if x > to_x else x + size, y + 0.25), (to_x if x < to_x else to_x + to_size, y + 0.25)
            panel.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "0.55", "lw": 0.7}, zorder=1)
    for part, (x, y, size) in boxes.items():
        is_folder = (PACKAGE / part).is_dir()
        panel.add_patch(Rectangle((x, y), size, 0.5, color=COLOURS[0 if is_folder else 1], ec="white", zorder=2))
        name = f"{part}/" if is_folder else f"{part}.py"
        panel.text(x + size / 2, y + 0.25, name, ha="center", va="center", size=9, zorder=3)
    return WIDTH, 1.15 * len(rows)


def _files(part: str) -> list[Path]:
    module = PACKAGE / f"{part}.py"
    return [module] if module.is_file() else sorted((PACKAGE / part).rglob("*.py"))


def _imported(part: str) -> set[str]:
    names: set[str] = set()
    for path in _files(part):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "jaxpar":
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpar."):
                names.add((node.module or "").split(".")[1])
    return names
