"""How close to the datasheet's peak can a step come on GPUs, in the order in which it is compiled?

    python benchmarks/gpu_roofline.py                          all jobs, for GPUs that are not here (ten minutes on 2 cores)
    python benchmarks/gpu_roofline.py --jobs "8b, tensor 8"    some of them
    python benchmarks/gpu_roofline.py --jobs                   none: the second table alone

The first table has jobs that fill their GPUs: Llama 3.1, Mixtral 8x7B and Qwen3 30B-A3B on H100 and BLOOM-176B on A100-80GB,
in bfloat16 with AdamW. All but BLOOM have flash attention and, with a tensor axis, sequence parallelism. Jobs of 131,072
tokens recompute complete layers. Experts belong to replicas, and routing is even. By the roofline each instruction takes as
long as its products at the datasheet's peak or its bytes at the memory's bandwidth, whichever is longer, and a collective adds
the part of its time during which nothing is computed (`jaxpar/planner/compiled.py`). Useful are 6 operations for each token
and each parameter, but of experts those that the token goes to, and causal attention; neither recomputed nor discarded ones.
"By plan" is the memory over that of the planner.

Published MFU is of the precision's peak. Llama 3 405B: 8,192 H100 (Llama Team 2024, arXiv 2407.21783, table 4). Mixtral 8x7B:
64 H100, 438 TFLOP/s (Megatron-LM, README of its experts at 0b4c4cf). Qwen3 30B-A3B: 8 H100, 277 TFLOP/s (NeMo Automodel,
performance summary of October 2025); 16 H100, FP8, 203 TFLOP/s (Megatron-Bridge, performance summary, release 26.06). 131,072
tokens: Llama 3 405B, 16,384 H100 (the same table); Llama 2 7B, 128 H100, FP8, 555 TFLOP/s (NeMo, page of long sequences at
9421f21).

The second table counts what the device does beside products in each schedule: copies of 1 MiB and more in loops, those of whole
rings of residuals over a step apart, waits of the host, and how many messages of the steady state have a product between their
start and their end. A Llama of 16 layers, 2,048 in width (0.8B parameters), runs 8 microbatches of one row on each replica.

It needs jaxpar[gpu-compile] and nvidia-cudnn-cu12, and no GPU. With --out, rows of the first table that are in the file stay,
but for those of the same jobs and the same JAX; so the file can have several versions.
"""

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
import report
import tyro

import jaxpar
from jaxpar.compile_only import check_cudnn, start_on_cpu
from jaxpar.inspect import StepReport
from jaxpar.inspect.gpu import KINDS
from jaxpar.layered_model import LAYERS
from jaxpar.models import transformer
from jaxpar.planner import Choice, ModelShape, Plan, cluster, price, roofline, transformer_shape
from jaxpar.planner.compiled import compile_choice
from jaxpar.planner.ops import Analysis

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Job:
    """A job: a preset of a model, the GPUs, and how it runs on them.

    Attributes:
        model: The preset's name.
        choice: Mesh and settings.
        nodes: Nodes of eight GPUs.
        seq: Tokens of a row.
        rows: Rows of a microbatch of one replica.
        gpu: The GPU.
        flash: Whether attention runs in cuDNN's kernel, and a tensor axis with sequence parallelism.
        changes: Fields of the model's configuration that differ from the preset.
        buffer: Of a model with experts over data, the ``buffer`` of its ``Experts``. At 1 there is room for as many rows as
            they have when tokens are spread evenly, as in the published steps.
        published: The MFU that others publish for a job like it.
    """

    model: str
    choice: Choice
    nodes: int = 1
    seq: int = 8192
    rows: int = 1
    gpu: str = "h100"
    flash: bool = True
    changes: tuple[tuple[str, Any], ...] = ()
    buffer: float | None = None
    published: str = ""


