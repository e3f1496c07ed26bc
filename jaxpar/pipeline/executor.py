"""The pipeline as one scan over the ticks of a Program. Every stage runs this same code, each on its row of the tables.

    tick:  F  if on: read the inbox (or embed), run the layers, store what the backward pass needs; the last part of the
              model goes on through the head and the loss, and hands itself the cotangent
           R  if on: run the layers again from what the inbox still holds, and store
           B  if on: read the cotangent, run the layers back; the first part goes on through the embedding
           W  if on: add the weights' gradients
           send right, send left: a collective-permute over ``stage`` from the stages that send; what arrives goes to the inbox

Nothing is differentiated from outside: each op calls what ``backward/split.py`` cut from the vjp of one layer. Work that is
off is skipped by ``cond``, not computed and masked; the collectives of tensor parallelism stand inside the branches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar.backward.split import SplitLayer, split_layer
from jaxpar.dtypes import is_float, wide_dtype
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import STAGE
from jaxpar.pipeline import buffers
from jaxpar.pipeline.ends import Ends, cut_ends
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.messages import exchange, put_cotangent
from jaxpar.pipeline.program import NONE, Program

Row = dict[str, jax.Array]
State = dict[str, Any]


def accumulate_pipelined(
    model: LayeredModel,
    loss: Callable,
    program: Program,
    layout: LayerLayout,
    params: PyTree,
    microbatches: PyTree,
    total_weight: jax.Array,
    scatter_layer: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[jax.Array, PyTree]:
    """Returns one stage's (loss_sum, gradients) over its replica's microbatches; call it under ``shard_map``.

    Both are added up in float32 at least, and returned so.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        program: The compiled schedule.
        layout: Where layers live.
        params: This stage's packed layers ``[num_chunks * places_per_chunk, ...]``, and outer whole.
        microbatches: ``[num_microbatches, rows, ...]``, the same on every stage.
        total_weight: That of the whole batch; gradients are those of the loss divided by it.
        scatter_layer: What is done to the gradients of one layer before they are added up (ZeRO 2 cuts them).

    Returns:
        This stage's part: loss_sum and the gradients of outer are still to be added over the stages
        (``sum_over_stages``); the gradients of layers are its own.

    **Collectives**: over ``stage`` at most two collective-permutes a tick, of one activation each, in which a stage sends an
    activation to the next and a cotangent to the one before once a microbatch and chunk.
    """
    stage = _Stage.build(model, loss, program, layout, params, microbatches, total_weight, scatter_layer)
    index = jax.lax.axis_index(STAGE)
    names, table = _table(program)

    def tick(number: jax.Array, state: State) -> State:
        row = jax.lax.dynamic_slice(table, (jnp.int32(number), index, jnp.int32(0)), (1, 1, len(names)))[0, 0]
        return stage.tick(number, state, dict(zip(names, row, strict=True)))

    state = jax.lax.fori_loop(0, program.schedule.num_ticks, tick, stage.first_state())
    grads = {
        OUTER: jax.tree.unflatten(stage.outer_tree, state["outer_grads"]),
        LAYERS: jax.tree.unflatten(stage.layer_tree, state["layer_grads"]),
    }
    return state["loss"], grads


def _table(program: Program) -> tuple[list[str], jax.Array]:
    """The tables as one constant ``[num_ticks, num_stages, columns]``, with the inbox's spare slot for what is not kept."""
    spare = program.num_slots["inbox"]
    inbox = ("right", "left", "in", "out", "ct")
    columns = {
        name: np.where(table == NONE, spare, table) if name.split("_")[-1] in inbox else np.maximum(table, 0)
        for name, table in program.tables.items()
    }
    return list(columns), jnp.asarray(np.stack([t.T for t in columns.values()], axis=-1))


def _cond(name: str, *args: Any) -> Any:
    """``jax.lax.cond`` by a name that the compiled program keeps: ``Program.branch_shares`` tells how often it is taken."""
    with jax.named_scope(name):
        return jax.lax.cond(*args)


