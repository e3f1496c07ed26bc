"""Sequences split over `context`: the numbers of one device, the traffic, the memory, and what is refused."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import context_parallel
from jaxpar.backward.split import split_layer
from jaxpar.context_parallel import heads_to_sequence, sequence_to_heads
from jaxpar.mesh import CONTEXT
from jaxpar.models import transformer
from jaxpar.params import abstract_params, init_params, stack_layers
from jaxpar.pipeline import check_permutes
from jaxpar.tensor_parallel import (
    EXPERT_RULES,
    EXPERTS_OVER_DATA,
    TRANSFORMER_RULES,
    sequence_parallel,
)
from tests.support.oracle import assert_same, assert_same_bits, cast
from tests.support.tiny import signatures_unchecked
from tests.support.written_out import WRITTEN_OUT

ROWS, SEQ, VOCAB = 8, 16, 32
SMALL = {
    "vocab_size": VOCAB,
    "num_layers": 4,
    "embed_dim": 32,
    "num_heads": 8,
    "num_kv_heads": 2,
    "mlp_dim": 16,
}
LLAMA = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "biases": False, "tied": False}
ROUTED = transformer.Experts(
    count=4, router_bias=True, router_score="sigmoid", balance_coefficient=0.1
)
EXPERTS = LLAMA | {"experts": ROUTED}


def make_config(**changes):
    return transformer.TransformerConfig(**SMALL | LLAMA | {"compute_dtype": "float64"} | changes)


def make_batch(*, packed=False, seed=0, seq=SEQ):
    """Tokens of uneven weight, in documents that begin anywhere."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, seq + 1)).astype(np.int32)
    mask = rng.uniform(0.5, 1.5, (ROWS, seq)) * (rng.random((ROWS, seq)) < 0.9)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": mask,
        "weight": rng.uniform(0.5, 1.5, ROWS),
    }
    documents = (
        np.cumsum(rng.random((ROWS, seq)) < 0.2, axis=1, dtype=np.int32) % 3
    )  # numbers come again
    return batch | {"segments": documents} if packed else batch


def weights(batch):
    return batch["mask"] * batch["weight"][:, None]


def make_loss(config):
    plain = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(
        logits, batch["targets"], weights(batch)
    )
    return transformer.add_routing_losses(config, plain, weights=weights)


@cache
def make_params(config, dtype=jnp.float64):
    init = lambda key: init_params(transformer.param_table(config), key, dtype)
    uneven = lambda p: 3 * p if p.ndim > 2 else p  # so that attention is uneven
    return jax.jit(lambda key: jax.tree.map(uneven, init(key)))(jax.random.key(1))


def make_run(axes, config, **settings):
    """The jitted step, and the shardings of its params."""
    mesh = jaxpar.make_mesh(**axes)
    config = config.for_tensor(mesh.shape["tensor"])
    constrain = {"constrain": settings.pop("constrain")} if "constrain" in settings else {}
    of_experts = settings.pop("experts", EXPERT_RULES["experts"])
    table, rules = transformer.param_table(config), TRANSFORMER_RULES | of_experts
    shardings = jaxpar.shardings_from_dims(table, mesh, rules)
    settings = {"num_microbatches": 2, "shardings": shardings} | settings
    model, loss = transformer.make_model(config, **constrain), make_loss(config)
    return jax.jit(jaxpar.value_and_grad(model, loss, mesh, **settings)), mesh, shardings


@cache
def step_of_one_device(config):
    model, loss = transformer.make_model(config), make_loss(config)
    return jax.jit(
        jax.value_and_grad(lambda p, batch: jnp.divide(*loss(model.apply(p, batch), batch)[:2]))
    )


def of_one_device(config, params, batch):
    """The loss and its gradients by plain JAX, where nothing is over context."""
    return step_of_one_device(replace(config, attention_over_context=None))(params, batch)


def check_parity(axes, changes, packed=False, **settings):
    """Holds a step against one device, and returns its program and mesh."""
    config, batch = make_config(**changes), make_batch(packed=packed)
    params = make_params(config)
    want = of_one_device(config, params, batch)
    step, mesh, shardings = make_run(axes, config, **settings)
    compiled = step.lower(
        jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)
    ).compile()
    if mesh.shape["stage"] > 1:
        check_permutes(compiled)
    assert_same(
        jaxpar.fetch(compiled(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))),
        want,
    )
    return compiled, mesh


GATHER, ULYSSES = {"attention_over_context": "gather"}, {"attention_over_context": "ulysses"}
ALIBI = {"positions": "alibi", "window": 5}
LEARNED = {"positions": "learned", "max_positions": SEQ, "norm": "layer", "mlp": "gelu"}
SCALING = transformer.RopeScaling(kind="dynamic", factor=2.0, original_positions=4)
DYNAMIC = {"rope": transformer.Rope(scaling=SCALING)}


