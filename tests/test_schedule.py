import itertools
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar import schedule as schedule_module
from jaxpar.schedule import (
    FORMS,
    NAMED,
    NUM_CHUNKS,
    SCHEDULES,
    TIMINGS,
    Costs,
    make_schedule,
    orders,
    plot_timeline,
    render,
    simulate,
    write_trace,
)
from tests.support.schedules import VARIANTS, WITHOUT, variants
from tests.support.tiers import quick

ROOT = Path(__file__).parents[1]


def bubble(name, num_stages, num_microbatches, num_chunks=None, *, timing="free", **options):
    """The bubble as an exact fraction: unit costs make every time a whole number."""
    timeline = simulate(
        make_schedule(name, num_stages, num_microbatches, num_chunks, **options), timing=timing
    )
    work = sum(span.end - span.start for order in timeline.spans for span in order)
    return 1 - Fraction(work, num_stages * timeline.makespan)


# The named schedules


@VARIANTS
def test_named_schedules_pass_check(name, num_chunks, form, remat):
    for num_stages, num_microbatches in itertools.product([1, 2, 3, 5], [1, 2, 4, 7]):
        schedule = make_schedule(
            name, num_stages, num_microbatches, num_chunks, form=form, remat=remat
        )
        schedule.check()
        assert schedule.num_stages == num_stages
        assert schedule.num_microbatches == num_microbatches
        assert schedule.num_chunks == num_chunks


@pytest.mark.slow
@VARIANTS
def test_every_small_named_schedule_passes_check(name, num_chunks, form, remat):
    for num_stages, num_microbatches in itertools.product(range(1, 9), range(1, 18)):
        make_schedule(
            name, num_stages, num_microbatches, num_chunks, form=form, remat=remat
        ).check()


