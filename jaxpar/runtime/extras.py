"""How a missing package is installed: jaxpar is on no package index, so an extra is installed from the clone."""


def install_extra(extra: str) -> str:
    """Returns the remedy for a package that is missing, without a full stop.

    >>> install_extra("hf")
    "Install it: pip install '.[hf]' in the clone of jaxpar"
    """
    return f"Install it: pip install '.[{extra}]' in the clone of jaxpar"
