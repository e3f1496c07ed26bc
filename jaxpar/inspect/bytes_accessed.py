"""The bytes that each instruction of a program reads from the device's memory and writes to it.

A fusion reads its inputs and writes its outputs, and nothing in between. Of an input that it slices it reads the slices alone,
and an output that is an updated slice of an input is written in place, so it writes the update alone.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction

from jaxpar.inspect.calls import Assumptions, calls
from jaxpar.inspect.hlo import Computation, Instruction, Module

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "optimization-barrier",
    "opt-barrier",
    "partition-id",
    "replica-id",
}
_CALLS = {"while", "conditional", "call"}
_SLICES = {"dynamic-slice", "slice", "gather"}
VIEWS = {"bitcast", "reshape", "convert", "transpose", "copy", "broadcast"}  # computed element by element in a fusion


def bytes_of_instructions(module: Module, assumptions: Assumptions) -> Callable[[Computation, Instruction], Fraction]:
    """Returns a function from an instruction and its computation to the bytes of one run, loops and branches included.

    Collectives count as 0: the bytes that they send are counted in ``collectives.py``.
    """
    done: dict[str, Fraction] = {}

    def of_computation(name: str) -> Fraction:
        if name not in done:
            computation = module.computations[name]
            done[name] = sum((of_instruction(computation, each) for each in computation.instructions), Fraction(0))
        return done[name]

    def of_instruction(computation: Computation, instruction: Instruction) -> Fraction:
        if instruction.opcode not in _CALLS:
            return Fraction(own_bytes(module, computation, instruction))
        called = [(call, of_computation(call.computation)) for call in calls(instruction, assumptions)]
        branches = [size for call, size in called if call.is_bound]
        times = lambda call: Fraction(1) if call.times is None else call.times
        rest = (size * times(call) for call, size in called if not call.is_bound)
        return max(branches, default=Fraction(0)) + sum(rest, Fraction(0))

    return of_instruction


def own_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that one run of an instruction reads and writes, without those of loops and branches."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode in _CALLS or opcode.endswith(("-start", "-done")):
        return 0
    if (fused := module.fused(instruction)) is not None:
        return _of_fusion(fused)
    operands = [sum(shape.num_bytes for shape in shapes) for shapes in computation.operand_shapes(instruction)]
    result = sum(shape.num_bytes for shape in instruction.shapes)
    if opcode in _SLICES:
        return 2 * result
    if opcode == "dynamic-update-slice":
        return 2 * operands[1]
    return sum(operands) + result


def _of_fusion(fused: Computation) -> int:
    read = sum(_read(fused, each) for each in fused.instructions if each.opcode == "parameter")
    return read + sum(_written(fused, each) for each in written_outputs(fused))


def _read(fused: Computation, instruction: Instruction) -> int:
    """The bytes of an input that a fusion reads: all of it, or the slices that are taken of it."""
    whole = sum(shape.num_bytes for shape in instruction.shapes)
    read = 0
    for user in _users(fused, instruction):
        if user.opcode in _SLICES and user.operands[0] == instruction.name:
            read += sum(shape.num_bytes for shape in user.shapes)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == instruction.name:
            continue
        elif user.opcode in VIEWS and user is not fused.instructions[-1]:
            read += _read(fused, user)
        else:
            return whole
    return min(read, whole)


def _users(fused: Computation, instruction: Instruction) -> Iterator[Instruction]:
    return (each for each in fused.instructions if instruction.name in each.operands)


def written_outputs(fused: Computation) -> list[Instruction]:
    """Returns the instructions that make what a fusion writes: an update in place itself, not a view of the updated array."""
    root = fused.instructions[-1]
    outputs = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return [_update_behind(fused, output) or output for output in outputs]


def _update_behind(fused: Computation, output: Instruction) -> Instruction | None:
    while output.opcode in ("bitcast", "reshape", "convert") and output.operands[0] in fused.by_name:
        output = fused.by_name[output.operands[0]]
    return output if output.opcode == "dynamic-update-slice" else None


def _written(fused: Computation, output: Instruction) -> int:
    if output.opcode == "dynamic-update-slice":
        return sum(shape.num_bytes for shape in fused.by_name[output.operands[1]].shapes)
    return sum(shape.num_bytes for shape in output.shapes)
