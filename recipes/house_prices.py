"""Learns house prices from real sales: price = w_area * area + w_bedrooms * bedrooms + b, by gradient descent.

One device:               python recipes/house_prices.py

Eight fake devices:       python recipes/house_prices.py --fake-devices 8 --mesh.data 8

Stochastic descent:       python recipes/house_prices.py --batch-size 1

Mini-batch descent:       python recipes/house_prices.py --batch-size 8

A price, once trained:    python recipes/house_prices.py --predict 1650 3

Another table:            python recipes/house_prices.py --csv flats.csv --features size floor --target rent
"""

if __name__ == "__main__":
    import first_line

    first_line.say()

import dataclasses
import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpointing
import cli
import compiling
import house_plots
import house_report as report
import jax
import numpy as np
import optax
import run_report
from csv_columns import read_columns
from least_squares import Line, Standard, Table, check_solvable, curvature, least_squares
from shared_flags import may_change

import jaxpar
from jaxpar.data.batches import pad_rows, round_up, samples_before, take_batch
from jaxpar.metrics.log import MetricsLog
from jaxpar.models import linear
from jaxpar.params import abstract_params, init_params

HOUSES = Path(__file__).parent / "data" / "portland_houses.csv"
RULES = {"weights": jaxpar.row_parallel(ndim=1), "bias": jaxpar.replicated()}
COMPARED_STEPS = 60  # of each descent that is compared with the run


@dataclass(frozen=True, kw_only=True)
class Config(cli.SharedFlags):
    csv: Path = HOUSES
    """Table to learn from: a first line of column names, then one line for each row."""
    features: tuple[str, ...] = ("area_ft2", "bedrooms")
    """Columns to predict from."""
    target: str = "price_usd"
    """Column to predict."""
    batch_size: int | None = None
    """Rows of a step. None: all, which is batch descent; 1: stochastic descent; values between: mini-batch descent."""
    learning_rate: float | None = None
    """Step size on standardised data. None: 1 over the curvature of the loss. With less than all rows a step it falls to 0
    over the run, since the noise of the batches would otherwise remain."""
    folds: int = 5
    """Folds of the cross-validation: parts of the rows, each of which tests a model trained on the others."""
    predict: tuple[float, ...] | None = None
    """A value for each feature: print what the model in --out-dir predicts for them, and train nothing."""
    out_dir: Path = Path("runs/house_prices")
    """Folder for config.json, metrics.jsonl, model.json, plots and checkpoints."""


