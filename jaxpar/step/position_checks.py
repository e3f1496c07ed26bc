"""The checks of sequences that ``context`` splits: a loss is a sum over positions too, and pairs no neighbours.

Both sums of a loss are added over the devices that share a sequence, as they are over microbatches (``row_checks.py``). What a
model does with positions is its own: attention reads those of other devices. So a model must send something over ``context``,
as it must over ``data`` to params that replicas own (``check_collectives``).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import equations, source_line
from jaxpar.context_parallel import copies_of_heads, is_sequence, sequence_length
from jaxpar.data_parallel import batch_specs
from jaxpar.fields import arg
from jaxpar.layered_model import OUTER, LayeredModel
from jaxpar.mesh import CONTEXT, DATA, MANUAL, TENSOR, abstract_mesh, cut_of, entry_axes
from jaxpar.row_dependence import Kind, Reader, Reason, Value, traced
from jaxpar.row_dependence.operation import LIBRARY
from jaxpar.row_dependence.values import OTHER_PROGRAM, TORN
from jaxpar.shard_map import as_on_a_device, manual_over_data_and_stage
from jaxpar.sharding import path_string
from jaxpar.step.row_checks import (
    NO_SUMS,
    Found,
    Model,
    examine,
    num_rows_of,
    pairs_of,
    rows_of,
    shapes_of,
)

UNOWNED = (
    "value_and_grad was given a mesh and no shardings, so each replica has all params whole here. Layers that send rows to the "
    "owners of a param need jaxpar.Parallel(mesh, shardings), with data in the sharding of that param."
)
_UNKNOWN = Value(Kind.UNKNOWN, None)


def check_positions(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    shardings: PyTree = None,
) -> None:
    """Raises if the loss would depend on how sequences are split.

    It does where a part of the model mixes the positions of a device, which is proved from two numbers of devices that share
    the same sequence; where the loss is no sum over positions; and where it pairs neighbours. Raises too for a dict without
    ``positions``: it has not been through ``shard_batch``, so its tokens are on other devices than
    ``context_parallel.places`` says.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        mesh: The mesh; if it splits no sequences nothing is refused, nor is a model of one length alone.
        shardings: The NamedShardings of the params, if they are known.
    """
    num_parts = mesh.shape[CONTEXT]
    if num_parts == 1:
        return
    if isinstance(batch, dict) and "positions" not in batch:
        raise ValueError(
            f"a batch whose sequences are split must have positions; got {arg(context=num_parts)} and none. Make it with "
            "jaxpar.shard_batch, which adds them."
        )
    # Without shardings: arrays that are placed have that of the whole mesh, which a device does not see.
    params, shapes = shapes_of(params), shapes_of(batch)
    seq = sequence_length(batch)
    try:
        jax.eval_shape(_forward(model), params, shapes)
    except Exception:  # of any kind: a model is a function of the user
        return
    _refuse_neighbours(model, loss, params, shapes, mesh, shardings)
    found = _of_devices(model, loss, params, shapes, mesh, shardings) or _of_loss(
        model, loss, params, shapes, seq
    )
    if found is None:
        return
    _refuse_parts(found)
    _warn(found)
    _refuse_sums(found)


def _refuse_sums(found: Found) -> None:
    """Raises if the loss returns other than sums over positions."""
    loss_sum, weight_sum, *sums = found.sums
    is_wrong = any(value.kind in NO_SUMS for value in (loss_sum, weight_sum))
    if is_wrong or found.disagree(loss_sum, weight_sum):
        loss_is, weight_is = (
            _of_positions(found.described(each)) for each in (loss_sum, weight_sum)
        )
        raise ValueError(
            "loss_sum and weight_sum must be sums over the positions that the loss is given, since both are added over the "
            f"devices that share a sequence; got loss_sum {loss_is}, and weight_sum {weight_is}. Return jnp.sum of the losses "
            "of positions, and jnp.sum of their weights or their number; divide what is the same on all devices, such as the "
            "loss of a row, by jaxpar.context_parallel.num_parts()."
        )
    for name, each in zip(found.names[2:], sums, strict=True):
        if each.kind in NO_SUMS or found.disagree(each, weight_sum):
            this, weight_is = (
                _of_positions(found.described(value)) for value in (each, weight_sum)
            )
            raise ValueError(
                "each sum of a loss must be one over the positions that the loss is given, since it is added over the devices "
                f"that share a sequence, and divided by weight_sum; got {name!r}, {this}, and weight_sum, {weight_is}. Return "
                "jnp.sum of it over the positions; divide what is the same on all devices, such as a number of rows, by "
                "jaxpar.context_parallel.num_parts()."
            )


def _warn(found: Found) -> None:
    """Warns of code that may depend on which positions a device has.

    The library's own models are right where they do otherwise on another number of devices, such as send copies of heads, and
    where a kernel takes positions in groups.
    """
    is_right = lambda doubt: doubt.line.startswith(LIBRARY) and doubt.what in (OTHER_PROGRAM, TORN)
    doubts = [_of_positions(each) for each in found.doubts if not is_right(each)]
    if doubts and jax.process_index() == 0:
        warnings.warn(
            "a device has some positions of a sequence, of which batch['positions'] and jaxpar.context_parallel.places say the "
            f"numbers; got code that may depend on which a device has: {'; '.join(map(str, doubts))}. Use these numbers, "
            "random keys that differ by position, and sums over the whole sequence (sum_over_sequence, max_over_sequence); "
            "send what each head has of its own, such as slopes, through sequence_to_heads. If it is right after all, compare "
            f"loss and gradients with those of {arg(context=1)}.",
            stacklevel=3,
        )


def _of_devices(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    shardings: PyTree,
) -> Found | None:
    """Returns how the loss depends on which positions a device has, of a sequence that more devices share, or fewer.

    None if that is not known, which is told: a model sends positions from device to device, or takes no such numbers of
    devices.
    """
    parts, seq = mesh.shape[CONTEXT], sequence_length(batch)
    read = partial(_of_so_many, model, loss, params, batch, mesh, shardings)
    if _sends_on(model, params, batch, mesh, shardings):
        if jax.process_index() == 0:
            warnings.warn(
                "what a model sends from device to device is not read, nor what it makes of the positions of one; got "
                f"jax.lax.ppermute in it, and {arg(context=parts)}. It is taken to be right. Compare its loss and gradients "
                f"with those of {arg(context=1)}.",
                stacklevel=2,
            )
        return None
    # Numbers of devices, and the sequence: a device has as much of it as in the step, if the model takes twice its length.
    cases = [((2 * parts, parts), 2 * seq)]
    if seq % (4 * parts) == 0:
        cases.append(((2 * parts, parts), seq))
    if parts > 2:
        cases.append(((parts, parts // 2), seq))
    first = None
    # A device has several copies of heads, though the model has fewer heads than there are devices; else those it has.
    for copies_heads, (counts, whole) in product((True, False), cases):
        with copies_of_heads(counts[0] if copies_heads else 1):
            found = read(counts, whole)
        if found and not any(each.what == OTHER_PROGRAM for each in found.doubts):
            return found
        first = first or found
    if first is None and jax.process_index() == 0:
        others = 2 * parts if parts == 2 else f"{2 * parts}, and no {parts // 2}"
        warnings.warn(
            "that a model mixes no positions of one device alone is read from two numbers of devices; got "
            f"{arg(context=parts)}, and a model that takes no {arg(context=others)}. It is taken to be right. Compare its loss "
            f"and gradients with those of {arg(context=1)}.",
            stacklevel=2,
        )
    return first


def _of_so_many(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    shardings: PyTree,
    counts: tuple[int, int],
    whole: int,
) -> Found | None:
    """Returns the same from two numbers of devices, the larger one first."""
    sizes = whole // counts[0], whole // counts[1]
    meshes = [_with_parts(mesh, count) for count in counts]
    within = [partial(as_on_a_device, each) for each in meshes]
    batches = [_of_length(batch, size) for size in sizes]
    reader = Reader(sizes[0], sizes[1] / sizes[0], axis=CONTEXT, num_joined=sizes[0] // 2)
    return examine(model, loss, _owned(params, shardings, meshes[0]), batches, reader, within)


def _of_length(batch: PyTree, size: int) -> PyTree:
    """Returns the shapes of a batch whose sequences have another length."""
    length = sequence_length(batch)

    def of(leaf: Any) -> jax.ShapeDtypeStruct:
        rows, *dims = leaf.shape
        if is_sequence(leaf, length):
            dims[0] = size
        return jax.ShapeDtypeStruct((rows, *dims), leaf.dtype)

    return jax.tree.map(of, batch)


def _sends_on(model: Model, params: PyTree, batch: PyTree, mesh: Mesh, shardings: PyTree) -> bool:
    """Whether a model sends positions from device to device, as around a ring."""
    parts = mesh.shape[CONTEXT]
    own = _of_length(batch, sequence_length(batch) // parts)
    on_mesh = _with_parts(mesh, parts)
    with as_on_a_device(on_mesh):
        program = jax.make_jaxpr(_forward(model))(_owned(params, shardings, on_mesh), own)
    return any(each.primitive.name == "ppermute" for each in equations(program))


def _with_parts(mesh: Mesh, parts: int) -> AbstractMesh:
    """Returns the mesh without ``tensor``, where so many devices share a sequence."""
    axes = {axis: size for axis, size in mesh.shape.items() if axis != TENSOR}
    return abstract_mesh(**(axes | {CONTEXT: parts}))


def _owned(params: PyTree, shardings: PyTree, mesh: AbstractMesh) -> PyTree:
    """Returns the shapes of the params that a device has in a step."""
    if shardings is None:
        return params
    return jax.tree.map(partial(_owned_shape, mesh=mesh), params, shardings)


def _owned_shape(param: Any, sharding: NamedSharding, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """Returns the shape of a param on a device in a step: a part of one that is sharded over ``data`` for good."""
    shape = NamedSharding(mesh, _over_data(sharding)).shard_shape(param.shape)
    return jax.ShapeDtypeStruct(shape, param.dtype)


def _of_loss(model: Model, loss: Callable, params: PyTree, batch: PyTree, seq: int) -> Found | None:
    """Returns how the loss depends on the positions if each output that has positions depends on its own alone."""
    sizes = seq, 2 * seq
    batches = [_of_length(batch, size) for size in sizes]
    try:
        outputs = [jax.eval_shape(_forward(model), params, each) for each in batches]
        return Found(2.0, _read_loss(loss, outputs, batches, sizes))
    except Exception:  # a model of one length alone
        return None


def _refuse_parts(found: Found) -> None:
    """Raises if positions of a device that a part of the model mixes reach the loss."""
    if mixed := found.mixed_on_the_way():
        part, why = mixed
        raise ValueError(
            f"{part} must treat each position of a sequence on its own, or read others by a collective, since a device has "
            f"some of them; got one that mixes those of a device, on the way to the loss: {_of_positions(why)}. Read "
            "the whole sequence by jaxpar.context_parallel.gather_sequence, add up over it by sum_over_sequence, or use "
            f"{arg(context=1)}."
        )


def _of_positions(why: Reason) -> Reason:
    """Returns what mixed rows, in words of positions."""
    what = why.what.partition(", where the batch")[0].replace("its microbatch", "its device")
    return why._replace(what=what.replace("row", "position"))


def check_collectives(
    forward: Callable[[PyTree, PyTree], PyTree],
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    shardings: PyTree,
    mesh: Mesh,
) -> None:
    """Raises for a model that sends nothing over ``data`` where it owns params, or over ``context``. Computes nothing.

    Raises too for one, or for a loss, that sends anything over another axis, or numbers its devices, where it asks whether the
    axis is split: else it cannot name one.

    Args:
        forward: The model, ``(params, batch) -> outputs``.
        loss: The loss.
        params: The params, in the model's order or packed.
        batch: A microbatch of all replicas.
        shardings: The NamedShardings of the params, if they are known.
        mesh: The mesh.
    """
    found = jax.tree_util.tree_leaves_with_path(shardings)
    owned = [(path, leaf.spec) for path, leaf in found if cut_of(leaf.spec, DATA) is not None]
    has_owned = bool(owned) and mesh.shape[DATA] > 1
    split = [axis for axis in MANUAL if mesh.shape[axis] > 1]
    if not split:
        return
    whole = lambda params, batch: loss(forward(params, batch), batch)
    read = partial(_lines_of_collectives, params, batch, shardings, mesh)
    try:
        lines = read(whole)
        of_model = read(forward) if has_owned else {}
    except (TypeError, ValueError) as error:  # of shapes, as products of matrices raise
        if not has_owned:
            if shardings is None and DATA in split:
                error.add_note(UNOWNED)
            raise
        raise ValueError(_of_owner(*owned[0], params, mesh, str(error).rstrip("."))) from error
    if CONTEXT in split and CONTEXT not in lines:
        raise ValueError(
            "each device has a part of every sequence, so layers must gather what they read of other positions; got "
            f"{arg(context=mesh.shape[CONTEXT])} and no collective over context in the model. Give attention the keys and "
            f"values of jaxpar.context_parallel.gather_sequence, or use {arg(context=1)}."
        )
    if has_owned and DATA not in lines:
        got = "no collective over data in the model"
        raise ValueError(_of_owner(*owned[0], params, mesh, got))
    for axis in split:
        allowed = len(of_model.get(axis, ())) if axis == DATA else 0
        sent = lines.get(axis, [])[allowed:]
        if sent and axis != CONTEXT:
            raise ValueError(
                f"a model and its loss must send nothing over {axis}, nor ask for the number of a device there: both get rows "
                f"of one replica, and sums over all are made for them; got {sent[0]}. Return a number for each row, which "
                "the loss sums over all rows, or put numbers of all rows into the batch. Params that replicas own have data in "
                "their shardings (docs/your_model.md, Experts over data)."
            )


def _of_owner(path: tuple, spec: PartitionSpec, params: PyTree, mesh: Mesh, got: str) -> str:
    """Returns the message for a model that does not send rows to the owners of a param."""
    found = {path_string(at): leaf for at, leaf in jax.tree_util.tree_leaves_with_path(params)}
    param = found[path_string(path)]
    on_mesh = abstract_mesh(**mesh.shape)
    own = _owned_shape(param, NamedSharding(on_mesh, spec), on_mesh).shape
    return (
        "layers must send rows to the owner of a param that is sharded over data for good; got "
        f"{path_string(path)} {list(param.shape)} of {spec}, of which a replica has {list(own)}, and: {got}. Send rows to "
        "the owners (docs/your_model.md, Experts over data), or leave data out of the rule: zero=3 shards params over it, "
        "and gathers them."
    )


def _lines_of_collectives(
    params: PyTree,
    batch: PyTree,
    shardings: PyTree,
    mesh: Mesh,
    function: Callable[[PyTree, PyTree], PyTree],
) -> dict[str, list[str]]:
    """Returns the manual axes over which a function sends anything, each with the lines of code that do, in their order.

    It is traced on a shard of the params that are owned. The number of a device counts as sent over axes but ``context``.
    """

    def outputless(params: PyTree, batch: PyTree) -> tuple:
        function(params, batch)
        return ()

    shapes = jax.eval_shape(lambda *trees: trees, params, batch)
    of_params = PartitionSpec() if shardings is None else jax.tree.map(_over_data, shardings)
    in_specs = of_params, batch_specs(shapes[1], mesh)
    on_shards = manual_over_data_and_stage(outputless, mesh, in_specs=in_specs, out_specs=())
    lines: dict[str, list[str]] = defaultdict(list)
    for equation in equations(jax.make_jaxpr(on_shards)(*shapes)):
        is_number = equation.primitive.name == "axis_index"
        for axis in _axes_of(equation):
            if not (is_number and axis == CONTEXT):
                lines[axis].append(f"{equation.primitive.name} at {source_line(equation)}")
    return lines


def _axes_of(equation: Any) -> list[str]:
    """Returns the mesh axes that an operation names."""
    given = [equation.params.get(name) or () for name in ("axis_name", "axes")]
    named = [[over] if isinstance(over, str) else over for over in given]
    return [axis for over in named for axis in over]


def _over_data(sharding: NamedSharding) -> PartitionSpec:
    """Returns the part of a param's spec that is ``data``."""
    return PartitionSpec(*(DATA if DATA in entry_axes(entry) else None for entry in sharding.spec))


