"""What a schedule's executor costs against no pipeline, for the work of four stages on one device.

On one device the executor runs a schedule of one stage: all layers in one chunk, or in four that follow one another, which are
four virtual stages. It stores residuals in rings, masks, and adds gradients layer by layer as in any pipeline, and its loss and
gradients are compared. What is not measured there: messages between devices, and the ticks in which a stage waits for others.
With two GPUs or more the real pipelines of two or four stages run too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import report
from gpt_training import Model, loss, make_batch, make_shape

from gpu_day_parts.common import Candidates, Context, off_by

COLUMNS = {
    "run": "",
    "devices": "d",
    "ms a step": ".2f",
    "time ratio": ".3f",
    "of schedule alone": ".3f",
}
COLUMNS |= {"gradients off by": ".1e", "temporary GiB": ".2f", "compile s": ".1f", "spread": ".1%"}
NUM_MICROBATCHES, NUM_LAYERS, NUM_CHUNKS = 8, 16, 4
REFERENCE = "no pipeline"
# Schedule, chunks, form, and whether idle ops are masked.
ON_ONE = {
    "1f1b, one stage": ("1f1b", 1, "fused", True),
    "interleaved, four virtual stages": ("interleaved", NUM_CHUNKS, "fused", True),
    "1f1b, one stage, ops behind predicates": ("1f1b", 1, "unit", False),
}
SMOKE = (REFERENCE, "interleaved, four virtual stages")
ON_MANY = ("1f1b", "interleaved", "zb-h1")


def measure(context: Context) -> Iterator[report.Table]:
    """Times no pipeline and each form of one, in turn."""
    import jax

    work = context.work("llama", batch_size=NUM_MICROBATCHES)
    shape = make_shape(work, **shape_changes(context.smoke))
    mesh = one_device(jax.devices())
    params = jax.jit(Model(shape, mesh).init)(jax.random.key(0))
    batch = make_batch(work, shape)
    candidates, devices, alone = Candidates(context), {}, {}
    expected: list[Any] = []

    def check(results: Any) -> dict[str, Any]:
        if not expected:
            expected.append(jax.device_get(results[1]))
        return {"gradients off by": off_by(jax.device_get(results[1]), expected[0])}

    found = programs(shape, params, batch, jax.devices())
    for name in SMOKE if context.smoke else found:
        make, args, count, share = found[name]
        candidates.add_run(name, make, *args, check=check)
        devices[name], alone[name] = count, share
    yield table(shape, candidates, devices, alone, candidates.timed(REFERENCE, repeats=5))


def shape_changes(smoke: bool) -> dict[str, Any]:
    return {"num_layers": 8 if smoke else NUM_LAYERS}


def one_device(devices: list[Any]) -> Any:
    import jaxpar

    return jaxpar.make_mesh(devices=devices[:1])


def programs(
    shape: Any, params: Any, batch: Any, devices: list[Any]
) -> dict[str, tuple[Callable, tuple, int, float]]:
    """Returns for each candidate what makes it, its arguments, its devices, and its time over that of no pipeline.

    The last is that of the schedule alone, in lock-step, if an executor and messages cost nothing and F, B and W take as long.
    """
    import jax

    import jaxpar

    mesh = one_device(devices)
    model = Model(shape, mesh).model
    compiled = lambda run, *args: lambda: jax.jit(run).lower(*args).compile()
    own = (params, on(batch, mesh))
    plain = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=NUM_MICROBATCHES)
    found = {REFERENCE: (compiled(plain, *own), own, 1, 1.0)}
    for name, settings in ON_ONE.items():
        run = through_executor(model, shape.num_layers, mesh, *settings)
        found[name] = (compiled(run, *own), own, 1, 1.0)
    found["mpmd, four virtual stages"] = (partial(mpmd, model, mesh), own, 1, 1.0)
    if len(devices) > 1:
        stages = 4 if len(devices) >= 4 else 2
        found |= real_pipelines(shape, params, batch, devices[:stages])
    return found


def on(batch: Any, mesh: Any) -> Any:
    import jax

    import jaxpar

    abstract = isinstance(jax.tree.leaves(batch)[0], jax.ShapeDtypeStruct)
    return jaxpar.abstract_batch(batch, mesh) if abstract else jaxpar.shard_batch(batch, mesh)


def through_executor(
    model: Any, num_layers: int, mesh: Any, name: str, chunks: int, form: str, masks: bool
) -> Callable[[Any, Any], Any]:
    """Returns ``(params, batch) -> (loss, gradients)`` by the executor of pipelines, on a mesh of one stage."""
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    import jaxpar
    from jaxpar.data_parallel import split_microbatches
    from jaxpar.pipeline import LayerLayout, accumulate_pipelined, build_stage, compile_schedule
    from jaxpar.schedule import make_schedule
    from jaxpar.shard_map import manual_over_data_and_stage
    from jaxpar.step.sharding import shard_step

    program = compile_schedule(
        make_schedule(name, 1, NUM_MICROBATCHES, chunks, form=form), masks=masks
    )
    layout = LayerLayout(num_layers, 1, chunks)

    def run(params: Any, batch: Any) -> tuple[Any, Any]:
        weight = jnp.float32(batch["targets"].size)
        microbatches = split_microbatches(batch, NUM_MICROBATCHES)
        zero = shard_step(params, jaxpar.Parallel(mesh), None, layered=True).zero
        stage = build_stage(
            model,
            loss,
            program,
            layout,
            params,
            microbatches=microbatches,
            total_weight=weight,
            zero=zero,
        )
        (loss_sum, _), grads = accumulate_pipelined(stage, params)
        return loss_sum / weight, grads

    return manual_over_data_and_stage(
        run, mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )


def mpmd(model: Any, mesh: Any) -> Callable[[Any, Any], Any]:
    """Returns ``(params, batch) -> (loss, gradients)`` by the executor that dispatches each op from Python."""
    from jaxpar.pipeline import MpmdExecutor
    from jaxpar.schedule import make_schedule
    from jaxpar.step.traced_loss import trace_loss

    return MpmdExecutor(
        model,
        loss,
        mesh,
        make_schedule("interleaved", 1, NUM_MICROBATCHES, NUM_CHUNKS, form="published"),
        layout=None,
        reduce_dtype=None,
        traced_loss=partial(trace_loss, model, loss, mesh, NUM_MICROBATCHES, "mpmd"),
        check=lambda params, batch: None,
    )


def real_pipelines(
    shape: Any, params: Any, batch: Any, devices: list[Any]
) -> dict[str, tuple[Callable, tuple, int, float]]:
    """Returns the candidates that use a device for each stage."""
    import jax

    import jaxpar
    from jaxpar.pipeline import masks_idle_ops
    from jaxpar.schedule import lockstep_form, make_schedule, simulate

    stages = len(devices)
    mesh = jaxpar.make_mesh(stage=stages, devices=devices)
    model, found = Model(shape, mesh), {}
    rows = on(batch, mesh)
    for name in ON_MANY:
        chunks = 2 if name == "interleaved" else 1
        form = lockstep_form(name, masks=masks_idle_ops(mesh, name))
        schedule = make_schedule(name, stages, NUM_MICROBATCHES, chunks, form=form)
        layout = jaxpar.LayerLayout(shape.num_layers, stages, chunks)
        packed = jaxpar.shard(layout.pack_params(params), packed_shardings(layout, model, params))
        run = jaxpar.value_and_grad(
            model.model,
            loss,
            mesh,
            schedule=schedule,
            num_microbatches=NUM_MICROBATCHES,
            layout=layout,
        )
        canonical = lambda params, batch, run=run, layout=layout: unpacked(
            layout, *run(params, batch)
        )
        make = lambda run=canonical, packed=packed: jax.jit(run).lower(packed, rows).compile()
        share = (
            simulate(schedule, timing="lockstep").makespan
            / (3 * NUM_MICROBATCHES * chunks)
            / stages
        )
        found[f"{name}, {stages} stages"] = (make, (packed, rows), stages, share)
    return found


def packed_shardings(layout: Any, model: Model, params: Any) -> Any:
    import jaxpar
    from jaxpar.params import stack_layers
    from jaxpar.tensor_parallel import TRANSFORMER_RULES

    packed = model.table | {
        "layers": layout.as_packed(stack_layers(model.table["layers"], layout.num_positions))
    }
    return jaxpar.shardings_from_dims(packed, model.mesh, TRANSFORMER_RULES)


def unpacked(layout: Any, value: Any, grads: Any) -> tuple[Any, Any]:
    return value, layout.unpack_params(grads)


def table(
    shape: Any,
    candidates: Candidates,
    devices: dict[str, int],
    alone: dict[str, float],
    timings: dict,
) -> report.Table:
    rows = []
    for name, timed in timings.items():
        facts = candidates.facts[name]
        cells = (
            name,
            devices[name],
            timed.wall_seconds * 1e3,
            timed.wall_ratio,
            alone[name],
            facts["gradients off by"],
            facts.get("temporary GiB"),
            facts["compile s"] if "temporary GiB" in facts else None,
            timed.wall_spread,
        )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    note = "Of schedule alone: the time ratio if executor and messages cost nothing. On one device no message is sent and no "
    note += f"stage waits for another. {candidates.note()}"
    title = f"Loss and gradients of {shape.num_layers} layers, in {NUM_MICROBATCHES} microbatches of a row"
    return report.Table(title, COLUMNS, rows, "", note.strip())
