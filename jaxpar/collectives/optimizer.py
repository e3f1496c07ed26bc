"""The optimizer of data parallelism by hand, for who comes from Horovod: average the gradients, then update."""

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
    """Returns ``optimizer``, which first takes the mean of the gradients over the devices of ``axis``.

    It is ``hvd.DistributedOptimizer`` for a training step written inside ``jax.shard_map``, where each device has gradients of
    the mean loss over its own rows: give ``check_vma=False``, as under it ``jax.grad`` leaves them unreduced. With
    ``jaxpar.value_and_grad`` it is not needed: gradients come reduced.

    Args:
        optimizer: Any optax optimizer.
        axis: The mesh axis of the replicas.
        reduce: ``reduce(grads, axis)`` gives the mean in another way: ``functools.partial(ring_all_reduce, mean=True)``.

    **Collectives**: one all-reduce of all gradients together.
    """
    mean = reduce or (lambda grads, axis: all_reduce(grads, axis, op="mean"))

    def update(updates: PyTree, state: optax.OptState, params: PyTree | None = None) -> tuple[PyTree, optax.OptState]:
        return optimizer.update(mean(updates, axis), state, params)

    return optax.GradientTransformation(optimizer.init, update)
