"""Outer params in a pipeline: what embed and head use, gathered for a step, its gradients left spread over the stages.

Only the first and the last stage use them, yet all stages run one program. So they lie spread over ``stage`` at rest, with
their optimizer state (``shardings_from_paths`` sees to it); a step gathers them once, and the sum of their gradients over the
stages leaves each stage the part that it keeps.
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, outer_stage_dim
from jaxpar.mesh import STAGE


def stage_specs(params: PyTree, num_stages: int) -> tuple[PyTree, PyTree]:
    """Returns the specs over ``stage`` with which params enter a pipeline, and gradients leave it."""

    def spread(leaf: jax.Array) -> PartitionSpec:
        dim = outer_stage_dim(leaf.shape, num_stages)
        return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, STAGE)

    layers = PartitionSpec(STAGE)
    return {OUTER: PartitionSpec(), LAYERS: layers}, {OUTER: jax.tree.map(spread, params[OUTER]), LAYERS: layers}


def sum_over_stages(grads: PyTree) -> PyTree:
    """Returns each gradient of outer summed over the stages: this stage's part of it, or the whole where it is not cut."""

    def reduce(leaf: jax.Array) -> jax.Array:
        dim = outer_stage_dim(leaf.shape, jax.lax.axis_size(STAGE))
        if dim is None:
            return jax.lax.psum(leaf, STAGE)
        return jax.lax.psum_scatter(leaf, STAGE, scatter_dimension=dim, tiled=True)

    return jax.tree.map(reduce, grads)
