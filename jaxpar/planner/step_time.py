"""The time of a step, from the schedule simulator and the computation and traffic of each op.

    step = pipeline (or accumulation) + gradients over data + embedding and head over stage + the optimizer's update

An op takes as long as its kernels (``kernel_seconds.py``) and its collectives (``cluster.py``), one after the other. What
overlaps in jaxpar's program for GPUs:

    F beside B     where the two run in one loop over layers, the collectives over ``tensor`` of each run beside the kernels of
                   the other
    the head       which the stages share, each with its part: messages between stages run beside it
    W              where it is an op of its own: messages run beside it
    ZeRO 3         gathers and scatters of a layer run beside the kernels of the next one

``Software`` says what others overlap.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.dtypes import num_bytes
from jaxpar.mesh import DATA, REPLICAS, STAGE, TENSOR
from jaxpar.planner.cluster import Cluster, Links, collective_seconds
from jaxpar.planner.job import EXPERTS, Assumptions, Choice, Software
from jaxpar.planner.kernel_seconds import memory_rate, seconds_of
from jaxpar.planner.kernels import Kernels
from jaxpar.planner.memory import num_cast_again
from jaxpar.planner.ops import Analysis, Work, layer_works
from jaxpar.planner.state import wide_bytes
from jaxpar.planner.traffic import GRADIENTS_OF_LAYERS, Transfer
from jaxpar.schedule import PLACEMENT, Costs, stage_and_chunk
from jaxpar.schedule.simulate import Row, makespan

# Collectives take multiprocessors and memory bandwidth from the computation beside which they run: by this share of their time
# they lengthen it.
INTERFERENCE = 0.25
ROUNDING = 1e-12  # the share of a sum of seconds that its rounding may be


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by cause.

    Attributes:
        compute: Matrix products of the busiest device, without recomputed ones.
        again: Recomputed matrix products of the forward pass.
        tensor: Collectives inside layers and the head: over ``tensor``, and over ``context``.
        bubble: Waiting for other stages, and messages to them.
        data: Reductions of gradients and gathers of params over ``data``, ``replica`` and ``context``.
        ends: Collectives over ``stage`` for params and gradients of embedding and head.
        update: The optimizer's update.
    """

    compute: int | float
    again: int | float
    tensor: int | float
    bubble: int | float
    data: int | float
    ends: int | float
    update: int | float

    @property
    def total(self) -> int | float:
        """Seconds of the step."""
        return sum(vars(self).values())


