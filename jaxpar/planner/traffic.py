"""The collectives of a training step over each mesh axis: those of the compiled step, derived from shapes.

Those over the replicas and ``stage`` are jaxpar's own (`zero.py`, `pipeline/buffers.py`, `pipeline/embed_and_head.py`) and are
counted from the same specs. Those over ``tensor`` are inserted by XLA (`backward/partition.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.dtypes import num_bytes
from jaxpar.inspect.collectives import ring_bytes
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import CONTEXT, OF_MODELS, OF_ZERO, REPLICA, REPLICAS, STAGE, cut_of
from jaxpar.planner.job import Choice
from jaxpar.planner.ops import Analysis, layer_works
from jaxpar.planner.state import AtRest, wide_bytes
from jaxpar.schedule import PLACEMENT

GRADIENTS = "gradients"
# Reduced in the backward pass: once a step, or at ZeRO 2 and 3 with each microbatch.
ONCE, IN_EACH = "gradients of layers", "gradients of a layer"
OF_OUTER = "gradients of embedding and head"
GRADIENTS_OF_LAYERS = ONCE, IN_EACH
SCALAR = 4  # float32: the loss, the weight, or a gradient's sum of squares or count of values that are not finite


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over one axis.

    Attributes:
        axis: The mesh axis.
        kind: XLA's name of the collective.
        payload_bytes: Bytes of the complete array, or of a message.
        times: Runs in a step.
        group_size: Size of the axis.
        what: Name of the arrays.
    """

    axis: str
    kind: str
    payload_bytes: int
    times: int
    group_size: int
    what: str

    @property
    def bytes_moved(self) -> int:
        """Bytes that a device sends in a step with ring algorithms."""
        return self.times * ring_bytes(self.kind, self.payload_bytes, self.group_size)


def step_traffic(
    choice: Choice,
    analysis: Analysis,
    at_rest: AtRest,
    *,
    messages: bool = True,
    masks: bool = True,
) -> list[Transfer]:
    """Returns the collectives of the busiest device in a training step with ``executor="spmd"``.

    Args:
        choice: Mesh axes and settings.
        analysis: The work of its ops.
        at_rest: Its state between steps.
        messages: Whether to include messages between stages, for which the schedule is compiled.
        masks: Whether ops are masked, as on GPUs; not on CPU devices, nor in other software.
    """
    transfers = [*_over_replicas(choice, analysis, at_rest, masks=masks)]
    transfers += _over_stage(choice, at_rest)
    if messages and choice.stage > 1:
        transfers += _messages(choice, analysis)
    transfers += _of_ops(choice, analysis)
    transfers += _of_norm(choice, at_rest)
    return [each for each in transfers if each.group_size > 1 and each.payload_bytes and each.times]


def bytes_by_axis(transfers: list[Transfer]) -> dict[str, int]:
    """Returns the bytes that a device sends in a step, by axis."""
    total: Counter[str] = Counter(dict.fromkeys(OF_MODELS, 0))
    for each in transfers:
        total[each.axis] += each.bytes_moved
    return dict(total)


def layers_of_a_stage(choice: Choice, num_layers: int) -> int:
    """Returns the number of layers of the stage that has the most."""
    if choice.stage == 1:
        return num_layers
    of_stages = choice.layout(num_layers).layer_counts.sum(axis=1)
    return int(of_stages.max())


def _over_replicas(
    choice: Choice, analysis: Analysis, at_rest: AtRest, *, masks: bool
) -> Iterator[Transfer]:
    yield from _whole_gradients(choice, at_rest)
    yield from _sharded_gradients(choice, at_rest)
    yield from _of_layers(choice, analysis, at_rest)
    yield from _of_outer(choice, analysis, at_rest, masks=masks)


