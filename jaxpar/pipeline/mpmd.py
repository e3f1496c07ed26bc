"""The MPMD executor runs a Schedule from Python: each stage runs its ops in order on its own devices, without lock-step.

    for each op, in an order in which its inputs are available:
        dispatch the jitted function of the stage   F, R, B, W (mpmd_programs.py); returns immediately
        send its output to the next stage           device to device

One process drives all devices. The ops of a stage run in the order of the schedule, since each depends on the previous one. The
values that an op stores are released as soon as the last op that reads them is dispatched, so a stage never holds more than the
peak of the schedule. Each stage has its own programs, so layers may differ. During a step each layer has arrays of its own,
params in the dtypes of the computation and sums of gradients; stacked layers are split into them and stacked again once a step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import Tracer
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked
from jaxpar.mesh import num_replicas, spec_of_rows
from jaxpar.pipeline.layout import LayerLayout, close_params, fitting_layout, open_params
from jaxpar.pipeline.mpmd_params import (
    ListedLayers,
    OnOneStage,
    StackedLayers,
    check_one_process,
    submeshes,
)
from jaxpar.pipeline.mpmd_programs import (
    jit_grads,
    jit_op,
    jit_params,
    jit_value,
    jit_weight,
    jit_zeros,
    sum_like,
)
from jaxpar.pipeline.mpmd_stages import make_virtual_stages
from jaxpar.schedule import Op, Schedule
from jaxpar.shard_map import NO_MESH, as_manual_over

Values = dict[str, Any]


@dataclass(frozen=True)
class MpmdExecutor:
    """``(params, batch) -> (loss, gradients)`` that runs a schedule. It must be called directly, not under ``jax.jit``.

    Attributes:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with further sums after the two.
        mesh: The mesh. This process must own all of its devices.
        schedule: The schedule.
        layout: The layout that packed stacked params; for a list of layers, which stage and chunk holds which.
        reduce_dtype: The dtype in which gradients are reduced; None: float32 or wider.
        traced_loss: ``(params, batch) -> TracedLoss``, for params in the model's order.
        check: Raises if params or batch do not fit the model; called once for each new set of shapes.
        frozen: ``params -> params``, of which those that are not trained are marked.

    Raises:
        ValueError: The mesh has devices of several processes, or the order of the schedule violates a dependency.

    **Collectives**: over ``data`` one all-reduce of gradients per stage and step, and on the last stage one each of the total
    weight and the loss, a few numbers; over ``tensor`` what XLA inserts for the shardings of the params; between stages one
    activation and one cotangent are sent for each boundary and microbatch.
    """

    model: LayeredModel
    loss: Callable
    mesh: Mesh
    schedule: Schedule
    layout: LayerLayout | None
    reduce_dtype: Any
    traced_loss: Callable[[PyTree, PyTree], Any]
    check: Callable[[PyTree, PyTree], None]
    frozen: Callable[[PyTree], PyTree] = lambda params: params
    _pipelines: dict[Any, "_Pipeline"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_one_process(self.mesh)
        self.schedule.check()

    def __call__(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss over the whole batch and its gradients, sharded like the params."""
        params = self.frozen(open_params(params, self.layout))
        pipeline = self._pipeline(params, batch)
        with jax.set_mesh(NO_MESH):  # a mesh set by the caller would be that of all stages
            step = _Step(pipeline, params, batch)
            step.walk()
            value, grads = step.value_and_grads()
        return value, close_params(grads, self.layout)

    def value_shape(self, params: PyTree, batch: PyTree) -> PyTree:
        """Returns the shape of the loss, or with ``has_aux`` those of the loss and the means. Compiles nothing."""
        return self._pipeline(self.frozen(open_params(params, self.layout)), batch).value_shape

    def _pipeline(self, params: PyTree, batch: PyTree) -> "_Pipeline":
        leaves, tree = jax.tree.flatten((params, batch))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise TypeError(
                'executor="mpmd" dispatches many programs from Python, so it must be called with arrays; got a traced '
                'argument, as under jax.jit or jax.grad. Call it directly, or use executor="spmd".'
            )
        key = (tree, *((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves))
        if key not in self._pipelines:
            self.check(params, batch)
            self._pipelines[key] = _Pipeline(self, params, batch)
        return self._pipelines[key]


class _Pipeline:
    """The jitted functions and shardings for params and batches of given shapes, made once."""

    def __init__(self, executor: MpmdExecutor, params: PyTree, batch: PyTree) -> None:
        mesh, schedule = executor.mesh, executor.schedule
        shapes, rows = jax.eval_shape(lambda *trees: trees, params, batch)
        layout, canonical = fitting_layout(executor.layout, schedule, shapes)
        one_replica = lambda a: jax.ShapeDtypeStruct(
            (a.shape[0] // num_replicas(mesh), *a.shape[1:]), a.dtype
        )

        self.mesh, self.meshes, self.schedule = mesh, submeshes(mesh), schedule
        self.outer = OnOneStage(params[OUTER], mesh)
        self.layers = (
            StackedLayers(params[LAYERS], mesh, layout, is_packed=executor.layout is not None)
            if is_stacked(params)
            else ListedLayers(params[LAYERS], mesh, layout)
        )
        rows = jax.tree.map(one_replica, rows)
        axes = executor.traced_loss(canonical, batch).manual_axes
        with as_manual_over(axes, self.meshes[0]):
            traced = executor.traced_loss(canonical, batch)
            self.virtual_stages = make_virtual_stages(
                executor.model, executor.loss, schedule, layout, shapes, rows, self.layers.shards
            )
        self.ends, self.last = self.virtual_stages[0].ends, len(self.virtual_stages) - 1
        self.first_stage, self.last_stage = (
            self.virtual_stages[0].stage,
            self.virtual_stages[-1].stage,
        )
        self.like: list[Values] = [{"layers": own} for own in self.layers.like]
        self.like[self.first_stage]["embed"] = self.outer.like(
            self.ends.embed_trains, self.first_stage
        )
        self.like[self.last_stage]["head"] = self.outer.like(self.ends.head_trains, self.last_stage)
        self._make_functions(traced, executor.reduce_dtype)
        numbers = list(np.arange(schedule.num_microbatches, dtype=np.int32))
        self.indices = [
            jax.device_put(numbers, NamedSharding(each, PartitionSpec())) for each in self.meshes
        ]
        self.routes: dict[tuple[int, int, str], list[NamedSharding]] = {}

    def _make_functions(self, traced: Any, reduce_dtype: Any) -> None:
        """Jits the ops of each virtual stage, and the functions of each stage before and after them."""
        turn = jax.ShapeDtypeStruct((), jnp.int32)
        sums = [
            own | {"layers": layers, "turn": turn}
            for own, layers in zip(self.like, self.layers.like_each, strict=True)
        ]
        sums[self.last_stage]["loss"] = self.ends.loss_sums
        sums = [
            jax.tree.map(partial(sum_like, mesh), own)
            for mesh, own in zip(self.meshes, sums, strict=True)
        ]
        self.zeros = [jit_zeros(own) for own in sums]
        self.ops = {
            (number, kind): jit_op(
                each, kind, self.meshes[each.stage], sums[each.stage], traced.manual_axes
            )
            for number, each in enumerate(self.virtual_stages)
            for kind in self.schedule.kinds
        }
        self.weight = jit_weight(self.meshes[self.last_stage], traced)
        self.value = jit_value(self.meshes[self.last_stage], traced)
        totals = sums[self.last_stage]["loss"]
        with jax.set_mesh(NO_MESH):
            self.value_shape = jax.eval_shape(
                self.value, totals, jax.ShapeDtypeStruct((), totals[0].dtype)
            )
        of_stage = lambda stage: [each for each in self.virtual_stages if each.stage == stage]
        split, stack = self.layers.split, self.layers.stack
        self.params = [
            jit_params(of_stage(i), partial(split, stage=i)) for i in range(len(self.meshes))
        ]
        self.grads = [
            jit_grads(mesh, self.like[i], partial(stack, stage=i), reduce_dtype)
            for i, mesh in enumerate(self.meshes)
        ]


class _Step:
    """The arrays of one call while the schedule runs."""

    def __init__(self, pipeline: _Pipeline, params: PyTree, batch: PyTree) -> None:
        self.pipeline = pipeline
        first, last, ends = pipeline.first_stage, pipeline.last_stage, pipeline.ends
        layers = pipeline.layers.enter(params[LAYERS])
        self.whole: list[Values] = [
            {"layers": f(own)} for f, own in zip(pipeline.params, layers, strict=True)
        ]
        self.whole[first]["embed"] = pipeline.outer.enter(params[OUTER], ends.embed_reads, first)
        self.whole[last]["head"] = pipeline.outer.enter(params[OUTER], ends.head_reads, last)
        rows = spec_of_rows(pipeline.mesh)
        self.rows = {
            virtual_stage: jax.device_put(batch, NamedSharding(pipeline.meshes[stage], rows))
            for virtual_stage, stage in ((0, first), (pipeline.last, last))
        }
        self.total_weight = self.whole[last]["total_weight"] = pipeline.weight(
            self.rows[pipeline.last]
        )
        self.sums = [zeros() for zeros in pipeline.zeros]
        self.arrived: dict[tuple[str, int, int], list] = {}
        self.stored: list[dict[tuple[int, int], Values]] = [{} for _ in pipeline.meshes]

    def walk(self) -> None:
        """Runs each op of the schedule, in an order in which its inputs are available."""
        for tick in self.pipeline.schedule.ops:
            for stage, ops in enumerate(tick):
                for op in ops:
                    self.run_op(stage, op)

    def run_op(self, stage: int, op: Op) -> None:
        """Dispatches an op, sends its outputs to other virtual stages, and stores the residuals for its later ops."""
        virtual_stage, key = (
            self.pipeline.schedule.virtual_stage(stage, op.chunk),
            (op.microbatch, op.chunk),
        )
        own = self.take(op.kind, virtual_stage, stage, key)
        made = self.call(op, virtual_stage, stage, own)
        # The head sends the cotangent to its own virtual stage.
        for name, to in {"x": virtual_stage + 1, "ct": virtual_stage - (op.kind == "B")}.items():
            if name in made:
                self.send(name, made.pop(name), virtual_stage, to, op.microbatch)
        if made:
            self.stored[stage][key] = made | (
                {"residuals_w": own["residuals_w"]} if op.kind == "B" else {}
            )

    def take(self, kind: str, virtual_stage: int, stage: int, key: tuple[int, int]) -> Values:
        """The inputs of an op other than params and rows. Those that no later op reads are released."""
        if kind in "FR":
            stays = kind == "F" and self.pipeline.schedule.recomputes
            arrived = self.arrived.get if stays else self.arrived.pop
            x = arrived(("x", virtual_stage, key[0]), None)
            return {} if x is None else {"x": x}
        stored = self.stored[stage].pop(key)
        return (
            stored | {"ct": self.arrived.pop(("ct", virtual_stage, key[0]))}
            if kind == "B"
            else stored
        )

    def call(self, op: Op, virtual_stage: int, stage: int, own: Values) -> Values:
        """Dispatches an op and returns its outputs."""
        made, sums = self.pipeline.ops[virtual_stage, op.kind](
            *self.args(op, virtual_stage, stage, own)
        )
        if "layers" in sums:
            self.sums[stage]["layers"][self.pipeline.virtual_stages[virtual_stage].positions] = (
                sums.pop("layers")
            )
        self.sums[stage] |= sums
        return made

    def args(
        self, op: Op, virtual_stage: int, stage: int, own: Values
    ) -> tuple[Values, Values, PyTree, Values]:
        """The arguments of an op's function."""
        this = self.pipeline.virtual_stages[virtual_stage]
        sums = this.values_of(self.sums[stage], this.changes(op.kind))
        whole = this.values_of(self.whole[stage], self.whole[stage])
        return (
            sums,
            whole | {"index": self.pipeline.indices[stage][op.microbatch]},
            self.rows.get(virtual_stage),
            own,
        )

    def send(
        self, name: str, arrays: list[jax.Array], virtual_stage: int, to: int, microbatch: int
    ) -> None:
        """Sends arrays to the stage of another virtual stage, where they have the shardings that they have here."""
        routes, route = self.pipeline.routes, (virtual_stage, to, name)
        if route not in routes:
            mesh = self.pipeline.meshes[self.pipeline.virtual_stages[to].stage]
            specs = [getattr(leaf.sharding, "spec", spec_of_rows(mesh)) for leaf in arrays]
            routes[route] = [NamedSharding(mesh, spec) for spec in specs]
        self.arrived[name, to, microbatch] = jax.device_put(arrays, routes[route])

    def value_and_grads(self) -> tuple[PyTree, PyTree]:
        """The loss over the whole batch, and the gradients, sharded like the params at rest."""
        pipeline = self.pipeline
        value = pipeline.value(self.sums[pipeline.last_stage].pop("loss"), self.total_weight)
        grads = [
            of_stage({name: sums.pop(name) for name in like})
            for of_stage, sums, like in zip(pipeline.grads, self.sums, pipeline.like, strict=True)
        ]
        outer = dict(grads[pipeline.first_stage]["embed"])
        for i, grad in grads[pipeline.last_stage]["head"].items():
            # Gradients of params that both ends read are added on the first stage.
            outer[i] = outer[i] + jax.device_put(grad, outer[i].sharding) if i in outer else grad
        layers = pipeline.layers.leave([own["layers"] for own in grads])
        value = jax.device_put(value, NamedSharding(pipeline.mesh, PartitionSpec()))
        return value, {OUTER: pipeline.outer.leave(outer), LAYERS: layers}
