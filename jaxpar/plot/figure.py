"""Figures and the files that they are written to: known formats, and the same bytes for the same picture; mixed colours."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from jaxpar.fields import arg
from jaxpar.runtime.output import install_extra, needing_extra

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")


def check_format(path: str | PathLike[str]) -> str:
    """Returns the suffix of a picture's path; raises if it is not a known format."""
    suffix = fspath(path).rpartition(".")[2].lower()
    if suffix not in FORMATS:
        raise ValueError(
            f"a plot's suffix must be one of {', '.join(FORMATS)}; got {arg(path=repr(fspath(path)))}."
        )
    return suffix


@contextmanager
def figure_to(
    path: str | PathLike[str],
    size: tuple[float, float],
    *,
    asked_by: str,
    style: Mapping[str, Any] | None = None,
) -> Iterator["Figure"]:
    """Yields a figure to draw in, and then writes it.

    Args:
        path: The file; its suffix selects the format: .svg, .png or .pdf.
        size: Width and height in inches.
        asked_by: The function that draws, for the message.
        style: matplotlib's rcParams, in addition to jaxpar's.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix is not a known format.
    """
    suffix = check_format(path)
    with needing_extra(f"{asked_by} needs matplotlib", "plot"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    settings: dict[Any, Any] = {"svg.hashsalt": "jaxpar", "font.size": 9}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, **(style or {})}
    with mpl.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        # No date, no random ids: the same picture gives the same file.
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
        figure.savefig(path, dpi=150, metadata=metadata)


def check_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed or has no folder to write; a run calls it before it trains."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"the recipe's pictures need matplotlib; got none. {install_extra('plot')}."
        )
    try:
        import matplotlib

        matplotlib.get_cachedir()
    except OSError as error:
        raise ValueError(
            "matplotlib, which draws the recipe's pictures, needs a folder that it can write; got none in MPLCONFIGDIR, the "
            "home and the folders for temporary files. Set MPLCONFIGDIR to one, or mount a volume at /tmp."
        ) from error


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Returns a figure of so many inches and its panels, without pyplot, which looks for a screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns) if rows else None


def running_mean(values: "np.ndarray", before: int, after: int = 0) -> "np.ndarray":
    """Returns the mean of each value, as many before it and as many after it; of fewer near the ends."""
    import numpy as np  # here, since plain schedules import this module

    sums, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    first, last = np.maximum(at - before, 0), np.minimum(at + after + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def mix(colour: str, other: str, share: float) -> str:
    """Returns a colour between two, given as #rrggbb: the first at share 0, the second at 1."""
    pairs = ((int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
