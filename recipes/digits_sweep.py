"""Under- and overfitting of perceptrons: models and training sets of several sizes, each trained from its initial values.

All trainings are calls of one program, compiled once, on one device. A smaller model is the largest one with its missing
units at zero: their gradients are zero too, so they stay zero. A smaller training set is the first rows of the complete one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxpar.losses import softmax_cross_entropy
from jaxpar.models import mlp
from jaxpar.params import count_params, init_params

NUM_STEPS, BATCH_SIZE, NUM_RUNS = 300, 128, 3
FEW_ROWS = 200  # for models of several sizes: with all rows there is little overfitting
ROWS = (20, 50, 100, 200, 500)

Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Errors:
    """The shares of digits read wrong by models that differ in one setting.

    Attributes:
        sizes: The values of that setting: units of a hidden layer, or digits to learn from.
        num_params: Parameters of each model.
        num_rows: Digits that each model learned from.
        train: ``[sizes, runs]``: shares of the digits that a model learned from.
        test: ``[sizes, runs]``: shares of the digits held out.
    """

    sizes: tuple[int, ...]
    num_params: tuple[int, ...]
    num_rows: tuple[int, ...]
    train: np.ndarray
    test: np.ndarray


def sweep(
    train: Rows, test: Rows, width: int, num_hidden: int, learning_rate: float
) -> tuple[Errors, Errors]:
    """Returns the errors by size of the model, and by size of the training set.

    Args:
        train: Digits to learn from.
        test: Digits held out.
        width: Units of a hidden layer of the largest model, which is also trained on every training set.
        num_hidden: Hidden layers.
        learning_rate: Learning rate of Adam.
    """
    run = make_run(train, test, width, num_hidden, learning_rate)
    num_all = len(train["label"])
    few = min(FEW_ROWS, num_all)
    widths = sorted({max(1, width >> k) for k in range(6)})
    counts = [n for n in ROWS if n < num_all] + [num_all]

    def errors(sizes: list[int], widths: list[int], counts: list[int]) -> Errors:
        of_train, of_test, num_params = [], [], []
        for units, rows in zip(widths, counts, strict=True):
            wrong, wrong_of_test = run(units, rows)
            of_train.append(wrong)
            of_test.append(wrong_of_test)
            table = mlp.param_table(64, 10, width=units, num_hidden=num_hidden)
            num_params.append(count_params(table))
        return Errors(
            tuple(sizes),
            tuple(num_params),
            tuple(counts),
            np.array(of_train),
            np.array(of_test),
        )

    by_width = errors(widths, widths, [few] * len(widths))
    by_count = errors(counts, [width] * len(counts), counts)
    return by_width, by_count


def make_run(
    train: Rows, test: Rows, width: int, num_hidden: int, learning_rate: float
) -> Callable[[int, int], tuple[Array, Array]]:
    """Returns a function ``(num_units, num_rows) -> (training errors, test errors)``, with one error of each for each run."""
    optimizer = optax.adam(learning_rate)
    table = mlp.param_table(train["features"].shape[1], 10, width=width, num_hidden=num_hidden)

    def mean_loss(params: dict, batch: dict[str, Array]) -> Array:
        logits = mlp.MODEL.apply(params, batch)
        loss_sum, weight_sum = softmax_cross_entropy(logits, batch["label"])
        return loss_sum / weight_sum

    def is_wrong(params: dict, rows: Rows) -> Array:
        logits = mlp.MODEL.apply(params, rows)
        return jnp.argmax(logits, -1) != rows["label"]

    def one_run(num_units: Array, num_rows: Array, seed: Array) -> tuple[Array, Array]:
        first = init_params(table, jax.random.key(seed))
        first = narrowed(first, num_units)

        def step(state: tuple, key: Array) -> tuple[tuple, None]:
            params, opt_state = state
            rows = jax.random.randint(key, (BATCH_SIZE,), 0, num_rows)
            batch = {name: jnp.asarray(column)[rows] for name, column in train.items()}
            grads = jax.grad(mean_loss)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), None

        keys = jax.random.split(jax.random.key(seed + NUM_RUNS), NUM_STEPS)
        start = first, optimizer.init(first)
        (params, _), _ = jax.lax.scan(step, start, keys)
        of_train, of_test = is_wrong(params, train), is_wrong(params, test)
        is_learned = jnp.arange(len(of_train)) < num_rows
        return jnp.sum(of_train & is_learned) / num_rows, jnp.mean(of_test)

    runs = jax.jit(jax.vmap(one_run, (None, None, 0)))
    seeds = jnp.arange(NUM_RUNS)
    return lambda num_units, num_rows: jax.device_get(runs(num_units, num_rows, seeds))


def narrowed(params: dict, num_units: Array) -> dict:
    """Returns initial params of a model with ``num_units`` in a hidden layer, scaled as its own initializers would."""
    outer, layers = params["outer"], params["layers"]
    width = outer["w_in"].shape[1]
    kept = (jnp.arange(width) < num_units).astype(jnp.float32)
    # Initializers divide by the square root of the number of inputs of a unit.
    scale = jnp.sqrt(width / num_units)
    both = kept[None, :, None] * kept[None, None, :] * scale
    outer = outer | {
        "w_in": outer["w_in"] * kept[None],
        "w_out": outer["w_out"] * kept[:, None] * scale,
    }
    layers = layers | {
        "w_up": layers["w_up"] * both,
        "w_down": layers["w_down"] * both,
    }
    return {"outer": outer, "layers": layers}
