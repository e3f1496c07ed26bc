"""A Deployment and a Service that serve a trained model by `python -m jaxpar serve`: one pod, or several alike.

A pod is given requests while /readyz answers, and is restarted when /healthz does not. Before it is stopped it waits for
PRE_STOP_SECONDS, since requests arrive until every node knows that the pod is about to end; then SIGTERM lets it finish.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from jaxpar import fields
from jaxpar.jobs.job import (
    CHECKPOINTS,
    DNS_LABEL,
    GPUS,
    MAX_NAME,
    Count,
    CountOrZero,
    HostName,
    Image,
    Namespace,
    Positive,
    Taint,
    Variable,
    check_command,
    check_environment,
)
from jaxpar.jobs.manifests import (
    ENDS_ON_SIGTERM,
    check_image,
    claim,
    cpus_and_memory,
    manifest,
    named,
    named_values,
    scraping,
    tolerations,
)

SERVED = (("jaxpar", "serve"), ("python", "-m", "jaxpar", "serve"))
HTTP = "http"  # the name of the port
SERVICE_PORT = 80
PRE_STOP_SECONDS, MARGIN_SECONDS = 5, 10
START_SECONDS, PROBE_SECONDS = 1800, 10


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of --kind service.

    Attributes:
        port: The port of a pod; that of the Service is 80.
        replicas: Pods, each with the whole model.
        gpus: GPUs of a pod; 0: it computes on CPUs.
        cpus: CPU cores that a pod is guaranteed.
        memory_gib: Memory of a pod in GiB, beyond which it is ended.
        timeout_seconds: After this long a request is given up; a pod that is stopped finishes its requests for as long.
    """

    port: Annotated[int, Field(ge=1, lt=2**16)] = 8000
    replicas: Count = 1
    gpus: CountOrZero = 0
    cpus: Count = 2
    memory_gib: Count = 8
    timeout_seconds: Positive = 60.0


@dataclass(frozen=True, kw_only=True)
class Serving(ServiceSettings):
    """A model to serve on a cluster.

    Attributes:
        command: ``jaxpar serve`` and the folder, with its flags.
        name: The name of the Deployment and the Service.
        image: The container image.
        namespace: The Kubernetes namespace; "": none is named.
        checkpoint_claim: A PersistentVolumeClaim with the folder, mounted read-only at /checkpoints; "": the image has it.
        toleration: Taints on which a pod may run, as a job has them.
        env: Variables of a pod, as a job has them.
    """

    command: tuple[str, ...]
    name: str
    image: Image
    namespace: Namespace = ""
    checkpoint_claim: HostName = ""
    toleration: tuple[Taint, ...] = ()
    env: tuple[Variable, ...] = ()

    def __post_init__(self) -> None:
        own = {each.name: f"--service.{each.name.replace('_', '-')}" for each in dataclasses.fields(ServiceSettings)}
        fields.check(self, "Leave it out for the default.", own)
        check_command(self.command)
        _check(self)

    def arguments(self) -> list[str]:
        """Returns the command line, with the flags that a pod needs unless it has its own."""
        told = {"--address": "0.0.0.0", "--port": str(self.port), "--timeout-seconds": f"{self.timeout_seconds:g}"}
        return [*self.command, *(word for pair in told.items() for word in pair)]

    @property
    def grace_seconds(self) -> int:
        """The seconds from the wish to stop a pod until it is ended."""
        return PRE_STOP_SECONDS + math.ceil(self.timeout_seconds) + MARGIN_SECONDS


def to_service(serving: Serving) -> list[dict[str, Any]]:
    """Returns the Deployment and the Service."""
    labels = {"app.kubernetes.io/name": serving.name, "app.kubernetes.io/part-of": "jaxpar"}
    metadata = named(serving.name, serving.namespace) | {"labels": labels}
    port = {"name": HTTP, "port": SERVICE_PORT, "targetPort": HTTP}
    pod = {"metadata": {"labels": labels, "annotations": scraping(serving.port)}, "spec": _pod(serving)}
    deployment = {"replicas": serving.replicas, "selector": {"matchLabels": labels}, "template": pod}
    service = {"selector": labels, "ports": [port]}
    return [manifest("Deployment", metadata, deployment), manifest("Service", metadata, service)]


def _pod(serving: Serving) -> dict[str, Any]:
    volumes = [claim("checkpoints", serving.checkpoint_claim, readOnly=True)] if serving.checkpoint_claim else []
    return {
        "terminationGracePeriodSeconds": serving.grace_seconds,
        **ENDS_ON_SIGTERM,
        **tolerations(serving.toleration),
        "automountServiceAccountToken": False,
        "containers": [_container(serving, bool(volumes))],
        "volumes": volumes,
    }


def _container(serving: Serving, has_claim: bool) -> dict[str, Any]:
    probe = lambda path, failures: {
        "httpGet": {"path": path, "port": HTTP},
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": PROBE_SECONDS // 2,
        "failureThreshold": failures,
    }
    gpus = {GPUS: serving.gpus} if serving.gpus else {}
    variables = named_values(dict(each.split("=", 1) for each in serving.env))
    return {
        "name": "serve",
        "image": serving.image,
        "command": serving.arguments(),
        **({"env": variables} if variables else {}),
        "ports": [{"name": HTTP, "containerPort": serving.port}],
        "startupProbe": probe("/healthz", START_SECONDS // PROBE_SECONDS),
        "livenessProbe": probe("/healthz", 3),
        "readinessProbe": probe("/readyz", 1),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "resources": cpus_and_memory(serving.cpus, serving.memory_gib, gpus),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "checkpoints", "mountPath": CHECKPOINTS, "readOnly": True}] if has_claim else [],
    }


def _check(serving: Serving) -> None:
    check_image(serving.image)
    check_environment(serving.env)
    if not re.fullmatch(DNS_LABEL, serving.name) or not serving.name[0].isalpha() or len(serving.name) > MAX_NAME:
        raise ValueError(
            f"a Service's name must be lower-case letters, digits and -, a letter first, and at most {MAX_NAME} long; got "
            f"{serving.name[:80]!r}. Choose such as gpt."
        )
    begins = next((words for words in SERVED if serving.command[: len(words)] == words), None)
    if begins is None or len(serving.command) == len(begins):
        raise ValueError(
            f"a Service runs jaxpar serve; got {' '.join(serving.command)[:80] or 'no command'}. Give it and a folder after "
            "the options: jaxpar serve /checkpoints/gpt"
        )
    own = {"--address", "--port", "--timeout-seconds"} & {word.split("=")[0] for word in serving.command}
    if own:
        raise ValueError(
            f"the probes depend on where a pod listens and how long it answers; got {', '.join(sorted(own))} in the command. "
            "Leave them out; --service.port and --service.timeout-seconds set them."
        )
