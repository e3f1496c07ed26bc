"""`python -m jaxpar plan`: ranks the meshes and settings for a model on a cluster, before renting GPUs."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxpar.commands.cli import call, make_folder
from jaxpar.inspect.text import bytes_text

if TYPE_CHECKING:
    from jaxpar.planner import Choice, Cluster, ModelShape, Plan


def plan(
    model: str,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: str = "h100",
    batch_size: int | None = None,
    seq: int | None = None,
    data: int | None = None,
    stage: int | None = None,
    tensor: int | None = None,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    zero: int | None = None,
    remat: Literal["yes", "no"] | None = None,
    executor: Literal["spmd", "mpmd"] = "spmd",
    top: int = 10,
    compute_efficiency: float = 0.55,
    network_efficiency: float = 0.8,
    compile_: Annotated[int, tyro.conf.arg(name="compile")] = 0,
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
    out_dir: Path | None = None,
) -> None:
    """Ranks the meshes and settings for a model on a cluster, with their memory, traffic and time, the best first.

    Args:
        model: A transformer by name: bloom-176b, llama3-70b, gpt2.
        nodes: Machines.
        gpus_per_node: GPUs per machine, joined by fast links.
        gpu: a100-40gb, a100-80gb, a100-80gb-jeanzay, h100, h200 or b200.
        batch_size: Rows per step, over all replicas; by default 4 million tokens.
        seq: Tokens per row; by default the model's longest.
        data: Fixes the number of replicas.
        stage: Fixes the number of pipeline stages.
        tensor: Fixes the number of shards of each weight.
        schedule: Fixes the schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v.
        num_microbatches: Fixes the number of microbatches.
        num_chunks: Fixes the number of chunks per stage.
        zero: Fixes the ZeRO level.
        remat: Fixes whether activations are recomputed.
        executor: Rank by lock-step time (spmd) or by free-running time (mpmd).
        top: Number of plans to print.
        compute_efficiency: Fraction of the peak FLOPs that a layer reaches.
        network_efficiency: Fraction of a link's bandwidth that collectives reach.
        compile_: Number of the best plans to compile for these GPUs, which need not be there; plans that do not fit by the
            compiler's account are dropped. It needs jaxpar[gpu-compile], and about a minute for each.
        json_: Print the plans as JSON, with every figure.
        out_dir: Folder for plots of the best plan: its GPUs on the nodes, its memory; needs matplotlib.
    """
    from jaxpar.planner import Assumptions, cluster, render, transformer_shape
    from jaxpar.planner import plan as search

    for flag, count in (("nodes", nodes), ("gpus-per-node", gpus_per_node), ("top", top), ("seq", seq)):
        if count is not None and count < 1:
            raise ValueError(f"--{flag} must be at least 1; got {count}. Choose 1 or more.")
    _check_compile(compile_, executor)
    if out_dir is not None:
        make_folder(out_dir)
    shape, machines = transformer_shape(model, seq=seq), cluster(gpu, nodes, gpus_per_node)
    held = {
        "data": data,
        "stage": stage,
        "tensor": tensor,
        "schedule": schedule,
        "num_chunks": num_chunks,
        "zero": zero,
    }
    plans = search(
        shape,
        machines,
        batch_size=batch_size,
        executor=executor,
        assumed=Assumptions(compute_efficiency, network_efficiency),
        top=top,
        num_microbatches=num_microbatches,
        remat=None if remat is None else remat == "yes",
        **held,
    )
    rows = plans[0].tokens // shape.tokens_per_row
    compiled = _compile(plans[:compile_], shape, machines, rows) if compile_ else {}
    best, plans = plans[0], [each for each in plans if compiled.get(each.choice, 0) <= machines.memory_bytes]
    if not plans:
        raise ValueError(
            f"a plan must fit the memory of a {gpu} by the compiler's account too; got {best.choice.axes()}, which needs "
            f"{compiled[best.choice] / 2**30:.1f} GiB, and no better one. Choose more --nodes, another --gpu, or --remat yes."
        )
    best = plans[0]
    if json_:
        # Presets are planned for bfloat16.
        run = {"model": model, "batch_size": rows, "seq": shape.tokens_per_row, "dtype": "bfloat16"}
        sizes = [compiled.get(each.choice) for each in plans]
        figures = [{} if size is None else {"compiled_memory_bytes": size} for size in sizes]
        print(json.dumps([run | each.as_json() | more for each, more in zip(plans, figures, strict=True)], indent=1))
        return
    print(
        f"{model}, {shape.num_params / 1e9:.4g} billion parameters, {rows} rows of {shape.tokens_per_row} tokens a step, on "
        f"{nodes} x {gpus_per_node} {gpu}\n"
    )
    print(render(plans))
    print(f"\nbest: {best.details(machines.memory_bytes)}")
    if out_dir is not None:
        _draw(best, machines, out_dir, model)


def _check_compile(count: int, executor: str) -> None:
    if count < 0:
        raise ValueError(
            f"--compile must be at least 0; got {count}. Choose the number of plans to compile, such as 3."
        )
    if count and executor == "mpmd":
        raise ValueError(
            f"--compile compiles the one program of --executor spmd; got --executor mpmd, --compile {count}. Leave one out."
        )


def _compile(plans: "Sequence[Plan]", shape: "ModelShape", machines: "Cluster", num_rows: int) -> "dict[Choice, int]":
    """Returns the bytes that a device needs by the compiler's account, for each choice; prints them on standard error."""
    import jax
    import optax

    from jaxpar.compile_only import compile_only_devices
    from jaxpar.mesh import make_mesh
    from jaxpar.planner.compiled import compile_choice

    jax.config.update("jax_platforms", "cpu")  # which needs no GPU to be there
    gpu = machines.name.removesuffix("-jeanzay")
    devices = compile_only_devices(gpu, num_nodes=machines.num_nodes, devices_per_node=machines.devices_per_node)
    found = {}
    for plan in plans:
        began, choice = time.perf_counter(), plan.choice
        mesh = make_mesh(data=choice.data, stage=choice.stage, tensor=choice.tensor, devices=devices)
        _, report = compile_choice(shape, choice, mesh, optax.adam(1e-4), num_rows)
        found[choice] = report.memory.total_bytes
        fits = "" if found[choice] <= machines.memory_bytes else f": more than a {gpu} has, dropped"
        print(
            f"compiled {choice.axes()} in {time.perf_counter() - began:.0f} s: {bytes_text(found[choice])}, planned "
            f"{bytes_text(plan.memory_bytes)}{fits}",
            file=sys.stderr,
            flush=True,
        )
    return found


def _draw(best: "Plan", machines: "Cluster", out_dir: Path, model: str) -> None:
    from jaxpar.plot import plot_memory, plot_placement

    axes = {"data": best.choice.data, "stage": best.choice.stage, "tensor": best.choice.tensor}
    plot_placement(axes, machines.devices_per_node, path=out_dir / "placement.svg", title=model)
    plot_memory(
        best.bytes_by_stage, machines.memory_bytes, path=out_dir / "memory.svg", title=f"{model}, {best.choice.axes()}"
    )
    print(f"wrote {out_dir / 'placement.svg'} and {out_dir / 'memory.svg'}")


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    call(plan, args, "plan")
