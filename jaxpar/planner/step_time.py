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

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.dtypes import num_bytes
from jaxpar.mesh import DATA, OF_ZERO, REPLICAS, STAGE, TENSOR
from jaxpar.planner.cluster import Cluster, Links, collective_seconds
from jaxpar.planner.job import EXPERTS, Assumptions, Choice, Software
from jaxpar.planner.kernel_seconds import memory_rate, seconds_of
from jaxpar.planner.kernels import Kernels
from jaxpar.planner.ops import Analysis, Work, layer_works
from jaxpar.planner.state import wide_bytes
from jaxpar.planner.traffic import Transfer
from jaxpar.schedule import PLACEMENT, Costs, stage_and_chunk
from jaxpar.schedule.simulate import Row, makespan

# Collectives take multiprocessors and memory bandwidth from the computation beside which they run: by this share of their time
# they lengthen it.
INTERFERENCE = 0.25


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
        self.choice, self.cluster, self.software, self.ideal = choice, cluster, software, ideal
        self._analysis, self._assumed, self._message = analysis, assumed, num_bytes(analysis.x)
        self.links = Links(cluster, choice.mesh.shape, assumed.network)
        works, ends = layer_works(choice, analysis), analysis.end_works
        part_of_head = None if ideal else analysis.part_of_head(choice)
        head, self.shares_head = part_of_head or ends["head"], part_of_head is not None
        self.head_computing, self.head_sending = self._computes(head), self._sends(head)
        self.embed, self.embed_back = (
            self._computes(ends[name]) + self._sends(ends[name]) for name in ("embed", "embed_back")
        )
        self.computing = {op: self._computes(work) for op, work in works.items()}
        self.sending = {op: self._sends(work) for op, work in works.items()}
        if "W" in works and software.products_alone_in_w:
            alone = self._computes(
                replace(works["W"], kernels=Kernels(works["W"].kernels.products))
            )
            self.computing |= {"B": self.computing["B"] + self.computing["W"] - alone, "W": alone}
        forward = self._computes(analysis.works["forward"])
        again = self.computing.get("R", forward if choice.remat is True else 0.0)
        self.again = again + software.recompute * forward
        self.computing["B"] += software.recompute * forward
        if assumed.compute is None:
            self._move_params_and_sums(works)
        self.counts: tuple[float, ...] = tuple(
            choice.layout(analysis.shape.num_layers).layers_per_virtual_stage or ()
        )
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
            work.kernels, self.cluster, self.choice.tensor, self.software, self._analysis.own_share
        )

    def _sends(self, work: Work) -> float:
        """Returns the seconds of the collectives of an op."""
        sent = [each for each in work.sent if not (each.of_rows and self.software.folds_experts)]
        seconds = [(each.axis, collective_seconds(self.links, *each[:3])) for each in sent]
        hides = lambda axis: (EXPERTS if axis == DATA else axis) in self.software.overlaps
        hidden = min(sum(each for axis, each in seconds if hides(axis)), self._computes(work))
        return sum(each for _, each in seconds) - (1 - INTERFERENCE) * hidden

    def _move_params_and_sums(self, works: Mapping[str, Work]) -> None:
        """Adds what copies the params of a layer out of their stacks, and adds gradients to sums."""
        analysis, rate = self._analysis, memory_rate(self.cluster)
        if self.choice.runs_pipeline and not self.ideal:
            params = analysis.layer.shapes(analysis.split.values["params"])
            for op, work in works.items():
                self.computing[op] += 2 * num_bytes(params[i] for i in work.reads) / rate
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
        return (of_f + min(of_backward(self.sending), self.computing["F"])) * (1 - INTERFERENCE)

    @property
    def head_seconds(self) -> int | float:
        """The seconds of the head and the loss for one microbatch, forward and backward, on the stage with the head."""
        exchanged = (
            ("reduce-scatter", "all-gather") if self.shares_head else ()
        )  # y, and the gradient of y
        exchange = sum(
            collective_seconds(self.links, STAGE, kind, self._message) for kind in exchanged
        )
        return self.head_computing + self.head_sending + exchange

    @property
    def messages(self) -> list[int | float]:
        """The seconds of one message between each stage and the next, and between the last and the first."""
        num_bytes, more = self._message, self.software.message_seconds
        if self.software.splits_messages:
            num_bytes /= self.choice.tensor
            more += collective_seconds(self.links, TENSOR, "all-gather", self._message)
        one = {
            crosses: self.links.message(num_bytes, STAGE, crosses=crosses) + more
            for crosses in (False, True)
        }
        return [one[crosses] for crosses in self.links.crossings(STAGE)]

    def exposed_message(self, kinds: Collection[str]) -> int | float:
        """The part of a message during which nothing is computed, in a tick of lock-step that runs some kinds of op."""
        if self.choice.stage == 1:
            return 0.0
        meanwhile = 0.0
        if self.shares_head and "F" in kinds:
            meanwhile = self.head_computing
        elif self.choice.form == "fused" and "W" in kinds:
            meanwhile = max(self.counts) * self.op("W")
        return max(
            max(self.messages) - meanwhile,
            self.cluster.latency(crosses_nodes=self.links.crosses(STAGE)),
        )

    def collectives(self, transfers: Iterable[Transfer], axis: str) -> int | float:
        """Returns the seconds of a step's collectives over an axis, without messages between stages.

        Collectives of the same kind and purpose are combined, those of the params of a layer for example.
        """
        own = [
            each for each in transfers if each.axis == axis and each.kind != "collective-permute"
        ]
        times: dict[tuple, int] = {}
        for each in own:
            key = each.kind, each.what
            times[key] = max(each.times, times.get(key, 0))
        latency = sum(
            count * collective_seconds(self.links, axis, kind, 0)
            for (kind, _), count in times.items()
        )
        return latency + sum(
            each.bytes_moved * self._width(each) for each in own
        ) / self.links.rate(axis)

    def _width(self, transfer: Transfer) -> float:
        """Returns the bytes that the software sends for each that jaxpar sends."""
        software = self.software
        width = (
            software.param_bytes if transfer.what.startswith("params") else software.gradient_bytes
        )
        return 1.0 if width is None or "norm" in transfer.what else width / 4

    def exposed_data(self, transfers: Iterable[Transfer]) -> int | float:
        """Returns the seconds in which gradients and params are sent between replicas, and nothing is computed."""
        transfers, choice, layers = list(transfers), self.choice, max(self.by_stage())
        reduced = [each for each in transfers if not each.what.startswith("a layer's")]
        seconds = beside = sum(self.collectives(reduced, axis) for axis in REPLICAS)
        if DATA not in self.software.overlaps:
            of_layers = [each for each in transfers if "of a layer" in each.what]
            beside = (choice.zero == 3) * sum(self.collectives(of_layers, axis) for axis in OF_ZERO)
        microbatches = choice.num_microbatches if choice.zero == 3 else 1
        backward = self.one_layer if choice.zero == 3 else self.one_layer - self.op("F")
        hidden = min(beside * (1 - 1 / layers), microbatches * layers * backward)
        return seconds - hidden + INTERFERENCE * hidden

    def busiest(self) -> int | float:
        """Returns the seconds of work of the busiest stage for one microbatch."""
        one, counts = self.one_layer - self.beside, self.by_stage()
        most = max(counts[:-1] or counts) if self.shares_head else counts[-1]
        return self._leading + max(
            max(counts) * one, max(most, counts[-1]) * one + self.head_seconds
        )

    def likely(self) -> int | float:
        """Returns an estimate of the seconds of the layers and the head in a step, without a schedule.

        Once the pipeline is full, free-running stages never wait, and those in lock-step wait for the busiest one.
        """
        choice, counts = self.choice, self.by_stage()
        if choice.stage == 1:
            return choice.num_microbatches * self.busiest()
        ops = {name: max(counts) * self.op(name) for name in self.computing}
        w = ops.get("W", 0)
        waits = {"zb-h1": sum(ops.values()) - 2 * w, "zb-v": (sum(ops.values()) - 2 * w) / 2}
        fill = (choice.stage - 1) * waits.get(
            choice.schedule, sum(ops.values()) / choice.num_chunks
        )
        if self.ideal:
            return choice.num_microbatches * self.busiest() + fill
        ticks = choice.num_chunks * (len(ops) if choice.form == "unit" else 1)
        steady = self.busiest() + ticks * self.exposed_message(ops)
        return (
            choice.num_microbatches * steady
            + fill
            + self.shares_head * (choice.stage - 1) * self.head_seconds
        )

    def by_stage(self) -> list[float]:
        """Returns the layers of each stage, the stage of the head last."""
        if self.choice.num_chunks == 1:
            return list(self.counts)
        placement = PLACEMENT[self.choice.schedule]
        stages = [
            stage_and_chunk(v, self.choice.stage, placement)[0] for v in range(len(self.counts))
        ]
        of = lambda stage: sum(
            count for own, count in zip(stages, self.counts, strict=True) if own == stage
        )
        return [of(stage) for stage in (*sorted({*stages} - {stages[-1]}), stages[-1])]


