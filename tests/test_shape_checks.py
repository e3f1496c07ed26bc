"""A ModelShape of one's own that does not fit itself is told in its own words, not in those of JAX."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar.__main__ import main
from jaxpar.context_parallel import gather_sequence
from jaxpar.planner import Choice, ModelShape, cluster, price
from jaxpar.planner.fused import planned_attention

leaf = jax.ShapeDtypeStruct


def _layer(params, x):
    return x + jnp.tanh(x @ params["w"])


MODEL = jaxpar.LayeredModel(
    lambda outer, batch: batch["x"],
    _layer,
    lambda outer, x: x @ outer["w"],
)
SHAPE = ModelShape(
    "own",
    MODEL,
    lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"]),
    {"outer": {"w": leaf((16, 1), "float32")}, "layers": {"w": leaf((4, 16, 16), "float32")}},
    {"**": jaxpar.replicated()},
    {"x": leaf((1, 16), "float32"), "y": leaf((1, 1), "float32")},
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda outputs, batch: jnp.mean(outputs)}, "must return the tuple (loss_sum, weight_sum); got float32[]"),
        ({"loss": lambda outputs, batch: None}, "loss must return the tuple (loss_sum, weight_sum); got None."),
        (
            {"loss": lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["z"])},
            "loss of a ModelShape must take the shapes that it has; got KeyError: 'z', for outputs float32[1, 1]; batch x",
        ),
        (
            {"row": {"x": leaf((1, 17), "float32"), "y": leaf((1, 1), "float32")}},
            "for layer w float32[16, 16]; x float32[1, 17]. Correct layer, or the params and row that the ModelShape has.",
        ),
        ({"row": {"x": leaf((16,), "float32")}}, "whose arrays have a leading dim of 1; got x of shape [16]. Write jax.Sh"),
        ({"row": {"x": 3}}, "whose arrays have a leading dim of 1; got x of int. Write jax.ShapeDtypeStruct((1, *shape)"),
        ({"model": lambda params, batch: batch}, "must be a LayeredModel, of which a plan counts the layers; got a function."),
        (
            {"model": dataclasses.replace(MODEL, layer=lambda params, x: (x, x))},
            "layer must return the structure that it takes; got",
        ),
        (
            {"params": SHAPE.params | {"layers": {"w": leaf((4, 16, 16), "float32"), "i": leaf((4,), "int32")}}},
            "floating-point or complex arrays, since each is given a gradient; got layers/i of dtype int32. Put it into",
        ),
        (
            {"params": SHAPE.params | {"layers": [{"w": leaf((16, 16), "float32")}] * 4}},
            "layers of a ModelShape must be stacked along a leading dim, since a plan traces one for all; got a list of 4.",
        ),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_fit_itself_is_told_in_its_words(changes, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        jaxpar.plan(
            dataclasses.replace(SHAPE, **changes, cache={}),
            cluster("h100", devices_per_node=1),
            batch_size=64,
        )


def _mean(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2), jnp.float32(outputs.size)


def _centred(params, x):
    return _layer(params, x - x.mean(0, keepdims=True))


MEAN = {"loss": _mean}
CENTRED = {"model": dataclasses.replace(MODEL, layer=_centred)}
SPLITS = [
    (MEAN, "must be sums over the rows that the loss is given"),
    (CENTRED, "layer must treat each row of a batch on its own"),
]


@pytest.mark.parametrize(("changes", "message"), SPLITS)
def test_no_plan_splits_rows_that_a_step_refuses_to_split(changes, message):
    own = dataclasses.replace(SHAPE, **changes, cache={})
    best = jaxpar.plan(SHAPE, cluster("h100"), batch_size=8)[0].choice
    assert best.num_replicas * best.num_microbatches == 1  # others are listed, which split rows
    with pytest.raises(ValueError, match=message):
        jaxpar.plan(own, cluster("h100"), batch_size=8)
    whole = jaxpar.plan(own, cluster("h100"), batch_size=8, data=1, num_microbatches=1)
    assert {plan.choice.data for plan in whole} == {1}


@pytest.mark.parametrize(("changes", "message"), SPLITS)
def test_no_split_that_a_step_refuses_is_priced(changes, message):
    own = dataclasses.replace(SHAPE, **changes, cache={})
    for choice in (Choice(data=8), Choice(data=8, num_microbatches=2)):
        with pytest.raises(ValueError, match=message):
            price(own, cluster("h100"), choice, batch_size=64)
    price(own, cluster("h100", devices_per_node=1), Choice(), batch_size=64)


def test_a_sweep_over_prices_checks_each_split_once():
    calls = []

    def loss(outputs, batch):
        calls.append(1)
        return SHAPE.loss(outputs, batch)

    own = dataclasses.replace(SHAPE, loss=loss, cache={})
    of = lambda zero: price(own, cluster("h100"), Choice(data=8, zero=zero), batch_size=64)
    of(0)
    before = len(calls)
    for zero in (0, 1, 2, 3):
        of(zero)
    assert len(calls) == before


EMBED, SEQ = 16, 16


def _attention(params, x):
    heads = lambda name: (x @ params[name]).reshape(*x.shape[:2], 2, EMBED // 2)
    return planned_attention(*map(heads, ("q", "k", "v"))).reshape(x.shape)


def _sequences(layer, of_loss=lambda loss_sum, weight_sum: (loss_sum, weight_sum)):
    """Returns the ModelShape of a model of sequences with this layer, whose loss returns what is made of both sums."""
    stacked = leaf((4, EMBED, EMBED), "float32")
    tokens = leaf((1, SEQ), "int32")
    return ModelShape(
        "own",
        jaxpar.LayeredModel(
            lambda outer, batch: outer["table"][batch["tokens"]],
            layer,
            lambda outer, x: x @ outer["table"].T,
        ),
        lambda outputs, batch: of_loss(
            *jaxpar.losses.softmax_cross_entropy(outputs, batch["targets"])
        ),
        {
            "outer": {"table": leaf((32, EMBED), "float32")},
            "layers": dict.fromkeys(("q", "k", "v"), stacked),
        },
        {"**": jaxpar.replicated()},
        {"tokens": tokens, "targets": tokens},
        tokens_per_row=SEQ,
    )


def test_no_plan_splits_sequences_that_a_step_refuses_to_split():
    layer = lambda params, x: x + _attention(params, x)
    centred = lambda params, x: layer(params, x - x.mean(1, keepdims=True))
    in_context = Choice(context=8)
    machines = cluster("h100")
    price(_sequences(layer), machines, in_context, batch_size=8)
    jaxpar.plan(_sequences(layer), machines, batch_size=8, context=2)
    mixes = "layer must treat each position of a sequence on its own.*mixes those of a device"
    with pytest.raises(ValueError, match=mixes):
        price(_sequences(centred), machines, in_context, batch_size=8)
    with pytest.raises(ValueError, match=mixes):
        jaxpar.plan(_sequences(centred), machines, batch_size=8, context=2)
    a_mean = _sequences(layer, lambda loss_sum, weight_sum: (loss_sum / weight_sum, jnp.float32(1)))
    price(a_mean, machines, Choice(tensor=8), batch_size=8)
    with pytest.raises(ValueError, match="must be sums over the positions"):
        price(a_mean, machines, in_context, batch_size=8)


def test_keys_and_values_of_the_whole_sequence_are_not_gathered_again():
    def layer(params, x):
        heads = lambda name: (x @ params[name]).reshape(*x.shape[:2], 2, EMBED // 2)
        whole = map(gather_sequence, map(heads, ("k", "v")))
        return x + planned_attention(heads("q"), *whole).reshape(x.shape)

    price(_sequences(layer), cluster("h100"), Choice(context=8), batch_size=8)


OF_MODULE = """import jax
import jax.numpy as jnp
import jaxpar
from jaxpar.planner import ModelShape

