"""Starts a run's processes on this machine: `python -m jaxpar launch -n 2 --devices-per-process 4 recipes/gpt.py ...`.

    runs/launch/0.log   process 0, which is also shown on the screen
    runs/launch/1.log   ...

The processes end together: when one fails, the launcher ends the others, which could only wait for it, within seconds. It shows
the last lines of the log of the process that failed first, and returns its exit code. A process that ends with 0 while others
still run 20 s later is a failure too: the launcher names it and those that run, ends them, and returns 70; or 124 if process 0
has ended, since the others, such as one that is frozen, can do nothing without its service. When the launcher ends, even by
SIGKILL, so do all processes and their children:

    launcher ---- pipe ----> watcher      reads the numbers of the process groups; kills them when the pipe closes,
       |                                  because the launcher has ended
       +-- process 0 and its children, a process group, which starts when the watcher has been told its number
       +-- process 1 and its children, a process group

The kernel's own PR_SET_PDEATHSIG would end the processes alone, not their children, and only on Linux.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from jaxpar.fields import arg, check_at_least
from jaxpar.runtime.chatter import Quiet, without_chatter
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode, describe_exit
from jaxpar.runtime.output import ANOTHER_IS_GONE, printable, tell
from jaxpar.runtime.process_env import TOKEN_VARIABLE
from jaxpar.runtime.program import near_script

POLL_SECONDS = 0.02
MOST_PROCESSES, MOST_A_CORE = 64, 16  # beyond which a machine is busy with starting them
SECONDS_TO_EXPLAIN = (
    1.0  # after a failure: the others may report the cause, or one of them may have failed earlier
)
SECONDS_TO_STOP = 5.0
SECONDS_TO_FOLLOW = 20.0  # after a process has ended with 0: those that jaxpar has joined wait for one another before
LINES_SHOWN, BYTES_READ = 40, 2**20  # at the end of a log
# A shell runs this: it waits for a line from the launcher and then becomes the process. It exits if the launcher has ended.
ON_A_LINE = 'read -r _ && exec "$@" < /dev/null'
# Exit codes of processes that end because another one did: JAX aborts, jaxpar returns PEER_LOST.
CONSEQUENCES = (-signal.SIGABRT, ExitCode.PEER_LOST)
# In the logs of processes that end because another one did, also of those that take over its code.
OF_CONSEQUENCES = (ANOTHER_IS_GONE, "PeerLostError: ")
AGREED = (
    {ExitCode.NOT_SAVED},
    {ExitCode.PREEMPTED},
    {ExitCode.NOT_FINITE},
)  # all processes end with it


def only_launch_in(folder: Path) -> TextIO:
    """Returns a file that keeps other launches from writing their logs to a folder, as long as it is open.

    Raises:
        ValueError: Another launch writes there.
    """
    held = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with held:
            held.seek(0)
            whose = held.read(200).strip()
            by = f", {printable(whose)}" if whose else ""
        raise ValueError(
            f"a folder has the logs of one launch at a time; got --log-dir {folder}, to which another one "
            f"writes{by}. Choose another, such as --log-dir {folder}-2."
        ) from error
    except OSError:  # a file system without locks
        pass
    with contextlib.suppress(OSError):  # a full disk: the name is for messages alone
        os.truncate(held.fileno(), 0)
        os.write(held.fileno(), f"pid {os.getpid()} on {socket.gethostname()}".encode())
    return held


@dataclass(frozen=True)
class Launch:
    """The processes to start.

    Attributes:
        command: A Python script (``*.py``) or a program, with its arguments.
        num_processes: The number of processes, at least 1.
        devices_per_process: The fake CPU devices of each process; unused with ``gpus_per_process``.
        gpus_per_process: The GPUs of this machine for each process, in order; 0: CPU devices.
        port: The coordinator's port on the loopback address; 0: a free one.
        log_dir: The folder for the logs, one file per process.
    """

    command: tuple[str, ...]
    num_processes: int
    devices_per_process: int = 1
    gpus_per_process: int = 0
    port: int = 0
    log_dir: Path = Path("runs/launch")

    def __post_init__(self) -> None:
        check_at_least(
            1, num_processes=self.num_processes, devices_per_process=self.devices_per_process
        )
        cores = os.cpu_count() or 1
        if self.num_processes > (most := max(MOST_PROCESSES, MOST_A_CORE * cores)):
            raise ValueError(
                f"{arg('num_processes')} must be at most {most} on this machine of {cores} CPU cores, since each starts Python "
                f"and JAX; got {self.num_processes}. Choose fewer with more devices each, {arg(devices_per_process=8)}, say, "
                "or start them on a cluster: python -m jaxpar manifest."
            )
        check_at_least(0, gpus_per_process=self.gpus_per_process, port=self.port)
        if self.port >= 2**16:
            raise ValueError(
                f"--port must be under 65536; got {self.port}. Choose such as 6379; 0 takes one that is free."
            )
        if self.port and (why := _why_not_free(self.port)):
            raise ValueError(
                f"process 0 must be able to listen at --port; got {self.port} ({why}). Choose another, leave it out for one "
                "that is free, or end the processes of an earlier run."
            )
        if not self.command:
            raise ValueError(
                "launch needs a program to start; got none. Name a script after the options: recipes/gpt.py"
            )
        if self.command[0].endswith(".py") and not Path(self.command[0]).is_file():
            near = near_script(Path(self.command[0]))
            remedy = f"Did you mean {near}?" if near else f"Give its path from here, {Path.cwd()}."
            raise ValueError(f"the script must exist; got {self.command[0]}. {remedy}")
        if not self.command[0].endswith(".py") and shutil.which(self.command[0]) is None:
            raise ValueError(
                f"the program must be on the PATH; got {self.command[0]}. Name one that is, or a script: recipes/gpt.py"
            )

    def arguments(self) -> list[str]:
        """Returns the command line of each process."""
        return (
            [sys.executable, *self.command]
            if self.command[0].endswith(".py")
            else list(self.command)
        )

    def environment(self, process_id: int, port: int) -> dict[str, str]:
        """Returns the environment variables of process ``process_id``, in addition to those of this process."""
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(self.num_processes),
            "JAX_PROCESS_ID": str(process_id),
            "PYTHONUNBUFFERED": "1",
        }
        if self.gpus_per_process:
            first = process_id * self.gpus_per_process
            return variables | {
                "JAX_LOCAL_DEVICE_IDS": ",".join(
                    map(str, range(first, first + self.gpus_per_process))
                )
            }
        return variables | fake_devices(self.devices_per_process)


def fake_devices(num_devices: int) -> dict[str, str]:
    """Returns the environment variables by which a process has this many CPU devices and no GPU."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "PJRT_NPROC": str(2 * num_devices),  # fewer threads deadlock: see use_fake_devices
    }


