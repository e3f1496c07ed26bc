"""What all recipes share: the flags, the way from a command line to a run, and what a run says. No training loop.

A recipe is a frozen dataclass of flags and a main, which checks first and trains then:

    @dataclass(frozen=True, kw_only=True)
    class Config(cli.SharedFlags):
        learning_rate: float = 0.1
        '''Step size of gradient descent, in units of the standardised target.'''

    def main(config: Config) -> None:
        with cli.checks():                      # what is wrong from here on is the user's to mend: one message, exit code 2
            mesh = cli.make_mesh(config)
            ...
        cli.write_config(config)                # what is wrong from here on is a bug: a traceback
        ...

    if __name__ == "__main__":
        cli.run(main, Config)
"""

import dataclasses
import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import tyro

import jaxpar
from jaxpar.checkpoint import BadCheckpointError, CheckpointManager, has_steps
from jaxpar.metrics import exporters
from jaxpar.pipeline import check_permutes, compile_schedule
from jaxpar.runtime.coordination import check_agreement
from jaxpar.runtime.distributed import leave
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.lease import released_at_end
from jaxpar.runtime.preemption import StopSignals
from jaxpar.runtime.printable import printable_lines
from jaxpar.runtime.progress import RESUME_IF_ANY, RESUME_VARIABLE
from jaxpar.runtime.watchdog import Budgets, Watchdog
from jaxpar.schedule import Schedule

BEGAN = time.monotonic()
INTERRUPTED = 130  # of Ctrl-C, as shells have it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk says that has no room
DISK_FAULTS = (*FULL, errno.EROFS, errno.EIO, errno.ESTALE)  # or has turned read-only, or is gone


@dataclass(frozen=True)
class Mesh:
    data: int = 1
    """Replicas, which share out the rows of each batch; -1: the devices that the other axes leave."""
    stage: int = 1
    """Pipeline stages, which share out the layers; -1: the rest."""
    tensor: int = 1
    """Shards, which share out each weight; -1: the rest."""


@dataclass(frozen=True, kw_only=True)
class SharedFlags:
    mesh: Mesh = field(default_factory=Mesh)
    fake_devices: int = 0
    """CPU devices to pretend, to try a mesh on any machine; 0: the real devices."""
    steps: int = 300
    """Training steps of the whole run, those before a --resume counted."""
    seed: int = 0
    """Of the first parameters and of the order of rows; 0 or more."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, with one more at the end; 0: one alone, when Ctrl-C or SIGTERM asks the run to stop."""
    checkpoint_minutes: float = 0.0
    """Minutes between two checkpoints, with one more at the end; 0: as for --checkpoint-every."""
    keep: int = 3
    """Checkpoints that stay, the newest."""
    keep_every: int = 0
    """Each checkpoint of a step that this divides stays too; 0: none."""
    keep_best: str | None = None
    """The checkpoint with the smallest metric of this name stays too, such as test_loss; "-" before it: the largest."""
    out_dir: Path = Path("runs")
    """Folder for config.json, metrics.jsonl, plots and checkpoints."""
    resume: bool = False
    """Go on from the newest checkpoint in --out-dir that is whole, on this or another mesh."""
    allow_change: tuple[str, ...] = ()
    """What may differ from the checkpoint's run on --resume, such as learning_rate or batch_size; a refusal names it."""
    max_skipped: int = 10
    """Steps in a row whose gradients are not finite, which change nothing, before the run ends with code 86; 0: any number."""
    budget: Budgets = field(default_factory=Budgets)
    metrics_port: int = 0
    """Serve the run's numbers to Prometheus at this port; 0: do not."""
    metrics_address: str = "127.0.0.1"
    """The address to serve them at; the default reaches this machine alone, 0.0.0.0 all."""
    profile: str = ""
    """Steps to trace, such as 10:13 for 10, 11 and 12, into --out-dir/profile for Perfetto or xprof."""
    tensorboard: bool = False
    """Write the run's numbers for TensorBoard too, into --out-dir/tensorboard."""
    dry_run: bool = False
    """Check, compile and print what a step costs; train and write nothing."""


