"""Weights in four or eight bits, decoded where a product reads them. They are frozen.

    weight [*stack, *in, *out]  -->  codes [*stack, in, *out]   scales [*stack, blocks, *out]

    kind    a code                                          a scale of
    nf4     one of 16 values, two codes to a byte           a block of 64 values along in
    nf4-dq  likewise                                        likewise, in a byte (double quantization)
    int8    an integer from -127 to 127                     all values along in, for each of out
    fp8     a float8_e4m3fn, as its bits                    a whole weight, for each layer

The in dims, those that a product sums over, are one dim here. A value is its code's value times the
scale, in float32. The values of NF4 are quantiles of a normal distribution, scaled to [-1, 1]. Its
codes, their order in a byte and their blocks are those of the library bitsandbytes, which stores
weights as [out, in].

Blocks lie along in. So a sharding of an out dim never divides one, and a sharding of in must give
each shard whole blocks, which ``Quantized.shardings`` checks.

The scales of nf4-dq are a weight in codes themselves, integers from 0 to 255 with a float32 scale
of all blocks along in, for each of out:

    scales [*stack, blocks, *out]  -->  codes [*stack, blocks, *out]   scales [*stack, 1, *out]

**Reference**: Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E. There the scales of
256 blocks share one, whatever outputs these are of, their mean is subtracted first, and a code is a
float of 8 bits. Here no shard of out has a part of the 256, and the error is as small: the mean
square of what NF4 changes in weights of a normal distribution, [8192, 512], is that of float32
scales to 0.04%. With codes in float8_e4m3fn it would be 9% larger.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

Kind = Literal["nf4", "nf4-dq", "int8", "fp8"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OF_SCALES = "uint8"  # the kind of scales that are in codes themselves

BLOCK = 64  # values of a scale in NF4
IN_BLOCKS = ("nf4", "nf4-dq")

# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on

_BITS = 4
_LARGEST = {"int8": 127.0, OF_SCALES: 255.0, "fp8": float(jnp.finfo(jnp.float8_e4m3fn).max)}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales"),
    meta_fields=("kind", "num_in", "of_one"),
)
@dataclass(frozen=True)
class Quantized:
    """A weight in codes, as a pytree node. Its two array fields may also hold shardings or shapes.

    Attributes:
        codes: ``[*stack, in, *out]``, two a byte in NF4: uint8, or int8 for "int8".
        scales: ``[*stack, blocks, *out]`` in float32, or for "nf4-dq" in codes, as a Quantized;
            "fp8" has one block and out dims of 1.
        kind: What a code is; "uint8" of the scales of "nf4-dq".
        num_in: The number of in dims of the weight.
        of_one: The shape of the weight without stacked layers, ``(*in, *out)``.
    """

    codes: Any
    scales: Any
    kind: Kind | Literal["uint8"]
    num_in: int
    of_one: tuple[int, ...]

    __array_ufunc__ = None  # a NumPy array, too, leaves ``x @ weight`` to __rmatmul__

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, with stacked layers."""
        num_outs = len(self.of_one) - self.num_in
        num_stacked = len(self.codes.shape) - 1 - num_outs
        return (*self.codes.shape[:num_stacked], *self.of_one)

    @property
    def ndim(self) -> int:
        """The number of dims of the weight."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of values of the weight."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which values are computed from codes."""
        return np.dtype(np.float32)

    def astype(self, dtype: Any) -> Array:
        """Returns the weight itself, computed in float32 and rounded to a dtype."""
        at = len(self.shape) - len(self.of_one)
        scales = dense(self.scales)
        units = _DECODE[self.kind](jnp.asarray(self.codes), at)
        blocks = _split_dim(units, at, scales.shape[at])
        values = blocks * jnp.expand_dims(scales, at + 1)
        return values.reshape(self.shape).astype(dtype)

    def __rmatmul__(self, x: Any) -> Array:
        return x @ self.astype(x.dtype)

    def shardings(self, sharding: NamedSharding, path: str) -> "Quantized":
        """Returns the shardings of codes and scales, of which each device has those of its values.

        Scales of all values along in are on each device that has some of these.

        Args:
            sharding: That of the weight.
            path: The weight, for the error.

        Raises:
            ValueError: A device's part of in is not whole blocks, or no contiguous part.
        """
        num_stacked = len(self.shape) - len(self.of_one)
        missing = len(self.shape) - len(sharding.spec)
        entries = (*sharding.spec, *(None,) * missing)
        stack, own = entries[:num_stacked], entries[num_stacked:]
        ins, outs = own[: self.num_in], own[self.num_in :]
        _check_blocks(self, ins, sharding, path)
        of = lambda *entries: NamedSharding(sharding.mesh, PartitionSpec(*entries))
        codes = of(*stack, ins[0], *outs)
        if is_quantized(self.scales):
            scales = self.scales.shardings(codes, f"{path}/scales")
        elif self.kind == "nf4":
            scales = codes
        else:
            scales = of(*stack, None) if self.kind == "fp8" else of(*stack, None, *outs)
        return replace(self, codes=codes, scales=scales)


