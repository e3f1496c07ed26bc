"""The frame of a chart, with title, legend, buttons, names on the left and ticks below; and the chart of some curves.

A chart is HTML around one inline SVG. Widths and horizontal positions in the SVG are percentages and heights are pixels, so
that a chart fits a telephone and a screen with text of the same size. Text and lines have the colours of ``page.css``,
which has a light and a dark set; ``page.js`` shows values under the pointer and handles the buttons.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

LINES = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#1f77b4")
BELOW = 22  # pixels of the numbers below a plot
ZOOM = '<button data-zoom="0.5" title="zoom out">-</button><button data-zoom="2" title="zoom in">+</button>'

Tick = tuple[float, str]  # the share of the width or height at which it is, and its text
HEIGHT = 230
WIDTH = 1000  # of the stretched coordinates
MAX_POINTS_SEEN = 60
MARGIN = 0.04  # above and below the values, as a share of their range
SCALES = '<button data-scale="linear">linear</button><button data-scale="log">log</button>'


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, linear or logarithmic."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(
        cls,
        values: Iterable[float],
        *,
        from_zero: bool = False,
        is_log: bool = False,
        margin: float = 0.0,
    ) -> "Scale":
        """Returns the axis that has all values, 0 if asked for, and beyond them a share ``margin`` of it at each end."""
        values = list(values) or [0.0]
        low, high = min(values), max(values)
        low = min(low, 0.0) if from_zero else low
        if low == high:
            low, high = (
                (low / 2, high * 2)
                if is_log
                else (low - abs(low) / 2, high + (abs(high) / 2 or 1.0))
            )
        if is_log:
            return cls(low * (low / high) ** margin, high * (high / low) ** margin, is_log)
        beyond = margin * (high - low)
        return cls(low if from_zero and not low else low - beyond, high + beyond)

    def share(self, value: float) -> float:
        """Returns where a value is on the axis: 0 at its low end, 1 at its high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[Tick]:
        """Returns some readable numbers on the axis, about ``count``."""
        values = self._decades() if self.is_log else []
        if len(values) < 2:
            values = [
                value
                for value in round_numbers(self.low, self.high, count)
                if value > 0 or not self.is_log
            ]
        return [(self.share(value), number(value)) for value in values]

    def _decades(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        parts = (1, 2, 5) if last - first <= 2 else (1,)
        every = max(1, (last - first) // 5)
        found = (part * 10.0**power for power in range(first, last + 1, every) for part in parts)
        return [value for value in found if self.low <= value <= self.high]


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """Returns the multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``, about ``count`` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(part for part in (1, 2, 5, 10) if part * power >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [at * step for at in range(first, last + 1)]


def number(value: float) -> str:
    """Returns a number as short as an axis needs it: "0.25", "12,000", "3M"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    """Returns a share of the width as SVG has it."""
    return f"{100 * share:.2f}%"


def frame(
    plot: str,
    height: int,
    *,
    kind: str,
    title: str,
    left: Iterable[Tick],
    below: Iterable[Tick] = (),
    across: str = "",
    legend: Mapping[str, str] | None = None,
    buttons: str = "",
    min_width: int = 0,
    curves: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns a chart.

    Args:
        plot: What is in the SVG, above the lines at the ticks.
        height: Its height in pixels.
        kind: "curves", whose left column is as wide in all charts, or "rows", whose left column is as wide as its names.
        title: What the chart shows, above it.
        left: Names or numbers on the left, at shares of the height from below.
        below: Numbers below, at shares of the width.
        across: What the numbers below are.
        legend: The colour of each name.
        buttons: HTML of buttons.
        min_width: The width in pixels below which the plot is scrolled.
        curves: For each line its "name", "colour", "x" and "y", to show values under the pointer.
    """
    left, below = list(left), list(below)
    names = "".join(
        f'<span style="top:{(1 - share) * height:.0f}px" title="{escape(name)}">{escape(name)}</span>'
        for share, name in left
    )
    swatches = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in (legend or {}).items()
    )
    lines = "".join(
        f'<line x1="{percent(share)}" x2="{percent(share)}" y1="0" y2="{height}"/>'
        for share, _ in below
    )
    if kind == "curves":
        heights = [(1 - share) * height for share, _ in left]
        lines += "".join(f'<line x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights)
    texts = "".join(_text_below(share, text, height) for share, text in below)
    data = f' data-curves="{escape(json.dumps(list(curves)))}"' if curves else ""
    width = f' style="min-width:{min_width}px"' if min_width else ""
    whole = height + (BELOW if below else 0)
    widths = "".join(
        f"<em>{escape(name)}</em>" for _, name in left
    )  # invisible: they give the column its width
    return (
        f'<figure class="{kind}"><figcaption><b>{escape(title)}</b>{swatches}'
        f'<span class="buttons">{buttons}</span></figcaption>'
        f'<div class="left" style="height:{whole}px">{widths}{names}</div>'
        f'<div class="scroll"><div class="plot"{width}{data}><svg height="{whole}" role="img" aria-label="{escape(title)}">'
        f'<rect class="paper" width="100%" height="{height}"/><g class="lines">{lines}</g>{plot}{texts}</svg></div></div>'
        f'<p class="across">{escape(across)}</p></figure>'
    )


def _text_below(share: float, text: str, height: int) -> str:
    anchor = "start" if share < 0.02 else "end" if share > 0.98 else "middle"
    return (
        f'<text x="{percent(share)}" y="{height + 15}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def stretched(inner: str, width: float, height: float, pixels: int) -> str:
    """Returns shapes in coordinates from 0 to ``width`` and ``height``, as wide as the plot and ``pixels`` high."""
    box = f'viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none"'
    return f'<svg class="stretched" width="100%" height="{pixels}" {box}>{inner}</svg>'


def bars(
    kinds: Iterable[tuple[str, str, Iterable[tuple[float, float, float, str]]]],
    height: float = 0.86,
) -> str:
    """Returns bars of height about 1 in stretched coordinates.

    Args:
        kinds: For each kind of bar its colour, a text for all its bars, and for each bar its row, start, length and text.
        height: Of a bar; its row has height 1.
    """
    margin = (1 - height) / 2
    parts = []
    for colour, about, found in kinds:
        inner = "".join(
            f'<rect x="{start:.6g}" y="{row + margin:.3g}" width="{length:.6g}" height="{height}" '
            f'data-tip="{escape(text)}"/>'
            for row, start, length, text in found
        )
        parts.append(f'<g fill="{colour}" data-about="{escape(about)}">{inner}</g>')
    return "".join(parts)


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: Its name in the legend.
        x: Where its values are.
        y: Its values, None where there is none.
        width: Of the line in pixels.
        colour: Of the line; None: by its place in the chart.
        is_shade: Whether it lies pale under the others, without a name and without values under the pointer.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    width: float = 1.5
    colour: str | None = None
    is_shade: bool = False


def chart(
    curves: Sequence[Curve],
    *,
    title: str,
    across: str,
    from_zero: bool = False,
    is_log: bool = False,
    has_log: bool = False,
    top: float | None = None,
) -> str | None:
    """Returns the chart of some curves; None if no curve has a value.

    Args:
        curves: The curves, the first below the others.
        title: What the values are.
        across: What they are over.
        from_zero: Whether the axis of the values starts at 0.
        is_log: Whether it is logarithmic.
        has_log: Whether buttons choose between a linear and a logarithmic one, if all values are positive.
        top: The highest value that is shown; None: all are.
    """
    values = [value for curve in curves for value in curve.y if value is not None]
    if not values:
        return None
    shown = [value for value in values if top is None or value <= top]
    wide = Scale.of(at for curve in curves for at in curve.x)
    lines = itertools.cycle(LINES)
    colours = [curve.colour or next(lines) for curve in curves]
    may_log = min(values) > 0
    scales = [
        Scale.of(
            shown, from_zero=from_zero and not is_log, is_log=is_log and may_log, margin=MARGIN
        )
    ]
    if has_log and may_log:
        scales.append(Scale.of(shown, is_log=True, margin=MARGIN))
    named = [
        (curve, colour) for curve, colour in zip(curves, colours, strict=True) if not curve.is_shade
    ]
    drawn = [
        frame(
            _lines(curves, colours, wide, scale),
            HEIGHT,
            kind="curves",
            title=f"{title}, log scale" if scale.is_log else title,
            left=scale.ticks(),
            below=wide.ticks(),
            across=across,
            legend={curve.name: colour for curve, colour in named} if len(named) > 1 else None,
            buttons=(SCALES if len(scales) > 1 else "") + ZOOM,
            curves=[
                {"name": c.name, "colour": colour, "x": list(c.x), "y": list(c.y)}
                for c, colour in named
            ],
        )
        for scale in scales
    ]
    if len(drawn) == 1:
        return drawn[0]
    return f'<div class="of-linear">{drawn[0]}</div><div class="of-log">{drawn[1]}</div>'


def _lines(curves: Sequence[Curve], colours: Sequence[str], wide: Scale, scale: Scale) -> str:
    high = lambda value: HEIGHT * (1 - scale.share(value))
    paths, dots = "", ""
    for curve, colour in zip(curves, colours, strict=True):
        points = [
            (wide.share(at), None if y is None else high(y))
            for at, y in zip(curve.x, curve.y, strict=True)
        ]
        shade = ' class="shade"' if curve.is_shade else ""
        paths += f'<path{shade} d="{" ".join(_path(points))}" stroke="{colour}" stroke-width="{curve.width:g}"/>'
        if len(points) <= MAX_POINTS_SEEN and not curve.is_shade:
            dots += "".join(
                f'<circle cx="{percent(x)}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
                for x, y in points
                if y is not None
            )
    return stretched(paths, WIDTH, HEIGHT, HEIGHT) + dots


def _path(points: list[tuple[float, float | None]]) -> Iterator[str]:
    """Yields the commands of a path, which begins anew after a gap; a lone point has length 0, which round ends show."""
    is_drawn = False
    for at, (x, y) in enumerate(points):
        if y is None:
            is_drawn = False
            continue
        yield f"{'L' if is_drawn else 'M'}{WIDTH * x:.1f} {y:.1f}"
        if not is_drawn and (at + 1 == len(points) or points[at + 1][1] is None):
            yield "h0"
        is_drawn = True
