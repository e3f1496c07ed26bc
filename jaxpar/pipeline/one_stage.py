"""The microbatches of the only stage, F and B of each in turn. B reads at once what F stores, so nothing waits in a slot.

    layers written out    What a layer stores stays where it was computed. The sums of its gradients are arrays of its own, to
                          which XLA adds as it computes the products.
    a loop over layers    What layers store is stacked, and so are their sums, in the carry of the loop over microbatches. Each
                          trip writes what belongs to its layer in place.

Layers written out take less time: nothing is sliced out of a stack or written into one. But the more of them there are, the
longer they take to compile, so there may be ``MOST_WRITTEN_OUT``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.dtypes import merge, unwrap_key
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import OpRow, Program
from jaxpar.pipeline.stage import Stage, State

MOST_WRITTEN_OUT = 48


def writes_out(program: Program, layout: LayerLayout) -> bool:
    """Returns whether the layers of a program are written out."""
    return program.is_in_turn and layout.num_layers <= MOST_WRITTEN_OUT


def accumulate_in_turn(stage: Stage) -> State:
    """Returns the sums over all microbatches, of a program that ``is_in_turn``."""
    layers = _WrittenOut(stage) if writes_out(stage.program, stage.layers.layout) else _Loop(stage)
    tick = partial(_tick, stage, layers)
    state = jax.lax.fori_loop(0, stage.program.schedule.num_ticks, tick, layers.first_state())
    return layers.with_stacked_sums(state)


def _tick(stage: Stage, layers: "_WrittenOut | _Loop", number: jax.Array, state: State) -> State:
    """F and B of one microbatch."""
    row = OpRow(True, number, chunk=jnp.int32(0), residuals_b=0, residuals_w=0)
    ends, microbatch = stage.ends, stage.microbatch(number)
    with jax.named_scope("F"):
        x = ends.embed(stage.read(ends.embed_reads), microbatch)
        state, y, stored = layers.forward(state, row, x)
    with jax.named_scope("head"):
        loss_sums, grads, ct = ends.head(stage.head, y, microbatch, stage.total_weight)
        state = stage.add_head(True, state, row, loss_sums, grads, [])
    with jax.named_scope("B"):
        state, dx = layers.backward(state, row, ct, stored)
        return stage.run_embed_back(True, state, row, dx) if ends.embed_trains else state


class _WrittenOut:
    """Layers one after another; ``layer_grads`` of a State are then a list of arrays for each layer."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.params = _unstacked(stage.layers.params, stage.layers.layout.num_layers)

    def first_state(self) -> State:
        layer_grads, outer_grads, loss = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.stage.sums)
        return State([], [], _unstacked(layer_grads, len(self.params)), loss, outer_grads, [], [])

    def forward(self, state: State, row: OpRow, x: list) -> tuple[State, list, list]:
        stored = []
        for params in self.params:
            x, *residuals = self.stage.layer.forward_and_store(self.stage.layers.gather(params), x)
            stored.append(residuals)
        return state, x, stored

    def backward(self, state: State, row: OpRow, ct: list, stored: list) -> tuple[State, list]:
        sums = list(state.layer_grads)
        for index in reversed(range(len(sums))):
            # XLA would find what B recomputes in F, and store it.
            residuals, ct = jax.lax.optimization_barrier((stored[index], ct))
            ct, grads = self.stage.layer.backward(self.stage.layers.gather(self.params[index]), *residuals, ct)
            # Where collectives follow, XLA would leave these products to the end, and keep what they read of all layers.
            sent = [i for i, grad in enumerate(grads) if grad.shape != sums[index][i].shape]
            added = [i for i in range(len(grads)) if i not in sent]
            ct, grads = _after(ct, grads, sent)
            grads = zip(sums[index], self.stage.layers.scatter(grads), strict=True)
            ct, sums[index] = _after(ct, [total + grad.astype(total.dtype) for total, grad in grads], added)
        return state._replace(layer_grads=sums), ct

    def with_stacked_sums(self, state: State) -> State:
        return state._replace(layer_grads=[jnp.stack(each) for each in zip(*state.layer_grads, strict=True)])


class _Loop:
    """A loop over layers; the buffers of a State have the one slot of residuals."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def first_state(self) -> State:
        return self.stage.first_state()._replace(inbox=[])

    def forward(self, state: State, row: OpRow, x: list) -> tuple[State, list, list]:
        carry = [unwrap_key(a) for a in x], state.residuals_b, state.residuals_w
        body = self.stage.layer_forward(row, store=True)
        y, residuals_b, residuals_w = self.stage.layers.over_layers(body, row.chunk, carry)
        return state._replace(residuals_b=residuals_b, residuals_w=residuals_w), self.stage.with_keys(y), []

    def backward(self, state: State, row: OpRow, ct: list, stored: list) -> tuple[State, list]:
        return self.stage.backward_over_layers(state, row, ct)

    def with_stacked_sums(self, state: State) -> State:
        return state


def _after(ct: list, arrays: list, which: list[int]) -> tuple[list, list]:
    """Returns ct and arrays, of which ct waits for some."""
    ct, waits = jax.lax.optimization_barrier((ct, [arrays[i] for i in which]))
    return ct, merge(arrays, which, waits)


def _unstacked(stacks: list, count: int) -> list[list[Any]]:
    return [[stack[index] for stack in stacks] for index in range(count)]
