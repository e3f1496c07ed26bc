"""Joining and leaving a run of several processes, and fake devices for runs on one machine."""

import atexit
import importlib.util
import multiprocessing
import os
import sys
import traceback
from types import TracebackType
from typing import NoReturn

import jax

from jaxpar._compat import EACH_KERNEL_ONCE, coordination, has_started
from jaxpar.fields import check_kind, check_positive
from jaxpar.runtime import endings
from jaxpar.runtime.coordination import PeerLostError, follow, is_peer_lost
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.interrupt import end_if_unhandled
from jaxpar.runtime.meetings import answer_who_waits
from jaxpar.runtime.output import tell
from jaxpar.runtime.process_env import (
    LAUNCHERS,
    NAMES,
    ProcessEnv,
    read_process_env,
    remark_outside_srun,
    timeout_of,
)
from jaxpar.runtime.rendezvous import meet
from jaxpar.runtime.uncaught import exit_code_of
from jaxpar.runtime.watchdog import end_if_silent

# XLA then schedules the start of a collective earlier and its end later, so that it overlaps with computation. It has eight
# in flight: a loop counts as many as its body has, and the messages of a pipeline to both neighbours travel beside a loop over
# layers that gathers params (ZeRO 3) or reduces over tensor. In such a loop it reduces the gradients of one layer while the
# next computes. That it gathers the params of the next layer while one computes (ZeRO 3) is an option of make_train_step: as a
# flag it would more than double the temporary memory of sequence parallelism (benchmarks/FINDINGS.md).
GPU_FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_experimental_parallel_collective_overlap_limit=8",
    "--xla_gpu_experimental_collective_start_as_early_as_possible=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    *EACH_KERNEL_ONCE,
)

OWN_COUNT = "JAX_NUM_CPU_DEVICES"  # JAX's own variable for the fake devices of a process
# JAX considers a process dead once half of its timeout to all of it has passed, and aborts the others without naming it: that
# must be later than the watchdog's report.
SECONDS_BEHIND = 10


def use_fake_devices(num_devices: int) -> None:
    """Gives this process ``num_devices`` CPU devices in place of its real ones; call it before JAX first uses a device.

    The devices are threads: programs, shardings and collectives are those of real devices, but the speed is not. XLA's CPU
    client deadlocks when all its threads hold programs that wait for one another, so it gets at least twice as many threads
    as devices (``PJRT_NPROC``). In a run of several processes each process gets ``num_devices``.

    JAX's persistent compilation cache is turned off. The CPU client of jaxlib 0.10 and 0.11 does not keep the order of the
    collectives of a program loaded from it: the process aborts, or devices may receive messages meant for others.

    Args:
        num_devices: At least 1.

    Raises:
        RuntimeError: JAX has already started with other devices.
    """
    check_kind((int,), "an integer", "Write use_fake_devices(8).", num_devices=num_devices)
    check_positive("Write use_fake_devices(8).", num_devices=num_devices)
    given = os.environ.get(OWN_COUNT, "1")
    if given not in ("1", str(num_devices)) and os.environ.get("JAX_PROCESS_ID", "0") == "0":
        tell(
            f"the program asks for {num_devices} fake devices in each process: {OWN_COUNT}={given}, which "
            "--devices-per-process of launch sets, has no effect"
        )
    give_threads(num_devices)
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_enable_compilation_cache", False)
    except RuntimeError as error:
        raise RuntimeError(
            f"fake devices must be requested before JAX starts; got {num_devices} after it started with "
            f"{jax.device_count()} {jax.default_backend()} devices. Call use_fake_devices first in the program."
        ) from error


def give_threads(num_devices: int) -> None:
    """Gives XLA's CPU client at least two threads for each device of this process; call it before JAX starts.

    Without ``PJRT_NPROC`` XLA has a thread for each core; it gets no fewer.
    """
    given = os.environ.get("PJRT_NPROC", "")
    threads = (int(given) if given.isdecimal() else 0) or os.cpu_count() or 1
    os.environ["PJRT_NPROC"] = str(max(threads, 2 * num_devices))


class NotJoinedError(RuntimeError):
    """A process of a run has not joined it, or joins it too late."""

    exit_code = ExitCode.BAD_CONFIG


def check_joined() -> None:
    """Raises NotJoinedError if a launcher or cluster has started this process as one of several, and it has joined none.

    Each would then train alone, on all rows, and write to the same folder.
    """
    if jax.distributed.is_initialized():
        return
    try:
        env = read_process_env(os.environ)
    except ValueError:  # whoever calls initialize is told
        return
    if env is not None and env.num_processes > 1:
        sys.excepthook = _leave_on_error  # no restart can help
        raise NotJoinedError(
            f"each process of a run must join it before it trains; got {_told(env)} without a call to jaxpar.initialize(), so "
            "that each would train alone. Call jaxpar.initialize() first in the script, after jaxpar.use_fake_devices if it "
            "has that; to train alone, unset these variables."
        )