@dataclass(frozen=True)
class _Stage:
    """What a stage knows for all ticks: functions, its params, and the shapes of what it stores."""

    program: Program
    layout: LayerLayout
    ends: Ends
    layer: SplitLayer
    outer: list
    layers: list
    cast_layers: list
    outer_tree: Any
    layer_tree: Any
    x: list[jax.ShapeDtypeStruct]
    microbatches: PyTree
    total_weight: jax.Array
    scatter_layer: Callable[[PyTree], PyTree]

    @classmethod
    def build(
        cls,
        model: LayeredModel,
        loss: Callable,
        program: Program,
        layout: LayerLayout,
        params: PyTree,
        batch: PyTree,
        total_weight: jax.Array,
        scatter_layer: Callable[[PyTree], PyTree],
    ) -> "_Stage":
        """The stage of one shard."""
        outer, outer_tree = jax.tree.flatten(params[OUTER])
        layers, layer_tree = jax.tree.flatten(params[LAYERS])
        one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        x = jax.eval_shape(model.embed, params[OUTER], microbatch)
        layer = split_layer(model.layers(1)[0], one_layer, x)
        return cls(
            program=program,
            layout=layout,
            ends=cut_ends(model, loss, params[OUTER], x, microbatch),
            layer=layer,
            outer=outer,
            layers=layers,
            cast_layers=layer.cast(layers),
            outer_tree=outer_tree,
            layer_tree=layer_tree,
            x=jax.tree.leaves(x),
            microbatches=batch,
            total_weight=total_weight,
            scatter_layer=scatter_layer,
        )

    def first_state(self) -> State:
        """Empty buffers and zero sums."""
        slots, places = self.program.num_slots, self.layout.places_per_chunk
        zeros = lambda arrays: [jnp.zeros(a.shape, wide_dtype(a.dtype)) for a in arrays]
        grads = jax.eval_shape(lambda: self.cut_grads(zeros(p[0] for p in self.layers)))
        return {
            "inbox": buffers.make_ring(self.x, slots["inbox"] + 1),
            "stored_b": buffers.make_ring(self.layer.stored_b, slots["stored_b"], places),
            "stored_w": buffers.make_ring(self.layer.stored_w, slots["stored_w"], places),
            "kept": buffers.make_ring(self.layer.kept if slots["kept"] else [], slots["kept"], places),
            "layer_grads": [jnp.zeros((len(p), *g.shape), g.dtype) for p, g in zip(self.layers, grads, strict=True)],
            "outer_grads": zeros(self.outer),
            "loss": zeros([self.ends.loss_sum])[0],
        }

    def tick(self, number: jax.Array, state: State, row: Row) -> State:
        """Runs the ops that are on, then sends and receives."""
        blank = buffers.make_ring(self.x)
        sends = {"F": blank, "B": [blank[i] for i in self.floats]}
        run = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}
        for op in self.program.ops:
            own = {field.removeprefix(f"{op}_"): value for field, value in row.items() if field.startswith(f"{op}_")}
            state, sends[op] = self._if_on(op, run[op[0]], state, own, sends.get(op, ()))
        inbox = exchange(self.program, number, self.x, state["inbox"], row, sends["F"], sends["B"])
        return state | {"inbox": inbox}

    @staticmethod
    def _if_on(name: str, op: Callable, state: State, row: Row, otherwise: Any) -> tuple[State, Any]:
        return _cond(name, row["on"] > 0, lambda state: op(state, row), lambda state: (state, otherwise), state)

    @property
    def floats(self) -> list[int]:
        """Which leaves of x carry gradients."""
        return [i for i, leaf in enumerate(self.x) if is_float(leaf)]

    def microbatch(self, index: jax.Array) -> PyTree:
        """One microbatch."""
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.microbatches)

    def is_part(self, part: int, chunk: jax.Array) -> jax.Array:
        """Whether a chunk of this stage is the given part of the model."""
        stage, of_chunk = self.layout.place_of_part(part)
        return (jax.lax.axis_index(STAGE) == stage) & (chunk == of_chunk)

    def count(self, chunk: jax.Array) -> Any:
        """How many layers a chunk of this stage has: an int where it is the same for all, so that loops have known trips."""
        counts = self.layout.layer_counts
        if counts.min() == counts.max():
            return int(counts.max())
        return jnp.asarray(counts)[jax.lax.axis_index(STAGE), chunk]

    def over_layers(self, body: Callable, chunk: jax.Array, carry: Any, *, back: bool = False) -> Any:
        """Runs ``body(carry, place, layer_params)`` over the layers of a chunk, in order or back."""
        count = self.count(chunk)

        def at(i: Any, carry: Any) -> Any:
            place = count - 1 - i if back else i
            return body(carry, place, buffers.take(self.cast_layers, chunk * self.layout.places_per_chunk + place))

        return jax.lax.fori_loop(0, count, at, carry)

    def input_of(self, state: State, row: Row) -> list:
        """What F and R start from: the embedding on the first part, else the inbox."""
        chunk, slot = row["chunk"], row["in"]
        return _cond(
            "embed",
            self.is_part(0, chunk),
            lambda: [
                buffers.to_raw(a)
                for a in self.ends.embed(self.read(self.ends.embed_reads), self.microbatch(row["microbatch"]))
            ],
            lambda: [buffers.to_raw(a) for a in buffers.get(state["inbox"], self.x, slot)],
        )

    def cook(self, raw: Sequence) -> list:
        """X as the model has it."""
        return [buffers.from_raw(a, like) for a, like in zip(raw, self.x, strict=True)]

    def run_layers(self, state: State, row: Row, *, store: bool) -> tuple[State, list]:
        """The layers of a chunk from its input, storing for the backward pass if asked."""

        def body(carry: tuple, place: Any, params: list) -> tuple:
            raw, stored_b, stored_w = carry
            if not store:
                y = self.layer.forward(params, self.cook(raw))
                return [buffers.to_raw(a) for a in y], stored_b, stored_w
            y, for_b, for_w = self.layer.forward_and_store(params, self.cook(raw))
            stored_b = buffers.put(stored_b, for_b, row["stored_b"], place)
            stored_w = buffers.put(stored_w, for_w, row["stored_w"], place)
            return [buffers.to_raw(a) for a in y], stored_b, stored_w

        rings = (state["stored_b"], state["stored_w"]) if store else ([], [])
        carry = (self.input_of(state, row), *rings)
        y, stored_b, stored_w = self.over_layers(body, row["chunk"], carry)
        return state | ({"stored_b": stored_b, "stored_w": stored_w} if store else {}), y

    def forward(self, state: State, row: Row) -> tuple[State, list]:
        """F: gives the activation to send."""
        state, y = self.run_layers(state, row, store=not self.program.schedule.recomputes)
        if self.turns:
            state = state | {"inbox": buffers.put(state["inbox"], self.cook(y), row["out"])}
        last = self.is_part(self.program.schedule.num_virtual_stages - 1, row["chunk"])
        state = _cond("head", last, lambda state: self.run_head(state, row, y), lambda state: state, state)
        return state, y

    @property
    def turns(self) -> bool:
        """Whether a stage hands over to itself between parts of the model."""
        schedule = self.program.schedule
        places = [schedule.place_of(part)[0] for part in range(schedule.num_virtual_stages)]
        return any(a == b for a, b in pairwise(places))

    def run_head(self, state: State, row: Row, y: list) -> State:
        """Head and loss of one microbatch, forward and back; the cotangent of y goes to the inbox."""
        microbatch = self.microbatch(row["microbatch"])
        read = self.read(self.ends.head_reads)
        loss_sum, grads, ct = self.ends.head(read, self.cook(y), microbatch, self.total_weight)
        return state | {
            "inbox": put_cotangent(state["inbox"], self.x, ct, row["out"]),
            "outer_grads": self.add_outer(state["outer_grads"], self.ends.head_reads, grads),
            "loss": state["loss"] + loss_sum.astype(state["loss"].dtype),
        }

    def recompute(self, state: State, row: Row) -> tuple[State, tuple]:
        """R."""
        state, _ = self.run_layers(state, row, store=True)
        return state, ()

    def backward(self, state: State, row: Row) -> tuple[State, list]:
        """B: gives the cotangent to send."""
        ct = [self.cook(buffers.take(state["inbox"], row["ct"]))[i] for i in self.floats]
        split = self.program.schedule.splits_backward
        target = "kept" if split else "layer_grads"
        first_place = row["chunk"] * self.layout.places_per_chunk

        def body(carry: tuple, place: Any, params: list) -> tuple:
            ct, written = carry
            stored_b = buffers.get(state["stored_b"], self.layer.stored_b, row["stored_b"], place)
            stored_w = buffers.get(state["stored_w"], self.layer.stored_w, row["stored_w"], place)
            if split:
                dx, kept = self.layer.backward_input(params, stored_b, stored_w, ct)
                return dx, buffers.put(written, kept, row["kept"], place)
            dx, dp = self.layer.backward(params, stored_b, stored_w, ct)
            return dx, buffers.add_at(written, self.cut_grads(dp), first_place + place)

        dx, written = self.over_layers(body, row["chunk"], (ct, state[target]), back=True)
        state = state | {target: written}
        if self.turns:
            state = state | {"inbox": put_cotangent(state["inbox"], self.x, dx, row["out"])}
        first = self.is_part(0, row["chunk"])
        return _cond(
            "embed_back", first, lambda state: self.run_embed_back(state, row, dx), lambda state: state, state
        ), dx

    def run_embed_back(self, state: State, row: Row, dx: list) -> State:
        """The embedding's part of the backward pass."""
        microbatch = self.microbatch(row["microbatch"])
        grads = self.ends.embed_backward(self.read(self.ends.embed_reads), microbatch, dx)
        return state | {"outer_grads": self.add_outer(state["outer_grads"], self.ends.embed_reads, grads)}

    def read(self, places: Sequence[int]) -> list:
        """The outer params that an end of the model reads."""
        return [self.outer[i] for i in places]

    def weights(self, state: State, row: Row) -> tuple[State, tuple]:
        """W."""
        first_place = row["chunk"] * self.layout.places_per_chunk

        def body(grads: list, place: Any, params: list) -> list:
            stored_w = buffers.get(state["stored_w"], self.layer.stored_w, row["stored_w"], place)
            kept = buffers.get(state["kept"], self.layer.kept, row["kept"], place)
            dp = self.cut_grads(self.layer.backward_weights(params, stored_w, kept))
            return buffers.add_at(grads, dp, first_place + place)

        return state | {"layer_grads": self.over_layers(body, row["chunk"], state["layer_grads"])}, ()

    def cut_grads(self, dp: list) -> list:
        """The gradients of one layer as they are added up."""
        return jax.tree.leaves(self.scatter_layer(jax.tree.unflatten(self.layer_tree, dp)))

    @staticmethod
    def add_outer(totals: list, places: Sequence[int], grads: Sequence) -> list:
        """Adds gradients of those outer params that were read."""
        totals = list(totals)
        for i, g in zip(places, grads, strict=True):
            totals[i] = totals[i] + g.astype(totals[i].dtype)
        return totals
