"""`python -m jaxpar train gpt --steps 300`: runs a recipe, the script of `recipes/` that an installed jaxpar contains."""

import ast
import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from jaxpar._first_line import import_first_line, recipes
from jaxpar.commands.cli import named, program

# The recipes; the other scripts in the folder are parts of them.
RECIPES = {
    "gpt": "gpt.py",
    "house-prices": "house_prices.py",
    "digits": "digits.py",
    "all-reduce": "all_reduce.py",
    "bloom": "bloom.py",
}


def main(args: Sequence[str]) -> None:
    """Runs a recipe with the flags that follow its name: train gpt --fake-devices 8 --mesh.data 8.

    Args:
        args: The command line after ``train``.

    Raises:
        ValueError: There is no such recipe.
    """
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return
    name, *rest = args
    script = path_of(name)
    called = program()
    sys.argv = [str(script), *rest]
    import_first_line().say()
    sys.path.insert(0, str(script.parent))  # as for `python recipes/gpt.py`: recipes import one another
    cli, recipe = importlib.import_module("cli"), importlib.import_module(script.stem)
    cli.run(recipe.main, recipe.Config, rest, program=f"{called} train {name}")


def path_of(name: str) -> Path:
    """Returns the script of a recipe.

    Raises:
        ValueError: There is no such recipe.
    """
    if name not in RECIPES:
        near = get_close_matches(name.replace("_", "-").removesuffix(".py"), RECIPES, 1)
        meant = f"Did you mean {near[0]}?" if near else "Choose one of these."
        raise ValueError(f"the recipe must be one of {', '.join(RECIPES)}; got {name!r}. {meant}")
    return recipes() / RECIPES[name]


def usage() -> str:
    """Returns the list of recipes, each with the first sentence of its docstring."""
    listed = named({name: _about(recipes() / script) for name, script in RECIPES.items()})
    return f"usage: {program()} train <recipe> [--help] ...\n\n{listed}\n\nscripts: {recipes()}"


def _about(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]
