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
    widths = tuple(sorted({max(1, width >> k) for k in range(6)}))
    few = min(FEW_ROWS, num_all)
    counts = (*(n for n in ROWS if n < num_all), num_all)

    def errors(sizes: tuple[int, ...], runs: list[tuple[int, int]]) -> Errors:
        of_train, of_test = np.array([run(*each) for each in runs]).swapaxes(0, 1)
        params = [
            count_params(mlp.param_table(64, 10, width=w, num_hidden=num_hidden)) for w, _ in runs
        ]
        return Errors(sizes, tuple(params), tuple(n for _, n in runs), of_train, of_test)

    return errors(widths, [(w, few) for w in widths]), errors(counts, [(width, n) for n in counts])


def make_run(
    train: Rows, test: Rows, width: int, num_hidden: int, learning_rate: float
) -> Callable[[int, int], tuple[jax.Array, jax.Array]]:
    """Returns a function ``(num_units, num_rows) -> (training errors, test errors)``, with one error of each for each run."""
    optimizer = optax.adam(learning_rate)
    table = mlp.param_table(train["features"].shape[1], 10, width=width, num_hidden=num_hidden)

    def mean_loss(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
        loss_sum, weight_sum = softmax_cross_entropy(mlp.MODEL.apply(params, batch), batch["label"])
        return loss_sum / weight_sum

    def one_run(
        num_units: jax.Array, num_rows: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        first = narrowed(init_params(table, jax.random.key(seed)), num_units)

        def step(state: tuple, key: jax.Array) -> tuple[tuple, None]:
            params, opt_state = state
            rows = jax.random.randint(key, (BATCH_SIZE,), 0, num_rows)
            grads = jax.grad(mean_loss)(
                params, {name: jnp.asarray(column)[rows] for name, column in train.items()}
            )
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        keys = jax.random.split(jax.random.key(seed + NUM_RUNS), NUM_STEPS)
        (params, _), _ = jax.lax.scan(step, (first, optimizer.init(first)), keys)
        of_train, of_test = (
            jnp.argmax(mlp.MODEL.apply(params, r), -1) != r["label"] for r in (train, test)
        )
        return jnp.sum(of_train & (jnp.arange(len(of_train)) < num_rows)) / num_rows, jnp.mean(
            of_test
        )

    runs = jax.jit(jax.vmap(one_run, (None, None, 0)))
    return lambda num_units, num_rows: jax.device_get(
        runs(num_units, num_rows, jnp.arange(NUM_RUNS))
    )


def narrowed(params: dict, num_units: jax.Array) -> dict:
    """Returns initial params of a model with ``num_units`` in a hidden layer, scaled as its own initializers would."""
    width = params["outer"]["w_in"].shape[1]
    kept = (jnp.arange(width) < num_units).astype(jnp.float32)
    scale = jnp.sqrt(
        width / num_units
    )  # initializers divide by the square root of the number of inputs of a unit
    outer, layers = params["outer"], params["layers"]
    both = kept[None, :, None] * kept[None, None, :] * scale
    return {
        "outer": outer
        | {"w_in": outer["w_in"] * kept[None], "w_out": outer["w_out"] * kept[:, None] * scale},
        "layers": layers | {"w_up": layers["w_up"] * both, "w_down": layers["w_down"] * both},
    }
