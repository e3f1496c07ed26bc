"""What a manifest says of its pods, read alike from each kind that has pods: a JobSet, a TrainJob, a Deployment."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from posixpath import join, normpath
from typing import Any

from jaxpar.jobs.field_types import QUANTITY
from jaxpar.jobs.job import (
    AXES,
    GPUS,
    INSTALLED,
    SERVED,
    flag_value,
    is_python,
    num_words,
    without_wrappers,
)

QUEUE = "kueue.x-k8s.io/queue-name"
FAKE_DEVICES = "JAX_NUM_CPU_DEVICES"
SHARED_MEMORY = PurePosixPath("/dev/shm")
UNITS = {
    "": 1,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
}
UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTPE", 1)}
USUAL_GRACE = 30  # seconds, of Kubernetes
SLEEP = re.compile(r"\bsleep (\d{1,6})\b")
CONTAINER_KINDS = ("containers", "initContainers")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
NODE = "node"  # the job, and the container, that trains in the runtimes of Kubeflow's Trainer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The pods of a manifest, which are alike.

    Attributes:
        kind: Of the manifest.
        path: Where the manifest describes them, for messages.
        words: The command line of the program, as it arrives in its container.
        variables: Its environment variables that have a value.
        fields: The fields of its pod that its other variables have, such as status.podIP, by their names.
        told: The names of all its variables that are given a value; None: not known, since more are on the cluster.
        num_pods: Their number; None: not stated.
        requests: What each requests.
        limits: What each may use.
        mounts: The volume mounts of the program's container.
        volumes: The volumes of a pod.
        has_all_volumes: Whether a pod has no others.
        mounted: The names of the volumes that any of its containers mounts.
        ports: The container ports; None: this kind of manifest has none.
        annotations: Of a pod.
        name: That of the manifest.
        is_queued: Whether it names a queue of Kueue.
        security: The security context of the program's container, with what that of its pod adds.
        shares_processes: Whether process 1 of a pod is Kubernetes' own; None: not stated, and the runtime's.
        grace_seconds: From the signal to stop until the end; None: not stated.
        containers: The names of those of a pod that run together.
        job: The name of the replicated job that has them.
        handlers: The probes and the hooks of the program's container.
        filled: The names of the volumes that other containers of a pod mount, which may write what the program reads.
        working_dir: The folder in which the program starts; "": that of the image.
        node: The one node on which all of them run; "": a scheduler chooses.
    """

    kind: str
    path: str
    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    told: frozenset[str] | None = None
    num_pods: int | None = None
    requests: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    mounts: Sequence[Mapping[str, Any]] = ()
    volumes: Sequence[Mapping[str, Any]] = ()
    has_all_volumes: bool = True
    mounted: frozenset[str] = frozenset()
    ports: Sequence[Mapping[str, Any]] | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    is_queued: bool = False
    security: Mapping[str, Any] = field(default_factory=dict)
    shares_processes: bool | None = None
    grace_seconds: int | None = None
    containers: tuple[str, ...] = ()
    job: str = ""
    handlers: Mapping[str, Any] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    working_dir: str = ""
    node: str = ""

    @property
    def is_of_runtime(self) -> bool:
        """Whether the manifest only changes the pods of a runtime, which may have more than it says."""
        return self.kind == "TrainJob"

    @property
    def program(self) -> Sequence[str]:
        """The command line without the programs around the one that trains or serves."""
        return without_wrappers(self.words)

    @property
    def recipe(self) -> Sequence[str] | None:
        """The flags of the recipe that the pods run; None: a program of one's own, to which `manifest` gives no mesh."""
        words = tuple(self.program)
        if len(words) > 2 and is_python(words[0]) and words[1] == "-u":
            has_mesh = any(word.startswith("--mesh.") for word in words)
            return words[3:] if words[2].endswith(".py") and has_mesh else None
        begins = num_words(words, INSTALLED)
        return words[begins + 1 :] if begins else None

    @property
    def served(self) -> str | None:
        """The folder that `jaxpar serve` is given; None: none, or the pods run something else."""
        begins = num_words(self.program, SERVED)
        return served_folder(self.program[begins:]) if begins else None

    def flag(self, name: str) -> str | None:
        """Returns the value that the command gives to a flag; None if it does not."""
        return flag_value(self.words, name)

    @property
    def user(self) -> int | None:
        """The number of the user that the program runs as; None: that of the image."""
        return self.security.get("runAsUser")

    @property
    def shared_memory(self) -> Mapping[str, Any] | None:
        """The volume that is mounted as shared memory; None: there is none, or not one of the pod's volumes."""
        names = [
            mount["name"]
            for mount in self.mounts
            if PurePosixPath(mount["mountPath"]) == SHARED_MEMORY
        ]
        return next((volume for volume in self.volumes if volume["name"] in names), None)

    @property
    def missing_volumes(self) -> list[str]:
        """The names of the volumes that are mounted and that the manifest does not have."""
        return sorted(self.mounted - {volume["name"] for volume in self.volumes})

    @property
    def devices(self) -> tuple[int, str] | None:
        """The devices of a pod and what they are; None: not stated."""
        if FAKE_DEVICES in self.variables:
            return whole(self.variables[FAKE_DEVICES], FAKE_DEVICES), FAKE_DEVICES
        number = self.limits.get(GPUS, self.requests.get(GPUS))
        return None if number is None else (whole(number, GPUS), GPUS)

    @property
    def num_devices(self) -> int | None:
        """The devices of all pods; None: not stated."""
        each = self.devices
        return None if each is None or self.num_pods is None else each[0] * self.num_pods

    @property
    def mounted_at(self) -> set[PurePosixPath]:
        """The paths at which volumes are mounted, shared memory too."""
        return {PurePosixPath(mount["mountPath"]) for mount in self.mounts}

    @property
    def folders(self) -> dict[PurePosixPath, Mapping[str, Any]]:
        """The mounts of volumes that hold files, by their paths; shared memory holds none."""
        found = {PurePosixPath(mount["mountPath"]): mount for mount in self.mounts}
        return {path: mount for path, mount in found.items() if path != SHARED_MEMORY}

    def folder_of(self, path: str) -> Mapping[str, Any] | None:
        """Returns the mount that holds a path; None if it is in no volume."""
        place = PurePosixPath(normpath(join(self.working_dir, path)))  # without ..
        inside = [folder for folder in self.folders if place.is_relative_to(folder)]
        return self.folders[max(inside, key=lambda folder: len(folder.parts))] if inside else None

    def volume_of(self, path: str) -> Mapping[str, Any]:
        """Returns the volume that holds a path; an empty one if there is none, or the manifest does not have it."""
        name = (self.folder_of(path) or {}).get("name")
        return next((each for each in self.volumes if each["name"] == name), {})

    @property
    def pre_stop_seconds(self) -> int:
        """The seconds for which the preStop hook sleeps, before SIGTERM; 0: there is none, or what it does is not known."""
        hook = self.handlers.get("preStop", {})
        if "sleep" in hook:
            return whole(hook["sleep"]["seconds"], "the seconds of preStop")
        found = SLEEP.search(" ".join(hook.get("exec", {}).get("command", [])))
        return int(found[1]) if found else 0


