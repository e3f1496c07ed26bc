"""Tables of integers do what their schedule says: run tick by tick over names of values, each op reads exactly its own."""

import random
from dataclasses import replace
from itertools import zip_longest

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxpar.pipeline.program import NONE, compile_schedule, join_backward
from jaxpar.schedule import NAMED, SCHEDULES, Op, Schedule, make_schedule, simulate
from tests.support.schedules import WITHOUT, random_schedule, sends_twice_one_way

BUFFERS = ("inbox", "residuals_b", "residuals_w", "cotangents_w")


class Stage:
    """The buffers of one stage, holding names of values, and a record of when each was written and last read."""

    def __init__(self, program, index):
        self.program, self.index, self.time = program, index, 0
        self.held = {buffer: [None] * program.num_slots[buffer] for buffer in BUFFERS}
        self.lives = {buffer: {} for buffer in BUFFERS}

    def slot(self, table, tick):
        return int(self.program.tables[table][self.index, tick])

    def write(self, buffer, slot, value):
        assert 0 <= slot < len(self.held[buffer]), (
            f"{value} goes to slot {slot} of {buffer} of stage {self.index}"
        )
        self.held[buffer][slot] = value
        self.lives[buffer][value] = [self.time, self.time]

    def read(self, buffer, slot, value):
        assert 0 <= slot < len(self.held[buffer]), (
            f"{value} comes from slot {slot} of {buffer} of stage {self.index}"
        )
        found = self.held[buffer][slot]
        assert found == value, (
            f"stage {self.index} reads {found} for {value}, in slot {slot} of {buffer}"
        )
        self.lives[buffer][value][1] = self.time

    def peak(self, buffer):
        lives = self.lives[buffer].values()
        return max(
            (sum(start <= time <= end for start, end in lives) for time, _ in lives), default=0
        )


def run_op(program, stage, name, tick):
    """Runs one op of a stage; returns [(direction, message)]."""
    schedule, kind = program.schedule, name[0]
    m, chunk = stage.slot(f"{name}_microbatch", tick), stage.slot(f"{name}_chunk", tick)
    part, last = schedule.virtual_stage(stage.index, chunk), schedule.num_virtual_stages - 1
    use = lambda action, buffer, field, value: action(
        buffer, stage.slot(f"{name}_{field}", tick), value
    )
    if kind in "FR" and part > 0:
        use(stage.read, "inbox", "x", ("x", part - 1, m))
    if kind == ("R" if schedule.recomputes else "F"):
        for buffer in ("residuals_b", "residuals_w"):
            use(stage.write, buffer, buffer, (buffer, part, m))
    if kind == "B":
        use(stage.read, "inbox", "ct", ("ct", part, m))
        use(stage.read, "residuals_b", "residuals_b", ("residuals_b", part, m))
        use(stage.read, "residuals_w", "residuals_w", ("residuals_w", part, m))
        if schedule.splits_backward:
            use(stage.write, "cotangents_w", "cotangents_w", ("cotangents_w", part, m))
    if kind == "W":
        use(stage.read, "residuals_w", "residuals_w", ("residuals_w", part, m))
        use(stage.read, "cotangents_w", "cotangents_w", ("cotangents_w", part, m))
    if kind == "F" and part == last:
        use(stage.write, "inbox", "out", ("ct", part, m))
    if kind not in "FB" or part == (last if kind == "F" else 0):
        return []
    message = ("x", part, m) if kind == "F" else ("ct", part - 1, m)
    receiver, _ = schedule.stage_and_chunk(part + 1 if kind == "F" else part - 1)
    if receiver == stage.index:
        use(stage.write, "inbox", "out", message)
        return []
    # The ring of two has both ways to the one neighbour: which of them is the chunk's own direction.
    forward = (kind == "F") == (schedule.placement == "loop" or chunk % 2 == 0)
    return [("right" if forward else "left", message)]


def is_discarded(program, index, name, tick):
    """Whether an idle stage computes an op all the same."""
    (segment,) = [each for each in program.segments if each.start <= tick < each.stop]
    return segment.masked and name in segment.ops and not program.tables[f"{name}_on"][index, tick]


def discard(program, stage, name, tick):
    """Writes what an idle op computes, of no use to any other."""
    for field in ("residuals_b", "residuals_w", "cotangents_w"):
        if (slot := program.tables.get(f"{name}_{field}")) is not None and writes(
            program, name, field
        ):
            stage.write(field, int(slot[stage.index, tick]), ("discarded", field, name, tick))


