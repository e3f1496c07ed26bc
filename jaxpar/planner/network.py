"""The seconds of collectives over a mesh axis, by size.

    ring    reduce-scatter and all-gather in n - 1 steps each; an all-reduce is both (Patarasuk and Yuan 2009)
    tree    an all-reduce up and down two binary trees, 2 log2 n steps, for small arrays on many devices (Sanders et al. 2009)

The faster of the two is taken, as NCCL does. Most steps of a ring over nodes are inside a node, and have its latency.
"""

import math

from jaxpar.inspect.collectives import ring_bytes
from jaxpar.planner.links import Links

_TREE_SHARE = 0.9  # of a ring's bandwidth


def collective_seconds(links: Links, axis: str, kind: str, payload_bytes: int) -> float:
    """Returns the seconds of one collective over an axis.

    Args:
        links: The links of the mesh.
        axis: The mesh axis.
        kind: XLA's name: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        payload_bytes: Bytes of the complete array, or of a message.
    """
    size = links.sizes[axis]
    if kind == "collective-permute":
        return links.message(payload_bytes, axis)
    if size == 1:
        return 0.0
    moved = ring_bytes(kind, payload_bytes, size) / links.rate(axis)
    if kind != "all-reduce":
        return moved + _round_seconds(links, axis)
    tree = moved / _TREE_SHARE + 2 * math.ceil(math.log2(size)) * links.cluster.latency(
        crosses_nodes=links.crosses(axis)
    )
    return min(moved + 2 * _round_seconds(links, axis), tree)


def _round_seconds(links: Links, axis: str) -> float:
    """Returns the latency of a message once around the ring."""
    size, together = links.sizes[axis], links.together(axis)
    between = math.ceil(size / together) if links.crosses(axis) else 0
    cluster = links.cluster
    return (size - 1 - min(between, size - 1)) * cluster.latency(crosses_nodes=False) + between * cluster.latency(
        crosses_nodes=True
    )
