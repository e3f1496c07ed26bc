"""Whether the manifests of a file lead to one another: a Service to a Deployment's pods, a PodMonitor to those of a job."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.jobs.pods import labels_of
from jaxpar.jobs.workload import workloads

NUMBER_LABEL = "batch.kubernetes.io/job-completion-index"
RUN_LABEL = "run"  # of alerts.yaml and dashboard.json
JOB_LABEL = "jobset.sigs.k8s.io/jobset-name"
HTTP, TCP = "http", "TCP"  # the name of the port of a server, and the API's default protocol
OF_CONTROLLERS = (
    "jobset.sigs.k8s.io/",
    "batch.kubernetes.io/",
)  # labels that pods get beside those of a manifest


def check_together(manifests: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless what leads to the pods of another manifest of a file finds them, if there is one."""
    named = [(each["kind"], _namespace(each), each["metadata"]["name"]) for each in manifests]
    for kind, _, name in named:
        if named.count((kind, _, name)) > 1:
            raise ValueError(
                f"a file may have one {kind} of a name; got two named {name!r}. Rename one."
            )
    deployments = [each for each in manifests if each["kind"] == "Deployment"]
    for service in (each for each in manifests if each["kind"] == "Service"):
        _check_leads_to(service, deployments)
    jobs = [each for each in manifests if each["kind"] in ("JobSet", "TrainJob")]
    for monitor in (each for each in manifests if each["kind"] == "PodMonitor"):
        _check_monitors(monitor, jobs)


def check_protocols(ports: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the port of a Service at which clients send HTTP takes no TCP.

    Args:
        ports: Those of the Service.
    """
    for port in ports:
        is_http = len(ports) == 1 or HTTP in (port.get("name"), port.get("targetPort"))
        if is_http and _protocol(port) != TCP:
            raise ValueError(
                f"the port of a Service for HTTP must have the protocol {TCP}; got {_protocol(port)} for port {port['port']}. "
                "Leave protocol out."
            )


def _protocol(port: Mapping[str, Any]) -> str:
    return port.get("protocol", TCP)


def _namespace(manifest: Mapping[str, Any]) -> str | None:
    return manifest["metadata"].get("namespace")


def _check_leads_to(service: Mapping[str, Any], deployments: Sequence[Mapping[str, Any]]) -> None:
    wanted = service["spec"]["selector"]
    chosen = [
        each
        for each in deployments
        if wanted.items() <= labels_of(each["spec"]["template"]).items()
    ]
    if deployments and not chosen:
        raise ValueError(
            f"spec.selector of a Service must be labels of the Deployment's pods; got {wanted}. Correct it."
        )
    for deployment in chosen:
        _check_namespaces(service, deployment)
        _check_targets(service, _ports(deployment["spec"]["template"]["spec"]))


def _check_targets(service: Mapping[str, Any], ports: Sequence[Mapping[str, Any]]) -> None:
    known = {port.get("name") for port in ports} | {port["containerPort"] for port in ports}
    protocols = {port["name"]: _protocol(port) for port in ports if "name" in port}
    for port in service["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        if target not in known:
            raise ValueError(
                f"targetPort of a Service must be a named port of its pods; got {target!r}. Name that of the Deployment."
            )
        of_pods = protocols.get(target, _protocol(port))
        if of_pods != _protocol(port):
            raise ValueError(
                f"a port of a Service must have the protocol of the port of its pods; got {_protocol(port)}, and {of_pods} for "
                f"{target!r}. Leave protocol out of both."
            )


def _check_namespaces(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    if _namespace(one) != _namespace(other):
        raise ValueError(
            f"a {one['kind']} and its {other['kind']} must have one namespace; got {_namespace(one)} and {_namespace(other)}. "
            "Make them equal."
        )


def _ports(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [port for container in spec["containers"] for port in container.get("ports", [])]


def _check_monitors(monitor: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> None:
    for job in _monitored(monitor, jobs):
        if "namespaceSelector" not in monitor["spec"]:
            _check_namespaces(monitor, job)
        if job["kind"] == "JobSet":  # the pods of a TrainJob have the ports of its runtime
            _check_endpoints(monitor, job)


def _monitored(
    monitor: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Returns the jobs of a file that a PodMonitor selects by their names, or else by labels of their own."""
    labels = monitor["spec"]["selector"].get("matchLabels", {})
    wanted = labels.get(JOB_LABEL)
    if wanted is None:
        own = {name: value for name, value in labels.items() if not name.startswith(OF_CONTROLLERS)}
        return [job for job in jobs if own.items() <= _labels_of_job(job).items()]
    chosen = [job for job in jobs if job["metadata"]["name"] == wanted]
    if jobs and not chosen:
        names = ", ".join(job["metadata"]["name"] for job in jobs)
        raise ValueError(
            f"a PodMonitor must select a job of its file, {names}; got {JOB_LABEL} {wanted!r}. Correct it."
        )
    return chosen


def _labels_of_job(job: Mapping[str, Any]) -> Mapping[str, str]:
    parts = job["spec"].get("replicatedJobs", [])
    return labels_of(parts[0]["template"]["spec"]["template"]) if parts else {}


def _check_endpoints(monitor: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    ports = [port for pods in workloads(job) for port in pods.ports or ()]
    names = {port["name"] for port in ports if "name" in port}
    numbers = {
        port["containerPort"] for port in ports if "name" in port
    }  # process 0's has none, and no metrics
    known = {"port": names, "portNumber": numbers, "targetPort": names | numbers}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        for field, there in known.items():
            if field in endpoint and endpoint[field] not in there:
                kind = "the number of a named port" if field == "portNumber" else "a named port"
                raise ValueError(
                    f"the {field} of a PodMonitor must be {kind} of the pods; got {endpoint[field]!r}, which "
                    f"{job['metadata']['name']} has not. Write the job with --metrics-port."
                )


def monitor_remarks(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each thing without which a PodMonitor finds other pods than those with metrics, or names no run."""
    if manifest["kind"] != "PodMonitor":
        return
    selector = manifest["spec"]["selector"]
    chosen = {each["key"] for each in selector.get("matchExpressions", [])}
    if NUMBER_LABEL not in {*selector.get("matchLabels", {}), *chosen}:
        yield (
            f"spec.selector has no {NUMBER_LABEL}: process 0 alone has metrics, and every other pod is a target that is down. "
            f'Add {NUMBER_LABEL}: "0"'
        )
    for number, endpoint in enumerate(manifest["spec"]["podMetricsEndpoints"]):
        made = {
            each.get("targetLabel")
            for each in endpoint.get("relabelings", [])
            if any(each.get("sourceLabels", [])) or each.get("replacement")
        }
        if RUN_LABEL not in made:
            yield (
                f"spec.podMetricsEndpoints.{number} makes no label {RUN_LABEL}, by which the alerts and the dashboard name a "
                f"run. Add a relabeling with targetLabel: {RUN_LABEL}, as `manifest --kind podmonitor` writes it"
            )
