"""LoRA: the gradients of merged weights, on every mesh, and a step that does nothing for the frozen ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxpar
from jaxpar.huggingface import write_adapters
from jaxpar.huggingface.peft import merge_factors
from jaxpar.models import lora, transformer
from jaxpar.models.lora import ADAPTERS, Lora
from jaxpar.params import init_params, stack_layers
from jaxpar.pipeline import spmd_program
from jaxpar.schedule import lockstep_form, make_schedule
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from jaxpar.trainable import trained_part, where_grads
from tests.support import tiny_transformer as tiny
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiny_lora import LORA, make_params

LLAMA = dataclasses.replace(tiny.FAMILIES["llama"], compute_dtype="float64")
COPIED = dataclasses.replace(LLAMA, num_kv_heads=2, explicit_head_dim=4)  # fewer heads than tensor


@functools.cache
def reference_of(config):
    def mean(params, batch):
        total, weight = tiny.loss(
            transformer.make_model(config).apply(lora.merge(params), batch), batch
        )
        return total / weight

    return tiny.jit(jax.value_and_grad(mean))


def reference(config, params, batch):
    """The loss of one device, and the gradients of the factors through the merged weights."""
    loss, grads = reference_of(config)(params, batch)
    return loss, where_grads(trained_part(params, ADAPTERS), grads)


def make_value_and_grad(config, mesh, how=LORA, **settings):
    shardings = how.shardings(tiny.shardings(config, mesh))
    model = transformer.make_model(config, constrain=jaxpar.tensor_parallel.split_copied_heads)
    settings = {"num_microbatches": 2, "trainable": ADAPTERS, "shardings": shardings} | settings
    return shardings, jaxpar.value_and_grad(model, tiny.loss, mesh, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "axes", "settings"),
    [
        pytest.param(LLAMA, {"data": 4, "tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param(COPIED, {"data": 2, "tensor": 4}, {"remat": True}, marks=pytest.mark.slow),
        (LLAMA, {"data": 2, "stage": 2, "tensor": 2}, {"schedule": "zb-h1", "zero": 1}),
        pytest.param(
            LLAMA,
            {"data": 2, "stage": 4},
            {"schedule": "1f1b", "num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_are_those_through_merged_weights_in_float64(x64, config, axes, settings):
    mesh = jaxpar.make_mesh(**axes)
    params, batch = make_params(config), tiny.make_batch(dtype=np.float64)
    shardings, value_and_grad = make_value_and_grad(
        config.for_tensor(mesh.shape["tensor"]), mesh, **settings
    )
    got = value_and_grad(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    assert_same(jaxpar.fetch(got), jaxpar.fetch(reference(config, params, batch)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        pytest.param({"data": 4, "tensor": 2}, None, marks=pytest.mark.slow),
        ({"data": 2, "stage": 2, "tensor": 2}, "zb-h1"),
        pytest.param({"data": 2, "stage": 4}, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_step_computes_and_reduces_the_gradients_of_the_factors_alone(axes, schedule):
    mesh, config, num_microbatches = jaxpar.make_mesh(**axes), tiny.FAMILIES["llama"], 2
    batch, reports, shares, settings = jaxpar.shard_batch(tiny.make_batch(), mesh), {}, None, {}
    if schedule is not None:
        table = make_schedule(
            schedule, mesh.shape["stage"], num_microbatches, form=lockstep_form(schedule)
        )
        settings, shares = {"schedule": table}, spmd_program(table, masks=False).branch_shares()
    for trainable in (ADAPTERS, None):
        shardings, value_and_grad = make_value_and_grad(
            config, mesh, trainable=trainable, **settings
        )
        params = jaxpar.shard(make_params(config), shardings)
        reports[trainable] = jaxpar.inspect_step(
            jax.jit(value_and_grad), params, batch, branch_shares=shares
        )
    on_device = lambda tree: sum(
        leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree)
    )
    replicas, loss_and_weight = mesh.shape["data"], 2
    numbers = on_device(trained_part(params, ADAPTERS)) + loss_and_weight
    assert (
        reports[ADAPTERS].bytes_moved("all-reduce", "data")
        == 2 * (replicas - 1) / replicas * 4 * numbers
    )
    assert reports[ADAPTERS].bytes_moved("all-gather", "tensor") == 0, "no weight is gathered"
    weights = trained_part(
        lora.without_factors(params), [f"layers/**/{name}" for name in transformer.LAYER_WEIGHTS]
    )
    head = (
        params["outer"]["head"].addressable_shards[0].data.size * mesh.shape["stage"]
    )  # gathered over stages
    saved = reports[None].flops - reports[ADAPTERS].flops
    tokens = tiny.ROWS * tiny.SEQ // replicas
    assert saved == 2 * tokens * (on_device(weights) + head), (
        "the products of the frozen weights' gradients, and no other"
    )


def train(mesh, state, train_step, steps):
    for step in steps:
        state, _ = train_step(state, jaxpar.shard_batch(tiny.make_batch(seed=step), mesh))
    return state


@pytest.mark.full
def test_training_updates_factors_alone_and_a_restored_run_goes_on_bit_for_bit(tmp_path):
    mesh, config, optimizer = jaxpar.make_mesh(stage=2), tiny.FAMILIES["llama"], optax.adamw(0.01)
    layout = jaxpar.LayerLayout(4, 2, layers_per_virtual_stage=(3, 1))
    table = transformer.param_table(config)
    packed = table | {
        "layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))
    }
    shardings = LORA.shardings(jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES))
    init = lambda key: layout.pack_params(LORA.init(key, init_params(table, key)))
    first = (init, jax.random.key(0), optimizer, mesh, shardings)
    _, value_and_grad = make_value_and_grad(
        config, mesh, shardings=shardings, layout=layout, schedule="zb-h1"
    )
    state = jaxpar.init_state(*first, trainable=ADAPTERS)
    begun = jaxpar.fetch(state.params)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    factors = trained_part(state.params, ADAPTERS)
    assert sorted(sizes) == sorted(2 * [leaf.size for leaf in jax.tree.leaves(factors)]), (
        "two moments a factor"
    )

    train_step = jaxpar.make_train_step(value_and_grad, optimizer)
    state = train(mesh, state, train_step, range(2))
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    manager.save(state)
    manager.wait()
    restored = manager.restore(jaxpar.abstract_state(*first, trainable=ADAPTERS))
    state, restored = (train(mesh, each, train_step, (2,)) for each in (state, restored))
    assert_same_bits(jaxpar.fetch(restored), jaxpar.fetch(state))
    got = jaxpar.fetch(state.params)
    assert_same_bits(lora.without_factors(got), lora.without_factors(begun))
    for one, other in zip(
        *(jax.tree.leaves(trained_part(each, ADAPTERS)) for each in (got, begun)), strict=True
    ):
        assert np.any(one != other), "each factor is trained"
    apply = tiny.jit(
        lambda each: transformer.make_model(config).apply(
            layout.unpack_params(each), tiny.make_batch()
        )
    )
    ours, merged = apply(got), apply(lora.merge(got))
    assert_same(np.asarray(merged), np.asarray(ours), within=1e-5)


def test_factors_are_zero_at_first_and_a_plain_model_takes_them():
    params = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
    model = lambda params, batch: batch["x"] @ params["w"] + params["b"][None]
    adapted, x = (
        Lora(2, {"w": 1}).init(jax.random.key(0), params),
        {"x": np.ones((5, 4), np.float32)},
    )
    assert_same_bits(np.asarray(model(adapted, x)), model(params, x))
    assert (adapted["w"].scale, adapted["w"].lora_a.shape) == (1.0, (4, 2))
    assert float(np.abs(adapted["w"].lora_a).max()) > 0
    loss = lambda outputs, batch: ((outputs**2).sum(), jnp.float32(len(outputs)))
    value_and_grad = jaxpar.value_and_grad(model, loss, jaxpar.make_mesh(), trainable=ADAPTERS)
    _, grads = value_and_grad(adapted, x)
    assert (grads["b"], grads["w"].weight) == (None, None)
    assert np.any(grads["w"].lora_b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lora(0, {"w": 1}), r"rank must be a positive integer; got 0\. Choose 8"),
        (
            lambda: Lora(2, {"w": 1}, alpha=-1.0),
            r"alpha must be positive; got -1\.0\. Choose the rank, 2",
        ),
        (lambda: Lora(2, {}), r"targets must name weights; got none"),
        (
            lambda: Lora(2, {"v": 1}).init(jax.random.key(0), {"w": jnp.ones((2, 2))}),
            r"name a weight; got 'v', where .* \['w'\]",
        ),
        (
            lambda: Lora(2, {"w": 2}).init(jax.random.key(0), {"w": jnp.ones((2, 2))}),
            r"and others; got w of shape \(2, 2\) and 2",
        ),
        (
            lambda: Lora(3, {"w": 1}).init(jax.random.key(0), {"w": jnp.ones((8, 2))}),
            r"^rank must .* A B has no higher rank; got 3, w of 8 inputs and 2 outputs. Choose 2 or less",
        ),
        (
            lambda: lora.einsum(
                "ab,cb->ac",
                jnp.ones((2, 2)),
                Lora(1, {"w": 1}).init(jax.random.key(0), {"w": jnp.ones((3, 2))})["w"],
            ),
            r"summed over must come first",
        ),
        (
            lambda: lora.einsum("ab,bc", jnp.ones((2, 2)), adapted(2, 3)),
            r"spec must name the dims .* got 'ab,bc'\. Write",
        ),
    ],
)
def test_factors_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def adapted(num_in, num_out):
    return Lora(1, {"w": 1}).init(jax.random.key(0), {"w": jnp.ones((num_in, num_out))})["w"]


def in_nnx(w):
    graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    nnx.replace_by_pure_dict(state, {"kernel": w, "bias": jnp.ones(3)})
    return nnx.merge(graph, state)(jnp.ones((4, 2)))


@pytest.mark.parametrize(
    "read",
    [
        lambda w: jnp.einsum("ab,bc->ac", jnp.ones((4, 2)), w),
        lambda w: jnp.dot(jnp.ones((4, 2)), w),
        lambda w: jax.jit(jnp.matmul)(jnp.ones((4, 2)), w),
        lambda w: jax.lax.dot(jnp.ones((4, 2)), w),
        lambda w: jnp.sum(w),
        lambda w: np.asarray(w),
        lambda w: w.T,
        lambda w: w.shape,
        lambda w: w[0],
        lambda w: w @ jnp.ones((3, 4)),
        lambda w: 2 * w,
        lambda w: linen.Dense(3).apply(
            {"params": {"kernel": w, "bias": jnp.ones(3)}}, jnp.ones((4, 2))
        ),
        in_nnx,
    ],
)
def test_what_cannot_read_factors_says_what_can(read):
    w = adapted(2, 3)
    message = r"a weight \(2, 3\) with factors of LoRA \(write x @ weight .* lora\.merge\(params\)"
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        read(w)


def test_a_layer_that_merges_its_params_has_the_gradients_of_the_factors():
    w, x = dataclasses.replace(adapted(2, 3), lora_b=jnp.ones((1, 3))), jnp.ones((4, 2))
    read = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))
    merged = jax.grad(lambda w: jnp.sum(jnp.sin(jnp.einsum("ab,bc->ac", x, lora.merge(w)))))
    assert_same(merged(w), read(w), within=1e-5)


def test_stored_factors_are_merged_a_layer_at_a_time_or_all_at_once():
    rng = np.random.default_rng(0)
    w, a, b = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((3, 4, 2, 5), (3, 4, 2), (3, 2, 2, 5))
    )
    stored = {"layers/w": w, "layers/w/lora_a": a, "layers/w/lora_b": b, "outer/v": w}
    stored = {**stored, "layers/w/weight": stored.pop("layers/w")}
    merged = merge_factors(stored, {"lora_alpha": 6.0, "lora_rank": 2})
    assert set(merged) == {"layers/w", "outer/v"}
    whole = w + 3 * np.einsum("ldr,lrhk->ldhk", a, b)
    np.testing.assert_allclose(np.asarray(merged["layers/w"]), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged["layers/w"][1], whole[1], rtol=1e-5, atol=1e-6)


def test_factors_that_are_not_finite_are_not_written(tmp_path):
    params = make_params(
        tiny.FAMILIES["llama"], Lora(2, {"w_down": transformer.LAYER_WEIGHTS["w_down"]}, alpha=3.0)
    )
    params["layers"]["mlp"]["w_down"].lora_b[1, 0, 0] = np.nan
    with pytest.raises(
        ValueError,
        match=r"finite; got NaN in 1 of .* in base_model.model.model.layers.1.mlp.down_proj.lora_B",
    ):
        write_adapters(tmp_path / "adapter", tiny.FAMILIES["llama"], params)
    assert not (tmp_path / "adapter").exists()