def _whole_gradients(choice: Choice, at_rest: AtRest) -> Iterator[Transfer]:
    """Yields the sums of the loss, its weight, and of gradients that no replica has a part of."""
    over = partial(_over, choice)
    shards = at_rest.step.zero.of_grads
    whole, owned = Counter({GRADIENTS: SCALAR}), 0  # that of the loss
    for leaf, shard, name in zip(at_rest.local_grads, shards, _names(choice, at_rest), strict=True):
        size = num_bytes([leaf])
        if shard.is_replicated:
            whole[name] += size
        elif shard.dim is None:
            owned += size
    in_one = all(shard.is_replicated for shard in shards)
    yield from over(REPLICAS, "all-reduce", SCALAR, 1, "weight")
    for name, size in whole.items():
        yield from over(REPLICAS if in_one else OF_ZERO, "all-reduce", size, 1, name)
    yield from over((CONTEXT,), "all-reduce", owned, 1, GRADIENTS)
    if not in_one:  # groups of replicas sum what each member has after its own group
        yield from over((REPLICA,), "all-reduce", wide_bytes(at_rest.grads) + SCALAR, 1, GRADIENTS)


def _sharded_gradients(choice: Choice, at_rest: AtRest) -> Iterator[Transfer]:
    """Yields the sums of gradients of which each replica keeps a part, and the gathers of what it updates by it."""
    shards, names = at_rest.step.zero.of_grads, _names(choice, at_rest)
    for leaf, shard, name in zip(at_rest.local_grads, shards, names, strict=True):
        size = num_bytes([leaf])
        if shard.dim is not None and not shard.is_early:
            yield from _over(choice, shard.axes, "reduce-scatter", size, 1, name)
        if shard.dim is not None and not shard.is_param:
            yield from _over(choice, shard.axes, "all-gather", size, 1, "params after the update")


def _names(choice: Choice, at_rest: AtRest) -> list[str]:
    """Returns what each gradient is part of where it is reduced, in the order of ``at_rest.local_grads``."""
    num_of_layers = len(at_rest.trained_layers)  # which are stacked, and come first
    num_layers = at_rest.local_grads[0].shape[0] if num_of_layers else 0
    of_layer = ONCE if choice.reduces_beside(num_layers) else GRADIENTS
    return [of_layer if i < num_of_layers else GRADIENTS for i in range(len(at_rest.local_grads))]


def _of_layers(choice: Choice, analysis: Analysis, at_rest: AtRest) -> Iterator[Transfer]:
    """Yields what ZeRO moves for each layer and microbatch: sums of gradients, and params where an op reads them."""
    times = choice.num_microbatches * layers_of_a_stage(choice, analysis.shape.num_layers)
    works = layer_works(choice, analysis).values()
    as_read = analysis.in_use
    shards = at_rest.step.zero[LAYERS].of_params
    leaves = zip(at_rest.one_layer, as_read, shards, strict=True)
    for index, (leaf, read, shard) in enumerate(leaves):
        if shard.is_early and index in at_rest.trained_layers:
            size = num_bytes([leaf])
            yield from _over(choice, shard.axes, "reduce-scatter", size, times, IN_EACH)
        if shard.is_param:
            num_ops = sum(index in work.reads for work in works)
            size = num_bytes([read])
            yield from _over(
                choice, shard.axes, "all-gather", size, times * num_ops, "params of a layer"
            )


def _of_outer(
    choice: Choice, analysis: Analysis, at_rest: AtRest, *, masks: bool
) -> Iterator[Transfer]:
    """Yields what ZeRO moves for embedding and head: sums of gradients of each microbatch, and params once a step."""
    zero, ends = at_rest.step.zero[OUTER], analysis.ends
    in_turn = masks and choice.is_in_turn(analysis.shape.num_layers)
    own = at_rest.local_grads[len(at_rest.trained_layers) :]
    for index, grad, shard in zip(at_rest.trained_outer, own, zero.of_grads, strict=True):
        if shard.is_early:
            # In turn each end that reads a param sends a gradient of it.
            num_ends = (index in ends.embed_reads) + (index in ends.head_reads)
            times = choice.num_microbatches * (num_ends if in_turn else 1)
            size = num_bytes([grad])
            yield from _over(choice, shard.axes, "reduce-scatter", size, times, OF_OUTER)
    shards = zero.of_params
    for leaf, shard in zip(at_rest.outer_in_use, shards, strict=True):
        if shard.is_param:
            size = num_bytes([leaf])
            yield from _over(
                choice, shard.axes, "all-gather", size, 1, "params of embedding and head"
            )


