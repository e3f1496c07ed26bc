"""`inspect_step`, the entry point: from a function or any stage of its compilation to a report."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxpar.inspect.collectives import find_collectives
from jaxpar.inspect.costs import count_flops
from jaxpar.inspect.gpu import GpuProgram, read_gpu_program
from jaxpar.inspect.groups import AxisSizes
from jaxpar.inspect.hlo import Assumptions, Module, parse_module, plain_number
from jaxpar.inspect.report import Memory, StepReport, WholeArray


def inspect_step(
    fn: Any,
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    large_bytes: int = 1 << 20,
    devices_per_node: int | None = None,
    loop_trips: int | None = None,
    branch_shares: Mapping[str, Sequence[float | Fraction]] | None = None,
) -> StepReport:
    """Returns the cost of a step on each device, read from its compiled program; nothing is run.

    Args:
        fn: a jitted function, a plain one (which is jitted), or a traced, lowered or compiled stage.
        *args: arguments of the function: arrays, or `jax.ShapeDtypeStruct`s with shardings. A stage needs none.
        mesh: the mesh whose axes name those of the collectives. By default that of the arguments' or the program's shardings.
        large_bytes: the size at which an array that is replicated on every device is listed in `whole_arrays`, and a copy in
            `gpu`.
        devices_per_node: separates links inside a node from links between nodes, by the ids of the mesh's devices.
        loop_trips: the trips to assume for loops whose number of trips the compiler does not know.
        branch_shares: how often branches are taken, by a pattern for the op name of their conditional: `{"cond$": (0.5, 0.5)}`
            (XLA numbers the branches of `jax.lax.cond` false, true). For a loop of one trip or none, those of none and one.

    Raises:
        ValueError: the mesh has another number of devices than the program, or an option is out of range.
        TypeError: `fn` is none of these.
    """
    _check_options(large_bytes, devices_per_node, loop_trips)
    compiled = _compile(fn, args)
    module = parse_module(compiled.as_text() or "")
    mesh = _find_mesh(mesh, args, compiled, module.num_devices)
    assumptions = Assumptions(loop_trips, dict(branch_shares or {}))
    flops = count_flops(module, assumptions=assumptions)
    axis_sizes: AxisSizes = () if mesh is None else tuple((str(name), int(size)) for name, size in mesh.shape.items())
    return StepReport(
        collectives=find_collectives(
            module, axis_sizes=axis_sizes, node_of=_nodes(mesh, module, devices_per_node), assumptions=assumptions
        ),
        memory=_memory(compiled),
        flops=plain_number(flops.most),
        flops_least=plain_number(flops.least),
        compiler_flops=_compiler_flops(compiled),
        whole_arrays=tuple(_whole_arrays(compiled, _parameter_names(fn, args, compiled), large_bytes)),
        unknown_loops=tuple(sorted(flops.unknown_loops)),
        uncounted_calls=tuple(sorted(flops.uncounted)),
        axis_sizes=axis_sizes,
        num_devices=module.num_devices,
        large_bytes=large_bytes,
        name=module.name,
        gpu=_gpu_program(mesh, module, large_bytes, assumptions),
    )


def _gpu_program(
    mesh: Mesh | AbstractMesh | None, module: Module, large_bytes: int, assumptions: Assumptions
) -> GpuProgram | None:
    if not isinstance(mesh, Mesh) or (device := mesh.devices.flat[0]).platform != "gpu":
        return None
    return read_gpu_program(module, large_bytes=large_bytes, assumptions=assumptions, device_kind=device.device_kind)


def _check_options(large_bytes: int, devices_per_node: int | None, loop_trips: int | None) -> None:
    for name, value, least in (
        ("large_bytes", large_bytes, 0),
        ("devices_per_node", devices_per_node, 1),
        ("loop_trips", loop_trips, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be {least} or more; got {value}. Leave it out for the default.")


def _compile(fn: Any, args: tuple) -> jax.stages.Compiled:
    if isinstance(fn, jax.stages.Compiled):
        return fn
    if isinstance(fn, jax.stages.Lowered):
        return fn.compile()
    if isinstance(fn, jax.stages.Traced):
        return fn.lower().compile()
    if not callable(fn):
        raise TypeError(
            "fn must be a function or a traced, lowered or compiled stage of one; "
            f"got {type(fn).__name__}. Pass the function itself, or jax.jit(fn).lower(...)."
        )
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    return jitted.lower(*args).compile()


def _find_mesh(
    mesh: Mesh | AbstractMesh | None, args: tuple, compiled: jax.stages.Compiled, num_devices: int
) -> Mesh | AbstractMesh | None:
    if mesh is not None:
        if mesh.size != num_devices:
            raise ValueError(
                f"mesh must have the devices of the compiled program; got a mesh of {mesh.size}, a program for {num_devices}. "
                "Pass the mesh of the program, and arguments with shardings on it."
            )
        return mesh
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    shardings += jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    found = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((each for each in found if each.size == num_devices and not each.empty), None)


def _nodes(mesh: Mesh | AbstractMesh | None, module: Module, devices_per_node: int | None) -> tuple[int, ...] | None:
    if devices_per_node is None:
        return None
    # Device ids are numbered node by node; positions in the mesh need not be.
    ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else range(module.num_devices)
    return tuple(each // devices_per_node for each in ids)


def _memory(compiled: jax.stages.Compiled) -> Memory:
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(f"the backend must plan memory; got none from {jax.default_backend()}. Inspect on cpu or gpu.")
    kinds = ("argument", "output", "temp", "alias", "generated_code")
    return Memory(*(int(getattr(stats, f"{kind}_size_in_bytes")) for kind in kinds))


def _compiler_flops(compiled: jax.stages.Compiled) -> float | None:
    analysis = compiled.cost_analysis()
    flops = analysis.get("flops") if isinstance(analysis, dict) else None
    return None if flops is None else float(flops)


def _parameter_names(fn: Any, args: tuple, compiled: jax.stages.Compiled) -> tuple[str, ...]:
    if len(compiled.in_avals[0]) != len(args):
        return ()  # static arguments are compiled in, and the program does not record which they were
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))


def _whole_arrays(compiled: jax.stages.Compiled, names: tuple[str, ...], large_bytes: int) -> Iterator[WholeArray]:
    for name, array, sharding in (*_inputs(compiled, names), *_outputs(compiled)):
        if sharding is None or len(sharding.device_set) < 2 or not sharding.is_fully_replicated:
            continue
        num_bytes = int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize
        if num_bytes >= large_bytes:
            yield WholeArray(name, tuple(array.shape), str(array.dtype), num_bytes, len(sharding.device_set))


def _inputs(compiled: jax.stages.Compiled, names: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    # The sharding of an argument that the program does not read is None, and so is that of a None in an argument.
    is_none = lambda leaf: leaf is None
    arrays = jax.tree_util.tree_leaves_with_path(compiled.in_avals, is_leaf=is_none)
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=is_none)
    for (path, array), sharding in zip(arrays, shardings, strict=True):
        side, *rest = path  # (positional arguments, keyword arguments)
        if side == jax.tree_util.SequenceKey(0):
            entry, *rest = rest
            index = entry.idx
            root = names[index] if index < len(names) else f"args[{index}]"
        else:
            root = "kwargs"
        yield root + jax.tree_util.keystr(tuple(rest)), array, sharding


def _outputs(compiled: jax.stages.Compiled) -> Iterator[tuple[str, Any, Any]]:
    arrays = jax.tree_util.tree_leaves_with_path(compiled.out_info)
    shardings = jax.tree.leaves(compiled.output_shardings)
    for (path, array), sharding in zip(arrays, shardings, strict=True):
        yield "output" + jax.tree_util.keystr(path), array, sharding
