"""Comparison of reports with one another, and with the expectations of a test."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.inspect.collectives import Collective
from jaxpar.inspect.report import Axes, StepReport, axes_text
from jaxpar.inspect.step import inspect_step
from jaxpar.inspect.text import bytes_text, flops_text, table


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
        return _render(self)

    def __str__(self) -> str:
        return self.render()


def compare(before: StepReport, after: StepReport) -> Comparison:
    """Returns the differences between two reports; `.render()` returns them as text, `.is_same` is for tests."""
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


def _render(comparison: Comparison) -> str:
    if comparison.is_same:
        return "no difference"
    rows = [["what", "before", "after"]]
    for (kind, axes), pair in comparison.collectives.items():
        rows.append([f"{kind} over {axes_text(axes)}", *(_runs_and_bytes(*side) for side in pair)])
    for kind, (before, after) in comparison.memory.items():
        rows.append([f"{kind} memory", bytes_text(before), bytes_text(after)])
    if comparison.flops:
        rows.append(["flops", *(flops_text(flops) for flops in comparison.flops)])
    lines = [table(rows)]
    for names, word in zip(comparison.whole_arrays, ("no longer", "newly"), strict=True):
        lines += [f"{word} whole on every device: {name}" for name in names]
    return "\n".join(lines)


def _runs_and_bytes(runs: int | float | None, num_bytes: int | None) -> str:
    if runs is None:
        return "unknown runs"
    return f"{runs:g} x, {bytes_text(num_bytes)}" if runs else "none"
