"""What a virtual stage runs on its own devices: one jitted function for each kind of op.

    F  (embed) layers (head and loss, forward and back)    gives y, or on the last part the cotangent, and what to store
    R  (embed) layers                                      gives what to store
    B  layers back (embedding back)                        gives dx, and what W needs; the whole backward adds gradients
    W  the rest of the layers' backward                    adds gradients

An op is manual over ``data``: each replica computes on its own rows and adds up its own gradients, which are summed over
``data`` once a step. What differs from replica to replica has a leading dim ``data``, one index each; ``tensor`` is automatic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked
from jaxpar.manual import manual_over_data_and_stage
from jaxpar.mesh import DATA
from jaxpar.pipeline import buffers
from jaxpar.pipeline.ends import Ends, cut_ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.split import SplitLayer, split_layer
from jaxpar.schedule import Schedule

Arrays = Sequence[Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One virtual stage.

    Attributes:
        stage: The stage that holds it.
        layers: Its layers.
        first_place: The place of the first of them among the layers that the stage holds.
        x: What its input is like.
        is_first: Whether its input comes from the embedding.
        is_last: Whether its output goes to the head.
        is_stacked: Whether the stage's layers are arrays with a leading dim of places; else there is a list of arrays each.
        ends: Embedding and head.
        microbatch_of: ``(a replica's rows, index) -> microbatch``.
        splits_backward: Whether B leaves the gradients of the weights to W.
        recomputes: Whether R, not F, stores.
    """

    stage: int
    layers: Sequence[SplitLayer]
    first_place: int
    x: Sequence[jax.ShapeDtypeStruct]
    is_first: bool
    is_last: bool
    is_stacked: bool
    ends: Ends
    microbatch_of: Callable[[PyTree, Any], PyTree]
    splits_backward: bool
    recomputes: bool

    def changes(self, kind: str) -> list[str]:
        """Returns which of the stage's sums an op of a kind adds to."""
        names = {
            "F": ["head", "loss", "weight"] * self.is_last,
            "R": [],
            "B": ["layers"] * (not self.splits_backward) + ["embed"] * self.is_first,
            "W": ["layers"],
        }
        return ["turn", *names[kind]]

    def run(self, kind: str, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """Runs an op on one replica.

        Args:
            kind: F, R, B or W.
            sums: What it adds to.
            whole: The stage's ``layers``, the leaves of outer that ``embed`` and ``head`` read, and the ``index`` of the
                microbatch.
            rows: The replica's rows, where the part is at an end of the model.
            own: What earlier ops made: ``x``, ``ct``, ``stored_b``, ``stored_w``, ``kept``.

        Returns:
            What it made, by the same names, and the sums.
        """
        op = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}[kind]
        made, changed = op(sums, whole, rows, own)
        return made, sums | changed | {"turn": sums["turn"] + 1}

    def forward(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """F."""
        y, stored = self.run_layers(whole, self.input(whole, rows, own), store=not self.recomputes)
        if not self.is_last:
            return stored | {"x": [buffers.to_raw(leaf) for leaf in y]}, {}
        microbatch = self.microbatch_of(rows, whole["index"])
        loss, weight, grads, ct = self.ends.head(whole["head"], y, microbatch)
        changed = {"head": add(sums["head"], grads), "loss": sums["loss"] + loss, "weight": sums["weight"] + weight}
        return stored | {"ct": ct}, changed

    def recompute(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """R."""
        return self.run_layers(whole, self.input(whole, rows, own), store=True)[1], {}

    def backward(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """B."""
        ct, kept, totals = own["ct"], [], sums.get("layers")
        for i, layer in reversed(list(enumerate(self.layers))):
            stored = [cook(own[name][i], getattr(layer, name)) for name in ("stored_b", "stored_w")]
            params = self.params(whole, i)
            if self.splits_backward:
                ct, new = layer.backward_input(params, *stored, ct)
                kept.insert(0, [buffers.to_raw(a) for a in new])
            else:
                ct, dp = layer.backward(params, *stored, ct)
                totals = self.add_to_layer(totals, dp, i)
        changed = {} if self.splits_backward else {"layers": totals}
        if not self.is_first:
            return {"kept": kept, "ct": ct}, changed
        grads = self.ends.embed_backward(whole["embed"], self.microbatch_of(rows, whole["index"]), ct)
        return {"kept": kept}, changed | {"embed": add(sums["embed"], grads)}

    def weights(self, sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        """W."""
        totals = sums["layers"]
        for i, layer in enumerate(self.layers):
            stored, kept = cook(own["stored_w"][i], layer.stored_w), cook(own["kept"][i], layer.kept)
            totals = self.add_to_layer(totals, layer.backward_weights(self.params(whole, i), stored, kept), i)
        return {}, {"layers": totals}

    def input(self, whole: Values, rows: PyTree, own: Values) -> list:
        """What F and R start from."""
        if self.is_first:
            return self.ends.embed(whole["embed"], self.microbatch_of(rows, whole["index"]))
        return cook(own["x"], self.x)

    def run_layers(self, whole: Values, x: list, *, store: bool) -> tuple[list, Values]:
        """The layers, and what they store if asked, a list of arrays each."""
        stored_b, stored_w = [], []
        for i, layer in enumerate(self.layers):
            if store:
                x, for_b, for_w = layer.forward_and_store(self.params(whole, i), x)
                stored_b.append([buffers.to_raw(a) for a in for_b])
                stored_w.append([buffers.to_raw(a) for a in for_w])
            else:
                x = layer.forward(self.params(whole, i), x)
        return x, {"stored_b": stored_b, "stored_w": stored_w} if store else {}

    def params(self, whole: Values, i: int) -> list:
        """The params of its i-th layer."""
        layers, place = whole["layers"], self.first_place + i
        return [leaf[place] for leaf in layers] if self.is_stacked else layers[place]

    def add_to_layer(self, totals: list, grads: Arrays, i: int) -> list:
        """Adds the gradients of its i-th layer."""
        place = self.first_place + i
        if self.is_stacked:
            return buffers.add_at(totals, grads, place)
        return [add(total, grads) if at == place else total for at, total in enumerate(totals)]


def cut_parts(
    model: LayeredModel,
    loss: Callable,
    schedule: Schedule,
    layout: LayerLayout,
    params: PyTree,
    rows: PyTree,
    cut: Callable[[PyTree], PyTree],
) -> list[Part]:
    """Returns the parts of a model, in its order.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        schedule: The schedule.
        layout: How many layers each part has.
        params: What the canonical params are like.
        rows: What one replica's rows are like.
        cut: Cuts them into microbatches, along a leading dim.
    """

    def microbatch_of(rows: PyTree, index: Any) -> PyTree:
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), cut(rows))

    microbatch = jax.eval_shape(microbatch_of, rows, 0)
    layers, xs = _split_layers(model, params, layout.num_layers, microbatch)
    ends = cut_ends(model, loss, params[OUTER], xs[-1], microbatch)
    counts = list(layout.layers_per_part or ())
    parts = []
    for number, count in enumerate(counts):
        stage, chunk = schedule.place_of(number)
        start = sum(counts[:number])
        part = Part(
            stage=stage,
            layers=layers[start : start + count],
            first_place=chunk * layout.places_per_chunk
            if is_stacked(params)
            else layout.layer_counts[stage, :chunk].sum(),
            x=jax.tree.leaves(xs[start]),
            is_first=number == 0,
            is_last=number == len(counts) - 1,
            is_stacked=is_stacked(params),
            ends=ends,
            microbatch_of=microbatch_of,
            splits_backward=schedule.splits_backward,
            recomputes=schedule.recomputes,
        )
        parts.append(part)
    return parts


def _split_layers(
    model: LayeredModel, params: PyTree, num_layers: int, microbatch: PyTree
) -> tuple[list[SplitLayer], list[PyTree]]:
    """The layers, and what comes before the first, between them and after the last."""
    x = jax.eval_shape(model.embed, params[OUTER], microbatch)
    if is_stacked(params):
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[LAYERS])
        return [split_layer(model.layer, one, x)] * num_layers, [x] * (num_layers + 1)
    layers, xs = [], [x]
    for function, layer_params in zip(model.functions(num_layers), params[LAYERS], strict=True):
        layers.append(split_layer(function, layer_params, xs[-1]))
        xs.append(jax.eval_shape(function, layer_params, xs[-1]))
    return layers, xs


def jit_op(part: Part, kind: str, mesh: Mesh, sums: Values) -> Callable[..., tuple[Values, Values]]:
    """Returns an op of a part as a jitted function of (sums, whole, rows, own), which donates the sums.

    Args:
        part: The part.
        kind: F, R, B or W.
        mesh: The mesh of its stage.
        sums: What the sums that it adds to are like, with the shardings that they keep.
    """

    def one_replica(sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        made, sums = part.run(kind, own_of(sums), whole, rows, own_of(own))
        return of_all((made, sums))

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole, each, each), out_specs=each)
    return jax.jit(run, donate_argnums=0, out_shardings=(None, jax.tree.map(lambda s: s.sharding, sums)))


