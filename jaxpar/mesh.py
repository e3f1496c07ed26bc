"""The mesh: five named axes, and the order of the devices on them. This module does not deal with arrays.

    replica   groups of replicas, such as nodes: gradients are summed over them, nothing is sharded over them
    data      replicas of one group, over which ZeRO shards
    context   parts of a sequence, over which ZeRO shards too
    stage     pipeline stages
    tensor    shards of each weight

Every jaxpar mesh has all of them, in this order, even if their size is 1, so specs and collectives can name any of them. (With
stage=1 there is no pipeline loop, and with data=1 gradients are not reduced over it.) The devices are numbered in another
order, by how much neighbours on an axis exchange, from the slowest axis to the fastest:

    replica   one all-reduce of gradients a step, so that ZeRO's gathers inside a group never leave a node that holds the group
    stage     one activation a microbatch, and its gradient
    data      gathers and reductions of all params, and with experts over it rows of tokens in every layer
    context   keys and values in every layer
    tensor    activations several times in every layer

So replicas of a stage lie next to one another, and stages may be on different nodes, as in Megatron-LM and DeepSpeed. A mesh of
data=2, stage=2, tensor=2 over eight devices:

    stage 0:  data 0: devices 0 1      stage 1:  data 0: devices 4 5
              data 1: devices 2 3                data 1: devices 6 7
"""

import functools
import inspect
import logging
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxpar._compat import is_compile_only
from jaxpar.devices import started_devices
from jaxpar.fields import arg, check_kind, is_flag

REPLICA, DATA, CONTEXT, STAGE, TENSOR = "replica", "data", "context", "stage", "tensor"
AXES = (REPLICA, DATA, CONTEXT, STAGE, TENSOR)
ROWS = (REPLICA, DATA)  # the axes over which the rows of a batch are split
OF_ZERO = (DATA, CONTEXT)  # those over which ZeRO shards: its devices hold the same params
REPLICAS = (REPLICA, *OF_ZERO)  # those over which gradients, the loss and its weight are summed
MANUAL = (REPLICA, DATA, CONTEXT, STAGE)  # those over which a step is manual (``shard_map.py``)
OF_MODELS = (DATA, STAGE, TENSOR)  # those that a mesh is described by in any case
FROM_SLOWEST = (REPLICA, STAGE, DATA, CONTEXT, TENSOR)  # as devices are numbered
# What other libraries call the axes.
OTHER_NAMES = {
    REPLICA: ("hsdp", "dp_replicate", "replicate", "node", "nodes"),
    DATA: ("dp", "batch", "replicas", "fsdp", "data_parallel", "dp_shard"),
    CONTEXT: ("cp", "sequence", "seq", "context_parallel"),
    STAGE: ("pp", "pipe", "pipeline", "stages", "pipeline_parallel"),
    TENSOR: ("tp", "mp", "model", "tensor_parallel", "model_parallel"),
}
Function = TypeVar("Function", bound=Callable[..., Any])


def _knows_axes(make: Function) -> Function:
    """Returns the function with a check before it that refuses an axis that no mesh has, and names the one that is meant."""
    known = inspect.signature(make).parameters.keys()

    @functools.wraps(make)
    def checked(*sizes: Any, **given: Any) -> Any:
        if sizes:
            named = ", ".join(
                f"{axis}={size!r}"
                for axis, size in zip(
                    OF_MODELS if len(sizes) <= len(OF_MODELS) else AXES, sizes, strict=False
                )
            )
            raise TypeError(
                f"the axes of a mesh are given by name: {', '.join(AXES)}; got {', '.join(map(repr, sizes))}. Write "
                f"{make.__name__}({named})."
            )
        if unknown := {name: size for name, size in given.items() if name not in known}:
            raise TypeError(_unknown_axes(unknown, known))
        return make(**given)

    return checked  # pyright: ignore[reportReturnType]  # it has the signature of ``make``


