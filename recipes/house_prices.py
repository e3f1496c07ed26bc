"""Learns house prices from real sales: price = w_area * area + w_bedrooms * bedrooms + b, by gradient descent.

    One device:               python recipes/house_prices.py
    Eight fake devices:       python recipes/house_prices.py --fake-devices 8 --mesh.data 8
    Stochastic descent:       python recipes/house_prices.py --batch-size 1
    Mini-batch descent:       python recipes/house_prices.py --batch-size 8
    A price, once trained:    python recipes/house_prices.py --predict 1650 3

Another table:            python recipes/house_prices.py --csv flats.csv --features size floor --target rent
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
from tyro.conf import OmitArgPrefixes, arg

import house_prices_report as report
import jaxpar
from house_prices_least_squares import (
    Line,
    Standard,
    Table,
    check_columns,
    check_folds,
    curvature,
    least_squares,
    read_table,
)
from jaxpar.commands import recipe
from jaxpar.data.batches import Columns, pad_rows, round_up
from jaxpar.fields import check_positive
from jaxpar.mesh import num_replicas
from jaxpar.models import linear
from jaxpar.models.trained_linear import MODEL, describe_prediction, write_linear
from jaxpar.params import abstract_params, init_params
from jaxpar.plot.figure import check_matplotlib
from jaxpar.run import Run, checks, make_mesh, say
from jaxpar.run.batches import Batches, check_replicas
from jaxpar.run.flags import BasicFlags, CommonFlags, OwnFlags

HOUSES = Path(__file__).parent / "data" / "portland_houses.csv"
RULES = {"weights": jaxpar.row_parallel(ndim=1), "bias": jaxpar.replicated()}
COMPARED_STEPS = 60  # of each descent that is compared with the run


@dataclass(frozen=True, kw_only=True)
class Common(CommonFlags):
    out_dir: Path = Path("runs/house_prices")
    """Folder for config.json, metrics.jsonl, model.json, plots and checkpoints."""
    batch_size: int | None = None
    """Rows of a step. None: all, which is batch descent; 1: stochastic descent; values between: mini-batch descent."""
    learning_rate: Annotated[float | None, arg(aliases=("--lr",))] = None
    """Step size on standardised data; it falls to 0 unless a step takes all rows. None: 1 over the curvature of the loss."""


@dataclass(frozen=True, kw_only=True)
class Recipe(OwnFlags):
    csv: Path = HOUSES
    """Table to learn from: a first line of column names, then one line for each row."""
    features: tuple[str, ...] = ("area_ft2", "bedrooms")
    """Columns to predict from."""
    target: str = "price_usd"
    """Column to predict."""
    folds: int = 5
    """Folds of the cross-validation: parts of the rows, each of which tests a model trained on the others."""
    predict: tuple[float, ...] | None = None
    """A value for each feature: print what the model in --out-dir predicts for them, and train nothing."""


@dataclass(frozen=True, kw_only=True)
class Config(BasicFlags):
    common: OmitArgPrefixes[Common] = Common()
    recipe: OmitArgPrefixes[Recipe] = Recipe()

    @property
    def trains(self) -> bool:
        return self.recipe.predict is None


def loss(predictions: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.squared_error(predictions, batch["target"], batch["weight"])


def check_settings(config: Config) -> None:
    """Raises where a flag is out of range, as far as neither data nor devices are needed to tell."""
    check_columns(config.recipe.features, config.recipe.target)
    if config.common.learning_rate is not None:
        check_positive("Leave it out.", learning_rate=config.common.learning_rate)


def check_predicts_alone(flags: Recipe) -> None:
    """Raises where a prediction is asked for with flags of a training: the saved model has its own features."""
    names = ("csv", "features", "target", "folds")
    given = [name for name in names if getattr(flags, name) != getattr(Recipe, name)]
    if given:
        raise ValueError(
            "--predict takes the model of --out-dir, which has its features and learned from its table; got "
            f"{' '.join(f'--{name}' for name in given)} too. Leave them out."
        )


def main(config: Config) -> None:
    if config.recipe.predict is not None:
        with checks():
            check_predicts_alone(config.recipe)
            prediction = describe_prediction(config.common.out_dir, config.recipe.predict)
        return say(prediction)

    with checks():
        check_matplotlib()
        table = read_table(config.recipe.csv, config.recipe.features, config.recipe.target)
        scale = Standard.of(table)
        rows = {name: column.astype(np.float32) for name, column in scale(table).items()}
        mesh, common, source = make_mesh(config), config.common, Columns(rows)
        batch_size = check_replicas(config, common.batch_size, table.num_rows, mesh)
        safe = 1 / curvature(rows["features"], batch_size)
        rate = float(f"{safe:.3g}") if common.learning_rate is None else common.learning_rate
        check_positive(f"Choose {safe:.3g}, or leave it out.", learning_rate=rate)
        check_folds(config.recipe.folds, table)
        checksum = zlib.crc32(rows["features"].tobytes() + rows["target"].tobytes())
        config = config.replace(batch_size=batch_size, learning_rate=rate)
        falling = optax.linear_schedule(rate, 0.0, config.common.steps)
        schedule = rate if batch_size == table.num_rows else falling
        fit = Fit(table, mesh, optax.sgd(schedule))
        run = Run(
            config,
            mesh,
            # The mesh and the number of steps may change.
            config.values("features", "target", "batch_size", "learning_rate", "seed")
            | {"checksum_of_rows": checksum},
            items_per_step=batch_size,
            has_evaluations=False,
            learning_rate=schedule,
            samples=lambda step: source.samples_before(batch_size, step, run.origin),
            remedy=f"--learning-rate {rate:g} is too large, {safe:.3g} is safe.",
            draw=lambda: draw_descent(config, table, mesh),
        )
        run.restore(*fit.init_state(config.common.seed))
    say(
        f"{table.num_rows} rows of {config.recipe.csv.name}: {table.target_name} from {', '.join(table.names)}"
    )
    say(report.how_rows_are_split(batch_size, mesh.shape["data"], mesh.shape["replica"]))

    batch_of = Batches(run, source, batch_size, num_microbatches=1)
    with run:
        train_step = run.compile(fit.train_step, batch_of.abstract())
        if run.is_dry:
            return run.say_cost()
        state = run.begin()
        if (
            jax.process_index() == 0
        ):  # --predict would use that of an earlier run as if it were of this one
            (run.out_dir / MODEL).unlink(missing_ok=True)
        for step in run.steps():
            state, metrics = train_step(state, batch_of(step))
            run.log(
                step,
                state,
                {**metrics, **report.in_units(scale.line(jaxpar.fetch(state.params)), table)},
            )

        say(
            f"{config.common.steps - run.first_step} steps in {run.seconds:.1f} s, learning rate {rate:g}"
        )
        learned = scale.line(jaxpar.fetch(state.params))
        if jax.process_index() == 0:
            write_linear(run.out_dir / MODEL, learned.trained_on(table))
        conclude(config, table, learned, mesh)
        run.say_skipped(state)
        median = (f"{value:g}" for value in np.median(table.features, axis=0))
        say(f"try it: {recipe.command('--out-dir', run.out_dir, '--predict', *median)}")


class Fit:
    """The model of a table on a mesh: what a training step and its state are made of."""

    def __init__(
        self, table: Table, mesh: jax.sharding.Mesh, optimizer: optax.GradientTransformation
    ) -> None:
        params = linear.param_table(len(table.names))
        self.parallel = jaxpar.Parallel(
            mesh, jaxpar.shardings_from_paths(abstract_params(params), mesh, RULES)
        )
        self.train_step = jaxpar.make_train_step(
            jaxpar.value_and_grad(linear.apply, loss, self.parallel), optimizer
        )
        init = lambda key: init_params(params, key)
        self.init_state = lambda seed: (init, jax.random.key(seed), optimizer, self.parallel)


def conclude(config: Config, table: Table, learned: Line, mesh: jax.sharding.Mesh) -> None:
    """Prints the errors of the learned line beside those of least squares and on rows held out, and draws them."""
    folds, out_dir = cross_validate(config, table, mesh), config.common.out_dir
    say(report.beside_least_squares(learned, least_squares(table), table))
    if config.common.batch_size != table.num_rows:
        say(
            "steps on part of the rows end near the least squares, not on it; more --steps end nearer"
        )
    say(report.errors(learned, folds, table))
    draw_descent(config, table, mesh)
    if jax.process_index() == 0:
        report.plot_errors(out_dir / "errors.png", learned, folds, table)
    say(
        f"in {out_dir}: report.html, loss.png, surface.png, errors.png, model.json, metrics.jsonl, config.json"
    )


def draw_descent(config: Config, table: Table, mesh: jax.sharding.Mesh) -> None:
    """Draws the error so far, and the path of descent."""
    scale, best, out_dir = Standard.of(table), least_squares(table), config.common.out_dir
    rates = compare_learning_rates(table, mesh)
    if jax.process_index() == 0:
        path, batch_size = (
            report.read_path(out_dir, scale, table),
            config.common.batch_size or table.num_rows,
        )
        report.plot_loss(out_dir / "loss.png", path, rates, best, table, batch_size)
        report.plot_surface(out_dir / "surface.png", path, best, table)


def compare_learning_rates(
    table: Table, mesh: jax.sharding.Mesh
) -> dict[str, tuple[float, np.ndarray]]:
    """Returns three learning rates, each with the error before each step of batch descent, in the target's unit."""
    scale = Standard.of(table)
    right = 1 / curvature(scale(table)["features"], table.num_rows)
    rates = {"too small": right / 30, "right": right, "too large": 2.1 * right}
    losses = {
        name: next(descend([scale(table)], rate, table, mesh))[0] for name, rate in rates.items()
    }
    return {name: (rate, np.sqrt(losses[name]) * scale.target_std) for name, rate in rates.items()}


