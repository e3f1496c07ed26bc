"""What a predicate costs: the host waits for it, and where it guards a large buffer, the buffer may be copied.

Ticks of matrix products, each product in the open, behind ``jax.lax.cond``, or in a ``jax.lax.while_loop`` of one trip, alone
and beside a buffer that it updates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import report

from gpu_day_parts.common import Candidates, Context

COLUMNS = {
    "product": "",
    "buffer MiB": ".0f",
    "form": "",
    "ms a call": ".3f",
    "microseconds a predicate": ".1f",
}
COLUMNS |= {"host waits a predicate": ".1f", "spread": ".1%"}
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """Ticks of products of one width beside a buffer.

    Attributes:
        width: Rows and columns of the matrices.
        buffer_bytes: Bytes of the buffer; 0: none.
        ticks: Trips of the loop.
        per_tick: Products in each.
    """

    width: int
    buffer_bytes: int
    ticks: int = 64
    per_tick: int = 5


def measure(context: Context) -> Iterator[report.Table]:
    """Times each form in turn, for small and large products, without and with a buffer."""
    import jax

    import jaxpar

    mesh = jaxpar.make_mesh(devices=jax.devices()[:1])
    cases = [Case(256, 0), Case(2048, 0), Case(2048, 256 * MIB)]
    rows: list[dict[str, Any]] = []
    notes = ""
    for case in [Case(16, 2**12, 2, 2)] if context.smoke else cases:
        candidates = Candidates(context)
        inputs = arrays(case, jax.random.key(case.width + case.buffer_bytes))
        for form in FORMS:
            add(candidates, case, form, inputs, mesh)
        notes += candidates.note()
        if candidates.runs:
            rows += rows_of(case, candidates)
            yield report.Table(
                "Products behind a predicate that is always true",
                COLUMNS,
                rows,
                "one device",
                notes,
            )
    if not rows:
        raise RuntimeError(f"no candidate ran: {notes}")


def add(candidates: Candidates, case: Case, form: str, inputs: tuple[Any, ...], mesh: Any) -> None:
    """Adds the program of a form, and the number of waits that are counted in it."""
    run = program(case, form)
    name = f"{form}, {case.width} wide, {case.buffer_bytes / MIB:.0f} MiB"
    candidates.add(name, run, *inputs, check=lambda results: {"waits": waits_of(run, inputs, mesh)})


def _cond(pred: Any, op: Callable, carry: Any) -> Any:
    import jax

    return jax.lax.cond(pred, op, lambda carry: carry, carry)


def _loop(pred: Any, op: Callable, carry: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.lax.while_loop(
        lambda c: c[0], lambda c: (jnp.zeros((), bool), op(c[1])), (pred, carry)
    )[1]


FORMS: dict[str, Callable] = {
    "open": lambda pred, op, carry: op(carry),
    "cond": _cond,
    "loop of one trip": _loop,
}


def arrays(case: Case, key: Any) -> tuple[Any, ...]:
    """Returns the weights, the activation, the buffer and the predicates."""
    import jax
    import jax.numpy as jnp

    random = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    first, second, third = jax.random.split(key, 3)
    slots = max(1, case.buffer_bytes // (2 * case.width**2))
    w = random(first, case.width, case.width) / case.width**0.5
    x, buffer = random(second, case.width, case.width), random(third, slots, case.width, case.width)
    return w, x, buffer, jnp.ones((case.ticks, case.per_tick), bool)


def program(case: Case, form: str) -> Callable:
    """Returns ``(w, x, buffer, predicates) -> (x, buffer)``; each product writes to the buffer where the case has one."""
    import jax

    def run(w: Any, x: Any, buffer: Any, on: Any) -> Any:
        def tick(t: Any, carry: Any) -> Any:
            for i in range(case.per_tick):

                def op(carry: Any, i: int = i) -> Any:
                    x, buffer = carry
                    x = (x @ w).astype(x.dtype)
                    if case.buffer_bytes:
                        buffer = jax.lax.dynamic_update_index_in_dim(
                            buffer, x, (t + i) % len(buffer), 0
                        )
                    return x, buffer

                carry = FORMS[form](on[t, i], op, carry)
            return carry

        return jax.lax.fori_loop(0, case.ticks, tick, (x, buffer))

    return run


def waits_of(run: Callable, inputs: tuple[Any, ...], mesh: Any) -> int | float | None:
    """Returns how often the host waits in a call, counted in the compiled program; None for other devices than GPUs."""
    import jax

    import jaxpar

    found = jaxpar.inspect_step(jax.jit(run).lower(*inputs).compile(), mesh=mesh)
    return None if found.gpu is None else found.gpu.host_waits


def rows_of(case: Case, candidates: Candidates) -> list[dict[str, Any]]:
    timings = candidates.timed(next(iter(candidates.runs)), repeats=15)
    names = {name.partition(",")[0]: name for name in timings}
    count = case.ticks * case.per_tick
    opened = timings[names["open"]].wall_seconds if "open" in names else None
    rows = []
    for form, name in names.items():
        timed, waits = timings[name], candidates.facts[name]["waits"]
        cells = (
            f"{case.width} x {case.width}",
            case.buffer_bytes / MIB,
            form,
            timed.wall_seconds * 1e3,
            None
            if opened is None or form == "open"
            else (timed.wall_seconds - opened) / count * 1e6,
            None if waits is None else waits / count,
            timed.wall_spread,
        )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows
