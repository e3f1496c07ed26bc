"""Published training runs, from ``bloom_jobs.toml``; and what a step costs, as text, figures, a page and pictures."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

from jaxpar.compile_only import compile_only_devices
from jaxpar.devices import started_devices
from jaxpar.fields import check_at_least, check_one_of
from jaxpar.inspect.text import bytes_text, table
from jaxpar.mesh import make_mesh
from jaxpar.models import transformer
from jaxpar.params import count_params
from jaxpar.pipeline import LayerLayout
from jaxpar.planner import Choice, Cluster, Plan, cluster, price, roofline
from jaxpar.planner.cluster import GPUS
from jaxpar.planner.compiled import inspect_pipeline, step_of_choice
from jaxpar.planner.model_shape import transformer_shape
from jaxpar.planner.state import local_bytes
from jaxpar.plot import plot_placement
from jaxpar.report import data
from jaxpar.schedule import (
    Schedule,
    check_schedule_name,
    lockstep_form,
    make_schedule,
    plot_timeline,
    simulate,
    timeline_data,
)
from jaxpar.sharding import path_string
from jaxpar.train import TrainStep


@dataclass(frozen=True)
class PublishedMesh:
    """The flags of a mesh in place of the published one.

    Attributes:
        data: Replicas; None: as published.
        stage: Pipeline stages; None: as published.
        tensor: Shards of each weight; None: as published.
    """

    data: int | None = None
    stage: int | None = None
    tensor: int | None = None


@dataclass(frozen=True)
class Job:
    """A published training run."""

    title: str
    model: transformer.TransformerConfig
    mesh: dict[str, Any]  # the size of each axis
    end_layers: tuple[int, int]  # the numbers of layers that embedding and head count as
    batch_size: int  # rows of a step, of all replicas
    seq: int
    microbatch_size: int  # rows of a microbatch, of one replica

    @property
    def num_devices(self) -> int:
        """The devices of all axes."""
        return math.prod(self.mesh.values())

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.batch_size // (self.mesh["data"] * self.microbatch_size)

    def num_nodes(self, gpus_per_node: int) -> int:
        """Returns the nodes that have the devices."""
        return -(-self.num_devices // gpus_per_node)


def _read_jobs() -> dict[str, Job]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    model = lambda name: transformer.preset(name, vocab_multiple=128, compute_dtype="bfloat16")
    of = lambda table: {"model": model(table["model"]), "end_layers": tuple(table["end_layers"])}
    return {name: Job(**table | of(table)) for name, table in tables.items()}


JOBS = _read_jobs()


def with_mesh(job: Job, flags: Any) -> Job:
    """Returns the job on the mesh that the flags ask for; raises where it does not divide."""
    given = {
        axis: size for axis, size in dataclasses.asdict(flags.mesh).items() if size is not None
    }
    check_at_least(1, **given)
    check_at_least(1, "Choose such as 8.", gpus_per_node=flags.gpus_per_node)
    check_one_of(
        GPUS, **{"--gpu": flags.gpu}
    )  # by its flag, since "gpu" is another name of --compile-for too
    job = dataclasses.replace(job, mesh=job.mesh | given)
    rows = job.mesh["data"] * job.microbatch_size
    if job.batch_size % rows:
        fitting = [n for n in range(1, 65) if job.batch_size % (n * job.microbatch_size) == 0]
        raise ValueError(
            f"replicas must share out a batch in whole microbatches; got --mesh.data {job.mesh['data']} for {job.batch_size} "
            f"rows in microbatches of {job.microbatch_size}. Choose --mesh.data from {', '.join(map(str, fitting))}."
        )
    if flags.gpus_per_node % job.mesh["tensor"] and job.mesh["tensor"] % flags.gpus_per_node:
        divisors = [n for n in range(1, flags.gpus_per_node + 1) if flags.gpus_per_node % n == 0]
        raise ValueError(
            f"the tensor axis must fill a node's GPUs or divide them; got --mesh.tensor {job.mesh['tensor']}, "
            f"--gpus-per-node {flags.gpus_per_node}. Choose --mesh.tensor from {', '.join(map(str, divisors))}."
        )
    return job


def mesh_of(job: Job, flags: Any) -> jax.sharding.Mesh:
    """Returns the mesh of a job, of fake devices or, with --compile-for, of GPUs that exist for the compiler alone."""
    if not flags.compile_for:
        devices = started_devices()
    else:
        shape = {
            "num_nodes": job.num_nodes(flags.gpus_per_node),
            "devices_per_node": flags.gpus_per_node,
        }
        devices = compile_only_devices(flags.compile_for, **shape)
    return make_mesh(
        **job.mesh, devices=devices[: job.num_devices]
    )  # of another job there may be more


def cluster_of(job: Job, flags: Any, gpu: str | None = None) -> Cluster:
    """Returns the GPUs to plan for, or as many of another kind."""
    return cluster(gpu or flags.gpu, job.num_nodes(flags.gpus_per_node), flags.gpus_per_node)


def make_step(job: Job, flags: Any) -> tuple[Schedule, LayerLayout, TrainStep, Any, Any]:
    """Returns the schedule, the layout, and the training step with the shapes of its state and of a batch."""
    count = job.num_microbatches
    check_schedule_name(flags.schedule)  # before devices are made
    mesh, remat = mesh_of(job, flags), flags.remat == "full"
    masks = bool(flags.compile_for)  # idle ops, as a run on GPUs does
    form = lockstep_form(flags.schedule, masks=masks)
    schedule = make_schedule(flags.schedule, job.mesh["stage"], count, form=form, remat=remat)
    ends, sizes = (
        job.end_layers if schedule.num_stages > 1 else (0, 0),
        (schedule.num_stages, schedule.num_chunks),
    )
    layout = LayerLayout(job.model.num_layers, *sizes, schedule.placement, end_layers=ends)
    shape, choice = transformer_shape(job.model, seq=job.seq), choice_of(job, flags, layout)
    given = shape, choice, mesh, optax.adamw(1e-4), job.batch_size
    step = step_of_choice(*given, max_grad_norm=1.0, mask_idle_ops=masks)
    return schedule, layout, *step


def choice_of(job: Job, flags: Any, layout: LayerLayout) -> Choice:
    """Returns the mesh and the settings of a job as the planner has them."""
    return Choice(
        **job.mesh,
        schedule=flags.schedule,
        num_microbatches=job.num_microbatches,
        num_chunks=layout.num_chunks,
        zero=flags.zero,
        remat=flags.remat == "full",
        layers_per_virtual_stage=tuple(layout.layers_per_virtual_stage or ())
        if layout.num_stages > 1
        else None,
    )


def plan_of(job: Job, flags: Any, layout: LayerLayout) -> Plan:
    """Returns the planner's estimate of the same step on GPUs, whether it fits or not."""
    return price(
        job.model, cluster_of(job, flags), choice_of(job, flags, layout), batch_size=job.batch_size
    )


