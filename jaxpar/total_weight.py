"""The total weight of a batch, by which its loss is divided, from the batch alone: it is known before the backward pass.

The cotangent of each loss_sum is then ``1 / total weight``, as it is for the ratio of the two on one device. A backward pass
that is not linear in its cotangent, because it clips or rounds gradients, gives the same numbers on every mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.data_parallel import accumulate
from jaxpar.jaxprs import trace
from jaxpar.layered_model import LAYERS, LayeredModel, is_stacked

Forward = Callable[[PyTree, PyTree], PyTree]
Loss = Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class BatchWeight:
    """What the loss of a batch is divided by.

    Attributes:
        of_rows: ``a replica's rows -> weight_sum``, the sum over its microbatches, in float32 at least.
        loss_dtype: The dtype of the loss on one device.
    """

    of_rows: Callable[[PyTree], jax.Array]
    loss_dtype: Any


def weigh_batch(
    model: LayeredModel | Forward,
    loss: Loss,
    params: PyTree,
    batch: PyTree,
    *,
    num_replicas: int,
    num_microbatches: int,
) -> BatchWeight:
    """Returns the weight of a batch as a function of rows, which runs no more of model and loss than the weight needs.

    Args:
        model: The model. A weight that passes through it from the batch to the outputs is followed.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        params: Arrays or ShapeDtypeStructs like the params, in the model's order.
        batch: The same for the batch.
        num_replicas: Replicas, among which the rows are split.
        num_microbatches: Microbatches of each.

    Raises:
        ValueError: The weight depends on the params.
    """
    rows = num_replicas * num_microbatches
    microbatch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] // rows, *a.shape[1:]), a.dtype), jax.eval_shape(lambda b: b, batch)
    )
    forward = model.apply if isinstance(model, LayeredModel) else model
    outputs = jax.eval_shape(forward, params, microbatch)
    weight = _without(lambda outputs, batch: loss(outputs, batch)[1], outputs, microbatch)
    if weight is None:
        forward = _unrolled(model) if isinstance(model, LayeredModel) else model
        weight = _without(lambda params, batch: loss(forward(params, batch), batch)[1], params, microbatch)
    if weight is None:
        raise ValueError(
            "weight_sum must depend on the batch alone, since its total is needed before the backward pass; got a loss whose "
            "weight_sum depends on the outputs. Compute it from the batch; weights that a model gives must be evaluated "
            "beforehand and put into the batch."
        )
    with jax.numpy_dtype_promotion("standard"):
        mean = jax.eval_shape(lambda *given: jnp.divide(*loss(*given)), outputs, microbatch)
    return BatchWeight(lambda rows: accumulate(weight, rows, num_microbatches), mean.dtype)


def _without(function: Callable[[PyTree, PyTree], jax.Array], first: PyTree, batch: PyTree) -> Callable | None:
    """``function`` of the batch alone, or None if its value depends on the values of ``first``."""
    graph = trace(function, first, batch)
    count = len(jax.tree.leaves(first))
    nodes = graph.needed(graph.outputs, ())
    read = {number for node in nodes for number in node.inputs} | set(graph.outputs)
    if not read.isdisjoint(graph.inputs[:count]):
        return None

    def of_batch(batch: PyTree) -> jax.Array:
        values = dict(zip(graph.inputs[count:], jax.tree.leaves(batch), strict=True))
        return jnp.asarray(graph.run(nodes, values, graph.outputs)[0])

    return of_batch


def _unrolled(model: LayeredModel) -> Forward:
    """The model with its layers written out, each traced once: what passes through a scan cannot be followed."""
    jitted = model.wrap_layers(jax.jit)

    def forward(params: PyTree, batch: PyTree) -> PyTree:
        layers = params[LAYERS]
        if is_stacked(params):
            count = jax.tree.leaves(layers)[0].shape[0]
            layers = [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count)]
        return jitted.apply(params | {LAYERS: layers}, batch)

    return forward
