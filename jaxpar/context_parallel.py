"""Context parallelism: each sequence is split over the ``context`` axis, and layers exchange what they read of other positions.

A sequence is cut into 2C chunks for C devices, and device c has two of them, so that all have the same work where each position
reads earlier ones. ``shard_batch`` orders the positions of a batch so; here C = 2:

    chunks of the sequence     0 1 2 3
    device 0                   0     3
    device 1                     1 2

A layer reads other positions by one of these functions; outside ``value_and_grad``, or without the axis, a device has all
positions, and they return what they are given.

    gather_sequence      the whole sequence in its order: the keys and values of attention (Grattafiori et al. 2024, arXiv
                         2407.21783, section 3.3.2)
    sequence_to_heads    the whole sequence of a part of the heads, and heads_to_sequence back (DeepSpeed-Ulysses, Jacobs et
                         al. 2023, arXiv 2309.14509)
    sum_over_sequence    a sum over the positions of all devices
    max_over_sequence    the largest value of all devices

``places`` says which positions of the sequence a device has, ``num_parts`` how many devices share it: what is the same on all
of them and is added to a sum over positions is divided by that. All else of a layer treats each position on its own. An
embedding or a loss that pairs neighbours, such as by ``tokens[:, 1:]``, does not: shift targets before ``shard_batch``.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree, Shaped

from jaxpar._compat import trace_context
from jaxpar.devices import traced_platform
from jaxpar.row_dependence import of_own_rows

CONTEXT = "context"
# Names that only arrays of a batch with a value for each position have.
SEQUENCES = frozenset({"tokens", "targets", "positions", "segments", "mask", "weight", "weights"})
SEQUENCES |= {"input_ids", "position_ids", "segment_ids", "attention_mask", "loss_mask"}

# With ``copies_of_heads(k)`` sequence_to_heads sends k copies of each head, to trace a model on more devices than it has heads
# for. What JAX caches of a trace holds for one number alone.
copies_of_heads = trace_context(default_value=1)


def num_parts() -> int:
    """Returns the number of devices that share each sequence, where this is traced: 1 outside ``value_and_grad``."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[CONTEXT] if CONTEXT in mesh.manual_axes else 1


def sequence_length(batch: PyTree) -> int:
    """Returns the number of positions of the sequences of a batch; arrays of two dims and another length belong to rows.

    It is that of the ``positions`` of a dict, else of the first array of two dims; 0 if there is none.
    """
    leaves = [batch["positions"]] if _has_positions(batch) else jax.tree.leaves(batch)
    return next((jnp.shape(leaf)[1] for leaf in leaves if jnp.ndim(leaf) > 1), 0)


def _has_positions(batch: PyTree) -> bool:
    return isinstance(batch, Mapping) and jnp.ndim(batch.get("positions", 0)) > 1


def is_sequence(leaf: Any, length: int) -> bool:
    """Returns whether an array of a batch has a value for each position of its sequences."""
    return jnp.ndim(leaf) > 1 and jnp.shape(leaf)[1] == length


def check_are_sequences(
    shapes: Mapping[str, tuple[int, ...]], named: Collection[str], lengths: Collection[int]
) -> None:
    """Raises ValueError where it is not known whether dim 1 of an array is the sequence or features of a row.

    Args:
        shapes: The arrays of a batch that have two or more dims, by path.
        named: The paths of those that the caller calls sequences; each must be there.
        lengths: The numbers of positions that sequences have here, and on a device. An array of another one is of the row.
    """
    check_are_there(shapes, named)
    is_open = lambda path: not is_named(path, named) and shapes[path][1] in lengths
    unknown = [path for path in shapes if is_open(path)]
    if unknown and len(shapes) > 1:  # a single one must be what is to be split
        got = ", ".join(f"{path} {list(shapes[path])}" for path in unknown)
        raise ValueError(
            "the context axis splits dim 1 of an array, which must be the sequence and not the features of a row; got "
            f"{got}, which may be either. If each has a value for each position, name them: "
            f"shard_batch(batch, mesh, sequences={[*named, *unknown]}). Give features of a row as [rows, 1, ...]."
        )


