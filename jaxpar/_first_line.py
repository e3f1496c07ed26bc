"""Prints the first line of a recipe's run where there is no terminal, before JAX is imported, which can take seconds.

A recipe imports the package jaxpar before JAX, and the package imports this module first: only here does an import print
something. It imports no JAX.
`jaxpar/run/messages.py` prints the lines that follow, whose time counts from this one.
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path

PHASE = "starting"
NO_RUN = {"-h", "--help", "--predict"}  # answered at once, without training
NO_LINE = ("untrained_model",)  # a script that trains nothing
_said: list[float] = []  # the time of the line, if it was printed


def recipes() -> Path:
    """Returns the folder of the recipes: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parent
    found = package / "recipes"
    return found if found.is_dir() else package.parent / "recipes"


def say(words: list[str]) -> None:
    """Prints that the run starts, unless standard error is a terminal, no run is asked for, or no lines are.

    Args:
        words: The flags of the recipe.
    """
    words = [word.replace("_", "-") for word in words]
    if _said or sys.stderr.isatty() or NO_RUN & {word.partition("=")[0] for word in words} or not _seconds(words) > 0:
        return
    line = f"[0 s] {PHASE}"
    if "--log-json" in words:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": now, "level": "info", "phase": PHASE, "elapsed_seconds": 0.0, "phase_seconds": 0.0})
    _said.append(time.monotonic())
    try:
        print(f"{line}\n", end="", file=sys.stderr, flush=True)
    except OSError:  # of a full disk; the old stream would fail again when the process ends
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115, it is open to the end


def when_said() -> float | None:
    """Returns the time of the line, and forgets it; None if it was not printed."""
    return _said.pop() if _said else None


def _seconds(words: list[str]) -> float:
    """Returns the seconds between two lines, as far as they are known before the flags are parsed."""
    told = os.environ.get("JAXPAR_LOG_SECONDS", "15")
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == "--log-seconds":
            told = value if equals else following
    try:
        return float(told)
    except ValueError:  # the checks of the flags will report it
        return 0.0


def _say_for_this_process() -> None:
    """Prints the line if this process is a recipe's script, or `jaxpar train` or `python -m jaxpar train` with a recipe."""
    program, *words = getattr(sys, "argv", None) or [""]
    # While `python -m` imports the package of a module, the name of the program is -m.
    is_command = Path(program).stem == "jaxpar" or (program == "-m" and "jaxpar" in sys.orig_argv)
    if is_command and words[:1] == ["train"] and words[1:]:
        script, words = recipes() / f"{words[1].replace('-', '_')}.py", words[2:]
    else:
        script = Path(program).absolute()
    if script.parent.resolve() == recipes().resolve() and script.is_file() and script.stem not in NO_LINE:
        say(words)


_say_for_this_process()
