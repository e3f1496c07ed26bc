"""The five axes, and the order of devices on them."""

import inspect
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxpar
from jaxpar.fields import given_by
from jaxpar.mesh import check_mesh, node_of
from tests.support import tiny


def device_of(process: int, index: int, **attributes):
    """A stand-in for a device of another process."""
    device = mock.Mock(spec=jax.Device, process_index=process, id=index, platform="cpu")
    for name, value in attributes.items():
        setattr(device, name, value)
    return device


TWO_NODES_OF_FOUR = [device_of(index // 4, index) for index in range(8)]


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_axes_are_replica_data_context_stage_tensor_of_auto_type_also_where_their_size_is_one():
    mesh = jaxpar.make_mesh()
    assert mesh.axis_names == ("replica", "data", "context", "stage", "tensor")
    assert dict(mesh.shape) == dict.fromkeys(mesh.axis_names, 1)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_tensor_is_fastest_then_data_then_stage():
    devices = ids(jaxpar.make_mesh(data=2, stage=2, tensor=2))
    assert devices.shape == (1, 2, 1, 2, 2), "as many axes as ever, of which two have size 1"
    assert devices.squeeze().tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], (
        "[data, stage, tensor]"
    )


def test_replica_is_slowest_and_context_next_to_tensor():
    assert ids(jaxpar.make_mesh(replica=2, data=2, tensor=2)).squeeze().tolist() == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    grouped = ids(jaxpar.make_mesh(replica=2, data=2, stage=2)).squeeze()
    assert grouped.tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]], "[replica, data, stage]"
    assert ids(jaxpar.make_mesh(data=2, context=2, tensor=2)).ravel().tolist() == list(range(8))
    by_context = ids(jaxpar.make_mesh(context=2, stage=2, tensor=2)).squeeze()
    assert by_context.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], "[context, stage, tensor]"


@pytest.mark.parametrize("axis", ["data", "stage", "tensor"])
def test_minus_one_takes_the_devices_that_are_left(axis):
    sizes = {"data": 2, "stage": 1, "tensor": 1} | {"data" if axis != "data" else "tensor": 2}
    assert jaxpar.make_mesh(**(sizes | {axis: -1})).shape[axis] == 4


def test_a_mesh_of_fewer_devices_takes_the_first_ones():
    assert ids(jaxpar.make_mesh(data=3)).ravel().tolist() == [0, 1, 2]


def test_the_order_in_which_devices_are_given_does_not_matter():
    shuffled = [jax.devices()[i] for i in (5, 2, 7, 0)]
    assert ids(jaxpar.make_mesh(tensor=4, devices=shuffled)).ravel().tolist() == [0, 2, 5, 7]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 16},
            r"at most the number of devices; got data=16, stage=1, tensor=1, which needs 16 devices, with 8",
        ),
        ({"data": 16}, r"--fake-devices 16 in recipes, jaxpar.use_fake_devices\(16\) in code"),
        (
            {"data": 0},
            r"must be positive, or -1 for the rest; got data=0, stage=1, tensor=1. Choose data=1 or more",
        ),
        ({"tensor": -2}, r"must be positive, or -1 for the rest; got data=1, stage=1, tensor=-2"),
        (
            {"data": -1, "tensor": -1},
            r"only one mesh axis can be -1.*Give a size to all but one of \['data', 'tensor'\]",
        ),
        (
            {"data": -1, "tensor": 3},
            r"fixed mesh axes must divide.*tensor=3 with 8 devices. Choose sizes whose product",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.make_mesh(**sizes)


@pytest.mark.parametrize("size", [2.0, "2", True])
def test_a_size_that_is_not_an_integer_is_refused(size):
    message = f"mesh axis sizes must be integers; got data={size!r}. Write data=2, or data=-1"
    with tiny.signatures_unchecked(), pytest.raises(TypeError, match=message):
        jaxpar.make_mesh(data=size)


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        (
            {"tensor": 8},
            r"Choose --mesh.tensor 4, which divides the devices of a node, 4, or .* launch -n 1 --devices-per-process 8\.$",
        ),
        (
            {"data": 2, "tensor": 6},
            r"processes of 6 devices: python -m jaxpar launch -n 2 --devices-per-process 6\.$",
        ),
    ],
)
def test_a_recipe_in_launched_processes_is_told_the_flag_of_launch(sizes, remedy):
    with given_by({"tensor": "--mesh.tensor"}), pytest.raises(ValueError, match=remedy):
        jaxpar.make_mesh(**sizes, devices=TWO_NODES_OF_FOUR)


