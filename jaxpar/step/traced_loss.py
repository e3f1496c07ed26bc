"""Traces a model and its loss before a step is built, to check that its operations can run on the mesh and to find its weight.

The total weight of a batch depends on the batch alone, so it is known before the backward pass. The cotangent of each
loss_sum is then ``1 / total weight``, as it is for the ratio of the two on one device. Therefore a backward pass that is not
linear in its cotangent, because it clips or rounds gradients, returns the same values on every mesh.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jaxpar._compat import equations, has_reference_effects
from jaxpar.backward.graph import trace
from jaxpar.data_parallel import accumulate, microbatch_shapes
from jaxpar.fields import arg
from jaxpar.layered_model import LayeredModel
from jaxpar.loss_sums import totals_of, value_of
from jaxpar.mesh import CONTEXT, MANUAL, TENSOR, entry_axes, num_replicas, shown_sizes
from jaxpar.pipeline.control_flow import is_maskable
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.sharding import path_string
from jaxpar.step.purity import check_same_traces, second_trace
from jaxpar.step.unread import is_read, unread_of_layers
from jaxpar.trainable import only_trained, with_trained

Loss = Callable[[PyTree, PyTree], tuple]

_HOST_CALLBACKS = ("pure_callback", "io_callback")


@dataclass(frozen=True)
class TracedLoss:
    """The properties of a model and its loss that a step needs.

    Attributes:
        weight_of_rows: ``a replica's rows -> weight_sum``, the sum over its microbatches, in float32 or wider.
        dtype: The dtype of the loss on one device.
        manual_axes: The mesh axes over which a step is manual.
        unread: The indices of the params on which the outputs do not depend.
        unread_of_batch: The paths of the arrays of a batch on which neither the outputs nor the loss depend.
        is_mean: Whether the value is that of ``value_and_grad``; otherwise it is that of an evaluation, the sums.
        is_maskable: Whether an idle stage may run all of it on any values (``control_flow.is_maskable``).
    """

    weight_of_rows: Callable[[PyTree], jax.Array]
    dtype: Any
    manual_axes: frozenset[str]
    unread: tuple[int, ...] = ()
    unread_of_batch: tuple[str, ...] = ()
    is_mean: bool = True
    is_maskable: bool = True

    def value(self, sums: PyTree, total_weight: jax.Array) -> PyTree:
        """Returns the loss, or with ``has_aux`` the loss and the means of the further sums (``loss_sums.py``)."""
        if self.is_mean:
            return value_of(sums, total_weight, self.dtype)
        loss_sum, further = sums
        return loss_sum, total_weight, *totals_of(further)


def once_for_shapes(function: Callable[[PyTree, PyTree], Any]) -> Callable[[PyTree, PyTree], Any]:
    """Returns ``function`` of params and a batch, called once for each new set of their shapes and dtypes.

    What it returns must depend on nothing else but JAX's settings for traces.
    """
    results: dict[Any, Any] = {}

    def once(params: PyTree, batch: PyTree) -> Any:
        leaves, tree = jax.tree.flatten((params, batch))
        shapes = tuple((jnp.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves)
        settings = jnp.result_type(float), jax.sharding.get_abstract_mesh()
        key = tree, shapes, settings
        if key not in results:
            results[key] = function(params, batch)
        return results[key]

    return once


def trace_loss(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    loss: Loss,
    mesh: Mesh,
    num_microbatches: int,
    executor: str,
    params: PyTree,
    batch: PyTree,
) -> TracedLoss:
    """Returns the TracedLoss of a model and its loss. Traces, computes nothing.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with further sums after the two.
        mesh: The mesh.
        num_microbatches: The number of microbatches of each replica.
        executor: "spmd" or "mpmd".
        params: Arrays or ShapeDtypeStructs like the params, in the model's order.
        batch: Likewise for the batch.

    Raises:
        ImpureError: Model and loss are not the same when they are traced again.
        ValueError: The weight depends on the outputs, or an operation cannot run on the mesh.
    """
    microbatch = microbatch_shapes(batch, mesh, num_microbatches)
    params = jax.eval_shape(lambda params: params, params)
    forward = model.apply if isinstance(model, LayeredModel) else model

    def of_part() -> TracedLoss:
        whole = partial(_can_be_traced, forward, loss, params, batch)
        with _parts_told(mesh, num_replicas(mesh) * num_microbatches, microbatch, whole):
            traced, outputs = jax.make_jaxpr(forward, return_shape=True)(params, microbatch)
            of_loss = jax.make_jaxpr(loss)(outputs, microbatch)
        with second_trace(True):
            again = (
                jax.make_jaxpr(forward)(params, microbatch),
                jax.make_jaxpr(loss)(outputs, microbatch),
            )
        check_same_traces((traced, of_loss), again)
        operations = [*equations(traced), *equations(of_loss)]
        if any(operation.primitive.name.startswith("custom_vjp_call") for operation in operations):
            operations += _of_gradients(forward, loss, params, microbatch)
        manual_axes = _check_operations(operations, mesh, executor)
        weight = _of_batch_alone(
            lambda outputs, batch: loss(outputs, batch)[1], outputs, microbatch
        )
        if weight is None:  # the model may return it unchanged from the batch
            weight = _of_batch_alone(
                lambda params, batch: loss(forward(params, batch), batch)[1], params, microbatch
            )
        if weight is None:
            raise ValueError(
                "weight_sum must depend on the batch alone, since its total is needed before the backward pass; got a loss "
                "whose weight_sum depends on the outputs. Compute it from the batch; weights that a model computes must be "
                "evaluated beforehand and put into the batch."
            )
        with jax.numpy_dtype_promotion("standard"):
            mean = jax.eval_shape(lambda *given: jnp.divide(*loss(*given)[:2]), outputs, microbatch)
        count, is_read_by = len(jax.tree.leaves(params)), is_read(traced)
        leaves = jax.tree_util.tree_leaves_with_path(microbatch)
        by_either = map(any, zip(is_read_by[count:], is_read(of_loss)[-len(leaves) :], strict=True))
        of_batch = zip(leaves, by_either, strict=True)
        unread = {index for index in range(count) if not is_read_by[index]}
        if isinstance(model, LayeredModel):
            unread |= unread_of_layers(model, params, microbatch)
        of_rows = lambda rows: accumulate(weight, rows, num_microbatches)
        return TracedLoss(
            of_rows,
            mean.dtype,
            manual_axes,
            tuple(sorted(unread)),
            tuple(path_string(path) for (path, _), read in of_batch if not read),
            is_maskable=is_maskable(operations),
        )

    if mesh.shape[CONTEXT] == 1:
        return of_part()
    found = []  # where sequences are split a model may ask for the axis
    on_shards = manual_over_data_and_stage(
        lambda: found.append(of_part()), mesh, in_specs=(), out_specs=None
    )
    jax.eval_shape(on_shards)
    return found[0]


@contextmanager
def _parts_told(
    mesh: Mesh, num_parts: int, microbatch: PyTree, takes_whole: Callable[[], bool]
) -> Iterator[None]:
    """Adds to an error that only a part of the rows, or of each sequence, raises that model and loss are given one.

    Args:
        mesh: The mesh.
        num_parts: The number of parts into which the rows are split.
        microbatch: ShapeDtypeStructs of a part.
        takes_whole: Whether model and loss can be traced for the whole batch, asked after an error.
    """
    try:
        yield
    except Exception as error:
        if "ncompatible shapes" not in str(error) and not takes_whole():
            raise
        if num_parts > 1:
            rows = jax.tree.leaves(microbatch)[0].shape[0]
            error.add_note(
                f"Model and loss are given one of the {num_parts} parts of a batch at once, those of all microbatches and "
                f"replicas: here {rows} of {num_parts * rows} rows. An array of all rows that one of them closes over belongs "
                "in the batch, and a number of rows must be read from what they are given: len(x)."
            )
        if mesh.shape[CONTEXT] > 1:
            error.add_note(
                f"With {arg(context=mesh.shape[CONTEXT])}, a device has some positions of each sequence. An array of all "
                "positions, such as a table of them, is read at those of the device: "
                "table[jaxpar.context_parallel.places(h.shape[1])]."
            )
        raise


def _can_be_traced(
    forward: Callable[[PyTree, PyTree], PyTree], loss: Loss, params: PyTree, batch: PyTree
) -> bool:
    try:
        jax.eval_shape(lambda *given: loss(forward(*given), given[1]), params, batch)
    except Exception:
        return False
    return True


def _of_batch_alone(
    function: Callable[[PyTree, PyTree], Any], first: PyTree, batch: PyTree
) -> Callable | None:
    """Returns ``function`` as a function of the batch alone; None if its value depends on the values of ``first``."""
    graph = trace(function, first, batch)
    count = len(jax.tree.leaves(first))
    nodes = graph.needed(graph.outputs, ())
    read = {number for node in nodes for number in node.inputs} | set(graph.outputs)
    if not read.isdisjoint(graph.inputs[:count]):
        return None

    def of_batch(batch: PyTree) -> jax.Array:
        values = dict(zip(graph.inputs[count:], jax.tree.leaves(batch), strict=True))
        return jnp.asarray(graph.run(nodes, values, graph.outputs)[0])

    return of_batch


def _of_gradients(
    forward: Callable[[PyTree, PyTree], PyTree], loss: Loss, params: PyTree, batch: PyTree
) -> list[Any]:
    """The equations of the loss and its gradients, which include the backward pass of each ``jax.custom_vjp``."""

    def gradients(params: PyTree, batch: PyTree) -> PyTree:
        loss_of = lambda trained: loss(forward(with_trained(params, trained), batch), batch)[0]
        loss_sum, vjp = jax.vjp(loss_of, only_trained(params))
        return vjp(jnp.ones_like(loss_sum))

    traced = jax.make_jaxpr(gradients)(params, batch)
    with second_trace(True):
        again = jax.make_jaxpr(gradients)(params, batch)
    check_same_traces([traced], [again])
    return list(equations(traced))


def _check_operations(operations: Collection[Any], mesh: Mesh, executor: str) -> frozenset[str]:
    """Returns the axes over which these jaxpr equations must be manual; raises for one that cannot run on the mesh."""
    names = {operation.primitive.name for operation in operations}
    if any(map(has_reference_effects, operations)):
        raise ValueError(
            "a model must be a pure function, since its parts do not run in the order in which they are written; got one that "
            "uses jax.new_ref. Return the new value in its place; in a loop carry it with jax.lax.scan."
        )
    manual = frozenset(MANUAL)
    if callbacks := sorted(names.intersection(_HOST_CALLBACKS)):
        if mesh.shape[TENSOR] > 1:
            raise ValueError(
                f"JAX calls the host only where no mesh axis is automatic, as the tensor axis is here; got jax.{callbacks[0]} "
                f"and {arg(tensor=mesh.shape[TENSOR])}. Use a mesh with {arg(tensor=1)}, or write the function with JAX's "
                "operations."
            )
        manual |= {TENSOR}
    constraints = (
        o.params["sharding"] for o in operations if o.primitive.name == "sharding_constraint"
    )
    for sharding in (each for each in constraints if isinstance(each, NamedSharding)):
        if {axis for entry in sharding.spec for axis in entry_axes(entry)} & manual:
            taken = " or ".join(
                axis for axis in mesh.axis_names if axis in manual & shown_sizes(mesh.shape).keys()
            )
            raise ValueError(
                f"with_sharding_constraint in a model must not name {taken}, over which a step is split "
                f"already; got {sharding.spec}. Leave these axes out of the spec: a model sees its own rows alone."
            )
        if executor == "mpmd" and isinstance(sharding.mesh, Mesh):
            raise ValueError(
                'executor="mpmd" runs each stage on its own devices; got with_sharding_constraint with a NamedSharding on the '
                f"whole mesh ({sharding.spec}). Give it the PartitionSpec alone, under jax.set_mesh(mesh), or use "
                'executor="spmd".'
            )
    return manual
