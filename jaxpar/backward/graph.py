"""Traced functions as graphs of values, which can be split and run in parts.

A Graph has numbered values, and nodes that each bind one primitive. Calls of jitted functions are inlined, so a graph can also
be split inside them. ``fold_transposes`` folds the transpose of a matrix product into the product, which multiplies the factors
in the other order; every traced function is rewritten so.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    def first(self) -> int:
        """The number of its first output; -1 if it has none, as ``jax.debug.print``."""
        return self.outputs[0] if self.outputs else -1

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
        bodies: What its loops and branches run, by the number of their first output, if it is known (``bodies.py``).
    """

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[int, Any]
    avals: dict[int, Any]
    bodies: Mapping[int, Sequence["Graph"]] = field(default_factory=dict)

    def num_bytes(self, number: int) -> int:
        """Returns the bytes of a value."""
        aval = self.avals[number]
        return math.prod(aval.shape) * aval.dtype.itemsize

    def is_transposed(self, number: int) -> bool:
        """Returns whether a value is made of transposed ones by operations that compute no products or sums."""
        reached = {number}
        for node in reversed(self.nodes):
            if reached.isdisjoint(node.outputs):
                continue
            if node.name == "transpose":
                return True
            if node.name in MOVES:
                reached.update(node.inputs)
        return False

    def needed(
        self,
        targets: Iterable[int],
        available: Collection[int],
        effects: Collection[Node] = (),
    ) -> list[Node]:
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
            aval, dtype = self.avals[number], self._only_cast_to(number)
            if dtype is not None and dtype.itemsize < aval.dtype.itemsize:
                cast[number] = jax.ShapeDtypeStruct(aval.shape, dtype)
        casts = [node for node in self.nodes if node.inputs and node.inputs[0] in cast]
        same = {node.outputs[0]: node.inputs[0] for node in casts}

        def renamed(numbers: Iterable[int]) -> tuple[int, ...]:
            return tuple(same.get(number, number) for number in numbers)

        others = [node for node in self.nodes if node not in casts]
        nodes = [replace(node, inputs=renamed(node.inputs)) for node in others]
        avals = {number: aval for number, aval in self.avals.items() if number not in same}
        return replace(self, nodes=tuple(nodes), outputs=renamed(self.outputs), avals=avals | cast)

    def _only_cast_to(self, number: int) -> Any:
        """The dtype to which alone a value is cast; None if something else reads it."""
        readers = [node for node in self.nodes if number in node.inputs]
        names = {node.name for node in readers}
        if number in self.outputs or names != {"convert_element_type"}:
            return None
        dtypes = {self.avals[node.outputs[0]].dtype for node in readers}
        return dtypes.pop() if len(dtypes) == 1 else None

    def widen(self, numbers: Iterable[int]) -> "Graph":
        """Returns the graph whose products are in the dtype to which alone they are cast to be one of these values."""
        nodes = {id(node): node for node in self.nodes}
        avals = dict(self.avals)
        for number, path, product in self._products_of(numbers):
            wide = self.avals[number].dtype
            if self.avals[path[-1]].dtype.itemsize >= wide.itemsize:
                continue
            params = product.equation.params | {"preferred_element_type": wide}
            equation = product.equation.replace(params=params)
            nodes[id(product)] = replace(product, equation=equation)
            for i in path:
                avals[i] = jax.ShapeDtypeStruct(self.avals[i].shape, wide)
        return replace(self, nodes=tuple(nodes.values()), avals=avals)

    def _products_of(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[int], Node]]:
        """Yields the values that are products, each with the values on its way back to the product, and this one."""
        makers = {output: node for node in self.nodes for output in node.outputs}
        read = Counter(self.outputs)
        for node in self.nodes:
            read.update(node.inputs)
        for number in numbers:
            path, maker = [number], makers.get(number)
            while maker and maker.name in _OF_PRODUCTS and read[maker.inputs[0]] == 1:
                path.append(maker.inputs[0])
                maker = makers.get(path[-1])
            if maker is not None and maker.name == "dot_general":
                yield number, path, maker

    def run(
        self,
        nodes: Sequence[Node],
        values: Mapping[int, Any],
        outputs: Sequence[int],
    ) -> list[Any]:
        """Returns the values of ``outputs`` after ``nodes`` have run on ``values``."""
        known = {**self.constants, **values}
        for node in nodes:
            inputs = [known[i] for i in node.inputs]
            made = bind(node.equation, inputs)
            known.update(zip(node.outputs, made, strict=True))
        return [known[i] for i in outputs]


