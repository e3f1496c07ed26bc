"""The rules as tables: what each operation of JAX makes of values that depend on the rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpar.row_dependence import collectives, dims, elements, indices, parts, products
from jaxpar.row_dependence.operation import Operation
from jaxpar.row_dependence.values import Value, Values, of_number

Rule = Callable[[Operation, Values], Value | list[Value]]

_RULES: dict[str, Rule] = {
    # elements
    "add sub add_any": elements.added,
    "mul": elements.multiplied,
    "div": elements.divided,
    "max": elements.largest,
    "select_n": elements.chosen,
    "stop_gradient": elements.stopped,
    "sqrt": elements.rooted,
    "square integer_pow": elements.squared,
    "convert_element_type": elements.converted,
    "neg copy real imag conj reduce_precision name": elements.unchanged,
    "sharding_constraint layout_constraint pvary device_put reshard": elements.unchanged,
    "with_memory_space_constraint optimization_barrier": elements.unchanged,
    "tie": elements.last,
    "pure_callback io_callback": elements.believed,
    "complex igamma igammac regularized_incomplete_beta bessel_i0e bessel_i1e": elements.elementwise,
    "exp exp2 expm1 log log1p tanh sin cos tan asin acos atan sinh cosh": elements.elementwise,
    "asinh acosh atanh rsqrt cbrt abs sign floor ceil round is_finite not": elements.elementwise,
    "population_count clz logistic erf erfc erf_inv lgamma digamma polygamma": elements.elementwise,
    "pow min rem and or xor eq ne lt le gt ge eq_to lt_to le_to nextafter": elements.elementwise,
    "atan2 shift_left shift_right_logical shift_right_arithmetic clamp zeta": elements.elementwise,
    "mulhi bitcast_convert_type threefry2x32 random_seed": elements.elementwise,
    "random_bits random_gamma random_split random_fold_in": elements.drawn,
    "random_wrap random_unwrap random_clone": elements.elementwise,
    "log2 one_minus_square polynomial igamma_grad_a": elements.elementwise,
    "to_edtype from_edtype threefry4x32 philox2x32 philox4x32": elements.elementwise,
    # dims
    "reduce_sum reduce_max reduce_min reduce_prod": dims.reduced,
    "reduce_and reduce_or reduce_xor argmax argmin": dims.reduced,
    "broadcast_in_dim": dims.broadcast,
    "reshape squeeze": dims.reshaped,
    "transpose": dims.transposed,
    "slice": parts.sliced,
    "concatenate": parts.concatenated,
    "iota": dims.counted,
    "stack": dims.stacked,
    "unstack": dims.unstacked,
    "tile": dims.tiled,
    "pad": dims.along(dims.padded, adds=True),
    "split": parts.split,
    "rev": dims.along(lambda params: params["dimensions"], adds=True),
    "cumsum": dims.along(lambda params: [params["axis"]], adds=True),
    "cumprod cummax cummin cumlogsumexp": dims.along(lambda params: [params["axis"]]),
    "sort": dims.along(lambda params: [params["dimension"]]),
    "top_k": dims.along(lambda params: [params.get("axis", -1)]),
    "fft": dims.along(lambda params: range(-len(params["fft_lengths"]), 0)),
    "approx_top_k": dims.along(lambda params: [params["reduction_dimension"]]),
    "reduce_window reduce_window_max reduce_window_min reduce_window_sum": dims.along(dims.windows),
    "select_and_gather_add select_and_scatter_add": dims.along(dims.windows),
    "cholesky lu qr eig eigh svd schur hessenberg": dims.along(lambda _: (-2, -1)),
    "geqrf householder_product tridiagonal": dims.along(lambda _: (-2, -1)),
    "lu_pivots_to_permutation": dims.along(lambda _: [-1]),
    # indices
    "dot_general": products.multiplied_matrices,
    "triangular_solve": products.solved_triangle,
    "conv_general_dilated": products.convolved,
    "dot_product_attention_fwd dot_product_attention_fwd_wrapper": products.by_batch,
    "planned_attention": products.by_batch,
    "gather": indices.gathered,
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": indices.scattered,
    "dynamic_slice": indices.sliced_at,
    "dynamic_update_slice": indices.updated_at,
    # collectives
    "psum": collectives.summed,
    "pmax pmin": collectives.largest,
    "all_gather": collectives.gathered,
    "all_to_all": collectives.exchanged,
    "ppermute axis_index": collectives.sent,
}
RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}

# Whose results are functions of the elements at the same place.
_OF_PLACES = (elements.drawn, elements.believed, elements.last)
OF_ELEMENTS = frozenset(
    name
    for name, rule in RULES.items()
    if rule.__module__ == elements.__name__ and rule not in _OF_PLACES
)

# What draws random numbers of keys that do not depend on rows.
DRAWS = frozenset(
    [
        "random_bits",
        "random_split",
        "random_gamma",
        "rng_bit_generator",
        "rng_uniform",
    ]
)

# Whose rules know what to do with values that mix rows. All others make such values of them.
TAKE_MIXED = frozenset(
    [
        "select_n",
        "stop_gradient",
        "sub",
        "square",
        "integer_pow",
        "copy",
        "convert_element_type",
        "psum",
        "pmax",
        "pmin",
        "all_gather",
        "all_to_all",
        "ppermute",
    ]
)

# Whose rules know what to do with a sum that a loop over rows carries.
KEEP_RUNNING = frozenset(
    [
        *("add", "add_any", "sub", "mul", "div", "select_n"),
        *("copy", "convert_element_type", "optimization_barrier", "scatter-add", "scatter-sub"),
    ]
)

# Of constants that are numbers: their number is known.
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "square": np.square,
    "pow": np.power,
    "integer_pow": np.float_power,
    "exp": np.exp,
    "log": np.log,
    "floor": np.floor,
    "ceil": np.ceil,
    "rsqrt": lambda x: x**-0.5,
    "convert_element_type": np.asarray,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def computed(op: Operation, given: Values) -> Value:
    """Returns a number made of numbers."""
    numbers = zip(*(v.number for v in given if v.number), strict=True)
    exponent = [op.params["y"]] if op.name == "integer_pow" else []
    with np.errstate(all="ignore"):
        few, many = (OF_NUMBERS[op.name](*each, *exponent) for each in numbers)
        if op.name == "div" and not op.is_float():
            few, many = np.trunc(few), np.trunc(many)
    return of_number(few, many)
