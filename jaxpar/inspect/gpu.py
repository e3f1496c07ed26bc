"""What a GPU's program costs beside its products: copies, waits of the host, and transfers that nothing overlaps.

XLA orders a GPU's program when it compiles it, so all three can be read from its text, also if it was compiled for GPUs that
are not here (``jaxpar.compile_only_devices``):

- A copy moves an array that the program could have used in place: an instruction ``copy`` or ``transpose``, or a fusion of
  nothing else, of at least ``large_bytes``.
- The host waits for the GPU where it must read a value to go on: at each ``conditional``, and before each trip of a loop whose
  number of trips the compiler does not know.
- A transfer starts at one instruction and ends at another; what stands between them in the program runs meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from jaxpar.inspect.calls import NO_ASSUMPTIONS, Assumptions, calls, plain_number
from jaxpar.inspect.flops import flops_of_instructions
from jaxpar.inspect.hlo import Computation, Instruction, Module
from jaxpar.inspect.text import bytes_text, flops_text, table

_TRANSFERS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COPIES_SHOWN = 8
_MOVES = {"parameter", "copy", "transpose", "bitcast", "reshape"}


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
        op_name: JAX's name for the operation.
    """

    kind: str
    num_bytes: int
    times: int | float
    flops_meanwhile: int | float
    op_name: str


@dataclass(frozen=True)
class GpuProgram:
    """The costs of a step on one GPU beside its products. Loops of unknown length count as one trip, branches as taken.

    Attributes:
        copies: The large copies, in the order of the program.
        host_waits: How often the host waits for the GPU in a step.
        transfers: The asynchronous collectives, in the order of the program.
    """

    copies: tuple[Copy, ...]
    host_waits: int | float
    transfers: tuple[Transfer, ...]

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
        return "\n".join([*lines, "", table(rows)] if self.transfers else lines)


def read_gpu_program(module: Module, *, large_bytes: int, assumptions: Assumptions) -> GpuProgram:
    """Returns the costs of a compiled program for GPUs.

    Args:
        module: The program.
        large_bytes: The size from which a copy counts.
        assumptions: Trips and shares that the compiler does not know.
    """
    flops_of = flops_of_instructions(module, assumptions)
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
                transfers.append(_transfer(computation, index, times, flops_of))
            if each.opcode in ("while", "conditional", "call"):
                for call in called:
                    visit(call.computation, times * (Fraction(1) if call.times is None else call.times))

    visit(module.entry, Fraction(1))
    return GpuProgram(tuple(copies), plain_number(waits), tuple(transfers))


def _waits(instruction: Instruction, assumptions: Assumptions) -> Fraction | int:
    """How often the host waits in one run of an instruction: before each trip of an unknown number, and at the end."""
    if instruction.opcode == "conditional":
        return 1
    if instruction.opcode != "while" or all(call.times is not None for call in calls(instruction, NO_ASSUMPTIONS)):
        return 0
    return 1 + next(Fraction(1) if call.times is None else call.times for call in calls(instruction, assumptions))


def _copied(module: Module, instruction: Instruction) -> tuple[str, int] | None:
    """The array that an instruction copies, and its bytes; None if it does more than that."""
    if instruction.opcode == "fusion":
        fused = module.computations[(instruction.attribute("calls") or "").lstrip("%")]
        opcodes = {each.opcode for each in fused.instructions}
        if not (opcodes <= _MOVES and opcodes & {"copy", "transpose"}):
            return None
    elif instruction.opcode not in ("copy", "copy-start", "transpose"):
        return None
    array = instruction.shapes[0]
    return str(array), array.num_bytes


def _transfer(
    computation: Computation, start: int, times: Fraction, flops_of: Callable[[Computation, Instruction], Fraction]
) -> Transfer:
    begun = computation.instructions[start]
    done = begun.opcode.replace("-start", "-done")
    after = computation.instructions[start + 1 :]
    end = next(i for i, each in enumerate(after) if each.opcode == done and begun.name in each.operands)
    return Transfer(
        begun.base_opcode,
        sum(shape.num_bytes for shape in after[end].shapes),
        plain_number(times),
        plain_number(sum((flops_of(computation, each) for each in after[:end]), Fraction(0))),
        begun.op_name,
    )
