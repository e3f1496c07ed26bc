"""How a missing package is installed: jaxpar is on no package index, so an extra is installed from the clone."""

from collections.abc import Iterator
from contextlib import contextmanager


def install_extra(extra: str) -> str:
    """Returns the remedy for a package that is missing, without a full stop.

    >>> install_extra("hf")
    "Install it: pip install '.[hf]' in the clone of jaxpar"
    """
    return f"Install it: pip install '.[{extra}]' in the clone of jaxpar"


@contextmanager
def needing_extra(rule: str, extra: str) -> Iterator[None]:
    """Adds the rule and the remedy to the error of an import inside that fails.

    Args:
        rule: What needs which package.
        extra: The extra that has it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{rule}; got {error}. {install_extra(extra)}.") from error
