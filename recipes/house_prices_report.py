"""The report of a linear regression: text beside least squares, in the units of the data, and pictures of its descent."""

from pathlib import Path

import numpy as np

from house_prices_least_squares import Line, Standard, Table
from jaxpar.data.batches import round_up
from jaxpar.mesh import sizes_text
from jaxpar.metrics.log import read_metrics
from jaxpar.plot.figure import panels

BLUE, ORANGE, GREEN, GREY = "#1f77b4", "#d95f02", "#1b9e77", "#808080"
UNITS = {
    "usd": "USD",
    "eur": "EUR",
    "ft2": "ft²",
    "m2": "m²",
}  # endings of column names, as in price_usd


def words(column: str) -> str:
    """Returns a column's name without its unit: "price_usd" is "price"."""
    name, _, ending = column.rpartition("_")
    return (name if ending in UNITS else column).replace("_", " ")


def unit(column: str) -> str | None:
    """Returns a column's unit: "price_usd" is in "USD"."""
    return UNITS.get(column.rpartition("_")[2])


def label(column: str) -> str:
    """Returns a column's name and unit: "price (USD)"."""
    return f"{words(column)} ({unit(column)})" if unit(column) else words(column)


def number(value: float, position: int | None = None) -> str:
    """Returns a number as readable text: 63,926 or 0.3205; also as Matplotlib asks for that of a tick, with its position."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def amount(value: float, column: str) -> str:
    """Returns a number with a column's unit: 63,926 USD."""
    return f"{number(value)} {unit(column) or ''}".strip()


def count(things: int, name: str) -> str:
    """Returns "1 row" or "2 rows"."""
    return f"{things} {name}" if things == 1 else f"{things} {name}s"


def how_rows_are_split(batch_size: int, data: int, replica: int = 1) -> str:
    """Returns how the rows of a step are split over the replicas, as text."""
    padded, sizes = (
        round_up(batch_size, replica * data),
        sizes_text({"replica": replica, "data": data}),
    )
    split = f"each step takes {count(batch_size, 'row')}; {sizes}: {padded // (replica * data)} on each replica"
    if padded == batch_size:
        return split
    return (
        f"{split}, {padded} in all; {count(padded - batch_size, 'row')} of weight 0 at the end of the last, so that every row "
        "counts once and none is dropped"
    )


def in_units(line: Line, table: Table) -> dict[str, float]:
    """Returns a line as entries of metrics.jsonl, in the units of the data."""
    weights = {
        f"weights/{name}": float(weight)
        for name, weight in zip(table.names, line.weights, strict=True)
    }
    return {**weights, "intercept": line.intercept}


def read_path(out_dir: Path, scale: Standard, table: Table) -> list[Line]:
    """Returns the line before the first step and after each step."""
    start = scale.line({"weights": np.zeros(len(table.names)), "bias": 0.0})
    logged = read_metrics(out_dir / "metrics.jsonl")
    return [start] + [
        Line(np.array([m[f"weights/{n}"] for n in table.names]), m["intercept"]) for m in logged
    ]


def beside_least_squares(learned: Line, best: Line, table: Table) -> str:
    """Returns a text table: each parameter as learned and in closed form, and by how much they differ."""
    lines = [f"{'':20}{'learned':>16}{'least squares':>16}{'difference':>14}"]
    for name, got, want in zip(
        (*table.names, "intercept"),
        (*learned.weights, learned.intercept),
        (*best.weights, best.intercept),
        strict=True,
    ):
        relative = abs(got - want) / abs(want) if want else abs(got)
        lines.append(
            f"{name:20}{got:16.6g}{want:16.6g}{f'{relative:.2%}' if relative < 10 else 'far off':>14}"
        )
    return "\n".join(lines)


