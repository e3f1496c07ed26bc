"""Asynchronous parameter servers: when each worker pushes, how stale its parameters are, and the effect on training.

A worker pulls, computes a gradient at its own speed, pushes, and pulls again. The server applies each push on arrival. So a
gradient is computed for parameters that other workers' pushes have changed since: its staleness is the number of these pushes.
Stale-synchronous parallel bounds it: a worker that is more than ``bound`` gradients ahead of the slowest waits. Bound 0 is
synchronous, and Hogwild and DistBelief have no bound.

`simulate_pushes` computes the order of events from the workers' speeds, and `train_with_stale_gradients` executes it: every
gradient is computed at the parameters that its worker had pulled. Only the clock is simulated.

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
        worker: The worker that pushes.
        clock: How many gradients the worker has pushed before.
        version: How many pushes the server had applied when the worker pulled.
        staleness: How many pushes it applied between that pull and this push.
        seconds: The time of arrival.
    """

    worker: int
    clock: int
    version: int
    staleness: int
    seconds: float


def simulate_pushes(
    seconds_per_gradient: Sequence[float], num_pushes: int, *, bound: int | None = None
) -> tuple[Push, ...]:
    """Returns the pushes in the order of their arrival.

    Args:
        seconds_per_gradient: The time that each worker takes for a gradient.
        num_pushes: The number of pushes of all workers together.
        bound: How many gradients a worker may be ahead of the slowest; 0: synchronous, None: any number.

    Raises:
        ValueError: There is no worker, a time is not positive, or the bound or the number of pushes is negative.
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
        # Workers that arrive at the same moment push before any waiting worker pulls.
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
    """Returns the server's parameters after all pushes, and the value of ``watch`` after each push.

    Args:
        gradient: ``gradient(params, worker, clock)`` returns the gradient for the rows of this worker at this clock.
        apply: ``apply(params, gradient)`` returns the server's parameters after one push.
        params: The initial parameters.
        pushes: From ``simulate_pushes``. Stores as many copies of the parameters as the largest staleness, plus one.
        watch: A function of the parameters, such as a loss.
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