@pytest.mark.parametrize(
    ("axes", "changes", "packed", "settings"),
    [
        (
            {"context": 2, "stage": 2, "tensor": 2},
            GATHER | {"num_layers": 2},
            True,
            {"schedule": "1f1b", "zero": 2},
        ),
        pytest.param(
            {"data": 2, "context": 2},
            GATHER | EXPERTS,
            False,
            {"zero": 3, "experts": EXPERTS_OVER_DATA},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_split_sequences_have_the_numbers_of_one_device(x64, axes, changes, packed, settings):
    check_parity(axes, changes, packed, **settings)


def test_heads_that_four_all_to_alls_exchange_in_each_pass_of_a_layer_have_the_numbers_of_one_device(
    x64,
):
    axes, num_layers = {"replica": 2, "context": 2, "tensor": 2}, 1
    program, mesh = check_parity(axes, ULYSSES | ALIBI | {"num_layers": num_layers})
    found = counted(jaxpar.inspect_step(program, mesh=mesh))
    assert found["all-to-all", CONTEXT] == 8 * num_layers * 2, found
    assert set(found) & {("all-gather", CONTEXT), ("reduce-scatter", CONTEXT)} == set()


def test_slopes_of_few_heads_are_proved_right():
    heads = {"num_heads": 4, "num_kv_heads": None}
    config = make_config(**ULYSSES | ALIBI | heads, compute_dtype="float32")
    mesh = jaxpar.make_mesh(context=2, devices=jax.devices()[:2])
    params = jax.eval_shape(lambda: make_params(config, jnp.float32))
    step = jaxpar.value_and_grad(transformer.make_model(config), make_loss(config), mesh)
    jax.eval_shape(step, params, jaxpar.shard_batch(make_batch(), mesh))  # warns of nothing


SWEEP = [
    ({"context": 2, "stage": 2, "tensor": 2}, GATHER, True, {"schedule": "zb-h1", "zero": 2}),
    ({"replica": 2, "context": 2, "tensor": 2}, ULYSSES | ALIBI, False, {"zero": 1}),
    ({"context": 8}, GATHER, False, {"zero": 3, "remat": True}),
    ({"context": 4, "tensor": 2}, ULYSSES, True, {"zero": 1, "constrain": sequence_parallel}),
    (
        {"context": 2, "tensor": 2, "data": 2},
        GATHER | ALIBI,
        True,
        {"zero": 2, "constrain": sequence_parallel},
    ),
    ({"context": 4, "stage": 2}, GATHER | LEARNED, True, {"schedule": "gpipe", "zero": 3}),
    (
        {"context": 2, "stage": 2, "data": 2},
        ULYSSES | LEARNED,
        False,
        {"schedule": "1f1b", "zero": 1},
    ),
    (
        {"context": 2, "stage": 2, "tensor": 2},
        GATHER,
        True,
        {"schedule": "interleaved", "mask_idle_ops": True, "zero": 3},
    ),
    (
        {"context": 2, "stage": 2, "tensor": 2},
        ULYSSES,
        True,
        {"schedule": "zb-v", "mask_idle_ops": True, "zero": 2},
    ),
    (
        {"context": 2, "stage": 4},
        GATHER,
        False,
        {"schedule": "zb-h1", "mask_idle_ops": True, "num_microbatches": 4},
    ),
    ({"context": 2, "stage": 2, "replica": 2}, GATHER, False, {"schedule": "zb-v", "zero": 1}),
    ({"replica": 2, "data": 2, "context": 2}, GATHER | DYNAMIC, True, {"zero": 3, "remat": True}),
    (
        {"data": 2, "context": 2, "tensor": 2},
        ULYSSES,
        True,
        {"zero": 2, "overlap_grad_reduce": True},
    ),
    (
        {"data": 2, "context": 2, "stage": 2},
        GATHER,
        True,
        {"schedule": "1f1b", "remat": "dots", "zero": 2},
    ),
    ({"context": 2, "stage": 2, "tensor": 2}, GATHER, False, {"schedule": "gpipe", "remat": True}),
    ({"context": 2, "tensor": 2, "data": 2}, EXPERTS | GATHER, True, {"zero": 1}),
    (
        {"context": 2, "stage": 2, "tensor": 2},
        EXPERTS | ULYSSES,
        True,
        {"schedule": "zb-h1", "zero": 3},
    ),
    (
        {"data": 2, "context": 2, "stage": 2},
        GATHER | EXPERTS,
        True,
        {"zero": 3, "mask_idle_ops": True},
    ),
    (
        {"replica": 2, "data": 2, "context": 2},
        ULYSSES | EXPERTS,
        False,
        {"zero": 1, "experts": EXPERTS_OVER_DATA},
    ),
    (
        {"data": 2, "context": 2, "stage": 2},
        GATHER | EXPERTS,
        False,
        {"zero": 3, "mask_idle_ops": True, "experts": EXPERTS_OVER_DATA},
    ),
    ({"context": 2, "tensor": 4}, {"num_kv_heads": 1, "window": 6}, True, {}),
    (
        {"context": 2, "stage": 2, "tensor": 2},
        GATHER,
        True,
        {"mask_idle_ops": True, "constrain": sequence_parallel},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(SWEEP)))
def test_split_sequences_have_the_numbers_of_one_device_on_every_mesh_and_schedule(x64, case):
    axes, changes, packed, settings = SWEEP[case]
    check_parity(axes, changes, packed, **settings)


TRAINED = ("layers/attention/*", "layers/mlp/*", "outer/tokens", "outer/head")


OPTIMIZER = optax.MultiSteps(optax.adam(1e-2), 2)


@cache
def trained_on_one_device(config, num_steps):
    """Params after clipped steps of plain JAX and optax, the last norm of the gradients included."""
    params, model, loss = make_params(config), transformer.make_model(config), make_loss(config)
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" in jax.tree_util.keystr(path), params
    )

    @jax.jit
    def one_step(params, opt_state, batch):
        grads = jax.grad(lambda p: jnp.divide(*loss(model.apply(p, batch), batch)[:2]))(params)
        grads = jax.tree.map(lambda g, is_frozen: 0 * g if is_frozen else g, grads, frozen)
        norm = optax.tree.norm(grads)
        updates, opt_state = OPTIMIZER.update(
            jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), grads), opt_state, params
        )
        return optax.apply_updates(params, updates), opt_state, norm

    opt_state, norm = OPTIMIZER.init(params), None
    for step in range(num_steps):
        params, opt_state, norm = one_step(params, opt_state, make_batch(seed=step))
    return params, norm


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "zero", "schedule"),
    [
        pytest.param({"replica": 2, "data": 2, "context": 2}, 1, "1f1b", marks=pytest.mark.slow),
        pytest.param({"replica": 2, "data": 2, "context": 2}, 2, "1f1b", marks=pytest.mark.slow),
        ({"data": 2, "context": 2, "stage": 2}, 3, "gpipe"),
        pytest.param({"data": 2, "context": 2, "stage": 2}, 3, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_zero_shards_over_data_and_context_in_one(x64, axes, zero, schedule):
    """Two updates, each of the mean of two clipped gradients, with frozen norms; in masked stages of uneven packed layers."""
    config, num_layers = make_config(num_layers=3, **GATHER), 3
    mesh, table = jaxpar.make_mesh(**axes), transformer.param_table(config)
    layout = jaxpar.LayerLayout(num_layers, mesh.shape["stage"])
    packed = table | {
        "layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))
    }
    shardings = jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES)
    parallel = jaxpar.Parallel(mesh, shardings, zero=zero, trainable=TRAINED, layout=layout)
    step = jaxpar.make_train_step(
        jaxpar.value_and_grad(
            transformer.make_model(config),
            make_loss(config),
            parallel,
            num_microbatches=2,
            schedule=schedule,
            mask_idle_ops=True,
        ),
        OPTIMIZER,
        max_grad_norm=0.1,
    )
    values = layout.pack_params(make_params(config))
    state = jaxpar.init_state(lambda key: values, jax.random.key(0), OPTIMIZER, parallel)
    for tree in (state.opt_state.inner_opt_state[0].mu, *((state.params,) if zero == 3 else ())):
        for leaf in jax.tree.leaves(tree["layers"]):
            assert leaf.size == 4 * mesh.shape["stage"] * leaf.addressable_shards[0].data.size
    compiled = step.lower(state, jaxpar.shard_batch(make_batch(), mesh)).compile()
    found = counted(jaxpar.inspect_step(compiled, mesh=mesh))
    assert {axes for kind, axes in found if kind in ("all-gather", "reduce-scatter")} <= {
        "data+context",
        CONTEXT,
        "stage",
    }
    assert found["reduce-scatter", "data+context"]
    assert found["all-gather", "data+context"]
    assert found["all-reduce", "replica"] == (mesh.shape["replica"] > 1), (
        "of the shards of gradients"
    )
    for number in range(4):
        state, metrics = compiled(state, jaxpar.shard_batch(make_batch(seed=number), mesh))
    params, norm = trained_on_one_device(config, 4)
    assert_same(jaxpar.fetch(layout.unpack_params(state.params)), params, within=1e-10)
    assert_same(metrics["grad_norm"], np.float32(norm), within=1e-6)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_each_device_has_a_chunk_from_the_beginning_and_one_from_the_end():
    mesh = jaxpar.make_mesh(data=2, context=2, tensor=2)
    batch = jaxpar.shard_batch({"x": np.arange(32).reshape(4, 8), "label": np.arange(4)}, mesh)
    held = {shard.device.id: shard.data.tolist() for shard in batch["x"].addressable_shards}
    assert held[0] == held[1] == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert held[2] == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert held[4] == [[16, 17, 22, 23], [24, 25, 30, 31]]
    assert batch["label"].sharding.spec == P("data"), "what belongs to a row is not split"
    assert batch["positions"][0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_positions_begin_anew_in_each_document():
    mesh = jaxpar.make_mesh(context=2)
    batch = jaxpar.shard_batch({"segments": np.array([[7, 7, 7, 4, 4, 7, 7, 7]])}, mesh)
    assert batch["segments"].tolist() == [[0, 0, 2, 2, 0, 1, 1, 2]]
    assert batch["positions"].tolist() == [[0, 1, 1, 2, 2, 0, 1, 0]]


def test_rows_of_a_process_are_cut_like_whole_batches():
    mesh, batch = jaxpar.make_mesh(data=2, context=2, stage=2), make_batch(packed=True)
    whole = jaxpar.shard_batch(batch, mesh)
    assert_same_bits(jaxpar.shard_batch(batch, mesh, num_rows=ROWS), whole)
    like = jaxpar.abstract_batch(batch, mesh)
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), whole) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), like
    )
    assert jaxpar.local_rows(ROWS, mesh, devices=jax.devices()[2:4]).tolist() == [4, 5, 6, 7]