@_knows_axes
def make_mesh(
    *,
    replica: int = 1,
    data: int = 1,
    context: int = 1,
    stage: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    tensor_across_nodes: bool = False,
) -> Mesh:
    """Returns a mesh with the axes ``("replica", "data", "context", "stage", "tensor")``, all of type Auto.

    Where it leaves devices idle, a warning of the logger "jaxpar" says so; not for a mesh of one of several CPU devices.

    Args:
        replica: Number of groups of ``data`` replicas each, such as one a node. The batch is split over all replicas; ZeRO
            shards inside a group, and over the groups gradients alone are summed.
        data: Number of replicas that the batch is split over. At most one axis may be -1, for the remaining devices.
        context: Number of devices that share each sequence (``context_parallel.py``).
        stage: Number of pipeline stages that the layers are split over.
        tensor: Number of shards that each weight is split into.
        devices: The devices to use, by default all of this run. If the axes need fewer, the first ones are used.
        tensor_across_nodes: Allows a ``tensor`` axis that crosses nodes, where links are about ten times slower.

    Raises:
        TypeError: An axis size is not an integer, or an axis is unknown.
        ValueError: The sizes do not fit the devices, or ``tensor`` crosses nodes without ``tensor_across_nodes``; or JAX cannot
            use the GPUs of this machine, and runs on the CPU though it was not told to.
    """
    sizes = {REPLICA: replica, DATA: data, CONTEXT: context, STAGE: stage, TENSOR: tensor}
    mesh, num_devices = arrange(sizes, devices, tensor_across_nodes=tensor_across_nodes)
    is_reference = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"  # beside fake devices
    if not is_reference and mesh.size < num_devices and jax.process_index() == 0:
        logging.getLogger("jaxpar").warning("%s", idle_text(mesh, num_devices))
    return mesh


