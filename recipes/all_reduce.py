"""Trains one digits model with gradients reduced by all-reduce, rings and parameter servers; counts traffic, times steps.

All ways, 2 to 8 devices:  python recipes/all_reduce.py

A few of them:             python recipes/all_reduce.py --devices 4 8 --steps 20

All synchronous ways end with the same parameters. They are float64, since sums in another order round differently, and one
ReLU input that rounds to the other side of zero would separate two runs for good. The ways differ in the bytes on each link,
which are counted in the compiled programs; an all-reduce is counted as a ring, since XLA does not state its algorithm. The
devices are fake, so the time is that of copies in memory. At the end, asynchronous parameter servers show the cost of stale
gradients and of waiting.
"""

if __name__ == "__main__":
    import first_line

    first_line.say()

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import all_reduce_plots as plots
import cli
import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import run_folder
import run_status
from all_reduce_report import NUM_SERVERS, SPEEDS, Curve, Measured, describe, formula, page_data, say_stale
from jax.sharding import PartitionSpec
from shared_flags import check_out_dir

import jaxpar
from jaxpar import collectives
from jaxpar.inspect import inspect_step, line_bytes, link_bytes
from jaxpar.models import mlp
from jaxpar.params import abstract_params, count_params, init_params
from jaxpar.report import write_page
from jaxpar.runtime.process_env import read_process_env

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
    """Returns the ways that are written by hand, each as an optimizer that reduces gradients."""
    base = optax.sgd(config.learning_rate, momentum=0.9)
    ring = partial(collectives.ring_all_reduce, mean=True)
    return {
        "all-reduce": collectives.distributed_optimizer(base),
        "ring": collectives.distributed_optimizer(base, reduce=ring),
        "ring, both ways": collectives.distributed_optimizer(base, reduce=partial(ring, bidirectional=True)),
        "1 server": collectives.server_optimizer(base, num_servers=1),
        f"{NUM_SERVERS} servers": collectives.server_optimizer(base, num_servers=min(NUM_SERVERS, size)),
    }


def main(config: Config) -> None:
    with cli.checks():
        plots.check_installed()
        check_out_dir(config.out_dir)
        run_folder.check_new(config.out_dir, overwrite=config.overwrite)
        sizes = numbers_of_devices(config)
        train, _ = digits.read_digits(digits.Config(seed=config.seed))
        check(config, sizes, len(train["label"]))
        table = mlp.param_table(
            digits.NUM_PIXELS, digits.NUM_CLASSES, width=config.width, num_hidden=config.hidden_layers
        )
        jax.config.update("jax_enable_x64", True)
    params = init_params(table, jax.random.key(config.seed), jnp.float64)
    batches = [whole_batch(config, train, step) for step in range(config.steps)]
    gradient_bytes = 8 * count_params(table)
    cli.say(f"{count_params(table):,} parameters, {gradient_bytes:,} bytes of gradients; SGD, {config.steps} steps\n")
    rows = []
    for size in sizes:
        with run_status.phase(f"training on {size} devices"):
            of_size = [by_hand(way, made, size, params, batches) for way, made in optimizers(config, size).items()]
            of_size.append(by_zero(config, size, table, batches))
        cli.say("\n".join(describe(of_size, gradient_bytes, header=not rows)))
        rows += of_size
    with run_status.phase("training with stale gradients"):
        curves = {bound: stale(config, bound, params, train) for bound in BOUNDS}
    if jax.process_index() == 0:
        if config.overwrite:
            run_folder.delete_run(config.out_dir)
        config.out_dir.mkdir(parents=True, exist_ok=True)
        plots.plot_traffic(config.out_dir / "traffic.png", rows, gradient_bytes, formula)
        plots.plot_staleness(config.out_dir / "staleness.png", curves)
        write_page(config.out_dir / "report.html", page_data(config, rows, gradient_bytes, curves))
    say_stale(curves)
    cli.say(f"written: {config.out_dir}/ with report.html, traffic.png, staleness.png")


def whole_batch(config: Config, train: dict, step: int) -> dict[str, np.ndarray]:
    """Returns the rows of a step without padding: the mean of the devices' means is that of all rows only for equal numbers."""
    rows = np.random.default_rng([config.seed, step]).permutation(len(train["label"]))[: config.batch_size]
    return {name: column[rows] for name, column in train.items()} | {"weight": np.ones(len(rows))}


def mean_loss(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    loss_sum, weight_sum = digits.loss(mlp.MODEL.apply(params, batch), batch)
    return loss_sum / weight_sum


def by_hand(way: str, optimizer: optax.GradientTransformation, size: int, params: dict, batches: list) -> Measured:
    """Trains inside ``shard_map``: each device computes the gradient of its rows, and the optimizer reduces them."""
    mesh = jaxpar.make_mesh(data=size)
    whole, cut = PartitionSpec(), PartitionSpec("data")
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    stacked = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

    def step(params: dict, state: Any, batch: dict) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(mean_loss)(params, batch), first(state), params)
        return optax.apply_updates(params, updates), stacked(state)

    on_shards = partial(jax.shard_map, mesh=mesh, check_vma=False)
    params = jaxpar.shard(params, jax.sharding.NamedSharding(mesh, whole))
    state = jax.jit(on_shards(lambda p: stacked(optimizer.init(p)), in_specs=whole, out_specs=cut))(params)
    placed = [jaxpar.shard_batch(batch, mesh) for batch in batches]
    jitted = jax.jit(on_shards(step, in_specs=(whole, cut, cut), out_specs=(whole, cut)))
    compiled = jitted.lower(params, state, placed[0]).compile()
    return measure(way, size, compiled, (params, state), placed, lambda carry: carry[0])


