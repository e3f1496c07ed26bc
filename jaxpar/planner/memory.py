"""The bytes that a device needs, by kind: the state between steps (``state.py``), and what a step adds to it.

A step computes gradients as ``step/plan.py`` chooses (``_of_gradients``), and then updates params (``_in_update``).
"""

import math
from collections.abc import Iterable
from functools import partial

from jaxpar.backward.min_cut import peak_bytes
from jaxpar.dtypes import num_bytes
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import REPLICAS
from jaxpar.pipeline import one_stage, spmd_program
from jaxpar.pipeline.layer import BUFFERS
from jaxpar.planner.job import Choice
from jaxpar.planner.ops import Analysis
from jaxpar.planner.state import AtRest, wide_bytes
from jaxpar.schedule import NAMED, PLACEMENT, lockstep_form


def step_memory(
    choice: Choice, analysis: Analysis, at_rest: AtRest, *, quick: bool = False, masks: bool = True
) -> dict[str, int]:
    """Returns the bytes of a device by kind; a stage with fewer layers is padded to the same number of positions.

    "params" and "optimizer" are stored between steps. "gradients" are sums over microbatches; "activations" wait for their
    backward pass or for another stage; "working" is live while one op runs: its intermediate values, params cast to the
    dtype of the computation, and gathered params of embedding and head.

    Args:
        choice: Mesh axes and settings.
        analysis: The work of its ops.
        at_rest: Its state between steps.
        quick: Whether to estimate the slots of long pipelines from short ones instead of compiling their schedules.
        masks: Whether idle stages compute too, as on GPUs; not on CPU devices.
    """
    found = _of_gradients(choice, analysis, at_rest, quick=quick, masks=masks)
    # Gradients are computed before params are updated.
    others = found["gradients"] + found["activations"]
    working = max(found["working"], _in_update(choice, at_rest) - others)
    return at_rest.bytes | found | {"working": working}


def _in_update(choice: Choice, at_rest: AtRest) -> int:
    """The shards of gradients and of new params, and the params that are gathered from these at ZeRO 1 and 2, beside the old.

    XLA for GPUs gathers a param that is sharded along a later dim than its first into a further array, which it then
    transposes, and it gathers all of them at once.
    """
    shards = at_rest.step.zero.of_grads
    total = 0
    for local, own, shard in zip(at_rest.local_grads, at_rest.grads, shards, strict=True):
        if shard.dim is None or shard.is_param:
            continue
        total += wide_bytes([own]) + num_bytes([own])
        if math.prod(local.shape[: shard.dim]) > 1:
            total += num_bytes([local])
    return total


def _of_gradients(
    choice: Choice, analysis: Analysis, at_rest: AtRest, *, quick: bool, masks: bool
) -> dict[str, int]:
    """What the gradients of a step add to the state."""
    if masks and choice.is_in_turn(analysis.shape.num_layers):
        in_turn = _in_turn if choice.num_microbatches > 1 else _one_batch
        return in_turn(choice, analysis, at_rest)
    if choice.stage == 1 and not (masks and choice.runs_pipeline):
        return _accumulating(choice, analysis, at_rest, masks=masks)
    if masks:
        slots = choice.likely_slots if quick else choice.num_slots
        splits = choice.splits_backward
    else:
        table = choice.table(choice.num_microbatches, lockstep_form(choice.schedule))
        joined = spmd_program(table, masks=False)
        slots = joined.num_slots
        splits = joined.schedule.splits_backward
    return _pipelined(choice, analysis, at_rest, slots, masks=masks, splits=splits)


