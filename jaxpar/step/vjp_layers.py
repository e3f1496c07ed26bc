"""Layers whose vjp adds or reduces their gradients, with one stage.

At ZeRO 3 a layer gathers its params, and its vjp reduce-scatters their gradients (``gathering_layers``).

With ``overlap_grad_reduce`` gradients are reduced during the backward pass of earlier layers (``ReducingLayers``):

    all microbatches but the last   gradients are added on each replica, at level 2 their shards
    last microbatch, layer L        backward; reduction of L's gradients, including those of earlier microbatches
                     layer L-1      backward at the same time; reduction
                     ...
    at the end                      reduction of the gradients of outer, unless they are shards, and of the loss

The traffic equals that without it. It saves time if collectives overlap with computation: on GPUs, with the XLA
flags that ``jaxpar.initialize`` sets (Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
VLDB, section 3.2). A pipeline of several stages does not: its gradients are complete in the last tick alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.dtypes import widen
from jaxpar.layered_model import LAYERS, LayeredModel, is_stacked, num_layers
from jaxpar.trainable import is_frozen
from jaxpar.zero import Zero, ZeroShard, map_leaves

Layer = Callable[[PyTree, PyTree], PyTree]


# -- params that are gathered ------------------------------------------------------------------------------------------


def gathering_layers(model: LayeredModel, zero: Zero, *, again: bool) -> LayeredModel:
    """Returns the model whose stacked layers fetch their params, and whose vjps add their gradients; for ``wide_shards``.

    Args:
        model: The model.
        zero: That of its params.
        again: Whether to wrap layers so that the backward pass gathers params again. ``min_cut_remat`` needs no wrapping, since
            it never stores values that depend on params alone.
    """
    shards = zero[LAYERS].of_params
    gather = partial(_gather_and_scatter, zero.reduce_dtype)

    def wrap(layer: Layer) -> Layer:
        def gathered(params: PyTree, x: PyTree) -> PyTree:
            whole = map_leaves(gather, shards, params)
            return layer(whole, x)

        if not again:
            return gathered
        return jax.checkpoint(gathered, policy=_store_all_but_gathered)

    return model.wrap_layers(wrap)


def wide_shards(params: PyTree, zero: Zero) -> PyTree:
    """Returns params with shards of stacked layers in float32 or wider, for ``gathering_layers``; frozen ones as they are.

    Their gradients then are too, and are not rounded before they are added over microbatches.
    """

    def of(param: Any, shard: Any) -> Any:
        is_wide = not is_frozen(param) and shard.is_layer and shard.is_param
        return widen(param) if is_wide else param

    return jax.tree.map(of, params, zero.shards, is_leaf=is_frozen)


def _gather_and_scatter(
    reduce_dtype: Any,
    shard: ZeroShard,
    param: jax.Array,
) -> jax.Array:
    """Returns the whole param in its own dtype; its vjp returns the shard of the gradient in the dtype of the given one."""
    if not shard.is_param:
        return param

    @jax.custom_vjp
    def gather(param: jax.Array) -> jax.Array:
        return shard.gather(param.astype(shard.dtype))

    def backward(like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
        scattered = shard.scatter(grad, reduce_dtype)
        return (scattered.astype(like.dtype),)

    def forward(param: jax.Array) -> tuple[jax.Array, jax.Array]:
        like = jnp.zeros((), param.dtype)
        return gather(param), like

    gather.defvjp(forward, backward)
    return gather(param)


def _store_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A ``jax.checkpoint`` policy that recomputes what is gathered, by a shard_map beside ``tensor``."""
    return primitive.name not in ("all_gather", "shard_map")


# -- gradients that are reduced ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReducingLayers:
    """A model whose layers reduce their gradients in their backward pass.

    Attributes:
        model: The model.
        zero: That of its params.
        params: The params.
    """

    model: LayeredModel
    zero: Zero
    params: PyTree

    def zeros(self, earlier: PyTree | None) -> PyTree:
        """Returns zeros like the gradients of layers, reduced with those of ``earlier`` microbatches or, without, added."""
        result = partial(reduced_or_added, self.zero[LAYERS])
        shapes = jax.eval_shape(result, self.params[LAYERS], earlier)
        zeros = lambda like: jnp.zeros(like.shape, like.dtype)
        return jax.tree.map(zeros, shapes)

    def outputs(self, earlier: PyTree | None, trained: PyTree, microbatch: PyTree) -> PyTree:
        """Returns the outputs of the model; the gradient of ``trained["layers"]``, any zeros, is the result of its layers."""
        layers = self._beside_sums(earlier, trained[LAYERS])
        params = trained | {LAYERS: layers}
        return self._reducing.apply(params, microbatch)

    @cached_property
    def _reducing(self) -> LayeredModel:
        of_layers = self.zero[LAYERS]
        if is_stacked(self.params):
            return self.model.wrap_layers(partial(reduce_in_backward, zero=of_layers))
        layers = enumerate(self.model.layers(num_layers(self.params)))
        reducing = [reduce_in_backward(layer, of_layers[i]) for i, layer in layers]
        return LayeredModel(self.model.embed, reducing, self.model.head)

    def _beside_sums(self, earlier: PyTree | None, totals: PyTree) -> PyTree:
        """Returns layers whose params are beside the other inputs of ``reduce_in_backward``."""
        layers = self.params[LAYERS]
        if not isinstance(layers, list):
            return _beside(layers, earlier, totals)
        sums = earlier or [None] * len(layers)
        each = zip(layers, sums, totals, strict=True)
        return [_beside(*one) for one in each]


def _beside(params: PyTree, earlier: PyTree | None, total: PyTree) -> dict[str, PyTree]:
    return {"params": params, "earlier": earlier, "total": total}


def reduce_in_backward(layer: Layer, zero: Zero) -> Layer:
    """Returns a layer whose vjp reduces its gradients over the replicas, before earlier layers run backward.

    Its params are ``{"params": ..., "earlier": ..., "total": ...}``. ``earlier`` is the sum of the gradients of earlier
    microbatches, to which its own are added before the reduction, or None: they are then returned as they are added.
    ``total`` is not read; its cotangent is the result, which with ZeRO has other shapes than the params.

    **Collectives**: in its backward pass one all-reduce over the replicas, with ZeRO also a reduce-scatter for each gradient
    that is sharded.
    """

    @jax.custom_vjp
    def params_of(inputs: dict[str, PyTree]) -> PyTree:
        return inputs["params"]

    def forward(inputs: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        return inputs["params"], inputs["earlier"]

    def backward(earlier: PyTree | None, grads: PyTree) -> tuple[dict[str, PyTree]]:
        total = reduced_or_added(zero, grads, earlier)
        return (_beside(None, None, total),)  # None: not differentiated

    params_of.defvjp(forward, backward)
    return lambda inputs, x: layer(params_of(inputs), x)


def reduced_or_added(zero: Zero, grads: PyTree, earlier: PyTree | None) -> PyTree:
    """Returns gradients as they are added over microbatches, or with the sum of earlier ones, their total over the replicas."""
    grads = widen(zero.add(grads))
    if earlier is None:
        return grads
    sums = jax.tree.map(jnp.add, earlier, grads)
    _, total = zero.finish(None, sums)
    return total
