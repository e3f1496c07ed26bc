"""What do training steps, pipelines, attention and checkpoints cost on a GPU? Measured in one command of 25 minutes.

    python benchmarks/gpu_day.py --out benchmarks/results/gpu_day.json
    python benchmarks/gpu_day.py --only training --minutes 9 --out a.json       where a command may not take as long
    python benchmarks/gpu_day.py --join a.json b.json --out benchmarks/results/gpu_day.json
    python benchmarks/gpu_day.py --smoke                                        tiny cases, on any machine

In this order: training steps of a Llama of 1B parameters (4 rows of 4,096 tokens, bfloat16 products, float32 parameters,
AdamW, cuDNN's attention) by jaxpar, plain JAX and PyTorch with ``torch.compile``, beside what the roofline and the planner
expected of them; ``jaxpar.value_and_grad`` against ``jax.value_and_grad``; the executor of pipelines against no pipeline; flash
attention under a mesh; the cost of a predicate; a checkpoint. On one GPU the executor runs a schedule of one stage, with all
layers in one chunk or in four, which are four virtual stages, and its gradients must be those of no pipeline; messages, and
stages that wait for one another, are measured with two GPUs or more.

Each part runs in a process of its own for its share of the minutes. One that fails or takes too long leaves the figures of the
others alone, and those are written as they come. MFU as in `gpt_gpu.py`. It needs no network, and PyTorch only for its rows.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import report

SCRIPT = Path(__file__).resolve()
# The parts in their order, each with its share of the minutes.
MINUTES = {
    "training": 9.5,
    "gradients": 3.5,
    "pipelines": 4.0,
    "attention": 2.0,
    "host_waits": 1.5,
    "checkpoints": 4.0,
}
LIBRARIES = ("optax", "orbax-checkpoint", "torch", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
OUTCOMES = "What was run"
DAY = 86400.0  # in seconds
GRACE = 10.0  # seconds after its time in which a part may still end by itself


def main(args: argparse.Namespace) -> int:
    """Runs the parts; returns the exit code: 0 if something was measured, in a smoke run if nothing failed."""
    device = "" if args.smoke else find_gpu()
    if not args.smoke and not device:
        print("gpu_day.py needs a GPU, and there is none here: nothing was measured; --smoke tries it on any machine")
        return report.CANNOT_RUN
    options = report.Options(args.out, args.smoke)
    record = report.Record.start("gpu_day", options)
    machine = ", ".join(filter(None, (record.machine, device)))
    record = dataclasses.replace(record, machine=machine, versions=record.versions | versions())
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save = partial(written, record, args, folder, outcomes)
        for names, until, all_until in turns(args, time.time()):
            began = time.time()
            code = run_in_child(args, names, folder, until, all_until, save)
            outcomes += outcomes_of(folder, names, code, began)
            save()
        save().finish(args.out)
        measured = [name for name in args.only if tables_of(folder, name)]
    failed = [row for row in outcomes if row["outcome"] != "measured"]
    return 1 if not measured or (args.smoke and failed) else 0


def find_gpu() -> str:
    """Returns the GPUs of this machine in words, "" if there are none; in another process, so that none is used here."""
    ask = "import jax; d = jax.devices(); print(d[0].platform, len(d), d[0].device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    platform, _, rest = done.stdout.strip().rpartition("\n")[2].partition("|")
    count, _, kind = rest.partition("|")
    return f"{count} x {kind}" if platform == "gpu" else ""


def versions() -> dict[str, str]:
    """Returns the versions of libraries that are installed, other than those of every record."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def turns(args: argparse.Namespace, began: float) -> Iterator[tuple[list[str], float, float]]:
    """Yields parts that share a process, and the times at which they and the whole run end; unused time goes to later parts.

    In a smoke run all parts share one process, since starting JAX takes longer than they do, and no time ends them.
    """
    if args.smoke:
        yield list(args.only), began + DAY, began + DAY
        return
    end = began + 60 * args.minutes
    for index, name in enumerate(args.only):
        share = MINUTES[name] / sum(MINUTES[other] for other in args.only[index:])
        yield [name], time.time() + share * (end - time.time()), end


def run_in_child(
    args: argparse.Namespace, names: Sequence[str], folder: Path, until: float, all_until: float, save: Callable
) -> int:
    """Runs parts in a process of their own, and saves their figures whenever they grow; returns its exit code."""
    from gpu_day_parts.processes import started

    command = [sys.executable, str(SCRIPT), "--child", *names, "--folder", str(folder), "--until", str(until)]
    command += [
        "--all-until",
        str(all_until),
        "--torch-python",
        args.torch_python,
        *(["--smoke"] if args.smoke else []),
    ]
    seen = None
    with started(command, child_env(folder, args.smoke)) as process:
        while process.poll() is None and time.time() < until + GRACE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            if (now := [path.stat().st_mtime for path in sorted(folder.glob("part-*.json"))]) != seen:
                seen = now
                save()
    return process.returncode


