"""Muon for a transformer's weights: which of their dims are matrices, and the direction of an update.

Muon orthogonalizes the momentum of each matrix by Newton and Schulz's iteration (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/). Queries, keys and values are matrices of their own, as are gate and up.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from optax import contrib

from jaxpar.layered_model import OUTER

# Of an update before the learning rate, as AdamW's is about (Liu et al. 2025, arXiv 2502.16982, section 2.2).
RMS = 0.2
W_QKV = "w_qkv"
GROUP = 3  # the dim of w_qkv with a group of queries, then their key, then their value

# Dims of the inputs and outputs of a transformer's weights (jaxpar/models/transformer/params.py), after the dim of layers. The
# others number matrices.
MATRICES = {
    W_QKV: ((1,), (2, GROUP, 4)),
    "w_out": ((1, 2), (3,)),
    "w_up": ((1,), (3,)),
    "w_down": ((1,), (2,)),
}
MATRICES |= dict.fromkeys(("w_expert_gate", "w_expert_up", "w_expert_down"), ((2,), (3,)))


class MuonState(NamedTuple):
    """The number of updates, and the mean of gradients."""

    num_updates: Any
    mu: PyTree


def scale_by_muon(momentum: float, eps: float) -> optax.GradientTransformation:
    """Returns the direction of Muon with Nesterov's momentum, of which an element's root mean square is about ``RMS``.

    Args:
        momentum: Decay of the mean of gradients in each update.
        eps: Added to norms.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        count: Any = optax.safe_increment(state.num_updates)
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        after: Any = optax.safe_increment(count)
        means = optax.tree.bias_correction(mu, momentum, after)
        latest = optax.tree.bias_correction(updates, momentum, count)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, means, latest)
        of_leaf = lambda path, leaf: _of_weight(path, leaf, eps)
        return jax.tree_util.tree_map_with_path(of_leaf, ahead), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def labels(params: PyTree) -> PyTree:
    """Returns "muon" for the matrices of layers and "adam" for the other params."""
    kind = lambda path, _: "muon" if path[-1].key in MATRICES else "adam"
    return jax.tree_util.tree_map_with_path(kind, params)


def _of_weight(path: tuple, momentum: jax.Array, eps: float) -> jax.Array:
    """Returns the direction of a weight from its momentum."""
    name = path[-1].key
    is_alone = path[0].key == OUTER  # not stacked: a leading dense layer
    inputs, outputs = MATRICES[name]
    if is_alone:
        inputs = tuple(dim - 1 for dim in inputs)
        outputs = tuple(dim - 1 for dim in outputs)
    if name != W_QKV:
        return _orthogonal(momentum, inputs, outputs, eps)
    axis = GROUP - is_alone
    group = momentum.shape[axis] - 2
    parts = jnp.split(momentum, (group, group + 1), axis)  # queries, keys, values
    found = [_orthogonal(part, inputs, outputs, eps) for part in parts]
    return jnp.concatenate(found, axis)


def _orthogonal(
    momentum: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...], eps: float
) -> jax.Array:
    # The momentum is in MuonState: here each update is taken as it is.
    dims = contrib.MuonDimensionNumbers(inputs, outputs)
    alone = contrib.scale_by_muon(beta=0.0, eps=eps, nesterov=False, weight_dimension_numbers=dims)
    found: Any
    found, _ = alone.update(momentum, alone.init(momentum))
    num_inputs = math.prod(momentum.shape[dim] for dim in inputs)
    num_outputs = math.prod(momentum.shape[dim] for dim in outputs)
    return RMS * math.sqrt(max(num_inputs, num_outputs)) * found