LONG = "38% (405B), 28.0% (7B, FP8)"
JOBS = {
    "8b, data 8, ZeRO 3": Job("llama3.1-8b", Choice(data=8, zero=3)),
    "8b, data 2, tensor 4": Job(
        "llama3.1-8b", Choice(data=2, tensor=4, num_microbatches=8, zero=1)
    ),
    "8b, tensor 8": Job("llama3.1-8b", Choice(tensor=8, num_microbatches=16)),
    "8b, data 2, stage 2, tensor 2": Job(
        "llama3.1-8b", Choice(data=2, stage=2, tensor=2, num_microbatches=8, zero=1)
    ),
    "8b, stage 8": Job("llama3.1-8b", Choice(stage=8, num_microbatches=32), seq=4096),
    "70b, data 2, stage 4, tensor 8": Job(
        "llama3.1-70b", Choice(data=2, stage=4, tensor=8, num_microbatches=16, zero=1), nodes=8
    ),
    "70b, the same with 256 microbatches": Job(
        "llama3.1-70b", Choice(data=2, stage=4, tensor=8, num_microbatches=256, zero=1), nodes=8
    ),
    "405b, data 256, tensor 2, ZeRO 3": Job(
        "llama3.1-405b", Choice(data=256, tensor=2, zero=3, remat=True), nodes=64, rows=2
    ),
    "405b, data 4, stage 16, tensor 8": Job(
        "llama3.1-405b",
        Choice(
            data=4,
            stage=16,
            tensor=8,
            schedule="interleaved",
            num_chunks=2,
            num_microbatches=128,
            zero=1,
            remat=True,
            layers_per_virtual_stage=(*(4,) * 30, 3, 3),
        ),
        nodes=64,
        published="43% (8,192 GPUs)",
    ),
    "BLOOM, data 8, stage 12, tensor 4": Job(
        "bloom-176b",
        Choice(
            data=8,
            stage=12,
            tensor=4,
            num_microbatches=128,
            zero=1,
            remat=True,
            layers_per_virtual_stage=(5, *(6,) * 10, 5),
        ),
        nodes=48,
        seq=2048,
        rows=2,
        gpu="a100-80gb",
        flash=False,
    ),
    "Mixtral 8x7B, replica 2, data 8, stage 4": Job(
        "mixtral-8x7b",
        Choice(
            replica=2,
            data=8,
            stage=4,
            schedule="interleaved",
            num_chunks=2,
            num_microbatches=16,
            zero=1,
            experts="data",
        ),
        nodes=8,
        seq=4096,
        buffer=1.0,
        published="44.3% (Megatron-LM)",
    ),
    "Qwen3 30B-A3B, data 8, stage 2": Job(
        "qwen3-30b-a3b",
        Choice(
            data=8,
            stage=2,
            schedule="interleaved",
            num_chunks=4,
            num_microbatches=16,
            zero=1,
            experts="data",
        ),
        nodes=2,
        seq=4096,
        buffer=1.0,
        published="28.0% (8 GPUs), 10.3% (FP8)",
    ),
    "8b of 131,072 tokens, context 4, tensor 2": Job(
        "llama3.1-8b", Choice(context=4, tensor=2, remat=True), seq=131_072, published=LONG
    ),
    **{
        f"8b of 131,072 tokens, context 8, ZeRO {zero}": Job(
            "llama3.1-8b", Choice(context=8, remat=True, zero=zero), seq=131_072, published=LONG
        )
        for zero in (1, 3)
    },
}
FULL, SMALLER = "Jobs that fill their GPUs", "A Llama of 0.8B on eight H100"  # the tables
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # with their chunks
SMALL = [
    Job(
        "tinyllama-1.1b",
        Choice(
            data=2,
            stage=2,
            tensor=2,
            num_microbatches=8,
            schedule=name,
            num_chunks=chunks,
            remat=remat,
            zero=zero,
        ),
        seq=2048,
        flash=False,
        changes=(("num_layers", 16),),
    )
    for name, chunks in SCHEDULES.items()
    for remat, zero in ((False, 1), (True, 1), (False, 3))
]
OF_JOBS = {
    "job": "",
    "jax": "",
    "at": "",
    "as compiled ms": ",.0f",
    "collectives alone ms": ",.0f",
    "useful MFU at most": ".1%",
    "published MFU": "",
    "peak GiB": ".1f",
    "by plan": ".2f",
    **{f"{kind} ms": ",.0f" for kind in KINDS},
    "host waits": ",.0f",
    "compiled in s": ".0f",
}
OF_SCHEDULES = {
    "schedule": "",
    "remat": "",
    "ZeRO": "d",
    "rings copied, MiB": ".1f",
    "copied a tick, MiB": ".1f",
    "host waits a tick": ".1f",
    "messages beside products": "",
    "temporary MiB": ".0f",
    "by plan": ".2f",
    "useful MFU at most": ".1%",
}


