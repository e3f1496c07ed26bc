"""A job as its cluster takes it: a JobSet, a Kubeflow TrainJob, a PodMonitor, or a batch script for SLURM.

A JobSet (jobset.x-k8s.io/v1alpha2) is one Job with one pod per node, all restarted together when one is lost: a Job alone would
replace only the lost pod, and its peers cannot continue with a new one. The reaction to the end of a pod, by the exit codes of
`jaxpar.runtime.exit_codes`:

    2, 65, 74, 86           the JobSet fails: a restart would end the same way, or needs inspection first
    75, or a drained node   all pods restart, and it does not count: nothing is wrong with the run
    anything else           all pods restart, at most max_restarts times

A TrainJob (trainer.kubeflow.org/v1alpha1) runs on Kubeflow's runtime for JAX, which sets the JAX_ variables itself. The runtime
controls restarts: its JobSet has the failure policy, which a TrainJob cannot change. Nor does the API let one set
``shareProcessNamespace`` (see ``ENDS_ON_SIGTERM``): set it in the runtime's pod template.

A PodMonitor (monitoring.coreos.com/v1) lets the Prometheus Operator find the metrics of a JobSet. It selects the pod of process
0, which serves the metrics of the whole run: annotations cannot select one pod of a Job, so with them the other pods are
targets that are down. Every series gets the label ``run``, the name of the JobSet, by which the dashboard and the alerts name a
run: the address of a pod changes with each restart.

A batch script has one task per node with all its GPUs, is signalled in time to save, and is requeued.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.fields import arg
from jaxpar.jobs.job import CHECKPOINTS, COMPILED, GPUS, PORT, Job, JobSettings, check_settings
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode
from jaxpar.runtime.process_env import TOKEN_VARIABLE

API_VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
}
METRICS = "metrics"  # the name of the port of the metrics
# The first process of a PID namespace ignores every signal that it has not set a handler for. In a namespace of its own, a
# program that still imports or waits for its peers would ignore SIGTERM until the grace period is over. Shared, the pod's
# pause container is the first process.
ENDS_ON_SIGTERM = {"shareProcessNamespace": True}
NODES = "nodes"  # the one Job of a JobSet; its pods are <name>-nodes-0-<number>.<name>-nodes
CONTAINER = "train"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
RUNTIME = "jax-distributed"
MANAGER = "jaxpar.dev/manifest"  # the manager of the patch to the runtime's template
RUNTIME_NODE = "node"  # the name of the Job and of its container in Kubeflow's runtimes
SCRAPE_INTERVAL = "30s"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
RUN_LABEL = {"sourceLabels": ["__meta_kubernetes_pod_label_jobset_sigs_k8s_io_jobset_name"], "targetLabel": "run"}


def to_jobset(job: Job) -> dict[str, Any]:
    """Returns the job as a JobSet, to be written as YAML or JSON.

    Raises:
        ValueError: The job names no image.
    """
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": _subdomain(job)},
        "failurePolicy": _failure_policy(job),
        # One replica, since pods are numbered within a Job.
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": _job(job)}}],
    }
    return manifest("JobSet", metadata(job), spec)


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
        "template": about(job) | {"spec": _pod_of_jobset(job)},
    }


def _pod_of_jobset(job: Job) -> dict[str, Any]:
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


def to_trainjob(job: Job) -> dict[str, Any]:
    """Returns the job as a TrainJob.

    Raises:
        ValueError: The job names no image.
    """
    trainer = {
        "image": job.image,
        "command": job.arguments(),
        "numNodes": job.num_nodes,
        "resourcesPerNode": resources(job),
        "env": environment(job),
    }
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": RUNTIME}
    spec = {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": [_patch(job)]}
    return manifest("TrainJob", metadata(job), spec)


def _patch(job: Job) -> dict[str, Any]:
    pod = {
        "terminationGracePeriodSeconds": job.grace_seconds,
        **tolerations(job.toleration),
        "containers": [{"name": RUNTIME_NODE, **security(job), "volumeMounts": mounts(job)}],
        "volumes": volumes(job),
    }
    replicated = {"name": RUNTIME_NODE, "template": {"spec": {"template": about(job) | {"spec": pod}}}}
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}


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
    endpoint = {"port": METRICS, "path": "/metrics", "interval": SCRAPE_INTERVAL, "relabelings": [RUN_LABEL]}
    spec = {"selector": {"matchLabels": pods}, "podMetricsEndpoints": [endpoint]}
    return manifest("PodMonitor", named(job.name, job.namespace), spec)


def to_sbatch(job: Job) -> str:
    """Returns the job as the text of a script for ``sbatch``."""
    options = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        **({} if job.fake_devices_per_node else {"gpus-per-node": job.gpus_per_node}),
        **({"cpus-per-task": job.cpus} if job.cpus else {}),
        **({"mem": f"{job.memory_gib}G"} if job.memory_gib else {}),
        "time": _time(job.hours),
        "signal": f"TERM@{job.grace_seconds}",  # sent to the tasks: they save, and exit with 75
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    options |= {name: getattr(job, name) for name in ("partition", "account") if getattr(job, name)}
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --exclusive", "#SBATCH --requeue", "", *_script(job)]) + "\n"


def _script(job: Job) -> list[str]:
    cpus = f" --cpus-per-task={job.cpus}" if job.cpus else ""  # srun does not take it from sbatch
    return [
        f"export JAXPAR_INITIALIZATION_TIMEOUT={job.start_seconds}",
        "export JAXPAR_RESUME=if-any  # a restarted job resumes from the newest checkpoint",
        f"export {TOKEN_VARIABLE}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # only processes with this token can join",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()),
        "",
        "# A task that fails ends the others, which could only wait for it.",
        f"srun --kill-on-bad-exit=1{cpus} {shlex.join(job.arguments())}",
        "code=$?",
        "",
        "case $code in",
        f"  {'|'.join(str(int(code)) for code in (ExitCode.DONE, *FINAL_CODES))}) exit $code ;;  # a restart would not help",
        f'  {int(ExitCode.PREEMPTED)}) scontrol requeue "$SLURM_JOB_ID" ;;  # asked to stop, and saved',
        f'  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ] && scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        "exit $code",
    ]


def _time(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"


# What Kubernetes objects share ----------------------------------------------------------------------------------------


def manifest(kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Returns an object of one of the kinds above."""
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec}


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
            f"{kueue}-slice-size": str(job.devices_per_stage // job.devices_per_node),
        }
    return annotations


