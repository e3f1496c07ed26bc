"""What the Kubernetes objects of this folder share: metadata, annotations, resources, environment, ports, volumes."""

from typing import Any

from jaxpar.jobs.job import CHECKPOINTS, COMPILED, Job
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


def gpu_resources(job: Job) -> dict[str, Any]:
    """Returns the resources of a container: the GPUs of a node."""
    gpus = {"nvidia.com/gpu": job.gpus_per_node}
    return {"limits": gpus, "requests": dict(gpus)}


def environment(job: Job) -> list[dict[str, str]]:
    """Returns the variables that only jaxpar reads, and the folder for compiled programs if there is a claim for them."""
    told = {
        "JAXPAR_INITIALIZATION_TIMEOUT": str(job.start_seconds),
        "JAXPAR_RESUME": "if-any",
        TOKEN_VARIABLE: job.token,
    }
    if job.cache_claim:
        told["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    return [{"name": name, "value": value} for name, value in told.items()]


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
