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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.manual import manual_over_data_and_stage
from jaxpar.mesh import DATA
from jaxpar.pipeline import buffers
from jaxpar.pipeline.ends import Ends
from jaxpar.pipeline.split import SplitLayer, is_float

Arrays = Sequence[Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One virtual stage.

    Attributes:
        layers: Its layers.
        first_place: The place of the first of them among the layers that the stage holds.
        x: What its input is like.
        is_first: Whether its input comes from the embedding.
        is_last: Whether its output goes to the head.
        is_stacked: Whether the stage's weights are arrays with a leading dim of places; else there is a list a place.
        ends: Embedding and head.
        microbatch_of: ``(a replica's rows, index) -> microbatch``.
        splits_backward: Whether B leaves the gradients of the weights to W.
        recomputes: Whether R, not F, stores.
    """

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


def jit_op(part: Part, kind: str, mesh: Mesh, sum_shardings: PyTree) -> Callable[..., tuple[Values, Values]]:
    """Returns an op of a part as a jitted function on the stage's mesh, which donates the sums."""

    def one_replica(sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        made, sums = part.run(kind, own_of(sums), whole, rows, own_of(own))
        return of_all(made), of_all(sums)

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole, each, each), out_specs=each)
    return jax.jit(run, donate_argnums=0, out_shardings=(None, sum_shardings))


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


def zeros_like_sums(shapes: PyTree, shardings: PyTree, data: int) -> Callable[[], PyTree]:
    """Returns a jitted function that gives zeros for each replica, in float32 at least."""

    def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
        wide = jnp.promote_types(shape.dtype, jnp.float32) if is_float(shape) else shape.dtype
        return jnp.zeros((data, *shape.shape), wide)

    return jax.jit(lambda: jax.tree.map(zeros, shapes), out_shardings=shardings)


def own_sharding(mesh: Mesh, spec: PartitionSpec | None = None) -> NamedSharding:
    """Returns the sharding of what differs from replica to replica, of which one replica's has ``spec``."""
    return NamedSharding(mesh, PartitionSpec(DATA, *(spec or ())))