def resources(job: Job) -> dict[str, Any]:
    """Returns the resources of a container: the GPUs of a node, its RDMA devices, and CPU cores and memory if stated.

    Raises:
        ValueError: The memory is less than the shared memory, which counts towards it.
    """
    if 0 < job.memory_gib <= job.shm_gib:
        raise ValueError(
            f"{arg('memory_gib')} must be more than the shared memory, which counts towards it; got "
            f"{arg(memory_gib=job.memory_gib, shm_gib=job.shm_gib)}. Choose a larger {arg('memory_gib')}, or a smaller "
            f"{arg('shm_gib')}."
        )
    limits: dict[str, Any] = {} if job.fake_devices_per_node else {GPUS: job.gpus_per_node}
    if job.rdma:
        name, count = job.rdma.split("=")
        limits[name] = int(count)
    return cpus_and_memory(job.cpus, job.memory_gib, limits)


def cpus_and_memory(cpus: int, memory_gib: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Returns the resources of a container: CPU cores as a request alone, memory (0: none of them) and others as limits too."""
    limits = ({"memory": f"{memory_gib}Gi"} if memory_gib else {}) | limits
    requests = ({"cpu": str(cpus)} if cpus else {}) | limits
    return {"requests": requests, "limits": limits} if requests else {}


def tolerations(taints: Sequence[str]) -> dict[str, Any]:
    """Returns the part of a pod's spec that lets it run on nodes with these taints."""
    return {"tolerations": [_toleration(taint) for taint in taints]} if taints else {}


def _toleration(taint: str) -> dict[str, str]:
    before, _, effect = taint.partition(":")
    key, _, value = before.partition("=")
    match = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": key, **match} | ({"effect": effect} if effect else {})


def security(job: Job) -> dict[str, Any]:
    """Returns the part of a container that lets RDMA register memory, which locks it."""
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if job.rdma else {}


def environment(job: Job) -> list[dict[str, str]]:
    """Returns the variables that only jaxpar reads, the folder for compiled programs if it has a claim, and the user's own."""
    told = {
        "JAXPAR_INITIALIZATION_TIMEOUT": str(job.start_seconds),
        "JAXPAR_RESUME": "if-any",
        TOKEN_VARIABLE: job.token,
    }
    if job.cache_claim:
        told["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    return named_values(told | job.variables())


def named_values(variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns variables as a container takes them."""
    return [{"name": name, "value": value} for name, value in variables.items()]


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
