"""The bytes that instructions read and write, counted by hand in programs written by hand."""

from fractions import Fraction

import pytest

from jaxpar.inspect.costs import costs_of_instructions, own_bytes
from jaxpar.inspect.hlo import Assumptions, parse_module

# A ring of four slots of 1 KiB, of which a fusion reads one and adds it to x; another writes x into a slot.
PROGRAM = """
HloModule jit_step

%added (ring: f32[4,16,16], x: f32[16,16], i: s32[]) -> f32[16,16] {
  %ring = f32[4,16,16]{2,1,0} parameter(0)
  %x = f32[16,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slot = f32[1,16,16]{2,1,0} dynamic-slice(%ring, %i, %zero, %zero), dynamic_slice_sizes={1,16,16}
  %flat = f32[16,16]{1,0} bitcast(%slot)
  ROOT %sum = f32[16,16]{1,0} add(%flat, %x)
}

%stored (ring: f32[4,16,16], x: f32[16,16], i: s32[]) -> f32[4,16,16] {
  %ring = f32[4,16,16]{2,1,0} parameter(0)
  %x = f32[16,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slot = f32[1,16,16]{2,1,0} bitcast(%x)
  ROOT %new = f32[4,16,16]{2,1,0} dynamic-update-slice(%ring, %slot, %i, %zero, %zero)
}

%both (ring: f32[4,16,16], x: f32[16,16]) -> (f32[4,16,16], f32[16,16]) {
  %ring = f32[4,16,16]{2,1,0} parameter(0)
  %x = f32[16,16]{1,0} parameter(1)
  %twice = f32[4,16,16]{2,1,0} add(%ring, %ring)
  %negated = f32[16,16]{1,0} negate(%x)
  ROOT %pair = (f32[4,16,16], f32[16,16]) tuple(%twice, %negated)
}

%narrowed (x: f32[16,16]) -> bf16[16,16] {
  %x = f32[16,16]{1,0} parameter(0)
  %negated = f32[16,16]{1,0} negate(%x)
  ROOT %narrow = bf16[16,16]{1,0} convert(%negated)
}

%body (state: (s32[], f32[4,16,16], f32[16,16])) -> (s32[], f32[4,16,16], f32[16,16]) {
  %state = (s32[], f32[4,16,16], f32[16,16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %ring = f32[4,16,16]{2,1,0} get-tuple-element(%state), index=1
  %x = f32[16,16]{1,0} get-tuple-element(%state), index=2
  %y = f32[16,16]{1,0} fusion(%ring, %x, %i), kind=kLoop, calls=%added
  %z = f32[16,16]{1,0} dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %new = f32[4,16,16]{2,1,0} fusion(%ring, %z, %i), kind=kLoop, calls=%stored
  ROOT %next = (s32[], f32[4,16,16], f32[16,16]) tuple(%i, %new, %z)
}

%below (state: (s32[], f32[4,16,16], f32[16,16])) -> pred[] {
  %state = (s32[], f32[4,16,16], f32[16,16]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (state: (s32[], f32[4,16,16], f32[16,16])) -> (f32[4,16,16], f32[16,16]) {
  %state = (s32[], f32[4,16,16], f32[16,16]) parameter(0)
  %loop = (s32[], f32[4,16,16], f32[16,16]) while(%state), condition=%below, body=%body, config={"known_trip_count":{"n":"3"}}
  %i = s32[] get-tuple-element(%loop), index=0
  %ring = f32[4,16,16]{2,1,0} get-tuple-element(%loop), index=1
  %x = f32[16,16]{1,0} get-tuple-element(%loop), index=2
  %taken = f32[1,16,16]{2,1,0} dynamic-slice(%ring, %i, %i, %i), dynamic_slice_sizes={1,16,16}
  %copied = f32[16,16]{1,0} copy(%x)
  %narrow = bf16[16,16]{1,0} fusion(%x), kind=kLoop, calls=%narrowed
  %begun = ((f32[4,16,16], f32[16,16], s32[]), f32[16,16], u32[]) fusion-start(%ring, %x, %i), kind=kLoop, calls=%added
  %ended = f32[16,16]{1,0} fusion-done(%begun)
  %multiplied = (f32[16,16], s8[4096]) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  ROOT %out = (f32[4,16,16], f32[16,16]) fusion(%ring, %x), kind=kLoop, calls=%both
}
"""
KIB, INDEX = 1024, 4
IN_BODY = (KIB + KIB + INDEX + KIB) + 3 * KIB + (KIB + INDEX + KIB)


@pytest.mark.parametrize(
    ("where", "name", "num_bytes"),
    [
        ("body", "y", KIB + KIB + INDEX + KIB),  # one slot, x and the index; the sum
        ("body", "z", 3 * KIB),
        ("body", "new", KIB + INDEX + KIB),  # x and the index; the slot, in place
        ("main", "taken", 2 * KIB),
        ("main", "copied", 2 * KIB),
        ("main", "narrow", KIB + KIB // 2),  # written in 16 bits
        ("main", "out", 5 * KIB + 5 * KIB),  # all of both, read and written
        ("main", "begun", KIB + KIB + INDEX + KIB),  # as y, beside what runs until it ends
        ("main", "ended", 0),
        ("main", "multiplied", 3 * KIB),  # not the room for sums
        ("main", "loop", 0),
        ("main", "ring", 0),
    ],
)
def test_an_instruction_reads_its_inputs_or_slices_of_them_and_writes_its_outputs(
    where, name, num_bytes
):
    module = parse_module(PROGRAM)
    computation = module.computations[where]
    assert own_bytes(module, computation, computation.by_name[name]) == num_bytes


def test_a_loop_has_the_bytes_of_its_trips():
    module = parse_module(PROGRAM)
    main = module.computations["main"]
    _, num_bytes = costs_of_instructions(module, Assumptions())
    loop = num_bytes(main, main.by_name["loop"])
    assert loop == Fraction(3 * IN_BODY)
