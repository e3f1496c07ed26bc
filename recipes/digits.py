"""Trains a multilayer perceptron of 8 hidden layers to read handwritten digits: 1,797 real images of 8x8 pixels.

One device:                python recipes/digits.py

Data parallel:             python recipes/digits.py --fake-devices 8 --mesh.data 8 --split data

Column-row tensor split:   python recipes/digits.py --fake-devices 8 --mesh.data 4 --mesh.tensor 2

All by column, or by row:  python recipes/digits.py --fake-devices 2 --mesh.tensor 2 --split column

In a pipeline:             python recipes/digits.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2

The results are those of one device, for every mesh and split.
"""

if __name__ == "__main__":
    import first_line

    first_line.say()

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import checkpointing
import cli
import compiling
import digits_plots as plots
import digits_sweep
import jax
import jax.numpy as jnp
import numpy as np
import optax
import run_report
from microbatches import check_microbatches
from shared_flags import may_change

import jaxpar
from jaxpar.data.batches import pad_rows, round_up, samples_before, take_batch
from jaxpar.metrics.log import MetricsLog, read_metrics
from jaxpar.models import mlp
from jaxpar.params import abstract_params, count_params, init_params
from jaxpar.runtime.extras import install_extra
from jaxpar.schedule import Schedule, lockstep_form, make_schedule, plot_timeline

COLUMN, ROW, WHOLE = jaxpar.column_parallel(), jaxpar.row_parallel(), jaxpar.replicated()
COLUMN_BIAS = jaxpar.column_parallel(ndim=1)
OUTER = {"outer/*": WHOLE}

# Each --split is no more than one of these tables. A pair of hidden layers is w_up [in, out] and then w_down [in, out].
SPLITS = {
    "data": {"layers/*": WHOLE, **OUTER},
    "column": {"layers/w_*": COLUMN, "layers/b_*": COLUMN_BIAS, **OUTER},
    "row": {"layers/w_*": ROW, "layers/b_*": WHOLE, **OUTER},
    "mixed": {"layers/w_up": COLUMN, "layers/b_up": COLUMN_BIAS, "layers/w_down": ROW, "layers/b_down": WHOLE, **OUTER},
}
NUM_PIXELS, NUM_CLASSES = 64, 10


@dataclass(frozen=True, kw_only=True)
class Config(cli.SharedFlags):
    split: Literal["data", "column", "row", "mixed"] = "mixed"
    """How the hidden layers are split over the tensor axis. data: not at all; column: by outputs; row: by inputs; mixed:
    column, then row, which halves the traffic."""
    hidden_layers: int = 8
    """Hidden layers, an even number: a pipeline splits them over its stages in pairs."""
    width: int = 64
    """Units of a hidden layer."""
    batch_size: int = 128
    """Digits of a step."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    num_microbatches: int | None = None
    """Microbatches of each replica in a step. None: 2 for each stage of a pipeline, else 1."""
    schedule: str = "1f1b"
    """The pipeline's schedule: gpipe, 1f1b, interleaved, zb-h1 or zb-v. Without a pipeline it has no effect."""
    test_fraction: float = 0.2
    """Share of the digits that is held out for testing; --seed determines which."""
    eval_every: int = 10
    """Steps between two evaluations on the digits held out."""
    sweep: bool = True
    """After training, also train smaller models, and on fewer digits, to show under- and overfitting: 15 s on two cores."""
    out_dir: Path = Path("runs/digits")
    """Folder for config.json, metrics.jsonl, plots and checkpoints."""


Rows = dict[str, np.ndarray]


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["label"], batch["weight"])


