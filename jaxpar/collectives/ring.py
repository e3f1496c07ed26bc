"""Ring all-reduce, step by step: each device communicates only with its two neighbours, and all links carry equal traffic.

The vector is split into N chunks. Scatter-reduce: in each of N-1 steps a device sends one chunk to its right neighbour, and
adds the chunk that it receives from the left to its own. Then each device has the complete sum of one chunk. All-gather: in N-1
more steps the finished chunks travel around the ring. With 3 devices, where a1 is device a's chunk 1:

    a: a0 a1 a2                     a: a0       a1+b1+c1   a2+c2               a: +0 +1 +2
    b: b0 b1 b2    -> 2 steps ->    b: b0+a0    b1+c1      a2+b2+c2   2 steps   b: +0 +1 +2
    c: c0 c1 c2                     c: a0+b0+c0 c1         c2           ->     c: +0 +1 +2

Every link carries 2(N-1)/N of the vector, the minimum for an all-reduce over N devices.

Reference: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations; brought to deep
learning by Gibiansky 2017 (Baidu) and Horovod (Sergeev and Del Balso 2018, arXiv 1802.05799).

``distributed_optimizer`` is the optimizer of hand-written data parallelism, as in Horovod: average the gradients, then update.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from jaxpar.collectives.primitives import all_reduce, group_size, rank, shift
from jaxpar.fields import check_positive


def ring_all_reduce(
    tree: PyTree,
    axis: str,
    *,
    bidirectional: bool = False,
    bucket_bytes: int | None = None,
    mean: bool = False,
) -> PyTree:
    """Returns the sum over the devices of ``axis`` on each of them, by ring all-reduce.

    Args:
        tree: Arrays; they are sent as one vector, with the widest of their dtypes.
        axis: The mesh axis; call it inside ``jax.shard_map``.
        bidirectional: Sends one half to the right and the other to the left at the same time, which takes half the time on
            links that carry both directions at once.
        bucket_bytes: Splits the vector into buckets of this size, each with its own rings, so that one can be sent while
            another is computed or added. None: one bucket.
        mean: Divides by the number of devices.

    **Collectives**: 2(N-1) collective-permutes of 1/N of a bucket each; if bidirectional, as many in each direction for its
    half. If N does not divide the vector, it is padded. The gradient takes as many.
    """
    check_positive("Leave it out for one bucket.", bucket_bytes=bucket_bytes)
    size = group_size(axis)
    vector, restore = ravel_pytree(tree)
    if size == 1 or not vector.size:
        return tree
    parts = _cut(vector, bucket_bytes)
    if bidirectional:
        halves = [
            half for part in parts for half in zip(jnp.array_split(part, 2), (1, -1), strict=True)
        ]
    else:
        halves = [(part, 1) for part in parts]
    total = jnp.concatenate([_ring(part, axis, way) for part, way in halves])
    return restore(total / size if mean else total)


def _cut(vector: jax.Array, bucket_bytes: int | None) -> list[jax.Array]:
    length = vector.size if bucket_bytes is None else max(bucket_bytes // vector.dtype.itemsize, 1)
    return [vector[start : start + length] for start in range(0, vector.size, length)]


def _ring(vector: jax.Array, axis: str, way: int) -> jax.Array:
    """Returns the sum of a vector over the devices; ``way`` is 1 for rings to the right, -1 to the left."""
    size = group_size(axis)
    chunks = jnp.pad(vector, (0, -vector.size % size)).reshape(size, -1)
    me = rank(axis) * way
    get = lambda chunks, index: jax.lax.dynamic_index_in_dim(chunks, index % size, keepdims=False)
    put = lambda chunks, chunk, index: jax.lax.dynamic_update_index_in_dim(
        chunks, chunk, index % size, 0
    )

    def scatter_reduce(step: jax.Array, chunks: jax.Array) -> jax.Array:
        """Sends the chunk that was added to last, and adds the received chunk to this device's own."""
        come = shift(get(chunks, me - step), axis, by=way)
        index = (me - step - 1) % size
        return put(chunks, get(chunks, index) + come, index)

    def all_gather(step: jax.Array, chunks: jax.Array) -> jax.Array:
        """Sends the finished chunk that was received last, and stores the one that is received now."""
        come = shift(get(chunks, me + 1 - step), axis, by=way)
        return put(chunks, come, me - step)

    for step_of in (scatter_reduce, all_gather):
        chunks = jax.lax.fori_loop(0, size - 1, step_of, chunks)
    return chunks.reshape(-1)[: vector.size]


def distributed_optimizer(
    optimizer: optax.GradientTransformation,
    axis: str = "data",
    *,
    reduce: Callable[[PyTree, str], PyTree] | None = None,
) -> optax.GradientTransformation:
    """Returns ``optimizer`` applied to the mean of the gradients over the devices of ``axis``.

    It corresponds to ``hvd.DistributedOptimizer``, for a training step written inside ``jax.shard_map`` where each device has
    gradients of the mean loss over its own rows: use ``check_vma=False``, with which ``jax.grad`` does not reduce them. With
    ``jaxpar.value_and_grad`` it is not needed: gradients are already reduced.

    Args:
        optimizer: Any optax optimizer.
        axis: The mesh axis of the replicas.
        reduce: ``reduce(grads, axis)`` returns the mean by another method, as in ``partial(ring_all_reduce, mean=True)``.

    **Collectives**: one all-reduce of all gradients together.
    """
    mean = reduce or (lambda grads, axis: all_reduce(grads, axis, op="mean"))

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        return optimizer.update(mean(updates, axis), state, params)

    return optax.GradientTransformation(optimizer.init, update)
