"""The output of house_prices.py: metrics in the units of the data, the model, and its comparison with least squares."""

import json
import math
from pathlib import Path

import numpy as np
from least_squares import Line, Standard, Table

from jaxpar.data.batches import round_up
from jaxpar.metrics.log import read_metrics
from jaxpar.models.trained_linear import MODEL, read_linear

UNITS = {"usd": "USD", "eur": "EUR", "ft2": "ft²", "m2": "m²"}  # endings of column names, as in price_usd


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


def number(value: float) -> str:
    """Returns a number as readable text: 63,926 or 0.3205."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def amount(value: float, column: str) -> str:
    """Returns a number with a column's unit: 63,926 USD."""
    return f"{number(value)} {unit(column) or ''}".strip()


def count(things: int, name: str) -> str:
    """Returns "1 row" or "2 rows"."""
    return f"{things} {name}" if things == 1 else f"{things} {name}s"


def how_rows_are_split(batch_size: int, data: int) -> str:
    """Returns how the rows of a step are split over the replicas, as text."""
    padded = round_up(batch_size, data)
    split = f"each step takes {count(batch_size, 'row')}; data={data}: {padded // data} on each replica"
    if padded == batch_size:
        return split
    return (
        f"{split}, {padded} in all; {count(padded - batch_size, 'row')} of weight 0 at the end of the last, so that every row "
        "counts once and none is dropped"
    )


def in_units(line: Line, table: Table) -> dict[str, float]:
    """Returns a line as entries of metrics.jsonl, in the units of the data."""
    weights = {f"weights/{name}": float(weight) for name, weight in zip(table.names, line.weights, strict=True)}
    return {**weights, "intercept": line.intercept}


def read_path(out_dir: Path, scale: Standard, table: Table) -> list[Line]:
    """Returns the line before the first step and after each step."""
    start = scale.line({"weights": np.zeros(len(table.names)), "bias": 0.0})
    logged = read_metrics(out_dir / "metrics.jsonl")
    return [start] + [Line(np.array([m[f"weights/{n}"] for n in table.names]), m["intercept"]) for m in logged]


def beside_least_squares(learned: Line, best: Line, table: Table) -> str:
    """Returns a text table: each parameter as learned and in closed form, and by how much they differ."""
    lines = [f"{'':20}{'learned':>16}{'least squares':>16}{'difference':>14}"]
    for name, got, want in zip(
        (*table.names, "intercept"), (*learned.weights, learned.intercept), (*best.weights, best.intercept), strict=True
    ):
        relative = abs(got - want) / abs(want) if want else abs(got)
        lines.append(f"{name:20}{got:16.6g}{want:16.6g}{f'{relative:.2%}' if relative < 10 else 'far off':>14}")
    return "\n".join(lines)


def errors(learned: Line, folds: list[tuple[float, float]], table: Table) -> str:
    """Returns the error of the model on its own rows, and the training and test errors over the folds, as text."""
    training, test = (number(float(np.sqrt(np.mean(np.square(part))))) for part in zip(*folds, strict=True))
    return (
        f"root mean squared error of {label(table.target_name)}:\n"
        f"  {number(learned.error(table))} on the {table.num_rows} rows that it was trained on\n"
        f"  {test} on rows held out, {training} on the rows trained on meanwhile ({len(folds)} folds)"
    )


def remove_model(out_dir: Path) -> None:
    """Removes the model of an earlier run, which --predict would otherwise use as that of this run."""
    (out_dir / MODEL).unlink(missing_ok=True)


def write_model(out_dir: Path, learned: Line, table: Table) -> None:
    """Writes the model, in the units of the data, and the range of each feature in the training rows."""
    seen = [[float(column.min()), float(column.max())] for column in table.features.T]
    model = {
        "features": list(table.names),
        "target": table.target_name,
        "weights": learned.weights.tolist(),
        "intercept": learned.intercept,
        "seen": seen,
    }
    (out_dir / MODEL).write_text(json.dumps(model, indent=2) + "\n")


def predict(out_dir: Path, values: tuple[float, ...]) -> str:
    """Returns the prediction of a run's model for one value of each feature, as a sentence."""
    path = out_dir / MODEL
    if not path.is_file():
        raise ValueError(
            f"--predict needs a run that has ended; got no {MODEL} in {out_dir}. Train first, or name its folder by "
            "--out-dir; --resume completes a run that was stopped."
        )
    linear = read_linear(path)
    if len(values) != len(linear.names):
        raise ValueError(
            f"--predict must have one value for each feature, {', '.join(linear.names)}; got {len(values)}. Give "
            f"{len(linear.names)}."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"--predict must have finite numbers; got {' '.join(map(str, values))}. Correct them.")
    outside = [f"{linear.names[i]} {linear.seen[i][0]:g} to {linear.seen[i][1]:g}" for i in linear.outside(values)]
    given = ", ".join(f"{name} {value:g}" for name, value in zip(linear.names, values, strict=True))
    warning = f" (a guess: the model has only seen {', '.join(outside)})" if outside else ""
    return f"{linear.target} {linear.predict(values):,.6g} for {given}{warning}"
