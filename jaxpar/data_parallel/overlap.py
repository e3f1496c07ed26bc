"""Gradients reduced over the replicas layer by layer, during the backward pass of earlier layers.

    all microbatches but the last   gradients are added on each replica
    last microbatch, layer L        backward; all-reduce of L's gradients, including those of earlier microbatches
                     layer L-1      backward at the same time; all-reduce
                     ...
    at the end                      all-reduce of the gradients of outer, and of the loss

The traffic equals that of one reduction at the end. It saves time if collectives overlap with computation: on GPUs, with the
XLA flags that ``jaxpar.initialize`` sets.

Reference: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB), section 3.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.backward.fold_transposes import fold_transposes
from jaxpar.backward.min_cut_remat import apply_remat
from jaxpar.data_parallel import accumulate, reduce_gradients
from jaxpar.data_parallel.zero import reduce_rest
from jaxpar.dtypes import widen
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel


def accumulate_overlapping(
    model: LayeredModel,
    loss: Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]],
    num_microbatches: int,
    remat: bool | Callable[..., bool],
    sharding: Callable[[PyTree], Any],
    traced_loss: Callable[[PyTree, PyTree], Any],
) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """Returns ``(params, batch) -> (loss, gradients)`` for one stage, from arguments that are already checked.

    Args:
        model: The model.
        loss: Its loss.
        num_microbatches: The number of microbatches of each replica.
        remat: As for ``value_and_grad``.
        sharding: ``params -> StepSharding``.
        traced_loss: ``(params, batch) -> TracedLoss``.
    """

    def run(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        own = sharding(params)
        plain = model.wrap_layers(apply_remat(remat, own.layer_shards))
        reducing = plain.wrap_layers(partial(reduce_in_backward, dtype=own.cuts.reduce_dtype))

        def sums(params: PyTree, batch: PyTree, total_weight: jax.Array) -> tuple[jax.Array, PyTree]:
            def one_microbatch(microbatch: PyTree, earlier: PyTree | None = None) -> tuple[jax.Array, PyTree]:
                def loss_sum_of(params: PyTree) -> jax.Array:
                    used, of = (plain, params) if earlier is None else (reducing, _beside(params, earlier))
                    return loss(used.apply(of, microbatch), microbatch)[0]

                @fold_transposes
                def differentiate(params: PyTree, total_weight: jax.Array) -> tuple[jax.Array, PyTree]:
                    loss_sum, vjp = jax.vjp(loss_sum_of, params)
                    return loss_sum, vjp(jnp.reciprocal(total_weight).astype(loss_sum.dtype))[0]

                return differentiate(params, total_weight)

            cut = jax.tree.leaves(batch)[0].shape[0] // num_microbatches * (num_microbatches - 1)
            first, last = (jax.tree.map(lambda a, part=part: a[part], batch) for part in (slice(cut), slice(cut, None)))
            if num_microbatches == 1:
                return one_microbatch(last, jax.tree.map(jnp.zeros_like, widen(params)))
            earlier_loss, earlier = accumulate(one_microbatch, first, num_microbatches - 1)
            loss_sum, grads = one_microbatch(last, earlier)
            outer = jax.tree.map(lambda e, g: e + g.astype(e.dtype), earlier[OUTER], grads[OUTER])
            return earlier_loss + loss_sum.astype(earlier_loss.dtype), grads | {OUTER: outer}

        return own.over_replicas(sums, params, batch, traced_loss(params, batch), reduce_rest)

    return run


def _beside(params: PyTree, earlier: PyTree) -> PyTree:
    """Returns params whose layers also hold the earlier gradients that ``reduce_in_backward`` adds to theirs."""
    beside = lambda p, e: {"params": p, "earlier": e}
    layers, of_layers = params[LAYERS], earlier[LAYERS]
    if isinstance(layers, list):
        return params | {LAYERS: [beside(p, e) for p, e in zip(layers, of_layers, strict=True)]}
    return params | {LAYERS: beside(layers, of_layers)}


def reduce_in_backward(
    layer: Callable[[PyTree, PyTree], PyTree], dtype: Any = None
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a layer whose vjp reduces its gradients over the replicas, before earlier layers run backward.

    Its params are ``{"params": ..., "earlier": ...}``, where ``earlier`` is the sum of the gradients of earlier microbatches.
    Its own are added to them, in float32 or wider, before the reduction.

    **Collectives**: one all-reduce over ``data`` in its backward pass.
    """
    return lambda given, x: layer(_summed_in_backward(dtype, given["params"], given["earlier"]), x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_in_backward(dtype: Any, params: PyTree, earlier: PyTree) -> PyTree:
    return params


def _sum_backward(dtype: Any, earlier: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
    total = reduce_gradients(jax.tree.map(lambda e, g: e + g.astype(e.dtype), earlier, grads), dtype)
    return jax.tree.map(lambda t, g: t.astype(g.dtype), total, grads), jax.tree.map(jnp.zeros_like, earlier)


_summed_in_backward.defvjp(lambda dtype, params, earlier: (params, earlier), _sum_backward)
