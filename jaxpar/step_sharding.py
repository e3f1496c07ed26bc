"""The shardings of params and gradients during a step, and the step itself over the shards of ``data`` and ``stage``."""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar.backward.partition import ParamShards
from jaxpar.data_parallel import reduce_gradients
from jaxpar.layered_model import LAYERS, OUTER, is_stacked
from jaxpar.mesh import DATA, STAGE, TENSOR
from jaxpar.pipeline import stage_specs
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.traced_loss import TracedLoss
from jaxpar.trainable import only_trained
from jaxpar.zero import choose_cuts

SumsAndGrads = Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]


class StepSharding:
    """The shardings of params and gradients over ``data`` and ``stage`` in a step, for given shapes.

    ``layer_shards`` says how the params of one layer are sharded over ``tensor``; None where layers are not stacked.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        zero: int,
        shardings: PyTree | None,
        params: PyTree,
        *,
        layered: bool,
        reduce_dtype: DTypeLike | None = None,
    ) -> None:
        self.mesh = mesh
        self.param_specs = self.grad_specs = jax.tree.map(lambda _: PartitionSpec(), params)
        if layered:
            is_known = mesh.shape[TENSOR] == 1 or shardings is not None
            self.param_specs, self.grad_specs = stage_specs(params, mesh.shape[STAGE], spread=is_known)
            if shardings is not None:
                self.grad_specs |= {OUTER: jax.tree.map(_where_at_rest, self.grad_specs[OUTER], shardings[OUTER])}
        self.taken = self.grad_specs if shardings is None else jax.tree.map(_both, self.grad_specs, shardings)
        one_at_a_time = layered and is_stacked(params)
        self.cuts = choose_cuts(zero, params, self.taken, mesh, layered=one_at_a_time, reduce_dtype=reduce_dtype)
        self.grad_cuts = self.cuts.of_trained()
        self.grad_specs, self.taken = only_trained(self.grad_specs), only_trained(self.taken)
        tensor = jax.tree.leaves(self.cuts.tensor[LAYERS]) if one_at_a_time else None
        self.layer_shards = None if tensor is None else ParamShards.of_layers(tensor, mesh.shape[TENSOR])

    def over_replicas(
        self, sums: SumsAndGrads, params: PyTree, batch: PyTree, traced: TracedLoss
    ) -> tuple[PyTree, PyTree]:
        """Returns the loss and gradients: ``sums`` run on each shard.

        Args:
            sums: ``(params, a replica's rows, total weight) -> (loss_sum and further sums, gradients of the loss)``, reduced
                over the replicas and the gradients sharded according to ``grad_cuts``.
            params: The params.
            batch: The batch.
            traced: The traced loss.
        """
        dtypes = only_trained(jax.tree.map(lambda p: p.dtype, params))

        def one_shard(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            total_weight = reduce_gradients(traced.weight_of_rows(batch))
            totals, grads = sums(self.cuts.gather_outer(params), batch, total_weight)
            value = traced.value(totals, total_weight)
            return value, jax.tree.map(lambda g, dtype: g.astype(dtype), grads, dtypes)

        in_specs = (self.cuts.specs(self.param_specs, from_level=3), PartitionSpec(DATA))
        out_specs = (PartitionSpec(), self.grad_cuts.specs(self.grad_specs, from_level=1))
        assert isinstance(self.mesh, Mesh), "a step runs on devices"
        manual = partial(manual_over_data_and_stage, in_specs=in_specs, out_specs=out_specs, axes=traced.manual_axes)
        return manual(one_shard, self.mesh)(params, batch)


def _where_at_rest(spec: PartitionSpec, sharding: NamedSharding) -> PartitionSpec:
    """The spec of the gradient of an outer param: sharded over ``stage`` if the param is so at rest, else replicated."""
    return spec if STAGE in sharding.spec else PartitionSpec()


def _both(spec: PartitionSpec, sharding: NamedSharding) -> PartitionSpec:
    """The spec of the dims that either spec shards."""
    longest = max(len(spec), len(sharding.spec))
    pad = lambda s: (*s, *(None,) * (longest - len(s)))
    return PartitionSpec(*(a or b for a, b in zip(pad(spec), pad(sharding.spec), strict=True)))
