"""What each instruction of a compiled program costs a device: floating-point operations, and bytes of memory.

Operations are those of matrix products and convolutions, multiplied by loop trips. XLA's own cost analysis counts the body of a
loop once, whatever its trips, so it is of little use for a scan over layers or microbatches. Here each product counts 2
operations for each multiply-add, wherever it is: alone, in a fusion, in a loop or in a library call. Elementwise work is not
counted, nor is a product that XLA rewrote as a multiply and a sum.

Of bytes, a fusion reads its inputs and writes its outputs, and nothing in between. Of an input that it slices it reads the
slices alone, and an output that is an updated slice of an input is written in place, so it writes the update alone.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from jaxpar.backward.products import meetings
from jaxpar.fp8 import CALL as FP8_CALL
from jaxpar.inspect.groups import integers
from jaxpar.inspect.hlo import (
    NO_ASSUMPTIONS,
    Assumptions,
    Computation,
    Instruction,
    Module,
    Shape,
    calls,
    plain_number,
    runs,
)

_CONVOLUTIONS = {
    # Which of (first operand, second operand, result) is the forward convolution's (input, kernel, output).
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}
_MASK = re.compile(r'"mask_type":\s*"(\w+)"')
_LIBRARY = re.compile(
    r"gemm|matmul|\bdot|conv|fmha|attention|flash|onednn|triton|mosaic|pallas", re.IGNORECASE
)
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
CALLS = {"while", "conditional", "call"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}  # XLA updates their first operand in its own memory
VIEWS = {
    "bitcast",
    "reshape",
    "convert",
    "transpose",
    "copy",
    "broadcast",
}  # computed element by element in a fusion


Cost = Callable[[Computation, Instruction], Fraction]


def count_flops(module: Module, assumptions: Assumptions = NO_ASSUMPTIONS) -> dict[str, Any]:
    """Returns the fields of a ``StepReport`` about the operations of one run of the program on one device."""
    entry = module.computations[module.entry]
    of = {
        choose: _counter(module, assumptions, _known_flops, choose=choose) for choose in (max, min)
    }
    most, least = (
        sum((cost(entry, each) for each in entry.instructions), Fraction(0)) for cost in of.values()
    )
    unknown = (
        each
        for _, each in module.walk()
        if any(call.times is None for call in calls(each, assumptions))
    )
    uncounted = {
        _target(each)
        for computation, each in module.walk()
        if _own_flops(computation, each) is None
    }
    return {
        "flops": plain_number(most),
        "flops_least": plain_number(least),
        "unknown_loops": tuple(sorted({each.op_name or each.name for each in unknown})),
        "uncounted_calls": tuple(sorted(uncounted)),
        "fp8_products": plain_number(sum(_runs_in_fp8(module, assumptions), Fraction(0))),
    }


def _runs_in_fp8(module: Module, assumptions: Assumptions) -> Iterator[Fraction]:
    """Yields the runs in a step of each product of factors in FP8."""
    for run, computation, each in runs(
        module, assumptions, lambda instruction, _: instruction.opcode in CALLS
    ):
        if is_in_fp8(module, computation, each):
            yield run.times


def is_in_fp8(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Returns whether an instruction is a product of two factors in FP8: a call of cuBLASLt, or a fusion that has one."""
    fused = module.fused(instruction) or Computation("", ())
    products = [(computation, instruction), *((fused, each) for each in fused.instructions)]
    of_bytes = lambda where, each: all(
        shape.dtype.startswith("f8") for shape in _first_operands(where, each)
    )
    is_dot = any(each.opcode == "dot" and of_bytes(where, each) for where, each in products)
    return is_dot or _target(instruction) == FP8_CALL


def costs_of_instructions(module: Module, assumptions: Assumptions) -> tuple[Cost, Cost]:
    """Returns two functions from a computation and an instruction of it: the operations, and the bytes, of one run.

    Loops and branches are included, of branches whose shares are not known the most expensive one. The bytes of collectives
    count as 0: those that they send are counted in ``collectives.py``.
    """
    num_bytes = lambda computation, instruction: own_bytes(module, computation, instruction)
    in_calls = lambda instruction: instruction.opcode in CALLS
    return _counter(module, assumptions, _known_flops), _counter(
        module, assumptions, num_bytes, enters=in_calls
    )


