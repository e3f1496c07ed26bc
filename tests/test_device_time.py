"""Where the time of a GPU goes, held against counts by hand in a program written by hand."""

import dataclasses

import pytest

from jaxpar.gpus import GPUS, gpu_of
from jaxpar.inspect.gpu import LARGEST_SHOWN, Work, read_gpu_program, render_device_time
from jaxpar.inspect.hlo import NO_ASSUMPTIONS, parse_module

# A loop of 5 trips with an instruction of each kind. Numbers inside the fusions choose the slot.
PROGRAM = """
HloModule jit_step

%taken (stack: bf16[4,64,64], i: s32[]) -> f32[64,64] {
  %stack = bf16[4,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %is_negative = pred[] compare(%i, %zero), direction=LT
  %index = s32[] select(%is_negative, %zero, %i)
  %slice = bf16[1,64,64]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,64,64}
  %flat = bf16[64,64]{1,0} bitcast(%slice)
  ROOT %wide = f32[64,64]{1,0} convert(%flat)
}

%added (sums: f32[4,64,64], x: f32[64,64], i: s32[]) -> f32[4,64,64] {
  %sums = f32[4,64,64]{2,1,0} parameter(0)
  %x = f32[64,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %old = f32[1,64,64]{2,1,0} dynamic-slice(%sums, %i, %zero, %zero), dynamic_slice_sizes={1,64,64}
  %row = f32[1,64,64]{2,1,0} bitcast(%x)
  %sum = f32[1,64,64]{2,1,0} add(%old, %row)
  ROOT %new = f32[4,64,64]{2,1,0} dynamic-update-slice(%sums, %sum, %i, %zero, %zero)
}

%turned (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  ROOT %moved = f32[64,64]{1,0} transpose(%x), dimensions={1,0}
}

%narrowed (x: f32[64,64]) -> bf16[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %negated = f32[64,64]{1,0} negate(%x)
  ROOT %narrow = bf16[64,64]{1,0} convert(%negated)
}

%looked_up (table: f32[512,64], rows: s32[4,1], x: bf16[4,1,64]) -> f32[512,64] {
  %table = f32[512,64]{1,0} parameter(0)
  %rows = s32[4,1]{1,0} parameter(1)
  %x = bf16[4,1,64]{2,1,0} parameter(2)
  %wide = f32[4,1,64]{2,1,0} convert(%x)
  ROOT %new = f32[512,64]{1,0} scatter(%table, %rows, %wide), index_vector_dim=1, to_apply=%sum_of_two
}

%sum_of_two (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%b (state: (s32[], bf16[4,64,64], f32[4,64,64])) -> (s32[], bf16[4,64,64], f32[4,64,64]) {
  %state = (s32[], bf16[4,64,64], f32[4,64,64]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[4,64,64]{2,1,0} get-tuple-element(%state), index=1
  %sums = f32[4,64,64]{2,1,0} get-tuple-element(%state), index=2
  %w = f32[64,64]{1,0} fusion(%stack, %i), kind=kLoop, calls=%taken, metadata={op_name="jit(step)/weights"}
  %t = f32[64,64]{1,0} fusion(%w), kind=kInput, calls=%turned
  %y = f32[64,64]{1,0} dot(%w, %t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = bf16[64,64]{1,0} fusion(%y), kind=kLoop, calls=%narrowed
  %new = f32[4,64,64]{2,1,0} fusion(%sums, %y, %i), kind=kLoop, calls=%added, metadata={op_name="jit(step)/grads"}
  ROOT %next = (s32[], bf16[4,64,64], f32[4,64,64]) tuple(%i, %stack, %new)
}

%on (state: (s32[], bf16[4,64,64], f32[4,64,64])) -> pred[] {
  %state = (s32[], bf16[4,64,64], f32[4,64,64]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (state: (s32[], bf16[4,64,64], f32[4,64,64])) -> (s32[], bf16[4,64,64], f32[4,64,64]) {
  %state = (s32[], bf16[4,64,64], f32[4,64,64]) parameter(0)
  ROOT %loop = (s32[], bf16[4,64,64], f32[4,64,64]) while(%state), condition=%on, body=%b, config={"known_trip_count":{"n":"5"}}
}
"""
WIDE, NARROW, INDEX = (
    4 * 64 * 64,
    2 * 64 * 64,
    4,
)  # bytes of a matrix in float32 and in bfloat16, and of a number


def read(device_kind="NVIDIA H100 80GB HBM3"):
    return read_gpu_program(
        parse_module(PROGRAM),
        large_bytes=1 << 30,
        assumptions=NO_ASSUMPTIONS,
        device_kind=device_kind,
    )


