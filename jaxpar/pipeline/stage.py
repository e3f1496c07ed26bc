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
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.backward.add_grads import add_grads
from jaxpar.mesh import TENSOR
from jaxpar.pipeline import buffers
from jaxpar.pipeline.buffers import State
from jaxpar.pipeline.control_flow import Mask, both, do_if, masked, stage_index, where
from jaxpar.pipeline.embed_and_head import Ends, Outer
from jaxpar.pipeline.layer import BUFFERS, Layer
from jaxpar.pipeline.layer_ops import LayerOps
from jaxpar.pipeline.program import OpRow, Program, Row, op_row
from jaxpar.pipeline.segments import Segment
from jaxpar.schedule import Schedule
from jaxpar.shard_map import whole_over_tensor
from jaxpar.zero import Zero

Embed = Callable[[Outer, PyTree], list]


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
        zero: What the stage exchanges with other replicas for each outer param that is trained.
    """

    program: Program
    ends: Ends
    layers: LayerOps
    embed: Outer
    head: Outer
    microbatches: PyTree
    total_weight: jax.Array
    sums: tuple[list, Outer, PyTree]
    zero: dict[int, Zero]

    @property
    def layer(self) -> Layer:
        """The functions of one layer."""
        return self.layers.layer

    @property
    def x(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the leaves of an activation."""
        return self.layer.x

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.program.schedule

    def first_state(self) -> State:
        """Empty buffers and zero sums. Where idle stages run every op, they read slots to which nothing was written."""
        slots = self.program.num_slots
        positions = self.layers.layout.positions_per_chunk
        shapes: dict[str, tuple] = {"inbox": (self.x, (slots["inbox"] + 1,))}
        for name in BUFFERS:
            of_layer = self.layer.split.shapes(name) if slots[name] else []
            shapes[name] = of_layer, (slots[name], positions)
        # XLA would replicate rings without initial values over an automatic axis.
        is_sharded = jax.sharding.get_abstract_mesh().shape[TENSOR] > 1
        rings = buffers.make_rings(shapes, clear=self.program.masks or is_sharded)
        zeros = lambda like: jnp.zeros(like.shape, like.dtype)
        layer_grads, outer_grads, loss = jax.tree.map(zeros, self.sums)
        return State(layer_grads=layer_grads, outer_grads=outer_grads, loss=loss, **rings)

    # -- a tick --------------------------------------------------------------------------------------------------------

    def tick(
        self,
        segment: Segment,
        number: jax.Array,
        state: State,
        row: Row,
        last: Row | None,
    ) -> State:
        """Runs the ops of one tick of a segment, then sends and receives; ``last`` is the row of the last stage."""
        blank = buffers.zeros(self.x)
        rows = self._rows(segment, row, last)
        sends = {"F": blank, "B": [blank[i] for i in self.layer.floats]}
        has_links = self.schedule.num_stages > 1
        arrived = None

        def transfer() -> dict[str, list]:
            return buffers.transfer(
                self.program, segment, number, self.x, row, sends["F"], sends["B"]
            )

        for name in segment.ops:
            if segment.merges and name == "F":
                continue  # beside B
            if segment.merges and name == "B":
                state, sends = self.forward_and_backward(state, rows["F"], rows["B"])
            elif name == "W" and has_links and self.program.masks:
                # The messages travel while W runs. Without the barrier XLA may wait for them before W.
                arrived = transfer()
                state, _ = self.run(name, rows[name], state, (), segment.masks(name))
                layer_grads, arrived = jax.lax.optimization_barrier((state.layer_grads, arrived))
                state = state._replace(layer_grads=layer_grads)
            else:
                unsent = sends.get(name, ())
                state, sends[name] = self.run(name, rows[name], state, unsent, segment.masks(name))
        if not has_links:
            return state
        arrived = transfer() if arrived is None else arrived
        inbox = buffers.receive(self.schedule, self.x, state.inbox, row, arrived)
        return state._replace(inbox=inbox)

    def _rows(self, segment: Segment, row: Row, last: Row | None) -> dict[str, OpRow]:
        """The row of each op of a segment."""
        rows = {name: op_row(row, name) for name in segment.ops}
        if self.program.reduces_in(segment):
            rows["B"] = rows["B"]._replace(reduces=True)
        if "F" in rows and segment.masks("F"):
            of_last = op_row(last, "F") if last else None
            rows["F"] = rows["F"]._replace(last=of_last, has_head=segment.has_head)
        return rows

    def run(
        self,
        name: str,
        row: OpRow,
        state: State,
        unsent: Any,
        masks: bool,
    ) -> tuple[State, Any]:
        """Runs an op, masked or under a branch; returns what it sends, or ``unsent`` where it is skipped."""
        ops = {"F": self.forward, "R": self.recompute, "B": self.backward, "W": self.weights}
        op = ops[name[0]]
        if masks:
            with jax.named_scope(name):
                return op(state, row)
        is_on = row._replace(on=True)
        carry = state, unsent
        return self.do_if(name, row.on, lambda carry: op(carry[0], is_on), carry)

    def do_if(self, name: str, on: Mask, op: Callable[[Any], Any], carry: Any) -> Any:
        """Returns ``op(carry)`` where ``on``, else ``carry``; ``Program.branch_shares`` says by ``name`` how often it is on."""
        with jax.named_scope(name):
            return do_if(on, op, carry, masks=self.program.masks)

    def at_end(
        self,
        name: str,
        here: Mask,
        on: Mask,
        op: Callable[[Mask, State], State],
        state: State,
    ) -> State:
        """Runs an end of the model, ``op(mask, state)``, on the one stage that holds it; ``here`` says whether this does."""
        if on is not True and self.ends.is_masked(name, self.program, self.layers.layout):
            with jax.named_scope(name):
                return op(both(here, on), state)
        run = lambda state: op(True, state)
        return self.do_if(name, both(here, on), run, state)

    def is_virtual_stage(self, virtual_stage: int, chunk: jax.Array) -> Mask:
        """Whether a chunk of this stage is the given virtual stage."""
        if self.schedule.num_virtual_stages == 1:
            return True
        stage, its_chunk = self.layers.layout.stage_and_chunk(virtual_stage)
        return (stage_index() == stage) & (chunk == its_chunk)

    @property
    def has_local_messages(self) -> bool:
        """Whether two virtual stages in succession are on the same stage, which then writes to its own inbox."""
        numbers = range(self.schedule.num_virtual_stages)
        stages = [self.schedule.stage_and_chunk(number)[0] for number in numbers]
        return any(a == b for a, b in pairwise(stages))

    def microbatch(self, index: jax.Array) -> PyTree:
        """One microbatch."""
        at = partial(jax.lax.dynamic_index_in_dim, index=index, axis=0, keepdims=False)
        return jax.tree.map(at, self.microbatches)

    # -- F and R -------------------------------------------------------------------------------------------------------

    def forward(self, state: State, row: OpRow) -> tuple[State, list]:
        """F: returns the activation to send."""
        stores = not (self.schedule.recomputes or self.schedule.is_forward)
        state, y = self.run_layers(state, row, self.ends.embed, store=stores)
        return self.after_layers(state, row, y)

    def recompute(self, state: State, row: OpRow) -> tuple[State, tuple]:
        """R."""
        state, _ = self.run_layers(state, row, self.ends.embed_again, store=True)
        return state, ()

    def run_layers(
        self,
        state: State,
        row: OpRow,
        embed: Embed,
        *,
        store: bool,
    ) -> tuple[State, list]:
        """Runs the layers of a chunk on its input, and stores their residuals if asked."""
        rings = state.residuals if store else ([], [])
        x = self.input_of(state, row, embed)
        y, rings = self.layers.forward(row, x, rings, store=store)
        return (state.with_residuals(rings) if store else state), y

    def input_of(self, state: State, row: OpRow, embed: Embed) -> list:
        """The input of F and R: the embedding on the first virtual stage, else the inbox."""
        is_first = self.is_virtual_stage(0, row.chunk)

        def embedded() -> list:
            x = embed(self.embed, self.microbatch(row.microbatch))
            return self.layer.without_keys(x)

        def received() -> list:
            x = buffers.get(state.inbox, self.x, row.x)
            return self.layer.without_keys(x)

        with jax.named_scope("embed"):
            if self.program.masks and self.ends.is_masked(
                "embed", self.program, self.layers.layout
            ):
                # The other stages wait for the first one anyway.
                return where(is_first, embedded(), received())
            here = both(is_first, row.on)
            whole = lambda: list(map(whole_over_tensor, embedded()))
            return jax.lax.cond(here, whole, received)

    def after_layers(self, state: State, row: OpRow, y: list) -> tuple[State, list]:
        """F after the last layer of a chunk: the message to a virtual stage on the same stage, or the head."""
        if self.has_local_messages:
            inbox = buffers.put(state.inbox, self.layer.with_keys(y), row.out)
            state = state._replace(inbox=inbox)
        if not row.has_head:
            return state, y
        if row.last is not None and "head" not in self.program.skips:
            return self.run_part_of_head(state, row, row.last, y), y
        last = self.is_virtual_stage(self.schedule.num_virtual_stages - 1, row.chunk)
        run_head = lambda on, state: self.run_head(on, state, row, y)
        return self.at_end("head", last, row.on, run_head, state), y

    def run_head(self, on: Mask, state: State, row: OpRow, y: list) -> State:
        """Runs head and loss of one microbatch forward and backward; the cotangent of y goes to the inbox."""
        microbatch = self.microbatch(row.microbatch)
        y = self.layer.with_keys(y)
        result = self.ends.head(self.head, y, microbatch, self.total_weight)
        return self.add_head(on, state, row, *result)

    def run_part_of_head(self, state: State, row: OpRow, last: OpRow, y: list) -> State:
        """Runs this stage's part of the head of the microbatch of which the last stage runs F, in the row ``last``."""
        parts = self.ends.parts
        assert parts is not None, "a head that is shared has parts"
        on = last.on & (last.chunk == self.schedule.num_chunks - 1)

        def of_last_stage(leaf: jax.Array) -> jax.Array:
            is_last = stage_index() == self.schedule.num_stages - 1
            return parts.scatter(jnp.where(is_last, leaf, 0))

        def own_part(leaf: jax.Array) -> jax.Array:
            return parts.of_stage(leaf, stage_index())

        with jax.named_scope("head"):
            given = [of_last_stage(a) if parts.is_split(a) else a for a in self.layer.with_keys(y)]
            microbatch = jax.tree.map(own_part, self.microbatch(last.microbatch))
            loss_sums, grads, ct = self.ends.head(self.head, given, microbatch, self.total_weight)
            ct = [parts.gather(each) for each in ct]
            return self.add_head(on, state, row, loss_sums, grads, ct)

    def add_head(
        self,
        on: Mask,
        state: State,
        row: OpRow,
        loss_sums: PyTree,
        grads: Outer,
        ct: list,
    ) -> State:
        """Adds what the head returns to the sums; the cotangent of y goes to the inbox."""

        def add(total: jax.Array, own: jax.Array) -> jax.Array:
            (own,) = masked(on, [own])
            return total + own.astype(total.dtype)

        inbox, outer = state.inbox, state.outer_grads
        if ct:
            # Where this is off, its slot is the spare one, which no op that is on reads.
            inbox = buffers.put_cotangent(inbox, self.x, ct, row.out)
        added = {i: add(outer[i], self.zero[i].add(grad)) for i, grad in grads.items()}
        loss = jax.tree.map(add, state.loss, loss_sums)
        return state._replace(inbox=inbox, outer_grads=outer | added, loss=loss)

    # -- B and W -------------------------------------------------------------------------------------------------------

    def backward(self, state: State, row: OpRow) -> tuple[State, list]:
        """B: returns the cotangent to send."""
        ct = self.cotangent(state, row)
        if self.schedule.splits_backward:
            dx, ring = self.layers.backward_input(row, ct, state.residuals, state.cotangents_w)
            state = state._replace(cotangents_w=ring)
        else:
            dx, sums = self.layers.backward(row, ct, state.residuals, state.layer_grads)
            state = state._replace(layer_grads=sums)
        return self.before_layers(state, row, dx)

    def cotangent(self, state: State, row: OpRow) -> list:
        """The input of B, for the float leaves of x."""
        leaves = self.layer.with_keys(buffers.take(state.inbox, row.ct))
        return [leaves[i] for i in self.layer.floats]

    def before_layers(self, state: State, row: OpRow, dx: list) -> tuple[State, list]:
        """B before the first layer of a chunk: the message to a virtual stage on the same stage, or the embedding."""
        if self.has_local_messages:
            inbox = buffers.put_cotangent(state.inbox, self.x, dx, row.out)
            state = state._replace(inbox=inbox)
        if not self.ends.embed_trains:
            return state, dx
        first = self.is_virtual_stage(0, row.chunk)
        embed_back = lambda on, state: self.run_embed_back(on, state, row, dx)
        return self.at_end("embed_back", first, row.on, embed_back, state), dx

    def run_embed_back(self, on: Mask, state: State, row: OpRow, dx: list) -> State:
        """Runs the backward pass of the embedding."""
        outer = state.outer_grads
        scattered = {i for i in self.ends.embed_trains if self.zero[i].scatters_early}
        # Rows that were looked up are added to whole arrays: to the sums, or to zeros, of which each replica adds its shard.
        zeros = {i: jnp.zeros(self.embed[i].shape, outer[i].dtype) for i in scattered}
        totals = {i: outer[i] for i in self.ends.embed_trains} | zeros
        given = self.embed, self.microbatch(row.microbatch), dx
        select = partial(masked, on)
        grads = add_grads(totals, self.ends.embed_backward, *given, select=select)
        sums = {i: outer[i] + self.zero[i].add(grads[i]) for i in scattered}
        return state._replace(outer_grads=outer | grads | sums)

    def weights(self, state: State, row: OpRow) -> tuple[State, tuple]:
        """W."""
        stored = state.residuals_w, state.cotangents_w
        sums = self.layers.weights(row, *stored, state.layer_grads)
        return state._replace(layer_grads=sums), ()

    # -- F beside B ----------------------------------------------------------------------------------------------------

    def forward_and_backward(
        self,
        state: State,
        forward: OpRow,
        backward: OpRow,
    ) -> tuple[State, dict[str, list]]:
        """Runs F of one microbatch and the complete B of another in one loop over the layers; returns what they send, by op."""
        ct = self.cotangent(state, backward)
        x = self.input_of(state, forward, self.ends.embed)
        y, dx, rings, sums = self.layers.forward_and_backward(
            forward,
            backward,
            x,
            ct,
            state.residuals,
            state.layer_grads,
            store=not self.schedule.recomputes,
        )
        state = state.with_residuals(rings)._replace(layer_grads=sums)
        state, y = self.after_layers(state, forward, y)
        state, dx = self.before_layers(state, backward, dx)
        return state, {"F": y, "B": dx}
