"""The first line of a run where there is no terminal, printed before JAX is imported, which can take seconds. Imports no JAX.

A recipe begins with

    if __name__ == "__main__":
        import first_line

        first_line.say()

and `run_status.py` prints the lines that follow, whose time counts from this one.
"""

import datetime
import json
import os
import sys
import time

PHASE = "starting"
NO_RUN = {"-h", "--help", "--predict"}  # answered at once, without training
_said: list[float] = []  # the time of the line, if it was printed


def say() -> None:
    """Prints that the run starts, once, unless standard error is a terminal, no run is asked for, or no lines are."""
    if _said:
        return
    words = [word.replace("_", "-") for word in sys.argv[1:]]
    if sys.stderr.isatty() or NO_RUN & {word.partition("=")[0] for word in words} or not _seconds(words) > 0:
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