def cross_validate(
    config: Config, table: Table, mesh: jax.sharding.Mesh
) -> list[tuple[float, float]]:
    """Returns for each fold the error on the rows trained on and on the rows held out, which the scale does not use either.

    A row that is held out has weight 0, so that one compiled step serves all folds.
    """
    order = np.random.default_rng(config.common.seed).permutation(table.num_rows)
    tested = [
        np.isin(np.arange(table.num_rows), fold)
        for fold in np.array_split(order, config.recipe.folds)
    ]
    scales = [Standard.of(table.part(~held_out)) for held_out in tested]
    batches = [
        {**scale(table), "weight": ~held_out}
        for scale, held_out in zip(scales, tested, strict=True)
    ]
    rate = 1 / max(
        curvature(batch["features"][batch["weight"]], int(batch["weight"].sum()))
        for batch in batches
    )
    errors = []
    for scale, held_out, (_, params) in zip(
        scales, tested, descend(batches, rate, table, mesh), strict=True
    ):
        line = scale.line(params)
        errors.append((line.error(table.part(~held_out)), line.error(table.part(held_out))))
    return errors


def descend(
    batches: list[dict[str, np.ndarray]], rate: float, table: Table, mesh: jax.sharding.Mesh
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yields the losses and the final params of batch descent from zero on each batch: the loop of main without its log."""
    fit = Fit(table, mesh, optax.sgd(rate))
    for batch in batches:
        narrow = {name: column.astype(np.float32) for name, column in batch.items()}
        on_mesh = jaxpar.shard_batch(
            pad_rows(narrow, round_up(table.num_rows, num_replicas(mesh))), mesh
        )
        state, losses = jaxpar.init_state(*fit.init_state(0)), []
        for _ in range(COMPARED_STEPS):
            state, metrics = fit.train_step(state, on_mesh)
            losses.append(metrics["loss"])
        yield np.array(jaxpar.fetch(losses)), jaxpar.fetch(state.params)


if __name__ == "__main__":
    recipe.run(main, Config)