def _told(env: ProcessEnv) -> str:
    variables = ", ".join(f"{name}={os.environ[name]}" for name in LAUNCHERS if name in os.environ)
    return f"process {env.process_id} of {env.num_processes} ({variables})"


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: float | None = None,
    heartbeat_seconds: int = 30,
) -> bool:
    """Joins the run of several processes that the environment describes, and returns whether there is one.

    Call it in every process before JAX first uses a device. If the environment describes no run of several processes it joins
    none, so a program can always call it. It reads ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``,
    and the variables of SLURM, Open MPI and Kubernetes (``process_env.py``). Process 0 listens only at the coordinator's
    address, or at ``JAX_COORDINATOR_BIND_ADDRESS``. It accepts only processes with its own ``JAXPAR_RUN_TOKEN``, which
    ``launch`` and ``manifest`` generate. JAX's own service, which then takes over the port, has no authentication: use it in a
    network that you trust.

    A process that ``python -m jaxpar launch`` has started is killed when the launcher ends.

    CPU devices of several processes communicate through gloo. On GPUs it sets the XLA flags that let collectives overlap with
    computation, unless XLA_FLAGS sets them. In a run of several processes an uncaught exception ends its process immediately,
    since the others would otherwise wait for it, and a process that reaches the end of its program waits for the others, as
    ``leave(0)`` does; one that calls ``sys.exit`` ends as by ``leave`` with its code. An uncaught exception has the exit code
    that it has in a recipe (``uncaught.py``), such as 2 for an error of jaxpar about what it was given, also in a process that
    is alone.

    Args:
        coordinator_address: ``host:port`` of process 0. This and the next two override the environment.
        num_processes: The number of processes in the run.
        process_id: The number of this process, from 0.
        timeout_seconds: How long the processes wait for one another to connect; by default the value of
            ``JAXPAR_INITIALIZATION_TIMEOUT``, else 300.
        heartbeat_seconds: How long a process may be silent, as one that is frozen, before the others end: in a training loop
            with exit code 124 and the name of the silent one. Elsewhere JAX aborts them, after that time and at most as
            much again and 10 seconds. A call that holds Python's interpreter lock for so long is silent too.

    Raises:
        NotJoinedError: JAX has already started, or this is a worker of multiprocessing that imports the script.
        TimeoutError: Not all processes connected in time; the message names the missing ones.
        ValueError: The environment is incomplete or invalid, or the processes disagree.
        OSError: Process 0 cannot listen at the address.
    """
    if not hasattr(sys, "ps1"):  # an interactive session must outlive its errors
        sys.excepthook = _leave_on_error
    set_gpu_flags()
    given = zip(NAMES, (coordinator_address, num_processes, process_id), strict=True)
    env = read_process_env(
        {**os.environ, **{name: str(value) for name, value in given if value is not None}}
    )
    if env is None and (remark := remark_outside_srun(os.environ)):
        tell(remark)
    if env is None or jax.distributed.is_initialized():
        return env is not None
    if env.num_processes > 1 and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise NotJoinedError(
            "a worker of multiprocessing must not join the run; got jaxpar.initialize() in one that "
            "imports the script, as each worker that is spawned does. Write the script below "
            '`if __name__ == "__main__":`.'
        )
    if has_started() and env.num_processes > 1:
        raise NotJoinedError(
            f"a process must join its run before JAX first uses a device; got {_told(env)}, which uses {jax.device_count()} "
            "devices. Call jaxpar.initialize() first in the script, before jaxpar.make_mesh, jax.devices() or an array."
        )
    if timeout_seconds is None:
        timeout_seconds = timeout_of(os.environ)
    give_threads(max(int(jax.config.values["jax_num_cpu_devices"]), 1))
    if jax.config.values["jax_platforms"] == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)  # as for fake devices
    bind = meet(env, timeout_seconds)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        env.coordinator,
        env.num_processes,
        env.process_id,
        local_device_ids=env.local_device_ids,
        cluster_detection_method="deactivate",  # else each process under SLURM or Open MPI gets one GPU, even alone on a node
        coordinator_bind_address=bind or None,
        initialization_timeout=int(max(timeout_seconds, 10)),
        heartbeat_timeout_seconds=2 * heartbeat_seconds + SECONDS_BEHIND,
        shutdown_timeout_seconds=max(heartbeat_seconds, 60),
    )
    atexit.register(endings.end_of_program)
    endings.note_exits()
    endings.watch_ends(answer_who_waits)
    end_if_silent(heartbeat_seconds)
    if not hasattr(sys, "ps1"):
        end_if_unhandled()
    return True


def set_gpu_flags() -> None:
    """Adds those ``GPU_FLAGS`` to XLA_FLAGS that it does not set, if JAX will use GPUs; call it before JAX starts."""
    platforms = str(jax.config.values["jax_platforms"] or "")
    has_plugin = any(
        importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")
    )
    if has_plugin and (not platforms or {"cuda", "gpu"} & set(platforms.split(","))):
        os.environ["XLA_FLAGS"] = with_gpu_flags(os.environ.get("XLA_FLAGS", ""))


def with_gpu_flags(flags: str) -> str:
    """Returns XLA flags with those in ``GPU_FLAGS`` added that they do not set.

    >>> with_gpu_flags("--xla_gpu_enable_latency_hiding_scheduler=false").count("latency_hiding")
    1
    """
    return " ".join(
        [*flags.split(), *(flag for flag in GPU_FLAGS if flag.split("=")[0] not in flags)]
    )


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code, which is also preserved in a run of several processes.

    A single process that exits by itself would wait for all others, abort, and lose its exit code. Processes that leave with a
    code wait two seconds for one another, in case all of them leave, and then exit immediately; those in a training loop then
    end too, with exit code 70. With 0 a process waits a minute for the others to end, ten after a complete training loop, and
    its own code is 70 if they do not. Process 0, which runs the service that the others depend on, exits last.

    Args:
        code: The exit code; ``jaxpar.runtime.exit_codes`` has those that mean something to a supervisor.
    """
    state = coordination()
    if state.client is None or (state.num_processes or 1) == 1:
        raise SystemExit(code)
    endings.end_now(endings.end_with(code))
    raise AssertionError("the process has ended")


def _leave_on_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not endings.is_shown(error):
        traceback.print_exception(kind, error, trace)
    if isinstance(error, PeerLostError) or not is_peer_lost(error):
        leave(exit_code_of(error))
    code, told = follow(error)
    if told:
        tell(told)
    leave(code)
