"""Where the time of a step goes, as a horizontal bar of parts for each plan."""

from collections.abc import Mapping
from os import PathLike

from jaxpar.plot.figure import check_format, figure_to

COLOURS = ("#5b92d0", "#bfaede", "#f2b45c", "#c9c9c9", "#8fca8b", "#dc8a62", "#7fc7c4")


def plot_step_time(
    seconds_by_plan: Mapping[str, Mapping[str, int | float]], *, path: str | PathLike[str], title: str | None = None
) -> None:
    """Draws the seconds of a step by part, a bar for each plan.

    Args:
        seconds_by_plan: For each bar its parts, from left to right.
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        title: Title above the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no bars, or the suffix is not a known format.
    """
    check_format(path)
    if not seconds_by_plan:
        raise ValueError("plot_step_time must get one bar or more; got none.")
    parts = list(dict.fromkeys(part for seconds in seconds_by_plan.values() for part in seconds))
    names = list(seconds_by_plan)
    with figure_to(path, (9.5, 1.6 + 0.42 * len(names)), asked_by="plot_step_time") as figure:
        panel = figure.add_subplot()
        until = [0.0] * len(names)
        for part, colour in zip(parts, COLOURS * len(parts), strict=False):
            lengths = [seconds_by_plan[name].get(part, 0) for name in names]
            if max(lengths) > 0:
                panel.barh(names, lengths, 0.7, until, color=colour, label=part, edgecolor="white")
            until = [start + length for start, length in zip(until, lengths, strict=True)]
        for at, total in enumerate(until):
            panel.text(total, at, f" {total:.3g} s", va="center", fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.1 * max(until) or 1)
        panel.set_xlabel("seconds of a step")
        panel.set_title(title or "Where the time of a step goes", loc="left", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", length=0, labelsize=8)
        figure.legend(loc="outside right center", frameon=False)
