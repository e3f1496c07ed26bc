"""Parameter servers that do not wait: which worker pushes when, how old its parameters are, and what that does to training.

A worker pulls, computes a gradient for as long as it takes it, pushes, and pulls again. The server applies each push as it
comes. So a gradient is of parameters to which others' pushes have been added meanwhile: its staleness is their number.
Stale-synchronous parallel bounds it: a worker that is more than ``bound`` gradients ahead of the slowest waits. Bound 0 is
synchronous, and no bound is Hogwild's and DistBelief's.

`simulate_pushes` finds the order of events from the workers' speeds, and `train_with_stale_gradients` runs it: every
gradient is really taken at the parameters that its worker had pulled. Nothing is sampled or modelled but the clock.

Reference: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NeurIPS).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


@dataclass(frozen=True)
class Push:
    """One gradient's arrival at the server.

    Attributes:
        worker: Whose it is.
        clock: How many the worker pushed before.
        version: How many pushes the server had applied when the worker pulled.
        staleness: How many it applied between then and this one.
        seconds: When it comes.
    """

    worker: int
    clock: int
    version: int
    staleness: int
    seconds: float


def simulate_pushes(
    seconds_per_gradient: Sequence[float], num_pushes: int, *, bound: int | None = None
) -> tuple[Push, ...]:
    """Returns the pushes in the order in which they come.

    Args:
        seconds_per_gradient: Of each worker.
        num_pushes: Of all workers together.
        bound: How many gradients a worker may be ahead of the slowest; 0: synchronous, None: any number.

    Raises:
        ValueError: No worker, a time that is not positive, or a negative bound or number.
    """
    if not seconds_per_gradient or min(seconds_per_gradient) <= 0:
        raise ValueError(
            f"each worker must take some time for a gradient; got {list(seconds_per_gradient)}. Give seconds."
        )
    if num_pushes < 0 or (bound is not None and bound < 0):
        raise ValueError(f"num_pushes and bound must be 0 or more; got {num_pushes} and {bound}.")
    num_workers = len(seconds_per_gradient)
    clocks, versions, pushes = [0] * num_workers, [0] * num_workers, []
    waiting: set[int] = set()
    arrivals = [(seconds, worker) for worker, seconds in enumerate(seconds_per_gradient)]
    heapq.heapify(arrivals)
    while len(pushes) < num_pushes:
        now, worker = heapq.heappop(arrivals)
        pushes.append(Push(worker, clocks[worker], versions[worker], len(pushes) - versions[worker], now))
        clocks[worker] += 1
        waiting.add(worker)
        # Those who arrive at this very moment have pushed before anyone who waits for them pulls.
        if arrivals and arrivals[0][0] <= now:
            continue
        for ready in sorted(w for w in waiting if bound is None or clocks[w] - min(clocks) <= bound):
            waiting.remove(ready)
            versions[ready] = len(pushes)
            heapq.heappush(arrivals, (now + seconds_per_gradient[ready], ready))
    return tuple(pushes)


def train_with_stale_gradients(
    gradient: Callable[[PyTree, jax.Array, jax.Array], PyTree],
    apply: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    pushes: Sequence[Push],
    *,
    watch: Callable[[PyTree], jax.Array] | None = None,
) -> tuple[PyTree, jax.Array | None]:
    """Returns the server's parameters after all pushes, and ``watch`` of them after each.

    Args:
        gradient: ``gradient(params, worker, clock)``: of the rows that are this worker's at this turn.
        apply: ``apply(params, gradient)``: what the server does with one push.
        params: The first.
        pushes: From ``simulate_pushes``. Memory is that of as many models as the oldest gradient is stale, and one.
        watch: Such as a loss.
    """
    if not pushes:
        return params, None if watch is None else jnp.zeros((0,))
    kept = max(push.staleness for push in pushes) + 1
    history = jax.tree.map(lambda p: jnp.broadcast_to(p, (kept, *jnp.shape(p))), params)  # version v is at v % kept
    rows = np.array([(push.worker, push.clock, push.version) for push in pushes], np.int32)

    def serve(history: PyTree, item: tuple[jax.Array, jax.Array]) -> tuple[PyTree, jax.Array | None]:
        applied, (worker, clock, version) = item
        at = lambda v: jax.tree.map(lambda h: h[v % kept], history)
        new = apply(at(applied), gradient(at(version), worker, clock))
        history = jax.tree.map(lambda h, p: h.at[(applied + 1) % kept].set(p), history, new)
        return history, None if watch is None else watch(new)

    history, watched = jax.lax.scan(serve, history, (jnp.arange(len(pushes)), jnp.asarray(rows)))
    return jax.tree.map(lambda h: h[len(pushes) % kept], history), watched
