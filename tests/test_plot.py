"""Pictures of a mesh on its nodes: every GPU is where make_mesh puts it, and each link is said to be what it is."""

import builtins

import numpy as np
import pytest

import jaxpar
from jaxpar.plot import (
    Topology,
    plot_memory,
    plot_placement,
    plot_step_time,
    render_placement,
)
from jaxpar.plot.placement import COLOURS
from jaxpar.plot.topology import rectangles


@pytest.mark.parametrize(
    "sizes", [(1, 2, 2, 2), (1, 8, 1, 1), (1, 1, 4, 2), (1, 1, 1, 8), (2, 2, 2, 1), (2, 1, 2, 2)]
)
def test_devices_are_numbered_as_make_mesh_orders_them(sizes):
    mesh = jaxpar.make_mesh(**dict(zip(("replica", "data", "stage", "tensor"), sizes, strict=True)))
    topology = Topology.of(mesh.shape, 4)
    for at, device in np.ndenumerate(mesh.devices.reshape(-1, *sizes[2:])):
        assert topology.device(*at) == device.id


def test_bloom_has_two_replicas_of_a_stage_on_a_node_and_their_shards_together():
    topology = Topology.of({"data": 8, "stage": 12, "tensor": 4}, 8)
    assert (topology.num_devices, topology.num_nodes) == (384, 48)
    assert topology.crossing("tensor") == (8 * 12 * 3, 0)
    assert topology.crossing("data") == (12 * 4 * 4, 12 * 3 * 4)
    assert topology.crossing("stage") == (0, 11 * 32)


@pytest.mark.parametrize(
    ("axes", "devices_per_node", "parts"),
    [
        ({"stage": 2, "tensor": 4}, 8, [(0, range(2), range(4))]),
        ({"stage": 3, "tensor": 4}, 8, [(0, range(2), range(4)), (1, range(2, 3), range(4))]),
        ({"stage": 1, "tensor": 8}, 4, [(0, range(1), range(4)), (1, range(1), range(4, 8))]),
    ],
)
def test_a_replica_falls_apart_in_nodes(axes, devices_per_node, parts):
    assert rectangles(Topology.of(axes, devices_per_node), 0) == parts


def test_text_names_each_node_once_where_nodes_hold_whole_parts():
    text = render_placement({"data": 8, "stage": 12, "tensor": 4}, 8)
    lines = text.splitlines()
    assert lines[0] == "data=8 x stage=12 x tensor=4: 384 GPUs on 48 nodes of 8"
    assert sum(line.startswith("node ") for line in lines) == 48
    assert "node 47  stage 11  replica 6: GPUs 376-379  replica 7: GPUs 380-383" in lines
    assert (
        "data    192 of 336 hops inside nodes, 144 across: replicas add up gradients, once a step"
        in lines
    )


def test_text_leaves_out_the_middle_of_many_nodes():
    lines = render_placement({"data": 64, "stage": 16, "tensor": 8}, 8).splitlines()
    assert "... 960 more, alike ..." in lines
    assert len(lines) < 75


@pytest.mark.parametrize(
    ("axes", "devices_per_node", "boxes"),
    [
        ({"data": 2, "stage": 2, "tensor": 2}, 8, 1),
        ({"data": 8}, 8, 1),
        ({"data": 2, "stage": 3, "tensor": 4}, 8, 3),
        (
            {"data": 3, "stage": 2, "tensor": 4},
            8,
            6,
        ),  # node 1 holds the end of one stage and the start of the next
    ],
)
def test_picture_has_a_cell_a_gpu_and_a_box_a_node(
    tmp_path, monkeypatch, axes, devices_per_node, boxes
):
    matplotlib = pytest.importorskip("matplotlib.figure")
    from matplotlib.patches import FancyBboxPatch, Rectangle

    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_placement(axes, devices_per_node, path=tmp_path / "mesh.png")
    (panel,) = drawn[0].axes
    assert sum(isinstance(patch, Rectangle) for patch in panel.patches) == np.prod(
        list(axes.values())
    )
    assert sum(isinstance(patch, FancyBboxPatch) for patch in panel.patches) == boxes
    names = [text.get_text().splitlines()[0].removeprefix("GPU ") for text in panel.texts]
    assert {str(i) for i in range(np.prod(list(axes.values())))} <= set(names)


