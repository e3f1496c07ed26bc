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
from bloom_report import describe, draw, page_data, report
from jax.sharding import NamedSharding, PartitionSpec
from published_jobs import JOBS, Job, cluster_of, mesh_of, with_mesh
from shared_flags import check_out_dir

import jaxpar
from jaxpar.compile_only import start_on_cpu
from jaxpar.models import transformer
from jaxpar.params import init_params, stack_layers
from jaxpar.pipeline import LayerLayout
from jaxpar.planner import Choice, Plan, price
from jaxpar.report import write_page
from jaxpar.schedule import Schedule, lockstep_form, make_schedule
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from jaxpar.train import TrainStep


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
    """Compile for this GPU: a100-40gb, a100-80gb, h100, h200 or b200. It needs the extra gpu-compile. None: for CPU devices."""
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
            start_on_cpu()
        else:
            jaxpar.use_fake_devices(max(job.num_devices for job in jobs.values()))
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
        cli.say(f"compiled for {job.num_devices} devices in {time.perf_counter() - began:.1f} s\n")
        figures[name], measured = report(job, config, schedule, layout, state, compiled)
        figures[name]["planned"] = plans[name].as_json()
        cli.say(f"\nplanned for {config.gpu}, where bfloat16 is sent and multiplied as it is:")
        cli.say(plans[name].details(cluster_of(job, config).memory_bytes))
        draw(name, job, config, schedule)
        page = page_data(job, config, plans[name], schedule, measured)
        write_page(config.out_dir / f"{name}-report.html", page)
    (config.out_dir / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    cli.say(f"written: {config.out_dir}/ with a -report.html, a -nodes.png and a -timeline.png for each, report.json")


def make_parts(job: Job, config: Config) -> tuple[Schedule, LayerLayout, TrainStep, Any, Any]:
    """Returns the schedule, the layout, and the training step with the shapes of its state and of a batch."""
    count = job.num_microbatches
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
        num_microbatches=job.num_microbatches,
        num_chunks=layout.num_chunks,
        zero=config.zero,
        remat=config.remat == "full",
        layers_per_virtual_stage=tuple(layout.layers_per_virtual_stage or ()) if layout.num_stages > 1 else None,
    )
    return price(job.model, cluster_of(job, config), choice, batch_size=job.batch_size)


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"], batch["weight"])


if __name__ == "__main__":
    cli.run(main, Config)
