"""Gradients of a pipeline's layers, reduced over the replicas in the last tick: the same numbers, as many bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.inspect import inspect_step
from jaxpar.pipeline import join_backward, spmd_program
from jaxpar.schedule import lockstep_form, make_schedule
from tests.support import tiny
from tests.support.oracle import assert_same

NUM_LAYERS = 8
SLOW_LEVELS = [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
UNEVEN = jaxpar.LayerLayout(8, 2, layers_per_virtual_stage=(5, 3))
WITH_NONE = jaxpar.LayerLayout(4, 2, layers_per_virtual_stage=(4, 0))
CHUNKS = jaxpar.LayerLayout(7, 2, 2, layers_per_virtual_stage=(3, 1, 2, 1))


def make_params(num_layers=NUM_LAYERS, dtype=np.float64):
    return tiny.draw_params(num_layers, dtype=dtype)


def both(mesh, params, *, masks=True, **settings):
    """Returns the function that reduces in the last tick, and the one that reduces after it."""
    settings = {"num_microbatches": 4, "shardings": tiny.shardings(mesh, params)} | settings
    return [
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, overlap_grad_reduce=overlap, mask_idle_ops=masks, **settings)
        for overlap in (True, False)
    ]


def check_parity(sizes, layout=None, *, masks=True, **settings):
    """Fails unless gradients equal those of one device; with a layout params are packed by it."""
    mesh = jaxpar.make_mesh(**dict(zip(("data", "stage", "tensor"), sizes, strict=True)))
    params, batch = make_params(layout.num_layers if layout else NUM_LAYERS), tiny.make_batch(dtype=np.float64)
    packed = layout.pack_params(params) if layout else params
    overlapping, _ = both(mesh, packed, masks=masks, layout=layout, **settings)
    loss, grads = overlapping(tiny.on_mesh(mesh, packed), jaxpar.shard_batch(batch, mesh))
    assert_same((loss, layout.unpack_params(jaxpar.fetch(grads)) if layout else grads), tiny.reference(params, batch))


@pytest.mark.parametrize(
    ("schedule", "sizes", "zero", "remat"),
    [
        ("gpipe", (2, 2, 2), 1, True),  # 1f1b is in the tests below
        pytest.param("interleaved", (4, 2, 1), 2, True, marks=pytest.mark.slow),
        pytest.param(
            "zb-v", (2, 2, 2), 0, False, marks=pytest.mark.slow
        ),  # whose last tick is not masked: nothing is reduced in it
        pytest.param("zb-h1", (2, 4, 1), 1, False, marks=pytest.mark.slow),  # likewise
    ],
)
def test_gradients_reduced_in_the_last_tick_equal_one_device(x64, schedule, sizes, zero, remat):
    check_parity(sizes, schedule=schedule, zero=zero, remat=remat)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes", "zero", "layout"),
    [
        ("1f1b", (2, 2, 2), 2, UNEVEN),  # as of the name, masked
        pytest.param("interleaved", (4, 2, 1), 3, None, marks=pytest.mark.slow),
        pytest.param("1f1b", (4, 2, 1), 3, UNEVEN, marks=pytest.mark.slow),
        pytest.param("interleaved", (2, 2, 2), 1, CHUNKS, marks=pytest.mark.slow),
    ],
)
def test_gradients_added_late_beside_a_forward_pass_equal_one_device(x64, name, sizes, zero, layout):
    """In the merged form, whose loop over layers then adds the gradients of the layer before."""
    schedule = make_schedule(name, sizes[1], 4, form="merged")
    overlaps = {"overlap_grad_reduce": True} if zero < 3 else {}
    mesh = jaxpar.make_mesh(**dict(zip(("data", "stage", "tensor"), sizes, strict=True)))
    params, batch = make_params(layout.num_layers if layout else NUM_LAYERS), tiny.make_batch(dtype=np.float64)
    packed = layout.pack_params(params) if layout else params
    settings = {"num_microbatches": 4, "shardings": tiny.shardings(mesh, packed), "layout": layout, "zero": zero}
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, schedule=schedule, mask_idle_ops=True, **settings, **overlaps
    )
    loss, grads = value_and_grad(tiny.on_mesh(mesh, packed), jaxpar.shard_batch(batch, mesh))
    assert_same((loss, layout.unpack_params(jaxpar.fetch(grads)) if layout else grads), tiny.reference(params, batch))


@pytest.mark.slow
@pytest.mark.parametrize("masks", [True, False], ids=["masked", "skipped"])
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 2, 2), (2, 4, 1)])
@pytest.mark.parametrize("schedule", NAMES)
def test_gradients_in_every_schedule_and_level_equal_one_device(x64, schedule, sizes, zero, remat, masks):
    check_parity(sizes, schedule=schedule, zero=zero, remat=remat, masks=masks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "layout", "zero"),
    [
        pytest.param("1f1b", UNEVEN, 0, marks=pytest.mark.slow),
        pytest.param("1f1b", UNEVEN, 1, marks=pytest.mark.slow),
        ("1f1b", WITH_NONE, 0),
        pytest.param("1f1b", WITH_NONE, 1, marks=pytest.mark.slow),
        pytest.param("interleaved", CHUNKS, 1, marks=pytest.mark.slow),
        pytest.param("interleaved", CHUNKS, 2, marks=pytest.mark.slow),
    ],
)
def test_layers_that_some_stages_lack_are_reduced_too(x64, schedule, layout, zero):
    check_parity((2, 2, 2), layout, schedule=schedule, zero=zero)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, *SLOW_LEVELS])
def test_a_backward_pass_that_is_not_split_reduces_in_b(x64, zero):
    schedule = join_backward(make_schedule("1f1b", 2, 4, form="fused"))
    assert spmd_program(schedule, masks=True, overlaps=True).segments[-1].reduces == "B"
    check_parity((2, 2, 2), schedule=schedule, zero=zero)


@pytest.mark.slow  # an update takes gradients wherever they were reduced, and the tests above hold these
@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("interleaved", 2), ("1f1b", 2), ("interleaved", 1)])
def test_params_after_steps_of_adam_equal_one_device(x64, schedule, zero):
    mesh, optimizer = jaxpar.make_mesh(data=2, stage=2, tensor=2), optax.adam(1e-2)
    params = make_params()
    shardings = tiny.shardings(mesh, params)
    state = jaxpar.init_state(lambda _: params, jax.random.key(0), optimizer, mesh, shardings, zero=zero)
    overlapping, _ = both(mesh, params, schedule=schedule, zero=zero)
    step, opt_state = jaxpar.make_train_step(overlapping, optimizer), optimizer.init(params)
    update = tiny.update_on_one_device(optimizer)
    for seed in range(3):
        batch = tiny.make_batch(seed, np.float64)
        state, _ = step(state, jaxpar.shard_batch(batch, mesh))
        params, opt_state = update(tiny.reference(params, batch)[1], opt_state, params)
    assert_same(state.params, params, within=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, *SLOW_LEVELS])
def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(x64, zero):
    mesh, params = jaxpar.make_mesh(data=4, stage=2), make_params()
    batch = tiny.make_batch(dtype=np.float64)
    overlapping, _ = both(mesh, params, zero=zero, grad_reduce_dtype=jnp.float32)
    got, want = overlapping(params, jaxpar.shard_batch(batch, mesh))[1], tiny.reference(params, batch)[1]
    assert_same(got, want, within=1e-6)
    with pytest.raises(AssertionError, match="w_up"):
        assert_same(got["layers"], want["layers"], within=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_in_bfloat16_are_added_in_float32_and_rounded_once(zero):
    mesh, params = jaxpar.make_mesh(data=4, stage=2), make_params(dtype=jnp.bfloat16)
    rows = jaxpar.shard_batch(tiny.make_batch(), mesh)
    last_tick, after = (f(params, rows) for f in both(mesh, params, zero=zero))
    assert_same(last_tick, after, within=1e-6)
    assert {grad.dtype for grad in jax.tree.leaves(last_tick[1])} == {jnp.dtype(jnp.bfloat16)}


# At level 2 the trips of the layers that one stage has alone are not known, so that the bytes cannot be counted.
@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        (None, 0),
        pytest.param(None, 1, marks=pytest.mark.slow),
        pytest.param(None, 2, marks=pytest.mark.slow),
        pytest.param(UNEVEN, 0, marks=pytest.mark.slow),
        pytest.param(UNEVEN, 1, marks=pytest.mark.slow),
    ],
)
def test_as_many_bytes_travel_and_a_layer_of_each_stage_at_a_time(layout, zero):
    mesh = jaxpar.make_mesh(data=4, stage=2)
    params = make_params(layout.num_layers if layout else NUM_LAYERS, np.float32)
    params = layout.pack_params(params) if layout else params
    batch = jaxpar.shard_batch(tiny.make_batch(), mesh)
    functions = both(mesh, params, zero=zero, layout=layout)
    in_last_tick, after = (inspect_step(f, params, batch, mesh=mesh) for f in functions)
    for kind in ("all-reduce", "reduce-scatter"):
        assert in_last_tick.bytes_moved(kind, "data") == after.bytes_moved(kind, "data")
    trips = (3 if layout else 4) - 1  # a trip is one position behind; the last reduction is after the loop
    in_loop = lambda report: [
        each
        for each in report.collectives
        if "data" in each.axes and each.times == trips and ("/FB/while" in each.op_name or "/B/while" in each.op_name)
    ]
    assert in_loop(in_last_tick)
    assert not in_loop(after)
    if zero == 0:
        one_layer = sum(leaf[0].nbytes for leaf in jax.tree.leaves(jaxpar.fetch(params["layers"])))
        assert sum(each.payload_bytes for each in in_loop(in_last_tick)) == one_layer, "the bucket is a layer a stage"


@pytest.mark.full
def test_a_last_tick_that_skips_idle_ops_is_followed_by_the_reduction_as_without():
    mesh, params = jaxpar.make_mesh(data=4, stage=2), make_params(dtype=np.float32)
    batch = jaxpar.shard_batch(tiny.make_batch(), mesh)
    for masks, schedule in ((False, "1f1b"), (True, "zb-h1")):
        functions = both(mesh, params, masks=masks, schedule=schedule)
        asked, plain = (jax.jit(f).lower(params, batch) for f in functions)
        assert asked.as_text() == plain.as_text(), "nothing can be reduced while something is computed"
        if not masks:
            report = inspect_step(asked.compile(), mesh=mesh)
            assert report.count("all-reduce", "data") == 2, "the weight; the gradients"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_last_tick_reduces_if_it_is_masked(name, num_stages):
    schedule = make_schedule(name, num_stages, 8, form=lockstep_form(name, masks=True))
    plain = spmd_program(schedule, masks=True)
    program = spmd_program(schedule, masks=True, overlaps=True)
    last = program.segments[-1]
    assert program.reduces == plain.segments[-1].masked
    assert [tick for each in program.segments for tick in each.ticks] == list(range(schedule.num_ticks))
    assert program.num_slots == plain.num_slots
    assert all(np.array_equal(program.tables[name], plain.tables[name]) for name in plain.tables)
    if program.reduces:
        adds = "W" if program.schedule.splits_backward else "B"
        assert (len(last.ticks), last.reduces) == (1, adds)
        assert program.tables[f"{adds}_on"][:, last.start].any()
        assert not any(each.reduces for each in program.segments[:-1])
    assert not spmd_program(schedule, masks=False, overlaps=True).reduces