Flags = TypeVar("Flags")


class ConfigError(Exception):
    """What a user gave cannot be used; the message says the rule, the values and the remedy."""


@contextmanager
def checks() -> Iterator[None]:
    """Turns the ValueError, TypeError or OSError of a check into a ConfigError. Nothing in it may train or write."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error


def run(main: Callable[[Flags], None], config: type[Flags], args: Sequence[str] | None = None) -> None:
    """Reads the command line as ``config`` and calls ``main`` with it; exits with code 2 where it cannot be used.

    Args:
        main: The recipe, whose module's docstring opens its help.
        config: Its flags, SharedFlags if it trains.
        args: In place of the command line's.
    """
    flags = tyro.cli(config, args=args, description=_about(main), config=(tyro.conf.FlagCreatePairsOff,))
    try:
        if isinstance(flags, SharedFlags):
            with checks():
                check_shared(flags)
                if flags.fake_devices:
                    jaxpar.use_fake_devices(flags.fake_devices)
                join_run()
                flags = resumed_if_restarted(flags)
        with released_at_end(), stop_signals(flags):
            main(flags)
    except ConfigError as error:
        stop(ExitCode.BAD_CONFIG, str(error))
    except BadCheckpointError as error:
        stop(ExitCode.BAD_DATA, str(error))
    except OSError as error:
        if error.errno not in DISK_FAULTS:  # a bug
            raise
        stop(ExitCode.NOT_SAVED, _not_written(flags, error))
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    except KeyboardInterrupt:
        stop(INTERRUPTED, "interrupted; nothing was saved")


def stop_signals(flags: Any) -> AbstractContextManager[object]:
    """Returns what takes SIGTERM and Ctrl-C from now on for the guard of the training loop, if there is to be one."""
    return StopSignals() if isinstance(flags, SharedFlags) and not flags.dry_run else nullcontext()


def join_run() -> None:
    """Joins the run of several processes that the environment speaks of, if any; ends the program where others are missing."""
    try:
        jaxpar.initialize()
    except TimeoutError as error:
        stop(ExitCode.PEER_LOST, str(error))


def resumed_if_restarted(flags: Flags) -> Flags:
    """Returns the flags of a run that a supervisor started again: with --resume, if anything was saved before."""
    if os.environ.get(RESUME_VARIABLE) != RESUME_IF_ANY or not isinstance(flags, SharedFlags):
        return flags
    return dataclasses.replace(flags, resume=flags.resume or has_steps(flags.out_dir / "checkpoints"))


def _not_written(flags: Any, error: OSError) -> str:
    go_on = "begin again"
    if isinstance(flags, SharedFlags) and has_steps(flags.out_dir / "checkpoints"):
        go_on = "go on from the newest checkpoint with --resume"
    where = error.filename or flags.out_dir
    return f"a run's files must be written; got: {error.strerror}, in {where}. Make room, then {go_on}."


@contextmanager
def spared(what: str) -> Iterator[None]:
    """Says that ``what`` is missing where the disk does not take it, in place of an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        print(f"{what} could not be written: {error.strerror}", file=sys.stderr, flush=True)


def stop(code: int, message: str) -> NoReturn:
    """Ends the program with an exit code and a message on standard error."""
    with suppress(OSError):  # a log on a full disk must not cost the exit code
        print(f"error: {printable_lines(message)}", file=sys.stderr, flush=True)
    leave(code)


def _about(main: Callable) -> str:
    return (sys.modules[main.__module__].__doc__ or "").strip()


