"""A layout puts each layer in one place, in the order in which the schedule runs virtual stages, and finds it again."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar import LayerLayout
from jaxpar.schedule import Schedule
from tests.support.oracle import assert_same_bits
from tests.support.tiny import signatures_unchecked


@st.composite
def sizes(draw):
    """The arguments of a layout."""
    num_stages, num_chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    parts = num_stages * num_chunks
    placement = draw(st.sampled_from(["loop", "v"]))
    if draw(st.booleans()):
        return draw(st.integers(parts, 30)), num_stages, num_chunks, placement
    given = draw(
        st.lists(st.integers(0, 4), min_size=parts, max_size=parts).filter(
            lambda g: sum(g) >= parts
        )
    )
    return sum(given), num_stages, num_chunks, placement, given


@settings(max_examples=40)
@given(sizes())
def test_unpack_gives_back_what_pack_took_and_padding_holds_zeros(sizes):
    layout = LayerLayout(*sizes)
    numbers = np.arange(1, 1 + 2 * layout.num_layers, dtype=np.float32)
    layers = {"w": numbers.reshape(layout.num_layers, 2)}
    packed = layout.pack(layers)
    assert isinstance(packed, dict if layout.is_canonical else jaxpar.PackedLayers)
    w = layout.tree_of(packed)["w"]
    assert w.shape == (layout.num_positions, 2)
    np.testing.assert_array_equal(w[layout.packed_order < 0], 0)
    assert_same_bits(layout.unpack(packed), layers)
    assert isinstance(w, np.ndarray), "what lies on the host must stay there"


@settings(max_examples=40)
@given(sizes())
def test_parts_of_the_model_in_order_are_its_layers_in_order(sizes):
    layout = LayerLayout(*sizes)
    schedule = Schedule("any", layout.num_stages, 1, layout.num_chunks, (), layout.placement)
    order = layout.packed_order.reshape(
        layout.num_stages, layout.num_chunks, layout.positions_per_chunk
    )
    in_order = []
    for part in range(schedule.num_virtual_stages):
        stage, chunk = layout.stage_and_chunk(part)
        assert (stage, chunk) == schedule.stage_and_chunk(part), (
            "a layout and a schedule must mean the same by a placement"
        )
        count = layout.layer_counts[stage, chunk]
        in_order += order[stage, chunk, :count].tolist()
        assert (order[stage, chunk, count:] == -1).all()
    assert in_order == list(range(layout.num_layers))


def test_default_parts_differ_by_at_most_a_layer():
    assert LayerLayout(7, 2, 2).layers_per_virtual_stage == (2, 2, 2, 1)
    assert LayerLayout(70, 12).layers_per_virtual_stage == (6,) * 10 + (5,) * 2
    assert LayerLayout(70, 12).positions_per_chunk == 6


def test_embedding_and_head_may_count_as_layers():
    assert LayerLayout(70, 12, end_layers=(1, 1)).layers_per_virtual_stage == (5, *(6,) * 10, 5)
    assert LayerLayout(5, 2, 2, end_layers=(0, 1)).layers_per_virtual_stage == (2, 2, 1, 0)


@pytest.mark.parametrize("ends", [(0, 9), (-1, 0)])
def test_ends_that_count_for_more_than_a_part_has_are_refused(ends):
    with pytest.raises(
        ValueError,
        match=r"end_layers must be from 0 .* got .* for 4 layers in 2 virtual stages. Choose smaller",
    ):
        LayerLayout(4, 2, end_layers=ends)


def test_packed_order_is_as_the_picture_says():
    assert LayerLayout(7, 2, 2).packed_order.tolist() == [0, 1, 4, 5, 2, 3, 6, -1]
    assert LayerLayout(7, 2, 2, "v").packed_order.tolist() == [0, 1, 6, -1, 2, 3, 4, 5]


def test_even_layers_in_one_chunk_are_packed_as_they_are():
    layout = LayerLayout(8, 4)
    layers = {"w": np.ones((8, 2))}
    assert layout.is_canonical
    assert layout.pack(layers)["w"] is layers["w"]
    assert layout.unpack(layers)["w"] is layers["w"]
    assert not LayerLayout(8, 2, 2).is_canonical
    assert not LayerLayout(7, 4).is_canonical


def test_packed_layers_lie_on_the_stage_that_runs_them():
    layout, mesh = LayerLayout(7, 4), jaxpar.make_mesh(stage=4, data=2)
    packed = jax.jit(layout.pack, out_shardings=NamedSharding(mesh, PartitionSpec("stage")))(
        {"w": np.arange(1.0, 8)}
    )
    assert jax.jit(layout.unpack)(packed)["w"].tolist() == list(range(1, 8))
    for shard in packed.tree["w"].addressable_shards:
        stage = int(np.argwhere(mesh.devices == shard.device)[0][mesh.axis_names.index("stage")])
        assert shard.data.tolist() == [[1, 2], [3, 4], [5, 6], [7, 0]][stage]


def test_a_layout_can_be_a_key():
    assert {LayerLayout(4, 2, layers_per_virtual_stage=[1, 3]): "found"}[
        LayerLayout(4, 2, layers_per_virtual_stage=(1, 3))
    ] == "found"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (3, 4),
            "at least one layer for each chunk of each stage; got 3 layers for stage=4, num_chunks=1",
        ),
        ((7, 4, 2), "got 7 layers for stage=4, num_chunks=2. Choose a product of at most 7"),
        (
            (4, 2, 1, "loop", (4,)),
            r"layers_per_virtual_stage must have .*got \(4,\) for 2 virtual stages and 4 layers",
        ),
        (
            (4, 2, 1, "loop", (1, 2)),
            r"got \(1, 2\) for 2 virtual stages.*Give 2 counts that add up to 4",
        ),
        ((4, 2, 1, "loop", (5, -1)), r"got \(5, -1\)"),
        ((4, 2, 1, "loop", ()), r"got \(\) for 2 virtual stages"),
        ((4, 2, 1, "V"), "placement must be one of loop, v; got 'V'"),
        ((4, 0), "num_stages must be 1 or more; got num_stages=0"),
        ((4, 2, 0), "num_chunks must be 1 or more"),
        ((0, 1), "num_layers must be 1 or more"),
    ],
)
def test_bad_layout_is_named(arguments, told):
    with pytest.raises(ValueError, match=told):
        LayerLayout(*arguments)


def test_layers_that_are_no_integer_are_named():
    with (
        signatures_unchecked(),
        pytest.raises(TypeError, match=r"num_layers must be an integer; got num_layers=4\.0"),
    ):
        LayerLayout(4.0, 2)
