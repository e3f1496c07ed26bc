"""A layer split into B and W computes the whole backward pass once and stores no weights, for any layer function.

A layer under min-cut rematerialisation has the same derivatives.
"""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from jaxpar.backward.graph import trace
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.remat import min_cut_remat
from jaxpar.backward.split import split_layer
from jaxpar.dtypes import is_float
from tests.support import tiny, tiny_gpt
from tests.support.oracle import assert_same
from tests.support.tiers import quick

NUM_ROWS, WIDTH = 5, 4
KEY = "key"


# Blocks that random layers are made of: each takes its params and x, a dict, and gives x.


def param(*shape, scale=0.7):
    return (shape, scale)


@jax.custom_jvp
def softplus(x):
    return jnp.log1p(jnp.exp(x))


@softplus.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softplus(x), jax.nn.sigmoid(x) * dx


@jax.custom_vjp
def scaled_matmul(x, w):
    return x @ w * 0.5


scaled_matmul.defvjp(
    lambda x, w: (scaled_matmul(x, w), (x, w)),
    lambda kept, g: (g @ kept[1].T * 0.5, kept[0].T @ g * 0.5),
)

CLOSED_OVER = np.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


def norm(h, scale):
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale[None]


def with_h(function):
    """A block that changes only the activations."""
    return lambda p, x: x | {"h": function(p, x["h"])}


def attention(p, x):
    q, k, v = jnp.einsum("td,dce->cte", x["h"], p["qkv"])
    scores = jnp.where(x["mask"][None] | jnp.eye(q.shape[0], dtype=bool), q @ k.T, -1e9)
    return x | {"h": x["h"] + jax.nn.softmax(scores, axis=-1) @ v @ p["out"]}


def dropout(p, x):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(x[KEY])
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(x[KEY])
    return x | {"h": jnp.where(keep, x["h"] / 0.7, 0) * p["scale"][None], KEY: keys}


def positions(p, x):
    return x | {"h": x["h"] + p["table"][x["position"]], "position": x["position"][::-1]}


def recurrence(p, h):
    return jax.lax.scan(lambda carry, row: (jnp.tanh(carry @ p["w"] + row),) * 2, h[0], h)[1]


