"""Floating-point operations of a compiled program: its matrix products and convolutions, multiplied by loop trips.

XLA's own cost analysis counts the body of a loop once, whatever its trips, so it is of little use for a scan over layers or
microbatches. Here each product counts 2 operations for each multiply-add, wherever it is: alone, in a fusion, in a loop or in
a library call. Elementwise work is not counted, nor is a product that XLA rewrote as a multiply and a sum.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxpar.inspect.calls import NO_ASSUMPTIONS, Assumptions, calls
from jaxpar.inspect.hlo import Computation, Instruction, Module, Shape

_CONVOLUTIONS = {
    # Which of (first operand, second operand, result) is the forward convolution's (input, kernel, output).
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}
_CAUSAL = re.compile(r'"mask_type":\s*"(PADDING_)?CAUSAL"')
_LIBRARY = re.compile(r"gemm|matmul|\bdot|conv|fmha|attention|flash|onednn|triton|mosaic|pallas", re.IGNORECASE)


@dataclass(frozen=True)
class Flops:
    """Operations of one run on one device.

    Attributes:
        most: with the most expensive branch of each conditional whose shares are not known.
        least: with the cheapest branch.
        unknown_loops: op names of the loops with an unknown number of trips, each counted as one trip.
        uncounted: custom calls that look like products and whose operations are not known.
    """

    most: Fraction = Fraction(0)
    least: Fraction = Fraction(0)
    unknown_loops: frozenset[str] = frozenset()
    uncounted: frozenset[str] = frozenset()

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.most + other.most,
            self.least + other.least,
            self.unknown_loops | other.unknown_loops,
            self.uncounted | other.uncounted,
        )

    def times(self, factor: Fraction) -> "Flops":
        """Returns the operations of `factor` runs."""
        return Flops(self.most * factor, self.least * factor, self.unknown_loops, self.uncounted)


def count_flops(module: Module, *, assumptions: Assumptions = NO_ASSUMPTIONS) -> Flops:
    """Returns the operations of one run of the program on one device."""
    entry, counter = module.computations[module.entry], _counter(module, assumptions)
    return sum((counter(entry, each) for each in entry.instructions), Flops())


def flops_of_instructions(module: Module, assumptions: Assumptions) -> Callable[[Computation, Instruction], Fraction]:
    """Returns a function from an instruction and its computation to the operations of one run, as ``Flops.most``."""
    counter = _counter(module, assumptions)
    return lambda computation, instruction: counter(computation, instruction).most


def _counter(module: Module, assumptions: Assumptions) -> Callable[[Computation, Instruction], Flops]:
    done: dict[str, Flops] = {}

    def of_computation(name: str) -> Flops:
        if name not in done:
            computation = module.computations[name]
            done[name] = sum((of_instruction(computation, each) for each in computation.instructions), Flops())
        return done[name]

    def of_instruction(computation: Computation, instruction: Instruction) -> Flops:
        called = [(call, of_computation(call.computation)) for call in calls(instruction, assumptions)]
        bounded = [flops for call, flops in called if call.is_bound]
        total = _own_flops(computation, instruction) + _one_branch(bounded)
        for call, flops in called:
            if call.is_bound:
                continue
            total += flops.times(Fraction(1) if call.times is None else call.times)
            if call.times is None:
                total += Flops(unknown_loops=frozenset({instruction.op_name or instruction.name}))
        return total

    return of_instruction


def _one_branch(branches: Sequence[Flops]) -> Flops:
    if not branches:
        return Flops()
    together = sum(branches, Flops())
    return Flops(
        max(branch.most for branch in branches),
        min(branch.least for branch in branches),
        together.unknown_loops,
        together.uncounted,
    )


def _own_flops(computation: Computation, instruction: Instruction) -> Flops:
    opcode = instruction.base_opcode
    if opcode == "dot":
        return _exactly(_dot_flops(_first_operands(computation, instruction), instruction.shapes[0], instruction))
    if opcode == "convolution":
        return _exactly(_conv_flops([*_first_operands(computation, instruction), instruction.shapes[0]], instruction))
    if opcode == "custom-call":
        return _custom_call_flops(computation, instruction)
    return Flops()


def _exactly(count: int) -> Flops:
    return Flops(Fraction(count), Fraction(count))


def _first_operands(computation: Computation, instruction: Instruction) -> list[Shape]:
    return [shapes[0] for shapes in computation.operand_shapes(instruction)[:2]]


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _dot_flops(operands: Sequence[Shape], result: Shape, instruction: Instruction) -> int:
    contracted = _integers(instruction.attribute("lhs_contracting_dims"))
    return 2 * result.size * math.prod(operands[0].dims[dim] for dim in contracted)


def _conv_flops(arrays: Sequence[Shape], instruction: Instruction) -> int:
    """Returns 2 for each product of an input and a kernel element; padding and the gaps of a dilation are not counted."""
    image, kernel, output = arrays
    image_dims, rest = (instruction.attribute("dim_labels") or "").split("_")
    kernel_dims, output_dims = rest.split("->")
    window = instruction.attribute("window") or ""
    spatial = sorted(label for label in kernel_dims if label.isdigit())
    met = 1
    for dim, label in enumerate(spatial):
        settings = {key: value.split("x")[dim] for key, value in re.findall(r"(\w+)=([\dx_\-]+)", window)}
        met *= _meetings(
            image.dims[image_dims.index(label)],
            kernel.dims[kernel_dims.index(label)],
            output.dims[output_dims.index(label)],
            settings,
        )
    batch_and_features = output.dims[output_dims.index("b")] * output.dims[output_dims.index("f")]
    return 2 * batch_and_features * kernel.dims[kernel_dims.index("i")] * met


def _meetings(image: int, kernel: int, output: int, settings: dict[str, str]) -> int:
    stride, low = int(settings.get("stride", 1)), int(settings.get("pad", "0_0").split("_")[0])
    image_step, kernel_step = int(settings.get("lhs_dilate", 1)), int(settings.get("rhs_dilate", 1))
    last = (image - 1) * image_step
    positions = (start * stride - low + offset * kernel_step for start in range(output) for offset in range(kernel))
    return sum(1 for position in positions if 0 <= position <= last and position % image_step == 0)


def _custom_call_flops(computation: Computation, instruction: Instruction) -> Flops:
    target = instruction.attribute("custom_call_target") or ""
    operands = _first_operands(computation, instruction)
    if target.startswith(("__cublas$", "__cublasLt$")) and (dims := _dot_dims(instruction, "dot_dimension_numbers")):
        return _exactly(_product_flops(operands, dims))
    if target in _CONVOLUTIONS:
        arrays = [*operands, instruction.shapes[0]]
        return _exactly(_conv_flops([arrays[index] for index in _CONVOLUTIONS[target]], instruction))
    if target.startswith("__cudnn$fmha"):
        return _attention_flops(target, instruction, operands)
    return Flops(uncounted=frozenset({target})) if _LIBRARY.search(target) else Flops()


def _attention_flops(target: str, instruction: Instruction, operands: Sequence[Shape]) -> Flops:
    """Fused attention: queries by keys and weights by values forward; backward five products of that size, one recomputed.

    With a causal mask the kernel skips the scores above the diagonal, of n x n all but n (n + 1) / 2.
    """
    backward = "Backward" in target
    dims = _dot_dims(instruction, "bmm2_grad_gemm2_dot_dimension_numbers" if backward else "bmm1_dot_dimension_numbers")
    if dims is None:
        return Flops(uncounted=frozenset({target}))
    # The backward pass's operands also begin with queries and keys; all its products are as large as theirs.
    whole = (5 if backward else 2) * _product_flops(operands, dims)
    if not _CAUSAL.search(instruction.attributes.replace('\\"', '"')):
        return _exactly(whole)
    (rows,), (columns,) = _free_dims(operands[0], dims, "lhs"), _free_dims(operands[1], dims, "rhs")
    return _exactly(whole * sum(min(row + 1, columns) for row in range(rows)) // (rows * columns))


def _dot_dims(instruction: Instruction, key: str) -> dict[str, list[int]] | None:
    found = re.search(rf'"{key}":\s*(\{{[^}}]*\}})', instruction.attributes.replace('\\"', '"'))
    return {name: [int(dim) for dim in dims] for name, dims in json.loads(found.group(1)).items()} if found else None


def _product_flops(operands: Sequence[Shape], dims: dict[str, list[int]]) -> int:
    return 2 * operands[0].size * math.prod(_free_dims(operands[1], dims, "rhs"))


def _free_dims(operand: Shape, dims: dict[str, list[int]], side: str) -> list[int]:
    """The sizes of the dims of one operand of a product that are neither contracted nor shared with the other."""
    shared = {*dims.get(f"{side}_contracting_dimensions", []), *dims.get(f"{side}_batch_dimensions", [])}
    return [size for dim, size in enumerate(operand.dims) if dim not in shared]
