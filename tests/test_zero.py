"""ZeRO 1 to 3, with and without a pipeline: the numbers of one device, the memory and the traffic that ZeRO promises."""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar._compat import equations
from jaxpar.models import mlp
from jaxpar.params import init_params
from jaxpar.run import BasicFlags, Run
from jaxpar.run.start import left_whole_lines, state_left_whole
from jaxpar.step.sharding import left_whole
from jaxpar.zero import zero_of
from tests.support import tiny, tiny_gpt
from tests.support.covering import covering
from tests.support.oracle import assert_same
from tests.support.tiers import quick

# Eight wide, and four layers: enough for the stages, and every matrix has a dim that data divides.
TABLE = mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=8)
MESHES = [(4, 1, 1), (4, 1, 2), (2, 2, 2), (4, 2, 1)]
# Each level, with and without stages and tensor shards; the rest of the product is for the slow run.
COVERING = {(4, 1, 1, 2), (4, 1, 2, 1), (2, 2, 2, 3)}
RUNS = [
    pytest.param(*mesh, zero, marks=[] if (*mesh, zero) in COVERING else pytest.mark.slow)
    for mesh in MESHES
    for zero in (1, 2, 3)
]


def make_run(
    mesh, zero, optimizer, make_state=jaxpar.abstract_state, key=None, dtype=jnp.float32, **settings
):
    """The state, the function of gradients, and the shapes of the params."""
    key, init = (
        jax.random.key(0) if key is None else key,
        lambda key: init_params(TABLE, key, dtype),
    )
    shapes = jax.eval_shape(init, key)
    shardings = jaxpar.shardings_from_paths(shapes, mesh, tiny.RULES)
    state = make_state(init, key, optimizer, mesh, shardings, zero=zero)
    value_and_grad = jaxpar.value_and_grad(
        mlp.MODEL, tiny.loss, mesh, zero=zero, shardings=shardings, **settings
    )
    return state, value_and_grad, shapes


@pytest.mark.few(1)
@pytest.mark.parametrize(("data", "stage", "tensor", "zero"), quick(RUNS, 1))
def test_loss_gradients_and_parameters_equal_one_device(x64, data, stage, tensor, zero):
    seed, optimizer = tiny.fresh_seed(), tiny.ADAM
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    settings = {"schedule": "zb-h1", "num_microbatches": 2}
    state, value_and_grad, _ = make_run(
        mesh, zero, optimizer, jaxpar.init_state, jax.random.key(seed), jnp.float64, **settings
    )
    params = jaxpar.fetch(state.params)
    train_step, opt_state = (
        jaxpar.make_train_step(value_and_grad, optimizer),
        optimizer.init(params),
    )
    update = jax.jit(optimizer.update)
    for step in range(3):
        batch = tiny.make_batch(seed + step, np.float64)
        loss, grads = tiny.reference(params, batch)
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert_same(metrics["loss"], np.float32(loss), within=1e-6, message=f"seed {seed}")
        assert_same(
            state.opt_state,
            opt_state,
            message=f"seed {seed}: the moments have the gradients of each step",
        )
    assert_same(state.params, params, within=1e-10, message=f"seed {seed}")


