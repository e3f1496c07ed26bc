"""`python -m jaxpar launch`: starts several processes of a program on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.commands.program import program, with_example
from jaxpar.commands.terminal_width import wrapped
from jaxpar.runtime.launch import Launch, run, split_command
from jaxpar.runtime.supervise import supervise


def main(args: Sequence[str]) -> int:
    """Starts several processes of a program on this machine: launch -n 2 --devices-per-process 4 recipes/gpt.py --steps 9.

    Args:
        args: The command line after ``launch``: options, the program and its arguments.
    """
    options, command = split_command(args)

    def read(
        num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"], help="Number of processes.")],
        devices_per_process: Annotated[int, tyro.conf.arg(help="Fake CPU devices per process.")] = 1,
        gpus_per_process: Annotated[int, tyro.conf.arg(help="GPUs per process, in place of CPU devices.")] = 0,
        port: Annotated[int, tyro.conf.arg(help="Port on which process 0 listens; 0: a free one.")] = 0,
        log_dir: Annotated[Path, tyro.conf.arg(help="Folder for the logs of the processes.")] = Path("runs/launch"),
        max_restarts: Annotated[
            int, tyro.conf.arg(help="Restart a failed run at most so often, from its last intact checkpoint.")
        ] = 0,
    ) -> tuple[Launch, int]:
        return Launch(command, num_processes, devices_per_process, gpus_per_process, port, log_dir), max_restarts

    about = wrapped((main.__doc__ or "").partition("\n")[0])
    with with_example(args, "launch -n 2 --devices-per-process 4 recipes/gpt.py --mesh.data 8"):
        launch, max_restarts = tyro.cli(read, args=options, prog=f"{program()} launch", description=about)
    return supervise(launch, max_restarts) if max_restarts else run(launch)