def _counter(
    module: Module,
    assumptions: Assumptions,
    own: Callable[[Computation, Instruction], int],
    *,
    enters: Callable[[Instruction], bool] = lambda instruction: True,
    choose: Callable = max,
) -> Cost:
    """Returns a function from an instruction and its computation to its own amount and that of what it calls.

    Args:
        module: The program.
        assumptions: Trips and shares that the compiler does not know; a loop with an unknown number of trips makes one.
        own: Returns the amount of one run of an instruction without what it calls.
        enters: Whether the computations that an instruction calls count beside its own amount.
        choose: ``max`` or ``min``, of the branches of a conditional whose shares are not known.
    """
    done: dict[str, Fraction] = {}

    def of_computation(name: str) -> Fraction:
        if name not in done:
            computation = module.computations[name]
            done[name] = sum(
                (of_instruction(computation, each) for each in computation.instructions),
                Fraction(0),
            )
        return done[name]

    def of_instruction(computation: Computation, instruction: Instruction) -> Fraction:
        found = calls(instruction, assumptions) if enters(instruction) else ()
        called = (
            call.known_times * of_computation(call.computation)
            for call in found
            if not call.is_bound
        )
        branches = (of_computation(call.computation) for call in found if call.is_bound)
        return sum(called, Fraction(own(computation, instruction))) + choose(branches, default=0)

    return of_instruction


def _known_flops(computation: Computation, instruction: Instruction) -> int:
    return _own_flops(computation, instruction) or 0