def _pipelined(
    choice: Choice,
    analysis: Analysis,
    at_rest: AtRest,
    slots: dict[str, int],
    *,
    masks: bool,
    splits: bool,
) -> dict[str, int]:
    layout = choice.layout(analysis.shape.num_layers)
    split = analysis.split
    layer = analysis.layer
    message = num_bytes(analysis.x)
    buffers = {}
    for name in BUFFERS:
        of_slot = num_bytes(layer.shapes(split.values[name]))
        buffers[name] = slots[name] * layout.positions_per_chunk * of_slot
    buffers["inbox"] = (slots["inbox"] + 1) * message
    of_op = lambda name: peak_bytes(layer.graph, *split.plans[name])
    if splits:
        one_layer = analysis.one_layer_bytes
    else:
        one_layer = max(of_op("forward_and_store"), of_op("backward"))
    rings = set(buffers)
    if choice.stage == 1 and choice.remat is True:  # a layer stores its input, and runs again in B
        positions = layout.positions_per_chunk * slots["residuals_w"]
        buffers |= {"residuals_b": 0, "residuals_w": positions * message}
        one_layer = analysis.again_bytes
    elif masks and choice.remat is True:
        # R writes a ring of one slot and one position in the tick in which B reads it, and XLA passes the values on without it.
        rings -= {name for name in rings if slots[name] * layout.positions_per_chunk == 1}
        if rings.isdisjoint(("residuals_b", "residuals_w")) and PLACEMENT[choice.schedule] != "v":
            one_layer = analysis.again_bytes
    if masks and choice.merges:
        one_layer += analysis.forward_bytes  # F of a microbatch runs beside B of another
    # Two messages travel while W or the head runs: what is sent and what arrives.
    messages = 4 * message if masks and choice.stage > 1 else 0
    # A branch skips the head with several chunks or unequal layers (Ends.is_masked), and where W is apart from B.
    skips_head = (
        NAMED[choice.schedule].splits_backward or layout.num_chunks > 1 or not layout.is_even
    )
    head = analysis.head_bytes_of_branch if skips_head else analysis.head_bytes_of_op
    # Where W is apart from B, a tick that skips idle ops has the whole head.
    if masks and not choice.splits_backward and analysis.part_of_head(choice):
        head = analysis.head_bytes_of_op // choice.stage
    # Under ZeRO 3 the gradients of the layer that is reduced while another runs; with several chunks XLA needs none.
    reduces_late = masks and choice.zero == 3 and choice.parts() > 1 and choice.num_chunks == 1
    late = num_bytes(at_rest.one_layer[i] for i in at_rest.trained_layers) if reduces_late else 0
    positions = layout.num_chunks * layout.positions_per_chunk
    # The op of a layer and that of the head do not run at the same time.
    working = max(one_layer + messages, head, analysis.embed_bytes) + late
    working += _cast_layers(choice, analysis, at_rest, positions) + _gathered(at_rest)
    return {
        "gradients": _summed_layers(choice, at_rest, positions) + _summed_outer(choice, at_rest),
        "activations": sum(buffers[name] for name in rings),
        "working": working,
    }