def by_zero(config: Config, size: int, table: dict, batches: list) -> Measured:
    """Trains with ZeRO-1: the optimizer's state is sharded over the devices, as if each were a server for its shard."""
    mesh = jaxpar.make_mesh(data=size)
    shardings = jaxpar.shardings_from_paths(abstract_params(table), mesh, {"**": jaxpar.replicated()})
    optimizer = optax.sgd(config.learning_rate, momentum=0.9)
    init = lambda key: init_params(table, key, jnp.float64)
    state = jaxpar.init_state(init, jax.random.key(config.seed), optimizer, mesh, shardings, zero=1)
    step = jaxpar.make_train_step(jaxpar.value_and_grad(mlp.MODEL, digits.loss, mesh, zero=1), optimizer)
    placed = [jaxpar.shard_batch(batch, mesh) for batch in batches]
    compiled = step.lower(state, placed[0]).compile()
    once = lambda state, batch: (compiled(state, batch)[0],)
    return measure(ZERO, size, once, (state,), placed, lambda carry: carry[0].params, report_of=compiled)


def measure(
    way: str,
    size: int,
    step: Callable,
    carry: tuple,
    batches: list,
    params_of: Callable[[tuple], dict],
    report_of: jax.stages.Compiled | None = None,
) -> Measured:
    """Counts the bytes that a compiled step sends, then trains with it and times it."""
    links = link_bytes(inspect_step(report_of or step).collectives, size)
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        carry = jax.block_until_ready(step(*carry, batch))
        seconds.append(time.perf_counter() - began)
    busiest = max(links.values()), max(line_bytes(links).values())
    return Measured(way, size, *busiest, min(seconds), jaxpar.fetch(params_of(carry)))


def stale(config: Config, bound: int | None, params: dict, train: dict) -> Curve:
    """Trains with one asynchronous parameter server; returns seconds, losses and the mean staleness."""
    pushes = collectives.simulate_pushes(SPEEDS, config.pushes, bound=bound)
    num_workers, rows = len(SPEEDS), 128
    data = {name: jnp.asarray(column) for name, column in train.items()}
    data["weight"] = jnp.ones(len(train["label"]))

    def gradient(params: dict, worker: jax.Array, clock: jax.Array) -> dict:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), worker), clock)
        own = jax.random.randint(key, (rows,), 0, len(train["label"]))
        return jax.grad(mean_loss)(params, {name: column[own] for name, column in data.items()})

    def apply(params: dict, grads: dict) -> dict:
        return jax.tree.map(lambda p, g: p - 2 * config.learning_rate / num_workers * g, params, grads)  # no momentum

    run = jax.jit(
        lambda params: collectives.train_with_stale_gradients(
            gradient, apply, params, pushes, watch=lambda params: mean_loss(params, data)
        )
    )
    _, losses = run(params)
    return np.array([p.seconds for p in pushes]), np.asarray(losses), float(np.mean([p.staleness for p in pushes]))


def numbers_of_devices(config: Config) -> tuple[int, ...]:
    """Returns the numbers of devices to compare: fake ones of this process, or all devices of several processes."""
    if read_process_env(os.environ) is None:
        sizes = config.devices or tuple(range(2, 9))
        jaxpar.use_fake_devices(max(*sizes, 1))
        return sizes
    cli.join_run()
    whole = (jax.device_count(),)
    if config.devices not in ((), whole):
        raise ValueError(
            f"several processes compare on all their devices; got --devices {' '.join(map(str, config.devices))}, a run of "
            f"{whole[0]}. Leave --devices out, or start it without a launcher."
        )
    return whole


def check(config: Config, sizes: tuple[int, ...], num_rows: int) -> None:
    """Raises where a flag is out of range."""
    for name, least in (("steps", 1), ("pushes", 1), ("hidden_layers", 2), ("width", 1)):
        if getattr(config, name) < least:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least {least}; got {getattr(config, name)}. Choose {least} or more."
            )
    if min(sizes) < 2:
        raise ValueError(f"--devices must be numbers of 2 or more; got {sizes}. Choose such as 2 4 8.")
    for size in sizes:
        if config.batch_size % size:
            raise ValueError(
                f"--batch-size must be divisible by every number of devices; got {config.batch_size} and {size}. "
                f"{divisible_batch(sizes, num_rows)}"
            )
    if not 1 <= config.batch_size <= num_rows:
        raise ValueError(
            f"--batch-size must be from 1 to {num_rows}, the digits; got {config.batch_size}. "
            f"{divisible_batch(sizes, num_rows)}"
        )


def divisible_batch(sizes: tuple[int, ...], num_rows: int) -> str:
    """Returns the remedy: a batch size that every number of devices divides, if there are enough digits."""
    least = math.lcm(*sizes)
    if least > num_rows:
        return f"Compare fewer numbers of devices at once, such as --devices {min(max(sizes), 8)}."
    return f"Choose {min(num_rows, max(840, least)) // least * least}."


if __name__ == "__main__":
    cli.run(main, Config)
