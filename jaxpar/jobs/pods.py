"""What pods need of Kubernetes to start, to find one another and to communicate, whatever else they run."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from jaxpar.jobs.workload import PROBES, SHARED_MEMORY, Workload, amount
from jaxpar.runtime.output import printable
from jaxpar.runtime.process_env import TIMEOUT_VARIABLE, timeout_of

REFERENCE = re.compile(r"(?<!\$)(?:\$\$)*\$\(([^)]+)\)")  # $(NAME); $$ is a dollar sign
_OF_POD = re.compile(
    r"\$\([^()]+\)|\[\$\([^()]+\)\]|0\.0\.0\.0|\[::\]"
)  # one variable, or all addresses
BIND_VARIABLE, POD_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS", "status.podIP"
COORDINATOR = "JAX_COORDINATOR_ADDRESS"
OF_HOST = "ClusterFirstWithHostNet"  # also right without hostNetwork
HANDLERS = {  # what a probe, or a hook, does one of
    **dict.fromkeys(PROBES, ("exec", "grpc", "httpGet", "tcpSocket")),
    **dict.fromkeys(("preStop", "postStart"), ("exec", "httpGet", "sleep", "tcpSocket")),
}
ONE_SUCCESS = ("startupProbe", "livenessProbe")  # a readinessProbe may ask for several
USUAL_SHARED_BYTES = 64 * 2**20  # of a container runtime, which is too little for NCCL


def labels_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the labels of a pod's template."""
    return pod.get("metadata", {}).get("labels", {})


