"""All uses of JAX API that is private or still changes, so that a new JAX breaks only this file (``tests/test_compat.py``).

jaxprs          equations of a traced function: read, bind, rewrite, evaluate
coordination    the client of a run of several processes; devices for the compiler alone
memory          the order of dims in memory; arrays without initial values
operations      primitives of jaxpar's own
kernels         cuDNN's attention with what merges its parts
known faults    of the installed version
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed as _distributed
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.source_info_util import current_name_stack, user_context
from jax.interpreters import mlir, partial_eval
from jaxtyping import PyTree

__all__ = ["Literal", "Primitive", "Tracer", "partial_eval"]

# A sum of an array without elements inside a partly manual shard_map ends the process, on CPU at least; seen with JAX 0.11.2.
EMPTY_ARRAYS_CRASH = jax.__version_info__ >= (0, 11)

# A conditional copies the arrays that it returns, on GPUs; seen with JAX 0.10.2.
COND_COPIES_ON_GPU = jax.__version_info__ < (0, 11)

# Of XLA for GPUs: in a loop it gathers for the next trip while one computes.
PIPELINED_ALL_GATHER: dict[str, bool | str] = (
    {"xla_gpu_enable_pipelined_all_gather": True}
    if jax.__version_info__ < (0, 11)
    else {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
)

# XLA for GPUs runs a kernel twice whose result is both written into a stack and read; seen with JAX 0.11.2.
EACH_KERNEL_ONCE: tuple[str, ...] = (
    ("--xla_gpu_enable_dynamic_slice_fusion=false",) if (0, 11) <= jax.__version_info__ < (0, 12) else ()
)

# The primitive of jax.checkpoint; under ``jax_remat3``, of JAX 0.12, one that holds another, of this class.
_REMAT, _HOLDER, _REMAT_3 = "remat2", "call_hi_primitive", "RematTraced"
# The parameter that holds the jaxpr of a call; eval_jaxpr is of JAX 0.11.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr", _REMAT: "jaxpr"}
_HOLDS_JAXPRS = (*_CALLS, "cond", "scan", "shard_map", "while")
_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")
_REFERENCE_EFFECTS = ("InternalMutableArrayEffect", "ReadEffect", "WriteEffect", "AccumEffect")
_AXIS_EFFECT = "NamedAxisEffect"  # of a collective: it names a mesh axis


# Processes and devices ------------------------------------------------------------------------------------------------------


def coordination() -> Any:
    """Returns the state of ``jax.distributed``: ``client`` (None until initialised), ``process_id``, ``num_processes``."""
    return _distributed.global_state


def has_started() -> bool:
    """Returns whether JAX has used a device, after which XLA reads no flags."""
    return xla_bridge.backends_are_initialized()


def backend_errors() -> dict[str, str]:
    """Returns why JAX cannot use a platform, such as "cuda", by its name; nothing before JAX has used a device."""
    return dict(xla_bridge._backend_errors)


def is_compile_only(device: jax.Device) -> bool:
    """Returns whether a device exists for the compiler alone."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


# Memory ---------------------------------------------------------------------------------------------------------------------


def row_major(array: jax.Array) -> jax.Array:
    """Returns an array whose last dim XLA must keep contiguous in memory, then the one before it, and so on."""
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def empty(shape: Sequence[int], dtype: Any, number: int) -> jax.Array:
    """Returns an array without initial values on a CPU, and zeros on other devices.

    ``jax.lax.empty`` writes zeros on a CPU too. The custom call behind ``jax.lax.dce_sink`` does nothing, so none are written.

    Args:
        shape: Its shape on one device: XLA replicates the result over an automatic axis.
        dtype: Its dtype.
        number: Another for each array of a program; XLA takes equal calls for one array, and then copies it.
    """
    sink = jax.ffi.ffi_call("dce_sink", jax.ShapeDtypeStruct(shape, dtype))
    return jax.lax.platform_dependent(cpu=lambda: sink(np.int32(number)), default=lambda: jnp.zeros(shape, dtype))


# Operations -----------------------------------------------------------------------------------------------------------------


