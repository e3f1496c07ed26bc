"""The commands of `python -m jaxpar`: `runs.py` has the short ones, the others a module each.

They share `cli.py`; `recipe.py` is the command line of a recipe. `plan_flags.py` has the flags of `plan`, `plan_model.py` its
model, `plans.py` what it finds.
"""