def test_a_process_reads_the_columns_of_its_devices():
    mesh = jaxpar.make_mesh(data=2, context=2, tensor=2)
    of = lambda *ids: jaxpar.local_rows(ROWS, mesh, seq=8, devices=[jax.devices()[i] for i in ids])
    rows, columns = of(4, 5)
    assert (rows.tolist(), columns.tolist()) == ([4, 5, 6, 7], [0, 1, 6, 7])
    assert [each.tolist() for each in of(2)] == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert of(0, 6)[1].tolist() == list(range(8)), "all columns of all rows that it has a part of"
    without = jaxpar.local_rows(ROWS, jaxpar.make_mesh(data=8), seq=7, devices=[jax.devices()[3]])
    assert [each.tolist() for each in without] == [[3], list(range(7))]
    with pytest.raises(
        ValueError, match=r"divisible by twice the context axis.*got seq=6, context=2. Use seq=8"
    ):
        jaxpar.local_rows(ROWS, mesh, seq=6)
    with pytest.raises(ValueError, match=r"seq must be at least 1; got -8\. Choose 1 or more"):
        jaxpar.local_rows(ROWS, mesh, seq=-8)
    for num_rows, seq, wrong in (
        (ROWS, "16", "seq must be an integer; got '16'"),
        (8.0, 8, "num_rows .* got 8.0"),
    ):
        with signatures_unchecked(), pytest.raises(TypeError, match=wrong):
            jaxpar.local_rows(num_rows, mesh, seq=seq)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_columns_of_a_process_are_placed_like_whole_sequences():
    mesh, batch = jaxpar.make_mesh(data=2, context=2, stage=2), make_batch(packed=True)
    whole = jaxpar.fetch(jaxpar.shard_batch(batch, mesh))
    order = context_parallel.zig_zag(SEQ, 2)
    positions = np.empty_like(batch["tokens"])
    positions[:, order] = whole["positions"]
    got = jaxpar.fetch(
        jaxpar.shard_batch(batch | {"positions": positions}, mesh, num_rows=ROWS, seq=SEQ)
    )
    begins = order - whole["positions"]
    assert_same_bits(got, whole | {"segments": begins.astype(np.int32)})
    del batch["segments"]
    assert_same_bits(jaxpar.shard_batch(batch, mesh, seq=SEQ), jaxpar.shard_batch(batch, mesh))


