"""`python -m jaxpar plan`: ranks the meshes and settings for a model on a cluster, before renting GPUs."""

import json
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import optax
import tyro

from jaxpar.commands.cli import call, make_folder
from jaxpar.commands.plan_model import PlannedModel, planned_model
from jaxpar.compile_only import check_cudnn, compile_only_devices, start_on_cpu
from jaxpar.fields import arg, check_at_least
from jaxpar.inspect.text import bytes_text
from jaxpar.mesh import AXES, make_mesh
from jaxpar.planner import Assumptions, Choice, Cluster, ModelShape, Plan, cluster, render
from jaxpar.planner import plan as search
from jaxpar.planner.compiled import compile_choice
from jaxpar.planner.plans import SETTINGS
from jaxpar.plot import plot_memory, plot_placement, plot_step_time
from jaxpar.report import plan_data, write_page
from jaxpar.runtime.output import tell

# Flags of the search itself, beside the settings of the plans.
SEARCHED = ("batch_size", "executor", "memory_headroom", "top")


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of the command.

    Attributes:
        model: A transformer by name, such as bloom-176b, llama3-70b or gpt2; the folder of a model as
            transformers writes it, such as ./Llama-3.1-8B; or module:name of a ModelShape or a TransformerConfig of your own.
        ignore_config_keys: Keys of the folder's config.json to ignore, as the recipes' flag of that name.
        nodes: Machines.
        gpus_per_node: GPUs per machine, joined by fast links.
        gpu: a100-40gb, a100-80gb, a100-80gb-jeanzay, h100, h200 or b200.
        batch_size: Rows per step, over all replicas; by default 4 million tokens.
        seq: Tokens per row; by default the model's longest, at most 8192.
        replica: Fixes the number of groups of replicas, inside which ZeRO shards.
        data: Fixes the number of replicas of a group.
        context: Fixes the number of parts of each sequence.
        stage: Fixes the number of pipeline stages.
        tensor: Fixes the number of shards of each weight.
        schedule: Fixes the schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v.
        num_microbatches: Fixes the number of microbatches.
        num_chunks: Fixes the number of chunks per stage.
        zero: Fixes the ZeRO level.
        remat: Fixes what is recomputed: complete layers (yes), attention scores (dots) or no matrix product (no).
        experts: Fixes the axis over which the experts of layers are.
        expert_buffer: With experts over data, as the recipes' --expert-buffer: room for this many times the rows of a
            replica's own tokens; by default for all rows that it can get.
        executor: Rank by lock-step time (spmd) or by free-running time (mpmd).
        top: Number of plans to print.
        compute_efficiency: Fraction of the peak FLOPs that a layer reaches; by default each kernel's time is told by its shape.
        network_efficiency: Fraction of a link's bandwidth that collectives reach.
        memory_headroom: Fraction of a GPU's memory that a plan leaves free, since CUDA, NCCL and fragmentation take it.
        attention: Attention by a fused kernel, as recipes run it on GPUs in bfloat16 (flash), or by XLA, which stores scores;
            by default flash, and of a TransformerConfig of your own what it says.
        sequence_parallel: Shard activations between pairs of splits over tensor, as the recipes' --sequence-parallel.
        lora_rank: Trains factors of this rank beside the weights of layers and nothing else, as the recipes' --lora-rank.
        compile_: Number of the best plans to compile for these GPUs, which need not be there; plans that do not fit by the
            compiler's account are dropped. It needs the extra gpu-compile, and about a minute for each.
        json_: Print the plans as JSON, with every figure.
        out_dir: Folder for report.html and for plots of the best plan: its GPUs on the nodes, its memory; needs matplotlib.
        report: File for one page, such as report.html, with the plans and the timeline, shards, memory and traffic of the best.
    """

    model: str
    ignore_config_keys: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 8
    gpu: str = "h100"
    batch_size: int | None = None
    seq: int | None = None
    replica: int | None = None
    data: int | None = None
    context: int | None = None
    stage: int | None = None
    tensor: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    num_chunks: int | None = None
    zero: int | None = None
    remat: Literal["yes", "no", "dots"] | None = None
    experts: Literal["tensor", "data"] | None = None
    expert_buffer: float | None = None
    executor: Literal["spmd", "mpmd"] = "spmd"
    top: int = 10
    compute_efficiency: float | None = None
    network_efficiency: float = 0.7
    memory_headroom: float = 0.1
    attention: Literal["flash", "xla"] | None = None
    sequence_parallel: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    lora_rank: int | None = None
    compile_: Annotated[int, tyro.conf.arg(name="compile")] = 0
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
    out_dir: Path | None = None
    report: Path | None = None


def plan(flags: Annotated[PlanFlags, tyro.conf.arg(name="")]) -> None:
    """Ranks the meshes and settings for a model on a cluster, with their memory, traffic and time, the best first."""
    _check(flags)
    if flags.compile_:
        start_on_cpu()
    if flags.out_dir is not None:
        make_folder(flags.out_dir)
    if flags.report is not None:
        make_folder(flags.report.absolute().parent, "--report's folder")
    model = planned_model(flags)
    if flags.compile_ and model.attention == "flash":
        check_cudnn(arg(attention="xla"))
    machines = cluster(flags.gpu, flags.nodes, flags.gpus_per_node)
    plans, compiled = _search(flags, model, machines)
    for path in (flags.report, flags.out_dir and flags.out_dir / "report.html"):
        if path is not None:
            _write_report(path, plans, model.shape, machines, flags.model)
    if flags.json_:
        print(_json(flags, plans, model, compiled))
        return
    _print(flags, plans, model, machines)
    if flags.out_dir is not None:
        _draw(plans, machines, flags.out_dir, flags.model)


def _check(flags: PlanFlags) -> None:
    names = ("nodes", "gpus_per_node", "top", "batch_size", "seq", "lora_rank")
    check_at_least(1, **{name: getattr(flags, name) for name in names})
    check_at_least(0, "Choose the number of plans to compile, such as 3.", compile=flags.compile_)
    if flags.compile_ and flags.executor == "mpmd":
        raise ValueError(
            "--compile compiles the one program of --executor spmd; got --executor mpmd, "
            f"--compile {flags.compile_}. Leave one out."
        )


def _search(flags: PlanFlags, model: PlannedModel, machines: Cluster) -> tuple[Sequence[Plan], dict[Choice, int]]:
    """Returns the plans that fit, the best first, and the bytes of those that were compiled."""
    remat = {None: None, "yes": True, "no": False}.get(flags.remat, flags.remat)
    names, assumed = (*SETTINGS, *SEARCHED), Assumptions(flags.compute_efficiency, flags.network_efficiency)
    wanted = {name: getattr(flags, name) for name in names} | {"remat": remat}
    plans = search(model.shape, machines, assumed=assumed, **wanted)
    compiled = _compile(plans[: flags.compile_], model.to_compile, machines) if flags.compile_ else {}
    limit = machines.memory_bytes * (1 - flags.memory_headroom)
    best, plans = plans[0], [each for each in plans if compiled.get(each.choice, 0) <= limit]
    if not plans:
        raise ValueError(
            f"a plan must fit the memory of a {flags.gpu} by the compiler's account too; got {arg(**best.choice.sizes)}, "
            f"which needs {compiled[best.choice] / 2**30:.1f} GiB, and no better one. Choose more --nodes, another --gpu, or "
            "--remat yes."
        )
    return plans, compiled


def _json(flags: PlanFlags, plans: Sequence[Plan], model: PlannedModel, compiled: Mapping[Choice, int]) -> str:
    run = model.run | {"batch_size": _rows(plans, model.shape)}
    run |= {name: getattr(flags, name) for name in ("lora_rank", "sequence_parallel") if getattr(flags, name)}
    run |= {"attention": model.attention} if model.attention else {}

    def as_json(plan: Plan) -> dict[str, Any]:
        found = run | plan.as_json()
        if plan.choice in compiled:
            found["compiled_memory_bytes"] = compiled[plan.choice]
        if flags.expert_buffer is not None and plan.choice.experts == "data":
            found["expert_buffer"] = flags.expert_buffer
        return found

    return json.dumps([as_json(each) for each in plans], indent=1)


def _rows(plans: Sequence[Plan], shape: ModelShape) -> int:
    """Returns the rows of a step, which all plans share."""
    return plans[0].tokens // shape.tokens_per_row


def _print(flags: PlanFlags, plans: Sequence[Plan], model: PlannedModel, machines: Cluster) -> None:
    width, shape = max(80, shutil.get_terminal_size((100, 24)).columns), model.shape
    trained = "" if flags.lora_rank is None else f", {shape.num_trained / 1e6:.4g} million trained"
    tokens = f" of {shape.tokens_per_row} tokens" if shape.tokens_per_row > 1 else ""
    attention = {"flash": ", flash attention", "xla": ", XLA's attention"}.get(model.attention or "", "")
    title = (
        f"{flags.model}, {shape.num_params / 1e9:.4g} billion parameters{trained}, {_rows(plans, shape)} rows{tokens} a step"
        f"{attention}, on {flags.nodes} x {flags.gpus_per_node} {flags.gpu}"
    )
    print(textwrap.fill(title, width) + "\n")
    print(render(plans, width=width))
    print("\n" + plans[0].details(machines.memory_bytes, width=width, title="best: "))


def _compile(plans: Sequence[Plan], shape: ModelShape, machines: Cluster) -> dict[Choice, int]:
    """Returns the bytes that a device needs by the compiler's account, for each choice; prints them on standard error."""
    gpu = machines.name.removesuffix("-jeanzay")
    devices = compile_only_devices(gpu, num_nodes=machines.num_nodes, devices_per_node=machines.devices_per_node)
    found = {}
    for plan in plans:
        began, choice = time.perf_counter(), plan.choice
        mesh = make_mesh(devices=devices, **{axis: getattr(choice, axis) for axis in AXES})
        _, report = compile_choice(shape.placed(choice.experts), choice, mesh, optax.adam(1e-4), _rows(plans, shape))
        found[choice] = report.memory.total_bytes
        fits = "" if found[choice] <= machines.memory_bytes else f": more than a {gpu} has, dropped"
        seconds, planned = time.perf_counter() - began, bytes_text(plan.memory_bytes)
        tell(f"compiled {choice.axes()} in {seconds:.0f} s: {bytes_text(found[choice])}, planned {planned}{fits}")
    return found


