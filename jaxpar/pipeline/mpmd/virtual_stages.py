"""The programs of a virtual stage: one jitted function for each kind of op.

    F  (embed) layers (head and loss, forward and backward)    returns residuals and y, on the last virtual stage ct
    R  (embed) layers                                          returns residuals
    B  layers backward (embedding backward)                    returns dx, and the cotangents for W or the sums of gradients
    W  the rest of the backward pass of the layers             returns the sums of gradients

An op is manual over ``data``: each replica computes on its own rows and adds its own gradients, which are reduced over ``data``
once per step. Values that differ between replicas have a leading dim for ``data``; ``tensor`` is automatic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from jaxpar.backward.add_grads import add_grads
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import split_layer
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import DATA
from jaxpar.pipeline.embed_and_head import Ends, cut_ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.mpmd.layers import EqualLayers, UnlikeLayers, add
from jaxpar.schedule import Schedule
from jaxpar.shard_map import manual_over_data_and_stage

Values = dict[str, Any]
Reduce = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class VirtualStage:
    """One virtual stage and its ops.

    Attributes:
        stage: The stage that holds it.
        layers: Its layers.
        is_first: Whether its input comes from the embedding.
        is_last: Whether its output goes to the head.
        ends: Embedding and head.
        microbatch_of: ``(a replica's rows, index) -> microbatch``.
        splits_backward: Whether B leaves the gradients of the weights to W.
        recomputes: Whether R stores the residuals, not F.
    """

    stage: int
    layers: EqualLayers | UnlikeLayers
    is_first: bool
    is_last: bool
    ends: Ends
    microbatch_of: Callable[[PyTree, Any], PyTree]
    splits_backward: bool
    recomputes: bool

    def changes(self, kind: str) -> list[str]:
        """Returns the names of the stage's sums to which an op of a kind adds."""
        names = {
            "F": ["head", "loss"] * self.is_last,
            "R": [],
            "B": ["layers"] * (not self.splits_backward) + ["embed"] * self.is_first,
            "W": ["layers"],
        }
        return ["turn", *names[kind]]

    def run(self, kind: str, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """Runs an op on one replica.

        Args:
            kind: F, R, B or W.
            sums: The sums to which it adds.
            whole: The replicated inputs: the stage's ``layers``, the leaves of outer that ``embed`` and ``head`` read, the
                ``index`` of the microbatch, and on the last virtual stage the ``total_weight`` of the batch.
            rows: The replica's rows, for the first and the last virtual stage.
            own: The outputs of earlier ops: ``x``, ``ct``, ``residuals_b``, ``residuals_w``, ``cotangents_w``.

        Returns:
            Its outputs, by the same names, and the new sums.
        """
        op = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}[kind]
        made, changed = op(sums, whole, rows, own)
        return made, sums | changed | {"turn": sums["turn"] + 1}

    def forward(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """F."""
        x, stored = self.input(whole, rows, own), {}
        if self.recomputes:
            y = self.layers.forward(whole["layers"], x)
        else:
            y, stored = self.layers.forward_and_store(whole["layers"], x)
        if not self.is_last:
            return stored | {"x": y}, {}
        microbatch = self.microbatch_of(rows, whole["index"])
        loss_sum, grads, ct = self.ends.head(whole["head"], y, microbatch, whole["total_weight"])
        changed = {"head": add(sums["head"], grads), "loss": add([sums["loss"]], [loss_sum])[0]}
        return stored | {"ct": ct}, changed

    def recompute(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """R."""
        return self.layers.forward_and_store(whole["layers"], self.input(whole, rows, own))[1], {}

    def backward(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """B."""
        made, changed = {}, {}
        if self.splits_backward:
            dx, made = self.layers.backward_input(whole["layers"], own, own["ct"])
        else:
            dx, changed["layers"] = self.layers.backward(whole["layers"], own, own["ct"], sums["layers"])
        if not self.is_first:
            return made | {"ct": dx}, changed
        microbatch = self.microbatch_of(rows, whole["index"])
        embed = add_grads(sums["embed"], self.ends.embed_backward, whole["embed"], microbatch, dx)
        return made, changed | {"embed": embed}

    def weights(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """W."""
        return {}, {"layers": self.layers.backward_weights(whole["layers"], own, sums["layers"])}

    def input(self, whole: Values, rows: PyTree, own: Values) -> list:
        """The input of F and R."""
        if self.is_first:
            return self.ends.embed(whole["embed"], self.microbatch_of(rows, whole["index"]))
        return own["x"]


def cut_virtual_stages(
    model: LayeredModel,
    loss: Callable,
    schedule: Schedule,
    layout: LayerLayout,
    params: PyTree,
    rows: PyTree,
    cut: Callable[[PyTree], PyTree],
    shards: ParamShards | list[ParamShards],
) -> list[VirtualStage]:
    """Returns the virtual stages of a model, in its order.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        schedule: The schedule.
        layout: How many layers each virtual stage has.
        params: The shapes of the params.
        rows: The shapes of one replica's rows.
        cut: ``rows -> microbatches``, stacked along a leading dim.
        shards: How the params of a layer are sharded over ``tensor``; for a list of layers, those of each.
    """

    def microbatch_of(rows: PyTree, index: Any) -> PyTree:
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), cut(rows))

    microbatch = jax.eval_shape(microbatch_of, rows, 0)
    layers, y = _layers_of_virtual_stages(model, schedule, layout, params, microbatch, shards)
    ends = cut_ends(model, loss, params[OUTER], y, microbatch)
    last = schedule.num_virtual_stages - 1
    return [
        VirtualStage(
            stage=schedule.stage_and_chunk(number)[0],
            layers=own,
            is_first=number == 0,
            is_last=number == last,
            ends=ends,
            microbatch_of=microbatch_of,
            splits_backward=schedule.splits_backward,
            recomputes=schedule.recomputes,
        )
        for number, own in enumerate(layers)
    ]


def _layers_of_virtual_stages(
    model: LayeredModel,
    schedule: Schedule,
    layout: LayerLayout,
    params: PyTree,
    microbatch: PyTree,
    shards: ParamShards | list[ParamShards],
) -> tuple[list[EqualLayers | UnlikeLayers], PyTree]:
    """The layers of each virtual stage, and the shape of what the last of them returns."""
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    functions, counts = model.layers(layout.num_layers), list(layout.layers_per_virtual_stage or ())
    if isinstance(shards, ParamShards):
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[LAYERS])
        split, positions = split_layer(functions[0], one, x, shards), layout.positions_per_chunk
        chunks = [schedule.stage_and_chunk(number)[1] for number in range(len(counts))]
        return [EqualLayers(split, *at) for at in zip(counts, [positions * chunk for chunk in chunks], strict=True)], x
    virtual_stages, start = [], 0
    for number, count in enumerate(counts):
        split = []
        for i in range(start, start + count):
            function, own = functions[i], params[LAYERS][i]
            split.append(split_layer(function, own, x, shards[i]))
            x = jax.eval_shape(function, own, x)
        stage, chunk = schedule.stage_and_chunk(number)
        virtual_stages.append(UnlikeLayers(split, int(layout.layer_counts[stage, :chunk].sum())))
        start += count
    return virtual_stages, x


def jit_op(
    virtual_stage: VirtualStage, kind: str, mesh: Mesh, sums: Values, axes: frozenset[str]
) -> Callable[..., tuple[Values, Values]]:
    """Returns an op of a virtual stage as a jitted function of (sums, whole, rows, own), which donates the sums.

    Args:
        virtual_stage: The virtual stage.
        kind: F, R, B or W.
        mesh: The mesh of its stage.
        sums: The shapes, dtypes and shardings of the sums to which it adds.
        axes: The mesh axes over which it is manual.
    """

    def one_replica(sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        made, sums = virtual_stage.run(kind, own_of(sums), whole, rows, own_of(own))
        return of_all((made, sums))

    one_replica.__name__ = f"{kind}_on_stage_{virtual_stage.stage}"  # the name in profiles
    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole, each, each), out_specs=each, axes=axes)
    return jax.jit(run, donate_argnums=0, out_shardings=(None, jax.tree.map(lambda s: s.sharding, sums)))


def jit_weight(mesh: Mesh, traced: Any, reduce: Reduce) -> Callable[[PyTree], jax.Array]:
    """Returns the jitted function of the weight of the whole batch, replicated on the devices of a stage."""
    one_replica = lambda rows: reduce(traced.weight_of_rows(rows))
    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole, axes=traced.manual_axes)
    return jax.jit(run)


