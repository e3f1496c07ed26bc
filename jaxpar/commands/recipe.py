"""The command line of a recipe: a script with a dataclass of flags, and a main function that first checks and then trains.

@dataclass(frozen=True, kw_only=True)
class Config(BasicFlags):
    ...

def main(config: Config) -> None:
    with checks():                          # errors in here are the user's: one message, exit code 2
        mesh = make_mesh(config)
        ...                                 # errors from here on are bugs: a traceback

if __name__ == "__main__":
    recipe.run(main, Config)
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro

import jaxpar
from jaxpar.checkpoint import BadCheckpointError, has_steps
from jaxpar.commands.cli import (
    check_args,
    flag_names,
    list_aliases,
    list_flags,
    suggest_values,
    take_wide_terminal,
    with_joined_values,
    wrapped,
)
from jaxpar.compile_only import start_on_cpu
from jaxpar.devices import found_devices
from jaxpar.fields import given_by
from jaxpar.run.flags import RunFlags, check_run_flags, check_run_numbers
from jaxpar.run.folder import CHECKPOINTS, has_run, resumed_if_restarted
from jaxpar.run.messages import (
    ConfigError,
    checks,
    only_on_first_process,
    phase,
    say,
    say_devices,
    status_lines,
    stop,
)
from jaxpar.runtime.distributed import leave
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.interrupt import INTERRUPTED
from jaxpar.runtime.lease import released_at_end
from jaxpar.runtime.output import how_to_make_room, is_terminal, tell
from jaxpar.runtime.preemption import StopSignals
from jaxpar.runtime.process_env import read_process_env
from jaxpar.runtime.uncaught import DISK_FAULTS

# Flags by the names that other trainers have for them; and names without an equal here, with the flag to use and how.
_NAMES = json.loads(Path(__file__).with_name("other_names.json").read_text())
OTHER_NAMES, ADVICE = _NAMES["flags"], _NAMES["advice"]

_command: list[str] = []  # by which the user started the recipe of this process

Flags = TypeVar("Flags")


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
        config: Its flags, RunFlags if it trains.
        args: Arguments to use instead of the command line.
        program: The command in the usage and in messages about flags; None: the script.
    """
    _command[:] = [program or f"python {_script(main)}"]
    flags = parse(main, config, sys.argv[1:] if args is None else args, program=program)
    with status_lines(flags), given_by(flag_names(config)):
        _run(main, flags)


def parse(
    main: Callable[[Flags], None],
    config: type[Flags],
    args: Sequence[str],
    *,
    program: str | None = None,
) -> Flags:
    """Returns the flags of a command line as ``config``; exits with code 2 where it does not take one.

    Args:
        main: The recipe's main function; the docstring of its module opens the help.
        config: Its flags.
        args: The command line.
        program: The command in the usage and in messages about flags; None: the script.
    """
    # Help comes from docstrings alone: a comment beside a field is for readers of the code, or for pyright.
    config_of_help = (tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)
    return _parse(
        config, args, prog=program, description=_about(main, program), config=config_of_help
    )


def check_numbers(flags: Any) -> None:
    """Raises ValueError where a flag of a run is out of range, as far as that does not depend on the machine."""
    if isinstance(flags, RunFlags):
        with given_by(flag_names(type(flags))):
            check_run_numbers(flags)


def _parse(kind: type[Flags], args: Sequence[str], **about: Any) -> Flags:
    """Returns the flags of a command line; one that is refused is answered with the flags that its names stand for."""
    take_wide_terminal()
    try:
        check_args(kind, args)
    except ValueError as error:
        tell(f"error: {error}")
        raise SystemExit(ExitCode.BAD_CONFIG) from None
    try:
        try:
            with given_by(flag_names(kind)):
                return tyro.cli(kind, args=with_joined_values(kind, args), **about)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, since the error could not be caught when the process ends
    except BrokenPipeError:  # the reader of the help, such as head, has ended
        sys.stdout = None
        raise SystemExit(ExitCode.DONE) from None
    except SystemExit as end:
        if end.code == ExitCode.BAD_CONFIG:
            _suggest(kind, args)
        raise


def _suggest(kind: type, args: Sequence[str]) -> None:
    own, aliases = {flag for _, flag, _ in list_flags(kind)}, {*list_aliases(kind)}
    for word in args:
        name = word.partition("=")[0]
        is_foreign = word.startswith("--") and name.replace("_", "-") not in own | aliases
        for flag, text in _meant(name.replace("_", "-")) if is_foreign else ():
            if flag in own:
                tell(f"{name}: {text}")
    suggest_values(kind, args)


