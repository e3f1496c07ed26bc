"""Rematerialisation: which activations of a layer are stored for its backward pass.

    none    stores the values that elementwise operations cannot recompute from fewer bytes (``min_cut.py``)
    dots    of those, stores products with weights and outputs of a fused attention kernel; recomputes attention scores
    full    stores only the input of the layer

For a layer of TinyLlama 1.1B (2048 wide, bfloat16, cuDNN's attention) they store about 39, 39 and 4 KiB per token, and
``jax.vjp``, which stores every value that some derivative reads, 121. "none" also takes less time than ``jax.vjp``, since
memory traffic costs more than arithmetic. "dots" saves memory for attention without a fused kernel, which otherwise stores
scores.

**Reference**: Chen et al. 2016, arXiv 1604.06174; "dots" is the selective recomputation of Korthikanti et al. 2022, arXiv
2205.05198, section 5.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar._compat import closure_converted
from jaxpar.backward.partition import ParamShards
from jaxpar.backward.split import Arrays, split_layer
from jaxpar.dtypes import float_indices, is_float, merge
from jaxpar.layered_model import LayeredModel
from jaxpar.trainable import trained_indices

Layer = Callable[..., PyTree]

_ATTENTION = ("dot_product_attention", "planned_attention")
_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def keep_products(primitive: Any, *args: Any, **params: Any) -> Any:
    """A ``jax.checkpoint`` policy: saves products with weights and outputs of cuDNN's ``jax.nn.dot_product_attention``.

    It treats the planner's stand-in for that kernel alike.
    """
    is_attention = primitive.name.startswith(_ATTENTION)
    return is_attention or _products(primitive, *args, **params)


# The argument of `value_and_grad(remat=...)`, by name.
REMAT: dict[str, bool | Callable[..., Any]] = {"none": False, "full": True, "dots": keep_products}


def with_remat(
    model: LayeredModel,
    remat: bool | Callable[..., Any],
    shards: ParamShards | None = None,
) -> LayeredModel:
    """Returns the model whose layers' vjps store what ``remat`` says, with a checkpoint around its embedding.

    Args:
        model: The model.
        remat: False: the fewest bytes from which elementwise operations recompute the rest. True: the input alone. A
            ``jax.checkpoint`` policy: the fewest bytes from which elementwise operations, and those that the policy recomputes,
            give the rest.
        shards: How the params are sharded over ``tensor``: bytes are then those on a device. By default those of whole arrays.
    """

    def min_cut(layer: Layer) -> Layer:
        return _min_cut_remat(_checkpointed(layer, remat), shards)

    wrapped = model.wrap_layers(jax.checkpoint if remat is True else min_cut)
    return replace(wrapped, embed=_checkpointed(model.embed, remat))


def _checkpointed(
    function: Callable[..., PyTree],
    remat: bool | Callable[..., Any],
) -> Callable[..., PyTree]:
    """The function with one checkpoint around it, unless ``remat`` is False."""
    if remat is False:
        return function
    policy = None if remat is True else remat
    return jax.checkpoint(function, policy=policy)


def forward_with_remat(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    remat: bool | Callable[..., Any],
    shards: ParamShards | None,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns ``(params, batch) -> outputs`` of a model, ``with_remat`` or, of a plain function, with one checkpoint around it.

    Args:
        model: A LayeredModel or a function.
        remat: As for ``with_remat``; a plain function is not changed by False.
        shards: As for ``with_remat``.
    """
    if isinstance(model, LayeredModel):
        return with_remat(model, remat, shards).apply
    return _checkpointed(model, remat)


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
        hoisted = _hoist_tracers(lambda params, x: layer(params, *x), params, inputs, shards)
        return _rematerialised(*hoisted)

    return rematerialised


def _hoist_tracers(
    layer: Layer,
    params: PyTree,
    x: PyTree,
    shards: ParamShards | None,
) -> tuple[Layer, PyTree, PyTree, ParamShards | None]:
    """Returns the arguments with the tracers that the layer closes over as further params and inputs."""
    converted, tracers = closure_converted(layer, params, x)
    if not tracers:
        return layer, params, x, shards
    are_floats = [is_float(value) for value in tracers]  # these have derivatives, as params do
    floats = [value for value in tracers if is_float(value)]
    others = [value for value in tracers if not is_float(value)]

    def hoisted(params: tuple, x: tuple) -> PyTree:
        (own_params, floats), (own_x, others) = params, x
        of_floats, of_others = iter(floats), iter(others)
        tracers = [next(of_floats if is_one else of_others) for is_one in are_floats]
        return converted(tracers, own_params, own_x)

    if shards is not None:  # what the layer closes over is taken to be replicated
        whole = [None] * len(floats)
        shards = replace(shards, cuts=(*shards.cuts, *whole))
    return hoisted, (params, floats), (x, others), shards


def _rematerialised(
    layer: Layer,
    params: PyTree,
    x: PyTree,
    shards: ParamShards | None,
) -> PyTree:
    """Runs a layer that closes over no tracers, with a vjp that stores what the minimum cut chose."""
    p_leaves, x_leaves = jax.tree.leaves(params), jax.tree.leaves(x)
    y_leaves, y_tree = jax.tree.flatten(jax.eval_shape(layer, params, x))
    num_params, num_x = len(p_leaves), len(x_leaves)  # the vjp must hold no leaf
    split = split_layer(layer, params, x, shards)
    own, floats = trained_indices(params), float_indices(x_leaves)
    y_floats = float_indices(y_leaves)

    @jax.custom_vjp
    def run(params: Arrays, x: Arrays) -> list:
        return split.forward(split.cast(params), x)

    def forward(params: Arrays, x: Arrays) -> tuple[list, tuple]:
        y, residuals_b, residuals_w = split.forward_and_store(split.cast(params), x)
        return y, (params, residuals_b, residuals_w)

    def backward(stored: tuple, ct: Arrays) -> tuple[list, list]:
        params, residuals_b, residuals_w = stored
        of_floats = [ct[i] for i in y_floats]
        dx, dp = split.backward(split.cast(params), residuals_b, residuals_w, of_floats)
        # None: no derivative
        of_params = merge([None] * num_params, own, dp)
        of_x = merge([None] * num_x, floats, dx)
        return of_params, of_x

    run.defvjp(forward, backward)
    return y_tree.unflatten(run(p_leaves, x_leaves))
