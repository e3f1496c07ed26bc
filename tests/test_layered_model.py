"""A model as embed, layer and head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.layered_model import check_layer, is_layered, num_layers
from tests.support import tiny
from tests.support.oracle import assert_same


def test_apply_is_the_composition_of_embed_each_layer_and_head():
    params, batch = jax.tree.map(jnp.asarray, (tiny.make_params(), tiny.make_batch()))
    x = tiny.MODEL.embed(params["outer"], batch)
    for i in range(tiny.NUM_LAYERS):
        x = tiny.MODEL.layer(jax.tree.map(lambda w, i=i: w[i], params["layers"]), x)
    want = tiny.MODEL.head(params["outer"], x)
    assert_same(tiny.MODEL.apply(params, batch), want, within=1e-5)


def test_layers_unlike_each_other_are_composed_in_order_and_x_may_change_on_its_way():
    functions = [lambda p, x: x @ p["w"], lambda p, x: (x, x.sum()), lambda p, x: x[0] * p + x[1]]
    model = jaxpar.LayeredModel(lambda outer, batch: batch, functions, lambda outer, x: x + outer)
    params = {"outer": jnp.float32(7), "layers": [{"w": jnp.ones((2, 3))}, {}, jnp.float32(10)]}
    batch = jnp.ones((1, 2))
    check_layer(model, params, batch)
    assert num_layers(params) == 3
    np.testing.assert_array_equal(model.apply(params, batch), [[33, 33, 33]])  # 2 * 10 + 6 + 7
    twice = model.wrap_layers(lambda f: lambda p, x: jax.tree.map(lambda a: 2 * a, f(p, x)))
    np.testing.assert_array_equal(
        twice.apply(params, batch), [[215, 215, 215]]
    )  # 2 * (8 * 10 + 24) + 7


def test_a_prng_key_may_travel_in_x():
    def layer(p, x):
        key, now = jax.random.split(x["key"])
        return {"h": x["h"] * p + jax.random.normal(now, x["h"].shape), "key": key}

    model = jaxpar.LayeredModel(lambda outer, batch: batch, layer, lambda outer, x: x["h"])
    params = {"outer": {}, "layers": jnp.ones(2)}
    batch = {"h": jnp.zeros(3), "key": jax.random.key(0)}
    check_layer(model, params, batch)
    first, second = (jax.random.normal(k, 3) for k in noise_keys(jax.random.key(0), 2))
    np.testing.assert_allclose(model.apply(params, batch), first + second, rtol=1e-6)


def noise_keys(key, num):
    for _ in range(num):
        key, now = jax.random.split(key)
        yield now


def test_the_number_of_layers_is_the_leading_dim_of_all_their_leaves():
    assert num_layers(tiny.make_params()) == tiny.NUM_LAYERS
    assert is_layered(tiny.make_params())
    assert not is_layered({"layers": {}})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"body": {}, "outer": {}},
            r'must be a dict with the keys "outer" and "layers"; got \[\'body\', \'outer\'\]. Put',
        ),
        ([1, 2], r'must be a dict with the keys "outer" and "layers"; got list'),
        (
            {"outer": {}, "layers": {"w": np.ones((2, 3)), "b": np.ones(3)}},
            r'every leaf under "layers" must have the same leading dim num_layers; got \{\'b\': \(3,\), \'w\': \(2,\)\}. Stack',
        ),
        (
            {"outer": {}, "layers": {"w": np.ones(())}},
            r"the same leading dim num_layers; got \{'w': \(\)\}",
        ),
        ({"outer": {}, "layers": {}}, r"the same leading dim num_layers; got \{\}"),
    ],
)
def test_params_that_are_not_outer_and_stacked_layers_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        num_layers(params)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda p, x: (x, x),
            r"layer must return the structure that it takes; got .*\*.* in, .*\(\*, \*\).* out; a layer must",
        ),
        (
            lambda p, x: x[:, :2],
            r"the shapes and dtypes that it takes; got x float32\[32, 8\] in, float32\[32, 2\] out",
        ),
        (
            lambda p, x: x.astype(jnp.bfloat16),
            r"got x float32\[32, 8\] in, bfloat16\[32, 8\] out.*Cast or reshape",
        ),
    ],
)
def test_a_layer_that_changes_what_it_takes_is_refused(layer, message):
    model = jaxpar.LayeredModel(tiny.MODEL.embed, layer, tiny.MODEL.head)
    with pytest.raises(ValueError, match=message):
        check_layer(model, tiny.make_params(), tiny.make_batch())
