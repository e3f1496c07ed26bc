"""The backward pass of any layer split in two: B, the gradient of its input, and W, the gradients of its weights.

The layer and its vjp are traced as one graph. B computes the gradient of the input and W the rest of the backward pass, so
together they do exactly the work of the unsplit one:

    x --forward--> y    residuals_b: values of the forward pass that B alone reads; residuals_w: those that W reads too
    ct --B--> dx        cotangents_w: values of B that W reads
    W --> dp            values that depend on the weights alone are recomputed, never stored

Params that the layer only ever casts to a smaller dtype (float32 masters computed with in bfloat16) are cast once a step,
not in each op. Frozen ones (``trainable.py``) have no gradient, and nothing is computed or stored for one.

A value that elementwise operations can recompute (a broadcast, a cast, a GELU) is stored only if nothing smaller would do
(``min_cut.py``).

Side effects of a layer, such as ``jax.debug.print``, happen in the forward pass, and those that read a cotangent in B or, if
they read values that W alone computes, in W.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from jaxpar._compat import is_on_host
from jaxpar.backward.graph import Graph, Node, trace
from jaxpar.backward.min_cut import cheapest_to_store
from jaxpar.backward.partition import ParamShards
from jaxpar.dtypes import float_indices, is_float, merge
from jaxpar.trainable import trained_indices

Arrays = Sequence[Any]


class Plan(NamedTuple):
    """The part of a graph that a function runs: nodes in order, the values that it is given and those that it computes."""

    nodes: list[Node]
    known: list[int]
    makes: list[int]


@dataclass(frozen=True)
class SplitLayer:
    """The functions of one layer that a pipeline runs. They take and return flat lists of arrays.

    Attributes:
        graph: The layer and its vjp, traced.
        values: The numbers in the graph of "params", "x", "ct", "y", "dx" and "dp", and of the values that are stored:
            "residuals_b", "residuals_w" and "cotangents_w". Those of x and y that are not floats have no ct and dx.
        plans: For each function the part of the graph that it runs. "again" is the backward pass from params, input and
            cotangent alone, as ``jax.checkpoint`` runs it, and "store" what XLA leaves of "forward_and_store" where nothing
            reads y.
    """

    graph: Graph
    values: dict[str, list[int]]
    plans: dict[str, Plan]

    def shapes(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the values of a name."""
        avals = [self.graph.avals[number] for number in self.values[name]]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def cast(self, params: Arrays) -> list:
        """Returns params in the dtypes that the other functions take; works on stacked layers too."""
        pairs = zip(params, self.shapes("params"), strict=True)
        return [param.astype(like.dtype) for param, like in pairs]

    def forward(self, params: Arrays, x: Arrays) -> list:
        """Returns y."""
        (y,) = self._run("forward", (params, x), "y")
        return y

    def forward_and_store(self, params: Arrays, x: Arrays) -> tuple[list, list, list]:
        """Returns (y, residuals_b, residuals_w)."""
        given = params, x
        return self._run("forward_and_store", given, "y", "residuals_b", "residuals_w")

    def backward_input(
        self,
        params: Arrays,
        residuals_b: Arrays,
        residuals_w: Arrays,
        ct: Arrays,
    ) -> tuple[list, list]:
        """B: returns (dx, cotangents_w), dx for the float leaves of x."""
        given = params, residuals_b, residuals_w, ct
        return self._run("backward_input", given, "dx", "cotangents_w")

    def backward_weights(
        self,
        params: Arrays,
        residuals_w: Arrays,
        cotangents_w: Arrays,
    ) -> list:
        """W: returns the gradients of the params that are trained."""
        given = params, residuals_w, cotangents_w
        (dp,) = self._run("backward_weights", given, "dp")
        return dp

    def backward(
        self,
        params: Arrays,
        residuals_b: Arrays,
        residuals_w: Arrays,
        ct: Arrays,
    ) -> tuple[list, list]:
        """B and W at once: returns (dx, dp)."""
        given = params, residuals_b, residuals_w, ct
        return self._run("backward", given, "dx", "dp")

    def _run(self, name: str, given: Iterable[Arrays], *returns: str) -> Any:
        plan = self.plans[name]
        known = dict(zip(plan.known, chain(*given), strict=True))
        made = self.graph.run(plan.nodes, known, plan.makes)
        sizes = [len(self.values[each]) for each in returns]
        return tuple(_divide(made, *sizes))


