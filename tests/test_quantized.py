"""Weights in four or eight bits: their codes, and the gradients of LoRA beside them."""

from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar._compat import equations
from jaxpar.backward.split import split_layer
from jaxpar.models import lora
from jaxpar.models.lora import ADAPTERS, Lora
from jaxpar.models.quantized import KINDS, NF4, dense, quantize_weight
from jaxpar.tensor_parallel import column_parallel, row_parallel
from jaxpar.trainable import accept_frozen, freeze
from tests.support import tiny_transformer as tiny
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_quantized import (
    CONFIG64,
    dense_params,
    make_value_and_grad,
    on_mesh,
    quantized_params,
    reference,
)

# As bitsandbytes publishes them, from the lowest code.
PUBLISHED = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1.0"
)


def weight_of(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def values_of(weight):
    return np.asarray(jax.jit(dense)(weight))


def test_the_values_of_nf4_are_the_published_quantiles_of_a_normal_distribution():
    assert " ".join(map(str, NF4)) == PUBLISHED
    ends = lambda count: np.linspace(0.9677083, 0.5, count)[:-1]
    quantiles = lambda count: [NormalDist().inv_cdf(at) for at in ends(count)]
    found = sorted([*quantiles(9), 0, *(-each for each in quantiles(8))])
    np.testing.assert_allclose(np.array(found) / max(found), NF4, atol=2e-7)


def test_a_weight_in_nf4_has_the_nearest_values_and_the_bytes_of_rows_of_out_and_in():
    weight = weight_of(128, 2, 3)
    weight[:64, 0, 0] = 0
    got = quantize_weight(weight, "nf4", 1, 0, "w")
    assert (got.codes.shape, got.codes.dtype, got.shape) == ((64, 2, 3), np.uint8, (128, 2, 3))
    # Written out as bitsandbytes stores it: [out, in] in one row, blocks of 64, the first of two codes in the upper bits.
    blocks = weight.reshape(128, 6).T.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    units = blocks / np.where(largest, largest, 1)
    codes = np.abs(units[..., None] - np.array(NF4)).argmin(axis=-1).reshape(-1, 2)
    packed = (codes[:, 0] * 16 + codes[:, 1]).reshape(6, 64).T
    assert_same_bits(np.asarray(got.codes).reshape(64, 6), packed.astype(np.uint8))
    values = np.array(NF4, np.float32)[codes].reshape(-1, 64) * largest
    assert_same_bits(values_of(got), values.reshape(6, 128).T.reshape(128, 2, 3))


def test_scales_of_nf4_dq_are_bytes_with_a_scale_for_each_output():
    weight = weight_of(256, 2, 3) * np.exp(weight_of(2, 3, seed=1))
    weight[64:128, 0, 0] = 0
    weight[:, 1, 1] = 0
    plain, got = (quantize_weight(weight, kind, 1, 0, "w") for kind in ("nf4", "nf4-dq"))
    assert_same_bits(np.asarray(got.codes), np.asarray(plain.codes))
    # Written out: the largest of an output's scales is 255.
    scales, unit = np.asarray(plain.scales), np.asarray(got.scales.scales)
    largest = scales.max(axis=0, keepdims=True)
    assert_same(unit, largest / np.float32(255), within=1e-6)
    of_scales = np.round(scales / np.where(largest, unit, 1))
    assert_same_bits(np.asarray(got.scales.codes), of_scales.astype(np.uint8))
    codes = np.asarray(got.codes)
    units = np.array(NF4, np.float32)[np.stack([codes >> 4, codes & 15], axis=1)].reshape(
        4, 64, 2, 3
    )
    values = units * (of_scales.astype(np.float32) * unit)[:, None]
    assert_same_bits(values_of(got), values.reshape(256, 2, 3))
    assert (np.abs(values_of(got) - values_of(plain)) <= largest / 509).all()
    sizes = lambda made: sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    assert (sizes(plain), sizes(got)) == (128 * 6 + 4 * 4 * 6, 128 * 6 + 4 * 6 + 4 * 6)


def test_scales_in_bytes_change_the_error_of_four_bits_by_less_than_a_thousandth():
    weight = weight_of(2048, 32)
    of = lambda kind: np.square(values_of(quantize_weight(weight, kind, 1, 0, "w")) - weight).mean()
    assert of("nf4-dq") == pytest.approx(of("nf4"), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "within"), [("nf4", 0.16), ("nf4-dq", 0.16), ("int8", 0.005), ("fp8", 0.0626)]
)
def test_stacked_weights_are_those_of_each_layer_within_the_rounding_of_a_code(kind, within):
    weight = weight_of(3, 4, 32, 5) * np.array([1, 100, 1e-3], np.float32)[:, None, None, None]
    got = quantize_weight(weight, kind, 2, 1, "w")
    assert got.shape == weight.shape
    for layer in range(3):
        one = quantize_weight(weight[layer], kind, 2, 0, "w")
        assert_same(values_of(one), values_of(got)[layer], within=1e-6)
    error = np.abs(values_of(got) - weight)
    largest = np.abs(weight).max(axis=(1, 2), keepdims=True)
    of = np.abs(weight) + 1e-3 * largest if kind == "fp8" else largest
    assert (error / of).max() < within


