"""Names for the policies of rematerialisation: which activations of a layer are stored for its backward pass.

    none    stores the values that elementwise operations cannot recompute from fewer bytes (``backward/min_cut.py``)
    dots    of those, stores products with weights and outputs of a fused attention kernel; recomputes attention scores
    full    stores only the input of the layer

For a layer of TinyLlama 1.1B (2048 wide, bfloat16, cuDNN's attention) they store about 39, 39 and 4 KiB per token, and
``jax.vjp`` stores 121. "dots" saves memory for attention without a fused kernel, which otherwise stores scores.

**Reference**: Chen et al. 2016, arXiv 1604.06174; "dots" is the selective recomputation of Korthikanti et al. 2022, arXiv
2205.05198, section 5.
"""

from collections.abc import Callable
from typing import Any

import jax

_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def keep_products(primitive: Any, *args: Any, **params: Any) -> Any:
    """A ``jax.checkpoint`` policy: saves products with weights and outputs of cuDNN's ``jax.nn.dot_product_attention``.

    It treats the planner's stand-in for that kernel alike.
    """
    return primitive.name.startswith(("dot_product_attention", "planned_attention")) or _products(
        primitive, *args, **params
    )


# The argument of `value_and_grad(remat=...)`, by name.
REMAT: dict[str, bool | Callable[..., Any]] = {"none": False, "full": True, "dots": keep_products}