def is_quantized(node: object) -> bool:
    """Returns whether a node of a tree is a weight in codes."""
    return isinstance(node, Quantized)


def dense(weight: Any, dtype: Any = None) -> Any:
    """Returns a weight in codes as an array of a dtype, by default float32; any other as it is."""
    return weight.astype(dtype or weight.dtype) if is_quantized(weight) else weight


def check_kind(kind: str) -> Kind:
    """Returns a kind of codes; raises ValueError for one that there is not."""
    for known in KINDS:
        if kind == known:
            return known
    raise ValueError(f"weights are quantized as {', '.join(KINDS)}; got {kind!r}. Choose nf4, say.")


def quantize_weight(weight: Any, kind: Kind, num_in: int, num_stacked: int, path: str) -> Quantized:
    """Returns a weight in codes.

    Args:
        weight: ``[*stack, *in, *out]``.
        kind: What a code is.
        num_in: The number of dims that a product sums over.
        num_stacked: The number of leading dims of stacked layers.
        path: The weight, for the error.

    Raises:
        ValueError: The weight is in codes already, or blocks do not divide the in dims.
    """
    if is_quantized(weight):
        raise ValueError(
            f"weights are quantized once; got {path} in {weight.kind}. Quantize the params that it was made of."
        )
    stack, of_one = weight.shape[:num_stacked], weight.shape[num_stacked:]
    ins, outs = of_one[:num_in], of_one[num_in:]
    size = math.prod(ins)
    if kind in IN_BLOCKS and size % BLOCK:
        raise ValueError(
            f"{kind} has a scale for each {BLOCK} values along the dims that a product sums over; got "
            f"{path} of shape {weight.shape}, which sums over {size}. Use int8 or fp8."
        )
    joined = weight.reshape(*stack, size, *outs)
    codes, scales = _encode(joined, kind, num_stacked)
    return Quantized(codes, scales, kind, num_in, tuple(of_one))


def _check_blocks(
    weight: Quantized,
    ins: Sequence[Any],
    sharding: NamedSharding,
    path: str,
) -> None:
    if any(entry is not None for entry in ins[1:]):
        raise ValueError(
            "codes are sharded along the first of the dims that a product sums over; got "
            f"{path} of {sharding.spec}. Shard that dim, or one of the others."
        )
    size = math.prod(weight.of_one[: weight.num_in])
    axes = ins[0] if isinstance(ins[0], tuple) else (ins[0],)
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes if axis is not None)
    unit = BLOCK if weight.kind in IN_BLOCKS else 1
    if size % (parts * unit):
        blocks, of = size // unit, " and ".join(axis for axis in axes if axis is not None)
        fitting = f"whose {of} divides its {blocks} blocks" if blocks > 1 else f"without {of}"
        raise ValueError(
            f"each device must have whole blocks of {unit} values of a weight in {weight.kind}; got "
            f"{path}, which sums over {size}, in {parts} parts of {size / parts:g}. "
            f"Use int8, or a mesh {fitting}."
        )


# -- codes and scales of weights [*stack, in, *out] with the dim in at ``at`` ------------------------


@partial(jax.jit, static_argnums=(1, 2))
def _encode(weight: Array, kind: Kind, at: int) -> tuple[Array, Any]:
    return _ENCODE[kind](weight.astype(jnp.float32), at)