def _in_turn(choice: Choice, analysis: Analysis, at_rest: AtRest) -> dict[str, int]:
    """The microbatches of one stage in turn: what layers store is kept once, and gradients are added layer by layer.

    The peak is where the head runs, in the backward pass of a layer, or at the end, where the largest of the sums is stacked to
    be reduced. A layer runs beside its own gradients, in float32, and at ZeRO 2 and 3 beside those of the layer above, which
    are under way; what both stored is free.
    """
    slots = {"residuals_b": 1, "residuals_w": 1, "cotangents_w": 0, "inbox": -1}
    found = _pipelined(choice, analysis, at_rest, slots, masks=True, splits=False)
    layers = analysis.shape.num_layers
    kept = found["activations"]
    waiting = min(_most_waiting(choice, layers), layers)
    of_layer = partial(_in_backward, choice, analysis, at_rest, kept // layers)
    # Above the last layer is the head.
    in_layer = max(of_layer(waiting), of_layer(1) + _sent(at_rest, analysis.ends.head_reads))
    in_layer += _cast_layers(choice, analysis, at_rest, layers)
    in_layer += _gathered(at_rest) - _gathered_to_cast(analysis, at_rest)
    in_layer += _cast_head(analysis, at_rest)
    in_embed = _sent(at_rest, analysis.ends.embed_reads) + sum(_summed_one(at_rest)) - kept
    at_end = max(in_embed, layers * max(_summed_one(at_rest), default=0) - kept)
    # Gathered params lie between gradients that come and go, where XLA leaves about as much free as the largest of them takes.
    in_layer += max(_gathered_each(at_rest), default=0)
    at_peak = max(found["working"], in_layer)
    return found | {"working": max(at_peak, at_end)}


def _summed_one(at_rest: AtRest) -> list[int]:
    """The sums of the gradients of one layer, float32 or wider, for each of its params."""
    return [wide_bytes([at_rest.one_layer[i]]) for i in at_rest.trained_layers]


def _most_waiting(choice: Choice, num_layers: int) -> int:
    """How many layers' gradients are whole at once: also those of the layer above, if they are scattered meanwhile."""
    scatters = choice.zero > 0 and choice.parts() > 1
    return 2 if scatters and choice.reduces_beside(num_layers) else 1


def _in_backward(
    choice: Choice,
    analysis: Analysis,
    at_rest: AtRest,
    stored: int,
    waiting: int,
) -> int:
    """The backward pass of a layer beside the whole gradients, in float32, of ``waiting`` layers.

    What these layers ``stored``, in bytes of each, is free.
    """
    one_layer = analysis.again_bytes if choice.remat is True else analysis.one_layer_bytes
    # By the op, as it computes them.
    counted = num_bytes(analysis.in_use[i] for i in at_rest.trained_layers)
    own = sum(_summed_one(at_rest))
    return one_layer - counted + waiting * (own - stored)


def _stored(choice: Choice, analysis: Analysis) -> int:
    """Returns what a layer stores for its backward pass: its residuals, or its input under remat."""
    if choice.remat is True:
        return num_bytes(analysis.x)
    values = analysis.split.values
    residuals = [*values["residuals_b"], *values["residuals_w"]]
    return num_bytes(analysis.layer.shapes(residuals))


def _one_batch(choice: Choice, analysis: Analysis, at_rest: AtRest) -> dict[str, int]:
    """One microbatch whose layers are written out: a layer's gradients take the place of what it stored.

    Returns the parts at the moment of the peak: where the head runs, in the backward pass of a layer, or at the end, where the
    embedding's gradients are there and the largest of those of layers is stacked. What waits is as in ``_in_turn``.
    """
    layers = analysis.shape.num_layers
    stored = _stored(choice, analysis)
    casts = _cast_layers(choice, analysis, at_rest, layers)
    # Of a gradient that is sharded a device keeps its part.
    sums = _summed_each(choice, at_rest, layers, scattered="is_sharded")
    of_layers = sum(sums)
    ends = analysis.ends
    of_head = _summed_outer(choice, at_rest, ends.head_reads)
    sent_by_head, sent_by_embed = (
        _sent(at_rest, reads) for reads in (ends.head_reads, ends.embed_reads)
    )
    # With remat the count of a layer that runs again is high enough without them.
    gathered = 0 if choice.remat is True else 2 * _gathered_layer(analysis, at_rest)

    def in_backward(done: int) -> dict[str, int]:
        """In the backward pass of a layer, after that of ``done`` layers."""
        waiting = min(_most_waiting(choice, layers), done + 1)
        rest = layers - done
        in_layer = _in_backward(choice, analysis, at_rest, stored, waiting)
        return {
            "gradients": of_head + of_layers * (done + 1 - waiting) // layers,
            "activations": rest * stored,
            "working": casts * rest // layers + in_layer + gathered + (0 if done else sent_by_head),
        }

    at_head = {
        "gradients": 0,
        "activations": layers * stored,
        "working": casts + _cast_head(analysis, at_rest) + analysis.head_bytes_of_op,
    }
    at_end = {
        "gradients": of_layers + _summed_outer(choice, at_rest),
        "activations": 0,
        "working": max(analysis.embed_bytes, max(sums, default=0), sent_by_embed),
    }
    moments = (at_head, at_end, *map(in_backward, range(layers)))
    return max(moments, key=lambda parts: sum(parts.values()))


def _accumulating(
    choice: Choice, analysis: Analysis, at_rest: AtRest, *, masks: bool
) -> dict[str, int]:
    """One stage: a scan over layers, whose backward pass reads the residuals of each layer, or its input under remat.

    The peak is where the head runs, in the backward pass of layers, or where what is left of the gradients is reduced.
    """
    layers = analysis.shape.num_layers
    kept = layers * _stored(choice, analysis)
    one_layer = analysis.remat_bytes if choice.remat is True else analysis.backward_bytes
    own = _summed_one(at_rest)
    outer = sum(_outer_each(at_rest).values())
    gathered = _gathered(at_rest)
    # A scan scatters gradients of params that it gathers; those of others are whole until it ends.
    of_layers = _summed_layers(choice, at_rest, layers, scattered="is_param")
    # Under ZeRO 3 those of a layer are reduced while the next one computes its own, which take their place one by one.
    late = masks and choice.zero == 3 and choice.parts() > 1
    # Under ZeRO 1 and 2 the largest one of all layers is transposed to be scattered.
    sent = layers * max(own, default=0) if choice.zero in (1, 2) and choice.parts() > 1 else 0
    many = choice.num_microbatches > 1
    gradients = of_layers + outer
    in_head = kept + analysis.head_bytes + gathered
    in_layers = kept + of_layers + analysis.head_waits_bytes + one_layer
    in_layers += sum(own) + late * max(own, default=0)
    at_end = gradients + late * sum(own) + analysis.embed_bytes
    at_end += 0 if many and choice.zero == 1 else sent
    peak = max(in_head, in_layers, at_end)
    if many:
        sums = _summed_layers(choice, at_rest, layers) + _summed_outer(choice, at_rest)
        gradients += sums
        # Sums are reduced over replicas after the last use of an activation; XLA for CPU devices does not do it in place.
        copied = 3 * sums if choice.parts(REPLICAS) > 1 and not masks else 0
        peak = max(sums + gathered + peak, sums + sent, copied)
    return {"gradients": gradients, "activations": kept, "working": max(0, peak - gradients - kept)}


def _summed_layers(
    choice: Choice, at_rest: AtRest, positions: int, scattered: str = "is_early"
) -> int:
    """The sums of layers' gradients, float32 or wider; of those that are ``scattered`` a device stores only its shard."""
    return sum(_summed_each(choice, at_rest, positions, scattered))


def _summed_each(
    choice: Choice, at_rest: AtRest, positions: int, scattered: str = "is_early"
) -> list[int]:
    """The same for each of a layer's params."""
    shards = at_rest.step.zero[LAYERS].of_grads
    sums = []
    for one, shard in zip(_summed_one(at_rest), shards, strict=True):
        parts = choice.parts(shard.axes) if getattr(shard, scattered) else 1
        sums.append(positions * (one // parts))
    return sums


def _summed_outer(choice: Choice, at_rest: AtRest, reads: Iterable[int] | None = None) -> int:
    """The sums of the gradients of embedding and head; of those that are scattered early a device stores only its shard.

    ``reads`` has the numbers of the params that count, by default all.
    """
    each, shards = _outer_each(at_rest), at_rest.step.zero[OUTER].of_grads
    total = 0
    for (i, whole), shard in zip(each.items(), shards, strict=True):
        if reads is None or i in reads:
            total += whole // choice.parts(shard.axes) if shard.is_early else whole
    return total


def _outer_each(at_rest: AtRest) -> dict[int, int]:
    """The gradients of embedding and head, float32 or wider, by the number of their param."""
    return {i: wide_bytes([at_rest.outer_in_use[i]]) for i in at_rest.trained_outer}


def _sent(at_rest: AtRest, reads: Iterable[int]) -> int:
    """Those of the params that an end reads that are whole while a microbatch sends them, since they are scattered early."""
    each, shards = _outer_each(at_rest), at_rest.step.zero[OUTER].of_grads
    early = (i for i, shard in zip(each, shards, strict=True) if shard.is_early)
    return sum(each[i] for i in early if i in reads)


def num_cast_again(choice: Choice, analysis: Analysis) -> int:
    """Returns how many layers GPUs cast in F and B of each microbatch, not once a step (``one_stage.py``)."""
    num_layers = analysis.shape.num_layers
    if not choice.is_in_turn(num_layers):
        return 0
    _, copied = analysis.cast_bytes
    return one_stage.num_cast_again(
        num_layers,
        choice.num_microbatches,
        shards_sums_alone=choice.zero == 2 and choice.parts() > 1,
        copied=copied,
        stored=_stored(choice, analysis),
    )


def _cast_layers(choice: Choice, analysis: Analysis, at_rest: AtRest, positions: int) -> int:
    """The params of layers in the dtype of the computation, if it is not their own, of those that are cast once a step.

    Under ZeRO 3 these are shards, and the shard of one layer is sliced out of them to be gathered.
    """
    shards = at_rest.step.zero[LAYERS].of_params
    once, total = positions - num_cast_again(choice, analysis), 0
    for own, new, shard in zip(at_rest.one_layer, analysis.in_use, shards, strict=True):
        times = (once if new.dtype != own.dtype else 0) + shard.is_param
        parts = choice.parts(shard.axes) if shard.is_param else 1
        total += times * num_bytes([new]) // parts
    return total


def _gathered_layer(analysis: Analysis, at_rest: AtRest) -> int:
    """The params of a layer that are gathered (ZeRO 3), for it or ahead of the next one."""
    shards = at_rest.step.zero[LAYERS].of_params
    pairs = zip(analysis.in_use, shards, strict=True)
    return num_bytes(leaf for leaf, shard in pairs if shard.is_param)


def _cast_head(analysis: Analysis, at_rest: AtRest) -> int:
    """The params of the head in the dtype of the computation, if it is not their own."""
    total = 0
    for i, dtype in analysis.ends.head_dtypes.items():
        leaf = at_rest.outer_in_use[i]
        if leaf.dtype != dtype:
            total += leaf.size * dtype.itemsize
    return total


def _gathered_to_cast(analysis: Analysis, at_rest: AtRest) -> int:
    """The gathered params that the head alone reads, in another dtype: they are cast once, and free after that."""
    ends, total = analysis.ends, 0
    for i, dtype in ends.head_dtypes.items():
        whole, own = at_rest.outer_in_use[i], at_rest.outer_at_rest[i]
        is_cast = whole.dtype != dtype and i not in ends.embed_reads
        if is_cast and whole.shape != own.shape:
            total += num_bytes([whole])
    return total


def _gathered(at_rest: AtRest) -> int:
    """Params of embedding and head that a step gathers, since they are sharded between steps."""
    return sum(_gathered_each(at_rest))


def _gathered_each(at_rest: AtRest) -> list[int]:
    pairs = zip(at_rest.outer_in_use, at_rest.outer_at_rest, strict=True)
    return [num_bytes([whole]) for whole, own in pairs if whole.shape != own.shape]