def trace(function: Callable[..., PyTree], *args: PyTree) -> Graph:
    """Returns the graph of a function of pytrees; arrays in ``args`` may be ShapeDtypeStructs."""
    return graph_of(rewrite(jax.make_jaxpr(function)(*args), fold))


def graph_of(closed: Any) -> Graph:
    """Returns the graph of a closed jaxpr."""
    builder = _Builder()
    inputs = [builder.new(v.aval) for v in closed.jaxpr.invars]
    outputs = builder.inline(closed, inputs, in_remat=False)
    return Graph(
        tuple(builder.nodes),
        tuple(inputs),
        tuple(outputs),
        builder.constants,
        builder.avals,
    )


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
        pairs = zip(jaxpr.constvars, closed.consts, strict=True)
        constants = [self.constant(variable.aval, value) for variable, value in pairs]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        numbers = dict(zip(variables, [*constants, *inputs], strict=True))

        def number(atom: Any) -> int:
            if isinstance(atom, Literal):
                return self.constant(atom.aval, literal_value(atom))
            return numbers[atom]

        for equation in jaxpr.eqns:
            arguments = [number(atom) for atom in equation.invars]
            inner = called(equation)
            if inner is not None:
                inside = in_remat or is_remat(equation)
                outputs = self.inline(inner, arguments, in_remat=inside)
            else:
                outputs = [self.new(variable.aval) for variable in equation.outvars]
                node = Node(equation, tuple(arguments), tuple(outputs), in_remat)
                self.nodes.append(node)
            numbers.update(zip(equation.outvars, outputs, strict=True))
        return [number(atom) for atom in jaxpr.outvars]


def fold_transposes(
    function: Callable[..., PyTree],
    run: Callable[[Any, Sequence[Any]], list[Any]] = evaluate,
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
    read = Counter(atom for atom in outputs if not isinstance(atom, Literal))
    for equation in equations:
        read.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    products, product_of = {}, {}
    for equation in equations:
        output = equation.outvars[0] if equation.outvars else None
        if equation.primitive.name == "dot_general" and read[output] == 1:
            products[output] = equation
        if equation.primitive.name == "transpose":
            product = products.get(equation.invars[0])
            if _is_foldable(product, equation.params["permutation"]):
                product_of[output] = product
    unread = {product.outvars[0] for product in product_of.values()}
    folded = []
    for equation in equations:
        output = equation.outvars[0] if equation.outvars else None
        if output in product_of:
            permutation = equation.params["permutation"]
            folded.append(_swapped(product_of[output], permutation, output))
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
    given = product.params
    (left, right), (batch_left, batch_right) = given["dimension_numbers"]
    precision, sharding = given["precision"], given["out_sharding"]
    if sharding is not None:
        missing = len(permutation) - len(sharding.spec)
        entries = *sharding.spec, *(None,) * missing
        spec = PartitionSpec(*(entries[dim] for dim in permutation))
        sharding = NamedSharding(sharding.mesh, spec)
    params = given | {
        "dimension_numbers": ((right, left), (batch_right, batch_left)),
        "precision": precision[::-1]
        if isinstance(precision, tuple)
        else precision,  # one for each factor
        "out_sharding": sharding,
    }
    factors = list(product.invars[::-1])
    return product.replace(invars=factors, outvars=[output], params=params)
