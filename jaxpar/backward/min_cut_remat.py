"""Min-cut rematerialisation: a layer whose vjp stores only activations that cannot be recomputed cheaply.

``jax.vjp`` stores every value that some derivative reads. Elementwise operations can recompute most of them from fewer values
(``min_cut.py``): a transformer layer then stores a third of the bytes, and takes less time, since memory traffic costs more
than arithmetic.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar._compat import closure_converted
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import Arrays, split_layer
from jaxpar.dtypes import float_indices, is_float
from jaxpar.layered_model import LayeredModel
from jaxpar.trainable import trained_indices

Layer = Callable[..., PyTree]


def apply_remat(remat: bool | Callable[..., Any], shards: ParamShards | None = None) -> Callable[[Layer], Layer]:
    """Returns the transformation of a layer that makes its vjp store what ``remat`` says.

    Args:
        remat: False: the fewest bytes from which elementwise operations recompute the rest. True: the input alone. A
            ``jax.checkpoint`` policy: the fewest bytes from which elementwise operations, and those that the policy recomputes,
            give the rest.
        shards: How the params are sharded over ``tensor``: bytes are then those on a device. By default those of whole arrays.
    """
    if remat is False:
        return lambda layer: _min_cut_remat(layer, shards)
    if remat is True:
        return jax.checkpoint
    return lambda layer: _min_cut_remat(jax.checkpoint(layer, policy=remat), shards)


def forward_with_remat(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    remat: bool | Callable[..., Any],
    shards: ParamShards | None,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns ``(params, batch) -> outputs`` of a model, with ``apply_remat`` for its layers, or one checkpoint around it.

    Args:
        model: A LayeredModel or a function.
        remat: As for ``apply_remat``; a plain function is not changed by False.
        shards: As for ``apply_remat``.
    """
    if isinstance(model, LayeredModel):
        return model.wrap_layers(apply_remat(remat, shards)).apply
    if remat is False:
        return model
    return jax.checkpoint(model, policy=None if remat is True else remat)


def min_cut_remat(layer: Layer) -> Layer:
    """Returns the same function, whose vjp stores the cheapest set of values from which the backward pass can be computed.

    It needs no mesh: use it as ``jax.checkpoint``, on a layer or on a whole model, under ``jax.grad``, ``jax.jit`` and
    ``jax.lax.scan``. No matrix product, convolution or other costly operation is computed twice; elementwise operations are,
    where that stores fewer bytes. Values that depend on the params alone are not stored. Bytes are those of whole arrays;
    inside ``value_and_grad``, which knows the shardings of params, those on a device.

    Args:
        layer: ``layer(params, *inputs) -> y``, whose params are floats. Inputs and results are pytrees; integers, booleans and
            PRNG keys have no derivatives.

    Returns:
        The function ``(params, *inputs) -> y``, with the same results and the same gradients to within rounding.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpar
        >>> layer = lambda w, x: jnp.tanh(x @ w) * x
        >>> loss = lambda w, x: jaxpar.min_cut_remat(layer)(w, x).sum()
        >>> jax.grad(loss)(jnp.ones((2, 2)), jnp.zeros((3, 2))).tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    return _min_cut_remat(layer, None)


def _min_cut_remat(layer: Layer, shards: ParamShards | None) -> Layer:
    def rematerialised(params: PyTree, *inputs: PyTree) -> PyTree:
        return _rematerialised(lambda params, x: layer(params, *x), params, inputs, shards)

    return rematerialised


def _rematerialised(layer: Layer, params: PyTree, x: PyTree, shards: ParamShards | None) -> PyTree:
    converted, tracers = closure_converted(layer, params, x)
    if tracers:  # floats among them have derivatives, as params do; the rest goes with x
        are_floats = [is_float(value) for value in tracers]
        pick = lambda kind: [value for value, own in zip(tracers, are_floats, strict=True) if own == kind]

        def whole(params: tuple, x: tuple) -> PyTree:
            floats, rest = iter(params[1]), iter(x[1])
            return converted([next(floats if own else rest) for own in are_floats], params[0], x[0])

        if shards is not None:  # what the layer closes over is taken to be replicated
            shards = replace(shards, cuts=(*shards.cuts, *(None for _ in pick(True))))
        return _rematerialised(whole, (params, pick(True)), (x, pick(False)), shards)
    p_leaves, x_leaves = jax.tree.leaves(params), jax.tree.leaves(x)
    y_leaves, y_tree = jax.tree.flatten(jax.eval_shape(layer, params, x))
    split, num_params, num_x = split_layer(layer, params, x, shards), len(p_leaves), len(x_leaves)
    floats, y_floats, own = float_indices(x_leaves), float_indices(y_leaves), trained_indices(params)

    @jax.custom_vjp
    def run(params: Arrays, x: Arrays) -> list:
        return split.forward(split.cast(params), x)

    def forward(params: Arrays, x: Arrays) -> tuple[list, tuple]:
        y, residuals_b, residuals_w = split.forward_and_store(split.cast(params), x)
        return y, (params, residuals_b, residuals_w)

    def backward(stored: tuple, ct: Arrays) -> tuple[list, list]:
        params, residuals_b, residuals_w = stored
        dx, dp = split.backward(split.cast(params), residuals_b, residuals_w, [ct[i] for i in y_floats])
        of_own, of_float = dict(zip(own, dp, strict=True)), dict(zip(floats, dx, strict=True))
        none_but = lambda found, count: [found.get(i) for i in range(count)]  # None: no derivative
        return none_but(of_own, num_params), none_but(of_float, num_x)

    run.defvjp(forward, backward)
    return jax.tree.unflatten(y_tree, run(p_leaves, x_leaves))
