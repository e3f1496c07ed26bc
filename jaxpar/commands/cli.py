"""What commands share: the way from a signature to flags, read by tyro, and files that a user names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import tyro

Result = TypeVar("Result")


def call(function: Callable[..., Result], args: Sequence[str], command: str) -> Result:
    """Returns what a function gives, called with the flags of a command line; its docstring is the help.

    An unknown flag ends the process with code 2 and a suggestion.

    Args:
        function: Whose parameters are the flags.
        args: The command line after the command.
        command: Its name.
    """
    return tyro.cli(function, args=args, prog=f"python -m jaxpar {command}", config=(tyro.conf.FlagCreatePairsOff,))


def read_file(path: Path, flag: str) -> str:
    """Returns the text of the file that a flag names; raises ValueError where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{flag} must name a text file that can be read; got {path}: {why}. Name one that is there."
        ) from error


def make_folder(path: Path, flag: str = "--out-dir") -> None:
    """Makes the folder that a flag names; raises ValueError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{flag} must be a folder that can be written to; got {path}: {error.strerror}. Name another."
        ) from error