def idle_text(mesh: Mesh, num_devices: int) -> str:
    """Returns that a mesh leaves some of the devices idle, and what takes all of them, if ``data`` can."""
    fits = num_devices % (mesh.size // mesh.shape[DATA]) == 0
    more = f"; {arg(data=-1)} takes all of them" if fits else ""
    return f"the mesh has {mesh.size} of {num_devices} devices, the others are idle{more}"


def arrange(
    given: dict[str, int],
    devices: Sequence[jax.Device] | None = None,
    *,
    tensor_across_nodes: bool = False,
) -> tuple[Mesh, int]:
    """Returns a mesh as ``make_mesh`` does, and the number of devices that there were to choose from.

    Args:
        given: The size of each axis.
        devices: As for ``make_mesh``.
        tensor_across_nodes: As there.
    """
    found = started_devices() if devices is None else _checked(devices)
    available = sorted(found, key=lambda d: (node_of(d), d.id))
    sizes = resolve_sizes(given, len(available), processes_with_fake_devices(available))
    used = available[: math.prod(sizes.values())]
    check_every_process_takes_part(used, available)
    if not tensor_across_nodes:
        _check_tensor_inside_node(used, sizes[TENSOR])
    auto, in_order = (AxisType.Auto,) * len(AXES), tuple(sizes[axis] for axis in FROM_SLOWEST)
    mesh = jax.make_mesh(in_order, FROM_SLOWEST, devices=used, axis_types=auto)
    transposed = mesh.devices.transpose([FROM_SLOWEST.index(axis) for axis in AXES])
    return Mesh(transposed, AXES, axis_types=auto), len(available)


def _checked(devices: Any) -> list[jax.Device]:
    """Returns devices as a list; raises unless each is one, and there once."""
    found = (
        list(devices)
        if isinstance(devices, Iterable) and not isinstance(devices, str)
        else [devices]
    )
    for each in found:
        check_kind(
            (jax.Device,), "a sequence of devices of JAX", "Use jax.devices().", devices=each
        )
    if not found or len(set(found)) < len(found):
        raise ValueError(
            f"devices must be at least one, and each once; got {len(found)}, of which {len(set(found))} differ. Use "
            "jax.devices()."
        )
    return found


def numbered_places(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns the coordinates of each device by axis, in the order in which ``make_mesh`` numbers devices.

    Args:
        sizes: The sizes of axes, such as ``mesh.shape``, in any order; the coordinates are in the same one.
    """
    axes = [axis for axis in FROM_SLOWEST if axis in sizes]
    places = (dict(zip(axes, at, strict=True)) for at in product(*(range(sizes[a]) for a in axes)))
    return [{axis: place[axis] for axis in sizes} for place in places]


def shown_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of axes, such as ``mesh.shape``, as they are shown: without a ``replica`` or ``context`` of 1."""
    return {
        axis: size for axis, size in sizes.items() if axis not in (REPLICA, CONTEXT) or size != 1
    }


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of axes, such as ``mesh.shape``, as text: "data=2, stage=2, tensor=2"."""
    return ", ".join(f"{axis}={size}" for axis, size in shown_sizes(sizes).items())


def num_replicas(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts into which the rows of a batch are split: ``replica`` times ``data``."""
    return mesh.shape[REPLICA] * mesh.shape[DATA]


def spec_of_rows(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the spec of the rows of a batch, which are split over ``replica`` and ``data``."""
    return PartitionSpec(DATA if mesh.shape[REPLICA] == 1 else ROWS)


def _unknown_axes(given: Mapping[str, object], known: Iterable[str]) -> str:
    """Returns a message about all keywords that name no axis, with the axes that are meant."""
    others = {other: axis for axis, names in OTHER_NAMES.items() for other in names} | {
        each: each for each in known
    }
    near = {name: get_close_matches(name.lower(), others, 1) for name in given}
    shown = {name: reprlib.repr(size) for name, size in given.items()}
    got = ", ".join(f"{name}={shown[name]}" for name in given)
    meant = ", ".join(f"{others[near[name][0]]}={shown[name]}" for name in given if near[name])
    advice = [f"Did you mean {meant}?"] if meant else []
    if unlike := [name for name in given if not near[name]]:
        advice.append(
            f"Choose one of these for {', '.join(unlike)}." if meant else "Choose one of these."
        )
    if ["fsdp"] in near.values():
        advice.append("fsdp is data with zero=3 in jaxpar.value_and_grad.")
    return f"the axes of a mesh are {', '.join(AXES)}; got {got}. {' '.join(advice)}"


def processes_with_fake_devices(devices: Sequence[jax.Device]) -> int:
    """Returns the number of processes, such as `launch` starts, whose CPU devices these are; 1 for other devices."""
    return len({d.process_index for d in devices if d.platform == "cpu"}) or 1


def resolve_sizes(
    sizes: dict[str, int], num_devices: int, num_processes: int = 1
) -> dict[str, int]:
    """Returns the axis sizes with -1 replaced by the remaining devices; raises if they do not fit.

    Args:
        sizes: The size of each axis.
        num_devices: The devices to choose from.
        num_processes: The processes on CPU devices that own them.
    """
    got = arg(**shown_sizes(sizes))
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(
                f"mesh axis sizes must be integers; got {arg(**{axis: repr(size)})}. Write {arg(**{axis: 2})}, or "
                f"{arg(**{axis: -1})}."
            )
        if size < 1 and size != -1:
            raise ValueError(
                f"mesh axis sizes must be positive, or -1 for the rest; got {got}. Choose {arg(**{axis: 1})} or more."
            )
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(
            f"only one mesh axis can be -1, the rest; got {got}. Give a size to all but one of {open_axes}."
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and num_devices % fixed == 0:
        return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
    if open_axes:
        raise ValueError(
            f"the fixed mesh axes must divide the number of devices when one is -1; got {got} with {num_devices} devices. "
            f"Choose sizes whose product divides {num_devices}."
        )
    if fixed > num_devices:
        raise ValueError(
            f"the product of the mesh axes must be at most the number of devices; got {got}, which needs {fixed} devices, "
            f"with {num_devices} devices. Choose smaller axes, or {_more_fake_devices(fixed, sizes[TENSOR], num_processes)}."
        )
    return dict(sizes)


def _more_fake_devices(needed: int, tensor: int, num_processes: int) -> str:
    if num_processes > 1:  # as many devices as are needed, and in each process a multiple of tensor
        processes = math.gcd(num_processes, needed // tensor)
        each = needed // processes
        return f"start processes of {each} devices: python -m jaxpar launch -n {processes} --devices-per-process {each}"
    return (
        f"test on a laptop with {needed} fake devices (--fake-devices {needed} in recipes, "
        f"jaxpar.use_fake_devices({needed}) in code)"
    )


def abstract_mesh(
    *, replica: int = 1, data: int = 1, context: int = 1, stage: int = 1, tensor: int = 1
) -> AbstractMesh:
    """Returns a mesh without devices, for computing shardings and shapes. Nothing can run on it."""
    return AbstractMesh(
        (replica, data, context, stage, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def check_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raises unless ``mesh`` has jaxpar's five axes, all of type Auto."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh; got {type(mesh).__name__}. Make one with jaxpar.make_mesh."
        )
    if mesh.axis_names != AXES:
        raise ValueError(
            f"a mesh must have the axes {AXES}; got {mesh.axis_names}. Make the mesh with jaxpar.make_mesh."
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"mesh axes must be of type Auto; got {mesh.axis_types}, which plain jax.make_mesh gives. "
            "Make the mesh with jaxpar.make_mesh."
        )


def node_of(device: jax.Device) -> Hashable:
    """Returns an id of the machine that holds ``device``: its fast-link domain if JAX knows one, else its process."""
    if is_compile_only(device):
        return device.process_index
    for attribute in ("partition_index", "slice_index"):
        index = getattr(device, attribute, None)
        if index is not None and device.platform == "gpu":
            return index
    return device.process_index


def check_every_process_takes_part(
    used: Sequence[jax.Device], available: Sequence[jax.Device]
) -> None:
    """Raises ValueError if a process owns available devices and none of those used."""
    idle = sorted({d.process_index for d in available} - {d.process_index for d in used})
    if idle:
        raise ValueError(
            f"every process must own a device of the mesh; got a mesh of {len(used)} of {len(available)} devices, which "
            f"leaves out process {idle}. Use all devices (one axis -1), or start fewer processes."
        )


def _check_tensor_inside_node(used: Sequence[jax.Device], tensor: int) -> None:
    for start in range(0, len(used), tensor):
        nodes = sorted({str(node_of(d)) for d in used[start : start + tensor]})
        if len(nodes) > 1:
            each = min(Counter(map(node_of, used)).values())
            others = [] if is_flag(TENSOR) else ["pass tensor_across_nodes=True"]
            if (processes := processes_with_fake_devices(used)) > 1:
                others.insert(0, _more_fake_devices(len(used), tensor, processes))
            fits = f"Choose {arg(tensor=math.gcd(each, tensor))}, which divides the devices of a node, {each}"
            remedy = ", or ".join([fits, *others])
            raise ValueError(
                f"the tensor axis must stay inside a node, whose links are the fast ones; got {arg(tensor=tensor)}, which puts "
                f"devices {start} to {start + tensor - 1} on nodes {', '.join(nodes)}. {remedy}."
            )


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def cut_of(spec: PartitionSpec | tuple, axis: str) -> int | None:
    """Returns the dim of an array that a PartitionSpec shards over an axis; None if there is none."""
    for dim, names in enumerate(spec):
        if names == axis or (isinstance(names, tuple) and axis in names):
            return dim
    return None