@pytest.mark.parametrize(
    ("changes", "seq", "message"),
    [
        (
            {},
            32,
            r"got 16 columns, and 32 of seq=32 are held here\. Give those of jaxpar\.local_rows\(num_rows, mesh, seq=seq\)",
        ),
        ({}, SEQ, "columns with segments must have positions; got none"),
        (
            {"positions": np.full((ROWS, SEQ), 3)},
            SEQ,
            "positions must count up by one in each document",
        ),
        (
            {"positions": np.tile(np.arange(SEQ) + 1, (ROWS, 1))},
            SEQ,
            "positions must count up by one in each document",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes, seq, message):
    batch = {"tokens": np.ones((ROWS, SEQ)), "segments": np.zeros((ROWS, SEQ), int)} | changes
    with pytest.raises(ValueError, match=message):
        jaxpar.shard_batch(batch, jaxpar.make_mesh(context=4), seq=seq)


@pytest.mark.slow
def test_bfloat16_is_trained_on_cpu_devices():
    step, mesh, shardings = make_run(
        {"context": 2}, make_config(compute_dtype="bfloat16", **GATHER)
    )
    params, batch = make_params(make_config(), jnp.float32), cast(make_batch(), np.float32)
    loss, grads = jaxpar.fetch(
        step(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    )
    want = of_one_device(make_config(compute_dtype="float32"), params, batch)
    assert_same(loss, np.float32(want[0]), within=2e-2)
    assert_same(grads, want[1], within=0.1)


@pytest.mark.full
def test_the_batch_in_the_order_of_the_devices_is_the_same_batch_on_one_device(x64):
    config, batch = make_config(), make_batch(packed=True)
    params, model, loss = make_params(config), transformer.make_model(config), make_loss(config)
    in_order = jaxpar.fetch(jaxpar.shard_batch(batch, jaxpar.make_mesh(context=4)))
    of = jax.jit(lambda batch: jnp.divide(*loss(model.apply(params, batch), batch)[:2]))
    assert_same(of(in_order), of(batch))


@pytest.mark.full
def test_a_batch_that_is_not_in_the_order_of_the_devices_gives_nan(x64):
    step, mesh, shardings = make_run({"context": 2}, make_config(num_layers=1), num_microbatches=1)
    params, batch = jaxpar.shard(make_params(make_config(num_layers=1)), shardings), make_batch()
    in_rows = batch | {"positions": np.broadcast_to(np.arange(SEQ, dtype=np.int32), (ROWS, SEQ))}
    assert np.isfinite(step(params, jaxpar.shard_batch(batch, mesh))[0])
    in_rows = jaxpar.shard(in_rows, jax.tree.map(lambda _: NamedSharding(mesh, P("data")), in_rows))
    assert np.isnan(step(params, in_rows)[0])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": np.ones((8, 12))},
            "divisible by twice the context axis.*got seq=12, context=4. Use seq=16, or another context",
        ),
        (
            {"x": np.ones((8, 16)), "y": np.ones((8, 3))},
            r"got \{'x': 16, 'y': 3\} and context=4. Give features of positions as",
        ),
        ({"x": np.ones(8)}, "got no such array and context=4"),
        ({"a": np.float32(1), "tokens": np.ones((8, 16))}, "its rows; got none for a"),
        (
            {"tokens": np.ones((8, 16)), "positions": np.zeros((8, 16), int)},
            "positions must count up by one in each document",
        ),
        (
            {"tokens": np.ones((8, 16)), "positions": np.tile(np.arange(16.0), (8, 1))},
            r"positions must be integers \[rows, seq\]; got float64 of shape \(8, 16\)",
        ),
        (
            {"tokens": np.ones((8, 16)), "segments": np.zeros(8, int)},
            r"segments must be integers \[rows, seq\]; got int64 of shape \(8,\), where rows, seq are 8, 16\. Give one",
        ),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, message):
    mesh = jaxpar.make_mesh(context=4)
    with pytest.raises(ValueError, match=message):
        jaxpar.shard_batch(batch, mesh)


# --- what is refused --------------------------------------------------------------------------------------------------


def trace(axes, config, batch, **settings):
    step, *_ = make_run(axes, config, **settings)
    return step.lower(abstract_params(transformer.param_table(config)), batch)


def test_a_model_or_batch_that_context_cannot_split_is_refused():
    config, batch = make_config(compute_dtype="float32"), make_batch()
    with pytest.raises(
        ValueError,
        match=r"must have positions; got context=2 and none\. Make it with jaxpar\.shard_batch",
    ):
        trace({"context": 2}, config, batch)
    in_order, in_eight = (
        jaxpar.abstract_batch(batch, jaxpar.make_mesh(context=context)) for context in (2, 8)
    )
    experts = make_config(**EXPERTS, compute_dtype="float32").with_experts(capacity_factor=1.0)
    with pytest.raises(
        ValueError, match=r"capacity_factor=1\.0, context=2\. Leave capacity_factor out"
    ):
        trace({"context": 2}, experts, in_order)
    few = make_config(**ULYSSES, compute_dtype="float32", num_heads=4, num_kv_heads=1)
    with pytest.raises(
        ValueError,
        match=r"got context=8, 4 heads and 1 key and value heads on a device\. Use attention",
    ):
        trace({"context": 8}, few, in_eight)
    with pytest.raises(
        ValueError, match="executor=mpmd splits no sequences; got context=2, stage=2"
    ):
        trace({"context": 2, "stage": 2}, config, in_order, executor="mpmd")
    with (
        signatures_unchecked(),
        pytest.raises(ValueError, match="must be one of 'gather', 'ulysses'; got 'ring'"),
    ):
        make_config(attention_over_context="ring")


def test_a_batch_that_was_not_sharded_is_refused_for_any_model():
    model = lambda params, batch: (
        context_parallel.gather_sequence(batch["x"] * params["w"]).mean(1, keepdims=True)
        * batch["x"]
    )
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"])
    mesh, batch = (
        jaxpar.make_mesh(context=2),
        {"x": np.ones((2, 4), np.float32), "y": np.ones((2, 4), np.float32)},
    )
    for step in (
        jaxpar.value_and_grad(model, loss, mesh),
        jaxpar.make_eval_step(model, loss, mesh),
    ):
        step({"w": np.float32(1)}, jaxpar.shard_batch(batch, mesh, sequences=["x", "y"]))
        with pytest.raises(
            ValueError,
            match=r"must have positions; got context=2 and none\. Make it with jaxpar\.shard",
        ):
            step({"w": np.float32(1)}, batch)


def test_an_array_that_may_be_features_of_a_row_is_refused_unless_it_is_named():
    """Sixteen features of a row are as long as its sixteen tokens, and are not split between devices as those are."""
    mesh, tokens = jaxpar.make_mesh(context=2), np.arange(2 * SEQ, dtype=np.int32).reshape(2, SEQ)
    message = (
        r"must be the sequence and not the features of a row; got {}, which may be either\. If each has a value for each "
        r"position, name them: shard_batch\(batch, mesh, sequences={}\)\. Give features of a row as \[rows, 1, "
    )
    for name, array in (
        ("features", np.ones((2, SEQ), np.float32)),
        ("labels", tokens),
        ("image", np.ones((2, SEQ, SEQ), np.float32)),
    ):
        batch, got = {"tokens": tokens, name: array}, re.escape(f"{name} {list(array.shape)}")
        for make in (jaxpar.shard_batch, jaxpar.abstract_batch):
            with pytest.raises(ValueError, match=message.format(got, re.escape(f"['{name}']"))):
                make(batch, mesh)
            split = make(batch, mesh, sequences=[name])
            assert split[name].sharding.spec[1] == CONTEXT
        assert_same(jaxpar.fetch(jaxpar.shard_batch(batch, jaxpar.make_mesh(data=2))), batch)
    split = jaxpar.fetch(
        jaxpar.shard_batch({"tokens": tokens, "in": {"x": tokens}}, mesh, sequences=["in/x"])
    )
    np.testing.assert_array_equal(split["in"]["x"], tokens[:, context_parallel.zig_zag(SEQ, 2)])
    with pytest.raises(ValueError, match=r"0 .*, 1 .*, which may be either"):
        jaxpar.shard_batch((tokens, tokens), mesh)
    jaxpar.shard_batch((tokens, np.ones(2)), mesh)  # a single one is what is to be split
    for axes in ({"context": 2}, {"data": 2}):
        with pytest.raises(
            ValueError,
            match=r"sequences must name arrays .* got x, where those are tokens\. Correct",
        ):
            jaxpar.shard_batch(
                {"tokens": tokens, "label": np.ones(2)}, jaxpar.make_mesh(**axes), sequences=["x"]
            )


@pytest.mark.parametrize(
    "axes", [{"context": 2}, {"data": 2, "context": 4}, {"context": 2, "stage": 2}]
)
def test_features_of_a_row_are_whole_on_each_device(axes, x64):
    """Attention reads what an encoder made of each row, of another number of positions, beside the tokens of the row."""

    def embed(outer, batch):
        seen = batch["encoded"] @ outer["to_seen"]
        return {
            "h": batch["x"] @ outer["embed"] + batch["style"][:, 0, None] @ outer["style"],
            "seen": seen,
        }

    def layer(params, x):
        keys = context_parallel.gather_sequence(x["h"] @ params["k"])
        own = jax.nn.softmax(x["h"] @ keys.mT) @ keys
        cross = jax.nn.softmax(x["h"] @ params["q"] @ x["seen"].mT) @ x["seen"]
        return x | {"h": x["h"] + own + cross}

    model = jaxpar.LayeredModel(embed, layer, lambda outer, x: x["h"] @ outer["head"])
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["targets"])
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape) / 2
    outer = {name: draw(4, 4) for name in ("embed", "to_seen", "style", "head")}
    params = {"outer": outer, "layers": {name: draw(2, 4, 4) for name in ("k", "q")}}
    rows, encoded = (4, SEQ, 4), {"encoded": draw(4, 6, 4), "style": draw(4, 1, 4)}
    batch = {"x": draw(*rows), "targets": draw(*rows)} | encoded
    mesh = jaxpar.make_mesh(**axes)
    mean = lambda params: jnp.divide(*loss(model.apply(params, batch), batch))
    expected = jax.value_and_grad(mean)(params)
    sharded = jaxpar.shard_batch(batch, mesh, sequences=["x"])
    assert sharded["encoded"].sharding.spec[1:] == sharded["style"].sharding.spec[1:] == ()
    by_process = jaxpar.shard_batch(batch, mesh, num_rows=4, seq=SEQ, sequences=["x"])
    assert_same(jaxpar.fetch(by_process), jaxpar.fetch(sharded))
    shapes = jaxpar.abstract_batch(batch, mesh, sequences=["x"])
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, sharded, shapes))
    )
    step = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)
    held = jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, {"**": P()}))
    assert_same(step(held, sharded), expected, within=1e-12)


