"""Describes a run as a job for a cluster: a JobSet or TrainJob for Kubernetes, a batch script for SLURM. Contacts no cluster.

Read `job.py` (the fields of a job and their rules), then `jobset.py`, `trainjob.py`, `sbatch.py`, `podmonitor.py` (where
Prometheus finds its metrics), and `schema.py` (checks a manifest against the API's own schema).
"""

from jaxpar.jobs.job import Job
from jaxpar.jobs.jobset import to_jobset
from jaxpar.jobs.podmonitor import to_podmonitor
from jaxpar.jobs.sbatch import to_sbatch
from jaxpar.jobs.schema import check_manifest
from jaxpar.jobs.trainjob import to_trainjob

__all__ = ["Job", "check_manifest", "to_jobset", "to_podmonitor", "to_sbatch", "to_trainjob"]
