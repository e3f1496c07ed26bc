"""The MPMD executor runs a Schedule from Python: each stage runs its ops in order on its own devices, without lock-step.

    for each op, in an order in which its inputs are available:
        dispatch the jitted function of the stage   F, R, B, W (mpmd_stages.py); returns immediately
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
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers
from jaxpar.mesh import num_replicas, spec_of_rows
from jaxpar.pipeline.layout import LayerLayout, check_layout, close_params, open_params
from jaxpar.pipeline.mpmd_params import ListedLayers, Outer, StackedLayers, check_one_process, submeshes
from jaxpar.pipeline.mpmd_stages import (
    jit_grads,
    jit_op,
    jit_params,
    jit_value,
    jit_weight,
    jit_zeros,
    make_virtual_stages,
    sum_like,
)
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
        split: ``(a replica's rows, num_microbatches) -> microbatches``, stacked along a leading dim.
        reduce: ``(tree, dtype) -> tree``, reduced over the replicas; called inside ``shard_map``.
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
    split: Callable[[PyTree, int], PyTree]
    reduce: Callable[..., PyTree]
    reduce_dtype: Any
    traced_loss: Callable[[PyTree, PyTree], Any]
    check: Callable[[PyTree, PyTree], None]
    frozen: Callable[[PyTree], PyTree] = lambda params: params
    _pipelines: dict[Any, "_Pipeline"] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        _check_not_traced(leaves)
        key = (tree, *((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves))
        if key not in self._pipelines:
            self.check(params, batch)
            self._pipelines[key] = _Pipeline(self, params, batch)
        return self._pipelines[key]


def _check_not_traced(leaves: list) -> None:
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TypeError(
            'executor="mpmd" dispatches many programs from Python, so it must be called with arrays; got a traced argument, as '
            'under jax.jit or jax.grad. Call it directly, or use executor="spmd".'
        )


class _Pipeline:
    """The jitted functions and shardings for params and batches of given shapes, made once."""

    def __init__(self, executor: MpmdExecutor, params: PyTree, batch: PyTree) -> None:
        mesh, schedule, layout = executor.mesh, executor.schedule, executor.layout
        count, stacked = num_layers(params), is_stacked(params)
        is_packed = layout is not None and stacked
        layout = layout or LayerLayout(count, schedule.num_stages, schedule.num_chunks, schedule.placement)
        check_layout(layout, schedule, count, is_packed=is_packed)
        shapes, rows = jax.eval_shape(lambda *trees: trees, params, batch)
        one_replica = lambda a: jax.ShapeDtypeStruct((a.shape[0] // num_replicas(mesh), *a.shape[1:]), a.dtype)
        split = lambda rows: executor.split(rows, schedule.num_microbatches)

        self.mesh, self.meshes, self.schedule = mesh, submeshes(mesh), schedule
        self.outer = Outer(params[OUTER], mesh)
        self.layers = (
            StackedLayers(params[LAYERS], mesh, layout, is_packed=is_packed)
            if stacked
            else ListedLayers(params[LAYERS], mesh, layout)
        )
        rows = jax.tree.map(one_replica, rows)
        canonical = (
            shapes | {LAYERS: jax.eval_shape(layout.in_canonical_order, shapes[LAYERS])} if is_packed else shapes
        )
        axes = executor.traced_loss(canonical, batch).manual_axes
        with as_manual_over(axes, self.meshes[0]):
            traced = executor.traced_loss(canonical, batch)
            self.virtual_stages = make_virtual_stages(
                executor.model, executor.loss, schedule, layout, shapes, rows, split, self.layers.shards
            )
        self.ends, self.first_stage, self.last_stage = (
            self.virtual_stages[0].ends,
            self.virtual_stages[0].stage,
            self.virtual_stages[-1].stage,
        )
        self.like = [{"layers": own} for own in self.layers.like]
        self.like[self.first_stage]["embed"] = self.outer.like(self.ends.embed_trains, self.first_stage)
        self.like[self.last_stage]["head"] = self.outer.like(self.ends.head_trains, self.last_stage)
        self._make_functions(traced, executor.reduce, executor.reduce_dtype)
        numbers = np.arange(schedule.num_microbatches, dtype=np.int32)
        self.indices = [jax.device_put(list(numbers), NamedSharding(m, PartitionSpec())) for m in self.meshes]
        self.routes: dict[tuple[int, int, str], list[NamedSharding]] = {}

    def _make_functions(self, traced: Any, reduce: Callable[..., PyTree], reduce_dtype: Any) -> None:
        """Jits the ops of each virtual stage, and the functions of each stage before and after them."""
        turn = jax.ShapeDtypeStruct((), jnp.int32)
        sums = [
            own | {"layers": layers, "turn": turn} for own, layers in zip(self.like, self.layers.like_each, strict=True)
        ]
        sums[self.last_stage]["loss"] = self.ends.loss_sums
        sums = [jax.tree.map(partial(sum_like, mesh), own) for mesh, own in zip(self.meshes, sums, strict=True)]

        self.zeros = [jit_zeros(own) for own in sums]
        self.ops = {
            (number, kind): jit_op(
                virtual_stage,
                kind,
                self.meshes[virtual_stage.stage],
                virtual_stage.values_of(sums[virtual_stage.stage], virtual_stage.changes(kind)),
                traced.manual_axes,
            )
            for number, virtual_stage in enumerate(self.virtual_stages)
            for kind in self.schedule.kinds
        }
        self.weight = jit_weight(self.meshes[self.last_stage], traced, reduce)
        self.value = jit_value(self.meshes[self.last_stage], traced, reduce)
        totals = sums[self.last_stage]["loss"]
        with jax.set_mesh(NO_MESH):
            self.value_shape = jax.eval_shape(self.value, totals, jax.ShapeDtypeStruct((), totals[0].dtype))
        reduce = partial(reduce, dtype=reduce_dtype)
        self.params, self.grads = [], []
        for stage, mesh in enumerate(self.meshes):
            chunks = [virtual_stage for virtual_stage in self.virtual_stages if virtual_stage.stage == stage]
            self.params.append(jit_params(chunks, partial(self.layers.split, stage=stage)))
            self.grads.append(jit_grads(mesh, self.like[stage], partial(self.layers.stack, stage=stage), reduce))

    def route(self, made: list[jax.Array], virtual_stage: int, to: int, name: str) -> list[NamedSharding]:
        """The shardings of a message on the receiver's stage, the same as on the sender's."""
        key = (virtual_stage, to, name)
        if key not in self.routes:
            mesh = self.meshes[self.virtual_stages[to].stage]
            specs = [getattr(leaf.sharding, "spec", spec_of_rows(mesh)) for leaf in made]
            self.routes[key] = [NamedSharding(mesh, spec) for spec in specs]
        return self.routes[key]


class _Step:
    """The arrays of one call while the schedule runs."""

    def __init__(self, pipeline: _Pipeline, params: PyTree, batch: PyTree) -> None:
        self.pipeline = pipeline
        first, last, ends = pipeline.first_stage, pipeline.last_stage, pipeline.ends
        layers = pipeline.layers.enter(params[LAYERS])
        self.whole: list[Values] = [{"layers": f(own)} for f, own in zip(pipeline.params, layers, strict=True)]
        self.whole[first]["embed"] = pipeline.outer.enter(params[OUTER], ends.embed_reads, first)
        self.whole[last]["head"] = pipeline.outer.enter(params[OUTER], ends.head_reads, last)
        rows = [NamedSharding(pipeline.meshes[stage], spec_of_rows(pipeline.mesh)) for stage in (first, last)]
        self.rows = {
            0: jax.device_put(batch, rows[0]),
            len(pipeline.virtual_stages) - 1: jax.device_put(batch, rows[1]),
        }
        self.total_weight = pipeline.weight(self.rows[len(pipeline.virtual_stages) - 1])
        self.whole[last]["total_weight"] = self.total_weight
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
        virtual_stage, key = self.pipeline.schedule.virtual_stage(stage, op.chunk), (op.microbatch, op.chunk)
        own = self.take(op.kind, virtual_stage, stage, key)
        made = self.call(op, virtual_stage, stage, own)
        if "x" in made:
            self.send("x", made.pop("x"), virtual_stage, virtual_stage + 1, op.microbatch)
        if "ct" in made:  # the head sends it to its own virtual stage
            self.send(
                "ct",
                made.pop("ct"),
                virtual_stage,
                virtual_stage if op.kind == "F" else virtual_stage - 1,
                op.microbatch,
            )
        if made:
            self.stored[stage][key] = made | ({"residuals_w": own["residuals_w"]} if op.kind == "B" else {})

    def take(self, kind: str, virtual_stage: int, stage: int, key: tuple[int, int]) -> Values:
        """The inputs of an op other than params and rows. Those that no later op reads are released."""
        if kind in "FR":
            stays = kind == "F" and self.pipeline.schedule.recomputes
            arrived = self.arrived.get if stays else self.arrived.pop
            x = arrived(("x", virtual_stage, key[0]), None)
            return {} if x is None else {"x": x}
        stored = self.stored[stage].pop(key)
        return stored | {"ct": self.arrived.pop(("ct", virtual_stage, key[0]))} if kind == "B" else stored

    def call(self, op: Op, virtual_stage: int, stage: int, own: Values) -> Values:
        """Dispatches an op and returns its outputs."""
        made, sums = self.pipeline.ops[virtual_stage, op.kind](*self.args(op, virtual_stage, stage, own))
        if "layers" in sums:
            self.sums[stage]["layers"][self.pipeline.virtual_stages[virtual_stage].positions] = sums.pop("layers")
        self.sums[stage] |= sums
        return made

    def args(self, op: Op, virtual_stage: int, stage: int, own: Values) -> tuple[Values, Values, PyTree, Values]:
        """The arguments of an op's function."""
        values_of = self.pipeline.virtual_stages[virtual_stage].values_of
        sums = values_of(self.sums[stage], self.pipeline.virtual_stages[virtual_stage].changes(op.kind))
        whole = values_of(self.whole[stage], self.whole[stage]) | {"index": self.pipeline.indices[stage][op.microbatch]}
        return sums, whole, self.rows.get(virtual_stage), own

    def send(self, name: str, arrays: list[jax.Array], virtual_stage: int, to: int, microbatch: int) -> None:
        """Sends arrays to the stage of another virtual stage."""
        self.arrived[name, to, microbatch] = jax.device_put(
            arrays, self.pipeline.route(arrays, virtual_stage, to, name)
        )

    def value_and_grads(self) -> tuple[PyTree, PyTree]:
        """The loss over the whole batch, and the gradients, sharded like the params at rest."""
        pipeline, whole = self.pipeline, PartitionSpec()
        value = pipeline.value(self.sums[pipeline.last_stage].pop("loss"), self.total_weight)
        grads = [
            pipeline.grads[stage]({name: self.sums[stage].pop(name) for name in like})
            for stage, like in enumerate(pipeline.like)
        ]
        outer = self.outer_grads(grads[pipeline.first_stage]["embed"], grads[pipeline.last_stage]["head"])
        layers = pipeline.layers.leave([own["layers"] for own in grads])
        return jax.device_put(value, NamedSharding(pipeline.mesh, whole)), {OUTER: outer, LAYERS: layers}

    def outer_grads(self, embed: list[jax.Array], head: list[jax.Array]) -> PyTree:
        """The gradients of outer from those of both ends; gradients of params that both read are added on the first stage."""
        pipeline, ends = self.pipeline, self.pipeline.ends
        total = {i: (grad, pipeline.first_stage) for i, grad in zip(ends.embed_trains, embed, strict=True)}
        for i, grad in zip(ends.head_trains, head, strict=True):
            tied = total.get(i)
            if tied is None:
                total[i] = (grad, pipeline.last_stage)
            else:
                total[i] = (tied[0] + jax.device_put(grad, tied[0].sharding), pipeline.first_stage)
        return pipeline.outer.leave(total)
