"""A shell around the program of a pod, `sh -c "..."`: which signals reach the program, and whose exit code is the pod's."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from jaxpar.jobs.job import is_python
from jaxpar.jobs.workload import Workload

SHELLS = ("sh", "bash", "dash", "ash", "zsh")
OPERATORS = ";|&\n"
REDIRECTED = re.compile(r"\d*[<>]&[\d-]|&>")  # an & that is no operator
Command = tuple[Sequence[str], str]  # the words of a command in a script, and the operator after it


def shell_remarks(pods: Workload) -> Iterator[str]:
    """Yields a line for each way in which a shell changes how a program is stopped, and what follows its end."""
    script = script_in(pods.words)
    if script is None or "trap" in script:
        return
    commands = commands_in(script)
    position = next((at for at, (words, _) in enumerate(commands) if _is_program(words)), -1)
    words, operator = commands[position] if commands else ((), "")
    is_piped = any(after == "|" for _, after in commands)
    shell = PurePosixPath(pods.words[0]).name
    if "exec" not in words or is_piped:
        yield (
            f"{pods.path} starts its program by {shell}, which passes no SIGTERM on: a drained pod neither saves nor ends "
            "before its grace period does. Write exec before the program, as the last command and without a pipe"
        )
    of_pipe = operator == "|" and "pipefail" not in script
    if pods.kind != "Deployment" and (of_pipe or operator in (";", "\n", "&", "||")):
        yield (
            f"{pods.path} has {operator!r} after its program: the exit code is that of what {shell} runs last, so a run that "
            "failed, or was asked to stop, counts as done and is not restarted. Make the program the last command"
        )


def script_in(words: Sequence[str]) -> str | None:
    """Returns the script that a command line gives to a shell; None if it starts none.

    >>> script_in(["/bin/sh", "-ec", "sleep 1; python train.py"])
    'sleep 1; python train.py'
    """
    if not words or PurePosixPath(words[0]).name not in SHELLS:
        return None
    flags = (at for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word))
    at = next(flags, len(words))
    return words[at + 1] if at + 1 < len(words) else None


def commands_in(script: str) -> list[Command]:
    """Returns the commands of a script, each with the operator after it; of one that cannot be read, none.

    >>> commands_in("python 'a;b.py' 2>&1 | tee log")
    [(['python', 'a;b.py'], '|'), (['tee', 'log'], '')]
    """
    lexer = shlex.shlex(REDIRECTED.sub(" ", script), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.commenters = " \t\r", ""
    found: list[Command] = []
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= {*OPERATORS}:
                found.append((words, word.strip("\n") or "\n"))
                words = []
            else:
                words.append(word)
    except ValueError:  # a quote that is not closed
        return []
    last = [(words, "")] if words else []
    commands = [each for each in found + last if each[0]]
    if commands and not last and commands[-1][1] != "&":  # nothing follows the last operator
        commands[-1] = (commands[-1][0], "")
    return commands


def _is_program(words: Sequence[str]) -> bool:
    runs = any(is_python(word) for word in words) and "pip" not in words
    return runs or any(word.endswith(".py") or word == "jaxpar" for word in words)