def loss(predictions: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.squared_error(predictions, batch["target"], batch["weight"])


def main(config: Config) -> None:
    if config.predict is not None:
        with cli.checks():
            prediction = report.predict(config.out_dir, config.predict)
        return cli.say(prediction)

    with cli.checks():
        house_plots.check_installed()
        table = read_table(config)
        scale = Standard.of(table)
        rows = {name: column.astype(np.float32) for name, column in scale(table).items()}
        mesh = cli.make_mesh(config)
        batch_size = check_batch_size(config, table.num_rows, mesh)
        learning_rate = check_learning_rate(config, curvature(rows["features"], batch_size))
        check_folds(config, table)
        config = dataclasses.replace(config, batch_size=batch_size, learning_rate=learning_rate)
        param_table = linear.param_table(len(table.names))
        shardings = jaxpar.shardings_from_paths(abstract_params(param_table), mesh, RULES)
        falling = optax.linear_schedule(learning_rate, 0.0, config.steps)
        optimizer = optax.sgd(learning_rate if batch_size == table.num_rows else falling)
        first = (lambda key: init_params(param_table, key), jax.random.key(config.seed), optimizer, mesh, shardings)
        decisive = numbers_depend_on(config, rows)
        checkpoints = checkpointing.open_checkpoints(config, mesh)
        abstract = jaxpar.abstract_state(*first)
        begin = checkpointing.resume(config, checkpoints, abstract, decisive)

    cli.say(f"{table.num_rows} rows of {config.csv.name}: {table.target_name} from {', '.join(table.names)}")
    cli.say(report.how_rows_are_split(batch_size, mesh.shape["data"]))

    def rows_of(step: int) -> dict[str, np.ndarray]:
        where = {"seed": config.seed, "step": step, "origin": begin.origin}
        return take_batch(rows, batch_size, **where, multiple=mesh.shape["data"])

    start = begin.origin.step
    watchers = cli.watchers(config, checkpoints)
    train_step = jaxpar.make_train_step(jaxpar.value_and_grad(linear.apply, loss, mesh), optimizer)
    compiled_step = compiling.compile_step(config, train_step, abstract, jaxpar.abstract_batch(rows_of(start), mesh))
    if config.dry_run:
        return compiling.say_cost(config, compiled_step, mesh)

    watchers.append(run_report.watcher(config, compiled_step, abstract, mesh))
    state = jaxpar.init_state(*first) if begin.state is None else begin.state
    checkpointing.overwrite(config, checkpoints)
    cli.write_config(config, mesh)
    if jax.process_index() == 0:
        report.remove_model(config.out_dir)
    safe = 1 / curvature(rows["features"], batch_size)
    began = time.perf_counter()
    kept = {"items_per_step": batch_size, "first_step": start, "watchers": watchers}
    with (
        MetricsLog(config.out_dir, config.steps, **kept) as log,
        checkpointing.guard(
            config,
            checkpoints,
            log,
            config=decisive,
            samples=lambda step: samples_before(table.num_rows, batch_size, step, begin.origin),
            remedy=f"--learning-rate {learning_rate:g} is too large, {safe:.3g} is safe.",
            draw=lambda: draw_descent(config, table, mesh, shardings),
        ) as guard,
    ):
        for step in range(start, config.steps):
            state, metrics = compiled_step(state, jaxpar.shard_batch(rows_of(step), mesh))
            log.log(step, {**metrics, **report.in_units(scale.line(jaxpar.fetch(state.params)), table)})
            guard.after_step(step + 1, state, metrics)
    cli.say(f"{config.steps - start} steps in {time.perf_counter() - began:.1f} s, learning rate {learning_rate:g}")

    learned = scale.line(jaxpar.fetch(state.params))
    if jax.process_index() == 0:
        report.write_model(config.out_dir, learned, table)
    conclude(config, table, learned, mesh, shardings)
    checkpointing.say_skipped(state)
    median = (f"{value:g}" for value in np.median(table.features, axis=0))
    cli.say(f"try it: {cli.command('--out-dir', config.out_dir, '--predict', *median)}")


def conclude(config: Config, table: Table, learned: Line, mesh: jax.sharding.Mesh, shardings: dict) -> None:
    """Prints the errors of the learned line beside those of least squares and on rows held out, and draws them."""
    folds = cross_validate(config, table, mesh, shardings)
    cli.say(report.beside_least_squares(learned, least_squares(table), table))
    if config.batch_size != table.num_rows:
        cli.say("steps on part of the rows end near the least squares, not on it; more --steps end nearer")
    cli.say(report.errors(learned, folds, table))
    draw_descent(config, table, mesh, shardings)
    if jax.process_index() == 0:
        house_plots.plot_errors(config.out_dir / "errors.png", learned, folds, table)
    pictures = "loss.png, surface.png, errors.png"
    cli.say(f"in {config.out_dir}: report.html, {pictures}, model.json, metrics.jsonl, config.json")


def draw_descent(config: Config, table: Table, mesh: jax.sharding.Mesh, shardings: dict) -> None:
    """Draws the error so far, and the path of descent."""
    scale, best = Standard.of(table), least_squares(table)
    rates = compare_learning_rates(scale, table, mesh, shardings)
    if jax.process_index() == 0:
        path = report.read_path(config.out_dir, scale, table)
        house_plots.plot_loss(
            config.out_dir / "loss.png", path, rates, best, table, config.batch_size or table.num_rows
        )
        house_plots.plot_surface(config.out_dir / "surface.png", path, best, table)


def read_table(config: Config) -> Table:
    """Returns the rows of the CSV; raises where the target cannot be learned from the features."""
    names = (*config.features, config.target)
    if not config.features:
        raise ValueError("--features must name at least one column; got none. Name the columns to predict from.")
    if len(set(names)) < len(names):
        raise ValueError(
            "--features and --target must not name a column twice; got "
            f"--features {' '.join(config.features)} --target {config.target}. Leave one of the two out."
        )
    columns = read_columns(config.csv, names)
    features = np.stack([columns[name] for name in config.features], axis=1)
    table = Table(config.features, config.target, features, columns[config.target])
    check_solvable(table)
    return table


def check_batch_size(config: Config, num_rows: int, mesh: jax.sharding.Mesh) -> int:
    """Returns the rows of a step; raises where the table has fewer, or the mesh needs more."""
    batch_size, data = num_rows if config.batch_size is None else config.batch_size, mesh.shape["data"]
    if mesh.shape["stage"] > 1:
        raise ValueError(
            f"linear regression is one layer and so one stage; got --mesh.stage {mesh.shape['stage']}. Use --mesh.stage 1."
        )
    if not 1 <= batch_size <= num_rows:
        raise ValueError(
            f"--batch-size must be from 1 to the number of rows; got {batch_size}, {num_rows} rows. "
            f"Choose 1 to {num_rows}, or leave it out for all rows."
        )
    if batch_size < data:
        larger = f"--batch-size {data} or more, or " if data <= num_rows and may_change(config, "batch_size") else ""
        fewer = f"--mesh.data {batch_size}" + (" or less" if batch_size > 1 else "")
        raise ValueError(
            f"each replica must have a row of every step; got {report.count(batch_size, 'row')} a step, data={data}. "
            f"Choose {larger}{fewer}."
        )
    return batch_size


def check_learning_rate(config: Config, steepest: float) -> float:
    """Returns the learning rate, by default 1 over the largest curvature, at which descent does not overshoot."""
    if config.learning_rate is None:
        return float(f"{1 / steepest:.3g}")
    if not 0 < config.learning_rate < math.inf:
        raise ValueError(
            f"--learning-rate must be positive; got {config.learning_rate:g}. Choose {1 / steepest:.3g}, or leave it out."
        )
    return config.learning_rate


def check_folds(config: Config, table: Table) -> None:
    """Raises unless each fold tests a row and leaves enough to train on."""
    num_rows, num_params = table.num_rows, len(table.names) + 1
    least = next((k for k in range(2, num_rows + 1) if num_rows - -(-num_rows // k) >= num_params), None)
    if least is None:
        raise ValueError(
            "there must be more rows than parameters to test on those that are left out; got "
            f"{num_rows} rows, {num_params} parameters. Add rows or use fewer --features."
        )
    if not least <= config.folds <= num_rows:
        raise ValueError(
            f"--folds must be from {least} to the number of rows; got {config.folds}, {num_rows} rows. "
            f"Choose {least} to {num_rows}."
        )


def numbers_depend_on(config: Config, rows: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one. The mesh and the number of steps may change."""
    flags = cli.as_json(config)
    kept = {name: flags[name] for name in ("features", "target", "batch_size", "learning_rate", "seed")}
    return {**kept, "checksum_of_rows": zlib.crc32(rows["features"].tobytes() + rows["target"].tobytes())}


def compare_learning_rates(
    scale: Standard, table: Table, mesh: jax.sharding.Mesh, shardings: dict
) -> dict[str, tuple[float, np.ndarray]]:
    """Returns three learning rates, each with the error before each step of batch descent, in the target's unit."""
    rows = scale(table)
    right = 1 / curvature(rows["features"], table.num_rows)
    compared = {}
    for name, rate in {"too small": right / 30, "right": right, "too large": 2.1 * right}.items():
        ((losses, _),) = descend([rows], rate, mesh, shardings)
        compared[name] = (rate, np.sqrt(losses) * scale.target_std)
    return compared


def cross_validate(config: Config, table: Table, mesh: jax.sharding.Mesh, shardings: dict) -> list[tuple[float, float]]:
    """Returns for each fold the error on the rows trained on and on the rows held out, which the scale does not use either.

    A row that is held out has weight 0, so that one compiled step serves all folds.
    """
    order = np.random.default_rng(config.seed).permutation(table.num_rows)
    tested = [np.isin(np.arange(table.num_rows), fold) for fold in np.array_split(order, config.folds)]
    scales = [Standard.of(table.part(~held_out)) for held_out in tested]
    batches = [{**scale(table), "weight": ~held_out} for scale, held_out in zip(scales, tested, strict=True)]
    rate = 1 / max(curvature(batch["features"][batch["weight"]], int(batch["weight"].sum())) for batch in batches)
    lines = [
        scale.line(params) for scale, (_, params) in zip(scales, descend(batches, rate, mesh, shardings), strict=True)
    ]
    return [
        (line.error(table.part(~held_out)), line.error(table.part(held_out)))
        for line, held_out in zip(lines, tested, strict=True)
    ]


def descend(
    batches: list[dict[str, np.ndarray]], learning_rate: float, mesh: jax.sharding.Mesh, shardings: dict
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yields the losses and the final params of batch descent from zero on each batch: the loop of main without its log."""
    param_table, optimizer = linear.param_table(batches[0]["features"].shape[1]), optax.sgd(learning_rate)
    train_step = jaxpar.make_train_step(jaxpar.value_and_grad(linear.apply, loss, mesh), optimizer)
    for batch in batches:
        narrow = {name: column.astype(np.float32) for name, column in batch.items()}
        padded = pad_rows(narrow, round_up(len(narrow["target"]), mesh.shape["data"]))
        on_mesh, losses = jaxpar.shard_batch(padded, mesh), []
        first = lambda key: init_params(param_table, key)
        state = jaxpar.init_state(first, jax.random.key(0), optimizer, mesh, shardings)
        for _ in range(COMPARED_STEPS):
            state, metrics = train_step(state, on_mesh)
            losses.append(metrics["loss"])
        yield np.array(jaxpar.fetch(losses)), jaxpar.fetch(state.params)


if __name__ == "__main__":
    cli.run(main, Config)
