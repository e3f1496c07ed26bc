"""The program on a command line: where it begins, the script that a misspelt one means, and whether there are GPUs for it."""

from collections.abc import Sequence
from pathlib import Path

from jaxpar.fields import near_name
from jaxpar.gpus import gpu_nodes

OTHER_GPUS = ("/dev/dxg", "/dev/kfd")  # Windows' and AMD's, which are not counted


def split_command(args: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns the launcher's own options and the command that follows them; each option but --help takes a value.

    The two may be separated by --.

    >>> split_command(["-n", "2", "recipes/gpt.py", "--steps", "3"])
    (['-n', '2'], ('recipes/gpt.py', '--steps', '3'))
    """
    position = 0
    while position < len(args) and args[position].startswith("-") and args[position] != "--":
        position += 1 if "=" in args[position] or args[position] in ("-h", "--help") else 2
    return list(args[:position]), tuple(args[position + ("--" in args[position : position + 1]) :])


def near_script(given: Path) -> Path | None:
    """Returns the script of its folder that a misspelt one means; None if there is none."""
    folder = given.parent
    known = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    near = near_name(given.name, known)
    return folder / near if near else None


def check_gpus(num_processes: int, gpus_per_process: int) -> None:
    """Raises ValueError if processes shall have GPUs that this machine has not, as far as its device files tell."""
    found = gpu_nodes()
    if num_processes * gpus_per_process > len(found) and not any(
        Path(other).exists() for other in OTHER_GPUS
    ):
        raise ValueError(
            f"--gpus-per-process needs GPUs of this machine; got {gpus_per_process} for each of {num_processes} processes, and "
            f"{', '.join(found) or 'no /dev/nvidia0'}. Choose fewer, or leave it out for CPU devices."
        )
