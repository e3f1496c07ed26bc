"""Collectives by their usual names, and the two architectures for adding gradients, rings and servers, step by step.

They are written by hand, for study and for use in your own ``jax.shard_map`` code; no other part of jaxpar uses them. All
collectives work inside ``jax.shard_map``, with ``check_vma`` on or off, and take any tree of arrays. Read in this order:
`primitives.py` (shift to barrier), `ring.py` (ring all-reduce, and the optimizer of Horovod), `server.py` (parameter servers,
also asynchronous ones).
"""

from jaxpar.collectives.primitives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    shift,
)
from jaxpar.collectives.ring import distributed_optimizer, ring_all_reduce
from jaxpar.collectives.server import (
    Push,
    parameter_server,
    server_optimizer,
    simulate_pushes,
    train_with_stale_gradients,
)

__all__ = [
    "Push",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "distributed_optimizer",
    "gather",
    "parameter_server",
    "reduce",
    "reduce_scatter",
    "ring_all_reduce",
    "scatter",
    "server_optimizer",
    "shift",
    "simulate_pushes",
    "train_with_stale_gradients",
]