MASKED = [
    ("1f1b", (2, 2, 2), (2, 2)),
    ("zb-h1", (2, 2, 2), (3, 1)),
    ("interleaved", (4, 2, 1), (1, 1, 1, 1)),
    ("1f1b", (2, 4, 1), (2, 1, 0, 1)),
    ("interleaved", (2, 2, 2), (2, 1, 1, 0)),
    ("gpipe", (4, 2, 1), (2, 2)),
    ("zb-v", (2, 2, 2), (1, 1, 1, 1)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("run", "remat"),
    quick(
        covering(
            [(MASKED[5], False), (MASKED[1], False), (MASKED[2], True)], MASKED, (False, True)
        ),
        10,
    ),
)
def test_level_3_equals_one_device_where_gradients_are_scattered_a_layer_late(x64, run, remat):
    """As on GPUs: idle stages compute and discard ops, and W reduces one layer while it computes the next."""
    schedule, axes, layers = run
    mesh = jaxpar.make_mesh(**dict(zip(("data", "stage", "tensor"), axes, strict=True)))
    layout = jaxpar.LayerLayout(
        4,
        mesh.shape["stage"],
        len(layers) // mesh.shape["stage"],
        "v" if schedule == "zb-v" else "loop",
        layers,
    )
    params, batch = (
        init_params(TABLE, jax.random.key(0), jnp.float64),
        tiny.make_batch(0, np.float64),
    )
    packed = layout.pack_params(params)
    settings = {
        "schedule": schedule,
        "layout": layout,
        "remat": remat,
        "num_microbatches": 4,
        "mask_idle_ops": True,
    }
    shardings = tiny.shardings(mesh, packed)
    value_and_grad = jaxpar.value_and_grad(
        mlp.MODEL, tiny.loss, mesh, zero=3, shardings=shardings, **settings
    )
    loss, grads = value_and_grad(tiny.on_mesh(mesh, packed), jaxpar.shard_batch(batch, mesh))
    assert_same((loss, layout.unpack_params(jaxpar.fetch(grads))), tiny.reference(params, batch))


def test_a_pipeline_at_level_3_gathers_in_the_dtype_of_the_computation():
    mesh = jaxpar.make_mesh(data=4, stage=2)
    layer = lambda p, x: (
        x + jnp.tanh(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(x.dtype)
    )
    model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, lambda outer, x: x)
    params = {"outer": {}, "layers": {"w": jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)}}
    batch = jaxpar.shard_batch({"x": np.ones((16, 8), np.float32)}, mesh)
    loss = lambda outputs, batch: (outputs.sum(), jnp.float32(len(outputs)))
    value_and_grad = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=4, zero=3)
    lowered = jax.jit(value_and_grad).lower(params, batch).as_text()  # XLA:CPU gathers in 32 bits
    gathered = re.findall(r"stablehlo\.all_gather.*-> tensor<(\S+)>", lowered)
    assert set(gathered) == {"8x8xbf16"}


@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_at_rest_fall_by_the_data_axis(stage):
    mesh = jaxpar.make_mesh(data=4, stage=stage)
    on_one = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    local_bytes = lambda tree: sum(map(on_one, jax.tree.leaves(tree)))
    by_level = {}
    for zero in (0, 1, 3):
        state, _, _ = make_run(mesh, zero, optax.sgd(0.1, momentum=0.9))
        by_level[zero] = (
            local_bytes(state.params["layers"]),
            local_bytes(state.opt_state[0].trace["layers"]),
        )
    params, momentum = by_level[0]
    assert by_level[1] == (params, momentum / 4)
    assert by_level[3] == (params / 4, momentum / 4)


