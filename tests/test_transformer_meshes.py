"""Transformers on meshes: the numbers of one device, fused kernels, and what tensor and sequence parallelism cost."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import split_layer
from jaxpar.inspect import assert_collectives, inspect_step
from jaxpar.models import transformer
from jaxpar.models.transformer.attention import attend
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.tensor_parallel import sequence_parallel, split_copied_heads
from tests.support import tiny
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import (
    EMBED,
    FAMILIES,
    ROWS,
    SEQ,
    fused,
    jit,
    loss,
    make_batch,
    make_params,
    on_mesh_of,
    reference,
    shardings,
)


def check_parity(
    family,
    mesh_sizes,
    *,
    constrain=None,
    num_microbatches=2,
    schedule="zb-h1",
    masks=None,
    **changes,
):
    seed = tiny.fresh_seed()
    data, stage, tensor = mesh_sizes
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    config = on_mesh_of(
        dataclasses.replace(FAMILIES[family], compute_dtype="float64", **changes), mesh
    )
    params, batch = make_params(config, seed=seed), make_batch(seed=seed, dtype=np.float64)
    model = (
        transformer.make_model(config)
        if constrain is None
        else transformer.make_model(config, constrain=constrain)
    )
    value_and_grad = jaxpar.value_and_grad(
        model,
        loss,
        mesh,
        num_microbatches=num_microbatches,
        schedule=schedule,
        shardings=shardings(config, mesh) if masks else None,
        mask_idle_ops=masks,
    )
    got = jit(value_and_grad)(
        jaxpar.shard(params, shardings(config, mesh)), jaxpar.shard_batch(batch, mesh)
    )
    assert_same(got, reference(config, params, batch), message=f"seed {seed}")


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh_sizes", "schedule", "constrain"),
    [
        ("bloom", (2, 1, 4), "1f1b", sequence_parallel),
        ("llama", (2, 2, 2), "zb-h1", None),
        pytest.param("gpt2", (1, 2, 4), "1f1b", sequence_parallel, marks=pytest.mark.slow),
        pytest.param("gpt2", (8, 1, 1), "1f1b", None, marks=pytest.mark.slow),
        pytest.param("llama-tied", (1, 1, 4), "1f1b", None, marks=pytest.mark.slow),
        pytest.param("gpt2", (1, 2, 4), "zb-h1", sequence_parallel, marks=pytest.mark.slow),
        pytest.param("bloom", (2, 4, 1), "zb-h1", None, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_equal_one_device_in_float64(
    x64, family, mesh_sizes, schedule, constrain
):
    check_parity(family, mesh_sizes, schedule=schedule, constrain=constrain)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.slow
def test_transposed_residuals_that_are_fixed_in_memory_change_no_number(x64, schedule):
    check_parity("llama", (1, 2, 4), schedule=schedule, masks=True)


@pytest.mark.full
def test_bfloat16_on_a_mesh_has_the_loss_of_float32_on_one_device():
    config = dataclasses.replace(FAMILIES["llama"], compute_dtype="bfloat16")
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    params, batch = make_params(config, dtype=np.float32), make_batch()
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config),
        loss,
        mesh,
        num_microbatches=2,
        shardings=shardings(config, mesh),
    )
    got, grads = jit(value_and_grad)(
        jaxpar.shard(params, shardings(config, mesh)), jaxpar.shard_batch(batch, mesh)
    )
    want, want_grads = reference(FAMILIES["llama"], params, batch)
    assert_same(got, want, within=2e-2)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    assert_same(grads, want_grads, within=0.3)


FACTORISATIONS = [
    (d, s, 8 // (d * s)) for d in (1, 2, 4, 8) for s in (1, 2, 4, 8) if 8 % (d * s) == 0
]


@pytest.mark.slow
@pytest.mark.parametrize("constrain", [None, sequence_parallel], ids=["", "sequence"])
@pytest.mark.parametrize("mesh_sizes", FACTORISATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_one_device_on_every_mesh(x64, family, mesh_sizes, constrain):
    _, stage, tensor = mesh_sizes
    changes = {"num_layers": 8} if stage == 8 else {}
    if tensor == 8 and FAMILIES[family].num_kv_heads:
        changes["num_kv_heads"] = 8
    check_parity(family, mesh_sizes, constrain=constrain, **changes)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh_sizes"),
    [
        ("llama", (2, 2, 2)),
        pytest.param("bloom", (2, 1, 4), marks=pytest.mark.slow),
        pytest.param("gpt2", (8, 1, 1), marks=pytest.mark.slow),
        ("llama", (1, 1, 1)),
    ],
)
def test_a_fused_kernel_runs_on_the_heads_of_each_device(family, mesh_sizes):
    config = dataclasses.replace(
        FAMILIES[family], attention=partial(jaxpar.flash_attention, kernel=fused)
    )
    data, stage, tensor = mesh_sizes
    mesh = jaxpar.make_mesh(
        data=data, stage=stage, tensor=tensor, devices=jax.devices()[: data * stage * tensor]
    )
    params, batch = make_params(config, dtype=np.float32), make_batch()
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config), loss, mesh, num_microbatches=2
    )
    got = jit(value_and_grad)(
        jaxpar.shard(params, shardings(config, mesh)), jaxpar.shard_batch(batch, mesh)
    )
    assert_same(got, reference(FAMILIES[family], params, batch), within=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kv_heads", "mesh_sizes"),
    [
        ("llama", 4, (1, 1, 4)),
        pytest.param(
            "llama", 1, (2, 2, 2), marks=pytest.mark.slow
        ),  # copies of one key and value head
        pytest.param("bloom", None, (2, 1, 4), marks=pytest.mark.slow),
    ],
)
def test_a_kernel_with_a_window_and_documents_has_the_gradients_of_attention_written_out(
    family, kv_heads, mesh_sizes
):
    data, stage, tensor = mesh_sizes
    heads = set()

    def kernel(q, k, v, bias, **options):
        heads.add((q.shape[2], k.shape[2]))
        return jax.nn.dot_product_attention(
            q, k, v, bias, is_causal=True, implementation="xla", **options
        )

    config = dataclasses.replace(FAMILIES[family], window=3, num_kv_heads=kv_heads, num_layers=2)
    own = dataclasses.replace(
        config.for_tensor(tensor), attention=partial(jaxpar.flash_attention, kernel=kernel)
    )
    mesh = jaxpar.make_mesh(
        data=data, stage=stage, tensor=tensor, devices=jax.devices()[: data * stage * tensor]
    )
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (ROWS, SEQ)), axis=1).astype(
        np.int32
    )
    params, batch = make_params(config), make_batch() | {"segments": segments}
    model = transformer.make_model(own, constrain=split_copied_heads)
    run = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)
    got = jit(run)(jaxpar.shard(params, shardings(own, mesh)), jaxpar.shard_batch(batch, mesh))
    assert_same(got, reference(config, params, batch), within=1e-5)
    assert (8 // tensor, max((kv_heads or 8) // tensor, 1)) in heads, (
        "each device runs it on its own heads"
    )


def test_a_kernel_that_xla_would_have_to_split_is_refused():
    config = dataclasses.replace(FAMILIES["gpt2"], compute_dtype="bfloat16", attention="cudnn")
    mesh = jaxpar.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    q = jnp.zeros((2, 4, 8, 2), jnp.bfloat16)
    cut = PartitionSpec("data")
    run = lambda q: attend(config, q, q, q, jnp.arange(4)[None])
    on_mesh = jax.jit(manual_over_data_and_stage(run, mesh, in_specs=(cut,), out_specs=cut))
    with pytest.raises(
        ValueError, match=r"runs on one device, .* Use attention=jaxpar.flash_attention"
    ):
        jax.eval_shape(on_mesh, q)


ACTIVATION_BYTES = ROWS * SEQ * EMBED * 4
ONE_ALL_REDUCE = 2 * 3 * ACTIVATION_BYTES // 4
ONE_A_TOKEN = 2 * 3 * ROWS * SEQ * 4 // 4


@pytest.mark.parametrize(
    ("family", "num_microbatches"),
    [
        ("gpt2", 1),
        pytest.param("llama", 4, marks=pytest.mark.full),
        pytest.param("bloom", 2, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallelism_costs_four_all_reduces_a_layer_and_three_numbers_a_token(
    family, num_microbatches
):
    """Beside the layers' there are one of an activation for the lookup, one for the head's input gradient; no table, no
    logits and no weight is gathered."""
    mesh = jaxpar.make_mesh(tensor=4)
    config = on_mesh_of(FAMILIES[family], mesh)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config), loss, mesh, num_microbatches=num_microbatches
    )
    params = jaxpar.shard(make_params(config), shardings(config, mesh))
    report = inspect_step(jit(value_and_grad), params, jaxpar.shard_batch(make_batch(), mesh))
    of_activations = 4 * config.num_layers + 2
    assert_collectives(
        report,
        {("all-reduce", "tensor"): of_activations * num_microbatches},
        min_bytes=ACTIVATION_BYTES // 4,
    )
    moved = of_activations * ONE_ALL_REDUCE + 3 * ONE_A_TOKEN
    assert report.bytes_moved("all-reduce", "tensor") == moved, report.render()
    assert report.count("all-reduce") == report.count(), report.render()


@pytest.mark.full
def test_sequence_parallelism_gathers_six_activations_a_layer_and_sends_a_part_of_them_between_stages():
    config = FAMILIES["llama"]
    mesh = jaxpar.make_mesh(stage=2, tensor=4)
    model = transformer.make_model(config, constrain=sequence_parallel)
    value_and_grad = jaxpar.value_and_grad(
        model, loss, mesh, num_microbatches=2, mask_idle_ops=False
    )
    params = jaxpar.shard(make_params(config), shardings(config, mesh))
    report = inspect_step(jit(value_and_grad), params, jaxpar.shard_batch(make_batch(), mesh))
    microbatch_bytes = ACTIVATION_BYTES // 2
    permutes = report.select("collective-permute", "stage")
    assert {each.payload_bytes for each in permutes} == {microbatch_bytes // 4}, report.render()
    gathers = [
        each
        for each in report.select("all-gather", "tensor")
        if each.payload_bytes == microbatch_bytes
    ]
    in_layers = [each for each in gathers if each.times == max(g.times for g in gathers)]
    assert len(in_layers) == 6, (
        "two forward; backward two gradients, and the two that were not stored: " + report.render()
    )


def test_sequence_parallelism_stores_no_activation_whole():
    config, mesh = FAMILIES["llama"], jaxpar.make_mesh(tensor=4)
    one_layer = jax.tree.map(lambda a: a[0], make_params(config)["layers"])
    specs = jax.tree.leaves(jax.tree.map(lambda s: s.spec, shardings(config, mesh)["layers"]))
    shards = ParamShards.of_layers(specs, 4)
    layer = transformer.make_model(config, constrain=sequence_parallel).layers(1)[0]
    x = jax.ShapeDtypeStruct((4, 8, config.embed_dim), jnp.float32)

    with jax.set_mesh(mesh):
        split = split_layer(layer, one_layer, x, shards)
    cuts = shards.partition(split.graph, split.values["params"]).cuts
    stored = [*split.values["residuals_b"], *split.values["residuals_w"]]
    assert len(stored) > 8
    assert [cuts.get(i) for i in stored if cuts.get(i) is None] == []


def test_sequence_parallelism_needs_a_sequence_that_the_tensor_axis_divides():
    config = FAMILIES["gpt2"]
    mesh = jaxpar.make_mesh(tensor=4)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config, constrain=sequence_parallel), loss, mesh
    )
    batch = jax.tree.map(lambda column: column[:, :6], make_batch())
    params = jaxpar.shard(make_params(config), shardings(config, mesh))
    with pytest.raises(
        ValueError,
        match=r"tensor axis, which must divide it; got a sequence of 6, tensor=4. Choose",
    ):
        value_and_grad(params, jaxpar.shard_batch(batch, mesh))


def test_more_shards_than_key_and_value_heads_are_refused():
    with pytest.raises(
        ValueError,
        match="layers/attention/w_qkv must be divisible by the tensor axis; got 4 of shape",
    ):
        shardings(FAMILIES["llama"], jaxpar.make_mesh(tensor=8))