def test_each_instruction_has_its_kind_and_its_cost():
    assert [(each.kind, each.num_bytes, each.flops, each.times) for each in read().work] == [
        ("slices", NARROW + INDEX + WIDE, 0, 5),
        ("copies", 2 * WIDE, 0, 5),
        ("products", 3 * WIDE, 2 * 64**3, 5),
        ("other", WIDE + NARROW, 0, 5),
        ("updates", 3 * WIDE + INDEX, 0, 5),
    ]
    assert (read().work[0].op_name, read().work[0].array) == ("jit(step)/weights", "f32[64,64]")


@pytest.mark.parametrize(
    ("alone", "instruction"),
    [
        (False, "fusion(%table, %rows, %x), kind=kInput, calls=%looked_up"),
        (True, "scatter(%table, %rows, %x), index_vector_dim=1, to_apply=%sum_of_two"),
    ],
)
def test_a_scatter_costs_the_rows_that_it_updates_in_place(alone, instruction):
    dtype = "f32" if alone else "bf16"
    entry = f"""ENTRY %main (table: f32[512,64], rows: s32[4,1], x: {dtype}[4,1,64]) -> f32[512,64] {{
  %table = f32[512,64]{{1,0}} parameter(0)
  %rows = s32[4,1]{{1,0}} parameter(1)
  %x = {dtype}[4,1,64]{{2,1,0}} parameter(2)
  ROOT %new = f32[512,64]{{1,0}} {instruction}
}}
"""
    module = parse_module(PROGRAM.partition("ENTRY")[0] + entry)
    (work,) = read_gpu_program(module, large_bytes=1, assumptions=NO_ASSUMPTIONS).work
    assert work.num_bytes == 4 * 4 + (4 if alone else 2) * 4 * 64 + 2 * 4 * 4 * 64


def test_seconds_are_those_of_the_slower_of_products_and_memory():
    by_memory = {
        each.kind: each.seconds(peak_flops=1e30, memory_bandwidth=1.0) for each in read().work
    }
    assert by_memory == {
        "products": 5 * 3 * WIDE,
        "slices": 5 * (NARROW + INDEX + WIDE),
        "updates": 5 * (3 * WIDE + INDEX),
        "copies": 5 * 2 * WIDE,
        "other": 5 * (WIDE + NARROW),
    }
    by_products = {
        each.kind: each.seconds(peak_flops=1.0, memory_bandwidth=1e30) for each in read().work
    }
    assert by_products["products"] == 5 * 2 * 64**3
    assert by_products["updates"] == pytest.approx(5 * (3 * WIDE + INDEX) / 1e30)


def test_the_text_has_the_time_by_kind_and_the_largest_instructions_first():
    assert read().gpu == GPUS["h100"]
    kinds, largest = render_device_time(read().work, read().gpu).split("\n\n")
    assert "at the rates of the datasheet of h100" in kinds
    rows = [line.split() for line in kinds.splitlines()[2:]]
    assert [row[0] for row in rows] == ["products", "slices", "updates", "copies", "other"]
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.3)
    first, second = (line.split() for line in largest.splitlines()[2:4])
    assert (first[0], first[-1]) == ("updates", "jit(step)/grads"), (
        "it reads a number more than the product"
    )
    assert (second[0], second[-1]) == ("products", "f32[64,64]"), "it has no name"
    assert read().render().endswith(f"{kinds}\n\n{largest}")


def test_no_more_instructions_are_shown_than_people_read():
    many = [
        dataclasses.replace(read().work[0], num_bytes=size, op_name=f"op {size}")
        for size in range(1000, 1020)
    ]
    lines = render_device_time(many, GPUS["h100"]).split("\n\n")[1].splitlines()[2:]
    assert [line.split()[-1] for line in lines] == [
        str(size) for size in range(1019, 1019 - LARGEST_SHOWN, -1)
    ]


def test_of_gpus_without_a_datasheet_bytes_are_shown():
    assert gpu_of("NVIDIA L40S") is None
    text = read("NVIDIA L40S").render()
    assert "datasheet" not in text
    assert "instructions on each device" in text
    heaviest = text.split("\n\n")[-1].splitlines()[2].split()
    assert heaviest[0] in ("products", "updates"), "the most bytes"


def test_a_program_without_work_has_no_table():
    assert render_device_time((), GPUS["h100"]) == ""
    assert Work(1, 1, 1, "other", "", "").seconds(1.0, 2.0) == 1.0
