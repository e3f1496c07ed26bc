"""What the pipeline's compiled program does: its collectives, its memory, its copies, its size. Nothing here runs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.backward.split import split_layer
from jaxpar.models import mlp
from jaxpar.params import abstract_params
from jaxpar.pipeline import LayerLayout, spmd_program
from jaxpar.schedule import SCHEDULES, make_schedule
from tests.support import tiny, tiny_gpt
from tests.support.covering import covering
from tests.support.tiers import quick

WIDTH, ROWS = 8, 2  # rows of a microbatch on a device


def compiled(
    name, mesh, *, num_layers=8, num_microbatches=8, remat=False, form="unit", masks=False
):
    """The program of the loss and gradients of an MLP on a mesh, and its report."""
    return _compiled(name, mesh, num_layers, num_microbatches, remat, form, masks)


@functools.cache
def _compiled(name, mesh, num_layers, num_microbatches, remat, form, masks):
    data, stage, tensor = mesh
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    schedule = make_schedule(name, stage, num_microbatches, form=form, remat=remat)
    layout = LayerLayout(num_layers, stage, schedule.num_chunks, schedule.placement)
    table = mlp.param_table(
        tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=WIDTH, num_hidden=2 * layout.num_positions
    )
    shapes = abstract_params(table)
    shapes = shapes | {"layers": layout.as_packed(shapes["layers"])}
    params = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s),
        shapes,
        tiny.shardings(mesh, shapes),
    )
    rows = NamedSharding(mesh, PartitionSpec("data"))
    num_rows = data * num_microbatches * ROWS
    batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), a.dtype, sharding=rows),
        tiny.make_batch(),
    )
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL,
        tiny.loss,
        mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        remat=remat,
        layout=layout,
        mask_idle_ops=masks,
    )
    program = jax.jit(value_and_grad).lower(params, batch).compile()
    tables = spmd_program(schedule, masks=masks)
    report = jaxpar.inspect_step(program, mesh=mesh, branch_shares=tables.branch_shares())
    return program, report, tables, layout


ACTIVATION_BYTES = 4 * ROWS * WIDTH


# The programs of other tests: 24 layers are the shapes of buffers that nothing else has.
STAGES = {"mesh": (1, 4, 1), "num_layers": 24}
SHARDS = {"mesh": (2, 2, 2)}


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "remat", "where"),
    covering(
        [
            *((name, False, STAGES) for name in SCHEDULES if name != "gpipe"),
            ("gpipe", False, SHARDS),
            ("zb-h1", True, STAGES),
            ("1f1b", False, SHARDS),
            ("zb-h1", True, SHARDS),
        ],
        SCHEDULES,
        (False, True),
        (STAGES, SHARDS),
    ),
)
def test_a_link_between_stages_carries_one_activation_and_one_gradient_a_microbatch_and_chunk(
    name, remat, where
):
    _, report, program, _ = compiled(name, **where, remat=remat)
    permutes = report.select("collective-permute", "stage")
    assert {each.payload_bytes for each in permutes} == {ACTIVATION_BYTES}
    schedule = program.schedule
    ways = 1 if schedule.num_stages == 2 else 2  # in which the device with the most messages sends
    messages = ways * schedule.num_microbatches * schedule.num_chunks
    assert report.bytes_moved("collective-permute", "stage") == messages * ACTIVATION_BYTES, (
        report.render()
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "where"),
    quick(
        [
            ("1f1b", SHARDS),
            ("zb-h1", SHARDS),
            *((name, STAGES) for name in ("1f1b", "zb-h1", "interleaved", "zb-v")),
        ],
        1,
    ),
)
def test_nothing_but_messages_crosses_stages_in_a_tick_and_at_most_one_each_way(name, where):
    _, report, program, _ = compiled(name, **where)
    in_ticks = [each for each in report.select(axis="stage") if each.conditional]
    assert {each.kind for each in in_ticks} == {"collective-permute"}
    for way in ("send_right", "send_left"):
        assert (
            0
            < sum(each.times for each in in_ticks if way in each.op_name)
            <= program.schedule.num_ticks
        )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_cross_data_once_a_step_and_the_stages_share_those_of_outer_once(name):
    _, report, _, _ = compiled(name, (2, 2, 2))
    weight, gradients = sorted(report.select(axis="data"), key=lambda each: each.payload_bytes)
    for each in (weight, gradients):
        assert (each.kind, each.times, each.conditional) == ("all-reduce", 1, False)
    assert weight.payload_bytes == 4
    assert not report.select("all-to-all")
    once = [each for each in report.select(axis="stage") if not each.conditional]
    assert {each.kind for each in once} <= {"all-gather", "all-reduce", "reduce-scatter"}
    outer = 4 * WIDTH * (tiny.NUM_FEATURES + tiny.NUM_CLASSES + 1)
    assert sum(each.bytes_moved for each in once) <= 3 * outer, (
        "outer is gathered once, its gradients are reduced once"
    )
    others = {frozenset(each.axes) for each in report.collectives} - {
        frozenset({axis}) for axis in ("data", "stage")
    }
    assert others == {frozenset({"tensor"})}


@pytest.mark.parametrize("remat", quick([False, True], False))
def test_tensor_parallelism_costs_one_all_reduce_a_pair_of_weights_each_way_inside_the_branches(
    remat,
):
    """Megatron's: one after the row-parallel weight forward, one before the column-parallel one backward."""
    _, report, program, layout = compiled("zb-h1", (2, 2, 2), remat=remat)
    reductions = report.select(axis="tensor")
    assert {each.kind for each in reductions} == {"all-reduce"}
    assert all(each.conditional for each in reductions), (
        "a stage that idles takes part in no reduction"
    )
    # F (and R, where there is one) and B have one each; W has none.
    runs = program.schedule.num_microbatches * layout.positions_per_chunk
    got = sorted((each.payload_bytes, each.times) for each in reductions)
    assert got == [(ACTIVATION_BYTES, runs)] * (3 if remat else 2)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-h1"])
