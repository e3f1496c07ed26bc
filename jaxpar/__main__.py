"""`jaxpar <command>`, or `python -m jaxpar <command>`: the table of commands, which are in `jaxpar/commands/`.

A command is the function ``main(args) -> exit code or None`` of its module, or the one of its name in `runs.py`. Its module is
imported when it is called. To add a command, write it and add a line here.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from jaxpar import __version__
from jaxpar.commands.cli import named, program
from jaxpar.fields import near_name
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.interrupt import INTERRUPTED, ended_by_interrupt
from jaxpar.runtime.output import printable_lines, take_all_characters, tell, text_of

COMMANDS = {
    "train": "train a recipe: a GPT, house prices, digits, and others; train --help lists them",
    "plan": "rank meshes and settings for a model on a cluster, with bytes, traffic and time",
    "manifest": "write a job for Kubernetes or SLURM that starts a run",
    "launch": "start several processes of a program on this machine, as on a cluster",
    "export": "write a run's model as a folder for Hugging Face's transformers",
    "watch": "serve the report of a run while it trains: loss, timeline, shards, memory, traffic",
    "serve": "answer HTTP requests for a trained model, for trying it",
    "plot": "plot the loss curves of several runs, as text and as a picture",
    "doctor": "print versions, devices, settings and cluster variables, to paste into an issue",
}
QUICK = (
    "plan",
    "manifest",
    "plot",
    "doctor",
)  # which have nothing to save, and no handler of their own
IN_RUNS = ("launch", "export", "watch", "serve", "plot")


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code.

    Args:
        args: The command and its arguments; by default those of the command line.
    """
    name, *rest = (sys.argv[1:] if args is None else args) or ["--help"]
    if name != "manifest":  # whose output is a file, in which a wrong character is worse than none
        take_all_characters()
    try:
        with ended_by_interrupt() if name in QUICK else nullcontext():
            return _run(name, rest)
    except BrokenPipeError:  # the reader of a pipe, such as head, has exited
        sys.stdout = None
        return ExitCode.DONE
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED
    except Exception as error:
        usual = (
            ExitCode.BAD_CONFIG
            if isinstance(error, (ValueError, TypeError, OSError, ImportError))
            else None
        )
        code = getattr(error, "exit_code", usual)
        if code is None:  # a bug
            raise
        tell(f"error: {printable_lines(text_of(error))}")
        return code


def _run(name: str, args: Sequence[str]) -> int:
    if name in ("-h", "--help", "--version"):
        print(f"jaxpar {__version__}" if name == "--version" else usage(), flush=True)
        return ExitCode.DONE
    if name not in COMMANDS:
        near = near_name(name, COMMANDS)
        meant = f" Did you mean {near}?" if near else ""
        raise ValueError(f"the command must be one of {', '.join(COMMANDS)}; got {name!r}.{meant}")
    return command(name)(args) or ExitCode.DONE


def command(name: str) -> Callable[[Sequence[str]], int | None]:
    """Returns the function of a command."""
    module = importlib.import_module(f"jaxpar.commands.{'runs' if name in IN_RUNS else name}")
    return getattr(module, name if name in IN_RUNS else "main")


def usage() -> str:
    """Returns the list of commands."""
    called = program()
    return f"usage: {called} <command> [--help] ...\n       {called} --version\n\n{named(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
