"""Compiles two published layouts without their GPUs, from shapes alone: BLOOM's on 384 devices and DeepSpeed's on 32.

Both:                            python recipes/bloom.py

Another mesh for BLOOM:          python recipes/bloom.py --job bloom --mesh.tensor 8 --mesh.stage 6

Another schedule, no recompute:  python recipes/bloom.py --schedule zb-h1 --remat none

It compiles the training step that the GPUs would run, for fake devices and from shapes, so no weight is ever allocated. It
prints figures of that program and its shardings: the memory of each device, the traffic over each axis and the idle time of
stages, and then the planner's estimates for GPUs. It draws the placement on nodes. Nothing is trained.
"""

if __name__ == "__main__":
    import first_line

    first_line.say()

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cli
import jax
import jax.numpy as jnp
import optax
import run_folder
import run_status
from jax.sharding import NamedSharding, PartitionSpec
from shared_flags import check_out_dir

import jaxpar
from jaxpar.inspect.text import bytes_text, table
from jaxpar.models import transformer
from jaxpar.params import count_params, init_params, stack_layers
from jaxpar.pipeline import LayerLayout, compile_schedule, masks_idle_ops
from jaxpar.planner import Choice, Cluster, Plan, cluster, price, roofline
from jaxpar.planner.model_shape import transformer_shape
from jaxpar.plot import plot_placement, render_placement
from jaxpar.report import costs, plan_data, write_page
from jaxpar.report.timeline import timeline
from jaxpar.schedule import Schedule, lockstep_form, make_schedule, plot_timeline, simulate
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from jaxpar.train import TrainStep

AXES = ("data", "stage", "tensor")


@dataclass(frozen=True)
class Job:
    """A published training run."""

    title: str
    model: transformer.TransformerConfig
    mesh: dict[str, int]
    end_layers: tuple[int, int]  # the numbers of layers that embedding and head count as
    batch_size: int  # rows of a step, of all replicas
    seq: int
    microbatch_size: int  # rows of a microbatch, of one replica


JOBS = {
    # The 3D figure of Microsoft's announcement, "DeepSpeed: Extreme-scale model training for everyone" (2020): 32 workers, 4
    # stages of 4 tensor shards, 2 replicas, ZeRO-1. It names no model; this is the 32-layer one of Brown et al. 2020, arXiv
    # 2005.14165, table 2.1: GPT-3 6.7B, with a batch of 2 million tokens.
    "deepspeed": Job(
        "DeepSpeed's 3D figure",
        transformer.preset("gpt3-6.7b", vocab_multiple=128, compute_dtype="bfloat16"),
        {"data": 2, "stage": 4, "tensor": 4},
        end_layers=(0, 0),
        batch_size=1024,
        seq=2048,
        microbatch_size=4,
    ),
    # BigScience 2022, arXiv 2211.05100, sections 3.4 and 3.5 and table 3: 48 nodes of 8 A100-80GB, ZeRO-1, embedding and head
    # counted as a layer each so that 72 divide by 12.
    "bloom": Job(
        "BLOOM-176B",
        transformer.preset("bloom-176b", vocab_multiple=128, compute_dtype="bfloat16"),
        {"data": 8, "stage": 12, "tensor": 4},
        end_layers=(1, 1),
        batch_size=2048,
        seq=2048,
        microbatch_size=2,
    ),
}


@dataclass(frozen=True)
class MeshFlags:
    data: int | None = None
    """Replicas; None: as published."""
    stage: int | None = None
    """Pipeline stages; None: as published."""
    tensor: int | None = None
    """Shards of each weight; None: as published."""


