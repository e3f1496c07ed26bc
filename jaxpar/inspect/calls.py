"""How often one computation of a program calls another: loop trips multiply the count, branches give an upper bound.

ENTRY main
  while, known_trip_count 5
    body                  runs 5 times (its condition 6)
      conditional
        branch 0          runs at most 5 times
        branch 1          runs at most 5 times
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from jaxpar.inspect.hlo import Instruction

_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_NAMES = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class Call:
    """A call of one computation from another: `times` in each run of the caller, None if the compiler does not know."""

    computation: str
    times: Fraction | None
    is_branch: bool = False
    is_bound: bool = False


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


def plain_number(number: Fraction) -> int | float:
    """Returns the fraction as an int if it is an integer, else as a float."""
    return number.numerator if number.denominator == 1 else float(number)


def _trip_count(instruction: Instruction, assumptions: Assumptions) -> Fraction | int | None:
    """The trips of a loop; the share of its second branch if it is a conditional written as a loop of one trip or none."""
    if known := _KNOWN_TRIPS.search(instruction.attributes):
        return int(known.group(1))
    shares = _shares(instruction, 2, assumptions)
    return assumptions.loop_trips if shares is None else shares[1]


def _loop_calls(instruction: Instruction, assumptions: Assumptions) -> tuple[Call, ...]:
    trips = _trip_count(instruction, assumptions)
    body = (instruction.attribute("body") or "").lstrip("%")
    condition = (instruction.attribute("condition") or "").lstrip("%")
    return (
        Call(body, None if trips is None else Fraction(trips)),
        Call(condition, None if trips is None else Fraction(trips + 1)),
    )


def _branch_calls(instruction: Instruction, assumptions: Assumptions) -> tuple[Call, ...]:
    listed = instruction.attribute("branch_computations")
    if listed is not None:
        branches = _NAMES.findall(listed)
    else:
        branches = [(instruction.attribute(f"{side}_computation") or "").lstrip("%") for side in ("true", "false")]
    shares = _shares(instruction, len(branches), assumptions)
    if shares is None:
        return tuple(Call(branch, Fraction(1), is_branch=True, is_bound=True) for branch in branches)
    return tuple(Call(branch, share, is_branch=True) for branch, share in zip(branches, shares, strict=True))


def _shares(instruction: Instruction, num_branches: int, assumptions: Assumptions) -> tuple[Fraction, ...] | None:
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