def writes(program, name, field):
    """Whether an op writes to a buffer, not reads it."""
    schedule = program.schedule
    if field == "cotangents_w":
        return name == "B" and schedule.splits_backward
    return name == ("R" if schedule.recomputes else "F")


def run_tables(program):
    """Runs the tables as the executor does; fails where an op reads what is not its own. Returns the stages."""
    schedule = program.schedule
    stages = [Stage(program, index) for index in range(schedule.num_stages)]
    done = []
    for tick in range(schedule.num_ticks):
        sent = {}
        for stage in stages:
            for name in program.ops:
                stage.time += 1
                if is_discarded(program, stage.index, name, tick):
                    discard(program, stage, name, tick)
                elif program.tables[f"{name}_on"][stage.index, tick]:
                    for direction, message in run_op(program, stage, name, tick):
                        assert (stage.index, direction) not in sent, (
                            f"two messages {direction} in tick {tick}"
                        )
                        sent[stage.index, direction] = message
                    done.append((stage.index, name[0], stage.slot(f"{name}_microbatch", tick)))
            stage.time += 1
        for stage in stages:
            for direction, step in (("right", -1), ("left", 1)):
                source = (stage.index + step) % schedule.num_stages
                slot = stage.slot(direction, tick)
                assert (slot != NONE) == ((source, direction) in sent), (
                    f"a message {direction} to {stage.index} is lost"
                )
                if slot != NONE:
                    stage.write("inbox", slot, sent[source, direction])
    want = [
        (stage, op.kind, op.microbatch)
        for row in schedule.ops
        for stage, ops in enumerate(row)
        for op in ops
    ]
    assert sorted(done) == sorted(want), "an op of the schedule is missing from the tables"
    return stages


def check_program(schedule, *, masks=False):
    program = compile_schedule(schedule, masks=masks)
    stages = run_tables(program)
    for buffer in BUFFERS:
        peak = max(stage.peak(buffer) for stage in stages)
        assert program.num_slots[buffer] == peak, (
            f"{buffer} of {schedule.name}: slots, and values live at once"
        )
    return program


def named(name, num_stages, num_microbatches, form="published", remat=False):
    return make_schedule(name, num_stages, num_microbatches, form=form, remat=remat)


ALL = [
    (name, form, remat)
    for name in SCHEDULES
    for form in ("published", "unit", "fused")
    for remat in (False, True)
    if (name, form) not in WITHOUT
]


@pytest.mark.parametrize(("name", "form", "remat"), ALL)
def test_each_op_reads_its_own_values_from_as_few_slots_as_are_live_at_once(name, form, remat):
    for num_stages, num_microbatches in ((1, 2), (2, 1), (3, 2), (4, 9)):
        for masks in (False, True):
            check_program(named(name, num_stages, num_microbatches, form, remat), masks=masks)


@pytest.mark.parametrize(
    ("name", "form", "remat"), [case for case in ALL if not NAMED[case[0]].holds_all]
)
def test_slots_do_not_grow_with_the_number_of_microbatches(name, form, remat):
    few, many = (
        compile_schedule(named(name, 4, num_microbatches, form, remat))
        for num_microbatches in (12, 36)
    )
    assert few.num_slots == many.num_slots


@pytest.mark.parametrize(("name", "form", "remat"), ALL)
def test_stored_activations_have_the_slots_that_the_simulator_says(name, form, remat):
    schedule = named(name, 4, 8, form, remat)
    assert compile_schedule(schedule).num_slots["residuals_w"] == max(
        simulate(schedule).peak_residuals
    )


@pytest.mark.parametrize(("name", "form", "remat"), ALL)
def test_segments_hold_each_tick_once_and_mask_only_where_that_takes_no_longer(name, form, remat):
    schedule = named(name, 4, 9, form, remat)
    (whole,) = compile_schedule(schedule).segments
    assert (whole.start, whole.stop, whole.masked) == (0, schedule.num_ticks, False)
    program = compile_schedule(schedule, masks=True)
    assert [tick for each in program.segments for tick in range(each.start, each.stop)] == list(
        range(whole.stop)
    )
    length = lambda op: 2 if op == "B" and not schedule.splits_backward else 1
    for segment in program.segments:
        for tick in range(segment.start, segment.stop):
            on = {op: program.tables[f"{op}_on"][:, tick] for op in program.ops}
            assert {op for op in program.ops if on[op].any()} <= set(segment.ops)
            slowest = max(
                sum(length(op) * on[op][stage] for op in program.ops) for stage in range(4)
            )
            assert not segment.masked or sum(map(length, segment.ops)) == slowest


