"""All of data parallelism: a batch to the ``data`` axis, gradients summed over microbatches and then over replicas; ZeRO.

    batch [16, ...] on data=2, two microbatches          replica 0: rows 0-7:  microbatch 0 = rows 0-3,  1 = rows 4-7
                                                         replica 1: rows 8-15: microbatch 0 = rows 8-11, 1 = rows 12-15

A replica cuts its own rows, so no row moves. It adds gradients over its microbatches, and only the total crosses the
``data`` axis: one all-reduce a step, which also carries the loss. The total weight of the batch, one number, crosses it first.

Losses, weights and gradients are added and reduced in float32 at least, whatever the dtype of the params.

ZeRO cuts over ``data`` what each replica would otherwise hold whole (Rajbhandari et al. 2020, arXiv 1910.02054):

    level   cut over data        what crosses the data axis
    0       nothing              gradients: one all-reduce a step
    1       optimizer state      gradients: one reduce-scatter a step; params: one all-gather, after the update
    2       and gradients        those of layers: a reduce-scatter each time they are made, so that no sum is ever whole
    3       and params           layers: an all-gather each time they run and a reduce-scatter each time back; outer once

A param is cut along its largest dim that no other axis cuts and that ``data`` divides; one that has none stays whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.dtypes import wide_dtype, widen
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.manual import on_tensor_shards, tensor_part
from jaxpar.mesh import DATA, TENSOR, check_mesh
from jaxpar.sharding import path_string, shard

WHOLE = -1


def shard_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Returns a host batch, the same on every process, as global arrays whose rows are split over ``data``.

    Args:
        batch: Arrays with a common leading dim, the rows.
        mesh: A mesh from ``make_mesh``.

    Raises:
        ValueError: A leaf without rows, unequal numbers of rows, or rows that ``data`` does not divide.
    """
    check_mesh(mesh)
    check_batch(batch, mesh.shape[DATA])
    return shard(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def check_batch(batch: PyTree, data: int, num_microbatches: int = 1) -> int:
    """Returns the number of rows of a batch; raises unless replicas and microbatches cut it in equal parts."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    rows = {path_string(path) or "batch": jnp.shape(leaf)[:1] for path, leaf in leaves}
    whole = sorted(path for path, dim in rows.items() if not dim)
    if whole or not rows:
        raise ValueError(
            f"every array of a batch must have a leading dim, its rows; got none for {whole or 'an empty batch'}. "
            "Repeat a value for each row; for a PRNG key use jax.random.split(key, batch_size)."
        )
    if len(set(rows.values())) > 1:
        sizes = {path: dim[0] for path, dim in rows.items()}
        raise ValueError(
            f"all arrays of a batch must have the same number of rows; got {sizes}. Cut or pad them alike."
        )
    (num_rows,) = next(iter(rows.values()))
    parts = data * num_microbatches
    if num_rows == 0 or num_rows % parts:
        up = max(-(-num_rows // parts), 1) * parts
        raise ValueError(
            "the rows of a batch must be divisible by the data axis times num_microbatches; got "
            f"{num_rows} rows, data={data}, num_microbatches={num_microbatches}. "
            f"Use {up} rows (jaxpar.batches.pad_rows adds rows of weight 0), or other parts."
        )
    return num_rows


def split_microbatches(batch: PyTree, num_microbatches: int) -> PyTree:
    """Returns one replica's rows ``[rows, ...]`` as ``[num_microbatches, rows / num_microbatches, ...]``."""
    return jax.tree.map(lambda a: a.reshape(num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:]), batch)


def accumulate(part: Callable[[PyTree], Any], batch: PyTree, num_microbatches: int) -> Any:
    """Returns the sum of ``part(microbatch)`` over the microbatches of one replica, in float32 at least.

    Args:
        part: A function of one microbatch that gives a tree of floats.
        batch: One replica's rows.
        num_microbatches: How often the scan runs ``part``; with 1 there is no scan and no sum.
    """
    if num_microbatches == 1:
        return widen(part(batch))
    microbatches = split_microbatches(batch, num_microbatches)
    shapes = jax.eval_shape(part, jax.tree.map(lambda a: a[0], microbatches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, wide_dtype(s.dtype)), shapes)

    def add(total: Any, microbatch: PyTree) -> tuple[Any, None]:
        return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part(microbatch)), None

    return jax.lax.scan(add, zeros, microbatches)[0]