@pytest.mark.parametrize("axes", [{"context": 2}, {"context": 4, "data": 2}])
def test_the_largest_value_of_a_sequence_has_the_gradient_of_one_device(x64, axes):
    """Also where several positions have it: each device that has one gets an equal part, as positions of one device do."""
    rng = np.random.default_rng(0)
    largest = lambda h: context_parallel.max_over_sequence(h.max(1, keepdims=True))
    model = lambda w, batch: jnp.tanh(batch["x"] @ w) * largest(jnp.sin(batch["x"] @ w))
    loss = lambda h, batch: jaxpar.losses.squared_error(h, batch["x"])
    x = rng.normal(size=(4, 16, 3))
    x[:, 4:8] = x[:, 8:12] = x[:, 12:] = x[:, :4]  # a part is the same on each device
    batch, w = {"x": x}, rng.normal(size=(3, 3))

    def whole(w):
        total, count = loss(model(w, batch), batch)
        return total / count

    mesh = jaxpar.make_mesh(**axes)
    params = jaxpar.shard(w, jaxpar.shardings_from_paths(w, mesh, {"": jaxpar.replicated()}))
    split = jaxpar.shard_batch(batch, mesh)
    with signatures_unchecked():
        got = jax.jit(jaxpar.value_and_grad(model, loss, mesh))(params, split)
    assert_same(got, jax.value_and_grad(whole)(w))


