"""Which params of a model its outputs do not depend on, so that their gradients are 0.

Of stacked layers a scan hides that a layer ignores what it is given: it carries x from one to the next whatever they read. So
the needed parts of x are followed from the head back, layer by layer, to the embedding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jaxpar._compat import opened, partial_eval
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers


def is_read(jaxpr: Any, needed: Sequence[bool] | None = None) -> list[bool]:
    """Returns of each input of a jaxpr whether its outputs depend on it, or those that are needed."""
    inner = opened(jaxpr)
    needed = [True] * len(inner.outvars) if needed is None else needed
    return list(partial_eval.dce_jaxpr(inner, needed)[1])


def unread_of_layers(model: LayeredModel, params: PyTree, batch: PyTree) -> set[int]:
    """Returns the indices of the params of a model with stacked layers on which its outputs do not depend.

    Args:
        model: The model.
        params: Their shapes.
        batch: That of a microbatch.
    """
    if not is_stacked(params):  # written out, nothing hides
        return set()
    one_layer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params[LAYERS]
    )
    embed, x = _traced(model.embed, params[OUTER], batch)
    (function,) = model.layers(1)
    layer, _ = _traced(function, one_layer, x)
    head, _ = _traced(model.head, params[OUTER], x)
    num_outer, num_own = (len(jax.tree.leaves(tree)) for tree in (params[OUTER], one_layer))

    by_head = is_read(head)
    needed, of_layer = by_head[num_outer:], [False] * num_own
    for _ in range(num_layers(params)):
        reads = is_read(layer, needed)
        of_layer = [a or b for a, b in zip(of_layer, reads, strict=False)]
        if reads[num_own:] == needed:
            break
        needed = reads[num_own:]
    by_embed = is_read(embed, needed)
    of_outer = [a or b for a, b in zip(by_head[:num_outer], by_embed, strict=False)]
    flags = {OUTER: of_outer, LAYERS: of_layer}
    read = [flag for part in sorted(params) for flag in flags[part]]  # as jax.tree has the keys
    return {index for index, flag in enumerate(read) if not flag}


def _traced(function: Callable[..., PyTree], *given: PyTree) -> tuple[Any, PyTree]:
    return jax.make_jaxpr(function, return_shape=True)(*given)