class Prices:
    """Seconds of the ops, messages and collectives of a choice, those of ops for one microbatch.

    Attributes:
        computing: Those of the kernels of each op of one layer. The last op of the backward pass adds its gradients to those of
            earlier microbatches.
        sending: Those of the collectives over ``tensor`` of each op.
        again: The part of ``computing`` that is recomputed.
        head_computing: Those of the kernels of the head and the loss, forward and backward, and of the sums of its gradients.
        head_sending: Those of their collectives.
        embed: Those of the embedding.
        embed_back: Those of its backward pass.
        counts: The layers of each virtual stage; the first has more if it alone runs the layers of the embedding.
        shares_head: Whether the stages share the head.
        whole_head: Seconds of the head and the loss for one microbatch where a stage runs them alone.

    Args:
        choice: Mesh axes and settings.
        analysis: The work of its ops.
        cluster: The machines.
        assumed: Assumed efficiencies.
        software: What runs it.
        ideal: Whether stages are free-running, as with ``executor="mpmd"`` and in other frameworks; otherwise they run in
            lock-step, as with ``executor="spmd"``.
    """

    def __init__(
        self,
        choice: Choice,
        analysis: Analysis,
        cluster: Cluster,
        assumed: Assumptions,
        software: Software,
        *,
        ideal: bool,
    ) -> None:
        self.choice = choice
        self.cluster = cluster
        self.software = software
        self.ideal = ideal
        self._analysis = analysis
        self._assumed = assumed
        self._message = num_bytes(analysis.x)
        self.links = Links(cluster, choice.mesh.shape, assumed.network)
        works, ends = layer_works(choice, analysis), analysis.end_works
        part_of_head = None if ideal else analysis.part_of_head(choice)
        self.shares_head = part_of_head is not None
        head = part_of_head or ends["head"]
        self.whole_head = self._takes(ends["head"])
        self.head_computing = self._computes(head)
        self.head_sending = self._sends(head)
        self.embed = self._takes(ends["embed"])
        self.embed_back = self._takes(ends["embed_back"])
        self.computing = {op: self._computes(work) for op, work in works.items()}
        self.sending = {op: self._sends(work) for op, work in works.items()}
        if "W" in works and software.products_alone_in_w:
            products = Kernels(works["W"].kernels.products)
            alone = self._computes(replace(works["W"], kernels=products))
            self.computing["B"] += self.computing["W"] - alone
            self.computing["W"] = alone
        forward = self._computes(analysis.works["forward"])
        again = self.computing.get("R", forward if choice.remat is True else 0.0)
        self.again = again + software.recompute * forward
        self.computing["B"] += software.recompute * forward
        if assumed.compute is None:
            self._move_params_and_sums(works)
        layout = choice.layout(analysis.shape.num_layers)
        self.counts: tuple[float, ...] = tuple(layout.layers_per_virtual_stage or ())
        self._leading = 0.0 if analysis.ends.embed_is_lookup else self.embed + self.embed_back
        if self._leading and (ideal or choice.num_chunks > 1 or len(set(self.counts)) > 1):
            # The first stage alone runs the layers of the embedding, as if it had more of its own.
            self.counts = (self.counts[0] + self._leading / self.one_layer, *self.counts[1:])
            self.embed = self.embed_back = self._leading = 0.0

    def _computes(self, work: Work) -> float:
        """Returns the seconds of the kernels of an op."""
        if self._assumed.compute is not None:
            return work.flops / (self.cluster.peak_flops * self._assumed.compute)
        return seconds_of(
            work.kernels,
            self.cluster,
            self.choice.tensor,
            self.software,
            self._analysis.own_share,
        )

    def _takes(self, work: Work) -> float:
        """Returns the seconds of an op."""
        return self._computes(work) + self._sends(work)

    def _sends(self, work: Work) -> float:
        """Returns the seconds of the collectives of an op."""
        seconds = hides = 0.0
        for each in work.sent:
            if each.of_rows and self.software.folds_experts:
                continue
            own = collective_seconds(self.links, *each[:3])
            name = EXPERTS if each.axis == DATA else each.axis
            seconds += own
            hides += own if name in self.software.overlaps else 0.0
        hidden = min(hides, self._computes(work))
        return seconds - (1 - INTERFERENCE) * hidden

    def _move_params_and_sums(self, works: Mapping[str, Work]) -> None:
        """Adds what copies the params of a layer out of their stacks or casts them, and adds gradients to sums."""
        analysis, rate = self._analysis, memory_rate(self.cluster)
        if self.choice.runs_pipeline and not self.ideal:
            for op, work in works.items():
                read = num_bytes(analysis.in_use[i] for i in work.reads)
                self.computing[op] += 2 * read / rate
        if not self.ideal:
            share = num_cast_again(self.choice, analysis) / analysis.shape.num_layers
            for op in ("F", "B"):
                self.computing[op] += share * sum(analysis.cast_bytes) / rate
        if self.choice.num_microbatches > 1 and not self.software.fused_accumulation:
            self.computing["W" if "W" in works else "B"] += (
                2 * wide_bytes(analysis.trained_params) / rate
            )
            self.head_computing += 2 * wide_bytes(analysis.head_grads) / rate

    def op(self, name: str) -> int | float:
        """Returns the seconds of an op of one layer."""
        return self.computing.get(name, 0.0) + self.sending.get(name, 0.0)

    @property
    def one_layer(self) -> int | float:
        """The seconds of all ops of one layer for one microbatch."""
        return sum(map(self.op, self.computing))

    @property
    def beside(self) -> int | float:
        """The seconds of the collectives of one layer, for one microbatch, that run beside the kernels of another.

        Those of F run beside the kernels of the backward pass, and the other way around (``Choice.merges``).
        """
        if self.ideal or not self.choice.merges:
            return 0.0
        of_backward = lambda seconds: sum(each for op, each in seconds.items() if op != "F")
        of_f = min(self.sending["F"], of_backward(self.computing))
        of_others = min(of_backward(self.sending), self.computing["F"])
        return (of_f + of_others) * (1 - INTERFERENCE)

    @property
    def head_seconds(self) -> int | float:
        """The seconds of the head and the loss for one microbatch, forward and backward, on the stage with the head."""
        exchange = 0.0
        if self.shares_head:
            for kind in ("reduce-scatter", "all-gather"):  # y, and the gradient of y
                exchange += collective_seconds(self.links, STAGE, kind, self._message)
        return self.head_computing + self.head_sending + exchange

    @property
    def messages(self) -> list[int | float]:
        """The seconds of one message between each stage and the next, and between the last and the first."""
        num_bytes = self._message
        more = self.software.message_seconds
        if self.software.splits_messages:
            num_bytes /= self.choice.tensor
            more += collective_seconds(self.links, TENSOR, "all-gather", self._message)
        message = lambda crosses: self.links.message(num_bytes, STAGE, crosses=crosses) + more
        return [message(crosses) for crosses in self.links.crossings(STAGE)]

    def exposed_message(self, kinds: Collection[str], *, has_part: bool) -> int | float:
        """The part of a message during which nothing is computed, in a tick of lock-step.

        Args:
            kinds: The kinds of op that run.
            has_part: Whether each stage runs its part of a head.
        """
        if self.choice.stage == 1:
            return 0.0
        meanwhile = 0.0
        if has_part:
            meanwhile = self.head_computing
        elif self.choice.form == "fused" and "W" in kinds:
            meanwhile = max(self.counts) * self.op("W")
        latency = self.cluster.latency(crosses_nodes=self.links.crosses(STAGE))
        return max(max(self.messages) - meanwhile, latency)

    def collectives(self, transfers: Iterable[Transfer], axis: str) -> int | float:
        """Returns the seconds of a step's collectives over an axis, without messages between stages.

        Collectives of the same kind and purpose are combined, those of the params of a layer for example.
        """
        times: dict[tuple, int] = {}
        sent = 0.0
        for each in transfers:
            if each.axis != axis or each.kind == "collective-permute":
                continue
            key = each.kind, each.what
            times[key] = max(each.times, times.get(key, 0))
            sent += each.bytes_moved * self._width(each)
        latency = 0.0
        for (kind, _), count in times.items():
            latency += count * collective_seconds(self.links, axis, kind, 0)
        return latency + sent / self.links.rate(axis)

    def _width(self, transfer: Transfer) -> float:
        """Returns the bytes that the software sends for each that jaxpar sends."""
        of_params = transfer.what.startswith("params")
        software = self.software
        width = software.param_bytes if of_params else software.gradient_bytes
        return 1.0 if width is None or "norm" in transfer.what else width / 4

    def exposed_data(self, transfers: Iterable[Transfer]) -> int | float:
        """Returns the seconds in which gradients and params are sent between replicas, and nothing is computed."""
        transfers, choice, layers = list(transfers), self.choice, max(self.by_stage())
        reduced = [each for each in transfers if not each.what.startswith("a layer's")]
        seconds = beside = sum(self.collectives(reduced, axis) for axis in REPLICAS)
        # Layers written out reduce their gradients beside one another.
        reduces = not self.ideal and choice.reduces_beside(self._analysis.shape.num_layers)
        if DATA not in self.software.overlaps:
            names = GRADIENTS_OF_LAYERS if reduces else ()
            of_layers = [
                each
                for each in transfers
                if each.what in names or (choice.zero == 3 and "of a layer" in each.what)
            ]
            beside = sum(self.collectives(of_layers, axis) for axis in REPLICAS)
        in_each = choice.zero == 3 or (reduces and choice.zero == 2)
        microbatches = choice.num_microbatches if in_each else 1
        backward = self.one_layer if choice.zero == 3 else self.one_layer - self.op("F")
        hidden = min(beside * (1 - 1 / layers), microbatches * layers * backward)
        return seconds - hidden + INTERFERENCE * hidden

    def busiest(self) -> int | float:
        """Returns the seconds of work of the busiest stage for one microbatch."""
        one = self.one_layer - self.beside
        *others, last = self.by_stage()
        most = max([*others, last])
        with_head = max(others or [last]) if self.shares_head else last
        with_head = max(with_head, last) * one + self.head_seconds
        return self._leading + max(most * one, with_head)

    def likely(self) -> int | float:
        """Returns an estimate of the seconds of the layers and the head in a step, without a schedule.

        Once the pipeline is full, free-running stages never wait, and those in lock-step wait for the busiest one.
        """
        choice = self.choice
        most = max(self.by_stage())
        if choice.stage == 1:
            # The first F and the last B have nothing beside them.
            return choice.num_microbatches * self.busiest() + most * self.beside
        ops = {name: most * self.op(name) for name in self.computing}
        all_ops = sum(ops.values())
        without_w = all_ops - 2 * ops.get("W", 0)
        waits = {"zb-h1": without_w, "zb-v": without_w / 2}
        wait = waits.get(choice.schedule, all_ops / choice.num_chunks)
        fill = (choice.stage - 1) * wait
        if self.ideal:
            return choice.num_microbatches * self.busiest() + fill
        ticks = choice.num_chunks * (len(ops) if choice.form == "unit" else 1)
        steady = self.busiest() + ticks * self.exposed_message(ops, has_part=self.shares_head)
        # Stages that share the head run it in each tick of an F, whatever its chunk, once the last stage has had one.
        more_heads = (choice.num_chunks - 1) * max(choice.num_microbatches - choice.stage, 0)
        of_heads = self.shares_head * more_heads * self.head_seconds
        return choice.num_microbatches * steady + fill + of_heads

    def by_stage(self) -> list[float]:
        """Returns the layers of each stage, the stage of the head last."""
        if self.choice.num_chunks == 1:
            return list(self.counts)
        placement = PLACEMENT[self.choice.schedule]
        counts: dict[int, float] = {}
        last = 0
        for v, count in enumerate(self.counts):
            last, _ = stage_and_chunk(v, self.choice.stage, placement)
            counts[last] = counts.get(last, 0) + count
        of_head = counts.pop(last)
        return [*(counts[stage] for stage in sorted(counts)), of_head]


