"""Remarks on what the pods of a job have of their nodes: GPUs, CPU cores, shared memory, and the network between them."""

from collections.abc import Iterator, Mapping

from jaxpar.jobs.job import GPUS, ROOT, is_accelerator
from jaxpar.jobs.workload import FAKE_DEVICES, SHARED_MEMORY, Workload, amount

LOCKS = "IPC_LOCK"
PLATFORMS = (
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
)  # the second is an older name, which JAX reads too
OF_GPUS = ("cuda", "gpu")  # in JAX_PLATFORMS
HIDING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def resource_remarks(pods: Workload) -> Iterator[str]:
    """Yields a line for each way in which pods lack, or hide from their program, what it needs of their nodes."""
    yield from _no_devices(pods)
    yield from hidden_devices(pods)
    yield from _few_cores(pods)
    yield from _slowed(pods)
    yield from _less_memory(pods)
    yield from _no_shared_memory(pods)
    yield from _slow_network(pods)
    yield from _unused_network(pods)
    yield from _locked_memory(pods)


def _no_devices(pods: Workload) -> Iterator[str]:
    """Yields a line if pods get no GPUs, as far as the manifest tells."""
    if pods.devices is None:
        yield f"{pods.path} requests no {GPUS}: pods get no GPUs, unless by another resource"


def hidden_devices(pods: Workload) -> Iterator[str]:
    """Yields a line for each variable that keeps the program from the GPUs of its pod."""
    each = pods.devices
    if each is None or each[1] != GPUS or each[0] == 0:
        return
    yield from unused_gpus(pods.path, pods.variables, f"{each[0]} GPUs a pod")
    for name in HIDING:
        if (value := pods.variables.get(name)) not in (None, "all"):
            yield (
                f"{pods.path} has {name}={value}, and the device plugin says which of the {each[0]} GPUs a pod sees: the "
                "program may not find its devices. Leave the variable out"
            )


def unused_gpus(place: str, variables: Mapping[str, str], gpus: str) -> Iterator[str]:
    """Yields a line if variables keep JAX from GPUs.

    Args:
        place: What has the variables.
        variables: The variables.
        gpus: How many GPUs there are, as in "8 GPUs a pod".
    """
    for variable in PLATFORMS:
        platforms = variables.get(variable)
        if platforms and not any(name in platforms.split(",") for name in OF_GPUS):
            yield (
                f"{place} has {variable}={platforms} and {gpus}: the program does not use them. Leave the variable out"
            )


def _few_cores(pods: Workload) -> Iterator[str]:
    """Yields a line if pods with GPUs are guaranteed less than a CPU core, as by 96m in place of 96."""
    each, cores = pods.devices, {**pods.limits, **pods.requests}.get("cpu")
    if each is None or each[1] != GPUS or each[0] == 0 or cores is None:
        return
    number = amount(cores, "cpu")
    if number < 1:
        yield (
            f"{pods.path} requests {cores} CPU, {number:.3g} of a core, for {each[0]} GPUs a pod: where its node is busy it "
            "gets no more. Write a number of cores without m, such as 96"
        )


def _slowed(pods: Workload) -> Iterator[str]:
    """Yields a line if the kernel holds a process to a number of CPU cores."""
    if limit := pods.limits.get("cpu"):
        yield (
            f"{pods.path} has a limit of {limit} CPU cores: once they are used up the kernel stops the process for the rest of "
            "each tenth of a second, unless its node reserves cores for it (the static policy of the CPU manager), and all "
            "others wait for it. Leave the limit out, and request the cores"
        )


def _less_memory(pods: Workload) -> Iterator[str]:
    """Yields a line if pods request less memory than they may use, which their nodes then may not have."""
    requested, limit = (of.get("memory") for of in (pods.requests, pods.limits))
    if requested is None or limit is None:
        return
    if amount(requested, "memory") < amount(limit, "memory"):
        yield (
            f"{pods.path} requests memory {requested} and may use {limit}: nodes and queues count {requested}, and a pod that "
            "uses more is ended when its node has no more. Request as much as the limit"
        )


def _no_shared_memory(pods: Workload) -> Iterator[str]:
    """Yields a line if the GPUs of a pod have the shared memory of the container runtime alone."""
    each = pods.devices
    if (
        each is not None
        and each[1] == GPUS
        and each[0] > 1
        and SHARED_MEMORY not in pods.mounted_at
    ):
        yield (
            f"{pods.path} has nothing at {SHARED_MEMORY}: NCCL needs more than the usual 64 MiB there for {each[0]} GPUs. "
            "Mount an emptyDir whose medium is Memory"
        )


def _slow_network(pods: Workload) -> Iterator[str]:
    """Yields a line if pods may communicate by TCP where the cluster has something faster."""
    if (pods.num_pods or 1) > 1 and not _networks(pods) and FAKE_DEVICES not in pods.variables:
        yield (
            f"{pods.num_pods} nodes and no --rdma: NCCL uses TCP between pods. If the nodes have InfiniBand or RoCE, give the "
            "resource that the cluster's device plugin offers, such as --rdma rdma/ib=8"
        )


def _networks(pods: Workload) -> list[str]:
    """Returns the resources of device plugins beside GPUs of any kind, of which a pod gets some."""
    given = {**pods.requests, **pods.limits}
    others = [name for name in given if "/" in name and not is_accelerator(name)]
    return [name for name in others if amount(given[name], name) > 0]


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
    rights = pods.security.get("capabilities", {}).get("add", [])
    if rdma and pods.user is None:
        and_else = ", and leave runAsNonRoot out" if pods.security.get("runAsNonRoot") else ""
        yield (
            f"{rdma[0]} and no runAsUser{unless_of_runtime(pods)}: the image says which user it is, and only root gets "
            f"{LOCKS}, the right to lock memory. If the image has another user, RDMA works only if the nodes' container "
            "runtime sets no limit to locked memory (ulimit -l unlimited). Write runAsUser: 0 in the securityContext of the pod"
            f"{and_else}"
        )
    elif rdma and pods.user != ROOT:
        yield (
            f"{rdma[0]} and --run-as-user {pods.user}: only root gets IPC_LOCK, the right to lock memory. RDMA works if the "
            "nodes' container runtime sets no limit to locked memory (ulimit -l unlimited); else leave --run-as-user out"
        )
    elif (
        rdma
        and pods.user == ROOT
        and not pods.security.get("privileged")
        and not {LOCKS, "ALL"}.intersection(rights)
    ):
        yield (
            f"{rdma[0]} and no {LOCKS}: without this right RDMA may not lock memory, unless the nodes' container runtime sets "
            "no limit (ulimit -l unlimited). Add it to the capabilities of the container"
        )


def unless_of_runtime(pods: Workload) -> str:
    """Returns what follows the name of a field that pods do not have: the runtime of a TrainJob may have it."""
    return ", unless the runtime sets it" if pods.is_of_runtime else ""
