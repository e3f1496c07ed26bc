"""Products with weights in FP8: bytes for factors, float32 for sums, a scale for each tensor.

    x [rows, in]  --/ scale, rounded-->  e4m3      of  x and w: 4 bits of exponent, 3 of mantissa
    w [in, out]   --/ scale, rounded-->  e4m3
    ct [rows, out]  --/ scale, rounded-->  e5m2    of cotangents: a wider range, 2 bits of mantissa

    forward                y  = x8 w8        times the scales of both
    gradient of rows       dx = ct8 w8^T     likewise
    gradient of weights    dw = x8^T ct8     likewise

A scale is current: it is that of the tensor at hand, so there is no state. The largest absolute
value of the tensor becomes the largest number of the dtype, 448 or 57,344, and none overflows.

The three products are separate calls of a ``jax.custom_vjp``, since a pipeline's backward pass
computes the gradient of weights later than that of rows. For the latter x is stored as bytes, with
its scale; weights are rounded again.

The factors are in FP8 where the product reads them, and the scales are multiplied after it: of
that XLA makes cuBLASLt's FP8 product, which an H100 runs at up to twice the rate of a 16-bit one.
Where factors are scaled back before the product, it runs in 16 bits. ``check_products`` finds it.

**Reference**: Micikevicius et al. 2022, arXiv 2209.05433, for the dtypes.
"""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar._compat import equations, opened, partial_eval, row_major
from jaxpar.context_parallel import max_over_sequence
from jaxpar.devices import HOPPER_OR_LATER, on_gpus, traced_kind
from jaxpar.dtypes import wide_dtype
from jaxpar.fields import arg
from jaxpar.row_dependence import row_wise

OF_VALUES = jnp.float8_e4m3fn
OF_COTANGENTS = jnp.float8_e5m2

MULTIPLE = 16  # of each width of a product, by cuBLASLt
LEAST_WIDTH = 1024  # of both, for a model's products: below, rounding takes longer than is saved
PASSES = 3  # forward, gradient of rows, gradient of weights

# A tensor whose values are all below this counts as zeros: its scale would be no normal float32.
_LEAST = 1e-33
_NAME = "fp8_product"  # of the operations, in a compiled program

Dims = tuple[tuple[int, ...], tuple[int, ...]]


class Bytes(NamedTuple):
    """A tensor in FP8.

    Attributes:
        units: Its values divided by the scale, rounded.
        scale: In float32 or wider.
    """

    units: Float[Array, "..."]
    scale: Float[Array, ""]


Residuals = tuple[Bytes, Array]  # x, and w


def fits(*widths: int) -> bool:
    """Returns whether a model's product with a weight of these widths is one in FP8."""
    are_multiples = all(width % MULTIPLE == 0 for width in widths)
    return min(widths) >= LEAST_WIDTH and are_multiples


def dot(
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    num_in: int = 1,
) -> Array:
    """Returns x times a weight, computed in FP8, and so are its gradients.

    It may be called in any layer. Each value of x, w and of the gradient of the result is rounded
    to 3 or 2 bits of mantissa, with one scale for the whole tensor that a device has: in
    ``value_and_grad`` that of a microbatch. So a row's rounding depends on the other rows of its
    microbatch; otherwise rows are multiplied each on its own, and the function is ``row_wise``.

    Args:
        x: Rows ``[*rows, *in]``.
        w: The weight ``[*in, *out]``.
        num_in: The number of dims that are summed over.

    Returns:
        ``[*rows, *out]`` in the dtype of x. The gradients have the dtypes of x and w.

    Raises:
        ValueError: The widths, the products of the in and of the out dims, are no multiples of 16;
            or it is traced for GPUs before NVIDIA's Hopper, which have no products in FP8.

    **Collectives**: over ``context`` the maximum of a scalar for x and one for the gradient; where
    ``tensor`` splits one of the three tensors, one for it, and for w one more in the backward pass.
    """
    ins, outs = w.shape[:num_in], w.shape[num_in:]
    check_widths(math.prod(ins), math.prod(outs))
    if on_gpus():
        check_gpu(traced_kind())
    product = lambda x, w: _dot(x, w, num_in)
    return row_wise(product)(x, w)


