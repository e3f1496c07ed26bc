"""What can be read off a traced function."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.jaxprs import varies_with

INPUTS = {"x": jax.ShapeDtypeStruct((3,), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}


@pytest.mark.parametrize(
    "function",
    [
        lambda inputs: jnp.sum(inputs["x"]),
        lambda inputs: jax.jit(lambda x: x[0] * 2)(inputs["x"]),
        lambda inputs: jax.lax.scan(lambda total, x: (total + x, None), 0.0, inputs["x"])[0],
        lambda inputs: jax.lax.cond(inputs["n"] > 0, jnp.sum, jnp.max, inputs["x"]),
        lambda inputs: jnp.where(inputs["x"][0] > 0, inputs["x"][1], 0.0),
    ],
    ids=["sum", "jit", "scan", "cond", "where"],
)
def test_a_derivative_is_found(function):
    assert varies_with(function, INPUTS)


@pytest.mark.parametrize(
    "function",
    [
        lambda inputs: jnp.float32(3),
        lambda inputs: jnp.float32(inputs["x"].size),
        lambda inputs: jnp.sum(jax.lax.stop_gradient(inputs["x"])),
        lambda inputs: jnp.sum(jnp.ones_like(inputs["x"])),
        lambda inputs: jnp.sum(inputs["x"] > 0).astype(jnp.float32),
        lambda inputs: inputs["n"].astype(jnp.float32),
    ],
    ids=["constant", "size", "stop_gradient", "ones_like", "count", "integer"],
)
def test_where_there_is_no_derivative_none_is_found(function):
    assert not varies_with(function, INPUTS)


def test_inputs_without_floats_have_no_derivative():
    assert not varies_with(lambda inputs: inputs["n"] * 2.0, {"n": INPUTS["n"]})
