"""jaxpar trains a pure JAX function on any number of devices: data, pipeline and tensor parallelism over one mesh.

A name is imported when it is first used (PEP 562), so that ``import jaxpar`` imports no JAX and a program pays for what it
uses. To add a name, add a line to ``__init__.pyi``, which type checkers read too (SPEC 1 of Scientific Python).
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from jaxpar._near_names import no_attribute, public_names

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULE_OF = {
    name.name: str(line.module)
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]
# Where a misspelt name is looked for too, the last one first.
_PARTS = ("huggingface", "planner", "collectives", "schedule", "losses")


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # of a module that is imported next, or of other programs
        raise no_attribute(__name__, name, {})
    if importlib.util.find_spec(f"jaxpar.{name}"):
        found = importlib.import_module(f"jaxpar.{name}")
    elif name in _MODULE_OF:
        found = getattr(
            __import__(_MODULE_OF[name], fromlist=[name]), name
        )  # which may be a module itself
    else:
        parts = [importlib.import_module(f"jaxpar.{part}") for part in _PARTS]
        inner = {own: f"{part.__name__}.{own}" for part in parts for own in public_names(part)}
        raise no_attribute(__name__, name, inner | {own: f"jaxpar.{own}" for own in __all__})
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