def _why_not_free(port: int) -> str:
    """Returns why nothing can listen on a port of the loopback address; nothing if it can."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def free_port() -> int:
    """Returns a port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ProcessGroups:
    """Process groups that are killed when this process ends, or before by ``kill`` or ``close``."""

    WATCHER = """# The watcher of a launcher of jaxpar
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self.WATCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it
        )

    def add(self, group: int) -> None:
        """Adds a process group."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def kill(self, group: int) -> None:
        """Kills what is left of a group, once: after its first process has ended, another may get its number."""
        if group in self._groups:
            self._groups.remove(group)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """Kills all groups and waits until the watcher has ended."""
        for group in [*self._groups]:
            self.kill(group)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._watcher.communicate(timeout=SECONDS_TO_STOP)

    def _tell(self, line: str) -> None:
        pipe = self._watcher.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):  # the watcher was killed
                pipe.write(line.encode())
                pipe.flush()


class Gang:
    """The processes of one run on this machine.

    Args:
        launch: The processes to start.
        variables: Environment variables of the processes, in addition to those of ``launch``.
    """

    def __init__(self, launch: Launch, variables: Mapping[str, str] | None = None) -> None:
        self.launch, self._variables = launch, dict(variables or {})
        self.processes: list[subprocess.Popen] = []
        self.first_failed: int | None = None
        self.still_running: list[int] = []  # when the first that failed had ended with 0, too early
        self.not_ended: list[int] = []  # some time after the first has failed
        self._ended: dict[int, None] = {}  # in their order
        self._screen = threading.Thread(target=self._copy_to_screen, daemon=True)

    def start(self) -> None:
        """Starts all processes and returns immediately. If one cannot be started, those already started are ended."""
        self.launch.log_dir.mkdir(parents=True, exist_ok=True)
        port = self.launch.port or free_port()
        token = {TOKEN_VARIABLE: secrets.token_hex(16)}
        self._groups = ProcessGroups()
        try:
            for number in range(self.launch.num_processes):
                variables = self._variables | token | self.launch.environment(number, port)
                process = self._prepare(number, os.environ | variables)
                self.processes.append(process)
                self._groups.add(process.pid)
                assert process.stdin is not None, "a pipe"
                with contextlib.suppress(BrokenPipeError), process.stdin:  # it was killed
                    process.stdin.write(b"\n")
                if number == 0:
                    self._screen.start()
        except OSError:
            self.stop()
            raise

    def _prepare(self, number: int, environment: Mapping[str, str]) -> subprocess.Popen:
        """Returns a process that starts when it reads a line."""
        with self.log_path(number).open("wb") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", ON_A_LINE, "sh", *self.launch.arguments()],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if number == 0 else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through send_signal alone
            )

    def wait(self) -> int:
        """Waits until no process is left; returns the run's exit code: 0, or that of the process that failed first."""
        deadline = float("inf")
        while self._is_running() and not self._failed() and time.monotonic() < deadline:
            if self._ended:
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
            time.sleep(POLL_SECONDS)
        if self._failed():
            running = self._running()
            self._wait_for_all(SECONDS_TO_EXPLAIN)
            if 0 in self._failed():  # whose last lines are in its log once they are on the screen
                self._screen.join(timeout=SECONDS_TO_STOP)
            if self._only_follow():
                self._wait_for_all(SECONDS_TO_STOP)
            self.not_ended = self._running()
            self.first_failed = self._cause(running)
        elif self._is_running():
            self.first_failed, self.still_running = next(iter(self._ended)), self._running()
        code = self._code()
        self.stop()
        return code

    def _cause(self, running: Sequence[int]) -> int:
        """Returns the first process that failed for a reason of its own; else one that had ended with 0 before any failed."""
        failed = self._failed()
        causes = [
            number for number in failed if self.processes[number].returncode not in CONSEQUENCES
        ]
        early = list(self._ended)[: list(self._ended).index(failed[0])]
        if not causes and early:
            self.still_running = sorted({*running, *failed})
        causes.sort(key=self._names_another)
        first = [*causes, *early, *failed][0]
        # Process 0 says why where all agreed to end, and whichever process is the first of them says nothing.
        agree = {self.processes[number].returncode for number in (0, first)}
        is_told = 0 in causes and agree in AGREED and not self._names_another(0)
        return 0 if is_told else first

    def _only_follow(self) -> bool:
        """Returns whether those that failed did so because of one that has not ended yet."""
        codes = (*FINAL_CODES, ExitCode.PEER_LOST)
        return all(
            self.processes[number].returncode in codes and self._names_another(number)
            for number in self._failed()
        )

    def _names_another(self, number: int) -> bool:
        """Returns whether a process says at its end that another one is gone."""
        shown = "\n".join(_end_of(self.log_path(number)))
        return any(each in shown for each in OF_CONSEQUENCES)

    def _code(self) -> int:
        if self.still_running:
            return int(ExitCode.PEER_LOST if 0 in self.still_running else ExitCode.STUCK)
        return 0 if self.first_failed is None else int(self.processes[self.first_failed].returncode)

    def stop(self) -> None:
        """Ends the processes that still run: SIGTERM, then SIGKILL after a few seconds. Their children are killed too."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._is_running():
                self.send_signal(number)
                self._wait_for_all(SECONDS_TO_STOP)
        self._groups.close()
        if self._screen.is_alive():
            self._screen.join(timeout=SECONDS_TO_STOP)

    def send_signal(self, number: int) -> None:
        """Sends a signal to every process that still runs, and to its children."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def log_path(self, number: int) -> Path:
        """Returns the file of one process's output."""
        return self.launch.log_dir / f"{number}.log"

    def _is_running(self) -> bool:
        """Returns whether any process still runs; kills the remaining children of those that have ended."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self._ended.setdefault(number)
                self._groups.kill(process.pid)
        return len(self._ended) < len(self.processes)

    def _running(self) -> list[int]:
        return [number for number in range(len(self.processes)) if number not in self._ended]

    def _failed(self) -> list[int]:
        """Returns the processes that have ended with another code than 0, in the order in which they did."""
        return [number for number in self._ended if self.processes[number].returncode]

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._is_running():
            time.sleep(POLL_SECONDS)

    def _copy_to_screen(self) -> None:
        output = self.processes[0].stdout
        assert output is not None, "process 0 has a pipe"
        quiet = Quiet()
        with output, self.log_path(0).open("wb", buffering=0) as log:
            while part := os.read(output.fileno(), 2**16):
                with contextlib.suppress(
                    OSError
                ):  # a full disk loses lines of the log; it must not end the run
                    log.write(part)
                _show(quiet.feed(part))
        _show(quiet.end())


def _show(output: bytes) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(output)
        sys.stdout.flush()


@contextlib.contextmanager
def forwarded_signals(gang: Gang) -> Iterator[list[int]]:
    """Forwards SIGTERM and Ctrl-C to the processes, which save and end; the fourth signal kills them. Yields those received."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        gang.send_signal(number if len(received) < 4 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(launch: Launch) -> int:
    """Starts the processes, waits for them, prints which one failed first and why, and returns the exit code of the run."""
    return shell_code(run_gang(Gang(launch))[0])