@given(variants, st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_any_number_of_microbatches_makes_a_schedule_with_every_op_once(
    variant, num_stages, num_microbatches
):
    name, num_chunks, form, remat = variant
    schedule = make_schedule(name, num_stages, num_microbatches, num_chunks, form=form, remat=remat)
    schedule.check()
    kinds = 2 + schedule.splits_backward + remat
    for stage in range(num_stages):
        assert len(schedule.order(stage)) == kinds * num_microbatches * num_chunks


@VARIANTS
def test_kinds_say_what_the_backward_is_made_of(name, num_chunks, form, remat):
    schedule = make_schedule(name, 3, 4, num_chunks, form=form, remat=remat)
    assert schedule.splits_backward == (NAMED[name].splits_backward or form in ("unit", "fused"))
    assert schedule.recomputes == remat


@VARIANTS
def test_only_fused_and_merged_ticks_hold_more_than_one_op(name, num_chunks, form, remat):
    schedule = make_schedule(name, 4, 9, num_chunks, form=form, remat=remat)
    most = max(len(ops) for tick in schedule.ops for ops in tick)
    assert (
        most == 1
        if form in ("published", "unit")
        else most > 1 or (NAMED[name].holds_all and not remat)
    )
    for tick in schedule.ops:
        for ops in tick:
            kinds = [op.kind for op in ops]
            assert kinds.count("F") <= 1, "a stage sends one activation a tick"
            assert kinds.count("B") <= 1, "a stage sends one gradient a tick"


def test_every_stage_does_the_same_in_a_fused_steady_state():
    for name in ("1f1b", "zb-h1"):
        schedule = make_schedule(name, 4, 32, form="fused")
        assert schedule.num_ticks == 32 + 2 * 3
        for tick in schedule.ops[2 * 3 : 32]:
            assert ["".join(op.kind for op in ops) for ops in tick] == ["FBW"] * 4


def test_1f1b_is_the_order_of_the_paper():
    schedule = make_schedule("1f1b", 4, 8)
    kinds = ["".join(op.kind for op in schedule.order(stage)) for stage in range(4)]
    assert kinds == [
        "FFF" + "FB" * 5 + "BBB",
        "FF" + "FB" * 6 + "BB",
        "F" + "FB" * 7 + "B",
        "FB" * 8,
    ]


def test_a_schedule_has_the_chunks_that_it_needs_unless_told_otherwise():
    chunks = {name: make_schedule(name, 2, 4).num_chunks for name in SCHEDULES}
    told = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
    assert chunks == NUM_CHUNKS == NUM_CHUNKS | told
    assert make_schedule("interleaved", 2, 4, 1).num_chunks == 1


def test_interleaved_is_the_order_of_the_paper():
    order = make_schedule("interleaved", 2, 4, 2).order(1)
    text = " ".join(f"{op.kind}{op.microbatch}{'ab'[op.chunk]}" for op in order)
    assert text == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


def test_placement_v_puts_the_last_virtual_stage_on_the_first_stage():
    schedule = make_schedule("zb-v", 3, 6)
    assert schedule.num_chunks == 2
    assert [schedule.stage_and_chunk(v) for v in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    assert all(schedule.virtual_stage(*schedule.stage_and_chunk(v)) == v for v in range(6))


def test_placement_loop_puts_the_virtual_stages_round_and_round():
    schedule = make_schedule("interleaved", 3, 6, 2)
    assert [schedule.stage_and_chunk(v) for v in range(6)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert all(schedule.virtual_stage(*schedule.stage_and_chunk(v)) == v for v in range(6))


# The bubble


def test_the_bubbles_of_four_stages_and_32_microbatches():
    assert simulate(make_schedule("1f1b", 4, 32)).bubble_fraction == 3 / 35
    assert simulate(make_schedule("zb-h1", 4, 32)).bubble_fraction == 1 / 33
    assert simulate(make_schedule("zb-v", 4, 32)).bubble_fraction == 1 / 65


@pytest.mark.parametrize("timing", quick(TIMINGS, "lockstep"))
def test_bubbles_match_their_formulas(timing):
    form = "published" if timing == "free" else "fused"
    for s, m in itertools.product([1, 2, 3, 5, 8], [8, 11, 16]):
        assert bubble("gpipe", s, m, timing=timing) == Fraction(s - 1, m + s - 1)
        assert bubble("1f1b", s, m, form=form, timing=timing) == Fraction(s - 1, m + s - 1)
        assert bubble("1f1b", s, m, form="unit", timing=timing) == Fraction(
            2 * (s - 1), 3 * m + 2 * (s - 1)
        )
        assert bubble("interleaved", s, m, 2, form=form, timing=timing) == Fraction(
            s - 1, 2 * m + s - 1
        )
        assert bubble("zb-h1", s, m, timing=timing) == Fraction(s - 1, 3 * m + s - 1)
        if m >= 2 * s - 1:
            assert bubble("zb-h1", s, m, form="fused", timing=timing) == Fraction(
                s - 1, 3 * m + s - 1
            )
            assert bubble("zb-v", s, m, timing=timing) == Fraction(s - 1, 6 * m + s - 1)


def test_recompute_as_an_op_costs_no_bubble():
    for name, makespan in (("1f1b", 4 * 32 + 2 * 3), ("zb-h1", 4 * 32 + 3)):
        timeline = simulate(make_schedule(name, 4, 32, form="unit", remat=True), timing="lockstep")
        assert timeline.makespan == makespan


def test_zb_v_idles_no_more_than_zb_h1():
    for num_stages, num_microbatches in itertools.product(
        [1, 2, 3, 4, 7], [1, 2, 3, 5, 6, 7, 8, 13]
    ):
        assert bubble("zb-v", num_stages, num_microbatches) <= bubble(
            "zb-h1", num_stages, num_microbatches
        )


def test_lock_step_costs_1f1b_as_published_a_third_and_the_other_forms_nothing():
    makespans = {
        form: simulate(make_schedule("1f1b", 4, 32, form=form), timing="lockstep").makespan
        for form in FORMS
    }
    assert makespans == {"published": 136, "unit": 102, "fused": 105, "merged": 105}


@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)],
)
@pytest.mark.parametrize("remat", [False, True])
def test_a_tick_of_the_merged_form_has_no_two_ops_of_which_one_needs_the_other(
    name, num_chunks, remat
):
    for num_stages, num_microbatches in itertools.product([1, 2, 3, 4], [1, 2, 5, 8]):
        schedule = make_schedule(
            name, num_stages, num_microbatches, num_chunks, form="merged", remat=remat
        )
        for tick in schedule.ops:
            for ops in tick:
                forward = {(op.microbatch, op.chunk) for op in ops if op.kind == "F"}
                assert forward.isdisjoint(
                    (op.microbatch, op.chunk) for op in ops if op.kind in "RB"
                ), f"{tick}"
        fused = make_schedule(
            name, num_stages, num_microbatches, num_chunks, form="fused", remat=remat
        )
        assert schedule.num_ticks == fused.num_ticks + 1
        live, before = (max(simulate(each).peak_live) for each in (schedule, fused))
        assert live <= before + 1


