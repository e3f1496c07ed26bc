"""The candidates of a search: meshes, schedules and numbers of microbatches that fit the devices, the batch and the layers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from jaxpar.mesh import DATA
from jaxpar.pipeline import LayerLayout
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.job import Choice, divisors, fixed_or
from jaxpar.planner.model_shape import ModelShape
from jaxpar.schedule import NAMED, NUM_CHUNKS

ROWS_APART = 4  # each number of rows in a microbatch of the candidates is at least so many times the one before
LONG = 2**14  # tokens below which no sequence is cut
CONTEXTS = (2, 4, 8, 16, 32, 64)  # into how many parts a longer one is


def candidates(
    cluster: Cluster, batch_size: int, shape: ModelShape, fixed: dict[str, Any]
) -> Iterator[Choice]:
    """Yields the choices that use all devices, divide the batch and have a layer for each virtual stage, at ZeRO level 0.

    Unless they are fixed, microbatches have one row, all rows or some numbers between (``likely_rows``), sequences are whole
    unless they are long, and gpipe is left out.

    Args:
        cluster: The machines.
        batch_size: Rows of a step, over all replicas.
        shape: The model.
        fixed: Fixed settings, by name.
    """
    for mesh in _meshes(cluster, batch_size, shape, fixed):
        rows = batch_size // mesh.num_replicas
        likely = [rows // each for each in likely_rows(rows)]
        microbatches = fixed_or(fixed, "num_microbatches", likely)
        remats = fixed_or(fixed, "remat", (False, "dots", True))
        schedules = schedules_of(mesh.stage, shape.num_layers, fixed)
        for number, remat, (name, chunks) in product(microbatches, remats, schedules):
            if rows % number == 0:
                yield replace(
                    mesh, schedule=name, num_microbatches=number, num_chunks=chunks, remat=remat
                )


def likely_rows(rows: int) -> list[int]:
    """Returns some of the numbers of rows in a microbatch that divide the rows of a replica, one and all of them among these.

    >>> likely_rows(96)
    [1, 4, 16, 96]
    """
    found = [1]
    for each in divisors(rows):
        if each >= ROWS_APART * found[-1]:
            found.append(each)
    return found if found[-1] == rows else [*found, rows]


def spreads(num_layers: int, num_virtual_stages: int, leading: int = 0) -> list[tuple[int, ...]]:
    """Returns layers of each virtual stage: with embedding and head as no layers, with the head as one, and with each as one.

    An embedding with ``leading`` layers also counts as so many. Splits that leave a virtual stage without layers are left out.
    """
    leading = min(leading, num_layers // num_virtual_stages)
    ends = [(0, 0), (0, 1), (1, 1)]
    if leading:
        ends += [(leading, 0), (leading, 1)]
    found = []
    for end_layers in ends:
        layout = LayerLayout(num_layers, num_virtual_stages, end_layers=end_layers)
        spread = layout.layers_per_virtual_stage
        if spread and min(spread) > 0:
            found.append(tuple(spread))
    return found


def _meshes(
    cluster: Cluster, batch_size: int, shape: ModelShape, fixed: dict[str, Any]
) -> Iterator[Choice]:
    """Yields each mesh of all devices, with ``tensor`` inside a node and no more stages than layers."""
    placements = fixed_or(fixed, "experts", list(shape.placements) or [None])
    for inner in _inner_axes(cluster, shape, fixed):
        num_replicas = cluster.num_devices // (inner.tensor * inner.context * inner.stage)
        if batch_size % num_replicas:
            continue
        for replica, data in _groups(cluster, inner, num_replicas, fixed):
            for experts in placements:
                if data == (fixed.get("data") or data) and _fits_experts(shape, experts, data):
                    yield replace(inner, replica=replica, data=data, experts=experts)


def _inner_axes(cluster: Cluster, shape: ModelShape, fixed: dict[str, Any]) -> Iterator[Choice]:
    """Yields the axes inside of a replica, of which whole ones fill the devices."""
    contexts = [1, *(each for each in CONTEXTS if each * LONG <= shape.tokens_per_row)]
    tensors = fixed_or(fixed, "tensor", divisors(cluster.devices_per_node))
    for tensor, context in product(tensors, fixed_or(fixed, "context", contexts)):
        if context > 1 and shape.tokens_per_row % (2 * context):
            continue
        for stage in fixed_or(fixed, "stage", divisors(cluster.num_devices // tensor)):
            fills = cluster.num_devices % (tensor * context * stage) == 0
            if fills and stage <= shape.num_layers:
                yield Choice(context=context, stage=stage, tensor=tensor)


def _groups(
    cluster: Cluster, inner: Choice, num_replicas: int, fixed: dict[str, Any]
) -> Iterator[tuple[int, int]]:
    """Yields the sizes of ``replica`` and ``data``: one group, and a group a node where replicas are on several (HSDP)."""
    if held := fixed.get("replica"):
        if num_replicas % held == 0:
            yield held, num_replicas // held
        return
    devices_in_node = cluster.fast_devices or cluster.devices_per_node
    in_node = max(1, devices_in_node // (inner.tensor * inner.context))  # replicas of a stage
    yield 1, num_replicas
    if 1 < in_node < num_replicas and num_replicas % in_node == 0:
        yield num_replicas // in_node, in_node


def _fits_experts(shape: ModelShape, experts: str | None, data: int) -> bool:
    """Returns whether ``data`` divides the experts, if they are over it."""
    if experts != DATA:
        return True
    return data > 1 and shape.experts is not None and shape.experts % data == 0


def schedules_of(stage: int, num_layers: int, fixed: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the schedules that have a layer for each virtual stage, with their chunks; one stage has 1f1b alone."""
    if stage == 1:
        return [("1f1b", 1)]
    names = (
        [fixed["schedule"]]
        if fixed.get("schedule")
        else [name for name, each in NAMED.items() if not each.holds_all]
    )
    found = []
    for name in names:
        num_chunks = fixed.get("num_chunks") or NUM_CHUNKS[name]
        is_possible = num_chunks == NUM_CHUNKS[name] or NAMED[name].takes_any_chunks
        if is_possible and num_chunks * stage <= num_layers:
            found.append((name, num_chunks))
    return found
