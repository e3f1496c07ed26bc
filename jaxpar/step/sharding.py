"""The shardings of params and gradients during a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.backward.partition import ParamShards
from jaxpar.layered_model import LAYERS, OUTER, is_stacked
from jaxpar.mesh import STAGE, TENSOR, cut_of
from jaxpar.pipeline import stage_specs
from jaxpar.sharding import path_string
from jaxpar.step.settings import Parallel
from jaxpar.trainable import only_trained, trained_part
from jaxpar.zero import Zero, zero_of, zero_shard


@dataclass(frozen=True)
class StepSharding:
    """The shardings of a step's params and gradients, for given shapes. Trees of gradients have None for frozen params.

    Attributes:
        params: The PartitionSpecs over ``data``, ``context`` and ``stage`` of the params that a step is given.
        grads: Those of the gradients that it returns.
        replica_grads: The PartitionSpecs over ``stage`` and ``tensor`` of the gradients of one replica.
        zero: What the replicas exchange.
        layer_shards: How the params of one layer are sharded over ``tensor``; None where layers are not stacked.
    """

    params: PyTree
    grads: PyTree
    replica_grads: PyTree
    zero: Zero
    layer_shards: ParamShards | None


def shard_step(
    params: PyTree,
    parallel: Parallel,
    shardings: PyTree | None,
    *,
    layered: bool,
) -> StepSharding:
    """Returns how a step shards its params and gradients.

    Args:
        params: Arrays or ShapeDtypeStructs, in packed order; some may be frozen.
        parallel: The mesh, the ZeRO level and the dtype of reductions.
        shardings: The NamedShardings of the params, in a tree like theirs, if known.
        layered: Whether they are those of a LayeredModel.
    """
    mesh = parallel.mesh
    of_params = of_grads = jax.tree.map(lambda _: PartitionSpec(), params)
    if layered:
        is_known = mesh.shape[TENSOR] == 1 or shardings is not None
        of_params, of_grads = stage_specs(params, mesh.shape[STAGE], spread=is_known)
        if shardings is not None:
            of_outer = jax.tree.map(_over_stage_at_rest, shardings[OUTER])
            of_grads |= {OUTER: of_outer}
    with_tensor = of_grads
    if shardings is not None:
        with_tensor = jax.tree.map(_both, of_grads, shardings)
    stacked = layered and is_stacked(params)
    zero = zero_of(
        parallel.zero,
        params,
        with_tensor,
        mesh,
        stacked=stacked,
        reduce_dtype=parallel.grad_reduce_dtype,
        overlaps=parallel.overlap_grad_reduce,
    )
    layer_shards = None
    if stacked:
        of_layers = [shard.tensor for shard in zero[LAYERS].of_params]
        layer_shards = ParamShards.of_layers(of_layers, mesh.shape[TENSOR])
    in_step = lambda spec, shard: shard.in_step(spec)
    at_rest = lambda spec, shard: shard.at_rest(spec)
    grads = jax.tree.map(at_rest, of_grads, zero.shards)
    return StepSharding(
        params=jax.tree.map(in_step, of_params, zero.shards),
        grads=only_trained(grads),
        replica_grads=only_trained(with_tensor),
        zero=zero,
        layer_shards=layer_shards,
    )


def left_whole(params: PyTree, parallel: Parallel) -> dict[str, int]:
    """Returns the bytes on a device of each param that ZeRO cannot shard, by path: its devices divide none of its free dims.

    Its gradient and its optimizer state are whole too. Frozen params, which have neither, count at level 3 alone. A param of
    one number, or of one for each layer, is left out: no number of devices would shard it.

    Args:
        params: Arrays or ShapeDtypeStructs.
        parallel: The settings, with shardings.
    """
    if parallel.zero == 0:
        return {}
    trainable = None if parallel.zero == 3 else parallel.trainable
    leaves = jax.tree_util.tree_leaves_with_path(trained_part(params, trainable))
    shardings = jax.tree.leaves(trained_part(parallel.shardings, trainable))
    found = {}
    for (path, param), sharding in zip(leaves, shardings, strict=True):
        shard = zero_shard(parallel.zero, param, sharding.spec, parallel.mesh)
        if shard.axes and shard.dim is None and _has_dims(param.shape, sharding.spec):
            size = math.prod(sharding.shard_shape(param.shape))
            found[path_string(path)] = size * param.dtype.itemsize
    return found


def _has_dims(shape: Sequence[int], spec: PartitionSpec) -> bool:
    """Whether a param, or one layer of it, is more than one number."""
    own = shape[1:] if spec[:1] == (STAGE,) else shape
    return max(own, default=1) > 1


def _over_stage_at_rest(sharding: NamedSharding) -> PartitionSpec:
    """The spec of the gradient of an outer param: over ``stage`` along the dim along which the param is at rest, if one is."""
    dim = cut_of(sharding.spec, STAGE)
    return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, STAGE)


def _both(spec: PartitionSpec, sharding: NamedSharding) -> PartitionSpec:
    """The spec of the dims that either spec shards."""
    pairs = zip_longest(spec, sharding.spec)
    return PartitionSpec(*(own or other for own, other in pairs))