leaf = jax.ShapeDtypeStruct
row = {"x": leaf((1, 8, 4), "float32")}
params = {"outer": {}, "layers": {"w": leaf((2, 4, 4), "float32")}}
model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], lambda p, x: x @ p["w"], lambda outer, x: x)
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('SHAPE = ModelShape("own", len, len, params, {}, row)', "must be a LayeredModel"),
        ("SHAPE = jnp.zeros((2, 3)) @ jnp.zeros((2, 3))", "dot_general requires"),
    ],
)
def test_an_error_of_a_module_names_its_line_and_none_of_a_library(
    line, message, tmp_path, monkeypatch, capsys
):
    name = f"own_{len(line)}"
    (tmp_path / f"{name}.py").write_text(f"{OF_MODULE}{line}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", f"{name}:SHAPE", "--batch-size", "8"]) == 2
    said = capsys.readouterr().err
    assert message in said
    number = len(OF_MODULE.splitlines()) + 1
    assert said.endswith(f" in {tmp_path / name}.py:{number}. Correct it.\n")


def test_sequences_of_a_model_of_ones_own_need_planned_attention_which_no_flag_gives(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_layer.py").write_text(
        f"""{OF_MODULE}
from jaxpar.planner.fused import planned_attention

def attend(p, x):
    q = x @ p["w"]
    return planned_attention(q[:, :, None], q[:, :, None], q[:, :, None])[:, :, 0]

def loss(outputs, batch):
    return jnp.sum(outputs), jnp.float32(outputs.size)

def shape(model):
    return ModelShape("own", model, loss, params, {{"**": jaxpar.replicated()}}, row, tokens_per_row=8)

WITHOUT = shape(model)
WITH = shape(jaxpar.LayeredModel(model.embed, attend, model.head))
"""
    )
    monkeypatch.chdir(tmp_path)
    flags = ("--batch-size", "8", "--top", "1", "--context")
    assert main(["plan", "--model", "own_layer:WITHOUT", *flags, "2"]) == 2
    said = capsys.readouterr().err
    assert "--attention" not in said
    assert "Call jaxpar.planner.fused.planned_attention in the layer of the ModelShape" in said
    assert said.endswith("or choose --context 1.\n")
    assert main(["plan", "--model", "own_layer:WITHOUT", *flags, "1"]) == 0
    assert main(["plan", "--model", "own_layer:WITH", *flags, "2"]) == 0
