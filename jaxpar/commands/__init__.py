"""What `python -m jaxpar` can do, a module a command."""