def describe(job: Job, flags: Any, layout: LayerLayout) -> str:
    """Returns a job's model, mesh, batch and stages as text."""
    model, sizes = job.model, ", ".join(f"{axis}={size}" for axis, size in job.mesh.items())
    chunks = f" with {layout.num_chunks} chunks a stage" if layout.num_chunks > 1 else ""
    return (
        f"\n{job.title}: {model.num_layers} layers, {model.embed_dim:,} wide, {model.num_heads} heads, vocabulary "
        f"{model.vocab_size:,}: {count_params(transformer.param_table(model)):,} parameters\n"
        f"{sizes}: {job.num_devices} devices on {job.num_nodes(flags.gpus_per_node)} nodes; a batch of "
        f"{job.batch_size:,} rows of {job.seq:,} tokens, {job.num_microbatches} microbatches of {job.microbatch_size} rows "
        f"on each replica; {flags.schedule}{chunks}, ZeRO {flags.zero}, remat {flags.remat}\n"
        f"layers of each stage: {' '.join(str(int(n)) for n in layout.layer_counts.sum(1))}"
        + (
            "; the embedding counts as a layer of the first stage, the head of the last"
            if any(job.end_layers)
            else ""
        )
    )


def step_cost(
    job: Job,
    flags: Any,
    schedule: Schedule,
    layout: LayerLayout,
    state: Any,
    compiled: jax.stages.Compiled,
) -> tuple[str, dict, dict]:
    """Returns the cost of a step as text and as figures, and its memory and traffic as a report's page shows them."""
    mesh, counts = mesh_of(job, flags), layout.layer_counts
    masks = bool(flags.compile_for)
    own_loop = int(counts.min()) if masks else 0  # a loop whose number of trips is known
    trips = max(1, layout.positions_per_chunk - own_loop)
    step = inspect_pipeline(compiled, mesh, schedule, masks=masks, loop_trips=trips)
    memory = {
        "parameters, float32": local_bytes(state.params),
        "optimizer state, float32": local_bytes(state.opt_state),
        f"temporary, as XLA for {'GPUs' if flags.compile_for else 'CPUs'} has it": step.memory.temp_bytes,
    }
    memory["together"] = sum(memory.values())
    text = [
        table(
            [
                ("each device holds", "bytes"),
                *((kind, bytes_text(size)) for kind, size in memory.items()),
            ]
        )
    ]
    traffic = {"+".join(axes): size for axes, size in step.bytes_by_axes().items()}
    rows = ((axis, bytes_text(traffic[axis])) for axis in job.mesh if axis in traffic)
    text.append("\n" + table([("a device sends a step, at most, over", "bytes"), *rows]))
    if step.gpu:
        text.append(
            f"\nthe host waits {step.gpu.host_waits:g} times a step; {bytes_text(step.gpu.bytes_copied)} are copied in it"
        )
        text.append("\n" + roofline(step, cluster_of(job, flags, flags.compile_for)).render())
    bubble = {
        timing: simulate(schedule, timing=timing).bubble_fraction for timing in ("free", "lockstep")
    }
    text.append(
        f"\nstages idle {bubble['lockstep']:.1%} of the time in lock-step, {bubble['free']:.1%} free-running "
        "(F, B, W and R of a stage take one unit each)"
    )
    outer = jax.tree_util.tree_leaves_with_path(
        state.params["outer"]
    )  # of which every stage may need the matrices
    whole = [
        path_string(path)
        for path, leaf in outer
        if leaf.ndim > 1 and "stage" not in leaf.sharding.spec
    ]
    if whole and schedule.num_stages > 1:
        text.append(
            f"{', '.join(whole)}: whole on every stage, since {schedule.num_stages} stages divide no free dim of it"
        )
    shown = {"memory": data.memory(step, state), "traffic": data.traffic(step)}
    figures = {
        "mesh": job.mesh,
        "num_microbatches": schedule.num_microbatches,
        "layers_of_stages": layout.layer_counts.sum(1).tolist(),
        "memory_bytes": memory,
        "sent_bytes": traffic,
        "bubble": bubble,
        "flops": step.flops,
        "gpu": step.gpu
        and {"host_waits": step.gpu.host_waits, "copied_bytes": step.gpu.bytes_copied},
    }
    return "\n".join(text), figures, shown