def check_shared(flags: SharedFlags) -> None:
    """Raises where a shared flag is out of range; the mesh is checked when it is made."""
    for name, least, remedy in (
        ("fake_devices", 0, "Give the number of CPU devices to pretend, or leave it out for the real ones."),
        ("steps", 1, "Choose 1 or more."),
        ("checkpoint_every", 0, "Give a number of steps, or leave it out for no checkpoints."),
        ("checkpoint_minutes", 0, "Give a number of minutes, or leave it out for no checkpoints."),
        ("max_skipped", 0, "Choose 10, say, or 0 for any number."),
    ):
        if not least <= getattr(flags, name) < float("inf"):
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least {least}; got {getattr(flags, name)}. {remedy}"
            )
    if not 0 <= flags.metrics_port < 2**16:
        raise ValueError(f"--metrics-port must be from 1 to 65535; got {flags.metrics_port}. Choose 9090, say.")
    if flags.profile:
        exporters.parse_steps(flags.profile, flags.steps)
    if not 0 <= flags.seed < 2**32:  # JAX would drop the higher bits
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}; got {flags.seed}. Choose 0, say.")
    check_out_dir(flags.out_dir)


def check_out_dir(out_dir: Path) -> None:
    """Raises unless ``--out-dir`` is a folder that can be written to, or can be made."""
    there = next(path for path in (out_dir.absolute(), *out_dir.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise ValueError(
            f"--out-dir must be a folder that can be written to; got {out_dir}, but {there} {why}. Name another."
        )


def make_mesh(flags: SharedFlags) -> jax.sharding.Mesh:
    """Returns the mesh that the flags ask for."""
    return jaxpar.make_mesh(**dataclasses.asdict(flags.mesh))


def as_json(flags: SharedFlags) -> dict[str, Any]:
    """Returns the flags as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(flags), default=str))


def write_config(flags: SharedFlags, mesh: jax.sharding.Mesh | None = None) -> None:
    """Writes every flag as it is used to ``config.json``, the mesh as it turned out; only the first process writes."""
    if mesh is not None:
        flags = dataclasses.replace(flags, mesh=Mesh(**mesh.shape))
    if jax.process_index() == 0:
        try:
            flags.out_dir.mkdir(parents=True, exist_ok=True)
            _write_whole(flags.out_dir / "config.json", json.dumps(as_json(flags), indent=2) + "\n")
        except OSError as error:  # what check_out_dir cannot see
            if error.errno in FULL:
                raise
            raise ConfigError(
                f"--out-dir must be a folder that can be written to; got {flags.out_dir}: {error.strerror}. Name another."
            ) from error


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def watchers(
    flags: SharedFlags, checkpoints: CheckpointManager, *, flops_per_step: float | None = None
) -> list[exporters.Watcher]:
    """Returns what the flags ask for beside metrics.jsonl; every recipe gives it to its MetricsLog.

    Args:
        flags: The run's.
        checkpoints: Whose saves are counted.
        flops_per_step: Useful operations of a step on all devices together, for the MFU.
    """
    found: list[exporters.Watcher] = []
    if jax.process_index() != 0:
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
    """Prints a line, on the first process alone."""
    if jax.process_index() == 0:
        print(printable_lines(text), flush=True)


def compile_step(flags: SharedFlags, train_step: Any, state: Any, batch: Any) -> jax.stages.Compiled:
    """Returns the training step compiled for this state and batch, and says how long that took: no step's time has it in.

    Every later batch must have the shapes and shardings of this one (``jaxpar.shard_batch`` gives them). In a run of several
    processes all must have the same flags and the same program: processes that do not would wait for one another for ever.
    """
    start = time.perf_counter()
    with Watchdog(flags.budget) as watchdog, watchdog.phase("compile"):
        lowered = train_step.lower(state, batch)
        if jax.process_count() > 1:
            with checks():
                check_agreement("train", {"flags": as_json(flags), "program": _digest(lowered.as_text())})
        compiled = lowered.compile()
        with checks():
            check_permutes(compiled)
    say(f"compiled in {time.perf_counter() - start:.1f} s")
    return compiled


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def say_cost(compiled: jax.stages.Compiled, mesh: jax.sharding.Mesh, schedule: Schedule | None = None) -> None:
    """Prints what a compiled step costs on each device: collectives by mesh axis, memory, FLOPs.

    Args:
        compiled: The step.
        mesh: Its mesh.
        schedule: Of its pipeline, which knows how often a step takes each branch.
    """
    shares = None if schedule is None else compile_schedule(schedule).branch_shares()
    say(jaxpar.inspect_step(compiled, mesh=mesh, branch_shares=shares).render())