def _meant(name: str) -> Iterator[tuple[str, str]]:
    """Yields the flag that a name stands for, and what to say of it. A name with dots stands for what is after the last one."""
    group, _, last = name.removeprefix("--").rpartition(".")
    bare = f"--{last}"
    for names, flag, text in [
        *(
            (f"{others} {flag if group else ''}", flag, f"did you mean {flag}?")
            for flag, others in OTHER_NAMES.items()
        ),
        *((names, *advice) for names, advice in ADVICE.items()),
    ]:
        if bare in names.split():
            yield flag, text


def _run(main: Callable[[Flags], None], flags: Flags) -> None:
    try:
        signals = nullcontext()
        if isinstance(flags, RunFlags):
            with checks():
                flags = _set_up(flags)
            signals = (
                nullcontext() if flags.common.dry_run else StopSignals()
            )  # for the guard of the training loop
        with released_at_end(), signals:
            main(flags)
    except (ConfigError, BadCheckpointError) as error:
        stop(error.exit_code, str(error))
    except OSError as error:
        if error.errno not in DISK_FAULTS:  # a bug
            raise
        stop(ExitCode.NOT_SAVED, _not_written(flags, error))
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    except KeyboardInterrupt:
        below = "\n" if is_terminal() else ""  # a terminal has shown ^C on the line
        tell(f"{below}error: interrupted; nothing was saved")
        leave(INTERRUPTED)


def _set_up(flags: RunFlags) -> RunFlags:
    """Checks the flags, sets up their devices and joins the other processes; returns the flags of this start."""
    check_run_flags(flags)
    if flags.gpu.compile_for:
        start_on_cpu()
        flags = flags.replace(dry_run=True)  # since nothing can run on them
    elif flags.common.fake_devices:
        jaxpar.use_fake_devices(flags.common.fake_devices)
    with phase("connecting to the other processes", then="setting up"):
        join_run()
    found_devices()
    only_on_first_process()
    if flags.trains:
        say_devices(compile_for=flags.gpu.compile_for)
    return resumed_if_restarted(flags, say)


def join_run() -> None:
    """Joins the run of several processes that the environment describes, if any; ends the program if others are missing."""
    try:
        jaxpar.initialize()
    except TimeoutError as error:
        stop(ExitCode.PEER_LOST, str(error))


def numbers_of_devices(given: tuple[int, ...], *, usual: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of devices to compare: fake ones of this process, or all devices of several processes.

    Args:
        given: The flag --devices.
        usual: The fake ones without it.

    Raises:
        ValueError: Several processes are asked for another number than they have.
    """
    if read_process_env(os.environ) is None:
        sizes = given or tuple(usual)
        jaxpar.use_fake_devices(max(*sizes, 1))
        return sizes
    join_run()
    whole = (jax.device_count(),)
    if given not in ((), whole):
        raise ValueError(
            f"several processes compare on all their devices; got --devices {' '.join(map(str, given))}, a run of "
            f"{whole[0]}. Leave --devices out, or start it without a launcher."
        )
    return whole


def _not_written(flags: Any, error: OSError) -> str:
    go_on, out_dir = (
        "begin again",
        flags.common.out_dir if isinstance(flags, RunFlags) else flags.out_dir,
    )
    with suppress(OSError):  # of the disk that could not be written to
        if has_run(out_dir):
            go_on = "begin again with --overwrite"
        if isinstance(flags, RunFlags) and has_steps(out_dir / CHECKPOINTS):
            go_on = "resume from the newest checkpoint with --resume"
    where = error.filename or out_dir
    return f"a run's files must be written; got: {error.strerror}, in {where}. {how_to_make_room(error)}, then {go_on}."


def command(*flags: object) -> str:
    """Returns a command line for the user to copy: this recipe as the user started it, with other flags."""
    return f"{_command[0] if _command else 'python ' + sys.argv[0]} {shlex.join(map(str, flags))}"


def _script(main: Callable) -> str:
    """Returns the path of a recipe as one types it here."""
    path = Path(sys.modules[main.__module__].__file__ or "").absolute()
    return shlex.quote(
        str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    )


def _about(main: Callable, program: str | None) -> str:
    about = wrapped((sys.modules[main.__module__].__doc__ or "").strip())
    return (
        about.replace(f"python recipes/{Path(_script(main)).name}", program) if program else about
    )
