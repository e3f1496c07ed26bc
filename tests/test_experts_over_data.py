"""Experts over `data`: rows travel to the replicas that own their experts, and the numbers are those of one device."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.backward.split import split_layer
from jaxpar.models import transformer
from jaxpar.models.lora import ADAPTERS, Lora
from jaxpar.models.transformer.dispatch import Shards, by_expert_first
from jaxpar.schedule import SCHEDULES
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import EXPERT_RULES, EXPERTS_OVER_DATA, TRANSFORMER_RULES
from tests.support import tiny
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiny_experts import (
    MOE,
    check_step,
    config_of,
    job,
    loss_of,
    placed,
    with_random_factors,
)
from tests.support.tiny_transformer import EMBED, ROWS, SEQ, jit

RULES = TRANSFORMER_RULES | EXPERTS_OVER_DATA
OVER_TENSOR = TRANSFORMER_RULES | EXPERT_RULES["experts"]
SLOW = pytest.mark.slow
TILES = {"products": "tiles", "buffer": 2.0}
ONE_LAYER = {"num_layers": 1}
A2A = {"exchange": "all_to_all"}  # also where tokens have as many experts as there are owners


def mesh_of(**axes):
    size = int(np.prod([*axes.values()]))
    return jaxpar.make_mesh(**axes, devices=jax.devices()[:size])


def check(name, axes, *, schedule="zb-h1", experts=None, changes=None, **how):
    config = config_of(name, experts, **changes or {})
    check_step(config, mesh_of(**axes), RULES, seed=tiny.fresh_seed(), schedule=schedule, **how)


# The numbers.


@pytest.mark.parametrize(
    ("name", "axes", "how"),
    [
        pytest.param(
            "mixtral",
            {"data": 2, "stage": 2, "tensor": 2},
            {"experts": A2A | TILES, "schedule": "1f1b", "masks": False},
            marks=SLOW,
        ),
        pytest.param(
            "deepseek",
            {"replica": 2, "data": 2, "tensor": 2},
            {"experts": A2A, "zero": 3},
            marks=SLOW,
        ),
        pytest.param("qwen3", {"data": 2, "tensor": 2}, {"experts": TILES, "zero": 2}, marks=SLOW),
        pytest.param(
            "qwen3",
            {"data": 4, "stage": 2},
            {"schedule": "1f1b", "masks": True, "zero": 2},
            marks=SLOW,
        ),
        ("mixtral", {"data": 2}, {"experts": A2A, "changes": ONE_LAYER, "zero": 1}),
        ("capacity", {"data": 2}, {"changes": ONE_LAYER}),
        pytest.param("mixtral", {"data": 2}, {}, marks=pytest.mark.full),
        pytest.param("capacity", {"data": 2}, {"experts": A2A}, marks=pytest.mark.full),
        pytest.param("capacity", {"data": 4, "tensor": 2}, {"remat": True, "zero": 1}, marks=SLOW),
        pytest.param(
            "mixtral",
            {"data": 2, "stage": 2, "tensor": 2},
            {"experts": A2A, "masks": False},
            marks=SLOW,
        ),
        pytest.param("qwen3", {"data": 4}, {"zero": 2}, marks=SLOW),
    ],
)
def test_loss_gradients_balance_and_loads_equal_one_device(x64, name, axes, how):
    check(name, axes, **how)


def test_rows_that_come_from_each_owner_by_expert_have_slots_by_expert():
    """From [owners, experts, room] to [experts, owners, room], and back."""
    owners, num_experts, room = 2, 3, 4
    slots = by_expert_first(
        owners, num_experts, room, Shards((), 1, 1, by_expert=False, owners=owners)
    )
    rows = np.arange(owners * num_experts * room).reshape(owners, num_experts, room)
    np.testing.assert_array_equal(slots.pair[0], rows.transpose(1, 0, 2).ravel())
    np.testing.assert_array_equal(slots.slot[0, slots.pair[0]], rows.ravel())
    np.testing.assert_array_equal(slots.sizes, [[owners * room] * num_experts])


MESHES = [
    {"data": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"replica": 2, "data": 4},
    {"replica": 4, "data": 2},
    {"data": 2, "stage": 4},
    {"replica": 2, "data": 2, "stage": 2},
    {"data": 2, "stage": 2, "tensor": 2},
    {"data": 2, "context": 2, "stage": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all_to_all", "gather"])
@pytest.mark.parametrize("at", range(len(MESHES)), ids=[str(axes) for axes in MESHES])
def test_every_mesh_has_the_numbers_of_one_device(x64, at, exchange):
    """With each of the models in turn; over ``context`` one without room by rows."""
    names = [name for name in MOE if name != "capacity"] if "context" in MESHES[at] else [*MOE]
    name = names[(at + (exchange == "gather")) % len(names)]
    check(name, MESHES[at], experts={"exchange": exchange}, zero=at % 4)


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("at", range(len(SCHEDULES)), ids=SCHEDULES)
def test_every_schedule_has_the_numbers_of_one_device(x64, at, masks):
    """With each level of ZeRO, with recomputation and without it, and both exchanges."""
    name = ["deepseek", "olmoe", "capacity", "mixtral", "qwen3"][at % 5]
    how = {"zero": (at + 2 * masks) % 4, "remat": (at + masks) % 2 == 1, "num_microbatches": 4}
    experts = {"exchange": ["all_to_all", "gather"][(at + masks) % 2]}
    check(
        name,
        {"data": 2, "stage": 2, "tensor": 2},
        schedule=SCHEDULES[at],
        masks=masks,
        experts=experts,
        **how,
    )


@pytest.mark.slow
def test_an_idle_stage_may_get_too_many_rows(x64):
    """It routes all its zeros to the same experts, and what it computes, NaN, is discarded."""
    experts, how = {"buffer": 3.0}, {"schedule": "1f1b", "masks": True, "num_microbatches": 1}
    check("mixtral", {"data": 4, "stage": 2}, experts=experts, **how)


def train(config, mesh, num_steps, *, rules=RULES, zero=0, state=None, before_last=None, **how):
    """Clipped steps of AdamW, with the balancing of biases; metrics are those of the last one."""
    params, batch = job(config)
    _, batch, shardings = placed(config, mesh, rules, params, batch)
    optimizer = transformer.balance_experts(optax.adamw(1e-2))
    run = jaxpar.value_and_grad(
        transformer.make_model(config),
        loss_of(config, metrics=True),
        mesh,
        shardings=shardings,
        has_aux=True,
        zero=zero,
        **how,
    )
    make = jaxpar.init_state if state is None else jaxpar.abstract_state
    made = make(lambda key: params, jax.random.key(0), optimizer, mesh, shardings, zero=zero)
    state = made if state is None else state(made)
    step, metrics, losses = jaxpar.make_train_step(run, optimizer, max_grad_norm=0.5), {}, []
    for left in reversed(range(num_steps)):
        if before_last is not None and left == 0:
            before_last(state)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, jaxpar.fetch(metrics), losses


@pytest.fixture
def x64_in_threads():
    """Float64 in all threads, since checkpoints are read in some."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