@pytest.mark.parametrize(
    ("name", "remat"), [(name, remat) for name, form, remat in ALL if form == "fused"]
)
def test_a_steady_state_in_fused_form_is_masked(name, remat):
    program = compile_schedule(named(name, 4, 12, "fused", remat), masks=True)
    longest = max(program.segments, key=lambda segment: segment.stop - segment.start)
    assert longest.masked
    assert len(program.segments) <= 5
    assert all(segment.masked for segment in program.segments) != NAMED[name].splits_backward


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        (name, remat)
        for name, form, remat in ALL
        if form == "fused" and not NAMED[name].splits_backward
    ],
)
def test_a_w_in_the_tick_of_its_b_is_joined_with_it(name, remat):
    schedule = named(name, 4, 12, "fused", remat)
    joined = join_backward(schedule)
    assert joined.kinds == schedule.kinds - {"W"}
    assert joined.ops == tuple(
        tuple(tuple(op for op in ops if op.kind != "W") for ops in tick) for tick in schedule.ops
    )
    program = check_program(joined)
    assert program.num_slots == compile_schedule(schedule).num_slots | {"cotangents_w": 0}


@pytest.mark.parametrize(
    ("name", "form"),
    [("1f1b", "unit"), ("1f1b", "published"), ("zb-h1", "fused"), ("zb-v", "unit")],
)
def test_a_w_in_another_tick_is_not_joined(name, form):
    schedule = named(name, 4, 12, form)
    assert join_backward(schedule) is schedule


def test_gpipe_keeps_every_microbatch_and_1f1b_one_a_stage():
    assert compile_schedule(named("gpipe", 4, 32)).num_slots["residuals_w"] == 32
    assert compile_schedule(named("1f1b", 4, 32)).num_slots["residuals_w"] == 4
    assert compile_schedule(named("1f1b", 4, 32)).num_slots["cotangents_w"] == 0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    num_stages=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    num_chunks=st.integers(1, 3),
    placement=st.sampled_from(["loop", "v"]),
    kinds=st.sampled_from(["FB", "FRB", "FBW", "FRBW"]),
)
def test_any_table_of_a_user_is_compiled_to_ops_that_read_their_own_values(
    seed, num_stages, num_microbatches, num_chunks, placement, kinds
):
    schedule = random_schedule(
        random.Random(seed),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        placement=placement,
        kinds=kinds,
    )
    schedule.check()
    if sends_twice_one_way(schedule):
        with pytest.raises(ValueError, match="one message each way"):
            compile_schedule(schedule)
    else:
        check_program(schedule)


def test_two_messages_one_way_in_a_tick_are_named():
    """In a V the F of an odd chunk goes back, as the B of an even one does."""

    def schedule(*together):
        start = [
            [Op("F", 0, 0), Op("F", 1, 0), Op("F", 0, 1)],
            [Op("F", 0, 0), Op("F", 0, 1), Op("F", 1, 0)],
        ]
        end = [Op("B", 0, 1), *together, Op("B", 1, 1), Op("B", 1, 0)]
        return Schedule.from_orders([[*start[0], *end], [*start[1], *end]], placement="v")

    check_program(schedule(Op("F", 1, 1), Op("B", 0, 0)))
    told = "one message each way in a tick; got F of microbatch 1, chunk 1 and B of microbatch 0, chunk 0 on stage 1 in tick 6"
    with pytest.raises(
        ValueError, match=f"{told}, both for stage 0. Give one of them a tick of its own"
    ):
        compile_schedule(schedule((Op("F", 1, 1), Op("B", 0, 0))))


def test_two_ops_of_a_kind_in_a_tick_are_named_and_two_w_are_run():
    def schedule(*last):
        orders = [[Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1), *last]]
        return Schedule.from_orders(orders)

    program = check_program(schedule((Op("W", 1), Op("W", 0))))
    assert program.ops == ("F", "B", "W", "W2")
    both = Schedule.from_orders([[(Op("F", 0), Op("F", 1)), Op("B", 0), Op("B", 1)]])
    with pytest.raises(
        ValueError,
        match=r"one F in a tick.* got a second, F of microbatch 1.* on stage 0 in tick 0",
    ):
        compile_schedule(both)


def test_a_table_that_breaks_a_dependency_is_named():
    late = Schedule(
        "custom",
        2,
        1,
        1,
        (((Op("F", 0),), (Op("F", 0),)), ((), (Op("B", 0),)), ((Op("B", 0),), ())),
    )
    with pytest.raises(
        ValueError,
        match=r"an op must come after what it needs.*F of microbatch 0, chunk 0 on stage 1 in tick 0",
    ):
        compile_schedule(late)


