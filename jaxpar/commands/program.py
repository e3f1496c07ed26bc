"""The command by which the user called jaxpar, for usages and messages."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.printable import tell


def program() -> str:
    """Returns ``jaxpar`` for its script, else ``python -m jaxpar``, since the script may not be on the PATH."""
    return "jaxpar" if Path(sys.argv[0]).stem == "jaxpar" else "python -m jaxpar"


@contextmanager
def with_example(args: Sequence[str], example: str) -> Iterator[None]:
    """Prints an example after the message about a command in the ``with`` block that needs arguments and was given none."""
    try:
        yield
    except SystemExit as end:
        if end.code == ExitCode.BAD_CONFIG and not args and example:
            tell(f"for example: {program()} {example}")
        raise