def test_temp_bytes_do_not_grow_with_the_number_of_microbatches(name):
    few, many = (
        compiled(name, (2, 2, 2), num_microbatches=count)[1].memory.temp_bytes for count in (8, 64)
    )
    assert few == many


@pytest.mark.full
def test_temp_bytes_of_gpipe_do_grow():
    few, many = (
        compiled("gpipe", (2, 2, 2), num_microbatches=count)[1].memory.temp_bytes
        for count in (8, 64)
    )
    assert many > 4 * few


def num_instructions(program):
    return program.as_text().count(" = ")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("1f1b", {"num_microbatches": 64}, marks=pytest.mark.slow),
        pytest.param("zb-h1", {"num_microbatches": 64}, marks=pytest.mark.full),
        pytest.param("zb-h1", {"num_layers": 64}, marks=pytest.mark.full),
        pytest.param("1f1b", {"num_layers": 64}, marks=pytest.mark.slow),
    ],
)
def test_the_program_does_not_grow_with_microbatches_or_layers(name, more):
    few, many = (
        num_instructions(compiled(name, (2, 2, 2), **options)[0]) for options in ({}, more)
    )
    assert abs(many - few) <= 0.01 * few, f"{few} instructions at 8, {many} at 64"


def ring_shapes(program, layout):
    """The dims of every buffer that waits on a stage, beside the inbox's for x alone."""
    one_layer = {
        "w_up": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "b_up": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
        "w_down": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "b_down": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    split = split_layer(mlp.layer, one_layer, x)
    stored = {name: split.shapes(name) for name in ("residuals_b", "residuals_w", "cotangents_w")}
    rings = {(program.num_slots["inbox"] + 1, *x.shape)}
    for buffer, shapes in stored.items():
        rings |= {
            (program.num_slots[buffer], layout.positions_per_chunk, *shape.shape)
            for shape in shapes
        }
    return rings


def copies_in_loops(text):
    """The dims of what is copied outside the entry computation, which runs once."""
    dims, entry = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            entry = line.startswith("ENTRY")
        found = re.search(r"= \w+\[([\d,]*)\]\S* copy\(", line)
        if found and not entry:
            dims.append(tuple(int(d) for d in found[1].split(",") if d))
    return dims


@pytest.mark.parametrize(
    ("name", "remat"),
    quick(
        [
            ("1f1b", False),
            ("zb-h1", False),
            ("zb-h1", True),
            ("interleaved", False),
            ("zb-v", False),
        ],
        0,
        2,
    ),
)
def test_no_buffer_is_copied_in_a_tick(name, remat):
    program, _, tables, layout = compiled(name, **STAGES, remat=remat)
    rings, text = ring_shapes(tables, layout), program.as_text()
    missing = {ring for ring in rings if f"[{','.join(map(str, ring))}]" not in text}
    assert not missing, (
        f"no buffer of the program has these shapes, so none is seen to be copied: {missing}"
    )
    copied = rings.intersection(copies_in_loops(text))
    assert not copied, f"copied in a tick: {copied}, of the buffers {rings}"


def test_copies_in_loops_are_found():
    """The test above must be able to fail: a loop that reads what it has overwritten copies it."""

    def loop(ring):
        def body(i, ring):
            new = jax.lax.dynamic_update_slice(ring, ring[:1] + 1, (i % 4, 0))
            return jnp.where(i > 2, jnp.sort(ring, axis=1) + new, new)

        return jax.lax.fori_loop(0, 4, body, ring)

    text = jax.jit(loop).lower(np.zeros((4, 8), np.float32)).compile().as_text()
    assert (4, 8) in copies_in_loops(text)


@pytest.mark.slow
def test_products_of_ops_that_are_masked_or_skipped_are_counted_as_often_as_they_run():
    """zb-h1 on 2 stages, with 8 microbatches: the last two of its ten ticks skip, all others mask."""
    settings = {"name": "zb-h1", "mesh": (1, 2, 1), "form": "fused"}
    (_, skipped, _, _), (_, masked, program, layout) = (
        compiled(**settings),
        compiled(**settings, masks=True),
    )
    assert [(len(each.ticks), each.masked) for each in program.segments] == [
        (1, True),
        (1, True),
        (6, True),
        (2, False),
    ]
    products = 2 * layout.positions_per_chunk  # of each op and microbatch, two in each layer
    of_layers = 3 * 8 * products * 2 * ROWS * WIDTH**2  # F, B and W
    embed = 8 * 2 * 2 * ROWS * tiny.NUM_FEATURES * WIDTH  # run by F and B
    head = (
        2 * ROWS * WIDTH * tiny.NUM_CLASSES
    )  # each of the three products of the head with a microbatch
    assert skipped.flops == of_layers + embed + 8 * 3 * head
    # In the last two ticks stage 0 runs two Bs and two Ws, and stage 1 one F, one B, one W and one W2, and the whole head. In
    # the others, but for the first, each stage runs the head of one row of two, of which the weight's gradient is no product.
    of_head = 7 * 2 * head / 2 + 3 * head / 2
    assert masked.flops == of_layers / 3 + (of_layers * 2 / 3 + embed) * 8.5 / 8 + of_head


@pytest.mark.slow
def test_tensor_parallelism_of_a_transformer_layer_costs_two_all_reduces_forward_and_two_backward():
    """Megatron's four, of one activation each: after attention and after the MLP, and before them on the way back."""
    mesh, num_microbatches = jaxpar.make_mesh(data=2, stage=2, tensor=2), 4
    params = tiny_gpt.make_params(num_layers=4, dtype=np.float32)
    batch = tiny_gpt.make_batch(num_rows=2 * num_microbatches * ROWS, dtype=np.float32)
    rules = tiny_gpt.RULES | {"outer/tokens": jaxpar.replicated()}
    value_and_grad = jaxpar.value_and_grad(
        tiny_gpt.MODEL, tiny_gpt.loss, mesh, schedule="zb-h1", num_microbatches=num_microbatches
    )
    args = (
        jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, rules)),
        jaxpar.shard_batch(batch, mesh),
    )
    report = jaxpar.inspect_step(jax.jit(value_and_grad), *args, mesh=mesh)
    ticks = make_schedule("zb-h1", 2, num_microbatches, form="fused").num_ticks
    activation = 4 * ROWS * batch["tokens"].shape[1] * params["outer"]["tokens"].shape[1]
    reductions = report.select(axis="tensor")
    assert [
        (each.kind, each.payload_bytes, each.times, each.conditional) for each in reductions
    ] == [("all-reduce", activation, 2 * ticks, True)] * 4