@dataclass(frozen=True)
class Config(report.Options):
    """What to compile."""

    jobs: tuple[str, ...] = tuple(JOBS)
    """Jobs of the first table, by name."""
    schedules: bool = True
    """Whether to compile the second table."""


def main(config: Config) -> None:
    if unknown := set(config.jobs) - set(JOBS):
        raise SystemExit(f"--jobs takes {'; '.join(JOBS)}; got {'; '.join(sorted(unknown))}.")
    start_on_cpu()
    record = report.Record.start("gpu_roofline", config)
    jobs, small = (
        ((), SMALL[:1]) if config.smoke else (config.jobs, SMALL if config.schedules else [])
    )
    try:
        jaxpar.compile_only_devices("h100")
        if any(JOBS[name].flash for name in jobs):
            check_cudnn()
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(report.CANNOT_RUN) from None
    tables = report.Record.read(config.out).tables if config.out and config.out.exists() else []
    earlier = {table.title: table for table in tables}
    if jobs:
        rows = [row_of_job(name, record.versions["jax"], record.commit) for name in jobs]
        rows = with_others(rows, earlier[FULL].rows if FULL in earlier else [])
        earlier |= {FULL: report.Table(FULL, OF_JOBS, rows, "in the names of the jobs")}
    if small:
        rows = [row_of_schedule(job) for job in small]
        earlier |= {
            SMALLER: report.Table(
                SMALLER, OF_SCHEDULES, rows, report.mesh_text(small[0].choice.mesh)
            )
        }
    record.tables.extend(earlier[title] for title in (FULL, SMALLER) if title in earlier)
    record.finish(config.out)


