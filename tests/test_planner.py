"""The search: what is found for published models, what is refused and what is nearest; the command."""

import contextlib
import dataclasses
import functools
import json
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from jaxpar.__main__ import main
from jaxpar.backward.graph import trace
from jaxpar.commands.plan_flags import PlanFlags, check_plan_flags
from jaxpar.commands.plan_model import planned_model
from jaxpar.dtypes import num_bytes
from jaxpar.inspect.text import seconds_text
from jaxpar.models.lora import Lora
from jaxpar.models.transformer import LAYER_WEIGHTS, Experts, TransformerConfig, param_table, preset
from jaxpar.params import count_params
from jaxpar.planner import (
    Assumptions,
    Choice,
    ModelShape,
    Software,
    cluster,
    price,
    ranking,
    render,
    transformer_shape,
)
from jaxpar.planner.cluster import Links, collective_seconds
from jaxpar.planner.fused import FORWARD, planned_attention
from jaxpar.planner.job import divisors
from jaxpar.planner.kernel_seconds import memory_rate, product_seconds
from jaxpar.planner.kernels import Product, kernels_of, peak_of_kernels
from jaxpar.planner.ops import Analysis
from jaxpar.planner.ranking import _usual_rows, gains_of
from jaxpar.planner.search import Estimator, likely_choices
from jaxpar.planner.state import AtRest
from jaxpar.planner.step_time import _ticks, difference
from jaxpar.planner.traffic import step_traffic
from jaxpar.run.language_model import ModelFlags, config_of_flags
from jaxpar.run.lora_flags import LoraFlags
from jaxpar.schedule import NUM_CHUNKS, Costs, make_schedule, simulate
from jaxpar.schedule.simulate import makespan, structure_of
from jaxpar.tensor_parallel import flash_attention
from tests.support import tiny
from tests.support.clusters import SMALL, node

BLOOM = Choice(
    data=8,
    stage=12,
    tensor=4,
    num_microbatches=128,
    zero=1,
    remat=True,
    layers_per_virtual_stage=(5, *(6,) * 10, 5),
)


OF_FOUR = {
    "batch_size": 64,
    "num_microbatches": 4,
}  # fewer sizes of a microbatch, of which each is traced
KEPT = functools.cache(transformer_shape)
FULL = pytest.mark.full  # another of its cases is quick


