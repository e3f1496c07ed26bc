"""The collectives of MPI and NCCL over one axis of a mesh, or over groups of its indices.

With the arrays of 4 devices written side by side, root 0 and + for the sum:

    shift by 1       a b c d  ->  d a b c           transpose: shift by -1
    broadcast        a b c d  ->  a a a a           reduce
    reduce           a b c d  ->  + 0 0 0           broadcast
    all_reduce       a b c d  ->  + + + +           all_reduce
    gather           a b c d  ->  abcd 0 0 0        scatter
    all_gather       a b c d  ->  abcd (each)       reduce_scatter
    scatter          efgh . . .  ->  e f g h        gather
    reduce_scatter   each efgh  ->  +e +f +g +h     all_gather
    all_to_all       each efgh  ->  each its own part of all devices     all_to_all back

The last column is the transpose of each, which computes its gradient: the transpose of the linear map from all devices' inputs
to all their outputs. ``groups`` are lists of indices of the axis, all of one size, with each index in exactly one; ranks, roots
and sizes are then those within a group.

Reference: MPI: A Message-Passing Interface Standard, version 4.1, chapter 6, which defines these names.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from jaxpar.fields import check_one_of

Groups = Sequence[Sequence[int]] | None
OwnGroups = list[list[int]] | None


def shift(
    tree: PyTree, axis: str, *, by: int = 1, wrap: bool = True, groups: Groups = None
) -> PyTree:
    """Returns the arrays of the device ``by`` positions before this one: each sends to the right and receives from the left.

    Args:
        tree: Arrays.
        axis: The mesh axis.
        by: The number of positions; if negative, devices send to the left.
        wrap: Whether the last device sends to the first. Otherwise a device that has no sender receives zeros.
        groups: Separate rings, in the order of their indices.

    **Collectives**: one collective-permute.
    """
    pairs = []
    for ring in _own_groups(axis, groups) or [range(lax.axis_size(axis))]:
        size = len(ring)
        for position, sender in enumerate(ring):
            to = position + by
            if wrap or 0 <= to < size:
                pairs.append((sender, ring[to % size]))
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def broadcast(tree: PyTree, axis: str, *, root: int = 0, groups: Groups = None) -> PyTree:
    """Returns the root's arrays on every device. **Collectives**: one all-reduce, to which the others add zeros."""
    return all_reduce(_only(tree, axis, root, groups), axis, groups=groups)


def reduce(
    tree: PyTree, axis: str, *, root: int = 0, op: str = "sum", groups: Groups = None
) -> PyTree:
    """Returns the sum over the devices on the root, zeros on the others. **Collectives**: one all-reduce."""
    return _only(all_reduce(tree, axis, op=op, groups=groups), axis, root, groups)


def all_reduce(tree: PyTree, axis: str, *, op: str = "sum", groups: Groups = None) -> PyTree:
    """Returns the sum over the devices on each of them, or with ``op`` the "mean", "max" or "min".

    The gradient of a maximum is divided equally among the devices that hold it, as in ``jnp.max``.

    **Collectives**: one all-reduce of all arrays together.
    """
    check_one_of(("sum", "mean", "max", "min"), op=op)
    own = _own_groups(axis, groups)
    if op == "max":
        return jax.tree.map(lambda x: _maximum(x, axis, own), tree)
    if op == "min":
        return jax.tree.map(lambda x: -_maximum(-x, axis, own), tree)
    total = _sum(tree, axis, own)
    if op == "sum":
        return total
    size = group_size(axis, groups)
    return jax.tree.map(lambda x: x / size, total)


def gather(
    tree: PyTree, axis: str, *, root: int = 0, dim: int = 0, groups: Groups = None
) -> PyTree:
    """Returns all arrays joined along ``dim`` on the root, zeros on the others. **Collectives**: one all-gather per array."""
    return _only(all_gather(tree, axis, dim=dim, groups=groups), axis, root, groups)


def all_gather(tree: PyTree, axis: str, *, dim: int = 0, groups: Groups = None) -> PyTree:
    """Returns all arrays joined along ``dim``, on each device. **Collectives**: one all-gather per array."""
    own = _own_groups(axis, groups)
    _check_dims(tree, dim)
    gathered = partial(lax.all_gather, axis=dim, tiled=True, axis_index_groups=own)
    return jax.tree.map(lambda x: gathered(x, axis), tree)


def scatter(
    tree: PyTree, axis: str, *, root: int = 0, dim: int = 0, groups: Groups = None
) -> PyTree:
    """Returns this device's part of the root's arrays, which are split equally along ``dim`` over the devices.

    The arrays of the other devices must have the same shapes; their values are not used.

    Raises:
        ValueError: The number of devices does not divide the dim.

    **Collectives**: one reduce-scatter per array, to which the others add zeros.
    """
    return reduce_scatter(_only(tree, axis, root, groups), axis, dim=dim, groups=groups)


def reduce_scatter(
    tree: PyTree, axis: str, *, dim: int = 0, op: str = "sum", groups: Groups = None
) -> PyTree:
    """Returns this device's part, along ``dim``, of the sum or mean over the devices.

    Raises:
        ValueError: The number of devices does not divide the dim.

    **Collectives**: one reduce-scatter per array.
    """
    check_one_of(("sum", "mean"), op=op)
    size = group_size(axis, groups)
    own = _own_groups(axis, groups)
    _check_dims(tree, dim, size)

    def part(x: Array) -> Array:
        total = lax.psum_scatter(
            x,
            axis,
            scatter_dimension=dim,
            tiled=True,
            axis_index_groups=own,
        )
        return total if op == "sum" else total / size

    return jax.tree.map(part, tree)


