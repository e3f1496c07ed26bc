"""The virtual stages of a model and what each kind of op does on one, on one replica.

    F  (embed) layers (head and loss, forward and backward)    returns residuals and y, on the last virtual stage ct
    R  (embed) layers                                          returns residuals
    B  layers backward (embedding backward)                    returns dx, and the cotangents for W or the sums of gradients
    W  the rest of the backward pass of the layers             returns the sums of gradients

``programs.py`` makes a jitted function of each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.backward.add_grads import add_grads
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.pipeline.embed_and_head import Ends, cut_ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.mpmd.layers import Layers, add
from jaxpar.schedule import Schedule

Values = dict[str, Any]


@dataclass(frozen=True)
class VirtualStage:
    """One virtual stage and its ops.

    Attributes:
        stage: The stage that holds it.
        layers: Its layers.
        positions: Which of the stage's layers they are.
        is_first: Whether its input comes from the embedding.
        is_last: Whether its output goes to the head.
        ends: Embedding and head.
        microbatch_of: ``(a replica's rows, index) -> microbatch``.
        splits_backward: Whether B leaves the gradients of the weights to W.
        recomputes: Whether R stores the residuals, not F.
    """

    stage: int
    layers: Layers
    positions: slice
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
        made, changed = op(sums, whole, rows, own)
        return made, sums | changed | {"turn": sums["turn"] + 1}

    def forward(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """F."""
        x, stored = self.input(whole, rows, own, self.ends.embed), {}
        if self.recomputes:
            y = self.layers.forward(whole["layers"], x)
        else:
            y, stored = self.layers.forward_and_store(whole["layers"], x)
        if not self.is_last:
            return stored | {"x": y}, {}
        microbatch = self.microbatch_of(rows, whole["index"])
        loss_sums, grads, ct = self.ends.head(whole["head"], y, microbatch, whole["total_weight"])
        add_one = lambda total, own: add([total], [own])[0]
        changed = {"head": add(sums["head"], grads), "loss": jax.tree.map(add_one, sums["loss"], loss_sums)}
        return stored | {"ct": ct}, changed

    def recompute(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """R."""
        x = self.input(whole, rows, own, self.ends.embed_again)
        return self.layers.forward_and_store(whole["layers"], x)[1], {}

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
        embed = [total[0] for total in sums["embed"]]
        embed = add_grads(embed, self.ends.embed_backward, whole["embed"], microbatch, dx)
        return made, changed | {"embed": [total[None] for total in embed]}

    def weights(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """W."""
        return {}, {"layers": self.layers.backward_weights(whole["layers"], own, sums["layers"])}

    def input(self, whole: Values, rows: PyTree, own: Values, embed: Callable[[list, PyTree], list]) -> list:
        """The input of F and R."""
        if self.is_first:
            return embed(whole["embed"], self.microbatch_of(rows, whole["index"]))
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
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with further sums after the two.
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
    layers, y = _split_layers(model, layout, params, microbatch, shards)
    ends = cut_ends(model, loss, params[OUTER], y, microbatch)
    virtual_stages, start = [], 0
    for number, count in enumerate(layout.layers_per_virtual_stage or ()):
        stage, chunk = schedule.stage_and_chunk(number)
        position = int(layout.layer_counts[stage, :chunk].sum())
        virtual_stages.append(
            VirtualStage(
                stage=stage,
                layers=Layers(layers[start : start + count]),
                positions=slice(position, position + count),
                is_first=number == 0,
                is_last=number == schedule.num_virtual_stages - 1,
                ends=ends,
                microbatch_of=microbatch_of,
                splits_backward=schedule.splits_backward,
                recomputes=schedule.recomputes,
            )
        )
        start += count
    return virtual_stages


def _split_layers(
    model: LayeredModel,
    layout: LayerLayout,
    params: PyTree,
    microbatch: PyTree,
    shards: ParamShards | list[ParamShards],
) -> tuple[list[SplitLayer], PyTree]:
    """The layers of the model, equal ones split once, and the shape of what the last of them returns."""
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    functions = model.layers(layout.num_layers)
    if isinstance(shards, ParamShards):
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[LAYERS])
        return [split_layer(functions[0], one, x, shards)] * layout.num_layers, x
    layers = []
    for function, own, own_shards in zip(functions, params[LAYERS], shards, strict=True):
        layers.append(split_layer(function, own, x, own_shards))
        x = jax.eval_shape(function, own, x)
    return layers, x
