"""Remarks on a manifest whose job can run but may not do what was meant: lost results, a slow network, unmet placement."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from jaxpar.jobs.agreement import paths_in
from jaxpar.jobs.job import CHECKPOINTS, GPUS, ROOT
from jaxpar.jobs.workload import FAKE_DEVICES, Workload, workloads


def remarks(manifest: Mapping[str, Any]) -> list[str]:
    """Returns a line for each way in which the pods of a manifest may not do what was meant.

    Args:
        manifest: A manifest that ``check_manifest`` takes.
    """
    return [line for pods in workloads(manifest) for line in _of(pods)]


def _of(pods: Workload) -> Iterator[str]:
    if pods.kind == "Deployment":
        yield from _unheld_folder(pods)
        return
    yield from _lost_results(pods) if pods.recipe is not None else _unheld_paths(pods)
    yield from _no_devices(pods)
    yield from _slow_network(pods)
    yield from _unused_network(pods)
    yield from _locked_memory(pods)
    yield from _unmet_placement(pods)


def _lost_results(pods: Workload) -> Iterator[str]:
    """Yields a line for each way in which a recipe loses its work with its pods."""
    folder = pods.flag("--out-dir")
    given, place = "no --out-dir" if folder is None else f"--out-dir {folder}", f"{CHECKPOINTS}/{pods.name}"
    if not pods.folders:
        yield (
            f"the recipe has {given} and there is no --checkpoint-claim: results and checkpoints are lost with the pods. "
            f"Name a claim, --checkpoint-claim runs, and a folder in it, --out-dir {place}"
        )
        return
    if folder is None or pods.folder_of(folder) is None:
        mounts = " and ".join(sorted(map(str, pods.folders)))
        yield (
            f"the recipe has {given} and the claim is mounted at {mounts}: results and checkpoints are lost with the pods. "
            f"Give it a folder there, such as --out-dir {place}"
        )
    every = pods.flag("--checkpoint-every")
    if every in (None, "0") and pods.flag("--checkpoint-minutes") in (None, "0"):
        has = "no --checkpoint-every" if every is None else "--checkpoint-every 0"
        yield (
            f"the recipe has {has}: it saves only when asked to stop, and after a failure it begins again. "
            "Give it such as --checkpoint-every 500"
        )


def _unheld_paths(pods: Workload) -> Iterator[str]:
    """Yields a line if a program of one's own names the folder of the claim, and there is none."""
    named = paths_in(pods, CHECKPOINTS)
    if named and not pods.folders:
        yield (
            f"the command names {named[0]} and there is no --checkpoint-claim: what is written there is lost with the "
            "pods. Name a claim: --checkpoint-claim runs"
        )


def _unheld_folder(pods: Workload) -> Iterator[str]:
    """Yields a line if the folder that is served is in no volume."""
    folder = pods.served or ""
    if pods.folder_of(folder) is not None:
        return
    mounts = " and ".join(sorted(map(str, pods.folders)))
    claim = f"the claim is mounted at {mounts}" if mounts else "there is no --checkpoint-claim"
    name = PurePosixPath(folder).name
    yield (
        f"the folder to serve is {folder} and {claim}: it must be in the image. If it is on a volume, name its claim, and give "
        f"the folder below {CHECKPOINTS}: --checkpoint-claim runs ... jaxpar serve {CHECKPOINTS}/{name}"
    )


def _no_devices(pods: Workload) -> Iterator[str]:
    """Yields a line if pods get no GPUs, as far as the manifest tells."""
    if pods.devices is None:
        yield f"{pods.path} requests no {GPUS}: pods get no GPUs, unless by another resource"


def _slow_network(pods: Workload) -> Iterator[str]:
    """Yields a line if pods may communicate by TCP where the cluster has something faster."""
    if (pods.num_pods or 1) > 1 and not _networks(pods) and FAKE_DEVICES not in pods.variables:
        yield (
            f"{pods.num_pods} nodes and no --rdma: NCCL uses TCP between pods. If the nodes have InfiniBand or RoCE, give the "
            "resource that the cluster's device plugin offers, such as --rdma rdma/ib=8"
        )


def _networks(pods: Workload) -> list[str]:
    """Returns the resources of device plugins beside the GPUs."""
    return [name for name in {**pods.requests, **pods.limits} if "/" in name and name != GPUS]


def _unused_network(pods: Workload) -> Iterator[str]:
    """Yields a line if pods of a rehearsal wait for nodes with a network that they do not use."""
    if FAKE_DEVICES in pods.variables and _networks(pods):
        yield (
            f"fake devices communicate by TCP, and {_networks(pods)[0]} is requested: pods wait for nodes that have it. Leave "
            "it out"
        )


def _locked_memory(pods: Workload) -> Iterator[str]:
    """Yields a line if pods may not lock the memory that RDMA needs."""
    rdma = _networks(pods)
    if rdma and pods.user not in (None, ROOT):
        yield (
            f"{rdma[0]} and --run-as-user {pods.user}: only root gets IPC_LOCK, the right to lock memory. RDMA works if the "
            "nodes' container runtime sets no limit to locked memory (ulimit -l unlimited); else leave --run-as-user out"
        )


def _unmet_placement(pods: Workload) -> Iterator[str]:
    """Yields a line if pods shall be close together and nothing may see to it."""
    if not pods.is_queued and any(name.startswith("kueue.x-k8s.io/") for name in pods.annotations):
        yield (
            "--topology or --replica-topology, and no --queue: Kueue places the pods of jobs that it admits, and it admits "
            "those without a queue only if the cluster or the namespace has one for them. Else the pods are anywhere. Name the "
            "queue: --queue research"
        )
