"""Remarks about a job that can run but may not do what was meant: flags that have no effect, and results that are lost."""

from collections.abc import Collection
from dataclasses import fields
from pathlib import PurePosixPath

from jaxpar.jobs.job import CHECKPOINTS, Job, JobSettings, flag_value

_SLURM = ("hours", "partition", "account")
_KUBERNETES = (
    "image",
    "namespace",
    "queue",
    "topology",
    "replica_topology",
    "toleration",
    "rdma",
    "checkpoint_claim",
    "cache_claim",
    "shm_gib",
)
OF_SERVICE = ("name", "image", "namespace", "checkpoint_claim", "toleration", "env")
_GROUPS = ("service", "mesh")  # of flags
# A PodMonitor takes all flags of its job, so that one command line writes both.
UNUSED = {
    "jobset": (*_SLURM, "service"),
    "trainjob": ("max_restarts", *_SLURM, "service"),
    "sbatch": (*_KUBERNETES, "service"),
    "podmonitor": ("service",),
    "service": (*(each.name for each in fields(JobSettings) if each.name not in OF_SERVICE), "mesh", "plan"),
}


def unused_flags(kind: str, given: Collection[str]) -> list[str]:
    """Returns a line that names the flags without effect on this kind of job, if there are any.

    Args:
        kind: That of ``manifest --kind``.
        given: The names of the settings that differ from their defaults.
    """
    names = [f"--{name.replace('_', '-')}" + ".*" * (name in _GROUPS) for name in UNUSED[kind] if name in given]
    return [f"not used by --kind {kind}: {', '.join(names)}"] if names else []


def slow_network(job: Job) -> list[str]:
    """Returns a line if the pods of a job may communicate by TCP where the cluster has something faster."""
    if job.num_nodes == 1 or job.rdma or job.fake_devices_per_node:
        return []
    return [
        f"{job.num_nodes} nodes and no --rdma: NCCL uses TCP between pods. If the nodes have InfiniBand or RoCE, give the "
        "resource that the cluster's device plugin offers, such as --rdma rdma/ib=8"
    ]


def lost_results(job: Job) -> list[str]:
    """Returns a line for each way in which a recipe with a claim for checkpoints still loses its work with its pods."""
    if not job.is_recipe or not job.checkpoint_claim:
        return []
    lines = []
    folder = flag_value(job.command, "--out-dir")
    if folder is None or not PurePosixPath(folder).is_relative_to(CHECKPOINTS):
        given = "no --out-dir" if folder is None else f"--out-dir {folder}"
        lines.append(
            f"the recipe has {given} and the claim is mounted at {CHECKPOINTS}: results and checkpoints are lost with the "
            f"pods. Give it a folder there, such as --out-dir {CHECKPOINTS}/{job.name}"
        )
    if all(flag_value(job.command, name) is None for name in ("--checkpoint-every", "--checkpoint-minutes")):
        lines.append(
            "the recipe has no --checkpoint-every: it saves only when asked to stop, and after a failure it begins again. "
            "Give it such as --checkpoint-every 500"
        )
    return lines