def half_precision(p, h):
    return h + (h.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(h.dtype)


def checkpointed(p, h):
    inner = lambda w, v, h: jnp.tanh(norm(h, v * v) @ w) * jnp.exp(v)[None]
    return h + jax.checkpoint(inner)(p["w"], p["v"], h)


def saving_dots(p, h):
    inner = jax.checkpoint(
        lambda w, h: jnp.sin(jnp.sin(h) @ w),
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )
    return inner(p["w"], h)


def factored(p, h):
    """A weight that is made from others at some cost."""
    return h @ jnp.sin(p["a"] @ p["b"])


def branch(p, h):
    return jax.lax.cond(
        h.sum() > 0, lambda w, h: jnp.tanh(h @ w), lambda w, h: jnp.sin(h @ w.T), p["w"], h
    )


def fused_attention(p, h):
    q, k, v = (part[None, :, None] for part in jnp.einsum("td,dce->cte", h, p["qkv"]))
    return h + jax.nn.dot_product_attention(q, k, v, is_causal=True)[0, :, 0]


def experts(p, h):
    """Each row goes to the two experts with the highest scores."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
    return jnp.einsum("tc,tcde,td->te", weights, p["experts"][chosen], h)


def two_branches(p, x):
    second = jnp.cos(x["second"] * p["v"][None]) + x["h"] @ p["w"]
    return x | {"h": x["h"] + x["second"] ** 2, "second": second}


def repeated(p, h):
    """The params are read in each of a scan's trips."""
    return jax.lax.scan(lambda h, _: (jnp.sin(h @ p["w"]), None), h, length=3)[0]


w, v = param(WIDTH, WIDTH), param(WIDTH)
BLOCKS = {
    "matmul": ({"w": w}, with_h(lambda p, h: h @ p["w"])),
    "affine": ({"w": w, "b": v}, with_h(lambda p, h: h @ p["w"] + p["b"][None])),
    "transposed": ({"w": w}, with_h(lambda p, h: jnp.einsum("td,ed->te", h, p["w"]))),
    "gate": ({"w": w, "g": w}, with_h(lambda p, h: jax.nn.silu(h @ p["g"]) * (h @ p["w"]))),
    "mlp": (
        {"up": param(WIDTH, 8), "down": param(8, WIDTH)},
        with_h(lambda p, h: jax.nn.gelu(h @ p["up"]) @ p["down"]),
    ),
    "residual": ({"w": w}, with_h(lambda p, h: h + jax.nn.relu(h @ p["w"]))),
    "norm": ({"scale": v}, with_h(lambda p, h: norm(h, p["scale"]))),
    "tanh": ({}, with_h(lambda p, h: jnp.tanh(h))),
    "nothing": ({"unread": v}, lambda p, x: x),
    "only params": (
        {"v": v},
        with_h(lambda p, h: jnp.broadcast_to(jnp.exp(p["v"])[None], h.shape)),
    ),
    "normed weight": ({"w": w}, with_h(lambda p, h: h @ (p["w"] / jnp.linalg.norm(p["w"])))),
    "closed over": (
        {"v": v},
        with_h(lambda p, h: h @ jnp.asarray(CLOSED_OVER, h.dtype) * p["v"][None]),
    ),
    "jitted": ({"w": w}, with_h(jax.jit(lambda p, h: jax.jit(jnp.tanh)(h) @ p["w"]))),
    "custom_jvp": ({"v": v}, with_h(lambda p, h: softplus(h * p["v"][None]))),
    "custom_vjp": ({"w": w}, with_h(lambda p, h: jnp.tanh(scaled_matmul(h, p["w"])))),
    "stopped": (
        {"w": w},
        with_h(lambda p, h: h * jax.lax.stop_gradient(jax.nn.sigmoid(h @ p["w"]))),
    ),
    "attention": ({"qkv": param(WIDTH, 3, WIDTH), "out": w}, attention),
    "dropout": ({"scale": v}, dropout),
    "positions": ({"table": param(6, WIDTH)}, positions),
    "recurrence": ({"w": w}, with_h(recurrence)),
    "repeated": ({"w": w}, with_h(repeated)),
    "half precision": ({"w": w}, with_h(half_precision)),
    "checkpointed": ({"w": w, "v": v}, with_h(checkpointed)),
    "saving dots": ({"w": w}, with_h(saving_dots)),
    "factored": ({"a": w, "b": w}, with_h(factored)),
    "factored, checkpointed": ({"a": w, "b": w}, with_h(jax.checkpoint(factored))),
    "branch": ({"w": w}, with_h(branch)),
    "fused attention": ({"qkv": param(WIDTH, 3, WIDTH)}, with_h(fused_attention)),
    "experts": ({"router": param(WIDTH, 3), "experts": param(3, WIDTH, WIDTH)}, with_h(experts)),
    "running sum": (
        {"w": w},
        with_h(lambda p, h: jnp.cumsum(h @ p["w"], axis=0) / (1 + jnp.arange(len(h)))[:, None]),
    ),
    "sorted": ({"v": v}, with_h(lambda p, h: jnp.sort(h * p["v"][None], axis=0))),
    "two branches": ({"w": w, "v": v}, two_branches),
}
# A loop's or conditional's backward pass makes input and weight gradients in one operation: B computes the latter for W.
WEIGHTS_IN_LOOPS = ("recurrence", "repeated", "branch")


def layer_of(blocks):
    def layer(params, x):
        for name, p in zip(blocks, params, strict=True):
            x = BLOCKS[name][1](p, x)
        return x

    return layer


def draw(rng, blocks, num_rows=NUM_ROWS):
    """Params, x and a cotangent for the float leaves of x."""
    params = [
        {k: rng.normal(size=shape) * scale for k, (shape, scale) in BLOCKS[name][0].items()}
        for name in blocks
    ]
    x = {
        "h": rng.normal(size=(num_rows, WIDTH)),
        "second": rng.normal(size=(num_rows, WIDTH)),
        "mask": rng.uniform(size=num_rows) < 0.7,
        "position": rng.integers(0, 6, num_rows).astype(np.int32),
        KEY: jax.random.split(jax.random.key(int(rng.integers(2**31))), num_rows),
    }
    x = jax.tree.map(jnp.asarray, x)
    ct = [jnp.asarray(rng.normal(size=leaf.shape)) for leaf in jax.tree.leaves(x) if is_float(leaf)]
    return jax.tree.map(jnp.asarray, params), x, ct


def whole_backward(layer, params, x, ct):
    """What ``jax.vjp`` gives: (y, dx of the float leaves, dp), flat."""
    leaves, treedef = jax.tree.flatten(x)
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]

    def outputs(params, x_floats):
        merged = dict(enumerate(leaves)) | dict(zip(floats, x_floats, strict=True))
        y = jax.tree.leaves(
            layer(params, jax.tree.unflatten(treedef, [merged[i] for i in range(len(leaves))]))
        )
        return [y[i] for i in floats], y

    _, vjp, y = jax.vjp(outputs, params, [leaves[i] for i in floats], has_aux=True)
    dp, dx = vjp(ct)
    return y, dx, jax.tree.leaves(dp)


