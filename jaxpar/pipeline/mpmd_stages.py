"""The virtual stages of a model for the MPMD executor: what each kind of op does on one replica, and its jitted function.

    F  (embed) layers (head and loss, forward and backward)    returns residuals and y, on the last virtual stage ct
    R  (embed) layers                                          returns residuals
    B  layers backward (embedding backward)                    returns dx, and the cotangents for W or the sums of gradients
    W  the rest of the backward pass of the layers             returns the sums of gradients

Layers run one after the other, each with arrays of its own: params in the dtypes that the layers take, residuals and sums of
gradients are lists of arrays, one list for each layer. The layers are written out. A loop over stacked params would copy the
params of each layer out of the stack in every op.

A jitted op is manual over ``data``: each replica computes on its own rows and adds its own gradients, which are reduced over
``data`` once per step. Values that differ between replicas have a leading dim for ``data``; ``tensor`` is automatic.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar import fp8
from jaxpar.backward.add_grads import add_grads
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.devices import are_gpus
from jaxpar.dtypes import is_float, wide_dtype
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import DATA, num_replicas, spec_of_rows
from jaxpar.pipeline.embed_and_head import Ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.mpmd_params import without
from jaxpar.schedule import Schedule
from jaxpar.shard_map import manual_over_data_and_stage

Arrays = Sequence[Any]
Values = dict[str, Any]
Microbatch = Callable[[], PyTree]
Reduce = Callable[[PyTree], PyTree]


def add(sums: Arrays, grads: Arrays) -> list:
    """Returns sums with gradients added, in the sums' dtype.

    Sums have a leading dim of one replica, which gradients get here. XLA would copy a sum that is reshaped before the addition.
    """
    return [total + grad.astype(total.dtype)[None] for total, grad in zip(sums, grads, strict=True)]


def add_each(sums: Sequence[Arrays], grads: Sequence[Arrays]) -> list[list]:
    """Returns the sums of each layer with its gradients added."""
    return [add(*each) for each in zip(sums, grads, strict=True)]


@dataclass(frozen=True)
class VirtualStage:
    """One virtual stage and its ops.

    Attributes:
        stage: The stage that holds it.
        layers: Its layers, which may differ.
        positions: Which of the stage's layers they are.
        is_first: Whether its input comes from the embedding.
        is_last: Whether its output goes to the head.
        ends: Embedding and head.
        microbatch_of: ``(a replica's rows, index) -> microbatch``.
        schedule: The schedule, which says whether B leaves the gradients of the weights to W, and whether R stores the
            residuals, not F.
    """

    stage: int
    layers: Sequence[SplitLayer]
    positions: slice
    is_first: bool
    is_last: bool
    ends: Ends
    microbatch_of: Callable[[PyTree, Any], PyTree]
    schedule: Schedule

    def changes(self, kind: str) -> list[str]:
        """Returns the names of the stage's sums to which an op of a kind adds."""
        names = {
            "F": ["head", "loss"] * self.is_last,
            "R": [],
            "B": ["layers"] * (not self.schedule.splits_backward) + ["embed"] * self.is_first,
            "W": ["layers"],
        }
        return ["turn", *names[kind]]

    def values_of(self, stage: Values, names: Iterable[str]) -> Values:
        """Returns some of the values of its stage, and of ``layers`` only its own."""
        return {name: stage[name][self.positions] if name == "layers" else stage[name] for name in names}

    def run(self, kind: str, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """Runs an op on one replica.

        Args:
            kind: F, R, B or W.
            sums: The sums to which it adds, with a leading dim of one replica.
            whole: The replicated inputs: the params of its ``layers``, the leaves of outer that ``embed`` and ``head`` read,
                the ``index`` of the microbatch, and on the last virtual stage the ``total_weight`` of the batch.
            rows: The replica's rows, for the first and the last virtual stage.
            own: The outputs of earlier ops: ``x``, ``ct``, ``residuals_b``, ``residuals_w``, ``cotangents_w``.

        Returns:
            Its outputs, by the same names, and the new sums.
        """
        op = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}[kind]
        microbatch = lambda: self.microbatch_of(rows, whole["index"])
        made, changed = op(sums, whole, microbatch, own)
        return made, sums | changed | {"turn": sums["turn"] + 1}

    def forward(self, sums: Values, whole: Values, microbatch: Microbatch, own: Values) -> tuple[Values, Values]:
        """F."""
        y, stored = self.run_layers(whole, microbatch, own, self.ends.embed)
        stored = {} if self.schedule.recomputes else stored
        if not self.is_last:
            return stored | {"x": y}, {}
        loss_sums, grads, ct = self.ends.head(whole["head"], y, microbatch(), whole["total_weight"])
        add_one = lambda total, own: add([total], [own])[0]
        changed = {"head": add(sums["head"], grads), "loss": jax.tree.map(add_one, sums["loss"], loss_sums)}
        return stored | {"ct": ct}, changed

    def recompute(self, sums: Values, whole: Values, microbatch: Microbatch, own: Values) -> tuple[Values, Values]:
        """R."""
        return self.run_layers(whole, microbatch, own, self.ends.embed_again)[1], {}

    def run_layers(self, whole: Values, microbatch: Microbatch, own: Values, embed: Callable) -> tuple[list, Values]:
        """Returns y and the residuals of each layer; XLA computes none that nothing reads."""
        x, stored = embed(whole["embed"], microbatch()) if self.is_first else own["x"], []
        for layer, params in zip(self.layers, whole["layers"], strict=True):
            x, *residuals = layer.forward_and_store(params, x)
            stored.append(residuals)
        return list(x), {"residuals_b": [b for b, _ in stored], "residuals_w": [w for _, w in stored]}

    def backward(self, sums: Values, whole: Values, microbatch: Microbatch, own: Values) -> tuple[Values, Values]:
        """B."""
        ct, each, splits = own["ct"], [], self.schedule.splits_backward
        stored = zip(self.layers, whole["layers"], own["residuals_b"], own["residuals_w"], strict=True)
        for layer, params, residuals_b, residuals_w in reversed(list(stored)):
            of_layer = layer.backward_input if splits else layer.backward
            ct, for_weights = of_layer(params, residuals_b, residuals_w, ct)
            each.insert(0, for_weights)
        made, changed = ({"cotangents_w": each}, {}) if splits else ({}, {"layers": add_each(sums["layers"], each)})
        if not self.is_first:
            return made | {"ct": list(ct)}, changed
        embed = [total[0] for total in sums["embed"]]
        embed = add_grads(embed, self.ends.embed_backward, whole["embed"], microbatch(), list(ct))
        return made, changed | {"embed": [total[None] for total in embed]}

    def weights(self, sums: Values, whole: Values, microbatch: Microbatch, own: Values) -> tuple[Values, Values]:
        """W."""
        each = zip(self.layers, whole["layers"], own["residuals_w"], own["cotangents_w"], strict=True)
        return {}, {"layers": add_each(sums["layers"], [layer.backward_weights(*given) for layer, *given in each])}


def make_virtual_stages(
    model: LayeredModel,
    loss: Callable,
    schedule: Schedule,
    layout: LayerLayout,
    params: PyTree,
    rows: PyTree,
    split: Callable[[PyTree], PyTree],
    shards: ParamShards | list[ParamShards],
) -> list[VirtualStage]:
    """Returns the virtual stages of a model, in its order.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with further sums after the two.
        schedule: The schedule.
        layout: How many layers each virtual stage has.
        params: The shapes of the params.
        rows: The shapes of one replica's rows.
        split: ``rows -> microbatches``, stacked along a leading dim.
        shards: How the params of a layer are sharded over ``tensor``; for a list of layers, those of each.
    """

    def microbatch_of(rows: PyTree, index: Any) -> PyTree:
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), split(rows))

    microbatch = jax.eval_shape(microbatch_of, rows, 0)
    x, functions = jax.eval_shape(model.embed, params[OUTER], microbatch), model.layers(layout.num_layers)
    if isinstance(shards, ParamShards):  # equal layers are split once
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[LAYERS])
        layers = [split_layer(functions[0], one, x, shards)] * layout.num_layers
    else:
        layers = []
        for function, own, own_shards in zip(functions, params[LAYERS], shards, strict=True):
            layers.append(split_layer(function, own, x, own_shards))
            x = jax.eval_shape(function, own, x)
    ends = Ends(model, loss, params[OUTER], x, microbatch)
    virtual_stages, each, counts = [], iter(layers), [0] * schedule.num_stages
    for number, count in enumerate(layout.layers_per_virtual_stage or ()):
        stage, _ = schedule.stage_and_chunk(number)
        positions = slice(counts[stage], counts[stage] + count)
        is_last = number == schedule.num_virtual_stages - 1
        own = list(islice(each, count))
        virtual_stages.append(VirtualStage(stage, own, positions, number == 0, is_last, ends, microbatch_of, schedule))
        counts[stage] += count
    return virtual_stages


