"""Losses as a sum and its weight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import losses
from jaxpar.data.batches import pad_rows
from jaxpar.inspect import inspect_step
from tests.support import tiny
from tests.support.oracle import assert_same, distance
from tests.support.tiers import quick

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, (3, 4)).astype(np.int32)
# Each as one program, where a test does not compare the last bits with those of another.
squared_error, cross_entropy = jax.jit(losses.squared_error), jax.jit(losses.softmax_cross_entropy)
optax_cross_entropy = jax.jit(optax.softmax_cross_entropy_with_integer_labels)


def test_squared_error_over_its_weight_is_the_mean_squared_error():
    predictions, targets = LOGITS, LOGITS[::-1]
    total, weight = losses.squared_error(predictions, targets)
    np.testing.assert_allclose(total / weight, np.mean((predictions - targets) ** 2), rtol=1e-6)


def test_softmax_cross_entropy_is_that_of_optax():
    total, weight = cross_entropy(LOGITS, LABELS)
    want = optax_cross_entropy(LOGITS, LABELS)
    np.testing.assert_allclose(total, want.sum(), rtol=1e-6)
    assert weight == want.size


def test_softmax_cross_entropy_of_large_logits_is_finite():
    total, _ = cross_entropy(np.array([[1e4, -1e4]], np.float32), np.array([1], np.int32))
    assert total == 2e4


def test_softmax_cross_entropy_of_bfloat16_is_computed_in_float32():
    rounded = jnp.asarray(LOGITS, jnp.bfloat16)
    total, _ = losses.softmax_cross_entropy(rounded, LABELS)
    assert total.dtype == jnp.float32
    want, _ = losses.softmax_cross_entropy(rounded.astype(jnp.float32), LABELS)
    assert total == want


@pytest.mark.parametrize("shape", [pytest.param((3,), marks=pytest.mark.full), (3, 4)])
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
    message = r"must have the dims of labels and then the classes; got \(3, 4, 5\) and \(3, 4, 5\). Pass labels as integers"
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=message):
        losses.softmax_cross_entropy(LOGITS, np.ones((3, 4, 5), np.int32))


def test_labels_in_the_place_of_logits_are_refused():
    message = (
        r"outputs first, logits as floats, and then labels; got int32\[3, 4\] first and float64\[3, 4, 5\] second\. "
        r"Swap the two: softmax_cross_entropy\(logits, labels\)\."
    )
    with tiny.signatures_unchecked(), pytest.raises(TypeError, match=message):
        losses.softmax_cross_entropy(np.zeros((3, 4), np.int32), np.zeros((3, 4, 5)))


def test_swapped_arguments_of_a_loss_are_refused_when_the_step_is_traced():
    step = jaxpar.value_and_grad(
        lambda params, batch: batch["x"] @ params,
        lambda outputs, batch: losses.softmax_cross_entropy(batch["y"], outputs),
        jaxpar.make_mesh(data=2),
    )
    batch = {"x": np.ones((4, 3), np.float32), "y": np.zeros(4, np.int32)}
    with (
        tiny.signatures_unchecked(),
        pytest.raises(TypeError, match=r"got int32\[\d\] first and float32\[\d, 5\] second"),
    ):
        jax.eval_shape(step, np.ones((3, 5), np.float32), batch)


def test_logits_of_integers_are_refused():
    with (
        tiny.signatures_unchecked(),
        pytest.raises(TypeError, match=r"Cast the logits to float32\."),
    ):
        losses.softmax_cross_entropy(np.zeros((3, 5), np.int32), np.zeros(3, np.int32))


def test_weights_of_other_leading_dims_are_refused():
    message = (
        r"weights must have the leading dims of the values that they weigh; got \(4,\) and \(3, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        losses.softmax_cross_entropy(LOGITS, LABELS, np.ones(4, np.float32))


# Labels that do not count, and labels that are no classes.

IGNORED = LABELS.copy()
IGNORED[0, 1] = IGNORED[2, 2:] = -100
KINDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def loss_and_gradient(logits, *rest, **options):
    mean = lambda logits: (lambda total, weight: total / weight)(
        *losses.softmax_cross_entropy(logits, *rest, **options)
    )
    return jax.jit(jax.value_and_grad(mean))(jnp.asarray(logits))


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (IGNORED, {}),
        pytest.param(
            np.where(IGNORED < 0, 3, IGNORED), {"ignore_index": 3}, marks=pytest.mark.full
        ),
    ],
)
def test_ignored_labels_have_neither_loss_nor_weight_nor_gradient(labels, options):
    counted = labels != options.get("ignore_index", -100)
    broken = np.where(counted[..., None], LOGITS, np.nan)  # what a model says there does not matter
    value, gradient = loss_and_gradient(broken, labels, **options)
    want, want_gradient = loss_and_gradient(LOGITS[counted], labels[counted])
    assert_same(value, want, within=1e-6)
    assert_same(gradient[counted], want_gradient, within=1e-6)
    np.testing.assert_array_equal(gradient[~counted], 0)
    assert losses.softmax_cross_entropy(broken, labels, **options)[1] == counted.sum()


def test_a_batch_of_ignored_labels_alone_has_the_sums_0_and_0():
    assert losses.softmax_cross_entropy(LOGITS, np.full((3, 4), -100, np.int32)) == (0, 0)


@pytest.mark.parametrize("label", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_label_that_is_no_class_makes_loss_and_gradient_nan_and_leaves_the_weight(label):
    labels = LABELS.copy()
    labels[1, 2] = label
    value, gradient = loss_and_gradient(LOGITS, labels)
    assert np.isnan(value)
    assert np.isnan(gradient).any()
    assert losses.softmax_cross_entropy(LOGITS, labels)[1] == labels.size


def test_a_label_of_64_bits_is_no_class_by_its_lower_bits():
    assert np.isnan(losses.softmax_cross_entropy(LOGITS, LABELS.astype(np.int64) + 2**32)[0])


def test_a_label_of_weight_0_may_be_no_class():
    weights = np.ones((3, 4), np.float32)
    weights[2] = 0
    labels = np.where(weights == 0, 77, LABELS)
    value, gradient = loss_and_gradient(
        np.where(weights[..., None] == 0, np.inf, LOGITS), labels, weights
    )
    want, want_gradient = loss_and_gradient(LOGITS, LABELS, weights)
    assert_same((value, gradient), (want, want_gradient), within=1e-6)


@pytest.mark.parametrize("dtype", quick(KINDS, "uint8", "int32", "uint32"))
def test_labels_of_every_integer_dtype_are_the_same_classes(dtype):
    logits = RNG.normal(size=(64, 300)).astype(np.float32)
    labels = RNG.integers(0, min(300, np.iinfo(dtype).max + 1), 64)
    want = cross_entropy(logits, labels.astype(np.int32))
    assert cross_entropy(logits, labels.astype(dtype)) == want
    assert cross_entropy(logits, jnp.asarray(labels, dtype)) == want
    np.testing.assert_allclose(
        want[0], np.sum(optax_cross_entropy(logits, labels.astype(np.int32))), rtol=1e-5
    )


def test_unsigned_labels_are_never_ignored_by_default():
    labels = np.array([2**32 - 100, 2**8 - 100], np.uint32)
    total, weight = cross_entropy(
        np.zeros((2, 200), np.float32), labels[1:].repeat(2).astype(np.uint8)
    )
    assert (float(total), weight) == (pytest.approx(2 * np.log(200)), 2)
    total, weight = cross_entropy(np.zeros((2, 200), np.float32), labels)
    assert np.isnan(total)
    assert weight == 2


@pytest.mark.parametrize("dtype", [np.float32, bool])
def test_labels_that_are_no_integers_are_refused_with_what_makes_them_some(dtype):
    with (
        tiny.signatures_unchecked(),
        pytest.raises(TypeError, match=r"must be integers; got .*Pass labels.astype\(jnp.int32\)"),
    ):
        losses.softmax_cross_entropy(LOGITS, LABELS.astype(dtype))
    losses.softmax_cross_entropy(LOGITS, LABELS.astype(dtype).astype(jnp.int32))


@pytest.mark.full
def test_a_step_with_a_label_that_is_no_class_is_skipped():
    batch = tiny.make_batch() | {"weight": np.ones(tiny.NUM_ROWS, np.float32)}
    batch["label"][3] = tiny.NUM_CLASSES
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    value_and_grad = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, num_microbatches=2)
    optimizer = optax.sgd(0.1)
    params = tiny.make_params()
    init = lambda key: jax.tree.map(jnp.asarray, params)
    state = jaxpar.init_state(
        init, jax.random.key(0), optimizer, mesh, tiny.shardings(mesh, params)
    )
    state, metrics = jaxpar.make_train_step(value_and_grad, optimizer)(
        state, jaxpar.shard_batch(batch, mesh)
    )
    assert np.isnan(metrics["loss"])
    assert (metrics["skipped"], state.num_skipped) == (1, 1)
    assert_same(jaxpar.fetch(state.params), params)


# Counts and sums in 16 bits.

NARROW = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", quick(NARROW, "float16"))
@pytest.mark.parametrize(
    "weights", [pytest.param(None, marks=pytest.mark.full), 1], ids=["unweighted", "weighted"]
)
def test_rows_are_counted_and_summed_in_float32_whatever_the_dtypes_are(dtype, weights):
    rows = (
        70_001 if dtype == "float16" else 257
    )  # the first whole numbers that the dtype does not have
    dtype = jnp.dtype(dtype)
    weights = weights and np.ones(rows, dtype)
    for total, weight in (
        squared_error(np.full(rows, 2, dtype), np.zeros(rows, dtype), weights),
        cross_entropy(np.zeros((rows, 1), dtype), np.zeros(rows, np.int32), weights),
    ):
        assert total.dtype == weight.dtype == jnp.float32
        assert weight == rows
        assert total in (0, 4 * rows)


@pytest.mark.parametrize("dtype", NARROW)
def test_squared_errors_of_16_bits_are_those_of_float32(dtype):
    narrow = [jnp.asarray(part, dtype) for part in (LOGITS, 300 * LOGITS[::-1])]
    assert losses.squared_error(*narrow) == losses.squared_error(
        *[part.astype(jnp.float32) for part in narrow]
    )


def test_mixed_dtypes_are_widened_where_jax_promotes_nothing_by_itself():
    with jax.numpy_dtype_promotion("strict"):
        logits, weights = jnp.asarray(LOGITS, jnp.bfloat16), jnp.ones(3, jnp.float16)
        jax.eval_shape(losses.softmax_cross_entropy, logits, LABELS, weights)
        jax.eval_shape(losses.squared_error, logits, LOGITS)


def test_targets_of_weight_0_may_be_nan():
    weights = np.array([1, 0, 2], np.float32)
    targets = np.where(weights == 0, np.nan, LOGITS[:, 0, 0])
    mean = lambda predictions, targets: losses.squared_error(predictions, targets, weights)[0]
    got = jax.value_and_grad(mean)(LOGITS[:, 1, 1], targets)
    want = jax.value_and_grad(mean)(LOGITS[:, 1, 1], LOGITS[:, 0, 0])
    assert distance(got, want) == 0


def test_the_weight_is_that_of_the_batch_whatever_the_outputs_are():
    batch = {"labels": IGNORED, "weights": RNG.uniform(size=(3, 4)).astype(np.float32)}
    weight = lambda logits: losses.softmax_cross_entropy(logits, batch["labels"], batch["weights"])[
        1
    ]
    assert weight(LOGITS) == weight(LOGITS * np.nan)


# The number of right answers.


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_right_answers_are_those_of_argmax_also_among_equal_logits(dtype):
    logits = jnp.asarray(RNG.integers(0, 3, (40, 5)), dtype)  # most rows have equal ones
    labels, weights = (
        RNG.integers(0, 5, 40).astype(np.int32),
        RNG.uniform(size=40).astype(np.float32),
    )
    right = np.argmax(np.asarray(logits, np.float32), axis=-1) == labels
    assert losses.num_correct(logits, labels) == right.sum()
    assert_same(losses.num_correct(logits, labels, weights), weights[right].sum(), within=1e-6)


def test_labels_that_are_ignored_and_logits_that_are_no_numbers_are_not_right():
    logits = np.zeros((5, 3), np.float32)
    logits[3:] = np.nan
    labels = np.array([0, -100, 7, 0, 0], np.int64)
    assert losses.num_correct(logits, labels) == 1
    assert losses.num_correct(logits, np.array([2, 2, 0, 2, 2], np.uint8), ignore_index=0) == 0


def test_right_answers_take_labels_after_logits():
    with (
        tiny.signatures_unchecked(),
        pytest.raises(TypeError, match=r"Swap the two: num_correct\(logits, labels\)"),
    ):
        losses.num_correct(LABELS, LOGITS)


def test_right_answers_of_sharded_classes_are_counted_without_gathering_them():
    mesh = jaxpar.make_mesh(tensor=4)
    shard = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    logits = jax.device_put(RNG.normal(size=(64, 32)).astype(np.float32), shard(None, "tensor"))
    labels = jax.device_put(RNG.integers(0, 32, 64).astype(np.int32), shard())
    count = jax.jit(losses.num_correct)
    assert count(logits, labels) == (np.argmax(logits, axis=-1) == labels).sum()
    kinds = [
        (each.kind, each.payload_bytes)
        for each in inspect_step(count, logits, labels, mesh=mesh).collectives
    ]
    assert kinds == [("all-reduce", 64 * 4)] * 2
