"""A layer that can be differentiated as any function, and keeps no more for it than a minimum cut does.

``jax.vjp`` keeps every value that some derivative reads. Most of them can be had again, by elementwise operations, from fewer
(``min_cut.py``): of a transformer's layer a third of the bytes, in less time, since memory costs more than arithmetic.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar.backward.graph import taking_traced
from jaxpar.backward.split import Arrays, split_layer
from jaxpar.dtypes import is_float

Layer = Callable[[PyTree, PyTree], PyTree]


def storing_by(remat: bool | Callable[..., Any]) -> Callable[[Layer], Layer]:
    """Returns what makes of a layer one whose vjp stores what ``remat`` says.

    Args:
        remat: False: the least that spares it all but elementwise operations. True: its input. A ``jax.checkpoint`` policy: the
            least from which the rest is had by elementwise operations and by what the policy has computed again.
    """
    if remat is False:
        return storing_least
    if remat is True:
        return jax.checkpoint
    return lambda layer: storing_least(jax.checkpoint(layer, policy=remat))


def storing_least(layer: Layer) -> Layer:
    """Returns the same layer, whose vjp stores the cheapest set of values from which the backward pass can be had.

    Args:
        layer: ``layer(params, x) -> y``, whose params are floats.
    """

    def stored_least(params: PyTree, x: PyTree) -> PyTree:
        given, traced = taking_traced(layer, params, x)
        if traced:  # floats among them have derivatives, as params do; the rest goes with x
            are_floats = [is_float(value) for value in traced]
            pick = lambda kind: [value for value, own in zip(traced, are_floats, strict=True) if own == kind]

            def whole(params: tuple, x: tuple) -> PyTree:
                floats, rest = iter(params[1]), iter(x[1])
                return given([next(floats if own else rest) for own in are_floats], params[0], x[0])

            return storing_least(whole)((params, pick(True)), (x, pick(False)))
        p_leaves, x_leaves = jax.tree.leaves(params), jax.tree.leaves(x)
        y_leaves, y_tree = jax.tree.flatten(jax.eval_shape(layer, params, x))
        split, num_leaves = split_layer(layer, params, x), len(x_leaves)
        floats, y_floats = ([i for i, a in enumerate(leaves) if is_float(a)] for leaves in (x_leaves, y_leaves))

        @jax.custom_vjp
        def run(params: Arrays, x: Arrays) -> list:
            return split.forward(split.cast(params), x)

        def forward(params: Arrays, x: Arrays) -> tuple[list, tuple]:
            y, stored_b, stored_w = split.forward_and_store(split.cast(params), x)
            return y, (params, stored_b, stored_w)

        def backward(kept: tuple, ct: Arrays) -> tuple[list, list]:
            params, stored_b, stored_w = kept
            dx, dp = split.backward(split.cast(params), stored_b, stored_w, [ct[i] for i in y_floats])
            of_float = dict(zip(floats, dx, strict=True))
            return dp, [of_float.get(i) for i in range(num_leaves)]  # None: no derivative

        run.defvjp(forward, backward)
        return jax.tree.unflatten(y_tree, run(p_leaves, x_leaves))

    return stored_least
