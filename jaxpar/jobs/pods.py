"""What the Kubernetes objects of this folder share: metadata, annotations, resources, environment, ports, volumes."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.jobs.job import CHECKPOINTS, COMPILED, GPUS, Job
from jaxpar.runtime.process_env import TOKEN_VARIABLE

METRICS = "metrics"  # the name of the port of the metrics
# The first process of a PID namespace ignores every signal that it has not set a handler for. In a namespace of its own, a
# program that still imports or waits for its peers would ignore SIGTERM until the grace period is over. Shared, the pod's
# pause container is the first process.
ENDS_ON_SIGTERM = {"shareProcessNamespace": True}


def named(name: str, namespace: str) -> dict[str, str]:
    """Returns the metadata of an object: its name, and its namespace if there is one."""
    return {"name": name} | ({"namespace": namespace} if namespace else {})


def check_image(image: str) -> None:
    """Raises ValueError unless a container image is named."""
    if not image:
        raise ValueError("a pod needs a container image; got none. Give one that has jaxpar: --image registry/name:tag")


def metadata(job: Job) -> dict[str, Any]:
    """Returns the metadata of a job; raises ValueError unless the job names a container image."""
    check_image(job.image)
    labels = {"labels": {"kueue.x-k8s.io/queue-name": job.queue}} if job.queue else {}
    return named(job.name, job.namespace) | labels


def about(job: Job) -> dict[str, Any]:
    """Returns the metadata of a job's pod: where Kueue places it, and where Prometheus finds its metrics."""
    annotations = topology(job) | (scraping(job.metrics_port) if job.metrics_port else {})
    return {"metadata": {"annotations": annotations}} if annotations else {}


def scraping(port: int) -> dict[str, str]:
    """Returns the annotations by which Prometheus is usually configured to find pods; process 0 of a job serves its metrics."""
    found = {"scrape": "true", "port": str(port), "path": "/metrics"}
    return {f"prometheus.io/{name}": value for name, value in found.items()}


def topology(job: Job) -> dict[str, str]:
    """Returns Kueue's annotations of a pod, which place nodes close to one another."""
    kueue = "kueue.x-k8s.io/podset"
    annotations = {f"{kueue}-preferred-topology": job.topology} if job.topology else {}
    if job.replica_topology:
        annotations |= {
            f"{kueue}-slice-required-topology": job.replica_topology,
            f"{kueue}-slice-size": str(job.nodes_per_replica),
        }
    return annotations


def resources(job: Job) -> dict[str, Any]:
    """Returns the resources of a container: the GPUs of a node, its RDMA devices, and CPU cores and memory if stated.

    Raises:
        ValueError: The memory is less than the shared memory, which counts towards it.
    """
    if 0 < job.memory_gib <= job.shm_gib:
        raise ValueError(
            f"memory_gib must be more than the shared memory, which counts towards it; got memory_gib={job.memory_gib}, "
            f"shm_gib={job.shm_gib}. Choose a larger memory_gib, or a smaller shm_gib."
        )
    limits: dict[str, Any] = {} if job.fake_devices_per_node else {GPUS: job.gpus_per_node}
    if job.rdma:
        name, count = job.rdma.split("=")
        limits[name] = int(count)
    return cpus_and_memory(job.cpus, job.memory_gib, limits)


def cpus_and_memory(cpus: int, memory_gib: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Returns the resources of a container: CPU cores as a request alone, memory (0: none of them) and others as limits too."""
    limits = ({"memory": f"{memory_gib}Gi"} if memory_gib else {}) | limits
    requests = ({"cpu": str(cpus)} if cpus else {}) | limits
    return {"requests": requests, "limits": limits} if requests else {}


def tolerations(taints: Sequence[str]) -> dict[str, Any]:
    """Returns the part of a pod's spec that lets it run on nodes with these taints."""
    return {"tolerations": [_toleration(taint) for taint in taints]} if taints else {}


def _toleration(taint: str) -> dict[str, str]:
    before, _, effect = taint.partition(":")
    key, _, value = before.partition("=")
    match = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **match} | ({"effect": effect} if effect else {})


def security(job: Job) -> dict[str, Any]:
    """Returns the part of a container that lets RDMA register memory, which locks it."""
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if job.rdma else {}


def environment(job: Job) -> list[dict[str, str]]:
    """Returns the variables that only jaxpar reads, the folder for compiled programs if it has a claim, and the user's own."""
    told = {
        "JAXPAR_INITIALIZATION_TIMEOUT": str(job.start_seconds),
        "JAXPAR_RESUME": "if-any",
        TOKEN_VARIABLE: job.token,
    }
    if job.cache_claim:
        told["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    return named_values(told | job.variables())


def named_values(variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns variables as a container takes them."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def metrics_ports(job: Job) -> list[dict[str, Any]]:
    """Returns the port of the metrics, under the name that a PodMonitor selects."""
    return [{"name": METRICS, "containerPort": job.metrics_port}] if job.metrics_port else []


def volumes(job: Job) -> list[dict[str, Any]]:
    """Returns a pod's volumes: shared memory, for NCCL, checkpoints, and compiled programs."""
    memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}}
    claims = {"checkpoints": job.checkpoint_claim, "compiled": job.cache_claim}
    return [memory, *(claim(name, of) for name, of in claims.items() if of)]


def claim(name: str, claim_name: str, **options: Any) -> dict[str, Any]:
    """Returns a volume that is a PersistentVolumeClaim."""
    return {"name": name, "persistentVolumeClaim": {"claimName": claim_name, **options}}


def mounts(job: Job) -> list[dict[str, str]]:
    """Returns a container's mounts of these volumes."""
    paths = {"shm": "/dev/shm", "checkpoints": CHECKPOINTS, "compiled": COMPILED}
    return [{"name": volume["name"], "mountPath": paths[volume["name"]]} for volume in volumes(job)]
