"""Data parallelism: each replica computes on its rows of the batch, and gradients are summed over the replicas.

`replicas.py` splits batches, accumulates gradients over microbatches and reduces them over the `data` axis; `zero.py` shards
optimizer state, gradients and params over it (ZeRO 1 to 3); `overlap.py` reduces the gradients of a layer during the backward
pass of the layer below.
"""

from jaxpar.data_parallel.replicas import (
    abstract_batch,
    accumulate,
    check_batch,
    local_rows,
    reduce_gradients,
    shard_batch,
    split_microbatches,
)

__all__ = [
    "abstract_batch",
    "accumulate",
    "check_batch",
    "local_rows",
    "reduce_gradients",
    "shard_batch",
    "split_microbatches",
]
