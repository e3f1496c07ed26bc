"""Trains a multilayer perceptron of 8 hidden layers to read handwritten digits: 1,797 real images of 8x8 pixels.

    One device:                python recipes/digits.py
    Data parallel:             python recipes/digits.py --fake-devices 8 --mesh.data 8 --split data
    Column-row tensor split:   python recipes/digits.py --fake-devices 8 --mesh.data 4 --mesh.tensor 2
    All by column, or by row:  python recipes/digits.py --fake-devices 2 --mesh.tensor 2 --split column
    In a pipeline:             python recipes/digits.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2

The results are those of one device, for every mesh and split.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tyro.conf import OmitArgPrefixes, arg

import digits_report as report
import jaxpar
from digits_sweep import sweep
from jaxpar.commands import recipe
from jaxpar.data.batches import Columns, pad_rows, round_up
from jaxpar.data.digits import NUM_CLASSES, NUM_PIXELS, Rows, read_digits
from jaxpar.fields import check_at_least, check_positive
from jaxpar.mesh import num_replicas, sizes_text
from jaxpar.models import mlp
from jaxpar.params import abstract_params, count_params, init_params
from jaxpar.pipeline import masks_idle_ops
from jaxpar.plot.figure import check_matplotlib
from jaxpar.run import Run, checks, make_mesh, say
from jaxpar.run.batches import Batches, check_microbatches, check_no_sequences
from jaxpar.run.early_stop import check_best_is_saved
from jaxpar.run.flags import BasicFlags, CommonFlags, OwnFlags
from jaxpar.run.messages import say_written
from jaxpar.schedule import Schedule, lockstep_form, make_schedule

COLUMN, ROW, WHOLE = jaxpar.column_parallel(), jaxpar.row_parallel(), jaxpar.replicated()
COLUMN_BIAS = jaxpar.column_parallel(ndim=1)
OUTER = {"outer/*": WHOLE}

# Each --split is no more than one of these tables. A pair of hidden layers is w_up [in, out] and then w_down [in, out].
SPLITS = {
    "data": {"layers/*": WHOLE, **OUTER},
    "column": {"layers/w_*": COLUMN, "layers/b_*": COLUMN_BIAS, **OUTER},
    "row": {"layers/w_*": ROW, "layers/b_*": WHOLE, **OUTER},
    "mixed": {
        "layers/w_up": COLUMN,
        "layers/b_up": COLUMN_BIAS,
        "layers/w_down": ROW,
        "layers/b_down": WHOLE,
        **OUTER,
    },
}


@dataclass(frozen=True, kw_only=True)
class Common(CommonFlags):
    out_dir: Path = Path("runs/digits")
    """Folder for config.json, metrics.jsonl, plots and checkpoints."""
    batch_size: int = 128
    """Digits of a step."""
    learning_rate: Annotated[float, arg(aliases=("--lr",))] = 1e-3
    """Learning rate of Adam."""


@dataclass(frozen=True, kw_only=True)
class Recipe(OwnFlags):
    split: Literal["data", "column", "row", "mixed"] = "mixed"
    """Hidden layers over the tensor axis. data: whole; column: by outputs; row: by inputs; mixed: in turn, half the traffic."""
    hidden_layers: int = 8
    """Hidden layers, an even number: a pipeline splits them over its stages in pairs."""
    width: int = 64
    """Units of a hidden layer."""
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


@dataclass(frozen=True, kw_only=True)
class Config(BasicFlags):
    common: OmitArgPrefixes[Common] = Common()
    recipe: OmitArgPrefixes[Recipe] = Recipe()


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["label"], batch["weight"])


def main(config: Config) -> None:
    with checks():
        check_matplotlib()
        mesh, common, own = make_mesh(config), config.common, config.recipe
        train, test = read_digits(common.seed, own.test_fraction)
        check_model(config, mesh)
        check_no_sequences(mesh)
        rows, schedule = Columns(train), make_pipeline(config, len(train["label"]), mesh)
        table = mlp.param_table(
            NUM_PIXELS, NUM_CLASSES, width=own.width, num_hidden=own.hidden_layers
        )
        shardings = jaxpar.shardings_from_paths(abstract_params(table), mesh, SPLITS[own.split])
        optimizer, count = optax.adam(common.learning_rate), schedule.num_microbatches
        parallel, pipeline = (
            jaxpar.Parallel(mesh, shardings),
            jaxpar.Pipeline(schedule, num_microbatches=count),
        )
        value_and_grad = jaxpar.value_and_grad(mlp.MODEL, loss, parallel, pipeline)
        draw_course = lambda: report.plot_course(common.out_dir, schedule, own.schedule)
        run = Run(
            config,
            mesh,
            config.values(
                "seed", "hidden_layers", "width", "batch_size", "learning_rate", "test_fraction"
            ),
            items="digits",
            items_per_step=common.batch_size,
            schedule=schedule,
            learning_rate=common.learning_rate,
            samples=lambda step: rows.samples_before(common.batch_size, step, run.origin),
            remedy=f"Choose a smaller one than --learning-rate {common.learning_rate:g}.",
            draw=draw_course,
        )
        run.restore(
            lambda key: init_params(table, key), jax.random.key(common.seed), optimizer, parallel
        )
    say(f"{len(train['label'])} digits to learn from, {len(test['label'])} held out")
    say(
        f"{own.hidden_layers} hidden layers of {own.width} units, {count_params(table):,} parameters; split {own.split} over "
        + sizes_text(mesh.shape)
    )

    batch_of = Batches(run, rows, common.batch_size, count)

    def whole_batch(
        rows: Rows,
    ) -> dict[str, jax.Array]:  # with rows of weight 0, a multiple of the data axis
        return jaxpar.shard_batch(
            pad_rows(rows, round_up(len(rows["label"]), num_replicas(mesh))), mesh
        )

    with run:
        train_step = jaxpar.make_train_step(value_and_grad, optimizer)
        train_step = run.compile(train_step, batch_of.abstract())
        if run.is_dry:
            return run.say_cost()
        state, test_rows = run.begin(), whole_batch(test)
        for step in run.steps():
            state, metrics = train_step(state, batch_of(step))
            if run.is_due(step, own.eval_every):
                with run.evaluation(metrics):
                    test_loss, test_accuracy = jaxpar.fetch(evaluate(state.params, test_rows))
                metrics |= {"test_loss": test_loss, "test_accuracy": test_accuracy}
            run.log(step, state, metrics)

        for name, each in (("learned from", whole_batch(train)), ("held out", test_rows)):
            row_loss, accuracy = jaxpar.fetch(evaluate(state.params, each))
            say(f"digits {name:>12}: loss {row_loss:.4f}, {accuracy:.1%} read right")
        read = jaxpar.fetch(jax.jit(predict)(state.params, test_rows))[: len(test["label"])]
        run.say_pace()
        draw_course()
        if jax.process_index() == 0:
            draw(config, run, train, test, read)
        run.say_skipped(state)


def draw(config: Config, run: Run, train: Rows, test: Rows, read: np.ndarray) -> None:
    """Draws predictions, under- and overfitting."""
    own = config.recipe
    report.plot_predictions(run.out_dir / "predictions.png", test["features"], test["label"], read)
    if own.sweep:
        sizes, rows = sweep(train, test, own.width, own.hidden_layers, config.common.learning_rate)
        report.plot_errors(run.out_dir / "errors.png", sizes, rows)
    pictures = ["loss.png", "predictions.png"]
    pictures += ["errors.png"] if own.sweep else []
    pictures += ["timeline.png"] if run.mesh.shape["stage"] > 1 else []
    say_written(run.out_dir, "report.html", *pictures, "metrics.jsonl", "config.json")


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


def check_model(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises where the model's flags are out of range, or do not fit the mesh."""
    own, tensor = config.recipe, mesh.shape["tensor"]
    _check_sizes(own, stage=mesh.shape["stage"], tensor=tensor)
    if own.split == "data" and tensor > 1:
        raise ValueError(
            f"--split data leaves the tensor axis nothing to share out; got --mesh.tensor {tensor}, whose devices would all "
            f"do the same. Choose --mesh.tensor 1, or --split mixed."
        )
    check_settings(config)


