"""The candidates of a search: meshes, schedules and numbers of microbatches that fit the devices, the batch and the layers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from jaxpar.mesh import DATA
from jaxpar.pipeline import LayerLayout
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.job import SCHEDULES, Choice, divisors, fixed_or
from jaxpar.planner.model_shape import ModelShape

ROWS_APART = 4  # each number of rows in a microbatch of the candidates is at least so many times the one before
LONG, CONTEXTS = 2**14, (2, 4, 8, 16, 32, 64)  # tokens below which no sequence is cut; into how many parts


def candidates(cluster: Cluster, batch_size: int, shape: ModelShape, fixed: dict[str, Any]) -> Iterator[Choice]:
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
        schedules, rows = schedules_of(mesh.stage, shape.num_layers, fixed), batch_size // mesh.num_replicas
        microbatches = fixed_or(fixed, "num_microbatches", [rows // each for each in likely_rows(rows)])
        remats = fixed_or(fixed, "remat", (False, "dots", True))
        for number, remat, (name, chunks) in product(microbatches, remats, schedules):
            if rows % number == 0:
                yield replace(mesh, schedule=name, num_microbatches=number, num_chunks=chunks, remat=remat)


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
    ends = [(0, 0), (0, 1), (1, 1)] + ([(leading, 0), (leading, 1)] if leading else [])
    spreads = [LayerLayout(num_layers, num_virtual_stages, end_layers=each).layers_per_virtual_stage for each in ends]
    return [tuple(spread) for spread in spreads if spread and min(spread) > 0]


def _meshes(cluster: Cluster, batch_size: int, shape: ModelShape, fixed: dict[str, Any]) -> Iterator[Choice]:
    """Yields each mesh of all devices, with ``tensor`` inside a node and no more stages than layers.

    Replicas of a stage on several nodes are one group, or a group a node (HSDP).
    """
    count, contexts = cluster.num_devices, [each for each in CONTEXTS if each * LONG <= shape.tokens_per_row]
    tensors = fixed_or(fixed, "tensor", divisors(cluster.devices_per_node))
    for tensor, context in product(tensors, fixed_or(fixed, "context", [1, *contexts])):
        in_node = max(1, (cluster.fast_devices or cluster.devices_per_node) // (tensor * context))  # of a stage
        for stage in fixed_or(fixed, "stage", divisors(count // tensor)):
            inner = tensor * context * stage
            replicas, fits = count // inner, count % inner == 0 and stage <= shape.num_layers
            if not fits or batch_size % replicas or (context > 1 and shape.tokens_per_row % (2 * context)):
                continue
            groups = {1: replicas} | ({replicas // in_node: in_node} if replicas % in_node == 0 and in_node > 1 else {})
            if held := fixed.get("replica"):
                groups = {held: replicas // held} if replicas % held == 0 else {}
            for replica, data in groups.items():
                for experts in fixed_or(fixed, "experts", list(shape.placements) or [None]):
                    fits = experts != DATA or (data > 1 and shape.experts is not None and shape.experts % data == 0)
                    if fits and data == (fixed.get("data") or data):
                        yield Choice(
                            replica=replica, data=data, context=context, stage=stage, tensor=tensor, experts=experts
                        )


def schedules_of(stage: int, num_layers: int, fixed: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the schedules that have a layer for each virtual stage, with their chunks; one stage has 1f1b alone."""
    if stage == 1:
        return [("1f1b", 1)]
    usual = {fixed["schedule"]: dict(SCHEDULES)[fixed["schedule"]]} if fixed.get("schedule") else dict(SCHEDULES)
    if not fixed.get("schedule"):
        del usual["gpipe"]
    found = {name: fixed.get("num_chunks") or count for name, count in usual.items()}
    fits = lambda name: found[name] * stage <= num_layers and (found[name] == usual[name] or name == "interleaved")
    return [(name, count) for name, count in found.items() if fits(name)]
