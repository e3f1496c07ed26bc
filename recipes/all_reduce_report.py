"""Ways to reduce gradients, compared with textbook formulas and with one another: as text, as a page, as pictures."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar import collectives
from jaxpar.inspect import inspect_step, line_bytes, link_bytes
from jaxpar.plot.figure import panels, running_mean
from jaxpar.report.data import versions
from jaxpar.report.page import write_page
from jaxpar.sharding import fetch

NUM_SERVERS = 4
STALE_ROWS = 128  # of each gradient of an asynchronous worker
SPEEDS = (
    1.0,
    1.0,
    1.2,
    4.0,
)  # seconds a gradient of the asynchronous workers, one of which is slow
COLORS = {
    "all-reduce": "#1f77b4",
    "ring": "#1b9e77",
    "ring, both ways": "#66c2a5",
    "1 server": "#c1121f",
    "4 servers": "#d95f02",
    "ZeRO-1": "#7570b3",
}
MEAN_OF = 20  # losses, of a smoothed curve
MARKS = dict(zip(COLORS, "osv^Dx", strict=True))
Figures = Mapping[str, Any]  # by name


def check_batch_size(batch_size: int, sizes: Sequence[int], num_rows: int) -> None:
    """Raises ValueError unless every number of devices, the flag --devices, divides --batch-size, and there are enough rows."""
    if min(sizes) < 2:
        raise ValueError(
            f"--devices must be numbers of 2 or more; got {sizes}. Choose such as 2 4 8."
        )
    for size in sizes:
        if batch_size % size:
            raise ValueError(
                f"--batch-size must be divisible by every number of devices; got {batch_size} and {size}. "
                f"{_divisible_batch(batch_size, sizes, num_rows)}"
            )
    if not 1 <= batch_size <= num_rows:
        raise ValueError(
            f"--batch-size must be from 1 to {num_rows}, the digits; got {batch_size}. "
            f"{_divisible_batch(batch_size, sizes, num_rows)}"
        )


def _divisible_batch(batch_size: int, sizes: Sequence[int], num_rows: int) -> str:
    """Returns the remedy: a batch size near the given one that every number of devices divides, if there are enough digits."""
    least = math.lcm(*sizes)
    if least > num_rows:
        return f"Compare fewer numbers of devices at once, such as --devices {min(max(sizes), 8)}."
    near = min(num_rows, max(batch_size, least))
    return f"Choose {near // least * least}."


def all_finite(*trees: PyTree) -> bool:
    """Returns whether all numbers of trees, such as params or losses, are finite."""
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(trees))


def measure(
    way: str,
    size: int,
    step: Callable,
    carry: tuple,
    batches: list,
    params_of: Callable[[tuple], dict],
    report_of: jax.stages.Compiled | None = None,
) -> dict[str, Any]:
    """Counts the bytes that a compiled step sends, then trains with it and times it.

    Returns:
        "way" and "devices"; the bytes in a step through the busiest "link" between two devices, in its busier direction, and
        through the busiest device's own "line", in and out together, in units of the gradients' bytes, as counted and by
        textbook formulas, "link_formula" and "line_formula"; the "seconds" of the fastest step; and the final "params".
    """
    links = link_bytes(inspect_step(report_of or step).collectives, size)
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        carry = jax.block_until_ready(step(*carry, batch))
        seconds.append(time.perf_counter() - began)
    params = fetch(params_of(carry))
    gradient_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    link, line = formula(way, size)
    return {
        "way": way,
        "devices": size,
        "link": max(links.values()) / gradient_bytes,
        "link_formula": link,
        "line": max(line_bytes(links).values()) / gradient_bytes,
        "line_formula": line,
        "seconds": min(seconds),
        "params": params,
    }


def beside_first(rows: Sequence[Figures]) -> list[dict[str, Any]]:
    """Returns the figures of ways on one number of devices with "apart" in place of "params".

    This is the largest difference from the params of the first way, in units of the largest value of their array.
    """
    apart = lambda a, b: float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
    first, found = rows[0]["params"], []
    for row in rows:
        figures = {name: value for name, value in row.items() if name != "params"}
        found.append(
            figures | {"apart": max(jax.tree.leaves(jax.tree.map(apart, row["params"], first)))}
        )
    return found


def stale_curve(
    mean_loss: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    train: Mapping[str, np.ndarray],
    bound: int | None,
    *,
    num_pushes: int,
    learning_rate: float,
    seed: int,
) -> dict[str, Any]:
    """Trains with one asynchronous parameter server.

    Args:
        mean_loss: ``mean_loss(params, batch)``.
        params: The params that the workers begin with.
        train: The rows to learn from.
        bound: The steps that a worker may be ahead of the slowest one; None: any number.
        num_pushes: Gradients that the server applies.
        learning_rate: Their factor, twice and over the number of workers.
        seed: Determines the rows of each gradient.

    Returns:
        "seconds" and "losses", a value for each gradient, and "mean", the mean staleness.
    """
    pushes = collectives.simulate_pushes(SPEEDS, num_pushes, bound=bound)
    data = {name: jnp.asarray(column) for name, column in train.items()}
    data["weight"] = jnp.ones(len(train["label"]))

    def gradient(params: PyTree, worker: jax.Array, clock: jax.Array) -> PyTree:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), worker), clock)
        own = jax.random.randint(key, (STALE_ROWS,), 0, len(train["label"]))
        return jax.grad(mean_loss)(params, {name: column[own] for name, column in data.items()})

    def apply(params: PyTree, grads: PyTree) -> PyTree:
        return jax.tree.map(
            lambda p, g: p - 2 * learning_rate / len(SPEEDS) * g, params, grads
        )  # no momentum

    watch = lambda params: mean_loss(params, data)
    run = jax.jit(
        lambda params: collectives.train_with_stale_gradients(
            gradient, apply, params, pushes, watch=watch
        )
    )
    _, losses = run(params)
    mean = float(np.mean([push.staleness for push in pushes]))
    return {"seconds": [push.seconds for push in pushes], "losses": losses.tolist(), "mean": mean}


def formula(way: str, size: int) -> tuple[float, float]:
    """Returns the bytes of the busiest link and line by textbook formulas, in units of the gradients' bytes."""
    ring = 2 * (size - 1) / size
    if way == "ring, both ways":
        return (
            ring if size == 2 else ring / 2
        ), 2 * ring  # two devices have one link for both directions
    if "server" not in way:
        return ring, 2 * ring
    num_servers = 1 if way == "1 server" else NUM_SERVERS
    # A server's line carries its own part from and to the others, and, as a worker, the other servers' parts.
    both = 2 * (size - 1) / num_servers + 2 * (num_servers - 1) / num_servers
    link = (2 if num_servers > 1 else 1) / num_servers
    return link, both


