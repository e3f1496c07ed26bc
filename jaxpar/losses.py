"""Losses as a sum and its weight, not a mean: means over unequal parts do not average to the mean over the whole.

A loss takes the model's outputs and returns two scalars, ``loss_sum`` and ``weight_sum``. jaxpar adds each over microbatches
and over the ``data`` axis and divides once, so the loss of a batch does not depend on how it is split. Padding rows get weight
0. Whatever the dtype of the outputs, losses and weights are computed and summed in float32 or wider.
"""

import functools
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from jaxpar._near_names import no_attribute, public_names

AnyArray = Array | np.ndarray

if not TYPE_CHECKING:  # or type checkers would take any name

    def __getattr__(name: str) -> Any:
        places = {known: f"{__name__}.{known}" for known in public_names(sys.modules[__name__])}
        raise no_attribute(__name__, name, places)


def squared_error(
    predictions: Float[AnyArray, "*dims"],
    targets: Float[AnyArray, "*dims"],
    weights: Float[AnyArray, "..."] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of weighted squared errors and the sum of weights; their ratio is the mean squared error.

    Args:
        predictions: Any shape.
        targets: The shape of ``predictions``.
        weights: One weight per element, or per index of the leading dims; by default 1. Where a weight is 0, prediction and
            target are ignored, even if they are NaN.
    """
    _check_arrays(predictions=predictions, targets=targets)
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
    """Returns the sum of weighted cross-entropies in nats and the sum of weights, computed in float32 or wider.

    A label that is not a class makes the sum and its gradients NaN, and ``make_train_step`` then skips the step. Where the
    label is ``ignore_index`` or the weight is 0, as in padding rows, label and logits are ignored. The sum of weights depends
    only on labels and weights.

    Args:
        logits: Scores before the softmax.
        labels: The correct classes, from 0 to num_classes - 1, or ``ignore_index``, in any integer dtype.
        weights: One weight per label, or per index of the leading dims of labels; by default 1.
        ignore_index: Labels of this value get weight 0. By default no unsigned label is ignored, since none is negative.

    Raises:
        TypeError: Labels that are not integers, or logits that are.
        ValueError: Shapes that do not fit together.

    **Collectives**: logits whose classes are sharded over an axis, as by a vocabulary-parallel head, are not gathered: a
    maximum and two sums are reduced over the axis, each of one number per label.
    """
    _check_labels(logits, labels, "softmax_cross_entropy")
    logits = jnp.asarray(logits)
    logits = logits.astype(_wide(logits.dtype))
    # Labels are compared in their own dtype, before JAX narrows 64-bit NumPy integers.
    whole = jnp.where(
        _equal(labels, ignore_index), 0, _whole_weights(weights, labels.shape, logits.dtype)
    )
    is_class, known = _known(labels, logits.shape[-1])
    counts = whole != 0
    factors = jnp.where(
        is_class | ~counts, whole, jnp.nan
    )  # a factor, so that the gradient is NaN if the loss is
    # An identity in the forward pass; in the backward pass it keeps NaN logits of ignored labels out of the gradient.
    logits = jnp.where(counts[..., None], logits, jax.lax.stop_gradient(logits))
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    # A comparison and a sum fuse and stay on their shard; the gradient of a gather would be a scatter into zeros.
    classes = jax.lax.broadcasted_iota(jnp.int32, shifted.shape, shifted.ndim - 1)
    is_right = known[..., None] == classes
    right = jnp.sum(jnp.where(is_right, shifted, 0), axis=-1)
    losses = jnp.where(counts, jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - right, 0)
    return jnp.sum(losses * factors), jnp.sum(whole)


def num_correct(
    logits: Float[AnyArray, "*dims num_classes"],
    labels: Integer[AnyArray, "*dims"],
    weights: Float[AnyArray, "..."] | None = None,
    *,
    ignore_index: int = -100,
) -> Float[Array, ""]:
    """Returns the sum of the weights of the labels that have the largest logit, by default their number.

    Its ratio to the weight of ``softmax_cross_entropy`` is the accuracy, a metric for ``value_and_grad(..., has_aux=True)``. Of
    equal logits the first counts, as for ``argmax``. A label beside NaN logits is not right.

    Args:
        logits: Scores, before or after the softmax.
        labels: As for ``softmax_cross_entropy``.
        weights: Likewise.
        ignore_index: Likewise.

    Raises:
        TypeError: Labels that are not integers, or logits that are.
        ValueError: Shapes that do not fit together.

    **Collectives**: logits whose classes are sharded over an axis are not gathered: a maximum and a minimum are reduced over
    the axis, each of one number per label.
    """
    _check_labels(logits, labels, "num_correct")
    logits = jnp.asarray(logits)
    whole = jnp.where(
        _equal(labels, ignore_index), 0, _whole_weights(weights, labels.shape, _wide(logits.dtype))
    )
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_largest = logits == logits.max(-1, keepdims=True)
    # The partitioner would gather sharded logits for an argmax.
    predicted = jnp.min(jnp.where(is_largest, classes, logits.shape[-1]), axis=-1)
    return jnp.sum(jnp.where(_known(labels, logits.shape[-1])[1] == predicted, whole, 0))


def _check_arrays(**given: Any) -> None:
    """Raises TypeError for what is no array, such as the tuple that a model returns."""
    for name, value in given.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"{name} must be an array; got {type(value).__name__}. A loss is given what the model returns, and the batch: "
                "take the array out of it, or return it from the model."
            )


def _check_labels(logits: AnyArray, labels: AnyArray, name: str) -> None:
    _check_arrays(logits=logits, labels=labels)
    is_integer = [jnp.issubdtype(each.dtype, jnp.integer) for each in (logits, labels)]
    if is_integer[0]:
        got = f"got {logits.dtype}{list(logits.shape)} first and {labels.dtype}{list(labels.shape)} second"
        remedy = (
            "Cast the logits to float32."
            if is_integer[1]
            else f"Swap the two: {name}(logits, labels)."
        )
        raise TypeError(
            f"a loss takes the model's outputs first, logits as floats, and then labels; {got}. {remedy}"
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must have the dims of labels and then the classes; got {logits.shape} and {labels.shape}. "
            "Pass labels as integers, not one-hot."
        )
    if not is_integer[1]:
        raise TypeError(
            f"labels must be integers; got {labels.dtype}. Pass labels.astype(jnp.int32)."
        )


def _wide(*dtypes: jnp.dtype) -> jnp.dtype:
    with jax.numpy_dtype_promotion("standard"):  # the user's setting is for the user's own code
        return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def _equal(labels: Integer[AnyArray, "*dims"], value: int) -> Bool[AnyArray, "*dims"] | bool:
    """Whether labels equal ``value``. JAX refuses to compare with a value that their dtype cannot represent."""
    return (
        labels == value
        if jnp.iinfo(labels.dtype).min <= value <= jnp.iinfo(labels.dtype).max
        else False
    )


def _known(
    labels: Integer[AnyArray, "*dims"], num_classes: int
) -> tuple[Bool[Array, "*dims"], Integer[Array, "*dims"]]:
    """Whether labels are classes, and the labels in int32, -1 for those that are not."""
    is_below = labels < num_classes if num_classes <= jnp.iinfo(labels.dtype).max else True
    is_class = jnp.asarray((labels >= 0) & is_below)
    return is_class, jnp.where(is_class, labels, -1).astype(jnp.int32)


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