@dataclass(frozen=True, kw_only=True)
class Config:
    job: Literal["both", "deepspeed", "bloom"] = "both"
    """Which layout."""
    mesh: MeshFlags = field(default_factory=MeshFlags)
    schedule: str = "1f1b"
    """The pipeline's schedule: gpipe, 1f1b or zb-h1; both runs were published with 1f1b."""
    remat: Literal["none", "full"] = "full"
    """Whether the backward pass recomputes a layer's activations."""
    zero: Literal[0, 1, 2, 3] = 1
    """What is sharded over the replicas: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    gpus_per_node: int = 8
    """GPUs of a node, which fast links join."""
    gpu: str = "a100-80gb"
    """GPU to plan for, by a name that `python -m jaxpar plan` knows. Both runs were published on A100s or similar GPUs."""
    compile_for: str | None = None
    """Compile for this GPU: a100-40gb, a100-80gb, h100, h200 or b200. It needs jaxpar[gpu-compile]. None: for CPU devices."""
    out_dir: Path = Path("runs/bloom")
    """Folder for the pictures and for the figures, report.json."""
    overwrite: bool = False
    """Delete an earlier run in --out-dir; without it, a folder with results of another run is refused."""


def main(config: Config) -> None:
    with cli.checks():
        check_out_dir(config.out_dir)
        run_folder.check_new(config.out_dir, overwrite=config.overwrite)
        jobs = {name: with_mesh(job, config) for name, job in JOBS.items() if config.job in ("both", name)}
        if config.compile_for:
            jax.config.update("jax_platforms", "cpu")  # which needs no GPU to be there
        else:
            jaxpar.use_fake_devices(max(num_devices(job) for job in jobs.values()))
        parts = {name: make_parts(job, config) for name, job in jobs.items()}
        plans = {name: plan_of(job, config, parts[name][1]) for name, job in jobs.items()}
        if config.overwrite:
            run_folder.delete_run(config.out_dir)
        config.out_dir.mkdir(parents=True, exist_ok=True)

    figures = {}
    for name, job in jobs.items():
        schedule, layout, step, state, batch = parts[name]
        describe(job, config, layout)
        began = time.perf_counter()
        with run_status.phase("compiling", then="reporting"):
            compiled = step.lower(state, batch).compile()
        cli.say(f"compiled for {num_devices(job)} devices in {time.perf_counter() - began:.1f} s\n")
        figures[name], measured = report(job, config, schedule, layout, state, compiled)
        figures[name]["planned"] = plans[name].as_json()
        cli.say(f"\nplanned for {config.gpu}, where bfloat16 is sent and multiplied as it is:")
        cli.say(plans[name].details(cluster_of(job, config).memory_bytes))
        draw(name, job, config, schedule)
        page = page_data(job, config, plans[name], schedule, measured)
        if missing := write_page(config.out_dir / f"{name}-report.html", page):
            cli.say(missing)
    (config.out_dir / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    cli.say(f"written: {config.out_dir}/ with a -report.html, a -nodes.png and a -timeline.png for each, report.json")


def make_parts(job: Job, config: Config) -> tuple[Schedule, LayerLayout, TrainStep, Any, Any]:
    """Returns the schedule, the layout, and the training step with the shapes of its state and of a batch."""
    count = num_microbatches(job)
    form, remat = lockstep_form(config.schedule), config.remat == "full"
    schedule = make_schedule(config.schedule, job.mesh["stage"], count, form=form, remat=remat)
    layout = LayerLayout(
        job.model.num_layers,
        schedule.num_stages,
        schedule.num_chunks,
        schedule.placement,
        end_layers=job.end_layers if schedule.num_stages > 1 else (0, 0),
    )
    mesh = mesh_of(job, config)
    params = transformer.param_table(job.model)
    packed = params | {"layers": layout.as_packed(stack_layers(params["layers"], layout.num_positions))}
    shardings = jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(job.model),
        loss,
        mesh,
        schedule=schedule,
        num_microbatches=count,
        remat=config.remat == "full",
        zero=config.zero,
        layout=layout if schedule.num_stages > 1 else None,
        shardings=shardings,
    )
    optimizer = optax.adamw(1e-4)

    def init(key: jax.Array) -> dict:
        return layout.pack_params(init_params(params, key))

    state = jaxpar.abstract_state(init, jax.random.key(0), optimizer, mesh, shardings, zero=config.zero)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weight": jnp.float32}
    shape = (job.batch_size, job.seq)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for name, dtype in dtypes.items()}
    step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=1.0)
    return schedule, layout, step, state, batch


def plan_of(job: Job, config: Config, layout: LayerLayout) -> Plan:
    """Returns the planner's estimate of the same step on GPUs, whether it fits or not."""
    choice = Choice(
        **job.mesh,
        schedule=config.schedule,
        num_microbatches=num_microbatches(job),
        num_chunks=layout.num_chunks,
        zero=config.zero,
        remat=config.remat == "full",
        layers_per_virtual_stage=tuple(layout.layers_per_virtual_stage or ()) if layout.num_stages > 1 else None,
    )
    return price(job.model, cluster_of(job, config), choice, batch_size=job.batch_size)


def cluster_of(job: Job, config: Config) -> Cluster:
    return cluster(config.gpu, num_nodes(job, config), config.gpus_per_node)


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"], batch["weight"])


def with_mesh(job: Job, config: Config) -> Job:
    """Returns the job on the mesh that the flags ask for; raises where it does not divide."""
    given = {axis: size for axis, size in dataclasses.asdict(config.mesh).items() if size is not None}
    for axis, size in given.items():
        if size < 1:
            raise ValueError(f"--mesh.{axis} must be at least 1; got {size}. Choose 1 or more.")
    if config.gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node must be at least 1; got {config.gpus_per_node}. Choose such as 8.")
    job = dataclasses.replace(job, mesh=job.mesh | given)
    rows = job.mesh["data"] * job.microbatch_size
    if job.batch_size % rows:
        fitting = [n for n in range(1, 65) if job.batch_size % (n * job.microbatch_size) == 0]
        raise ValueError(
            f"replicas must share out a batch in whole microbatches; got --mesh.data {job.mesh['data']} for {job.batch_size} "
            f"rows in microbatches of {job.microbatch_size}. Choose --mesh.data from {', '.join(map(str, fitting))}."
        )
    divisors = [n for n in range(1, config.gpus_per_node + 1) if config.gpus_per_node % n == 0]
    if config.gpus_per_node % job.mesh["tensor"] and job.mesh["tensor"] % config.gpus_per_node:
        raise ValueError(
            f"the tensor axis must fill a node's GPUs or divide them; got --mesh.tensor {job.mesh['tensor']}, "
            f"--gpus-per-node {config.gpus_per_node}. Choose --mesh.tensor from {', '.join(map(str, divisors))}."
        )
    return job


