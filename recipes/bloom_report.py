"""The output of bloom.py: the cost of a compiled step as text, as figures and as a page, and its pictures."""

from typing import Any

import cli
import jax
from published_jobs import AXES, Job, cluster_of, mesh_of

import jaxpar
from jaxpar.inspect.text import bytes_text, table
from jaxpar.models import transformer
from jaxpar.params import count_params
from jaxpar.pipeline import LayerLayout, masks_idle_ops, spmd_program
from jaxpar.planner import Plan, cluster, roofline
from jaxpar.planner.job import transformer_shape
from jaxpar.plot import plot_placement, render_placement
from jaxpar.report import plan_data, sections
from jaxpar.schedule import Schedule, lockstep_form, make_schedule, plot_timeline, simulate, timeline_data


def describe(job: Job, flags: Any, layout: LayerLayout) -> None:
    model, sizes = job.model, ", ".join(f"{axis}={job.mesh[axis]}" for axis in AXES)
    cli.say(
        f"\n{job.title}: {model.num_layers} layers, {model.embed_dim:,} wide, {model.num_heads} heads, vocabulary "
        f"{model.vocab_size:,}: {count_params(transformer.param_table(model)):,} parameters\n"
        f"{sizes}: {job.num_devices} devices on {job.num_nodes(flags.gpus_per_node)} nodes; a batch of "
        f"{job.batch_size:,} rows of {job.seq:,} tokens, {job.num_microbatches} microbatches of {job.microbatch_size} rows "
        f"on each replica; {flags.schedule}, ZeRO {flags.zero}, remat {flags.remat}\n"
        f"layers of each stage: {' '.join(str(int(n)) for n in layout.layer_counts.sum(1))}"
        + ("; the embedding counts as a layer of the first stage, the head of the last" if any(job.end_layers) else "")
    )


def report(
    job: Job, flags: Any, schedule: Schedule, layout: LayerLayout, state: Any, compiled: jax.stages.Compiled
) -> tuple[dict, dict]:
    """Prints the cost of a step; returns it, and its memory and traffic as a report's page shows them."""
    mesh, counts = mesh_of(job, flags), layout.layer_counts
    own_loop = int(counts.min()) if masks_idle_ops(mesh) else 0  # a loop whose number of trips is known
    step = jaxpar.inspect_step(
        compiled,
        mesh=mesh,
        branch_shares=spmd_program(schedule, masks=masks_idle_ops(mesh)).branch_shares(),
        loop_trips=max(1, layout.positions_per_chunk - own_loop),
    )
    params = bytes_on_device(state.params)
    memory = {
        "parameters, float32": params,
        "optimizer state, float32": bytes_on_device(state.opt_state),
        f"temporary, as XLA for {'GPUs' if flags.compile_for else 'CPUs'} has it": step.memory.temp_bytes,
    }
    memory["together"] = sum(memory.values())
    cli.say(table([("each device holds", "bytes"), *((kind, bytes_text(size)) for kind, size in memory.items())]))
    traffic = {"+".join(axes): size for axes, size in step.bytes_by_axes().items()}
    heard = [axis for axis in AXES if axis in traffic]
    cli.say(
        "\n"
        + table(
            [("a device sends a step, at most, over", "bytes"), *((axis, bytes_text(traffic[axis])) for axis in heard)]
        )
    )
    if step.gpu:
        cli.say(
            f"\nthe host waits {step.gpu.host_waits:g} times a step; {bytes_text(step.gpu.bytes_copied)} are copied in it"
        )
        gpus = cluster(flags.compile_for or flags.gpu, job.num_nodes(flags.gpus_per_node), flags.gpus_per_node)
        cli.say("\n" + roofline(step, gpus).render())
    bubble = {timing: simulate(schedule, timing=timing).bubble_fraction for timing in ("free", "lockstep")}
    cli.say(
        f"\nstages idle {bubble['lockstep']:.1%} of the time in lock-step, {bubble['free']:.1%} free-running "
        "(F, B, W and R of a stage take one unit each)"
    )
    whole = [path for path, leaf in outer_matrices(state.params) if "stage" not in leaf.sharding.spec]
    if whole and schedule.num_stages > 1:
        cli.say(
            f"{', '.join(whole)}: whole on every stage, since {schedule.num_stages} stages divide no free dim of it"
        )
    shown = {"memory": sections.memory(step, state), "traffic": sections.traffic(step)}
    figures = {
        "mesh": job.mesh,
        "num_microbatches": schedule.num_microbatches,
        "layers_of_stages": layout.layer_counts.sum(1).tolist(),
        "memory_bytes": memory,
        "sent_bytes": traffic,
        "bubble": bubble,
        "flops": step.flops,
        "gpu": step.gpu and {"host_waits": step.gpu.host_waits, "copied_bytes": step.gpu.bytes_copied},
    }
    return figures, shown


def page_data(job: Job, flags: Any, plan: Plan, schedule: Schedule, measured: dict) -> dict[str, Any]:
    """Returns the data of the page of a layout: the plan for GPUs, and memory and traffic of the compiled step."""
    model = transformer_shape(job.model, seq=job.seq)
    found = plan_data([plan], model, cluster_of(job, flags), name=job.title)
    kind = f"{job.num_devices} {flags.compile_for or 'CPU devices'}"
    compiled, planned = (bytes_text(each["memory"]["total_bytes"]) for each in (measured, found))
    facts = found["facts"] | {
        "memory of a device": f"{compiled} compiled for {flags.compile_for or 'CPUs'}, {planned} planned for {flags.gpu}",
        "memory and traffic below": f"of the step compiled for {kind}"
        + ("" if flags.compile_for else ", which widen bfloat16 to float32"),
    }
    few = few_microbatches(flags, schedule)
    pipeline = timeline_data(few, of_microbatches=schedule.num_microbatches)
    return found | measured | {"facts": facts, "timeline": pipeline}


def few_microbatches(flags: Any, schedule: Schedule) -> Schedule:
    """Returns the schedule with as many microbatches as show its steady state."""
    return make_schedule(
        flags.schedule,
        schedule.num_stages,
        min(schedule.num_microbatches, 2 * schedule.num_stages),
        form=lockstep_form(flags.schedule),
        remat=schedule.recomputes,
    )


def outer_matrices(params: dict) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(params["outer"])
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves if len(leaf.shape) > 1
    ]


def bytes_on_device(tree: Any) -> int:
    """Returns the bytes of a sharded tree that one device holds."""
    shard = lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return sum(shard(leaf).size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def draw(name: str, job: Job, flags: Any, schedule: Schedule) -> None:
    """Draws the placement on nodes and the pipeline's timeline; prints the placement where there are few devices."""
    if job.num_devices <= 64:
        cli.say("\n" + render_placement(job.mesh, flags.gpus_per_node))
    plot_placement(job.mesh, flags.gpus_per_node, path=flags.out_dir / f"{name}-nodes.png", title=job.title)
    if schedule.num_stages > 1:
        plot_timeline(few_microbatches(flags, schedule), flags.out_dir / f"{name}-timeline.png", timing="lockstep")
