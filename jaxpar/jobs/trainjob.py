"""A Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1) on its runtime for JAX, which sets the JAX_ variables itself.

The runtime controls restarts: its JobSet has the failure policy, which a TrainJob cannot change. Nor does the API let one set
``shareProcessNamespace`` (see ``ENDS_ON_SIGTERM`` in `pods.py`): set it in the runtime's pod template.
"""

from typing import Any

from jaxpar.jobs.job import Job
from jaxpar.jobs.pods import about, environment, metadata, mounts, resources, security, tolerations, volumes

RUNTIME = "jax-distributed"
MANAGER = "jaxpar.dev/manifest"  # the manager of the patch to the runtime's template
JOB, CONTAINER = "node", "node"  # their names in Kubeflow's runtimes


def to_trainjob(job: Job) -> dict[str, Any]:
    """Returns the job as a TrainJob.

    Raises:
        ValueError: The job names no image.
    """
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(job),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": RUNTIME,
            },
            "trainer": {
                "image": job.image,
                "command": job.arguments(),
                "numNodes": job.num_nodes,
                "resourcesPerNode": resources(job),
                "env": environment(job),
            },
            "runtimePatches": [_patch(job)],
        },
    }


def _patch(job: Job) -> dict[str, Any]:
    pod = {
        "terminationGracePeriodSeconds": job.grace_seconds,
        **tolerations(job.toleration),
        "containers": [{"name": CONTAINER, **security(job), "volumeMounts": mounts(job)}],
        "volumes": volumes(job),
    }
    replicated = {"name": JOB, "template": {"spec": {"template": about(job) | {"spec": pod}}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
