"""`inspect_step`: from a function or any stage of its compilation to a report. Reports compared, and held to expectations."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxpar.fields import check_at_least
from jaxpar.inspect.collectives import Collective, find_collectives
from jaxpar.inspect.costs import count_flops
from jaxpar.inspect.gpu import read_gpu_program
from jaxpar.inspect.groups import AxisSizes
from jaxpar.inspect.hlo import Assumptions, Module, parse_module
from jaxpar.inspect.report import Axes, Memory, StepReport, WholeArray, axes_text
from jaxpar.inspect.text import bytes_text, flops_text, table


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
    check_at_least(0, large_bytes=large_bytes, loop_trips=loop_trips)
    check_at_least(1, devices_per_node=devices_per_node)
    _check_shares(branch_shares or {})
    compiled = _compile(fn, args)
    module = parse_module(compiled.as_text() or "")
    mesh = _find_mesh(mesh, args, compiled, module.num_devices)
    assumptions = Assumptions(loop_trips, dict(branch_shares or {}))
    analysis = compiled.cost_analysis()
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    axis_sizes: AxisSizes = (
        () if mesh is None else tuple((str(name), int(size)) for name, size in mesh.shape.items())
    )
    return StepReport(
        collectives=find_collectives(
            module,
            axis_sizes=axis_sizes,
            node_of=_nodes(mesh, module, devices_per_node),
            assumptions=assumptions,
        ),
        memory=_memory(compiled),
        **count_flops(module, assumptions),
        compiler_flops=analysis.get("flops") if isinstance(analysis, dict) else None,
        whole_arrays=tuple(
            _whole_arrays(compiled, _parameter_names(fn, args, compiled), large_bytes)
        ),
        axis_sizes=axis_sizes,
        num_devices=module.num_devices,
        large_bytes=large_bytes,
        name=module.name,
        gpu=read_gpu_program(
            module, large_bytes=large_bytes, assumptions=assumptions, device_kind=device.device_kind
        )
        if device is not None and device.platform == "gpu"
        else None,
    )


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


def _check_shares(branch_shares: Mapping[str, Sequence[float | Fraction]]) -> None:
    for pattern, shares in branch_shares.items():
        if min(shares, default=0) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(
                "branch_shares must be shares of the times that a conditional runs, which add up to 1; got "
                f"{tuple(map(str, shares))} for {pattern!r}. Give such as (0.5, 0.5)."
            )


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


def _nodes(
    mesh: Mesh | AbstractMesh | None, module: Module, devices_per_node: int | None
) -> tuple[int, ...] | None:
    if devices_per_node is None:
        return None
    # Device ids are numbered node by node; positions in the mesh need not be.
    ids = (
        [device.id for device in mesh.devices.flat]
        if isinstance(mesh, Mesh)
        else range(module.num_devices)
    )
    return tuple(each // devices_per_node for each in ids)


def _memory(compiled: jax.stages.Compiled) -> Memory:
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            f"the backend must plan memory; got none from {jax.default_backend()}. Inspect on cpu or gpu."
        )
    kinds = ("argument", "output", "temp", "alias", "generated_code")
    return Memory(*(int(getattr(stats, f"{kind}_size_in_bytes")) for kind in kinds))


def _parameter_names(fn: Any, args: tuple, compiled: jax.stages.Compiled) -> tuple[str, ...]:
    if len(compiled.in_avals[0]) != len(args):
        return ()  # static arguments are compiled in, and the program does not record which they were
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    )


def _whole_arrays(
    compiled: jax.stages.Compiled, names: tuple[str, ...], large_bytes: int
) -> Iterator[WholeArray]:
    for name, array, sharding in (*_inputs(compiled, names), *_outputs(compiled)):
        if sharding is None or len(sharding.device_set) < 2 or not sharding.is_fully_replicated:
            continue
        num_bytes = int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize
        if num_bytes >= large_bytes:
            yield WholeArray(
                name, tuple(array.shape), str(array.dtype), num_bytes, len(sharding.device_set)
            )


def _inputs(
    compiled: jax.stages.Compiled, names: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
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


@dataclass(frozen=True)
class Comparison:
    """The figures that differ between two reports, before and after.

    Attributes:
        collectives: by kind and axes: ((runs, bytes) before, (runs, bytes) after); runs are None where unknown.
        memory: by kind: (bytes before, bytes after).
        flops: (before, after), or None where they are the same.
        whole_arrays: names of large arrays that are replicated only before, and only after.
    """

    collectives: Mapping[tuple[str, tuple[str, ...]], tuple[tuple, tuple]]
    memory: Mapping[str, tuple[int, int]]
    flops: tuple[int | float, int | float] | None
    whole_arrays: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def is_same(self) -> bool:
        """Whether no figure differs."""
        return not (self.collectives or self.memory or self.flops or any(self.whole_arrays))

    def render(self) -> str:
        """Returns a table of the figures that differ, or `no difference`."""
        if self.is_same:
            return "no difference"
        rows = [["what", "before", "after"]]
        for (kind, axes), pair in self.collectives.items():
            rows.append(
                [f"{kind} over {axes_text(axes)}", *(_runs_and_bytes(*side) for side in pair)]
            )
        for kind, (before, after) in self.memory.items():
            rows.append([f"{kind} memory", bytes_text(before), bytes_text(after)])
        if self.flops:
            rows.append(["flops", *(flops_text(flops) for flops in self.flops)])
        lines = [table(rows)]
        for names, word in zip(self.whole_arrays, ("no longer", "newly"), strict=True):
            lines += [f"{word} whole on every device: {name}" for name in names]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def compare(before: StepReport, after: StepReport) -> Comparison:
    """Returns the differences between two reports; `.render()` returns them as text, `.is_same` is for tests."""
    old, new = _totals(before.collectives), _totals(after.collectives)
    old_whole, new_whole = (
        {array.name for array in report.whole_arrays} for report in (before, after)
    )
    return Comparison(
        collectives=_differing(old, new, (0, 0)),
        memory=_differing(before.memory.by_kind(), after.memory.by_kind()),
        flops=(before.flops, after.flops) if before.flops != after.flops else None,
        whole_arrays=(tuple(sorted(old_whole - new_whole)), tuple(sorted(new_whole - old_whole))),
    )


def _differing(old: dict, new: dict, none: Any = None) -> dict[Any, tuple]:
    """Returns the pairs of values that differ, by key; ``none`` in place of one that is missing."""
    pairs = {key: (old.get(key, none), new.get(key, none)) for key in old | new}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _totals(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple]:
    totals: dict[tuple[str, tuple[str, ...]], tuple] = {}
    for each in collectives:
        key = (each.kind, each.axes)
        runs, num_bytes = totals.get(key, (0, 0))
        if runs is None or each.times is None:
            totals[key] = (None, None)
        else:
            totals[key] = (runs + each.times, num_bytes + (each.bytes_moved or 0))
    return totals


Expected = Mapping[str | tuple[str, Axes], int | tuple[int, int]]


def assert_collectives(
    step: StepReport | Callable,
    expected: Expected,
    *args: Any,
    min_bytes: int = 0,
    allow_others: bool = False,
    **inspect_options: Any,
) -> StepReport:
    """Asserts that a step runs exactly these collectives; for tests.

    Args:
        step: a report, or a function to inspect with `args`.
        expected: runs a step, or (runs, bytes moved), by kind or by (kind, axis) or (kind, (axis, axis)):
            `{("all-reduce", "data"): 1, ("collective-permute", "stage"): (22, 22 * 4096)}`.
        *args: arguments of the function, as for `inspect_step`.
        min_bytes: collectives with a smaller payload are ignored (a loss, a gradient norm).
        allow_others: accept collectives that `expected` does not name.
        **inspect_options: for `inspect_step`, where `step` is a function.

    Returns:
        The report, for further checks.

    Raises:
        AssertionError: a count or a size differs, or there is another collective; the message contains the report.
    """
    report = step if isinstance(step, StepReport) else inspect_step(step, *args, **inspect_options)
    wrong = []
    named: set[int] = set()
    for key, value in expected.items():
        kind, axis = (key, None) if isinstance(key, str) else key
        chosen = report.select(kind, axis, min_bytes=min_bytes)
        named.update(map(id, chosen))
        runs, num_bytes = value if isinstance(value, tuple) else (value, None)
        wrong += _differences(report, kind, axis, min_bytes, runs, num_bytes)
    others = [each for each in report.select(min_bytes=min_bytes) if id(each) not in named]
    if others and not allow_others:
        wrong += [
            f"nothing else expected; got {each.kind} over {axes_text(each.axes)}" for each in others
        ]
    if wrong:
        raise AssertionError("\n".join([*wrong, "", report.render()]))
    return report


def _differences(
    report: StepReport,
    kind: str,
    axis: Axes | None,
    min_bytes: int,
    runs: int | float,
    num_bytes: int | None,
) -> list[str]:
    where = "" if axis is None else f" over {axes_text((axis,) if isinstance(axis, str) else axis)}"
    found = report.count(kind, axis, min_bytes=min_bytes)
    wrong = [] if found == runs else [f"{kind}{where} must run {runs} times a step; got {found}"]
    if (
        num_bytes is not None
        and (moved := report.bytes_moved(kind, axis, min_bytes=min_bytes)) != num_bytes
    ):
        wrong.append(f"{kind}{where} must move {num_bytes} bytes a step; got {moved}")
    return wrong


def _runs_and_bytes(runs: int | float | None, num_bytes: int | None) -> str:
    if runs is None:
        return "unknown runs"
    return f"{runs:g} x, {bytes_text(num_bytes)}" if runs else "none"
