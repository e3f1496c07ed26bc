"""Bytes in a step on each link between two devices, which sums over devices do not show, such as the line of one server.

A permutation lists its pairs. The other collectives are counted as ring algorithms, which NCCL and XLA use: each member of a
group sends its bytes to the next one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from jaxpar.inspect.collectives import Collective
from jaxpar.inspect.groups import parse_groups

Link = tuple[int, int]


def link_bytes(collectives: Iterable[Collective], num_devices: int) -> dict[Link, int]:
    """Returns the bytes that one device sends to another in a step, by (sender, receiver), for pairs that communicate.

    Args:
        collectives: The collectives of a ``StepReport``.
        num_devices: Devices of the program.
    """
    links: Counter[Link] = Counter()
    for each in collectives:
        groups = parse_groups(each.groups, num_devices)
        if each.senders is None:
            pairs = [(group[n - 1], group[n]) for group in groups for n in range(len(group)) if len(group) > 1]
        else:
            pairs = [(pair[0], pair[1]) for pair in groups if pair[0] != pair[1]]
        for pair in pairs:
            links[pair] += each.bytes_moved or 0
    return dict(links)


def line_bytes(links: Mapping[Link, int]) -> dict[int, int]:
    """Returns the bytes in a step through each device's own line to the network, in and out together."""
    lines: Counter[int] = Counter()
    for (sender, receiver), num_bytes in links.items():
        lines[sender] += num_bytes
        lines[receiver] += num_bytes
    return dict(lines)
