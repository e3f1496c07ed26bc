"""Published training runs: their models, meshes and batches, and the devices and the cluster of one."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

import jaxpar
from jaxpar.models import transformer
from jaxpar.planner import Cluster, cluster

AXES = ("data", "stage", "tensor")


@dataclass(frozen=True)
class Job:
    """A published training run."""

    title: str
    model: transformer.TransformerConfig
    mesh: dict[str, int]
    end_layers: tuple[int, int]  # the numbers of layers that embedding and head count as
    batch_size: int  # rows of a step, of all replicas
    seq: int
    microbatch_size: int  # rows of a microbatch, of one replica

    @property
    def num_devices(self) -> int:
        """The devices of all axes."""
        return self.mesh["data"] * self.mesh["stage"] * self.mesh["tensor"]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.batch_size // (self.mesh["data"] * self.microbatch_size)

    def num_nodes(self, gpus_per_node: int) -> int:
        """Returns the nodes that have the devices."""
        return -(-self.num_devices // gpus_per_node)


JOBS = {
    # The 3D figure of Microsoft's announcement, "DeepSpeed: Extreme-scale model training for everyone" (2020): 32 workers, 4
    # stages of 4 tensor shards, 2 replicas, ZeRO-1. It names no model; this is the 32-layer one of Brown et al. 2020, arXiv
    # 2005.14165, table 2.1: GPT-3 6.7B, with a batch of 2 million tokens.
    "deepspeed": Job(
        "DeepSpeed's 3D figure",
        transformer.preset("gpt3-6.7b", vocab_multiple=128, compute_dtype="bfloat16"),
        {"data": 2, "stage": 4, "tensor": 4},
        end_layers=(0, 0),
        batch_size=1024,
        seq=2048,
        microbatch_size=4,
    ),
    # BigScience 2022, arXiv 2211.05100, sections 3.4 and 3.5 and table 3: 48 nodes of 8 A100-80GB, ZeRO-1, embedding and head
    # counted as a layer each so that 72 divide by 12.
    "bloom": Job(
        "BLOOM-176B",
        transformer.preset("bloom-176b", vocab_multiple=128, compute_dtype="bfloat16"),
        {"data": 8, "stage": 12, "tensor": 4},
        end_layers=(1, 1),
        batch_size=2048,
        seq=2048,
        microbatch_size=2,
    ),
}


def with_mesh(job: Job, flags: Any) -> Job:
    """Returns the job on the mesh that the flags ask for; raises where it does not divide."""
    given = {axis: size for axis, size in dataclasses.asdict(flags.mesh).items() if size is not None}
    for axis, size in given.items():
        if size < 1:
            raise ValueError(f"--mesh.{axis} must be at least 1; got {size}. Choose 1 or more.")
    if flags.gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node must be at least 1; got {flags.gpus_per_node}. Choose such as 8.")
    job = dataclasses.replace(job, mesh=job.mesh | given)
    rows = job.mesh["data"] * job.microbatch_size
    if job.batch_size % rows:
        fitting = [n for n in range(1, 65) if job.batch_size % (n * job.microbatch_size) == 0]
        raise ValueError(
            f"replicas must share out a batch in whole microbatches; got --mesh.data {job.mesh['data']} for {job.batch_size} "
            f"rows in microbatches of {job.microbatch_size}. Choose --mesh.data from {', '.join(map(str, fitting))}."
        )
    divisors = [n for n in range(1, flags.gpus_per_node + 1) if flags.gpus_per_node % n == 0]
    if flags.gpus_per_node % job.mesh["tensor"] and job.mesh["tensor"] % flags.gpus_per_node:
        raise ValueError(
            f"the tensor axis must fill a node's GPUs or divide them; got --mesh.tensor {job.mesh['tensor']}, "
            f"--gpus-per-node {flags.gpus_per_node}. Choose --mesh.tensor from {', '.join(map(str, divisors))}."
        )
    return job


def mesh_of(job: Job, flags: Any) -> jax.sharding.Mesh:
    """Returns the mesh of a job, of fake devices or, with --compile-for, of GPUs that exist for the compiler alone."""
    devices = None
    if flags.compile_for:
        shape = {"num_nodes": job.num_nodes(flags.gpus_per_node), "devices_per_node": flags.gpus_per_node}
        devices = jaxpar.compile_only_devices(flags.compile_for, **shape)
    data, stage, tensor = (job.mesh[axis] for axis in AXES)
    return jaxpar.make_mesh(data=data, stage=stage, tensor=tensor, devices=devices)


def cluster_of(job: Job, flags: Any) -> Cluster:
    """Returns the GPUs to plan for."""
    return cluster(flags.gpu, job.num_nodes(flags.gpus_per_node), flags.gpus_per_node)