@pytest.mark.full
def test_level_1_costs_one_reduce_scatter_and_one_all_gather_of_the_params():
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    optimizer = optax.adam(1e-2)
    state, value_and_grad, params = make_run(mesh, 1, optimizer, num_microbatches=4)
    batch = jaxpar.shard_batch(tiny.make_batch(0, np.float32), mesh)
    report = jaxpar.inspect_step(jaxpar.make_train_step(value_and_grad, optimizer), state, batch)
    layers, outer = params["layers"], params["outer"]
    halves = layers["w_up"].size // 2 + layers["w_down"].size // 2
    cut_bytes = 4 * (halves + layers["b_down"].size + outer["w_in"].size + outer["w_out"].size)
    assert report.bytes_moved("reduce-scatter", "data") == 3 / 4 * cut_bytes
    assert report.bytes_moved("all-gather", "data") == 3 / 4 * cut_bytes
    # b_up lies over tensor, b_out has 5 elements: they stay whole. The rest are scalars: loss, weight, norms of parts.
    vectors = 4 * (layers["b_up"].size // 2 + outer["b_out"].size)
    assert vectors < report.bytes_moved("all-reduce", "data") / (2 * 3 / 4) < vectors + 100


def test_level_3_gathers_a_layer_each_time_it_runs():
    mesh = jaxpar.make_mesh(data=8)
    state, value_and_grad, params = make_run(mesh, 3, optax.sgd(0.1))
    rows = jaxpar.shard_batch(tiny.make_batch(0, np.float32), mesh)
    report = jaxpar.inspect_step(jax.jit(value_and_grad), state.params, rows)
    layers = params["layers"]
    num_layers = len(layers["w_up"])
    matrices = 4 * (layers["w_up"].size + layers["w_down"].size) // num_layers
    biases = 4 * (layers["b_up"].size + layers["b_down"].size) // num_layers
    gathers = [c for c in report.collectives if c.kind == "all-gather" and c.times > 1]
    assert {c.times for c in gathers} == {num_layers}, "each layer is gathered when it runs"
    gathered = sum(c.payload_bytes for c in gathers)
    assert 2 * matrices <= gathered <= 2 * (matrices + biases), (
        "once forward, once backward, and never kept"
    )


@pytest.mark.parametrize("masks", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("zero", "overlaps"), [(1, False), (1, True), (2, False), (2, True), (3, False)]
)
def test_the_sums_of_microbatches_are_shards_from_level_2_on(zero, overlaps, masks):
    """Also those of embedding and head; those of level 1 are reduced at the end alone."""
    mesh = jaxpar.make_mesh(data=4)
    params = tiny_gpt.on_mesh(mesh, tiny_gpt.make_params(num_layers=2, vocab=24, embed=16))
    step = jaxpar.value_and_grad(
        tiny_gpt.MODEL,
        tiny_gpt.loss,
        mesh,
        num_microbatches=4,
        zero=zero,
        overlap_grad_reduce=overlaps,
        mask_idle_ops=masks,
    )
    batch = jaxpar.shard_batch(tiny_gpt.make_batch(vocab=24), mesh)
    loops = [
        e for e in equations(jax.make_jaxpr(step)(params, batch)) if e.primitive.name == "scan"
    ]
    carried = {leaf.aval.shape for loop in loops for leaf in loop.outvars}
    whole, shard = (24, 16), (6, 16)
    assert (whole in carried, shard in carried) == (zero == 1, zero > 1)


def test_settings_that_cannot_be_are_refused():
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    with pytest.raises(
        ValueError,
        match=r"ZeRO must know which dims the tensor axis cuts; got zero=1, tensor=2 and no sh",
    ):
        jaxpar.value_and_grad(mlp.MODEL, tiny.loss, mesh, zero=1)
    with pytest.raises(
        ValueError, match=r'executor="mpmd" replicates params and gradients over data; got zero=2'
    ):
        jaxpar.value_and_grad(
            mlp.MODEL, tiny.loss, jaxpar.make_mesh(data=2, stage=2), zero=2, executor="mpmd"
        )


@pytest.mark.parametrize(
    "axes", [{"data": 2}, pytest.param({"data": 2, "stage": 2}, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "masks", [pytest.param(False, marks=pytest.mark.full), True], ids=["", "masked"]
)
def test_zero_3_adds_gradients_of_16_bit_params_over_replicas_and_microbatches_without_rounding(
    axes, masks
):
    """2048 and 1 are the first microbatch's, -2048 and 1 the second's: in float16 their sum would be 1, not 2."""
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"], lambda p, h: h * p["w"][None], lambda outer, h: h
    )
    mesh = jaxpar.make_mesh(**axes)
    params = {"outer": {}, "layers": {"w": jnp.ones((2, 4), jnp.float16)}}
    batch = {"x": np.repeat(np.array([[2048], [-2048], [1], [1]], np.float16), 4, axis=1)}
    loss = lambda outputs, batch: (outputs.sum().astype(jnp.float32), jnp.float32(len(outputs)))
    value_and_grad = jaxpar.value_and_grad(
        model, loss, mesh, num_microbatches=2, zero=3, mask_idle_ops=masks
    )
    grads = jaxpar.fetch(value_and_grad(params, jaxpar.shard_batch(batch, mesh))[1])
    assert_same(grads, {"outer": {}, "layers": {"w": np.full((2, 4), 0.5, np.float16)}})


# --- params that ZeRO cannot shard ------------------------------------------------------------------------------------


def test_params_that_zero_leaves_whole_are_told_at_the_start_of_a_run(tmp_path):
    """Three replicas divide six features, and no dim of the layers, eight wide, or of five classes."""
    mesh, said = jaxpar.make_mesh(data=3), []
    shardings = tiny.shardings(mesh, tiny.make_params())
    for zero in (0, 1, 3):
        parallel = jaxpar.Parallel(mesh, shardings, zero=zero)
        with Run(
            BasicFlags.of(out_dir=tmp_path, steps=1, dry_run=True), mesh, say=said.append
        ) as run:
            run.restore(tiny.init, jax.random.key(0), optax.adam(1e-2), parallel)
    said = [line for line in said if "does not split" in line]
    assert len(said) == 2, "at level 0 ZeRO shards nothing, and no param is left"
    assert re.match(
        r"zero=1 does not split 1\.\d+ KiB of params, with their optimizer state, since data times context, 3, "
        r"divides none of their dims that no other axis splits: "
        r"layers/w_\w+ 512 B, layers/w_\w+ 512 B, outer/\S+ 160 B and 3 more$",
        said[0],
    )


@pytest.mark.parametrize(
    ("trainable", "told"),
    [
        (
            ("layers/a", "outer/*"),
            "of params, with the optimizer state of those that are trained,",
        ),
        (("outer/w",), "of params, all frozen, since data times context, 3,"),
        (("layers/*",), "of params, with their optimizer state, since data times"),
    ],
)
def test_what_zero_leaves_whole_says_what_has_optimizer_state_and_leaves_single_numbers_out(
    trainable, told
):
    """As the scales of weights in FP8, one number a layer, which no number of replicas would shard."""
    of_layers = {"a": jnp.ones((2, 5)), "b": jnp.ones((2, 7)), "scales": jnp.ones((2, 1))}
    params = {"outer": {"w": jnp.ones(6), "scale": jnp.ones(())}, "layers": of_layers}
    mesh = jaxpar.make_mesh(data=3)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    parallel = jaxpar.Parallel(mesh, shardings, zero=3, trainable=trainable)
    [line] = left_whole_lines(params, [parallel])
    assert told in line
    assert "scale" not in line


def _gram(of):
    """An optimizer whose state is the product of each gradient with itself, by rows or by columns."""
    make = lambda grads: jax.tree.map(of, grads)
    return optax.GradientTransformation(
        make, lambda grads, state, params=None: (grads, make(grads))
    )


@pytest.mark.parametrize(
    ("optimizer", "zero", "told"),
    [
        (_gram(lambda g: g.T @ g), 1, "16.0 KiB of optimizer state, 33% of what"),
        (_gram(lambda g: g.T @ g), 3, "16.0 KiB of optimizer state, 80% of what"),
        (optax.flatten(optax.sgd(0.1, momentum=0.9)), 3, "32.0 KiB of optimizer state, 89% of"),
        (_gram(lambda g: g @ g.T), 3, None),
        (_gram(lambda g: g.T @ g), 0, None),
        (optax.adam(0.1), 3, None),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), 3, None),
    ],
    ids=["columns-1", "columns", "flatten", "rows", "none", "adam", "adafactor"],
)
def test_much_optimizer_state_that_zero_leaves_whole_is_told(optimizer, zero, told):
    """A param [128, 64] is split along its first dim, which the product by columns does not have."""
    mesh, init = jaxpar.make_mesh(data=8), lambda key: {"w": jnp.ones((128, 64))}
    shardings = jaxpar.shardings_from_paths(init(0), mesh, {"**": jaxpar.replicated()})
    parallel = jaxpar.Parallel(mesh, shardings, zero=zero)
    target = jaxpar.abstract_state(init, jax.random.key(0), optimizer, parallel)
    lines = list(state_left_whole(target, [init, 0, optimizer, parallel]))
    assert len(lines) == (told is not None)
    if told:
        assert lines[0].startswith(f"zero={zero} does not split {told}"), lines
        assert "since none of its dims is one along which a param is split: " in lines[0]


