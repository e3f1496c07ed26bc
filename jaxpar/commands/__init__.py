"""The commands of `python -m jaxpar`: `runs.py` has the short ones, the others a module each.

They share `cli.py`; `recipe.py` is the command line of a recipe.
"""
