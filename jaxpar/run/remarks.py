"""What a run says of the files of --data: those that are learned although their names say otherwise, and those not read."""

from collections.abc import Sequence
from pathlib import Path

from jaxpar.data.text import is_held_out
from jaxpar.runtime.output import printable

MOST_NAMED = 3


def remark_on_names(paths: Sequence[Path]) -> str:
    """Returns what to say of several --data, some of which are named as if they were held out; "" if none is."""
    named = [path for path in paths if is_held_out(path)]
    if not 0 < len(named) < len(paths):
        return ""
    return (
        f"{_shown(named)}: learned like the other --data, but for a share of its own. Files with val or test in their names "
        "are held out of a folder: put them and the others into one, and name the folder."
    )


def remark_on_others(path: Path, files: Sequence[Path]) -> str:
    """Returns what to say of files beside the .bin files of a folder; "" if there are none."""
    of_tokens = {path, *path.glob("*.bin")}
    others = [file for file in files if file not in of_tokens]
    return f"of {printable(str(path))} only its .bin files are read, not {_shown(others)}" if others else ""


def _shown(files: Sequence[Path]) -> str:
    shown = ", ".join(printable(str(file)) for file in files[:MOST_NAMED])
    return shown + (f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else "")
