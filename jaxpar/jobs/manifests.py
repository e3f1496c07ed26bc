"""A job as its cluster takes it: a JobSet, a Kubeflow TrainJob, a PodMonitor, or a batch script for SLURM.

`manifests.json` has the objects of Kubernetes, and the parts that they share; ``fill`` puts a job's values into them.
`job.sbatch` is the script for SLURM.

A JobSet (jobset.x-k8s.io/v1alpha2) is one Job with one pod per node, all restarted together when one is lost: a Job alone would
replace only the lost pod, and its peers cannot continue with a new one. It has one replica of its Job, since pods are numbered
within a Job. The reaction to the end of a pod, by the exit codes of `jaxpar.runtime.exit_codes`:

    2, 65, 74, 86           the JobSet fails: a restart would end the same way, or needs inspection first
    75, or a drained node   all pods restart, and it does not count: nothing is wrong with the run
    anything else           all pods restart, at most max_restarts times

The pods' headless Service has a name of its own, so that a Service may serve the model under that of the job. Pods share their
PID namespace: the first process of a namespace ignores every signal that it has not set a handler for, so a program that still
imports or waits for its peers would ignore SIGTERM until the grace period is over; shared, the pause container is the first.

A TrainJob (trainer.kubeflow.org/v1alpha1) runs on Kubeflow's runtime for JAX, which sets the JAX_ variables itself. The runtime
controls restarts: its JobSet has the failure policy, which a TrainJob cannot change. Nor does the API let one set
``shareProcessNamespace``: set it in the runtime's pod template.

A PodMonitor (monitoring.coreos.com/v1) lets the Prometheus Operator find the metrics of a JobSet. It selects the pod of process
0, which serves the metrics of the whole run: annotations cannot select one pod of a Job, so with them the other pods are
targets that are down. Every series gets the label ``run``, the name of the JobSet, by which the dashboard and the alerts name a
run: the address of a pod changes with each restart.

A batch script has one task per node with all its GPUs, is signalled in time to save, and is requeued.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from jaxpar.fields import arg
from jaxpar.jobs.job import CHECKPOINTS, COMPILED, GPUS, PORT, Job, JobSettings, check_settings
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode
from jaxpar.runtime.process_env import TOKEN_VARIABLE

PARTS = json.loads(Path(__file__).with_name("manifests.json").read_text(encoding="utf-8"))
API_VERSIONS = {kind: part["apiVersion"] for kind, part in PARTS.items() if "apiVersion" in part}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def fill(part: Any, values: Mapping[str, Any]) -> Any:
    """Returns a part of ``manifests.json`` with values in the place of their names.

    A text that is only a name, as in "{num_nodes}", becomes the part of that name, or the value with its own type; names within
    a longer text, and "{num_nodes!s}", become text. A list within a list is joined to it. An object is left out if the value of
    its "if" is empty, 0 or False, and so is each field without a value.

    >>> fill({"name": "{name}", "count": "{n}", "queue": "{queue}"}, {"name": "gpt", "n": 2, "queue": ""})
    {'name': 'gpt', 'count': 2}
    """
    if isinstance(part, str):
        name = part[1:-1] if re.fullmatch(r"\{\w+\}", part) else ""
        return (
            fill(PARTS[name], values)
            if name in PARTS
            else values[name]
            if name
            else part.format_map(values)
        )
    if isinstance(part, list):
        items = [fill(item, values) for item in part]
        return [
            each for item in items if item for each in (item if isinstance(item, list) else [item])
        ]
    if not isinstance(part, dict):
        return part
    if not fill(part.get("if", True), values):
        return None
    filled = {name: fill(value, values) for name, value in part.items() if name != "if"}
    return {name: value for name, value in filled.items() if value not in (None, "", [], {})}


def to_jobset(job: Job) -> dict[str, Any]:
    """Returns the job as a JobSet, to be written as YAML or JSON.

    Raises:
        ValueError: The job names no image.
    """
    return fill(PARTS["JobSet"], _values(job))


def to_trainjob(job: Job) -> dict[str, Any]:
    """Returns the job as a TrainJob.

    Raises:
        ValueError: The job names no image.
    """
    return fill(PARTS["TrainJob"], _values(job))


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
    return fill(PARTS["PodMonitor"], vars(job))


def _values(job: Job) -> dict[str, Any]:
    """Returns what the manifests of a job name.

    Raises:
        ValueError: The job names no image, or its memory is less than the shared memory, which counts towards it.
    """
    check_image(job.image)
    if 0 < job.memory_gib <= job.shm_gib:
        raise ValueError(
            f"{arg('memory_gib')} must be more than the shared memory, which counts towards it; got "
            f"{arg(memory_gib=job.memory_gib, shm_gib=job.shm_gib)}. Choose a larger {arg('memory_gib')}, or a smaller "
            f"{arg('shm_gib')}."
        )
    resource, _, count = job.rdma.partition("=")
    limits = {} if job.fake_devices_per_node else {GPUS: job.gpus_per_node}
    told = {
        "JAXPAR_INITIALIZATION_TIMEOUT": str(job.start_seconds),
        "JAXPAR_RESUME": "if-any",
        TOKEN_VARIABLE: job.token,
        **({"JAX_COMPILATION_CACHE_DIR": COMPILED} if job.cache_claim else {}),
    }
    values = vars(job) | of_pod(
        job, limits | ({resource: int(count)} if resource else {}), told | job.variables()
    )
    values |= {
        "num_nodes": job.num_nodes,
        "slice_size": job.replica_topology and str(job.devices_per_stage // job.devices_per_node),
        "final_codes": [*map(int, FINAL_CODES)],
        "final_pattern": _either(FINAL_CODES),
        "preempted_codes": [int(ExitCode.PREEMPTED)],
        "pod_index": INDEX,
        "port": PORT,
        "compiled": COMPILED,
    }
    return values | {
        "annotations": fill("{placement}", values) | (fill("{scraping}", values) or {})
    }


def of_pod(job: Any, limits: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values that the pods of jobs and of services both have.

    Args:
        job: The job or the service.
        limits: Its devices. CPU cores are requested without a limit, which would slow a process down.
        variables: Its environment variables.
    """
    limits = ({"memory": f"{job.memory_gib}Gi"} if job.memory_gib else {}) | dict(limits)
    return {
        "arguments": [as_written(word) for word in job.arguments()],
        "grace_seconds": job.grace_seconds,
        "environment": [
            {"name": name, "value": as_written(value)} for name, value in variables.items()
        ],
        "tolerations": [_toleration(taint) for taint in job.toleration],
        "requests": ({"cpu": str(job.cpus)} if job.cpus else {}) | limits,
        "limits": limits,
        "checkpoints": CHECKPOINTS,
        **_security(job),
    }


