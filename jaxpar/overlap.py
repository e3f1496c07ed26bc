"""Gradients reduced over the replicas layer by layer, during the backward pass of earlier layers.

    all microbatches but the last   gradients are added on each replica
    last microbatch, layer L        backward; reduction of L's gradients, including those of earlier microbatches
                     layer L-1      backward at the same time; reduction
                     ...
    at the end                      reduction of the gradients of outer, and of the loss

The reduction is an all-reduce, with ZeRO 1 and 2 a reduce-scatter of each gradient that is sharded over ``data``. At level 2
every microbatch reduce-scatters the gradients of stacked layers, layer by layer, and their sums are sharded.

This is for one stage. A pipeline reduces its layers in its last tick (``pipeline/layer_loop.py``).

The traffic equals that of reductions at the end. It saves time if collectives overlap with computation: on GPUs, with the
XLA flags that ``jaxpar.initialize`` sets.

Reference: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB), section 3.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.remat import apply_remat
from jaxpar.data_parallel import accumulate
from jaxpar.dtypes import widen
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers
from jaxpar.loss_sums import sums_of
from jaxpar.zero import ZeroCuts, reduce_and_cut, reduce_rest


def accumulate_overlapping(
    model: LayeredModel,
    loss: Callable[[PyTree, PyTree], tuple],
    num_microbatches: int,
    remat: bool | Callable[..., bool],
    sharding: Callable[[PyTree], Any],
    traced_loss: Callable[[PyTree, PyTree], Any],
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Returns ``(params, batch) -> (loss, gradients)`` for one stage, from arguments that are already checked.

    Args:
        model: The model.
        loss: Its loss.
        num_microbatches: The number of microbatches of each replica.
        remat: As for ``value_and_grad``.
        sharding: ``params -> StepSharding``.
        traced_loss: ``(params, batch) -> TracedLoss``.
    """

    def run(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        own = sharding(params)
        reducing = _with_reducing_layers(model.wrap_layers(apply_remat(remat, own.layer_shards)), own.cuts, params)

        def own_sums(params: PyTree, batch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            def one_microbatch(microbatch: PyTree, earlier: PyTree | None = None) -> tuple[PyTree, PyTree]:
                def loss_sum_of(outer: PyTree, totals: PyTree) -> tuple[jax.Array, list]:
                    layers = _beside(params[LAYERS], earlier and earlier[LAYERS], totals)
                    return sums_of(loss, reducing.apply({OUTER: outer, LAYERS: layers}, microbatch), microbatch)

                @fold_transposes
                def differentiate(outer: PyTree, totals: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
                    loss_sum, vjp, further = jax.vjp(loss_sum_of, outer, totals, has_aux=True)
                    return (loss_sum, further), vjp(jnp.reciprocal(total_weight).astype(loss_sum.dtype))

                totals = _zeros(own.cuts, params, earlier)[LAYERS]
                loss_sums, (of_outer, of_layers) = differentiate(params[OUTER], totals, total_weight)
                return loss_sums, {OUTER: of_outer, LAYERS: of_layers}

            cut = jax.tree.leaves(batch)[0].shape[0] // num_microbatches * (num_microbatches - 1)
            first, last = (jax.tree.map(lambda a, part=part: a[part], batch) for part in (slice(cut), slice(cut, None)))
            if num_microbatches == 1:
                return one_microbatch(last, _zeros(own.cuts, params))
            earlier_loss, earlier = accumulate(one_microbatch, first, num_microbatches - 1)
            # Otherwise XLA may run the last forward pass first, and keep its residuals beside those of the loop.
            last, earlier_loss = jax.lax.optimization_barrier((last, earlier_loss))
            loss_sums, grads = one_microbatch(last, earlier)
            added = lambda earlier, own: jax.tree.map(lambda e, g: e + g.astype(e.dtype), earlier, own)
            return added(earlier_loss, loss_sums), grads | {OUTER: added(earlier[OUTER], grads[OUTER])}

        sums = lambda *given: reduce_rest(*own_sums(*given), own.grad_cuts)
        return own.over_replicas(sums, params, batch, traced_loss(params, batch))

    return run


def _with_reducing_layers(model: LayeredModel, cuts: ZeroCuts, params: PyTree) -> LayeredModel:
    if is_stacked(params):
        return model.wrap_layers(partial(reduce_in_backward, cuts=cuts.of_layer(0)))
    layers = model.layers(num_layers(params))
    reducing = [reduce_in_backward(layer, cuts.of_layer(index)) for index, layer in enumerate(layers)]
    return LayeredModel(model.embed, reducing, model.head)


def _beside(layers: PyTree, earlier: PyTree | None, totals: PyTree) -> PyTree:
    """Returns layers whose params stand beside the other inputs of ``reduce_in_backward``."""
    beside = lambda p, e, t: {"params": p, "earlier": e, "total": t}
    if isinstance(layers, list):
        return [beside(*each) for each in zip(layers, earlier or [None] * len(layers), totals, strict=True)]
    return beside(layers, earlier, totals)


def _zeros(cuts: ZeroCuts, params: PyTree, earlier: PyTree | None = None) -> PyTree:
    """Returns zeros in the shapes and dtypes of the results of ``_reduced``."""
    like = jax.eval_shape(partial(_reduced, cuts), params, earlier)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


def reduce_in_backward(layer: Callable[[PyTree, PyTree], PyTree], cuts: ZeroCuts) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a layer whose vjp reduces its gradients over the replicas, before earlier layers run backward.

    Its params are ``{"params": ..., "earlier": ..., "total": ...}``. ``earlier`` is the sum of the gradients of earlier
    microbatches, to which its own are added before the reduction, or None: they are then returned as they are added.
    ``total`` is not read; its cotangent is the result, which with ZeRO has other shapes than the params.

    **Collectives**: in its backward pass one all-reduce over ``data``, with ZeRO also a reduce-scatter for each gradient that
    is sharded.
    """

    @jax.custom_vjp
    def params_of(given: dict[str, PyTree]) -> PyTree:
        return given["params"]

    def backward(earlier: PyTree | None, grads: PyTree) -> tuple[dict[str, PyTree]]:
        total = _reduced(cuts, {LAYERS: grads}, None if earlier is None else {LAYERS: earlier})[LAYERS]
        return ({"params": None, "earlier": None, "total": total},)  # None: not differentiated

    params_of.defvjp(lambda given: (given["params"], given["earlier"]), backward)
    return lambda given, x: layer(params_of(given), x)


def _reduced(cuts: ZeroCuts, grads: PyTree, earlier: PyTree | None) -> PyTree:
    """Returns gradients as they are added over microbatches, or with the sum of earlier ones, their total over the replicas."""
    own = widen(cuts.scatter_layers(grads))
    if earlier is None:
        return own
    return reduce_and_cut(None, jax.tree.map(jnp.add, earlier, own), cuts)[1]
