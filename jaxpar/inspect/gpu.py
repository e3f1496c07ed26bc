"""What a GPU program costs besides its products: copies, waits of the host, transfers; and where the time of a step goes.

XLA orders a GPU's program when it compiles it, so all three can be read from its text, even if it was compiled for GPUs that
this machine lacks (``jaxpar.compile_only_devices``):

- A copy moves an array that the program could have used in place: an instruction ``copy`` or ``transpose``, or a fusion of
  nothing else, of at least ``large_bytes``.
- The host waits for the GPU where it must read a value to go on: at each ``conditional``, and before each trip of a loop whose
  number of trips the compiler does not know.
- A transfer starts at one instruction and ends at another; the instructions between them run meanwhile.

The time is estimated by the roofline, by kind of instruction and of the largest instructions. An instruction takes as
long as its products at the peak of the datasheet, or as long as the bytes that it reads and writes at the bandwidth of the
memory, whichever is longer (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785). The kinds are

    products   matrix products and convolutions, with what is fused to them
    slices     a slice is taken of an array and at most converted or transposed: params and residuals out of their stacks
    updates    a slice of an array is written in place: residuals into their stacks, sums of gradients
    copies     an array is copied or transposed
    other      elementwise operations, reductions, lookups
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxpar.gpus import Gpu, gpu_of
from jaxpar.inspect.costs import (
    CALLS,
    VIEWS,
    Cost,
    costs_of_instructions,
    is_in_fp8,
    own_bytes,
    written_outputs,
)
from jaxpar.inspect.hlo import (
    NO_ASSUMPTIONS,
    Assumptions,
    Computation,
    Instruction,
    Module,
    calls,
    plain_number,
    runs,
)
from jaxpar.inspect.text import bytes_text, device_seconds_text, flops_text, table, table_of

KINDS = ("products", "slices", "updates", "copies", "other")
LARGEST_SHOWN = 10
_SLICES = {"dynamic-slice", "slice"}
_MOVES = {"parameter", "copy", "transpose", "bitcast", "reshape"}
_TRANSFERS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COPIES_SHOWN = 8


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
        rate: How many times the peak of 16-bit products its own may reach: 2 in FP8.
    """

    flops: int | float
    num_bytes: int
    times: int | float
    kind: str
    array: str
    op_name: str
    rate: int = 1

    def seconds(self, peak_flops: float, memory_bandwidth: float) -> float:
        """Returns the seconds of all its runs in a step, by the peak of 16-bit products and the bytes of memory a second."""
        return self.times * max(
            self.flops / (self.rate * peak_flops), self.num_bytes / memory_bandwidth
        )


def kind_of(module: Module, instruction: Instruction, flops: int | float) -> str:
    """Returns the kind of an instruction that reads or writes memory."""
    if flops:
        return "products"
    fused = module.fused(instruction)
    inside, outputs = (
        ([instruction], [instruction])
        if fused is None
        else (fused.instructions, written_outputs(fused))
    )
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
        counted = (
            f"{sum(each.times for each in work):g}",
            flops_text(amount("flops")),
            bytes_text(amount("num_bytes")),
        )
        if gpu is None:
            return counted
        seconds = sum(_seconds(each, gpu) for each in work)
        return device_seconds_text(seconds), f"{seconds / total:.1%}", *counted

    rates = "on each device" if gpu is None else f"at the rates of the datasheet of {gpu.name}"
    columns = (*(() if gpu is None else ("time", "share")), "runs", "products", "bytes")
    kinds = [
        (f"instructions {rates}", *columns),
        *((kind, *cells(own)) for kind, own in by_kind if own),
    ]
    instructions = [
        (each.kind, *cells([each]), each.array[:40], each.op_name[-48:]) for each in largest
    ]
    return "\n\n".join(
        [table(kinds), table([("the largest", *columns, "result", "from"), *instructions])]
    )


def _seconds(work: Work, gpu: Gpu) -> float:
    return work.seconds(gpu.peak_flops, gpu.memory_bandwidth)


@dataclass(frozen=True)
class Copy:
    """A copy of a large array.

    Attributes:
        array: Its dtype and dims.
        num_bytes: Its size.
        times: Its runs in a step.
        op_name: JAX's name for the operation; often empty, since XLA inserted it.
    """

    array: str
    num_bytes: int
    times: int | float
    op_name: str


@dataclass(frozen=True)
class Transfer:
    """A collective that runs beside other operations.

    Attributes:
        kind: Its opcode, such as collective-permute.
        num_bytes: The bytes of its result.
        times: Its runs in a step.
        flops_meanwhile: Operations of matrix products between its start and its end, in one run.
        bytes_meanwhile: Bytes of memory that instructions between them read and write, in one run.
        op_name: JAX's name for the operation.
        name: The name of the instruction that starts it.
    """

    kind: str
    num_bytes: int
    times: int | float
    flops_meanwhile: int | float
    bytes_meanwhile: int | float
    op_name: str
    name: str


