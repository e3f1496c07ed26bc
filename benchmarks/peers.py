"""How does jaxpar compare? One small GPT on CPU, trained side by side by jaxpar, plain JAX, PyTorch and JaxPP.

    python benchmarks/peers.py                     everything that is installed (PyTorch: pip install torch)
    python benchmarks/peers.py --only pipeline     one question alone: one, data, tensor, pipeline, jaxpp, mixed
    python benchmarks/peers.py --only jaxpp --jaxpp-python ../jaxpp/bin/python     JaxPP, of an environment of its own

The small GPT of `small_gpt.py`, SGD included. Each peer has its own process, or several if it needs them, and the peers step in
turn, so that other load on the machine affects all of them. All must have the same losses to 1e-4. CPU seconds are those of all
processes of a peer, the peak is that of its first process, and the first step includes compilation. JaxPP runs on an older JAX
(0.9.2), as it requires. Times are medians over the rounds of all starts, the first step and the peak over the starts.
"""

import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import report
import tyro
from peer_questions import QUESTIONS, Command, is_jaxpp, is_torch

HERE = Path(__file__).parent
ROUND_TRIP = 1e-4  # the losses of two peers may differ by this

JAXPP_REMEDY = (
    "Install JaxPP beside its own JAX and pass --jaxpp-python ../jaxpp/bin/python: python3.12 -m venv ../jaxpp; "
    "../jaxpp/bin/pip install jax==0.9.2; ../jaxpp/bin/pip install --no-deps git+https://github.com/NVIDIA/jaxpp "
    "(on CPU it needs no CUDA package)."
)


COLUMNS = {
    "peer": "",
    "wall s": ".3f",
    "wall ratio": ".2f",
    "CPU s": ".3f",
    "CPU ratio": ".2f",
}  # medians of rounds
COLUMNS |= {"least wall s": ".3f", "first step s": ".1f", "peak MiB": ".0f"}


@dataclass(frozen=True)
class Config(report.Options):
    """What to compare."""

    only: Literal["all", "one", "data", "tensor", "pipeline", "jaxpp", "mixed"] = "all"
    """The question to measure."""
    repeats: int = 5
    """Rounds; every peer steps once in each."""
    starts: int = 1
    """How often every peer is started, for that many rounds each: two processes of one program can differ by 8%."""
    jaxpp_python: str | None = None
    """Python of an environment with JaxPP, for the question jaxpp; without it, that question is left out."""


class PeerEnded(SystemExit):
    """A peer's process ended before it answered."""


