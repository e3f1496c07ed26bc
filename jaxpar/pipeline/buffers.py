"""The buffers of a stage, and the messages between stages that arrive in one of them, the inbox.

Buffers are arrays of slots in the carry of a loop, updated in place. The residuals of a layer are written at ``[slot,
position]`` while the loop over layers runs. Collecting them first and copying them to a slot afterwards would move every byte
twice.

In a tick a stage sends at most one message to each neighbour, with one activation or cotangent. In ``loop`` placement
activations are sent right and cotangents left; in ``v`` placement a chunk that runs back sends in the opposite directions. A
cotangent has arrays for the float leaves of x only: the others (positions, masks, keys) have no gradient.

The senders of a permutation are fixed at compilation, so there is one permutation for each set of stages that send in the same
tick, and each tick selects one. A link therefore transfers only the messages of the schedule, one per microbatch and direction.
In a program that masks, a tick does not select: every stage that sends in some tick of a segment sends in all its ticks, since
the host would wait for the selection, and XLA overlaps no transfer inside a branch. What the schedule does not send goes to the
spare slot of the inbox.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar._compat import empty
from jaxpar.dtypes import float_indices, is_float, merge, rewrap_key, unwrap_key, unwrapped_shape
from jaxpar.mesh import STAGE
from jaxpar.pipeline.program import Program, Row, op_row
from jaxpar.pipeline.segments import Segment
from jaxpar.pipeline.timetable import sends_right
from jaxpar.schedule import Op, Schedule

Arrays = list[Any]


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

    cotangents_w: Arrays
    inbox: Arrays
    layer_grads: Arrays
    loss: PyTree
    outer_grads: dict[int, Any]
    residuals_b: Arrays
    residuals_w: Arrays

    @property
    def residuals(self) -> tuple[Arrays, Arrays]:
        """Both buffers of values of the forward pass."""
        return self.residuals_b, self.residuals_w

    def with_residuals(self, rings: Sequence[Arrays]) -> "State":
        """Returns the state with other ``residuals``."""
        residuals_b, residuals_w = rings
        return self._replace(residuals_b=residuals_b, residuals_w=residuals_w)


def zeros(shapes: Sequence[Any]) -> Arrays:
    """Returns zeros for arrays of the given shapes."""
    unwrapped = map(unwrapped_shape, shapes)
    return [jnp.zeros(a.shape, a.dtype) for a in unwrapped]


def make_rings(
    rings: Mapping[str, tuple[Sequence[Any], Sequence[int]]],
    *,
    clear: bool,
) -> dict[str, Arrays]:
    """Returns rings by name: arrays ``[*dims, ...]`` for the shapes of what is stored at one index.

    Args:
        rings: By name ``(shapes, dims)``: the dims are the number of slots, and of positions if a slot has positions.
        clear: Whether slots hold zeros before they are written, for programs that read such slots. On a CPU it takes up to a
            tenth of a step's time to write them.
    """
    numbers = count()
    made: dict[str, Arrays] = {}
    for name, (shapes, dims) in rings.items():
        made[name] = []
        for stored in map(unwrapped_shape, shapes):
            shape = *dims, *stored.shape
            ring = (
                jnp.zeros(shape, stored.dtype)
                if clear
                else empty(shape, stored.dtype, next(numbers))
            )
            made[name].append(ring)
    return made


def put(ring: Arrays, values: Sequence[Any], *index: Any) -> Arrays:
    """Returns the ring with ``values`` written at an index of its leading dims."""
    pairs = zip(ring, map(unwrap_key, values), strict=True)
    return [_write(array, value, index) for array, value in pairs]


def get(ring: Arrays, shapes: Sequence[Any], *index: Any) -> Arrays:
    """Returns the values of a ring at an index of its leading dims (slot, position of a layer), as arrays like ``shapes``."""
    pairs = zip(ring, shapes, strict=True)
    return [rewrap_key(_read(array, index), like) for array, like in pairs]


def add_at(totals: Arrays, values: Sequence[Any], index: Any) -> Arrays:
    """Returns ``totals`` with ``values`` added at an index of their leading dim, in the dtype of the totals."""

    def add(total: Any, value: Any) -> Any:
        # The slice keeps its leading dim: with a reshape behind it XLA adds in two passes on GPUs.
        starts = _starts(total, (index,))
        before = jax.lax.dynamic_slice(total, starts, (1, *value.shape))
        after = before + value[None].astype(total.dtype)
        return jax.lax.dynamic_update_slice(total, after, starts)

    return [add(*each) for each in zip(totals, values, strict=True)]


def take(arrays: Sequence[Any], index: Any, *, as_stored: bool = False) -> Arrays:
    """Returns the arrays at an index of their leading dim.

    Args:
        arrays: The arrays.
        index: The index.
        as_stored: Whether XLA must read the values as they are in memory. Otherwise it may transpose whole arrays for products
            that read them; it does so on GPUs.
    """
    return [_read(array, (index,), as_stored) for array in arrays]


def _starts(array: Any, index: tuple) -> tuple:
    zero = jnp.int32(0)
    given = [jnp.asarray(i, jnp.int32) for i in index]
    return *given, *[zero] * (array.ndim - len(index))


def _write(array: Any, value: Any, index: tuple) -> Any:
    ones = (1,) * len(index)
    value = value.reshape(ones + value.shape)
    return jax.lax.dynamic_update_slice(array, value, _starts(array, index))


def _read(array: Any, index: tuple, as_stored: bool = False) -> Any:
    ones, rest = (1,) * len(index), array.shape[len(index) :]
    value = jax.lax.dynamic_slice(array, _starts(array, index), ones + rest)
    value = value.reshape(rest)
    return jax.lax.optimization_barrier(value) if as_stored else value


def transfer(
    program: Program,
    segment: Segment,
    tick: jax.Array,
    x: Sequence[Any],
    row: Row,
    y: list,
    dx: list,
) -> dict[str, list]:
    """Sends the outputs of F and B of this tick to the neighbours; returns by "left" and "right" what arrives on this stage.

    Args:
        program: The compiled schedule.
        segment: The segment of the tick.
        tick: The number of this tick, the same on every stage.
        x: Shapes of the leaves of an activation.
        row: This stage's row of the tables.
        y: The activation from F, PRNG keys as their data.
        dx: The cotangent from B, for the float leaves.
    """
    schedule, to = program.schedule, partial(send, program, segment, tick)
    if schedule.placement == "loop":
        return {"left": to("left", dx), "right": to("right", y)}
    f = op_row(row, "F")
    right_by_chunk = [
        sends_right(schedule, Op("F", 0, chunk)) for chunk in range(schedule.num_chunks)
    ]
    goes_right = jnp.asarray(right_by_chunk)[f.chunk]
    cotangents = iter(dx)
    back = [next(cotangents) if is_float(leaf) else blank for leaf, blank in zip(x, y, strict=True)]
    pairs = list(zip(y, back, strict=True))
    right = to("right", [jnp.where(f.on & goes_right, a, b) for a, b in pairs])
    left = to("left", [jnp.where(f.on & ~goes_right, a, b) for a, b in pairs])
    return {"right": right, "left": left}


def receive(
    schedule: Schedule,
    x: Sequence[Any],
    inbox: list,
    row: Row,
    arrived: Mapping[str, list],
) -> list:
    """Returns the inbox with the messages that arrived in this tick."""
    if schedule.placement == "loop":
        # B's message first: otherwise XLA sees a write that need not wait for B's read of the inbox, and copies the inbox.
        inbox = put_cotangent(inbox, x, arrived["left"], row["left"])
        return put(inbox, arrived["right"], row["right"])
    inbox = put(inbox, arrived["right"], row["right"])
    return put(inbox, arrived["left"], row["left"])


def put_cotangent(
    inbox: list,
    x: Sequence[Any],
    ct: Sequence[Any],
    slot: jax.Array,
) -> list:
    """Returns the inbox with a cotangent in the float leaves of a slot."""
    inbox, places = list(inbox), float_indices(x)
    written = put([inbox[i] for i in places], ct, slot)
    return merge(inbox, places, written)


def send(
    program: Program,
    segment: Segment,
    tick: jax.Array,
    way: str,
    message: list,
) -> list:
    """Sends a message "right" or "left"; returns the one that arrives on this stage, if none does a value that is not read."""
    sends, step = program.sends[way], 1 if way == "right" else -1
    num_stages = program.schedule.num_stages

    def permute(stages: Iterable[int]) -> Callable[[list], list]:
        pairs = [(stage, (stage + step) % num_stages) for stage in stages]
        return lambda message: jax.lax.ppermute(message, STAGE, pairs) if pairs else message

    with jax.named_scope(f"send_{way}"):
        if program.masks:
            in_ticks = sends.which[segment.start : segment.stop]
            in_segment = {stage for which in in_ticks for stage in sends.senders[which]}
            return permute(sorted(in_segment))(message)
        which = jnp.asarray(sends.which)[tick]
        return jax.lax.switch(which, list(map(permute, sends.senders)), message)