def _own_flops(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the operations of an instruction without what it calls; None if it looks like a product but is not known."""
    opcode = instruction.base_opcode
    if opcode == "dot":
        contracted = integers(instruction.attribute("lhs_contracting_dims"))
        left = _first_operands(computation, instruction)[0]
        return 2 * instruction.shapes[0].size * math.prod(left.dims[dim] for dim in contracted)
    if opcode == "convolution":
        return _conv_flops(
            [*_first_operands(computation, instruction), instruction.shapes[0]], instruction
        )
    return _custom_call_flops(computation, instruction) if opcode == "custom-call" else 0


def _first_operands(computation: Computation, instruction: Instruction) -> list[Shape]:
    return [shapes[0] for shapes in computation.operand_shapes(instruction)[:2]]


def _target(instruction: Instruction) -> str:
    return instruction.attribute("custom_call_target") or ""


def _conv_flops(arrays: Sequence[Shape], instruction: Instruction) -> int:
    """Returns 2 for each product of an input and a kernel element; padding and the gaps of a dilation are not counted."""
    image, kernel, output = arrays
    image_dims, rest = (instruction.attribute("dim_labels") or "").split("_")
    kernel_dims, output_dims = rest.split("->")
    window = instruction.attribute("window") or ""
    spatial = sorted(label for label in kernel_dims if label.isdigit())
    met, labelled = 1, ((image, image_dims), (kernel, kernel_dims), (output, output_dims))
    for dim, label in enumerate(spatial):
        settings = {
            key: value.split("x")[dim] for key, value in re.findall(r"(\w+)=([\dx_\-]+)", window)
        }
        met *= _meetings(settings, *(array.dims[labels.index(label)] for array, labels in labelled))
    batch_and_features = output.dims[output_dims.index("b")] * output.dims[output_dims.index("f")]
    return 2 * batch_and_features * kernel.dims[kernel_dims.index("i")] * met


def _meetings(settings: dict[str, str], image: int, kernel: int, output: int) -> int:
    return meetings(
        *(image, kernel, output),
        stride=int(settings.get("stride", 1)),
        low=int(settings.get("pad", "0_0").split("_")[0]),
        image_step=int(settings.get("lhs_dilate", 1)),
        kernel_step=int(settings.get("rhs_dilate", 1)),
    )


def _custom_call_flops(computation: Computation, instruction: Instruction) -> int | None:
    target, operands = _target(instruction), _first_operands(computation, instruction)
    if target.startswith(("__cublas$", "__cublasLt$")) and (
        dims := _dot_dims(instruction, "dot_dimension_numbers")
    ):
        return _product_flops(operands, dims)
    if target in _CONVOLUTIONS:
        arrays = [*operands, instruction.shapes[0]]
        return _conv_flops([arrays[index] for index in _CONVOLUTIONS[target]], instruction)
    if target.startswith("__cudnn$fmha"):
        return _attention_flops(target, instruction, operands)
    if _is_grouped(target, instruction):
        return _grouped_flops(computation, instruction)
    return None if _LIBRARY.search(target) else 0


def _is_grouped(target: str, instruction: Instruction) -> bool:
    """Whether a call is a kernel of ``models/grouped_product.py``, by its name in op_name, or in the settings of Triton's."""
    if "mosaic_gpu" in target:
        return "grouped_product" in instruction.op_name
    return "triton" in target and 'name = "grouped_product"' in instruction.attributes


def _grouped_flops(computation: Computation, instruction: Instruction) -> int:
    """The products of rows with a weight each (``models/grouped_product.py``), as if all rows for which there is room had one.

    Of the arrays rows [r, in], results [r, out] and weights [e, in, out] any may be the result of the call.
    """
    arrays = [
        *(shapes[0] for shapes in computation.operand_shapes(instruction)),
        instruction.shapes[0],
    ]
    rows, others = (shape.dims for shape in arrays if len(shape.dims) == 2)
    return 2 * math.prod(rows) * others[-1]


def _attention_flops(
    target: str, instruction: Instruction, operands: Sequence[Shape]
) -> int | None:
    """Fused attention: queries by keys and weights by values forward; backward five products of that size, one recomputed.

    With a causal mask the kernel skips the scores above the diagonal, of n x n all but n (n + 1) / 2. With a padding mask only
    the running program knows how many keys a query sees. If queries are fewer than keys, they are one of two chunks that
    together see all keys but a chunk of them (``models/transformer/flash_chunks.py``).
    """
    backward = "Backward" in target
    dims = _dot_dims(
        instruction,
        "bmm2_grad_gemm2_dot_dimension_numbers" if backward else "bmm1_dot_dimension_numbers",
    )
    if dims is None:
        return None
    # The backward pass's operands also begin with queries and keys; all its products are as large as theirs.
    whole = (5 if backward else 2) * _product_flops(operands, dims)
    (rows,), (columns,) = _free_dims(operands[0], dims, "lhs"), _free_dims(operands[1], dims, "rhs")
    mask = _MASK.search(instruction.attributes.replace('\\"', '"'))
    if mask and mask[1].endswith("CAUSAL"):
        return whole * sum(min(row + 1, columns) for row in range(rows)) // (rows * columns)
    if mask and mask[1] == "PADDING" and rows < columns:
        return whole * (columns - rows) // (2 * columns)
    return whole


def _dot_dims(instruction: Instruction, key: str) -> dict[str, list[int]] | None:
    found = re.search(rf'"{key}":\s*(\{{[^}}]*\}})', instruction.attributes.replace('\\"', '"'))
    return (
        {name: [int(dim) for dim in dims] for name, dims in json.loads(found.group(1)).items()}
        if found
        else None
    )


def _product_flops(operands: Sequence[Shape], dims: dict[str, list[int]]) -> int:
    return 2 * operands[0].size * math.prod(_free_dims(operands[1], dims, "rhs"))


def _free_dims(operand: Shape, dims: dict[str, list[int]], side: str) -> list[int]:
    """The sizes of the dims of one operand of a product that are neither contracted nor shared with the other."""
    shared = {
        *dims.get(f"{side}_contracting_dimensions", []),
        *dims.get(f"{side}_batch_dimensions", []),
    }
    return [size for dim, size in enumerate(operand.dims) if dim not in shared]


def own_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that one run of an instruction reads and writes, without those of loops and branches."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode in CALLS:
        return 0
    if (fused := module.fused(instruction)) is not None:
        read = sum(_read(fused, each) for each in fused.instructions if each.opcode == "parameter")
        return read + sum(_written(fused, each) for each in written_outputs(fused))
    if opcode.endswith(("-start", "-done")):
        return 0
    operands = [
        sum(shape.num_bytes for shape in shapes)
        for shapes in computation.operand_shapes(instruction)
    ]
    result = _result_bytes(instruction)
    if opcode in _SLICES:
        return 2 * result
    if opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if opcode == "scatter" and len(operands) == 3:
        return operands[1] + 3 * operands[2]
    return sum(operands) + result


def _read(fused: Computation, instruction: Instruction) -> int:
    """The bytes of an input that a fusion reads: all of it, or the slices that are taken of it."""
    whole = sum(shape.num_bytes for shape in instruction.shapes)
    read = 0
    for user in (each for each in fused.instructions if instruction.name in each.operands):
        if user.opcode in _SLICES and user.operands[0] == instruction.name:
            read += sum(shape.num_bytes for shape in user.shapes)
        elif user.opcode in _IN_PLACE and user.operands[0] == instruction.name:
            continue
        elif user.opcode in VIEWS and user is not fused.instructions[-1]:
            read += _read(fused, user)
        else:
            return whole
    return min(read, whole)


def written_outputs(fused: Computation) -> list[Instruction]:
    """Returns the instructions that make what a fusion writes: an update in place itself, not a view of the updated array."""
    root = fused.instructions[-1]
    outputs = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return [_update_behind(fused, output) or output for output in outputs]


def _update_behind(fused: Computation, output: Instruction) -> Instruction | None:
    while (
        output.opcode in ("bitcast", "reshape", "convert") and output.operands[0] in fused.by_name
    ):
        output = fused.by_name[output.operands[0]]
    return output if output.opcode in _IN_PLACE else None


def _written(fused: Computation, output: Instruction) -> int:
    if output.opcode in _IN_PLACE:  # a scatter also reads what it adds to
        updates = fused.by_name[
            output.operands[-1] if output.opcode == "scatter" else output.operands[1]
        ]
        return (2 if output.opcode == "scatter" else 1) * sum(
            shape.num_bytes for shape in updates.shapes
        )
    return _result_bytes(output)


def _result_bytes(instruction: Instruction) -> int:
    """The bytes of a result; those in which cuBLAS may put sums, the last of a product's results, count as none."""
    is_product = instruction.opcode == "custom-call" and _target(instruction).startswith(
        "__cublas$"
    )
    shapes = (
        instruction.shapes[:-1]
        if is_product and len(instruction.shapes) > 1
        else instruction.shapes
    )
    return sum(shape.num_bytes for shape in shapes)
