"""A JobSet (jobset.x-k8s.io/v1alpha2): one Job with one pod per node, all restarted together when one is lost.

The reaction to the end of a pod, by the exit codes of `jaxpar.runtime.exit_codes`:

    2, 65, 74, 86           the JobSet fails: a restart would end the same way, or needs inspection first
    75, or a drained node   all pods restart, and it does not count: nothing is wrong with the run
    anything else           all pods restart, at most max_restarts times

A Job alone would replace only the lost pod, and its peers cannot continue with a new one.
"""

from typing import Any

from jaxpar.jobs.job import CHECKPOINTS, COMPILED, PORT, Job
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode
from jaxpar.runtime.process_env import TOKEN_VARIABLE

NODES = "nodes"  # the one Job of the set; its pods are <name>-nodes-0-<number>
CONTAINER = "train"
METRICS = "metrics"  # the name of the port of the metrics
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def to_jobset(job: Job) -> dict[str, Any]:
    """Returns the job as a JobSet, to be written as YAML or JSON.

    Raises:
        ValueError: The job names no image.
    """
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(job),
            # One replica, since pods are numbered within a Job.
            "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": _job(job)}}],
        },
    }


def metadata(job: Job) -> dict[str, Any]:
    """Returns the metadata of a job for Kubernetes; raises ValueError unless the job names a container image."""
    if not job.image:
        raise ValueError("a pod needs a container image; got none. Give one that has jaxpar: --image registry/name:tag")
    namespace = {"namespace": job.namespace} if job.namespace else {}
    labels = {"labels": {"kueue.x-k8s.io/queue-name": job.queue}} if job.queue else {}
    return {"name": job.name} | namespace | labels


def _failure_policy(job: Job) -> dict[str, Any]:
    codes = "|".join(str(int(code)) for code in FINAL_CODES)
    return {
        "maxRestarts": job.max_restarts,
        "rules": [
            {
                "name": "final",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f".*failed with exit code ({codes}) matching.*"],
            },
            {
                "name": "taken-away",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _job(job: Job) -> dict[str, Any]:
    fail = lambda codes: {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [int(code) for code in codes]},
    }
    about = {"metadata": {"annotations": annotations(job)}} if annotations(job) else {}
    return {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                fail(FINAL_CODES),
                fail((ExitCode.PREEMPTED,)),
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": about | {"spec": _pod(job)},
    }


def annotations(job: Job) -> dict[str, str]:
    """Returns the annotations of a pod: where Kueue places it, and where Prometheus finds its metrics."""
    return topology(job) | scraping(job)


def scraping(job: Job) -> dict[str, str]:
    """Returns the annotations by which Prometheus is usually configured to find pods; process 0 serves the metrics."""
    if not job.metrics_port:
        return {}
    found = {"scrape": "true", "port": str(job.metrics_port), "path": "/metrics"}
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


def _pod(job: Job) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": job.gpus_per_node}
    return {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [
            {
                "name": CONTAINER,
                "image": job.image,
                "command": job.arguments(),
                "env": _environment(job),
                "ports": [{"containerPort": PORT}, *metrics_ports(job)],
                "resources": {"limits": gpus, "requests": dict(gpus)},
                "volumeMounts": mounts(job),
            }
        ],
        "volumes": volumes(job),
    }


def _environment(job: Job) -> list[dict[str, Any]]:
    field = lambda path: {"valueFrom": {"fieldRef": {"fieldPath": path}}}
    return [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{job.name}-{NODES}-0-0.{job.name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(job.num_nodes)},
        {"name": "JAX_PROCESS_ID", **field(INDEX)},
        {"name": "POD_IP", **field("status.podIP")},
        {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": f"$(POD_IP):{PORT}"},
        *own_environment(job),
    ]


def own_environment(job: Job) -> list[dict[str, str]]:
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
    claim = lambda name, of: {"name": name, "persistentVolumeClaim": {"claimName": of}}
    return [memory, *(claim(name, of) for name, of in claims.items() if of)]


def mounts(job: Job) -> list[dict[str, str]]:
    """Returns a container's mounts of these volumes."""
    paths = {"shm": "/dev/shm", "checkpoints": CHECKPOINTS, "compiled": COMPILED}
    return [{"name": volume["name"], "mountPath": paths[volume["name"]]} for volume in volumes(job)]
