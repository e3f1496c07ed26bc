"""The commands of `python -m jaxpar`, one module per command; `cli.py` and `program.py` have what they share."""