TWO_LAYERS = {"num_layers": 2, "experts": {"num_dense_layers": 0}}


def save_in(folder, mesh):
    """Saves a state in a folder."""

    def save(state):
        manager = jaxpar.CheckpointManager(folder, mesh)
        manager.save(state)
        manager.wait()

    return save


def check_steps(got, alone):
    """Compares what ``train`` returns with what it returns on one device."""
    (state, metrics, losses), (state_alone, metrics_alone, losses_alone) = got, alone
    assert_same(losses, losses_alone, within=1e-10)
    assert_same(jaxpar.fetch(state.params), jaxpar.fetch(state_alone.params), within=1e-10)
    assert_same(metrics, metrics_alone, within=1e-6)


@pytest.mark.slow
def test_three_steps_with_experts_over_tensor_equal_one_device(x64_in_threads):
    config = config_of("deepseek", **TWO_LAYERS)
    over_tensor = train(
        config, mesh_of(data=2, tensor=2), 3, rules=OVER_TENSOR, num_microbatches=2, zero=2
    )
    check_steps(over_tensor, train(config, mesh_of(), 3))


@pytest.mark.full
def test_three_steps_equal_one_device_and_are_restored_on_fewer(x64_in_threads, tmp_path):
    config, saved = config_of("deepseek", **TWO_LAYERS), []
    alone, want, losses = train(config, mesh_of(), 3)
    untrained = job(config)[0]["layers"]["router"]["bias"]
    assert np.abs(alone.params["layers"]["router"]["bias"] - untrained).max() > 1e-3

    def save(state):
        save_in(tmp_path, mesh_of(data=4))(state)
        saved.append(jaxpar.fetch(state))

    over_data = train(config, mesh_of(data=4), 3, num_microbatches=2, zero=2, before_last=save)
    check_steps(over_data, (alone, want, losses))
    held = lambda state: (
        state.params["layers"]["experts"]["w_expert_up"].addressable_shards[0].data.shape
    )
    assert held(over_data[0]) == (2, 2, EMBED, 16)
    mesh = mesh_of(data=2)
    restore = jaxpar.CheckpointManager(tmp_path, mesh).restore
    restored, _, _ = train(config, mesh, 0, zero=3, state=restore)
    assert held(restored) == (2, 4, EMBED, 16)
    assert_same_bits(jaxpar.fetch(restored), saved[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "zero"), [({"data": 2}, 3), ({"data": 2, "stage": 2}, 3), ({}, 0)]
)
def test_the_last_of_three_steps_may_run_on_fewer(x64_in_threads, tmp_path, axes, zero):
    config, mesh = config_of("deepseek", **TWO_LAYERS), mesh_of(data=4)
    _, _, losses = train(
        config, mesh, 3, num_microbatches=2, zero=2, before_last=save_in(tmp_path, mesh)
    )
    restored = lambda target: jaxpar.CheckpointManager(tmp_path, mesh_of(**axes)).restore(target)
    _, _, last = train(config, mesh_of(**axes), 1, zero=zero, state=restored)
    assert_same(last, losses[2:], within=1e-10)