@dataclass(frozen=True)
class TracedLayer:
    """The graph of a layer with its backward pass, (p, x, ct) -> (y, dx, dp), and the numbers of these values in it.

    Attributes:
        graph: The graph.
        values: "params", "x", "ct" of the outputs that are floats, "y", "dx" of the inputs that are floats, and "dp" of the
            params that are trained.
        y_floats: Which outputs are floats.
    """

    graph: Graph
    values: dict[str, list[int]]
    y_floats: Sequence[int]

    def split(self, shards: ParamShards | None = None) -> SplitLayer:
        """Returns the layer split into forward pass, B and W; ``shards`` as for ``split_layer``."""
        parts = _classify(self)
        on_device = self.graph if shards is None else self._on_device(shards)
        stored = _choose_stored(self, parts, on_device.num_bytes)
        values = self.values | stored
        plans = _make_plans(self.graph, values, parts)
        return SplitLayer(self.graph, values, plans)

    def with_wide_grads(self) -> "TracedLayer":
        """Returns the layer whose products that are gradients of params are in the dtype of the params."""
        return replace(self, graph=self.graph.widen(self.values["dp"]))

    def _on_device(self, shards: ParamShards) -> Graph:
        """The graph with the shapes on a device. Layers follow each other: input and cotangent are sharded like the output."""
        graph, values = self.graph, self.values
        params, y = values["params"], values["y"]
        cuts = shards.partition(graph, params).cuts
        ends = {}
        for number, ct in zip(self.y_floats, values["ct"], strict=True):
            ends[ct] = cuts.get(y[number])
        for x, output in zip(values["x"], y, strict=False):
            if graph.avals[x].shape == graph.avals[output].shape:
                ends[x] = cuts.get(output)
        return shards.partition(graph, params, ends).graph


def split_layer(
    layer: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
    shards: ParamShards | None = None,
    *,
    widens_grads: bool = False,
) -> SplitLayer:
    """Returns ``layer`` split into forward pass, B and W.

    Args:
        layer: ``layer(params, x) -> y``. y need not have the structure of x.
        params: The params of one layer, or ShapeDtypeStructs; some of them may be frozen.
        x: Its input, or ShapeDtypeStructs. Leaves that are not floats (positions, masks, PRNG keys) carry no gradient.
        shards: How the params are sharded over ``tensor``. What is stored is then what takes the fewest bytes on a device: a
            sharded activation costs a shard. By default whole arrays are compared.
        widens_grads: Whether products that are gradients of params are computed in the dtype of the params, where JAX casts
            them to it, so that they are not rounded before they are added; XLA can then add while it computes them.
    """
    traced = trace_layer(layer, params, x)
    if widens_grads:
        traced = traced.with_wide_grads()
    return traced.split(shards)