def describe(rows: Sequence[Figures], *, header: bool) -> list[str]:
    """Returns a table of the ways on one number of devices, compared with the formulas and with the parameters of the first."""
    head = f"{'':16} {'devices':>7}  {'busiest link':>24}  {'busiest line, both ways':>24}  {'a step':>8}  params"
    line = (
        "{way:16} {devices:>7}  {link:>8.3f} (book {link_formula:>6.3f})   {line:>10.3f} (book {line_formula:>6.3f})  "
        "{ms:>5.1f} ms  {apart:.0e} apart"
    )
    lines = [line.format(**row, ms=row["seconds"] * 1e3) for row in rows]
    return [head, *lines] if header else lines


def write_report(
    folder: Path, ways: Sequence[Figures], staleness: Mapping[str, Figures], *, settings: Figures
) -> None:
    """Writes report.html and the pictures of a comparison.

    Args:
        folder: The folder.
        ways: For each way on each number of devices what ``measure`` and ``beside_first`` return.
        staleness: What ``stale_curve`` returns, by the name of the bound.
        settings: The settings.
    """
    plot_traffic(folder / "traffic.png", ways)
    plot_staleness(folder / "staleness.png", staleness)
    facts = {
        "devices": ", ".join(map(str, sorted({row["devices"] for row in ways}))),
        "largest difference of parameters": f"{max(row['apart'] for row in ways):.0e}",
        "versions": versions(),
    }
    page = {
        "kind": "comparison",
        "name": folder.name,
        "facts": facts,
        "ways": ways,
        "staleness": staleness,
    }
    write_page(
        folder / "report.html",
        page | {"config": {name: str(value) for name, value in settings.items()}},
    )