@functools.cache
def adapted_job():
    """The factors of LoRA, params with them, a batch, and the loss and gradients of one device."""
    config, lora = config_of("deepseek"), Lora(2, transformer.LAYER_WEIGHTS)
    params, batch = job(config)
    adapted, model, loss = (
        with_random_factors(lora, params),
        transformer.make_model(config),
        loss_of(config),
    )
    mean = lambda params: jnp.divide(*loss(model.apply(params, batch), batch))
    return config, lora, adapted, batch, jaxpar.fetch(jit(jax.value_and_grad(mean))(adapted))


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        pytest.param({"data": 2, "tensor": 2}, RULES, marks=SLOW),
        pytest.param({"stage": 2, "tensor": 2}, OVER_TENSOR, marks=SLOW),
    ],
)
def test_lora_adapts_attention_and_shared_experts_beside_frozen_experts(x64, axes, rules):
    mesh, (config, lora, adapted, batch, want) = mesh_of(**axes), adapted_job()
    assert adapted["outer"]["dense_layers"][0]["mlp"]["w_up"].lora_a.shape == (EMBED, 2), (
        "of a leading layer too"
    )
    shardings = lora.shardings(shardings_from_dims(transformer.param_table(config), mesh, rules))
    model, loss = transformer.make_model(config), loss_of(config)
    run = jaxpar.value_and_grad(
        model, loss, mesh, num_microbatches=2, trainable=ADAPTERS, shardings=shardings
    )
    value, grads = jit(run)(jaxpar.shard(adapted, shardings), jaxpar.shard_batch(batch, mesh))
    trained = jax.tree.map(
        lambda g, w: None if g is None else w, grads, want[1], is_leaf=lambda g: g is None
    )
    assert_same((value, grads), (want[0], trained))


