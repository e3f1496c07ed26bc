"""Min-cut rematerialisation: a layer whose vjp stores only activations that cannot be recomputed cheaply.

``jax.vjp`` stores every value that some derivative reads. Elementwise operations can recompute most of them from fewer values
(``min_cut.py``): a transformer layer then stores a third of the bytes, and takes less time, since memory traffic costs more
than arithmetic.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar._compat import closure_converted
from jaxpar.backward.split import Arrays, split_layer
from jaxpar.dtypes import float_indices, is_float

Layer = Callable[[PyTree, PyTree], PyTree]


def apply_remat(remat: bool | Callable[..., Any]) -> Callable[[Layer], Layer]:
    """Returns the transformation of a layer that makes its vjp store what ``remat`` says.

    Args:
        remat: False: the fewest bytes from which elementwise operations recompute the rest. True: the input alone. A
            ``jax.checkpoint`` policy: the fewest bytes from which elementwise operations, and those that the policy recomputes,
            give the rest.
    """
    if remat is False:
        return min_cut_remat
    if remat is True:
        return jax.checkpoint
    return lambda layer: min_cut_remat(jax.checkpoint(layer, policy=remat))


def min_cut_remat(layer: Layer) -> Layer:
    """Returns the same layer, whose vjp stores the cheapest set of values from which the backward pass can be computed.

    Args:
        layer: ``layer(params, x) -> y``, whose params are floats.
    """

    def rematerialised(params: PyTree, x: PyTree) -> PyTree:
        converted, tracers = closure_converted(layer, params, x)
        if tracers:  # floats among them have derivatives, as params do; the rest goes with x
            are_floats = [is_float(value) for value in tracers]
            pick = lambda kind: [value for value, own in zip(tracers, are_floats, strict=True) if own == kind]

            def whole(params: tuple, x: tuple) -> PyTree:
                floats, rest = iter(params[1]), iter(x[1])
                return converted([next(floats if own else rest) for own in are_floats], params[0], x[0])

            return min_cut_remat(whole)((params, pick(True)), (x, pick(False)))
        p_leaves, x_leaves = jax.tree.leaves(params), jax.tree.leaves(x)
        y_leaves, y_tree = jax.tree.flatten(jax.eval_shape(layer, params, x))
        split, num_leaves = split_layer(layer, params, x), len(x_leaves)
        floats, y_floats = float_indices(x_leaves), float_indices(y_leaves)

        @jax.custom_vjp
        def run(params: Arrays, x: Arrays) -> list:
            return split.forward(split.cast(params), x)

        def forward(params: Arrays, x: Arrays) -> tuple[list, tuple]:
            y, residuals_b, residuals_w = split.forward_and_store(split.cast(params), x)
            return y, (params, residuals_b, residuals_w)

        def backward(stored: tuple, ct: Arrays) -> tuple[list, list]:
            params, residuals_b, residuals_w = stored
            dx, dp = split.backward(split.cast(params), residuals_b, residuals_w, [ct[i] for i in y_floats])
            of_float = dict(zip(floats, dx, strict=True))
            return dp, [of_float.get(i) for i in range(num_leaves)]  # None: no derivative

        run.defvjp(forward, backward)
        return jax.tree.unflatten(y_tree, run(p_leaves, x_leaves))

    return rematerialised