def _over(
    choice: Choice, axes: Sequence[str], kind: str, payload_bytes: int, times: int, what: str
) -> Iterator[Transfer]:
    """Yields one collective over several axes: the whole array over the fastest, and a share of it over each slower one.

    In all a device sends as many bytes as in a ring over all of them.
    """
    for axis in reversed(axes):
        size = choice.mesh.shape[axis]
        yield Transfer(axis, kind, payload_bytes, times, size, what)
        payload_bytes = -(-payload_bytes // size)


def _over_stage(choice: Choice, at_rest: AtRest) -> Iterator[Transfer]:
    yield Transfer(STAGE, "all-reduce", SCALAR, 1, choice.stage, "loss")
    is_spec = lambda each: isinstance(each, PartitionSpec)
    specs = jax.tree.leaves(at_rest.step.replica_grads[OUTER], is_leaf=is_spec)
    trained = [at_rest.outer_in_use[index] for index in at_rest.trained_outer]
    for leaf, spec in zip(trained, specs, strict=True):
        kind = "reduce-scatter" if STAGE in spec else "all-reduce"
        size = num_bytes([leaf])
        yield Transfer(STAGE, kind, size, 1, choice.stage, OF_OUTER)
    outer = jax.tree.leaves(at_rest.params[OUTER])
    for leaf, on_device in zip(outer, at_rest.outer_at_rest, strict=True):
        if STAGE in leaf.sharding.spec:
            payload = choice.stage * num_bytes([on_device])
            yield Transfer(
                STAGE, "all-gather", payload, 1, choice.stage, "params of embedding and head"
            )


def _messages(choice: Choice, analysis: Analysis) -> Iterator[Transfer]:
    activations = num_bytes(analysis.x)
    gradients = num_bytes(leaf for leaf in analysis.x if jnp.issubdtype(leaf.dtype, jnp.inexact))
    goes_both_ways = PLACEMENT[choice.schedule] == "v"
    sizes = {"right": activations, "left": activations if goes_both_ways else gradients}
    for way, times in _sends_of_busiest(choice, sizes).items():
        yield Transfer(
            STAGE, "collective-permute", sizes[way], times, choice.stage, f"messages {way}"
        )


def _sends_of_busiest(choice: Choice, sizes: dict[str, int]) -> dict[str, int]:
    """Returns how often the stage that sends the most bytes sends in each direction."""
    by_stage: list[Counter[str]] = [Counter() for _ in range(choice.stage)]
    program = choice.program(choice.num_simulated)
    for way, sends in program.sends.items():
        for which in sends.which.tolist():
            for stage in sends.senders[which]:
                by_stage[stage][way] += 1
    bytes_of = lambda times: sum(times[way] * sizes[way] for way in sizes)
    busiest = max(by_stage, key=bytes_of)
    # Each microbatch sends the same.
    return {
        way: count * choice.num_microbatches // choice.num_simulated
        for way, count in busiest.items()
    }


def _of_norm(choice: Choice, at_rest: AtRest) -> Iterator[Transfer]:
    """Yields the all-reduces of the gradient norm, over each axis that shards a gradient."""
    for axis, size in choice.mesh.shape.items():
        cut = sum(cut_of(spec, axis) is not None for spec in at_rest.grad_specs)
        yield Transfer(axis, "all-reduce", cut * 2 * SCALAR, 1, size, "gradient norm")


def _of_ops(choice: Choice, analysis: Analysis) -> Iterator[Transfer]:
    count = choice.num_microbatches
    layers = layers_of_a_stage(choice, analysis.shape.num_layers)
    sends = [
        (work.sent, count * layers, f"a layer's {op}")
        for op, work in layer_works(choice, analysis).items()
    ]
    ends, has_stages = analysis.end_works, choice.stage > 1
    embeds_again = has_stages and choice.remat is True
    sent_back = ends["embed_back"].sent if has_stages else analysis.sent_by_embed_back(choice.remat)
    sends += [
        (ends["embed"].sent, 2 * count if embeds_again else count, "embedding"),
        (sent_back, count, "embedding back"),
        (ends["head"].sent, count, "head"),
    ]
    for sent, times, what in sends:
        for each in sent:
            size = choice.mesh.shape[each.axis]
            yield Transfer(each.axis, each.kind, each.payload_bytes, times, size, what)
