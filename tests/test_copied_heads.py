"""Fewer key and value heads than the tensor axis: heads that are copied in a step."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.inspect import inspect_step
from jaxpar.models import transformer
from jaxpar.tensor_parallel import sequence_parallel, split_copied_heads
from tests.support import tiny
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import (
    EMBED,
    FAMILIES,
    SWITCHES,
    jit,
    loss,
    make_batch,
    make_params,
    reference,
    shardings,
)

FEW = {"num_kv_heads": 2, "explicit_head_dim": 8}


@pytest.mark.full
@pytest.mark.parametrize(
    ("switches", "mesh_sizes", "constrain"),
    [
        ("qwen2", (1, 2, 4), split_copied_heads),
        pytest.param("olmo2", (1, 1, 8), sequence_parallel, marks=pytest.mark.slow),
        pytest.param("llama", (2, 1, 4), None, marks=pytest.mark.slow),
        pytest.param("qwen3", (2, 1, 4), split_copied_heads, marks=pytest.mark.slow),
        pytest.param("qwen3", (1, 2, 4), sequence_parallel, marks=pytest.mark.slow),
    ],
)
def test_copied_heads_have_the_loss_and_gradients_of_one_device_in_float64(
    x64, switches, mesh_sizes, constrain
):
    seed, (data, stage, tensor) = tiny.fresh_seed(), mesh_sizes
    config = dataclasses.replace(
        FAMILIES["llama"], compute_dtype="float64", **FEW, **SWITCHES[switches]
    )
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    copied = config.for_tensor(tensor)
    assert copied.kv_copies == tensor // 2
    params, batch = make_params(config, seed=seed), make_batch(seed=seed, dtype=np.float64)
    model = (
        transformer.make_model(copied)
        if constrain is None
        else transformer.make_model(copied, constrain=constrain)
    )
    value_and_grad = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2, schedule="zb-h1")
    got = jit(value_and_grad)(
        jaxpar.shard(params, shardings(copied, mesh)), jaxpar.shard_batch(batch, mesh)
    )
    assert_same(got, reference(config, params, batch), message=f"seed {seed}")


@pytest.mark.full
def test_copied_heads_hold_no_copy_at_rest_and_gather_no_activation():
    config = dataclasses.replace(FAMILIES["llama"], **FEW).for_tensor(4)
    mesh = jaxpar.make_mesh(tensor=4, devices=jax.devices()[:4])
    where = shardings(config, mesh)
    params, batch = jaxpar.shard(make_params(config), where), jaxpar.shard_batch(make_batch(), mesh)
    weight = params["layers"]["attention"]["w_qkv"]
    assert weight.addressable_shards[0].data.size == weight.size // 4
    model = transformer.make_model(config, constrain=split_copied_heads)
    report = inspect_step(
        jit(jaxpar.value_and_grad(model, loss, mesh, shardings=where)), params, batch
    )
    copied_bytes = (
        EMBED * 4 * (2 + 2) * 8 * 4 // 4
    )  # [embed, copied heads, 2 queries and key and value, head_dim] of a device
    rest = [each for each in report.collectives if each.kind != "all-reduce"]
    assert {(each.kind, each.axes, each.payload_bytes, each.times) for each in rest} == {
        ("all-to-all", ("tensor",), copied_bytes, config.num_layers)
    }, report.render()
    assert len(rest) == 3, report.render()  # forward, backward, and the gradient


@pytest.mark.full
def test_a_mesh_without_a_key_and_value_head_for_each_device_generates_what_one_device_does():
    config = dataclasses.replace(FAMILIES["llama"], **FEW)
    params, mesh = make_params(config), jaxpar.make_mesh(stage=2, tensor=4)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    want = transformer.generate(config, params, prompts, 6)
    copied = config.for_tensor(4)
    got = transformer.generate(copied, jaxpar.shard(params, shardings(copied, mesh)), prompts, 6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_tensor_axis_that_the_heads_do_not_fit_is_refused():
    config = dataclasses.replace(
        FAMILIES["llama"], num_heads=6, num_kv_heads=3, explicit_head_dim=4, vocab_size=24
    )
    for tensor in (4, 12):
        with pytest.raises(
            ValueError,
            match=rf"got tensor={tensor}, num_heads=6, num_kv_heads=3, .*\. Choose tensor from 1, 2, 3\.",
        ):
            config.for_tensor(tensor)
    assert [config.for_tensor(tensor).kv_copies for tensor in (1, 2, 3, 6)] == [1, 2, 1, 2]
    config.check_tensor(3)
    with pytest.raises(
        ValueError, match=r"head_dim=4, mlp_dim=24, vocab_rows=24\. Choose tensor from 1, 2, 3\."
    ):
        config.check_tensor(6)  # the weights of 3 key and value heads are sharded over head_dim
