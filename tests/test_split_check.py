"""``check_split`` compares a step of all rows with the same step of parts of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar

KEYS = [jax.random.key(i) for i in range(2)]
X = jax.random.normal(KEYS[0], (64, 8))
W = jax.random.normal(KEYS[1], (8, 8, 8)) / 3
PARAMS, BATCH = {"outer": W[0, :, :1], "layers": W}, {"x": X, "y": jnp.sin(X[:, :1])}
MODEL = jaxpar.LayeredModel(
    lambda outer, batch: batch["x"], lambda w, x: x + jnp.tanh(x @ w), lambda outer, x: x @ outer
)


def loss(out, batch):
    return jaxpar.losses.squared_error(out, batch["y"])


@pytest.mark.full
def test_a_loss_that_is_a_sum_over_rows_is_the_same_whole_and_in_parts():
    with_metric = lambda out, batch: (*loss(out, batch), {"positive": jnp.sum(out > 0)})
    assert jaxpar.check_split(MODEL, with_metric, PARAMS, BATCH, num_parts=8) < 1e-5


def test_a_sum_plus_a_mean_is_another_number_in_parts():
    def plus_a_mean(out, batch):
        loss_sum, weight_sum = loss(out, batch)
        return loss_sum + 5 * jnp.mean(out**2), weight_sum

    with pytest.raises(
        ValueError, match=r"got loss 2\.1450. whole and 2\.951.* in 8 parts, .* sums over the rows"
    ):
        jaxpar.check_split(MODEL, plus_a_mean, PARAMS, BATCH, num_parts=8)


@pytest.mark.full
def test_a_layer_that_normalizes_over_the_batch_and_a_metric_that_is_a_maximum_are_found():
    normed = jaxpar.LayeredModel(
        MODEL.embed, lambda w, x: MODEL.layer(w, x - x.mean(0, keepdims=True)), MODEL.head
    )
    with pytest.raises(
        ValueError, match=r"may be rounding\. Let no row of the model depend on others"
    ):
        jaxpar.check_split(normed.apply, loss, PARAMS, BATCH)
    with pytest.raises(ValueError, match="in metric largest, of which"):
        jaxpar.check_split(
            MODEL, lambda o, b: (*loss(o, b), {"largest": jnp.max(o)}), PARAMS, BATCH
        )


def test_params_of_integers_have_no_gradients_to_compare():
    scaled = lambda params, batch: batch["x"] @ (params["w"] * params["scale"])
    params = {"w": np.ones((8, 1), np.float32), "scale": np.int32(2)}
    assert jaxpar.check_split(scaled, loss, params, BATCH) < 1e-5


def test_a_loss_without_a_weight_is_refused_as_a_step_refuses_it():
    with pytest.raises(TypeError, match="loss must return the tuple"):
        jaxpar.check_split(MODEL, lambda out, batch: loss(out, batch)[0], PARAMS, BATCH)


def test_parts_must_divide_the_rows_and_be_one_at_least():
    with pytest.raises(
        ValueError, match="num_parts must divide the rows of the batch; got num_parts=7 and 64 rows"
    ):
        jaxpar.check_split(MODEL, loss, PARAMS, BATCH, num_parts=7)
    with pytest.raises(ValueError, match="num_parts must be at least 1; got 0"):
        jaxpar.check_split(MODEL, loss, PARAMS, BATCH, num_parts=0)


def test_a_batch_of_which_no_row_counts_cannot_be_compared():
    nothing = lambda out, batch: (jnp.sum(out) * 0, jnp.sum(out) * 0)
    with pytest.raises(ValueError, match=r"loss of a batch must be finite, .*; got nan. Give rows"):
        jaxpar.check_split(MODEL, nothing, PARAMS, BATCH)
