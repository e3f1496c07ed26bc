"""The device groups of a collective, and the mesh axes over which they run.

XLA writes groups in three forms; all become tuples of positions in `mesh.devices.flat`:

    {{0,1},{2,3}}                  as they are
    [2,4]<=[8]   [4,2]<=[2,4]T(1,0)  iota, reshaped, transposed, split into rows
    mesh['a'=2,'b'=4] {'a'}        axes of a mesh, by the compiler's names, which may differ from ours
"""

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
AxisSizes = tuple[tuple[str, int], ...]

_EXPLICIT = r"\{(?:\{[\d, ]*\}[, ]*)*\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_DEVICE_IDS = r"(?:, ?device_ids=\((?:\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
_MESH = rf"@?mesh[\[<][^\]>]*[\]>]{_DEVICE_IDS}(?: ?\{{[^}}]*\}})?"
_GROUPS = re.compile(rf"replica_groups=({_EXPLICIT}|{_IOTA}|{_MESH})")
_PAIRS = re.compile(rf'source_target_pairs="?({_EXPLICIT})')


def groups_text(attributes: str) -> tuple[str, bool]:
    """Returns a collective's groups as text of the program, and whether they are the pairs of a permutation.

    The text is "{}", which means all devices, where the program has none.
    """
    if pairs := _PAIRS.search(attributes):
        return pairs.group(1), True
    match = _GROUPS.search(attributes)
    if match is None and "replica_groups=" in attributes:
        raise ValueError(
            f"replica groups must be in a form that this parser knows; got {attributes[:200]!r}. Report it."
        )
    return match.group(1) if match else "{}", False


@functools.lru_cache(maxsize=1024)
def parse_groups(text: str, num_devices: int) -> Groups:
    """Returns the groups of device positions that the text of replica groups denotes."""
    if text.startswith("["):
        shape, iota = text.split("<=")
        return _rows(_iota(iota), integers(shape)[-1])
    if "mesh" in text:
        return _mesh_groups(text)
    listed = re.findall(r"\{([\d, ]+)\}", text)
    groups = tuple(tuple(integers(group)) for group in listed)
    return groups or (tuple(range(num_devices)),)


def integers(text: str | None) -> list[int]:
    """Returns the integers in a text, in order; none if there is no text."""
    numbers = re.findall(r"\d+", text or "")
    return list(map(int, numbers))


def _iota(text: str) -> np.ndarray:
    shape, _, permutation = text.partition("T")
    dims = integers(shape)
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices.transpose(integers(permutation)) if permutation else devices


def _rows(devices: np.ndarray, row_size: int) -> Groups:
    rows = devices.reshape(-1, row_size)
    return tuple(map(tuple, rows.tolist()))


def _mesh_groups(text: str) -> Groups:
    axes = re.findall(r"'?([\w.\-]+)'?=(\d+)", text.split("device_ids")[0])
    sizes = {name: int(size) for name, size in axes}
    devices = np.arange(math.prod(sizes.values()))
    if listed := re.search(r"device_ids=\((.*?)\)(?: ?\{|$)", text):
        ids = listed.group(1)
        devices = _iota(ids) if ids.startswith("[") else np.array(integers(ids))
    references = [(name, "", "") for name in sizes]
    if grouped := re.search(r"\{([^}]*)\}", text):
        references = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?", grouped.group(1))
    return _group_over(devices, sizes, references)


def _group_over(
    devices: np.ndarray,
    sizes: dict[str, int],
    references: Sequence[tuple[str, str, str]],
) -> Groups:
    """Returns groups over axes or parts of them: `'b':(2)4` is the part of b of extent 4 that has extent 2 outside it.

    An axis b of 16 is cut where such parts begin and end, into dims of which that part is one:

        extents   1 | 2 | 8 | 16      dims 2, 4 and 2
    """
    dims: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        own = [each for each in references if each[0] == name]
        spans = [_span(outside, extent, size) for _, outside, extent in own]
        cuts = {1, size}.union(*spans)
        for outer, inner in itertools.pairwise(sorted(cuts)):
            if any(low <= outer and inner <= high for low, high in spans):
                grouped.append(len(dims))
            dims.append(inner // outer)
    devices = devices.reshape(dims)
    kept = [dim for dim in range(len(dims)) if dim not in grouped]
    row_size = math.prod(dims[dim] for dim in grouped)
    return _rows(devices.transpose([*kept, *grouped]), row_size)


def _span(outside: str, extent: str, size: int) -> tuple[int, int]:
    """Returns the extents between which a part of an axis lies: all of the axis if there are none."""
    if not outside:
        return 1, size
    low = int(outside)
    return low, low * int(extent)


@functools.lru_cache(maxsize=1024)
def axes_of_groups(groups: Groups, axis_sizes: AxisSizes) -> tuple[tuple[str, ...], bool]:
    """Returns the axes over which the groups run, and whether they cover them completely.

    For groups that are not a product of axes (a part of an axis, an irregular list) it returns every axis along which members
    of a group differ, and False.
    """
    wanted = _as_sets(groups)
    sizes = [size for _, size in axis_sizes]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    split = [axis for axis, size in enumerate(sizes) if size > 1]
    for num_axes in range(1, len(split) + 1):
        for joined in itertools.combinations(split, num_axes):
            kept = [axis for axis in range(len(sizes)) if axis not in joined]
            row_size = math.prod(sizes[axis] for axis in joined)
            rows = _rows(devices.transpose([*kept, *joined]), row_size)
            if _as_sets(rows) == wanted:
                return tuple(axis_sizes[axis][0] for axis in joined), True
    pairs = []
    for first, *others in groups:
        pairs += [(first, other) for other in others]
    return axes_of_pairs(tuple(pairs), axis_sizes), False


def _as_sets(groups: Groups) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, groups))


def axes_of_pairs(pairs: Groups, axis_sizes: AxisSizes) -> tuple[str, ...]:
    """Returns the axes along which source and target differ in any pair."""
    if not pairs:
        return ()
    source, target = _coordinates(pairs, axis_sizes)
    differs = (source != target).any(axis=1)
    names = [name for name, _ in axis_sizes]
    return tuple(itertools.compress(names, differs))


def shift_of_pairs(pairs: Groups, axis_sizes: AxisSizes) -> int | None:
    """Returns the distance by which all pairs shift along one axis, None if they are not such a shift.

    The wrap-around of a ring counts as part of the shift. In a ring of two, forward and backward are the same: 1.
    """
    axes = axes_of_pairs(pairs, axis_sizes)
    if len(axes) != 1:
        return None
    names = [name for name, _ in axis_sizes]
    axis = names.index(axes[0])
    _, size = axis_sizes[axis]
    source, target = _coordinates(pairs, axis_sizes)
    steps = {int(step) for step in target[axis] - source[axis]}
    if len(steps) == 1:
        return steps.pop()
    around = {step % size for step in steps}
    if len(around) != 1:
        return None
    forward = around.pop()
    return forward if forward <= size - forward else forward - size


def _coordinates(pairs: Groups, axis_sizes: AxisSizes) -> tuple[np.ndarray, np.ndarray]:
    sizes = [size for _, size in axis_sizes]
    sources, targets = np.asarray(pairs).T
    source = np.unravel_index(sources, sizes)
    target = np.unravel_index(targets, sizes)
    return np.array(source), np.array(target)


def crosses_nodes(groups: Groups, node_of: Sequence[int]) -> bool:
    """Returns whether any group (or pair) has members on different nodes."""
    nodes = [{node_of[device] for device in group} for group in groups]
    return any(len(each) > 1 for each in nodes)
