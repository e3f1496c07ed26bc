"""The microbatches of the only stage, one or more, F and B of each in turn. B reads at once what F stores.

    layers written out    What a layer stores stays where it was computed. The sums of its gradients are arrays of its own, to
                          which XLA adds as it computes the products.
    a loop over layers    What layers store is stacked, and so are their sums, in the carry of the loop over microbatches. Each
                          trip writes what belongs to its layer in place.

Layers written out take less time: nothing is sliced out of a stack or written into one. But the more of them there are, the
longer they take to compile, so there may be ``MOST_WRITTEN_OUT``.

In a program that ``reduces``, the last microbatch is not in the loop over microbatches. Its B completes the sums of one layer
after another, and reduces each over the replicas while the next layer runs. That of a single microbatch always does: it is
compiled once in either case. At ZeRO 2 and 3 every microbatch reduces the gradients of a layer, and has no need of it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.dtypes import is_float, merge, num_bytes
from jaxpar.pipeline.buffers import State
from jaxpar.pipeline.layer import RESIDUALS
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.program import OpRow, Program
from jaxpar.pipeline.stage import Stage

# 80 layers take 70 to 90 CPU seconds to compile for GPUs, 126 take 80 to 140; a loop over any takes 7.
MOST_WRITTEN_OUT = 96

Arrays = list[jax.Array]


class Stored(NamedTuple):
    """What F of a microbatch keeps for B.

    Attributes:
        residuals: Of each layer.
        last_weights: The last layer's, which B reads first.
    """

    residuals: list
    last_weights: Arrays


def takes(zero: int, num_layers: int, num_microbatches: int) -> bool:
    """Returns whether microbatches of one stage run in turn: one alone, or any at ZeRO 3, only if layers are written out.

    A loop gains nothing for one microbatch. At ZeRO 3 XLA gathers the next layer beside the one that
    computes, but only in a loop of ``jax.lax.scan``.
    """
    return num_layers <= MOST_WRITTEN_OUT or (zero < 3 and num_microbatches > 1)


def num_cast_again(
    num_layers: int,
    num_microbatches: int,
    *,
    shards_sums_alone: bool,
    copied: int,
    stored: int,
) -> int:
    """Returns how many layers, the first, are cast in F and B of each microbatch; the others once for all microbatches.

    At ZeRO 2 copies of all layers take more memory than the sums of their gradients. So a third of the
    layers have none: the first, whose copies would wait longest between F and B. Where layers store
    less than the copies take, most memory is needed in the update, and this would not help.

    Args:
        num_layers: The number of layers.
        num_microbatches: The number of microbatches.
        shards_sums_alone: Whether sums of gradients are sharded, and params are not (ZeRO 2).
        copied: The bytes of the params of a layer that are cast, as they are then.
        stored: The bytes that a layer stores for B.
    """
    is_written_out = num_layers <= MOST_WRITTEN_OUT
    would_help = shards_sums_alone and copied < stored
    saves = is_written_out and num_microbatches > 1 and would_help
    return num_layers // 3 if saves else 0


def writes_out(program: Program, layout: LayerLayout) -> bool:
    """Returns whether the layers of a program are written out."""
    return program.is_in_turn and layout.num_layers <= MOST_WRITTEN_OUT


def accumulate_in_turn(stage: Stage) -> State:
    """Returns the sums over all microbatches, of a program that ``is_in_turn``."""
    is_written_out = writes_out(stage.program, stage.layers.layout)
    layers = _WrittenOut(stage) if is_written_out else _Loop(stage)
    tick = partial(_tick, stage, layers)
    reduces = stage.program.reduces
    num_looped = stage.program.schedule.num_ticks - reduces
    state = layers.first_state()
    if num_looped:
        state = jax.lax.fori_loop(0, num_looped, tick, state)
    if reduces:
        last = jnp.int32(num_looped)
        if num_looped:
            # XLA may otherwise run this F before the loop, and keep its residuals beside those of the loop.
            last, state = jax.lax.optimization_barrier((last, state))
        state = tick(last, state, reduces=True)
    return layers.with_stacked_sums(state)


def _tick(
    stage: Stage,
    layers: "_WrittenOut | _Loop",
    number: jax.Array,
    state: State,
    *,
    reduces: bool = False,
) -> State:
    """F and B of one microbatch; ``reduces`` says whether B reduces the sums of layers."""
    row = OpRow(True, number, chunk=jnp.int32(0), residuals_b=0, residuals_w=0)
    row = row._replace(reduces=reduces)
    ends = stage.ends
    microbatch = stage.microbatch(number)
    with jax.named_scope("F"):
        x = ends.embed(stage.embed, microbatch)
        state, y, stored = layers.forward(state, row, x)
    with jax.named_scope("head"):
        loss_sums, grads, ct = ends.head(stage.head, y, microbatch, stage.total_weight)
        # XLA would leave the gradients of the head to the end, and keep those of the logits. So layers
        # wait for the sums, and where collectives come first, for the gradients alone.
        numbers = list(grads)
        is_sent = [stage.zero[i].scatters_early for i in numbers]
        ct, own = _after(ct, list(grads.values()), is_sent)
        grads = dict(zip(numbers, own, strict=True))
        state = stage.add_head(True, state, row, loss_sums, grads, [])
        sums = [state.outer_grads[i] for i in numbers]
        ct, sums = _after(ct, sums, [not each for each in is_sent])
        outer = state.outer_grads | dict(zip(numbers, sums, strict=True))
        state = state._replace(outer_grads=outer)
    with jax.named_scope("B"):
        state, dx = layers.backward(state, row, ct, stored)
        if ends.embed_trains:
            state = stage.run_embed_back(True, state, row, dx)
    return state


class _WrittenOut:
    """Layers one after another; ``layer_grads`` of a State are then a list of arrays for each layer."""

    def __init__(self, stage: Stage) -> None:
        self.layer = stage.layer
        self.layers = stage.layers
        self.sums = stage.sums
        self.reduces = stage.program.reduces
        self.params = _unstacked(stage.layers.params, stage.layers.layout.num_layers)
        whole = jax.eval_shape(self.layer.fetch, self.params[0])
        shapes = lambda arrays: [each.shape for each in arrays]
        self.gathers = shapes(whole) != shapes(self.params[0])
        self.decodes = not all(map(is_float, self.params[0]))
        pairs = list(zip(stage.layers.given, self.params[0], strict=True))
        self.as_given = [i for i, (own, cast) in enumerate(pairs) if own.dtype == cast.dtype]
        stored = map(self.layer.split.shapes, RESIDUALS)
        self.num_cast_again = num_cast_again(
            len(self.params),
            stage.schedule.num_microbatches,
            shards_sums_alone=self.layer.zero.scatters_early and not self.gathers,
            copied=num_bytes(cast for own, cast in pairs if own.dtype != cast.dtype),
            stored=sum(map(num_bytes, stored)),
        )
        self.sent_by_head = [i for i in stage.ends.head_trains if stage.zero[i].scatters_early]

    def first_state(self) -> State:
        zeros = lambda total: jnp.zeros(total.shape, total.dtype)
        layer_grads, outer_grads, loss = jax.tree.map(zeros, self.sums)
        of_layers = _unstacked(layer_grads, len(self.params))
        return State([], [], of_layers, loss, outer_grads, [], [])

    def forward(self, state: State, row: OpRow, x: Arrays) -> tuple[State, Arrays, Stored]:
        residuals, sums, last = [], state.layer_grads, []
        if self.gathers:
            # XLA would run F of the next microbatch too, to gather weights for it.
            x, sums = jax.lax.optimization_barrier((x, sums))
        weights, x = self._fetch(0, x)
        for index in range(len(self.params)):
            ahead, x = self._fetch(index + 1, x)
            weights, x = self._to_decode(weights, x)
            x, *of_layer = self.layer.split.forward_and_store(weights, x)
            residuals.append(of_layer)
            last, weights = weights, ahead
        return state._replace(layer_grads=sums), x, Stored(residuals, last)

    def backward(
        self,
        state: State,
        row: OpRow,
        ct: Arrays,
        stored: Stored,
    ) -> tuple[State, Arrays]:
        weights = stored.last_weights
        # The head is above the last layer.
        sums = [*state.layer_grads, [state.outer_grads[i] for i in self.sent_by_head]]
        for index in reversed(range(len(self.params))):
            ahead, ct = self._fetch(index - 1, ct)
            # The sums of this layer and of the one above, whose gradients are under way.
            of_two = sums[index : index + 2]
            ct, of_two = self._backward_one(weights, stored.residuals[index], ct, of_two)
            sums[index : index + 2] = self._reduced(of_two) if row.reduces else of_two
            weights = ahead
        *of_layers, of_head = sums
        outer = state.outer_grads | dict(zip(self.sent_by_head, of_head, strict=True))
        return state._replace(layer_grads=of_layers, outer_grads=outer), ct

    def _fetch(self, index: int, beside: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the weights of a layer, none if there is none, and what the layer beside it reads.

        Weights that are gathered (ZeRO 3) wait for that. XLA would gather those of all layers at
        once, and keep those of F for B.
        """
        if not 0 <= index < len(self.params):
            return [], beside
        params, beside = self._params_of(index, beside)
        if self.gathers:
            params, beside = jax.lax.optimization_barrier((params, beside))
        return self.layer.fetch(params), beside

    def _params_of(self, index: int, beside: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the params of a layer, and what the layer beside it reads.

        A step makes an array of each param that it casts for all microbatches. XLA would do so with
        the others too, a second copy of all of them for the whole step, so these are sliced, and
        cast, where they are read.
        """
        params = self.params[index]
        read_here = range(len(params)) if index < self.num_cast_again else self.as_given
        if self.gathers or not read_here:
            return params, beside
        stacks = [self.layers.given[i] for i in read_here]
        stacks, beside = jax.lax.optimization_barrier((stacks, beside))
        pairs = zip(read_here, stacks, strict=True)
        own = [stack[index].astype(params[i].dtype) for i, stack in pairs]
        return merge(params, read_here, own), beside

    def _to_decode(self, weights: Arrays, beside: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the weights of a layer, which wait for what it reads if they are in codes.

        XLA would decode those of all layers at once, before the loop over microbatches.
        """
        if not self.decodes:
            return weights, beside
        return jax.lax.optimization_barrier((weights, beside))

    def _backward_one(
        self,
        weights: Arrays,
        residuals: list,
        ct: Arrays,
        sums_and_above: list[Arrays],
    ) -> tuple[Arrays, list[Arrays]]:
        """Returns the cotangent of a layer's input, and the sums, the first with its gradients."""
        sums, *above = sums_and_above
        # XLA would find what B recomputes in F, and store it.
        (for_b, for_w), ct = jax.lax.optimization_barrier((residuals, ct))
        weights, ct = self._to_decode(weights, ct)
        ct, grads = self.layer.split.backward(weights, for_b, for_w, ct)
        # XLA would leave gradients to the end, and keep what they read of all layers. So the layer
        # below waits for the sums, and where collectives come first, for the products alone.
        is_sent = [grad.shape != total.shape for grad, total in zip(grads, sums, strict=True)]
        if any(is_sent):
            # XLA would reduce the gradients of several layers as one, when the last of them are there.
            grads, above = jax.lax.optimization_barrier((grads, above))
        ct, grads = _after(ct, grads, is_sent)
        scattered = zip(sums, self.layer.add(grads), strict=True)
        sums = [total + grad.astype(total.dtype) for total, grad in scattered]
        ct, sums = _after(ct, sums, [not each for each in is_sent])
        return ct, [sums, *above]

    def _reduced(self, sums_and_above: list[Arrays]) -> list[Arrays]:
        """Returns the sums of a layer and of the one above, with the first reduced over the replicas."""
        # XLA would reduce the sums of several layers as one, when the last of them are there.
        sums, *above = jax.lax.optimization_barrier(sums_and_above)
        reduced = self.layer.finish([total[None] for total in sums])
        return [[total[0] for total in reduced], *above]

    def with_stacked_sums(self, state: State) -> State:
        by_array = [list(each) for each in zip(*state.layer_grads, strict=True)]
        if self.reduces:
            stacks = _stacked_in_turn(by_array)
        else:
            stacks = [jnp.stack(each) for each in by_array]
        return state._replace(layer_grads=stacks)


class _Loop:
    """A loop over layers; the buffers of a State have the one slot of residuals."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def first_state(self) -> State:
        return self.stage.first_state()._replace(inbox=[])

    def forward(self, state: State, row: OpRow, x: Arrays) -> tuple[State, Arrays, Stored]:
        layers, layer = self.stage.layers, self.stage.layer
        x = layer.without_keys(x)
        y, rings = layers.forward(row, x, state.residuals, store=True)
        return state.with_residuals(rings), layer.with_keys(y), Stored([], [])

    def backward(
        self,
        state: State,
        row: OpRow,
        ct: Arrays,
        stored: Stored,
    ) -> tuple[State, Arrays]:
        dx, layer_grads = self.stage.layers.backward(row, ct, state.residuals, state.layer_grads)
        return state._replace(layer_grads=layer_grads), dx

    def with_stacked_sums(self, state: State) -> State:
        return state


def _after(ct: Arrays, arrays: Arrays, which: list[bool]) -> tuple[Arrays, Arrays]:
    """Returns ct and arrays, of which ct waits for some."""
    chosen = [i for i, waits in enumerate(which) if waits]
    ct, waited = jax.lax.optimization_barrier((ct, [arrays[i] for i in chosen]))
    return ct, merge(arrays, chosen, waited)


def _stacked_in_turn(by_array: list[Arrays]) -> Arrays:
    """Returns stacks of arrays that are there at once, of one list after another.

    XLA would make all stacks first, beside all the arrays.
    """
    stacks: Arrays = []
    while by_array:
        arrays, *rest = by_array
        stack, by_array = jax.lax.optimization_barrier((jnp.stack(arrays), rest))
        stacks.append(stack)
    return stacks


def _unstacked(stacks: Arrays, count: int) -> list[Arrays]:
    return [[stack[index] for stack in stacks] for index in range(count)]