@pytest.fixture(scope="module", autouse=True)
def each_model_is_traced_once():
    """A model that several tests plan for keeps what was traced of it; to trace takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for user in (
            "jaxpar.planner.ranking",
            "jaxpar.planner",
        ):  # `plan`, `price`; and the command, which asks late
            patch.setattr(f"{user}.transformer_shape", KEPT)
        yield


@pytest.mark.full
def test_bloom_as_it_was_trained_fits_and_runs_freely_faster_than_in_lock_step():
    """Its published rate is a row of `data/published.json`; it stored the scores of attention."""
    shape = KEPT(
        preset("bloom-176b", compute_dtype="bfloat16", vocab_multiple=128, attention="xla")
    )
    plan = price(shape, cluster("a100-80gb", 48), BLOOM, batch_size=2048)
    assert 60 * 2**30 < plan.memory_bytes < 0.9 * 80 * 2**30
    assert plan.ideal_time.total < plan.time.total < 1.2 * plan.ideal_time.total


@pytest.mark.slow
def test_blooms_mesh_is_among_the_first_five():
    """Of plans that recompute, as BLOOM did: flash attention, which it had not, leaves room for others.

    Without ZeRO, as executor="mpmd" is, the mesh does not fit.
    """
    plans = jaxpar.plan("bloom-176b", cluster("a100-80gb", 48), batch_size=2048, remat=True, top=5)
    meshes = [(plan.choice.data, plan.choice.stage, plan.choice.tensor) for plan in plans]
    assert (8, 12, 4) in meshes, render(plans)


@pytest.mark.full
def test_the_best_is_first_and_each_other_says_why_not():
    plans = jaxpar.plan(SMALL, cluster("h100"), **OF_FOUR, top=4)
    assert len(plans) == 4
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert len({plan.choice.mesh.shape_tuple for plan in plans}) == 4, "one plan a mesh"
    assert "faster than the next, which" in plans[0].why
    assert all("slower: " in plan.why for plan in plans[1:])
    assert len(render(plans).splitlines()) == 2 + len(plans)


@pytest.mark.full
def test_groups_of_replicas_are_preferred_where_zero_3_would_send_over_a_slow_network():
    slow, held = (
        node(num_nodes=4, network_bandwidth=1e9),
        {"batch_size": 256, "num_microbatches": 2},
    )
    plans = jaxpar.plan(SMALL, slow, zero=3, stage=1, tensor=1, **held)
    assert [(plan.choice.replica, plan.choice.data) for plan in plans] == [(4, 8), (1, 32)]
    grouped, flat = plans
    assert grouped.bytes_moved["replica"] < 0.2 * flat.bytes_moved["data"]
    assert grouped.step_seconds < 0.9 * flat.step_seconds
    assert "replica  data" in render(plans)
    assert grouped.as_json()["replica"] == 4
    assert (
        jaxpar.plan(SMALL, node(num_nodes=4), replica=2, tensor=1, stage=1, **held)[
            0
        ].choice.replica
        == 2
    )


def test_sums_of_experts_over_data_are_scattered_over_tensor_in_both_passes():
    """As XLA for GPUs does, where each shard sends its slice of the width to the owners of experts."""
    shape = transformer_shape(preset("moe-bytes"), experts="data", seq=32)
    works = Analysis(shape, 4, 2, data=4).works
    rows = 4 * 32 * 2 * 4 * preset("moe-bytes").embed_dim * 4  # of all replicas, in float32
    for name in ("forward", "backward"):
        kinds = [each.kind for each in works[name].sent if each.payload_bytes == rows]
        assert kinds.count("reduce-scatter") == kinds.count("all-gather") == 1, (name, kinds)
        assert "all-reduce" not in kinds, name


@pytest.mark.full
def test_long_sequences_are_cut_over_context():
    config = preset(
        "llama3.1-8b", compute_dtype="bfloat16", vocab_multiple=128, attention=planned_attention
    )
    shape = KEPT(config, seq=2**18)
    whole, cut = (
        price(
            shape,
            cluster("h100", context),
            Choice(tensor=8, context=context, remat=True),
            batch_size=1,
        )
        for context in (1, 4)
    )
    assert 4 * cut.flops == pytest.approx(whole.flops, rel=0.01)
    assert cut.bytes_per_device["activations"] == pytest.approx(
        whole.bytes_per_device["activations"] / 4
    )
    # Keys and values of 8 heads are gathered in F and again in B, where their gradients are scattered.
    sent = 3 * 32 * 2 * 2 * 128 * 2**18 * 3 / 4
    assert cut.bytes_moved["context"] == pytest.approx(
        sent + 2 * 3 / 4 * cut.bytes_per_device["gradients"], rel=0.02
    )
    with pytest.raises(ValueError, match=r"planned with fused attention; got context=2"):
        price(SMALL, cluster("h100"), Choice(context=2, tensor=4), batch_size=8)
    best = jaxpar.plan(
        shape, cluster("h100", 8), batch_size=8, remat=True, stage=1, tensor=8, top=1
    )[0]
    assert best.choice.context > 1


@pytest.mark.parametrize("zero", [1, 3, pytest.param(0, marks=FULL), pytest.param(2, marks=FULL)])
def test_zero_shards_over_context_as_over_data(zero):
    config = TransformerConfig(
        vocab_size=512,
        num_layers=4,
        embed_dim=256,
        num_heads=8,
        max_positions=512,
        attention=planned_attention,
    )
    shape = KEPT(config)

    def of(**axes):
        choice = Choice(**axes, zero=zero, num_microbatches=2)
        analysis, at_rest = (
            Analysis(shape, 1, 1, context=choice.context),
            AtRest(shape, optax.adam(1e-3), choice),
        )
        transfers = step_traffic(choice, analysis, at_rest)
        sent = sum(each.bytes_moved for each in transfers if not each.what.startswith("a layer's"))
        return at_rest.bytes | {"gradients": num_bytes(at_rest.grads), "sent": sent}

    assert of(context=8) == pytest.approx(of(data=8), abs=128)
    assert of(data=2, context=4) == pytest.approx(of(data=8), abs=128)


EXPERTS = TransformerConfig(
    vocab_size=512, num_layers=4, embed_dim=256, num_heads=8, max_positions=512, norm="rms", mlp="swiglu", biases=False,
    experts=Experts(count=8, per_token=2, mlp_dim=512), compute_dtype="bfloat16",
)  # fmt: skip


LONG_EXPERTS = dataclasses.replace(
    EXPERTS, positions="rope", max_positions=2**15, attention=planned_attention
)


def test_stages_that_run_freely_hold_all_params_and_whole_sequences():
    shape = KEPT(LONG_EXPERTS, seq=2**15)
    estimator = Estimator(shape, cluster("h100", 1, 4), 16, optax.adam(1e-4), "mpmd", Assumptions())
    found = list(estimator.candidates({"stage": 2}))
    assert len(found) > 1
    assert {(choice.zero, choice.context, choice.experts) for choice in found} == {(0, 1, "tensor")}
    for held in ({"zero": 1}, {"context": 2}, {"experts": "data"}):
        (name,) = held
        with pytest.raises(
            ValueError,
            match=rf"hold all params and whole sequences; got .*stage=2, {name}=.* Leave {name} out",
        ):
            jaxpar.plan(shape, cluster("h100"), batch_size=16, executor="mpmd", stage=2, **held)


@pytest.mark.full
def test_a_plan_for_stages_that_run_freely_is_one_that_their_executor_takes():
    held = {"num_microbatches": 4, "remat": False, "stage": 2}
    shape = KEPT(LONG_EXPERTS, seq=2**15)
    plans = jaxpar.plan(shape, cluster("h100", 1, 4), batch_size=16, executor="mpmd", top=9, **held)
    assert len(plans) > 1
    assert {(plan.choice.zero, plan.choice.context, plan.choice.experts) for plan in plans} == {
        (0, 1, "tensor")
    }


@pytest.mark.full
def test_leading_dense_layers_are_further_layers_of_the_first_stage():
    shape, machines, rows = KEPT(EXPERTS), cluster("h100"), 64
    leading = KEPT(dataclasses.replace(EXPERTS, num_layers=6).with_experts(num_dense_layers=2))
    choice = Choice(stage=2, tensor=4, num_microbatches=16)
    seconds = lambda shape, *layers: (
        price(
            shape,
            machines,
            dataclasses.replace(choice, layers_per_virtual_stage=layers or None),
            batch_size=rows,
        ).step_seconds
    )
    assert seconds(shape, 1, 3) < seconds(leading, 1, 3) < seconds(leading), (
        "a stage with fewer layers has time for them"
    )
    held = {"num_microbatches": 16, "remat": False, "schedule": "1f1b"}
    best = jaxpar.plan(leading, machines, batch_size=rows, stage=2, tensor=4, **held)[0]
    assert best.choice.layers_per_virtual_stage == (1, 3)
    more = price(leading, machines, choice, batch_size=rows).useful_flops
    assert more > price(shape, machines, choice, batch_size=rows).useful_flops * 1.2


@pytest.mark.full
def test_experts_are_planned_over_tensor_and_over_data():
    shape, machines, rows = KEPT(EXPERTS.with_experts(buffer=1.0)), cluster("h100"), 64
    plain, over_tensor, over_data = (
        price(
            shape,
            machines,
            Choice(data=data, tensor=8 // data, num_microbatches=2, zero=1, experts=experts),
            batch_size=rows,
        )
        for data, experts in ((8, "tensor"), (1, "tensor"), (8, "data"))
    )
    # Products of the two experts of each token, not of all.
    assert plain.useful_flops == pytest.approx(over_data.useful_flops, rel=0.01)
    assert plain.useful_flops == pytest.approx(over_tensor.useful_flops, rel=0.05)
    experts = 4 * 3 * 8 * 256 * 512
    at_rest = lambda plan: plan.bytes_per_device["params"]
    assert at_rest(plain) - at_rest(over_data) == 4 * experts * 7 / 8
    # Rows to experts and back, in F and in B: four exchanges of two copies of each token, 16 bits a number.
    pairs = 2 * rows // 8 * 512 * 4
    marks = 2 * pairs * 2 * 4  # a weight and the number of an expert, and their gradients
    sent = (4 * pairs * 256 * 2 + marks) * 7 / 8
    dense = over_data.bytes_moved["data"] - sent
    assert 0 < dense < 0.5 * (plain.bytes_moved["data"] - dense)
    # By default there is room for all tokens of all replicas, 4 times as many: these are sent and stored, and not multiplied.
    worst = price(KEPT(EXPERTS), machines, over_data.choice, batch_size=rows)
    assert worst.bytes_moved["data"] == dense + 4 * sent
    assert worst.useful_flops == pytest.approx(over_data.useful_flops, rel=0.01)
    assert worst.bytes_per_device["activations"] > 1.5 * over_data.bytes_per_device["activations"]
    # Gathered, each token is sent to all 8 replicas, and not to 2, with the numbers of both experts.
    gathers = KEPT(EXPERTS.with_experts(buffer=1.0, exchange="gather"))
    gathered = price(gathers, machines, over_data.choice, batch_size=rows)
    assert gathered.bytes_moved["data"] == dense + 4 * sent + 4 * marks * 7 / 8
    # Each shard multiplies the rows of its own experts, and sums the tokens of all.
    assert over_tensor.bytes_moved["tensor"] > 0
    assert Analysis(shape, 32, 8).layer.guessed == (), "as traced for the plan over tensor"
    slower = price(
        shape, machines, over_data.choice, batch_size=rows, software=Software(expert_imbalance=2.0)
    )
    assert slower.time.compute > over_data.time.compute
    held = {"num_microbatches": 2, "tensor": 1, "stage": 1, "remat": False}
    found = {
        plan.choice.experts
        for plan in jaxpar.plan(shape, machines, batch_size=rows, experts="data", **held)
    }
    assert found == {"data"}
    with pytest.raises(
        ValueError,
        match=r'experts must be over "tensor" or "data"; got stage'.replace("stage", "'stage'"),
    ):
        jaxpar.plan(shape, machines, batch_size=rows, experts="stage")
    with pytest.raises(
        ValueError,
        match=r"data must divide the experts where experts=data spreads them; got data=16 and 8 exp.* Choose data from 2, 4, 8",
    ):
        jaxpar.plan(shape, cluster("h100", 2), batch_size=rows, experts="data", data=16)
    with pytest.raises(ValueError, match=r"^num_microbatches must divide .* Choose batch_size=72"):
        jaxpar.plan(shape, machines, batch_size=rows, experts="data", num_microbatches=3)
    assert jaxpar.plan(shape, machines, batch_size=72, experts="data", num_microbatches=3)


def test_a_tenth_of_the_memory_stays_free_unless_told_otherwise():
    tight = node(memory_bytes=3e9)
    usual, all_of_it = (
        max(
            plan.memory_bytes
            for plan in jaxpar.plan(SMALL, tight, batch_size=512, data=8, remat=False, **given)
        )
        for given in ({}, {"memory_headroom": 0.0})
    )
    assert usual <= 0.9 * 3e9
    assert usual <= all_of_it <= 3e9
    with pytest.raises(ValueError, match=r"memory_headroom must be a share .* got 1\. Choose 0\.1"):
        jaxpar.plan(SMALL, tight, batch_size=512, memory_headroom=1)


def mlp(width, hidden, num_layers):
    """A model whose functions take little time to trace."""
    leaf = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    layer = lambda params, x: x + jnp.tanh(x @ params["up"]) @ params["down"]
    return ModelShape(
        name="mlp",
        model=jaxpar.LayeredModel(
            lambda outer, batch: batch["x"], layer, lambda outer, x: x @ outer["out"]
        ),
        loss=lambda outputs, batch: (
            jnp.sum((outputs - batch["y"]) ** 2),
            jnp.float32(outputs.size),
        ),
        params={
            "outer": {"out": leaf(width, 8)},
            "layers": {
                "up": leaf(num_layers, width, hidden),
                "down": leaf(num_layers, hidden, width),
            },
        },
        rules={
            "outer/out": jaxpar.replicated(),
            "layers/up": jaxpar.column_parallel(),
            "layers/down": jaxpar.row_parallel(),
        },
        row={"x": leaf(1, width), "y": leaf(1, 8)},
    )


def with_layer(shape, layer):
    model = dataclasses.replace(shape.model, layer=layer)
    return dataclasses.replace(shape, model=model, cache={})


def test_a_loop_in_a_layer_is_planned_like_its_trips_written_out():
    shape = mlp(64, 256, 4)
    block = shape.model.layer
    written_out = lambda params, x: block(params, block(params, block(params, x)))
    once = lambda params, x, _: (block(params, x), None)
    by_scan = lambda params, x: jax.lax.scan(functools.partial(once, params), x, None, 3)[0]
    expected, found = (
        Analysis(with_layer(shape, layer), 32, 4) for layer in (written_out, by_scan)
    )
    for op in ("forward", "forward_and_store", "backward"):
        work, of_loop = expected.works[op], found.works[op]
        assert of_loop.flops == work.flops
        assert sorted(of_loop.sent) == sorted(work.sent)
        assert of_loop.kernels.products == work.kernels.products
    # A scan stores what its backward pass reads of each trip, x and both operands of the derivative of tanh too.
    activations, of_scan = (
        sum(map(each.layer.graph.num_bytes, each.split.plans["forward_and_store"].makes))
        for each in (expected, found)
    )
    assert activations < of_scan < 4 * activations
    assert expected.one_layer_bytes < found.one_layer_bytes < 3 * expected.one_layer_bytes


def test_rows_one_by_one_are_planned_as_often_as_there_are_rows():
    shape = mlp(64, 256, 4)
    block = shape.model.layer
    by_row = lambda params, x: jax.lax.map(lambda row: block(params, row[None])[0], x)
    expected, found = (Analysis(with_layer(shape, layer), 32, 4) for layer in (block, by_row))
    assert found.works["forward"].flops == expected.works["forward"].flops
    assert found.works["backward"].flops == expected.works["backward"].flops
    sent = found.works["forward"].sent
    assert len(sent) == 32
    assert sum(each.payload_bytes for each in sent) == expected.works["forward"].sent[0][2]


def test_a_loop_whose_trips_are_not_known_is_refused():
    shape = mlp(64, 256, 4)

    def layer(params, x):
        goes_on = lambda x: jnp.max(x) > 1
        x = jax.lax.stop_gradient(jax.lax.while_loop(goes_on, lambda x: x / 2, x))
        return shape.model.layer(params, x)

    with pytest.raises(
        ValueError,
        match=r"how often a loop of the model runs; got a jax.lax.while_loop .*test_planner.* "
        r"Write it as a jax.lax.fori_loop",
    ):
        Analysis(with_layer(shape, layer), 32, 1)


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_print_in_a_layer_costs_nothing(tensor):
    shape = mlp(64, 256, 4)

    def layer(params, x):
        jax.debug.print("{}", x[0, 0])
        return shape.model.layer(params, x)

    found = Analysis(with_layer(shape, layer), 32, tensor).works["forward"]
    expected = Analysis(shape, 32, tensor).works["forward"]
    assert (found.flops, found.kernels) == (expected.flops, expected.kernels)


def draw_model(rng, kind):
    if kind == "mlp":
        return mlp(rng.choice((256, 4096)), rng.choice((512, 8192)), rng.choice((4, 6, 8)))
    return transformer_shape(
        TransformerConfig(
            vocab_size=rng.choice((512, 32768)),
            num_layers=rng.choice((4, 6, 8)),
            embed_dim=rng.choice((128, 1024)),
            num_heads=8,
            max_positions=rng.choice((64, 1024)),
            compute_dtype="bfloat16",
            attention=planned_attention,
        )
    )


def changes_of_one_setting(shape, choice, batch_size):
    for count in divisors(batch_size // choice.num_replicas):
        yield dataclasses.replace(choice, num_microbatches=count)
    for zero in range(4) if choice.parts() > 1 else ():
        yield dataclasses.replace(choice, zero=zero)
    for remat in (False, "dots", True):
        yield dataclasses.replace(choice, remat=remat)
    for name, chunks in NUM_CHUNKS.items() if choice.stage > 1 else ():
        if chunks * choice.stage <= shape.num_layers:
            given = {"schedule": name, "num_chunks": chunks, "layers_per_virtual_stage": None}
            yield dataclasses.replace(choice, **given)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "draw",
    [
        0,
        pytest.param(1, marks=FULL),
        *(pytest.param(draw, marks=pytest.mark.slow) for draw in range(2, 5)),
    ],
)
@pytest.mark.parametrize("kind", ["mlp", pytest.param("transformer", marks=FULL)])
def test_no_change_of_one_setting_makes_the_best_plan_faster(kind, draw):
    del draw  # each has a seed of its own
    rng = random.Random(tiny.fresh_seed())
    shape, batch_size = draw_model(rng, kind), rng.choice((24, 32, 48, 72))
    gpus = node(
        devices_per_node=rng.choice((2, 4)), memory_bytes=rng.uniform(4, 40) * shape.num_params
    )
    plans = []
    while not plans:
        with contextlib.suppress(ValueError):
            plans = jaxpar.plan(shape, gpus, batch_size=batch_size, top=1)
        gpus = dataclasses.replace(gpus, memory_bytes=gpus.memory_bytes * (1 if plans else 2))
    best = plans[0]
    for choice in changes_of_one_setting(shape, best.choice, batch_size):
        other = price(shape, gpus, choice, batch_size=batch_size)
        if other.memory_bytes <= 0.9 * gpus.memory_bytes:
            assert other.step_seconds > 0.998 * best.step_seconds, (
                shape.params,
                gpus,
                batch_size,
                best.choice,
                choice,
            )


@pytest.mark.full
def test_the_best_plan_of_gpt2_on_two_nodes_is_no_slower_than_with_four_microbatches():
    free, held = (
        jaxpar.plan("gpt2", cluster("h100", 2), batch_size=4096, tensor=1, stage=1, top=1, **given)[
            0
        ]
        for given in ({}, {"num_microbatches": 4})
    )
    assert free.step_seconds <= 1.001 * held.step_seconds
    assert free.why != "the only mesh that fits", (
        "the plans of other meshes, which are not asked for, fit too"
    )


def test_presets_are_planned_as_they_are_trained():
    shape = KEPT("llama3.1-8b")
    assert shape.tokens_per_row == 8192
    assert shape.row["tokens"].shape == (1, 8192)
    fused = lambda shape: any(
        node.name == FORWARD for node in Analysis(shape, 1, 1).layer.graph.nodes
    )
    assert fused(KEPT("gpt2"))
    assert not fused(KEPT("gpt2", compute_dtype="float32")), "its kernel takes 16-bit floats"
    config = preset("gpt2", compute_dtype="bfloat16", attention=jaxpar.flash_attention)
    assert fused(transformer_shape(config)), "the kernel that no machine without a GPU traces"


def test_a_window_of_fused_attention_has_the_operations_of_its_scores():
    config = dataclasses.replace(SMALL, compute_dtype="bfloat16", attention=planned_attention)
    whole, windowed = (
        Analysis(KEPT(dataclasses.replace(config, window=window)), 1, 1)
        .works["forward"]
        .kernels.attention[0]
        for window in (None, 32)
    )
    seen = lambda window: sum(min(1 + at, window) for at in range(SMALL.max_positions))
    assert windowed / whole == pytest.approx(seen(32) / seen(SMALL.max_positions), rel=0.02)


def test_gains_are_of_changes_that_are_faster_and_say_what_they_need():
    plans = jaxpar.plan(
        SMALL, cluster("h100"), **OF_FOUR, stage=4, schedule="1f1b", remat=True, top=2
    )
    for plan in plans:
        assert 0 < len(plan.gains) <= 3
        assert all(0.005 <= gain.faster < 2 for gain in plan.gains), "more tokens a second"
        fits = [gain.missing_bytes == 0 for gain in plan.gains]
        assert fits == sorted(fits, reverse=True), "those that fit are first"
    changes = {gain.change for plan in plans for gain in plan.gains}
    assert "no recomputation" in changes, changes
    assert "faster" in plans[0].details(80e9)


@pytest.mark.parametrize(("attention", "is_told"), [("xla", True), ("flash", False)])
def test_recomputing_scores_alone_is_told_where_it_needs_less_than_no_recomputation(
    attention, is_told, monkeypatch
):
    monkeypatch.setattr(ranking, "COUNT", 20)
    shape = transformer_shape(dataclasses.replace(SMALL, compute_dtype="bfloat16"))
    shape = shape if attention == "xla" else shape.remake(attention=attention)
    given = shape, cluster("h100"), 64, optax.adam(1e-4), "spmd", Assumptions()
    choice = Choice(data=4, stage=2, remat=True, num_microbatches=4)
    told = {gain.change: gain for gain in gains_of(Estimator(*given), choice)}
    assert "no recomputation" in told
    assert ("recomputing attention scores alone" in told) == is_told


@pytest.mark.parametrize(
    ("rows", "fixed"),
    [
        (64, {"tensor": 4, "num_microbatches": 2}),
        (64, {"tensor": 2, "num_microbatches": 4}),
        (64, {"num_microbatches": 4, "remat": True}),
        (32, {"stage": 4, "schedule": "1f1b", "num_microbatches": 16, "remat": True}),
    ],
)
def test_gains_are_what_the_changed_plans_gain(rows, fixed):
    shape, machines = transformer_shape(SMALL), cluster("h100")
    (best,) = jaxpar.plan(shape, machines, batch_size=rows, **fixed, top=1)
    estimator = Estimator(shape, machines, rows, optax.adam(1e-4), "spmd", Assumptions())
    seconds = lambda rows, choice: (
        price(shape, machines, choice, batch_size=rows).step_seconds / rows
    )
    before, choice = seconds(rows, best.choice), best.choice
    same, twice = ({"num_microbatches": n * choice.num_microbatches} for n in (1, 2))
    others = {
        "twice the batch": [(2 * rows, same), (2 * rows, twice)],  # both fit
        "no recomputation": [(rows, {"remat": False})],
    }
    for count in divisors(rows // choice.num_replicas):
        of_each = rows // choice.num_replicas // count
        others[f"microbatches of {of_each} rows"] = [(rows, {"num_microbatches": count})]
    told, checked = gains_of(estimator, choice), 0
    assert {gain.change for gain in best.gains} == {gain.change for gain in told}
    for gain in told:
        if gain.change in others:
            ways = others[gain.change]
            after = min(seconds(n, dataclasses.replace(choice, **changed)) for n, changed in ways)
            assert gain.faster == pytest.approx(before / after - 1, abs=1e-6), gain
            checked += 1
    assert checked


def test_twice_the_batch_is_priced_in_the_fastest_way_that_fits():
    shape, machines, rows = transformer_shape(SMALL), cluster("h100", devices_per_node=2), 16
    choice = Choice(data=2)
    twice = Choice(data=2, num_microbatches=2)
    before = price(shape, machines, choice, batch_size=rows)
    larger, more = (price(shape, machines, way, batch_size=2 * rows) for way in (choice, twice))
    assert more.memory_bytes < larger.memory_bytes
    assert larger.step_seconds < more.step_seconds
    between = (more.memory_bytes + larger.memory_bytes) / 2
    for memory, after in ((machines.memory_bytes, larger), (between, more)):
        held = dataclasses.replace(machines, memory_bytes=memory)
        estimator = Estimator(shape, held, rows, optax.adam(1e-4), "spmd", Assumptions())
        (gain,) = (each for each in gains_of(estimator, choice) if each.change == "twice the batch")
        assert gain.faster == pytest.approx(2 * before.step_seconds / after.step_seconds - 1)
        assert gain.more_bytes == after.memory_bytes - before.memory_bytes
        assert gain.missing_bytes == 0


def test_faster_is_of_tokens_a_second_in_the_lead_of_a_plan_and_in_what_helps_it():
    best, after = jaxpar.plan(SMALL, cluster("h100"), **OF_FOUR, stage=1, top=2)
    lead = best.tokens / best.step_seconds / (after.tokens / after.step_seconds) - 1
    assert f"{lead:.1%} faster than the next" in best.why
    machines = cluster("h100", 2)
    slow, fast = (
        price(SMALL, machines, Choice(data=16, remat=remat), batch_size=64)
        for remat in (True, False)
    )
    estimator = Estimator(KEPT(SMALL), machines, 64, optax.adam(1e-4), "spmd", Assumptions())
    (gain,) = (
        each for each in gains_of(estimator, slow.choice) if each.change == "no recomputation"
    )
    assert f"{slow.step_seconds / fast.step_seconds - 1:.0%} faster" in str(gain)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_that_shards_nothing_takes_the_time_of_none_and_is_told(zero):
    machines = cluster("h100", devices_per_node=7)
    whole, planned = (
        price(SMALL, machines, Choice(data=7, num_microbatches=2, zero=level), batch_size=14)
        for level in (0, zero)
    )
    assert planned.bytes_per_device == whole.bytes_per_device
    assert planned.bytes_moved == whole.bytes_moved
    assert planned.ranked_by == whole.ranked_by
    told = f"level {zero} shards nothing: data times context, 7, divides no free dim of the params"
    assert told in planned.details(machines.memory_bytes)
    assert "shards nothing" not in whole.details(machines.memory_bytes)
    other = price(SMALL, cluster("h100"), Choice(data=8, zero=zero), batch_size=16)
    assert "shards nothing" not in other.details(machines.memory_bytes)


def test_the_search_takes_zero_0_where_others_shard_nothing():
    machines = cluster("h100", devices_per_node=7)
    for fixed in ({}, {"num_microbatches": 2}):
        (best,) = jaxpar.plan(SMALL, machines, batch_size=14, data=7, top=1, **fixed)
        assert best.choice.zero == 0
    (best,) = jaxpar.plan(SMALL, cluster("h100"), batch_size=16, data=8, top=1)
    assert best.choice.zero > 0


def test_an_update_takes_the_time_of_the_params_whose_state_a_device_has():
    """Where ZeRO leaves some params whole, that is more than its share of them."""
    shape, machines = KEPT(SMALL), cluster("h100")
    estimator = Estimator(shape, machines, 8, optax.adam(1e-4), "spmd", Assumptions())
    updated = []
    for zero in range(4):
        choice = Choice(data=2, stage=2, tensor=2, num_microbatches=2, zero=zero)
        of_param = estimator.at_rest(choice).bytes["optimizer"] / 2  # Adam has two of each
        seconds = estimator.price(choice).ranked_by.update
        assert seconds == pytest.approx(2 * 4 * of_param / memory_rate(machines), rel=1e-3), zero
        updated.append(of_param)
    assert 1.02 * updated[0] / 2 < updated[1] < updated[0]


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_quick_estimate_of_one_stage_lacks_the_embedding_and_the_update_alone(count, tensor):
    shape, machines = transformer_shape(SMALL), cluster("h100")
    estimator = Estimator(shape, machines, 64, optax.adam(1e-4), "spmd", Assumptions())
    choice = Choice(data=8 // tensor, stage=1, tensor=tensor, num_microbatches=count)
    time, prices = estimator.price(choice).time, estimator.prices(choice)
    rest = count * (prices.embed + prices.embed_back) + time.update
    likely = prices.likely() + estimator.seconds_of_data(choice)
    assert likely == pytest.approx(time.total - rest, rel=1e-9)


@pytest.mark.parametrize("width", [80, pytest.param(100, marks=FULL)])
def test_text_fits_the_terminal(width):
    plans = jaxpar.plan(SMALL, cluster("h100"), **OF_FOUR, top=4)
    for text in (
        render(plans, width=width),
        plans[0].details(80e9, width=width),
        plans[-1].details(80e9, width=width),
    ):
        assert max(map(len, text.splitlines())) <= width, text
    shown = render(plans, width=width)
    assert all(f"{plan.step_seconds:.3g}" in shown for plan in plans)
    header, *_ = shown.splitlines()
    for plan in plans if width == 80 else ():
        assert "zero" not in header
        assert f"bubble {plan.bubble_fraction:.1%}, zero {plan.choice.zero}, " in shown


@pytest.mark.parametrize(
    ("name", "chunks", "form"),
    [
        ("1f1b", 1, "published"),
        ("1f1b", 1, "fused"),
        ("zb-h1", 1, "fused"),
        ("interleaved", 2, "fused"),
        ("zb-v", 2, "published"),
    ],
)
def test_makespans_are_the_simulators(name, chunks, form):
    table = make_schedule(name, 4, 12, chunks, form=form, remat=name != "zb-h1")
    rng = random.Random(tiny.fresh_seed())
    scale = tuple(rng.random() for _ in range(4 * chunks))
    costs = Costs(
        **{field: rng.random() for field in ("f", "b", "w", "r", "p2p", "head")}, stage_scale=scale
    )
    structure = structure_of(table)
    seconds = lambda row: sum(costs.of(table, *op) for op in row)
    lockstep = sum(max(map(seconds, tick)) + costs.p2p for tick in structure.ticks)
    for timing, found in (
        ("free", makespan(structure, costs, [costs.p2p] * 4)),
        ("lockstep", lockstep),
    ):
        assert found == pytest.approx(simulate(table, costs, timing=timing).makespan, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "chunks", "shared", "alone"),
    [("gpipe", 1, 8, 0), ("1f1b", 1, 8, 0), ("interleaved", 2, 12, 0), ("zb-h1", 1, 5, 3)],
)
def test_the_head_is_charged_in_the_ticks_in_which_the_program_runs_it(
    schedule, chunks, shared, alone
):
    choice = Choice(stage=4, num_microbatches=8, schedule=schedule, num_chunks=chunks)
    assert sum(choice.heads(8)) == shared
    segments = choice.program(8).segments
    with_head = [each for each in segments if each.has_head and "F" in each.ops]
    assert sum(len(each.ticks) for each in with_head if each.masked) == shared
    shape = KEPT(dataclasses.replace(SMALL, num_layers=8))
    estimator = Estimator(shape, cluster("h100"), 8, optax.sgd(0.1), "spmd", Assumptions())
    prices = estimator.prices(choice)
    assert prices.shares_head
    before = _ticks(prices, 8)
    prices.head_computing += 1
    prices.whole_head += 100
    # What is sent beside a longer head is no longer waited for.
    assert _ticks(prices, 8) - before == pytest.approx(shared + 100 * alone, abs=0.1)


def test_a_softmax_keeps_logits_or_their_gradient_and_not_each_step_in_between():
    config = dataclasses.replace(SMALL, vocab_size=32768, compute_dtype="bfloat16")
    analysis = Analysis(KEPT(config), 4, 1)
    logits, table = 2 * 4 * SMALL.max_positions * 32768, 2 * 32768 * SMALL.embed_dim
    assert logits + table < analysis.head_bytes < 1.5 * logits + 2 * table
    assert logits + table < analysis.head_bytes_of_op < 1.02 * (logits + table), (
        "the table in the forward pass, its gradient after"
    )


def test_a_products_time_follows_its_tiles_and_its_bytes():
    gpu = cluster("a100-80gb")
    seconds = lambda *shape: product_seconds(
        Product(1, *shape, 2 * sum(math.prod(shape) // size for size in shape)), gpu
    )
    rate = lambda *shape: 2 * math.prod(shape) / seconds(*shape) / gpu.peak_flops
    assert gpu.product_share * 0.9 < rate(8192, 8192, 8192) < gpu.product_share
    # 108 multiprocessors: a tile more than they have takes another wave, and fewer leave some of them idle.
    assert rate(256 * 108, 128, 8192) > 1.1 * rate(256 * 109, 128, 8192)
    assert rate(256 * 108, 128, 8192) > 1.1 * rate(256 * 60, 128, 8192)
    # Not less than its bytes take.
    assert product_seconds(Product(1, 128, 128, 64, 10**9), gpu) == pytest.approx(
        10**9 / memory_rate(gpu), rel=0.01
    )


def test_kernels_count_products_and_the_bytes_of_fused_chains():
    layer = lambda w, x: jax.numpy.tanh(x @ w + 1.0) * 2.0
    graph = trace(
        layer, jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((128, 64), "float32")
    )
    found = kernels_of(graph, graph.nodes, graph.outputs, ())
    ((product, count),) = found.products
    assert (product.rows, product.columns, product.depth, count) == (128, 32, 64, 1)
    assert found.num_bytes == 2 * 128 * 32 * 4, "one chain reads the product and writes the result"
    assert found.num_others == 1


def test_a_barrier_is_no_kernel_and_takes_no_memory():
    barrier, shape = jax.lax.optimization_barrier, jax.ShapeDtypeStruct((64, 64), "float32")

    def kernels_and_peak(between):
        def layer(w, x):
            w, h = between((w, jax.numpy.tanh(x)))
            return between(jax.numpy.sin(h @ w))

        graph = trace(layer, shape, shape)
        peak = peak_of_kernels(graph, graph.nodes, graph.inputs, graph.outputs)
        return kernels_of(graph, graph.nodes, graph.outputs, ()), peak

    assert kernels_and_peak(barrier) == kernels_and_peak(lambda values: values)


def test_small_all_reduces_take_a_tree_and_large_ones_a_ring():
    many = Links(node(num_nodes=64), {"data": 512, "stage": 1, "tensor": 1}, 1.0)
    steps = 2 * 9 * 8e-6  # up and down a tree of 512
    assert collective_seconds(many, "data", "all-reduce", 4) == pytest.approx(steps, rel=0.01)
    ring = 2 * 511 / 512 * 1e10 / many.rate("data")
    assert ring < collective_seconds(many, "data", "all-reduce", 10**10) < 1.02 * ring
    assert collective_seconds(many, "data", "all-gather", 10**10) == pytest.approx(
        ring / 2, rel=0.02
    )
    assert collective_seconds(many, "tensor", "all-reduce", 10**10) == 0


def test_what_leaves_a_node_in_an_all_to_all_takes_the_card_of_its_device():
    near, apart = (
        Links(node(num_nodes=4), {"data": 16, "stage": 2, "tensor": size}, 1.0) for size in (1, 2)
    )
    assert collective_seconds(near, "data", "all-to-all", 10**10) == pytest.approx(0.5, rel=0.01), (
        "8 of 16 on another"
    )
    assert collective_seconds(apart, "data", "all-to-all", 10**10) == pytest.approx(
        0.75, rel=0.01
    ), "12 of 16"


def test_fast_links_may_join_more_than_a_node():
    sizes = {"data": 9, "stage": 1, "tensor": 8}
    ordinary, wide = (
        Links(node(num_nodes=9, **given), sizes, 1.0) for given in ({}, {"fast_devices": 72})
    )
    assert ordinary.crosses("data")
    assert not wide.crosses("data")
    assert wide.rate("data") > ordinary.rate("data")


def test_software_changes_times_and_is_named():
    machines, choice = cluster("h100", 2), Choice(data=8, tensor=2, num_microbatches=4, zero=1)
    plain = price("gpt2", machines, choice, batch_size=256)
    told = Software(
        name="Theirs",
        overlaps=("data", "tensor"),
        sequence_parallel=True,
        gradient_bytes=2,
        param_bytes=2,
    )
    theirs = price("gpt2", machines, choice, batch_size=256, software=told)
    assert theirs.time.data < 0.6 * plain.time.data
    assert theirs.time.tensor < plain.time.tensor
    assert theirs.time.compute < plain.time.compute
    assert theirs.bytes_per_device == plain.bytes_per_device
    assert "as Theirs runs it, not jaxpar" in theirs.details(80e9)
    assert theirs.as_json()["software"] == "Theirs"


@pytest.mark.full
def test_recomputing_scores_alone_costs_less_than_recomputing_layers():
    plans = {
        remat: price(
            KEPT("gpt2-xl", attention="xla"),
            cluster("a100-80gb"),
            Choice(data=8, num_microbatches=4, remat=remat),
            batch_size=32,
        )
        for remat in (False, "dots", True)
    }
    flops, stored = (
        {k: pick(plan) for k, plan in plans.items()} for pick in (_flops, _activations)
    )
    assert flops[False] < flops["dots"] < flops[True]
    assert stored[True] < stored["dots"] < stored[False]


def _flops(plan):
    return plan.flops


def _activations(plan):
    return plan.bytes_per_device["activations"]


def test_fused_attention_stores_no_scores():
    config = dataclasses.replace(SMALL, compute_dtype="bfloat16")
    plain, fused = (
        Analysis(KEPT(dataclasses.replace(config, attention=kernel)), 4, 2)
        for kernel in ("xla", planned_attention)
    )
    assert fused.layer.guessed == ()
    assert fused.works["forward"].flops == plain.works["forward"].flops
    assert fused.works["backward"].flops == plain.works["backward"].flops
    stored = lambda each: sum(
        num_bytes(each.layer.shapes(each.split.values[name]))
        for name in ("residuals_b", "residuals_w")
    )
    scores = 4 * SMALL.num_heads // 2 * SMALL.max_positions**2 * 2
    assert stored(plain) - stored(fused) > 0.9 * scores


@pytest.mark.parametrize("stage", [pytest.param(1, marks=FULL), 4])
def test_zero_3_gathers_layers_in_the_dtype_of_the_computation(stage):
    choice = Choice(data=8, stage=stage, num_microbatches=4, zero=3)

    def gathered(dtype):
        shape = KEPT(dataclasses.replace(SMALL, compute_dtype=dtype))
        traffic = step_traffic(
            choice, Analysis(shape, 4, 1), AtRest(shape, optax.adam(1e-3), choice)
        )
        return sum(each.bytes_moved for each in traffic if each.what == "params of a layer")

    # Norms are computed in float32; they are few.
    assert 0.5 * gathered("float32") <= gathered("bfloat16") < 0.51 * gathered("float32")


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "num_microbatches", "most"),
    [
        pytest.param("1f1b", 1, 8, 1.0, marks=FULL),
        ("1f1b", 1, 256, 0.9),
        pytest.param("interleaved", 2, 32, 1.0, marks=FULL),
        ("zb-h1", 1, 32, 1.09),
    ],
)
def test_equal_stages_in_lock_step_take_no_longer_where_collectives_run_beside_products(
    schedule, num_chunks, num_microbatches, most
):
    """zb-h1 has nothing beside its collectives that makes up for what lock-step adds.

    Copying the params of layers out of their stacks takes 5% of its time, embeddings in every tick 1.5%, and heads in those in
    which the pipeline fills 1%.
    """
    sizes = {
        "num_layers": 48,
        "embed_dim": 8192,
        "num_heads": 64,
        "vocab_size": 51_200,
        "max_positions": 2048,
    }
    shape = KEPT(TransformerConfig(**sizes, compute_dtype="bfloat16"), sequence_parallel=True)
    choice = Choice(
        stage=8,
        tensor=8,
        schedule=schedule,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
    )
    plan = price(shape, cluster("h100", 8), choice, batch_size=num_microbatches)
    assert plan.time.total < most * plan.ideal_time.total


# The roofline of steps compiled for H100 with jax 0.10.2: milliseconds in the order in which they are compiled, and GiB; the
# first with 0.12.0.1.
COMPILED = [
    ("llama3.1-8b", 1, 8192, Choice(data=8, zero=3), 511, 40.6),
    ("llama3.1-8b", 1, 8192, Choice(data=2, tensor=4, num_microbatches=8, zero=1), 1164, 32.7),
    ("llama3.1-8b", 1, 8192, Choice(tensor=8, num_microbatches=16), 1249, 20.2),
    (
        "llama3.1-8b",
        1,
        8192,
        Choice(data=2, stage=2, tensor=2, num_microbatches=8, zero=1),
        1290,
        47.8,
    ),
    ("llama3.1-8b", 1, 4096, Choice(stage=8, num_microbatches=32), 1435, 46.3),
    (
        "llama3.1-70b",
        8,
        8192,
        Choice(data=2, stage=4, tensor=8, num_microbatches=16, zero=1),
        3033,
        56.3,
    ),
]


@pytest.mark.full
def test_plans_are_as_far_from_one_another_as_their_compiled_steps():
    """A plan's kernels are below the datasheet's rates, of which a roofline is: the ratio of the two is that of all jobs."""
    ratios = []
    for name, nodes, seq, choice, milliseconds, gib in COMPILED:
        config = preset(
            name, compute_dtype="bfloat16", vocab_multiple=128, attention=planned_attention
        )
        shape = KEPT(config, seq=seq, sequence_parallel=choice.tensor > 1)
        rows = choice.data * choice.num_microbatches
        plan = price(
            shape, cluster("h100", nodes), choice, batch_size=rows, optimizer=optax.adamw(1e-4)
        )
        ratios.append(1e3 * plan.step_seconds / milliseconds)
        assert plan.memory_bytes / 2**30 == pytest.approx(gib, rel=0.1), choice
    middle = (max(ratios) + min(ratios)) / 2
    assert ratios == pytest.approx([middle] * len(ratios), rel=0.1)


def test_times_add_up_and_the_bubble_is_the_simulators():
    choice = Choice(stage=4, num_microbatches=8)
    assumed = Assumptions(compute=1, network=1)
    fast = node(
        node_bandwidth=1e30,
        network_bandwidth=1e30,
        node_latency_seconds=1e-30,
        network_latency_seconds=1e-30,
    )
    plan = price(SMALL, fast, choice, batch_size=8, executor="mpmd", assumed=assumed)
    assert plan.step_seconds == pytest.approx(sum(vars(plan.ideal_time).values()))
    even = simulate(choice.table(8, "published")).bubble_fraction
    assert plan.bubble_fraction == pytest.approx(even, abs=0.12), "but for the head and unequal ops"
    rounded = dataclasses.replace(plan.ranked_by, bubble=-1e-17)
    assert dataclasses.replace(plan, time=rounded, ideal_time=rounded).bubble_fraction >= 0, (
        "shown as -0.0%"
    )


def test_what_rounding_leaves_of_a_difference_is_no_time_of_a_bubble():
    """`seconds.bubble` of `plan --json` was -2e-16 where one device does all."""
    assert difference(0.1 + 0.2, 0.3) == 0
    assert difference(0.3, 0.1 + 0.2) == 0
    assert difference(1.0, 1.5) == -0.5, "what is no rounding is left as it is"
    assert difference(1 + 1e-9, 1) > 0


def test_lora_needs_no_state_and_no_products_for_gradients_of_frozen_params():
    lora, choice = Lora(4, LAYER_WEIGHTS), Choice(data=2, stage=2, num_microbatches=4, zero=1)
    whole, factors = (
        price(transformer_shape(SMALL, lora=given), cluster("h100", 1, 4), choice, batch_size=64)
        for given in (None, lora)
    )
    for kind in ("optimizer", "gradients"):
        assert factors.bytes_per_device[kind] < 0.1 * whole.bytes_per_device[kind]
    assert factors.bytes_per_device["params"] > whole.bytes_per_device["params"]
    assert factors.bytes_moved["data"] < 0.1 * whole.bytes_moved["data"]
    assert factors.useful_flops < 0.8 * whole.useful_flops


CODED = TransformerConfig(
    vocab_size=64, num_layers=2, embed_dim=128, num_heads=2, mlp_dim=256, max_positions=32
)


def with_and_without_codes():
    return [
        transformer_shape(CODED, lora=Lora(4, LAYER_WEIGHTS), quantize=kind)
        for kind in (None, "nf4", "nf4-dq")
    ]


def test_a_model_has_as_many_parameters_in_four_bits():
    whole, coded, doubly = with_and_without_codes()
    assert whole.num_params == coded.num_params == doubly.num_params
    assert num_bytes(jax.tree.leaves(coded.params)) < 0.4 * num_bytes(jax.tree.leaves(whole.params))


@pytest.mark.full
def test_weights_in_four_bits_take_their_codes_and_scales_and_the_traffic_of_whole_ones():
    choice = Choice(tensor=2, num_microbatches=2)
    shapes = with_and_without_codes()
    whole, coded, doubly = (
        price(each, cluster("h100", 1, 2), choice, batch_size=4) for each in shapes
    )
    weights = 2 * (
        4 * 128 * 128 + 2 * 128 * 256
    )  # of both layers, in float32 and at four bits with a scale for each 64
    saved = whole.bytes_per_device["params"] - coded.bytes_per_device["params"]
    assert saved == weights * (4 - 0.5 - 4 / 64) / 2
    assert whole.bytes_moved == coded.bytes_moved
    assert whole.useful_flops == coded.useful_flops
    assert whole.bytes_per_device["activations"] == coded.bytes_per_device["activations"]
    # A byte for each scale, and 4 for each output of a weight, of which a weight split by row has all on each device.
    of_outputs = 4 * 2 * (3 * 128 / 2 + 128 + 256 / 2 + 128)
    saved = coded.bytes_per_device["params"] - doubly.bytes_per_device["params"]
    assert saved == weights * 3 / 64 / 2 - of_outputs
    assert doubly.bytes_moved == coded.bytes_moved


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            r"beside factors of LoRA, in a model without experts; got quantize=nf4, no factors\. .* give lora_rank=8",
        ),
        (
            {"lora": Lora(4, LAYER_WEIGHTS), "config": "moe-bytes"},
            r"got quantize=nf4, a model with experts\. Leave it out\.",
        ),
    ],
)
def test_codes_are_planned_beside_factors_and_without_experts(settings, message):
    with pytest.raises(ValueError, match=message):
        transformer_shape(**{"config": "llama-bytes", "quantize": "nf4"} | settings)


@pytest.mark.full
def test_candidates_come_in_the_order_of_their_estimates_and_are_held_against_the_memory_only_in_their_turn():
    shape, held = KEPT(SMALL), {"num_microbatches": 4}
    estimator = Estimator(shape, cluster("h100"), 64, optax.adam(1e-4), "spmd", Assumptions())
    seconds, choices = zip(
        *likely_choices(estimator, held, lambda seconds, choice: False), strict=True
    )
    assert len(set(choices)) == len(choices) > 20
    assert list(seconds) == sorted(seconds)
    likely = estimator.prices(choices[0]).likely() + estimator.seconds_of_data(choices[0])
    assert seconds[0] == pytest.approx(likely)
    limit, begun = seconds[0] * 1.5, len(estimator._states)
    lazy = Estimator(shape, cluster("h100"), 64, optax.adam(1e-4), "spmd", Assumptions())
    few = list(likely_choices(lazy, held, lambda seconds, choice: seconds > limit))
    assert [choice for each, choice in few if each <= limit] == [
        choices[n] for n, each in enumerate(seconds) if each <= limit
    ]
    assert len(lazy._states) < begun


@pytest.mark.parametrize("executor", [pytest.param("spmd", marks=FULL), "mpmd"])
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("1f1b", marks=FULL),
        "zb-h1",
        pytest.param("gpipe", marks=FULL),
        pytest.param("interleaved", marks=FULL),
        pytest.param("zb-v", marks=FULL),
    ],
)
def test_no_plan_of_a_sweep_has_a_negative_bubble(schedule, executor):
    held = {"stage": 4, "schedule": schedule, "num_microbatches": 64, "remat": False, "zero": 0}
    for plan in jaxpar.plan(SMALL, cluster("a100-40gb"), batch_size=512, executor=executor, **held):
        assert plan.bubble_fraction > 0, plan.choice


@pytest.mark.parametrize(
    "held",
    [
        pytest.param({"tensor": 2}, marks=FULL),
        pytest.param({"stage": 2, "schedule": "zb-h1"}, marks=FULL),
        {"zero": 0, "data": 4},
        pytest.param({"remat": True}, marks=FULL),
    ],
)
def test_what_is_held_is_kept(held):
    for plan in jaxpar.plan(SMALL, cluster("h100"), **OF_FOUR, top=3, **held):
        assert all(getattr(plan.choice, name) == value for name, value in held.items())


def test_what_does_not_fit_is_named_with_the_nearest_that_does():
    shape = mlp(4096, 16384, 8)
    held = {
        "tensor": 1,
        "stage": 2,
        "zero": 0,
        "remat": False,
        "schedule": "1f1b",
        "num_microbatches": 16,
    }
    with pytest.raises(
        ValueError,
        match=r"mlp needs [\d.]+ GiB a device at tensor=1, stage=2, data=4; have 7\.2, since 10% of 8 stays free\. ",
    ):
        jaxpar.plan(shape, node(memory_bytes=8 * 2**30), batch_size=64, **held)
    of_one = node(memory_bytes=3 * 2**30, devices_per_node=1)
    with pytest.raises(
        ValueError,
        match=r"mlp needs [\d.]+ GiB a device at .*; have 2\.7, .*\. Nearest: \d+ nodes\.",
    ) as told:
        jaxpar.plan(shape, of_one, batch_size=4)
    fewest = int(str(told.value).split()[-2])
    assert jaxpar.plan(shape, dataclasses.replace(of_one, num_nodes=fewest), batch_size=4)
    with pytest.raises(ValueError, match="mlp needs"):
        jaxpar.plan(shape, dataclasses.replace(of_one, num_nodes=fewest - 1), batch_size=4)
    with pytest.raises(ValueError, match=r"Nearest: (\d+) nodes\.$") as told:
        jaxpar.plan(shape, of_one, batch_size=16, replica=1, tensor=1, zero=1)
    more = dataclasses.replace(of_one, num_nodes=int(str(told.value).split()[-2]))
    assert jaxpar.plan(shape, more, batch_size=16, replica=1, tensor=1, zero=1)
    of_three = dataclasses.replace(
        of_one, num_nodes=3
    )  # 6 nodes fit, or more, and fewer than a multiple of 3 as well
    with pytest.raises(ValueError, match=rf"Nearest: {fewest} nodes\."):
        jaxpar.plan(shape, of_three, batch_size=4)


def followed(said, settings, machines):
    """Returns the settings and the machines that the remedy at the end of a message names."""
    *_, remedy = re.findall(r"(?:Nearest: |Choose |Leave ).*", said)
    settings = dict(settings)
    if left_out := re.findall(r"Leave (.*) out|without a fixed (.*)\.", remedy):
        for name in re.split(" and | or ", "".join(left_out[0])):
            del settings[name]
    if nodes := re.findall(r"(\d+) nodes", remedy):
        machines = dataclasses.replace(machines, num_nodes=int(nodes[0]))
    values = re.findall(r"(\w+)=(\w+(?:\.\d+)?)|(\w+) from (\w+)", remedy)
    for name, value in (filter(None, each) for each in values):
        settings[name] = float(value) if "." in value else int(value)
    assert left_out or nodes or values, remedy
    return settings, machines


LONG_ROWS = TransformerConfig(
    vocab_size=512,
    num_layers=4,
    embed_dim=2048,
    num_heads=16,
    max_positions=512,
    attention=flash_attention,
    compute_dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("memory", "settings", "remedy"),
    [
        (4, {"replica": 8}, "Nearest: replica=1."),
        (4, {"replica": 4, "tensor": 2, "schedule": "zb-h1"}, "Nearest: replica=1."),
        (4, {"replica": 4, "data": 2, "schedule": "1f1b"}, "Nearest: replica=1, data="),
        (4, {"replica": 2, "data": 4, "tensor": 1, "stage": 1, "zero": 0}, "Nearest: replica=1, data="),
        (80, {"memory_headroom": 0.998, "tensor": 1, "stage": 1}, "Nearest: memory_headroom=0.9"),
        (2, {"replica": 8, "stage": 1, "tensor": 1}, " nodes, without a fixed replica or stage or tensor."),
    ],
)  # fmt: skip
def test_what_a_mesh_without_the_memory_is_told_to_change_fits(memory, settings, remedy):
    model, machines = mlp(4096, 16384, 8), node(memory_bytes=memory * 2**30)
    settings = {"batch_size": 16} | settings
    with pytest.raises(ValueError, match=r"needs .* GiB a device") as told:
        jaxpar.plan(model, machines, **settings)
    assert remedy in str(told.value)
    settings, machines = followed(str(told.value), settings, machines)
    assert jaxpar.plan(model, machines, top=1, **settings)


def test_all_settings_are_to_be_left_out_where_no_single_one_makes_room():
    whole = dataclasses.replace(
        mlp(4096, 16384, 1), rules={"**": jaxpar.replicated()}
    )  # which neither tensor nor stage splits
    settings, machines = {"batch_size": 16, "replica": 8, "zero": 0}, node(memory_bytes=1.6e9)
    with pytest.raises(ValueError, match=r"Leave replica and zero out\.") as told:
        jaxpar.plan(whole, machines, **settings)
    settings, machines = followed(str(told.value), settings, machines)
    assert jaxpar.plan(whole, machines, top=1, **settings)


def test_another_context_is_the_nearest_where_that_alone_fits():
    settings = {"batch_size": 8, "context": 2, "replica": 4}
    machines = node(memory_bytes=1.3 * 2**30)
    with pytest.raises(ValueError, match=r"Nearest: replica=1\.") as told:
        jaxpar.plan(KEPT(LONG_ROWS), machines, **settings)
    settings, machines = followed(str(told.value), settings, machines)
    assert jaxpar.plan(KEPT(LONG_ROWS), machines, top=1, **settings)


@pytest.mark.parametrize(
    ("tokens", "devices", "rows"),
    [
        (1024, 8, 4096),
        (1024, 7, 7 * 576),
        (1024, 3, 3 * 1280),
        (8192, 512, 512),
        (8192, 768, 384),
        (8192, 1025, 512),
        (2**30, 4, 1),
    ],
)
def test_rows_by_default_are_round_numbers_that_the_devices_divide(tokens, devices, rows):
    shape = dataclasses.replace(mlp(8, 8, 2), tokens_per_row=tokens)
    assert _usual_rows(shape, node(devices_per_node=devices)) == rows


def test_what_a_refusal_of_the_model_proposes_divides_the_devices_too():
    twelve_heads = TransformerConfig(
        vocab_size=512, num_layers=4, embed_dim=96, num_heads=12, max_positions=64
    )
    machines = cluster("h100", num_nodes=2)
    with pytest.raises(
        ValueError, match=r"got 12 of shape .*, tensor=16\. Choose tensor from 1, 2, 4\.$"
    ):
        jaxpar.plan(KEPT(twelve_heads), machines, batch_size=64, tensor=16)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("loss", r"loss_sum and weight_sum must .*; got loss_sum "),
        ("layer", r"layer must treat each row of a batch on its own.*; got one that mixes them"),
    ],
)
def test_a_plan_of_what_no_step_takes_is_refused(part, message):
    shape = mlp(64, 64, 2)
    of_one = lambda outputs, batch: (jnp.sum((outputs - batch["y"]) ** 2), jnp.float32(1))
    mixing = lambda params, x: (
        jnp.tanh((x - x.mean(0, keepdims=True)) @ params["up"]) @ params["down"]
    )
    changed = {
        "loss": {"loss": of_one},
        "layer": {"model": dataclasses.replace(shape.model, layer=mixing)},
    }
    own = dataclasses.replace(shape, **changed[part], cache={})
    for top in (1, 8):  # how many plans are shown decides nothing
        with pytest.raises(ValueError, match=message):
            jaxpar.plan(own, node(), batch_size=64, top=top)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster("v100"), r"gpu must be one of a100-40gb, .*; got 'v100'\."),
        (lambda: node(peak_flops=0), r"peak_flops of a cluster must be positive; got 0\."),
        (
            lambda: Assumptions(compute=1.5),
            r"an efficiency must be a share of the datasheet's figure; got compute=1.5\. Choose more than 0",
        ),
        (
            lambda: Software(overlaps=("model",)),
            r"overlaps must be mesh axes, replica, data, context, stage, tensor; got \['model'\]\.",
        ),
        (
            lambda: Software(gradient_bytes=3),
            r"gradient_bytes must be 1, 2, 4 or 8; got 3\. Choose 2",
        ),
        (
            lambda: Software(message_seconds=-1),
            r"message_seconds must be 0 or more; got -1\. Choose 0\.",
        ),
        (lambda: Software(recompute=2), r"recompute must be a share, 0 to 1; got 2\."),
        (lambda: Software(product_rate=0), r"product_rate must be positive; got 0\."),
        (lambda: Software(expert_imbalance=0.5), r"expert_imbalance must be 1 or more; got 0\.5\."),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, pipeline=2),
            r"a fixed setting must be one of .*; got \['pipeline'\]",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, schedule="2f2b"),
            r"schedule must be one of gpipe, 1f1b, .*; got '2f2b'",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, executor="fast"),
            r'executor must be "spmd" or "mpmd"; got \'fast\'',
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, top=0),
            r"top must be at least 1; got 0",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=66, tensor=2, stage=1),
            r"data must divide the batch; got data=4.* batch_size=68",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, tensor=3),
            r"the axes must multiply to the devices; got tensor=3, which 8 devices cannot be divided into. Choose tensor",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, experts="data"),
            r"experts is for a model with experts; got experts=data and ",
        ),
        (
            lambda: jaxpar.plan(KEPT("gpt2", seq=60), node(), batch_size=64, context=4),
            r"divisible by twice the context axis.*; got seq=60, context=4\. Use seq=64, or another context",
        ),
        (
            lambda: price(SMALL, node(), Choice(data=8, num_microbatches=3), batch_size=64),
            r"data times num_microbatches must divide batch_size; got 8 times 3 and batch_size=64. Choose a batch_size of 48\.",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


GPT2 = ("--model", "gpt2", "--gpu", "h100", "--batch-size", "64", "--num-microbatches", "2")


@pytest.mark.full
def test_the_command_prints_a_table_or_a_list_for_programs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    args = ["plan", *GPT2, "--tensor", "1"]
    assert main([*args, "--out-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "gpt2, 0.1245 billion parameters, 64 rows of 1024 tokens a step, flash attention, on 1 x 8 h100"
    )
    assert "best: tensor=1, stage=1, data=8" in out
    assert max(map(len, out.splitlines())) <= 100
    assert (tmp_path / "placement.svg").exists()
    assert (tmp_path / "memory.svg").exists()
    assert (tmp_path / "time.svg").exists()
    drawn = tmp_path / "of json"
    assert main([*args, "--json", "--remat", "no", "--out-dir", str(drawn)]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert {each.name for each in drawn.iterdir()} == {each.name for each in tmp_path.glob("*.*")}
    assert len(plans) > 1
    assert plans[0] | {"data": 8, "stage": 1, "tensor": 1, "remat": False} == plans[0]
    assert plans[0]["memory_bytes"] == sum(plans[0]["bytes_per_device"].values())
    assert main(["plan", "--model", "gpt5"]) == 2
    assert "gpt5" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_slots_and_times_of_many_microbatches_go_on_as_those_of_few(monkeypatch, remat):
    def slots_and_times(schedule, chunks):
        many = Choice(
            stage=4, schedule=schedule, num_chunks=chunks, num_microbatches=40, remat=remat
        )
        found = price("gpt2", cluster("h100", 1), many, batch_size=40)
        return many.num_slots, [found.time.total, found.ideal_time.total]

    extrapolated = [slots_and_times(*each) for each in NUM_CHUNKS.items()]
    monkeypatch.setattr(Choice, "num_simulated", property(lambda self: self.num_microbatches))
    for each, (slots, times) in zip(NUM_CHUNKS.items(), extrapolated, strict=True):
        exact, exact_times = slots_and_times(*each)
        assert slots == exact, each
        assert times == pytest.approx(exact_times, rel=1e-9), each


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (0.01234, 3, "0.0123 s"),
        (9.876, 3, "9.88 s"),
        (1834.2, 3, "1834 s"),
        (180.4, 2, "180 s"),
        (0.5, 2, "0.5 s"),
    ],
)
def test_seconds_are_written_without_powers_of_ten(seconds, digits, text):
    assert seconds_text(seconds, digits) == text


# With layers of one row on one GPU, so that the refusal takes little time.
ONE_ROW = ("--gpus-per-node", "1", "--batch-size", "1", "--remat", "yes")


def test_what_needs_the_memory_is_named_first_with_changes_that_fit(capsys):
    args = ["plan", "--model", "llama3.2-1b", *ONE_ROW, "--top", "1"]
    assert main([*args, "--seq", "32768", "--attention", "xla"]) == 2
    said = capsys.readouterr().err
    assert (
        "llama3.2-1b with rows of 32,768 tokens and attention that stores its scores needs" in said
    )
    assert re.search(
        r"stays free\. The largest part: [a-z]+, [\d.]+ GiB\. Choose --seq 8192 or --attention flash\.$",
        said.strip(),
    )
    assert main([*args, "--seq", "8192", "--attention", "xla"]) == 0
    assert main([*args, "--seq", "32768", "--attention", "flash"]) == 0


def test_shorter_rows_that_fit_are_named_beside_more_nodes():
    sizes = {"vocab_size": 256, "num_layers": 8, "embed_dim": 256, "num_heads": 4}
    config = TransformerConfig(**sizes, positions="rope", compute_dtype="bfloat16")
    of_rows = lambda seq: transformer_shape(config).remake(seq=seq, attention="flash")

    def refused(seq, memory_bytes):
        of_one = node(memory_bytes=memory_bytes, devices_per_node=1)
        with pytest.raises(ValueError, match="needs") as told:
            jaxpar.plan(of_rows(seq), of_one, batch_size=1, memory_headroom=0)
        return str(told.value)

    least = [
        float(re.search(r"needs ([\d.]+) GiB", refused(seq, 2**20))[1]) for seq in (8192, 4096)
    ]
    between = int(sum(least) / 2 * 2**30)
    assert re.search(r"Nearest: seq=4096, or \d+ nodes\.$", refused(8192, between)), least
    of_one = node(memory_bytes=between, devices_per_node=1)
    assert jaxpar.plan(of_rows(4096), of_one, batch_size=1, memory_headroom=0)


def test_rows_and_attention_that_do_not_help_are_not_advised(capsys, tmp_path, monkeypatch):
    args = ["plan", *ONE_ROW, "--gpu", "a100-40gb", "--model"]
    for flags, cause in (
        (["--seq", "16384"], "rows of 16,384 tokens"),
        (["--seq", "2048", "--attention", "xla"], "attention that stores its scores"),
    ):
        assert main([*args, "llama3.2-3b", *flags]) == 2
        said = capsys.readouterr().err
        assert f"llama3.2-3b with {cause} needs" in said
        assert re.search(r"The largest part: [a-z]+, \d+ GiB\. Nearest: \d+ nodes\.$", said.strip())
    monkeypatch.chdir(tmp_path)
    own = "from jaxpar.planner import transformer_shape\nSHAPE = transformer_shape('llama3.2-1b', seq=131072)\n"
    (tmp_path / "own_rows.py").write_text(own)
    assert main([*args, "own_rows:SHAPE"]) == 2
    said = capsys.readouterr().err
    assert "with rows of 131,072 tokens needs" in said
    assert "--seq" not in said, "a flag that is refused for a ModelShape"


@pytest.mark.parametrize("fixed", [[], ["--tensor", "2"], ["--tensor", "4", "--stage", "1"]])
def test_attention_that_sequences_over_context_need_is_named_beside_any_mesh(fixed, capsys):
    args = ["plan", "--model", "gpt2", "--seq", "256", "--batch-size", "8", "--context", "2"]
    assert main([*args, *fixed, "--attention", "xla"]) == 2
    assert capsys.readouterr().err.strip().endswith("by flag --attention flash.")
    assert main([*args, *fixed, "--attention", "flash", "--top", "1"]) == 0


def test_flash_attention_of_a_model_in_float32_is_refused(monkeypatch, capsys):
    """No such kernel is there: a run stores the scores."""
    config = dataclasses.replace(SMALL, compute_dtype="float32")
    configs = {"WIDE": config, "NARROW": dataclasses.replace(config, compute_dtype="bfloat16")}
    monkeypatch.setitem(sys.modules, "of_test", SimpleNamespace(**configs))
    given = ["plan", *HELD, "--attention", "flash", "--model"]
    assert main([*given, "of_test:WIDE"]) == 2
    told = "is a kernel for 16 bits; got --attention flash and a compute_dtype of float32. Choose --attention xla"
    assert told in capsys.readouterr().err
    assert main([*given, "of_test:NARROW"]) == 0
    assert main(["plan", *HELD, "--attention", "xla", "--model", "of_test:WIDE"]) == 0


HELD = (
    "--batch-size",
    "8",
    "--num-microbatches",
    "1",
    "--gpus-per-node",
    "2",
    "--tensor",
    "2",
    "--json",
)


def test_the_command_plans_factors_beside_the_weights_that_are_named(capsys):
    assert PlanFlags.lora_targets == LoraFlags.lora_targets == (*LAYER_WEIGHTS,)
    args = ["plan", "--model", "moe-bytes", *HELD, "--top", "1", "--lora-rank", "8"]
    assert main(args) == 2
    said = capsys.readouterr().err
    assert "got w_up w_down for a model that has none of these names, whose" in said
    (remedy,) = re.findall(r"Give (--lora-targets .*)\.", said)
    assert main([*args, *remedy.split()]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["lora_targets"] == ["w_qkv", "w_out"]
    for targets, message in (
        (("w_out", "w_out"), r"each once; got w_out w_out\. Choose among w_qkv w_out w_up w_down"),
        ((), r"each once; got none\. Choose among"),
    ):
        with pytest.raises(ValueError, match=message):
            planned_model(PlanFlags(model="gpt2", lora_rank=8, lora_targets=targets))
    with pytest.raises(ValueError, match=r"applies to lora_rank; got it without that\. Add lora_r"):
        check_plan_flags(PlanFlags(model="gpt2", lora_targets=("w_qkv",)))
    trained = [
        planned_model(PlanFlags(model="gpt2", lora_rank=8, lora_targets=targets)).shape.num_trained
        for targets in (("w_qkv",), ("w_qkv", "w_out"))
    ]
    assert trained == [12 * 8 * (768 + 3 * 768), 12 * 8 * (768 + 3 * 768 + 768 + 768)]


def test_a_window_is_in_the_plan_of_a_model_that_has_one(capsys):
    found = {}
    for name in ("mistral-7b", "gpt2"):
        assert main(["plan", "--model", name, *HELD, "--top", "1", "--lora-rank", "8"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)
        found[name] = plan.get("window"), plan.get("lora_targets")
    assert found == {"mistral-7b": (4096, None), "gpt2": (None, None)}


def test_the_command_plans_for_the_config_of_a_folder(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 500,
    }
    config |= {
        "intermediate_size": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path), *HELD]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    wanted = {"init_from": str(tmp_path), "seq": 8192, "attention": "flash", "batch_size": 8}
    assert plan | wanted == plan
    assert "model" not in plan
    longer = ["plan", "--model", str(tmp_path), *HELD, "--seq"]
    for seq, is_told in (("16384", False), ("32768", True)):
        assert main([*longer, seq]) == 0
        told = f"--seq {seq} is longer than the 16384 positions that {tmp_path} was trained for"
        assert (told in capsys.readouterr().err) == is_told
    for seq, is_told in (("1024", False), ("2048", True)):
        assert main(["plan", "--model", "gpt2", *HELD, "--seq", seq]) == 0
        told = f"--seq {seq} is longer than the 1024 positions of gpt2: its learned table is planned with"
        assert (told in capsys.readouterr().err) == is_told
    for name, remedy in (
        ("./nothing", "got ./nothing, which does not exist. Name the folder of a model."),
        (str(tmp_path / "elsewhere"), "elsewhere, which does not exist. Name the folder of a"),
        ("no-one/model", "download it: hf download no-one/model --local-dir model, and give"),
    ):
        assert main(["plan", "--model", name, *HELD]) == 2
        printed = capsys.readouterr().err
        assert "--model must be a folder with a model; got" in printed
        assert remedy in printed
    assert main(["plan", "--model", "gpt2", "--ignore-config-keys", "attn_pdrop", *HELD]) == 2
    assert (
        "--ignore-config-keys are of the config.json in a folder; got attn_pdrop for gpt2"
        in capsys.readouterr().err
    )


def test_the_command_plans_for_the_model_of_a_module_as_the_page_has_it(
    tmp_path, capsys, monkeypatch
):
    """python -m jaxpar plan --model my_model:SHAPE"""
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
    (program,) = re.findall(r"`my_model.py`:\n\n```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my_model.py").write_text(program + "\nOTHER = 3\n")
    (tmp_path / "wrong_model.py").write_text("raise ValueError('not a number')\n")
    (tmp_path / "program.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "unclosed.py").write_text("def (\n")
    (tmp_path / "talks.py").write_text(f"{program}\nprint('a line of its own')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    assert main(["plan", "--model", "my_model:SHAPE", *HELD]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["tensor"] == 2
    assert not {"model", "seq", "attention"} & set(plan)
    assert plan["own_model"] == "my_model:SHAPE", (
        "by which `manifest` tells that a recipe trains another"
    )
    assert (plan["gpu"], plan["nodes"], plan["gpus_per_node"]) == ("h100", 1, 2), (
        "by which `manifest` makes nodes"
    )
    assert main(["plan", "--model", "my_model:SHAPE", *(f for f in HELD if f != "--json")]) == 0
    assert re.search(r" rate +[\d,]+ rows/s; ", capsys.readouterr().out)
    for given, message in (
        (["my_model:OTHER"], "--model must name a ModelShape; got my_model:OTHER, of type int"),
        (
            ["here/my_model.py:SHAPE"],
            "a module, not its file; got here/my_model.py:SHAPE. Call `plan` in its folder, with --model my_model:SHAPE.",
        ),
        (
            ["my_model:SHAPES"],
            "--model must name a value of my_model; got my_model:SHAPES, which is not there",
        ),
        (
            ["no_model:SHAPE"],
            "--model must name a module that is there; got no_model:SHAPE: No module named 'no_model'",
        ),
        (["wrong_model:SHAPE"], "got wrong_model:SHAPE: ValueError: not a number in"),
        (
            ["program:SHAPE"],
            'program.py:2. Put what runs a program under if __name__ == "__main__", or correct the module.',
        ),
        (["unclosed:SHAPE"], "unclosed.py:1. Correct it."),
        (
            ["a..b:SHAPE"],
            "--model must name a module, as in an import; got a..b:SHAPE. Name a ModelShape",
        ),
        (
            ["my_model:SHAPE", "--seq", "8"],
            "a ModelShape has its own rows, layers and sharding rules; got --seq 8",
        ),
    ):
        assert main(["plan", "--model", *given, *HELD]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", "--model", "my_model:SHAPE"]) == 2
    told = "rows have one token each, and no --batch-size. Give it, over all replicas, such as --batch-size 256"
    assert told in capsys.readouterr().err
    assert main(["plan", "--model", "talks:SHAPE", *HELD]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["own_model"] == "talks:SHAPE"
    assert "a line of its own" in printed.err, "and not between the lines of the JSON"
    own = "from jaxpar.models import transformer\nCONFIG = transformer.preset('llama-bytes', window=8)\n"
    (tmp_path / "own_config.py").write_text(own)
    assert main(["plan", "--model", "own_config:CONFIG", "--seq", "64", *HELD]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    of_rows = {name: plan[name] for name in ("own_model", "seq", "dtype", "window")}
    assert of_rows == {
        "own_model": "own_config:CONFIG",
        "seq": 64,
        "dtype": "float32",
        "window": 8,
    }


@pytest.mark.parametrize(
    ("given", "remedy", "followed"),
    [
        ("--data 3 --tensor 8", "Leave --tensor and --data out.", ""),
        ("--data 3 --stage 5 --tensor 7", "Leave --tensor and --stage and --data out.", ""),
        ("--data 8 --tensor 8 --nodes 8 --batch-size 12", "Leave --tensor and --data out.", "--nodes 8 --batch-size 12"),
        ("--data 8 --num-microbatches 8 --batch-size 12", "Choose --batch-size 64, or another mesh.",
         "--data 8 --num-microbatches 8 --batch-size 64"),
        ("--nodes 3 --gpus-per-node 7 --batch-size 4", "--data 21, the rest of 21 devices with any setting, and 4 rows. Choose",
         "--nodes 3 --gpus-per-node 7 --batch-size 21"),
        ("--nodes 1009 --gpus-per-node 1 --batch-size 4", "Choose --batch-size 1009, or another mesh.",
         "--nodes 1009 --gpus-per-node 1 --batch-size 1009"),
        ("--batch-size 4 --context 8 --num-microbatches 3", "--num-microbatches must divide the rows of a replica; got "
         "--num-microbatches 3, and 4 rows over 1 replica. Choose --batch-size 6.",
         "--batch-size 6 --context 8 --num-microbatches 3"),
        ("--batch-size 10 --context 2 --tensor 1 --stage 1", "got --data 4, the rest of 8 devices with --context 2, --stage 1, "
         "--tensor 1, and 10 rows. Choose --batch-size 12,", "--batch-size 12 --context 2 --tensor 1 --stage 1"),
        ("--data 8 --num-chunks 2", "with which no mesh of 8 devices has stages of the 12 layers of gpt2. Leave --num-chunks o",
         "--data 8"),
        ("--schedule interleaved --num-chunks 50", "Leave --schedule and --num-chunks out.", ""),
        ("--tensor 1 --sequence-parallel", "--sequence-parallel splits activations over the tensor axis; got --tensor 1. Lea",
         "--tensor 2 --sequence-parallel"),
        ("--context 3 --seq 1000", "--context must divide the devices; got --context 3 and 8 devices. Choose it from 1, 2, 4.",
         "--context 4 --seq 1000"),
        ("--replica 2 --data 8 --batch-size 12", "got --replica 2, --data 8, which 8 devices cannot be divided into. Choose "
         "--data from 1, 2.", "--replica 2 --data 2 --batch-size 12"),
        ("--replica 2 --data 4 --batch-size 12", "--replica times --data must divide the batch; got --replica 2, --data 4, and "
         "12 rows. Choose --batch-size 16,", "--replica 2 --data 4 --batch-size 16"),
        ("--stage 8 --schedule interleaved --batch-size 16", "each stage must have a layer for each of its chunks; got "
         "--stage 8, --schedule interleaved, 2 chunks a stage, and 12 layers. Choose --stage from 2, 4.",
         "--stage 2 --schedule interleaved --batch-size 16"),
        pytest.param("--stage 8 --schedule zb-v --batch-size 16", "Choose --stage from 2, 4.",
                     "--stage 4 --schedule zb-v --batch-size 16", marks=FULL),
        ("--stage 8 --num-chunks 2", "got --stage 8, --num-chunks 2 and 12 layers. Leave --num-chunks out.",
         "--stage 8 --batch-size 16"),
    ],
)  # fmt: skip
def test_what_a_mesh_that_does_not_fit_is_told_to_change_fits(capsys, given, remedy, followed):
    assert main(["plan", "--model", "gpt2", *given.split()]) == 2
    assert remedy in capsys.readouterr().err
    assert main(["plan", "--model", "gpt2", "--top", "1", *followed.split()]) == 0


@pytest.mark.parametrize("flag", ["--batch-size", "--nodes", "--seq"])
def test_a_number_whose_divisors_would_take_for_ever_is_refused(capsys, flag):
    assert main(["plan", "--model", "gpt2", flag, "99999999999999999999"]) == 2
    assert (
        f"{flag} must be at most 2147483648; got 99999999999999999999. Choose less."
        in capsys.readouterr().err
    )
    assert divisors(2**31 - 1) == [1, 2**31 - 1]
    assert [divisors(n) for n in (1, 12, 16)] == [[1], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]


@pytest.mark.full
def test_plans_that_do_not_fit_by_the_compilers_account_are_dropped(monkeypatch, capsys):
    args = ["plan", *GPT2, "--tensor", "1", "--remat", "no", "--json"]
    assert main(args) == 0
    first, second, *_ = json.loads(capsys.readouterr().out)
    sizes = iter([10**12, 7])
    monkeypatch.setattr(
        "jaxpar.commands.plans._compile",
        lambda plans, *_: {each.choice: next(sizes) for each in plans},
    )
    monkeypatch.setattr("jaxpar.commands.plans.check_cudnn", lambda otherwise: None)
    monkeypatch.setattr("jaxpar.compile_only.set_compiler_flags", lambda: None)  # too late here
    assert main([*args, "--compile", "2"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert left[0] == second | {"why": left[0]["why"], "compiled_memory_bytes": 7}
    axes = [(each["data"], each["stage"], each["tensor"]) for each in left]
    assert (first["data"], first["stage"], first["tensor"]) not in axes
    sizes = iter([10**12])
    assert main([*args, "--compile", "1", "--top", "1"]) == 2
    said = capsys.readouterr().err
    assert "a plan must fit the memory of a h100 by the compiler's account too; got" in said
    assert "Choose more --nodes, another --gpu, --remat yes, --zero 3, or leave out" in said
    sizes = iter([10**12])
    given = ["--tensor", "1", "--remat", "yes", "--zero", "1"]
    assert main(["plan", *GPT2, *given, "--compile", "1", "--top", "1"]) == 2
    assert "Choose more --nodes, another --gpu, --zero 3, or leave out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--compile", "-1"), "--compile must be at least 0; got -1."),
        (
            ("--compile", "2", "--executor", "mpmd"),
            "got --executor mpmd, --compile 2. Leave one out.",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(capsys, flags, said):
    assert main(["plan", "--model", "gpt2", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
def test_a_missing_compiler_for_gpus_is_named(monkeypatch, capsys):
    monkeypatch.setattr("jaxpar.compile_only.PLUGINS", ())
    monkeypatch.setattr("jaxpar.commands.plans.check_cudnn", lambda otherwise: None)
    monkeypatch.setattr("jaxpar.compile_only.set_compiler_flags", lambda: None)
    assert (
        main(["plan", *GPT2, "--tensor", "1", "--stage", "1", "--remat", "no", "--compile", "1"])
        == 2
    )
    assert "Install it: pip install -e '.[gpu-compile]'" in capsys.readouterr().err


def test_a_published_model_is_planned_with_the_table_of_positions_that_the_recipe_makes():
    asked = PlanFlags(model="gpt2", seq=2048)
    config, _ = config_of_flags(ModelFlags(model="gpt2", dtype="bfloat16"), 2048)
    assert planned_model(asked).shape.num_params == count_params(param_table(config))


@pytest.mark.parametrize(("num_microbatches", "slots"), [(8, 9), (32, 15)])
def test_a_plan_counts_the_slot_to_which_idle_stages_write(num_microbatches, slots):
    choice = Choice(stage=8, num_microbatches=num_microbatches)
    assert choice.num_slots["residuals_b"] == choice.num_slots["residuals_w"] == slots


def test_under_remat_chunks_of_one_layer_keep_only_their_inputs():
    shape = KEPT(
        TransformerConfig(num_layers=16, embed_dim=64, num_heads=4, vocab_size=256), seq=128
    )
    choice = Choice(stage=8, schedule="interleaved", num_chunks=2, num_microbatches=8, remat=True)
    plan = price(shape, cluster("h100"), choice, batch_size=8)
    inputs = choice.num_slots["inbox"] + 1
    assert plan.bytes_per_device["activations"] == inputs * 128 * 64 * 4