def check_settings(config: Config) -> None:
    """Raises where a flag is out of range, as far as neither data nor devices are needed to tell."""
    every = config.recipe.eval_every
    check_positive("Choose such as 0.001.", learning_rate=config.common.learning_rate)
    check_at_least(1, "Choose such as 10.", eval_every=every)
    check_best_is_saved(config, every, ("test_loss", "test_accuracy"))
    sizes = config.mesh
    if sizes.stage > 0 and sizes.tensor > 0:
        _check_sizes(config.recipe, stage=sizes.stage, tensor=sizes.tensor)


def _check_sizes(own: Recipe, *, stage: int, tensor: int) -> None:
    mlp.check_sizes(own.hidden_layers, own.width, stage=stage, tensor=tensor)
    chunks = make_schedule(own.schedule, stage, 1).num_virtual_stages
    pairs = own.hidden_layers // 2
    if stage > 1 and pairs < chunks:
        raise ValueError(
            "each chunk of each stage must have a pair of hidden layers; got "
            f"--hidden-layers {own.hidden_layers}, which are {pairs} pairs, --mesh.stage {stage}, and {chunks // stage} chunks "
            f"a stage by --schedule {own.schedule}. Choose --hidden-layers {2 * chunks}, or --schedule 1f1b."
        )


def make_pipeline(config: Config, num_rows: int, mesh: jax.sharding.Mesh) -> Schedule:
    """Returns the pipeline's schedule; raises unless each microbatch of each replica has rows."""
    own = config.recipe
    count = check_microbatches(config, own.num_microbatches, num_rows, mesh, unit="digit")
    form = lockstep_form(own.schedule, masks=masks_idle_ops(mesh, own.schedule))
    return make_schedule(own.schedule, mesh.shape["stage"], count, form=form)


if __name__ == "__main__":
    recipe.run(main, Config)
