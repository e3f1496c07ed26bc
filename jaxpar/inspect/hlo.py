"""The text of a compiled program as computations and instructions, and how often each computation runs another.

This module only parses XLA's text: `collectives.py` and `costs.py` find the cost of the instructions. Loop trips multiply the
number of calls, branches give an upper bound:

    ENTRY main
      while, known_trip_count 5
        body                  runs 5 times (its condition 6)
          conditional
            branch 0          runs at most 5 times
            branch 1          runs at most 5 times
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=?]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+)$")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_NAMES = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array: its dtype by XLA's name and its extents."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """The bytes of the elements, without padding."""
        return -(-self.size * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    # The first number in the name is the width (bf16, c64, f8e4m3fn); token and opaque have no number and no elements.
    width = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else int(width.group()) if width else 0


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns every array in a type, tuples flattened."""
    return tuple(
        Shape(dtype, tuple(int(dim.strip("<=?") or 0) for dim in dims.split(",") if dim))
        for dtype, dims in _SHAPE.findall(text)
    )


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, split into its parts: `name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type_text: str
    operand_text: str
    attributes: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result, tuples flattened."""
        return parse_shapes(self.type_text)

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the instructions whose results are its operands."""
        text = re.sub(r"/\*.*?\*/", "", self.operand_text)
        names = (
            re.findall(r"%([\w.\-]+)", text)
            if "%" in text
            else [name.strip() for name in text.split(",")]
        )
        return tuple(name for name in names if name)

    def attribute(self, key: str) -> str | None:
        """Returns the text of an attribute without its quotes or outer braces, or None if it is absent."""
        start = re.search(rf"(?:^|[,\s]){re.escape(key)}=", self.attributes)
        if start is None:
            return None
        rest = self.attributes[start.end() :]
        if rest.startswith("{"):
            return rest[1 : _closing(rest, 0, "{}")]
        if rest.startswith('"'):
            return rest[1:].split('"', 1)[0]
        return re.split(r"[,\s]", rest, maxsplit=1)[0]

    @property
    def op_name(self) -> str:
        """JAX's name for the operation: its path through functions, loops and branches; "" where there is none."""
        name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return name.group(1).replace("\\'", "'") if name else ""

    @property
    def base_opcode(self) -> str:
        """The opcode without the suffix of an asynchronous start."""
        return self.opcode.removesuffix("-start")


@dataclass(frozen=True)
class Computation:
    """A list of instructions that run together: the program, a loop's body, a branch, a fusion."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    def operand_shapes(self, instruction: Instruction) -> tuple[tuple[Shape, ...], ...]:
        """Returns the shapes of each operand whose producer is known."""
        producers = (self.by_name.get(name) for name in instruction.operands)
        return tuple(producer.shapes for producer in producers if producer is not None)


@dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name; `entry` runs once in a step on each device."""

    name: str
    num_devices: int
    entry: str
    computations: dict[str, Computation]
    source_lines: dict[str, str]

    def walk(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction as written, each once, however often it runs."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction

    def fused(self, instruction: Instruction) -> Computation | None:
        """Returns the computation inside a fusion, or one that is begun (``fusion-start``); None for another instruction."""
        if instruction.opcode not in ("fusion", "fusion-start"):
            return None
        return self.computations[(instruction.attribute("calls") or "").lstrip("%")]

    def source(self, instruction: Instruction) -> str:
        """Returns `file:line` of the Python code behind the instruction, or "" if the metadata lacks it."""
        return self.source_lines.get(_field(instruction.attributes, "stack_frame_id"), "")


def parse_module(text: str) -> Module:
    """Returns the computations of an HLO module's text, as `compiled.as_text()` prints it.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", None, []
    for line in text.splitlines():
        if name is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                name, lines = header.group(2), []
                entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif (instruction := _parse_instruction(line)) is not None:
            lines.append(instruction)
    if not entry:
        raise ValueError(
            "the text must be an HLO module with an ENTRY computation; got none. Pass compiled.as_text()."
        )
    first_line = text.lstrip().split("\n", 1)[0]
    name_of_module = re.match(r"HloModule ([^\s,]+)", first_line)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", first_line)
    return Module(
        name_of_module.group(1) if name_of_module else "",
        math.prod(map(int, counts)),
        entry,
        computations,
        _source_lines(text),
    )


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, rest = match.groups()
    if rest.startswith("("):
        end = _closing(rest, 0, "()") + 1
        type_text, rest = rest[:end], rest[end:].lstrip()
    else:
        type_text, _, rest = rest.partition(" ")
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    end = _closing(rest, len(opcode), "()")
    return Instruction(name, opcode, type_text, rest[len(opcode) + 1 : end], rest[end + 1 :])


def _closing(text: str, start: int, pair: str) -> int:
    depth = 0
    for match in re.compile(f"[{re.escape(pair)}]").finditer(text, start):
        depth += 1 if match.group() == pair[0] else -1
        if depth == 0:
            return match.start()
    return len(text)


def _source_lines(text: str) -> dict[str, str]:
    """Returns `file:line` of each stack frame, from the tables at the beginning of the text."""
    files, locations, frames = (
        _numbered(text, name) for name in ("FileNames", "FileLocations", "StackFrames")
    )
    lines = {}
    for frame, row in frames.items():
        location = locations.get(_field(row, "file_location_id"), "")
        file = files.get(_field(location, "file_name_id"), '""')
        lines[frame] = f"{file[1:-1]}:{_field(location, 'line')}"
    return lines


def _numbered(text: str, name: str) -> dict[str, str]:
    rows = re.search(rf"^{name}\n((?:\d+ .*\n?)*)", text, re.MULTILINE)
    return dict(re.findall(r"^(\d+) (.*)$", rows.group(1), re.MULTILINE)) if rows else {}


def _field(row: str, key: str) -> str:
    value = re.search(rf"\b{key}=(\d+)", row)
    return value.group(1) if value else ""


@dataclass(frozen=True)
class Call:
    """A call of one computation from another: `times` in each run of the caller, None if the compiler does not know."""

    computation: str
    times: Fraction | None
    is_branch: bool = False
    is_bound: bool = False

    @property
    def known_times(self) -> Fraction:
        """The same, with one trip for a loop whose trips are not known."""
        return Fraction(1) if self.times is None else self.times


@dataclass(frozen=True)
class Assumptions:
    """Values that the compiler does not know: the trips of unknown loops, and how often branches are taken."""

    loop_trips: int | None = None
    branch_shares: Mapping[str, Sequence[float | Fraction]] = field(default_factory=dict)


NO_ASSUMPTIONS = Assumptions()


def calls(instruction: Instruction, assumptions: Assumptions) -> tuple[Call, ...]:
    """Returns the calls of other computations in one run of the instruction.

    Reducers (`to_apply` of a reduce or an all-reduce) are left out: they hold scalar arithmetic only.
    """
    opcode = instruction.base_opcode
    if opcode == "while":
        return _loop_calls(instruction, assumptions)
    if opcode == "conditional":
        return _branch_calls(instruction, assumptions)
    if opcode.endswith(("-done", "-update")):
        return ()
    called = instruction.attribute("to_apply" if opcode == "call" else "calls")
    return tuple(Call(name, Fraction(1)) for name in _NAMES.findall(called or ""))


@dataclass(frozen=True)
class Run:
    """How often a computation runs in a step on each device, and how it is reached.

    Attributes:
        times: runs, with loop trips; an unknown loop makes one trip.
        unknown: whether it is in a loop whose trips the compiler does not know.
        conditional: whether it is in a branch of a conditional.
        is_bound: whether `times` is an upper bound, because it is not known how often its branch is taken.
        asynchronous: whether it runs between a start and a done.
    """

    times: Fraction = Fraction(1)
    unknown: bool = False
    conditional: bool = False
    is_bound: bool = False
    asynchronous: bool = False


def runs(
    module: Module,
    assumptions: Assumptions,
    enters: Callable[[Instruction, Call], bool],
    name: str | None = None,
    run: Run = Run(),
) -> Iterator[tuple[Run, Computation, Instruction]]:
    """Yields the instructions of a computation and of those that it calls, in order, at each call again.

    Args:
        module: The program.
        assumptions: Trips and shares that the compiler does not know.
        enters: Whether to go on in the computation of an instruction's call.
        name: The computation; None: the entry.
        run: How it is reached.
    """
    computation = module.computations[name or module.entry]
    for instruction in computation.instructions:
        yield run, computation, instruction
        for call in calls(instruction, assumptions):
            if enters(instruction, call):
                inner = Run(
                    run.times * call.known_times,
                    run.unknown or call.times is None,
                    run.conditional or call.is_branch,
                    run.is_bound or call.is_bound,
                    instruction.opcode == "async-start",
                )
                yield from runs(module, assumptions, enters, call.computation, inner)


def plain_number(number: Fraction) -> int | float:
    """Returns the fraction as an int if it is an integer, else as a float."""
    return number.numerator if number.denominator == 1 else float(number)


def _loop_calls(instruction: Instruction, assumptions: Assumptions) -> tuple[Call, ...]:
    trips = assumptions.loop_trips
    if known := _KNOWN_TRIPS.search(instruction.attributes):
        trips = int(known.group(1))
    elif shares := _shares(
        instruction, 2, assumptions
    ):  # a conditional written as a loop of one trip or none
        trips = shares[1]
    return tuple(
        Call(
            (instruction.attribute(part) or "").lstrip("%"),
            None if trips is None else Fraction(trips + more),
        )
        for part, more in (("body", 0), ("condition", 1))
    )


def _branch_calls(instruction: Instruction, assumptions: Assumptions) -> tuple[Call, ...]:
    listed = instruction.attribute("branch_computations")
    if listed is not None:
        branches = _NAMES.findall(listed)
    else:
        # In JAX's order, in which shares are given: XLA for GPUs turns the index 0 or 1 into a predicate from JAX 0.11 on.
        branches = [
            (instruction.attribute(f"{side}_computation") or "").lstrip("%")
            for side in ("false", "true")
        ]
    shares = _shares(instruction, len(branches), assumptions)
    if shares is None:
        return tuple(
            Call(branch, Fraction(1), is_branch=True, is_bound=True) for branch in branches
        )
    return tuple(
        Call(branch, share, is_branch=True) for branch, share in zip(branches, shares, strict=True)
    )


def _shares(
    instruction: Instruction, num_branches: int, assumptions: Assumptions
) -> tuple[Fraction, ...] | None:
    for pattern, shares in assumptions.branch_shares.items():
        if re.search(pattern, instruction.op_name):
            if len(shares) != num_branches:
                raise ValueError(
                    "branch_shares must give one share for each branch of the compiled conditional; got "
                    f"{len(shares)} shares for {pattern!r}, {num_branches} branches in {instruction.op_name!r}. "
                    f"Give {num_branches} shares, in the order of the branches."
                )
            return tuple(Fraction(share).limit_denominator(10**6) for share in shares)
    return None