def check_widths(num_in: int, num_out: int) -> None:
    """Raises ValueError for a weight ``[num_in, num_out]`` that a product in FP8 does not take."""
    are_multiples = not (num_in % MULTIPLE or num_out % MULTIPLE)
    if not are_multiples or 0 in (num_in, num_out):
        raise ValueError(
            f"the widths of a product in FP8 must be multiples of {MULTIPLE}; got a weight of "
            f"{num_in} by {num_out}. Multiply by x @ w instead, or choose other widths."
        )


def check_gpu(kind: str) -> None:
    """Raises ValueError for a GPU, by the name that JAX gives it, without products in FP8."""
    if not re.search(HOPPER_OR_LATER, kind):
        raise ValueError(
            "products in FP8 need an NVIDIA GPU of the architecture Hopper, such as H100, or a "
            f"later one; got {kind}. Choose {arg(products='compute')} for a transformer, and "
            "x @ w elsewhere."
        )


# The products -----------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x: Array, w: Array, num_in: int) -> Array:
    return _forward(x, w, num_in)[0]


def _forward(
    x: Array,
    w: Array,
    num_in: int,
) -> tuple[Array, Residuals]:
    x8 = to_bytes(x, OF_VALUES, is_of_rows=True)
    # This product reads w transposed, and that of the backward pass as it is. Where a loop runs the
    # layers, XLA would keep the 16-bit weights of all of them in both orders.
    w8 = to_bytes(row_major(w) if on_gpus() else w, OF_VALUES)
    dims = _last(x, num_in), _first(w, num_in)
    sums = _sums_of_rows(x.dtype)
    y = _product(x8, w8, dims, sums)
    return y.astype(x.dtype), (x8, w)


def _backward(
    num_in: int,
    residuals: Residuals,
    ct: Array,
) -> tuple[Array, Array]:
    x8, w = residuals
    scale = scale_of(w, OF_VALUES)
    # Otherwise XLA would find that F has rounded w too, and keep the bytes of all layers.
    w, ct = jax.lax.optimization_barrier((w, ct))
    w8 = _rounded(w, scale, OF_VALUES)
    ct8 = to_bytes(ct, OF_COTANGENTS, is_of_rows=True)

    num_out = w.ndim - num_in
    dims = _last(ct, num_out), _last(w, num_out)
    dx = _product(ct8, w8, dims, _sums_of_rows(ct.dtype))

    rows = _first(ct, ct.ndim - num_out)
    # Not rounded before they are added to those of other microbatches.
    dw = _product(x8, ct8, (rows, rows), wide_dtype(w.dtype))
    return dx.astype(ct.dtype), dw.astype(w.dtype)


_dot.defvjp(_forward, _backward)


def to_bytes(
    x: Float[Array, "..."],
    dtype: Any,
    *,
    is_of_rows: bool = False,
) -> Bytes:
    """Returns a tensor in FP8, with one scale that its largest absolute value gives.

    Args:
        x: The tensor.
        dtype: ``OF_VALUES`` or ``OF_COTANGENTS``.
        is_of_rows: Whether ``context`` splits it.
    """
    scale = scale_of(x, dtype, is_of_rows=is_of_rows)
    return _rounded(x, scale, dtype)


def scale_of(
    x: Float[Array, "..."],
    dtype: Any,
    *,
    is_of_rows: bool = False,
) -> Float[Array, ""]:
    """Returns the scale of a tensor, the arguments as of ``to_bytes``; of zeros it is 1."""
    largest = jnp.max(jnp.abs(x))
    largest = largest.astype(wide_dtype(x.dtype))
    if is_of_rows:
        largest = max_over_sequence(largest)
    scale = largest / _largest_number(dtype)
    return jnp.where(largest < _LEAST, 1, scale)


