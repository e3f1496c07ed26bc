"""What the parser of compiled programs makes of text that the CPU's compiler does not write."""

import json

import pytest

from jaxpar.inspect.collectives import Collective, find_collectives
from jaxpar.inspect.costs import count_flops
from jaxpar.inspect.groups import axes_of_groups, parse_groups, shift_of_pairs
from jaxpar.inspect.hlo import Assumptions, parse_module
from tests.support.hlo_text import DATA_TENSOR, program

# What the parser makes of text that the CPU's compiler does not write.

EVEN_ODD = ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", EVEN_ODD),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", EVEN_ODD),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", EVEN_ODD),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_groups_are_read_in_every_form(text, groups):
    assert parse_groups(text, 8) == groups


@pytest.mark.parametrize(
    ("groups", "axes", "whole"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("tensor",), True),
        (((4, 0), (5, 1), (2, 6), (3, 7)), ("data",), True),
        ((tuple(range(8)),), ("data", "tensor"), True),
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",), False),
        (((0, 1, 4, 5), (2, 3, 6, 7)), ("data", "tensor"), False),
    ],
)
def test_groups_become_axes(groups, axes, whole):
    assert axes_of_groups(groups, DATA_TENSOR) == (axes, whole)
    assert axes_of_groups(groups, (("data", 2), ("stage", 1), ("tensor", 4))) == (axes, whole)


@pytest.mark.parametrize(
    ("pairs", "shift"),
    [
        (((0, 1), (1, 2), (2, 3), (3, 0)), 1),
        (((1, 0), (2, 1), (3, 2)), -1),
        (((0, 3), (1, 0), (2, 1), (3, 2)), -1),
        (((0, 4),), 1),
        (((0, 2), (1, 3), (2, 0), (3, 1)), 2),
        (((0, 1), (2, 0)), None),
        (((0, 5),), None),
    ],
)
def test_shifts_along_an_axis_are_told_from_other_permutations(pairs, shift):
    assert shift_of_pairs(pairs, DATA_TENSOR) == shift


def collectives_of(text: str, **assumptions) -> dict[str, Collective]:
    found = find_collectives(
        program(text), axis_sizes=DATA_TENSOR, assumptions=Assumptions(**assumptions)
    )
    assert len({each.kind for each in found}) == len(found), "the snippets here hold one of a kind"
    return {each.kind: each for each in found}


def test_asynchronous_pairs_of_a_gpu_count_once():
    found = collectives_of("""
        HloModule gpu, is_scheduled=true, num_partitions=8

        %add (a: f32[], b: f32[]) -> f32[] {
          %a = f32[] parameter(0)
          %b = f32[] parameter(1)
          ROOT %sum = f32[] add(%a, %b)
        }

        %wrapped (p: bf16[64]) -> bf16[64] {
          %p = bf16[64]{0} parameter(0)
          ROOT %a2a = bf16[64]{0} all-to-all(%p), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}
        }

        %body (state: (s32[], f32[32])) -> (s32[], f32[32]) {
          %state = (s32[], f32[32]{0}) parameter(0)
          %i = s32[] get-tuple-element(%state), index=0
          %x = f32[32]{0} get-tuple-element(%state), index=1
          %y = bf16[64]{0} custom-call(%x), custom_call_target="make"
          %ar = (f32[32]{0}, f32[32]{0}) all-reduce-start(%x, %x), channel_id=1,
              replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add
          %ar-done = (f32[32]{0}, f32[32]{0}) all-reduce-done(%ar)
          %ag = (bf16[64]{0}, bf16[256]{0}) all-gather-start(%y),
              channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
          %ag-done = bf16[256]{0} all-gather-done(%ag)
          %rs = ((f32[32]{0}), f32[8]{0}) reduce-scatter-start(%x),
              channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
          %rs-done = f32[8]{0} reduce-scatter-done(%rs)
          %cp = (f32[32]{0}, f32[32]{0}, u32[], u32[]) collective-permute-start(%x),
              channel_id=4, source_target_pairs={{0,4},{1,5},{2,6},{3,7},{4,4}}
          %cp-done = f32[32]{0} collective-permute-done(%cp)
          %as = ((bf16[64]{0}), bf16[64]{0}) async-start(%y), calls=%wrapped
          %as-update = ((bf16[64]{0}), bf16[64]{0}) async-update(%as)
          %as-done = bf16[64]{0} async-done(%as-update)
          ROOT %next = (s32[], f32[32]{0}) tuple(%i, %cp-done)
        }

        %condition (state: (s32[], f32[32])) -> pred[] {
          %state = (s32[], f32[32]{0}) parameter(0)
          ROOT %go = pred[] constant(true)
        }

        ENTRY %main (p: (s32[], f32[32])) -> (s32[], f32[32]) {
          %p = (s32[], f32[32]{0}) parameter(0)
          ROOT %loop = (s32[], f32[32]{0}) while(%p), condition=%condition, body=%body,
              backend_config={"known_trip_count":{"n":"3"}}
        }
        """)
    expected = {  # kind: axes, payload, bytes a run
        "all-reduce": (("data",), 256, 256),
        "all-gather": (("tensor",), 512, 384),
        "reduce-scatter": (("tensor",), 128, 96),
        "collective-permute": (("data",), 128, 128),
        "all-to-all": (("tensor",), 128, 96),
    }
    assert {
        kind: (each.axes, each.payload_bytes, each.bytes_per_run) for kind, each in found.items()
    } == expected
    assert all(each.times == 3 and each.asynchronous for each in found.values())
    assert len(found["collective-permute"].senders) == 4