def in_parts(split, params, x, ct):
    """The same from F, B and W, each of which gets only what a pipeline passes to it; and from both at once."""
    p, x = jax.tree.leaves(params), jax.tree.leaves(x)
    y, residuals_b, residuals_w = split.forward_and_store(p, x)
    dx, kept = split.backward_input(p, residuals_b, residuals_w, ct)
    dp = split.backward_weights(p, residuals_w, kept)
    return (y, dx, dp), (split.forward(p, x), *split.backward(p, residuals_b, residuals_w, ct))


def check_split(blocks, seed, num_rows=NUM_ROWS):
    layer = layer_of(blocks)
    params, x, ct = draw(np.random.default_rng(seed), blocks, num_rows)
    split = split_layer(layer, params, x)

    @jax.jit
    def all_ways(params, x, ct):
        whole = whole_backward(layer, params, x, ct)
        return (
            whole,
            *in_parts(split, params, x, ct),
            whole_backward(min_cut_remat(layer), params, x, ct),
        )

    want, parts, at_once, differentiated = all_ways(params, x, ct)
    message = f"blocks {blocks}, seed {seed}"
    # bfloat16 in the layer: XLA may keep float32 between two operations that it fuses, and the parts are cut elsewhere.
    within = 2e-2 if "half precision" in blocks else 1e-12
    assert_same(parts, want, within=within, message=f"B and W, {message}")
    assert_same(at_once, want, within=within, message=f"both at once, {message}")
    assert_same(differentiated, want, within=within, message=f"storing least, {message}")
    return split, params, x


random_blocks = st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)


@pytest.mark.full
@settings(max_examples=10)
@example(blocks=[], seed=0)
@example(blocks=["nothing"], seed=0)
@example(blocks=["only params"], seed=0)
@given(blocks=random_blocks, seed=seeds)
def test_b_and_w_of_a_random_layer_are_its_whole_backward_pass(blocks, seed):
    with jax.enable_x64(True):
        check_split(blocks, seed)


@pytest.mark.slow
@settings(max_examples=300)
@given(blocks=random_blocks, seed=seeds)
def test_b_and_w_of_many_random_layers_are_their_whole_backward_pass(blocks, seed):
    with jax.enable_x64(True):
        check_split(blocks, seed)


