"""What a step needs of each device: the report of `inspect_step`, its questions and its text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jaxpar.inspect.collectives import Collective

Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while the step runs, as the compiler planned them.

    `alias_bytes` are outputs that take the place of donated arguments, counted in both; `total_bytes` counts them once.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes + self.generated_code_bytes

    def by_kind(self) -> dict[str, int]:
        return {
            "argument": self.argument_bytes,
            "output": self.output_bytes,
            "temp": self.temp_bytes,
            "alias": self.alias_bytes,
            "generated code": self.generated_code_bytes,
            "total": self.total_bytes,
        }


@dataclass(frozen=True)
class WholeArray:
    """An argument or output that every device holds whole, though it is large."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_devices: int


@dataclass(frozen=True)
class StepReport:
    """What one step costs on each device, read from the compiled program.

    Attributes:
        collectives: every collective that moves data, with its mesh axes, runs a step and bytes.
        memory: bytes by kind on each device.
        flops: of matrix products and convolutions on each device, loop trips counted; where a conditional's shares are
            not known, with its dearest branch. One trip is counted of each of `unknown_loops`.
        flops_least: the same with the cheapest branches.
        compiler_flops: XLA's own figure, which counts loop bodies once and elementwise work too; None if it gives none.
        whole_arrays: arguments and outputs that are whole on every device though large.
        unknown_loops: op names of loops whose trips the compiler does not know.
        uncounted_calls: custom calls that look like matrix products and are not in `flops`.
        axis_sizes: the mesh, by axis; empty if none is known.
        num_devices: devices that the program runs on.
        large_bytes: the size from which an array counts as large.
        name: of the compiled module.
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

    def count(self, kind: str | None = None, axis: Axes | None = None, *, min_bytes: int = 0) -> int | float:
        """Returns how often collectives run a step, loop trips counted: an upper bound where one stands in a branch.

        Raises:
            ValueError: one of them is in a loop whose trips the compiler does not know.
        """
        chosen = _check_times(self.select(kind, axis, min_bytes=min_bytes))
        return sum(each.known_times for each in chosen)

    def bytes_moved(self, kind: str | None = None, axis: Axes | None = None, *, min_bytes: int = 0) -> int:
        """Returns the bytes that a device sends a step by ring algorithms; bounds and errors as in `count`."""
        chosen = _check_times(self.select(kind, axis, min_bytes=min_bytes))
        return sum(each.bytes_moved or 0 for each in chosen)

    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        """Returns the bytes that a device sends a step, by the axes over which it sends them."""
        axes = dict.fromkeys(each.axes for each in self.collectives)
        return {joined: sum(each.bytes_moved or 0 for each in _check_times(self._over(joined))) for joined in axes}

    def render(self) -> str:
        """Returns the report as text for a terminal, 80 to 160 columns wide."""
        from jaxpar.inspect.render import render_report

        return render_report(self)

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
    return "+".join(axes) or "?"


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side: each figure that differs, before and after.

    Attributes:
        collectives: by kind and axes: ((runs, bytes) before, (runs, bytes) after); runs None where unknown.
        memory: by kind: (bytes before, bytes after).
        flops: (before, after), or None where they are the same.
        whole_arrays: names that are whole only before, and only after.
    """

    collectives: Mapping[tuple[str, tuple[str, ...]], tuple[tuple, tuple]]
    memory: Mapping[str, tuple[int, int]]
    flops: tuple[int | float, int | float] | None
    whole_arrays: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def is_same(self) -> bool:
        return not (self.collectives or self.memory or self.flops or any(self.whole_arrays))

    def render(self) -> str:
        from jaxpar.inspect.render import render_comparison

        return render_comparison(self)

    def __str__(self) -> str:
        return self.render()


def compare(before: StepReport, after: StepReport) -> Comparison:
    """Returns what differs between two reports; `.render()` says it in words, `.is_same` is for tests."""
    old, new = _totals(before.collectives), _totals(after.collectives)
    none = (0, 0)
    collectives = {key: (old.get(key, none), new.get(key, none)) for key in sorted({*old, *new})}
    old_memory, new_memory = before.memory.by_kind(), after.memory.by_kind()
    memory = {kind: (old_memory[kind], new_memory[kind]) for kind in old_memory}
    old_whole, new_whole = ({array.name for array in report.whole_arrays} for report in (before, after))
    return Comparison(
        collectives={key: pair for key, pair in collectives.items() if pair[0] != pair[1]},
        memory={kind: pair for kind, pair in memory.items() if pair[0] != pair[1]},
        flops=(before.flops, after.flops) if before.flops != after.flops else None,
        whole_arrays=(tuple(sorted(old_whole - new_whole)), tuple(sorted(new_whole - old_whole))),
    )


def _totals(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple]:
    totals: dict[tuple[str, tuple[str, ...]], tuple] = {}
    for each in collectives:
        key = (each.kind, each.axes)
        runs, num_bytes = totals.get(key, (0, 0))
        unknown = runs is None or each.times is None
        totals[key] = (None, None) if unknown else (runs + each.times, num_bytes + (each.bytes_moved or 0))
    return totals


Expected = Mapping[str | tuple[str, Axes], int | tuple[int, int]]


def assert_collectives(
    step: StepReport | Callable,
    expected: Expected,
    *args,
    min_bytes: int = 0,
    allow_others: bool = False,
    **inspect_options,
) -> StepReport:
    """Asserts that a step runs exactly these collectives; for tests.

    Args:
        step: a report, or a function to inspect with `args`.
        expected: runs a step, or (runs, bytes moved), by kind or by (kind, axis) or (kind, (axis, axis)):
            `{("all-reduce", "data"): 1, ("collective-permute", "stage"): (22, 22 * 4096)}`.
        *args: of the function, as `inspect_step` takes them.
        min_bytes: collectives with a smaller payload are left out (a loss, a gradient norm).
        allow_others: accept collectives that `expected` does not name.
        **inspect_options: for `inspect_step`, where `step` is a function.

    Returns:
        The report, to ask it more.

    Raises:
        AssertionError: a count or a size differs, or there is another collective; it lists what the program has.
    """
    from jaxpar.inspect.step import inspect_step

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
        wrong += [f"nothing else expected; got {each.kind} over {axes_text(each.axes)}" for each in others]
    if wrong:
        raise AssertionError("\n".join([*wrong, "", report.render()]))
    return report


def _differences(
    report: StepReport, kind: str, axis: Axes | None, min_bytes: int, runs: int | float, num_bytes: int | None
) -> list[str]:
    where = "" if axis is None else f" over {axes_text((axis,) if isinstance(axis, str) else axis)}"
    found = report.count(kind, axis, min_bytes=min_bytes)
    wrong = [] if found == runs else [f"{kind}{where} must run {runs} times a step; got {found}"]
    if num_bytes is not None and (moved := report.bytes_moved(kind, axis, min_bytes=min_bytes)) != num_bytes:
        wrong.append(f"{kind}{where} must move {num_bytes} bytes a step; got {moved}")
    return wrong
