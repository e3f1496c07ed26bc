"""Prints the first line of `jaxpar train` where there is no terminal, before JAX is imported, which can take seconds.

To run any command Python first imports the package jaxpar, and with it JAX. So the package imports this module before all
others, and only here does an import print something. It imports no JAX. The line itself is in `recipes/first_line.py`.
"""

import sys


def say() -> None:
    """Prints the line if this process is `jaxpar train` or `python -m jaxpar train`, with a recipe."""
    program, *words = getattr(sys, "argv", None) or [""]
    name = program.replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    # While `python -m` imports the package of a module, the name of the program is -m.
    if words[:1] != ["train"] or not (name == "jaxpar" or (name == "-m" and "jaxpar" in sys.orig_argv)):
        return
    from jaxpar.commands.train import RECIPES, import_first_line

    if words[1:] and words[1] in RECIPES:
        import_first_line().say()


say()
