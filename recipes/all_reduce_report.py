"""The output of all_reduce.py: the ways compared with textbook formulas and with one another, as text and as a page."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import cli
import jax
import numpy as np

from jaxpar.report import ways_data

NUM_SERVERS = 4
SPEEDS = (1.0, 1.0, 1.2, 4.0)  # seconds a gradient of the asynchronous workers, one of which is slow
Curve = tuple[np.ndarray, np.ndarray, float]


@dataclass(frozen=True)
class Measured:
    """The figures of one way on one number of devices.

    Attributes:
        way: Its name.
        size: Devices.
        link_bytes: Bytes in a step through the busiest link between two devices, in its busier direction.
        line_bytes: Bytes in a step through the busiest device's own line, in and out together.
        seconds: Time of the fastest step.
        params: The final parameters.
    """

    way: str
    size: int
    link_bytes: int
    line_bytes: int
    seconds: float
    params: Any


def formula(way: str, size: int) -> tuple[float, float]:
    """Returns the bytes of the busiest link and line by textbook formulas, in units of the gradients' bytes."""
    ring = 2 * (size - 1) / size
    if way == "ring, both ways":
        return (ring if size == 2 else ring / 2), 2 * ring  # two devices have one link for both directions
    if "server" not in way:
        return ring, 2 * ring
    num_servers = min(1 if way == "1 server" else NUM_SERVERS, size)
    # A server's line carries its own part from and to the others, and, as a worker, the other servers' parts.
    both = 2 * (size - 1) / num_servers + 2 * (num_servers - 1) / num_servers
    link = (2 if num_servers > 1 else 1) / num_servers
    return link, both


def describe(rows: list[Measured], gradient_bytes: int, *, header: bool) -> list[str]:
    """Returns a table of the ways on one number of devices, compared with the formulas and with the parameters of the first."""
    lines = []
    if header:
        lines.append(
            f"{'':16} {'devices':>7}  {'busiest link':>24}  {'busiest line, both ways':>24}  {'a step':>8}  params"
        )
    for row in rows:
        link, line = formula(row.way, row.size)
        lines.append(
            f"{row.way:16} {row.size:>7}  {row.link_bytes / gradient_bytes:>8.3f} (book {link:>6.3f}) "
            f"  {row.line_bytes / gradient_bytes:>10.3f} (book {line:>6.3f})  {row.seconds * 1e3:>5.1f} ms  "
            f"{apart(row.params, rows[0].params):.0e} apart"
        )
    return lines


def page_data(flags: Any, rows: list[Measured], gradient_bytes: int, curves: dict[int | None, Curve]) -> dict[str, Any]:
    """Returns the data of report.html."""
    first = {size: next(row.params for row in rows if row.size == size) for size in {row.size for row in rows}}
    ways = []
    for row in rows:
        link, line = formula(row.way, row.size)
        ways.append(
            {
                "way": row.way,
                "devices": row.size,
                "link": row.link_bytes / gradient_bytes,
                "link_formula": link,
                "line": row.line_bytes / gradient_bytes,
                "line_formula": line,
                "seconds": row.seconds,
                "apart": apart(row.params, first[row.size]),
            }
        )
    stale = {
        bound_name(bound): {"seconds": seconds.tolist(), "losses": losses.tolist(), "mean": staleness}
        for bound, (seconds, losses, staleness) in curves.items()
    }
    settings = {name: str(value) for name, value in dataclasses.asdict(flags).items()}
    return ways_data(ways, stale, name=flags.out_dir.name, config=settings)


def apart(params: Any, others: Any) -> float:
    """Returns the largest difference between parameters, in units of the largest value of their array."""
    return max(map(distance, jax.tree.leaves(params), jax.tree.leaves(others)))


def bound_name(bound: int | None) -> str:
    return "no bound" if bound is None else f"bound {bound}"


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference between two arrays, in units of the second's largest absolute value."""
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))


def say_stale(curves: dict[int | None, Curve]) -> None:
    cli.say(
        f"\n{len(SPEEDS)} workers, {', '.join(f'{s:g}' for s in SPEEDS)} s a gradient, and one server that does not wait:"
    )
    for bound, (seconds, losses, staleness) in curves.items():
        took = f"{len(losses)} gradients in {seconds[-1]:6.1f} s"
        cli.say(f"  {bound_name(bound):9} {took}, mean staleness {staleness:.1f}: loss {losses[-1]:.4f}")