def run_gang(gang: Gang) -> tuple[int, bool]:
    """Does the same, and returns the code, negative for a signal, and whether this process was asked to stop meanwhile."""
    with forwarded_signals(gang) as received:
        gang.start()
        code = gang.wait()
    if gang.first_failed is not None:
        tell(explain(gang, code))
    return code, bool(received)


def shell_code(code: int) -> int:
    """Returns a process's exit code as a shell reports it: 128 plus its number for a signal."""
    return 128 - code if code < 0 else code


def explain(gang: Gang, code: int) -> str:
    """Returns the report on a failed run: the end of the log of the process that failed first, then which one it was."""
    number = gang.first_failed or 0
    path, running = gang.log_path(number), gang.still_running
    shown = [
        line for each in [number, *running[:1]] if each for line in _end_of(gang.log_path(each))
    ]
    ended = f"ended first ({describe_exit(code)})"
    if running:
        ended = f"ended early, with exit code 0 while {_named(running)} still ran: all must end together"
    elif code == ExitCode.STUCK and gang.not_ended:
        ended += f", and {_named(gang.not_ended)} did not end by itself: frozen, or stuck too"
    verdict = f"process {number} of {gang.launch.num_processes} {ended}; its log: {path}"
    return "\n".join([*shown, f"launch: {verdict}"])


def _named(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _end_of(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - BYTES_READ, 0))
        text = without_chatter(file.read()).decode(errors="replace")
    return [f"--- the end of {log}", *text.splitlines()[-LINES_SHOWN:], "---"]
