"""The plans that `plan` finds: searched, compiled, printed, drawn and written as a page."""

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import optax

from jaxpar.commands.cli import make_folder
from jaxpar.commands.plan_flags import PlanFlags
from jaxpar.commands.plan_model import PlannedModel, planned_model
from jaxpar.compile_only import check_cudnn, compile_only_devices, start_on_cpu
from jaxpar.fields import arg
from jaxpar.inspect.text import bytes_text, params_text
from jaxpar.mesh import AXES, make_mesh
from jaxpar.planner import Assumptions, Choice, Cluster, ModelShape, Plan, cluster, render
from jaxpar.planner import plan as search
from jaxpar.planner.compiled import compile_choice
from jaxpar.planner.plans import SETTINGS
from jaxpar.plot import plot_memory, plot_placement, plot_step_time
from jaxpar.report import plan_data, write_page
from jaxpar.runtime.output import seconds_shown, tell

# Flags of the search itself, beside the settings of the plans.
SEARCHED = ("batch_size", "executor", "memory_headroom", "top")


def show_plans(flags: PlanFlags) -> None:
    """Prints the plans for the model and the cluster of the flags, and draws them where the flags ask for it."""
    if flags.compile_:
        start_on_cpu()
    if flags.out_dir is not None:
        make_folder(flags.out_dir)
    if flags.report is not None:
        _check_page(flags.report)
        make_folder(flags.report.absolute().parent, "--report's folder")
    with redirect_stdout(sys.stderr):  # what a model of one's own prints is no part of the JSON
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
    else:
        _print(flags, plans, model, machines)
    if flags.out_dir is not None:
        _draw(plans, machines, flags.out_dir, flags.model)


def _check_page(path: Path) -> None:
    """Raises ValueError if a page cannot be written because its path is a folder; a search takes a minute."""
    if path.is_dir():
        raise ValueError(
            f"--report must name a file; got the folder {path}. Name a page in it: {path / 'plan.html'}"
        )


def _search(
    flags: PlanFlags, model: PlannedModel, machines: Cluster
) -> tuple[Sequence[Plan], dict[Choice, int]]:
    """Returns the plans that fit, the best first, and the bytes of those that were compiled."""
    remat = {None: None, "yes": True, "no": False}.get(flags.remat, flags.remat)
    names, assumed = (
        (*SETTINGS, *SEARCHED),
        Assumptions(flags.compute_efficiency, flags.network_efficiency),
    )
    wanted = {name: getattr(flags, name) for name in names} | {"remat": remat}
    with seconds_shown("searching for plans"):
        plans = search(model.shape, machines, assumed=assumed, **wanted)
    compiled = (
        _compile(plans[: flags.compile_], model.to_compile, machines) if flags.compile_ else {}
    )
    limit = machines.memory_bytes * (1 - flags.memory_headroom)
    best, plans = plans[0], [each for each in plans if compiled.get(each.choice, 0) <= limit]
    if not plans:
        others = ["--remat yes"] * (best.choice.remat is not True)
        others += ["--zero 3"] * (best.choice.zero < 3)
        raise ValueError(
            f"a plan must fit the memory of a {flags.gpu} by the compiler's account too; got {arg(**best.choice.sizes)}, "
            f"which needs {compiled[best.choice] / 2**30:.1f} GiB, and no better one. Choose "
            f"{', '.join(['more --nodes', 'another --gpu', *others])}, or leave out what fixes the mesh."
        )
    return plans, compiled


def _json(
    flags: PlanFlags, plans: Sequence[Plan], model: PlannedModel, compiled: Mapping[Choice, int]
) -> str:
    run = {
        "gpu": flags.gpu,
        "nodes": flags.nodes,
        "gpus_per_node": flags.gpus_per_node,
        **model.run,
    }
    run |= {"batch_size": _rows(plans, model.shape)}
    run |= {
        name: getattr(flags, name)
        for name in ("lora_rank", "quantize", "sequence_parallel")
        if getattr(flags, name)
    }
    if flags.lora_targets != PlanFlags.lora_targets:
        run["lora_targets"] = list(flags.lora_targets)
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
    trained += "" if flags.quantize is None else f", layers in {flags.quantize}"
    tokens = f" of {shape.tokens_per_row} tokens" if shape.tokens_per_row > 1 else ""
    attention = {"flash": ", flash attention", "xla": ", XLA's attention"}.get(
        model.attention or "", ""
    )
    title = (
        f"{flags.model}, {params_text(shape.num_params)}{trained}, {_rows(plans, shape)} rows{tokens} a step"
        f"{attention}, on {flags.nodes} x {flags.gpus_per_node} {flags.gpu}"
    )
    lines = filter(None, [title, model.products, model.factors])
    print("\n".join(textwrap.fill(line, width) for line in lines) + "\n")
    print(render(plans, width=width))
    print("\n" + plans[0].details(machines.memory_bytes, width=width, title="best: "))


def _compile(plans: Sequence[Plan], shape: ModelShape, machines: Cluster) -> dict[Choice, int]:
    """Returns the bytes that a device needs by the compiler's account, for each choice; prints them on standard error."""
    gpu = machines.name.removesuffix("-jeanzay")
    devices = compile_only_devices(
        gpu, num_nodes=machines.num_nodes, devices_per_node=machines.devices_per_node
    )
    found = {}
    for plan in plans:
        began, choice = time.perf_counter(), plan.choice
        mesh = make_mesh(devices=devices, **{axis: getattr(choice, axis) for axis in AXES})
        _, report = compile_choice(
            shape.placed(choice.experts), choice, mesh, optax.adam(1e-4), _rows(plans, shape)
        )
        found[choice] = report.memory.total_bytes
        fits = "" if found[choice] <= machines.memory_bytes else f": more than a {gpu} has, dropped"
        seconds, planned = time.perf_counter() - began, bytes_text(plan.memory_bytes)
        tell(
            f"compiled {choice.axes()} in {seconds:.0f} s: {bytes_text(found[choice])}, planned {planned}{fits}"
        )
    return found


def _write_report(
    path: Path, plans: Sequence[Plan], shape: ModelShape, machines: Cluster, model: str
) -> None:
    """Writes the page, and says so on standard error, since the plans on standard output may be JSON."""
    write_page(path, plan_data(plans, shape, machines, name=model))
    tell(f"wrote {path}")


def _draw(plans: Sequence[Plan], machines: Cluster, out_dir: Path, model: str) -> None:
    best = plans[0]
    plot_placement(
        best.choice.sizes, machines.devices_per_node, path=out_dir / "placement.svg", title=model
    )
    plot_memory(
        best.bytes_by_stage,
        machines.memory_bytes,
        path=out_dir / "memory.svg",
        title=f"{model}, {best.choice.axes()}",
    )
    parts = {
        f"{rank}: {plan.choice.axes()}": plan.time_by_part for rank, plan in enumerate(plans, 1)
    }
    plot_step_time(
        parts, path=out_dir / "time.svg", title=f"{model}: where the time of a step goes"
    )
    names = ("placement.svg", "memory.svg", "time.svg")
    tell(f"wrote {', '.join(str(out_dir / name) for name in names)}")