def is_named(path: str, named: Collection[str]) -> bool:
    """Returns whether an array of a batch is a sequence by its name, or is called one."""
    return path in named or path.split("/")[-1] in SEQUENCES


def check_are_there(shapes: Mapping[str, tuple[int, ...]], named: Collection[str]) -> None:
    """Raises ValueError if an array that is called a sequence is none of a batch."""
    if unknown := sorted(set(named) - set(shapes)):
        raise ValueError(
            f"sequences must name arrays of two or more dims of the batch; got {', '.join(unknown)}, where those are "
            f"{', '.join(shapes) or 'none'}. Correct the names."
        )


def zig_zag(seq: int, parts: int) -> np.ndarray:
    """Returns the positions of a sequence in the order of the devices ``[seq]``: chunks 0 and 2C - 1, 1 and 2C - 2, ..."""
    chunks = np.arange(seq).reshape(2, parts, -1)
    pairs = np.stack([chunks[0], chunks[1, ::-1]], axis=1)
    return pairs.reshape(seq)


def places(length: int) -> Int[Array, " length"]:
    """Returns the places in the sequence of the ``length`` positions that this device has.

    ``jnp.arange`` numbers those of a sequence that was gathered.
    """
    parts, of_one = num_parts(), jnp.arange(length)
    if parts == 1:
        return of_one
    by_device = zig_zag(parts * length, parts).reshape(parts, length)
    by_device = jnp.asarray(by_device, of_one.dtype)
    own = lambda: lax.dynamic_index_in_dim(by_device, lax.axis_index(CONTEXT), keepdims=False)
    return of_own_rows(own)()


def gather_sequence(x: Shaped[Array, "batch seq *dims"]) -> Shaped[Array, "batch all *dims"]:
    """Returns the whole sequence in its order from the part of each device; to its gradient all devices contribute.

    Args:
        x: An array ``[batch, seq, ...]``; a third dim is that of the heads, which automatic axes (``tensor``) may split.

    **Collectives**: over ``context`` an all-gather, and a reduce-scatter of the gradient. ``value_and_grad`` does not store
    the whole: the backward pass gathers again.

    Raises:
        ValueError: The array has an odd number along dim 1.
    """
    parts = num_parts()
    if parts == 1:
        return x
    if x.shape[1] % 2:
        raise ValueError(
            f"gather_sequence takes an array of the positions of a device, which are two chunks; got {x.shape}, with an odd "
            "number along dim 1. What is of a row as a whole, such as a class token, is no position: keep it in an array of "
            "its own, and join it to what is gathered. To reduce, gather first, or add up by sum_over_sequence."
        )
    gather = lambda x: lax.all_gather(x, CONTEXT, axis=1, tiled=True)
    sent = x.astype(_reduced_in(x.dtype))
    whole = _on_shards(gather, sent).astype(x.dtype)
    return _in_order(whole, parts)


def sequence_to_heads(
    x: Shaped[Array, "batch seq heads *dims"],
) -> Shaped[Array, "batch all part *dims"]:
    """Returns the whole sequence in its order of this device's part of the heads, from a part of it of all heads.

    Raises:
        ValueError: The devices do not divide the heads: those of ``context``, times those of ``tensor`` if it splits them.

    **Collectives**: an all-to-all over ``context``, and one of the gradient.
    """
    parts = num_parts()
    if parts == 1:
        return x
    if x.ndim > 2 and (copies := copies_of_heads.value) > 1:
        x = jnp.concatenate([x] * copies, axis=2)
    _check_heads_divide(x.shape, parts)
    exchange = lambda x: lax.all_to_all(x, CONTEXT, 2, 1, tiled=True)
    return _in_order(_on_shards(exchange, x), parts)


def _check_heads_divide(shape: tuple[int, ...], parts: int) -> None:
    if len(shape) < 3:
        raise ValueError(
            f"sequence_to_heads takes an array [batch, seq, heads, ...]; got one of shape {shape}. Give it a dim of heads."
        )
    heads = shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {CONTEXT: parts}
    sizes |= {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
    count = parts * num_shards_of_heads(heads)
    if heads % count:
        axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"the heads must be divisible by context times the axes that split them, for sequence_to_heads; got {heads} heads "
            f"in an array of shape {shape}, {axes}. Choose {math.lcm(heads, count)} heads or smaller axes, or gather keys and "
            "values by gather_sequence, which takes any number of heads."
        )