def test_a_wrong_slot_or_tick_is_noticed_here():
    """The simulation of this file is a test only if tables that are off by one fail it."""
    program = compile_schedule(named("1f1b", 3, 4))
    for table, values in program.tables.items():
        if "_on" in table or not (values != NONE).any():
            continue
        stage, tick = np.argwhere(values != NONE)[-1]
        off = {**program.tables, table: values.copy()}
        off[table][stage, tick] += 1
        with pytest.raises(AssertionError):
            run_tables(replace(program, tables=off))


def test_f_and_b_are_merged_where_no_stage_needs_one_for_the_other():
    merges = lambda schedule: [
        each.merges for each in compile_schedule(schedule, masks=True).segments
    ]
    for name, num_chunks in (("1f1b", 1), ("interleaved", 2)):
        for remat in (False, True):
            merged = make_schedule(name, 4, 12, num_chunks, form="merged", remat=remat)
            assert True in merges(merged)
            assert not any(each.merges for each in compile_schedule(merged).segments), (
                "stages skip idle ops"
            )
            fused = make_schedule(name, 4, 12, num_chunks, form="fused", remat=remat)
            assert True not in merges(join_backward(fused)), (
                "the last stage runs F and B of one microbatch in a tick"
            )
    assert True not in merges(make_schedule("1f1b", 4, 12, form="fused")), "B and W are apart"


@pytest.mark.parametrize(
    ("name", "form", "first"),
    [
        ("1f1b", "merged", 3),
        ("1f1b", "fused", 3),
        ("interleaved", "merged", 7),
        ("gpipe", "fused", 3),
    ],
)
def test_masked_ticks_before_the_first_head_have_none(name, form, first):
    program = compile_schedule(make_schedule(name, 4, 8, form=form), masks=True)
    without = [tick for each in program.segments if not each.has_head for tick in each.ticks]
    assert without == list(range(first))
    last, chunk = program.schedule.stage_and_chunk(program.schedule.num_virtual_stages - 1)
    assert not (program.tables["F_chunk"][last, :first] == chunk).any()
    assert all(
        each.has_head for each in compile_schedule(make_schedule(name, 4, 8, form=form)).segments
    )


def run_layers(program, num_layers=3):
    """Runs F and B layer by layer as the executor does; fails where B reads from a slot what is not its own."""
    for stage in range(program.schedule.num_stages):
        held = {}
        for segment, tick in ((each, tick) for each in program.segments for tick in each.ticks):
            of = {key: int(table[stage, tick]) for key, table in program.tables.items()}
            place = lambda op, layer, of=of: (
                of[f"{op}_residuals_w"],
                num_layers - 1 - layer if of[f"{op}_reversed"] else layer,
            )
            value = lambda op, layer, of=of: (of[f"{op}_microbatch"], of[f"{op}_chunk"], layer)
            forward = [("F", layer) for layer in range(num_layers)] if "F" in segment.ops else []
            backward = [("B", layer) for layer in reversed(range(num_layers))] if of["B_on"] else []
            pairs = zip_longest(backward, forward) if segment.merges else [forward + backward]
            for op, layer in (each for pair in pairs for each in pair if each):
                if op == "F":  # also what is discarded
                    held[place(op, layer)] = value(op, layer)
                else:
                    assert held[place(op, layer)] == value(op, layer), (
                        f"layer {layer} of stage {stage}, tick {tick}"
                    )


@pytest.mark.parametrize(
    ("name", "num_chunks", "num_stages", "num_microbatches"),
    [
        ("1f1b", 1, 1, 5),
        ("1f1b", 1, 2, 4),
        ("1f1b", 1, 4, 12),
        ("interleaved", 2, 2, 4),
        ("interleaved", 3, 4, 12),
    ],
)
def test_f_beside_b_takes_the_place_of_what_b_has_read(
    name, num_chunks, num_stages, num_microbatches
):
    made = lambda form: make_schedule(name, num_stages, num_microbatches, num_chunks, form=form)
    merged, fused = (
        compile_schedule(join_backward(made(form)), masks=True) for form in ("merged", "fused")
    )
    slots = [
        each.num_slots[buffer]
        for each in (merged, fused)
        for buffer in ("residuals_b", "residuals_w")
    ]
    assert len(set(slots)) == 1, (
        f"F runs ahead of B by one more microbatch, which needs no slot: {slots}"
    )
    run_layers(merged)
    assert "B_reversed" not in fused.tables
    with pytest.raises(AssertionError, match="layer"):
        run_layers(
            replace(
                merged,
                tables=merged.tables | {"B_reversed": np.zeros_like(merged.tables["B_reversed"])},
            )
        )
