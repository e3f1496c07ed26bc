"""All calls to ``jax.shard_map``, whose interface still changes: functions inside see their shard of ``data`` and ``stage``.

All axes but ``tensor`` are always manual: if ``data`` were automatic, XLA would reduce gradients once per microbatch, and two
automatic axes under a manual one can abort the process. ``tensor`` is automatic, so XLA inserts the collectives of tensor
parallelism. ``check_vma`` is off, so differentiation inside returns the gradients of one shard, and all sums are explicit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import axes_named
from jaxpar.mesh import DATA, MANUAL, TENSOR


def manual_over_data_and_stage(
    function: Callable,
    mesh: Mesh | AbstractMesh,
    *,
    in_specs: PyTree,
    out_specs: PyTree,
    axes: frozenset[str] = frozenset(MANUAL),
) -> Callable:
    """Returns ``function`` run on each shard over all axes but ``tensor``, with its arguments split by ``in_specs``.

    Args:
        function: The function.
        mesh: The mesh.
        in_specs: The PartitionSpecs of its arguments over the manual axes.
        out_specs: Those of its results.
        axes: The manual axes; with ``tensor`` among them, which must then be of size 1, the function may use host callbacks.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


NO_MESH = Mesh(np.empty((), dtype=object), ())


@contextmanager
def as_manual_over(axes: frozenset[str], mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Sets the context in which ``manual_over_data_and_stage`` traces a function, to trace one before it runs there."""
    with jax.set_mesh(NO_MESH), jax.sharding.use_abstract_mesh(_manual(axes, mesh)):
        yield


def _manual(axes: frozenset[str], mesh: Mesh | AbstractMesh) -> AbstractMesh:
    kinds = tuple(AxisType.Manual if name in axes else AxisType.Auto for name in mesh.axis_names)
    return mesh.abstract_mesh.update(axis_types=kinds)


@contextmanager
def as_on_a_device(mesh: AbstractMesh) -> Iterator[None]:
    """Sets the context to trace a function, with its collectives, of what a device has in ``manual_over_data_and_stage``."""
    axes = frozenset(MANUAL)
    sizes = {axis: mesh.shape[axis] for axis in axes}
    with jax.sharding.use_abstract_mesh(_manual(axes, mesh)), axes_named(sizes):
        yield


def on_tensor_shards(function: Callable, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns ``function(array)``, computed on each shard over ``tensor`` separately; for ``manual_over_data_and_stage``.

    XLA's partitioner gathers an array that is sharded over an automatic axis before a reduce-scatter or an all-gather over a
    manual axis. It does not do so before an all-reduce.

    Args:
        function: A function of one array that keeps its sharding over ``tensor``.
        array: An array whose sharding over ``tensor`` is up to XLA.
        spec: Its sharding over ``tensor``.
    """
    return (
        each_on_its_tensor_shard(function, in_specs=spec, out_specs=spec)(array)
        if TENSOR in spec
        else function(array)
    )


def each_on_its_tensor_shard(
    function: Callable, *, in_specs: PyTree, out_specs: PyTree
) -> Callable:
    """Returns ``function``, run on each shard over ``tensor`` separately inside ``manual_over_data_and_stage``.

    Elsewhere the function is returned unchanged.

    Args:
        function: A function that needs no data of other shards.
        in_specs: The PartitionSpecs of its arguments over ``tensor``.
        out_specs: Those of its results.
    """
    if not _is_tensor_automatic():
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False
    )


def whole_over_tensor(array: jax.Array) -> jax.Array:
    """Returns an array that XLA does not shard over ``tensor``, inside ``manual_over_data_and_stage``; for results of branches.

    XLA refuses branches that a constraint in one of them shards differently.
    """
    return (
        jax.lax.with_sharding_constraint(array, PartitionSpec())
        if _is_tensor_automatic()
        else array
    )


def _is_tensor_automatic() -> bool:
    """Whether this is traced inside ``manual_over_data_and_stage`` with ``tensor`` left automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return kinds.get(DATA) == AxisType.Manual and kinds.get(TENSOR) == AxisType.Auto


def take_layer(stacked: jax.Array, layer: int) -> jax.Array:
    """Returns ``stacked[layer]`` bit for bit, with its sharding over the other dims.

    **Collectives**: one all-reduce of that layer if the leading dim is sharded; plain indexing would gather all layers.
    """
    sharding = stacked.sharding
    if isinstance(sharding, NamedSharding) and sharding.spec and sharding.spec[0] is not None:
        return _take_from_owner(stacked, layer, sharding)
    return _take(stacked, layer)


_take = jax.jit(partial(jax.lax.dynamic_index_in_dim, keepdims=False))


@partial(jax.jit, static_argnums=2)
def _take_from_owner(stacked: jax.Array, layer: jax.Array, sharding: NamedSharding) -> jax.Array:
    spec = PartitionSpec(*sharding.spec, *(None,) * (stacked.ndim - len(sharding.spec)))

    def on_shard(shard: jax.Array, layer: jax.Array) -> jax.Array:
        at = layer - jax.lax.axis_index(spec[0]) * len(shard)
        values = jax.lax.dynamic_index_in_dim(
            shard, jnp.clip(at, 0, len(shard) - 1), keepdims=False
        )
        bits = jax.lax.bitcast_convert_type(
            values, f"uint{8 * values.dtype.itemsize}"
        )  # a sum with zeros changes -0.0
        bits = jax.lax.psum(jnp.where((at >= 0) & (at < len(shard)), bits, 0), spec[0])
        return jax.lax.bitcast_convert_type(bits, values.dtype)

    shape = PartitionSpec(*spec[1:])
    return jax.shard_map(
        on_shard,
        mesh=sharding.mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=shape,
        check_vma=False,
    )(stacked, layer)


def tensor_part(spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec without the axes other than ``tensor``."""
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return PartitionSpec(*(TENSOR if TENSOR in name else None for name in names))
