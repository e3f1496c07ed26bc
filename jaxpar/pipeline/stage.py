"""The ops of one stage in one tick of the SPMD executor.

    F  if on: read the inbox (or embed), run the layers, store their residuals; the last virtual stage also runs the head and
       the loss, and writes the cotangent to its own inbox
    R  if on: run the layers again from the inbox, and store their residuals
    B  if on: read the cotangent, run the layers backward; the first virtual stage also runs the embedding backward
    W  if on: add the gradients of the weights
    send right, send left: a collective-permute over ``stage`` from the stages that send, before W in a program that masks, if
       W is an op of its own, else at the end; what arrives is written to the inbox at the end. Where the stages share the head
       they run it meanwhile

``jax.grad`` never sees the pipeline: each op calls one of the functions into which ``backward/split.py`` splits the vjp of one
layer. In a masked tick every stage runs every op, and the results of an idle stage are discarded by ``where``, never multiplied
by 0, since they may be NaN. In other ticks ``cond`` skips an op that is off, with its collectives of tensor parallelism; so it
does in every tick where the op may not run on what an idle stage holds (``Program.skips``).
Embedding and head belong to one stage each; ``Ends.is_masked`` says when they are masked and when skipped. In masked
ticks each stage runs a part of the head, if it has parts (``head_parts.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.backward.add_grads import add_grads
from jaxpar.mesh import TENSOR
from jaxpar.pipeline import buffers
from jaxpar.pipeline.control_flow import Mask, both, do_if, masked, stage_index, where
from jaxpar.pipeline.embed_and_head import Ends, Outer
from jaxpar.pipeline.layer import BUFFERS, Layer
from jaxpar.pipeline.layer_ops import LayerOps, Rings
from jaxpar.pipeline.program import OpRow, Program, Row, Segment, op_row
from jaxpar.shard_map import whole_over_tensor

Embed = Callable[[Outer, PyTree], list]


class State(NamedTuple):
    """The buffers and sums of a stage. Buffers are lists of arrays ``[slots, ...]``, or for layers ``[slots, positions, ...]``.

    Attributes:
        cotangents_w: Values of B for W.
        inbox: Activations and cotangents.
        layer_grads: Sums of gradients ``[num_chunks * positions_per_chunk, ...]``.
        loss: ``(loss_sum, further sums of the loss)``.
        outer_grads: Sums of gradients, by the number of the param's leaf; none of frozen params.
        residuals_b: Values of the forward pass for B alone.
        residuals_w: Values of it for W.
    """

    cotangents_w: list
    inbox: list
    layer_grads: list
    loss: PyTree
    outer_grads: Outer
    residuals_b: list
    residuals_w: list

    @property
    def residuals(self) -> tuple[list, list]:
        """Both buffers of values of the forward pass."""
        return self.residuals_b, self.residuals_w

    def with_residuals(self, rings: Rings) -> "State":
        """Returns the state with other ``residuals``."""
        residuals_b, residuals_w = rings
        return self._replace(residuals_b=residuals_b, residuals_w=residuals_w)


@dataclass(frozen=True)
class Stage:
    """What a stage needs in every tick.

    Attributes:
        program: The compiled schedule.
        ends: Embedding and head.
        layers: The layers.
        embed: The outer params that the embedding reads.
        head: Those that the head reads, in the dtypes in which it takes them.
        microbatches: ``[num_microbatches, rows, ...]``.
        total_weight: The weight of the whole batch.
        sums: The shapes of ``layer_grads``, ``outer_grads`` and ``loss`` of a State.
    """

    program: Program
    ends: Ends
    layers: LayerOps
    embed: Outer
    head: Outer
    microbatches: PyTree
    total_weight: jax.Array
    sums: tuple[list, Outer, PyTree]

    @property
    def layer(self) -> Layer:
        """The functions of one layer."""
        return self.layers.layer

    @property
    def x(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the leaves of an activation."""
        return self.layer.x

    def first_state(self) -> State:
        """Empty buffers and zero sums. Where idle stages run every op, they read slots to which nothing was written."""
        slots, positions = self.program.num_slots, self.layers.layout.positions_per_chunk
        rings = {"inbox": (self.x, (slots["inbox"] + 1,))} | {
            name: (self.layer.split.shapes(name) if slots[name] else [], (slots[name], positions)) for name in BUFFERS
        }
        # XLA would replicate rings without initial values over an automatic axis.
        clear = self.program.masks or jax.sharding.get_abstract_mesh().shape[TENSOR] > 1
        rings = buffers.make_rings(rings, clear=clear)
        layer_grads, outer_grads, loss = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.sums)
        return State(layer_grads=layer_grads, outer_grads=outer_grads, loss=loss, **rings)

    def tick(self, segment: Segment, number: jax.Array, state: State, row: Row, last: Row | None) -> State:
        """Runs the ops of one tick of a segment, then sends and receives; ``last`` is the row of the last stage."""
        blank = buffers.zeros(self.x)
        sends = {"F": blank, "B": [blank[i] for i in self.layer.floats]}
        over_links = partial(buffers.transfer, self.program, segment, number, self.x, row)
        early, arrived = self.program.masks and self.program.schedule.num_stages > 1, None
        rows = {name: op_row(row, name) for name in segment.ops}
        if self.program.reduces_in(segment):
            rows["B"] = rows["B"]._replace(reduces=True)
        if "F" in rows and segment.masks("F"):
            rows["F"] = rows["F"]._replace(last=op_row(last, "F") if last else None, has_head=segment.has_head)
        for name in segment.ops:
            if name == "W" and early:
                # The messages travel while W runs. Without the barrier below XLA may wait for them before W.
                arrived = over_links(sends["F"], sends["B"])
            if segment.merges and name in "FB":
                if name == "B":
                    state, sends = self.forward_and_backward(state, rows["F"], rows["B"])
            else:
                state, sends[name] = self.run(name, rows[name], state, sends.get(name, ()), segment.masks(name))
            if name == "W" and early:
                layer_grads, arrived = jax.lax.optimization_barrier((state.layer_grads, arrived))
                state = state._replace(layer_grads=layer_grads)
        if self.program.schedule.num_stages == 1:
            return state
        if arrived is None:
            arrived = over_links(sends["F"], sends["B"])
        return state._replace(inbox=buffers.receive(self.program.schedule, self.x, state.inbox, row, arrived))

    def run(self, name: str, row: OpRow, state: State, blank: Any, masks: bool) -> tuple[State, Any]:
        """Runs an op, masked or under a branch; returns what it sends, or ``blank`` where it is skipped."""
        op = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}[name[0]]
        if masks:
            with jax.named_scope(name):
                return op(state, row)
        return self.do_if(name, row.on, lambda carry: op(carry[0], row._replace(on=True)), (state, blank))

    def do_if(self, name: str, on: Mask, op: Callable[[Any], Any], carry: Any) -> Any:
        """Returns ``op(carry)`` where ``on``, else ``carry``; ``Program.branch_shares`` says by ``name`` how often it is on."""
        with jax.named_scope(name):
            return do_if(on, op, carry, masks=self.program.masks)

    def at_end(self, name: str, here: Mask, on: Mask, op: Callable[[Mask, State], State], state: State) -> State:
        """Runs an end of the model, ``op(mask, state)``, on the one stage that holds it; ``here`` says whether this does."""
        if on is not True and self.ends.is_masked(name, self.program, self.layers.layout):
            with jax.named_scope(name):
                return op(both(here, on), state)
        return self.do_if(name, both(here, on), lambda state: op(True, state), state)

    def microbatch(self, index: jax.Array) -> PyTree:
        """One microbatch."""
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.microbatches)

    def is_virtual_stage(self, virtual_stage: int, chunk: jax.Array) -> Mask:
        """Whether a chunk of this stage is the given virtual stage."""
        if self.program.schedule.num_virtual_stages == 1:
            return True
        stage, its_chunk = self.layers.layout.stage_and_chunk(virtual_stage)
        return (stage_index() == stage) & (chunk == its_chunk)

    def input_of(self, state: State, row: OpRow, embed: Embed) -> list:
        """The input of F and R: the embedding on the first virtual stage, else the inbox."""
        is_first = self.is_virtual_stage(0, row.chunk)
        args = lambda: (self.embed, self.microbatch(row.microbatch))
        embedded = lambda: self.layer.without_keys(embed(*args()))
        received = lambda: self.layer.without_keys(buffers.get(state.inbox, self.x, row.x))
        with jax.named_scope("embed"):
            if self.program.masks and self.ends.is_masked("embed", self.program, self.layers.layout):
                # The other stages wait for the first one anyway.
                return where(is_first, embedded(), received())
            return jax.lax.cond(both(is_first, row.on), lambda: list(map(whole_over_tensor, embedded())), received)

    def run_layers(
        self, state: State, row: OpRow, embed: Embed, *, store: bool
    ) -> tuple[State, list]:
        """Runs the layers of a chunk on its input, and stores their residuals if asked."""
        rings = state.residuals if store else ([], [])
        x = self.input_of(state, row, embed)
        y, rings = self.layers.forward(row, x, rings, store=store)
        return (state.with_residuals(rings) if store else state), y

    def forward(self, state: State, row: OpRow) -> tuple[State, list]:
        """F: returns the activation to send."""
        stores = not (self.program.schedule.recomputes or self.program.schedule.is_forward)
        state, y = self.run_layers(state, row, self.ends.embed, store=stores)
        return self.after_layers(state, row, y)

    def after_layers(self, state: State, row: OpRow, y: list) -> tuple[State, list]:
        """F after the last layer of a chunk: the message to a virtual stage on the same stage, or the head."""
        if self.has_local_messages:
            state = state._replace(inbox=buffers.put(state.inbox, self.layer.with_keys(y), row.out))
        if not row.has_head:
            return state, y
        if row.last is not None and "head" not in self.program.skips:
            return self.run_part_of_head(state, row, row.last, y), y
        last = self.is_virtual_stage(self.program.schedule.num_virtual_stages - 1, row.chunk)
        return self.at_end("head", last, row.on, lambda on, state: self.run_head(on, state, row, y), state), y

    @property
    def has_local_messages(self) -> bool:
        """Whether two virtual stages in succession are on the same stage, which then writes to its own inbox."""
        schedule = self.program.schedule
        stages = [schedule.stage_and_chunk(v)[0] for v in range(schedule.num_virtual_stages)]
        return any(a == b for a, b in pairwise(stages))

    def run_head(self, on: Mask, state: State, row: OpRow, y: list) -> State:
        """Runs head and loss of one microbatch forward and backward; the cotangent of y goes to the inbox."""
        microbatch = self.microbatch(row.microbatch)
        result = self.ends.head(self.head, self.layer.with_keys(y), microbatch, self.total_weight)
        return self.add_head(on, state, row, *result)

    def run_part_of_head(self, state: State, row: OpRow, last: OpRow, y: list) -> State:
        """Runs this stage's part of the head of the microbatch of which the last stage runs F, in the row ``last``."""
        parts, stage = self.ends.parts, self.program.schedule.num_stages - 1
        assert parts is not None, "a head that is shared has parts"
        on = last.on & (last.chunk == self.program.schedule.num_chunks - 1)
        with jax.named_scope("head"):
            of_last = lambda a: parts.scatter(jnp.where(stage_index() == stage, a, 0))
            given = [of_last(a) if parts.is_split(a) else a for a in self.layer.with_keys(y)]
            microbatch = jax.tree.map(lambda a: parts.of_stage(a, stage_index()), self.microbatch(last.microbatch))
            loss_sums, grads, ct = self.ends.head(self.head, given, microbatch, self.total_weight)
            return self.add_head(on, state, row, loss_sums, grads, [parts.gather(each) for each in ct])

    def add_head(self, on: Mask, state: State, row: OpRow, loss_sums: PyTree, grads: Outer, ct: list) -> State:
        """Adds what the head returns to the sums; the cotangent of y goes to the inbox."""

        def add(total: jax.Array, own: jax.Array) -> jax.Array:
            (own,) = masked(on, [own])
            return total + own.astype(total.dtype)

        inbox, outer = state.inbox, state.outer_grads
        if ct:
            # Where this is off, its slot is the spare one, which no op that is on reads.
            inbox = buffers.put_cotangent(inbox, self.x, ct, row.out)
        added = {i: add(outer[i], grad) for i, grad in grads.items()}
        loss = jax.tree.map(add, state.loss, loss_sums)
        return state._replace(inbox=inbox, outer_grads=outer | added, loss=loss)

    def recompute(self, state: State, row: OpRow) -> tuple[State, tuple]:
        """R."""
        state, _ = self.run_layers(state, row, self.ends.embed_again, store=True)
        return state, ()

    def backward(self, state: State, row: OpRow) -> tuple[State, list]:
        """B: returns the cotangent to send."""
        ct = self.cotangent(state, row)
        if self.program.schedule.splits_backward:
            dx, cotangents_w = self.layers.backward_input(row, ct, state.residuals, state.cotangents_w)
            state = state._replace(cotangents_w=cotangents_w)
        else:
            dx, layer_grads = self.layers.backward(row, ct, state.residuals, state.layer_grads)
            state = state._replace(layer_grads=layer_grads)
        return self.before_layers(state, row, dx)

    def cotangent(self, state: State, row: OpRow) -> list:
        """The input of B, for the float leaves of x."""
        return [self.layer.with_keys(buffers.take(state.inbox, row.ct))[i] for i in self.layer.floats]

    def before_layers(self, state: State, row: OpRow, dx: list) -> tuple[State, list]:
        """B before the first layer of a chunk: the message to a virtual stage on the same stage, or the embedding."""
        if self.has_local_messages:
            state = state._replace(inbox=buffers.put_cotangent(state.inbox, self.x, dx, row.out))
        if not self.ends.embed_trains:
            return state, dx
        first = self.is_virtual_stage(0, row.chunk)
        embed_back = lambda on, state: self.run_embed_back(on, state, row, dx)
        return self.at_end("embed_back", first, row.on, embed_back, state), dx

    def run_embed_back(self, on: Mask, state: State, row: OpRow, dx: list) -> State:
        """Runs the backward pass of the embedding."""
        outer, microbatch = state.outer_grads, self.microbatch(row.microbatch)
        totals = {i: outer[i] for i in self.ends.embed_trains}
        select = partial(masked, on)
        added = add_grads(totals, self.ends.embed_backward, self.embed, microbatch, dx, select=select)
        return state._replace(outer_grads=outer | added)

    def weights(self, state: State, row: OpRow) -> tuple[State, tuple]:
        """W."""
        layer_grads = self.layers.weights(row, state.residuals_w, state.cotangents_w, state.layer_grads)
        return state._replace(layer_grads=layer_grads), ()

    def forward_and_backward(self, state: State, forward: OpRow, backward: OpRow) -> tuple[State, dict[str, list]]:
        """Runs F of one microbatch and the complete B of another in one loop over the layers; returns what they send, by op."""
        ct = self.cotangent(state, backward)
        x = self.input_of(state, forward, self.ends.embed)
        stores = not self.program.schedule.recomputes
        y, dx, rings, layer_grads = self.layers.forward_and_backward(
            forward, backward, x, ct, state.residuals, state.layer_grads, store=stores
        )
        state = state.with_residuals(rings)._replace(layer_grads=layer_grads)
        state, y = self.after_layers(state, forward, y)
        state, dx = self.before_layers(state, backward, dx)
        return state, {"F": y, "B": dx}
