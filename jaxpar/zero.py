"""ZeRO: shards optimizer state, gradients and params over the ``data`` axis (Rajbhandari et al. 2020, arXiv 1910.02054).

    level   sharded over data    collectives over data
    0       nothing              gradients: one all-reduce per step
    1       optimizer state      gradients: one reduce-scatter per step; params: one all-gather, after the update
    2       and gradients        layers: a reduce-scatter whenever gradients are computed, so sums are always sharded
    3       and params           layers: an all-gather before each use, a reduce-scatter in each backward pass; outer once

A param is sharded along its largest dim that no other axis shards and that ``data`` divides; a param without one is replicated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.data_parallel import reduce_gradients
from jaxpar.dtypes import from_floats, to_floats, widen
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel
from jaxpar.mesh import DATA, TENSOR
from jaxpar.shard_map import on_tensor_shards, tensor_part
from jaxpar.trainable import is_frozen, only_trained

WHOLE = -1


@dataclass(frozen=True)
class ZeroCuts:
    """Which dim of each param is sharded over ``data``.

    Attributes:
        level: The ZeRO level.
        dims: For each param the dim that is sharded, -1 for a param that is replicated.
        tensor: For each param its PartitionSpec over ``tensor``.
        dtypes: For each param its dtype.
        layered: Whether the params hold stacked layers, which are gathered and scattered one at a time.
        reduce_dtype: The dtype in which gradients are reduced over ``data``; None: float32 or wider.
    """

    level: int
    dims: PyTree
    tensor: PyTree
    dtypes: PyTree
    layered: bool
    reduce_dtype: Any = None

    def of_trained(self) -> "ZeroCuts":
        """Returns the cuts of the gradients, with None for frozen params."""
        return replace(self, **{name: only_trained(getattr(self, name)) for name in ("dims", "tensor", "dtypes")})

    def specs(self, specs: PyTree, *, from_level: int) -> PyTree:
        """Returns ``specs`` with ``data`` on the sharded dims, if this level is ``from_level`` or higher."""
        return jax.tree.map(_with_data, specs, self.dims) if self.level >= from_level else specs

    def gather_outer(self, params: PyTree) -> PyTree:
        """Returns params with all but stacked layers gathered, at level 3; a step does so once for all microbatches."""
        if self.level < 3:
            return params
        if not self.layered:
            return self._gather(params, self.dims, self.tensor, self.dtypes)
        outer = self._gather(params[OUTER], self.dims[OUTER], self.tensor[OUTER], self.dtypes[OUTER])
        return params | {OUTER: outer}

    def widen_layers(self, params: PyTree) -> PyTree:
        """Returns params with shards of stacked layers in float32 or wider, at level 3, for ``gather_layer``.

        Their gradients then are too, before they are added over microbatches. Shards of frozen params keep their dtype.
        """
        if self.level < 3 or not self.layered:
            return params
        widened = lambda shard, dim: shard if is_frozen(shard) or dim == WHOLE else widen(shard)
        return params | {LAYERS: jax.tree.map(widened, params[LAYERS], self.dims[LAYERS], is_leaf=is_frozen)}

    def gather_layer(self, layer_params: PyTree) -> PyTree:
        """Returns the gathered params of one layer, at level 3; the transpose reduce-scatters their gradients."""
        return self._gather(layer_params, *self._of_one_layer, self.dtypes[LAYERS]) if self.level == 3 else layer_params

    def gather_shards(self, layer_params: PyTree) -> PyTree:
        """Returns the gathered params of one layer, at level 3, each in the dtype that is given: they may be cast already.

        It is not to be differentiated: a pipeline computes gradients of gathered params and reduces them by ``scatter_layer``.
        """
        return jax.tree.map(_all_gather, layer_params, *self._of_one_layer) if self.level == 3 else layer_params

    def scatter_layer(self, layer_grads: PyTree) -> PyTree:
        """Returns the gradients of one layer as a pipeline adds them: at levels 2 and 3 reduce-scattered where sharded."""
        return self.scatter(layer_grads, *self._of_one_layer) if self.level >= 2 else layer_grads

    def scatter_layers(self, grads: PyTree) -> PyTree:
        """Returns the gradients of all params, those of stacked layers reduce-scattered where sharded, at level 2."""
        if self.level != 2 or not self.layered:
            return grads
        return grads | {LAYERS: self.scatter(grads[LAYERS], self.dims[LAYERS], self.tensor[LAYERS])}

    def _gather(self, params: PyTree, dims: PyTree, tensor: PyTree, dtypes: PyTree) -> PyTree:
        return jax.tree.map(partial(_gather, self.reduce_dtype), params, dims, tensor, dtypes)

    def scatter(self, grads: PyTree, dims: PyTree, tensor: PyTree) -> PyTree:
        """Returns for gradients that are sharded this replica's shard of their sum over the replicas; the others unchanged.

        **Collectives**: a reduce-scatter over ``data`` for each gradient that is sharded.
        """
        return jax.tree.map(partial(_scatter, self.reduce_dtype), grads, dims, tensor)

    @property
    def _of_one_layer(self) -> tuple[PyTree, PyTree]:
        """``dims`` and ``tensor`` of layers without their leading dim."""
        dims = jax.tree.map(lambda dim: WHOLE if dim == WHOLE else dim - 1, self.dims[LAYERS])
        return dims, jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), self.tensor[LAYERS])

    def of_outer(self) -> "ZeroCuts":
        """Returns the cuts of a tree that holds "outer" alone."""
        return self._of(OUTER, self.dims[OUTER], self.tensor[OUTER], self.dtypes[OUTER], layered=False)

    def of_layers(self) -> "ZeroCuts":
        """Returns the cuts of a tree that holds stacked layers alone, under "layers"."""
        return self._of(LAYERS, self.dims[LAYERS], self.tensor[LAYERS], self.dtypes[LAYERS], layered=True)

    def of_layer(self, index: int) -> "ZeroCuts":
        """Returns the cuts of a tree that holds one layer alone, not stacked, under "layers"."""
        if self.layered:
            return self._of(LAYERS, *self._of_one_layer, self.dtypes[LAYERS], layered=True)
        dims, tensor, dtypes = (of[LAYERS][index] for of in (self.dims, self.tensor, self.dtypes))
        return self._of(LAYERS, dims, tensor, dtypes, layered=False)

    def _of(self, name: str, dims: PyTree, tensor: PyTree, dtypes: PyTree, *, layered: bool) -> "ZeroCuts":
        return replace(self, dims={name: dims}, tensor={name: tensor}, dtypes={name: dtypes}, layered=layered)

    def is_summed(self) -> PyTree:
        """Returns for each param whether its gradients are reduced over the replicas before the end of the step."""
        summed = jax.tree.map(lambda dim: False, self.dims)
        if self.level >= 2 and self.layered:
            summed |= {LAYERS: jax.tree.map(lambda dim: dim != WHOLE, self.dims[LAYERS])}
        return summed


def choose_cuts(
    level: int,
    params: PyTree,
    specs: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    layered: bool,
    reduce_dtype: Any = None,
) -> ZeroCuts:
    """Returns how a ZeRO level shards params.

    Args:
        level: 0 to 3.
        params: Arrays or ShapeDtypeStructs.
        specs: For each param a PartitionSpec; dims that it shards over other axes are not used.
        mesh: The mesh.
        layered: Whether the params hold stacked layers.
        reduce_dtype: The dtype in which gradients are reduced over ``data``; None: float32 or wider.
    """
    dims = jax.tree.map(lambda p, spec: _dim_to_cut(p.shape, spec, mesh) if level else WHOLE, params, specs)
    dtypes = jax.tree.map(lambda p: p.dtype, params)
    return ZeroCuts(level, dims, jax.tree.map(tensor_part, specs), dtypes, layered, reduce_dtype)


def cut_shardings(params: PyTree, shardings: PyTree) -> PyTree:
    """Returns shardings of optimizer state (ZeRO 1 to 3) or of params (ZeRO 3): ``shardings`` with ``data`` on a dim of each.

    Args:
        params: Arrays or ShapeDtypeStructs.
        shardings: Their NamedShardings without ZeRO.
    """

    def cut(param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        dim = _dim_to_cut(param.shape, sharding.spec, sharding.mesh)
        return NamedSharding(sharding.mesh, _with_data(sharding.spec, dim))

    return jax.tree.map(cut, params, shardings)


@partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3, 4))
def _gather(reduce_dtype: Any, param: jax.Array, dim: int, spec: PartitionSpec, dtype: Any) -> jax.Array:
    """Gathers a param in its dtype, of which a shard is wide, so that its gradient is not rounded before it is added.

    **Collectives**: an all-gather over ``data`` if it is sharded, a reduce-scatter backward.
    """
    return param if dim == WHOLE else _all_gather(param.astype(dtype), dim, spec)


def _all_gather(param: jax.Array, dim: int, spec: PartitionSpec) -> jax.Array:
    if dim == WHOLE:
        return param
    return on_tensor_shards(lambda p: jax.lax.all_gather(p, DATA, axis=dim, tiled=True), param, spec)


def _gather_backward(
    reduce_dtype: Any, dim: int, spec: PartitionSpec, dtype: Any, like: jax.Array, grad: jax.Array
) -> tuple[jax.Array]:
    return (_scatter(reduce_dtype, grad, dim, spec).astype(like.dtype),)


_gather.defvjp(lambda *args: (_gather(*args), jnp.zeros((), args[1].dtype)), _gather_backward)


def _scatter(reduce_dtype: Any, grad: jax.Array, dim: int, spec: PartitionSpec) -> jax.Array:
    if dim == WHOLE:
        return grad
    reduce = lambda g: jax.lax.psum_scatter(g, DATA, scatter_dimension=dim, tiled=True)
    if reduce_dtype is None:
        return on_tensor_shards(reduce, widen(grad), spec)
    return from_floats(on_tensor_shards(reduce, to_floats(grad, reduce_dtype), spec), grad)


def _dim_to_cut(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    free = {None} if mesh.shape[TENSOR] > 1 else {None, TENSOR}
    entries, data = (*spec, *(None,) * (len(shape) - len(spec))), mesh.shape[DATA]
    fitting = [dim for dim, size in enumerate(shape) if entries[dim] in free and size and size % data == 0]
    return max(fitting, key=lambda dim: shape[dim]) if fitting and data > 1 else WHOLE


def _with_data(spec: PartitionSpec, dim: int) -> PartitionSpec:
    if dim == WHOLE:
        return spec
    entries = [*spec, *(None,) * (dim + 1 - len(spec))]
    entries[dim] = DATA
    return PartitionSpec(*entries)


def reduce_rest(loss_sums: PyTree, grads: PyTree, cuts: ZeroCuts) -> tuple[PyTree, PyTree]:
    """Returns the loss and all gradients as ``reduce_and_cut`` does, for layers whose gradients are already so.

    **Collectives**: those of ``reduce_and_cut``, for ``outer`` alone.
    """
    loss_sums, outer = reduce_and_cut(loss_sums, {OUTER: grads[OUTER]}, cuts.of_outer())
    return loss_sums, grads | outer


def reduce_layers(layers: PyTree, cuts: ZeroCuts) -> PyTree:
    """Returns the gradients of some stacked layers as ``reduce_and_cut`` does.

    **Collectives**: those of ``reduce_and_cut``, for these layers alone.
    """
    return reduce_and_cut(None, {LAYERS: layers}, cuts.of_layers())[1][LAYERS]


def reduce_and_cut(loss_sums: PyTree, grads: PyTree, cuts: ZeroCuts) -> tuple[PyTree, PyTree]:
    """Returns the loss and gradients reduced over the replicas, each gradient sharded according to ``cuts``.

    Args:
        loss_sums: loss_sum and further sums, or None to reduce gradients alone.
        grads: The gradients.
        cuts: How they are sharded.

    **Collectives**: one all-reduce over ``data`` of the loss and the replicated gradients, and a reduce-scatter for each
    gradient that is sharded and not yet reduced.
    """
    leaves, treedef = jax.tree.flatten(grads)
    dims, summed, tensor = map(jax.tree.leaves, (cuts.dims, cuts.is_summed(), cuts.tensor))
    whole = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim == WHOLE]
    loss_sums, whole = _reduce_with_loss(loss_sums, whole, cuts)
    reduced = iter(whole)
    cut = [
        next(reduced) if dim == WHOLE else leaf if done else cuts.scatter(leaf, dim, spec)
        for leaf, dim, done, spec in zip(leaves, dims, summed, tensor, strict=True)
    ]
    return loss_sums, jax.tree.unflatten(treedef, cut)


def _reduce_with_loss(loss_sums: PyTree, grads: PyTree, cuts: ZeroCuts) -> tuple[PyTree, PyTree]:
    if cuts.reduce_dtype is None:
        return reduce_gradients((loss_sums, grads))
    return reduce_gradients(loss_sums), reduce_gradients(grads, cuts.reduce_dtype)


def gathering_layers(model: LayeredModel, cuts: ZeroCuts, *, again: bool) -> LayeredModel:
    """Returns the model whose layers gather their params, at ZeRO 3.

    Args:
        model: The model.
        cuts: How the params are sharded.
        again: Whether to wrap layers so that the backward pass gathers params again. ``min_cut_remat`` needs no wrapping, since
            it never stores values that depend on params alone.
    """
    if cuts.level < 3 or not cuts.layered:
        return model

    def wrap(layer: Callable) -> Callable:
        gathered = lambda params, x: layer(cuts.gather_layer(params), x)
        return jax.checkpoint(gathered, policy=_keep_all_but_gathered) if again else gathered

    return model.wrap_layers(wrap)


def _keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A ``jax.checkpoint`` policy that recomputes what ``gather_layer`` returns, which is a shard_map beside ``tensor``."""
    return primitive.name not in ("all_gather", "shard_map")
