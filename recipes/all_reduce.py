"""Trains one digits model with gradients reduced by all-reduce, rings and parameter servers; counts traffic, times steps.

    All ways, 2 to 8 devices:  python recipes/all_reduce.py
    A few of them:             python recipes/all_reduce.py --devices 4 8 --steps 20

All synchronous ways end with the same parameters. They are float64, since sums in another order round differently, and one
ReLU input that rounds to the other side of zero would separate two runs for good. The ways differ in the bytes on each link,
which are counted in the compiled programs; an all-reduce is counted as a ring, since XLA does not state its algorithm. The
devices are fake, so the time is that of copies in memory. At the end, asynchronous parameter servers show the cost of stale
gradients and of waiting.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import all_reduce_report as report
import jaxpar
from all_reduce_report import NUM_SERVERS
from jaxpar import collectives
from jaxpar.commands import recipe
from jaxpar.data.digits import NUM_CLASSES, NUM_PIXELS, read_digits
from jaxpar.fields import check_at_least, check_positive
from jaxpar.models import mlp
from jaxpar.params import abstract_params, count_params, init_params
from jaxpar.plot.figure import check_matplotlib
from jaxpar.run import checks, folder, phase, say
from jaxpar.run.flags import check_seed
from jaxpar.run.messages import say_written, stop
from jaxpar.runtime.exit_codes import ExitCode

ZERO = "ZeRO-1"
BOUNDS = (0, 4, None)


@dataclass(frozen=True, kw_only=True)
class Config:
    devices: tuple[int, ...] = ()
    """Numbers of fake devices to train on, one after another. By default 2 to 8; several processes use all their devices."""
    steps: int = 30
    """Training steps of each run."""
    batch_size: int = 840
    """Digits of a step; every number of devices must divide it."""
    hidden_layers: int = 8
    """Hidden layers, an even number."""
    width: int = 64
    """Units of a hidden layer."""
    learning_rate: float = 0.02
    """Learning rate of SGD with a momentum of 0.9."""
    pushes: int = 800
    """Gradients that an asynchronous parameter server applies."""
    seed: int = 0
    """Seed of the initial parameters and of the order of rows."""
    out_dir: Path = Path("runs/all_reduce")
    """Folder for report.html, traffic.png and staleness.png."""
    overwrite: bool = False
    """Delete an earlier run in --out-dir at the end; without it, a folder with results of another run is refused."""


def optimizers(config: Config, size: int) -> dict[str, optax.GradientTransformation]:
    """Returns the ways that are written by hand, each as an optimizer that reduces gradients, for a number of devices.

    Servers are devices: several of them are no way on fewer devices.
    """
    base = optax.sgd(config.learning_rate, momentum=0.9)
    ring = partial(collectives.ring_all_reduce, mean=True)
    several = {
        f"{NUM_SERVERS} servers": collectives.server_optimizer(base, num_servers=NUM_SERVERS)
    }
    return {
        "all-reduce": collectives.distributed_optimizer(base),
        "ring": collectives.distributed_optimizer(base, reduce=ring),
        "ring, both ways": collectives.distributed_optimizer(
            base, reduce=partial(ring, bidirectional=True)
        ),
        "1 server": collectives.server_optimizer(base, num_servers=1),
        **(several if size >= NUM_SERVERS else {}),
    }


def main(config: Config) -> None:
    with checks():
        check_matplotlib()
        folder.check_new(config.out_dir, overwrite=config.overwrite)
        check_at_least(1, steps=config.steps, pushes=config.pushes)
        check_positive("Choose such as 0.02.", learning_rate=config.learning_rate)
        check_seed(config.seed)
        mlp.check_sizes(config.hidden_layers, config.width, stage=1, tensor=1)
        sizes = recipe.numbers_of_devices(config.devices, usual=range(2, 9))
        train, _ = read_digits(config.seed)
        report.check_batch_size(config.batch_size, sizes, len(train["label"]))
        table = mlp.param_table(
            NUM_PIXELS, NUM_CLASSES, width=config.width, num_hidden=config.hidden_layers
        )
        jax.config.update("jax_enable_x64", True)
    params = init_params(table, jax.random.key(config.seed), jnp.float64)
    batches = [whole_batch(config, train, step) for step in range(config.steps)]
    count = count_params(table)
    say(f"{count:,} parameters, {8 * count:,} bytes of gradients; SGD, {config.steps} steps\n")
    rows = []
    for size in sizes:
        with phase(f"training on {size} devices"):
            of_size = [
                by_hand(way, made, size, params, batches)
                for way, made in optimizers(config, size).items()
            ]
            of_size.append(by_zero(config, size, table, batches))
        check_finite(config, [row["params"] for row in of_size])
        of_size = report.beside_first(of_size)
        say("\n".join(report.describe(of_size, header=not rows)))
        rows += of_size
    with phase("training with stale gradients"):
        given = {
            "num_pushes": config.pushes,
            "learning_rate": config.learning_rate,
            "seed": config.seed,
        }
        stale = partial(report.stale_curve, mean_loss, params, train, **given)
        curves = {report.bound_name(bound): stale(bound) for bound in BOUNDS}
    check_finite(config, [run["losses"] for run in curves.values()])
    if jax.process_index() == 0:
        folder.make_new(config.out_dir, overwrite=config.overwrite)
        report.write_report(config.out_dir, rows, curves, settings=dataclasses.asdict(config))
    say("\n" + "\n".join(report.describe_stale(curves)))
    say_written(config.out_dir, "report.html", "traffic.png", "staleness.png")


def check_finite(config: Config, found: Any) -> None:
    """Ends the program where params or losses are not finite: there is nothing left to compare."""
    if not report.all_finite(found):
        stop(
            ExitCode.NOT_FINITE,
            "params and losses must stay finite, else there is nothing to compare; got some that are not. Choose a smaller "
            f"one than --learning-rate {config.learning_rate:g}.",
        )


def whole_batch(config: Config, train: dict, step: int) -> dict[str, np.ndarray]:
    """Returns the rows of a step without padding: the mean of the devices' means is that of all rows only for equal numbers."""
    rows = np.random.default_rng([config.seed, step]).permutation(len(train["label"]))[
        : config.batch_size
    ]
    return {name: column[rows] for name, column in train.items()} | {"weight": np.ones(len(rows))}


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["label"], batch["weight"])