def bound_name(bound: int | None) -> str:
    """Returns a bound as text."""
    return "no bound" if bound is None else f"bound {bound}"


def describe_stale(curves: Mapping[str, Figures]) -> list[str]:
    """Returns lines about the asynchronous parameter servers."""
    lines = [
        f"{len(SPEEDS)} workers, {', '.join(f'{s:g}' for s in SPEEDS)} s a gradient, and one server that does not wait:"
    ]
    for bound, run in curves.items():
        took = f"{len(run['losses'])} gradients in {run['seconds'][-1]:6.1f} s"
        lines.append(
            f"  {bound:9} {took}, mean staleness {run['mean']:.1f}: loss {run['losses'][-1]:.4f}"
        )
    return lines


def plot_traffic(path: Path, rows: Sequence[Figures]) -> None:
    """Draws the bytes through the busiest device's line, counted and by textbook formulas, and the time of a step."""
    figure, (lines, times) = _two_panels()
    for way in dict.fromkeys(row["way"] for row in rows):
        of_way, names = (
            [row for row in rows if row["way"] == way],
            ("devices", "line", "line_formula", "seconds"),
        )
        sizes, line, book, seconds = ([row[name] for row in of_way] for name in names)
        style = {"color": COLORS[way], "marker": MARKS[way], "label": way, "markersize": 7}
        lines.plot(sizes, line, linestyle="none", **style)
        lines.plot(sizes, book, color=COLORS[way], linewidth=1, alpha=0.6)
        times.plot(sizes, np.multiply(seconds, 1e3), linewidth=1, **style)
    lines.set(
        title="Through the busiest device's line, in and out together",
        xlabel="devices",
        ylim=(0, None),
    )
    lines.set(ylabel="times the bytes of the gradients, a step")
    lines.legend(
        title="marks: counted in the compiled program\nlines: by the book", loc="upper left"
    )
    times.set(
        title="Time of a step on fake devices of one machine", xlabel="devices", ylim=(0, None)
    )
    times.set(ylabel="ms (fastest)")
    for axes in (lines, times):
        axes.set_xticks(sorted({row["devices"] for row in rows}))
    figure.savefig(path, dpi=110)


def plot_staleness(path: Path, curves: Mapping[str, Figures]) -> None:
    """Draws the loss over gradients and over time, for each bound."""
    figure, (by_count, by_time) = _two_panels()
    for (name, run), color in zip(curves.items(), ("#1f77b4", "#1b9e77", "#c1121f"), strict=True):
        losses, also = np.array(run["losses"]), ": synchronous" if name == bound_name(0) else ""
        label = f"{name}{also}; {run['mean']:.1f} stale in the mean"
        for axes, x in ((by_count, np.arange(1, len(losses) + 1)), (by_time, run["seconds"])):
            axes.plot(x, losses, color=color, linewidth=1, alpha=0.4, label=label)
            mean = f"{name}; mean of the last {MEAN_OF} losses"
            axes.plot(x, running_mean(losses, MEAN_OF - 1), color=color, linewidth=2, label=mean)
    by_count.set(
        title="As many gradients",
        xlabel="gradients applied",
        ylabel="loss on all digits (nats, log scale)",
    )
    by_time.set(
        title="As much time: the synchronous ones wait for the slow worker",
        xlabel="simulated seconds",
    )
    for axes in (by_count, by_time):
        axes.set_yscale("log")
        axes.legend(loc="best")
    figure.savefig(path, dpi=110)


def _two_panels() -> tuple[Any, Any]:
    figure, axes = panels(1, 2, (13, 5.5))
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25)
    return figure, axes