@dataclass(frozen=True)
class ZeroCuts:
    """Which dim of each param lies over ``data``.

    Attributes:
        level: The ZeRO level.
        dims: For each param the dim that is cut, -1 for one that stays whole.
        tensor: For each param its cuts over ``tensor``.
        layered: Whether the params hold stacked layers, which are gathered and scattered one at a time.
        reduce_dtype: The dtype in which gradients are reduced over ``data``; None: float32 at least.
    """

    level: int
    dims: PyTree
    tensor: PyTree
    layered: bool
    reduce_dtype: Any = None

    def specs(self, specs: PyTree, *, from_level: int) -> PyTree:
        """Returns ``specs`` with ``data`` on the dims that are cut, if this level is ``from_level`` or more."""
        return jax.tree.map(_with_data, specs, self.dims) if self.level >= from_level else specs

    def gather_outer(self, params: PyTree) -> PyTree:
        """Returns params as a step uses them: at level 3 all but the layers are gathered, once for all microbatches."""
        if self.level < 3:
            return params
        if not self.layered:
            return self._gather(params, self.dims, self.tensor)
        return params | {OUTER: self._gather(params[OUTER], self.dims[OUTER], self.tensor[OUTER])}

    def gather_layer(self, layer_params: PyTree) -> PyTree:
        """Returns the params of one layer whole, at level 3; its transpose sums their gradients and cuts them again."""
        return self._gather(layer_params, *self._of_one_layer) if self.level == 3 else layer_params

    def scatter_layer(self, layer_grads: PyTree) -> PyTree:
        """Returns gradients of one layer as level 2 adds them up: those that are cut summed over the replicas, and cut."""
        return self.scatter(layer_grads, *self._of_one_layer) if self.level == 2 else layer_grads

    def scatter_layers(self, grads: PyTree) -> PyTree:
        """Returns gradients of all params with those of layers as level 2 adds them up."""
        if self.level != 2 or not self.layered:
            return grads
        return grads | {LAYERS: self.scatter(grads[LAYERS], self.dims[LAYERS], self.tensor[LAYERS])}

    def _gather(self, params: PyTree, dims: PyTree, tensor: PyTree) -> PyTree:
        return jax.tree.map(partial(_gather, self.reduce_dtype), params, dims, tensor)

    def scatter(self, grads: PyTree, dims: PyTree, tensor: PyTree) -> PyTree:
        """Returns gradients that are cut as their sum over the replicas, this replica's part of it; the others as they are.

        **Collectives**: a reduce-scatter over ``data`` for each that is cut.
        """
        return jax.tree.map(partial(_scatter, self.reduce_dtype), grads, dims, tensor)

    @property
    def _of_one_layer(self) -> tuple[PyTree, PyTree]:
        """Dims and cuts over ``tensor`` without the leading dim of stacked layers."""
        dims = jax.tree.map(lambda dim: WHOLE if dim == WHOLE else dim - 1, self.dims[LAYERS])
        return dims, jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), self.tensor[LAYERS])

    def is_summed(self) -> PyTree:
        """Returns for each param whether its gradients are summed over the replicas before the step's end."""
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
    """Returns the cuts of a ZeRO level.

    Args:
        level: 0 to 3.
        params: Arrays or ShapeDtypeStructs.
        specs: For each param a PartitionSpec, in which the dims that other axes cut are taken.
        mesh: The mesh.
        layered: Whether the params hold stacked layers.
        reduce_dtype: The dtype in which gradients are reduced over ``data``; None: float32 at least.
    """
    dims = jax.tree.map(lambda p, spec: _dim_to_cut(p.shape, spec, mesh) if level else WHOLE, params, specs)
    return ZeroCuts(level, dims, jax.tree.map(tensor_part, specs), layered, reduce_dtype)


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3))
def _gather(reduce_dtype: Any, param: jax.Array, dim: int, spec: PartitionSpec) -> jax.Array:
    """A param whole from its cuts. **Collectives**: an all-gather over ``data`` if it is cut, a reduce-scatter backward."""
    if dim == WHOLE:
        return param
    return on_tensor_shards(lambda p: jax.lax.all_gather(p, DATA, axis=dim, tiled=True), param, spec)