def test_permutation_taken_apart_into_send_and_recv_counts_once():
    found = collectives_of("""
        HloModule gpu, num_partitions=8

        ENTRY %main (x: f32[32]) -> f32[32] {
          %x = f32[32]{0} parameter(0)
          %token = token[] after-all()
          %recv = (f32[32]{0}, u32[], token[]) recv(%token), channel_id=1,
              frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}
          %send = (f32[32]{0}, u32[], token[]) send(%x, %token), channel_id=1,
              frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}
          %recv-done = (f32[32]{0}, token[]) recv-done(%recv), channel_id=1
          %send-done = token[] send-done(%send), channel_id=1
          ROOT %y = f32[32]{0} get-tuple-element(%recv-done), index=0
        }
        """)
    permute = found["collective-permute"]
    assert (permute.axes, permute.bytes_moved, permute.shift, len(permute.senders)) == (
        ("tensor",),
        128,
        1,
        2,
    )


def test_broadcast_and_ragged_exchange_are_counted_and_groups_of_one_are_not():
    found = collectives_of("""
        HloModule rare, num_partitions=8

        ENTRY %main (x: f32[32], out: f32[64], sizes: s32[4]) -> f32[64] {
          %x = f32[32]{0} parameter(0)
          %out = f32[64]{0} parameter(1)
          %sizes = s32[4]{0} parameter(2)
          %cb = f32[32]{0} collective-broadcast(%x), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}
          %alone = f32[32]{0} all-gather(%x), channel_id=2, replica_groups=[8,1]<=[8], dimensions={0}
          %still = f32[32]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,0},{1,1}}
          ROOT %ra = f32[64]{0} ragged-all-to-all(%x, %out, %sizes, %sizes, /*index=4*/%sizes, %sizes),
              replica_groups=[2,4]<=[8]
        }
        """)
    assert {kind: (each.axes, each.bytes_moved) for kind, each in found.items()} == {
        "collective-broadcast": (("data",), 128),
        "ragged-all-to-all": (("tensor",), 96),
    }


def test_condition_of_a_loop_runs_once_more_than_its_body():
    text = """
        HloModule loop, num_partitions=8

        %body (x: f32[32]) -> f32[32] {
          %x = f32[32]{0} parameter(0)
          ROOT %gathered = f32[32]{0} collective-permute(%x), source_target_pairs={{0,1}}
        }

        %condition (x: f32[32]) -> pred[] {
          %x = f32[32]{0} parameter(0)
          %sum = f32[32]{0} all-reduce(%x), replica_groups={}, to_apply=%add
          ROOT %go = pred[] constant(true)
        }

        ENTRY %main (x: f32[32]) -> f32[32] {
          %x = f32[32]{0} parameter(0)
          ROOT %loop = f32[32]{0} while(%x), condition=%condition, body=%body
        }
        """
    assert {kind: each.times for kind, each in collectives_of(text).items()} == {
        "collective-permute": None,
        "all-reduce": None,
    }
    known = collectives_of(text, loop_trips=4)
    assert (known["collective-permute"].times, known["all-reduce"].times) == (4, 5)


