"""The costs of a GPU program besides its matrix products: copies, waits of the host, and transfers without overlap.

XLA orders a GPU's program when it compiles it, so all three can be read from its text, even if it was compiled for GPUs that
this machine lacks (``jaxpar.compile_only_devices``):

- A copy moves an array that the program could have used in place: an instruction ``copy`` or ``transpose``, or a fusion of
  nothing else, of at least ``large_bytes``.
- The host waits for the GPU where it must read a value to go on: at each ``conditional``, and before each trip of a loop whose
  number of trips the compiler does not know.
- A transfer starts at one instruction and ends at another; the instructions between them run meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from jaxpar.gpus import Gpu
from jaxpar.inspect.bytes_accessed import bytes_of_instructions, own_bytes
from jaxpar.inspect.calls import NO_ASSUMPTIONS, Assumptions, calls, plain_number
from jaxpar.inspect.device_time import Work, gpu_of, is_copy, kind_of, render_device_time
from jaxpar.inspect.flops import flops_of_instructions
from jaxpar.inspect.hlo import Computation, Instruction, Module
from jaxpar.inspect.text import bytes_text, flops_text, table

_TRANSFERS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COPIES_SHOWN = 8
Cost = Callable[[Computation, Instruction], Fraction]


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
        largest = sorted(self.copies, key=lambda each: each.num_bytes * each.times, reverse=True)[:COPIES_SHOWN]
        lines += [
            f"  {each.times:g} x {bytes_text(each.num_bytes)}  {each.array}  {each.op_name[-48:]}" for each in largest
        ]
        rows = [("asynchronous", "runs", "bytes", "products meanwhile", "from")]
        rows += [
            (
                each.kind,
                f"{each.times:g}",
                bytes_text(each.num_bytes),
                flops_text(each.flops_meanwhile),
                each.op_name[-48:],
            )
            for each in self.transfers
        ]
        parts = ["\n".join(lines), table(rows) if self.transfers else "", render_device_time(self.work, self.gpu)]
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
    costs = flops_of_instructions(module, assumptions), bytes_of_instructions(module, assumptions)
    work: list[Work] = []
    copies: list[Copy] = []
    transfers: list[Transfer] = []
    waits = Fraction(0)

    def visit(name: str, times: Fraction) -> None:
        nonlocal waits
        computation = module.computations[name]
        for index, each in enumerate(computation.instructions):
            called = calls(each, assumptions)
            waits += times * _waits(each, assumptions)
            if (copied := _copied(module, each)) is not None and copied[1] >= large_bytes:
                copies.append(Copy(*copied, plain_number(times), each.op_name))
            if each.opcode.endswith("-start") and each.base_opcode in _TRANSFERS:
                transfers.append(_transfer(computation, index, times, *costs))
            if each.opcode in ("while", "conditional", "call"):
                for call in called:
                    visit(call.computation, times * (Fraction(1) if call.times is None else call.times))
            elif num_bytes := own_bytes(module, computation, each):
                flops = plain_number(costs[0](computation, each))
                kind, array = kind_of(module, each, flops), ", ".join(map(str, each.shapes))
                work.append(Work(flops, num_bytes, plain_number(times), kind, array, each.op_name))

    visit(module.entry, Fraction(1))
    return GpuProgram(tuple(copies), plain_number(waits), tuple(transfers), tuple(work), gpu_of(device_kind))


def _waits(instruction: Instruction, assumptions: Assumptions) -> Fraction | int:
    """How often the host waits in one run of an instruction: before each trip of an unknown number, and at the end."""
    if instruction.opcode == "conditional":
        return 1
    if instruction.opcode != "while" or all(call.times is not None for call in calls(instruction, NO_ASSUMPTIONS)):
        return 0
    return 1 + next(Fraction(1) if call.times is None else call.times for call in calls(instruction, assumptions))


def _copied(module: Module, instruction: Instruction) -> tuple[str, int] | None:
    """The array that an instruction copies, and its bytes; None if it does more than that."""
    if not is_copy(module, instruction):
        return None
    array = instruction.shapes[0]
    return str(array), array.num_bytes


def _transfer(computation: Computation, start: int, times: Fraction, flops_of: Cost, bytes_of: Cost) -> Transfer:
    begun = computation.instructions[start]
    done = begun.opcode.replace("-start", "-done")
    after = computation.instructions[start + 1 :]
    end = next(i for i, each in enumerate(after) if each.opcode == done and begun.name in each.operands)
    meanwhile = lambda cost: plain_number(sum((cost(computation, each) for each in after[:end]), Fraction(0)))
    return Transfer(
        kind=begun.base_opcode,
        num_bytes=sum(shape.num_bytes for shape in after[end].shapes),
        times=plain_number(times),
        flops_meanwhile=meanwhile(flops_of),
        bytes_meanwhile=meanwhile(bytes_of),
        op_name=begun.op_name,
        name=begun.name,
    )
