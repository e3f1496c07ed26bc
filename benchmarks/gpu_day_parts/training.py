"""Training steps of a Llama of 1B parameters, by jaxpar, plain JAX and PyTorch, each in a process of its own.

So each has the whole memory, and a peak of its own. The first one writes its initial parameters for PyTorch. The first losses
of all must agree.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import timing
import torch_process
from gpt_training import CHECKED_STEPS, Ours, figures, make_batch, make_shape

from gpu_day_parts import roofline
from gpu_day_parts.common import Context, in_words
from gpu_day_parts.processes import started

SCRIPT = Path(__file__).parents[1] / "gpu_day.py"
STEPS, ROUNDS = 5, 7
CANDIDATE_SECONDS = 240.0  # one that hangs leaves time for the others
AGAIN = "jaxpar, again"
COLUMNS = {"run": "", "ms a step": ".2f", "spread": ".1%", "time ratio": ".3f", "tokens/s": ",.0f", "TFLOP/s": ".2f"}
COLUMNS |= {"MFU": ".3f", "peak GiB": ".2f", "first compile s": ".1f"}


@dataclass(frozen=True)
class Candidate:
    """A way to train: by jaxpar, "jax" or "torch", with a rematerialisation by name, or PyTorch's attention kernel."""

    library: str
    setting: str


CANDIDATES = {
    "jaxpar": Candidate("jaxpar", "none"),
    "PyTorch, torch.compile": Candidate("torch", "flash"),
    "jax.value_and_grad, remat dots": Candidate("jax", "dots"),
    "jaxpar, remat dots": Candidate("jaxpar", "dots"),
    "PyTorch, torch.compile, cuDNN's attention": Candidate("torch", "cudnn"),
    "jaxpar, remat full": Candidate("jaxpar", "full"),
    "jax.value_and_grad": Candidate("jax", "none"),
    AGAIN: Candidate("jaxpar", "none"),
}


def measure(context: Context) -> Iterator[report.Table]:
    """Runs each candidate in a process, in the order of what is most wanted, while time is left."""
    found: dict[str, dict] = {}
    left_out: dict[str, str] = {}
    longest = 0.0
    for name in chosen(context):
        if context.left < 1.2 * longest:
            left_out[name] = "no time was left"
            continue
        began = time.perf_counter()
        answer = run_candidate(context, name)
        longest = max(longest, time.perf_counter() - began)
        if "error" not in answer and found and (why := differs(next(iter(found.values())), answer, context)):
            answer = {"error": why}
        if "error" in answer:
            left_out[name] = answer["error"]
            context.say(f"{name}: left out: {answer['error']}")
            continue
        if name == AGAIN:  # its program was compiled before
            del answer["first compile s"]
        found[name] = answer
        context.say(f"{name}: {answer['ms a step']:.2f} ms a step, MFU {report.cell(answer['MFU'], '.3f')}")
        yield table(context, found, left_out)
        yield roofline.table(found)
    if not found:
        raise RuntimeError(f"no candidate ran: {left_out}")
    yield table(context, found, left_out)


def chosen(context: Context) -> dict[str, Candidate]:
    """The candidates; a smoke run has two of them."""
    if context.smoke:
        return {name: CANDIDATES[name] for name in ("jaxpar", "jax.value_and_grad, remat dots")}
    return {name: each for name, each in CANDIDATES.items() if context.torch_python or each.library != "torch"}


def run_candidate(context: Context, name: str) -> dict:
    """Runs a candidate in a process of its own, in a smoke run in this one; returns its figures, or an "error"."""
    if context.smoke:
        return answer_of(context, name)
    out = context.folder / "candidate.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), "--candidate", name, "--folder", str(context.folder)]
    command += ["--until", str(context.until), "--torch-python", context.torch_python]
    with started(command) as process:
        try:
            code = process.wait(timeout=max(1.0, min(context.left, CANDIDATE_SECONDS)))
        except subprocess.TimeoutExpired:
            return {"error": "it took too long"}
    if out.exists():
        return json.loads(out.read_text())
    return {"error": f"its process ended with exit code {code}: see its messages"}


