"""Describes a run as a job for a cluster: a JobSet or TrainJob for Kubernetes, a batch script for SLURM. Contacts no cluster.

Read `job.py` (the fields of a job), `forms.py` with `forms.toml` (the rules of their values), `manifests.json` (the objects
of Kubernetes), `job.sbatch` (the script for SLURM), `manifests.py` (fills them in), `service.py` (a trained model that
answers requests), `plain_scalars.py` (writes them as YAML that all programs read alike), `check.py` (checks manifests by the
API's own schema, and by rules that no schema has), `field_types.py` with `field_types.toml` (the types of fields),
`choices.py` (fields that take one of a few values, or a text of a form), `job_sets.py` and `train_jobs.py` (the rules of
these kinds that are about several fields), `workload.py` (reads the pods of a manifest), `pods.py` (what they need to start
and to communicate), `agreement.py` (compares what a manifest says twice), `placement.py` (what Kueue is told), `selectors.py`
(what of a file leads to its pods), `restarts.py` (what follows the end of a pod), `shells.py` (a shell around its program),
`serving_remarks.py` (what pods that serve lack), `resource_remarks.py` (what pods have of their nodes), `remarks.py` (what
else may not be meant), and `flags.py` (those that a plan sets, and those that have no effect).
"""

from jaxpar.jobs.check import check_manifest, check_manifests
from jaxpar.jobs.job import Job
from jaxpar.jobs.manifests import to_jobset, to_podmonitor, to_sbatch, to_trainjob
from jaxpar.jobs.remarks import beside_resume, remarks, trains_nothing, unsaved
from jaxpar.jobs.resource_remarks import unused_gpus
from jaxpar.jobs.service import Serving, to_service

__all__ = [
    "Job",
    "Serving",
    "beside_resume",
    "check_manifest",
    "check_manifests",
    "remarks",
    "to_jobset",
    "to_podmonitor",
    "to_sbatch",
    "to_service",
    "to_trainjob",
    "trains_nothing",
    "unsaved",
    "unused_gpus",
]
