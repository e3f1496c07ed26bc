"""The layout that all charts of a report share."""

from typing import Any

Chart = dict[str, Any]
GREY, GREEN = "#808080", "#1b9e77"
LINES = (GREEN, "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#1f77b4")
MARGIN = 110  # pixels above and below a chart's rows


def layout(height: int, **more: Any) -> dict[str, Any]:
    """Returns a plotly layout whose ``uirevision`` keeps the reader's zoom when a live page is redrawn."""
    return {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 50, "b": 50},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "#f4f5f7",
        "modebar": {"bgcolor": "rgba(255,255,255,0.8)", "color": GREY, "activecolor": "#1b6ca8"},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "uirevision": "kept",
        **more,
    }
