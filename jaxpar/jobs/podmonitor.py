"""A PodMonitor (monitoring.coreos.com/v1), by which the Prometheus Operator finds the metrics of a JobSet.

It selects the pod of process 0, which serves the metrics of the whole run. Annotations cannot select one pod of a Job, so with
them the other pods are targets that are down.
"""

from typing import Any

from jaxpar.jobs.job import Job
from jaxpar.jobs.pods import METRICS, named

SCRAPE_INTERVAL = "30s"


def to_podmonitor(job: Job) -> dict[str, Any]:
    """Returns the PodMonitor of a job.

    Raises:
        ValueError: The job serves no metrics.

    Reference:
        The labels are those that JobSet and Kubernetes 1.28 or newer give to a pod.
    """
    if not job.metrics_port:
        raise ValueError(
            "a PodMonitor needs the port of the metrics; got none. Give the job's, such as --metrics-port 9090."
        )
    pods = {"jobset.sigs.k8s.io/jobset-name": job.name, "batch.kubernetes.io/job-completion-index": "0"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": named(job.name, job.namespace),
        "spec": {
            "selector": {"matchLabels": pods},
            "podMetricsEndpoints": [{"port": METRICS, "path": "/metrics", "interval": SCRAPE_INTERVAL}],
        },
    }
