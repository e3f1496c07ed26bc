"""Data parallelism: batches split over the mesh, gradients summed over microbatches and then over replicas.

    batch [16, ...] on data=2, two microbatches          replica 0: rows 0-7:  microbatch 0 = rows 0-3,  1 = rows 4-7
                                                         replica 1: rows 8-15: microbatch 0 = rows 8-11, 1 = rows 12-15

A replica splits its own rows, so no row moves. It adds gradients over its microbatches, and only the sum is reduced over the
replicas: one all-reduce per step, together with the loss, or on GPUs one a layer where a batch is not split. With ``replica``
there are as many groups of ``data`` replicas, the first rows in the first group. The total weight of the batch, a single
number, is reduced before it.

With ``context`` the sequences of a batch are split too, dim 1 of every array that has one (``context_parallel.py``). Gradients
are then summed over all devices that share a row, in the same all-reduce.

Losses, weights and gradients are added and reduced in float32 or wider, whatever the dtype of the params.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from numbers import Integral
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import Tracer, closure_converted
from jaxpar.context_parallel import (
    check_are_sequences,
    check_are_there,
    is_named,
    is_sequence,
    sequence_length,
    zig_zag,
)
from jaxpar.data.same_batch import (
    check_kept,
    check_same_everywhere,
    check_same_rows,
    look_for_equal_rows,
)
from jaxpar.dtypes import by_parts, from_floats, is_key, to_floats, wide_dtype, widen
from jaxpar.fields import arg, check_at_least, check_kind
from jaxpar.mesh import CONTEXT, DATA, REPLICA, REPLICAS, check_mesh, num_replicas, spec_of_rows
from jaxpar.sharding import from_host, path_string, shard

_PAD = ' (jaxpar.data.batches.pad_rows adds rows, and a column "weight", 0 for these, by which the loss must multiply)'


def shard_batch(
    batch: PyTree,
    mesh: Mesh,
    *,
    num_rows: int | None = None,
    seq: int | None = None,
    sequences: Collection[str] = (),
) -> PyTree:
    """Returns a host batch as global arrays with rows sharded over ``replica`` and ``data``, and sequences over ``context``.

    With a ``context`` axis the positions of each row are in the order of the devices (``context_parallel.py``), of every array
    ``[rows, seq, ...]``. An array says that it is one by its name (tokens, targets, positions, segments, mask, weight, weights,
    input_ids, position_ids, segment_ids, attention_mask, loss_mask) or is named in ``sequences``. Other arrays of a dict are
    features of a row if their second dim is not that of the sequences, such as ``[rows, 1, ...]``; each device has them whole.

    A dict gets ``positions`` [rows, seq], int32, if it has none: 0, 1, ... in each row, or in each document if there are
    ``segments`` [rows, seq]; segments, runs of equal numbers, are numbered from 0 in each row. The same batch on one device
    then gives the same numbers, to a model that goes by positions and segments.

    Args:
        batch: Arrays with a common leading dim, the rows: all of them, the same on every process, or with ``num_rows`` those of
            ``local_rows(num_rows, mesh)`` alone, in that order. Sequences are in their own order: whole, or with ``seq`` the
            columns alone that ``local_rows(num_rows, mesh, seq=seq)`` names. A dict of columns that has segments must have
            positions too, from the beginning of each document, since it may lie in columns that are not here; segments are then
            numbered by the columns where their documents begin.
        mesh: A mesh from ``make_mesh``.
        num_rows: The number of rows of the whole batch, for a batch of which each process has its own rows; None: the batch is
            whole.
        seq: The length of whole sequences, for a batch of which each process has its own columns; None: sequences are whole.
        sequences: The paths of other arrays ``[rows, seq, ...]``, such as "x" or "inputs/x". A batch with a single array of two
            or more dims needs none.

    Raises:
        ValueError: Integers beyond JAX's 32 bits; a leaf without rows, unequal numbers of rows, a number of rows that the
            replicas do not divide, or rows or columns that are not as many as this process holds; a whole batch, the first of
            its shapes, that other processes have otherwise, or rows that several processes hold, and not alike; a name in
            ``sequences`` that the batch does not have; with ``context`` sequences of unequal lengths, an array whose second dim
            may be the sequence or features, a length that twice the axis does not divide, or positions that do not count up by
            one in each document.
    """
    check_mesh(mesh)
    check_kept(batch)
    if num_rows is None and seq is None:
        check_same_everywhere(batch, mesh)
    batch, dims = _in_order_of_devices(batch, mesh, seq, sequences)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), batch_specs(batch, mesh))
    is_whole = num_rows is None
    if num_rows is None:
        num_rows = check_batch(batch, mesh.shape[DATA], replica=mesh.shape[REPLICA])
        if seq is None:
            return shard(batch, shardings)
        local = np.arange(num_rows)
    else:
        local = local_rows(num_rows, mesh)
    if (count := check_batch(batch, 1)) != len(local):
        raise ValueError(
            f"a process must give the rows that its devices hold; got {count} rows, and {len(local)} of num_rows={num_rows} "
            "are held here. Give those of jaxpar.local_rows(num_rows, mesh), or the whole batch without num_rows."
        )
    columns = [at for at, _ in dims]
    if is_whole or _are_shared(mesh, has_columns=seq is not None):
        num_parts = 1 if is_whole else len(local) * num_replicas(mesh) // num_rows
        numbers = {"rows": local, "num_rows": num_rows, "num_parts": num_parts}
        check_same_rows(batch, mesh, **numbers, columns=columns)
    look_for_equal_rows(batch, [local, *columns])
    length, of_rows = sequence_length(batch), [(local, num_rows)]

    def send(leaf: Any, sharding: NamedSharding) -> jax.Array:
        own = [*of_rows, *dims] if is_sequence(leaf, length) else of_rows
        return from_host(leaf, sharding, own)

    return jax.tree.map(send, batch, shardings)


def _are_shared(mesh: Mesh, *, has_columns: bool) -> bool:
    """Returns whether several processes hold the same rows, or the same columns of them if each has its own columns alone."""
    axes = (REPLICA, DATA, CONTEXT) if has_columns else (REPLICA, DATA)
    which = [mesh.axis_names.index(axis) for axis in axes]
    parts = np.moveaxis(mesh.devices, which, range(len(axes)))
    parts = parts.reshape(math.prod(parts.shape[: len(axes)]), -1)
    return any(len({device.process_index for device in part}) > 1 for part in parts)


# -- sequences ---------------------------------------------------------------------------------------------------------


def batch_specs(batch: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the spec of each leaf of a batch: rows over the replicas, and sequences, if they are split, over ``context``."""
    rows, length = spec_of_rows(mesh), sequence_length(batch)
    splits = lambda leaf: mesh.shape[CONTEXT] > 1 and is_sequence(leaf, length)
    return jax.tree.map(lambda leaf: PartitionSpec(*rows, CONTEXT) if splits(leaf) else rows, batch)