def step_time(prices: Prices, transfers: list[Transfer], state_bytes: int) -> StepTime:
    """Returns the seconds of a step.

    Args:
        prices: Seconds of the ops and collectives of a choice.
        transfers: Its collectives.
        state_bytes: Bytes of params, optimizer state and gradients that a device updates; it reads and writes them.
    """
    choice, layers = prices.choice, prices.by_stage()
    last = len(layers) - 1
    busiest = max(range(len(layers)), key=lambda i: layers[i] * 1000 + (i == last))
    microbatches = choice.num_microbatches
    times = microbatches * layers[busiest]
    heads = microbatches if busiest == last or prices.shares_head else 0
    # In lock-step every stage computes them.
    ends = 0.0 if prices.ideal else microbatches * (prices.embed + prices.embed_back)
    compute = times * sum(prices.computing.values()) + heads * prices.head_computing + ends
    # The first F and the last B have nothing beside them.
    beside = (microbatches - 1) * layers[busiest] * prices.beside
    tensor = times * sum(prices.sending.values()) + heads * prices.head_sending - beside
    pipeline = _pipeline(prices) if choice.stage > 1 else compute + tensor
    again = times * prices.again
    return StepTime(
        compute=compute - again,
        again=again,
        tensor=tensor,
        bubble=difference(pipeline, compute + tensor),
        data=prices.exposed_data(transfers),
        ends=prices.collectives(transfers, STAGE),
        update=2 * state_bytes / memory_rate(prices.cluster),
    )


