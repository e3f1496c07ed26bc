"""The report of `inspect_step`: the cost of a step on each device, with queries and as text."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.inspect.collectives import Collective, bytes_of_busiest
from jaxpar.inspect.gpu import GpuProgram
from jaxpar.inspect.text import bytes_text, flops_text, table, table_of
from jaxpar.mesh import sizes_text

Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while the step runs, as the compiler planned them.

    `alias_bytes` are outputs in the memory of donated arguments, which `argument_bytes` and `output_bytes` both include;
    `total_bytes` counts them once.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that a device needs for the step."""
        return (
            self.argument_bytes
            + self.output_bytes
            + self.temp_bytes
            - self.alias_bytes
            + self.generated_code_bytes
        )

    def by_kind(self) -> dict[str, int]:
        """Returns the figures by their names in a report, the total last."""
        kinds = {
            name.removesuffix("_bytes").replace("_", " "): size for name, size in vars(self).items()
        }
        return kinds | {"total": self.total_bytes}


@dataclass(frozen=True)
class WholeArray:
    """A large argument or output that is replicated on every device."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_devices: int


@dataclass(frozen=True)
class StepReport:
    """The cost of one step on each device, read from the compiled program.

    Attributes:
        collectives: every collective that moves data, with its mesh axes, its runs in a step and its bytes.
        memory: bytes by kind on each device.
        flops: operations of matrix products and convolutions on each device, multiplied by loop trips; where a conditional's
            shares are not known, with its most expensive branch. Each of `unknown_loops` counts as one trip.
        flops_least: the same with the cheapest branches.
        compiler_flops: XLA's own figure, which counts loop bodies once and elementwise work too; None if it has none.
        whole_arrays: large arguments and outputs that are replicated on every device.
        unknown_loops: op names of loops whose trips the compiler does not know.
        uncounted_calls: custom calls that look like matrix products and are not in `flops`.
        axis_sizes: the mesh, by axis; empty if none is known.
        num_devices: devices that the program runs on.
        large_bytes: the size in bytes at which an array counts as large.
        name: name of the compiled module.
        gpu: copies, waits of the host and overlap of a program for GPUs; None for other devices.
        fp8_products: runs in a step of products of factors in FP8, with loop trips; branches count as taken, and a loop of
            `unknown_loops` as one trip.
    """

    collectives: tuple[Collective, ...]
    memory: Memory
    flops: int | float
    flops_least: int | float
    compiler_flops: float | None
    whole_arrays: tuple[WholeArray, ...]
    unknown_loops: tuple[str, ...]
    uncounted_calls: tuple[str, ...]
    axis_sizes: tuple[tuple[str, int], ...]
    num_devices: int
    large_bytes: int
    name: str
    gpu: GpuProgram | None = None
    fp8_products: int | float = 0

    def select(
        self, kind: str | None = None, axis: Axes | None = None, *, min_bytes: int = 0
    ) -> tuple[Collective, ...]:
        """Returns the collectives of one kind, over exactly these axes, with at least `min_bytes` of payload.

        Raises:
            ValueError: the mesh has no such axis.
        """
        wanted = None if axis is None else frozenset(self._checked_axes(axis))
        return tuple(
            each
            for each in self.collectives
            if (kind is None or each.kind == kind)
            and (wanted is None or frozenset(each.axes) == wanted)
            and each.payload_bytes >= min_bytes
        )

    def count(
        self, kind: str | None = None, axis: Axes | None = None, *, min_bytes: int = 0
    ) -> int | float:
        """Returns the number of runs of collectives in a step, with loop trips: an upper bound where one has `is_bound`.

        Raises:
            ValueError: one of them is in a loop whose trips the compiler does not know.
        """
        chosen = _check_times(self.select(kind, axis, min_bytes=min_bytes))
        return sum(each.known_times for each in chosen)

    def bytes_moved(
        self, kind: str | None = None, axis: Axes | None = None, *, min_bytes: int = 0
    ) -> int:
        """Returns the bytes that the busiest device sends in a step by ring algorithms; bounds and errors as in `count`."""
        return bytes_of_busiest(_check_times(self.select(kind, axis, min_bytes=min_bytes)))

    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        """Returns the bytes that the busiest device sends in a step, by the axes over which it sends them."""
        axes = dict.fromkeys(each.axes for each in self.collectives)
        return {joined: bytes_of_busiest(_check_times(self._over(joined))) for joined in axes}

    def render(self) -> str:
        """Returns the report as text for a terminal, 80 to 160 columns wide."""
        mesh = sizes_text(dict(self.axis_sizes))
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        title = f"{self.name or 'step'} on {devices}" + (f", mesh {mesh}" if mesh else "")
        memory = [(kind, bytes_text(size)) for kind, size in self.memory.by_kind().items()]
        parts = [
            title,
            _collectives_table(self),
            _axes_table(self),
            table([("memory on each device", "bytes"), *memory]),
            _flops_lines(self),
            "" if self.gpu is None else self.gpu.render(),
            _whole_table(self),
        ]
        return "\n\n".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.render()

    def _over(self, axes: tuple[str, ...]) -> tuple[Collective, ...]:
        return tuple(each for each in self.collectives if each.axes == axes)

    def _checked_axes(self, axis: Axes) -> tuple[str, ...]:
        axes = (axis,) if isinstance(axis, str) else axis
        names = [name for name, _ in self.axis_sizes]
        for name in axes:
            if name not in names:
                mesh = f"a mesh with axes {tuple(names)}" if names else "no mesh"
                raise ValueError(
                    f"axis must be one of the mesh's; got {name!r}, {mesh}. Name one of them, or pass mesh= to inspect_step."
                )
        return axes


def _check_times(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    for each in collectives:
        if each.times is None:
            raise ValueError(
                "runs a step must be known to be counted; got "
                f"{each.kind} over {axes_text(each.axes)} in a loop whose trips the compiler does not know ({each.op_name}). "
                "Pass loop_trips= to inspect_step, or use a scan."
            )
    return collectives


def axes_text(axes: Iterable[str]) -> str:
    """Returns axes joined as text: `data+tensor`; `?` where none is known."""
    return "+".join(axes) or "?"


def _collectives_table(report: StepReport) -> str:
    if not report.collectives:
        return "no collectives"
    columns = {
        "collective": lambda each: each.kind + (" (async)" if each.asynchronous else ""),
        "axes": lambda each: _location_text(each, bool(report.axis_sizes)),
        "runs": lambda each: _bounded(
            each, f"{each.known_times:g}" + (" x ?" if each.times is None else "")
        ),
        "group": lambda each: str(each.group_size),
        "payload": lambda each: bytes_text(each.payload_bytes),
        "sent a step": lambda each: _bounded(each, bytes_text(each.bytes_moved)),
        "link": lambda each: {None: "-", True: "across", False: "inside"}[each.crosses_nodes],
        "arrays": _arrays_text,
        "from": _origin_text,
    }
    lines = [table_of(report.collectives, columns)]
    if any(each.is_bound for each in report.collectives):
        lines.append("<= is in a branch that is taken at most this often")
    if any(each.times is None for each in report.collectives):
        lines.append("x ? is in a loop whose trips the compiler does not know")
    return "\n".join(lines)


def _location_text(each: Collective, has_mesh: bool) -> str:
    if not has_mesh:
        return each.groups if len(each.groups) <= 28 else f"{each.groups[:25]}..."
    shift = "" if each.shift is None else f" {each.shift:+d}"
    return axes_text(each.axes) + shift + ("" if each.whole_axes else " (part)")


def _bounded(each: Collective, text: str) -> str:
    return f"<= {text}" if each.is_bound and each.times is not None else text


def _arrays_text(each: Collective) -> str:
    first = str(each.shapes[0]) if each.shapes else "?"
    return first if len(each.shapes) < 2 else f"{first} + {len(each.shapes) - 1} more"


def _origin_text(each: Collective) -> str:
    name = each.op_name if len(each.op_name) <= 48 else f"...{each.op_name[-45:]}"
    return " ".join(filter(None, (os.path.basename(each.source), name)))


def _axes_table(report: StepReport) -> str:
    """Returns the sums by axes, or "" where one of them is unknown, since a sum without it would mislead."""
    if (
        not report.axis_sizes
        or not report.collectives
        or any(each.times is None for each in report.collectives)
    ):
        return ""
    rows = [("sent a step over", "runs", "bytes")]
    for axes, num_bytes in report.bytes_by_axes().items():
        chosen = [each for each in report.collectives if each.axes == axes]
        bound = "<= " if any(each.is_bound for each in chosen) else ""
        runs = sum(each.known_times for each in chosen)
        rows.append((axes_text(axes), f"{bound}{runs:g}", bound + bytes_text(num_bytes)))
    return table(rows)


def _flops_lines(report: StepReport) -> str:
    lines = [f"matrix products and convolutions on each device: {flops_text(report.flops)}"]
    if report.fp8_products:
        lines.append(f"products in FP8 on each device: {report.fp8_products:g} a step")
    if report.flops_least != report.flops:
        lines[0] += f" at most, {flops_text(report.flops_least)} at least (branches)"
    lines += [
        f"one trip counted of a loop whose trips the compiler does not know: {loop}"
        for loop in report.unknown_loops
    ]
    lines += [f"not counted: custom call {target}" for target in report.uncounted_calls]
    return "\n".join(lines)


def _whole_table(report: StepReport) -> str:
    if not report.whole_arrays:
        return ""
    columns = {
        f"whole on every device though {bytes_text(report.large_bytes)} or more": lambda each: (
            each.name
        ),
        "array": lambda each: f"{each.dtype}[{','.join(map(str, each.shape))}]",
        "bytes": lambda each: bytes_text(each.num_bytes),
        "devices": lambda each: str(each.num_devices),
    }
    return table_of(report.whole_arrays, columns)