def microbatch_shapes(batch: PyTree, mesh: Mesh | AbstractMesh, num_microbatches: int) -> PyTree:
    """Returns the shapes of a device's part of a microbatch."""
    count, length = num_replicas(mesh) * num_microbatches, sequence_length(batch)

    def part(leaf: Any) -> jax.ShapeDtypeStruct:
        rows, *dims = leaf.shape
        if is_sequence(leaf, length):
            dims[0] //= mesh.shape[CONTEXT]
        return jax.ShapeDtypeStruct((rows // count, *dims), leaf.dtype)

    return jax.tree.map(part, jax.eval_shape(lambda batch: batch, batch))


def check_sequences(
    batch: PyTree,
    mesh: Mesh | AbstractMesh,
    seq: int | None = None,
    sequences: Collection[str] | None = None,
) -> int:
    """Returns how many columns a batch has; raises where a ``context`` axis cannot split its sequences, without one 0.

    Args:
        batch: Arrays or ShapeDtypeStructs.
        mesh: The mesh.
        seq: The length of whole sequences; None: that of the batch.
        sequences: The paths of arrays that are sequences although their names do not say so; None: ``shard_batch`` has made the
            batch, or all are.
    """
    context = mesh.shape[CONTEXT]
    if context == 1 and not sequences:
        return 0
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {
        path_string(path) or "batch": jnp.shape(leaf) for path, leaf in leaves if jnp.ndim(leaf) > 1
    }
    if context == 1:
        check_are_there(shapes, sequences or ())
        return 0
    named = [path for path in shapes if is_named(path, sequences or ())]
    # Where no array is named, none says how long the sequences are.
    has_features = isinstance(batch, dict) and len(named) > 0
    lengths = {path: shapes[path][1] for path in (named if has_features else shapes)}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            "the context axis splits dim 1, the sequence, of the arrays of a batch, so all that have one must have the same; "
            f"got {lengths or 'no such array'} and {arg(context=context)}. Give features of positions as "
            "[rows, seq, features], name the sequences of a dict that has features of rows too by "
            f"shard_batch(batch, mesh, sequences=[...]), or use {arg(context=1)}."
        )
    count, chunks = next(iter(lengths.values())), 2 * context
    seq = count if seq is None else seq
    if sequences is not None:
        check_are_sequences(shapes, sequences, {count, seq, seq // context})
    if seq < 1 or seq % chunks:
        raise ValueError(
            "a sequence must be divisible by twice the context axis, since each device has two chunks of it; got "
            f"{arg(seq=seq, context=context)}. Use {arg(seq=max(-(-seq // chunks), 1) * chunks)}, or another {arg('context')}."
        )
    return count


def _in_order_of_devices(
    batch: PyTree, mesh: Mesh, seq: int | None, sequences: Collection[str]
) -> tuple[PyTree, list[tuple[np.ndarray, int]]]:
    """Returns a host batch with the positions of each row in the order of the devices, and a dict with ``positions``.

    With a ``context`` axis there is one item beside it: which places in that order are here, and how many there are.
    """
    count, is_whole = check_sequences(batch, mesh, seq, sequences), seq is None
    if mesh.shape[CONTEXT] == 1:
        return batch, []
    seq = count if seq is None else seq
    columns = np.arange(seq) if is_whole else local_rows(num_replicas(mesh), mesh, seq=seq)[1]
    if count != len(columns):
        raise ValueError(
            "a process must give the columns that its devices hold; got "
            f"{count} columns, and {len(columns)} of seq={seq} are held here. Give those of "
            "jaxpar.local_rows(num_rows, mesh, seq=seq), or whole sequences without seq."
        )
    batch = _with_positions(batch, columns, is_whole=is_whole)
    order = zig_zag(seq, mesh.shape[CONTEXT])
    is_here = np.isin(order, columns)
    at = np.searchsorted(columns, order[is_here])
    on_host = lambda leaf: leaf if is_key(leaf) else np.asarray(leaf)
    batch = jax.tree.map(
        lambda leaf: on_host(leaf)[:, at] if is_sequence(leaf, count) else leaf, batch
    )
    return batch, [(np.flatnonzero(is_here), seq)]


def _with_positions(batch: PyTree, columns: np.ndarray, *, is_whole: bool) -> PyTree:
    """Returns a dict of some columns with the position of each token in its document, and its documents numbered."""
    if not isinstance(batch, dict):
        return batch
    seq = len(columns)
    rows = next(len(leaf) for leaf in jax.tree.leaves(batch) if is_sequence(leaf, seq))
    segments, positions = (np.asarray(batch.get(name, 0)) for name in ("segments", "positions"))
    for name, given in (("segments", segments), ("positions", positions)):
        if name in batch and (
            given.shape != (rows, seq) or not np.issubdtype(given.dtype, np.integer)
        ):
            raise ValueError(
                f"{name} must be integers [rows, seq]; got {given.dtype} of shape {given.shape}, where rows, seq are {rows}, "
                f"{seq}. Give one for each token, or leave them out."
            )
    packed, steps = "segments" in batch, np.diff(columns)
    segments = np.broadcast_to(segments, (rows, seq))
    is_next = (segments[:, 1:] == segments[:, :-1]) & ((steps == 1) | (not packed))
    starts = np.pad(~is_next, ((0, 0), (1, 0)))
    numbers = np.cumsum(starts, axis=1, dtype=np.int32)
    if "positions" not in batch:
        if packed and not is_whole:
            raise ValueError(
                "a document may begin in columns that are not here, so columns with segments must have positions; got none. "
                "Give the place of each token in its document, from 0."
            )
        index = np.broadcast_to(columns.astype(np.int32), (rows, seq))
        batch = batch | {
            "positions": index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        }
    else:
        are_wrong = np.any((np.diff(positions, axis=1) != steps) & is_next)
        if packed and not is_whole:
            numbers = (columns - positions).astype(
                np.int32
            )  # where the document begins, which all processes know
            are_wrong |= np.any(np.diff(numbers, axis=1, prepend=0) < 0)
        if are_wrong:
            raise ValueError(
                "positions must count up by one in each document, a run of equal numbers in segments or else a row; got "
                "others. Leave them out, and they are added."
            )
    return batch | {"segments": numbers} if packed else batch


@overload
def local_rows(
    num_rows: int, mesh: Mesh, *, seq: None = None, devices: Collection[Any] | None = None
) -> np.ndarray: ...
@overload
def local_rows(
    num_rows: int, mesh: Mesh, *, seq: int, devices: Collection[Any] | None = None
) -> tuple[np.ndarray, np.ndarray]: ...
def local_rows(
    num_rows: int, mesh: Mesh, *, seq: int | None = None, devices: Collection[Any] | None = None
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a batch that this process must read, ascending: those of its devices' replicas.

    With ``seq`` it returns ``(rows, columns)``: the columns that ``context`` gives to its devices, ascending too, which are two
    chunks for each device of a sequence (``context_parallel.py``). So ``tokens[np.ix_(rows, columns)]`` is what
    ``shard_batch(..., num_rows=num_rows, seq=seq)`` takes.

    Args:
        num_rows: The number of rows of the whole batch.
        mesh: A mesh from ``make_mesh``.
        seq: The length of whole sequences; None: the process reads whole rows.
        devices: The devices that read; None: those of this process.

    Raises:
        TypeError: ``num_rows`` or ``seq`` is no integer.
        ValueError: The replicas do not divide the rows, or twice ``context`` does not divide the sequences.
    """
    check_mesh(mesh)
    check_kind(
        (Integral,), "an integer", "Convert it.", num_rows=num_rows, seq=1 if seq is None else seq
    )
    check_at_least(1, seq=seq)
    count = num_replicas(mesh)
    _check_rows_divide(num_rows, mesh.shape[DATA], None, mesh.shape[REPLICA])
    if devices is None:
        devices = [
            device for device in mesh.devices.flat if device.process_index == jax.process_index()
        ]
    by_replica = mesh.devices.reshape(count, -1)  # replica and data are the first axes
    replicas = np.array(
        [i for i in range(count) if not set(devices).isdisjoint(by_replica[i])], np.int64
    )
    size = num_rows // count
    rows = (replicas[:, None] * size + np.arange(size)).reshape(-1)
    if seq is None:
        return rows
    check_sequences(jax.ShapeDtypeStruct((num_rows, seq), np.int32), mesh)
    parts = mesh.shape[CONTEXT]
    by_part = np.moveaxis(mesh.devices, mesh.axis_names.index(CONTEXT), 0).reshape(parts, -1)
    are_here = [not set(devices).isdisjoint(each) for each in by_part]
    order = zig_zag(seq, parts) if parts > 1 else np.arange(seq)
    return rows, np.sort(order.reshape(parts, -1)[are_here].reshape(-1))


def abstract_batch(
    batch: PyTree, mesh: Mesh | AbstractMesh, *, sequences: Collection[str] = ()
) -> PyTree:
    """Returns the result of ``shard_batch`` as ShapeDtypeStructs with shardings, to compile a step. Nothing is sent.

    Args:
        batch: Arrays or ShapeDtypeStructs with a common leading dim, the rows.
        mesh: A mesh from ``make_mesh``, also of devices for the compiler alone.
        sequences: As for ``shard_batch``.

    Raises:
        ValueError: As for ``shard_batch``.
    """
    check_mesh(mesh)
    check_batch(batch, mesh.shape[DATA], replica=mesh.shape[REPLICA])
    seq = check_sequences(batch, mesh, sequences=sequences)
    shapes = jax.eval_shape(lambda batch: batch, batch)
    if mesh.shape[CONTEXT] > 1 and isinstance(shapes, dict):
        rows = jax.tree.leaves(shapes)[0].shape[0]
        position = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
        shapes = (
            {"positions": position}
            | shapes
            | {name: position for name in ("segments",) if name in shapes}
        )
    as_sharded = lambda leaf, spec: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
    )
    return jax.tree.map(as_sharded, shapes, batch_specs(shapes, mesh))


def _lists_of_numbers(batch: PyTree) -> list[str]:
    """Returns the paths of lists that have numbers in them, at any depth, where an array is meant."""
    is_list = lambda node: isinstance(node, list | tuple) and not hasattr(node, "_fields")
    first = lambda node: first(node[0]) if is_list(node) and node else node
    is_number = lambda node: (
        isinstance(node, int | float) or (isinstance(node, Tracer) and not node.ndim)
    )  # under jax.jit
    is_meant = lambda node: is_list(node) and is_number(first(node))
    found = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_meant)
    return [path_string(path) or "the batch" for path, leaf in found if is_meant(leaf)]


def _few(names: Sequence[str]) -> str:
    """Returns the first names as text, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_batch(
    batch: PyTree, data: int, num_microbatches: int | None = None, *, replica: int = 1
) -> int:
    """Returns the number of rows of a batch; raises unless it splits evenly into replicas, and into microbatches if known."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    rows = {path_string(path) or "batch": jnp.shape(leaf)[:1] for path, leaf in leaves}
    without = sorted(path for path, dim in rows.items() if not dim)
    if lists := _lists_of_numbers(batch):
        raise TypeError(
            f"a batch must have arrays, not Python lists; got lists of numbers in {_few(lists)}. Give "
            "numpy.asarray(list), whose first dim is that of the rows."
        )
    if without or not rows:
        raise ValueError(
            "every array of a batch must have a leading dim, its rows; got none for "
            f"{_few(without) or 'an empty batch'}. Repeat a value for each row; for a PRNG key use "
            "jax.random.split(key, batch_size)."
        )
    if len(set(rows.values())) > 1:
        sizes = {path: dim[0] for path, dim in rows.items()}
        raise ValueError(
            f"all arrays of a batch must have the same number of rows; got {sizes}. Cut or pad them alike; what is of no row, "
            "such as a table, is closed over by the model, or a param that trainable leaves out."
        )
    (num_rows,) = next(iter(rows.values()))
    _check_rows_divide(num_rows, data, num_microbatches, replica)
    return num_rows


def _check_rows_divide(
    num_rows: int, data: int, num_microbatches: int | None, replica: int
) -> None:
    """Raises unless rows split evenly into replicas, and into microbatches if known."""
    parts = replica * data * (num_microbatches or 1)
    if num_rows < 1 or num_rows % parts:
        axes = "data axis" if replica == 1 else "replica axis times the data axis"
        sizes = {"data": data} if replica == 1 else {"replica": replica, "data": data}
        times, of = " times num_microbatches", ""
        if num_microbatches is None:
            times, of = "", ", or the next multiple of data times num_microbatches"
        else:
            sizes["num_microbatches"] = num_microbatches
        raise ValueError(
            f"the rows of a batch must be divisible by the {axes}{times}; got {num_rows} rows, {arg(**sizes)}. "
            f"Use {max(-(-num_rows // parts), 1) * parts} rows{of}{_PAD}, or other parts."
        )


def split_microbatches(batch: PyTree, num_microbatches: int) -> PyTree:
    """Returns one replica's rows ``[rows, ...]`` as ``[num_microbatches, rows / num_microbatches, ...]``."""
    return jax.tree.map(
        lambda a: a.reshape(num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:]), batch
    )


def accumulate(part: Callable[[PyTree], Any], batch: PyTree, num_microbatches: int) -> Any:
    """Returns the sum of ``part(microbatch)`` over the microbatches of one replica, in float32 or wider.

    Args:
        part: A function of one microbatch that returns a tree of floats.
        batch: One replica's rows.
        num_microbatches: The number of microbatches, which a scan runs over; with 1 there is no scan.
    """
    if num_microbatches == 1:
        return widen(part(batch))
    microbatches = split_microbatches(batch, num_microbatches)
    first = jax.tree.map(lambda a: a[0], microbatches)
    converted, closed_over = closure_converted(part, first)
    traced = partial(converted, closed_over)  # once, for the shapes and for the scan
    shapes = jax.eval_shape(traced, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, wide_dtype(s.dtype)), shapes)

    def add(total: Any, microbatch: PyTree) -> tuple[Any, None]:
        return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, traced(microbatch)), None

    return jax.lax.scan(add, zeros, microbatches)[0]


def reduce_gradients(sums: PyTree, dtype: Any = None, axes: Sequence[str] = REPLICAS) -> PyTree:
    """Returns ``sums`` reduced over the replicas, in float32 or wider. Call it once per step, on all gradients together.

    Args:
        sums: A tree of floats.
        dtype: The dtype in which they are sent and added, if not that of the result; complex numbers as their two parts.

        axes: The axes to reduce over, by default all that the replicas are on.

    **Collectives**: one all-reduce over ``replica``, ``data`` and ``context``, of all leaves together.
    """
    axes = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    if not axes:  # XLA refuses a sum over an axis of one beside an automatic axis
        return widen(sums)
    if dtype is None:
        return by_parts(lambda parts: jax.lax.psum(parts, axes), widen(sums))
    sent = jax.tree.map(lambda a: to_floats(a, dtype), sums)
    return jax.tree.map(from_floats, jax.lax.psum(sent, axes), sums)
