"""Params from where they lie at rest to the stages that use them, and gradients back to the same places.

    stacked layers   each stage's own, with no copy where the layout is the model's own order; else packed and unpacked
    a list of layers each gathered on its stage
    outer            what an end of the model reads, gathered on that end's stage
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER, is_stacked, outer_stage_dim
from jaxpar.mesh import DATA, STAGE
from jaxpar.pipeline.layout import LayerLayout
from jaxpar.pipeline.submeshes import Home, move, without

Arrays = list[Any]


@dataclass(frozen=True)
class AtRest:
    """Where the params of a model lie.

    Attributes:
        mesh: The mesh.
        layout: Where each layer belongs.
        is_packed: Whether stacked layers come in packed order.
        given: For each leaf of params the sharding that it came with, or the default where it came from elsewhere.
    """

    mesh: Mesh
    layout: LayerLayout
    is_packed: bool
    given: PyTree

    @classmethod
    def of(cls, params: PyTree, mesh: Mesh, layout: LayerLayout, *, is_packed: bool) -> "AtRest":
        """Returns where these params lie."""
        num_stages = mesh.shape[STAGE]

        def spread(leaf: Any) -> NamedSharding:
            dim = outer_stage_dim(jnp.shape(leaf), num_stages)
            return _sharding(leaf, mesh, () if dim is None else (*(None,) * dim, STAGE))

        def by_layer(leaf: Any) -> NamedSharding:
            return _sharding(leaf, mesh, () if jnp.shape(leaf)[0] % num_stages else (STAGE,))

        of_layers = by_layer if is_stacked(params) else spread
        layers = jax.tree.map(of_layers, params[LAYERS])
        return cls(mesh, layout, is_packed, {OUTER: jax.tree.map(spread, params[OUTER]), LAYERS: layers})

    @cached_property
    def is_stacked(self) -> bool:
        """Whether layers are stacked along a leading dim."""
        return is_stacked(self.given)

    @cached_property
    def outer(self) -> list[Home]:
        """The home of each leaf of outer."""
        return [Home.of(sharding) for sharding in jax.tree.leaves(self.given[OUTER])]

    @cached_property
    def layers(self) -> list[Home]:
        """The home of each leaf of layers, of stacked ones when packed."""
        given = jax.tree.leaves(self.given[LAYERS])
        if not self.is_stacked:
            return [Home.of(sharding) for sharding in given]
        return [Home(self.mesh, PartitionSpec(STAGE, *without(s.spec, STAGE)[1:])) for s in given]

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds a layer."""
        return int(self.layout.places.tolist().index(layer) // (self.layout.num_places // self.layout.num_stages))

    def layers_by_stage(self, layers: PyTree) -> list[list]:
        """Returns for each stage its layers: arrays ``[places, ...]``, or for a list of layers a list a place."""
        if self.is_stacked:
            homes = self.layers
            leaves = [move(leaf, home.sharding) for leaf, home in zip(self._pack(layers), homes, strict=True)]
            pieces = [home.pieces(leaf) for leaf, home in zip(leaves, homes, strict=True)]
            stages = range(self.layout.num_stages)
            return [[move(p[s], h.on(s, DATA)) for p, h in zip(pieces, homes, strict=True)] for s in stages]
        arrived: dict[int, Arrays] = {-1: []}
        homes = iter(self.layers)
        for i, layer in enumerate(layers):
            stage = self.stage_of_layer(i)
            arrived[i] = [self._enter(leaf, home, stage) for leaf, home in zip(jax.tree.leaves(layer), homes)]
        return [[arrived[i] for i in places] for places in self.layout.places.reshape(self.layout.num_stages, -1)]

    def outer_on(self, outer: PyTree, reads: Sequence[int], stage: int) -> Arrays:
        """Returns on one stage the leaves of outer that it reads."""
        leaves = jax.tree.leaves(outer)
        return [self._enter(leaves[i], self.outer[i], stage) for i in reads]

    def layers_home(self, by_stage: list[list]) -> PyTree:
        """Returns the gradients of layers, from those of each stage."""
        given, tree = jax.tree.flatten(self.given[LAYERS])
        if self.is_stacked:
            leaves = [home.join(pieces) for home, pieces in zip(self.layers, zip(*by_stage, strict=True), strict=True)]
            return self._unpack(jax.tree.unflatten(tree, leaves))
        at = {layer: place for place, layer in enumerate(self.layout.places.tolist())}
        by_place = [arrays for stage in by_stage for arrays in stage]
        leaves = [(self.stage_of_layer(i), leaf) for i in range(self.layout.num_layers) for leaf in by_place[at[i]]]
        home = [home.scatter(leaf, stage) for home, (stage, leaf) in zip(self.layers, leaves, strict=True)]
        return jax.tree.unflatten(tree, [move(leaf, sharding) for leaf, sharding in zip(home, given, strict=True)])

    def outer_home(self, grads: dict[int, tuple[int, jax.Array]], shapes: PyTree) -> PyTree:
        """Returns the gradients of outer from (stage, gradient) of the leaves that are read; the others have zeros."""
        given, tree = jax.tree.flatten(self.given[OUTER])
        leaves = [
            move(self.outer[i].scatter(grads[i][1], grads[i][0]), sharding)
            if i in grads
            else jnp.zeros(shape.shape, shape.dtype, device=sharding)
            for i, (sharding, shape) in enumerate(zip(given, jax.tree.leaves(shapes), strict=True))
        ]
        return jax.tree.unflatten(tree, leaves)

    def _enter(self, leaf: Any, home: Home, stage: int) -> jax.Array:
        return home.gather(move(leaf, home.sharding), stage)

    def _pack(self, layers: PyTree) -> Arrays:
        leaves = jax.tree.leaves(layers)
        if self.is_packed or self.layout.is_canonical:
            return leaves
        if all(isinstance(leaf, jax.Array) and leaf.sharding.device_set == self._devices for leaf in leaves):
            return self._packer(leaves)
        return self.layout.pack(jax.tree.map(jnp.asarray, leaves))

    def _unpack(self, packed: PyTree) -> PyTree:
        if self.is_packed or self.layout.is_canonical:
            return jax.tree.map(move, packed, self.given[LAYERS])
        return self._unpacker(packed)

    @cached_property
    def _devices(self) -> set:
        return set(self.mesh.devices.flat)

    @cached_property
    def _packer(self) -> Any:
        return jax.jit(self.layout.pack, out_shardings=[home.sharding for home in self.layers])

    @cached_property
    def _unpacker(self) -> Any:
        return jax.jit(self.layout.unpack, out_shardings=self.given[LAYERS])


def _sharding(leaf: Any, mesh: Mesh, default: tuple) -> NamedSharding:
    """The sharding of a leaf that lies on the mesh; the default for any other."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return NamedSharding(mesh, PartitionSpec(*default))