def main(config: Config) -> None:
    with cli.checks():
        plots.check_installed()
        mesh = cli.make_mesh(config)
        train, test = read_digits(config)
        check_model(config, mesh)
        num_microbatches = check_microbatches(
            config.batch_size,
            config.num_microbatches,
            len(train["label"]),
            mesh,
            unit="digit",
            may_change_batch=may_change(config, "batch_size"),
        )
        table = mlp.param_table(NUM_PIXELS, NUM_CLASSES, width=config.width, num_hidden=config.hidden_layers)
        shardings = jaxpar.shardings_from_paths(abstract_params(table), mesh, SPLITS[config.split])
        optimizer = optax.adam(config.learning_rate)
        form = lockstep_form(config.schedule)
        schedule = make_schedule(config.schedule, mesh.shape["stage"], num_microbatches, form=form)
        check_pairs(config, schedule)
        value_and_grad = jaxpar.value_and_grad(
            mlp.MODEL, loss, mesh, schedule=schedule, num_microbatches=num_microbatches
        )
        first = (lambda key: init_params(table, key), jax.random.key(config.seed), optimizer, mesh, shardings)
        checkpoints = checkpointing.open_checkpoints(config, mesh)
        decisive = numbers_depend_on(config)
        abstract = jaxpar.abstract_state(*first)
        begin = checkpointing.resume(config, checkpoints, abstract, decisive)

    cli.say(f"{len(train['label'])} digits to learn from, {len(test['label'])} held out")
    cli.say(
        f"{config.hidden_layers} hidden layers of {config.width} units, {count_params(table):,} parameters; "
        f"split {config.split} over {', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())}"
    )
    multiple = mesh.shape["data"] * num_microbatches

    def rows_of(step: int) -> dict[str, np.ndarray]:
        where = {"seed": config.seed, "step": step, "origin": begin.origin}
        return take_batch(train, config.batch_size, **where, multiple=multiple)

    start = begin.origin.step
    watchers = cli.watchers(config, checkpoints)
    train_step = jaxpar.make_train_step(value_and_grad, optimizer)
    train_step = compiling.compile_step(config, train_step, abstract, jaxpar.abstract_batch(rows_of(start), mesh))
    if config.dry_run:
        return compiling.say_cost(config, train_step, mesh, schedule)

    watchers.append(run_report.watcher(config, train_step, abstract, mesh, schedule))
    checkpointing.overwrite(config, checkpoints)
    cli.write_config(config, mesh)
    state = jaxpar.init_state(*first) if begin.state is None else begin.state
    test_rows = whole_batch(test, mesh)
    kept = {"items_per_step": config.batch_size, "items": "digits", "first_step": start, "watchers": watchers}
    with (
        MetricsLog(config.out_dir, config.steps, **kept) as log,
        checkpointing.guard(
            config,
            checkpoints,
            log,
            config=decisive,
            samples=lambda step: samples_before(len(train["label"]), config.batch_size, step, begin.origin),
            remedy=f"Choose a smaller one than --learning-rate {config.learning_rate:g}.",
            draw=lambda: draw_course(config, mesh.shape["stage"], num_microbatches),
        ) as guard,
    ):
        for step in range(start, config.steps):
            state, metrics = train_step(state, jaxpar.shard_batch(rows_of(step), mesh))
            if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
                with log.pause(metrics), guard.phase("evaluation"):
                    test_loss, test_accuracy = jaxpar.fetch(evaluate(state.params, test_rows))
                metrics |= {"test_loss": test_loss, "test_accuracy": test_accuracy}
            log.log(step, metrics)
            guard.after_step(step + 1, state, metrics)

    for name, rows in (("learned from", whole_batch(train, mesh)), ("held out", test_rows)):
        row_loss, accuracy = jaxpar.fetch(evaluate(state.params, rows))
        cli.say(f"digits {name:>12}: loss {row_loss:.4f}, {accuracy:.1%} read right")
    read = jaxpar.fetch(jax.jit(predict)(state.params, test_rows))[: len(test["label"])]
    if jax.process_index() == 0:
        say_speed(config, start)
        draw(config, train, test, read, mesh.shape["stage"], num_microbatches)
    checkpointing.say_skipped(state)


def say_speed(config: Config, start: int) -> None:
    """Prints the median time of a step, if this run took any."""
    if median := run_report.median_seconds(config.out_dir, first_step=start):
        rate = config.batch_size / median
        cli.say(f"{config.steps - start} steps: {median * 1e3:.1f} ms each (median), {rate:,.0f} digits/s")


def draw(config: Config, train: Rows, test: Rows, read: np.ndarray, stages: int, num_microbatches: int) -> None:
    """Draws the losses, predictions, under- and overfitting, and the timeline of a pipeline."""
    draw_course(config, stages, num_microbatches)
    plots.plot_predictions(config.out_dir / "predictions.png", test["features"], test["label"], read)
    if config.sweep:
        sizes, rows = digits_sweep.sweep(train, test, config.width, config.hidden_layers, config.learning_rate)
        plots.plot_errors(config.out_dir / "errors.png", sizes, rows)
    pictures = "report.html, loss.png, predictions.png" + (", errors.png" if config.sweep else "")
    pictures += ", timeline.png" if stages > 1 else ""
    cli.say(f"written: {config.out_dir}/ with {pictures}, metrics.jsonl, config.json")


