"""Schedules to test with: all that are made by name, small, and random tables of ops, such as a user may write."""

import pytest
from hypothesis import strategies as st

from jaxpar.schedule import FORMS, NAMED, Op, Schedule

NAMES = [
    (name, num_chunks)
    for name, each in NAMED.items()
    for num_chunks in ((1, 2, 3) if each.takes_any_chunks else (each.num_chunks,))
]
WITHOUT = {("zb-v", "fused"), ("zb-v", "merged"), ("zb-h1", "merged")}  # there are no such forms
SMALL = [
    (name, num_chunks, form, remat)
    for name, num_chunks in NAMES
    for form in FORMS
    if (name, form) not in WITHOUT
    for remat in (False, True)
]
VARIANTS = pytest.mark.parametrize(("name", "num_chunks", "form", "remat"), SMALL)
variants = st.sampled_from(SMALL)


def random_schedule(rng, *, num_stages, num_microbatches, num_chunks, placement, kinds):
    """Any schedule: in each tick each stage runs some of the ops that it can, with any number of Ws."""
    table, done = [], set()
    total = len(kinds) * num_stages * num_microbatches * num_chunks
    empty = Schedule("random", num_stages, num_microbatches, num_chunks, (), placement)
    # With a table that holds these kinds, inputs_of knows whether there is an R.
    empty.__dict__["kinds"] = frozenset(kinds)
    while len(done) < total:
        before, tick = set(done), []
        for stage in range(num_stages):
            ops = []
            for kind in kinds:
                ready = [
                    Op(kind, m, chunk)
                    for m in range(num_microbatches)
                    for chunk in range(num_chunks)
                    if (stage, Op(kind, m, chunk)) not in done
                    and all(
                        needed in before or (needed[0] == stage and needed[1] in ops)
                        for needed in empty.inputs_of(stage, Op(kind, m, chunk))
                    )
                ]
                rng.shuffle(ready)
                chosen = ready[: rng.randint(0, 2) if kind == "W" else rng.randint(0, 1)]
                ops += chosen
                done.update((stage, op) for op in chosen)
            tick.append(tuple(ops))
        table.append(tuple(tick))
    return Schedule("random", num_stages, num_microbatches, num_chunks, tuple(table), placement)


def sends_twice_one_way(schedule):
    """Whether some stage has two messages for one direction in one tick."""
    for row in schedule.ops:
        for stage, ops in enumerate(row):
            ways = []
            for op in ops:
                part = schedule.virtual_stage(stage, op.chunk) + {"F": 1, "B": -1}.get(op.kind, 0)
                if (
                    op.kind in "FB"
                    and 0 <= part < schedule.num_virtual_stages
                    and schedule.stage_and_chunk(part)[0] != stage
                ):
                    ways.append(
                        (op.kind == "F") == (schedule.placement == "loop" or op.chunk % 2 == 0)
                    )
            if len(ways) != len(set(ways)):
                return True
    return False