def served_folder(words: Sequence[str]) -> str | None:
    """Returns the folder among the arguments of `jaxpar serve`, whose flags each take a value; None if there is none.

    >>> served_folder(["--max-tokens", "64", "--model-name=gpt", "runs/gpt"])
    'runs/gpt'
    """
    position = 0
    while position < len(words) and words[position].startswith("-"):
        position += 1 if "=" in words[position] else 2
    return words[position] if position < len(words) else None


def mesh_of_flags(command: Sequence[str]) -> dict[str, int]:
    """Returns the sizes of the mesh's axes that a command line gives as flags of recipes, whatever its program.

    >>> mesh_of_flags(("python", "train.py", "--mesh.data", "4", "--mesh.tensor=2"))
    {'data': 4, 'tensor': 2}
    """
    given = {axis: flag_value(command, f"--mesh.{axis}") for axis in AXES}
    return {
        axis: int(value)
        for axis, value in given.items()
        if value and re.fullmatch(r"-?\d{1,9}", value)
    }


def fills(sizes: Mapping[str, int], num_devices: int) -> bool:
    """Returns whether a mesh of these sizes, of which one may be -1, for the rest, has a number of devices."""
    asked = math.prod(size for size in sizes.values() if size != -1)
    if min(asked, num_devices) < 1:
        return False
    return num_devices % asked == 0 if -1 in sizes.values() else num_devices == asked