def check_references(containers: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raises ValueError if a container reads a variable that it does not have there: its text would stay as it is.

    Args:
        containers: Those of a pod. One with envFrom may have others than those in its env.
        path: Where they are, for messages.

    Reference:
        A value may refer to variables before it in env; the command, its arguments and subPathExpr to all of them (Kubernetes,
        EnvVar.value).
    """
    for container in containers:
        names = [variable["name"] for variable in container.get("env", [])]
        for number, variable in enumerate(container.get("env", [])):
            _check_known(variable.get("value", ""), container, names[:number], path)
            if variable["name"] in names[:number]:
                raise ValueError(
                    f"env of {path} must have each variable once; got {variable['name']} twice. Leave one out."
                )
        places = [mount.get("subPathExpr", "") for mount in container.get("volumeMounts", [])]
        for text in (*container.get("command", []), *container.get("args", []), *places):
            _check_known(text, container, names, path)


def _check_known(text: str, container: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for name in REFERENCE.findall(text):
        if name in known:
            continue
        if any(variable["name"] == name for variable in container.get("env", [])):
            raise ValueError(
                f"$({name}) in a value of env must be a variable before it, which alone Kubernetes puts in its place; got "
                f"{name} after {text} in {path}. Move it before."
            )
        if "envFrom" not in container:
            raise ValueError(
                f"$({name}) in {path} must be a variable of its container; got none of this name. Add it to env, or write "
                f"$$({name}) for the text itself."
            )


def check_container_ports(containers: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raises ValueError if two ports of a pod, whose containers have one network, are the same, or have one name."""
    ports = [port for each in containers for port in each.get("ports", [])]
    for found in (
        [
            f"containerPort {port['containerPort']} ({port.get('protocol', 'TCP')})"
            for port in ports
        ],
        [f"name {port['name']}" for port in ports if "name" in port],
    ):
        for each in found:
            if found.count(each) > 1:
                raise ValueError(
                    f"the ports of {path} must differ; got {each} twice. Change one of them."
                )


def check_handlers(containers: Sequence[Mapping[str, Any]], path: str) -> None:
    """Raises ValueError if a probe or a hook of a container is one that the API refuses, as one that does nothing."""
    for container in containers:
        given = {**container, **container.get("lifecycle", {})}
        for name in (name for name in HANDLERS if name in given):
            found = [each for each in HANDLERS[name] if each in given[name]]
            if len(found) != 1:
                remedy = "Leave all but one out"
                if not found:
                    remedy = f"Write {'httpGet' if name in PROBES else 'exec'}"
                raise ValueError(
                    f"{name} must have one of {', '.join(HANDLERS[name])}; got {' and '.join(found) or 'none'} in {path}. "
                    f"{remedy}."
                )
            successes = given[name].get("successThreshold", 1)
            if name in ONE_SUCCESS and successes > 1:
                raise ValueError(
                    f"successThreshold of a {name} must be 1; got {successes} in {path}. Leave it out."
                )
            if "exec" in given[name] and not given[name]["exec"].get("command"):
                raise ValueError(
                    f"exec of {name} in {path} must have a command; got none. Write it, each word in a line with -."
                )


def check_bound(pod: Mapping[str, Any], container: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if process 0 would listen at an address that its pod does not have, such as that of its node."""
    variables = {variable["name"]: variable for variable in container.get("env", [])}
    value = variables.get(BIND_VARIABLE, {}).get("value", "")
    host = value.rpartition(":")[0]
    if value and not pod.get("hostNetwork") and not _OF_POD.fullmatch(host):
        raise ValueError(
            f"{BIND_VARIABLE} of {path} must be an address of its pod, which gets one when it starts; got {printable(value)}. "
            f"Write $(POD_IP):PORT, and POD_IP from {POD_ADDRESS} before it; or 0.0.0.0:PORT."
        )
    for name in REFERENCE.findall(value):
        of = (
            variables.get(name, {})
            .get("valueFrom", {})
            .get("fieldRef", {})
            .get("fieldPath", POD_ADDRESS)
        )
        if of != POD_ADDRESS and not pod.get("hostNetwork"):
            raise ValueError(
                f"{BIND_VARIABLE} of {path} must be an address of its pod, {POD_ADDRESS}; got {name} from {printable(of)}. "
                "Correct it."
            )


def check_network(network: Mapping[str, Any]) -> None:
    """Raises ValueError if the pods of a JobSet would not find pod 0 while it starts."""
    for name in ("publishNotReadyAddresses", "enableDNSHostnames"):
        if not network.get(name, True):  # the API's default
            raise ValueError(
                f"{name} of spec.network must be true, since pods find pod 0 by its name before any of them is ready; got "
                "false. Correct it."
            )


def check_names_resolve(
    pod: Mapping[str, Any], container: Mapping[str, Any], *, count: int | None, path: str
) -> None:
    """Raises ValueError if several pods would ask other nameservers than the cluster's, which alone know pod 0.

    Args:
        pod: The spec of the pods.
        container: One of their containers.
        count: The number of pods.
        path: Where they are, for messages.
    """
    policy, has_host = pod.get("dnsPolicy", "ClusterFirst"), pod.get("hostNetwork", False)
    if pod.get("dnsConfig", {}).get("nameservers"):
        return
    names = [each["name"] for each in container.get("env", []) if "value" in each]
    asks_others = policy == "Default" or (policy == "ClusterFirst" and has_host)
    if (count or 1) > 1 and COORDINATOR in names and asks_others:
        given = f"hostNetwork {str(has_host).lower()} and dnsPolicy {pod.get('dnsPolicy', 'none')}"
        raise ValueError(
            f"the {count} pods of {path} must ask the DNS of the cluster, which alone knows the name of pod 0; got {given}, by "
            f"which they ask that of their node. Write dnsPolicy: {OF_HOST}."
        )


def check_pods(pods: Workload) -> None:
    """Raises ValueError if the pods of a manifest could not start, or have too little memory to share."""
    _check_program(pods)
    _check_mounts(pods)
    _check_user(pods)
    _check_shared_memory(pods)


def _check_program(pods: Workload) -> None:
    """Raises ValueError if a command begins with no program, or says in no number how long its processes wait."""
    if pods.words and not pods.words[0]:
        raise ValueError(
            f"the command of {pods.path} must begin with a program; got an empty word. Write it, such as python."
        )
    if not REFERENCE.search(pods.variables.get(TIMEOUT_VARIABLE, "")):
        timeout_of(pods.variables)


def _check_mounts(pods: Workload) -> None:
    """Raises ValueError if a container mounts a volume that its pod does not have."""
    if pods.has_all_volumes and pods.missing_volumes:
        raise ValueError(
            f"volumeMounts of {pods.path} must be of its volumes; got {pods.missing_volumes[0]!r}. Add the volume, or leave it "
            "out."
        )


def _check_user(pods: Workload) -> None:
    if pods.security.get("runAsNonRoot") and pods.user == 0:
        raise ValueError(
            f"a pod with runAsNonRoot must have another user than root, or its container never starts; got runAsUser 0 in "
            f"{pods.path}. Give the number of a user, such as 1000, or leave runAsNonRoot out."
        )


def _check_shared_memory(pods: Workload) -> None:
    for mount in pods.mounts:
        if PurePosixPath(mount["mountPath"]) == SHARED_MEMORY and mount.get("readOnly"):
            raise ValueError(
                f"the mount at {SHARED_MEMORY} of {pods.path} must be writable, since the GPUs of a node communicate through "
                "it; got readOnly. Remove it."
            )
    volume = (pods.shared_memory or {}).get("emptyDir")
    if volume is None:
        return
    medium, size = volume.get("medium", ""), volume.get("sizeLimit")
    if medium != "Memory":
        raise ValueError(
            f"the volume at {SHARED_MEMORY} of {pods.path} must be memory, through which the GPUs of a node communicate; got "
            f"medium {str(medium)[:80]!r}, which is the node's disk. Write Memory."
        )
    if size is not None and amount(size, "sizeLimit") <= USUAL_SHARED_BYTES:
        raise ValueError(
            f"the volume at {SHARED_MEMORY} of {pods.path} must have more than 64Mi, which is too little for NCCL; got "
            f"sizeLimit {size}. Write 64Gi, say."
        )
