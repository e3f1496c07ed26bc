"""The bounds of a step's time, held against counts by hand."""

from dataclasses import replace

import pytest

from jaxpar.inspect import Collective, GpuProgram, Memory, StepReport
from jaxpar.inspect.gpu import Transfer, Work
from jaxpar.planner import Cluster, cluster, roofline

# Round rates: 1 TFLOP/s, 1 GB/s of memory, 100 MB/s inside a node, 10 MB/s between nodes.
MACHINES = Cluster(
    num_nodes=2,
    devices_per_node=4,
    memory_bytes=1e9,
    peak_flops=1e12,
    memory_bandwidth=1e9,
    node_bandwidth=1e8,
    network_bandwidth=1e7,
    node_latency_seconds=1e-4,
    network_latency_seconds=1e-3,
)


def collective(kind, axis, sent, times, name):
    facts = {
        "whole_axes": True,
        "conditional": False,
        "is_bound": False,
        "payload_bytes": sent,
        "group_size": 2,
    }
    facts |= {
        "shapes": (),
        "shift": None,
        "senders": None,
        "crosses_nodes": None,
        "asynchronous": True,
    }
    facts |= {"groups": "", "op_name": "", "source": "", "known_times": times, "times": times}
    return Collective(kind=kind, axes=(axis,), bytes_per_run=sent, name=name, **facts)


def transfer(kind, name, flops, num_bytes):
    return Transfer(kind, 0, 1, flops, num_bytes, "", name)


def work(flops, num_bytes, times):
    return Work(flops, num_bytes, times, "products" if flops else "other", "", "")


REPORT = StepReport(
    collectives=(
        collective(
            "all-reduce", "tensor", 1_000_000, 5, "summed"
        ),  # 12.5 ms at 0.8 of 100 MB/s, and 0.2 ms of latency
        collective(
            "collective-permute", "stage", 500_000, 2, "sent"
        ),  # across nodes: 62.5 ms, and 1 ms
        collective("all-reduce", "data", 800_000, 1, "reduced"),  # 10 ms and 0.2 ms
    ),
    memory=Memory(0, 0, 0, 0, 0),
    flops=9e10,
    flops_least=9e10,
    compiler_flops=None,
    whole_arrays=(),
    unknown_loops=(),
    uncounted_calls=(),
    axis_sizes=(("data", 2), ("stage", 2), ("tensor", 2)),
    num_devices=8,
    large_bytes=1,
    name="jit_step",
    gpu=GpuProgram(
        copies=(),
        host_waits=3,
        transfers=(
            transfer("all-reduce", "summed", 1e10, 1),
            transfer("collective-permute", "sent", 1, 4e6),
        ),
        work=(
            work(2e10, 1e6, 4),
            work(1e10, 3e7, 1),
            work(0, 5e6, 2),
        ),  # 4 x 20 ms of products, 30 ms and 2 x 5 ms of memory
    ),
)


def test_each_bound_is_that_of_a_count_by_hand():
    found = roofline(REPORT, MACHINES)
    assert found.products == pytest.approx(0.09)
    assert found.device == pytest.approx(4 * 0.020 + 0.030 + 2 * 0.005)
    of_axes = {"tensor": 5 * 0.0127, "stage": 2 * 0.0635, "data": 0.0102}
    assert dict(found.by_axes) == pytest.approx(of_axes)
    assert found.collectives == pytest.approx(sum(of_axes.values()))
    # 10 ms of products beside each of the first, 4 ms of memory beside each of the second, nothing beside the third.
    assert found.exposed == pytest.approx(5 * 0.0027 + 2 * 0.0595 + 0.0102)
    assert found.least == pytest.approx(found.collectives)
    assert found.as_compiled == pytest.approx(0.12 + found.exposed)
    assert found.most == pytest.approx(0.12 + found.collectives)
    assert found.mfu() == pytest.approx(9e10 / (1e12 * found.as_compiled))
    assert found.mfu(4.5e10) == pytest.approx(found.mfu() / 2)


def test_the_least_is_that_of_the_device_where_it_takes_longer_than_the_collectives():
    found = roofline(REPORT, replace(MACHINES, node_bandwidth=1e9, network_bandwidth=1e8))
    assert found.collectives < found.least == found.device


def test_the_text_has_the_bounds_and_what_they_leave_out():
    text = roofline(REPORT, MACHINES).render()
    assert "collectives over tensor                               63.5 ms" in text
    assert "most: none of them                                    0.321 s" in text
    assert "3 waits of the host, launches, kernels below the peak" in text


def test_a_program_for_other_devices_and_a_cluster_that_is_too_small_are_refused():
    with pytest.raises(
        ValueError, match="a roofline needs a step compiled for GPUs; got one for other devices"
    ):
        roofline(replace(REPORT, gpu=None), MACHINES)
    with pytest.raises(
        ValueError, match=r"must have the devices of the program; got 4 for 8\. Choose num_nodes=2"
    ):
        roofline(REPORT, cluster("h100", num_nodes=1, devices_per_node=4))