def errors(learned: Line, folds: list[tuple[float, float]], table: Table) -> str:
    """Returns the error of the model on its own rows, and the training and test errors over the folds, as text."""
    training, test = (
        number(float(np.sqrt(np.mean(np.square(part))))) for part in zip(*folds, strict=True)
    )
    return (
        f"root mean squared error of {label(table.target_name)}:\n"
        f"  {number(learned.error(table))} on the {table.num_rows} rows that it was trained on\n"
        f"  {test} on rows held out, {training} on the rows trained on meanwhile ({len(folds)} folds)"
    )


def error_label(table: Table) -> str:
    """Returns the label of an error, which has the unit of the target."""
    return f"root mean squared error ({unit(table.target_name) or words(table.target_name)})"


def weight_label(table: Table, index: int) -> str:
    """Returns the label of a weight: "weight of area (USD per ft²)"."""
    target, name = table.target_name, table.names[index]
    per = f"per {unit(name)}" if unit(name) else "for each"
    return f"weight of {words(name)} ({unit(target) or words(target)} {per})"


def plot_loss(
    path: Path,
    lines: list[Line],
    rates: dict[str, tuple[float, np.ndarray]],
    best: Line,
    table: Table,
    batch_size: int,
) -> None:
    """Draws the error over this run's steps, and beside it the errors with three learning rates."""
    figure, (run, compared) = panels(1, 2, (13, 5))
    least, all_rows = best.error(table), f"all {table.num_rows} rows"
    each = (
        all_rows
        if batch_size == table.num_rows
        else "1 row"
        if batch_size == 1
        else f"{batch_size} rows"
    )
    errors = np.array([line.error(table) for line in lines])
    run.plot(errors, color=BLUE, linewidth=2, label=f"this run, {each} a step")
    run.axhline(
        least,
        color="black",
        linestyle="--",
        label=f"least squares: {amount(least, table.target_name)}",
    )
    run.set(title="The error as the model learns", xlabel=f"steps taken, of {len(lines) - 1}")
    run.set(ylabel=f"{error_label(table)} over {all_rows}", xlim=(0, _settled(errors)))
    run.set(yscale="log" if np.nanmax(errors) > 100 * errors[0] else "linear")
    run.xaxis.get_major_locator().set_params(integer=True)
    run.legend(loc="best")

    for (name, (rate, course)), color in zip(rates.items(), (GREY, GREEN, ORANGE), strict=True):
        compared.plot(course, color=color, linewidth=2, label=f"{name}: {rate:.2g}")
    compared.axhline(least, color="black", linestyle="--", label="least squares")
    compared.set(
        title="A learning rate too small crawls, one too large diverges", xlabel="steps taken"
    )
    compared.set(ylabel=f"{error_label(table)}, log scale", yscale="log", xlim=(0, 50))
    compared.set(ylim=(max(0.8 * least, 1e-3 * errors[0]), 15 * errors[0]))
    compared.legend(loc="best", title=f"learning rate, {all_rows} a step")
    for axes in (run, compared):
        axes.yaxis.set_major_formatter(number)
    figure.savefig(path, dpi=120)


def _settled(errors: np.ndarray) -> int:
    """Returns how many steps to show: those after which the error hardly changes are left out."""
    moving = np.flatnonzero(~(np.abs(errors - errors[-1]) <= 1e-3 * errors[-1]))
    return min(len(errors) - 1, 20 + 2 * int(moving.max(initial=0)))


