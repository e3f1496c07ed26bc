"""Command lines, checks and messages that all recipes share, whose flags are in shared_flags.py. No training loop.

A recipe is a frozen dataclass of flags and a main function, which first checks and then trains:

    @dataclass(frozen=True, kw_only=True)
    class Config(cli.SharedFlags):
        learning_rate: float = 0.1
        '''Step size of gradient descent, in units of the standardised target.'''

    def main(config: Config) -> None:
        with cli.checks():                      # errors in here are the user's: one message, exit code 2
            mesh = cli.make_mesh(config)
            ...
        cli.write_config(config)                # errors from here on are bugs: a traceback
        ...

    if __name__ == "__main__":
        cli.run(main, Config)
"""

import dataclasses
import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import run_status
import tyro
from flag_suggestions import suggested
from grouped_help import asks_for_help, grouped
from run_folder import CHECKPOINTS, has_run
from shared_flags import Mesh, SharedFlags, check_shared

import jaxpar
from jaxpar.checkpoint import BadCheckpointError, CheckpointManager, has_steps
from jaxpar.commands.cli import wrapped
from jaxpar.commands.flag_names import flag_names, in_flags
from jaxpar.compile_only import start_on_cpu
from jaxpar.metrics import exporters
from jaxpar.runtime.distributed import leave
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.files import write_whole
from jaxpar.runtime.lease import released_at_end
from jaxpar.runtime.preemption import StopSignals
from jaxpar.runtime.printable import printable_lines, tell
from jaxpar.runtime.supervise import RESUME_IF_ANY, RESUME_VARIABLE

BEGAN = time.monotonic()
INTERRUPTED = 130  # the exit code of Ctrl-C, as in shells
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
DISK_FAULTS = (*FULL, errno.EROFS, errno.EIO, errno.ESTALE)  # and of one that has become read-only or unavailable

_command: list[str] = []  # by which the user started the recipe of this process

Flags = TypeVar("Flags")


class ConfigError(Exception):
    """Flags or files of the user cannot be used; the message states the rule, the values and the remedy."""


@contextmanager
def checks() -> Iterator[None]:
    """Turns errors of a check into a ConfigError: ValueError, TypeError, OSError, ImportError. It must not train or write."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def run(
    main: Callable[[Flags], None],
    config: type[Flags],
    args: Sequence[str] | None = None,
    *,
    program: str | None = None,
) -> None:
    """Parses the command line as ``config`` and calls ``main`` with it; exits with code 2 where it cannot be used.

    Args:
        main: The recipe's main function; the docstring of its module opens the help.
        config: Its flags, SharedFlags if it trains.
        args: Arguments to use instead of the command line.
        program: The command in the usage and in messages about flags; None: the script.
    """
    words = sys.argv[1:] if args is None else args
    _command[:] = [program or f"python {_script(main)}"]
    about: Any = {"prog": program, "description": _about(main, program), "config": (tyro.conf.FlagCreatePairsOff,)}
    with _end_with_reader():
        if issubclass(config, SharedFlags) and asks_for_help(words):
            tyro.cli(grouped(config), args=["--help"], **about)
        with suggested(args, config):
            flags = tyro.cli(config, args=args, **about)
    with run_status.shown(flags):
        _run(main, flags)


@contextmanager
def _end_with_reader() -> Iterator[None]:
    """Ends the program without a message where the reader of its help, such as head, has ended."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, since the error could not be caught when the process ends
    except BrokenPipeError:
        sys.stdout = None
        raise SystemExit(ExitCode.DONE) from None


def _run(main: Callable[[Flags], None], flags: Flags) -> None:
    try:
        if isinstance(flags, SharedFlags):
            with checks():
                check_shared(flags)
                flags = with_devices(flags)
                with run_status.phase("connecting to the other processes", then="setting up"):
                    join_run()
                run_status.only_on_first_process()
                flags = resumed_if_restarted(flags)
        with released_at_end(), stop_signals(flags):
            main(flags)
    except ConfigError as error:
        stop(ExitCode.BAD_CONFIG, in_flags(str(error), flag_names(type(flags))))
    except BadCheckpointError as error:
        stop(ExitCode.BAD_DATA, str(error))
    except OSError as error:
        if error.errno not in DISK_FAULTS:  # a bug
            raise
        stop(ExitCode.NOT_SAVED, _not_written(flags, error))
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    except KeyboardInterrupt:
        below = "\n" if sys.stderr.isatty() else ""  # a terminal has shown ^C on the line
        tell(f"{below}error: interrupted; nothing was saved")
        leave(INTERRUPTED)


def with_devices(flags: SharedFlags) -> SharedFlags:
    """Sets up the devices that the flags ask for; returns the flags, with --dry-run if nothing can run on them."""
    if flags.compile_for:
        start_on_cpu()
        return dataclasses.replace(flags, dry_run=True)
    if flags.fake_devices:
        jaxpar.use_fake_devices(flags.fake_devices)
    return flags


def stop_signals(flags: Any) -> AbstractContextManager[object]:
    """Returns a context that catches SIGTERM and Ctrl-C for the guard of the training loop, if there will be one."""
    return StopSignals() if isinstance(flags, SharedFlags) and not flags.dry_run else nullcontext()


def join_run() -> None:
    """Joins the run of several processes that the environment describes, if any; ends the program if others are missing."""
    try:
        jaxpar.initialize()
    except TimeoutError as error:
        stop(ExitCode.PEER_LOST, str(error))


def resumed_if_restarted(flags: Flags) -> Flags:
    """Returns the flags; if a supervisor restarted the run and there is a checkpoint, with --resume, not --overwrite."""
    if not is_restarted() or not isinstance(flags, SharedFlags) or not has_steps(flags.out_dir / CHECKPOINTS):
        return flags
    return dataclasses.replace(flags, resume=True, overwrite=False)


