"""The small models, as plain functions on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import linear, mlp
from jaxpar.params import count_params, init_params

RNG = np.random.default_rng(0)


def test_linear_regression_is_a_weighted_sum_and_a_bias():
    features = jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32)
    params = {"weights": jnp.array([1.0, -2.0, 0.5]), "bias": jnp.float32(3)}
    want = [row[0] - 2 * row[1] + 0.5 * row[2] + 3 for row in np.asarray(features)]
    np.testing.assert_allclose(linear.apply(params, {"features": features}), want, rtol=1e-5)


def test_linear_regression_begins_at_zero():
    params = init_params(linear.param_table(3), jax.random.key(0))
    assert all(not leaf.any() for leaf in jax.tree.leaves(params))


def test_an_mlp_is_a_chain_of_hidden_layers_with_relu():
    params = jax.jit(lambda key: init_params(mlp.param_table(6, 3, width=4, num_hidden=4), key))(
        jax.random.key(0)
    )
    features = jnp.asarray(RNG.normal(size=(5, 6)), jnp.float32)
    outer, layers = jax.tree.map(np.asarray, (params["outer"], params["layers"]))
    x = np.asarray(features) @ outer["w_in"]
    for i in range(2):
        for part in ("up", "down"):
            x = np.maximum(x @ layers[f"w_{part}"][i] + layers[f"b_{part}"][i][None], 0)
    want = x @ outer["w_out"] + outer["b_out"][None]
    np.testing.assert_allclose(
        mlp.MODEL.apply(params, {"features": features}), want, rtol=1e-4, atol=1e-5
    )


def test_eight_hidden_layers_are_four_pairs():
    table = mlp.param_table(64, 10, width=16, num_hidden=8)
    assert table["layers"]["w_up"].full_shape == (4, 16, 16)
    assert count_params(table) == 64 * 16 + 8 * (16 * 16 + 16) + 16 * 10 + 10


@pytest.mark.parametrize("num_hidden", [0, 7])
def test_hidden_layers_that_are_not_pairs_are_refused(num_hidden):
    with pytest.raises(
        ValueError,
        match=rf"num_hidden must be even, since hidden layers come in pairs; got {num_hidden}.",
    ):
        mlp.param_table(64, 10, width=16, num_hidden=num_hidden)