def test_branches_by_predicate_are_branches():
    text = """
        HloModule branches, num_partitions=8

        %yes (x: f32[32]) -> f32[32] {
          %x = f32[32]{0} parameter(0)
          ROOT %moved = f32[32]{0} collective-permute(%x), source_target_pairs={{0,1}}
        }

        %no (x: f32[32]) -> f32[32] {
          ROOT %x = f32[32]{0} parameter(0)
        }

        ENTRY %main (p: pred[], x: f32[32]) -> f32[32] {
          %p = pred[] parameter(0)
          %x = f32[32]{0} parameter(1)
          ROOT %choice = f32[32]{0} conditional(%p, %x, %x), true_computation=%yes, false_computation=%no,
              metadata={op_name="jit(step)/cond"}
        }
        """
    permute = collectives_of(text)["collective-permute"]
    assert (permute.is_bound, permute.times) == (True, 1)
    permute = collectives_of(text, branch_shares={"cond$": (0.75, 0.25)})["collective-permute"]
    assert (permute.is_bound, permute.times) == (False, 0.25), (
        "shares are in JAX's order, false before true"
    )


def test_source_lines_are_read_from_the_tables_before_the_program():
    found = collectives_of("""
        HloModule step, num_partitions=8

        FileNames
        1 "/src/other.py"
        2 "/src/model.py"

        FunctionNames
        1 "loss"

        FileLocations
        1 {file_name_id=2 function_name_id=1 line=12 end_line=12 column=4 end_column=8}

        StackFrames
        1 {file_location_id=1 parent_frame_id=1}

        ENTRY %main (x: f32[32]) -> f32[32] {
          %x = f32[32]{0} parameter(0)
          ROOT %sum = f32[32]{0} all-reduce(%x), replica_groups={}, to_apply=%add,
              metadata={op_name="jit(f)/w[\\'b\\']/psum" stack_frame_id=1}
        }
        """)
    assert (found["all-reduce"].source, found["all-reduce"].op_name) == (
        "/src/model.py:12",
        "jit(f)/w['b']/psum",
    )


def flops_of(parameters: list[str], result: str, call: str) -> tuple[int, frozenset[str]]:
    lines = [f"  %p{index} = {shape} parameter({index})" for index, shape in enumerate(parameters)]
    operands = ", ".join(f"%p{index}" for index in range(len(parameters)))
    entry = [*lines, f"  ROOT %out = {result} custom-call({operands}), {call}"]
    flops = count_flops(
        parse_module("\n".join(["HloModule gpu", "ENTRY %main () -> f32[] {", *entry, "}"]))
    )
    assert flops["flops"] == flops["flops_least"]
    return flops["flops"], frozenset(flops["uncounted_calls"])


def library_call(target: str, key: str, **dims: list[int]) -> str:
    """Returns the attributes of a call whose backend config tells the dims of its product under `key`."""
    named = {f"{name}_dimensions": [str(dim) for dim in listed] for name, listed in dims.items()}
    return f'custom_call_target="{target}", backend_config={json.dumps({"config": {key: named}}, separators=(",", ":"))}'


def test_flops_of_a_product_by_cublas():
    dims = {"lhs_contracting": [2], "rhs_contracting": [1], "lhs_batch": [0], "rhs_batch": [0]}
    call = library_call("__cublas$lt$matmul", "dot_dimension_numbers", **dims)
    result = "(bf16[4,32,64], s8[1024])"
    assert flops_of(["bf16[4,32,16]", "bf16[4,16,64]"], result, call) == (
        2 * 4 * 32 * 16 * 64,
        frozenset(),
    )