def jit_loss(mesh: Mesh, dtype: Any, reduce: Reduce) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the jitted function that reduces the loss_sum of the last stage over ``data`` and divides it by the weight."""

    def one_replica(loss_sum: jax.Array, total_weight: jax.Array) -> jax.Array:
        return (reduce(own_of(loss_sum)) / total_weight).astype(dtype)

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    return jax.jit(manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole), out_specs=whole))


def jit_grads(mesh: Mesh, like: Values, reduce: Reduce) -> Callable[[Values], Values]:
    """Returns the jitted function that reduces a stage's sums over ``data`` to gradients, in the dtypes of the params."""
    one_replica = lambda sums: jax.tree.map(lambda a, shape: a.astype(shape.dtype), reduce(own_of(sums)), like)
    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole)
    return jax.jit(run, out_shardings=jax.tree.map(lambda g: g.sharding, like))


def jit_zeros(like: Values) -> Callable[[], Values]:
    """Returns the jitted function that returns zeros of the given shapes, dtypes and shardings."""
    zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, like))


def own_of(tree: PyTree) -> PyTree:
    """Returns the arrays of one replica without their leading dim."""
    return jax.tree.map(lambda a: a.reshape(a.shape[1:]), tree)


def of_all(tree: PyTree) -> PyTree:
    """Returns the arrays of one replica with a leading dim, along which ``shard_map`` concatenates the replicas."""
    return jax.tree.map(lambda a: a[None], tree)