def page_data(
    job: Job, flags: Any, plan: Plan, schedule: Schedule, measured: dict
) -> dict[str, Any]:
    """Returns the data of the page of a layout: the plan for GPUs, and memory and traffic of the compiled step."""
    model = transformer_shape(job.model, seq=job.seq)
    found = data.plan_data([plan], model, cluster_of(job, flags), name=job.title)
    kind = f"{job.num_devices} {flags.compile_for or 'CPU devices'}"
    compiled, planned = (bytes_text(each["memory"]["total_bytes"]) for each in (measured, found))
    facts = found["facts"] | {
        "memory of a device": f"{compiled} compiled for {flags.compile_for or 'CPUs'}, {planned} planned for {flags.gpu}",
        "memory and traffic below": f"of the step compiled for {kind}"
        + ("" if flags.compile_for else ", which widen bfloat16 to float32"),
    }
    pipeline = timeline_data(
        few_microbatches(flags, schedule), of_microbatches=schedule.num_microbatches
    )
    return found | measured | {"facts": facts, "timeline": pipeline}


def few_microbatches(flags: Any, schedule: Schedule) -> Schedule:
    """Returns the schedule with as many microbatches as show its steady state."""
    count = min(schedule.num_microbatches, 2 * schedule.num_stages)
    form = lockstep_form(flags.schedule, masks=bool(flags.compile_for))
    return make_schedule(
        flags.schedule, schedule.num_stages, count, form=form, remat=schedule.recomputes
    )


def draw(name: str, job: Job, flags: Any, schedule: Schedule, out_dir: Path) -> None:
    """Draws the placement on nodes and the pipeline's timeline."""
    plot_placement(
        job.mesh, flags.gpus_per_node, path=out_dir / f"{name}-nodes.png", title=job.title
    )
    if schedule.num_stages > 1:
        plot_timeline(
            few_microbatches(flags, schedule), out_dir / f"{name}-timeline.png", timing="lockstep"
        )
