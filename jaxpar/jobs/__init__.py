"""Describes a run as a job for a cluster: a JobSet or TrainJob for Kubernetes, a batch script for SLURM. Contacts no cluster.

Read `job.py` (the fields of a job), `field_checks.py` (their rules), `plan_file.py` (those that a plan sets) and `pods.py`
(what Kubernetes objects share), then `jobset.py`, `trainjob.py`, `sbatch.py`, `podmonitor.py` (where Prometheus finds its
metrics), `schema.py` (checks a manifest against the API's own schema), `rules.py` (and against rules that no schema has),
`remarks.py` (what may not be meant as it is given), and `service.py` (a trained model that answers requests).
"""

from jaxpar.jobs.job import Job
from jaxpar.jobs.jobset import to_jobset
from jaxpar.jobs.podmonitor import to_podmonitor
from jaxpar.jobs.sbatch import to_sbatch
from jaxpar.jobs.schema import check_manifest, check_manifests
from jaxpar.jobs.service import Serving, to_service
from jaxpar.jobs.trainjob import to_trainjob

__all__ = [
    "Job",
    "Serving",
    "check_manifest",
    "check_manifests",
    "to_jobset",
    "to_podmonitor",
    "to_sbatch",
    "to_service",
    "to_trainjob",
]
