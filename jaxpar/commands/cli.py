"""The way from a command's arguments to its flags: a function's signature, read by tyro."""

from collections.abc import Callable, Sequence
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
