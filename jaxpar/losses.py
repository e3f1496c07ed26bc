"""Losses as a sum and its weight, never a mean: means of unequal parts do not add up to the mean of the whole.

A loss takes the model's outputs and gives two scalars, ``loss_sum`` and ``weight_sum``. jaxpar adds each over microbatches
and over the ``data`` axis and divides once, so the loss is that of the whole batch however it is cut. Rows that only pad a
batch get weight 0. Whatever the dtype of the outputs, a loss is computed, counted and summed in float32 at least.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

AnyArray = Array | np.ndarray


def squared_error(
    predictions: Float[AnyArray, "*dims"],
    targets: Float[AnyArray, "*dims"],
    weights: Float[AnyArray, "..."] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of weighted squared errors and the sum of weights; their ratio is the mean squared error.

    Args:
        predictions: Any shape.
        targets: The shape of ``predictions``.
        weights: One weight an element, or for each index of the leading dims; by default 1. Where it is 0, prediction and
            target may be anything, NaN too, and change nothing.
    """
    if predictions.shape != targets.shape:
        raise ValueError(
            f"predictions and targets must have one shape; got {predictions.shape} and {targets.shape}. Reshape one of them."
        )
    predictions, targets = jnp.asarray(predictions), jnp.asarray(targets)
    dtype = _wide(predictions.dtype, targets.dtype)
    whole = _whole_weights(weights, predictions.shape, dtype)
    errors = jnp.where(whole != 0, predictions.astype(dtype) - targets.astype(dtype), 0)
    return jnp.sum(jnp.square(errors) * whole), jnp.sum(whole)


def softmax_cross_entropy(
    logits: Float[AnyArray, "*dims num_classes"],
    labels: Integer[AnyArray, "*dims"],
    weights: Float[AnyArray, "..."] | None = None,
    *,
    ignore_index: int = -100,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of weighted cross-entropies in nats and the sum of weights, computed in float32 at least.

    A label that is no class makes the sum and its gradients NaN, and ``make_train_step`` then skips the step. Where the
    label is ``ignore_index`` or the weight 0, as in rows that pad a batch, label and logits may be anything and change
    nothing. The sum of weights depends on labels and weights alone.

    Args:
        logits: Scores before the softmax.
        labels: The right class of each, from 0 to num_classes - 1, or ``ignore_index``. Integers of any kind.
        weights: One weight a label, or for each index of its leading dims; by default 1.
        ignore_index: Labels of this value get weight 0. Unsigned labels are never negative, so by default all count.

    Raises:
        TypeError: Labels that are no integers.
        ValueError: Shapes that do not fit together.

    **Collectives**: of logits whose classes are split over an axis, as those of a vocabulary-parallel head are, none is
    gathered: a maximum and two sums are reduced over the axis, one number a label each.
    """
    _check_labels(logits, labels)
    logits = jnp.asarray(logits)
    logits = logits.astype(_wide(logits.dtype))
    # Labels are compared in their own dtype, before JAX narrows those of 64 bits that NumPy has.
    whole = jnp.where(_equal(labels, ignore_index), 0, _whole_weights(weights, labels.shape, logits.dtype))
    is_class = (labels >= 0) & _below(labels, logits.shape[-1])
    counts = whole != 0
    factors = jnp.where(is_class | ~counts, whole, jnp.nan)  # a factor, so that the gradient is NaN with the loss
    # Forward this is nothing, and compiled away; backward it keeps a NaN softmax of labels that do not count from the gradient.
    logits = jnp.where(counts[..., None], logits, jax.lax.stop_gradient(logits))
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    # A comparison and a sum, both of which fuse and stay on their shard; a gather's gradient is a scatter into zeros.
    classes = jax.lax.broadcasted_iota(jnp.int32, shifted.shape, shifted.ndim - 1)
    is_right = jnp.where(is_class, labels, -1).astype(jnp.int32)[..., None] == classes
    right = jnp.sum(jnp.where(is_right, shifted, 0), axis=-1)
    losses = jnp.where(counts, jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - right, 0)
    return jnp.sum(losses * factors), jnp.sum(whole)


def _check_labels(logits: AnyArray, labels: AnyArray) -> None:
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must have the dims of labels and then the classes; got {logits.shape} and {labels.shape}. "
            "Pass labels as integers, not one-hot."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers; got {labels.dtype}. Pass labels.astype(jnp.int32).")


def _wide(*dtypes: jnp.dtype) -> jnp.dtype:
    with jax.numpy_dtype_promotion("standard"):  # the users' setting is for their own mixtures
        return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def _equal(labels: Integer[AnyArray, "*dims"], value: int) -> Bool[AnyArray, "*dims"] | bool:
    """Whether labels are ``value``, which their dtype need not have: JAX refuses to compare then."""
    return labels == value if jnp.iinfo(labels.dtype).min <= value <= jnp.iinfo(labels.dtype).max else False


def _below(labels: Integer[AnyArray, "*dims"], size: int) -> Bool[AnyArray, "*dims"] | bool:
    return labels < size if size <= jnp.iinfo(labels.dtype).max else True


def _whole_weights(
    weights: Float[AnyArray, "..."] | None, shape: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """A weight for each element, in ``dtype``."""
    if weights is None:
        return jnp.ones(shape, dtype)
    if weights.shape != shape[: weights.ndim]:
        raise ValueError(
            f"weights must have the leading dims of the values that they weigh; got {weights.shape} and {shape}. "
            "Give one weight an example, or one an element."
        )
    spread = weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim))
    return jnp.broadcast_to(spread, shape).astype(dtype)