def jit_params(virtual_stages: Sequence[VirtualStage], split: Callable[[PyTree], list]) -> Callable[[PyTree], list]:
    """Returns the jitted function of the params of a stage's layers, in the dtypes in which its ops compute.

    Args:
        virtual_stages: The virtual stages of the stage.
        split: The params of each layer from those of the stage.
    """
    layers = [layer for virtual_stage in virtual_stages for layer in virtual_stage.layers]
    return jax.jit(lambda params: [layer.cast(own) for layer, own in zip(layers, split(params), strict=True)])


def jit_op(
    virtual_stage: VirtualStage, kind: str, mesh: Mesh, sums: Values, axes: frozenset[str]
) -> Callable[..., tuple[Values, Values]]:
    """Returns an op of a virtual stage as a jitted function of (sums, whole, rows, own), which donates the sums.

    Args:
        virtual_stage: The virtual stage.
        kind: F, R, B or W.
        mesh: The mesh of its stage.
        sums: The shapes, dtypes and shardings of the sums of its stage.
        axes: The mesh axes over which it is manual.
    """

    def one_replica(sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        made, sums = virtual_stage.run(kind, sums, whole, rows, own_of(own))
        return of_all(made), sums

    one_replica.__name__ = f"{kind}_on_stage_{virtual_stage.stage}"  # the name in profiles
    whole, each = PartitionSpec(), spec_of_rows(mesh)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole, each, each), out_specs=each, axes=axes)
    sums = virtual_stage.values_of(sums, virtual_stage.changes(kind))
    jitted = jax.jit(run, donate_argnums=0, out_shardings=(None, jax.tree.map(lambda s: s.sharding, sums)))
    return _checked(jitted) if are_gpus(mesh) else jitted


