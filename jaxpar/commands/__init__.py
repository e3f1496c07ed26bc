"""The commands of `python -m jaxpar`: `runs.py` has the short ones, the others a module each; `cli.py` is what they share."""