def trace_layer(
    layer: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
) -> TracedLayer:
    """Returns the graph of a layer with its backward pass, to split it for several shardings; arguments as ``split_layer``."""
    p_leaves, p_tree = jax.tree.flatten(params)
    x_leaves, x_tree = jax.tree.flatten(x)
    y_leaves = jax.tree.leaves(jax.eval_shape(layer, params, x))
    own = trained_indices(params)
    floats, y_floats = float_indices(x_leaves), float_indices(y_leaves)

    def joint(p: Arrays, x: Arrays, ct: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        def outputs(p_own: Arrays, x_floats: Arrays) -> tuple[list, list]:
            whole_x = x_tree.unflatten(merge(x, floats, x_floats))
            whole_p = p_tree.unflatten(merge(p, own, p_own))
            y = jax.tree.leaves(layer(whole_p, whole_x))
            return [y[i] for i in y_floats], y

        p_own, x_floats = [p[i] for i in own], [x[i] for i in floats]
        _, vjp, y = jax.vjp(outputs, p_own, x_floats, has_aux=True)
        dp, dx = vjp(list(ct))
        return y, dx, dp

    of_floats = [y_leaves[i] for i in y_floats]
    graph = trace(joint, p_leaves, x_leaves, of_floats)
    if any(map(is_on_host, graph.avals.values())):
        raise ValueError(
            "a layer must keep on the device what it saves for its backward pass; got a policy of jax.checkpoint that offloads "
            "to the host. Use one that saves or recomputes, such as jax.checkpoint_policies.dots_saveable."
        )
    p, x, ct = _divide(graph.inputs, len(p_leaves), len(x_leaves), len(y_floats))
    graph = graph.narrow(p)
    y, dx, dp = _divide(graph.outputs, len(y_leaves), len(floats), len(own))
    values = {"params": p, "x": x, "ct": ct, "y": y, "dx": dx, "dp": dp}
    return TracedLayer(graph, values, y_floats)


class _Parts(NamedTuple):
    """The values of a layer by the pass that computes them, and the side effects of the passes.

    Values that depend on the weights alone belong to neither pass: B and W each recompute them, so that B need not store them
    for W. The backward pass has the values that depend on ct, and those that a ``jax.checkpoint`` in the layer defers to it.
    What a ``jax.checkpoint`` recomputes has no effect again.
    """

    of_params: set[int]
    forward: set[int]
    effects: list[Node]
    effects_b: list[Node]
    effects_w: list[Node]


def _classify(layer: TracedLayer) -> _Parts:
    """Divides the values and side effects of a layer into those of the forward pass, of B and of W."""
    graph, values = layer.graph, layer.values
    of_x, of_ct = graph.reached(values["x"]), graph.reached(values["ct"])
    for_y = _made(graph.needed(values["y"], ()))
    in_remat = _made(node for node in graph.nodes if node.in_remat)
    deferred = (in_remat & of_x) - for_y
    backward = graph.reached({*values["ct"], *deferred})
    forward = of_x - backward
    of_params = set(graph.avals) - forward - backward

    effects = [node for node in graph.nodes if node.has_effects]
    once = [node for node in effects if not node.in_remat]
    in_forward = [node for node in once if backward.isdisjoint(node.inputs)]
    in_backward = [node for node in effects if not of_ct.isdisjoint(node.inputs)]
    for_dx = graph.needed(values["dx"], of_params | forward)
    made_by_b = {*values["ct"], *_made(for_dx)}
    in_b = [node for node in in_backward if of_ct.intersection(node.inputs) <= made_by_b]
    in_w = [node for node in in_backward if node not in in_b]
    return _Parts(of_params, forward, in_forward, in_b, in_w)


def _choose_stored(
    layer: TracedLayer,
    parts: _Parts,
    num_bytes: Callable[[int], int],
) -> dict[str, list[int]]:
    """Returns the values to store by name: those of the forward pass, and of them those for B; ``num_bytes`` on a device."""
    graph, values = layer.graph, layer.values
    dx, dp = values["dx"], values["dp"]
    before = parts.of_params | parts.forward
    b_nodes = graph.needed(dx, before, parts.effects_b)
    b_reads = _read(b_nodes, dx)
    b_values = _made(b_nodes) | set(values["ct"])
    w_nodes = graph.needed(dp, before | b_values, parts.effects_w)
    w_reads = _read(w_nodes, dp)

    # W may look up rows where B does: integers that B reads are stored in any case.
    integers = {i for i in b_reads & parts.forward if not is_float(graph.avals[i])}
    free = parts.of_params | (w_reads & parts.forward) | integers
    # W does not gather again what B has gathered: that would add to the traffic of one device's backward pass.
    cotangents_w = cheapest_to_store(
        graph, w_reads & b_values, b_values, free, num_bytes, gathers=False
    )
    w_nodes = graph.needed(dp, before | cotangents_w, parts.effects_w)
    residuals = (b_reads | _read(w_nodes, dp)) & parts.forward
    residuals = cheapest_to_store(graph, residuals, parts.forward, parts.of_params, num_bytes)
    given_to_w = {*values["params"], *residuals, *cotangents_w}
    w_reads = _read(graph.needed(dp, given_to_w, parts.effects_w), dp)
    return {
        "residuals_b": sorted(residuals - w_reads),
        "residuals_w": sorted(residuals & w_reads),
        "cotangents_w": sorted(cotangents_w),
    }


def _make_plans(
    graph: Graph,
    values: dict[str, list[int]],
    parts: _Parts,
) -> dict[str, Plan]:
    """Returns the part of the graph of each function."""

    def numbers(names: str) -> list[int]:
        return [number for name in names.split() for number in values[name]]

    def plan(given: str, makes: str, effects: Sequence[Node] = ()) -> Plan:
        known, made = numbers(given), numbers(makes)
        nodes = graph.needed(made, known, effects)
        return Plan(nodes, known, made)

    of_b = "params residuals_b residuals_w ct"
    effects_back = [*parts.effects_b, *parts.effects_w]
    return {
        "forward": plan("params x", "y", parts.effects),
        "forward_and_store": plan("params x", "y residuals_b residuals_w", parts.effects),
        "store": plan("params x", "residuals_b residuals_w"),
        "backward_input": plan(of_b, "dx cotangents_w", parts.effects_b),
        "backward_weights": plan("params residuals_w cotangents_w", "dp", parts.effects_w),
        "backward": plan(of_b, "dx dp", effects_back),
        "again": plan("params x ct", "dx dp"),
    }


def _made(nodes: Iterable[Node]) -> set[int]:
    """The values that nodes make."""
    return {number for node in nodes for number in node.outputs}


def _read(nodes: Iterable[Node], targets: Iterable[int]) -> set[int]:
    """The values that nodes read, and targets that may need no node."""
    read = {number for node in nodes for number in node.inputs}
    return read.union(targets)


def _divide(flat: Sequence, *sizes: int) -> list[list]:
    """Splits a flat list into lists of the given sizes."""
    parts, start = [], 0
    for size in sizes:
        parts.append(list(flat[start : start + size]))
        start += size
    return parts
