"""Prints the first line of `jaxpar train` where there is no terminal, before JAX is imported, which can take seconds.

To run any command Python first imports the package jaxpar, and with it JAX. So the package imports this module before all
others, and only here does an import print something. It imports no JAX. The line itself is in `recipes/first_line.py`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def recipes() -> Path:
    """Returns the folder of the recipes: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parent
    found = package / "recipes"
    return found if found.is_dir() else package.parent / "recipes"


def import_first_line() -> Any:
    """Returns the recipes' module ``first_line``."""
    sys.path.insert(0, str(recipes()))
    try:
        return importlib.import_module("first_line")
    finally:
        sys.path.remove(str(recipes()))


def _say() -> None:
    """Prints the line if this process is `jaxpar train` or `python -m jaxpar train`, with a recipe."""
    program, *words = getattr(sys, "argv", None) or [""]
    # While `python -m` imports the package of a module, the name of the program is -m.
    is_command = Path(program).stem == "jaxpar" or (program == "-m" and "jaxpar" in sys.orig_argv)
    if (
        is_command
        and words[:1] == ["train"]
        and words[1:]
        and (recipes() / f"{words[1].replace('-', '_')}.py").is_file()
    ):
        import_first_line().say()


_say()
