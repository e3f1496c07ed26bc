"""Gradients summed over the replicas layer by layer, inside the backward pass, while layers below still run.

    microbatches but the last    their gradients are added up, and stay
    the last, layer L            backward; all-reduce of L's gradients, with what earlier microbatches gave
              layer L-1          backward meanwhile; all-reduce
              ...
    at the end                   all-reduce of what belongs to no layer, and of the loss

As many bytes travel as in one reduction at the end. In time it pays where collectives run beside computation: on GPUs, with
the XLA flags that ``jaxpar.initialize`` sets.

Reference: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB), section 3.2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.backward.storing import storing_by
from jaxpar.data_parallel import accumulate, reduce_in_backward, reduce_rest
from jaxpar.jaxprs import with_direct_products
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel


def accumulate_overlapping(
    model: LayeredModel,
    loss: Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]],
    num_microbatches: int,
    remat: bool | Callable[..., bool],
    places: Callable[[PyTree], Any],
) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """Returns ``(params, batch) -> (loss, gradients)`` for one stage, all arguments being checked.

    Args:
        model: The model.
        loss: Its loss.
        num_microbatches: Parts of a replica's rows.
        remat: As for ``value_and_grad``.
        places: Gives for params where they lie, with ``over_replicas``.
    """
    plain = model.wrap_layers(storing_by(remat))
    reducing = plain.wrap_layers(reduce_in_backward)

    def run(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        own = places(params)

        def sums(params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
            def one_microbatch(
                microbatch: PyTree, earlier: PyTree | None = None
            ) -> tuple[jax.Array, jax.Array, PyTree]:
                def loss_and_weight(params: PyTree) -> tuple[jax.Array, jax.Array]:
                    used, of = (plain, params) if earlier is None else (reducing, _beside(params, earlier))
                    return loss(used.apply(of, microbatch), microbatch)

                differentiate = with_direct_products(jax.value_and_grad(loss_and_weight, has_aux=True))
                (loss_sum, weight_sum), grads = differentiate(params)
                return loss_sum, weight_sum, grads

            cut = jax.tree.leaves(batch)[0].shape[0] // num_microbatches * (num_microbatches - 1)
            first, last = (jax.tree.map(lambda a, part=part: a[part], batch) for part in (slice(cut), slice(cut, None)))
            if num_microbatches == 1:
                zeros = jax.tree.map(jnp.zeros_like, params)
                return one_microbatch(last, zeros)
            earlier = accumulate(one_microbatch, first, num_microbatches - 1)
            loss_sum, weight_sum, grads = one_microbatch(last, earlier[2])
            outer = jax.tree.map(jnp.add, earlier[2][OUTER], grads[OUTER])
            return earlier[0] + loss_sum, earlier[1] + weight_sum, grads | {OUTER: outer}

        return own.over_replicas(sums, params, batch, reduce_rest)

    return run


def _beside(params: PyTree, earlier: PyTree) -> PyTree:
    """Returns params whose layers hold, beside their own, what ``reduce_in_backward`` is to add to their gradients."""
    beside = lambda p, e: {"params": p, "earlier": e}
    layers, of_layers = params[LAYERS], earlier[LAYERS]
    if isinstance(layers, list):
        return params | {LAYERS: [beside(p, e) for p, e in zip(layers, of_layers, strict=True)]}
    return params | {LAYERS: beside(layers, of_layers)}
