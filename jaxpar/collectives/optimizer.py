"""The optimizer of hand-written data parallelism, as in Horovod: average the gradients, then update."""

from collections.abc import Callable

import optax
from jaxtyping import PyTree

from jaxpar.collectives.primitives import all_reduce


def distributed_optimizer(
    optimizer: optax.GradientTransformation,
    axis: str = "data",
    *,
    reduce: Callable[[PyTree, str], PyTree] | None = None,
) -> optax.GradientTransformation:
    """Returns ``optimizer`` applied to the mean of the gradients over the devices of ``axis``.

    It corresponds to ``hvd.DistributedOptimizer``, for a training step written inside ``jax.shard_map`` where each device has
    gradients of the mean loss over its own rows: use ``check_vma=False``, with which ``jax.grad`` does not reduce them. With
    ``jaxpar.value_and_grad`` it is not needed: gradients are already reduced.

    Args:
        optimizer: Any optax optimizer.
        axis: The mesh axis of the replicas.
        reduce: ``reduce(grads, axis)`` returns the mean by another method, as in ``partial(ring_all_reduce, mean=True)``.

    **Collectives**: one all-reduce of all gradients together.
    """
    mean = reduce or (lambda grads, axis: all_reduce(grads, axis, op="mean"))

    def update(updates: PyTree, state: optax.OptState, params: PyTree | None = None) -> tuple[PyTree, optax.OptState]:
        return optimizer.update(mean(updates, axis), state, params)

    return optax.GradientTransformation(optimizer.init, update)
