"""ZeRO: shards optimizer state, gradients and params over ``data`` and ``context`` (Rajbhandari et al. 2020, arXiv 1910.02054).

    level   sharded              collectives over data and context together
    0       nothing              gradients: one all-reduce per step
    1       optimizer state      gradients: one reduce-scatter per step; params: one all-gather, after the update
    2       and gradients        a reduce-scatter whenever gradients are computed, so sums are always sharded
    3       and params           layers: an all-gather before each use; outer: one per step

At levels 2 and 3 stacked layers are reduced one at a time, and outer with each microbatch. Outer is reduced once per step with
several stages, of which one runs each end, and with ``tensor``, where both ends run in one tick and their whole gradients would
take as much memory as sums of them. Layers in a list with their outer, and functions without layers, are reduced once per step
too.

The devices of both axes hold the same params and add up their gradients, whether they have other rows or other parts of the
same rows. A param is sharded along its first dim that no other axis shards and that their number divides; a param without one
is replicated, which a run says at its start (``left_whole``). With a ``replica`` axis (HSDP) all this happens
inside each group of N such devices, and at the end of the step one all-reduce over ``replica`` adds up the shards of the
groups: 1 / N of the gradients' bytes leave a group, and no param.

A param whose own sharding names ``data`` is owned: each replica has its part for good, as of experts, to which layers send
rows. It is neither gathered nor reduced over ``data`` at any level, and sharded over ``context`` alone.

Each param has a ``ZeroShard``, which says this of it. A step has one ``Zero``, made by ``zero_of``, which does it:

    fetch     a shard of a param -> the param
    add       a gradient of a microbatch -> what is added to the sums
    finish    the sums of a replica -> the loss and the gradients over all replicas
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar.data_parallel import reduce_gradients
from jaxpar.dtypes import by_parts, from_floats, merge, to_floats, widen
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import CONTEXT, DATA, OF_ZERO, REPLICA, REPLICAS, STAGE, TENSOR, cut_of, entry_axes
from jaxpar.shard_map import on_tensor_shards, tensor_part
from jaxpar.trainable import only_trained

# -- one param ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroShard:
    """How one param is sharded over ``data`` and ``context``.

    Attributes:
        dim: The dim that is sharded; None: the param, its gradient and its optimizer state are replicated.
        axes: The axes over which it is, those of one device left out; ``context`` alone for an owned param.
        tensor: Its PartitionSpec over ``tensor``.
        ndim: The number of its dims. An array of fewer dims is one layer of it, without the leading dim.
        dtype: Its dtype.
        is_early: Whether its gradient is reduced whenever it is computed, not once a step: at levels 2 and 3 in stacked layers,
            and in outer without ``stage`` and ``tensor``.
        is_param: Whether the param itself is sharded, and gathered where it is used: at level 3.
        is_layer: Whether it holds stacked layers, which are gathered and reduced one at a time.
        owned: The dim that its own sharding puts over ``data``; None: none. A replica computes with its part, whose gradient is
            complete once it is summed over ``context``.
    """

    dim: int | None
    axes: tuple[str, ...]
    tensor: PartitionSpec
    ndim: int
    dtype: Any
    is_early: bool
    is_param: bool
    is_layer: bool
    owned: int | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each device of a group has a part of its gradient."""
        return self.dim is not None

    @property
    def is_replicated(self) -> bool:
        """Whether every device of a group has its whole gradient."""
        return self.dim is None and self.owned is None

    def at_rest(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns ``spec`` with the axes on the dim that is sharded, and ``data`` on one that is owned."""
        owned = _with_axes(spec, self.owned, (DATA,))
        return _with_axes(owned, self.dim, self.axes)

    def in_step(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns ``spec`` as ``at_rest`` if the param itself is sharded, else with ``data`` on a dim that is owned."""
        if self.is_param:
            return self.at_rest(spec)
        return _with_axes(spec, self.owned, (DATA,))

    def gather(self, param: jax.Array) -> jax.Array:
        """Returns the whole param, in the dtype that is given.

        **Collectives**: an all-gather over ``axes`` if the param is sharded.
        """
        if not self.is_param:
            return param
        dim, tensor = self._of_rank(param.ndim)

        def whole(shard: jax.Array) -> jax.Array:
            return jax.lax.all_gather(shard, self.axes, axis=dim, tiled=True)

        return on_tensor_shards(whole, param, tensor)

    def scatter(self, grad: jax.Array, dtype: Any = None) -> jax.Array:
        """Returns this device's shard of the sum of a gradient over its group; a gradient that is not sharded as it is.

        Args:
            grad: The gradient.
            dtype: The dtype in which it is sent and added; None: float32 or wider.

        **Collectives**: a reduce-scatter over ``axes`` if it is sharded.
        """
        if self.dim is None:
            return grad
        dim, tensor = self._of_rank(grad.ndim)

        def summed(sent: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(sent, self.axes, scatter_dimension=dim, tiled=True)

        if dtype is None:
            each = lambda parts: [on_tensor_shards(summed, part, tensor) for part in parts]
            return by_parts(each, widen(grad))
        sent = to_floats(grad, dtype)
        return from_floats(on_tensor_shards(summed, sent, tensor), grad)

    def _of_rank(self, ndim: int) -> tuple[int, PartitionSpec]:
        """Returns the sharded dim and the spec over ``tensor`` of the param, or of one layer of it."""
        assert self.dim is not None, "no dim is sharded"
        leading = self.ndim - ndim
        return self.dim - leading, PartitionSpec(*self.tensor[leading:])


def _with_axes(spec: PartitionSpec, dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    named = {axis for entry in spec for axis in entry_axes(entry)}
    if dim is None or named.issuperset(axes):
        return spec
    missing = dim + 1 - len(spec)
    entries = [*spec, *(None,) * missing]
    entries[dim] = axes[0] if len(axes) == 1 else axes
    return PartitionSpec(*entries)


def zero_shard(
    level: int,
    param: Any,
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    *,
    is_layer: bool = False,
    once: bool = True,
) -> ZeroShard:
    """Returns the ZeroShard of a param.

    Args:
        level: The ZeRO level, 0 to 3.
        param: An array or ShapeDtypeStruct.
        spec: Its PartitionSpec; dims that it shards over other axes are not used.
        mesh: The mesh.
        is_layer: Whether it holds stacked layers.
        once: Whether its gradient is reduced once a step at any level.
    """
    owned = cut_of(spec, DATA)
    axes = [axis for axis in OF_ZERO if mesh.shape[axis] > 1]
    if owned is not None:
        axes = [axis for axis in axes if axis != DATA]
    dim = _dim_to_shard(param.shape, spec, mesh, axes) if level and axes else None
    is_sharded = dim is not None
    return ZeroShard(
        dim,
        tuple(axes),
        tensor_part(spec),
        len(param.shape),
        param.dtype,
        is_early=is_sharded and level >= 2 and not once,
        is_param=is_sharded and level == 3,
        is_layer=is_layer,
        owned=owned,
    )


def _dim_to_shard(
    shape: Sequence[int],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str],
) -> int | None:
    """Returns the first dim that no other axis shards and that the axes divide: its shards are contiguous.

    XLA would transpose what it gathers and scatters along another dim.
    """
    free = {None} if mesh.shape[TENSOR] > 1 else {None, TENSOR}
    parts = math.prod(mesh.shape[axis] for axis in axes)
    missing = len(shape) - len(spec)
    entries = [*spec, *(None,) * missing]
    for dim, size in enumerate(shape):
        if entries[dim] in free and size and size % parts == 0:
            return dim
    return None


def shardings_at_rest(params: PyTree, shardings: PyTree) -> PyTree:
    """Returns shardings of optimizer state (ZeRO 1 to 3) or of params (ZeRO 3): ``shardings`` with its axes on a dim of each.

    Args:
        params: Arrays or ShapeDtypeStructs.
        shardings: Their NamedShardings without ZeRO.
    """

    def at_rest(param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        mesh, spec = sharding.mesh, sharding.spec
        shard = zero_shard(1, param, spec, mesh)
        return NamedSharding(mesh, shard.at_rest(spec))

    return jax.tree.map(at_rest, params, shardings)


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Zero:
    """What the replicas exchange in a step, for all of its params or, as ``zero[LAYERS]``, for a part of them.

    Params and gradients may have any structure, also that of a list, with their leaves in the order of the shards; those of
    layers may be the stacks, slices ``[1, ...]`` of them, or one layer.

    Attributes:
        shards: The ZeroShard of each param, in a tree like theirs; frozen params have no gradient.
        reduce_dtype: The dtype in which gradients are reduced; None: float32 or wider.
        overlaps: Whether reductions are to run beside the backward pass.
        in_turn: Whether the reductions of a layer wait for one another. XLA for the CPU may start those of two devices in
            another order, and then ends the program or waits forever; on GPUs all devices have one order.
    """

    shards: PyTree
    reduce_dtype: Any = None
    overlaps: bool = False
    in_turn: bool = False

    def __getitem__(self, part: Any) -> "Zero":
        return replace(self, shards=self.shards[part])

    @property
    def of_params(self) -> list[ZeroShard]:
        """The ZeroShard of each param."""
        return jax.tree.leaves(self.shards)

    @property
    def of_grads(self) -> list[ZeroShard]:
        """The ZeroShard of each gradient."""
        return jax.tree.leaves(only_trained(self.shards))

    @property
    def gathers_layers(self) -> bool:
        """Whether the params of layers are gathered one layer at a time (level 3)."""
        return any(shard.is_param and shard.is_layer for shard in self.of_params)

    @property
    def scatters_early(self) -> bool:
        """Whether gradients are reduce-scattered whenever they are computed (levels 2 and 3)."""
        return any(shard.is_early for shard in self.of_grads)

    def by_grad(self, numbers: Sequence[int]) -> dict[int, "Zero"]:
        """Returns that of each gradient, by numbers that are given for them."""
        pairs = zip(numbers, self.of_grads, strict=True)
        return {number: replace(self, shards=shard) for number, shard in pairs}

    def fetch(self, params: PyTree) -> PyTree:
        """Returns whole params, in the dtypes that are given: they may be cast already.

        It is not to be differentiated: a pipeline computes gradients of whole params, and adds them by ``add``.
        """
        return map_leaves(ZeroShard.gather, self.of_params, params)

    def fetch_once(self, params: PyTree) -> PyTree:
        """Returns params with all but stacked layers whole, which a step fetches once for all microbatches."""

        def fetched(shard: ZeroShard, param: jax.Array) -> jax.Array:
            return param if shard.is_layer else shard.gather(param)

        return map_leaves(fetched, self.of_params, params)

    def add(self, grads: PyTree) -> PyTree:
        """Returns gradients as they are added over microbatches: this device's shard of those that are reduced early."""
        last: jax.Array | None = None

        def added(shard: ZeroShard, grad: jax.Array) -> jax.Array:
            nonlocal last
            if not shard.is_early:
                return grad
            if self.in_turn and last is not None:
                grad, _ = jax.lax.optimization_barrier((grad, last))
            last = shard.scatter(grad, self.reduce_dtype)
            return last

        return map_leaves(added, self.of_grads, grads)

    def finish(self, loss_sums: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss and gradients reduced over the replicas, each gradient sharded as its ZeroShard says.

        Args:
            loss_sums: loss_sum and further sums, or None to reduce gradients alone.
            grads: The sums of gradients as ``add`` returns them.

        **Collectives**: one all-reduce over the replicas of the loss and the replicated gradients (two with a
        ``reduce_dtype``), and a reduce-scatter over ``data`` and ``context`` for each gradient that is sharded and not yet
        reduced. If any is sharded, the all-reduce is over ``data`` and ``context``, and one over ``replica`` of the loss and
        all gradients follows. Those of owned params are reduced over ``context`` in the same ways, in an all-reduce of their
        own where they are not sharded.
        """
        leaves, tree = jax.tree.flatten(grads)
        shards = self.of_grads
        everything = range(len(shards))
        replicated = [i for i in everything if shards[i].is_replicated]
        owned = [i for i in everything if shards[i].dim is None and i not in replicated]
        if len(replicated) == len(shards):
            loss_sums, leaves = self._sum(loss_sums, leaves, replicated, REPLICAS)
        else:
            loss_sums, leaves = self._sum(loss_sums, leaves, replicated, OF_ZERO)
            _, leaves = self._sum(None, leaves, owned, (CONTEXT,))
            leaves = [self._scatter_rest(*each) for each in zip(shards, leaves, strict=True)]
            loss_sums, leaves = self._sum(loss_sums, leaves, everything, (REPLICA,))
        return loss_sums, tree.unflatten(leaves)

    def finish_outer(self, loss_sums: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss and all gradients as ``finish`` does, for layers whose gradients are already so.

        **Collectives**: those of ``finish``, for ``outer`` alone.
        """
        loss_sums, outer = self[OUTER].finish(loss_sums, grads[OUTER])
        return loss_sums, grads | {OUTER: outer}

    def _scatter_rest(self, shard: ZeroShard, grad: jax.Array) -> jax.Array:
        return grad if shard.is_early else shard.scatter(grad, self.reduce_dtype)

    def _sum(
        self,
        loss_sums: PyTree,
        grads: list,
        which: Sequence[int],
        axes: Sequence[str],
    ) -> tuple[PyTree, list]:
        """Returns the loss and some gradients summed over axes: together, or apart if gradients have a dtype of their own."""
        some = [grads[i] for i in which]
        if self.reduce_dtype is None:
            loss_sums, some = reduce_gradients((loss_sums, some), axes=axes)
        else:
            loss_sums = reduce_gradients(loss_sums, axes=axes)
            some = reduce_gradients(some, self.reduce_dtype, axes)
        return loss_sums, merge(grads, which, some)


def zero_of(
    level: int,
    params: PyTree,
    specs: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    stacked: bool,
    reduce_dtype: Any = None,
    overlaps: bool = False,
) -> Zero:
    """Returns what the replicas exchange in a step.

    Args:
        level: The ZeRO level, 0 to 3.
        params: Arrays or ShapeDtypeStructs.
        specs: The PartitionSpec of each.
        mesh: The mesh.
        stacked: Whether the params hold stacked layers.
        reduce_dtype: The dtype in which gradients are reduced; None: float32 or wider.
        overlaps: Whether reductions are to run beside the backward pass.
    """
    shard = partial(zero_shard, level, mesh=mesh)
    shards = jax.tree.map(shard, params, specs)
    if stacked:
        of_part = {
            LAYERS: partial(shard, is_layer=True, once=False),
            OUTER: partial(shard, once=mesh.shape[STAGE] > 1 or mesh.shape[TENSOR] > 1),
        }
        shards |= {
            part: jax.tree.map(of, params[part], specs[part]) for part, of in of_part.items()
        }
    is_on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return Zero(shards, reduce_dtype, overlaps, in_turn=is_on_cpu)


def map_leaves(
    function: Callable[[ZeroShard, Any], Any],
    shards: list[ZeroShard],
    arrays: PyTree,
) -> PyTree:
    """Returns ``function(shard, array)`` for each leaf of a tree."""
    leaves, tree = jax.tree.flatten(arrays)
    pairs = zip(shards, leaves, strict=True)
    return tree.unflatten(function(*pair) for pair in pairs)