def test_flops_of_a_convolution_by_cudnn_are_the_same_in_each_direction():
    image, kernel, output = "f32[8,16,16,4]", "f32[32,3,3,4]", "f32[8,16,16,32]"
    met = (
        16 * 3 - 2
    ) ** 2  # along each dim every place meets 3 kernel elements, but the two edges meet 2
    for target, operands, result in (
        ("__cudnn$convForward", [image, kernel], output),
        ("__cudnn$convBackwardInput", [output, kernel], image),
        ("__cudnn$convBackwardFilter", [image, output], kernel),
    ):
        call = f'window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, custom_call_target="{target}"'
        assert flops_of(operands, f"({result}, u8[0])", call) == (2 * 8 * 32 * 4 * met, frozenset())


def test_flops_of_fused_attention_by_cudnn():
    query, keys = "bf16[2,128,4,64]", "bf16[2,256,4,64]"
    one_product = 2 * 2 * 4 * 128 * 256 * 64
    dims = {
        "lhs_contracting": [3],
        "rhs_contracting": [3],
        "lhs_batch": [0, 2],
        "rhs_batch": [0, 2],
    }
    call = library_call("__cudnn$fmhaSoftmax", "bmm1_dot_dimension_numbers", **dims)
    assert flops_of([query, keys, keys], f"({query}, u8[0])", call) == (
        2 * one_product,
        frozenset(),
    )
    call = library_call(
        "__cudnn$fmhaSoftmaxBackward", "bmm2_grad_gemm2_dot_dimension_numbers", **dims
    )
    assert flops_of([query, keys, keys], f"({query}, {keys}, {keys})", call) == (
        5 * one_product,
        frozenset(),
    )


# A chunk of 128 of a context axis has 0 and 384 keys before it on one device, and 128 and 256 on the other.
@pytest.mark.parametrize(
    ("mask", "num_keys", "scores"),
    [
        ("CAUSAL", 128, 128 * 129 // 2),
        ("PADDING", 512, 128 * 384 // 2),
        ("PADDING", 128, 128 * 128),
    ],
)
def test_a_mask_takes_its_part_off_fused_attention(mask, num_keys, scores):
    """The form in which XLA prints the call for a GPU: spaces in its JSON, and integers as strings."""
    heads, keys = "bf16[2,128,8,64]", f"bf16[2,{num_keys},4,64]"
    dims = '"lhs_contracting_dimensions": ["3"], "rhs_contracting_dimensions": ["3"]'
    dims += ', "lhs_batch_dimensions": ["0", "2"], "rhs_batch_dimensions": ["0", "2"]'
    for target, name, products in (
        ("__cudnn$fmhaSoftmax", "bmm1_dot_dimension_numbers", 2),
        ("__cudnn$fmhaSoftmaxBackward", "bmm2_grad_gemm2_dot_dimension_numbers", 5),
    ):
        config = f'{{"cudnn_fmha_backend_config": {{"mask_type": "{mask}", "{name}": {{{dims}}}}}}}'
        call = f'custom_call_target="{target}", backend_config={config}'
        assert flops_of([heads, keys, keys], f"({heads}, u8[0])", call) == (
            2 * products * 2 * 8 * 64 * scores,
            set(),
        )


@pytest.mark.parametrize(
    "call",
    [
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 2 : i32, name = "grouped_product"}',
        'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/grouped_product/mpmd_map"}',
    ],
    ids=["triton", "mosaic"],
)
def test_flops_of_rows_times_the_weights_of_their_experts(call):
    rows, weights, outputs = "bf16[256,32]", "bf16[4,32,64]", "bf16[256,64]"
    of_all = (2 * 256 * 32 * 64, frozenset())
    assert flops_of([rows, weights, "s32[2]"], outputs, call) == of_all
    assert flops_of([outputs, weights, "s32[2]"], rows, call) == of_all
    assert flops_of([rows, outputs, "s32[4]", "s32[4]"], weights, call) == of_all


def test_products_that_cannot_be_counted_are_named():
    unknown = 'custom_call_target="my_flash_attention"'
    assert flops_of(["f32[8]"], "f32[8]", unknown) == (0, frozenset({"my_flash_attention"}))
    assert flops_of(["f32[8]"], "f32[8]", 'custom_call_target="TopK"') == (0, frozenset())