@pytest.mark.parametrize("kind", KINDS)
def test_no_operand_in_the_shape_of_a_weight_is_made_before_a_loop_over_layers(kind):
    weight = quantize_weight(weight_of(64, 4), kind, 1, 0, "w")
    closed = jax.make_jaxpr(dense)(weight)
    assert not closed.consts
    of_codes = lambda equation: any(not hasattr(atom, "val") for atom in equation.invars)
    assert all(map(of_codes, closed.jaxpr.eqns)), (
        "JAX makes constants before a loop that is differentiated"
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", quick(KINDS, "nf4-dq"))
def test_gradients_on_data_and_tensor_are_those_beside_the_decoded_weights_in_float64(x64, kind):
    params = {"up": weight_of(128, 256), "down": weight_of(256, 4, seed=1)}
    how = Lora(2, {"up": 1, "down": 1}, alpha=3.0)
    params = lora.quantize(how.init(jax.random.key(0), params), kind)
    is_factor = lambda path: getattr(path[-1], "key", "").startswith("lora")
    draw = lambda path, leaf: (
        np.float64(0.1) * weight_of(*leaf.shape) if is_factor(path) else np.asarray(leaf)
    )
    params = jax.tree_util.tree_map_with_path(draw, params)
    model = lambda params, batch: jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    loss = lambda y, batch: ((y**2).sum(), jnp.float64(len(y)))
    batch = {"x": weight_of(4, 128).astype(np.float64)}

    def mean(params):
        total, weight = loss(model(params, batch), batch)
        return total / weight

    want = jax.jit(jax.value_and_grad(mean))(dense_params(params, np.float64))
    mesh = jaxpar.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    of = lambda spec: jax.NamedSharding(mesh, spec)
    given = how.shardings({"up": of(column_parallel()), "down": of(row_parallel())})
    shardings = lora.quantized_shardings(params, given)
    step = jax.jit(
        jaxpar.value_and_grad(model, loss, mesh, trainable=ADAPTERS, shardings=shardings)
    )
    got = jaxpar.fetch(step(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)))
    assert_same(got[0], np.asarray(want[0]))
    for name in params:
        assert got[1][name].weight.codes is None, "codes have no gradient"
        assert_same(got[1][name].lora_a, np.asarray(want[1][name].lora_a))
        assert_same(got[1][name].lora_b, np.asarray(want[1][name].lora_b))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "axes", "settings"),
    [
        ("nf4", {"data": 2, "tensor": 2}, {}),
        ("nf4", {"data": 2, "stage": 2, "tensor": 2}, {"schedule": "zb-h1"}),
        ("nf4", {"data": 2}, {"zero": 3, "mask_idle_ops": True}),
        ("nf4-dq", {"data": 2, "stage": 2, "tensor": 2}, {"schedule": "1f1b", "zero": 3}),
        slow("nf4-dq", {"stage": 2, "tensor": 2}, {"schedule": "zb-h1", "executor": "mpmd"}),
        slow("nf4-dq", {"data": 2}, {"zero": 3, "mask_idle_ops": True}),
        slow("nf4", {"data": 2}, {"zero": 3}),
        slow("nf4", {"data": 2}, {"mask_idle_ops": True}),
        slow("nf4", {"data": 2, "tensor": 2}, {"remat": True, "num_microbatches": 1}),
        slow("nf4", {"stage": 2}, {"schedule": "1f1b"}),
        slow("int8", {"data": 2, "stage": 2}, {"schedule": "1f1b", "zero": 3}),
        slow("fp8", {"stage": 2, "tensor": 2}, {"schedule": "zb-h1", "executor": "mpmd"}),
    ],
)
def test_gradients_of_a_transformer_are_those_beside_the_decoded_weights_in_float64(
    x64, kind, axes, settings
):
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    params, batch = quantized_params(CONFIG64, kind), tiny.make_batch(dtype=np.dtype("float64"))
    want = jaxpar.fetch(reference(CONFIG64, dense_params(params, np.float64), batch))
    placed, shardings = on_mesh(CONFIG64, params, mesh)
    step = make_value_and_grad(CONFIG64, mesh, shardings, **settings)
    got = jaxpar.fetch(step(placed, jaxpar.shard_batch(batch, mesh)))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same(one, other)


