"""What the compiler says of a choice, and the least and the most time that a compiled step can take on GPUs.

    compiled = train_step.lower(state, batch).compile()     # for GPUs, also for those of jaxpar.compile_only_devices
    report = jaxpar.inspect_step(compiled, mesh=mesh)
    print(roofline(report, cluster("h100", num_nodes=2)).render())

Roofline: each instruction takes as long as its products at the peak of the datasheet, or as long as the bytes that it reads and
writes at the bandwidth of the memory, whichever is longer (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785).
Collectives take as long as their bytes at the bandwidth of the link, and the latency.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.data_parallel import abstract_batch
from jaxpar.fields import check_kind
from jaxpar.gradients import value_and_grad
from jaxpar.inspect import Collective, StepReport, inspect_step
from jaxpar.inspect.report import axes_text
from jaxpar.inspect.text import device_seconds_text, table
from jaxpar.layered_model import LAYERS
from jaxpar.mesh import AXES, STAGE
from jaxpar.pipeline import masks_idle_ops, spmd_program
from jaxpar.planner.cluster import Cluster, Links, collective_seconds
from jaxpar.planner.job import Choice
from jaxpar.planner.model_shape import ModelShape
from jaxpar.schedule import Schedule
from jaxpar.sharding import shardings_from_paths
from jaxpar.step.settings import Parallel, Pipeline
from jaxpar.train import Optimizer, TrainState, TrainStep, abstract_state, make_train_step


def step_of_choice(
    shape: ModelShape,
    choice: Choice,
    mesh: Mesh,
    optimizer: Optimizer,
    batch_size: int,
    *,
    max_grad_norm: float | None = None,
    mask_idle_ops: bool | Literal["auto"] = "auto",
) -> tuple[TrainStep, TrainState, PyTree]:
    """Returns the training step of a choice, with its state and a batch as ShapeDtypeStructs. Nothing is run or compiled.

    Args:
        shape: The model.
        choice: Mesh axes and settings.
        mesh: A mesh of the choice's axes, also of devices for the compiler alone.
        optimizer: The optimizer.
        batch_size: Rows of a step, over all replicas.
        max_grad_norm: As for ``make_train_step``.
        mask_idle_ops: As for ``Pipeline``.
    """
    shape, layout = shape.placed(choice.experts), choice.layout(shape.num_layers)
    packed = shape.with_positions(layout.num_positions)
    packed = packed | {LAYERS: layout.as_packed(packed[LAYERS])}
    shardings = shardings_from_paths(packed, mesh, shape.rules)
    zeros = lambda key: jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), packed)
    held = layout if choice.stage > 1 else None
    parallel = Parallel(mesh, shardings, zero=choice.zero, trainable=shape.trainable, layout=held)
    state = abstract_state(zeros, jax.random.key(0), optimizer, parallel)
    pipeline = _pipeline(choice, mask_idle_ops)
    of_mesh = value_and_grad(shape.model, shape.loss, parallel, pipeline)
    step = make_train_step(of_mesh, optimizer, max_grad_norm=max_grad_norm)
    batch = abstract_batch(shape.batch(batch_size), mesh, sequences=shape.sequences)
    return step, state, batch


def _pipeline(choice: Choice, mask_idle_ops: bool | Literal["auto"]) -> Pipeline:
    settings: dict[str, Any] = {
        name: getattr(choice, name) for name in ("num_microbatches", "num_chunks", "remat")
    }
    return Pipeline(choice.schedule, **settings, mask_idle_ops=mask_idle_ops)


def compile_choice(
    shape: ModelShape,
    choice: Choice,
    mesh: Mesh,
    optimizer: Optimizer,
    batch_size: int,
    *,
    mask_idle_ops: bool | Literal["auto"] = "auto",
) -> tuple[TrainState, StepReport]:
    """Returns the state of a training step, as ShapeDtypeStructs, and the report of the compiled step.

    Nothing is run. Arguments are those of ``step_of_choice``.
    """
    given = shape, choice, mesh, optimizer, batch_size
    step, state, batch = step_of_choice(*given, mask_idle_ops=mask_idle_ops)
    pipeline, schedule = _pipeline(choice, mask_idle_ops), None
    masks = pipeline.masks(mesh)
    if choice.stage > 1:
        schedule = pipeline.table(choice.stage, masks=masks)
    with jax.numpy_rank_promotion("allow"):
        compiled = step.lower(state, batch).compile()
    return state, inspect_pipeline(compiled, mesh, schedule, masks=masks)


def inspect_pipeline(
    compiled: jax.stages.Compiled,
    mesh: Mesh,
    schedule: Schedule | None = None,
    *,
    masks: bool | None = None,
    loop_trips: int | None = None,
) -> StepReport:
    """Returns the cost of a compiled step whose pipeline, if it has one, takes its branches as often as a schedule says.

    Args:
        compiled: The training step.
        mesh: Its mesh.
        schedule: The schedule of its pipeline; None for none.
        masks: Whether it masks idle ops; None: as it does by default.
        loop_trips: The trips of a loop whose number the program does not tell.

    Raises:
        TypeError: The schedule is none, such as the name of one.
        ValueError: It has another number of stages than the mesh.
    """
    shares = None
    if schedule is not None:
        remedy = (
            'Make one: jaxpar.schedule.make_schedule("1f1b", num_stages=4, num_microbatches=8).'
        )
        check_kind((Schedule,), "a Schedule", remedy, schedule=schedule)
        if schedule.num_stages != mesh.shape[STAGE]:
            raise ValueError(
                f"a schedule must have the stages of the mesh; got {schedule.num_stages} and {mesh.shape[STAGE]}. Make it for "
                "these."
            )
        masks = masks_idle_ops(mesh, schedule) if masks is None else masks
        shares = spmd_program(schedule, masks=masks).branch_shares()
    return inspect_step(compiled, mesh=mesh, branch_shares=shares, loop_trips=loop_trips)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bounds of a step's time on one device, in seconds.

    Attributes:
        products: Matrix products at the peak, whatever they read.
        device: All instructions, each limited by its products or by its bytes.
        collectives: All collectives, one after the other.
        exposed: The part of them during which the program, in the order in which it is compiled, computes nothing.
        host_waits: How often the host waits for the device in a step; each costs time that is not counted here.
        flops: Operations of matrix products of the program.
        peak_flops: Of the device, operations per second.
        by_axes: Seconds of the collectives by the axes over which they run.
    """

    products: float
    device: float
    collectives: float
    exposed: float
    host_waits: int | float
    flops: int | float
    peak_flops: int | float
    by_axes: tuple[tuple[str, float], ...]

    @property
    def least(self) -> float:
        """Seconds if each collective ran beside computation."""
        return max(self.device, self.collectives)

    @property
    def as_compiled(self) -> float:
        """Seconds in the order of the compiled program, in which some collectives run beside computation."""
        return self.device + self.exposed

    @property
    def most(self) -> float:
        """Seconds if none did."""
        return self.device + self.collectives

    def mfu(self, useful_flops: int | float | None = None) -> float:
        """Returns the highest share of the peak that the step can reach, in the order in which it is compiled.

        Args:
            useful_flops: Operations of a step on one device that count, such as 6 for each parameter and token. By default all
                of the program's, recomputed and discarded ones too.
        """
        return (self.flops if useful_flops is None else useful_flops) / (
            self.peak_flops * self.as_compiled
        )

    def render(self) -> str:
        """Returns the bounds as text."""
        rows = [
            ("a step on these GPUs, at the rates of the datasheet", "time"),
            ("matrix products alone", device_seconds_text(self.products)),
            (
                "all instructions, each limited by products or memory",
                device_seconds_text(self.device),
            ),
            *(
                (f"collectives over {axes}", device_seconds_text(seconds))
                for axes, seconds in self.by_axes
            ),
            ("collectives during which nothing is computed", device_seconds_text(self.exposed)),
            ("least: all collectives beside computation", device_seconds_text(self.least)),
            ("in the order in which it is compiled", device_seconds_text(self.as_compiled)),
            ("most: none of them", device_seconds_text(self.most)),
        ]
        return (
            f"{table(rows)}\nhighest MFU of this program: {self.mfu():.1%} of the peak, recomputed and discarded products "
            f"counted. Not counted: {self.host_waits:g} waits of the host, launches, kernels below the peak"
        )


