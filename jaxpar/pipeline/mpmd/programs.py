"""The programs of a stage: one jitted function for each virtual stage and kind of op, and those before and after them.

An op is manual over ``data``: each replica computes on its own rows and adds its own gradients, which are reduced over ``data``
once per step. Values that differ between replicas have a leading dim for ``data``; ``tensor`` is automatic.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.dtypes import is_float, wide_dtype
from jaxpar.mesh import DATA
from jaxpar.pipeline.mpmd.submeshes import without
from jaxpar.pipeline.mpmd.virtual_stages import VirtualStage
from jaxpar.shard_map import manual_over_data_and_stage

Values = dict[str, Any]
Reduce = Callable[[PyTree], PyTree]


def jit_params(virtual_stages: Sequence[VirtualStage], split: Callable[[PyTree], list]) -> Callable[[PyTree], list]:
    """Returns the jitted function of the params of a stage's layers, in the dtypes in which its ops compute.

    Args:
        virtual_stages: The virtual stages of the stage.
        split: The params of each layer from those of the stage.
    """
    layers = [layer for virtual_stage in virtual_stages for layer in virtual_stage.layers.layers]
    return jax.jit(lambda params: [layer.cast(own) for layer, own in zip(layers, split(params), strict=True)])


def jit_op(
    virtual_stage: VirtualStage, kind: str, mesh: Mesh, sums: Values, axes: frozenset[str]
) -> Callable[..., tuple[Values, Values]]:
    """Returns an op of a virtual stage as a jitted function of (sums, whole, rows, own), which donates the sums.

    Args:
        virtual_stage: The virtual stage.
        kind: F, R, B or W.
        mesh: The mesh of its stage.
        sums: The shapes, dtypes and shardings of the sums to which it adds.
        axes: The mesh axes over which it is manual.
    """

    def one_replica(sums: Values, whole: Values, rows: PyTree, own: Values) -> tuple[Values, Values]:
        made, sums = virtual_stage.run(kind, sums, whole, rows, own_of(own))
        return of_all(made), sums

    one_replica.__name__ = f"{kind}_on_stage_{virtual_stage.stage}"  # the name in profiles
    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole, each, each), out_specs=each, axes=axes)
    return jax.jit(run, donate_argnums=0, out_shardings=(None, jax.tree.map(lambda s: s.sharding, sums)))


def jit_weight(mesh: Mesh, traced: Any, reduce: Reduce) -> Callable[[PyTree], jax.Array]:
    """Returns the jitted function of the weight of the whole batch, replicated on the devices of a stage."""
    one_replica = lambda rows: reduce(traced.weight_of_rows(rows))
    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole, axes=traced.manual_axes)
    return jax.jit(run)


def jit_value(mesh: Mesh, traced: Any, reduce: Reduce) -> Callable[[PyTree, jax.Array], PyTree]:
    """Returns the jitted function that reduces the sums of the loss over ``data`` and divides them by the weight."""

    def one_replica(sums: PyTree, total_weight: jax.Array) -> PyTree:
        return traced.value(reduce(own_of(sums)), total_weight)

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    return jax.jit(manual_over_data_and_stage(one_replica, mesh, in_specs=(each, whole), out_specs=whole))


def jit_grads(mesh: Mesh, like: Values, stack: Callable[[list], PyTree], reduce: Reduce) -> Callable[[Values], Values]:
    """Returns the jitted function that reduces a stage's sums over ``data`` to gradients, in the dtypes of the params.

    Args:
        mesh: The mesh of the stage.
        like: The shapes, dtypes and shardings of the gradients.
        stack: The gradients of the stage's layers from the sums of each layer.
        reduce: ``tree -> tree``, reduced over the replicas.
    """

    def one_replica(sums: Values) -> Values:
        own = own_of(sums)
        grads = reduce(own | {"layers": stack(own["layers"])})
        return jax.tree.map(lambda a, shape: a.astype(shape.dtype), grads, like)

    whole, each = PartitionSpec(), PartitionSpec(DATA)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=(each,), out_specs=whole)
    return jax.jit(run, out_shardings=jax.tree.map(lambda g: g.sharding, like))


def sum_like(mesh: Mesh, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of a sum of gradients over microbatches, with a leading dim of replicas, in float32 or wider."""
    spec = () if like.sharding is None else without(like.sharding.spec, DATA)
    dtype = wide_dtype(like.dtype) if is_float(like) else like.dtype
    sharding = NamedSharding(mesh, PartitionSpec(DATA, *spec))
    return jax.ShapeDtypeStruct((mesh.shape[DATA], *like.shape), dtype, sharding=sharding)


def jit_zeros(like: Values) -> Callable[[], Values]:
    """Returns the jitted function that returns zeros of the given shapes, dtypes and shardings."""
    zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, like))


def own_of(tree: PyTree) -> PyTree:
    """Returns the arrays of one replica without their leading dim."""
    return jax.tree.map(lambda a: a.reshape(a.shape[1:]), tree)


def of_all(tree: PyTree) -> PyTree:
    """Returns the arrays of one replica with a leading dim, along which ``shard_map`` concatenates the replicas."""
    return jax.tree.map(lambda a: a[None], tree)
