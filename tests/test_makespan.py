"""The time of schedules whose stages run freely: messages of unequal links, exchanges in pairs, and the end of a step."""

import dataclasses

import pytest

from jaxpar.models.transformer import TransformerConfig
from jaxpar.planner import Assumptions, Choice, cluster, price, transformer_shape
from jaxpar.planner.cluster import Links
from jaxpar.schedule import Costs, make_schedule, simulate
from jaxpar.schedule.simulate import makespan, structure_of


def test_messages_take_the_time_of_their_own_boundary_and_only_some_cross_nodes():
    links = Links(cluster("a100-80gb", 2), {"data": 1, "stage": 8, "tensor": 2}, 1.0)
    assert links.crossings("stage") == [False, False, False, True, False, False, False, True]
    schedule, costs = make_schedule("1f1b", 8, 32), Costs(f=1, b=1, w=1)
    table = structure_of(schedule)
    take = lambda *seconds, **how: makespan(table, costs, seconds, **how)
    fast, slow, some = (
        take(*[0.1] * 8),
        take(*[1] * 8),
        take(*(1 if each else 0.1 for each in links.crossings("stage"))),
    )
    assert fast < some < slow
    assert simulate(schedule, dataclasses.replace(costs, p2p=0.1)).makespan == pytest.approx(
        fast, rel=1e-12
    )
    assert take(*[0.1] * 8, waits_for_all=False) == fast, (
        "the first stage of 1f1b begins first and ends last"
    )


def test_stages_that_wait_for_pairs_of_messages_lose_the_time_of_one_in_each_pair():
    """Interleaved: each chunk's F and B of a microbatch are a pair, followed by an exchange."""
    schedule, costs = make_schedule("interleaved", 4, 32, 2, form="fused"), Costs()
    pairs = structure_of(schedule, by_tick=True)
    take = lambda seconds: makespan(pairs, costs, [seconds] * 4, blocks=True)
    assert take(0.5) - take(0) == pytest.approx(0.5 * len(schedule.ops), rel=0.1)
    one_by_one = structure_of(make_schedule("interleaved", 4, 32, 2))
    assert makespan(one_by_one, costs, [0] * 4) <= take(0)


def test_zero_bubble_gains_where_stages_do_not_wait_between_steps():
    table, costs = structure_of(make_schedule("zb-v", 4, 16)), Costs()
    step = lambda waits: makespan(table, costs, [0] * 4, waits_for_all=waits)
    assert 2 * 3 * 16 <= step(False) < step(True)


@pytest.mark.parametrize("ideal", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize(
    ("schedule", "num_chunks"),
    [
        pytest.param("gpipe", 1, marks=pytest.mark.full),
        pytest.param("1f1b", 1, marks=pytest.mark.full),
        pytest.param("interleaved", 2, marks=pytest.mark.full),
        ("zb-h1", 1),
        pytest.param("zb-v", 2, marks=pytest.mark.full),
    ],
)
def test_steps_of_many_microbatches_take_as_long_as_if_all_were_simulated(
    schedule, num_chunks, ideal, monkeypatch
):
    shape = transformer_shape(
        TransformerConfig(
            vocab_size=8192, num_layers=16, embed_dim=1024, num_heads=16, max_positions=512
        )
    )
    choice = Choice(stage=4, schedule=schedule, num_chunks=num_chunks, num_microbatches=64)
    for network, near in (
        (1, 0.001),
        (0.05, 0.015),
    ):  # messages of interleaved repeat after twice as many microbatches
        take = lambda: price(
            shape,
            cluster("a100-40gb", 4, 1),
            choice,
            batch_size=64,
            executor="mpmd" if ideal else "spmd",
            assumed=Assumptions(network=network),  # noqa: B023, it is called here
        )
        shortened = take()
        with monkeypatch.context() as patch:
            patch.setattr(Choice, "num_simulated", 64)
            whole = take()
        assert shortened.step_seconds == pytest.approx(whole.step_seconds, rel=near)
        assert shortened.bubble_fraction > 0
