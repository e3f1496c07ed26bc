"""`python -m jaxpar train gpt --steps 300`: runs a recipe, the script of `recipes/` that an installed jaxpar contains."""

import ast
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from jaxpar.commands.cli import named, program
from jaxpar.fields import near_name

RECIPES = ("gpt", "house-prices", "digits", "all-reduce", "bloom")


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
    called = f"{program()} train {name}"
    sys.argv = [str(script), *rest]
    module = load(script)
    from jaxpar.commands import recipe  # with tyro, which only a recipe needs

    recipe.run(module.main, module.Config, rest, program=called)


def path_of(name: str) -> Path:
    """Returns the script of a recipe.

    Raises:
        ValueError: There is no such recipe.
    """
    if name not in RECIPES:
        near = near_name(name.replace("_", "-").removesuffix(".py"), RECIPES)
        meant = f"Did you mean {near}?" if near else "Choose one of these."
        raise ValueError(f"the recipe must be one of {', '.join(RECIPES)}; got {name!r}. {meant}")
    return recipes() / f"{name.replace('-', '_')}.py"


def recipes() -> Path:
    """Returns the folder of the recipes: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def load(script: Path) -> ModuleType:
    """Returns the module of a script, of an installed jaxpar or of a checkout, which imports what is beside it."""
    name = f"recipes.{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module


def usage() -> str:
    """Returns the list of recipes, each with the first sentence of its docstring."""
    listed = named({name: _about(path_of(name)) for name in RECIPES})
    return f"usage: {program()} train <recipe> [--help] ...\n\n{listed}\n\nscripts: {recipes()}"


def _about(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]