def heads_to_sequence(
    x: Shaped[Array, "batch all part *dims"],
) -> Shaped[Array, "batch seq heads *dims"]:
    """Returns what ``sequence_to_heads`` was given.

    **Collectives**: an all-to-all over ``context``, and one of the gradient.
    """
    parts = num_parts()
    if parts == 1:
        return x
    chunks = x.reshape(x.shape[0], 2, parts, x.shape[1] // (2 * parts), *x.shape[2:])
    first, second = jnp.split(chunks, 2, axis=1)
    pairs = jnp.concatenate([first, second[:, :, ::-1]], axis=1)
    by_device = pairs.swapaxes(1, 2).reshape(x.shape)
    exchange = lambda x: lax.all_to_all(x, CONTEXT, 1, 2, tiled=True)
    sent = _on_shards(exchange, by_device)
    copies = copies_of_heads.value
    return sent if copies == 1 else sent[:, :, : sent.shape[2] // copies]


def sum_over_sequence(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Returns the sum over the devices that share each sequence.

    **Collectives**: an all-reduce over ``context``, and one of the gradient.
    """
    if num_parts() == 1:
        return x
    sent = x.astype(_reduced_in(x.dtype))
    return lax.psum(sent, CONTEXT).astype(x.dtype)


def max_over_sequence(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Returns the largest values of the devices that share each sequence.

    The gradient goes to the device that has the largest value, and in equal parts to those that have it.

    **Collectives**: an all-reduce over ``context``, and two of the gradient.
    """
    if num_parts() == 1:
        return x
    has_derivative = jnp.issubdtype(x.dtype, jnp.inexact)
    return _largest(x) if has_derivative else lax.pmax(x, CONTEXT)


@jax.custom_jvp  # jax.lax.pmax has no rule
def _largest(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    return lax.pmax(x, CONTEXT)


@_largest.defjvp
def _share_of_largest(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    largest = _largest(x)
    holds = (x == largest).astype(tangent.dtype)
    share = holds / sum_over_sequence(holds)
    return largest, sum_over_sequence(share * tangent)


def _reduced_in(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which arrays, or their gradients, are sent and added: XLA's CPU compiler ends the process on 16-bit sums."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    if is_narrow and traced_platform() == "cpu":
        return jnp.dtype(jnp.float32)
    return dtype


def num_shards_of_heads(num_heads: int) -> int:
    """Returns over how many devices automatic axes split heads: 1 if they do not divide them."""
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in mesh.auto_axes)
    return 1 if num_heads % count else count


def _in_order(by_device: Array, parts: int) -> Array:
    """Returns chunks 0 to 2C - 1 along dim 1, of an array with chunks c and 2C - 1 - c of each device c."""
    shape = by_device.shape
    pairs = by_device.reshape(shape[0], parts, 2, shape[1] // (2 * parts), *shape[2:])
    chunks = jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1)
    return chunks.reshape(shape)


def on_shards_of_heads(function: Callable[..., Array], *arrays: Array) -> Array:
    """Returns ``function(*arrays)`` on each shard of the heads over automatic axes, if those divide them.

    Args:
        function: A function of arrays ``[batch, seq, heads, ...]`` that treats heads on their own, and of ``[batch, seq]``.
        *arrays: The arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.auto_axes)
    count = math.prod(mesh.shape[axis] for axis in axes)
    if not axes or any(x.shape[2] % count for x in arrays if x.ndim > 2):
        return function(*arrays)
    spec = PartitionSpec(None, None, axes)
    mapped = jax.shard_map(
        function,
        in_specs=tuple(spec if x.ndim > 2 else PartitionSpec() for x in arrays),
        out_specs=spec,
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(*arrays)


def _on_shards(function: Callable[[Array], Array], x: Array) -> Array:
    """Returns ``function(x)`` on each shard of the heads, if there are several: XLA would gather all heads before it."""
    split = x.ndim > 2 and num_shards_of_heads(x.shape[2]) > 1
    return on_shards_of_heads(function, x) if split else function(x)