def plot_surface(path: Path, lines: list[Line], best: Line, table: Table) -> None:
    """Draws the error as contours, with the path of descent.

    They are over two weights, the others at their optimum, or with one feature over its weight and the mean prediction. At a
    distance d from the least squares the squared error is larger by ``d . bend . d``.
    """
    mean, is_plane = table.features.mean(axis=0), len(table.names) > 1
    second = weight_label(table, 1) if is_plane else f"mean predicted {label(table.target_name)}"
    point = lambda line: np.array([line.weights[0], line.weights[1] if is_plane else line(mean)])
    moved = table.features - mean
    columns = moved[:, :2] if is_plane else np.column_stack([moved, np.ones(len(moved))])
    centre, bend = point(best), columns.T @ columns / table.num_rows
    steps = np.array([point(line) for line in lines])
    u, v = _window(steps, centre, bend)
    away = np.stack([u - centre[0], v - centre[1]], axis=-1)
    errors = np.sqrt(best.error(table) ** 2 + np.einsum("...i,ij,...j", away, bend, away))
    gone = np.flatnonzero(
        ~((steps > [u.min(), v.min()]) & (steps < [u.max(), v.max()])).all(axis=1)
    )
    shown = steps[: gone[0] + 1] if len(gone) else steps

    figure, axes = panels(1, 1, (9, 7))
    heights = axes.contourf(u, v, errors, levels=24, cmap="viridis_r")
    figure.colorbar(heights, label=f"{error_label(table)}: dark is worse", format=number)
    axes.plot(
        *shown.T,
        color="black",
        marker="o",
        markersize=4,
        label=f"path of descent, {len(lines) - 1} steps",
    )
    start = f"start: predicts the mean {words(table.target_name)} for all"
    axes.plot(*steps[0], color="black", marker="s", markersize=10, label=start, linestyle="")
    axes.plot(
        *centre,
        color="red",
        marker="*",
        markersize=16,
        label="least squares: the lowest point",
        linestyle="",
    )
    axes.set(
        xlim=(u.min(), u.max()),
        ylim=(v.min(), v.max()),
        xlabel=weight_label(table, 0),
        ylabel=second,
    )
    axes.xaxis.set_major_formatter(number)
    axes.yaxis.set_major_formatter(number)
    axes.set_title("Where gradient descent goes on the loss surface")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def _window(
    steps: np.ndarray, centre: np.ndarray, bend: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a grid around the optimum that shows the path from its start, scaled by the curvature of each parameter."""
    scale = 1 / np.sqrt(np.diag(bend))
    far = np.abs((steps - centre) / scale).max(axis=1)
    half = 1.25 * min(far[np.isfinite(far)].max(), 2 * far[0])
    low, high = centre - half * scale, centre + half * scale
    u, v = np.meshgrid(np.linspace(low[0], high[0], 201), np.linspace(low[1], high[1], 201))
    return u, v


def plot_errors(path: Path, learned: Line, folds: list[tuple[float, float]], table: Table) -> None:
    """Draws predictions over true values, and for each fold the error on rows trained on beside that on rows held out."""
    figure, (dots, bars) = panels(1, 2, (13, 5))
    predicted = learned(table.features)
    ends = [min(table.target.min(), predicted.min()), max(table.target.max(), predicted.max())]
    dots.plot(ends, ends, color="black", linestyle="--", label="a perfect prediction")
    dots.scatter(table.target, predicted, color=BLUE, alpha=0.7, label="a row of the table")
    dots.set(title=f"What the model predicts for the {table.num_rows} rows it has learned from")
    dots.set(
        xlabel=f"true {label(table.target_name)}", ylabel=f"predicted {label(table.target_name)}"
    )
    dots.xaxis.set_major_formatter(number)
    dots.yaxis.set_major_formatter(number)
    dots.legend(loc="best")

    positions, parts = np.arange(1, len(folds) + 1), np.array(folds).T
    names, handles = ("training: rows that the model saw", "test: rows held out"), []
    for name, part, offset, color in zip(names, parts, (-0.2, 0.2), (GREEN, ORANGE), strict=True):
        mean = float(np.sqrt(np.mean(part**2)))
        handles.append(bars.bar(positions + offset, part, 0.38, color=color, label=name))
        handles.append(
            bars.axhline(
                mean,
                color=color,
                linestyle="--",
                label=f"over all folds: {amount(mean, table.target_name)}",
            )
        )
    bars.set(
        title=f"{len(folds)}-fold cross-validation",
        xlabel="fold that is held out",
        ylabel=error_label(table),
    )
    bars.set(ylim=(0, 1.35 * parts.max()), xticks=positions if len(folds) <= 12 else ())
    bars.yaxis.set_major_formatter(number)
    bars.legend(handles=handles, loc="upper center", ncols=2)
    figure.savefig(path, dpi=120)
