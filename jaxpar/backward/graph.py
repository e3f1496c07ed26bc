"""Traced functions as graphs of values, which can be split and run in parts.

A Graph has numbered values, and nodes that each bind one primitive. Calls of jitted functions are inlined, so a graph can also
be split inside them. ``fold_transposes`` folds the transpose of a matrix product into the product, which multiplies the factors
in the other order; every traced function is rewritten so.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import (
    Literal,
    bind,
    called,
    evaluate,
    has_side_effects,
    is_remat,
    literal_value,
    rewrite,
    rewritten,
)

# fmt: off
ELEMENTWISE = frozenset({
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "erf",
    "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pow", "reshape", "round", "rsqrt",
    "select_n", "sign", "sin", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
})
# fmt: on

# Operations that move elements and compute no products or sums of them.
MOVES = ELEMENTWISE | {"concatenate", "dynamic_slice", "pad", "rev", "split"}

_OF_PRODUCTS = {"convert_element_type", "reshape", "squeeze", "transpose"}


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        equation: The jaxpr equation that it came from.
        inputs: Numbers of its inputs.
        outputs: Numbers of its outputs.
        in_remat: Whether it is inside a ``jax.checkpoint``: it must not run before the checkpoint would run it.
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
        """Whether it has side effects, such as those of ``jax.debug.print``."""
        return has_side_effects(self.equation)


@dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        nodes: The operations, in an order in which they can run.
        inputs: Numbers of the flat inputs.
        outputs: Numbers of the flat outputs.
        constants: The values that are known when tracing, by number.
        avals: The abstract value (shape and dtype) of each number.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[int, Any]
    avals: dict[int, Any]

    def num_bytes(self, number: int) -> int:
        """Returns the bytes of a value."""
        return math.prod(self.avals[number].shape) * self.avals[number].dtype.itemsize

    def is_transposed(self, number: int) -> bool:
        """Returns whether a value is made of transposed ones by operations that compute no products or sums."""
        reached = {number}
        for node in reversed(self.nodes):
            if not reached.isdisjoint(node.outputs):
                if node.name == "transpose":
                    return True
                reached.update(node.inputs if node.name in MOVES else ())
        return False

    def needed(self, targets: Iterable[int], available: Collection[int], effects: Collection[Node] = ()) -> list[Node]:
        """Returns in order the nodes that compute ``targets`` from ``available`` values and constants, and ``effects``."""
        wanted = set(targets) - set(available)
        nodes = []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs) or node in effects:
                nodes.append(node)
                wanted.update(i for i in node.inputs if i not in available)
        return nodes[::-1]

    def reached(self, sources: Iterable[int]) -> set[int]:
        """Returns the values that depend on ``sources``, including ``sources``."""
        found = set(sources)
        for node in self.nodes:
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def narrow(self, inputs: Iterable[int]) -> "Graph":
        """Returns the graph that takes those ``inputs`` already cast that it only casts to one smaller dtype."""
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

    def widen(self, numbers: Iterable[int]) -> "Graph":
        """Returns the graph whose products are in the dtype to which alone they are cast to be one of these values."""
        makers = {output: node for node in self.nodes for output in node.outputs}
        read = Counter([*(i for node in self.nodes for i in node.inputs), *self.outputs])
        nodes, avals = {id(node): node for node in self.nodes}, dict(self.avals)
        for number in numbers:
            wide, path = self.avals[number].dtype, [number]
            while (maker := makers.get(path[-1])) and maker.name in _OF_PRODUCTS and read[maker.inputs[0]] == 1:
                path.append(maker.inputs[0])
            if maker is None or maker.name != "dot_general" or self.avals[path[-1]].dtype.itemsize >= wide.itemsize:
                continue
            equation = maker.equation.replace(params=maker.equation.params | {"preferred_element_type": wide})
            nodes[id(maker)] = replace(maker, equation=equation)
            avals |= {i: jax.ShapeDtypeStruct(self.avals[i].shape, wide) for i in path}
        return replace(self, nodes=tuple(nodes.values()), avals=avals)

    def run(self, nodes: Sequence[Node], values: Mapping[int, Any], outputs: Sequence[int]) -> list[Any]:
        """Returns the values of ``outputs`` after ``nodes`` have run on ``values``."""
        known = {**self.constants, **values}
        for node in nodes:
            made = bind(node.equation, [known[i] for i in node.inputs])
            known.update(zip(node.outputs, made, strict=True))
        return [known[i] for i in outputs]


def trace(function: Callable[..., PyTree], *args: PyTree) -> Graph:
    """Returns the graph of a function of pytrees; arrays in ``args`` may be ShapeDtypeStructs."""
    closed = rewrite(jax.make_jaxpr(function)(*args), fold)
    builder = _Builder()
    inputs = [builder.new(v.aval) for v in closed.jaxpr.invars]
    outputs = builder.inline(closed, inputs, in_remat=False)
    return Graph(tuple(builder.nodes), tuple(inputs), tuple(outputs), builder.constants, builder.avals)


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

    def inline(self, closed: Any, inputs: Sequence[int], *, in_remat: bool) -> list[int]:
        jaxpr = closed.jaxpr
        constants = [self.constant(v.aval, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)]
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def number(atom: Any) -> int:
            return self.constant(atom.aval, literal_value(atom)) if isinstance(atom, Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            arguments = [number(atom) for atom in equation.invars]
            inner = called(equation)
            if inner is not None:
                outputs = self.inline(inner, arguments, in_remat=in_remat or is_remat(equation))
            else:
                outputs = [self.new(v.aval) for v in equation.outvars]
                self.nodes.append(Node(equation, tuple(arguments), tuple(outputs), in_remat))
            numbers.update(zip(equation.outvars, outputs, strict=True))
        return [number(atom) for atom in jaxpr.outvars]


def fold_transposes(
    function: Callable[..., PyTree], run: Callable[[Any, Sequence[Any]], list[Any]] = evaluate
) -> Callable[..., PyTree]:
    """Returns a function that computes the same with fewer transposes of matrix products.

    JAX's derivative of ``x @ w`` with respect to w is the transpose of the product of ct and x. The product of x and ct needs
    no transpose. If x is no larger than ct, XLA's CPU compiler computes it in half the time, because it transposes the left
    factor. Products inside loops, branches, ``jit``, ``jax.checkpoint`` and ``shard_map`` are rewritten too.

    Args:
        function: The function.
        run: Computes the outputs of a closed jaxpr from the leaves of the arguments.
    """
    return wraps(function)(partial(rewritten, function, fold, run=run))


def fold(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Returns the equations of a jaxpr with foldable transposes folded into their products."""
    read = Counter(v for e in equations for v in e.invars if not isinstance(v, Literal))
    read.update(v for v in outputs if not isinstance(v, Literal))
    products = {e.outvars[0]: e for e in equations if e.primitive.name == "dot_general" and read[e.outvars[0]] == 1}
    product_of = {
        e.outvars[0]: products[e.invars[0]]
        for e in equations
        if e.primitive.name == "transpose" and _is_foldable(products.get(e.invars[0]), e.params["permutation"])
    }
    unread = {product.outvars[0] for product in product_of.values()}
    folded = []
    for equation in equations:
        output = equation.outvars[0] if equation.outvars else None
        if output in product_of:
            folded.append(_swapped(product_of[output], equation.params["permutation"], output))
        elif output not in unread:
            folded.append(equation)
    return folded


def _is_foldable(product: Any, permutation: Sequence[int]) -> bool:
    """Whether a transpose puts the dims of a product's second factor before those of the first, and swapping them is faster."""
    if product is None:
        return False
    first, second = (atom.aval for atom in product.invars)
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    shared, rank = len(batch), len(permutation)
    own = first.ndim - len(contracted) - shared
    swap = (*range(shared), *range(shared + own, rank), *range(shared, shared + own))
    return second.size <= first.size and tuple(permutation) == swap


def _swapped(product: Any, permutation: Sequence[int], output: Any) -> Any:
    """The product of the same factors in the other order, which equals the transpose."""
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