def test_the_table_in_the_module_docstring_holds():
    rows = re.findall(
        r"^    (\S+) +(published|unit|fused|merged) +(\d+) +(\d+) +(\d+) +(\d+)",
        orders.__doc__,
        re.MULTILINE,
    )
    assert len(rows) == 13
    for name, form, *figures in rows:
        schedule = make_schedule(name, 4, 32, form=form)
        free, lockstep = (simulate(schedule, timing=timing) for timing in TIMINGS)
        found = [schedule.num_ticks, free.makespan, lockstep.makespan, free.peak_live[0]]
        assert found == [int(figure) for figure in figures], f"{name} {form}"


@given(
    variants,
    st.integers(1, 5),
    st.integers(1, 12),
    st.fixed_dictionaries(
        {cost: st.integers(0, 9) for cost in ("f", "b", "w", "r", "p2p", "head")}
    ),
)
@settings(max_examples=60, deadline=None)
def test_lock_step_takes_at_least_as_long_as_free_running(
    variant, num_stages, num_microbatches, costs
):
    name, num_chunks, form, remat = variant
    costs = Costs(**costs)
    schedule = make_schedule(name, num_stages, num_microbatches, num_chunks, form=form, remat=remat)
    free, lockstep = (simulate(schedule, costs, timing=timing) for timing in TIMINGS)
    assert lockstep.makespan >= free.makespan
    assert 0 <= free.bubble_fraction <= lockstep.bubble_fraction <= 1
    assert free.peak_live == lockstep.peak_live, "what is kept depends on the order alone"


