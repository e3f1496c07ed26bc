"""What pods need of Kubernetes to start, to find one another and to communicate, whatever else they run."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpar.jobs.workload import SHARED_MEMORY, Workload, amount

REFERENCE = re.compile(r"(?<!\$)(?:\$\$)*\$\(([^)]+)\)")  # $(NAME); $$ is a dollar sign
USUAL_SHARED_BYTES = 64 * 2**20  # of a container runtime, which is too little for NCCL


def labels_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the labels of a pod's template."""
    return pod.get("metadata", {}).get("labels", {})


def check_mounts(spec: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a container mounts a volume that its pod does not have."""
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                raise ValueError(
                    f"volumeMounts of {path} must be of its volumes; got {mount['name']!r}. Add the volume, or leave it out."
                )


def check_references(spec: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a container reads a variable that it does not have: its text would stay as it is."""
    for container in spec["containers"]:
        if "envFrom" in container:
            continue
        known = {variable["name"] for variable in container.get("env", [])}
        for name in _references(container):
            if name not in known:
                raise ValueError(
                    f"$({name}) in {path} must be a variable of its container; got none of this name. Add it to env, or write "
                    f"$$({name}) for the text itself."
                )


def _references(container: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the variables in a container's command and in the values of its variables."""
    values = [variable.get("value", "") for variable in container.get("env", [])]
    for text in (*container.get("command", []), *container.get("args", []), *values):
        yield from REFERENCE.findall(text)


def check_network(network: Mapping[str, Any]) -> None:
    """Raises ValueError if the pods of a JobSet would not find pod 0 while it starts."""
    for name in ("publishNotReadyAddresses", "enableDNSHostnames"):
        if not network.get(name, True):  # the API's default
            raise ValueError(
                f"{name} of spec.network must be true, since pods find pod 0 by its name before any of them is ready; got "
                "false. Correct it."
            )


def check_pods(pods: Workload) -> None:
    """Raises ValueError if the pods of a manifest could not start, or have too little memory to share."""
    _check_user(pods)
    _check_shared_memory(pods)


def _check_user(pods: Workload) -> None:
    if pods.security.get("runAsNonRoot") and pods.user == 0:
        raise ValueError(
            f"a pod with runAsNonRoot must have another user than root, or its container never starts; got runAsUser 0 in "
            f"{pods.path}. Give the number of a user, such as 1000, or leave runAsNonRoot out."
        )


def _check_shared_memory(pods: Workload) -> None:
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