def _rounded(x: Array, scale: Array, dtype: Any) -> Bytes:
    most = _largest_number(dtype)
    units = x.astype(scale.dtype) * (1 / scale)
    # The largest value may be rounded to one above the largest number, which would be no number.
    units = jnp.clip(units, -most, most)
    return Bytes(units.astype(dtype), scale)


def _largest_number(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)


def _product(
    a: Bytes,
    b: Bytes,
    dims: Dims,
    sums: Any,
) -> Array:
    """Returns the product over ``dims``, scaled in float32 or wider, of sums in that dtype."""
    no_batch = (), ()
    with jax.named_scope(_NAME):
        product = jax.lax.dot_general(
            a.units,
            b.units,
            (dims, no_batch),
            preferred_element_type=sums,
        )
    scale = a.scale * b.scale
    return product.astype(scale.dtype) * scale


def _sums_of_rows(dtype: Any) -> Any:
    """Returns the dtype to which sums, which are in float32, are rounded before they are scaled.

    It is that of the rows, since as many bytes are written and added over ``tensor``, unless sums
    of up to 448 * 448 * in would overflow, as they do in float16.
    """
    return jnp.promote_types(dtype, jnp.bfloat16)


def _first(x: Array, count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _last(x: Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


# Their form in a compiled program ---------------------------------------------------------------


def check_products(
    program: str | None,
    least: int = 0,
) -> None:
    """Raises ValueError where a GPU would compute products in 16 bits that were asked for in FP8.

    Args:
        program: The text of the compiled program, as ``compiled.as_text()`` returns it.
        least: The number of products in FP8 that it must have at least.
    """
    count, others = products_of(program or "")
    if others or count < least:
        kinds = ", ".join(sorted(set(others)))
        wanted = f" at least {least}" if least else ""
        found = f", and {kinds} in place of others" if others else ""
        raise ValueError(
            f"a step in FP8 must have{wanted} products of factors in FP8, {PASSES} for each "
            f"weight that is trained; got {count}{found}, which XLA chose and which take longer. "
            "Leave out flags of XLA_FLAGS that choose kernels for products, take a version of JAX "
            f"that constraints.txt names, or choose {arg(products='compute')}."
        )


def num_asked(jaxpr: Any) -> int:
    """Returns the number of products of factors in FP8 in a traced function, each once.

    Those that no output needs are not among them, and XLA leaves them out: below the lowest of
    the factors of LoRA no layer need pass on the gradient of its input.
    """
    dtypes = {jnp.dtype(OF_VALUES), jnp.dtype(OF_COTANGENTS)}
    whole = opened(jaxpr)
    needed, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))
    products = [each for each in equations(needed) if each.primitive.name == "dot_general"]
    return sum({x.aval.dtype for x in each.invars} <= dtypes for each in products)


def products_of(program: str) -> tuple[int, list[str]]:
    """Returns the number of products in FP8 in a GPU's program, each once, and what others became.

    In FP8 are cuBLASLt's, and those that XLA writes itself (Triton) of two factors in FP8. Others
    are products that were traced in FP8 and whose factors are in another dtype.
    """
    count = 0
    others: list[str] = []
    dtypes: dict[str, str] = {}
    for line in program.splitlines():
        if defined := _DEFINED.match(line):
            name, dtype = defined.groups()
            dtypes[name] = dtype
        product = _PRODUCT.search(line)
        if product is None:
            continue
        factors, call = product.groups("dot")
        names = factors.replace("%", "").split(", ")
        of_factors = [dtypes.get(name, "") for name in names]
        if call == CALL or all(each.startswith("f8") for each in of_factors):
            count += 1
        elif f"{_NAME}/" in line:
            others.append(call)
    return count, others


CALL = "__cublas$lt$matmul$f8"
_DEFINED = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[")
_PRODUCT = re.compile(r' dot\(([^)]*)\)| custom-call\(.*custom_call_target="(__cublas[^"]*)"')