def test_features_of_a_row_that_may_be_a_sequence_are_refused():
    mesh, tokens = jaxpar.make_mesh(context=2), np.ones((2, SEQ), np.int32)
    for count in (SEQ, SEQ // 2):  # as many as positions of the row, or of a device
        with pytest.raises(
            ValueError, match=rf"got encoded \[2, {count}, 4\], which may be either"
        ):
            jaxpar.shard_batch({"tokens": tokens, "encoded": np.ones((2, count, 4))}, mesh)
    with pytest.raises(
        ValueError,
        match=r"got \{'0': 16, '1': 6\} .* name the sequences of a dict that has features of rows",
    ):
        jaxpar.shard_batch((tokens, np.ones((2, 6, 4))), mesh, sequences=["0"])


def test_a_model_that_sends_nothing_over_context_is_refused():
    model = lambda params, batch: batch["x"] * params["w"]
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"])
    mesh, batch = (
        jaxpar.make_mesh(context=2),
        {"x": np.ones((2, 4), np.float32), "y": np.ones((2, 4), np.float32)},
    )
    step = jaxpar.value_and_grad(model, loss, mesh)
    with pytest.raises(
        ValueError, match=r"no collective over context in the model\. Give attention the keys"
    ):
        step({"w": np.float32(1)}, jaxpar.shard_batch(batch, mesh, sequences=["x", "y"]))


def test_a_table_of_all_positions_is_told_which_a_device_reads():
    model = lambda params, batch: batch["x"] * params["of_positions"]
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["x"])
    mesh = jaxpar.make_mesh(context=2)
    batch = jaxpar.shard_batch({"x": np.ones((2, 4), np.float32)}, mesh, sequences=["x"])
    step = jaxpar.value_and_grad(model, loss, mesh)
    with pytest.raises((TypeError, ValueError), match="ncompatible shapes") as raised:
        step({"of_positions": np.ones((1, 4), np.float32)}, batch)
    (note,) = raised.value.__notes__[:1]
    assert "With context=2" in note
    assert "places(h.shape[1])]" in note


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda y, batch: (jnp.sum(y[:, 1:] - batch["x"][:, :-1]), jnp.float32(y.size)),
            "loss must treat .* a slice of 7 of 8",
        ),
        (
            lambda y, batch: (jnp.sum(jnp.square(y[:, :4])), jnp.float32(y[:, :4].size)),
            "loss must treat .* a slice of 4 of 8",
        ),
        (
            lambda y, batch: (jnp.sum(y[:, -1]), jnp.float32(len(y))),
            "got a slice of 1 of 8 positions. Shift targets before",
        ),
        (
            lambda y, batch: (jnp.sum(y), jnp.float32(len(y))),
            "got loss_sum a sum over positions, and weight_sum the same for any",
        ),
        (lambda y, batch: (jnp.sum(jnp.mean(y, 1)), jnp.float32(len(y))), None),
        (lambda y, batch: (jnp.sum(y), jnp.float32(y.size)), None),
        (
            lambda y, batch: (
                jnp.sum(jnp.square(jnp.diff(context_parallel.gather_sequence(y), axis=1))),
                jnp.float32(len(y)),
            ),
            None,
        ),
    ],
)
def test_a_loss_that_is_no_sum_over_positions_is_refused(loss, message):
    mesh, x = jaxpar.make_mesh(context=2), np.random.default_rng(0).normal(size=(2, 8))
    batch = {"x": x.astype(np.float32)}
    model = lambda params, batch: (
        params["w"] * context_parallel.gather_sequence(batch["x"]).sum(1)[:, None] * batch["x"]
    )
    step, args = (
        jaxpar.value_and_grad(model, loss, mesh),
        ({"w": np.float32(1)}, jaxpar.shard_batch(batch, mesh)),
    )
    if message is None:
        whole = jax.tree.map(jnp.asarray, batch)
        assert_same(step(*args)[0], jnp.divide(*loss(model(args[0], whole), whole)), within=1e-6)
    else:
        with pytest.raises(ValueError, match=message):
            step(*args)


