"""All of data parallelism: each replica takes its share of the rows, and gradients are summed over replicas.

`replicas.py` cuts batches, accumulates gradients over microbatches and reduces them over the `data` axis; `zero.py` cuts
optimizer state, gradients and params over it (ZeRO 1 to 3); `overlap.py` reduces the gradients of a layer while the layer below
it is differentiated.
"""

from jaxpar.data_parallel.replicas import accumulate, check_batch, reduce_gradients, shard_batch, split_microbatches

__all__ = ["accumulate", "check_batch", "reduce_gradients", "shard_batch", "split_microbatches"]