def step_time(prices: Prices, transfers: list[Transfer], state_bytes: int) -> StepTime:
    """Returns the seconds of a step.

    Args:
        prices: Seconds of the ops and collectives of a choice.
        transfers: Its collectives.
        state_bytes: Bytes of params, optimizer state and gradients that a device updates; it reads and writes them.
    """
    choice, layers = prices.choice, prices.by_stage()
    busiest = max(range(len(layers)), key=lambda i: layers[i] * 1000 + (i == len(layers) - 1))
    times = choice.num_microbatches * layers[busiest]
    heads = choice.num_microbatches if busiest == len(layers) - 1 or prices.shares_head else 0
    # In lock-step every stage computes them.
    ends = 0.0 if prices.ideal else choice.num_microbatches * (prices.embed + prices.embed_back)
    compute = times * sum(prices.computing.values()) + heads * prices.head_computing + ends
    # The first F and the last B have nothing beside them.
    beside = (choice.num_microbatches - 1) * layers[busiest] * prices.beside
    tensor = times * sum(prices.sending.values()) + heads * prices.head_sending - beside
    pipeline = _pipeline(prices) if choice.stage > 1 else compute + tensor
    return StepTime(
        compute=compute - times * prices.again,
        again=times * prices.again,
        tensor=tensor,
        bubble=pipeline - compute - tensor,
        data=prices.exposed_data(transfers),
        ends=prices.collectives(transfers, STAGE),
        update=2 * state_bytes / memory_rate(prices.cluster),
    )