def _refuse_neighbours(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    shardings: PyTree,
) -> None:
    """Raises if the loss or the embedding takes a slice of the positions, as those do that shift targets.

    A slice of a gathered sequence is right. To tell the two apart, the functions are traced on a device that has ``seq``
    positions of a longer sequence: what it gathers has more positions, and a slice of its own ones is the same as without a
    mesh.
    """
    seq = sequence_length(batch)
    cut = _cut_positions(model, loss, params, batch)
    if not cut:
        return
    on_mesh = _with_parts(mesh, mesh.shape[CONTEXT])
    try:
        with as_on_a_device(on_mesh):
            of_device = _cut_positions(model, loss, _owned(params, shardings, on_mesh), batch)
    except Exception:  # of any kind: a model is a function of the user
        of_device = cut
    for name, left in of_device.items():
        if name in cut:
            raise ValueError(
                f"{name} must treat each position on its own, since a device has some of a sequence; got a slice of {left} of "
                f"{seq} positions. Shift targets before jaxpar.shard_batch, and give positions that do not count a weight of "
                "0, or gather the whole sequence first (context_parallel.gather_sequence)."
            )


def _cut_positions(model: Model, loss: Callable, params: PyTree, batch: PyTree) -> dict[str, int]:
    """Returns the size of a slice that "loss" or "embed" takes of the positions, of each that does.

    It is one of dim 1 of an array ``[rows, positions, ...]``.
    """
    functions = {"loss": (loss, jax.eval_shape(_forward(model), params, batch))}
    if isinstance(model, LayeredModel):
        functions["embed"] = model.embed, params[OUTER]
    first = num_rows_of(batch), sequence_length(batch)
    found: dict[str, int] = {}
    for name, (function, given) in functions.items():
        for equation in equations(jax.make_jaxpr(function)(given, batch)):
            if equation.primitive.name in ("slice", "dynamic_slice"):
                before, after = (e[0].aval.shape for e in (equation.invars, equation.outvars))
                if before[:2] == first and before[1] != after[1]:
                    found.setdefault(name, after[1])
    return found


def _read_loss(
    loss: Callable,
    outputs: Sequence[PyTree],
    batches: Sequence[PyTree],
    sizes: tuple[int, int],
) -> list[Value]:
    """Returns how a loss depends on the positions, if each output that has positions depends on its own alone."""
    jaxprs, _ = traced(
        loss,
        (outputs[0], batches[0]),
        (outputs[1], batches[1]),
    )
    of_outputs, of_batch = (
        [rows_of(pair, sizes[0]) for pair in pairs_of(trees)] for trees in (outputs, batches)
    )
    unknown = [_UNKNOWN if value.is_free else value for value in of_outputs]
    return Reader(sizes[0], sizes[1] / sizes[0]).read(*jaxprs, [*unknown, *of_batch])


def _forward(model: Model) -> Callable[[PyTree, PyTree], PyTree]:
    return model.apply if isinstance(model, LayeredModel) else model