class Peer:
    """One peer's process."""

    def __init__(
        self, name: str, command: Command, smoke: bool, python: str = sys.executable
    ) -> None:
        script, *args = command
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the peer may write)
        self.process = subprocess.Popen(
            [python, str(HERE / "peers" / script), *args, *(["--smoke"] if smoke else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.name, self.python, self.command = (
            name,
            "python" if python == sys.executable else python,
            " ".join(command),
        )
        self.first = self.answer()

    def answer(self) -> dict:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.communicate()
        with self.errors:
            self.errors.seek(0)
            why = last_error(self.errors.read())
        raise PeerEnded(
            f"{self.name} ended with exit code {self.process.returncode}: {why} "
            f"(alone: {self.python} benchmarks/peers/{self.command})"
        )

    def ask(self, wish: str) -> dict:
        assert self.process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # if the process has ended, answer() raises with the reason
            print(wish, file=self.process.stdin, flush=True)
        return self.answer()

    def stop(self) -> dict:
        last = self.ask("stop")
        self.process.communicate()
        self.errors.close()
        return last


def last_error(text: str) -> str:
    """Returns the line of a process's messages that states why it ended."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing."])[-1]


def start_peers(
    commands: dict[str, Command], smoke: bool, jaxpp_python: str | None = None
) -> dict[str, Peer]:
    """Starts the peers of a question; one of PyTorch or JaxPP that fails to start is left out, and the reason is printed."""
    pythons = {name: python_of(command, jaxpp_python) for name, command in commands.items()}
    peers = {}
    for name, command in commands.items():
        if (python := pythons[name]) is None:
            continue
        try:
            peers[name] = Peer(name, command, smoke, python)
        except PeerEnded as ended:
            if not (is_torch(command) or is_jaxpp(command)):
                raise
            print(f"left out: {ended}")
    return peers


def compare(question: str, config: Config) -> tuple[report.Table, dict[str, str]]:
    """Runs the peers of a question in turn; returns their figures and the versions of their packages."""
    asked, runs = QUESTIONS[question], []
    for _ in range(1 if config.smoke else config.starts):
        peers = start_peers(asked.peers, config.smoke, config.jaxpp_python)
        runs.append(take_turns(peers, 1 if config.smoke else config.repeats))
    rounds = [one_round for run in runs for one_round in run.rounds]
    names = [name for name in asked.peers if all(name in run.first for run in runs)]
    left_out, reference = [name for name in asked.peers if name not in names], names[0]
    rows = []
    for name in names:
        times = []
        for key in ("wall_seconds", "cpu_seconds"):
            times.append(statistics.median(r[name][key] for r in rounds))
            times.append(statistics.median(r[name][key] / r[reference][key] for r in rounds))
        least = min(r[name]["wall_seconds"] for r in rounds)
        first = statistics.median(run.first[name]["compile_seconds"] for run in runs)
        peak = statistics.median(run.last[name]["peak_bytes"] for run in runs) / 2**20
        rows.append(dict(zip(COLUMNS, (name, *times, least, first, peak), strict=True)))
    losses = ", ".join(f"{loss:.5f}" for loss in runs[0].losses(reference))
    note = f"Losses, to {ROUND_TRIP} those of all: {losses}."
    if left_out:
        note += f" Left out: {', '.join(left_out)}."
    versions = dict(first["versions"].split(" ", 1) for first in runs[0].first.values())
    return report.Table(asked.title, COLUMNS, rows, asked.mesh, note), versions


@dataclass(frozen=True)
class Run:
    """What peers answered, by name: first, in each round, and at the end."""

    first: dict[str, dict]
    rounds: list[dict[str, dict]]
    last: dict[str, dict]

    def losses(self, name: str) -> list[float]:
        return [self.first[name]["loss"], *(one_round[name]["loss"] for one_round in self.rounds)]


def take_turns(peers: dict[str, Peer], count: int) -> Run:
    """Lets every peer step in each of ``count`` rounds and stops them; raises unless all have the same losses."""
    rounds = [{name: peer.ask("step") for name, peer in peers.items()} for _ in range(count)]
    first = {name: peer.first for name, peer in peers.items()}
    run = Run(first, rounds, {name: peer.stop() for name, peer in peers.items()})
    check_losses({name: run.losses(name) for name in peers})
    return run


def check_losses(losses: dict[str, list[float]]) -> None:
    """Raises unless all peers have the same losses."""
    wanted = next(iter(losses.values()))
    for name, own in losses.items():
        if not all(abs(a - b) <= ROUND_TRIP for a, b in zip(own, wanted, strict=True)):
            raise SystemExit(
                f"peers must have the same losses to {ROUND_TRIP}; got {own} from {name}, {wanted} from the first."
            )


def python_of(command: Command, jaxpp_python: str | None) -> str | None:
    """Returns the Python that runs a peer; None where its library is missing."""
    if is_jaxpp(command):
        return jaxpp_python
    if is_torch(command) and importlib.util.find_spec("torch") is None:
        return None
    return sys.executable


def check_jaxpp(python: str) -> None:
    """Raises unless JaxPP can be imported by another Python."""
    try:
        done = subprocess.run(
            [python, "-c", "import jaxpp.api"], capture_output=True, text=True, check=False
        )
        why = last_error(done.stderr) if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise SystemExit(
            f"--jaxpp-python must be a Python that imports jaxpp; got {python}: {why}. {JAXPP_REMEDY}"
        )


def questions_of(config: Config) -> list[str]:
    """Returns the questions to measure, and prints what is left out because a library is missing.

    Raises:
        SystemExit: The question is JaxPP alone, and there is no JaxPP.
    """
    asked = list(QUESTIONS) if config.only == "all" else [config.only]
    if config.jaxpp_python is not None:
        check_jaxpp(config.jaxpp_python)
    elif config.only == "jaxpp":
        raise SystemExit(f"--only jaxpp must have a Python with JaxPP; got none. {JAXPP_REMEDY}")
    elif "jaxpp" in asked:
        print(
            f"left out, since there is no --jaxpp-python: {QUESTIONS['jaxpp'].title}. {JAXPP_REMEDY}"
        )
        asked.remove("jaxpp")
    commands = {
        name: command for question in asked for name, command in QUESTIONS[question].peers.items()
    }
    if missing := [
        name
        for name, command in commands.items()
        if python_of(command, config.jaxpp_python) is None
    ]:
        print(
            f"left out, since torch is not installed: {', '.join(missing)}. Install it: pip install torch."
        )
    return asked


def main(config: Config) -> None:
    for name, count in (("--repeats", config.repeats), ("--starts", config.starts)):
        if count < 1:
            raise SystemExit(f"{name} must be positive; got {count}. Leave it out for the default.")
    questions = questions_of(config)
    record = report.Record.start("peers", config)
    for question in questions:
        table, versions = compare(question, config)
        record.tables.append(table)
        record.versions.update(versions)
    record.finish(config.out)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
