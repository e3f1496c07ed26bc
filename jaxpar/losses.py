"""Losses as a sum and its weight, never a mean: means of unequal parts do not add up to the mean of the whole.

A loss takes the model's outputs and gives two scalars, ``loss_sum`` and ``weight_sum``. jaxpar adds each over microbatches
and over the ``data`` axis and divides once, so the loss is that of the whole batch however it is cut. Rows that only pad a
batch get weight 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

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
        weights: One weight an element, or for each index of the leading dims; by default 1.
    """
    if predictions.shape != targets.shape:
        raise ValueError(
            f"predictions and targets must have one shape; got {predictions.shape} and {targets.shape}. Reshape one of them."
        )
    return _weighted_sum(jnp.square(jnp.subtract(predictions, targets)), weights)


def softmax_cross_entropy(
    logits: Float[AnyArray, "*dims num_classes"],
    labels: Int[AnyArray, "*dims"],
    weights: Float[AnyArray, "..."] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of weighted cross-entropies in nats and the sum of weights, computed in float32 at least.

    Args:
        logits: Scores before the softmax.
        labels: The right class of each, from 0 to num_classes - 1.
        weights: One weight a label, or for each index of its leading dims; by default 1.

    **Collectives**: of logits whose classes are split over an axis, as those of a vocabulary-parallel head are, none is
    gathered: a maximum and two sums are reduced over the axis, one number a label each.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must have the dims of labels and then the classes; got {logits.shape} and {labels.shape}. "
            "Pass labels as integers, not one-hot."
        )
    logits = jnp.asarray(logits, jnp.promote_types(logits.dtype, jnp.float32))
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    # A comparison and a sum, both of which fuse and stay on their shard; a gather's gradient is a scatter into zeros.
    is_right = labels[..., None] == jax.lax.broadcasted_iota(labels.dtype, shifted.shape, shifted.ndim - 1)
    right = jnp.sum(jnp.where(is_right, shifted, 0), axis=-1)
    return _weighted_sum(jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - right, weights)


def _weighted_sum(
    values: Float[Array, "..."], weights: Float[AnyArray, "..."] | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    if weights is None:
        return jnp.sum(values), jnp.asarray(values.size, values.dtype)
    if weights.shape != values.shape[: weights.ndim]:
        raise ValueError(
            f"weights must have the leading dims of the values that they weigh; got {weights.shape} and {values.shape}. "
            "Give one weight an example, or one an element."
        )
    spread = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    whole = jnp.broadcast_to(spread, values.shape).astype(values.dtype)
    return jnp.sum(values * whole), jnp.sum(whole)
