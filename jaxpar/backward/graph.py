"""Traced functions as graphs of values that can be cut and run in parts. All use of JAX's jaxprs is here.

JAX's own interface to jaxprs still moves, so a traced function becomes a Graph of our own at once: numbered values, and
nodes that each bind one primitive. Calls of jitted functions are written out in place, so that a cut can pass through them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.extend.source_info_util import current_name_stack, user_context
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}
_REMAT = ("remat2", "checkpoint")
_REFERENCE_EFFECTS = ("InternalMutableArrayEffect", "ReadEffect", "WriteEffect", "AccumEffect")
_HOLDS_JAXPRS = (*_CALLS, "cond", "scan", "shard_map", "while")


@dataclass(frozen=True)
class Node:
    """One primitive: values in, values out.

    Attributes:
        equation: The jaxpr equation that it came from.
        inputs: Numbers of its inputs.
        outputs: Numbers of its outputs.
        in_remat: Whether it comes from inside a ``jax.checkpoint``: it must run when the checkpoint would, not earlier.
    """

    equation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_remat: bool

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name

    @property
    def has_effects(self) -> bool:
        """Whether it does more than to give its outputs: ``jax.debug.print`` does."""
        return bool(self.equation.effects)


@dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        nodes: In an order in which they can run.
        inputs: Numbers of the flat inputs.
        outputs: Numbers of the flat outputs.
        constants: The values that are known.
        avals: The abstract value (shape and dtype) of each number.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[int, Any]
    avals: dict[int, Any]

    def needed(self, targets: Iterable[int], available: Collection[int], effects: Collection[Node] = ()) -> list[Node]:
        """Returns the nodes that make ``targets`` from ``available`` values and constants, and ``effects``, in order."""
        wanted = set(targets) - set(available)
        nodes = []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs) or node in effects:
                nodes.append(node)
                wanted.update(i for i in node.inputs if i not in available)
        return nodes[::-1]

    def reached(self, sources: Iterable[int]) -> set[int]:
        """Returns the values that depend on ``sources``, these among them."""
        found = set(sources)
        for node in self.nodes:
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def narrow(self, inputs: Iterable[int]) -> "Graph":
        """Returns the graph that takes those of ``inputs`` already cast that it only ever casts, to one smaller dtype."""
        cast = {}
        for number in inputs:
            readers = [node for node in self.nodes if number in node.inputs]
            dtypes = {self.avals[node.outputs[0]].dtype for node in readers if node.name == "convert_element_type"}
            only_cast = all(node.name == "convert_element_type" for node in readers) and number not in self.outputs
            if only_cast and len(dtypes) == 1 and (dtype := dtypes.pop()).itemsize < self.avals[number].dtype.itemsize:
                cast[number] = jax.ShapeDtypeStruct(self.avals[number].shape, dtype)
        casts = [node for node in self.nodes if node.inputs and node.inputs[0] in cast]
        same = {node.outputs[0]: node.inputs[0] for node in casts}
        renamed = lambda numbers: tuple(same.get(number, number) for number in numbers)
        nodes = [replace(node, inputs=renamed(node.inputs)) for node in self.nodes if node not in casts]
        avals = {number: aval for number, aval in self.avals.items() if number not in same}
        return replace(self, nodes=tuple(nodes), outputs=renamed(self.outputs), avals=avals | cast)

    def run(self, nodes: Sequence[Node], values: Mapping[int, Any], outputs: Sequence[int]) -> list[Any]:
        """Returns the values of ``outputs`` after ``nodes`` have run on ``values``."""
        known = {**self.constants, **values}
        for node in nodes:
            made = _bind(node.equation, [known[i] for i in node.inputs])
            known.update(zip(node.outputs, made, strict=True))
        return [known[i] for i in outputs]


def trace(function: Callable[..., PyTree], *args: PyTree) -> Graph:
    """Returns the graph of a function of pytrees; arrays in ``args`` may be ShapeDtypeStructs."""
    closed = _direct(jax.make_jaxpr(function)(*args))
    builder = _Builder()
    inputs = [builder.new(v.aval) for v in closed.jaxpr.invars]
    constants = [
        builder.constant(v.aval, value) for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
    ]
    outputs = builder.inline(closed.jaxpr, [*constants, *inputs], in_remat=False)
    return Graph(tuple(builder.nodes), tuple(inputs), tuple(outputs), builder.constants, builder.avals)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, open or closed, and of those that its equations hold; kernels stay closed."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for param in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(param):
                    yield from equations(param)


def float_literals(function: Callable[..., PyTree], *args: PyTree) -> list[str]:
    """Returns the floats that are written into a function's equations, in their order: "8.0" of a mean over 8 rows."""
    traced = jax.make_jaxpr(function)(*args)
    inputs = (x for equation in equations(traced) for x in equation.invars)
    values = [x.val for x in inputs if isinstance(x, Literal)]
    return [str(value) for value in values if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def has_reference_effects(equation: Any) -> bool:
    """Returns whether an equation makes, reads or writes a ``jax.new_ref``."""
    effects = {type(effect).__name__ for effect in equation.effects}
    return not effects.isdisjoint(_REFERENCE_EFFECTS)


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[int, Any] = {}
        self.avals: dict[int, Any] = {}

    def new(self, aval: Any) -> int:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def constant(self, aval: Any, value: Any) -> int:
        number = self.new(aval)
        self.constants[number] = value
        return number

    def inline(self, jaxpr: Any, inputs: Sequence[int], *, in_remat: bool) -> list[int]:
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def number(atom: Any) -> int:
            return self.constant(atom.aval, _as_array(atom)) if isinstance(atom, Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            arguments = [number(atom) for atom in equation.invars]
            inner = _called(equation)
            if inner is not None:
                constants = [self.constant(v.aval, c) for v, c in zip(inner.jaxpr.constvars, inner.consts, strict=True)]
                remat = in_remat or equation.primitive.name in _REMAT
                outputs = self.inline(inner.jaxpr, [*constants, *arguments], in_remat=remat)
            else:
                outputs = [self.new(v.aval) for v in equation.outvars]
                self.nodes.append(Node(equation, tuple(arguments), tuple(outputs), in_remat))
            numbers.update(zip(equation.outvars, outputs, strict=True))
        return [number(atom) for atom in jaxpr.outvars]


def _as_array(literal: Any) -> Any:
    """The value of a literal, which JAX may hold as a Python number."""
    return np.asarray(literal.val, literal.aval.dtype) if np.isscalar(literal.val) else literal.val


def _called(equation: Any) -> Any:
    """The closed jaxpr of a call that can be written out in place; None for all else, and for jits that set shardings."""
    key = _CALLS.get(equation.primitive.name)
    if key is None or key not in equation.params:
        return None
    shardings = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
    if any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    inner = equation.params[key]
    return inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())


def _bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    stack = current_name_stack() + equation.source_info.name_stack
    source = user_context(equation.source_info.traceback, name_stack=stack)  # so that profiles name the user's own line
    here = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())  # not the mesh in which it was traced
    with source, equation.ctx.manager, here:
        made = equation.primitive.bind(*inputs, **params)
    return list(made) if equation.primitive.multiple_results else [made]


