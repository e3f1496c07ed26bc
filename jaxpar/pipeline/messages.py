"""The messages that stages send each other in a tick, and the inbox that stores them.

In a tick a stage sends at most one message to each neighbour, with one activation or cotangent. In ``loop`` placement
activations are sent right and cotangents left; in ``v`` placement a chunk that runs back sends in the opposite directions. A
cotangent has arrays for the float leaves of x only: the others (positions, masks, keys) have no gradient.

The senders of a permutation are fixed at compilation, so there is one permutation for each set of stages that send in the same
tick, and each tick selects one. A link therefore transfers only the messages of the schedule, one per microbatch and direction.
In a program that masks, a tick does not select: every stage that sends in some tick of a segment sends in all its ticks, since
the host would wait for the selection, and XLA overlaps no transfer inside a branch. What the schedule does not send goes to the
spare slot of the inbox.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.dtypes import is_float
from jaxpar.mesh import STAGE
from jaxpar.pipeline import buffers
from jaxpar.pipeline.program import Program, Segment
from jaxpar.pipeline.timetable import sends_right
from jaxpar.schedule import Op, Schedule

Row = dict[str, jax.Array]


def transfer(
    program: Program, segment: Segment, tick: jax.Array, x: Sequence[Any], row: Row, y: list, dx: list
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
    f_right = (row["F_on"] > 0) & _goes_right(schedule, "F", row)
    f_left = (row["F_on"] > 0) & ~_goes_right(schedule, "F", row)
    cotangents = iter(dx)
    back = [next(cotangents) if is_float(leaf) else blank for leaf, blank in zip(x, y, strict=True)]
    return {
        "right": to("right", [jnp.where(f_right, a, b) for a, b in zip(y, back, strict=True)]),
        "left": to("left", [jnp.where(f_left, a, b) for a, b in zip(y, back, strict=True)]),
    }


def receive(schedule: Schedule, x: Sequence[Any], inbox: list, row: Row, arrived: Mapping[str, list]) -> list:
    """Returns the inbox with the messages that arrived in this tick."""
    if schedule.placement == "loop":
        # B's message first: otherwise XLA sees a write that need not wait for B's read of the inbox, and copies the inbox.
        inbox = put_cotangent(inbox, x, arrived["left"], row["left"])
        return buffers.put(inbox, arrived["right"], row["right"])
    return buffers.put(buffers.put(inbox, arrived["right"], row["right"]), arrived["left"], row["left"])


def put_cotangent(inbox: list, x: Sequence[Any], ct: Sequence[Any], slot: jax.Array) -> list:
    """Returns the inbox with a cotangent in the float leaves of a slot."""
    values = iter(ct)
    return [
        buffers.put([array], [next(values)], slot)[0] if is_float(leaf) else array
        for array, leaf in zip(inbox, x, strict=True)
    ]


def send(program: Program, segment: Segment, tick: jax.Array, way: str, message: list) -> list:
    """Sends a message "right" or "left"; returns the one that arrives on this stage, if none does a value that is not read."""
    sends, step = program.sends[way], 1 if way == "right" else -1
    num_stages = program.schedule.num_stages
    pairs = [[(stage, (stage + step) % num_stages) for stage in stages] for stages in sends.senders]
    permute = lambda pairs: lambda message: jax.lax.ppermute(message, STAGE, pairs) if pairs else message
    with jax.named_scope(f"send_{way}"):
        if program.masks:
            in_segment = {pair for which in sends.which[segment.start : segment.stop] for pair in pairs[which]}
            return permute(sorted(in_segment))(message)
        return jax.lax.switch(jnp.asarray(sends.which)[tick], [permute(each) for each in pairs], message)


def _goes_right(schedule: Schedule, kind: str, row: Row) -> jax.Array:
    """Whether the output of this tick's F or B is sent to the next stage."""
    by_chunk = jnp.asarray([sends_right(schedule, Op(kind, 0, chunk)) for chunk in range(schedule.num_chunks)])
    return by_chunk[row[f"{kind}_chunk"]]
