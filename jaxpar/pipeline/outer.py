"""Outer params in a pipeline: those of embedding and head, gathered for a step, with gradients sharded over the stages.

Only the first and the last stage use them, but all stages run one program. At rest they and their optimizer state are therefore
sharded over ``stage`` (by ``shardings_from_paths``). A step gathers them once, and reduce-scatters their gradients over the
stages.
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, is_stacked, outer_stage_dim
from jaxpar.mesh import STAGE
from jaxpar.shard_map import on_tensor_shards, tensor_part


def stage_specs(params: PyTree, num_stages: int, *, spread: bool = True) -> tuple[PyTree, PyTree]:
    """Returns the specs over ``stage`` of the params that enter a pipeline and of the gradients that it returns.

    Args:
        params: The params of a LayeredModel.
        num_stages: The number of stages.
        spread: Whether the gradients of outer are sharded over the stages; if not, they are replicated.
    """

    def of_grad(leaf: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
        dim = outer_stage_dim(leaf.shape, num_stages) if spread and num_stages > 1 else None
        return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, STAGE)

    whole = jax.tree.map(lambda _: PartitionSpec(), params[OUTER])
    of_layer = PartitionSpec(STAGE) if is_stacked(params) else PartitionSpec()
    layers = jax.tree.map(lambda _: of_layer, params[LAYERS])
    return {OUTER: whole, LAYERS: layers}, {OUTER: jax.tree.map(of_grad, params[OUTER]), LAYERS: layers}


def sum_over_stages(loss_sums: PyTree, grads: PyTree, specs: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the loss and the gradients of outer summed over the stages, each gradient sharded according to ``specs``.

    Args:
        loss_sums: This stage's loss_sum and further sums.
        grads: This stage's gradients, in float32 or wider; those of layers are returned unchanged.
        specs: For each gradient its PartitionSpec over ``stage`` and ``tensor``.

    **Collectives**: over ``stage`` an all-reduce of the loss and the replicated gradients, and a reduce-scatter for each
    sharded gradient.
    """

    def spread(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        if STAGE not in spec:
            return jax.lax.psum(grad, STAGE)
        reduce = lambda g: jax.lax.psum_scatter(g, STAGE, scatter_dimension=tuple(spec).index(STAGE), tiled=True)
        return on_tensor_shards(reduce, grad, tensor_part(spec))

    outer = jax.tree.map(spread, grads[OUTER], specs[OUTER])
    return jax.lax.psum(loss_sums, STAGE), grads | {OUTER: outer}