def _encode_nf4(weight: Array, at: int) -> tuple[Array, Array]:
    blocks = _split_dim(weight, at, weight.shape[at] // BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=at + 1)
    inverse = jnp.where(scales > 0, 1 / scales, 0)
    units = blocks * jnp.expand_dims(inverse, at + 1)
    units = units.reshape(weight.shape)
    values = np.asarray(NF4, np.float32)
    codes = jnp.zeros(weight.shape, jnp.uint8)
    for between in (values[1:] + values[:-1]) / 2:
        is_above = units > between
        codes = codes + is_above.astype(jnp.uint8)
    pairs = _split_dim(codes, at, weight.shape[at] // 2)
    first = lax.index_in_dim(pairs, 0, at + 1, keepdims=False)
    second = lax.index_in_dim(pairs, 1, at + 1, keepdims=False)
    return (first << _BITS) | second, scales


def _encode_nf4_dq(weight: Array, at: int) -> tuple[Array, Quantized]:
    codes, scales = _encode_nf4(weight, at)
    units, of_scales = _in_units(scales, (at,), _LARGEST[OF_SCALES])
    bytes_ = jnp.round(units).astype(jnp.uint8)
    return codes, Quantized(bytes_, of_scales, OF_SCALES, 1, scales.shape[at:])


def _decode_nf4(codes: Array, at: int) -> Array:
    """Selects the bits of a float32 by one bit of the code after another.

    Every operand is made of codes or is a scalar: where a loop over layers is differentiated, JAX
    makes other constants before the loop, in the shape of a weight.
    """
    first, second = codes >> _BITS, codes & (2**_BITS - 1)
    of_pair = [jnp.expand_dims(each, at + 1) for each in (first, second)]
    pairs = jnp.concatenate(of_pair, axis=at + 1)
    units = _join_dims(pairs, at).astype(jnp.uint32)
    values: list[Any] = list(np.asarray(NF4, np.float32).view(np.uint32))
    for bit in range(_BITS):
        is_set = -((units >> bit) & 1)  # all bits, or none
        evens_and_odds = zip(values[::2], values[1::2], strict=True)
        values = [(is_set & (even ^ odd)) ^ even for even, odd in evens_and_odds]
    return lax.bitcast_convert_type(values[0], jnp.float32)


def _encode_int8(weight: Array, at: int) -> tuple[Array, Array]:
    units, scales = _in_units(weight, (at,), _LARGEST["int8"])
    return jnp.round(units).astype(jnp.int8), scales


def _encode_fp8(weight: Array, at: int) -> tuple[Array, Array]:
    of_one = tuple(range(at, weight.ndim))
    units, scales = _in_units(weight, of_one, _LARGEST["fp8"])
    floats = units.astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(floats, jnp.uint8), scales


def _decode_integers(codes: Array, at: int) -> Array:
    return codes.astype(jnp.float32)


def _decode_fp8(codes: Array, at: int) -> Array:
    floats = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return floats.astype(jnp.float32)


def _in_units(
    weight: Array,
    axes: tuple[int, ...],
    largest: float,
) -> tuple[Array, Array]:
    """Returns a weight divided by its scales, with ``largest`` as its largest value, and the scales."""
    most = jnp.max(jnp.abs(weight), axis=axes, keepdims=True)
    scales = most / np.float32(largest)
    units = weight / jnp.where(scales > 0, scales, 1)
    return jnp.clip(units, -largest, largest), scales


def _split_dim(array: Array, at: int, size: int) -> Array:
    """Returns ``[..., size, rest, ...]`` of an array whose dim at ``at`` is size * rest."""
    shape = array.shape
    rest = shape[at] // size
    return array.reshape(*shape[:at], size, rest, *shape[at + 1 :])


def _join_dims(array: Array, at: int) -> Array:
    shape = array.shape
    joined = shape[at] * shape[at + 1]
    return array.reshape(*shape[:at], joined, *shape[at + 2 :])


_ENCODE: dict[str, Callable[[Array, int], Any]] = {
    "nf4": _encode_nf4,
    "nf4-dq": _encode_nf4_dq,
    "int8": _encode_int8,
    "fp8": _encode_fp8,
}
_DECODE: dict[str, Callable[[Array, int], Array]] = {
    "nf4": _decode_nf4,
    "nf4-dq": _decode_nf4,
    "int8": _decode_integers,
    OF_SCALES: _decode_integers,
    "fp8": _decode_fp8,
}
