"""The costs of a GPU program besides its matrix products, counted in a program written by hand."""

from fractions import Fraction

import pytest

from jaxpar.inspect.gpu import Copy, Transfer, read_gpu_program
from jaxpar.inspect.hlo import Assumptions, parse_module

# A loop of 5 trips: a product between the two ends of a permutation, a transposed ring, a branch. Then a loop of unknown
# length.
PROGRAM = """
HloModule jit_step, num_partitions=2

%moved (p: f32[4,8,16]) -> f32[4,16,8] {
  %p = f32[4,8,16]{2,1,0} parameter(0)
  ROOT %turned = f32[4,16,8]{2,1,0} transpose(%p), dimensions={0,2,1}
}

%scaled (p: f32[4,8,16]) -> f32[4,16,8] {
  %p = f32[4,8,16]{2,1,0} parameter(0)
  %turned = f32[4,16,8]{2,1,0} transpose(%p), dimensions={0,2,1}
  ROOT %negated = f32[4,16,8]{2,1,0} negate(%turned)
}

%taken (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %copied = f32[8,8]{1,0} copy(%x), metadata={op_name="jit(step)/in the branch"}
}

%skipped (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8]{1,0} parameter(0)
}

%below (i: (s32[], f32[8,8], f32[4,8,16])) -> pred[] {
  %i = (s32[], f32[8,8], f32[4,8,16]) parameter(0)
  ROOT %true = pred[] constant(true)
}

%tick (state: (s32[], f32[8,8], f32[4,8,16])) -> (s32[], f32[8,8], f32[4,8,16]) {
  %state = (s32[], f32[8,8], f32[4,8,16]) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %ring = f32[4,8,16]{2,1,0} get-tuple-element(%state), index=2
  %start = (f32[8,8], f32[8,8]) collective-permute-start(%x), source_target_pairs={{0,1}}, metadata={op_name="jit(step)/send"}
  %whole = f32[4,16,8]{2,1,0} fusion(%ring), kind=kInput, calls=%moved
  %more = f32[4,16,8]{2,1,0} fusion(%ring), kind=kLoop, calls=%scaled
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[8,8]{1,0} collective-permute-done(%start)
  %z = f32[8,8]{1,0} dot(%done, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %on = pred[] compare(%n, %n), direction=EQ
  %w = f32[8,8]{1,0} conditional(%on, %z, %z), branch_computations={%skipped, %taken}, metadata={op_name="jit(s)/head/cond"}
  ROOT %next = (s32[], f32[8,8], f32[4,8,16]) tuple(%n, %w, %ring)
}

ENTRY %main (state: (s32[], f32[8,8], f32[4,8,16])) -> (s32[], f32[8,8], f32[4,8,16]) {
  %state = (s32[], f32[8,8], f32[4,8,16]) parameter(0)
  %ticks = (s32[], f32[8,8], f32[4,8,16]) while(%state), condition=%below, body=%tick, config={"known_trip_count":{"n":"5"}}
  ROOT %rest = (s32[], f32[8,8], f32[4,8,16]) while(%ticks), condition=%below, body=%tick
}
"""


def read(large_bytes=1, **assumed):
    return read_gpu_program(
        parse_module(PROGRAM), large_bytes=large_bytes, assumptions=Assumptions(**assumed)
    )


def test_copies_are_those_of_instructions_and_fusions_that_do_nothing_else():
    ring, branch = (
        Copy("f32[4,16,8]", 2048, 5, ""),
        Copy("f32[8,8]", 256, 5, "jit(step)/in the branch"),
    )
    assert read().copies[:2] == (ring, branch)
    assert [each.times for each in read().copies[2:]] == [1, 1], (
        "a loop of unknown length counts as one trip"
    )
    assert read().bytes_copied == 6 * (2048 + 256)
    assert read(large_bytes=1024).bytes_copied == 6 * 2048


def test_the_host_waits_at_branches_and_at_loops_of_unknown_length():
    assert read().host_waits == 5 + 2 + 1
    assert read(loop_trips=7).host_waits == 5 + 8 + 7, (
        "before each trip that the compiler did not know, and after the last"
    )


def test_shares_and_trips_that_are_given_count():
    assert read(branch_shares={"head/cond$": (Fraction(4, 5), Fraction(1, 5))}).copies[1].times == 1
    assert read(loop_trips=3).copies[2].times == 3
    loop = read(branch_shares={"^$": (Fraction(3, 4), Fraction(1, 4))})
    assert loop.copies[2].times == Fraction(1, 4), "a loop of one trip or none"
    assert loop.host_waits == 5 + (1 + Fraction(1, 4)) + Fraction(1, 4)


def test_products_between_the_ends_of_a_transfer_are_counted():
    product = 2 * 8 * 8 * 8
    of_product, of_rings = 3 * 256, 2 * 2 * 2048  # each reads its inputs once and writes its output
    assert read().transfers[0] == Transfer(
        "collective-permute", 256, 5, product, of_product + of_rings, "jit(step)/send", "start"
    )
    assert len(read().transfers) == 2


def test_the_text_has_what_was_counted():
    lines = read().render().splitlines()
    assert lines[:2] == ["the host waits 8 times a step", "copied in a step: 13.5 KiB"]
    assert lines[2].split() == ["5", "x", "2.00", "KiB", "f32[4,16,8]"]
    assert "1.02 KFLOP" in lines[lines.index("", 4) + 3]


@pytest.mark.parametrize("instruction", ["%y = ", "ROOT %next"])
def test_a_transfer_with_nothing_meanwhile_is_seen(instruction):
    """Moved in front of the product, the end of the permutation leaves nothing between."""
    done = next(line for line in PROGRAM.splitlines() if "permute-done" in line)
    without = PROGRAM.replace(done + "\n", "")
    text = without.replace(f"  {instruction}", f"{done}\n  {instruction}", 1)
    found = (
        read_gpu_program(parse_module(text), large_bytes=1, assumptions=Assumptions())
        .transfers[0]
        .flops_meanwhile
    )
    assert found == (0 if instruction == "%y = " else 2 * 2 * 8**3)