@dataclass(frozen=True)
class GpuProgram:
    """The costs of a step on one GPU besides its products. Loops of unknown length count as one trip, branches as taken.

    Attributes:
        copies: The large copies, in the order of the program.
        host_waits: How often the host waits for the GPU in a step.
        transfers: The asynchronous collectives, in the order of the program.
        work: The instructions that compute or move something in the device's memory, in the order of the program.
        gpu: The datasheet; None for GPUs without one here.
    """

    copies: tuple[Copy, ...]
    host_waits: int | float
    transfers: tuple[Transfer, ...]
    work: tuple[Work, ...] = ()
    gpu: Gpu | None = None

    @property
    def bytes_copied(self) -> int:
        """The bytes of large copies in a step."""
        return round(sum(each.num_bytes * each.times for each in self.copies))

    def render(self) -> str:
        """Returns the costs as text."""
        lines = [
            f"the host waits {self.host_waits:g} times a step",
            f"copied in a step: {bytes_text(self.bytes_copied)}",
        ]
        largest = sorted(self.copies, key=lambda each: each.num_bytes * each.times, reverse=True)[
            :COPIES_SHOWN
        ]
        of = lambda each: (
            f"  {each.times:g} x {bytes_text(each.num_bytes)}  {each.array}  {each.op_name[-48:]}"
        )
        lines += map(of, largest)
        columns = {
            "asynchronous": lambda each: each.kind,
            "runs": lambda each: f"{each.times:g}",
            "bytes": lambda each: bytes_text(each.num_bytes),
            "products meanwhile": lambda each: flops_text(each.flops_meanwhile),
            "from": lambda each: each.op_name[-48:],
        }
        transfers = table_of(self.transfers, columns) if self.transfers else ""
        parts = ["\n".join(lines), transfers, render_device_time(self.work, self.gpu)]
        return "\n\n".join(part for part in parts if part)


def read_gpu_program(
    module: Module, *, large_bytes: int, assumptions: Assumptions, device_kind: str = ""
) -> GpuProgram:
    """Returns the costs of a compiled program for GPUs.

    Args:
        module: The program.
        large_bytes: The size from which a copy counts.
        assumptions: Trips and shares that the compiler does not know.
        device_kind: The name of the GPUs, as JAX reports it.
    """
    costs = costs_of_instructions(module, assumptions)
    work: list[Work] = []
    copies: list[Copy] = []
    transfers: list[Transfer] = []
    waits = Fraction(0)
    for run, computation, each in runs(
        module, assumptions, lambda instruction, _: instruction.opcode in CALLS
    ):
        times = plain_number(run.times)
        waits += run.times * _waits(each, assumptions)
        if is_copy(module, each) and (array := each.shapes[0]).num_bytes >= large_bytes:
            copies.append(Copy(str(array), array.num_bytes, times, each.op_name))
        if each.opcode.endswith("-start") and each.base_opcode in _TRANSFERS:
            transfers.append(_transfer(computation, each, times, *costs))
        if num_bytes := own_bytes(module, computation, each):
            flops = plain_number(costs[0](computation, each))
            kind, array = kind_of(module, each, flops), ", ".join(map(str, each.shapes))
            rate = 2 if is_in_fp8(module, computation, each) else 1
            work.append(Work(flops, num_bytes, times, kind, array, each.op_name, rate))
    return GpuProgram(
        tuple(copies), plain_number(waits), tuple(transfers), tuple(work), gpu_of(device_kind)
    )


def _waits(instruction: Instruction, assumptions: Assumptions) -> Fraction | int:
    """How often the host waits in one run of an instruction: before each trip of an unknown number, and at the end."""
    if instruction.opcode == "conditional":
        return 1
    if instruction.opcode != "while" or all(
        call.times is not None for call in calls(instruction, NO_ASSUMPTIONS)
    ):
        return 0
    return 1 + next(call.known_times for call in calls(instruction, assumptions))


def _transfer(
    computation: Computation, begun: Instruction, times: int | float, flops_of: Cost, bytes_of: Cost
) -> Transfer:
    done = begun.opcode.replace("-start", "-done")
    after = computation.instructions[computation.instructions.index(begun) + 1 :]
    end = next(
        i for i, each in enumerate(after) if each.opcode == done and begun.name in each.operands
    )
    meanwhile = lambda cost: plain_number(
        sum((cost(computation, each) for each in after[:end]), Fraction(0))
    )
    return Transfer(
        kind=begun.base_opcode,
        num_bytes=sum(shape.num_bytes for shape in after[end].shapes),
        times=times,
        flops_meanwhile=meanwhile(flops_of),
        bytes_meanwhile=meanwhile(bytes_of),
        op_name=begun.op_name,
        name=begun.name,
    )
