"""The backward pass of any layer split in two: B, the gradient of its input, and W, the gradients of its weights.

The layer and its vjp are traced as one graph. B computes the gradient of the input and W the rest of the backward pass, so
together they do exactly the work of the unsplit one:

    x --forward--> y    residuals_b: values of the forward pass that B alone reads; residuals_w: those that W reads too
    ct --B--> dx        cotangents_w: values of B that W reads
    W --> dp            values that depend on the weights alone are recomputed, never stored

Params that the layer only ever casts to a smaller dtype (float32 masters computed with in bfloat16) are cast once a step,
not in each op. Frozen ones (``frozen.py``) have no gradient, and nothing is computed or stored for one.

A value that elementwise operations can recompute (a broadcast, a cast, a GELU) is stored only if nothing smaller would do
(``min_cut.py``).

Side effects of a layer, such as ``jax.debug.print``, happen in the forward pass, and those that read a cotangent in B or, if
they read values that W alone computes, in W.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxpar.backward.graph import Graph, Node, trace
from jaxpar.backward.min_cut import cheapest_to_store, peak_bytes
from jaxpar.backward.partition import ParamShards
from jaxpar.dtypes import float_indices, merge
from jaxpar.trainable import trained_indices

Arrays = Sequence[Any]
Numbers = Sequence[int]


@dataclass(frozen=True)
class SplitLayer:
    """The functions of one layer that a pipeline runs. They take and return flat lists of arrays.

    Attributes:
        residuals_b: Shapes of the values that the forward pass stores for B alone.
        residuals_w: Shapes of the values that it stores for W, or for both.
        cotangents_w: Shapes of the values that B stores for W.
        working_bytes: By function, the peak of live bytes while it runs: its inputs, and values that XLA does not fuse away.
        cast: ``params -> params`` in the dtypes that the other functions take; works on stacked layers too.
        forward: ``(params, x) -> y``.
        forward_and_store: ``(params, x) -> (y, residuals_b, residuals_w)``.
        backward_input: B, ``(params, residuals_b, residuals_w, ct) -> (dx, cotangents_w)``, for the float leaves of x.
        backward_weights: W, ``(params, residuals_w, cotangents_w) -> dp``, for the params that are trained.
        backward: Both at once, ``(params, residuals_b, residuals_w, ct) -> (dx, dp)``.
        graph: The layer and its vjp, traced.
        plans: For each function the part of the graph that it runs. "again" is the backward pass from params, input and
            cotangent alone, as ``jax.checkpoint`` runs it.
        values: The numbers in the graph of params, residuals_b, residuals_w and cotangents_w.
    """

    residuals_b: list[jax.ShapeDtypeStruct]
    residuals_w: list[jax.ShapeDtypeStruct]
    cotangents_w: list[jax.ShapeDtypeStruct]
    working_bytes: dict[str, int]
    cast: Callable[[Arrays], list]
    forward: Callable[[Arrays, Arrays], list]
    forward_and_store: Callable[[Arrays, Arrays], tuple[list, list, list]]
    backward_input: Callable[[Arrays, Arrays, Arrays, Arrays], tuple[list, list]]
    backward_weights: Callable[[Arrays, Arrays, Arrays], list]
    backward: Callable[[Arrays, Arrays, Arrays, Arrays], tuple[list, list]]
    graph: Graph
    plans: dict[str, "Plan"]
    values: dict[str, list[int]]


class Plan(NamedTuple):
    """The part of a graph that a function runs: nodes in order, the values that it is given and those that it computes."""

    nodes: list[Node]
    known: list[int]
    makes: list[int]


@dataclass(frozen=True)
class TracedLayer:
    """The graph of a layer with its backward pass, (p, x, ct) -> (y, dx, dp), and the numbers of these values in it.

    Attributes:
        graph: The graph.
        p: Params.
        x: Inputs.
        ct: Cotangents of the outputs that are floats.
        y: Outputs.
        dx: Gradients of the inputs that are floats.
        dp: Gradients of the params that are trained.
        y_floats: Which outputs are floats.
    """

    graph: Graph
    p: Numbers
    x: Numbers
    ct: Numbers
    y: Numbers
    dx: Numbers
    dp: Numbers
    y_floats: Sequence[int]

    def split(self, shards: ParamShards | None = None) -> SplitLayer:
        """Returns the layer split into forward pass, B and W; ``shards`` as for ``split_layer``."""
        num_bytes = self.graph.num_bytes if shards is None else self._on_device(shards).num_bytes
        return _cut(self.graph, self.p, self.x, self.ct, self.y, self.dx, self.dp, num_bytes)

    def _on_device(self, shards: ParamShards) -> Graph:
        """The graph with the shapes on a device. Layers follow each other: input and cotangent are sharded like the output."""
        graph, y = self.graph, self.y
        cuts = shards.partition(graph, self.p).cuts
        ends = {i: cuts.get(y[n]) for n, i in zip(self.y_floats, self.ct, strict=True)}
        ends |= {
            i: cuts.get(o) for i, o in zip(self.x, y, strict=False) if graph.avals[i].shape == graph.avals[o].shape
        }
        return shards.partition(graph, self.p, ends).graph


def split_layer(
    layer: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree, shards: ParamShards | None = None
) -> SplitLayer:
    """Returns ``layer`` split into forward pass, B and W.

    Args:
        layer: ``layer(params, x) -> y``. y need not have the structure of x.
        params: The params of one layer, or ShapeDtypeStructs; some of them may be frozen.
        x: Its input, or ShapeDtypeStructs. Leaves that are not floats (positions, masks, PRNG keys) carry no gradient.
        shards: How the params are sharded over ``tensor``. What is stored is then what takes the fewest bytes on a device: a
            sharded activation costs a shard. By default whole arrays are compared.
    """
    return trace_layer(layer, params, x).split(shards)


def trace_layer(layer: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree) -> TracedLayer:
    """Returns the graph of a layer with its backward pass, to split it for several shardings; arguments as ``split_layer``."""
    p_leaves, p_tree = jax.tree.flatten(params)
    x_leaves, x_tree = jax.tree.flatten(x)
    y_leaves = jax.tree.leaves(jax.eval_shape(layer, params, x))
    floats, y_floats, own = float_indices(x_leaves), float_indices(y_leaves), trained_indices(params)

    def joint(p: Arrays, x: Arrays, ct: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        def outputs(p_own: Arrays, x_floats: Arrays) -> tuple[list, list]:
            whole_x = jax.tree.unflatten(x_tree, merge(x, floats, x_floats))
            y = jax.tree.leaves(layer(jax.tree.unflatten(p_tree, merge(p, own, p_own)), whole_x))
            return [y[i] for i in y_floats], y

        _, vjp, y = jax.vjp(outputs, [p[i] for i in own], [x[i] for i in floats], has_aux=True)
        dp, dx = vjp(list(ct))
        return y, dx, dp

    graph = trace(joint, p_leaves, x_leaves, [y_leaves[i] for i in y_floats])
    p, x, ct = _divide(graph.inputs, len(p_leaves), len(x_leaves), len(y_floats))
    graph = graph.narrow(p)
    y, dx, dp = _divide(graph.outputs, len(y_leaves), len(floats), len(own))
    return TracedLayer(graph, p, x, ct, y, dx, dp, y_floats)


def _cut(
    graph: Graph,
    p: Numbers,
    x: Numbers,
    ct: Numbers,
    y: Numbers,
    dx: Numbers,
    dp: Numbers,
    num_bytes: Callable[[int], int],
) -> SplitLayer:
    """Splits the graph of (p, x, ct) -> (y, dx, dp); ``num_bytes`` are those of a value on a device."""
    forward_values, backward_values = _forward_and_backward(graph, x, ct, y)
    of_params = set(graph.avals) - forward_values - backward_values
    effects, in_b, in_w = _effects(graph, ct, backward_values, graph.needed(dx, of_params | forward_values))
    b_nodes = graph.needed(dx, of_params | forward_values, in_b)
    b_values = {i for n in b_nodes for i in n.outputs} | set(ct)
    w_nodes = graph.needed(dp, of_params | forward_values | b_values, in_w)

    cotangents_w = _read(w_nodes, dp) & b_values
    free = of_params | (_read(w_nodes, dp) & forward_values)
    # W does not gather again what B has gathered: that would add to the traffic of one device's backward pass.
    cotangents_w = cheapest_to_store(graph, cotangents_w, b_values, free, num_bytes, gathers=False)
    w_nodes = graph.needed(dp, of_params | forward_values | cotangents_w, in_w)
    stored = (_read(b_nodes, dx) | _read(w_nodes, dp)) & forward_values
    stored = cheapest_to_store(graph, stored, forward_values, of_params, num_bytes)
    w_reads = _read(graph.needed(dp, {*p, *stored, *cotangents_w}, in_w), dp)
    b_only, w_too, cotangents_w = sorted(stored - w_reads), sorted(stored & w_reads), sorted(cotangents_w)

    known_b = [*p, *b_only, *w_too, *ct]
    known_w = [*p, *w_too, *cotangents_w]
    plan_y = graph.needed(y, [*p, *x], effects)
    plan_store = graph.needed([*y, *stored], [*p, *x], effects)
    plan_b = graph.needed([*dx, *cotangents_w], known_b, in_b)
    plan_w = graph.needed(dp, known_w, in_w)
    plan_whole = graph.needed([*dx, *dp], known_b, [*in_b, *in_w])

    def run(nodes: list[Node], known: Sequence[int], arrays: Iterable[Arrays], *outputs: Sequence[int]) -> Any:
        values = dict(zip(known, (a for group in arrays for a in group), strict=True))
        flat = graph.run(nodes, values, [i for group in outputs for i in group])
        return tuple(_divide(flat, *(len(group) for group in outputs)))

    plans = {
        "forward": Plan(plan_y, [*p, *x], [*y]),
        "forward_and_store": Plan(plan_store, [*p, *x], [*y, *stored]),
        "backward_input": Plan(plan_b, known_b, [*dx, *cotangents_w]),
        "backward_weights": Plan(plan_w, known_w, [*dp]),
        "backward": Plan(plan_whole, known_b, [*dx, *dp]),
        "again": Plan(graph.needed([*dx, *dp], [*p, *x, *ct]), [*p, *x, *ct], [*dx, *dp]),
    }
    shapes = lambda numbers: [jax.ShapeDtypeStruct(graph.avals[i].shape, graph.avals[i].dtype) for i in numbers]
    return SplitLayer(
        residuals_b=shapes(b_only),
        residuals_w=shapes(w_too),
        cotangents_w=shapes(cotangents_w),
        working_bytes={name: peak_bytes(graph, *plan) for name, plan in plans.items()},
        cast=lambda params: [a.astype(graph.avals[i].dtype) for a, i in zip(params, p, strict=True)],
        forward=lambda params, xs: run(plan_y, [*p, *x], (params, xs), y)[0],
        forward_and_store=lambda params, xs: run(plan_store, [*p, *x], (params, xs), y, b_only, w_too),
        backward_input=lambda params, sb, sw, cts: run(plan_b, known_b, (params, sb, sw, cts), dx, cotangents_w),
        backward_weights=lambda params, sw, ks: run(plan_w, known_w, (params, sw, ks), dp)[0],
        backward=lambda params, sb, sw, cts: run(plan_whole, known_b, (params, sb, sw, cts), dx, dp),
        graph=graph,
        plans=plans,
        values={"params": [*p], "residuals_b": b_only, "residuals_w": w_too, "cotangents_w": cotangents_w},
    )


def _forward_and_backward(graph: Graph, x: Sequence[int], ct: Sequence[int], y: Sequence[int]) -> tuple[set, set]:
    """The values of the forward pass that vary with x, and those of the backward pass.

    The backward pass is the values that depend on ct, and those that a ``jax.checkpoint`` in the layer defers to it. Values
    that depend on the weights alone belong to neither: B and W each recompute them, so that B need not store them for W.
    """
    of_x = graph.reached(x)
    for_y = {i for node in graph.needed(y, ()) for i in node.outputs}
    deferred = {i for n in graph.nodes if n.in_remat for i in n.outputs if i in of_x and i not in for_y}
    backward = graph.reached({*ct, *deferred})
    return of_x - backward, backward


def _effects(
    graph: Graph, ct: Sequence[int], backward_values: set[int], b_nodes: Sequence[Node]
) -> tuple[list[Node], list[Node], list[Node]]:
    """The side effects of the forward pass, of B and of W. What a ``jax.checkpoint`` recomputes has no effect again."""
    effects, of_ct = [node for node in graph.nodes if node.has_effects], graph.reached(ct)
    forward = [node for node in effects if not node.in_remat and backward_values.isdisjoint(node.inputs)]
    backward = [node for node in effects if not of_ct.isdisjoint(node.inputs)]
    in_b = {*ct, *(i for node in b_nodes for i in node.outputs)}
    of_b = [node for node in backward if of_ct.intersection(node.inputs) <= in_b]
    return forward, of_b, [node for node in backward if node not in of_b]


def _read(nodes: Iterable[Node], targets: Iterable[int]) -> set[int]:
    """The values that nodes read, and targets that may need no node."""
    return {i for node in nodes for i in node.inputs} | set(targets)


def _divide(flat: Sequence, *sizes: int) -> list[list]:
    """Splits a flat list into lists of the given sizes."""
    parts, start = [], 0
    for size in sizes:
        parts.append(list(flat[start : start + size]))
        start += size
    return parts