def _security(job: Any) -> dict[str, Any]:
    """Returns the values of the security contexts of a job's or a service's pods; what root has no need of is None."""
    is_not_root = job.user > 0 or None
    return {
        "is_not_root": is_not_root,
        "user": job.user,
        "group": is_not_root and job.user,
        "group_policy": is_not_root
        and "OnRootMismatch",  # else every start would change each file of the volume
        "capabilities": job.capabilities,
    }


def as_written(text: str) -> str:
    """Returns a word of a command, or the value of a variable, so that it arrives in a container as it was given.

    Kubernetes puts the value of a variable in the place of $(NAME) there, and one $ in the place of $$.

    >>> as_written("costs $5")
    'costs $$5'
    """
    return text.replace("$", "$$")


def _toleration(taint: str) -> dict[str, str]:
    before, _, effect = taint.partition(":")
    key, _, value = before.partition("=")
    match = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **match} | ({"effect": effect} if effect else {})


def check_image(image: str) -> None:
    """Raises ValueError unless a container image is named."""
    if not image:
        raise ValueError(
            "a pod needs a container image; got none. Give one that has jaxpar: --image registry/name:tag"
        )


# Of `sbatch --signal`, in seconds.
LONGEST_NOTICE = 65_535


def to_sbatch(job: Job) -> str:
    """Returns the job as the text of a script for ``sbatch``.

    Raises:
        ValueError: The time limit leaves none to train, since the signal to save comes before it; or the signal comes earlier
            than SLURM sends one.
    """
    if job.grace_seconds > LONGEST_NOTICE:
        raise ValueError(
            f"SLURM sends the signal to save at most {LONGEST_NOTICE:,} s before the end; got "
            f"{arg(save_seconds=job.save_seconds)}, for which it would come {job.grace_seconds:,} s before it. Choose fewer "
            f"{arg('save_seconds')}."
        )
    if job.hours * 3600 <= job.grace_seconds:
        raise ValueError(
            f"{arg('hours')} must be more than the time to save, {job.grace_seconds} s; got {arg(hours=job.hours)}, "
            f"{job.hours * 3600:g} s. Choose more hours, or fewer {arg('save_seconds')}."
        )
    options = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": not job.fake_devices_per_node and job.gpus_per_node,
        "cpus-per-task": job.cpus,
        "mem": job.memory_gib and f"{job.memory_gib}G",
        "time": _time(job.hours),
        "signal": f"TERM@{job.grace_seconds}",  # sent to the tasks: they save, and exit with 75
        "open-mode": "append",
        "output": "%x-%j.log",
        "partition": job.partition,
        "account": job.account,
    }
    cpus = f" --cpus-per-task={job.cpus}" if job.cpus else ""  # srun does not take it from sbatch
    return _Script(Path(__file__).with_name("job.sbatch").read_text(encoding="utf-8")).substitute(
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value),
        start_seconds=job.start_seconds,
        token=TOKEN_VARIABLE,
        variables="".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in job.variables().items()
        ),
        command=f"srun --kill-on-bad-exit=0 --wait={job.grace_seconds}{cpus} {shlex.join(job.arguments())}",
        final=_either((ExitCode.DONE, *FINAL_CODES)),
        preempted=int(ExitCode.PREEMPTED),
        max_restarts=job.max_restarts,
    )


class _Script(Template):
    """The text of `job.sbatch`, in which a shell has its own use for $."""

    delimiter = "@"


def _either(codes: Sequence[int]) -> str:
    return "|".join(str(int(code)) for code in codes)


def _time(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"
