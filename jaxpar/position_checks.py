"""The checks of sequences that ``context`` splits: a loss is a sum over positions too, and pairs no neighbours.

Both sums of a loss are added over the devices that share a sequence, as they are over microbatches (``row_checks.py``). What a
model does with positions is its own: attention reads those of other devices.
"""

from collections.abc import Callable, Sequence

import jax
from jaxtyping import PyTree

from jaxpar._compat import equations
from jaxpar.fields import arg
from jaxpar.layered_model import OUTER, LayeredModel
from jaxpar.row_checks import NO_SUMS, Found, Model, pairs_of, resized, rows_of, shapes_of, size_of
from jaxpar.row_dependence import Kind, Reader, Value, traced

_UNKNOWN = Value(Kind.UNKNOWN, None)


def check_positions(
    model: Model,
    loss: Callable,
    params: PyTree,
    batch: PyTree,
    num_parts: int,
) -> None:
    """Raises if the loss would depend on how sequences are split: it is no sum over positions, or it pairs neighbours.

    Raises too for a dict without ``positions``: it has not been through ``shard_batch``, so its tokens are on other devices
    than ``context_parallel.places`` says.

    Args:
        model: The model.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays or ShapeDtypeStructs.
        batch: Likewise.
        num_parts: The number of parts of a sequence; with one nothing is refused, nor is a model of one length alone.
    """
    if num_parts == 1:
        return
    if isinstance(batch, dict) and "positions" not in batch:
        raise ValueError(
            f"a batch whose sequences are split must have positions; got {arg(context=num_parts)} and none. Make it with "
            "jaxpar.shard_batch, which adds them."
        )
    sizes = size_of(batch, 1), 2 * size_of(batch, 1)
    batches = [resized(shapes_of(batch), size, dim=1) for size in sizes]
    try:
        outputs = [jax.eval_shape(_forward(model), params, each) for each in batches]
        found = Found(2.0, _read_loss(loss, outputs, batches, sizes))
    except Exception:  # a model of one length alone
        return
    _refuse_neighbours(
        model,
        loss,
        params,
        outputs[0],
        batches[0],
        sizes[0],
    )
    loss_sum, weight_sum, *_ = found.sums
    is_wrong = any(value.kind in NO_SUMS for value in (loss_sum, weight_sum))
    if is_wrong or found.disagree(loss_sum, weight_sum):
        loss_is, weight_is = (found.described(each, "position") for each in (loss_sum, weight_sum))
        raise ValueError(
            "loss_sum and weight_sum must be sums over the positions that the loss is given, since both are added over the "
            f"devices that share a sequence; got loss_sum {loss_is}, and weight_sum {weight_is}. Return jnp.sum of the losses "
            "of positions, and jnp.sum of their weights or their number."
        )


def _refuse_neighbours(
    model: Model,
    loss: Callable,
    params: PyTree,
    outputs: PyTree,
    batch: PyTree,
    seq: int,
) -> None:
    """Raises if the loss or the embedding takes a slice of the positions, as those do that shift targets."""
    functions = {"loss": (loss, outputs)}
    if isinstance(model, LayeredModel):
        functions["embed"] = model.embed, params[OUTER]
    for name, (function, first) in functions.items():
        if size := _cut_positions(function, [first, batch], seq):
            raise ValueError(
                f"{name} must treat each position on its own, since a device has some of a sequence; got a slice of {size} of "
                f"{seq} positions. Shift targets before jaxpar.shard_batch, and give positions that do not count a weight of 0."
            )


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
    of_outputs, of_batch = ([rows_of(pair, sizes[0]) for pair in pairs_of(trees)] for trees in (outputs, batches))
    unknown = [_UNKNOWN if value.is_free else value for value in of_outputs]
    return Reader(sizes[0], sizes[1] / sizes[0]).read(*jaxprs, [*unknown, *of_batch])


def _cut_positions(function: Callable, args: list, seq: int) -> int | None:
    """Returns the size of a slice that a function takes of dim 1 of an array ``[rows, seq, ...]``; None if it takes none."""
    for equation in equations(jax.make_jaxpr(function)(*args)):
        if equation.primitive.name in ("slice", "dynamic_slice"):
            given = equation.invars[0].aval.shape
            made = equation.outvars[0].aval.shape
            if given[1:2] == (seq,) != made[1:2] and given[0] == size_of(args[1], 0):
                return made[1]
    return None


def _forward(model: Model) -> Callable[[PyTree, PyTree], PyTree]:
    return model.apply if isinstance(model, LayeredModel) else model
