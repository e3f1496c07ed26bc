"""The candidates of a search: meshes, schedules and numbers of microbatches that fit the devices, the batch and the layers."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from jaxpar.pipeline import LayerLayout
from jaxpar.planner.choice import SCHEDULES, Choice, divisors, held_or
from jaxpar.planner.cluster import Cluster

ROWS = (1, 2, 4, 8)  # of a microbatch


def check_held(fixed: dict[str, Any], executor: str, batch_size: int, top: int) -> None:
    """Raises for an unknown setting, or a value out of its range."""
    names = ("data", "stage", "tensor", "schedule", "num_chunks", "num_microbatches", "zero", "remat")
    unknown = sorted(set(fixed) - set(names))
    if unknown:
        raise ValueError(f"a fixed setting must be one of {', '.join(names)}; got {unknown}.")
    if executor not in ("spmd", "mpmd"):
        raise ValueError(f'executor must be "spmd" or "mpmd"; got {executor!r}.')
    counts = {name: fixed.get(name) for name in ("data", "stage", "tensor", "num_chunks", "num_microbatches")}
    for name, value in {"batch_size": batch_size, "top": top, **counts}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more; got {value}. Choose 1, say.")
    if fixed.get("zero") not in (None, 0, 1, 2, 3):
        raise ValueError(f"zero must be a ZeRO level, 0 to 3; got {fixed['zero']!r}. Choose 0 for none.")
    schedules = [name for name, _ in SCHEDULES]
    if fixed.get("schedule") is not None and fixed["schedule"] not in schedules:
        raise ValueError(f"schedule must be one of {', '.join(schedules)}; got {fixed['schedule']!r}.")


def candidates(cluster: Cluster, batch_size: int, num_layers: int, fixed: dict[str, Any]) -> Iterator[Choice]:
    """Yields the choices that use all devices, divide the batch and have a layer for each virtual stage, at ZeRO level 0.

    Unless they are fixed, microbatches have 1, 2, 4 or 8 rows, and gpipe is left out.

    Args:
        cluster: The machines.
        batch_size: Rows of a step, over all replicas.
        num_layers: Layers of the model.
        fixed: Fixed settings, by name.
    """
    for data, stage, tensor in _meshes(cluster, batch_size, num_layers, fixed):
        remats, schedules = held_or(fixed, "remat", (False, "dots", True)), list(_schedules(stage, num_layers, fixed))
        for num_microbatches, remat, (schedule, chunks) in product(
            _microbatches(batch_size // data, fixed), remats, schedules
        ):
            yield Choice(
                data=data,
                stage=stage,
                tensor=tensor,
                schedule=schedule,
                num_microbatches=num_microbatches,
                num_chunks=chunks,
                remat=remat,
            )


def spreads(num_layers: int, num_virtual_stages: int) -> list[tuple[int, ...]]:
    """Returns layers of each virtual stage: with embedding and head as no layers, with the head as one, and with each as one.

    Splits that leave a virtual stage without layers are left out.
    """
    spreads = [
        LayerLayout(num_layers, num_virtual_stages, end_layers=ends).layers_per_virtual_stage
        for ends in ((0, 0), (0, 1), (1, 1))
    ]
    return [tuple(spread or ()) for spread in spreads if min(spread or (0,)) > 0]


def _meshes(
    cluster: Cluster, batch_size: int, num_layers: int, fixed: dict[str, Any]
) -> Iterator[tuple[int, int, int]]:
    """Yields each (data, stage, tensor) that uses all devices, with tensor inside a node and no more stages than layers."""
    count = cluster.num_devices
    for tensor in held_or(fixed, "tensor", divisors(cluster.devices_per_node)):
        for stage in held_or(fixed, "stage", divisors(count // tensor)):
            data = count // (tensor * stage)
            fits = stage <= num_layers and batch_size % max(1, data) == 0
            if data * stage * tensor == count and fits and data == (fixed.get("data") or data):
                yield data, stage, tensor


def _schedules(stage: int, num_layers: int, fixed: dict[str, Any]) -> Iterator[tuple[str, int]]:
    held, chunks = fixed.get("schedule"), fixed.get("num_chunks")
    for name, usual in SCHEDULES if stage > 1 else SCHEDULES[:1]:
        count = (chunks or usual) if stage > 1 else 1
        can = (count == usual) or name == "interleaved"
        if held is None and name == "gpipe":
            continue
        if (stage == 1 or held in (None, name)) and can and count * stage <= num_layers:
            yield name, count


def _microbatches(rows: int, fixed: dict[str, Any]) -> Sequence[int]:
    held = fixed.get("num_microbatches")
    if held:
        return [held] if rows % held == 0 else []
    return [rows // each for each in ROWS if rows % each == 0]