def difference(whole: int | float, part: int | float) -> int | float:
    """Returns what a sum has beyond a part of it; 0 where it is no more than rounding, which may leave less than nothing."""
    beyond = whole - part
    return 0 if abs(beyond) <= ROUNDING * whole else beyond


def _pipeline(prices: Prices) -> int | float:
    """Returns the makespan of the schedule; for many microbatches extrapolated, since the steady state repeats.

    It repeats after as many microbatches as there are stages, which is how long messages take to return to a stage, and no
    microbatch takes less time than its work on the busiest stage.
    """
    choice = prices.choice
    of_count = _makespan if prices.ideal else _ticks
    simulated = choice.num_simulated
    after = of_count(prices, simulated)
    if simulated == choice.num_microbatches:
        return after
    before = of_count(prices, simulated - choice.stage)
    one = max((after - before) / choice.stage, prices.busiest())
    return after + (choice.num_microbatches - simulated) * one


def _ticks(prices: Prices, num_microbatches: int) -> int | float:
    """Returns the seconds of lock-step: a tick takes as long as the stage with the most to do, and its messages."""
    choice, counts = prices.choice, prices.counts
    on_last = (len(counts) - 1, "F")
    is_cheap = choice.num_chunks == 1 and len(set(counts)) == 1
    runs_everywhere = prices.shares_head or is_cheap  # idle stages run it too

    def of_row(row: Row, of_head: float) -> int | float:
        seconds = 0.0
        for v, kind in row:
            seconds += counts[v] * prices.op(kind) + of_head * ((v, kind) == on_last)
        kinds = {kind for _, kind in row}
        if not {"F", "B"} <= kinds:
            return seconds
        return seconds - min(counts[v] for v, _ in row) * prices.beside

    def of_tick(tick: frozenset[Row], has_head: bool) -> int | float:
        kinds = {kind for row in tick for _, kind in row}
        is_everywhere = runs_everywhere and has_head
        of_last = 0.0 if is_everywhere else prices.whole_head
        ends = prices.head_seconds if is_everywhere else 0.0
        if "F" in kinds:
            ends += prices.embed
        if "B" in kinds:
            ends += prices.embed_back
        has_part = is_everywhere and prices.shares_head
        message = prices.exposed_message(kinds, has_part=has_part)
        return max(of_row(row, of_last) for row in tick) + ends + message

    ticks = zip(
        choice.structure(num_microbatches).ticks, choice.heads(num_microbatches), strict=True
    )
    return sum(count * of_tick(*each) for each, count in Counter(ticks).items())


def _makespan(prices: Prices, num_microbatches: int) -> int | float:
    """Returns the seconds of stages that run freely."""
    most = max(prices.counts)
    ops: dict[str, Any] = {name.lower(): most * prices.op(name) for name in "FBWR"}
    ops["stage_scale"] = tuple(count / most for count in prices.counts)
    choice, software = prices.choice, prices.software
    in_pairs = software.exchanges_in_pairs and choice.schedule == "interleaved"
    form = "fused" if in_pairs else "published"
    return makespan(
        choice.structure(num_microbatches, form, by_tick=in_pairs),
        Costs(head=prices.head_seconds / 3, **ops),
        prices.messages,
        blocks=software.blocks_on_messages or in_pairs,
        waits_for_all=software.waits_between_steps,
    )