def operation(name: str, function: Callable[..., jax.Array], shape: Callable[..., Any]) -> Primitive:
    """Returns a primitive that is one equation of a jaxpr, and that is compiled as a function of the same arguments.

    Args:
        name: Its name.
        function: ``function(*arrays, **params)`` returns an array.
        shape: ``shape(*avals, **params)`` returns its abstract value, such as one of the given ones with ``update``.
    """
    made = Primitive(name)
    made.def_abstract_eval(shape)
    compiled = jax.jit(lambda params, *arrays: function(*arrays, **dict(params)), static_argnums=0)
    made.def_impl(lambda *arrays, **params: compiled(tuple(params.items()), *arrays))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


# Kernels --------------------------------------------------------------------------------------------------------------------


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    lengths: tuple | None,
    bias: jax.Array | None,
    documents: tuple | None = None,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns cuDNN's attention and, in float32, the logarithm of the sum of exponentials of each query's scores.

    ``jax.nn.dot_product_attention`` rounds the latter to 16 bits, and its derivative ignores the cotangent.

    Args:
        q: Queries ``[rows, seq, heads, head_dim]``, in 16-bit floats.
        k: Keys ``[rows, keys, kv_heads, head_dim]``.
        v: Values, likewise.
        scale: Factor of the scores.
        lengths: None: causal; else how many queries, the first of each row, see how many of its keys: two arrays [rows].
        bias: Added to the scores, ``[rows or 1, heads or 1, seq, keys]``; None: nothing.
        documents: The documents of all rows, at most ``most`` a row (2 or more), causal each: lengths of queries and keys
            [rows, most], and where both begin [rows, most + 1], in elements, those of all rows first. Then XLA cannot partition
            the call, and the sums are [rows * most, heads, seq], from the first query of each document. None: rows are whole.
        window: How many keys each query sees, its own included; None: all that it may.
    """
    operands, settings, is_whole = _cudnn_call(q, scale, lengths, bias, documents, window)
    primitive = _cudnn._dot_product_attention_fwd_p_wrapper if is_whole else _cudnn._dot_product_attention_fwd_p
    out, lse = primitive.bind(q, k, v, *operands, **settings, is_training=True)
    return out, lse


def cudnn_attention_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, ct: jax.Array, *how: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v; ``how`` is what follows v in ``cudnn_attention``.

    ``out`` and ``lse`` may be those of a softmax over more keys than these.
    """
    operands, settings, is_whole = _cudnn_call(q, *how)
    primitive = _cudnn._dot_product_attention_bwd_p_wrapper if is_whole else _cudnn._dot_product_attention_bwd_p
    dq, dk, dv = primitive.bind(q, k, v, *operands, lse, out, ct, **settings)
    return dq, dk, dv


def _cudnn_call(
    q: jax.Array, scale: float, lengths: Any, bias: Any, documents: Any = None, window: int | None = None
) -> tuple[list, dict[str, Any], bool]:
    """Returns the operands of both primitives after q, k and v, those of pages empty, their parameters, and which ones."""
    none, masks = jnp.zeros(0, q.dtype), _cudnn.MaskType
    mask = masks.CAUSAL if lengths is None else masks.PADDING
    settings = {
        "scale": float(scale),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # there is a bias, and its gradient is asked for
        "mask_type": mask if documents is None else masks.PADDING_CAUSAL,
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **_SCORE_MOD[documents is None],
    }
    places = documents or (*(lengths or (none, none)), none, none)
    return [none if bias is None else bias, *places, none, none], settings, documents is None


# Since JAX 0.12 the primitives, wrapped or not, may be given functions of the scores.
_SCORE_MOD: dict[bool, dict[str, None]] = {True: {}, False: {}}
if jax.__version_info__ >= (0, 12):
    _SCORE_MOD = {True: {"score_mod": None}, False: {"score_mod_name": None, "score_mod_jaxpr": None}}


# Jaxprs ---------------------------------------------------------------------------------------------------------------------


def is_jaxpr(value: Any) -> bool:
    """Returns whether a value is a jaxpr, open or closed; since JAX 0.11 the two are one class."""
    return isinstance(value, ClosedJaxpr | Jaxpr)