def fold_transposes(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function that computes the same, with fewer matrix products that are made only to be transposed.

    JAX's derivative of ``x @ w`` with respect to w is the transpose of the product of ct and x. The product of x and ct needs
    no transpose, and where x is no larger than ct XLA's CPU compiler makes it in half the time (it transposes the factor on the
    left). What is inside loops, branches, ``jit``, ``jax.checkpoint`` and ``shard_map`` is rewritten too.
    """

    @wraps(function)
    def direct(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        made = jaxpr_as_fun(_direct(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, made))  # constants come as NumPy's

    return direct


def _direct(jaxpr: Any) -> Any:
    """A jaxpr, open or closed, in which products that are only made to be transposed have their factors swapped."""
    if (inner := getattr(jaxpr, "jaxpr", jaxpr)) is not jaxpr:  # a closed one; from JAX 0.11 on the two are one class
        return jaxpr.replace(jaxpr=_direct(inner))
    read = Counter(v for e in jaxpr.eqns for v in e.invars if not isinstance(v, Literal))
    read.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    products = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive.name == "dot_general" and read[e.outvars[0]] == 1}
    made_of = {
        e.outvars[0]: products[e.invars[0]]
        for e in jaxpr.eqns
        if e.primitive.name == "transpose" and _undoes(products.get(e.invars[0]), e.params["permutation"])
    }
    unread = {product.outvars[0] for product in made_of.values()}
    equations = []
    for equation in jaxpr.eqns:
        output = equation.outvars[0] if equation.outvars else None
        if output in made_of:
            equations.append(_swapped(made_of[output], equation.params["permutation"], output))
        elif output not in unread:
            equations.append(_direct_inside(equation))
    return jaxpr.replace(eqns=equations)


def _undoes(product: Any, permutation: Sequence[int]) -> bool:
    """Whether a transpose puts the dims of a product's second factor before those of the first, and swapping them pays."""
    if product is None:
        return False
    first, second = (atom.aval for atom in product.invars)
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    shared, rank = len(batch), len(permutation)
    free = first.ndim - len(contracted) - shared
    swap = (*range(shared), *range(shared + free, rank), *range(shared, shared + free))
    return second.size <= first.size and tuple(permutation) == swap


def _swapped(product: Any, permutation: Sequence[int], output: Any) -> Any:
    """The product with its factors in the other order, which gives what its transpose gave."""
    (left, right), (batch_left, batch_right) = product.params["dimension_numbers"]
    precision, sharding = product.params["precision"], product.params["out_sharding"]
    if sharding is not None:
        entries = (*sharding.spec, *(None,) * (len(permutation) - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(entries[dim] for dim in permutation)))
    params = product.params | {
        "dimension_numbers": ((right, left), (batch_right, batch_left)),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,  # one for each factor
        "out_sharding": sharding,
    }
    return product.replace(invars=list(product.invars[::-1]), outvars=[output], params=params)


def _direct_inside(equation: Any) -> Any:
    if equation.primitive.name not in _HOLDS_JAXPRS:
        return equation
    direct = lambda value: _direct(value) if isinstance(value, ClosedJaxpr | Jaxpr) else value
    of = lambda value: tuple(map(direct, value)) if isinstance(value, tuple) else direct(value)
    return equation.replace(params={name: of(value) for name, value in equation.params.items()})


def taking_traced(function: Callable[..., PyTree], *args: PyTree) -> tuple[Callable[..., PyTree], list[jax.Array]]:
    """Returns ``(given, traced)``: ``given(traced, *args)`` is the function, whose traced values it is given, not closes over.

    A model made inside ``jax.jit`` closes over such values; a ``jax.custom_vjp`` in a scan must not.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    indices = [i for i, constant in enumerate(closed.consts) if isinstance(constant, Tracer)]

    def given(traced: Sequence[jax.Array], *args: PyTree) -> PyTree:
        constants = list(closed.consts)
        for i, value in zip(indices, traced, strict=True):
            constants[i] = value
        made = jaxpr_as_fun(closed.replace(consts=constants))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, made))

    return given, [closed.consts[i] for i in indices]
