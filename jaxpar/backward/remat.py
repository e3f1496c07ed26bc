"""Which activations of a layer are kept for its backward pass and which are computed again, by name.

    none    kept is what elementwise operations cannot make again from less (``backward/min_cut.py``)
    dots    of that, products with weights and what a fused attention kernel gives; scores are computed again
    full    none is kept but the layer's input

For a layer of TinyLlama 1.1B (2048 wide, bfloat16, cuDNN's attention) these are about 39, 39 and 4 KiB a token, where
``jax.vjp`` keeps 121. "dots" is for attention without a fused kernel, which has scores to store.

**Reference**: Chen et al. 2016, arXiv 1604.06174; "dots" is the selective recomputation of Korthikanti et al. 2022, arXiv
2205.05198, section 5.
"""

from collections.abc import Callable
from typing import Any

import jax

_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def keep_products(primitive: Any, *args: Any, **params: Any) -> Any:
    """A ``jax.checkpoint`` policy: keeps products with weights, and what ``jax.nn.dot_product_attention`` gives by cuDNN."""
    return primitive.name.startswith("dot_product_attention") or _products(primitive, *args, **params)


# What `value_and_grad(remat=...)` takes, by its name.
REMAT: dict[str, bool | Callable[..., Any]] = {"none": False, "full": True, "dots": keep_products}