def _gather_backward(reduce_dtype: Any, dim: int, spec: PartitionSpec, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (_scatter(reduce_dtype, grad, dim, spec).astype(grad.dtype),)


_gather.defvjp(lambda *args: (_gather(*args), None), _gather_backward)


def _scatter(reduce_dtype: Any, grad: jax.Array, dim: int, spec: PartitionSpec) -> jax.Array:
    if dim == WHOLE:
        return grad
    reduce = lambda g: jax.lax.psum_scatter(g, DATA, scatter_dimension=dim, tiled=True)
    return widen(on_tensor_shards(reduce, grad.astype(reduce_dtype or wide_dtype(grad.dtype)), spec))


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


def reduce_gradients(sums: PyTree, dtype: Any = None) -> PyTree:
    """Returns ``sums`` added over the replicas, in float32 at least. Call it once a step, on all that must be reduced.

    Args:
        sums: A tree of floats.
        dtype: The dtype in which they travel and are added, where it is not that of the result.

    **Collectives**: one all-reduce over ``data``, of all leaves together.
    """
    if jax.lax.axis_size(DATA) == 1:  # XLA refuses a sum over an axis of one beside an automatic axis
        return widen(sums)
    sent = jax.tree.map(lambda a: a.astype(dtype or wide_dtype(a.dtype)), sums)
    return widen(jax.lax.psum(sent, DATA))


def reduce_in_backward(
    layer: Callable[[PyTree, PyTree], PyTree], dtype: Any = None
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a layer whose gradients come summed over the replicas, at once, while layers before it still run backward.

    It takes ``{"params": ..., "earlier": ...}`` for the params: what microbatches before this one gave, to be added first.

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


def reduce_rest(loss_sum: jax.Array, grads: PyTree, cuts: ZeroCuts) -> tuple[jax.Array, PyTree]:
    """Returns the loss and all gradients summed over the replicas, where those of layers are already.

    **Collectives**: one all-reduce over ``data``.
    """
    loss_sum, outer = _reduce_with_loss(loss_sum, grads[OUTER], cuts)
    return loss_sum, grads | {OUTER: outer}


def reduce_and_cut(loss_sum: jax.Array, grads: PyTree, cuts: ZeroCuts) -> tuple[jax.Array, PyTree]:
    """Returns the loss and gradients summed over the replicas, each gradient cut as ``cuts`` says.

    **Collectives**: one all-reduce over ``data`` of all that stays whole, and a reduce-scatter for each gradient that is cut
    and not yet summed.
    """
    leaves, treedef = jax.tree.flatten(grads)
    dims, summed, tensor = map(jax.tree.leaves, (cuts.dims, cuts.is_summed(), cuts.tensor))
    whole = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim == WHOLE]
    loss_sum, whole = _reduce_with_loss(loss_sum, whole, cuts)
    reduced = iter(whole)
    cut = [
        next(reduced) if dim == WHOLE else leaf if done else cuts.scatter(leaf, dim, spec)
        for leaf, dim, done, spec in zip(leaves, dims, summed, tensor, strict=True)
    ]
    return loss_sum, jax.tree.unflatten(treedef, cut)


def _reduce_with_loss(loss_sum: jax.Array, grads: PyTree, cuts: ZeroCuts) -> tuple[jax.Array, PyTree]:
    if cuts.reduce_dtype is None:
        return reduce_gradients((loss_sum, grads))
    return reduce_gradients(loss_sum), reduce_gradients(grads, cuts.reduce_dtype)