def jit_loss(mesh: Mesh, like: Values, reduce: Callable[[PyTree], PyTree]) -> Callable[[Values], tuple]:
    """Returns the jitted function that makes of the last part's sums the loss and the weight of the whole batch."""

    def one_replica(sums: Values) -> tuple[jax.Array, jax.Array]:
        total = reduce(_cast(own_of(sums), like))
        return total["loss"] / total["weight"], total["weight"]

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    return jax.jit(manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole))


def jit_grads(mesh: Mesh, like: Values, reduce: Callable[[PyTree], PyTree]) -> Callable[[Values, jax.Array], Values]:
    """Returns the jitted function that makes of a stage's sums and the weight the gradients: the one sum over ``data``."""

    def one_replica(sums: Values, weight: jax.Array) -> Values:
        total = reduce(_cast(own_of(sums), like))
        return jax.tree.map(lambda g: g / weight.astype(g.dtype), total)

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole), out_specs=whole)
    return jax.jit(run, out_shardings=jax.tree.map(lambda g: g.sharding, like))


def jit_zeros(like: Values) -> Callable[[], Values]:
    """Returns the jitted function that makes zeros of the given shapes, dtypes and shardings."""
    zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, like))


def _cast(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda a, shape: a.astype(shape.dtype), tree, like)


def own_of(tree: PyTree) -> PyTree:
    """Returns a replica's own arrays, from those with a leading dim of one replica."""
    return jax.tree.map(lambda a: a.reshape(a.shape[1:]), tree)


def of_all(tree: PyTree) -> PyTree:
    """Returns a replica's own arrays with a leading dim, along which ``shard_map`` puts the replicas together."""
    return jax.tree.map(lambda a: a[None], tree)


def cook(raw: Arrays, like: Arrays) -> list:
    """Returns arrays as the model has them: PRNG keys travel as their data."""
    return [buffers.from_raw(a, shape) for a, shape in zip(raw, like, strict=True)]


def add(totals: Arrays, grads: Arrays) -> list:
    """Returns totals with gradients added, in the totals' dtype."""
    return [total + grad.astype(total.dtype) for total, grad in zip(totals, grads, strict=True)]
