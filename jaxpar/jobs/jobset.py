"""A JobSet (jobset.x-k8s.io/v1alpha2): one Job with one pod per node, all restarted together when one is lost.

The reaction to the end of a pod, by the exit codes of `jaxpar.runtime.exit_codes`:

    2, 65, 74, 86           the JobSet fails: a restart would end the same way, or needs inspection first
    75, or a drained node   all pods restart, and it does not count: nothing is wrong with the run
    anything else           all pods restart, at most max_restarts times

A Job alone would replace only the lost pod, and its peers cannot continue with a new one.
"""

from typing import Any

from jaxpar.jobs.job import PORT, Job
from jaxpar.jobs.pods import (
    ENDS_ON_SIGTERM,
    about,
    environment,
    metadata,
    metrics_ports,
    mounts,
    resources,
    security,
    tolerations,
    volumes,
)
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode

NODES = "nodes"  # the one Job of the set; its pods are <name>-nodes-0-<number>.<name>-nodes
CONTAINER = "train"
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
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": _subdomain(job)},
            "failurePolicy": _failure_policy(job),
            # One replica, since pods are numbered within a Job.
            "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": _job(job)}}],
        },
    }


def _subdomain(job: Job) -> str:
    """Returns the name of the pods' headless Service: not the job's own, so that a Service may serve the model under that."""
    return f"{job.name}-{NODES}"


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
        "template": about(job) | {"spec": _pod(job)},
    }


def _pod(job: Job) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "subdomain": _subdomain(job),
        "terminationGracePeriodSeconds": job.grace_seconds,
        **ENDS_ON_SIGTERM,
        **tolerations(job.toleration),
        "containers": [
            {
                "name": CONTAINER,
                "image": job.image,
                "command": job.arguments(),
                "env": _environment(job),
                "ports": [{"containerPort": PORT}, *metrics_ports(job)],
                "resources": resources(job),
                **security(job),
                "volumeMounts": mounts(job),
            }
        ],
        "volumes": volumes(job),
    }


def _environment(job: Job) -> list[dict[str, Any]]:
    field = lambda path: {"valueFrom": {"fieldRef": {"fieldPath": path}}}
    return [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{job.name}-{NODES}-0-0.{_subdomain(job)}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(job.num_nodes)},
        {"name": "JAX_PROCESS_ID", **field(INDEX)},
        {"name": "POD_IP", **field("status.podIP")},
        {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": f"$(POD_IP):{PORT}"},
        *environment(job),
    ]