@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_stored_is_shaped_like_weights_or_depends_on_weights_alone(x64, block):
    blocks = ["affine", block, "residual"]
    layer, (params, x, ct) = layer_of(blocks), draw(np.random.default_rng(0), blocks)
    split = split_layer(layer, params, x)
    if block not in WEIGHTS_IN_LOOPS:
        for shape in (
            *split.shapes("residuals_b"),
            *split.shapes("residuals_w"),
            *split.shapes("cotangents_w"),
        ):
            assert NUM_ROWS in shape.shape, f"{shape} has no dim of rows, as only weights have none"

    def from_f_to_w(p, x, ct):
        _, residuals_b, residuals_w = split.forward_and_store(p, x)
        return residuals_b, residuals_w, split.backward_input(p, residuals_b, residuals_w, ct)[1]

    graph = trace(from_f_to_w, jax.tree.leaves(params), jax.tree.leaves(x), ct)
    of_x = graph.reached(graph.inputs[len(jax.tree.leaves(params)) :])
    alone = [graph.avals[i] for i in graph.outputs if i not in of_x]
    assert not alone, f"stored though weights alone give it: {alone}"


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "block",
    quick(
        BLOCKS,
        "matmul",
        "affine",
        "transposed",
        "tanh",
        "nothing",
        "only params",
        "factored, checkpointed",
    ),
)
def test_b_and_w_of_each_block_between_two_others_are_the_whole_backward_pass(x64, block):
    check_split(["affine", block, "residual"], 0)


# The cost of the split of a transformer layer.


@pytest.fixture(scope="module")
def transformer_layer():
    """The shapes of a small GPT layer's params and x in float32, and its split."""

    def params_and_x(batch):
        made = tiny_gpt.make_params(
            num_layers=1, embed=256, mlp=1024, positions=128, dtype=np.float32
        )
        params = jax.tree.map(jnp.asarray, made)
        return jax.tree.map(lambda p: p[0], params["layers"]), tiny_gpt.embed(
            params["outer"], batch
        )

    batch = tiny_gpt.make_batch(num_rows=4, num_positions=128, dtype=np.float32)
    params, x = jax.eval_shape(params_and_x, batch)
    return params, x, split_layer(tiny_gpt.layer, params, x)


def residuals(params, x):
    """What ``jax.vjp`` keeps for the backward pass, as the function that runs it, which is a pytree."""

    return jax.vjp(lambda params, h: tiny_gpt.layer(params, x | {"h": h})["h"], params, x["h"])[1]


def num_bytes(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def flops(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.full
def test_b_and_w_of_a_transformer_layer_have_the_flops_of_its_whole_backward_pass(
    transformer_layer,
):
    params, x, split = transformer_layer
    p, ct = jax.tree.leaves(params), [x["h"]]
    whole = flops(lambda vjp, ct: vjp(ct), jax.eval_shape(residuals, params, x), x["h"])
    b = flops(split.backward_input, p, split.shapes("residuals_b"), split.shapes("residuals_w"), ct)
    w = flops(split.backward_weights, p, split.shapes("residuals_w"), split.shapes("cotangents_w"))
    both = flops(split.backward, p, split.shapes("residuals_b"), split.shapes("residuals_w"), ct)
    assert 0.98 * whole <= b + w <= 1.02 * whole, (
        f"B {b:.3g} + W {w:.3g}, whole {whole:.3g}: {(b + w) / whole:.3f}"
    )
    assert 0.98 * whole <= both <= 1.02 * whole, (
        f"both at once {both:.3g}, whole {whole:.3g}: {both / whole:.3f}"
    )
    assert 0.3 < w / (b + w) < 0.7, (
        f"B {b:.3g} and W {w:.3g} must be about equal, to fill a tick each"
    )


def test_a_transformer_layer_stores_less_than_vjp_keeps(transformer_layer):
    params, x, split = transformer_layer
    kept_by_vjp = num_bytes(jax.eval_shape(residuals, params, x)) - num_bytes(params)
    stored = num_bytes([split.shapes("residuals_b"), split.shapes("residuals_w")])

    assert stored < kept_by_vjp, f"stored {stored} bytes, vjp keeps {kept_by_vjp}"


def test_a_checkpointed_transformer_layer_stores_only_its_input(transformer_layer):
    params, x, _ = transformer_layer
    split = split_layer(jax.checkpoint(tiny_gpt.layer), params, x)
    stored = [*split.shapes("residuals_b"), *split.shapes("residuals_w")]
    assert num_bytes(stored) <= num_bytes(jax.tree.leaves(x)), (
        f"{stored} stored, {jax.tree.leaves(x)} in x"
    )


def mixed_layer(params, x):
    """Computes in bfloat16 with float32 params, of which one is read as it is too."""
    h = x.astype(jnp.bfloat16)
    h = jnp.tanh(h @ params["w_up"].astype(h.dtype)) @ params["w_down"].astype(h.dtype)
    return (
        x
        + h.astype(x.dtype) * params["scale"][None]
        + params["scale"].astype(jnp.bfloat16).astype(x.dtype)[None]
    )


def test_a_policy_that_offloads_is_refused():
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    layer = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p) @ p), policy=offload)
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pytest.raises(
        ValueError, match=r"a layer must keep on the device .* offloads to the host"
    ):
        split_layer(layer, shape, shape)


