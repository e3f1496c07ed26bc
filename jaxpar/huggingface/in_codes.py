"""Reads weights into codes, four or eight bits a value, one layer at a time.

    tensors of one layer --float32--> codes and scales --into those of all layers--> devices

Of one weight the host holds the values of a layer and the codes of all layers that its devices
have: of a 70B's largest weight 2 GB and 21 GB. It reads all values of these layers, whatever its
devices have of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxpar.models.quantized import Quantized, check_kind, quantize_weight

Index = tuple[slice, ...]
Holders = dict[tuple[tuple[int, int], ...], list[jax.Device]]


def in_codes(
    shape: tuple[int, ...],
    shardings: Quantized,
    block: Callable[[Index], np.ndarray],
) -> Quantized:
    """Returns stacked weights in codes on devices.

    Args:
        shape: That of the weights, ``[layers, *in, *out]``.
        shardings: The shardings of codes and scales, and the kind of codes.
        block: Returns a part of the weights, on the host.
    """
    num_layers, *of_layer = shape
    kind = check_kind(shardings.kind)
    quantize = lambda weight: quantize_weight(weight, kind, shardings.num_in, 0, "a layer")
    one = jax.eval_shape(quantize, jax.ShapeDtypeStruct(of_layer, "float32"))
    each, treedef = jax.tree.flatten(shardings)
    parts = []
    for leaf, sharding in zip(jax.tree.leaves(one), each, strict=True):
        stacked = (num_layers, *leaf.shape)
        parts.append(_Parts(stacked, leaf.dtype, sharding))
    whole = [slice(0, size) for size in of_layer]
    for layer in range(num_layers):
        if not any(part.needs(layer) for part in parts):
            continue
        weight = block((slice(layer, layer + 1), *whole))[0]
        with jax.default_device(_host()):
            made = quantize(weight)
        for part, array in zip(parts, jax.tree.leaves(made), strict=True):
            part.write(layer, np.asarray(array))
    return treedef.unflatten([part.on_devices() for part in parts])


class _Parts:
    """The parts of a stacked array that the devices of this process hold, on the host."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> None:
        self.shape = shape
        self.sharding = sharding
        self.holders = holders_of(shape, sharding)
        self.arrays = {}
        for ends in self.holders:
            sizes = [stop - start for start, stop in ends]
            self.arrays[ends] = np.empty(sizes, dtype)

    def needs(self, layer: int) -> bool:
        return any(start <= layer < stop for (start, stop), *_ in self.holders)

    def write(self, layer: int, array: np.ndarray) -> None:
        for ends, part in self.arrays.items():
            (start, stop), *others = ends
            of_one = tuple(slice(*each) for each in others)
            if start <= layer < stop:
                part[layer - start] = array[of_one]

    def on_devices(self) -> jax.Array:
        placed = []
        for ends, devices in self.holders.items():
            host = self.arrays.pop(ends)
            copies = [jax.device_put(host, device) for device in devices]
            placed += jax.block_until_ready(copies)
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)


def holders_of(shape: tuple[int, ...], sharding: Sharding) -> Holders:
    """Returns the devices of this process with each part of an array, by its ends along each dim."""
    holders: Holders = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        places = zip(index or (), shape, strict=True)
        ends = tuple(place.indices(size)[:2] for place, size in places)
        holders.setdefault(ends, []).append(device)
    return holders


def _host() -> jax.Device:
    """This machine's CPU as a device, or the first device where JAX was told to leave CPUs out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