def child_env(folder: Path, smoke: bool) -> dict[str, str]:
    """The environment of a part: nearly all of the GPU's memory, and programs that an earlier part compiled."""
    env = {"PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    env["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = (
        "none"  # a program that is compiled for the first time takes its full time
    )
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        env["XLA_CLIENT_MEM_FRACTION"] = "0.92"
    if smoke:
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster
    return env | os.environ


def part_file(folder: Path, name: str) -> Path:
    return folder / f"part-{name}.json"


def tables_of(folder: Path, name: str) -> list[report.Table]:
    """Returns the tables that a part has written so far."""
    path = part_file(folder, name)
    return [report.Table(**table) for table in json.loads(path.read_text())["tables"]] if path.exists() else []


def outcomes_of(folder: Path, names: Sequence[str], code: int, began: float) -> list[dict[str, Any]]:
    """Returns how each of the parts that shared a process ended."""
    rows = []
    for name in names:
        path = part_file(folder, name)
        found = json.loads(path.read_text()) if path.exists() else {"outcome": None}
        stopped = "stopped at the end of its time" if code == -signal.SIGKILL else f"ended with exit code {code}"
        minutes = found.get("minutes") or (time.time() - began) / 60
        rows.append({"part": name, "minutes": minutes, "outcome": found["outcome"] or stopped})
    return rows


def outcome_table(rows: list[dict[str, Any]]) -> list[report.Table]:
    return [report.Table(OUTCOMES, {"part": "", "minutes": ".1f", "outcome": ""}, list(rows))] if rows else []


def written(
    record: report.Record, args: argparse.Namespace, folder: Path, outcomes: list[dict[str, Any]]
) -> report.Record:
    """Returns the record with the tables that there are so far, written where asked."""
    tables = [table for name in args.only for table in tables_of(folder, name)]
    record = dataclasses.replace(record, tables=tables + outcome_table(outcomes))
    if args.out is not None:
        record.write(args.out)
    return record


def child(args: argparse.Namespace) -> int:
    """Runs parts in this process, one after another; returns the exit code."""
    from gpu_day_parts import PARTS
    from gpu_day_parts.common import Context, in_words

    import jaxpar

    if args.child != ["training"]:  # whose candidates have processes of their own, and flags of their own
        jaxpar.initialize()  # XLA's flags for GPUs, as in a training run
    outcomes = []
    for name in args.child:
        context = Context(name, args.folder, args.smoke, args.until, args.all_until, args.torch_python)
        began, tables = time.time(), {}

        def save(outcome: str | None, tables: dict = tables, began: float = began, name: str = name) -> None:
            found = {"tables": [dataclasses.asdict(each) for each in tables.values()], "outcome": outcome}
            part = args.folder / f"{name}.new"
            part.write_text(json.dumps(found | {"minutes": (time.time() - began) / 60}))
            part.replace(part_file(args.folder, name))

        context.say("starts")
        try:
            for table in PARTS[name]()(context):
                tables[table.title] = table
                save(None)
            outcomes.append("measured")
        except Exception as error:  # the other parts go on
            traceback.print_exc()
            outcomes.append(f"failed: {in_words(error)}")
        save(outcomes[-1])
        context.say(outcomes[-1])
    return 0 if set(outcomes) == {"measured"} else 1


def candidate(args: argparse.Namespace) -> int:
    """Runs one candidate of the part "training" in this process, and writes its figures."""
    from gpu_day_parts import training
    from gpu_day_parts.common import Context

    context = Context("training", args.folder, False, args.until, args.until, args.torch_python)
    if training.CANDIDATES[args.candidate].library == "jaxpar":
        import jaxpar

        jaxpar.initialize()
    (args.folder / "candidate.json").write_text(json.dumps(training.answer_of(context, args.candidate)))
    return 0


def join(paths: Sequence[Path], out: Path | None) -> int:
    """Joins records of several commands on one machine, at one commit; returns the exit code."""
    records = [report.Record.read(path) for path in paths]
    first = records[0]
    for name in ("commit", "machine", "versions", "smoke"):
        if len(values := {str(getattr(record, name)) for record in records}) > 1:
            raise SystemExit(f"records to join must have one {name}; got {'; '.join(sorted(values))}. Measure again.")
    parts = [table for record in records for table in record.tables if table.title != OUTCOMES]
    if len({table.title for table in parts}) < len(parts):
        raise SystemExit("records to join must be of different parts; got a table twice. Leave one of the files out.")
    rows = [row for record in records for table in record.tables if table.title == OUTCOMES for row in table.rows]
    command = "; ".join(record.command for record in records)
    dataclasses.replace(first, command=command, tables=[*parts, *outcome_table(rows)]).finish(out)
    return 0


def has_torch() -> str:
    """Returns this interpreter if it has PyTorch, else ""."""
    return sys.executable if importlib.util.find_spec("torch") is not None else ""


def parse(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--smoke", action="store_true", help="run tiny cases on any machine; the figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=list(MINUTES), default=list(MINUTES), help="the parts to run")
    parser.add_argument("--minutes", type=float, default=25.0, help="the time for all parts")
    parser.add_argument(
        "--torch-python", default=has_torch(), help='the interpreter that has PyTorch; "": without PyTorch'
    )
    parser.add_argument("--join", type=Path, nargs="+", help="join the figures of several commands, run nothing")
    for name, kind in {"--folder": Path, "--until": float, "--all-until": float, "--candidate": str}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(flags)
    args.only = [name for name in MINUTES if name in args.only]
    if not args.minutes > 0:
        parser.error(f"--minutes must be positive; got {args.minutes}. Choose 25, or less.")
    return args


if __name__ == "__main__":
    sys.path.append(str(SCRIPT.parents[1]))  # where jaxpar is not installed
    asked = parse(sys.argv[1:])
    if asked.join:
        sys.exit(join(asked.join, asked.out))
    sys.exit(child(asked) if asked.child else candidate(asked) if asked.candidate else main(asked))