def mean_loss(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    loss_sum, weight_sum = loss(mlp.MODEL.apply(params, batch), batch)
    return loss_sum / weight_sum


def by_hand(
    way: str, optimizer: optax.GradientTransformation, size: int, params: dict, batches: list
) -> dict[str, Any]:
    """Trains inside ``shard_map``: each device computes the gradient of its rows, and the optimizer reduces them."""
    mesh = jaxpar.make_mesh(data=size, devices=jax.devices()[:size])
    whole, cut = PartitionSpec(), PartitionSpec("data")
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    stacked = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

    def step(params: dict, state: Any, batch: dict) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(mean_loss)(params, batch), first(state), params)
        return optax.apply_updates(params, updates), stacked(state)

    on_shards = partial(jax.shard_map, mesh=mesh, check_vma=False)
    params = jaxpar.shard(params, jax.sharding.NamedSharding(mesh, whole))
    state = jax.jit(on_shards(lambda p: stacked(optimizer.init(p)), in_specs=whole, out_specs=cut))(
        params
    )
    placed = [jaxpar.shard_batch(batch, mesh) for batch in batches]
    jitted = jax.jit(on_shards(step, in_specs=(whole, cut, cut), out_specs=(whole, cut)))
    compiled = jitted.lower(params, state, placed[0]).compile()
    return report.measure(way, size, compiled, (params, state), placed, lambda carry: carry[0])


def by_zero(config: Config, size: int, table: dict, batches: list) -> dict[str, Any]:
    """Trains with ZeRO-1: the optimizer's state is sharded over the devices, as if each were a server for its shard."""
    mesh = jaxpar.make_mesh(data=size, devices=jax.devices()[:size])
    shardings = jaxpar.shardings_from_paths(
        abstract_params(table), mesh, {"**": jaxpar.replicated()}
    )
    optimizer = optax.sgd(config.learning_rate, momentum=0.9)
    init = lambda key: init_params(table, key, jnp.float64)
    state = jaxpar.init_state(init, jax.random.key(config.seed), optimizer, mesh, shardings, zero=1)
    step = jaxpar.make_train_step(jaxpar.value_and_grad(mlp.MODEL, loss, mesh, zero=1), optimizer)
    placed = [jaxpar.shard_batch(batch, mesh) for batch in batches]
    compiled = step.lower(state, placed[0]).compile()
    once = lambda state, batch: (compiled(state, batch)[0],)
    return report.measure(
        ZERO, size, once, (state,), placed, lambda carry: carry[0].params, report_of=compiled
    )


if __name__ == "__main__":
    recipe.run(main, Config)
