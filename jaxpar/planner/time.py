"""The time of a step, from the schedule simulator and the computation and traffic of each op.

    step = pipeline (or accumulation) + gradients over data + embedding and head over stage + the optimizer's update

``Assumptions`` holds the assumed efficiencies, the same for all models and machines. Nothing overlaps: an op computes, then
sends; in lock-step a tick ends with an exchange; gradients are reduced over the data axis after the last microbatch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.inspect.collectives import ring_bytes
from jaxpar.mesh import DATA, STAGE, TENSOR
from jaxpar.planner.analysis import Analysis, Work
from jaxpar.planner.choice import Choice
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.links import Links
from jaxpar.planner.traffic import Transfer, layer_works
from jaxpar.schedule import Costs, Op, Schedule, lockstep_form, simulate, stage_and_chunk


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies, which no datasheet states.

    Attributes:
        compute: The share of the peak that a layer reaches in matrix products, the time of other operations included.
        network: The share of a link's bandwidth that collectives reach.
    """

    compute: int | float = 0.55
    network: int | float = 0.8

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0 < share <= 1:
                raise ValueError(f"an efficiency must be a share of the datasheet's figure; got {name}={share}.")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by cause.

    Attributes:
        compute: Matrix products of the busiest device, without recomputed ones.
        again: Recomputed matrix products of the forward pass.
        tensor: Collectives over ``tensor``.
        bubble: Waiting for other stages, and messages to them.
        data: Collectives over ``data``.
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
    """Seconds of the ops, messages and collectives of a choice.

    Args:
        choice: Mesh axes and settings.
        analysis: The work of its ops.
        cluster: The machines.
        assumed: Assumed efficiencies.
    """

    def __init__(self, choice: Choice, analysis: Analysis, cluster: Cluster, assumed: Assumptions) -> None:
        self.choice, self.cluster, self.assumed = choice, cluster, assumed
        self.links = Links(cluster, choice.mesh.shape, assumed.network)
        self.works = layer_works(choice, analysis)
        self.head = analysis.end_works["head"]
        self.counts = choice.layout(analysis.shape.num_layers).layers_per_virtual_stage or ()
        self._message = analysis.activation_bytes

    def compute(self, work: Work) -> int | float:
        """Returns the seconds of the matrix products of ``work``."""
        return work.flops / (self.cluster.peak_flops * self.assumed.compute)

    def tensor(self, work: Work) -> int | float:
        """Returns the seconds of the collectives of ``work`` over ``tensor``."""
        rate, size = self.links.rate(TENSOR), self.choice.tensor
        sent = sum(ring_bytes(each.kind, each.payload_bytes, size) for each in work.crossings)
        return sent / rate + len(work.crossings) * self.links.latency(TENSOR)

    def op(self, work: Work) -> int | float:
        """Returns the seconds of ``work``."""
        return self.compute(work) + self.tensor(work)

    @property
    def message(self) -> int | float:
        """The seconds of one message to the next stage."""
        return self.links.message(self._message, STAGE)

    def collectives(self, transfers: Iterable[Transfer], axis: str) -> int | float:
        """Returns the seconds of a step's collectives over an axis, without messages between stages."""
        own = [each for each in transfers if each.axis == axis and each.kind != "collective-permute"]
        return sum(
            each.bytes_moved / self.links.rate(axis) + min(each.times, 1) * self.links.latency(axis) for each in own
        )

    def busiest(self) -> int | float:
        """Returns the seconds of work of the busiest stage for one microbatch."""
        one, counts = sum(map(self.op, self.works.values())), self.by_stage()
        return max(max(counts) * one, counts[-1] * one + self.op(self.head))

    def likely(self, *, ideal: bool) -> int | float:
        """Returns an estimate of the seconds of the layers and the head in a step, without a schedule.

        Once the pipeline is full, free-running stages never wait, and those in lock-step wait for the busiest one.
        """
        choice, counts = self.choice, self.by_stage()
        if choice.stage == 1:
            return choice.num_microbatches * self.busiest()
        ops = {name: max(counts) * self.op(work) for name, work in self.works.items()}
        waits = {"zb-h1": sum(ops.values()) - 2 * ops["W"], "zb-v": (sum(ops.values()) - 2 * ops["W"]) / 2}
        fill = (choice.stage - 1) * waits.get(choice.schedule, sum(ops.values()) / choice.num_chunks)
        if ideal:
            return choice.num_microbatches * self.busiest() + fill
        ticks = choice.num_chunks * (1 if lockstep_form(choice.schedule) == "fused" else len(ops))
        return choice.num_microbatches * (self.busiest() + ticks * self.message) + fill

    def by_stage(self) -> list[int]:
        """Returns the layers of each stage, the stage of the head last."""
        if self.choice.num_chunks == 1:
            return list(self.counts)
        placement = "v" if self.choice.schedule == "zb-v" else "loop"
        stages = [stage_and_chunk(v, self.choice.stage, placement)[0] for v in range(len(self.counts))]
        counts = [0] * self.choice.stage
        for stage, count in zip(stages, self.counts, strict=True):
            counts[stage] += count
        last = stages[-1]
        return [*counts[:last], *counts[last + 1 :], counts[last]]


