"""Compiles two published layouts without their GPUs, from shapes alone: BLOOM's on 384 devices and DeepSpeed's on 32.

    Both:                            python recipes/bloom.py
    Another mesh for BLOOM:          python recipes/bloom.py --job bloom --mesh.tensor 8 --mesh.stage 6
    Another schedule, no recompute:  python recipes/bloom.py --schedule zb-h1 --remat none

It compiles the training step that the GPUs would run, for fake devices and from shapes, so no weight is ever allocated. It
prints figures of that program and its shardings: the memory of each device, the traffic over each axis and the idle time of
stages, and then the planner's estimates for GPUs. It draws the placement on nodes. Nothing is trained.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import bloom_jobs
import jaxpar
from bloom_jobs import JOBS, PublishedMesh, cluster_of
from jaxpar.commands import recipe
from jaxpar.compile_only import start_on_cpu
from jaxpar.plot import render_placement
from jaxpar.report import write_page
from jaxpar.run import checks, folder, phase, say


@dataclass(frozen=True, kw_only=True)
class Config:
    job: Literal["both", "deepspeed", "bloom"] = "both"
    """Which layout."""
    mesh: PublishedMesh = PublishedMesh()
    schedule: str = "1f1b"
    """The pipeline's schedule: gpipe, 1f1b (as published), interleaved, zb-h1 or zb-v; interleaved and zb-v have 2 chunks."""
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
    with checks():
        folder.check_new(config.out_dir, overwrite=config.overwrite)
        jobs = {
            name: bloom_jobs.with_mesh(job, config)
            for name, job in JOBS.items()
            if config.job in ("both", name)
        }
        if config.compile_for:
            start_on_cpu()
        else:
            jaxpar.use_fake_devices(max(job.num_devices for job in jobs.values()))
        parts = {name: bloom_jobs.make_step(job, config) for name, job in jobs.items()}
        plans = {
            name: bloom_jobs.plan_of(job, config, parts[name][1]) for name, job in jobs.items()
        }
        folder.make_new(config.out_dir, overwrite=config.overwrite)

    figures = {}
    for name, job in jobs.items():
        schedule, layout, step, state, batch = parts[name]
        say(bloom_jobs.describe(job, config, layout))
        began = time.perf_counter()
        with phase("compiling", then="reporting"):
            compiled = step.lower(state, batch).compile()
        say(f"compiled for {job.num_devices} devices in {time.perf_counter() - began:.1f} s\n")
        text, cost, measured = bloom_jobs.step_cost(job, config, schedule, layout, state, compiled)
        figures[name] = cost | {"planned": plans[name].as_json()}
        say(text)
        say(f"\nplanned for {config.gpu}, where bfloat16 is sent and multiplied as it is:")
        say(plans[name].details(cluster_of(job, config).memory_bytes))
        if job.num_devices <= 64:
            say("\n" + render_placement(job.mesh, config.gpus_per_node))
        bloom_jobs.draw(name, job, config, schedule, config.out_dir)
        page = bloom_jobs.page_data(job, config, plans[name], schedule, measured)
        write_page(config.out_dir / f"{name}-report.html", page)
    (config.out_dir / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    say(
        f"written: {config.out_dir}/ with a -report.html, a -nodes.png and a -timeline.png for each, report.json"
    )


if __name__ == "__main__":
    recipe.run(main, Config)
