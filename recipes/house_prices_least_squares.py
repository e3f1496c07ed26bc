"""A table of rows, linear regression on it in closed form in float64 NumPy, and learning rates at which descent is safe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.csv_columns import read_columns
from jaxpar.models.trained_linear import TrainedLinear


@dataclass(frozen=True)
class Table:
    """Rows to learn from: ``features`` [rows, columns] and ``target`` [rows], with the names of their columns."""

    names: tuple[str, ...]
    target_name: str
    features: np.ndarray
    target: np.ndarray

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.target)

    def part(self, rows: np.ndarray) -> "Table":
        """Returns some of the rows, by number or by mask."""
        return Table(self.names, self.target_name, self.features[rows], self.target[rows])


@dataclass(frozen=True)
class Line:
    """A model in the units of the data: ``target = features . weights + intercept``."""

    weights: np.ndarray
    intercept: float

    def __call__(self, features: np.ndarray) -> Any:
        """Returns the target of each row of ``features`` [rows, columns], or of one row."""
        return features @ self.weights + self.intercept

    def error(self, table: Table) -> float:
        """Returns the root mean squared error over the rows of ``table``, in the unit of its target."""
        return float(np.sqrt(np.mean((self(table.features) - table.target) ** 2)))

    def trained_on(self, table: Table) -> TrainedLinear:
        """Returns the model with the names of a table's columns, and the range of each feature in its rows."""
        seen = tuple((float(column.min()), float(column.max())) for column in table.features.T)
        return TrainedLinear(
            table.names, table.target_name, tuple(self.weights.tolist()), self.intercept, seen
        )


def least_squares(table: Table) -> Line:
    """Returns the line with the least squared error, by a singular value decomposition of the standardised features."""
    scale = Standard.of(table)
    rows = scale(table)
    return scale.line(
        {"weights": np.linalg.lstsq(rows["features"], rows["target"])[0], "bias": 0.0}
    )


@dataclass(frozen=True)
class Standard:
    """Standardisation of features and target to mean 0 and standard deviation 1, and its inverse.

    Gradient descent needs it: with areas in thousands and bedrooms in ones the loss is a narrow valley, whose steep sides
    allow only steps that are too small along its floor. float32 needs it too: a squared price has 11 digits.
    """

    feature_means: np.ndarray
    feature_stds: np.ndarray
    target_mean: float
    target_std: float

    @classmethod
    def of(cls, table: Table) -> "Standard":
        """Returns the scale of these rows; a column that does not vary is only shifted."""
        stds, std = table.features.std(axis=0), float(table.target.std())
        return cls(
            table.features.mean(axis=0),
            np.where(stds > 0, stds, 1.0),
            float(table.target.mean()),
            std or 1.0,
        )

    def __call__(self, table: Table) -> dict[str, np.ndarray]:
        """Returns the rows of ``table`` on this scale, as columns "features" and "target"."""
        features = (table.features - self.feature_means) / self.feature_stds
        return {"features": features, "target": (table.target - self.target_mean) / self.target_std}

    def line(self, params: Mapping[str, Any]) -> Line:
        """Returns a model on this scale, {"weights", "bias"}, converted to the units of the data."""
        weights = np.asarray(params["weights"], np.float64) * self.target_std / self.feature_stds
        intercept = (
            self.target_mean
            + float(params["bias"]) * self.target_std
            - weights @ self.feature_means
        )
        return Line(weights, float(intercept))


def curvature(features: np.ndarray, batch_size: int) -> float:
    """Returns the largest curvature of a batch's mean squared error: gradient descent is safe at a learning rate of 1 over it.

    With all rows it is the largest eigenvalue of the loss's Hessian. A batch of one row may be as sharp as the sharpest row;
    between the two it falls as the batch grows (Ma, Bassily and Belkin 2018, arXiv 1712.06559, the step size of mini-batches
    for a quadratic loss; ours has no factor one half).

    Args:
        features: Standardised, [rows, columns]. The bias counts as one more column, of ones.
        batch_size: Rows of a step.
    """
    rows = np.column_stack([features, np.ones(len(features))])
    mean = 2 * np.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]
    sharpest = 2 * np.max(np.sum(rows**2, axis=1))
    return float(
        mean if batch_size == len(rows) else (sharpest + (batch_size - 1) * mean) / batch_size
    )


def read_table(path: Path, features: tuple[str, ...], target: str) -> Table:
    """Returns the rows of a CSV file.

    Args:
        path: The file: a first line of column names, then one line for each row.
        features: Columns to predict from, the flag --features.
        target: Column to predict, the flag --target.

    Raises:
        ValueError: The columns cannot be read, or the target cannot be learned from the features.
    """
    check_columns(features, target)
    columns = read_columns(path, (*features, target))
    table = Table(
        features, target, np.stack([columns[name] for name in features], axis=1), columns[target]
    )
    check_solvable(table)
    return table


def check_columns(features: tuple[str, ...], target: str) -> None:
    """Raises unless there are features, and no column is named twice; takes what ``read_table`` takes."""
    names = (*features, target)
    if not features:
        raise ValueError(
            "--features must name at least one column; got none. Name the columns to predict from."
        )
    if len(set(names)) < len(names):
        raise ValueError(
            "--features and --target must not name a column twice; got "
            f"--features {' '.join(features)} --target {target}. Leave one of the two out."
        )


def check_solvable(table: Table) -> None:
    """Raises unless the rows determine one line: enough of them, columns that vary, none a weighted sum of the others."""
    num_params = len(table.names) + 1
    if table.num_rows < num_params:
        raise ValueError(
            "there must be at least as many rows as parameters, one for each feature and the intercept; got "
            f"{_rows(table.num_rows)}, {num_params} parameters. Add rows or use fewer --features."
        )
    for name, column in zip(table.names, table.features.T, strict=True):
        if np.ptp(column) == 0:
            raise ValueError(
                f"a feature must vary to be learned from; got {column[0]:g} in every row of {name!r}. Leave it out."
            )
    if np.ptp(table.target) == 0:
        raise ValueError(
            f"a target must vary to be learned; got {table.target[0]:g} in every row of {table.target_name!r}. "
            "Choose another --target."
        )
    if np.linalg.matrix_rank(Standard.of(table)(table)["features"]) < len(table.names):
        raise ValueError(
            "no feature may be made up of the others, or many answers fit alike; got "
            f"--features {' '.join(table.names)}, of which one is a weighted sum of others. Leave one out."
        )


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def check_folds(folds: int, table: Table) -> None:
    """Raises unless each of so many folds, the flag --folds, tests a row and leaves enough to train on."""
    num_rows, num_params = table.num_rows, len(table.names) + 1
    least = next(
        (k for k in range(2, num_rows + 1) if num_rows - -(-num_rows // k) >= num_params), None
    )
    if least is None:
        raise ValueError(
            "there must be more rows than parameters to test on those that are left out; got "
            f"{_rows(num_rows)}, {num_params} parameters. Add rows or use fewer --features."
        )
    if not least <= folds <= num_rows:
        raise ValueError(
            f"--folds of a cross-validation must be from {least} to the number of rows; got {folds}, {num_rows} rows. "
            f"Give --folds {least}{f' to {num_rows}' if least < num_rows else ''}."
        )
