"""Pipelines that are broken on purpose, which parity must notice, and bad input, which is named before anything is compiled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import LayerLayout
from jaxpar.models import mlp
from jaxpar.params import abstract_params
from jaxpar.pipeline.program import NONE, spmd_program
from jaxpar.schedule import SCHEDULES, Op, Schedule, make_schedule
from tests.support import tiny
from tests.support.oracle import distance

# Tests that must be able to fail: broken on purpose, parity breaks.


def mlp_error(schedule="1f1b", **options):
    params, batch = tiny.make_params(), tiny.make_batch(dtype=np.float64)
    mesh = jaxpar.make_mesh(data=2, stage=2)
    options = {"schedule": schedule, "num_microbatches": 4} | options
    value_and_grad = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, **options)
    got = jaxpar.fetch(jax.jit(value_and_grad)(params, jaxpar.shard_batch(batch, mesh)))
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got)):
        return np.inf  # from a slot that nothing was written to
    return distance(got, tiny.reference(params, batch))


@pytest.mark.full
def test_the_unbroken_pipeline_passes_as_the_broken_ones_are_run(x64):
    assert mlp_error() <= 1e-12


@pytest.mark.full
def test_parity_notices_outer_gradients_that_are_not_summed_over_the_stages(x64, monkeypatch):
    """The sums over ``stage`` of all that is no scalar are left out, in whichever of their two forms."""
    psum, psum_scatter = jax.lax.psum, jax.lax.psum_scatter
    left_out = []

    def own(x, axes, **options):
        if "stage" not in axes or jax.tree.leaves(x)[0].ndim == 0:
            return psum(x, axes, **options)
        left_out.append(x)
        return x

    def own_part(x, axes, *, scatter_dimension=0, **options):
        if "stage" not in axes:
            return psum_scatter(x, axes, scatter_dimension=scatter_dimension, **options)
        left_out.append(x)
        size = x.shape[scatter_dimension] // 2
        return jax.lax.dynamic_slice_in_dim(
            x, jax.lax.axis_index("stage") * size, size, scatter_dimension
        )

    monkeypatch.setattr(jax.lax, "psum", own)
    monkeypatch.setattr(jax.lax, "psum_scatter", own_part)
    assert mlp_error() > 1e-3
    assert left_out


@pytest.mark.few(3)
@pytest.mark.full
@pytest.mark.parametrize(
    "table",
    [
        "F_x",
        "F_microbatch",
        "F_residuals_w",
        "B_ct",
        "B_residuals_b",
        "B_cotangents_w",
        "W_residuals_w",
        "W_cotangents_w",
        "right",
        "left",
    ],
)
@pytest.mark.parametrize("masks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parity_notices_a_table_with_one_number_off_by_one(x64, monkeypatch, table, masks):
    def off_by_one(schedule, *, masks):
        program = spmd_program(schedule, masks=masks)
        values = program.tables[table].copy()
        op = table.partition("_")[0]
        on = program.tables[f"{op}_on"] == 1 if "_" in table else True
        stage, tick = np.argwhere((values != NONE) & on)[-1]
        num_slots = program.num_slots.get(table.split("_", 1)[-1], program.num_slots["inbox"])
        count = 4 if table == "F_microbatch" else num_slots
        assert count > 1, "there is but one slot, so none is wrong"
        values[stage, tick] = (values[stage, tick] + 1) % count
        return replace(program, tables={**program.tables, table: values})

    monkeypatch.setattr("jaxpar.gradients.spmd_program", off_by_one)
    schedule = make_schedule("gpipe", 2, 4, form="unit")
    assert mlp_error("zb-h1" if "cotangents_w" in table else schedule, mask_idle_ops=masks) > 1e-6


@pytest.mark.full
def test_parity_notices_layers_in_another_order(x64, monkeypatch):
    backwards = lambda self, layers: jax.tree.map(lambda leaf: leaf[::-1], layers)
    monkeypatch.setattr(LayerLayout, "in_packed_order", backwards)
    assert mlp_error() > 1e-6


# Bad input is named before anything is compiled.


@pytest.fixture
def compiles_nothing(monkeypatch):
    """Fails a test that comes as far as the program on the mesh."""

    def refuse(*args, **kwargs):
        raise AssertionError("compiled, though the input is bad")

    monkeypatch.setattr("jaxpar.step.run.manual_over_data_and_stage", refuse)


def call(
    *, model=tiny.MODEL, num_layers=2, num_rows=32, data=1, stage=2, num_microbatches=2, **options
):
    table = mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=2 * num_layers)
    params, layout = abstract_params(table), options.get("layout")
    if layout is not None and not layout.is_canonical:
        params = jax.eval_shape(layout.pack_params, params)
    batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), a.dtype), tiny.make_batch()
    )
    mesh = jaxpar.make_mesh(data=data, stage=stage)
    value_and_grad = jaxpar.value_and_grad(
        model, tiny.loss, mesh, num_microbatches=num_microbatches, **options
    )
    return jax.eval_shape(value_and_grad, params, batch)


def with_layer(layer):
    return jaxpar.LayeredModel(mlp.embed, layer, mlp.head)


LATE = Schedule(
    "late", 2, 1, 1, (((Op("F", 0),), (Op("F", 0),)), ((), (Op("B", 0),)), ((Op("B", 0),), ()))
)
BAD = {
    "fewer layers than stages": (
        {"num_layers": 3, "stage": 4},
        "at least one layer for each chunk of each stage; got 3 layers for stage=4, num_chunks=1. Choose a product",
    ),
    "fewer layers than chunks": (
        {"num_layers": 3, "schedule": "zb-v"},
        "got 3 layers for stage=2, num_chunks=2",
    ),
    "a layer with more in its output": (
        {"model": with_layer(lambda p, x: {"x": x, "more": x})},
        "layer must return the structure that it takes; got .* in, .*more.* out; a layer must keep them",
    ),
    "a layer that widens": (
        {"model": with_layer(lambda p, x: jnp.concatenate([x, x], axis=-1))},
        r"layer must return the shapes and dtypes that it takes; got x float32\[32, 8\] in, float32\[32, 16\] out",
    ),
    "a layer that narrows its type": (
        {"model": with_layer(lambda p, x: x.astype(jnp.bfloat16))},
        r"got x float32\[32, 8\] in, bfloat16\[32, 8\] out; a layer must keep them, since layers are chained",
    ),
    "rows that microbatches do not divide": (
        {"num_rows": 32, "num_microbatches": 3},
        "rows of a batch must be divisible by .*; got 32 rows, data=1, num_microbatches=3. Use 33 rows",
    ),
    "rows that data does not divide": (
        {"num_rows": 30, "data": 4, "num_microbatches": 2},
        "got 30 rows, data=4, num_microbatches=2. Use 32 rows",
    ),
    "a table that breaks a dependency": (
        {"schedule": LATE, "num_microbatches": 1},
        "an op must come after what it needs, .* got F of microbatch 0, chunk 0 on stage 1 in tick 0, which needs",
    ),
    "a schedule for other stages": (
        {"schedule": make_schedule("1f1b", 4, 2)},
        "a schedule must be made for the run that uses it; got num_stages=4 in 1f1b and num_stages=2 in the run",
    ),
    "a schedule for other microbatches": (
        {"schedule": make_schedule("1f1b", 2, 8)},
        "got num_microbatches=8 in 1f1b and num_microbatches=2 in the run. Make a new schedule, or change the run",
    ),
    "a schedule for other chunks": (
        {"schedule": make_schedule("interleaved", 2, 2, 2), "num_chunks": 4},
        "got num_chunks=2 in interleaved and num_chunks=4 in the run",
    ),
    "a schedule without remat": (
        {"schedule": make_schedule("1f1b", 2, 2), "remat": True},
        "got remat=False in 1f1b and remat=True in the run",
    ),
    "chunks that a schedule cannot have": (
        {"schedule": "1f1b", "num_chunks": 2},
        "1f1b must have 1 chunk a stage; got num_chunks=2. Choose num_chunks=1, or interleaved",
    ),
    "a V of three chunks": (
        {"schedule": "zb-v", "num_chunks": 3},
        "zb-v must have 2 chunks a stage; got num_chunks=3. Choose num_chunks=2",
    ),
    "a schedule that there is none of": (
        {"schedule": "zb-h2"},
        f"schedule must be one of {', '.join(SCHEDULES)}; got 'zb-h2'. Did you mean 'zb-h1'",
    ),
    "a plain function": (
        {"model": tiny.MODEL.apply},
        "a pipeline needs to know a model's layers; got stage=2 and a plain function. Write the model as",
    ),
    "a layout for other stages": (
        {"layout": LayerLayout(4, 4), "num_layers": 4},
        "a layout must fit the schedule and the packed params; got num_stages=4 in the layout and 2 in the run",
    ),
    "a layout for other chunks": (
        {"layout": LayerLayout(4, 2, 2), "num_layers": 4},
        "got num_chunks=2 in the layout and 1 in the run",
    ),
    "a layout in a loop for a V": (
        {"layout": LayerLayout(4, 2, 2), "num_layers": 4, "schedule": "zb-v"},
        "got placement=loop in the layout and v in the run",
    ),
    "a layout for other layers": (
        {"layout": LayerLayout(4, 2), "num_layers": 6},
        "got layers=4 in the layout and 6 in the run. Make the LayerLayout for this schedule, and pack params with it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_before_anything_is_compiled(compiles_nothing, case):
    options, told = BAD[case]
    with pytest.raises(ValueError, match=told):
        call(**options)


def test_good_input_comes_as_far_as_the_program(compiles_nothing):
    with pytest.raises(AssertionError, match="compiled, though the input is bad"):
        call()