def test_state_of_a_param_that_zero_leaves_whole_is_told_with_it():
    mesh, init = jaxpar.make_mesh(data=8), lambda key: {"w": jnp.ones((63, 31))}
    shardings = jaxpar.shardings_from_paths(init(0), mesh, {"**": jaxpar.replicated()})
    parallel = jaxpar.Parallel(mesh, shardings, zero=3)
    make = lambda optimizer: jaxpar.abstract_state(init, jax.random.key(0), optimizer, parallel)
    assert not list(state_left_whole(make(optax.adam(0.1)), [parallel]))
    assert len(list(state_left_whole(make(_gram(lambda g: g @ g.T)), [parallel]))) == 1


def test_what_is_whole_is_a_params_part_on_a_device():
    mesh = jaxpar.make_mesh(data=3, tensor=2)
    shapes = jax.eval_shape(tiny.init, jax.random.key(0))
    whole = left_whole(
        shapes,
        jaxpar.Parallel(mesh, tiny.shardings(mesh, shapes), zero=2, trainable=("layers/w_*",)),
    )
    assert whole == {"layers/w_up": 256, "layers/w_down": 256}, (
        "half of each, and no frozen param, which has no gradient"
    )
    on_four = jaxpar.make_mesh(data=4)
    assert left_whole(
        shapes, jaxpar.Parallel(on_four, tiny.shardings(on_four, shapes), zero=3)
    ) == {"outer/b_out": 20}


