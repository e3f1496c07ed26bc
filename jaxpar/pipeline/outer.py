"""Outer params in a pipeline: what embed and head use, gathered for a step, its gradients left spread over the stages.

Only the first and the last stage use them, yet all stages run one program. So they lie spread over ``stage`` at rest, with
their optimizer state (``shardings_from_paths`` sees to it); a step gathers them once, and the sum of their gradients over the
stages leaves each stage the part that it keeps.
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, is_stacked, outer_stage_dim
from jaxpar.mesh import STAGE
from jaxpar.shard_map import on_tensor_shards, tensor_part


def stage_specs(params: PyTree, num_stages: int, *, spread: bool = True) -> tuple[PyTree, PyTree]:
    """Returns the specs over ``stage`` with which params enter a pipeline, and gradients leave it.

    Args:
        params: A LayeredModel's params.
        num_stages: Number of stages.
        spread: Whether the gradients of outer are left spread over the stages, or whole on each.
    """

    def of_grad(leaf: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
        dim = outer_stage_dim(leaf.shape, num_stages) if spread and num_stages > 1 else None
        return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, STAGE)

    whole = jax.tree.map(lambda _: PartitionSpec(), params[OUTER])
    of_layer = PartitionSpec(STAGE) if is_stacked(params) else PartitionSpec()
    layers = jax.tree.map(lambda _: of_layer, params[LAYERS])
    return {OUTER: whole, LAYERS: layers}, {OUTER: jax.tree.map(of_grad, params[OUTER]), LAYERS: layers}


def sum_over_stages(loss_sum: jax.Array, grads: PyTree, specs: PyTree) -> tuple[jax.Array, PyTree]:
    """Returns the loss and the gradients of outer summed over the stages, each gradient spread as ``specs`` says.

    Args:
        loss_sum: This stage's.
        grads: This stage's gradients, in float32 at least; those of layers are its own.
        specs: For each gradient its cuts over ``stage`` and ``tensor``.

    **Collectives**: over ``stage`` an all-reduce of all that is not spread, a reduce-scatter for each gradient that is.
    """

    def spread(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        if STAGE not in spec:
            return jax.lax.psum(grad, STAGE)
        reduce = lambda g: jax.lax.psum_scatter(g, STAGE, scatter_dimension=tuple(spec).index(STAGE), tiled=True)
        return on_tensor_shards(reduce, grad, tensor_part(spec))

    outer = jax.tree.map(spread, grads[OUTER], specs[OUTER])
    return jax.lax.psum(loss_sum, STAGE), grads | {OUTER: outer}
