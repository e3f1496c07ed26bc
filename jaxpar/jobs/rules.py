"""Rules of manifests that no schema expresses: names by which one part refers to another, and counts that must agree."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.jobs.job import DNS_LABEL, MAX_NAME
from jaxpar.jobs.jobset import INDEX

API_VERSIONS = {  # of the kinds that `manifest` writes
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def check_rules(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError unless a manifest of one of these kinds fulfils the rules of its kind."""
    kind = manifest["kind"]
    if manifest.get("apiVersion") != API_VERSIONS[kind]:
        raise ValueError(
            f"apiVersion of a {kind} must be {API_VERSIONS[kind]}; got {str(manifest.get('apiVersion'))[:80]!r}. Correct it."
        )
    name = manifest.get("metadata", {}).get("name", "")
    if not DNS_LABEL.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(
            f"metadata.name must be a host name's label of at most {MAX_NAME} letters; got {name!r}. Rename it."
        )
    checks = {  # none for a TrainJob, whose other half is the runtime on the cluster
        "JobSet": _check_jobset,
        "PodMonitor": _check_podmonitor,
        "Deployment": _check_deployment,
        "Service": _check_service,
    }
    if kind in checks:
        checks[kind](manifest)


def check_together(manifests: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless each Service of a file leads to a Deployment there, if there is one."""
    deployments = [each for each in manifests if each["kind"] == "Deployment"]
    for service in (each for each in manifests if each["kind"] == "Service"):
        wanted = service["spec"]["selector"]
        pods = [each["spec"]["template"] for each in deployments]
        chosen = [pod for pod in pods if wanted.items() <= _labels(pod).items()]
        if pods and not chosen:
            raise ValueError(
                f"spec.selector of a Service must be labels of the Deployment's pods; got {wanted}. Correct it."
            )
        for pod in chosen:
            _check_targets(service, {port.get("name") for port in _ports(pod["spec"])})


def _check_targets(service: Mapping[str, Any], names: set[Any]) -> None:
    for port in service["spec"]["ports"]:
        target = port.get("targetPort")
        if isinstance(target, str) and target not in names:
            raise ValueError(
                f"targetPort of a Service must be a named port of its pods; got {target!r}. Name that of the Deployment."
            )


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod.get("metadata", {}).get("labels", {})


def _ports(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [port for container in spec["containers"] for port in container.get("ports", [])]


def _check_volumes(spec: Mapping[str, Any], path: str) -> None:
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                raise ValueError(
                    f"volumeMounts of {path} must be of its volumes; got {mount['name']!r}. Add the volume, or leave it out."
                )


def _check_deployment(manifest: Mapping[str, Any]) -> None:
    spec = manifest["spec"]
    labels, wanted = _labels(spec["template"]), spec["selector"]["matchLabels"]
    if not wanted or not wanted.items() <= labels.items():
        raise ValueError(
            f"spec.selector.matchLabels of a Deployment must be labels of its pods, {dict(labels)}; got {wanted}. Make them "
            "equal."
        )
    pod = spec["template"]["spec"]
    _check_volumes(pod, "spec.template.spec")
    names = {port.get("name") for port in _ports(pod)}
    for container in pod["containers"]:
        for probe in PROBES:
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in names:
                raise ValueError(f"{probe} must ask a named port of the container; got {port!r}. Correct it.")


def _check_service(manifest: Mapping[str, Any]) -> None:
    spec = manifest["spec"]
    if not spec["selector"] or not spec["ports"]:
        raise ValueError("a Service must have a selector and ports; got none. Write it with `manifest --kind service`.")


def _check_podmonitor(manifest: Mapping[str, Any]) -> None:
    spec = manifest["spec"]
    if not spec["selector"].keys() & {"matchLabels", "matchExpressions"} or not spec["podMetricsEndpoints"]:
        raise ValueError(
            "a PodMonitor must have labels to select and an endpoint; got none. Write it with `manifest --kind podmonitor`."
        )


def _check_jobset(manifest: Mapping[str, Any]) -> None:
    name = manifest["metadata"]["name"]
    subdomain = manifest["spec"].get("network", {}).get("subdomain", name)
    for path, job in _jobs(manifest):
        spec = job["template"]["spec"]
        _check_policy(spec, path)
        count = spec.get("parallelism")
        if count != spec.get("completions"):
            raise ValueError(
                f"{path}.parallelism must equal completions, the number of processes; got {count} and "
                f"{spec.get('completions')}. Make them equal."
            )
        if "volumeClaimPolicies" not in manifest["spec"]:  # those are volumes of all pods
            _check_volumes(spec["template"]["spec"], path)
        for container in spec["template"]["spec"]["containers"]:
            told = {variable["name"]: variable for variable in container.get("env", [])}
            _check_environment(told, count, f"{name}-{job['name']}-0-0.{subdomain}", path)


def _check_policy(spec: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a rule about exit codes is of a container that the pods do not have."""
    pod = spec["template"]["spec"]
    names = [each["name"] for each in (*pod["containers"], *pod.get("initContainers", []))]
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        wanted = rule.get("onExitCodes", {}).get("containerName", names[0])
        if wanted not in names:
            raise ValueError(
                f"containerName in {path}.podFailurePolicy must be a container of the pods, {', '.join(names)}; got "
                f"{wanted!r}. Make them equal."
            )


def _jobs(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, job in enumerate(manifest["spec"]["replicatedJobs"]):
        path = f"spec.replicatedJobs.{number}"
        if job.get("replicas", 1) != 1:
            raise ValueError(
                f"{path}.replicas must be 1, since processes are numbered inside a Job; got {job['replicas']}. Raise its "
                "parallelism and completions."
            )
        yield path, job


def _check_environment(told: Mapping[str, Any], count: int, host: str, path: str) -> None:
    processes = told.get("JAX_NUM_PROCESSES", {}).get("value")
    if processes is not None and processes != str(count):
        raise ValueError(
            f"JAX_NUM_PROCESSES must be the number of pods; got {processes}, {path}.parallelism {count}. Make them equal."
        )
    address = told.get("JAX_COORDINATOR_ADDRESS", {}).get("value", host)
    if not re.fullmatch(rf"{re.escape(host)}(\..*)?", address.partition(":")[0]):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS must be pod 0's host, {host}; got {address}. Correct it.")
    number = told.get("JAX_PROCESS_ID", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", INDEX)
    if number != INDEX:
        raise ValueError(f"JAX_PROCESS_ID must be the pod's number, {INDEX}; got {number}. Correct it.")
