"""Where the time of a GPU goes in a step, by the roofline: by kind of instruction, and in the largest instructions.

An instruction takes as long as its products at the peak of the datasheet, or as long as the bytes that it reads and writes at
the bandwidth of the memory, whichever is longer (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785).
Collectives are left out; `gpu.py` has those that run beside instructions. The kinds are

    products   matrix products and convolutions, with what is fused to them
    slices     a slice is taken of an array and at most converted or transposed: params and residuals out of their stacks
    updates    a slice of an array is written in place: residuals into their stacks, sums of gradients
    copies     an array is copied or transposed
    other      elementwise operations, reductions, lookups
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.gpus import GPUS, Gpu
from jaxpar.inspect.bytes_accessed import VIEWS, written_outputs
from jaxpar.inspect.hlo import Instruction, Module
from jaxpar.inspect.text import bytes_text, device_seconds_text, flops_text, table

KINDS = ("products", "slices", "updates", "copies", "other")
LARGEST_SHOWN = 10
_SLICES = {"dynamic-slice", "slice"}
_MOVES = {"parameter", "copy", "transpose", "bitcast", "reshape"}


@dataclass(frozen=True)
class Work:
    """An instruction that a GPU runs.

    Attributes:
        flops: Operations of matrix products in one run.
        num_bytes: Bytes of memory that one run reads and writes.
        times: Runs in a step.
        kind: One of ``KINDS``.
        array: Dtype and dims of its result.
        op_name: JAX's name for the operation; empty where XLA inserted it.
    """

    flops: int | float
    num_bytes: int
    times: int | float
    kind: str
    array: str
    op_name: str

    def seconds(self, peak_flops: float, memory_bandwidth: float) -> float:
        """Returns the seconds of all its runs in a step at these rates, operations and bytes a second."""
        return self.times * max(self.flops / peak_flops, self.num_bytes / memory_bandwidth)


def seconds_by_kind(work: Sequence[Work], peak_flops: float, memory_bandwidth: float) -> dict[str, float]:
    """Returns the seconds of a step by kind of instruction; every kind is in it."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for each in work:
        seconds[each.kind] += each.seconds(peak_flops, memory_bandwidth)
    return {kind: seconds[kind] for kind in KINDS}


def gpu_of(device_kind: str) -> Gpu | None:
    """Returns the GPU to which the driver gives this name, "NVIDIA H100 80GB HBM3" say; None without a datasheet of it."""
    return next((gpu for gpu in GPUS.values() if gpu.driver_name == device_kind), None)


def kind_of(module: Module, instruction: Instruction, flops: int | float) -> str:
    """Returns the kind of an instruction that reads or writes memory."""
    if flops:
        return "products"
    fused = module.fused(instruction)
    inside, outputs = ([instruction], [instruction]) if fused is None else (fused.instructions, written_outputs(fused))
    if any(each.opcode == "dynamic-update-slice" for each in outputs):
        return "updates"
    # Numbers are indices: of slices, and of the loops that take them.
    opcodes = {each.opcode for each in inside if any(shape.size > 1 for shape in each.shapes)}
    if opcodes & _SLICES and opcodes <= {*_SLICES, *VIEWS, "parameter"}:
        return "slices"
    return "copies" if is_copy(module, instruction) else "other"


def is_copy(module: Module, instruction: Instruction) -> bool:
    """Returns whether an instruction copies or transposes an array and does nothing else."""
    fused = module.fused(instruction)
    if fused is None:
        return instruction.opcode in ("copy", "copy-start", "transpose")
    opcodes = {each.opcode for each in fused.instructions}
    return opcodes <= _MOVES and bool(opcodes & {"copy", "transpose"})


def render_device_time(work: Sequence[Work], gpu: Gpu | None) -> str:
    """Returns two tables: the work of a device by kind of instruction, and its largest instructions.

    Args:
        work: The instructions of a step.
        gpu: The datasheet; None: times are left out, and the largest instructions are those of the most bytes.
    """
    if not work:
        return ""
    rank = lambda each: each.num_bytes * each.times if gpu is None else _seconds(each, gpu)
    by_kind = [(kind, [each for each in work if each.kind == kind]) for kind in KINDS]
    largest = sorted(work, key=rank, reverse=True)[:LARGEST_SHOWN]
    total = 0.0 if gpu is None else sum(_seconds(each, gpu) for each in work)

    def cells(work: Sequence[Work]) -> tuple[str, ...]:
        amount = lambda name: sum(each.times * getattr(each, name) for each in work)
        counted = f"{sum(each.times for each in work):g}", flops_text(amount("flops")), bytes_text(amount("num_bytes"))
        if gpu is None:
            return counted
        seconds = sum(_seconds(each, gpu) for each in work)
        return device_seconds_text(seconds), f"{seconds / total:.1%}", *counted

    rates = "on each device" if gpu is None else f"at the rates of the datasheet of {gpu.name}"
    columns = (*(() if gpu is None else ("time", "share")), "runs", "products", "bytes")
    kinds = [(f"instructions {rates}", *columns), *((kind, *cells(own)) for kind, own in by_kind if own)]
    instructions = [(each.kind, *cells([each]), each.array[:40], each.op_name[-48:]) for each in largest]
    return "\n\n".join([table(kinds), table([("the largest", *columns, "result", "from"), *instructions])])


def _seconds(work: Work, gpu: Gpu) -> float:
    return work.seconds(gpu.peak_flops, gpu.memory_bandwidth)
