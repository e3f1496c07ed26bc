"""Curves of a report: lines over steps or devices, a point where there are few, and a gap where a value is not finite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpar.report.frame import LINES, ZOOM, Scale, frame, percent, stretched

HEIGHT = 230
WIDTH = 1000  # of the stretched coordinates
MAX_POINTS_SEEN = 60
MARGIN = 0.04  # above and below the values, as a share of their range
SCALES = '<button data-scale="linear">linear</button><button data-scale="log">log</button>'

Points = tuple[Sequence[float], Sequence[float | None]]


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
    colours = _colours(curves)
    may_log = min(values) > 0
    scales = [Scale.of(shown, from_zero=from_zero and not is_log, is_log=is_log and may_log, margin=MARGIN)]
    if has_log and may_log:
        scales.append(Scale.of(shown, is_log=True, margin=MARGIN))
    named = [(curve, colour) for curve, colour in zip(curves, colours, strict=True) if not curve.is_shade]
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
            curves=[{"name": c.name, "colour": colour, "x": list(c.x), "y": list(c.y)} for c, colour in named],
        )
        for scale in scales
    ]
    if len(drawn) == 1:
        return drawn[0]
    return f'<div class="of-linear">{drawn[0]}</div><div class="of-log">{drawn[1]}</div>'


def _colours(curves: Sequence[Curve]) -> list[str]:
    at, found = 0, []
    for curve in curves:
        found.append(curve.colour or LINES[at % len(LINES)])
        at += not curve.is_shade
    return found


def _lines(curves: Sequence[Curve], colours: Sequence[str], wide: Scale, scale: Scale) -> str:
    high = lambda value: HEIGHT * (1 - scale.share(value))
    paths, dots = "", ""
    for curve, colour in zip(curves, colours, strict=True):
        points = [(wide.share(at), None if y is None else high(y)) for at, y in zip(curve.x, curve.y, strict=True)]
        shade = ' class="shade"' if curve.is_shade else ""
        paths += f'<path{shade} d="{" ".join(_path(points))}" stroke="{colour}" stroke-width="{curve.width:g}"/>'
        if len(points) <= MAX_POINTS_SEEN and not curve.is_shade:
            dots += "".join(
                f'<circle cx="{percent(x)}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points if y is not None
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
