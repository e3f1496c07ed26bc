"""How fast are training, decoding and single kernels on a GPU? Measured in one command of 12 minutes, most wanted first.

    python benchmarks/gpu_day.py --out benchmarks/results/gpu_day.json
    python benchmarks/gpu_day.py --only training lora --minutes 3 --out a.json      where a command may not take as long
    python benchmarks/gpu_day.py --join a.json b.json --out benchmarks/results/gpu_day.json
    python benchmarks/gpu_day.py --smoke                                            tiny cases, on any machine
    python benchmarks/gpu_day.py --torch-python ../torch/bin/python                 PyTorch of another environment

In this order: training steps of a Llama of 1.1B parameters (bfloat16 products, float32 parameters, AdamW, cuDNN's attention) by
jaxpar and by PyTorch with ``torch.compile``, with documents in its rows, of Llama 3.1 8B with LoRA, of GPT-2 by both, of OLMoE
with experts, and of three layers of a 70B; greedy decoding; products of experts; a profile of a step by its kernels; the
executor of pipelines against no pipeline; plain JAX with ``jax.checkpoint``. With more minutes: attention under a mesh,
``jaxpar.value_and_grad`` against ``jax.value_and_grad``, the cost of a predicate, a checkpoint. Beside a step is what the
roofline and the planner expected of it. On one GPU the executor runs a schedule of one stage, with all layers in one chunk or
in four; messages, and stages that wait for one another, are measured with two GPUs or more.

Each job runs in a process of its own for at most twice the time that it takes on an H100. One that does not fit in what is left
of the minutes is left out, and the last table says so; one that fails or takes too long costs no figures of the others, which
are written as they come. MFU: (6 * parameters + 12 * layers * heads * head_dim * sequence) * tokens/s (Chowdhery et al. 2022,
arXiv 2204.02311, appendix B, without subtracting the causal half of attention) over the datasheet's dense bfloat16 peak; frozen
parameters count 4 times. It needs no network and no tyro, PyTorch only for its rows, and pydantic only for the checkpoint.
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
from gpu_day_parts import schedule
from gpu_day_parts.schedule import GRACE, JOBS, NAMES, Job, Turn

SCRIPT = Path(__file__).resolve()
MINUTES = 12.0
LIBRARIES = ("optax", "orbax-checkpoint", "torch", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
OUTCOMES = "What was run"
OF_OUTCOMES = {"job": "", "seconds": ".0f", "outcome": ""}
MEASURED = "measured"
# Where each row was measured, which ``marked`` adds.
ORIGIN = {"GPU": "", "jax": "", "at": ""}
DAY = 86400.0  # in seconds


def main(args: argparse.Namespace) -> int:
    """Runs the jobs; returns the exit code: 0 if something was measured, in a smoke run if nothing failed."""
    end = time.time() + 60 * args.minutes  # which the start of JAX below is part of
    device = "" if args.smoke else find_gpu()
    if not args.smoke and not device:
        print(
            "gpu_day.py needs a GPU, and there is none here: nothing was measured; --smoke tries it on any machine"
        )
        return report.CANNOT_RUN
    record = report.Record.start("gpu_day", report.Options(args.out, args.smoke))
    machine = ", ".join(filter(None, (record.machine, device)))
    record = dataclasses.replace(record, machine=machine, versions=record.versions | versions())
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save = partial(written, record, args, folder, outcomes, device)
        for jobs, until in smoke_turns(args) if args.smoke else gpu_turns(args, end, outcomes):
            began = time.time()
            code = run_in_child(args, jobs, folder, until, end, save)
            outcomes += outcomes_of(folder, jobs, code, began)
            save()
        save().finish(args.out)
        found = tables_of(folder, args.only)
    failed = [row for row in outcomes if row["outcome"] != MEASURED]
    return 1 if not found or (args.smoke and failed) else 0


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


def wanted(args: argparse.Namespace) -> list[Job]:
    """The jobs that were asked for; without PyTorch none of its rows."""
    jobs = [job for job in JOBS if job.name in args.only]
    return [job for job in jobs if args.torch_python or not job.name.endswith("-torch")]


def smoke_turns(args: argparse.Namespace) -> Iterator[tuple[list[Job], float]]:
    """Yields all jobs for one process, since starting JAX takes longer than they do; no time ends them."""
    yield wanted(args), time.time() + DAY


def gpu_turns(
    args: argparse.Namespace, end: float, outcomes: list[dict[str, Any]]
) -> Iterator[tuple[list[Job], float]]:
    """Yields each job with the time at which it has to be done, and notes those that are left out."""
    for turn in schedule.turns(wanted(args), end, time.time):
        if turn.until is None:
            outcomes.append(left_out(turn))
        else:
            yield [turn.job], turn.until


def left_out(turn: Turn) -> dict[str, Any]:
    print(f"{turn.job.name}: {turn.why}", flush=True)
    return dict(zip(OF_OUTCOMES, (turn.job.name, None, turn.why), strict=True))


def run_in_child(
    args: argparse.Namespace,
    jobs: Sequence[Job],
    folder: Path,
    until: float,
    end: float,
    save: Callable,
) -> int:
    """Runs jobs in a process of their own, and saves their figures whenever they grow; returns its exit code."""
    from gpu_day_parts.processes import started

    command = [
        sys.executable,
        str(SCRIPT),
        "--child",
        *(job.name for job in jobs),
        "--folder",
        str(folder),
    ]
    command += [
        "--until",
        str(until),
        "--all-until",
        str(end),
        "--torch-python",
        args.torch_python,
    ]
    command += ["--smoke"] if args.smoke else []
    seen = None
    with started(command, child_env(folder, args.smoke)) as process:
        while process.poll() is None and time.time() < until + GRACE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            if (
                now := [path.stat().st_mtime for path in sorted(folder.glob("part-*.json"))]
            ) != seen:
                seen = now
                save()
    return process.returncode


def child_env(folder: Path, smoke: bool) -> dict[str, str]:
    """The environment of a job: nearly all of the GPU's memory, and programs that an earlier job compiled."""
    env = {"PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    # A program that is compiled for the first time takes its full time.
    env["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    # Both of them would keep JAX off the GPU.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        env["XLA_CLIENT_MEM_FRACTION"] = "0.92"
    if smoke:
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster
    return env | os.environ


def part_file(folder: Path, name: str) -> Path:
    return folder / f"part-{name}.json"


def tables_of(folder: Path, jobs: Sequence[str]) -> list[report.Table]:
    """Returns the tables that jobs have written so far, those of one title as one."""
    found: dict[str, report.Table] = {}
    for path in (part_file(folder, name) for name in jobs):
        for table in json.loads(path.read_text())["tables"] if path.exists() else []:
            found[table["title"]] = merged(found.get(table["title"]), report.Table(**table))
    return list(found.values())


def merged(first: report.Table | None, second: report.Table) -> report.Table:
    """Returns a table with the rows of both; the note of the second one follows unless the first one has it."""
    if first is None:
        return second
    note = first.note if second.note in first.note else f"{first.note} {second.note}".strip()
    return dataclasses.replace(first, rows=[*first.rows, *second.rows], note=note)


def outcomes_of(folder: Path, jobs: Sequence[Job], code: int, began: float) -> list[dict[str, Any]]:
    """Returns how each of the jobs that shared a process ended."""
    rows = []
    for job in jobs:
        path = part_file(folder, job.name)
        found = json.loads(path.read_text()) if path.exists() else {"outcome": None}
        stopped = (
            "stopped at the end of its time"
            if code == -signal.SIGKILL
            else f"ended with exit code {code}"
        )
        cells = (
            job.name,
            found.get("seconds") or time.time() - began,
            found["outcome"] or stopped,
        )
        rows.append(dict(zip(OF_OUTCOMES, cells, strict=True)))
    return rows


def outcome_table(rows: list[dict[str, Any]]) -> list[report.Table]:
    order = {name: number for number, name in enumerate(NAMES)}
    rows = sorted(rows, key=lambda row: order[row["job"]])
    return [report.Table(OUTCOMES, OF_OUTCOMES, rows)] if rows else []


def written(
    record: report.Record,
    args: argparse.Namespace,
    folder: Path,
    outcomes: list[dict[str, Any]],
    device: str,
) -> report.Record:
    """Returns the record with the tables that there are so far, written where asked."""
    from gpu_day_parts import published, steps

    found = [
        steps.with_ratios(t) if t.title == steps.TITLE else t for t in tables_of(folder, args.only)
    ]
    origin = dict(zip(ORIGIN, (device, record.versions["jax"], record.commit), strict=True))
    tables = [marked(table, origin) for table in found]
    record = dataclasses.replace(
        record, tables=[*tables, published.table(), *outcome_table(outcomes)]
    )
    if args.out is not None:
        record.write(args.out)
    return record


def marked(table: report.Table, origin: dict[str, str]) -> report.Table:
    """Returns the table whose rows say on which GPU, by which JAX and at which commit they were measured."""
    columns, rows = table.columns | ORIGIN, [row | origin for row in table.rows]
    return dataclasses.replace(table, columns=columns, rows=rows)


def child(args: argparse.Namespace) -> int:
    """Runs jobs in this process, one after another; returns the exit code."""
    from gpu_day_parts.common import Context

    outcomes = []
    for job in JOBS:
        if job.name in args.child:
            flags = (args.folder, args.smoke, args.until, args.all_until, args.torch_python)
            outcomes.append(run_job(job, Context(job.name, *flags)))
    return 0 if set(outcomes) == {MEASURED} else 1


def run_job(job: Job, context: Any) -> str:
    """Runs a job, writes its tables as they grow, and returns how it ended."""
    from gpu_day_parts import measure
    from gpu_day_parts.common import in_words

    began, tables = time.time(), {}

    def save(outcome: str | None) -> None:
        found = {
            "tables": [dataclasses.asdict(each) for each in tables.values()],
            "outcome": outcome,
        }
        part = context.folder / f"{job.name}.new"
        part.write_text(json.dumps(found | {"seconds": time.time() - began}))
        part.replace(part_file(context.folder, job.name))

    context.say("starts")
    try:
        for table in measure(job.part, context, *job.args):
            tables[table.title] = table
            save(None)
        outcome = MEASURED
    except (Exception, SystemExit) as error:  # the other jobs go on
        traceback.print_exc()
        outcome = f"failed: {in_words(error)}"
    save(outcome)
    context.say(outcome)
    return outcome


def join(paths: Sequence[Path], out: Path | None) -> int:
    """Joins records of several commands on one machine, at one commit; returns the exit code."""
    from gpu_day_parts import published

    records = [report.Record.read(path) for path in paths]
    first = records[0]
    for name in ("commit", "machine", "versions", "smoke"):
        if len(values := {str(getattr(record, name)) for record in records}) > 1:
            raise SystemExit(
                f"records to join must have one {name}; got {'; '.join(sorted(values))}. Measure again."
            )
    rows = [
        row
        for record in records
        for table in record.tables
        if table.title == OUTCOMES
        for row in table.rows
    ]
    if len({row["job"] for row in rows}) < len(rows):
        raise SystemExit(
            "records to join must be of different jobs; got one twice. Leave one of the files out."
        )
    found: dict[str, report.Table] = {}
    theirs = published.table()
    for table in (
        table
        for record in records
        for table in record.tables
        if table.title not in (OUTCOMES, theirs.title)
    ):
        found[table.title] = merged(found.get(table.title), table)
    command = "; ".join(record.command for record in records)
    dataclasses.replace(
        first, command=command, tables=[*found.values(), theirs, *outcome_table(rows)]
    ).finish(out)
    return 0


def has_torch() -> str:
    """Returns this interpreter if it has PyTorch, else ""."""
    return sys.executable if importlib.util.find_spec("torch") is not None else ""


def parse(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run tiny cases on any machine; the figures mean nothing",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="the jobs to run")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the time for all of it")
    torch = 'the interpreter that has PyTorch; "": without PyTorch'
    parser.add_argument("--torch-python", default=has_torch(), help=torch)
    parser.add_argument(
        "--join", type=Path, nargs="+", help="join the figures of several commands, run nothing"
    )
    for name, kind in {"--folder": Path, "--until": float, "--all-until": float}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(flags)
    args.only = [name for name in NAMES if name in args.only]
    if not args.minutes > 0:
        parser.error(
            f"--minutes must be positive; got {args.minutes}. Choose {MINUTES:.0f}, or less."
        )
    return args


if __name__ == "__main__":
    sys.path.append(str(SCRIPT.parents[1]))  # where jaxpar is not installed
    asked = parse(sys.argv[1:])
    if asked.join:
        sys.exit(join(asked.join, asked.out))
    sys.exit(child(asked) if asked.child else main(asked))