def draw_course(config: Config, stages: int, num_microbatches: int) -> None:
    """Draws the losses so far, and the timeline of a pipeline."""
    if jax.process_index() != 0:
        return
    if lines := read_metrics(config.out_dir / "metrics.jsonl"):
        plots.plot_loss(config.out_dir / "loss.png", lines)
    if stages > 1:
        names = dict.fromkeys(("gpipe", config.schedule, "zb-h1"))  # the bubble, and schedules that reduce it
        schedules = [make_schedule(name, stages, num_microbatches, form=lockstep_form(name)) for name in names]
        plot_timeline(schedules, config.out_dir / "timeline.png", timing="lockstep")


def predict(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the digit that the model predicts for each image."""
    return jnp.argmax(mlp.MODEL.apply(params, batch), axis=-1)


@jax.jit
def evaluate(params: dict, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss over rows and the share of them that the model reads right."""
    logits = mlp.MODEL.apply(params, batch)
    loss_sum, weight_sum = loss(logits, batch)
    right = jaxpar.losses.num_correct(logits, batch["label"], batch["weight"])
    return loss_sum / weight_sum, right / weight_sum


def whole_batch(rows: Rows, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Returns all rows as one batch, padded with rows of weight 0 to a multiple of the data axis."""
    return jaxpar.shard_batch(pad_rows(rows, round_up(len(rows["label"]), mesh.shape["data"])), mesh)


def read_digits(config: Config) -> tuple[Rows, Rows]:
    """Returns the images to learn from and those held out, with pixels from 0 to 1."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(f"the digits come with scikit-learn; got none. {install_extra('data')}.")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([config.seed, 1]).permutation(len(labels))
    num_test = round(config.test_fraction * len(labels)) if math.isfinite(config.test_fraction) else 0
    if not 0 < num_test < len(labels):
        raise ValueError(
            f"--test-fraction must leave digits to learn from and digits to test on; got {config.test_fraction:g}, which holds "
            f"out {num_test} of {len(labels)}. Choose one such as 0.2."
        )
    columns = {"features": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    train, test = (
        {name: column[part] for name, column in columns.items()} for part in (order[num_test:], order[:num_test])
    )
    return train, test


def check_model(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises where the model's flags are out of range, or do not fit the mesh."""
    tensor, stage, pairs = mesh.shape["tensor"], mesh.shape["stage"], config.hidden_layers // 2
    if config.hidden_layers < 2 or config.hidden_layers % 2:
        raise ValueError(
            f"--hidden-layers must be even, since they come in pairs; got {config.hidden_layers}. Choose 2, 4, 6 or 8."
        )
    if pairs % stage:
        raise ValueError(
            f"the pairs of hidden layers must be divisible by the stage axis; got --hidden-layers {config.hidden_layers}, "
            f"which are {pairs} pairs, --mesh.stage {stage}. Choose --hidden-layers {2 * round_up(pairs, stage)}."
        )
    if config.width < 1:
        raise ValueError(f"--width must be at least 1; got {config.width}. Choose such as 64.")
    if config.split == "data" and tensor > 1:
        raise ValueError(
            f"--split data leaves the tensor axis nothing to share out; got --mesh.tensor {tensor}, whose devices would all "
            f"do the same. Choose --mesh.tensor 1, or --split mixed."
        )
    if config.width % tensor:
        raise ValueError(
            f"--width must be divisible by the tensor axis; got --width {config.width}, --mesh.tensor {tensor}. "
            f"Choose --width {round_up(config.width, tensor)}."
        )
    if not 0 < config.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be positive; got {config.learning_rate:g}. Choose such as 0.001.")
    if config.eval_every < 1:
        raise ValueError(f"--eval-every must be at least 1; got {config.eval_every}. Choose such as 10.")


def check_pairs(config: Config, schedule: Schedule) -> None:
    """Raises unless each chunk of each stage has a pair of hidden layers."""
    pairs, chunks = config.hidden_layers // 2, schedule.num_virtual_stages
    if schedule.num_stages > 1 and pairs < chunks:
        raise ValueError(
            "each chunk of each stage must have a pair of hidden layers; got "
            f"--hidden-layers {config.hidden_layers}, which are {pairs} pairs, --mesh.stage {schedule.num_stages}, and "
            f"{schedule.num_chunks} chunks a stage by --schedule {config.schedule}. Choose --hidden-layers {2 * chunks}, or "
            "--schedule 1f1b."
        )


def numbers_depend_on(config: Config) -> dict[str, int | float]:
    """Returns the flags that a resumed run must share with the saved one. The mesh and the split are not among them."""
    names = ("seed", "hidden_layers", "width", "batch_size", "learning_rate", "test_fraction")
    return {name: getattr(config, name) for name in names}


if __name__ == "__main__":
    cli.run(main, Config)