def test_a_layer_stores_no_decoded_weight_for_its_backward_pass():
    how = Lora(2, {"up": 1, "down": 1})
    params = how.init(jax.random.key(0), {"up": weight_of(64, 128), "down": weight_of(128, 64)})
    params = freeze(lora.quantize(params, "nf4"), ADAPTERS)
    layer = lambda own, x: x + jnp.tanh(x @ own["up"]) @ own["down"]
    accepting: Any = accept_frozen(layer, ADAPTERS)
    split = split_layer(accepting, params, jax.ShapeDtypeStruct((3, 64), np.float32))
    stored = [
        each.shape
        for name in ("residuals_b", "residuals_w", "cotangents_w")
        for each in split.shapes(name)
    ]
    assert stored
    assert all(shape[:1] == (3,) for shape in stored), "activations of the three rows alone"


def test_each_layer_of_microbatches_in_turn_decodes_its_weights_where_it_reads_them_in_f_and_in_b():
    num_layers = 3
    params = {"outer": np.ones(64, np.float32), "layers": {"w": weight_of(num_layers, 64, 64)}}
    params = lora.quantize(Lora(2, {"w": 1}).init(jax.random.key(0), params), "nf4")
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"] * outer[None],
        lambda own, x: x + jnp.tanh(x @ own["w"]),
        lambda outer, x: x * outer[None],
    )
    loss = lambda y, batch: ((y**2).sum(), jnp.float32(len(y)))
    mesh = jaxpar.make_mesh(devices=jax.devices()[:1])
    settings = {"num_microbatches": 2, "trainable": ADAPTERS, "mask_idle_ops": True}
    step = jaxpar.value_and_grad(model, loss, mesh, **settings)
    traced = jax.make_jaxpr(step)(params, {"x": weight_of(4, 64)})
    barriers = [each for each in equations(traced) if each.primitive.name == "optimization_barrier"]
    codes_of_one = (32, 64)
    waits = [
        each for each in barriers if any(atom.aval.shape == codes_of_one for atom in each.invars)
    ]
    assert len(waits) == 2 * num_layers, (
        "otherwise XLA keeps what F decodes for B, or decodes before the loop"
    )
    assert all(any(atom.aval.shape == (2, 64) for atom in each.invars) for each in waits), (
        "until the rows are there"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda params: lora.quantize(params, "int4"),
            r"as nf4, nf4-dq, int8, fp8; got 'int4'\. Choose nf4",
        ),
        (
            lambda params: lora.quantize(params, "int8-dq"),
            r"as nf4, nf4-dq, int8, fp8; got 'int8-dq'\. Choose nf4",
        ),
        (
            lambda params: lora.quantize(params, "nf4"),
            r"got params without factors: .*Make factors first: Lora\.init",
        ),
        (
            lambda params: lora.quantize(params, "nf4", {"v": 1}),
            r"each of weights must name one; got 'v'\. Choose among",
        ),
        (
            lambda params: lora.quantize(params, "nf4-dq", {"w": 1}),
            r"nf4-dq has a scale for each 64 values .* got w of shape \(96, 4, 8\), which sums over 96\. Use int8 or fp8",
        ),
        (
            lambda params: lora.quantize(lora.quantize(params, "int8", {"w": 1}), "nf4", {"w": 1}),
            r"quantized once; got w in int8",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused(make, message):
    params = {"w": weight_of(96, 4, 8)}
    with pytest.raises(ValueError, match=message):
        make(params)


@pytest.mark.parametrize(
    ("spec", "num_in", "message"),
    [
        (
            ("tensor", None, None),
            1,
            r"whole blocks of 64 .*; got w, which sums over 192, in 2 parts .* Use int8, or a mesh whose tensor divides its 3",
        ),
        (
            (None, "tensor", None),
            2,
            r"along the first of the dims that a product sums over; got w of ",
        ),
    ],
)
def test_a_sharding_that_cuts_a_block_is_refused(spec, num_in, message):
    weight = quantize_weight(weight_of(192, 2, 4), "nf4-dq", num_in, 0, "w")
    mesh = jaxpar.make_mesh(tensor=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=message):
        weight.shardings(jax.NamedSharding(mesh, jax.P(*spec)), "w")
