"""Converts PRNG keys in a state, such as those of ``optax.add_noise``: a checkpoint holds their key data."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.dtypes import is_key


def as_numbers(tree: PyTree) -> PyTree:
    """Returns a tree of arrays or ShapeDtypeStructs with each PRNG key replaced by its key data, uint32 ``[..., words]``."""
    return jax.tree.map(lambda leaf: _numbers(leaf) if is_key(leaf) else leaf, tree)


def as_keys(tree: PyTree, like: PyTree) -> PyTree:
    """Returns a tree of arrays with key data replaced by PRNG keys where ``like`` has keys."""

    def wrap(leaf: jax.Array, want: Any) -> jax.Array:
        if not is_key(want):
            return leaf
        keys = jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(jnp.empty((), want.dtype)))
        return jax.device_put(keys, want.sharding)

    return jax.tree.map(wrap, tree, like)


def _numbers(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    shape = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)
