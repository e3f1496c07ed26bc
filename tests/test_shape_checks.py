"""A ModelShape of one's own that does not fit itself is told in its own words, not in those of JAX."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar.planner import ModelShape, cluster

leaf = jax.ShapeDtypeStruct
MODEL = jaxpar.LayeredModel(
    lambda outer, batch: batch["x"],
    lambda params, x: x + jnp.tanh(x @ params["w"]),
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
