"""The commands of `python -m jaxpar`, one module per command; `cli.py` has what they share."""
