"""A table of one's own: what check notices, and how bad input is named."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.schedule import (
    SCHEDULES,
    Costs,
    Op,
    Schedule,
    make_schedule,
    plot_timeline,
    render,
    simulate,
)
from tests.support.schedules import VARIANTS, variants
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]

# A table of one's own


HAND_WRITTEN = (
    ((Op("F", 0),), ()),
    ((Op("F", 1),), (Op("F", 0), Op("B", 0))),
    ((Op("B", 0),), (Op("F", 1), Op("B", 1))),
    ((Op("B", 1),), ()),
)


def test_a_hand_written_table_is_a_schedule():
    schedule = Schedule("mine", num_stages=2, num_microbatches=2, num_chunks=1, ops=HAND_WRITTEN)
    schedule.check()
    assert simulate(schedule).makespan == 9
    assert hash(schedule) == hash(replace(schedule))


def test_from_orders_runs_each_op_in_the_first_tick_that_it_can():
    orders = [
        [Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1)],
        [(Op("F", 0), Op("B", 0)), (Op("F", 1), Op("B", 1))],
    ]
    assert Schedule.from_orders(orders).ops == HAND_WRITTEN


def edited(schedule, take=(), put=()):
    """The schedule without the (stage, op) of `take` and with each (tick, stage, place, op) of `put`."""
    table = [
        [[op for op in ops if (s, op) not in take] for s, ops in enumerate(tick)]
        for tick in schedule.ops
    ]
    for tick, stage, place, op in put:
        table[tick][stage].insert(place, op)
    return replace(schedule, ops=tuple(tuple(map(tuple, tick)) for tick in table))


def moments(schedule):
    """The (tick, place in the tick) of each (stage, op)."""
    return {
        (stage, op): (tick, place)
        for tick, stages in enumerate(schedule.ops)
        for stage, ops in enumerate(stages)
        for place, op in enumerate(ops)
    }


def dependencies(schedule):
    """Each (stage, op) with each (stage, op) that it needs."""
    return [
        ((stage, op), needed)
        for stage, op in moments(schedule)
        for needed in schedule.inputs_of(stage, op)
    ]


def check_too_early(schedule):
    with pytest.raises(ValueError, match="an op must come after what it needs"):
        schedule.check()


@VARIANTS
def test_check_notices_an_op_that_is_gone(name, num_chunks, form, remat):
    schedule = make_schedule(name, 3, 3, num_chunks, form=form, remat=remat)
    for stage, op in moments(schedule):
        with pytest.raises(ValueError, match=f"got no {op} on stage {stage} in any"):
            edited(schedule, take=[(stage, op)]).check()


@VARIANTS
def test_check_notices_an_op_that_is_there_twice(name, num_chunks, form, remat):
    schedule = make_schedule(name, 3, 3, num_chunks, form=form, remat=remat)
    for (stage, op), (tick, _) in moments(schedule).items():
        first, last = sorted([tick, (tick + 3) % schedule.num_ticks])
        doubled = edited(schedule, put=[(first if first != tick else last, stage, 0, op)])
        with pytest.raises(
            ValueError, match=f"got {op} on stage {stage} in tick {first} and again in tick {last}"
        ):
            doubled.check()


@VARIANTS
def test_check_notices_an_op_that_changed_places_with_what_it_needs(name, num_chunks, form, remat):
    schedule = make_schedule(name, 3, 3, num_chunks, form=form, remat=remat)
    when = moments(schedule)
    for (stage, op), (source, needed) in dependencies(schedule):
        early, late = when[source, needed], when[stage, op]
        put = sorted([(*late[:1], source, late[1], needed), (*early[:1], stage, early[1], op)])
        check_too_early(edited(schedule, take=[(stage, op), (source, needed)], put=put))


@VARIANTS
def test_check_notices_an_op_in_the_tick_in_which_another_stage_makes_what_it_needs(
    name, num_chunks, form, remat
):
    schedule = make_schedule(name, 3, 3, num_chunks, form=form, remat=remat)
    when = moments(schedule)
    for (stage, op), (source, needed) in dependencies(schedule):
        if source != stage:
            tick = when[source, needed][0]
            check_too_early(edited(schedule, take=[(stage, op)], put=[(tick, stage, 99, op)]))


@given(variants, st.data())
@settings(max_examples=60, deadline=None)
def test_check_passes_the_tables_whose_ops_find_their_inputs_and_no_other(variant, data):
    name, num_chunks, form, remat = variant
    schedule = make_schedule(name, 3, 3, num_chunks, form=form, remat=remat)
    stage, op = data.draw(st.sampled_from(sorted(moments(schedule))))
    tick = data.draw(st.integers(0, schedule.num_ticks - 1))
    moved = edited(schedule, take=[(stage, op)], put=[(tick, stage, 99, op)])
    when = moments(moved)
    sound = all(
        when[source, needed] < moment if source == stage else when[source, needed][0] < moment[0]
        for (stage, op), moment in when.items()
        for source, needed in moved.inputs_of(stage, op)
    )
    if sound:
        moved.check()
    else:
        with pytest.raises(ValueError, match="an op must come after what it needs"):
            moved.check()


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_schedule("1F1B", 4, 8), ValueError, f"schedule must be one of {', '.join(SCHEDULES)}; "
         "got '1F1B'. Did you mean '1f1b'?"),
        (lambda: make_schedule("zbh1", 4, 8), ValueError, "Did you mean 'zb-h1'?"),
        (lambda: make_schedule("1f1b", 4, 8, form="fuse"), ValueError, "form must be one of published, unit, fused, "
         "merged; got 'fuse'. Did you mean 'fused'?"),
        (lambda: make_schedule("zb-v", 4, 8, form="fused"), ValueError, "form must be published or unit for zb-v, whose "
         "stages send two ways at once when fused; got form='fused'. Choose form='published', or zb-h1 or interleaved in "
         "fused form."),
        (lambda: make_schedule("1f1b", 0, 8), ValueError, "num_stages must be 1 or more; got num_stages=0. Choose "
         "num_stages=1 or more."),
        (lambda: make_schedule("1f1b", 4, -1), ValueError, "num_microbatches must be 1 or more; got num_microbatches=-1"),
        (lambda: make_schedule("interleaved", 4, 8, 0), ValueError, "num_chunks must be 1 or more; got num_chunks=0"),
        (lambda: make_schedule("zb-v", 4, 8, 1), ValueError, "zb-v must have 2 chunks a stage; got num_chunks=1. Choose "
         "num_chunks=2."),
        (lambda: make_schedule("1f1b", 4, 8, 2), ValueError, "1f1b must have 1 chunk a stage; got num_chunks=2. Choose "
         "num_chunks=1, or interleaved, which runs 2 chunks."),
        (lambda: make_schedule("zb-h1", 4, 8, 2), ValueError, "zb-h1 must have 1 chunk a stage; got num_chunks=2. Choose "
         "num_chunks=1, or zb-v, which runs 2 chunks."),
        (lambda: Schedule("mine", 2, 2, 1, HAND_WRITTEN, "x"), ValueError, "placement must be one of loop, v; got 'x'."),
        (lambda: Schedule("mine", 3, 2, 1, HAND_WRITTEN).check(), ValueError, "a tick must hold one tuple of ops a stage; "
         "got 2 in tick 0 with num_stages=3. Give idle stages an empty tuple."),
        (lambda: Schedule("mine", 1, 1, 1, (((Op("X", 0),),),)).check(), ValueError, "an op's kind must be one of F, R, B, "
         "W; got ('X', 0, 0) on stage 0 in tick 0."),
        (lambda: Schedule("mine", 1, 1, 1, (((Op("F", 1),),),)).check(), ValueError, "an op's microbatch must be one of "
         "the schedule's 1, counted from 0; got ('F', 1, 0) on stage 0 in tick 0."),
        (lambda: Schedule("mine", 1, 1, 1, (((Op("F", 0, 2),),),)).check(), ValueError, "an op's chunk must be one of the "
         "schedule's 1, counted from 0; got ('F', 0, 2) on stage 0 in tick 0."),
        (lambda: Schedule("mine", 1, 2, 1, (((Op("F", 0), Op("B", 0), Op("F", 1), Op("B", 1), Op("W", 0)),),)).check(),
         ValueError, "every stage must run W once for each microbatch and chunk; got no W of microbatch 1, chunk 0 on stage "
         "0 in any of 1 ticks. Add it, or take out every W."),
        (lambda: Schedule("mine", 1, 1, 1, (((Op("B", 0),),), ((Op("F", 0),),))).check(), ValueError, "an op must come "
         "after what it needs; got B of microbatch 0, chunk 0 on stage 0 in tick 0, which needs F of microbatch 0, chunk 0 "
         "on stage 0, run in tick 1. Move it to after it in tick 1, or later, or what it needs to an earlier "
         "tick."),
        (lambda: Schedule("mine", 2, 1, 1, (((Op("F", 0),), (Op("F", 0),)), ((), (Op("B", 0),)), ((Op("B", 0),), ()))).check(),
         ValueError, "an op must come after what it needs, a tick after if that is on another stage; got F of microbatch 0, "
         "chunk 0 on stage 1 in tick 0, which needs F of microbatch 0, chunk 0 on stage 0, run in tick 0. Move it to tick "
         "1 or later, or what it needs to an earlier tick."),
        (lambda: Schedule.from_orders([[Op("F", 0), Op("B", 0)], [Op("B", 0), Op("F", 0)]]), ValueError, "the orders of "
         "the stages must not wait for one another; got B of microbatch 0, chunk 0 on stage 0, which waits for B of "
         "microbatch 0, chunk 0 on stage 1, while no stage can continue. Move the awaited op earlier in its stage's order."),
        (lambda: simulate(make_schedule("1f1b", 2, 2), timing="slow"), ValueError, "timing must be one of free, lockstep; "
         "got 'slow'."),
        (lambda: simulate(make_schedule("1f1b", 2, 2), Costs(stage_scale=(1,))), ValueError, "stage_scale must have one "
         "factor a virtual stage; got 1 for 1f1b with num_stages=2, num_chunks=1. Give 2."),
        (lambda: Costs(f=-1), ValueError, "a cost must be finite and not negative; got f=-1."),
        (lambda: Costs(p2p=float("nan")), ValueError, "a cost must be finite and not negative; got p2p=nan."),
        (lambda: plot_timeline(make_schedule("1f1b", 2, 2), "timeline.jpg"), ValueError, "a plot's suffix must be one of "
         "svg, png, pdf; got path='timeline.jpg'."),
        (lambda: plot_timeline([], "timeline.svg"), ValueError, "plot_timeline must get one schedule or more; got none."),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


WRONG_KINDS = {
    'make_schedule("1f1b", 4.0, 8)': "num_stages must be an integer; got num_stages=4.0. For example: num_stages=4.",
    'make_schedule("1f1b", 4, "8")': "num_microbatches must be an integer; got num_microbatches='8'. For example: "
    "num_microbatches=4.",
    'make_schedule("1f1b", True, 8)': "num_stages must be an integer; got num_stages=True. For example: num_stages=4.",
    'Schedule("mine", 1, 1, 1, [[["F"]]])': "ops[tick][stage] must be a tuple of Op(kind, microbatch, chunk); got 'F' in it.",
    'Schedule.from_orders([[("F", 0)]])': "ops[tick][stage] must be a tuple of Op(kind, microbatch, chunk); got 'F' in it.",
    'Costs(b="1")': "a cost must be a number; got b='1'.",
}


@pytest.fixture(scope="module")
def run_unchecked():
    """Runs a program where nothing checks the types in signatures, as for a user, and returns the lines that it prints."""

    def run(program):
        command = [sys.executable, "-c", "from jaxpar.schedule import *\n" + program]
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


def test_values_of_a_wrong_kind_are_named(run_unchecked):
    program = "".join(
        f"try: {call}\nexcept TypeError as error: print(error)\n" for call in WRONG_KINDS
    )
    assert run_unchecked(program) == list(WRONG_KINDS.values())


def test_plain_tuples_and_lists_read_as_a_table(run_unchecked):
    program = f"""
table = {[[[tuple(op) for op in ops] for ops in tick] for tick in HAND_WRITTEN]!r}
schedule = Schedule("mine", 2, 2, 1, table)
schedule.check()
print(schedule == Schedule.from_orders([schedule.order(0), [schedule.order(1)[:2], schedule.order(1)[2:]]], name="mine"))
print(hash(schedule) is not None, schedule.ops[0][0][0].kind)
"""
    assert run_unchecked(program) == ["True", "True F"]


def test_simulate_checks_the_table_first():
    wrong = Schedule("mine", 1, 1, 1, (((Op("B", 0), Op("F", 0)),),))
    for use in (simulate, render):
        with pytest.raises(ValueError, match="an op must come after what it needs"):
            use(wrong)


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"plot_timeline needs matplotlib; .* pip install -e '\.\[plot\]'"
    ):
        plot_timeline(make_schedule("1f1b", 2, 2), "timeline.svg")