def _pipeline(prices: Prices) -> int | float:
    """Returns the makespan of the schedule; for many microbatches extrapolated, since the steady state repeats.

    It repeats after as many microbatches as there are stages, which is how long messages take to return to a stage, and no
    microbatch takes less time than its work on the busiest stage.
    """
    choice, of_count = prices.choice, _makespan if prices.ideal else _ticks
    simulated, fewer = choice.num_simulated, choice.num_simulated - choice.stage
    if simulated == choice.num_microbatches:
        return of_count(prices, simulated)
    before, after = (of_count(prices, count) for count in (fewer, simulated))
    return after + (choice.num_microbatches - simulated) * max(
        (after - before) / choice.stage, prices.busiest()
    )


def _ticks(prices: Prices, num_microbatches: int) -> int | float:
    """Returns the seconds of lock-step: a tick takes as long as the stage with the most to do, and its messages."""
    last, is_cheap = (
        len(prices.counts) - 1,
        prices.choice.num_chunks == 1 and len(set(prices.counts)) == 1,
    )
    everywhere = (
        prices.head_seconds if prices.shares_head or is_cheap else 0.0
    )  # idle stages run it too
    on_last = 0.0 if everywhere else prices.head_seconds

    def of_row(row: Row) -> int | float:
        seconds = sum(
            prices.counts[v] * prices.op(kind) + on_last * ((v, kind) == (last, "F"))
            for v, kind in row
        )
        common = min((prices.counts[v] for v, _ in row), default=0)
        return seconds - common * prices.beside * ({"F", "B"} <= {kind for _, kind in row})

    def of_tick(tick: frozenset[Row]) -> int | float:
        kinds = {kind for row in tick for _, kind in row}
        ends = ("F" in kinds) * (everywhere + prices.embed) + ("B" in kinds) * prices.embed_back
        return max(map(of_row, tick)) + ends + prices.exposed_message(kinds)

    return sum(
        count * of_tick(tick) for tick, count in prices.choice.structure(num_microbatches).ticks
    )


def _makespan(prices: Prices, num_microbatches: int) -> int | float:
    """Returns the seconds of stages that run freely."""
    most = max(prices.counts)
    scale = tuple(count / most for count in prices.counts)
    ops: dict[str, Any] = {name.lower(): most * prices.op(name) for name in "FBWR"} | {
        "stage_scale": scale
    }
    choice, software = prices.choice, prices.software
    in_pairs = software.exchanges_in_pairs and choice.schedule == "interleaved"
    return makespan(
        choice.structure(num_microbatches, "fused" if in_pairs else "published", by_tick=in_pairs),
        Costs(head=prices.head_seconds / 3, **ops),
        prices.messages,
        blocks=software.blocks_on_messages or in_pairs,
        waits_for_all=software.waits_between_steps,
    )