def with_others(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of jobs, and earlier ones of other jobs or of another JAX, in the order of the jobs."""
    by_job = {(row["job"], row["jax"]): row for row in (*earlier, *rows)}
    return [by_job[key] for name in JOBS for key in sorted(by_job) if key[0] == name]


def row_of_job(name: str, version: str, commit: str) -> dict[str, Any]:
    """Returns a row of the first table, of a version of JAX and a commit."""
    job = JOBS[name]
    shape, plan, found, seconds = compiled(job)
    machines = cluster(job.gpu, num_nodes=job.nodes)
    bounds, gpu = roofline(found, machines), found.gpu
    assert gpu is not None
    by_kind = [
        1e3
        * sum(
            each.seconds(machines.peak_flops, machines.memory_bandwidth)
            for each in gpu.work
            if each.kind == kind
        )
        for kind in KINDS
    ]
    peak = found.memory.argument_bytes + found.memory.temp_bytes
    cells = (
        name,
        version,
        commit,
        1e3 * bounds.as_compiled,
        1e3 * bounds.exposed,
        bounds.mfu(useful_flops(shape, job)),
        job.published,
        peak / GIB,
        peak / plan.memory_bytes,
        *by_kind,
        gpu.host_waits,
        seconds,
    )
    return said(OF_JOBS, cells)


def row_of_schedule(job: Job) -> dict[str, Any]:
    """Returns a row of the second table."""
    choice = job.choice
    shape, plan, found, _ = compiled(job)
    gpu, ticks = found.gpu, choice.program(choice.num_microbatches).schedule.num_ticks
    assert gpu is not None
    copies, is_ring = [each for each in gpu.copies if each.times > 1], rings_of(shape, choice)
    messages = [each for each in gpu.transfers if each.kind == "collective-permute"]
    steady = max((each.times for each in messages), default=0)
    of_steady = [each for each in messages if each.times == steady]
    planned = (
        plan.memory_bytes - plan.bytes_per_device["params"] - plan.bytes_per_device["optimizer"]
    )
    cells = (
        choice.schedule,
        "yes" if choice.remat else "no",
        choice.zero,
        sum(each.num_bytes * each.times for each in copies if is_ring(each.array)) / MIB,
        sum(each.num_bytes * each.times for each in copies) / ticks / MIB,
        gpu.host_waits / ticks,
        f"{sum(each.flops_meanwhile > 0 for each in of_steady)} of {len(of_steady)}",
        found.memory.temp_bytes / MIB,
        found.memory.temp_bytes / planned,
        roofline(found, cluster(job.gpu)).mfu(useful_flops(shape, job)),
    )
    return said(OF_SCHEDULES, cells)


def said(columns: dict[str, str], cells: tuple) -> dict[str, Any]:
    """Returns a row, and prints it: the next one may take minutes."""
    row = dict(zip(columns, cells, strict=True))
    print(
        ", ".join(f"{name} {report.cell(row[name], form)}" for name, form in columns.items()),
        file=sys.stderr,
        flush=True,
    )
    return row


def compiled(job: Job) -> tuple[ModelShape, Plan, StepReport, float]:
    """Returns a job's shape, its plan, the report on its compiled step, and the seconds that it took to compile."""
    choice, optimizer = job.choice, optax.adamw(1e-4)
    shape, num_rows = (
        shape_of(job, is_planned=False),
        choice.num_replicas * choice.num_microbatches * job.rows,
    )
    plan = price(
        shape_of(job, is_planned=True),
        cluster(job.gpu, num_nodes=job.nodes),
        choice,
        batch_size=num_rows,
        optimizer=optimizer,
    )
    mesh = jaxpar.make_mesh(
        **dict(choice.mesh.shape), devices=jaxpar.compile_only_devices(job.gpu, num_nodes=job.nodes)
    )
    began = time.perf_counter()
    _, found = compile_choice(shape, choice, mesh, optimizer, num_rows)
    return shape, plan, found, time.perf_counter() - began


def shape_of(job: Job, *, is_planned: bool) -> ModelShape:
    """Returns the shapes of a job's model, to plan for or to compile."""
    config = transformer.preset(
        job.model, compute_dtype="bfloat16", vocab_multiple=128, **dict(job.changes)
    )
    config = config if job.buffer is None else config.with_experts(buffer=job.buffer)
    config = config.for_tensor(job.choice.tensor)
    if job.flash:
        config = dataclasses.replace(config, attention=jaxpar.flash_attention)
    of_tokens = job.flash and job.choice.tensor > 1
    given = {"seq": job.seq, "sequence_parallel": of_tokens, "experts": job.choice.experts}
    return transformer_shape(config, is_planned=is_planned, **given)


def useful_flops(shape: ModelShape, job: Job) -> float:
    """Returns the operations of a step that count, on each device: of experts those to which a token is sent."""
    config, choice = transformer.preset(job.model), job.choice
    used = config.experts.per_token / config.experts.count if config.experts else 1
    idle = (1 - used) * sum(
        leaf.size for leaf in jax.tree.leaves(shape.params[LAYERS].get("experts", {}))
    )
    width = config.num_heads * config.head_dim
    tokens = (
        job.seq
        * job.rows
        * choice.num_microbatches
        / (choice.context * choice.stage * choice.tensor)
    )
    return (6 * (shape.num_params - idle) + 6 * shape.num_layers * width * job.seq) * tokens


def rings_of(shape: ModelShape, choice: Choice) -> Callable[[str], bool]:
    """Returns whether an array in HLO's notation, such as ``bf16[2,4]``, is a ring of residuals with two slots or more.

    XLA may merge and reorder a ring's dims, so it is known by its number of elements: slots times layers of a chunk times those
    of a residual. An activation or a residual may have as many, and is known by its dims.
    """
    analysis = Analysis(shape, 1, choice.tensor, choice.remat)
    slots, positions = choice.num_slots, choice.layout(shape.num_layers).positions_per_chunk
    residuals = {
        name: [each.shape for each in analysis.layer.shapes(analysis.split.values[name])]
        for name in ("residuals_b", "residuals_w", "cotangents_w")
    }
    sizes = {
        slots[name] * positions * math.prod(dims)
        for name in residuals
        if slots[name] > 1
        for dims in residuals[name]
    }
    values = [*itertools.chain(*residuals.values()), *(each.shape for each in analysis.x)]
    without_ones = lambda dims: tuple(size for size in dims if size > 1)
    of_one_layer = set(map(without_ones, values))

    def is_ring(array: str) -> bool:
        dims = tuple(
            int(size) for size in array.partition("[")[2].partition("]")[0].split(",") if size
        )
        return math.prod(dims) in sizes and without_ones(dims) not in of_one_layer

    return is_ring


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