def mesh_of(job: Job, config: Config) -> jax.sharding.Mesh:
    devices = None
    if config.compile_for:
        shape = {"num_nodes": num_nodes(job, config), "devices_per_node": config.gpus_per_node}
        devices = jaxpar.compile_only_devices(config.compile_for, **shape)
    data, stage, tensor = (job.mesh[axis] for axis in AXES)
    return jaxpar.make_mesh(data=data, stage=stage, tensor=tensor, devices=devices)


def num_nodes(job: Job, config: Config) -> int:
    return -(-num_devices(job) // config.gpus_per_node)


def num_devices(job: Job) -> int:
    return job.mesh["data"] * job.mesh["stage"] * job.mesh["tensor"]


def num_microbatches(job: Job) -> int:
    return job.batch_size // (job.mesh["data"] * job.microbatch_size)


def describe(job: Job, config: Config, layout: LayerLayout) -> None:
    model, sizes = job.model, ", ".join(f"{axis}={job.mesh[axis]}" for axis in AXES)
    cli.say(
        f"\n{job.title}: {model.num_layers} layers, {model.embed_dim:,} wide, {model.num_heads} heads, vocabulary "
        f"{model.vocab_size:,}: {count_params(transformer.param_table(model)):,} parameters\n"
        f"{sizes}: {num_devices(job)} devices on {num_nodes(job, config)} nodes; a batch of "
        f"{job.batch_size:,} rows of {job.seq:,} tokens, {num_microbatches(job)} microbatches of {job.microbatch_size} rows "
        f"on each replica; {config.schedule}, ZeRO {config.zero}, remat {config.remat}\n"
        f"layers of each stage: {' '.join(str(int(n)) for n in layout.layer_counts.sum(1))}"
        + ("; the embedding counts as a layer of the first stage, the head of the last" if any(job.end_layers) else "")
    )


def report(
    job: Job, config: Config, schedule: Schedule, layout: LayerLayout, state: Any, compiled: jax.stages.Compiled
) -> tuple[dict, dict]:
    """Prints the cost of a step; returns it, and its memory and traffic as a report's page shows them."""
    mesh, counts = mesh_of(job, config), layout.layer_counts
    own_loop = int(counts.min()) if masks_idle_ops(mesh) else 0  # its trips are known
    step = jaxpar.inspect_step(
        compiled,
        mesh=mesh,
        branch_shares=compile_schedule(schedule).branch_shares(),
        loop_trips=max(1, layout.positions_per_chunk - own_loop),
    )
    params = bytes_on_device(state.params)
    memory = {
        "parameters, float32": params,
        "optimizer state, float32": bytes_on_device(state.opt_state),
        f"temporary, as XLA for {'GPUs' if config.compile_for else 'CPUs'} has it": step.memory.temp_bytes,
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
        gpus = cluster(config.compile_for or config.gpu, num_nodes(job, config), config.gpus_per_node)
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
    shown = {"memory": costs.memory(step, state), "traffic": costs.traffic(step)}
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


def page_data(job: Job, config: Config, plan: Plan, schedule: Schedule, measured: dict) -> dict[str, Any]:
    """Returns the data of the page of a layout: the plan for GPUs, and memory and traffic of the compiled step."""
    model = transformer_shape(job.model, seq=job.seq)
    found = plan_data([plan], model, cluster_of(job, config), name=job.title)
    kind = f"{num_devices(job)} {config.compile_for or 'CPU devices'}"
    facts = found["facts"] | {"memory, traffic": f"of the step compiled for {kind}; the plan is for {config.gpu}"}
    few = few_microbatches(config, schedule)
    pipeline = timeline(few, of_microbatches=schedule.num_microbatches)
    return found | measured | {"facts": facts, "timeline": pipeline}


def few_microbatches(config: Config, schedule: Schedule) -> Schedule:
    """Returns the schedule with as many microbatches as show its steady state."""
    return make_schedule(
        config.schedule,
        schedule.num_stages,
        min(schedule.num_microbatches, 2 * schedule.num_stages),
        form=lockstep_form(config.schedule),
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


def draw(name: str, job: Job, config: Config, schedule: Schedule) -> None:
    """Draws the placement on nodes and the pipeline's timeline; prints the placement where there are few devices."""
    if num_devices(job) <= 64:
        cli.say("\n" + render_placement(job.mesh, config.gpus_per_node))
    plot_placement(job.mesh, config.gpus_per_node, path=config.out_dir / f"{name}-nodes.png", title=job.title)
    if schedule.num_stages > 1:
        plot_timeline(few_microbatches(config, schedule), config.out_dir / f"{name}-timeline.png", timing="lockstep")


if __name__ == "__main__":
    cli.run(main, Config)
