"""The state of a device between steps, and the shardings of params and gradients during a step.

Both come from the code that shards them, called without devices.
"""

from collections.abc import Callable
from functools import cached_property

import jax
from jaxtyping import PyTree

from jaxpar.dtypes import num_bytes
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.optimizer_state import Optimizer
from jaxpar.planner.choice import Choice
from jaxpar.planner.model_shape import ModelShape
from jaxpar.sharding import shardings_from_paths
from jaxpar.step_sharding import StepSharding
from jaxpar.train import TrainState, abstract_state
from jaxpar.trainable import only_trained, trained_indices


class AtRest:
    """A TrainState of a choice, as ShapeDtypeStructs with shardings.

    Args:
        shape: The model.
        optimizer: The optimizer.
        choice: Mesh axes and settings.
    """

    def __init__(self, shape: ModelShape, optimizer: Optimizer, choice: Choice) -> None:
        num_positions = choice.layout(shape.num_layers).num_positions if choice.stage > 1 else shape.num_layers
        packed = shape.with_positions(num_positions)
        self.shardings = shardings_from_paths(packed, choice.mesh, shape.rules)
        self.state: TrainState = abstract_state(
            _as_init(packed),
            None,
            optimizer,
            choice.mesh,
            self.shardings,
            zero=choice.zero,
            trainable=shape.trainable,
        )
        self.params = self.state.params
        self.step = StepSharding(
            choice.mesh, choice.zero, shape.frozen(self.shardings), shape.frozen(packed), layered=True
        )
        self.trained_layers, self.trained_outer = (
            trained_indices(shape.frozen(packed)[part]) for part in (LAYERS, OUTER)
        )
        self._frozen = shape.frozen
        self._packed, self._trained = packed, only_trained(shape.frozen(packed))

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes on one device: "params" and "optimizer", which includes the counters of steps and skipped steps."""
        state = self.state
        return {
            "params": local_bytes(state.params),
            "optimizer": local_bytes((state.opt_state, state.step, state.num_skipped)),
        }

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes on one device of the params that are trained."""
        return local_bytes(only_trained(self._frozen(self.params)))

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes on one device of the gradients that ``value_and_grad`` returns."""
        leaves = jax.tree.leaves(self._trained)
        named = [jax.sharding.NamedSharding(self.step.mesh, spec) for spec in self.grad_specs]
        return local_bytes(list(map(_with_sharding, leaves, named)))

    @cached_property
    def grad_specs(self) -> list[jax.sharding.PartitionSpec]:
        """The specs of the gradients that ``value_and_grad`` returns."""
        specs = self.step.grad_cuts.specs(self.step.taken, from_level=1)
        return jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, jax.sharding.PartitionSpec))

    @cached_property
    def local_grads(self) -> list[jax.ShapeDtypeStruct]:
        """Gradients on one device before they are reduced over the replicas: sharded over ``stage`` and ``tensor``."""
        named = jax.tree.map(lambda spec: jax.sharding.NamedSharding(self.step.mesh, spec), self.step.taken)
        return [_local(leaf) for leaf in jax.tree.leaves(jax.tree.map(_with_sharding, self._trained, named))]

    @cached_property
    def one_layer(self) -> list[jax.ShapeDtypeStruct]:
        """The params of one layer on one device: sharded over ``tensor``."""
        local = jax.tree.map(_with_sharding, self._packed[LAYERS], self.shardings[LAYERS])
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in map(_local, jax.tree.leaves(local))]

    @cached_property
    def outer_in_use(self) -> list[jax.ShapeDtypeStruct]:
        """The params of embedding and head on one device during a step: sharded over ``tensor`` only."""
        local = []
        for leaf, sharding in zip(*map(jax.tree.leaves, (self._packed[OUTER], self.shardings[OUTER])), strict=True):
            spec = jax.sharding.PartitionSpec(*("tensor" if entry == "tensor" else None for entry in sharding.spec))
            local.append(_local(_with_sharding(leaf, jax.sharding.NamedSharding(sharding.mesh, spec))))
        return local

    @cached_property
    def outer_at_rest(self) -> list[jax.ShapeDtypeStruct]:
        """The params of embedding and head on one device between steps."""
        return [_local(leaf) for leaf in jax.tree.leaves(self.params[OUTER])]


def local_bytes(tree: PyTree) -> int:
    """Returns the bytes on one device of a tree of arrays or ShapeDtypeStructs with shardings, PRNG keys as their data."""
    return num_bytes(map(_local, jax.tree.leaves(tree)))


def _as_init(params: PyTree) -> Callable[[None], PyTree]:
    zeros = lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype)
    return lambda key: jax.tree.map(zeros, params)


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _local(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