def test_params_that_are_only_cast_to_a_smaller_dtype_are_taken_cast():
    rng = np.random.default_rng(tiny.fresh_seed())
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params, x, ct = (
        {"scale": draw(8), "w_down": draw(16, 8), "w_up": draw(8, 16)},
        draw(4, 8),
        draw(4, 8),
    )
    split = split_layer(mixed_layer, params, x)
    cast = split.cast(jax.tree.leaves(params))
    assert [leaf.dtype for leaf in cast] == [jnp.float32, jnp.bfloat16, jnp.bfloat16], (
        "scale is read as it is too"
    )

    y, residuals_b, residuals_w = jax.jit(split.forward_and_store)(cast, [x])
    dx, kept = jax.jit(split.backward_input)(cast, residuals_b, residuals_w, [ct])
    dp = jax.jit(split.backward_weights)(cast, residuals_w, kept)

    @jax.jit
    def whole(params, x, ct):
        y, vjp = jax.vjp(mixed_layer, params, x)
        return y, *vjp(ct)

    want_y, want_dp, want_dx = whole(params, x, ct)
    got = (y, dict(zip(params, dp, strict=True)), dx)
    assert_same(got, ([want_y], want_dp, [want_dx]), within=0.02)  # bfloat16
    assert [g.dtype for g in dp] == [jnp.float32] * 3, "gradients have their params' dtype"


def test_stacked_params_are_cast_once_and_not_in_the_ops():
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8,), (16, 8), (8, 16))]
    params = dict(zip(("scale", "w_down", "w_up"), leaves, strict=True))
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    split = split_layer(mixed_layer, params, x)
    cast = jax.eval_shape(split.cast, leaves)
    ops = {
        "F": jax.make_jaxpr(split.forward_and_store)(cast, [x]),
        "B": jax.make_jaxpr(split.backward_input)(
            cast, split.shapes("residuals_b"), split.shapes("residuals_w"), [x]
        ),
        "W": jax.make_jaxpr(split.backward_weights)(
            cast, split.shapes("residuals_w"), split.shapes("cotangents_w")
        ),
    }
    for op, jaxpr in ops.items():
        weights = [
            v
            for v in jaxpr.jaxpr.invars
            if v.aval.shape in ((16, 8), (8, 16)) and v.aval.dtype == jnp.bfloat16
        ]
        casts = [
            e
            for e in jaxpr.eqns
            if e.primitive.name == "convert_element_type" and e.invars[0] in weights
        ]
        assert weights or op == "W", f"{op} reads no weight in bfloat16"
        assert not casts, f"{op} casts a weight: {casts}"


@pytest.mark.parametrize("num_shards", [1, 4])
def test_what_is_stored_takes_the_fewest_bytes_on_a_device(num_shards):
    """A value in float32 takes twice the bytes of the one in bfloat16 that it is made of, but half of them in four shards."""

    def layer(p, x):
        narrow = (x @ p["w"]).astype(jnp.bfloat16)
        wide = narrow.astype(jnp.float32) + p["bias"]
        return jnp.sin(wide) @ p["v"]

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in (("bias", (1, 8)), ("v", (8, 8)), ("w", (8, 8)))
    }
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    split = split_layer(layer, params, x, ParamShards((1, 0, None), num_shards))
    dtypes = [
        residual.dtype
        for residual in [*split.shapes("residuals_b"), *split.shapes("residuals_w")]
        if residual.shape == x.shape
    ]
    # x itself is float32: W reads it.
    expected = ["bfloat16", "float32"] if num_shards == 1 else ["float32", "float32"]
    assert sorted(map(str, dtypes)) == expected