def test_a_tensor_axis_that_leaves_a_node_is_refused():
    message = "must stay inside a node.*got tensor=8, which puts devices 0 to 7 on nodes 0, 1. .*pass tensor_across_nodes=True"
    with pytest.raises(ValueError, match=message):
        jaxpar.make_mesh(tensor=8, devices=TWO_NODES_OF_FOUR)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 8, "tensor_across_nodes": True}, {"data": 2, "tensor": 4}]
)
def test_a_tensor_axis_inside_nodes_or_asked_to_leave_them_is_made(monkeypatch, sizes):
    here = jaxpar.make_mesh()
    asked = {}
    monkeypatch.setattr(
        jax, "make_mesh", lambda *_, devices, **__: asked.update(devices=devices) or here
    )
    jaxpar.make_mesh(**sizes, devices=TWO_NODES_OF_FOUR[::-1])
    assert [d.id for d in asked["devices"]] == list(range(8)), "nodes should stay together"


def test_a_mesh_that_leaves_a_process_without_devices_is_refused():
    message = r"every process must own a device of the mesh; got a mesh of 4 of 8 devices, which leaves out process \[1\]"
    with pytest.raises(ValueError, match=message):
        jaxpar.make_mesh(data=4, devices=TWO_NODES_OF_FOUR)


def test_a_node_is_the_fast_link_domain_on_gpus_and_the_process_elsewhere():
    assert node_of(device_of(3, 0, platform="gpu", partition_index=1)) == 1
    assert node_of(device_of(3, 0, platform="gpu", partition_index=None, slice_index=2)) == 2
    assert node_of(device_of(3, 0, platform="cpu", partition_index=1)) == 3


def test_only_a_mesh_with_the_five_auto_axes_is_accepted():
    check_mesh(jaxpar.make_mesh(data=2))
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    with pytest.raises(
        ValueError,
        match=r"must have the axes \('replica', 'data', 'context', .*; got \('x', 'y', 'z'\)",
    ):
        check_mesh(Mesh(devices, ("x", "y", "z")))
    axes = jaxpar.make_mesh().axis_names
    with pytest.raises(
        ValueError, match=r"must be of type Auto; got .*Explicit.* which plain jax.make_mesh gives"
    ):
        check_mesh(jax.make_mesh((1, 2, 1, 2, 2), axes, axis_types=(AxisType.Explicit,) * 5))


def test_what_is_not_a_mesh_is_refused():
    message = "mesh must be a jax.sharding.Mesh; got dict. Make one with jaxpar.make_mesh"
    with tiny.signatures_unchecked(), pytest.raises(TypeError, match=message):
        check_mesh({"data": 2})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, "stage") for name in ("pipe", "pp", "pipeline", "stages", "stag")),
        *((name, "tensor") for name in ("tp", "mp", "model", "model_parallel", "Tensor")),
        *((name, "data") for name in ("dp", "batch", "fsdp", "replicas", "dat")),
        ("device", "devices"),
    ],
)
def test_an_axis_by_another_library_s_name_is_refused_with_ours(name, meant):
    message = rf"the axes of a mesh are replica, data, context, stage, tensor; got {name}=4\. Did you mean {meant}=4\?"
    with pytest.raises(TypeError, match=message) as refused:
        jaxpar.make_mesh(**{name: 4})
    assert ("zero=3" in str(refused.value)) == (name == "fsdp"), (
        "the axis alone does not shard the parameters"
    )


def test_all_axes_by_other_names_are_corrected_in_one_message():
    with pytest.raises(TypeError, match=r"; got dp=2, pp=4\. Did you mean data=2, stage=4\?$"):
        jaxpar.make_mesh(dp=2, pp=4)
    with pytest.raises(
        TypeError,
        match=r"; got tp=2, expert=4\. Did you mean tensor=2\? Choose one of these for expert\.$",
    ):
        jaxpar.make_mesh(data=2, tp=2, expert=4)


def test_an_axis_that_is_like_no_other_is_refused_with_all():
    with pytest.raises(
        TypeError, match=r"context, stage, tensor; got expert=2\. Choose one of these\."
    ):
        jaxpar.make_mesh(expert=2)


def test_sizes_without_names_are_refused():
    message = r"the axes of a mesh are given by name: replica, data, .*, tensor; got 2, 4\. Write make_mesh\(data=2, stage=4\)"
    with pytest.raises(TypeError, match=message):
        jaxpar.make_mesh(2, 4)


def test_the_signature_names_the_axes():
    names = list(inspect.signature(jaxpar.make_mesh).parameters)
    assert names[:5] == ["replica", "data", "context", "stage", "tensor"]