def test_a_step_refuses_a_model_that_mixes_the_positions_of_a_device_beside_a_gather():
    mesh, batch = jaxpar.make_mesh(context=2), {"x": np.ones((2, 8), np.float32)}
    whole = lambda x: context_parallel.gather_sequence(x).sum(1)[:, None] * x
    loss = lambda y, batch: (jnp.sum(y), jnp.float32(y.size))
    args = {"w": np.float32(1)}, jaxpar.shard_batch(batch, mesh)
    model = lambda change: lambda params, batch: params["w"] * change(whole(batch["x"]))
    jaxpar.value_and_grad(model(lambda x: x), loss, mesh)(*args)
    mixing = jaxpar.value_and_grad(model(lambda x: jnp.tanh(jnp.cumsum(x, 1))), loss, mesh)
    with pytest.raises(
        ValueError, match=r"model must treat each position .* positions \(cumsum at .*test_context"
    ):
        mixing(*args)
    placed = jax.device_put(args[0], NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="model must treat each position"):
        jax.jit(mixing)(placed, args[1])


def test_a_softmax_of_the_positions_of_a_device_that_is_added_up_is_told():
    mesh, batch = jaxpar.make_mesh(context=2), {"x": np.ones((2, 8), np.float32)}
    loss = lambda y, batch: (jnp.sum(y), jnp.float32(y.size))

    def model(params, batch):
        shares = jax.nn.softmax(params["w"] * batch["x"], 1)
        return batch["x"] * context_parallel.sum_over_sequence(jnp.sum(shares, 1))[:, None]

    value_and_grad = jaxpar.value_and_grad(model, loss, mesh)
    with pytest.warns(UserWarning, match=r"depend on which a device has: .* what mixes the pos"):
        value_and_grad({"w": np.float32(1)}, jaxpar.shard_batch(batch, mesh))


def with_the_mean_of_the_ring(x):
    """x and the mean of the sequence, whose parts go round the devices."""
    num_devices = context_parallel.num_parts()
    total = part = x.mean(1, keepdims=True)
    for _ in range(num_devices - 1):
        part = jax.lax.ppermute(
            part, CONTEXT, [(i, (i + 1) % num_devices) for i in range(num_devices)]
        )
        total = total + part
    return x + total / num_devices


def test_what_is_sent_by_a_permutation_is_said_not_to_be_read():
    mesh = jaxpar.make_mesh(context=2)
    loss = lambda y, batch: (jnp.sum(y**2), jnp.float32(y.size))
    model = lambda params, batch: with_the_mean_of_the_ring(params["w"] * batch["x"])
    batch = jaxpar.shard_batch({"x": np.ones((2, 8), np.float32)}, mesh)
    with pytest.warns(
        UserWarning, match=r"is not read, .* got jax\.lax\.ppermute in it, and context=2"
    ):
        jaxpar.value_and_grad(model, loss, mesh)({"w": np.float32(1)}, batch)


@pytest.mark.filterwarnings("ignore:what a model sends")
@pytest.mark.parametrize("part", ["layer", "head"])
def test_a_permutation_in_a_pipeline_needs_stages_that_skip_no_op(x64, part):
    mesh = jaxpar.make_mesh(context=2, stage=2, devices=jax.devices()[:4])
    ring = {"layer": lambda x: x, "head": lambda x: x} | {part: with_the_mean_of_the_ring}
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"] * outer["w"],
        lambda layer, x: ring["layer"](jnp.tanh(x * layer["w"])),
        lambda outer, x: ring["head"](x) * outer["w"],
    )
    loss = lambda y, batch: (jnp.sum((y - batch["y"]) ** 2), jnp.float32(y.size))
    batch = dict(zip("xy", np.random.default_rng(0).normal(size=(2, 4, 8)), strict=True))
    params = {"outer": {"w": jnp.float64(1.5)}, "layers": {"w": jnp.array([0.5, 2.0])}}
    sharded = jaxpar.shard_batch(batch, mesh, sequences=["x", "y"])
    step = partial(jaxpar.value_and_grad, model, loss, mesh, num_microbatches=2)
    for settings in ({}, {"mask_idle_ops": True, "schedule": "zb-h1"}):
        with pytest.raises(
            ValueError,
            match=f"run each op at the same time; got one in {part}, in a pipeline whose stages skip",
        ):
            jax.eval_shape(step(**settings), params, sharded)
    whole = lambda params: jnp.divide(*loss(model.apply(params, batch), batch))
    assert_same(
        jax.jit(step(mask_idle_ops=True))(params, sharded),
        jax.value_and_grad(whole)(params),
        within=1e-12,
    )


# --- traffic and memory -----------------------------------------------------------------------------------------------


def collectives(axes, changes, **settings):
    """How often a step runs each kind of collective over context, and those that reduce gradients."""
    config = make_config(compute_dtype="float32", **changes)
    step, mesh, shardings = make_run(axes, config, **settings)
    table = abstract_params(transformer.param_table(config))
    params = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), table, shardings
    )
    report = jaxpar.inspect_step(step, params, jaxpar.abstract_batch(make_batch(), mesh))
    return dict(counted(report)), {
        (each.kind, "+".join(each.axes)): each.payload_bytes for each in report.collectives
    }


def counted(report):
    """How often a step runs each kind of collective, by its axes."""
    found = Counter()
    for each in report.collectives:
        found[each.kind, "+".join(each.axes)] += each.known_times
    return found


