"""How does jaxpar compare? One small GPT on CPU, trained side by side by jaxpar, plain JAX and PyTorch.

    python benchmarks/peers.py                     everything that is installed (PyTorch: pip install torch)
    python benchmarks/peers.py --only pipeline     one question alone: one, data, tensor, pipeline or mixed

Each peer is a process of its own, or as many as it takes, and they step in turn, so that a busy machine is busy for each of
them. All must have the same losses to 1e-4. A ratio is the median over the rounds of a peer's figure to that of the
question's first row in the same round. CPU seconds are those of all processes of a peer.
"""

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROUND_TRIP = 1e-4  # the losses of two peers may differ by this

Command = tuple[str, ...]


def jax_peer(*args: str) -> Command:
    return "jax_peer.py", *args


def torch_peer(*args: str) -> Command:
    return "torch_peer.py", *args


def jaxpar_pipeline(*args: str) -> Command:
    return jax_peer("jaxpar", "--stage", "4", *args)


def torch_pipeline(schedule: str) -> Command:
    return torch_peer("pipeline", "--size", "4", "--schedule", schedule)


WHOLE = ("--num-microbatches", "1")

# The first row of each is what the ratios are taken to.
QUESTIONS: dict[str, dict[str, Command]] = {
    "one": {
        "jax.jit": jax_peer("plain"),
        "jaxpar": jax_peer("jaxpar"),
        "PyTorch": torch_peer("single"),
    },
    "data": {
        "jax.jit with shardings, DP 2": jax_peer("plain", "--data", "2", *WHOLE),
        "jaxpar, DP 2": jax_peer("jaxpar", "--data", "2", *WHOLE),
        "PyTorch DDP 2": torch_peer("ddp", "--size", "2", *WHOLE),
    },
    "tensor": {
        "jax.jit with shardings, TP 2": jax_peer("plain", "--tensor", "2", *WHOLE),
        "jaxpar, TP 2": jax_peer("jaxpar", "--tensor", "2", *WHOLE),
        "PyTorch, TP 2": torch_peer("tensor", "--size", "2", *WHOLE),
    },
    "pipeline": {
        "jax.jit, one device": jax_peer("plain"),
        **{
            f"jaxpar {name}": jaxpar_pipeline("--schedule", name)
            for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
        },
        **{
            f"jaxpar free {name}": jaxpar_pipeline("--executor", "free", "--schedule", name)
            for name in ("1f1b", "zb-h1")
        },
        "GPipe by jax.grad": jax_peer("gpipe", "--stage", "4"),
        **{f"PyTorch {name}": torch_pipeline(name) for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")},
    },
    "mixed": {
        "jax.jit, one device": jax_peer("plain"),
        "jaxpar data 2, stage 2, tensor 2": jax_peer(
            "jaxpar", "--data", "2", "--stage", "2", "--tensor", "2", "--num-microbatches", "4"
        ),
        "jaxpar data 2, stage 4": jax_peer("jaxpar", "--data", "2", "--stage", "4", "--num-microbatches", "4"),
        "jaxpar stage 4, tensor 2": jax_peer("jaxpar", "--stage", "4", "--tensor", "2"),
    },
}


@dataclass(frozen=True)
class Config:
    """What to compare."""

    only: Literal["all", "one", "data", "tensor", "pipeline", "mixed"] = "all"
    """The question to ask."""
    repeats: int = 5
    """Rounds; in each every peer steps once."""
    out: Path | None = None
    """A JSON file for the figures."""
    smoke: bool = False
    """A tiny model, one round: does it run?"""


class Peer:
    """One peer's process."""

    def __init__(self, command: Command, smoke: bool) -> None:
        script, *args = command
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peers" / script), *args, *(["--smoke"] if smoke else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.command = " ".join(command)
        self.first = self.answer()

    def answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a peer must answer; got none from {self.command}. Its error stands above.")
        return json.loads(line)

    def ask(self, wish: str) -> dict:
        assert self.process.stdin is not None
        print(wish, file=self.process.stdin, flush=True)
        return self.answer()

    def stop(self) -> dict:
        last = self.ask("stop")
        self.process.wait()
        return last


@dataclass(frozen=True)
class Figures:
    """Of one peer: medians over the rounds, and of the ratios to the first peer of its question."""

    wall_seconds: float
    wall_ratio: float
    cpu_seconds: float
    cpu_ratio: float
    first_step_seconds: float
    peak_bytes: int
    losses: tuple[float, ...]
    versions: str


def ask_all(commands: dict[str, Command], config: Config) -> dict[str, Figures]:
    """Lets the peers of a question step in turn."""
    peers = {name: Peer(command, config.smoke) for name, command in commands.items()}
    rounds = [
        {name: peer.ask("step") for name, peer in peers.items()} for _ in range(1 if config.smoke else config.repeats)
    ]
    last = {name: peer.stop() for name, peer in peers.items()}
    reference = next(iter(peers))
    check_losses({name: [peer.first["loss"], *(r[name]["loss"] for r in rounds)] for name, peer in peers.items()})
    median = lambda name, key: statistics.median(r[name][key] for r in rounds)
    ratio = lambda name, key: statistics.median(r[name][key] / r[reference][key] for r in rounds)
    return {
        name: Figures(
            median(name, "wall_seconds"),
            ratio(name, "wall_seconds"),
            median(name, "cpu_seconds"),
            ratio(name, "cpu_seconds"),
            peer.first["compile_seconds"],
            last[name]["peak_bytes"],
            (peer.first["loss"], *(r[name]["loss"] for r in rounds)),
            peer.first["versions"],
        )
        for name, peer in peers.items()
    }


def check_losses(losses: dict[str, list[float]]) -> None:
    """Raises unless all peers train one model."""
    wanted = next(iter(losses.values()))
    for name, own in losses.items():
        if any(abs(a - b) > ROUND_TRIP for a, b in zip(own, wanted, strict=True)):
            raise SystemExit(
                f"peers must have the same losses to {ROUND_TRIP}; got {own} from {name}, {wanted} from the first."
            )


def installed(command: Command) -> bool:
    return command[0] != "torch_peer.py" or importlib.util.find_spec("torch") is not None


def render(title: str, figures: dict[str, Figures]) -> None:
    table = Table("", "wall s", "ratio", "CPU s", "ratio", "first step s", "peak MiB", title=title)
    for name, f in figures.items():
        numbers = (f"{f.wall_seconds:.3f}", f"{f.wall_ratio:.2f}", f"{f.cpu_seconds:.3f}", f"{f.cpu_ratio:.2f}")
        table.add_row(name, *numbers, f"{f.first_step_seconds:.1f}", f"{f.peak_bytes / 2**20:.0f}")
    Console(width=120).print(table)


def main(config: Config) -> None:
    asked = QUESTIONS if config.only == "all" else {config.only: QUESTIONS[config.only]}
    missing = [name for commands in asked.values() for name, command in commands.items() if not installed(command)]
    if missing:
        print(f"left out, since torch is not installed: {', '.join(missing)}")
    results = {}
    for question, commands in asked.items():
        results[question] = ask_all({name: c for name, c in commands.items() if installed(c)}, config)
        render(question, results[question])
    versions = sorted({f.versions for figures in results.values() for f in figures.values()})
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}"
    print(machine)
    if config.out is not None:
        rows = {question: {name: asdict(f) for name, f in figures.items()} for question, figures in results.items()}
        config.out.write_text(json.dumps({"machine": machine, "questions": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