def _checked(op: jax.stages.Wrapped) -> Callable[..., tuple[Values, Values]]:
    """Returns an op for GPUs that at its first call raises ValueError where XLA took products in FP8 back to 16 bits."""
    is_checked = False

    def run(*given: Any) -> tuple[Values, Values]:
        nonlocal is_checked
        if not is_checked:
            traced = op.trace(*given)
            if asked := fp8.num_asked(traced.jaxpr):
                compiled = traced.lower().compile()  # the call below reuses it
                fp8.check_products(compiled.as_text(), asked)
            is_checked = True
        return op(*given)

    return run


def jit_weight(mesh: Mesh, traced: Any, reduce: Reduce) -> Callable[[PyTree], jax.Array]:
    """Returns the jitted function of the weight of the whole batch, replicated on the devices of a stage."""
    one_replica = lambda rows: reduce(traced.weight_of_rows(rows))
    whole, each = PartitionSpec(), spec_of_rows(mesh)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole, axes=traced.manual_axes)
    return jax.jit(run)


def jit_value(mesh: Mesh, traced: Any, reduce: Reduce) -> Callable[[PyTree, jax.Array], PyTree]:
    """Returns the jitted function that reduces the sums of the loss over the replicas and divides them by the weight."""

    def one_replica(sums: PyTree, total_weight: jax.Array) -> PyTree:
        return traced.value(reduce(own_of(sums)), total_weight)

    whole, each = PartitionSpec(), spec_of_rows(mesh)
    return jax.jit(manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole), out_specs=whole))


def jit_grads(mesh: Mesh, like: Values, stack: Callable[[list], PyTree], reduce: Reduce) -> Callable[[Values], Values]:
    """Returns the jitted function that reduces a stage's sums over the replicas to gradients, in the dtypes of the params.

    Args:
        mesh: The mesh of the stage.
        like: The shapes, dtypes and shardings of the gradients.
        stack: The gradients of the stage's layers from the sums of each layer.
        reduce: ``tree -> tree``, reduced over the replicas.
    """

    def one_replica(sums: Values) -> Values:
        own = own_of(sums)
        grads = reduce(own | {"layers": stack(own["layers"])})
        return jax.tree.map(lambda a, shape: a.astype(shape.dtype), grads, like)

    whole, each = PartitionSpec(), spec_of_rows(mesh)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole)
    return jax.jit(run, out_shardings=jax.tree.map(lambda g: g.sharding, like))


def sum_like(mesh: Mesh, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of a sum of gradients over microbatches, with a leading dim of replicas, in float32 or wider."""
    spec = () if like.sharding is None else without(like.sharding.spec, DATA)
    dtype = wide_dtype(like.dtype) if is_float(like) else like.dtype
    sharding = NamedSharding(mesh, PartitionSpec(*spec_of_rows(mesh), *spec))
    return jax.ShapeDtypeStruct((num_replicas(mesh), *like.shape), dtype, sharding=sharding)


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