# Room for rows.


def too_little_room(exchange):
    experts = {"buffer": 1.0, "exchange": exchange, "balance_coefficient": 0.1}
    return config_of("mixtral", experts, compute_dtype="float32", num_layers=2)


@pytest.mark.full
def test_a_step_with_too_many_rows_for_a_buffer_changes_nothing_and_is_counted():
    config = too_little_room("all_to_all")
    state, metrics, _ = train(config, mesh_of(data=4), 2)
    assert np.isnan(metrics["loss"])
    assert (metrics["skipped"], int(state.num_skipped), int(state.step)) == (1, 2, 2)
    assert_same_bits(jaxpar.fetch(state.params), job(config)[0])


@pytest.mark.full
def test_gathered_rows_that_are_too_many_for_a_buffer_make_the_loss_nan():
    config, mesh = too_little_room("gather"), mesh_of(data=4)
    *args, shardings = placed(config, mesh, RULES, *job(config))
    evaluate = jaxpar.make_eval_step(
        transformer.make_model(config), loss_of(config), jaxpar.Parallel(mesh, shardings)
    )
    assert np.isnan(evaluate(*args)[0])


def test_with_a_buffer_less_is_sent(x64):
    sent = {}
    for buffer in (None, 2.0):
        moved = collectives_of_layer(
            config_of("mixtral", num_layers=1, experts={"buffer": buffer}), 4
        )
        assert {name for name, _ in moved} == {"all_to_all"}
        sent[buffer] = sum(size for _, size in moved)
    assert sent[2.0] * 2 == sent[None], "room for half of each replica's pairs, not for all of them"


# The program.


def report_of(config, mesh):
    *args, shardings = placed(config, mesh, RULES, *job(config))
    run = jaxpar.value_and_grad(
        transformer.make_model(config),
        loss_of(config),
        mesh,
        num_microbatches=2,
        shardings=shardings,
    )
    return jaxpar.inspect_step(jit(run), *args)


