"""Losses as a sum and its weight."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxpar import losses
from jaxpar.batches import pad_rows

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, (3, 4)).astype(np.int32)


def test_squared_error_over_its_weight_is_the_mean_squared_error():
    predictions, targets = LOGITS, LOGITS[::-1]
    total, weight = losses.squared_error(predictions, targets)
    np.testing.assert_allclose(total / weight, np.mean((predictions - targets) ** 2), rtol=1e-6)


def test_softmax_cross_entropy_is_that_of_optax():
    total, weight = losses.softmax_cross_entropy(LOGITS, LABELS)
    want = optax.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS)
    np.testing.assert_allclose(total, want.sum(), rtol=1e-6)
    assert weight == want.size


def test_softmax_cross_entropy_of_large_logits_is_finite():
    total, _ = losses.softmax_cross_entropy(np.array([[1e4, -1e4]], np.float32), np.array([1], np.int32))
    assert total == 2e4


def test_softmax_cross_entropy_of_bfloat16_is_computed_in_float32():
    rounded = jnp.asarray(LOGITS, jnp.bfloat16)
    total, _ = losses.softmax_cross_entropy(rounded, LABELS)
    assert total.dtype == jnp.float32
    want, _ = losses.softmax_cross_entropy(rounded.astype(jnp.float32), LABELS)
    assert total == want


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_weights_count_examples_or_elements(shape):
    weights = RNG.uniform(size=shape).astype(np.float32)
    total, weight = losses.softmax_cross_entropy(LOGITS, LABELS, weights)
    each = np.asarray(optax.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS))
    spread = np.broadcast_to(weights.reshape(shape + (1,) * (2 - len(shape))), each.shape)
    np.testing.assert_allclose(total, (each * spread).sum(), rtol=1e-5)
    np.testing.assert_allclose(weight, spread.sum(), rtol=1e-6)


def test_rows_of_padding_change_neither_sum_nor_weight():
    batch = {"x": LOGITS[:, 0, 0], "y": LOGITS[:, 0, 1]}
    padded = pad_rows(batch, 8)
    want = losses.squared_error(batch["x"], batch["y"])
    assert losses.squared_error(padded["x"], padded["y"], padded["weight"]) == want


def test_predictions_and_targets_of_two_shapes_are_refused():
    message = r"predictions and targets must have one shape; got \(3, 1\) and \(3,\)"
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=message):
        losses.squared_error(np.ones((3, 1)), np.ones(3))


def test_labels_that_are_one_hot_are_refused():
    message = (
        r"must have the dims of labels and then the classes; got \(3, 4, 5\) and \(3, 4, 5\). Pass labels as integers"
    )
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=message):
        losses.softmax_cross_entropy(LOGITS, np.ones((3, 4, 5), np.int32))


def test_weights_of_other_leading_dims_are_refused():
    message = r"weights must have the leading dims of the values that they weigh; got \(4,\) and \(3, 4\)"
    with pytest.raises(ValueError, match=message):
        losses.softmax_cross_entropy(LOGITS, LABELS, np.ones(4, np.float32))