@given(variants, st.integers(1, 5), st.integers(1, 12), st.sampled_from(TIMINGS), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_op_starts_before_its_inputs_and_no_stage_runs_two(
    variant, num_stages, num_microbatches, timing, p2p
):
    name, num_chunks, form, remat = variant
    schedule = make_schedule(name, num_stages, num_microbatches, num_chunks, form=form, remat=remat)
    timeline = simulate(schedule, Costs(f=2, b=3, w=1, r=2, p2p=p2p), timing=timing)
    ends = {
        (stage, span.op): span.end for stage, order in enumerate(timeline.spans) for span in order
    }
    for stage, order in enumerate(timeline.spans):
        for before, after in itertools.pairwise(order):
            assert before.end <= after.start
        for span in order:
            for source, needed in schedule.inputs_of(stage, span.op):
                assert ends[source, needed] + p2p * (source != stage) <= span.start
    assert timeline.makespan >= max(ends.values())


# Memory


def test_1f1b_keeps_no_more_microbatches_than_stages_that_follow():
    for num_stages in range(1, 9):
        schedule = make_schedule("1f1b", num_stages, 32)
        assert simulate(schedule).peak_live == tuple(
            num_stages - stage for stage in range(num_stages)
        )


def test_peak_live_grows_with_microbatches_where_a_stage_holds_all_of_them():
    for name, form in itertools.product(SCHEDULES, FORMS):
        if (name, form) in WITHOUT:
            continue
        few, many = (simulate(make_schedule(name, 4, m, form=form)).peak_live for m in (16, 64))
        assert (few != many) == NAMED[name].holds_all, f"{name} {form}"


def test_peak_live_of_each_schedule():
    def peaks(*args, **options):
        return simulate(make_schedule(*args, **options)).peak_live

    assert peaks("gpipe", 4, 32) == (32,) * 4
    assert peaks("1f1b", 4, 32, form="unit") == (4, 3, 2, 1)
    assert peaks("1f1b", 4, 32, form="fused") == (7, 5, 3, 1)
    assert peaks("1f1b", 4, 32, form="merged") == (8, 6, 4, 2)
    assert peaks("interleaved", 4, 32, 2) == (11, 9, 7, 5)
    assert peaks("zb-h1", 4, 32) == (4, 4, 4, 4)
    assert max(peaks("zb-h1", 4, 32, form="fused")) == 7
    assert peaks("zb-v", 4, 32) == (8, 8, 8, 8), "in chunks: half a stage each"


def test_recompute_keeps_one_full_set_of_residuals():
    timeline = simulate(make_schedule("1f1b", 4, 32, form="unit", remat=True))
    assert timeline.peak_live == (4, 3, 2, 1)
    assert timeline.peak_residuals == (1, 1, 1, 1)


# Costs


def test_a_whole_backward_costs_b_and_w():
    costs = Costs(f=1, b=2, w=4)
    whole, split = (
        simulate(make_schedule("1f1b", 1, 3, form=form), costs) for form in ("published", "unit")
    )
    assert whole.makespan == split.makespan == 3 * (1 + 2 + 4)


def test_a_hop_costs_p2p_in_free_running():
    free = simulate(make_schedule("gpipe", 3, 1), Costs(p2p=10))
    assert free.makespan == 3 * 3 + 4 * 10, "two hops there, two back"


def test_a_tick_costs_p2p_in_lock_step():
    schedule = make_schedule("gpipe", 3, 2)
    with_hops, without = (
        simulate(schedule, Costs(p2p=p2p), timing="lockstep").makespan for p2p in (10, 0)
    )
    assert with_hops == without + 10 * schedule.num_ticks


def test_one_stage_has_no_hops():
    for timing in TIMINGS:
        assert simulate(make_schedule("zb-v", 1, 4), Costs(p2p=10), timing=timing).makespan == 4 * 6


def test_head_is_on_the_last_virtual_stage_alone():
    for name, last in (("1f1b", 3), ("zb-v", 0)):
        schedule = make_schedule(name, 4, 1)
        work = [
            sum(span.end - span.start for span in order)
            for order in simulate(schedule, Costs(head=5)).spans
        ]
        base = 3 * schedule.num_chunks
        assert work == [base + 15 * (stage == last) for stage in range(4)], (
            "5 more for each of F, B and W"
        )


def test_stage_scale_is_one_factor_a_virtual_stage():
    schedule = make_schedule("interleaved", 2, 2, 2)
    work = [
        sum(span.end - span.start for span in order)
        for order in simulate(schedule, Costs(stage_scale=(1, 2, 3, 4))).spans
    ]
    assert work == [2 * 3 * (1 + 3), 2 * 3 * (2 + 4)]


def test_costs_of_zero_are_no_bubble():
    assert simulate(make_schedule("1f1b", 2, 2), Costs(f=0, b=0, w=0)).bubble_fraction == 0


# Text, pictures, traces


def test_render_of_1f1b():
    assert render(make_schedule("1f1b", 2, 3)).splitlines() == [
        "1f1b, 2 stages, 3 microbatches, free-running: 12 units of time, 25.0% idle, peak live 2 1",
        "         0              5              10",
        "stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "stage 1  .  F0 B0--- F1 B1--- F2 B2--- .  .",
        "F forward, B backward (gradients of inputs and weights)",
    ]


def test_render_of_zb_v_with_recompute_and_chunks():
    assert render(make_schedule("zb-v", 2, 2, remat=True)).splitlines() == [
        "zb-v (remat), 2 stages, 2 microbatches, 2 chunks, free-running: 18 units of time, 11.1% idle, peak live 3 4",
        "         0                   5                   10                  15",
        "stage 0  F0a F1a .   F0b R0b B0b W0b F1b R1b B1b W1b R0a B0a W0a R1a .   B1a W1a",
        "stage 1  .   F0a F0b F1a F1b R0b B0b W0b R0a B0a W0a R1b B1b W1b R1a B1a W1a .",
        "F forward, R recompute, B backward for inputs, W backward for weights, a chunk 0, b chunk 1",
    ]


def test_render_in_lock_step_shows_the_ticks():
    assert render(make_schedule("1f1b", 2, 3, form="fused"), timing="lockstep").splitlines()[
        1:4
    ] == [
        "         0              5              10",
        "stage 0  F0|F1 .  . |F2 B0 W0|B1 W1 . |B2 W2|",
        "stage 1  . |F0 B0 W0|F1 B1 W1|F2 B2 W2|.  . |",
    ]


@VARIANTS
def test_trace_has_a_slice_for_each_op(name, num_chunks, form, remat, tmp_path):
    schedule = make_schedule(name, 3, 4, num_chunks, form=form, remat=remat)
    write_trace(schedule, tmp_path / "trace.json", timing="lockstep", seconds_per_unit=0.5)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(schedule.order(stage)) for stage in range(3))
    end = max(event["ts"] + event["dur"] for event in slices)
    assert end == pytest.approx(5e5 * simulate(schedule, timing="lockstep").makespan)
    for stage in range(3):
        row = [event for event in slices if event["tid"] == stage]
        assert [event["ts"] for event in row] == sorted(event["ts"] for event in row)
        live = [
            event["args"]["live"]
            for event in events
            if event["name"] == f"live activations, stage {stage}"
        ]
        assert max(live) == simulate(schedule).peak_live[stage]
        assert live[-1] == 0, "all that was kept is let go"


