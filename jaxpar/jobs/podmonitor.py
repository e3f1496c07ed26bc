"""A PodMonitor (monitoring.coreos.com/v1), by which the Prometheus Operator finds the metrics of a JobSet.

It selects the pod of process 0, which serves the metrics of the whole run. Annotations cannot select one pod of a Job, so with
them the other pods are targets that are down.

Every series gets the label ``run``, the name of the JobSet, by which the dashboard and the alerts name a run: the address of a
pod changes with each restart.
"""

from typing import Any

from jaxpar.jobs.job import JobSettings, check_settings
from jaxpar.jobs.pods import METRICS, named

SCRAPE_INTERVAL = "30s"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
RUN_LABEL = {"sourceLabels": ["__meta_kubernetes_pod_label_jobset_sigs_k8s_io_jobset_name"], "targetLabel": "run"}


def to_podmonitor(job: JobSettings) -> dict[str, Any]:
    """Returns the PodMonitor of a job. It depends on the job's name, namespace and port of metrics alone.

    Raises:
        ValueError: The job serves no metrics, or a setting is not well-formed.

    Reference:
        The labels are those that JobSet and Kubernetes 1.28 or newer give to a pod.
    """
    check_settings(job)
    if not job.metrics_port:
        raise ValueError(
            "a PodMonitor needs the port of the metrics; got none. Give the job's, such as --metrics-port 9090."
        )
    pods = {JOBSET_NAME: job.name, "batch.kubernetes.io/job-completion-index": "0"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": named(job.name, job.namespace),
        "spec": {
            "selector": {"matchLabels": pods},
            "podMetricsEndpoints": [
                {"port": METRICS, "path": "/metrics", "interval": SCRAPE_INTERVAL, "relabelings": [RUN_LABEL]}
            ],
        },
    }