def answer_of(context: Context, name: str) -> dict:
    """Runs a candidate in this process; returns its figures, or an "error"."""
    candidate = CANDIDATES[name]
    try:
        return by_torch(context, candidate) if candidate.library == "torch" else by_jax(context, candidate)
    except (Exception, SystemExit) as error:
        return {"error": in_words(error) if isinstance(error, Exception) else str(error)}


def by_jax(context: Context, candidate: Candidate) -> dict:
    import jax

    work = context.work()
    shape = make_shape(work)
    batch = make_batch(work, shape)
    ours = Ours(shape, batch, candidate.setting, plain=candidate.library == "jax")
    inputs = context.folder / "torch"
    if not context.smoke and context.torch_python and not inputs.exists():
        inputs.mkdir()
        torch_process.write_inputs(inputs, work, shape, ours.host_params(), batch)
    losses = ours.train(CHECKED_STEPS)
    seconds = rounds(context, lambda count: [ours.train(count), time.perf_counter()][1])
    ours.note_peak()
    found = {"losses": losses, "parameters": ours.num_params, "device": jax.devices()[0].device_kind}
    found |= ours.facts | step_figures(context, ours.num_params, seconds)
    remat = candidate.setting if candidate.library == "jaxpar" else None
    return found | {"bounds": roofline.of_step(work, shape, ours, found["ms a step"] / 1e3, remat)}


def by_torch(context: Context, candidate: Candidate) -> dict:
    inputs = context.folder / "torch"
    if not (inputs / "spec.json").exists():
        return {"error": "jaxpar's run did not write the initial parameters"}
    with torch_process.start(context.torch_python, inputs, "compile", attention=candidate.setting) as theirs:
        losses = torch_process.first_losses(theirs)
        seconds = rounds(context, lambda count: [theirs.train(count), time.perf_counter()][1])
        kind, num_params = theirs.about["device_kind"], theirs.about["num_params"]
        found = {"losses": losses, "parameters": num_params, "device": kind, "torch": theirs.about["torch"]}
        return found | theirs.facts | step_figures(context, num_params, seconds, kind)


def rounds(context: Context, train: Any) -> list[float]:
    """Returns the seconds of a step in each round; ``train(count)`` runs steps and returns the time at their end."""
    steps, count = (1, 1) if context.smoke else (STEPS, ROUNDS)
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        seconds.append((train(steps) - began) / steps)
        if context.left < 3 * steps * seconds[-1]:
            break
    return seconds


def step_figures(context: Context, num_params: int, seconds: list[float], kind: str | None = None) -> dict:
    work = context.work()
    median = statistics.median(seconds)
    rates = figures(work, make_shape(work), num_params, median, device_kind=kind)
    return rates | {"spread": timing.spread(seconds)}


def differs(first: dict, other: dict, context: Context) -> str:
    """Returns why two runs do not train one model; "" if they do."""
    if first["parameters"] != other["parameters"]:
        return f"another model: {other['parameters']} parameters"
    agree = torch_process.losses_agree(make_shape(context.work()), first["losses"], other["losses"])
    return (
        "" if agree else f"it does not train this model: losses {other['losses']}, {first['losses']} in the first row"
    )


def table(context: Context, found: dict[str, dict], left_out: dict[str, str]) -> report.Table:
    work = context.work()
    first = next(iter(found.values()))
    rows = [
        {
            column: ({"run": run, "time ratio": row["ms a step"] / first["ms a step"]} | row).get(column)
            for column in COLUMNS
        }
        for run, row in found.items()
    ]
    torch = next((f" PyTorch {row['torch']}." for row in found.values() if "torch" in row), "")
    missing = "".join(f" Left out: {name} ({why})." for name, why in left_out.items())
    return report.Table(
        f"Training steps of {work.model}{', made tiny' if work.smoke else ''}: {first['parameters']:,} parameters, "
        f"{work.batch_size} rows of {work.seq} tokens",
        COLUMNS,
        rows,
        "one device",
        f"Medians of up to {ROUNDS} rounds of {STEPS} steps, one process after another; the spread is that of the rounds. "
        f"Only jaxpar's rows have the flags of XLA that `jaxpar.initialize` sets.{torch}{missing}",
    )