def _write_report(path: Path, plans: Sequence[Plan], shape: ModelShape, machines: Cluster, model: str) -> None:
    """Writes the page, and says so on standard error, since the plans on standard output may be JSON."""
    write_page(path, plan_data(plans, shape, machines, name=model))
    tell(f"wrote {path}")


def _draw(plans: Sequence[Plan], machines: Cluster, out_dir: Path, model: str) -> None:
    best = plans[0]
    plot_placement(best.choice.sizes, machines.devices_per_node, path=out_dir / "placement.svg", title=model)
    plot_memory(
        best.bytes_by_stage, machines.memory_bytes, path=out_dir / "memory.svg", title=f"{model}, {best.choice.axes()}"
    )
    parts = {f"{rank}: {plan.choice.axes()}": plan.time_by_part for rank, plan in enumerate(plans, 1)}
    plot_step_time(parts, path=out_dir / "time.svg", title=f"{model}: where the time of a step goes")
    print(f"wrote {', '.join(str(out_dir / name) for name in ('placement.svg', 'memory.svg', 'time.svg'))}")


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    _check_json(args)
    call(plan, args, "plan", example="--model llama3-8b --nodes 2 --gpu h100")


def _check_json(args: Sequence[str]) -> None:
    """Raises ValueError if a file follows --json, which tyro would call an unrecognized option."""
    for word, after in pairwise([*args, ""]):
        file = word.partition("=")[2] if word.startswith("--json=") else after
        if word.partition("=")[0] == "--json" and file and not file.startswith("-"):
            raise ValueError(
                f"--json is a switch, which prints the plans; got --json {file}. To write them to a file, redirect them: "
                f"--json > {file}"
            )
