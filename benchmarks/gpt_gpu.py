"""How fast does one GPU train a Llama of 1B parameters? Tokens/s, MFU and memory, against PyTorch in the same run.

    python benchmarks/gpt_gpu.py                        on a GPU; also runs PyTorch where it is installed
    python benchmarks/gpt_gpu.py --torch-python ../torch/bin/python    PyTorch of another environment
    python benchmarks/gpt_gpu.py --smoke                a tiny model, to try it on any machine

Both train the same parameters on the same batch: bfloat16 products, float32 parameters, AdamW, flash attention (cuDNN's for
JAX). They take turns, and their first losses must agree. A second table compares ``jaxpar.value_and_grad`` with
``jax.value_and_grad`` on one device. Memory is the peak that the device reports, or the compiler's plan if it reports none.

MFU: (6 * parameters + 12 * layers * width * sequence) * tokens/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix B,
without subtracting the causal half of attention) over the datasheet's dense bfloat16 peak.
"""

import contextlib
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import report
from gpt_training import CHECKED_STEPS, TINY, Ours, Work, figures, make_batch, make_shape
from torch_process import check_same, start_on

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Config(Work):
    """What to measure."""

    remat: Literal["none", "full", "dots"] = "dots"
    """What JAX recomputes in the backward pass, as in recipes/gpt.py. PyTorch's compiler makes its own choice."""
    torch: Literal["auto", "compile", "eager", "none"] = "auto"
    """How PyTorch runs; auto: compiled where it is installed and there is a GPU, else not at all."""
    torch_python: str = sys.executable
    """The interpreter that has PyTorch."""
    steps: int = 5
    """Steps of a turn."""
    repeats: int = 7
    """Turns of each candidate."""


def main(config: Config) -> None:
    import jax
    import timing

    if jax.default_backend() != "gpu" and not config.smoke:
        print("gpt_gpu.py needs a GPU, and there is none here: nothing was measured; --smoke tries it on any machine")
        sys.exit(report.CANNOT_RUN)
    record = report.Record.start("gpt_gpu", config)
    config = dataclasses.replace(config, **TINY, steps=2, repeats=1) if config.smoke else config
    shape = make_shape(config)
    batch = make_batch(config, shape)
    ours = Ours(shape, batch, config.remat)
    rows = {"jaxpar": ours.facts}
    candidates: dict[str, Callable] = {"jaxpar": lambda: ours.train(config.steps)}
    with contextlib.ExitStack() as stack:
        if (how := torch_mode(config)) is not None:
            given = (config.torch_python, how, config, shape, ours.host_params(), batch)
            theirs = stack.enter_context(start_on(*given, cpu=jax.default_backend() != "gpu"))
            candidates["PyTorch"], rows["PyTorch"] = (lambda: theirs.train(config.steps)), theirs.facts
            record.versions["torch"] = f"{theirs.about['torch']} ({how}, {theirs.about['device']})"
            check_same(shape, ours, theirs)
        else:
            ours.train(CHECKED_STEPS)
        ours.note_peak()  # before anything else of JAX runs
        steps = timing.measure(candidates, reference="jaxpar", repeats=config.repeats)
    for name, timed in steps.items():
        rows[name] |= figures(config, shape, ours.num_params, timed.wall_seconds / config.steps)
        rows[name]["time ratio"] = timed.wall_ratio
    pair = timing.measure(value_and_grads(config, ours), reference="jax.value_and_grad", repeats=config.repeats)
    record.tables.extend((training(config, shape, ours.num_params, rows), gradients(config, pair)))
    dataclasses.replace(record, machine=f"{record.machine}, {jax.devices()[0].device_kind}").finish(config.out)


def value_and_grads(config: Config, ours: Ours) -> dict[str, Callable]:
    """Returns functions that compute loss and gradients with plain JAX and with jaxpar."""
    import jax

    functions = {"jax.value_and_grad": ours.plain_value_and_grad, "jaxpar.value_and_grad": ours.value_and_grad}
    args = (ours.state.params, ours.batch)
    compiled = {name: jax.jit(function).lower(*args).compile() for name, function in functions.items()}
    turn = lambda run: [run(*args)[0] for _ in range(config.steps)]
    return {name: lambda run=run: turn(run) for name, run in compiled.items()}


def torch_mode(config: Config) -> str | None:
    """Returns how PyTorch runs; None: not at all."""
    if config.torch != "auto":
        return None if config.torch == "none" else config.torch
    is_there = config.torch_python != sys.executable or importlib.util.find_spec("torch") is not None
    if not is_there:
        print("PyTorch is not installed, so jaxpar runs alone: pip install torch, or give --torch-python")
    return "compile" if is_there and not config.smoke else None


def training(config: Config, shape: Any, num_params: int, rows: dict[str, dict]) -> report.Table:
    """Returns the table of training steps."""
    import jax.numpy as jnp

    title = (
        f"Training steps of {config.model}{', made tiny' if config.smoke else ''}: {num_params:,} parameters, "
        f"{config.batch_size} rows of {config.seq} tokens, {jnp.dtype(shape.compute_dtype)}, remat {config.remat}"
    )
    columns = {"run": "", "ms a step": ".2f", "time ratio": ".3f", "tokens/s": ",.0f", "TFLOP/s": ".2f", "MFU": ".3f"}
    columns |= {"peak GiB": ".2f", "first compile s": ".1f"}
    return report.Table(
        title,
        columns,
        [{name: ({"run": run} | row).get(name) for name in columns} for run, row in rows.items()],
        "one device",
    )


def gradients(config: Config, pair: dict[str, Any]) -> report.Table:
    """Returns the table of loss and gradients alone."""
    columns = {"run": "", "ms a call": ".2f", "time ratio": ".3f"}
    milliseconds = {name: timed.wall_seconds / config.steps * 1e3 for name, timed in pair.items()}
    rows = [
        dict(zip(columns, (name, milliseconds[name], timed.wall_ratio), strict=True)) for name, timed in pair.items()
    ]
    return report.Table("Loss and gradients of the same model, without the optimizer", columns, rows, "one device")


if __name__ == "__main__":
    import tyro

    # PyTorch shares the GPU, so JAX must not preallocate three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(tyro.cli(Config, description=__doc__))
