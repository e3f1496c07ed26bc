"""What stages send each other at the end of a tick, and the inbox in which it waits.

Two messages a tick, one to each neighbour, of one activation or cotangent each. In ``loop`` placement activations go right and
cotangents left; in ``v`` placement a chunk that runs back sends the other way round. A cotangent fills the float leaves of
x: the others (positions, masks, keys) need none.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.mesh import STAGE
from jaxpar.pipeline import buffers
from jaxpar.pipeline.program import sends_right
from jaxpar.pipeline.split import is_float
from jaxpar.schedule import Op, Schedule

Row = dict[str, jax.Array]


def exchange(schedule: Schedule, x: Sequence[Any], inbox: list, row: Row, y: list, dx: list) -> list:
    """Sends what F and B of this tick made to its neighbours; returns the inbox with what arrived.

    Args:
        schedule: The schedule.
        x: Shapes of the leaves of an activation.
        inbox: The inbox.
        row: This stage's row of the tables.
        y: The activation that F made, PRNG keys as their data.
        dx: The cotangent that B made, for the float leaves.
    """
    if schedule.placement == "loop":
        # What B made first: else XLA sees a write that need not wait for B's read of the inbox, and copies the inbox.
        inbox = put_cotangent(inbox, x, _to_left(schedule, dx), row["left"])
        return buffers.put(inbox, _to_right(schedule, y), row["right"])
    f_right = (row["F_on"] > 0) & _goes_right(schedule, "F", row)
    f_left = (row["F_on"] > 0) & ~_goes_right(schedule, "F", row)
    cotangents = iter(dx)
    back = [next(cotangents) if is_float(leaf) else blank for leaf, blank in zip(x, y, strict=True)]
    right = _to_right(schedule, [jnp.where(f_right, a, b) for a, b in zip(y, back, strict=True)])
    left = _to_left(schedule, [jnp.where(f_left, a, b) for a, b in zip(y, back, strict=True)])
    return buffers.put(buffers.put(inbox, right, row["right"]), left, row["left"])


def put_cotangent(inbox: list, x: Sequence[Any], ct: Sequence[Any], slot: jax.Array) -> list:
    """Returns the inbox with a cotangent in the float leaves of a slot."""
    values = iter(ct)
    return [
        buffers.put([array], [next(values)], slot)[0] if is_float(leaf) else array
        for array, leaf in zip(inbox, x, strict=True)
    ]


def _to_right(schedule: Schedule, message: list) -> list:
    pairs = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    return jax.lax.ppermute(message, STAGE, pairs + _around(schedule, (schedule.num_stages - 1, 0)))


def _to_left(schedule: Schedule, message: list) -> list:
    pairs = [(stage + 1, stage) for stage in range(schedule.num_stages - 1)]
    return jax.lax.ppermute(message, STAGE, pairs + _around(schedule, (0, schedule.num_stages - 1)))


def _around(schedule: Schedule, pair: tuple[int, int]) -> list[tuple[int, int]]:
    """The way from the last stage to the first and back, which only a loop of several chunks takes."""
    return [pair] if schedule.placement == "loop" and schedule.num_chunks > 1 else []


def _goes_right(schedule: Schedule, kind: str, row: Row) -> jax.Array:
    """Whether what this tick's F or B makes goes to the next stage."""
    by_chunk = jnp.asarray([sends_right(schedule, Op(kind, 0, chunk)) for chunk in range(schedule.num_chunks)])
    return by_chunk[row[f"{kind}_chunk"]]
