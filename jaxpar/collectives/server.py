"""Parameter servers, step by step: workers push gradients to the servers, which compute updates, and pull the updates.

All N devices of the axis are workers, and the first S of them are also servers, each for 1/S of the vector. In round r a server
communicates with the worker r positions after it, so it serves one worker at a time:

    push, N-1 rounds     worker s+r  ->  server s      the server's part of that worker's gradients, which it adds
    serve                server s                      computes the result: the sum itself, or an optimizer's update
    pull, N-1 rounds     server s    ->  worker s+r    the server's part of the result

The link of a server carries (N-1)/S of the vector in and as much out: 2(N-1)/S in total, which grows with the number of workers
unless S does. The link of a worker that is not a server carries 2 in total. With S = N the traffic is that of a ring, 2(N-1)/N
in each direction; ZeRO is such a sharded server.

Reference: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server (OSDI), where servers are separate
machines; here a server is also a worker, so one of its N gradients need not be sent.

Asynchronous servers do not wait. A worker pulls, computes a gradient at its own speed, pushes, and pulls again. The server
applies each push on arrival. So a gradient is computed for parameters that other workers' pushes have changed since: its
staleness is the number of these pushes. Stale-synchronous parallel bounds it: a worker that is more than ``bound`` gradients
ahead of the slowest waits. Bound 0 is synchronous, and Hogwild and DistBelief have no bound. `simulate_pushes` computes the
order of events from the workers' speeds, and `train_with_stale_gradients` executes it: every gradient is computed at the
parameters that its worker had pulled. Only the clock is simulated.

Reference: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NeurIPS).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from jaxpar.collectives.primitives import group_size, rank


def parameter_server(
    tree: PyTree,
    axis: str,
    *,
    num_servers: int = 1,
    serve: Callable[[jax.Array], tuple[Any, Any]] | None = None,
) -> tuple[PyTree, Any]:
    """Returns the servers' result for the sum of the devices' trees, on each device, and the state that each server keeps.

    Args:
        tree: Each worker's arrays; they are sent as one vector.
        axis: The mesh axis; call it inside ``jax.shard_map``.
        num_servers: S, from 1 to the number of devices.
        serve: ``serve(total) -> (result, left)`` for one server's part of the sum, a vector; ``result`` has its shape, and
            ``left`` is the state to keep. All devices run it, since there is one program, but only the servers' results are
            used. None: the result is the sum.

    **Collectives**: 2(N-1) collective-permutes of 1/S of the vector, padded if S does not divide it.
    """
    size = group_size(axis)
    if not 1 <= num_servers <= size:
        nearest = 1 if num_servers < 1 else size
        raise ValueError(
            f"num_servers must be from 1 to the size of the axis; got num_servers={num_servers}, {axis}={size}. Choose "
            f"{nearest}, say."
        )
    vector, restore = ravel_pytree(tree)
    parts = _in_parts(vector, num_servers)
    total = _push(parts, axis, num_servers)
    result, left = (total, None) if serve is None else serve(total)
    return restore(_pull(result, axis, num_servers).reshape(-1)[: vector.size]), left


def _in_parts(vector: jax.Array, num_servers: int) -> jax.Array:
    return jnp.pad(vector, (0, -vector.size % num_servers)).reshape(num_servers, -1)


def _push(parts: jax.Array, axis: str, num_servers: int) -> jax.Array:
    """Returns the sum of part s over all workers, on server s."""
    size, me = group_size(axis), rank(axis)
    total = _part(parts, me)
    for r in range(1, size):
        pairs = [((server + r) % size, server) for server in range(num_servers)]
        total += jax.lax.ppermute(_part(parts, (me - r) % size), axis, pairs)
    return total


def _pull(result: jax.Array, axis: str, num_servers: int) -> jax.Array:
    """Returns the results of all servers, in the order of the servers."""
    size, me = group_size(axis), rank(axis)
    servers = jnp.arange(num_servers)[:, None]
    come = jnp.where(servers == me, result, jnp.zeros_like(result))
    for r in range(1, size):
        pairs = [(server, (server + r) % size) for server in range(num_servers)]
        come += jnp.where(
            servers == (me - r) % size,
            jax.lax.ppermute(result, axis, pairs),
            jnp.zeros_like(result),
        )
    return come


def _part(parts: jax.Array, server: jax.Array) -> jax.Array:
    """Returns the part of a server; if there is no such server, an arbitrary part, which is not used."""
    return jax.lax.dynamic_index_in_dim(
        parts, jnp.minimum(server, parts.shape[0] - 1), keepdims=False
    )


def server_optimizer(
    optimizer: optax.GradientTransformation, axis: str = "data", *, num_servers: int = 1
) -> optax.GradientTransformation:
    """Returns ``optimizer`` run on parameter servers: each stores the state, and computes the updates, of its part.

    It uses the mean of the gradients. Use it inside ``jax.shard_map`` over ``axis``: ``init`` and ``update`` depend on the
    device that they run on, and the state differs between devices.

    Args:
        optimizer: An elementwise optimizer, such as SGD or Adam: a server has only its part of the gradients, so a global norm
            would be that of the part.
        axis: The mesh axis of the workers.
        num_servers: S.
    """

    def own_part(tree: PyTree) -> jax.Array:
        return _part(_in_parts(ravel_pytree(tree)[0], num_servers), rank(axis))

    def init(params: PyTree) -> optax.OptState:
        return optimizer.init(own_part(params))

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        own_params = None if params is None else own_part(params)

        def serve(total: jax.Array) -> tuple[Any, optax.OptState]:
            return optimizer.update(total / group_size(axis), state, own_params)

        return parameter_server(updates, axis, num_servers=num_servers, serve=serve)

    return optax.GradientTransformation(init, update)


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
        pushes.append(
            Push(worker, clocks[worker], versions[worker], len(pushes) - versions[worker], now)
        )
        clocks[worker] += 1
        waiting.add(worker)
        # Workers that arrive at the same moment push before any waiting worker pulls.
        if arrivals and arrivals[0][0] <= now:
            continue
        for ready in sorted(
            w for w in waiting if bound is None or clocks[w] - min(clocks) <= bound
        ):
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
    history = jax.tree.map(
        lambda p: jnp.broadcast_to(p, (kept, *jnp.shape(p))), params
    )  # version v is at v % kept
    rows = np.array([(push.worker, push.clock, push.version) for push in pushes], np.int32)

    def serve(
        history: PyTree, item: tuple[jax.Array, jax.Array]
    ) -> tuple[PyTree, jax.Array | None]:
        applied, (worker, clock, version) = item
        at = lambda v: jax.tree.map(lambda h: h[v % kept], history)
        new = apply(at(applied), gradient(at(version), worker, clock))
        history = jax.tree.map(lambda h, p: h.at[(applied + 1) % kept].set(p), history, new)
        return history, None if watch is None else watch(new)

    history, watched = jax.lax.scan(serve, history, (jnp.arange(len(pushes)), jnp.asarray(rows)))
    return jax.tree.map(lambda h: h[len(pushes) % kept], history), watched