@pytest.mark.parametrize(
    ("suffix", "magic"),
    [
        ("svg", b"<?xml"),
        pytest.param("png", b"\x89PNG", marks=pytest.mark.full),
        pytest.param("pdf", b"%PDF", marks=pytest.mark.full),
    ],
)
def test_plot_is_the_same_file_each_time(tmp_path, suffix, magic):
    schedules = [make_schedule("1f1b", 2, 3), make_schedule("zb-v", 2, 3, remat=True)]
    contents = []
    for name in ("one", "two"):
        plot_timeline(schedules, tmp_path / f"{name}.{suffix}", timing="lockstep")
        contents.append((tmp_path / f"{name}.{suffix}").read_bytes())
    assert contents[0].startswith(magic)
    assert contents[0] == contents[1]


def test_plot_of_one_schedule_has_a_bar_for_each_op(tmp_path, monkeypatch):
    figures = []
    figure_module = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure)
    )
    plot_timeline(make_schedule("zb-h1", 3, 4), tmp_path / "timeline.svg")
    (panel,) = figures[0].axes
    assert len(panel.patches) == 3 * 3 * 4
    assert sorted(text.get_text() for text in panel.texts) == sorted("0123" * 9)
    assert f"{simulate(make_schedule('zb-h1', 3, 4)).bubble_fraction:.1%} idle" in panel.get_title(
        loc="left"
    )
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "stage 0",
        "stage 1",
        "stage 2",
    ]


def test_all_that_is_public_has_a_docstring():
    for name in schedule_module.__all__:
        assert getattr(schedule_module, name).__doc__, name
