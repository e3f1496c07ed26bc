"""A pipeline gives the numbers of one device: every mesh, schedule, remat, layout and structure of x."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import LayerLayout
from jaxpar.models import mlp
from jaxpar.pipeline import buffers, spmd_program
from jaxpar.pipeline.stage import Stage
from jaxpar.schedule import NUM_CHUNKS, SCHEDULES, Op, Schedule, make_schedule
from tests.support import tiny, tiny_gpt
from tests.support.oracle import assert_same, assert_same_bits, distance
from tests.support.schedules import WITHOUT
from tests.support.tiers import cases_of_make_test, quick

SAVE_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT = {"no remat": False, "remat": True, "policy": SAVE_DOTS}
MESHES = ((1, 8, 1), (2, 4, 1), (4, 2, 1), (1, 4, 2), (2, 2, 2), (1, 2, 4))
ONE_STAGE = ((8, 1, 1), (4, 1, 2), (2, 1, 4))  # tiny_gpt has 4 heads: test_parity.py has tensor=8
NUM_ROWS = 16


@functools.cache
def job(module, num_layers):
    """Params, a batch, and the loss and gradients of one device: one draw for all tests of a process."""
    if module is tiny_gpt:
        params, batch = (
            tiny_gpt.make_params(num_layers=num_layers),
            tiny_gpt.make_batch(num_rows=NUM_ROWS),
        )
    else:
        params, batch = tiny.draw_params(num_layers), tiny.make_batch(0, np.float64)
    return params, batch, jaxpar.fetch(module.reference(params, batch))


@functools.cache
def program(module, mesh, schedule, num_microbatches, remat, layout, mask_idle_ops):
    """The loss and gradients on a mesh as one program, which tests of the same settings share."""
    options = {
        "num_microbatches": num_microbatches,
        "remat": remat,
        "layout": layout,
        "mask_idle_ops": mask_idle_ops,
    }
    return jax.jit(
        jaxpar.value_and_grad(module.MODEL, module.loss, mesh, schedule=schedule, **options)
    )


def run(
    module,
    mesh,
    schedule,
    *,
    num_layers,
    num_microbatches,
    remat=False,
    layout=None,
    masks="auto",
    weights=None,
):
    """Loss and gradients from a mesh, whose layers are packed if there is a layout."""
    params, batch, _ = job(module, num_layers)
    if layout is not None:
        params = params | {"layers": layout.pack(params["layers"])}
    if weights is not None:
        batch = batch | {"weight": weights}
    value_and_grad = program(module, mesh, schedule, num_microbatches, remat, layout, masks)
    return value_and_grad(module.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))


def check(module, mesh, schedule, *, num_layers, **options):
    data, stage, tensor = mesh
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    _, _, want = job(module, num_layers)
    assert_same(run(module, mesh, schedule, num_layers=num_layers, **options), want)


check_gpt = functools.partial(check, tiny_gpt)  # all that a pipeline must carry
check_mlp = functools.partial(check, tiny)  # a third of the time to compile


def check_padding(layers, layout, num_padded):
    padding = jax.tree.map(lambda leaf: np.asarray(leaf)[layout.packed_order < 0], layers)
    assert {len(leaf) for leaf in jax.tree.leaves(padding)} == {num_padded}
    assert_same_bits(
        padding, jax.tree.map(np.zeros_like, padding), message="padding must stay zero"
    )


def garbage(shape, dtype, number):
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 111, dtype)


# Each mesh, schedule and kind of remat, more layers than stages and just enough, even and uneven, microbatches of one row
# and a single one, in a few of their combinations. EXHAUSTIVE below has all.
COVERING = [
    (check_mlp, (1, 8, 1), "zb-h1", "no remat", 9, 16),
    (check_mlp, (2, 4, 1), "interleaved", "policy", 8, 4),
    (check_mlp, (4, 2, 1), "zb-v", "remat", 5, 4),
    (check_mlp, (1, 4, 2), "gpipe", "remat", 5, 2),
    (check_gpt, (2, 2, 2), "1f1b", "policy", 5, 8),
    (check_mlp, (2, 2, 2), "zb-v", "policy", 4, 1),
    (check_mlp, (1, 2, 4), "1f1b", "no remat", 5, 8),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("check", "mesh", "schedule", "remat", "num_layers", "num_microbatches"),
    quick(COVERING, 0, 2, 3, 6),
)
def test_loss_and_gradients_equal_one_device_in_float64(
    x64, monkeypatch, check, mesh, schedule, remat, num_layers, num_microbatches
):
    """On a CPU slots have no initial values, unless they are sharded over tensor: here NaN, and integers out of range."""
    seen = []
    monkeypatch.setattr(buffers, "empty", lambda *args: seen.append(args) or garbage(*args))
    check(
        mesh, schedule, remat=REMAT[remat], num_layers=num_layers, num_microbatches=num_microbatches
    )
    assert bool(seen) == (mesh[2] == 1), "which rings are made without initial values"


# As on GPUs: idle stages compute and discard ops, uneven stages padded positions, and ends with chunks are conditional.
MASKED = [
    ((2, 2, 2), "1f1b", "remat", 5, 4),
    ((4, 2, 1), "interleaved", "no remat", 5, 2),
    ((2, 2, 2), "zb-h1", "remat", 5, 4),
    ((1, 8, 1), "1f1b", "no remat", 9, 4),
    ((1, 4, 2), "zb-v", "policy", 9, 8),
    ((4, 2, 1), "gpipe", "remat", 5, 1),
]


@pytest.mark.slow  # the next test has masks, recomputation and uneven stages in one program
@pytest.mark.parametrize(("mesh", "schedule", "remat", "num_layers", "num_microbatches"), MASKED)
def test_masked_idle_ops_change_nothing_in_float64(
    x64, mesh, schedule, remat, num_layers, num_microbatches
):
    options = {
        "remat": REMAT[remat],
        "num_layers": num_layers,
        "num_microbatches": num_microbatches,
    }
    check_mlp(mesh, schedule, **options, masks=True)


@pytest.mark.full
def test_masked_idle_ops_discard_nan(x64):
    """A layer of zeros gives NaN, as an idle stage computes before its first activation arrives."""

    @jaxpar.row_wise  # in effect: the quotient is 1
    def as_it_is(x):
        square = jnp.sum(x**2)
        return x * (square / square)

    layer = lambda params, x: mlp.layer(params, as_it_is(x))

    params, batch, _ = job(tiny, 5)
    model = jaxpar.LayeredModel(mlp.embed, layer, mlp.head)
    check_model(
        model,
        params,
        batch,
        tiny.loss,
        "1f1b",
        stage=4,
        num_microbatches=4,
        remat=True,
        mask_idle_ops=True,
    )


WITHOUT_VALUES = [
    ((2, 4, 1), "1f1b", "no remat", 5, 4),
    ((1, 4, 1), "zb-h1", "remat", 4, 8),
    ((4, 2, 1), "zb-v", "no remat", 5, 2),
    ((1, 4, 1), "interleaved", "remat", 9, 8),
    ((2, 4, 1), "gpipe", "policy", 5, 2),
    ((1, 8, 1), "zb-h1", "no remat", 9, 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "remat", "num_layers", "num_microbatches"), WITHOUT_VALUES
)
def test_slots_are_read_after_they_are_written_only(
    x64, monkeypatch, mesh, schedule, remat, num_layers, num_microbatches
):
    """As above, of all that a pipeline must carry."""
    monkeypatch.setattr(buffers, "empty", garbage)
    options = {
        "remat": REMAT[remat],
        "num_layers": num_layers,
        "num_microbatches": num_microbatches,
    }
    check_gpt(mesh, schedule, **options)


def sizes(mesh, schedule):
    """An even and an uneven number of layers, and what comes of microbatches of one row and of few."""
    parts = mesh[1] * NUM_CHUNKS[schedule]
    return [(parts, NUM_ROWS // mesh[0]), (parts + 1, 2)]


EXHAUSTIVE = [
    (mesh, schedule, remat, *size)
    for mesh, schedule, remat in product(MESHES, SCHEDULES, REMAT)
    for size in sizes(mesh, schedule)
] + [(mesh, "1f1b", remat, 3, 2) for mesh, remat in product(ONE_STAGE, REMAT)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "remat", "num_layers", "num_microbatches"), EXHAUSTIVE
)
def test_every_mesh_schedule_and_remat_equals_one_device_in_float64(
    x64, mesh, schedule, remat, num_layers, num_microbatches
):
    options = {
        "remat": REMAT[remat],
        "num_layers": num_layers,
        "num_microbatches": num_microbatches,
    }
    check_gpt(mesh, schedule, **options)
    if mesh[1] > 1:
        check_gpt(mesh, schedule, **options, masks=True)


FREE = [(mesh, schedule, remat) for mesh, schedule, remat in product(MESHES, SCHEDULES, REMAT)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "schedule", "remat"), FREE)
def test_the_mpmd_executor_equals_one_device_on_every_mesh_and_schedule_in_float64(
    x64, mesh, schedule, remat
):
    data, stage, tensor = mesh
    num_layers = stage * NUM_CHUNKS[schedule] + 1
    params, batch, want = job(tiny_gpt, num_layers)
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    value_and_grad = jaxpar.value_and_grad(
        tiny_gpt.MODEL,
        tiny_gpt.loss,
        mesh,
        schedule=schedule,
        num_microbatches=2,
        remat=REMAT[remat],
        executor="mpmd",
    )
    assert_same(value_and_grad(params, jaxpar.shard_batch(batch, mesh)), want)


FORMS = [
    (name, form, remat)
    for name, form, remat in product(
        SCHEDULES, ("published", "unit", "fused", "merged"), (False, True)
    )
    if (name, form) not in WITHOUT
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "remat"), FORMS)
def test_every_form_of_a_schedule_equals_one_device_in_float64(x64, name, form, remat):
    schedule = make_schedule(name, 4, 4, form=form, remat=remat)
    for masks in (False, True):
        check_gpt((2, 4, 1), schedule, remat=remat, num_layers=9, num_microbatches=4, masks=masks)


@pytest.mark.parametrize(
    ("name", "mesh", "num_layers", "remat"),
    [
        # Two layers or more in each chunk, or their order would not matter.
        pytest.param(
            "1f1b", (2, 2, 2), 5, False, marks=pytest.mark.full
        ),  # a loop for the layer that one stage has more
        ("interleaved", (4, 2, 1), 8, True),
        pytest.param("interleaved", (1, 4, 2), 9, False, marks=pytest.mark.slow),
        pytest.param("1f1b", (1, 8, 1), 8, True, marks=pytest.mark.slow),
        pytest.param("1f1b", (2, 4, 1), 9, True, marks=pytest.mark.slow),
        pytest.param("interleaved", (1, 2, 4), 5, True, marks=pytest.mark.slow),
    ],
)
def test_f_and_b_in_one_loop_over_layers_equal_one_device_in_float64(
    x64, name, mesh, num_layers, remat
):
    schedule = make_schedule(name, mesh[1], 4, form="merged", remat=remat)
    assert any(segment.merges for segment in spmd_program(schedule, masks=True).segments)
    check_mlp(mesh, schedule, num_layers=num_layers, num_microbatches=4, remat=remat, masks=True)


BESIDE = [
    pytest.param((2, 1, 4), {}, marks=pytest.mark.slow),
    ((4, 1, 2), {"zero": 3, "remat": True}),
    ((4, 1, 2), {"zero": 2, "overlap_grad_reduce": True}),
    pytest.param((1, 1, 8), {"remat": "dots"}, marks=pytest.mark.slow),
]


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "settings"), BESIDE)
def test_f_beside_b_with_one_stage_equals_one_device_in_float64(x64, monkeypatch, mesh, settings):
    """Where idle ops are masked and there is a tensor axis, F of a microbatch runs beside B of the one before."""
    ran, forward_and_backward = [], Stage.forward_and_backward
    monkeypatch.setattr(
        Stage, "forward_and_backward", lambda *args: ran.append(1) or forward_and_backward(*args)
    )
    mesh = jaxpar.make_mesh(data=mesh[0], tensor=mesh[2])
    params, batch, want = job(tiny, 4)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL,
        tiny.loss,
        mesh,
        num_microbatches=4,
        shardings=tiny.shardings(mesh, params),
        mask_idle_ops=True,
        **settings,
    )
    got = jax.jit(value_and_grad)(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, want)
    assert ran


@pytest.mark.full
def test_a_table_of_ones_own_equals_one_device_in_float64(x64):
    """A V on two stages, in which a stage does what no named schedule does: B before it must, F of the second chunk late."""
    first = [
        Op("F", 0, 0),
        Op("F", 1, 0),
        Op("F", 0, 1),
        Op("B", 0, 1),
        Op("F", 1, 1),
        Op("B", 1, 1),
    ]
    second = [
        Op("F", 0, 0),
        Op("F", 0, 1),
        Op("F", 1, 0),
        Op("F", 1, 1),
        Op("B", 0, 1),
        Op("B", 1, 1),
    ]
    last = [Op("B", 1, 0), Op("B", 0, 0)]
    schedule = Schedule.from_orders([[*first, *last], [*second, *last]], placement="v")
    check_mlp((2, 2, 2), schedule, num_layers=5, num_microbatches=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "counts",
    [
        (0, 2, 0, 0),  # neither end has a layer, nor has a chunk between layers
        pytest.param((1, 2, 0, 2), marks=pytest.mark.slow),
        pytest.param((0, 1, 1, 0), marks=pytest.mark.slow),
    ],
)
def test_packed_params_give_packed_gradients_and_zeros_for_padding(x64, counts):
    num_layers = sum(counts)
    layout = LayerLayout(num_layers, 2, 2, "v", layers_per_virtual_stage=counts)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    value, grads = run(tiny, mesh, "zb-v", num_layers=num_layers, num_microbatches=4, layout=layout)
    _, _, want = job(tiny, num_layers)
    assert_same((value, grads | {"layers": layout.unpack(grads["layers"])}), want)
    check_padding(grads["layers"], layout, num_padded=4 * max(counts) - num_layers)


@pytest.mark.slow  # tests/test_readme.py has float32, and the next test both
def test_float32_equals_one_device():
    params, batch = tiny.draw_params(4, dtype=np.float32), tiny.make_batch()
    mesh = jaxpar.make_mesh(data=2, stage=4)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, schedule="zb-h1", num_microbatches=4
    )
    value, grads = jax.jit(value_and_grad)(
        tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh)
    )
    want, want_grads = tiny.reference(params, batch)
    assert_same(value, want, within=1e-5)
    assert_same(grads, want_grads, within=1e-4)


@pytest.mark.full
def test_bfloat16_compute_keeps_float32_params_is_as_near_as_one_device_and_the_same_bits_again():
    """Rounding differs between any two programs, so both are held against float32."""

    def in_bfloat16(function):
        cast = lambda tree: jax.tree.map(
            lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, tree
        )
        return lambda params, x: function(cast(params), cast(x))

    half = jaxpar.LayeredModel(*map(in_bfloat16, (mlp.embed, mlp.layer, mlp.head)))

    def mean(params):
        total, weight = tiny.loss(half.apply(params, batch), batch)
        return total / weight

    params, batch = tiny.draw_params(2, dtype=np.float32), tiny.make_batch()
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    value_and_grad = jax.jit(
        jaxpar.value_and_grad(half, tiny.loss, mesh, schedule="zb-h1", num_microbatches=4)
    )
    args = tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh)
    value, grads = value_and_grad(*args)
    want, want_grads = tiny.reference(params, batch)
    _, grads_of_one = jax.jit(jax.value_and_grad(mean))(params)
    assert_same(value, want, within=2e-2)
    assert distance(grads, want_grads) <= 2 * distance(grads_of_one, want_grads)
    assert_same_bits(value_and_grad(*args), (value, grads))


# What x may hold, and what may be missing.


def trees_model():
    """An x of many kinds: a tuple with a scalar, integers, a mask that each layer makes anew, a float that none touches."""

    def embed(outer, batch):
        h = batch["features"] @ outer["w_in"]
        return h, [h.mean(), batch["label"]], {"mask": h > 0, "same": 2 * h, "nothing": None}

    def layer(p, x):
        h, (scalar, label), rest = x
        new = jnp.where(rest["mask"], jnp.tanh(h @ p["w"] * scalar), h)
        new += jnp.where(label % 2 == 0, 1.0, 0.5)[:, None] * rest["same"]
        return new, [scalar + new.mean(), label[::-1]], rest | {"mask": new > scalar}

    def head(outer, x):
        h, (scalar, _), rest = x
        return (jnp.where(rest["mask"], h, scalar) + rest["same"]) @ outer["w_out"]

    return jaxpar.LayeredModel(embed, layer, head)


def check_model(model, params, batch, loss, schedule, *, stage=2, data=2, **options):
    def mean(params):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    mesh = jaxpar.make_mesh(data=data, stage=stage)
    value_and_grad = jaxpar.value_and_grad(model, loss, mesh, schedule=schedule, **options)
    got = jax.jit(value_and_grad)(params, jaxpar.shard_batch(batch, mesh))
    assert_same(got, jax.jit(jax.value_and_grad(mean))(params))


def arrays(**shapes):
    rng = np.random.default_rng(0)
    return {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_any_tree_travels_from_layer_to_layer(x64, schedule):
    """With one microbatch and one replica: a mean over rows is of those that come together."""
    params = {"outer": arrays(w_in=(6, 4), w_out=(4, 5)), "layers": arrays(w=(5, 4, 4))}
    batch = tiny.make_batch(dtype=np.float64)
    check_model(trees_model(), params, batch, tiny.loss, schedule, num_microbatches=1, data=1)


@pytest.mark.full
@pytest.mark.parametrize("schedule", [pytest.param("interleaved", marks=pytest.mark.slow), "zb-h1"])
@pytest.mark.filterwarnings("ignore:a model's outputs must depend on a param")
def test_params_may_be_missing_unread_or_in_any_tree(x64, schedule):
    """No outer params at all, a weight in a tuple, a scalar weight a layer, and one that no layer reads."""
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["features"],
        lambda p, x: x + p[1]["scale"] * jnp.tanh(x @ p[0]),
        lambda outer, x: x[:, :5],
    )
    layers = arrays(w=(4, 6, 6), scale=(4,), unread=(4, 3))
    params = {
        "outer": {},
        "layers": (layers["w"], {"scale": layers["scale"], "unread": layers["unread"]}),
    }
    check_model(
        model, params, tiny.make_batch(dtype=np.float64), tiny.loss, schedule, num_microbatches=4
    )


def test_a_microbatch_of_no_weight_adds_nothing(x64):
    params, batch, _ = job(tiny, 5)
    weights = np.where(
        np.arange(len(batch["weight"])) < 12, 0, batch["weight"]
    )  # three microbatches of COVERING's last
    mesh = jaxpar.make_mesh(stage=2, tensor=4)
    got = run(tiny, mesh, "1f1b", num_layers=5, num_microbatches=8, remat=False, weights=weights)
    assert_same(got, tiny.reference(params, batch | {"weight": weights}))


def test_make_test_has_gradients_of_each_schedule():
    """A new one takes a row of COVERING, and its number there in ``quick``."""
    tests = (
        test_loss_and_gradients_equal_one_device_in_float64,
        test_f_and_b_in_one_loop_over_layers_equal_one_device_in_float64,
    )
    values = [value for test in tests for case in cases_of_make_test(test) for value in case]
    assert [name for name in SCHEDULES if name not in values] == []


# Training.


@pytest.mark.slow  # the next test trains packed layers
@pytest.mark.parametrize(
    ("mesh", "schedule", "optimizer"),
    [((2, 2, 2), "1f1b", optax.adam(1e-2)), ((1, 2, 4), "zb-h1", optax.sgd(0.1))],
    ids=["adam", "sgd"],
)
def test_parameters_after_three_steps_equal_one_device_in_float64(x64, mesh, schedule, optimizer):
    data, stage, tensor = mesh
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    params = tiny.make_params()
    state = jaxpar.init_state(
        lambda key: jax.tree.map(jnp.asarray, params),
        jax.random.key(0),
        optimizer,
        mesh,
        tiny.shardings(mesh, params),
    )
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, schedule=schedule, num_microbatches=4
    )
    train_step = jaxpar.make_train_step(value_and_grad, optimizer)
    opt_state, update = optimizer.init(params), tiny.update_on_one_device(optimizer)
    for step in range(3):
        batch = tiny.make_batch(step, np.float64)
        state, _ = train_step(state, jaxpar.shard_batch(batch, mesh))
        params, opt_state = update(tiny.reference(params, batch)[1], opt_state, params)
    assert_same(state.params, params, within=1e-10)


@pytest.mark.full
def test_uneven_layers_train_packed_and_their_padding_stays_zero(x64):
    """The state holds packed layers, so that nothing moves between stages in a step."""
    mesh, optimizer = jaxpar.make_mesh(data=2, stage=4), optax.adam(1e-2)
    layout, (params, batch, _) = LayerLayout(5, 4), job(tiny, 5)

    def init(key):
        canonical = jax.tree.map(jnp.asarray, params)
        return canonical | {"layers": layout.pack(canonical["layers"])}

    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings = jaxpar.shardings_from_paths(shapes, mesh, tiny.RULES)
    state = jaxpar.init_state(init, jax.random.key(0), optimizer, mesh, shardings)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, schedule="zb-h1", num_microbatches=2, layout=layout
    )
    train_step = jaxpar.make_train_step(value_and_grad, optimizer)
    want, opt_state, update = params, optimizer.init(params), tiny.update_on_one_device(optimizer)
    for _ in range(3):
        state, _ = train_step(state, jaxpar.shard_batch(batch, mesh))
        want, opt_state = update(tiny.reference(want, batch)[1], opt_state, want)
    got = state.params | {"layers": layout.unpack(state.params["layers"])}
    assert_same(got, want, within=1e-10)
    check_padding(state.params["layers"], layout, num_padded=3)
