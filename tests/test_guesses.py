"""What a plan does not know of a model, against steps compiled on 8 fake devices: nothing is wrong that is not told."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.backward.products import meetings
from jaxpar.planner import Choice, ModelShape, cluster, price, render, transformer_shape
from jaxpar.planner.compiled import compile_choice
from jaxpar.planner.guesses import guesses_of, uncounted_of
from jaxpar.planner.ops import Analysis
from jaxpar.planner.state import AtRest
from jaxpar.planner.traffic import bytes_by_axis, step_traffic
from jaxpar.report import page
from tests.support import tiny_transformer
from tests.support.tiers import quick

ROWS, OPTIMIZER = 256, optax.adam(1e-3)
SIZES = {
    "up": (64, 256),
    "gate": (64, 256),
    "middle": (256, 256),
    "down": (256, 64),
    "half": (128, 64),
    "kernel_up": (3, 16, 64),
    "kernel_down": (3, 64, 16),
    "bias": (256,),
    "scale": (64,),
}
SPLITS = {
    "column": jaxpar.column_parallel(),
    "row": jaxpar.row_parallel(),
    "whole": jaxpar.replicated(),
    "shards": PartitionSpec("tensor"),  # of a vector
    "features": PartitionSpec(None, None, "tensor"),  # of a kernel
    "inputs": PartitionSpec(None, "tensor"),
}


def _normed(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def mlp(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def gated(p, x):
    return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def deeper(p, x):
    return x + jnp.tanh(jnp.tanh(x @ p["up"]) @ p["middle"]) @ p["down"]


def with_bias(p, x):
    return x + jnp.tanh(x @ p["up"] + p["bias"][None]) @ p["down"]


def scaled(p, x):
    return x + jnp.tanh((_normed(x) * p["scale"][None]) @ p["up"]) @ p["down"]


def in_heads(p, x):
    heads = (x @ p["up"]).reshape(*x.shape[:-1], 8, -1)
    return x + _normed(heads).reshape(*x.shape[:-1], -1) @ p["down"]


def of_halves(p, x):
    left, right = jnp.split(x @ p["up"], 2, -1)
    return x + (left * jnp.tanh(right)) @ p["half"]


def convolved(x, kernel, stride=1):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,), "SAME", dimension_numbers=numbers)


def of_convolutions(p, x, stride=1):
    rows = x.reshape(-1, 4, 16)
    hidden = jnp.tanh(convolved(rows, p["kernel_up"], stride))
    added = convolved(jnp.repeat(hidden, stride, 1), p["kernel_down"])
    return x + added.reshape(x.shape)


def of_strided(p, x):
    return of_convolutions(p, x, stride=2)


WEIGHTS = {
    of_convolutions: ("kernel_up", "kernel_down"),
    of_strided: ("kernel_up", "kernel_down"),
    mlp: ("up", "down"),
    gated: ("gate", "up", "down"),
    deeper: ("up", "middle", "down"),
    with_bias: ("up", "bias", "down"),
    scaled: ("scale", "up", "down"),
    in_heads: ("up", "down"),
    of_halves: ("up", "half"),
}


def shape_of(layer, splits, embed="whole", head="whole"):
    """A model with such a layer; ``splits`` are of its weights, in their order."""
    float32 = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    names = WEIGHTS[layer]
    rules = {f"layers/{name}": SPLITS[split] for name, split in zip(names, splits, strict=True)}
    return ModelShape(
        name=layer.__name__,
        model=jaxpar.LayeredModel(
            lambda outer, batch: batch["x"] @ outer["w_in"],
            layer,
            lambda outer, x: x @ outer["w_out"],
        ),
        loss=lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"]),
        params={
            "outer": {"w_in": float32(16, 64), "w_out": float32(64, 8)},
            "layers": {name: float32(4, *SIZES[name]) for name in names},
        },
        rules=rules | {"outer/w_in": SPLITS[embed], "outer/w_out": SPLITS[head]},
        row={"x": float32(1, 16), "y": float32(1, 8)},
    )


def all_splits(layer):
    """All splits of the weights of a layer."""
    kinds = {
        1: ("shards", "whole"),
        2: ("column", "row", "whole"),
        3: ("features", "inputs", "whole"),
    }
    return itertools.product(*(kinds[len(SIZES[name])] for name in WEIGHTS[layer]))


# layer, splits, embedding, head; whether figures are known
KNOWN = [
    (mlp, ("column", "row"), "whole", "column"),
    (mlp, ("whole", "whole"), "whole", "whole"),
    (gated, ("column", "column", "row"), "whole", "whole"),
    (deeper, ("whole", "column", "row"), "whole", "whole"),
    (with_bias, ("column", "shards", "row"), "whole", "whole"),
    (scaled, ("whole", "column", "row"), "whole", "whole"),
    (in_heads, ("column", "row"), "whole", "whole"),
    (of_convolutions, ("features", "inputs"), "whole", "whole"),
    (of_convolutions, ("whole", "whole"), "whole", "whole"),
    (of_strided, ("features", "inputs"), "whole", "whole"),
]
UNSURE = [
    (mlp, ("row", "column"), "whole", "whole"),
    (mlp, ("column", "whole"), "whole", "whole"),
    (mlp, ("column", "column"), "whole", "whole"),
    (mlp, ("column", "row"), "column", "whole"),
    (mlp, ("column", "row"), "whole", "row"),
    (with_bias, ("column", "whole", "row"), "whole", "whole"),
    (of_halves, ("column", "row"), "whole", "whole"),
    (of_convolutions, ("inputs", "features"), "whole", "whole"),
]
CASES = [(*each, True) for each in KNOWN] + [(*each, False) for each in UNSURE]
NAMED = {each[:4] for each in CASES}
MORE = [
    (layer, splits, *ends, None)
    for layer in WEIGHTS
    for splits in all_splits(layer)
    for ends in itertools.product(("column", "row", "whole"), repeat=2)
    if (layer is mlp or ends == ("whole", "whole")) and (layer, splits, *ends) not in NAMED
]


@pytest.mark.parametrize(
    ("layer", "splits", "embed", "head", "is_known"),
    quick(CASES, 0, 7, 10) + [pytest.param(*each, marks=pytest.mark.slow) for each in MORE],
)
def test_bytes_and_operations_are_the_compiled_steps_or_the_plan_says_that_it_guesses(
    layer, splits, embed, head, is_known
):
    shape = shape_of(layer, splits, embed, head)
    choice = Choice(data=2, tensor=4, num_microbatches=2)
    mesh = jaxpar.make_mesh(data=2, tensor=4)
    _, report = compile_choice(shape, choice, mesh, OPTIMIZER, ROWS)
    moved = {"data": 0, "stage": 0, "tensor": 0} | {
        "+".join(axes): size for axes, size in report.bytes_by_axes().items()
    }
    analysis = Analysis(shape, ROWS // 4, choice.tensor)
    planned = bytes_by_axis(step_traffic(choice, analysis, AtRest(shape, OPTIMIZER, choice)))
    flops = price(shape, cluster("h100"), choice, batch_size=ROWS).flops
    is_right = planned == moved and flops == pytest.approx(report.flops, rel=0.03)
    guesses = guesses_of(analysis)
    assert is_right or guesses, report.render()
    if is_known is not None:
        assert (is_right, not guesses) == (is_known, is_known), (guesses, planned, moved)


@pytest.mark.parametrize("name", quick(tiny_transformer.FAMILIES, "llama"))
@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}], ids=["", "sequence"])
def test_nothing_is_guessed_of_transformers(name, changes):
    shape = transformer_shape(tiny_transformer.FAMILIES[name], **changes)
    for tensor in (2, 4):
        assert guesses_of(Analysis(shape, 4, tensor)) == ()
    plan = price(shape, cluster("h100"), Choice(data=2, tensor=4), batch_size=8)
    assert (plan.guesses, plan.uncounted) == ((), ())


def _by_fft(p, x):
    return mlp(p, jnp.real(jnp.fft.fft(x)).astype(x.dtype))


def _in_a_shard_map(p, x):
    product = lambda x, w: x @ w
    whole = PartitionSpec()
    return x + jax.shard_map(product, in_specs=(whole, whole), out_specs=whole, mesh=MESH)(
        x, p["up"] @ p["down"]
    )


@jax.custom_vjp
def _with_derivative(x, w):
    return x @ w


_with_derivative.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct)
)
MESH = jaxpar.make_mesh()


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (mlp, []),
        (of_strided, []),
        (lambda p, x: x + _with_derivative(jnp.tanh(x @ p["up"]), p["down"]), []),
        (lambda p, x: jax.lax.fori_loop(0, 3, lambda _, x: mlp(p, x), x), []),
        (_by_fft, ["fft"]),
        (lambda p, x: jax.lax.fori_loop(0, 3, lambda _, x: _by_fft(p, x), x), ["fft"]),
        (_in_a_shard_map, ["dot_general"]),
        (lambda p, x: mlp(p, x) + jnp.sum(jnp.linalg.cholesky(p["up"] @ p["up"].T)), ["cholesky"]),
    ],
)
def test_operations_that_are_not_counted_are_told_with_their_lines(layer, told):
    names = (of_strided,) if layer is of_strided else (mlp,)
    shape = shape_of(*names, ("whole", "whole"))
    shape = dataclasses.replace(
        shape, model=dataclasses.replace(shape.model, layer=layer), cache={}
    )
    found = uncounted_of(Analysis(shape, 8, 1))
    assert {each.partition(" at ")[0] for each in found} >= set(told)
    assert bool(found) == bool(told)
    if layer is _in_a_shard_map:
        assert "test_guesses.py:" in found[0]
    plan = price(shape, cluster("h100"), Choice(data=8), batch_size=64)
    assert plan.uncounted == found
    assert ("\n  lacks   the operations of " in plan.details(2**36)) == bool(told)
    assert ("Plans lack the operations of " in render([plan])) == bool(told)
    assert ("Plans lack the operations of " in page.plans([plan.as_json()])) == bool(told)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 6),
        ({"low": 1}, 5),
        ({"low": 1, "image_step": 2}, 3),
        ({"stride": 2}, 4),
        ({"kernel_step": 2}, 5),
    ],
)
def test_an_element_of_padding_or_of_a_gap_meets_none_of_a_kernel(settings, count):
    """A kernel of two over an image of four, at three places; with gaps between its elements the image has two."""
    image = 2 if "image_step" in settings else 4
    assert meetings(image, 2, 3, **settings) == count


def test_one_device_over_tensor_guesses_nothing():
    shape = shape_of(mlp, ("row", "column"))
    assert guesses_of(Analysis(shape, 4, 1)) == ()
    assert price(shape, cluster("h100"), Choice(data=8), batch_size=8).guesses == ()


def test_a_plan_that_guesses_says_so_wherever_it_is_shown():
    machines = cluster("h100")
    known, unsure = (
        price(shape_of(mlp, splits), machines, Choice(data=2, tensor=4), batch_size=8)
        for splits in (("column", "row"), ("column", "whole"))
    )
    product, gradient = unsure.guesses
    assert product.startswith("dot_general at ")
    assert "test_guesses.py" in product
    assert gradient == "the gradient of layers/down"
    assert f"  unsure  how XLA shards {product}, {gradient} over tensor" in unsure.details(2**36)
    assert "unsure" not in known.details(2**36)
    assert "Plans with tensor > 1 are unsure: how XLA shards" in render([known, unsure])
    assert "unsure" not in render([known])
    assert unsure.as_json()["guesses"] == [product, gradient]
    assert known.as_json()["guesses"] == []
    assert "Plans with tensor &gt; 1 are unsure" in page.plans([known.as_json(), unsure.as_json()])
    assert "unsure" not in page.plans([known.as_json()])


def test_a_mesh_whose_devices_over_tensor_all_compute_the_same_is_told():
    machines = cluster("h100")
    whole, split = (
        price(shape_of(mlp, splits), machines, Choice(data=2, tensor=4), batch_size=8)
        for splits in (("whole", "whole"), ("column", "row"))
    )
    told = "  tensor  shards no param: its devices all compute the same"
    assert told in whole.details(2**36)
    assert told not in split.details(2**36)
    assert told not in price(
        shape_of(mlp, ("whole", "whole")), machines, Choice(data=8), batch_size=8
    ).details(2**36)