@dataclass(frozen=True)
class _SpmdCosts(Costs):
    """The spmd executor runs the complete head, forward and backward, in F."""

    whole_head: int | float = 0

    def of(self, schedule: Schedule, stage: int, op: Op) -> int | float:
        is_last = schedule.virtual_stage(stage, op.chunk) == schedule.num_virtual_stages - 1
        return super().of(schedule, stage, op) + (self.whole_head if is_last and op.kind == "F" else 0)


def step_time(
    choice: Choice, prices: Prices, transfers: list[Transfer], state_bytes: int, *, ideal: bool = False
) -> StepTime:
    """Returns the seconds of a step.

    Args:
        choice: Mesh axes and settings.
        prices: Seconds of its ops and collectives.
        transfers: Its collectives.
        state_bytes: Bytes of params, optimizer state and gradients of a device, which the update reads and partly writes.
        ideal: Whether stages are free-running, as with ``executor="mpmd"`` and in other frameworks; otherwise they run in
            lock-step, as with ``executor="spmd"``.
    """
    works, head = prices.works, prices.head
    layers = prices.by_stage()
    busiest = max(range(len(layers)), key=lambda i: layers[i] * 1000 + (i == len(layers) - 1))
    times = choice.num_microbatches * layers[busiest]
    ends = choice.num_microbatches if busiest == len(layers) - 1 else 0
    again = works["R"] if "R" in works else works["F"] if choice.remat else Work()
    compute = times * sum(map(prices.compute, works.values())) + ends * prices.compute(head)
    tensor = times * sum(map(prices.tensor, works.values())) + ends * prices.tensor(head)
    pipeline = _pipeline(choice, prices, ideal) if choice.stage > 1 else compute + tensor
    return StepTime(
        compute=compute - times * prices.compute(again),
        again=times * prices.compute(again),
        tensor=tensor,
        bubble=pipeline - compute - tensor,
        data=prices.collectives(transfers, DATA),
        ends=prices.collectives(transfers, STAGE),
        update=2 * state_bytes / prices.cluster.memory_bandwidth,
    )


def _pipeline(choice: Choice, prices: Prices, ideal: bool) -> int | float:
    """Returns the makespan of the schedule; for many microbatches extrapolated, since the steady state repeats."""
    simulated = choice.num_simulated
    if simulated == choice.num_microbatches:
        return _makespan(choice, prices, simulated, ideal)
    before, after = (_makespan(choice, prices, count, ideal) for count in (choice.fewer_simulated, simulated))
    return after + (choice.num_microbatches - simulated) * (after - before) / (simulated - choice.fewer_simulated)


def _makespan(choice: Choice, prices: Prices, num_microbatches: int, ideal: bool) -> int | float:
    table = choice.table(num_microbatches, "published" if ideal else None)
    most = max(prices.counts)
    scale = tuple(count / most for count in prices.counts)
    f, b = prices.op(prices.works["F"]), prices.op(prices.works["B"])
    w, r = (prices.op(prices.works[op]) if op in prices.works else 0 for op in "WR")
    head = prices.op(prices.head)
    one = {"f": most * f, "b": most * b, "w": most * w, "r": most * r, "p2p": prices.message, "stage_scale": scale}
    costs = Costs(head=head / 3, **one) if ideal else _SpmdCosts(whole_head=head, **one)
    return simulate(table, costs, timing="free" if ideal else "lockstep").makespan
