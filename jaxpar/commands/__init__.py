"""The commands of `python -m jaxpar`, one module per command."""
