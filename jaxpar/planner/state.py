"""The state that a step updates, as the code that shards it makes it without devices, and its bytes on a device."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
from jax import ShapeDtypeStruct
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from jaxpar.dtypes import num_bytes, wide_dtype
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import TENSOR
from jaxpar.planner.job import Choice
from jaxpar.planner.model_shape import ModelShape
from jaxpar.sharding import shardings_from_paths
from jaxpar.step.optimizer_state import Optimizer
from jaxpar.step.settings import Parallel
from jaxpar.step.sharding import shard_step
from jaxpar.train import TrainState, abstract_state
from jaxpar.trainable import only_trained, trained_indices

Shapes = list[ShapeDtypeStruct]


class AtRest:
    """A TrainState of a choice, as ShapeDtypeStructs with shardings.

    Args:
        shape: The model.
        optimizer: The optimizer.
        choice: Mesh axes and settings.
    """

    def __init__(self, shape: ModelShape, optimizer: Optimizer, choice: Choice) -> None:
        num_positions = shape.num_layers
        if choice.stage > 1:
            num_positions = choice.layout(shape.num_layers).num_positions
        packed = shape.with_positions(num_positions)
        self.shardings = shardings_from_paths(packed, choice.mesh, shape.rules)
        zeros = lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype)
        init = lambda key: jax.tree.map(zeros, packed)
        parallel = Parallel(
            choice.mesh, self.shardings, zero=choice.zero, trainable=shape.trainable
        )
        self.state: TrainState = abstract_state(init, None, optimizer, parallel)
        self.params = self.state.params
        self._mesh = choice.mesh
        frozen = shape.frozen(packed)
        self.step = shard_step(frozen, parallel, shape.frozen(self.shardings), layered=True)
        self.trained_layers = trained_indices(frozen[LAYERS])
        self.trained_outer = trained_indices(frozen[OUTER])
        self._packed = packed
        self._trained = only_trained(frozen)

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes on one device: "params" and "optimizer", which includes the counters of steps and skipped steps."""
        state = self.state
        counted = state.opt_state, state.step, state.num_skipped
        return {"params": local_bytes(state.params), "optimizer": local_bytes(counted)}

    @cached_property
    def grads(self) -> Shapes:
        """The gradients that ``value_and_grad`` returns on one device, of which ``replica`` reduces float32 or wider ones."""
        trained = jax.tree.leaves(self._trained)
        return list(map(self._shard, trained, self.grad_specs))

    @cached_property
    def grad_specs(self) -> list[PartitionSpec]:
        """The specs of the gradients that ``value_and_grad`` returns."""
        is_spec = lambda spec: isinstance(spec, PartitionSpec)
        specs = jax.tree.leaves(self.step.replica_grads, is_leaf=is_spec)
        pairs = zip(self.step.zero.of_grads, specs, strict=True)
        return [shard.at_rest(spec) for shard, spec in pairs]

    @property
    def updated_bytes(self) -> int:
        """The bytes of the trained params that one device updates, which are sharded as their gradients."""
        return num_bytes(self.grads)

    @property
    def shards_nothing(self) -> bool:
        """Whether ZeRO shards neither optimizer state, gradients nor params: its devices divide no free dim of them."""
        zero = self.step.zero
        params = [shard for shard in zero.of_params if shard.is_param]
        return not any(shard.is_sharded for shard in [*zero.of_grads, *params])

    @cached_property
    def local_grads(self) -> Shapes:
        """Gradients on one device before they are reduced over the replicas: sharded over ``stage`` and ``tensor``."""
        local = jax.tree.map(self._shard, self._trained, self.step.replica_grads)
        return jax.tree.leaves(local)

    def _shard(self, leaf: ShapeDtypeStruct, spec: PartitionSpec) -> ShapeDtypeStruct:
        return _local(leaf, NamedSharding(self._mesh, spec))

    @cached_property
    def one_layer(self) -> Shapes:
        """The params of one layer on one device: sharded over ``tensor``."""
        local = jax.tree.map(_local, self._packed[LAYERS], self.shardings[LAYERS])
        leaves = jax.tree.leaves(local)
        return [ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]

    @cached_property
    def outer_in_use(self) -> Shapes:
        """The params of embedding and head on one device during a step: sharded over ``tensor`` only."""

        def local(leaf: ShapeDtypeStruct, sharding: NamedSharding) -> ShapeDtypeStruct:
            entries = [TENSOR if entry == TENSOR else None for entry in sharding.spec]
            return self._shard(leaf, PartitionSpec(*entries))

        outer = jax.tree.map(local, self._packed[OUTER], self.shardings[OUTER])
        return jax.tree.leaves(outer)

    @cached_property
    def outer_at_rest(self) -> Shapes:
        """The params of embedding and head on one device between steps."""
        return [_local(leaf) for leaf in jax.tree.leaves(self.params[OUTER])]


def local_bytes(tree: PyTree) -> int:
    """Returns the bytes on one device of a tree of arrays or ShapeDtypeStructs with shardings, PRNG keys as their data."""
    return num_bytes(map(_local, jax.tree.leaves(tree)))


def _local(leaf: Any, sharding: Sharding | None = None) -> ShapeDtypeStruct:
    """Returns the shard of an array on one device, by default with the array's own sharding."""
    own = sharding or leaf.sharding
    return ShapeDtypeStruct(own.shard_shape(leaf.shape), leaf.dtype)


def wide_bytes(arrays: Iterable[Any]) -> int:
    """Returns the bytes of arrays in the dtype in which their values are added: float32 or wider."""
    return sum(a.size * wide_dtype(a.dtype).itemsize for a in arrays)
