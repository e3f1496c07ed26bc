"""The optimizer of the biases of routers, which keep experts in balance without a loss (Wang et al. 2024, arXiv 2408.15664).

After each step the bias of an expert that got fewer tokens than the mean rises by a fixed rate, and that of one with more
falls. The loads come as the gradient of the bias (``router.py``), so small that norms and clipping do not see it. No other
optimizer should: Adam would divide it by its own size.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jaxpar.models.transformer.router import LOAD_SCALE

_OTHERS, _BIASES = "others", "router_biases"


def balance_experts(
    optimizer: optax.GradientTransformation, rate: float = 1e-3
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates the biases of routers by the loads of their experts, and all else by ``optimizer``.

    Biases get no weight decay and no state. Where they are frozen they have no gradient, and are left alone.

    Args:
        optimizer: For the other params.
        rate: By how much a bias rises or falls in a step; DeepSeek-V3 takes 0.001, and 0 at the end of training.

    Raises:
        ValueError: The rate is negative.
    """
    if not rate >= 0:
        raise ValueError(f"the rate of the biases must be 0 or more; got {rate}. Choose such as 0.001.")

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        return jax.tree.map(towards_mean, updates), state

    def towards_mean(loads: Float[Array, "*layers experts"]) -> Array:
        mean = loads.mean(-1, keepdims=True)
        # A load that is the mean must not move its bias by the rounding of the sums, which depends on the mesh.
        is_mean = jnp.abs(mean - loads) <= 1024 * jnp.finfo(loads.dtype).eps * mean
        return jnp.where(is_mean, 0, rate * jnp.sign(mean - loads)).astype(loads.dtype)

    biases = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.partition({_OTHERS: optimizer, _BIASES: biases}, _labels)


def expert_loads(grads: PyTree) -> PyTree:
    """Returns the loads in gradients of routers' biases: the tokens of each expert, over the weight of the batch.

    Args:
        grads: The gradient of a bias, or a tree of them. With weights of 1 the loads of a layer add up to experts_per_token.
    """
    return jax.tree.map(lambda g: g / LOAD_SCALE, grads)


def _labels(params: PyTree) -> PyTree:
    def label(path: tuple, _: object) -> str:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return _BIASES if names[-2:] == ["router", "bias"] else _OTHERS

    return jax.tree_util.tree_map_with_path(label, params)