def all_to_all(
    tree: PyTree, axis: str, *, split_dim: int = 0, join_dim: int = 0, groups: Groups = None
) -> PyTree:
    """Returns this device's part of all arrays: each is split along ``split_dim``, and the parts are joined along ``join_dim``.

    Raises:
        ValueError: The number of devices does not divide the dim that is split.

    **Collectives**: one all-to-all per array.
    """
    own = _own_groups(axis, groups)
    _check_dims(tree, split_dim, group_size(axis, groups))
    _check_dims(tree, join_dim)
    exchange = partial(lax.all_to_all, tiled=True, axis_index_groups=own)
    return jax.tree.map(lambda x: exchange(x, axis, split_dim, join_dim), tree)


def barrier(tree: PyTree, axis: str, *, groups: Groups = None) -> PyTree:
    """Returns ``tree`` once every device has reached this point; computations that use the result run after that.

    **Collectives**: one all-reduce of one number.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.size(x)]
    if not leaves:
        return tree
    # The sum depends on the arrays and the result on the sum: else XLA could run it early, or not at all.
    first = jnp.ravel(leaves[0])[0].astype(jnp.float32)
    one = jnp.isnan(first).astype(jnp.int32)
    present = _sum(one, axis, _own_groups(axis, groups)) >= 0
    return _where(present, tree)


def rank(axis: str, groups: Groups = None) -> Array:
    """Returns the index of this device in the axis, or in its group."""
    index = lax.axis_index(axis)
    if groups is None:
        return index
    ranks = {}
    for group in groups:
        for place, member in enumerate(group):
            ranks[member] = place
    return jnp.array([ranks[member] for member in sorted(ranks)])[index]


def group_size(axis: str, groups: Groups = None) -> int:
    """Returns the number of devices of the axis, or of each group; raises unless the groups partition the axis equally."""
    size = lax.axis_size(axis)
    if groups is None:
        return size
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1:
        raise ValueError(
            f"groups must have one size, since all devices run one program; got sizes {sizes} in {groups}. Make "
            "them equal."
        )
    if sorted(index for group in groups for index in group) != list(range(size)):
        raise ValueError(
            f"groups must hold each index of the axis once; got {groups} for {axis}={size}. Use 0 to {size - 1}."
        )
    return sizes[0]


def _own_groups(axis: str, groups: Groups) -> OwnGroups:
    group_size(axis, groups)
    return None if groups is None else [list(group) for group in groups]


def _only(tree: PyTree, axis: str, root: int, groups: Groups) -> PyTree:
    """Returns the arrays on the root, zeros on the others."""
    size = group_size(axis, groups)
    if not 0 <= root < size:
        raise ValueError(
            f"root must be from 0 to {size - 1}, an index in the axis or group; got {root}. Choose another."
        )
    return _where(rank(axis, groups) == root, tree)


def _where(condition: Array, tree: PyTree) -> PyTree:
    """Returns the arrays where a condition holds, zeros elsewhere."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def _sum(tree: PyTree, axis: str, groups: OwnGroups) -> PyTree:
    try:
        return lax.psum(tree, axis, axis_index_groups=groups)
    except NotImplementedError:
        # Groups under check_vma: an all-reduce is a reduce-scatter and an all-gather.
        return jax.tree.map(lambda x: _sum_in_two_steps(x, axis, groups), tree)


def _sum_in_two_steps(x: Array, axis: str, groups: OwnGroups) -> Array:
    shape, count = jnp.shape(x), jnp.size(x)
    padding = -count % group_size(axis, groups)
    flat = jnp.pad(jnp.ravel(x), (0, padding))
    part = lax.psum_scatter(flat, axis, tiled=True, axis_index_groups=groups)
    whole = lax.all_gather(part, axis, tiled=True, axis_index_groups=groups)
    return whole[:count].reshape(shape)


def _maximum(x: Array, axis: str, groups: OwnGroups) -> Array:
    @jax.custom_jvp  # jax.lax.pmax has no differentiation rule
    def maximum(x: Array) -> Array:
        return lax.pmax(x, axis, axis_index_groups=groups)

    @maximum.defjvp
    def share(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
        (x,), (tangent,) = primals, tangents
        top = maximum(x)
        holds = (x == top).astype(tangent.dtype)
        part = holds / _sum(holds, axis, groups)
        return top, _sum(tangent * part, axis, groups)

    return maximum(x)


def _check_dims(tree: PyTree, dim: int, parts: int = 1) -> None:
    for leaf in jax.tree.leaves(tree):
        shape = jnp.shape(leaf)
        if not 0 <= dim < len(shape):
            raise ValueError(
                f"dim must be one of the array's, counted from 0; got dim={dim} for shape {shape}."
            )
        if shape[dim] % parts:
            up = -(-shape[dim] // parts) * parts
            raise ValueError(
                f"a dim that is split must be divisible by the number of devices; got dim {dim} of shape {shape}, {parts} "
                f"devices. Pad it to {up}."
            )