@pytest.mark.full
def test_a_layer_gathers_its_keys_and_values_once_in_each_pass_and_scatters_their_gradients_once():
    found, sizes = collectives({"data": 2, "context": 2, "tensor": 2}, GATHER)
    passes = SMALL["num_layers"] * 2  # of two microbatches
    assert found["all-gather", CONTEXT] == 2 * passes, found
    assert found["reduce-scatter", CONTEXT] == passes, found
    assert found["all-reduce", "data+context"] == 2, "of the weight, and of loss and gradients"
    assert not {key for key in found if CONTEXT in key[1]} - {
        ("all-gather", CONTEXT),
        ("reduce-scatter", CONTEXT),
        ("all-reduce", "data+context"),
    }
    rows, heads, head_dim = (
        ROWS // 4,
        SMALL["num_kv_heads"] // 2,
        SMALL["embed_dim"] // SMALL["num_heads"],
    )
    assert sizes["all-gather", CONTEXT] == 4 * rows * SEQ * heads * 2 * head_dim, (
        "each shard of tensor gathers its own"
    )


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_was_gathered_is_not_stored(tensor):
    config, mesh = make_config(compute_dtype="float32"), jaxpar.make_mesh(context=4, tensor=tensor)
    model, one = (
        transformer.make_model(config),
        partial(jax.tree.map, lambda p: p.update(shape=p.shape[1:])),
    )
    params = abstract_params(transformer.param_table(config))
    batch = {
        name: jax.ShapeDtypeStruct((2, SEQ // 4), jnp.int32) for name in ("tokens", "positions")
    }
    stored, splits = [], []

    def inside(x):
        x_like = jax.eval_shape(model.embed, params["outer"], batch)
        splits.append(split_layer(model.layer, one(params["layers"]), x_like))
        stored.extend((*splits[0].shapes("residuals_b"), *splits[0].shapes("residuals_w")))
        return x

    manual = {"replica", "data", "context", "stage"} | ({"tensor"} if tensor == 1 else set())
    jax.eval_shape(
        jax.shard_map(
            inside, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=manual, check_vma=False
        ),
        1.0,
    )
    assert all(SEQ not in leaf.shape[:2] for leaf in stored), [leaf.shape for leaf in stored]


def memory(context, seq=512):
    config = make_config(compute_dtype="float32", num_layers=2, attention_over_context="gather")
    step, mesh, _ = make_run({"context": context}, config)
    params = abstract_params(transformer.param_table(config))
    compiled = step.lower(params, jaxpar.abstract_batch(make_batch(seq=seq), mesh)).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()


@pytest.mark.full
def test_a_fourth_of_each_sequence_takes_less_than_a_third_of_the_memory():
    whole, _ = memory(1)
    part, text = memory(4)
    assert part < 0.35 * whole, (part, whole)
    sizes = [
        math.prod(map(int, dims.split(","))) for dims in re.findall(r"[a-z]\w*\[([\d,]+)\]", text)
    ]
    layers, rows = 2, ROWS // 2
    assert max(sizes) <= layers * rows * SMALL["num_heads"] * 512 * 512 // 4, (
        "scores of all pairs of positions"
    )


def test_the_form_that_moves_fewer_bytes_is_the_default():
    over = lambda parts, **changes: transformer.attention.over_context(
        make_config(**changes), parts
    )
    assert over(2, num_heads=8, num_kv_heads=2) == "gather"  # 2 < 2/3 (1 + 4)
    assert over(4, num_heads=8, num_kv_heads=2) == "ulysses"
    assert over(16, num_heads=8, num_kv_heads=2) == "gather", "16 does not divide the heads"
    assert (
        over(2, attention=jaxpar.flash_attention, compute_dtype="bfloat16", window=4) == "ulysses"
    ), "a kernel's window"
    assert context_parallel.num_parts() == 1
    assert context_parallel.CONTEXT == CONTEXT


@pytest.mark.full
@pytest.mark.parametrize(
    ("packed", "axes", "told"),
    [
        pytest.param(False, {"context": 2}, False, marks=pytest.mark.slow),
        (True, {"context": 2, "tensor": 2}, True),
        pytest.param(True, {"context": 2, "tensor": 2}, False, marks=pytest.mark.slow),
        pytest.param(True, {"context": 2, "stage": 2, "tensor": 2}, True, marks=pytest.mark.slow),
    ],
    ids=["whole rows", "documents", "a bias", "stages"],
)
def test_a_kernel_of_chunks_takes_the_place_of_scores(x64, packed, axes, told):
    def never(*args, **options):
        raise AssertionError("it is given whole sequences")

    never.kernel_of_chunks, never.kernel_of_documents = (
        WRITTEN_OUT,
        WRITTEN_OUT.of_documents if told else None,
    )
    config = make_config(compute_dtype="float32", max_documents=SEQ, **GATHER)
    params, batch = make_params(config, jnp.float32), cast(make_batch(packed=packed), np.float32)
    step, mesh, shardings = make_run(axes, replace(config, attention=never))
    got = jaxpar.fetch(step(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)))
    assert_same(got, of_one_device(config, params, batch), within=1e-5)


@pytest.mark.parametrize(
    ("heads", "axes", "got"),
    [
        (2, {"context": 2, "tensor": 2}, "context=2, tensor=2. Choose 4 "),
        (3, {"context": 2}, "context=2. Choose 6 "),
    ],
)
def test_heads_that_context_and_tensor_do_not_divide_are_refused_with_a_number_that_they_do(
    heads, axes, got
):
    model = jaxpar.LayeredModel(
        embed=lambda outer, batch: outer["tokens"][batch["tokens"]],
        layer=lambda layer, h: h + heads_to_sequence(sequence_to_heads(h @ layer["w"])),
        head=lambda outer, h: jnp.einsum("btki,vki->btv", h, outer["tokens"]),
    )
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    batch = jaxpar.shard_batch(
        {name: np.zeros((2, 8), np.int32) for name in ("tokens", "targets")}, mesh
    )
    loss = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])

    def traced(heads):
        params = {
            "outer": {"tokens": jnp.ones((8, heads, 4))},
            "layers": {"w": jnp.ones((2, 4, 4))},
        }
        return jax.eval_shape(jaxpar.value_and_grad(model, loss, mesh), params, batch)

    with pytest.raises(
        ValueError, match=f"got {heads} heads in an array of shape .*, {got}"
    ) as raised:
        traced(heads)
    traced(int(re.search(r"Choose (\d+) heads", str(raised.value))[1]))