def roofline(report: StepReport, cluster: Cluster, *, network: float = 0.8) -> Roofline:
    """Returns the bounds of a step that was compiled for GPUs.

    Args:
        report: The report of ``inspect_step`` on a mesh of GPUs.
        cluster: Their rates.
        network: The share of a link's bandwidth that collectives reach.

    Raises:
        ValueError: The report is of a program for other devices, or its mesh does not fit the cluster.
    """
    if report.gpu is None:
        raise ValueError(
            "a roofline needs a step compiled for GPUs; got one for other devices, or without mesh=. Compile it on a mesh of "
            "jaxpar.compile_only_devices, and pass mesh= to inspect_step."
        )
    if report.num_devices > cluster.num_devices:
        raise ValueError(
            f"the cluster must have the devices of the program; got {cluster.num_devices} for {report.num_devices}. Choose "
            f"num_nodes={-(-report.num_devices // cluster.devices_per_node)}."
        )
    links = Links(cluster, dict.fromkeys(AXES, 1) | dict(report.axis_sizes), network)
    on_device = lambda flops, size: max(flops / cluster.peak_flops, size / cluster.memory_bandwidth)
    meanwhile = {
        each.name: on_device(each.flops_meanwhile, each.bytes_meanwhile)
        for each in report.gpu.transfers
    }
    by_axes: defaultdict[str, float] = defaultdict(float)
    exposed = 0.0
    for each in report.collectives:
        one = _seconds_of(each, links)
        by_axes[axes_text(each.axes)] += each.known_times * one
        exposed += each.known_times * max(0.0, one - meanwhile.get(each.name, 0.0))
    work = report.gpu.work
    return Roofline(
        products=sum(each.times * each.flops for each in work) / cluster.peak_flops,
        device=sum(each.seconds(cluster.peak_flops, cluster.memory_bandwidth) for each in work),
        collectives=sum(by_axes.values()),
        exposed=exposed,
        host_waits=report.gpu.host_waits,
        flops=report.flops,
        peak_flops=cluster.peak_flops,
        by_axes=tuple(by_axes.items()),
    )


def _seconds_of(each: Collective, links: Links) -> float:
    """The seconds of one run; a group over several axes is as fast as the slowest of them."""
    axes: Sequence[str] = each.axes or AXES
    if each.kind == "collective-permute":
        return max(links.message(each.bytes_per_run, axis) for axis in axes)
    if each.kind == "all-to-all":  # what leaves a node takes the device's own card
        return max(collective_seconds(links, axis, each.kind, each.payload_bytes) for axis in axes)
    return each.bytes_per_run / min(map(links.rate, axes)) + max(map(links.latency, axes))