@pytest.mark.full
def test_a_layer_has_six_all_to_alls_and_no_byte_of_an_expert_is_reduced_over_data(x64):
    config, mesh = config_of("mixtral", A2A), mesh_of(replica=2, data=2, tensor=2)
    report = report_of(config, mesh)
    per_layer = [each for each in report.collectives if (each.times or 0) >= 2 * config.num_layers]
    over = lambda axis, kind: sorted(
        e.payload_bytes for e in per_layer if e.axes == (axis,) and e.kind == kind
    )
    num_pairs, width = ROWS // 8 * SEQ * 2, 8 * EMBED
    marks, rows = (
        2 * num_pairs * 2 * 8,
        2 * num_pairs * width,
    )  # a replica has room for all pairs of both
    assert over("data", "all-to-all") == sorted([marks, *(2 * [rows // 2])] * 2), (
        "each shard sends half of the width"
    )
    assert {each.kind for each in per_layer if each.axes == ("data",)} == {"all-to-all"}, (
        report.render()
    )
    activation = num_pairs // 2 * width
    reduced = over("tensor", "all-reduce")
    assert reduced.count(activation) == 2, "those of attention"
    assert len(reduced) == 4, "and of the rows that a replica computes, in F and in B"
    params = jax.tree.leaves(job(config)[0])
    of_experts = sum(leaf.nbytes for leaf in jax.tree.leaves(job(config)[0]["layers"]["experts"]))
    dense = sum(leaf.nbytes for leaf in params) - of_experts
    summed = [
        e
        for e in report.collectives
        if "data" in e.axes and e.kind in ("all-reduce", "reduce-scatter")
    ]
    assert sum(each.payload_bytes for each in summed) <= dense + 64, report.render()


def test_tokens_with_many_experts_are_gathered(x64):
    moved = collectives_of_layer(config_of("qwen3", num_layers=1), 4)
    assert {name for name, _ in moved} == {"all_gather", "reduce_scatter"}


def collectives_of_layer(config, data):
    """The collectives over ``data`` of a layer's forward pass, and the bytes of their results."""
    found = []
    run_on_owner(config, data, lambda layer, *args: found.append(str(jax.make_jaxpr(layer)(*args))))
    named = re.findall(r":f(\d+)\[([\d,]*)\] = (all_\w+|reduce_scatter|psum\w*)\[", found[-1])
    return [
        (name, int(bits) // 8 * math.prod(map(int, dims.split(",")))) for bits, dims, name in named
    ]


def run_on_owner(config, data, function):
    """Calls ``function(layer, params, x)`` with a layer as one of some owners of its experts runs it."""
    mesh, (params, batch) = mesh_of(data=data), job(config)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    model = transformer.make_model(config)
    specs = jax.tree.map(lambda leaf: P(), layer) | {
        "experts": jax.tree.map(lambda leaf: P("data"), layer["experts"])
    }

    def one_shard(params, x):
        function(model.layer, params, x)
        return x

    x = jax.eval_shape(model.embed, params["outer"], batch)
    on_shards = manual_over_data_and_stage(
        one_shard, mesh, in_specs=(specs, P("data")), out_specs=P("data")
    )
    jax.eval_shape(on_shards, layer, x)


def split_of(config, data):
    """That layer split in B and W."""
    found = []
    run_on_owner(config, data, lambda *layer: found.append(split_layer(*layer)))
    return found[-1]


def test_rows_are_stored_where_they_came_from_afar_and_looked_up_again_elsewhere(x64):
    config = config_of("mixtral", experts={"mlp_dim": 24})
    alone, over_data = split_of(config, 1), split_of(config, 4)
    rows = (ROWS * SEQ * 2, EMBED)
    num_rows = lambda split, name: [each.shape[-2:] for each in split.shapes(name)].count(rows)
    for name in ("residuals_b", "residuals_w", "cotangents_w"):
        assert not num_rows(alone, name), "each token is stored once, not once an expert"
    for name in ("residuals_w", "cotangents_w"):
        assert num_rows(over_data, name) == 1, "an all-to-all is not repeated"


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"buffer": 0.5},
            "buffer must be at least 1; got 0.5. Choose such as 1.5, or leave it out",
        ),
        (
            {"buffer": 2.0, "capacity_factor": 1.0},
            "so buffer has no effect; got capacity_factor=1.0",
        ),
        (
            {"exchange": "ring"},
            "exchange must be one of 'auto', 'all_to_all', 'gather'; got 'ring'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=re.escape(message)):
        config_of("mixtral", changes)


def test_experts_that_the_axis_does_not_divide_are_refused():
    table = transformer.param_table(config_of("mixtral", experts={"count": 6}))
    with pytest.raises(
        ValueError, match="layers/experts/w_expert_down must be divisible by the data axis; got 6"
    ):
        shardings_from_dims(table, mesh_of(data=4), RULES)


def test_weights_of_another_number_of_experts_are_refused():
    config = config_of("mixtral", compute_dtype="float32")
    params, batch = job(config.with_experts(count=4))
    with pytest.raises(
        ValueError,
        match=r"router must choose among all experts; got .*, of 4, and count=8\. Make the params from",
    ):
        jax.eval_shape(transformer.make_model(config).apply, params, batch)


def test_the_other_executor_refuses_them():
    config, mesh = config_of("mixtral", compute_dtype="float32"), mesh_of(data=2, stage=2)
    shardings = shardings_from_dims(transformer.param_table(config), mesh, RULES)
    with pytest.raises(
        ValueError, match=r'replicates params over data; got layers/experts/.* Use executor="spmd"'
    ):
        jaxpar.value_and_grad(
            transformer.make_model(config),
            loss_of(config),
            mesh,
            shardings=shardings,
            executor="mpmd",
        )