def opened(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one, and an open one itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, open or closed, and of those inside its equations, except those of kernels."""
    for equation in opened(jaxpr).eqns:
        yield from with_inner(equation)


def with_inner(equation: Any) -> Iterator[Any]:
    """Yields an equation and those inside it, except those of a kernel."""
    yield equation
    if equation.primitive.name != "pallas_call":
        for param in jax.tree.leaves(list(_params(equation).values()), is_leaf=is_jaxpr):
            if is_jaxpr(param):
                yield from equations(param)


def is_remat(equation: Any) -> bool:
    """Returns whether an equation is a ``jax.checkpoint``."""
    return _name(equation) == _REMAT


def _name(equation: Any) -> str:
    """Returns the name of an equation's primitive."""
    is_new = equation.primitive.name == _HOLDER and type(equation.params["_prim"]).__name__ == _REMAT_3
    return _REMAT if is_new else equation.primitive.name


def _params(equation: Any) -> dict[str, Any]:
    """Returns the parameters of an equation's primitive, or of the one that it holds."""
    return equation.params["_prim"].params if equation.primitive.name == _HOLDER else equation.params


def constraint_of(equation: Any) -> Any:
    """Returns the sharding of an equation that only constrains one, also as a ``jax.custom_vjp``; None for other equations."""
    own = [equation]
    if equation.primitive.name.startswith("custom_vjp_call"):
        own = list(equations(equation.params["call_jaxpr"]))
    is_one = [inner.primitive.name == "sharding_constraint" for inner in own]
    return own[-1].params["sharding"] if own and all(is_one) else None


def has_reference_effects(equation: Any) -> bool:
    """Returns whether an equation makes, reads or writes a ``jax.new_ref``."""
    effects = {type(effect).__name__ for effect in equation.effects}
    return not effects.isdisjoint(_REFERENCE_EFFECTS)


def has_side_effects(equation: Any) -> bool:
    """Returns whether an equation has side effects, such as those of ``jax.debug.print``; that it names an axis is none."""
    return any(type(effect).__name__ != _AXIS_EFFECT for effect in equation.effects)


def has_known_trips(loop: Any) -> bool:
    """Returns whether a ``while`` equation counts from one number that is written in it to another, in steps of a third.

    ``jax.lax.fori_loop`` between Python numbers is a ``scan``, so this is a loop that its author counts by hand.
    """
    num_before = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    condition, body = opened(loop.params["cond_jaxpr"]), opened(loop.params["body_jaxpr"])
    up = {"lt": 1, "le": 1, "gt": -1, "ge": -1}, {"add": 1, "sub": -1}
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name not in up[0]:
        return False
    (compare,), carried = condition.eqns, list(condition.invars[num_before[0] :])
    counter, limit = compare.invars
    if counter not in carried or not isinstance(limit, Literal):
        return False
    at = carried.index(counter)
    old, new, first = body.invars[num_before[1] + at], body.outvars[at], loop.invars[sum(num_before) + at]
    steps = [e for e in body.eqns if new in e.outvars and e.primitive.name in up[1] and e.invars[0] is old]
    if not steps or not isinstance(first, Literal) or not isinstance(step := steps[0].invars[1], Literal):
        return False
    return bool(up[0][compare.primitive.name] * up[1][steps[0].primitive.name] * step.val > 0)


def called(equation: Any) -> Any:
    """Returns the closed jaxpr of a call that can be inlined; None for other equations, and for jits that set shardings."""
    key, params = _CALLS.get(_name(equation)), _params(equation)
    if key is None or key not in params:
        return None
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    inner = params[key]
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def inlined(equation: Any) -> Any:
    """Returns the jaxpr of a call, also of one with a derivative of its own; None for other equations."""
    params, name = _params(equation), _name(equation)
    held = [params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params]
    is_call = name in _CALLS or name == "composite" or name.startswith("custom_")
    return held[0] if is_call and held and is_jaxpr(held[0]) else None


def scan_counts(equation: Any) -> tuple[int, int]:
    """Returns how many of the inputs of a scan are constants, and how many it carries.

    Its parameters changed with JAX 0.11. Inputs and outputs that are neither have one dim more than in the body.
    """
    body = opened(equation.params["jaxpr"])
    pairs = zip(equation.invars, body.invars, strict=True), zip(equation.outvars, body.outvars, strict=True)
    num_inputs, num_carry = (sum(a.aval.shape == b.aval.shape for a, b in each) for each in pairs)
    return num_inputs - num_carry, num_carry


def source_line(equation: Any) -> str:
    """Returns the user's line of code that made an equation, "file:line:column (function)"; "" if none is known."""
    return _source_info.summarize(equation.source_info)


def linear_solve(equation: Any) -> tuple[Any, int, int]:
    """Returns the jaxpr by which a ``custom_linear_solve`` solves, the number of its constants, and where they start."""
    counts = equation.params["const_lengths"]
    return equation.params["jaxprs"].solve, counts.solve, counts.matvec + counts.vecmat


def literal_value(literal: Any) -> Any:
    """Returns the value of a literal as an array; JAX may hold it as a Python number."""
    return np.asarray(literal.val, literal.aval.dtype) if np.isscalar(literal.val) else literal.val


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation for other inputs, under the mesh that is set now, with the user's source line."""
    params = equation.primitive.get_bind_params(equation.params)
    stack = current_name_stack() + equation.source_info.name_stack
    source = user_context(equation.source_info.traceback, name_stack=stack)
    here = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    with source, equation.ctx.manager, here:
        made = equation.primitive.bind(*inputs, **params)
    return list(made) if equation.primitive.multiple_results else [made]


def rewrite(jaxpr: Any, change: Callable[[Sequence[Any], Sequence[Any]], list[Any]]) -> Any:
    """Returns a jaxpr with ``change(equations, outputs)`` in place of its equations, and so in loops, branches and calls."""
    if (inner := opened(jaxpr)) is not jaxpr:
        return jaxpr.replace(jaxpr=rewrite(inner, change))

    def inside(equation: Any) -> Any:
        if _name(equation) not in _HOLDS_JAXPRS:
            return equation
        one = lambda value: rewrite(value, change) if is_jaxpr(value) else value
        of = lambda value: tuple(map(one, value)) if isinstance(value, tuple) else one(value)
        params = {name: of(value) for name, value in _params(equation).items()}
        if equation.primitive.name == _HOLDER:
            params = {"_prim": type(equation.params["_prim"])(**params)}
        return equation.replace(params=params)

    return jaxpr.replace(eqns=change([inside(equation) for equation in jaxpr.eqns], jaxpr.outvars))


def evaluate(closed: Any, leaves: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr."""
    return jaxpr_as_fun(closed)(*leaves)


def rewritten(function: Callable[..., PyTree], change: Callable, *args: PyTree, run: Callable = evaluate) -> PyTree:
    """Returns ``function(*args)``, computed by ``run(jaxpr, leaves)``, such as ``evaluate``, after ``rewrite``."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return _evaluate(rewrite(closed, change), shapes, args, run)


def closure_converted(function: Callable[..., PyTree], *args: PyTree) -> tuple[Callable[..., PyTree], list[jax.Array]]:
    """Returns ``(converted, tracers)``: ``converted(tracers, *args)`` is the function with the tracers that it closes over.

    A model made inside ``jax.jit`` closes over such values; a ``jax.custom_vjp`` in a scan must not.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    indices = [i for i, constant in enumerate(closed.consts) if isinstance(constant, Tracer)]

    def converted(tracers: Sequence[jax.Array], *args: PyTree) -> PyTree:
        constants = list(closed.consts)
        for i, value in zip(indices, tracers, strict=True):
            constants[i] = value
        return _evaluate(closed.replace(consts=constants), shapes, args)

    return converted, [closed.consts[i] for i in indices]


def literals(jaxpr: Any) -> list[Any]:
    """Returns the values that are written into a jaxpr's equations, in their order: 8.0 of a mean over 8 rows."""
    inputs = (x for equation in equations(jaxpr) for x in equation.invars)
    return [x.val for x in inputs if isinstance(x, Literal)]


def drawn_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of the random numbers that a jaxpr draws, in the order of its equations."""
    draws = (equation for equation in equations(jaxpr) if equation.primitive.name in _DRAWS)
    return [v.aval.shape for equation in draws for v in equation.outvars]


def _evaluate(closed: Any, shapes: PyTree, args: tuple, run: Callable = evaluate) -> PyTree:
    made = run(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, made))  # constants are NumPy arrays