def workloads(manifest: Mapping[str, Any]) -> Iterator[Workload]:
    """Yields the pods of a manifest; of a kind without pods, none. A field whose text is empty is one that is not there."""
    given = _without_empty(manifest)
    metadata = given["metadata"]
    of_manifest = {"name": metadata["name"], "is_queued": QUEUE in metadata.get("labels", {})}
    for pods in _pods_of(given):
        yield replace(pods, **of_manifest)


def _without_empty(part: Any) -> Any:
    """Returns a part of a manifest without the fields whose text is empty, as templates write what they have no value for."""
    if isinstance(part, list):
        return [_without_empty(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    return {name: _without_empty(value) for name, value in part.items() if value != ""}


def _pods_of(manifest: Mapping[str, Any]) -> Iterator[Workload]:
    kind, spec = manifest["kind"], manifest["spec"]
    if kind == "JobSet":
        for number, job in enumerate(spec["replicatedJobs"]):
            of_job = job["template"]["spec"]
            pods = _of_pods(kind, f"spec.replicatedJobs.{number}", of_job["template"])
            yield replace(
                pods,
                num_pods=of_job.get("parallelism"),
                volumes=[*pods.volumes, *_claimed(manifest, pods.mounted)],
                job=job["name"],
            )
    elif kind == "Deployment":
        yield _of_pods(kind, "spec.template", spec["template"])
    elif kind == "TrainJob":
        yield _of_trainjob(spec)


def claim_templates(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the PersistentVolumeClaims that a JobSet makes, and mounts by their names, from its spec."""
    return [each for policy in spec.get("volumeClaimPolicies", []) for each in policy["templates"]]


def _claimed(manifest: Mapping[str, Any], mounted: frozenset[str]) -> list[Mapping[str, Any]]:
    """Returns the volumes of those claims that pods mount, named as JobSet names them."""
    names = [each["metadata"]["name"] for each in claim_templates(manifest["spec"])]
    of = manifest["metadata"]["name"]
    return [
        {"name": name, "persistentVolumeClaim": {"claimName": f"{name}-{of}"}}
        for name in names
        if name in mounted
    ]


def _of_trainjob(spec: Mapping[str, Any]) -> Workload:
    """Returns the pods of a TrainJob: those of a patch of its runtime, whose program its trainer describes."""
    trainer = spec["trainer"]
    jobs = [job for patch in spec.get("runtimePatches", []) for job in patched_jobs(patch)]
    job = _named(jobs or [{}], NODE)
    template = job.get("template", {}).get("spec", {}).get("template", {})
    pod = template.get("spec", {})
    node = _named(pod.get("containers") or [{}], NODE)
    program = {**node, **trainer, "resources": trainer.get("resourcesPerNode", {})}
    return replace(
        _of_program("TrainJob", "spec.trainer", template, program),
        num_pods=trainer.get("numNodes"),
        has_all_volumes=False,
        ports=None,
        shares_processes=None,
        job=job.get("name", ""),
    )


def patched_jobs(patch: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the jobs of a TrainJob's runtime that one of its patches changes."""
    return (
        patch.get("trainingRuntimeSpec", {})
        .get("template", {})
        .get("spec", {})
        .get("replicatedJobs", [])
    )


def _named(parts: Sequence[Mapping[str, Any]], *names: str) -> Mapping[str, Any]:
    """Returns the first part that has one of some names, or else the first."""
    return next((each for each in parts if each.get("name") in names), parts[0])


def _of_pods(kind: str, path: str, template: Mapping[str, Any]) -> Workload:
    return _of_program(
        kind, path, template, _named(template["spec"]["containers"], "train", "serve")
    )


def _of_program(
    kind: str, path: str, template: Mapping[str, Any], program: Mapping[str, Any]
) -> Workload:
    """Returns pods by their template and the container of their program, whatever the kind of manifest."""
    pod = template.get("spec", {})
    resources = program.get("resources", {})
    return Workload(
        kind=kind,
        path=path,
        words=_words(program),
        variables=_variables(program),
        fields=_fields(program),
        told=_told(program),
        requests=resources.get("requests", {}),
        limits=resources.get("limits", {}),
        mounts=program.get("volumeMounts", []),
        volumes=pod.get("volumes", []),
        mounted=_mounted(pod),
        ports=program.get("ports", []),
        annotations=template.get("metadata", {}).get("annotations", {}),
        security={**pod.get("securityContext", {}), **program.get("securityContext", {})},
        shares_processes=bool(pod.get("shareProcessNamespace")),
        grace_seconds=pod.get("terminationGracePeriodSeconds"),
        containers=tuple(each["name"] for each in pod.get("containers", [])),
        handlers={name: program[name] for name in PROBES if name in program}
        | program.get("lifecycle", {}),
        filled=_mounted(pod, without=program),
        working_dir=program.get("workingDir", ""),
        node=pod.get("nodeName") or "",
    )


def _words(container: Mapping[str, Any]) -> list[str]:
    words = [*container.get("command", []), *container.get("args", [])]
    return [word.replace("$$", "$") for word in words]


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables with their values; one of an empty value has it, such as the GPUs that a program may see."""
    return {
        each["name"]: each.get("value", "")
        for each in container.get("env", [])
        if "valueFrom" not in each
    }


def _fields(container: Mapping[str, Any]) -> dict[str, str]:
    given = {each["name"]: each.get("valueFrom", {}) for each in container.get("env", [])}
    return {
        name: source["fieldRef"]["fieldPath"]
        for name, source in given.items()
        if "fieldRef" in source
    }


def _told(container: Mapping[str, Any]) -> frozenset[str] | None:
    if "envFrom" in container:
        return None
    return frozenset(
        each["name"] for each in container.get("env", []) if each.keys() & {"value", "valueFrom"}
    )


def _mounted(
    spec: Mapping[str, Any], *, without: Mapping[str, Any] | None = None
) -> frozenset[str]:
    containers = [each for kind in CONTAINER_KINDS for each in spec.get(kind, [])]
    return frozenset(
        mount["name"]
        for each in containers
        if each is not without
        for mount in each.get("volumeMounts", [])
    )


def whole(value: Any, name: str) -> int:
    """Returns a count, which a manifest has as a number or as text; raises ValueError if it is none."""
    if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}", str(value)):
        raise ValueError(
            f"{name} must be a whole number; got {str(value)[:80]!r}. Write it in digits."
        )
    return int(value)


def amount(value: Any, name: str) -> float:
    """Returns a quantity of Kubernetes, such as 800Gi; raises ValueError if it is none."""
    found = QUANTITY.fullmatch(str(value))
    if isinstance(value, bool) or not found:
        raise ValueError(
            f"{name} must be a quantity, such as 8 or 800Gi; got {str(value)[:80]!r}. Correct it."
        )
    unit = found[2] or ""
    if unit not in UNITS:  # an exponent
        return float(str(value))
    return float(found[1]) * UNITS[unit]
