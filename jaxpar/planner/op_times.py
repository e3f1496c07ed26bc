"""The seconds of each op of a layer, and of the head, for one microbatch on one device."""

from dataclasses import dataclass, replace

from jaxpar.dtypes import wide_dtype
from jaxpar.mesh import TENSOR
from jaxpar.planner.choice import Choice
from jaxpar.planner.kernel_time import memory_rate, seconds_of
from jaxpar.planner.kernels import Kernels
from jaxpar.planner.links import Links
from jaxpar.planner.network import collective_seconds
from jaxpar.planner.op_costs import Analysis, Work
from jaxpar.planner.software import Software
from jaxpar.planner.traffic import layer_works


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies, which no datasheet states.

    Attributes:
        compute: The share of the peak that a layer reaches in matrix products, the time of other operations included. None:
            the time of each kernel by its shape.
        network: The share of a link's bandwidth that collectives reach.
    """

    compute: int | float | None = None
    network: int | float = 0.7

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"an efficiency must be a share of the datasheet's figure; got {name}={share}.")


# Collectives take multiprocessors and memory bandwidth from the computation beside which they run: by this share of their time
# they lengthen it.
INTERFERENCE = 0.25


@dataclass(frozen=True)
class OpTimes:
    """Seconds for one microbatch.

    Attributes:
        computing: Those of the kernels of each op of one layer. The last op of the backward pass adds its gradients to those of
            earlier microbatches.
        sending: Those of the collectives over ``tensor`` of each op.
        again: The part of ``computing`` that is recomputed.
        head_computing: Those of the kernels of the head and the loss, forward and backward.
        head_sending: Those of their collectives.
    """

    computing: dict[str, float]
    sending: dict[str, float]
    again: float
    head_computing: float
    head_sending: float


def op_times(choice: Choice, analysis: Analysis, links: Links, assumed: Assumptions, software: Software) -> OpTimes:
    """Returns the seconds of the ops of a choice, cached in its analysis."""
    pipelined, accumulates = choice.stage > 1, choice.num_microbatches > 1
    key = pipelined, accumulates, choice.remat, links.cluster, assumed, software
    if key not in analysis.times:
        analysis.times[key] = _op_times(choice, analysis, links, assumed, software)
    return analysis.times[key]


def _op_times(choice: Choice, analysis: Analysis, links: Links, assumed: Assumptions, software: Software) -> OpTimes:
    computes = lambda work: _compute(work, choice, links, assumed, software)
    sends = lambda work: _send(work, links, computes(work) if TENSOR in software.overlaps else 0.0)
    works, head = layer_works(choice, analysis), analysis.end_works["head"]
    computing = {op: computes(work) for op, work in works.items()}
    if "W" in works and software.products_alone_in_w:
        alone = computes(replace(works["W"], kernels=Kernels(works["W"].kernels.products)))
        computing |= {"B": computing["B"] + computing["W"] - alone, "W": alone}
    forward = computes(analysis.work("forward"))
    again = computing.get("R", forward if choice.remat is True else 0.0) + software.recompute * forward
    computing["B"] += software.recompute * forward
    if choice.num_microbatches > 1 and assumed.compute is None and not software.fused_accumulation:
        params = analysis.trained_params
        sums = sum(2 * each.size * wide_dtype(each.dtype).itemsize for each in params)
        computing["W" if "W" in works else "B"] += sums / memory_rate(links.cluster)
    sending = {op: sends(work) for op, work in works.items()}
    return OpTimes(computing, sending, again, computes(head), sends(head))


def _compute(work: Work, choice: Choice, links: Links, assumed: Assumptions, software: Software) -> float:
    """Returns the seconds of the kernels of ``work``."""
    if assumed.compute is not None:
        return work.flops / (links.cluster.peak_flops * assumed.compute)
    return seconds_of(work.kernels, links.cluster, choice.tensor, software)


def _send(work: Work, links: Links, beside: float) -> float:
    """Returns the seconds of the collectives of ``work`` over ``tensor`` that ``beside`` seconds of computation do not hide."""
    seconds = sum(collective_seconds(links, TENSOR, each.kind, each.payload_bytes) for each in work.collectives)
    hidden = min(seconds, beside)
    return seconds - hidden + INTERFERENCE * hidden
