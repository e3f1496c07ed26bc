"""A Deployment and a Service that serve a trained model by `python -m jaxpar serve`: one pod, or several alike.

A pod is given requests while /readyz answers, and is restarted when /healthz does not. Before it is stopped it waits for
PRE_STOP_SECONDS, since requests arrive until every node knows that the pod is about to end; then SIGTERM lets it finish. It has
half an hour to start. Both objects are in `manifests.json`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from jaxpar import fields
from jaxpar.jobs import forms
from jaxpar.jobs.job import (
    GPUS,
    LEAST_PORT,
    SERVED,
    USER,
    check_command,
    check_environment,
    check_name,
    num_words,
)
from jaxpar.jobs.manifests import PARTS, check_image, fill, of_pod
from jaxpar.jobs.workload import served_folder

PRE_STOP_SECONDS, MARGIN_SECONDS = 5, 10


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of --kind service.

    Attributes:
        port: The port of a pod, 1024 or more; that of the Service is 80.
        replicas: Pods, each with the whole model.
        gpus: GPUs of a pod; 0: it computes on CPUs.
        cpus: CPU cores that a pod is guaranteed.
        memory_gib: Memory of a pod in GiB, beyond which it is ended.
        timeout_seconds: After this long a request is given up; a pod that is stopped finishes its requests for as long.
    """

    port: Annotated[int, Field(ge=LEAST_PORT, lt=2**16)] = 8000
    replicas: forms.Count = 1
    gpus: forms.CountOrZero = 0
    cpus: forms.Count = 2
    memory_gib: forms.Count = 8
    timeout_seconds: forms.Positive = 60.0


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
        run_as_user: The number of the user that a pod runs as, as a job has it. None: 1000.
    """

    command: tuple[str, ...]
    name: str
    image: forms.Image
    namespace: forms.Namespace = ""
    checkpoint_claim: forms.HostName = ""
    toleration: tuple[forms.Taint, ...] = ()
    env: tuple[forms.Variable, ...] = ()
    run_as_user: forms.CountOrZero | None = None
    capabilities = {"drop": ["ALL"]}  # noqa: RUF012, of every container; no field

    def __post_init__(self) -> None:
        own = {
            each.name: f"--service.{each.name.replace('_', '-')}"
            for each in dataclasses.fields(ServiceSettings)
        }
        fields.check(self, "Leave it out for the default.", own)
        check_command(self.command)
        check_image(self.image)
        check_environment(self.env)
        check_name(self.name, "a Service", suffix="")
        begins = num_words(self.command, SERVED)
        if not begins or served_folder(self.command[begins:]) is None:
            raise ValueError(
                f"a Service runs jaxpar serve; got {' '.join(self.command)[:80] or 'no command'}. Give it and a folder after "
                "the options: jaxpar serve /checkpoints/gpt"
            )
        given = {"--address", "--port", "--timeout-seconds"} & {
            word.split("=")[0] for word in self.command
        }
        if given:
            raise ValueError(
                f"the probes depend on where a pod listens and how long it answers; got {', '.join(sorted(given))} in the "
                "command. Leave them out; --service.port and --service.timeout-seconds set them."
            )

    @property
    def served(self) -> list[str]:
        """The words after ``jaxpar serve``: the folder, and its flags."""
        words = self.arguments()
        return words[words.index("serve") + 1 :]

    def arguments(self) -> list[str]:
        """Returns the command line, with the flags that a pod needs unless it has its own."""
        told = {
            "--address": "0.0.0.0",
            "--port": str(self.port),
            "--timeout-seconds": f"{self.timeout_seconds:g}",
        }
        return [*self.command, *(word for pair in told.items() for word in pair)]

    @property
    def user(self) -> int:
        """The number of the user that a pod runs as."""
        return USER if self.run_as_user is None else self.run_as_user

    @property
    def grace_seconds(self) -> int:
        """The seconds from the wish to stop a pod until it is ended."""
        return PRE_STOP_SECONDS + math.ceil(self.timeout_seconds) + MARGIN_SECONDS


def to_service(serving: Serving) -> list[dict[str, Any]]:
    """Returns the Deployment and the Service."""
    limits = {GPUS: serving.gpus} if serving.gpus else {}
    values = vars(serving) | of_pod(
        serving, limits, dict(each.split("=", 1) for each in serving.env)
    )
    values |= {"metrics_port": serving.port, "pre_stop_seconds": PRE_STOP_SECONDS}
    return [fill(PARTS[kind], values) for kind in ("Deployment", "Service")]