def is_restarted() -> bool:
    """Returns whether the run may be one that a supervisor or a scheduler has started again.

    Raises:
        ValueError: The environment's JAXPAR_RESUME has another value than those that mean something.
    """
    told = os.environ.get(RESUME_VARIABLE, "")
    if told not in ("", RESUME_IF_ANY):
        raise ValueError(
            f"{RESUME_VARIABLE} must be {RESUME_IF_ANY} or not set; got {told!r}. Set it to {RESUME_IF_ANY} for a run "
            "that may be restarted, or unset it."
        )
    return told == RESUME_IF_ANY


def _not_written(flags: Any, error: OSError) -> str:
    go_on = "begin again"
    with suppress(OSError):  # of the disk that could not be written to
        if has_run(flags.out_dir):
            go_on = "begin again with --overwrite"
        if isinstance(flags, SharedFlags) and has_steps(flags.out_dir / CHECKPOINTS):
            go_on = "resume from the newest checkpoint with --resume"
    where = error.filename or flags.out_dir
    return f"a run's files must be written; got: {error.strerror}, in {where}. Make room, then {go_on}."


@contextmanager
def spared(what: str) -> Iterator[None]:
    """Prints that ``what`` could not be written, instead of raising an OSError of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        tell(f"{what} could not be written: {error.strerror}")


def stop(code: int, message: str) -> NoReturn:
    """Ends the program with an exit code and a message on standard error."""
    tell(f"error: {printable_lines(message)}")
    leave(code)


def command(*flags: object) -> str:
    """Returns a command line for the user to copy: this recipe as the user started it, with other flags."""
    return f"{_command[0] if _command else 'python ' + sys.argv[0]} {shlex.join(map(str, flags))}"


def _script(main: Callable) -> str:
    """Returns the path of a recipe as one types it here."""
    path = Path(sys.modules[main.__module__].__file__ or "").absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _about(main: Callable, program: str | None) -> str:
    about = wrapped((sys.modules[main.__module__].__doc__ or "").strip())
    return about.replace(f"python recipes/{Path(_script(main)).name}", program) if program else about


def make_mesh(flags: SharedFlags) -> jax.sharding.Mesh:
    """Returns the mesh that the flags ask for."""
    devices = None
    if flags.compile_for:
        num_nodes, each = num_gpus(flags)
        devices = jaxpar.compile_only_devices(flags.compile_for, num_nodes=num_nodes, devices_per_node=each)
    mesh = jaxpar.make_mesh(**dataclasses.asdict(flags.mesh), devices=devices)
    num_devices = jax.device_count() if devices is None else len(devices)
    if mesh.size < num_devices:
        fits = num_devices % (mesh.shape["stage"] * mesh.shape["tensor"]) == 0
        more = "; --mesh.data -1 takes all of them" if fits else ""
        say(f"the mesh has {mesh.size} of {num_devices} devices, the others are idle{more}")
    return mesh


def num_gpus(flags: SharedFlags) -> tuple[int, int]:
    """Returns the nodes to --compile-for, and the GPUs of each."""
    return 1 if flags.nodes is None else flags.nodes, 8 if flags.gpus_per_node is None else flags.gpus_per_node


def as_json(flags: SharedFlags) -> dict[str, Any]:
    """Returns the flags as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(flags), default=str))


def write_config(flags: SharedFlags, mesh: jax.sharding.Mesh | None = None) -> None:
    """Writes every flag to ``config.json``, with the actual sizes of the mesh; only the first process writes."""
    if mesh is not None:
        flags = dataclasses.replace(flags, mesh=Mesh(**mesh.shape))
    if jax.process_index() == 0:
        try:
            flags.out_dir.mkdir(parents=True, exist_ok=True)
            write_whole(flags.out_dir / "config.json", json.dumps(as_json(flags), indent=2) + "\n")
        except OSError as error:  # errors that check_out_dir cannot detect
            if error.errno in FULL:
                raise
            raise ConfigError(
                f"--out-dir must be a folder that can be written to; got {flags.out_dir}: {error.strerror}. Name another."
            ) from error


def watchers(
    flags: SharedFlags, checkpoints: CheckpointManager, *, flops_per_step: float | None = None
) -> list[exporters.Watcher]:
    """Returns the exporters that the flags ask for beside metrics.jsonl; every recipe passes them to its MetricsLog.

    They are open from this call on: call it before the step is compiled, which can take minutes. A --dry-run has none.

    Args:
        flags: The run's flags.
        checkpoints: The manager whose saves are counted.
        flops_per_step: Useful operations of a step on all devices together, for the MFU.
    """
    found: list[exporters.Watcher] = [*run_status.watchers()]
    if jax.process_index() != 0 or flags.dry_run:
        return found
    with checks():
        if flags.metrics_port:
            saves = lambda: checkpoints.num_saved
            server = exporters.PrometheusExporter(
                flags.metrics_port,
                address=flags.metrics_address,
                num_saves=saves,
                flops_per_step=flops_per_step,
                began=BEGAN,
            )
            found.append(server)
            say(f"metrics at http://{flags.metrics_address}:{server.port}/metrics")
        if flags.tensorboard:
            found.append(exporters.TensorBoardWriter(flags.out_dir / "tensorboard"))
        if flags.profile:
            found.append(
                exporters.StepProfiler(exporters.parse_steps(flags.profile, flags.steps), flags.out_dir / "profile")
            )
    return found


def say(text: str) -> None:
    """Prints a line, on the first process only."""
    if jax.process_index() == 0:
        print(printable_lines(text), flush=True)