@pytest.mark.parametrize(
    ("zero", "of_state", "whole"),
    [(3, 0, "w"), (3, 1, "w"), (2, 0, "0/mu/w"), (1, 1, None), (3, 3, None)],
)
def test_a_state_that_is_whole_where_its_step_shards_is_refused(zero, of_state, whole):
    mesh, optimizer = jaxpar.make_mesh(data=4, tensor=2), optax.adam(1e-2)
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(3)}
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    parallel = [jaxpar.Parallel(mesh, shardings, zero=level) for level in (zero, of_state)]
    value_and_grad = jaxpar.value_and_grad(
        lambda params, batch: batch["x"] @ params["w"] + params["b"][0],
        lambda outputs, batch: (jnp.sum(outputs**2), jnp.float32(len(outputs))),
        parallel[0],
    )
    step = jaxpar.make_train_step(value_and_grad, optimizer)
    first = lambda key: jax.tree.map(jnp.copy, params)
    state = jaxpar.init_state(first, jax.random.key(0), optimizer, parallel[1])
    batch = jaxpar.shard_batch({"x": np.ones((8, 8), np.float32)}, mesh)
    if whole is None:
        step(state, batch)
        return
    message = rf"got zero={zero} for value_and_grad, and a state whose {whole} is whole .* the same jaxpar\.Parallel"
    with pytest.raises(ValueError, match=message):
        step(state, batch)
    with pytest.raises(ValueError, match=message):
        step.lower(state, batch)


@pytest.mark.parametrize(
    ("of_state", "of_gradients", "message"),
    [
        ({"zero": 3}, {"zero": 2}, "got w over data in the state, and zero=2 and shardings for"),
        ({"zero": 3}, None, "got w over data in the state, and no shardings for value_and_grad"),
        ({"rule": "data"}, None, "got w over data in the state, and no shardings"),
        ({}, {"rule": "tensor"}, "got w over tensor in the shardings of value_and_grad, and whole"),
        ({"rule": "tensor"}, None, None),
        ({"zero": 2}, {}, None),
    ],
)
def test_a_state_and_gradients_that_are_split_over_other_axes_are_refused(
    of_state, of_gradients, message
):
    mesh, optimizer = jaxpar.make_mesh(data=4, tensor=2), optax.adam(1e-2)
    params = {"w": jnp.ones((8, 4))}

    def parallel(rule=None, zero=0):
        rules = {"w": jax.P(None, rule) if rule else jaxpar.replicated()}
        return jaxpar.Parallel(mesh, jaxpar.shardings_from_paths(params, mesh, rules), zero=zero)

    value_and_grad = jaxpar.value_and_grad(
        lambda params, batch: batch["x"] @ params["w"],
        lambda outputs, batch: (jnp.sum(outputs**2), jnp.float32(len(outputs))),
        mesh if of_gradients is None else parallel(**of_gradients),
    )
    step = jaxpar.make_train_step(value_and_grad, optimizer)
    first = lambda key: jax.tree.map(jnp.copy, params)
    state = jaxpar.init_state(first, jax.random.key(0), optimizer, parallel(**of_state))
    batch = jaxpar.shard_batch({"x": np.ones((8, 8), np.float32)}, mesh)
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        step.lower(state, batch)


def test_the_reductions_of_a_layer_wait_for_one_another_on_cpu_devices():
    """XLA for the CPU may start them in another order on each device, and then ends the program or waits forever."""
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    layers = {"a": jnp.ones((2, 4)), "b": jnp.ones((2, 6)), "c": jnp.ones((2, 8))}
    params = {"outer": {"w": jnp.ones(4)}, "layers": layers}
    specs = {
        "outer": {"w": PartitionSpec()},
        "layers": dict.fromkeys("abc", PartitionSpec("stage")),
    }
    assert not zero_of(2, params, specs, mesh.abstract_mesh, stacked=True).in_turn
    of_layers = zero_of(2, params, specs, mesh, stacked=True)["layers"]
    add = jax.shard_map(
        of_layers.add,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    one = jax.tree.map(lambda stack: stack[0], layers)
    names = [each.primitive.name for each in equations(jax.make_jaxpr(add)(one))]
    in_order = [n for n in names if n in ("reduce_scatter", "optimization_barrier")]
    assert in_order == ["reduce_scatter", *["optimization_barrier", "reduce_scatter"] * 2]