@pytest.mark.full
def test_picture_of_thousands_says_what_it_leaves_out(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_placement(
        {"data": 16, "stage": 64, "tensor": 8}, 8, path=tmp_path / "mesh.svg", title="Llama 3 405B"
    )
    large, small = drawn[0].axes
    names = [text.get_text() for text in small.texts]
    assert "... 49 more\nstages, alike ..." in names
    assert "GPUs 8064-8191, nodes 1008-1023" in names, "the last stage is drawn"
    names = {text.get_text().removeprefix("GPU ") for text in large.texts}
    assert {str(i) for i in range(128)} <= names


def test_picture_of_hundreds_has_the_first_stage_large_and_all_of_them_small(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    from matplotlib.patches import FancyBboxPatch, Rectangle
    from matplotlib.transforms import Bbox

    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_placement({"data": 8, "stage": 12, "tensor": 4}, 8, path=tmp_path / "mesh.png")
    large, small = drawn[0].axes
    count = lambda panel, kind: sum(isinstance(patch, kind) for patch in panel.patches)
    assert (count(large, Rectangle), count(large, FancyBboxPatch)) == (32, 4)
    assert count(small, Rectangle) == 384
    assert {f"stage {i}" for i in range(12)} <= {text.get_text() for text in small.texts}
    tints = {patch.get_facecolor() for patch in small.patches if isinstance(patch, Rectangle)}
    assert len(tints) == 12 * 4, "what holds unlike weights has unlike colours"
    assert {
        patch.get_facecolor() for patch in large.patches if isinstance(patch, Rectangle)
    } < tints
    messages = [line.get_xydata() for line in small.lines]
    maps = [patch.get_bbox() for patch in small.patches]
    maps = [Bbox.union(maps[at : at + 32]) for at in range(0, 384, 32)]
    touched = [
        {
            at
            for at, box in enumerate(maps)
            for end in line[[0, -1]]
            if box.padded(1e-6).contains(*end)
        }
        for line in messages
    ]
    assert touched == [{at, at + 1} for at in range(11)]
    assert all(line.is_dashed() for line in small.lines), "from node to node"
    plot_placement(
        {"replica": 2, "data": 4, "stage": 12, "tensor": 4}, 8, path=tmp_path / "mesh.png"
    )
    small = drawn[1].axes[1]
    assert {"group 0, stage 11", "group 1, stage 11"} <= {text.get_text() for text in small.texts}
    assert "GPUs 368-383, nodes 46-47" in {text.get_text() for text in small.texts}
    assert len(small.lines) == 14, "messages stay in a group"


def test_data_links_join_the_nodes_that_hold_the_same_weights(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    from matplotlib.patches import FancyBboxPatch

    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for axes, want in (
        ({"data": 2, "stage": 2, "tensor": 8}, [(0, 1), (2, 3)]),
        ({"data": 2, "stage": 4, "tensor": 8}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"data": 4, "stage": 2, "tensor": 4}, [(0, 1), (2, 3)]),
    ):
        plot_placement(axes, 8, path=tmp_path / "mesh.png")
        (panel,) = drawn[-1].axes
        names = [
            int(text.get_text()[5:]) for text in panel.texts if text.get_text().startswith("node ")
        ]
        boxes = [
            patch.get_bbox().padded(0.11)
            for patch in panel.patches
            if isinstance(patch, FancyBboxPatch)
        ]
        at = lambda end, boxes=boxes, names=names: {
            n for n, box in zip(names, boxes, strict=True) if box.contains(*end)
        }
        links = [line for line in panel.lines if line.get_color() == COLOURS["data"]]
        ends = {line: (*at(line.get_xydata()[0]), *at(line.get_xydata()[-1])) for line in links}
        assert sorted(pair for pair in ends.values() if pair[0] != pair[1]) == want
        assert all(line.is_dashed() == (a != b) for line, (a, b) in ends.items()), (
            "dashed from node to node"
        )


def test_memory_has_a_bar_a_stage_whose_parts_add_up(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    parts = {"params": 3 * 2**30, "activations": 2 * 2**30}
    plot_memory(
        {"stage 0": parts, "stage 1": parts | {"activations": 2**30}},
        8 * 2**30,
        path=tmp_path / "memory.png",
    )
    (panel,) = drawn[0].axes
    tops = sorted(bar.get_y() + bar.get_height() for bar in panel.patches)
    assert tops == [3, 3, 4, 5]
    assert "a device has 8 GiB" in [text.get_text() for text in panel.texts]


def test_times_have_a_bar_a_plan_whose_parts_add_up(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_step_time(
        {"1": {"computing": 3.0, "data": 1.0}, "2": {"computing": 5.0}}, path=tmp_path / "time.png"
    )
    (panel,) = drawn[0].axes
    assert sorted(bar.get_x() + bar.get_width() for bar in panel.patches) == [3, 4, 5, 5]
    assert {" 4 s", " 5 s"} <= {text.get_text() for text in panel.texts}


def test_picture_is_the_same_file_each_time(tmp_path):
    for name in ("mesh.svg", "again.svg"):
        plot_placement({"data": 2, "stage": 2, "tensor": 2}, 4, path=tmp_path / name)
    assert (tmp_path / "mesh.svg").read_text().startswith("<?xml")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "mesh.svg").read_bytes()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: render_placement({"data": 0}),
            r"data must be an integer, 1 or more; got data=0\.",
        ),
        (
            lambda: plot_memory({}, 1.0, path="memory.svg"),
            r"plot_memory must get one bar or more; got none\.",
        ),
        (
            lambda: plot_step_time({}, path="time.svg"),
            r"plot_step_time must get one bar or more; got none\.",
        ),
        (
            lambda: render_placement({"model": 2}),
            r"a mesh has the axes data, stage and tensor; got \['model'\]\.",
        ),
        (
            lambda: plot_placement({"data": 2}, path="mesh.jpg"),
            r"suffix must be one of svg, png, pdf; got path='mesh.jpg'",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_picture_without_matplotlib_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match=r"plot_placement needs matplotlib; .* pip install -e '\.\[plot\]'"
    ):
        plot_placement({"data": 2}, path="mesh.svg")
