"""The virtual stages of a model for the MPMD executor: what each kind of op does on one replica.

    F  (embed) layers (head and loss, forward and backward)    returns residuals and y, on the last virtual stage ct
    R  (embed) layers                                          returns residuals
    B  layers backward (embedding backward)                    returns dx, and the cotangents for W or the sums of gradients
    W  the rest of the backward pass of the layers             returns the sums of gradients

Layers run one after the other, each with arrays of its own: params in the dtypes that the layers take, residuals and sums of
gradients are lists of arrays, one list for each layer. The layers are written out. A loop over stacked params would copy the
params of each layer out of the stack in every op. ``mpmd_programs.py`` has the jitted functions of these ops.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxpar.backward.add_grads import add_grads
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.data_parallel import split_microbatches
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.pipeline.embed_and_head import Ends, Outer
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.schedule import Schedule

Arrays = Sequence[Any]
Values = dict[str, Any]
Results = tuple[Values, Values]  # the outputs of an op by name, and the sums to which it adds


class Given(NamedTuple):
    """What an op reads on one replica.

    Attributes:
        sums: The sums to which it adds, with a leading dim of one replica.
        whole: The replicated inputs: the params of its ``layers``, the leaves of outer that ``embed`` and ``head`` read, the
            ``index`` of the microbatch, and on the last virtual stage the ``total_weight`` of the batch.
        rows: The replica's rows, for the first and the last virtual stage.
        own: The outputs of earlier ops: ``x``, ``ct``, ``residuals_b``, ``residuals_w``, ``cotangents_w``.
    """

    sums: Values
    whole: Values
    rows: PyTree
    own: Values


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
        adds_layers = "B" if not self.schedule.splits_backward else "W"
        names = ["turn"]
        if kind == "F" and self.is_last:
            names += ["head", "loss"]
        if kind == adds_layers:
            names += ["layers"]
        if kind == "B" and self.is_first:
            names += ["embed"]
        return names

    def values_of(self, stage: Values, names: Iterable[str]) -> Values:
        """Returns some of the values of its stage, and of ``layers`` only its own."""
        values = {name: stage[name] for name in names}
        if "layers" in values:
            values["layers"] = values["layers"][self.positions]
        return values

    def run(self, kind: str, given: Given) -> Results:
        """Runs an op, F, R, B or W, on one replica; returns its outputs, under the names of ``own``, and the new sums."""
        ops = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}
        made, changed = ops[kind](given)
        turn = given.sums["turn"] + 1
        return made, given.sums | changed | {"turn": turn}

    def microbatch(self, given: Given) -> PyTree:
        """Returns the microbatch of an op."""
        return self.microbatch_of(given.rows, given.whole["index"])

    def forward(self, given: Given) -> Results:
        """F."""
        y, stored = self.run_layers(given, self.ends.embed)
        made = {} if self.schedule.recomputes else stored
        if not self.is_last:
            return made | {"x": y}, {}
        sums, whole = given.sums, given.whole
        microbatch = self.microbatch(given)
        loss_sums, grads, ct = self.ends.head(whole["head"], y, microbatch, whole["total_weight"])
        head = jax.tree.map(_add_one, sums["head"], grads)
        loss = jax.tree.map(_add_one, sums["loss"], loss_sums)
        return made | {"ct": ct}, {"head": head, "loss": loss}

    def recompute(self, given: Given) -> Results:
        """R."""
        _, stored = self.run_layers(given, self.ends.embed_again)
        return stored, {}

    def run_layers(self, given: Given, embed: Callable) -> tuple[list, Values]:
        """Returns y and the residuals of each layer; XLA computes none that nothing reads."""
        whole = given.whole
        x = embed(whole["embed"], self.microbatch(given)) if self.is_first else given.own["x"]
        residuals_b, residuals_w = [], []
        for layer, params in zip(self.layers, whole["layers"], strict=True):
            x, for_b, for_w = layer.forward_and_store(params, x)
            residuals_b.append(for_b)
            residuals_w.append(for_w)
        return list(x), {"residuals_b": residuals_b, "residuals_w": residuals_w}

    def backward(self, given: Given) -> Results:
        """B."""
        ct, for_weights = self._backward_layers(given)
        made, changed = {}, {}
        if self.schedule.splits_backward:
            made["cotangents_w"] = for_weights
        else:
            changed["layers"] = add_each(given.sums["layers"], for_weights)
        if self.is_first:
            changed["embed"] = self._add_embedding(given, ct)
        else:
            made["ct"] = ct
        return made, changed

    def _backward_layers(self, given: Given) -> tuple[list, list]:
        """Returns dx, and of each layer the gradients, or what W makes them of."""
        own, params = given.own, given.whole["layers"]
        stored = zip(self.layers, params, own["residuals_b"], own["residuals_w"], strict=True)
        ct, for_weights = own["ct"], []
        for layer, of_layer, for_b, for_w in reversed(list(stored)):
            run = layer.backward_input if self.schedule.splits_backward else layer.backward
            ct, made = run(of_layer, for_b, for_w, ct)
            for_weights.insert(0, made)
        return list(ct), for_weights

    def _add_embedding(self, given: Given, ct: list) -> Outer:
        """Returns the sums of the embedding with its gradients added."""
        sums = jax.tree.map(lambda total: total[0], given.sums["embed"])
        params, microbatch = given.whole["embed"], self.microbatch(given)
        added = add_grads(sums, self.ends.embed_backward, params, microbatch, ct)
        return jax.tree.map(lambda total: total[None], added)

    def weights(self, given: Given) -> Results:
        """W."""
        own, params = given.own, given.whole["layers"]
        stored = zip(self.layers, params, own["residuals_w"], own["cotangents_w"], strict=True)
        grads = [layer.backward_weights(*inputs) for layer, *inputs in stored]
        return {}, {"layers": add_each(given.sums["layers"], grads)}


def _add_one(total: jax.Array, grad: jax.Array) -> jax.Array:
    """Returns a sum with a gradient added, in the sum's dtype.

    The sum has a leading dim of one replica, which the gradient gets here. XLA would copy a sum that is reshaped before the
    addition.
    """
    return total + grad.astype(total.dtype)[None]


def add(sums: Arrays, grads: Arrays) -> list:
    """Returns sums with gradients added, likewise."""
    return [_add_one(*each) for each in zip(sums, grads, strict=True)]


def add_each(sums: Sequence[Arrays], grads: Sequence[Arrays]) -> list[list]:
    """Returns the sums of each layer with its gradients added."""
    return [add(*each) for each in zip(sums, grads, strict=True)]


def make_virtual_stages(
    model: LayeredModel,
    loss: Callable,
    schedule: Schedule,
    layout: LayerLayout,
    params: PyTree,
    rows: PyTree,
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
        shards: How the params of a layer are sharded over ``tensor``; for a list of layers, those of each.
    """

    def microbatch_of(rows: PyTree, index: Any) -> PyTree:
        at_index = lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False)
        return jax.tree.map(at_index, split_microbatches(rows, schedule.num_microbatches))

    microbatch = jax.eval_shape(microbatch_of, rows, 0)
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    functions = model.layers(layout.num_layers)
    if isinstance(shards, ParamShards):
        layers = _split_once(functions, params[LAYERS], x, shards)
    else:
        layers, x = _split_each(functions, params[LAYERS], x, shards)
    ends = Ends(model, loss, params[OUTER], x, microbatch)
    virtual_stages, rest = [], iter(layers)
    num_on_stage = [0] * schedule.num_stages
    for number, count in enumerate(layout.layers_per_virtual_stage or ()):
        stage, _ = schedule.stage_and_chunk(number)
        first = num_on_stage[stage]
        num_on_stage[stage] += count
        virtual_stage = VirtualStage(
            stage=stage,
            layers=list(islice(rest, count)),
            positions=slice(first, first + count),
            is_first=number == 0,
            is_last=number == schedule.num_virtual_stages - 1,
            ends=ends,
            microbatch_of=microbatch_of,
            schedule=schedule,
        )
        virtual_stages.append(virtual_stage)
    return virtual_stages


def _split_once(
    functions: Sequence[Callable],
    params: PyTree,
    x: PyTree,
    shards: ParamShards,
) -> list[SplitLayer]:
    """Returns equal layers, of which one is split."""
    of_one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    layer = split_layer(functions[0], jax.tree.map(of_one, params), x, shards)
    return [layer] * len(functions)


def _split_each(
    functions: Sequence[Callable],
    params: list[PyTree],
    x: PyTree,
    shards: list[ParamShards],
) -> tuple[list[SplitLayer], PyTree]:
    """Returns the layers of a list, and the output of the last one."""
    layers = []
    for function, own, own_shards in zip(functions, params, shards, strict=True):
        layers.append(split_layer(function, own, x, own_shards))
        x = jax.eval_shape(function, own, x)
    return layers, x
