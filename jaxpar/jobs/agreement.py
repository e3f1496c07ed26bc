"""Compares what a manifest says twice: the mesh of the command with the pods and their GPUs, folders with mounts, and ports.

A manifest that was edited by hand in one of two places is one that its API accepts and that does not work.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from jaxpar.jobs.job import AXES, CHECKPOINTS, LEAST_PORT, ROOT, is_accelerator
from jaxpar.jobs.manifests import PARTS
from jaxpar.jobs.workload import FAKE_DEVICES, USUAL_GRACE, Workload, amount, fills, whole
from jaxpar.runtime.output import printable

CACHE, THREADS = "JAX_COMPILATION_CACHE_DIR", "PJRT_NPROC"
ONCE = (
    *(f"--mesh.{axis}" for axis in AXES),
    "--metrics-port",
    "--out-dir",
)  # flags that other parts of a manifest depend on
SCRAPED, SCRAPED_PORT, SCRAPED_PATH = (
    f"prometheus.io/{name}" for name in ("scrape", "port", "path")
)
METRICS_PATH = "/metrics"  # of a run and of a server, and Prometheus's own default
MOST_PORTS = 2**16
WRITTEN = ("--out-dir", "--save-hf")  # folders of a recipe
READ_ONLY = (
    "configMap",
    "secret",
    "projected",
    "downwardAPI",
    "image",
)  # volumes, whatever they say
TEMPORARY = "/tmp"  # where what is written may be lost
METRICS = (
    "--metrics-port",
    "metrics",
    "--metrics-address",
)  # the flag of a port, the port's name, the flag of where it listens
SERVER = ("--port", "http", "--address")
# The probes of `jaxpar serve`. It answers /healthz while it loads a model, and /readyz by 503, which ends what is not live.
PROBES = {
    "startupProbe": ("/healthz", "/readyz"),
    "livenessProbe": ("/healthz",),
    "readinessProbe": ("/readyz",),
}
(PATTERN,) = PARTS["JobSet"]["spec"]["failurePolicy"]["rules"][0]["onJobFailureMessagePatterns"]
BEFORE_CODES, AFTER_CODES = PATTERN.split("{final_pattern}")
LOOPBACK = ("127.", "localhost", "::1", "[::1]")


def check_agreement(pods: Workload) -> None:
    """Raises ValueError if two parts of a manifest say different things of its pods."""
    _check_given_once(pods)
    _check_resources(pods)
    _check_devices(pods)
    _check_mesh(pods)
    _check_volumes(pods)
    _check_folders(pods)
    _check_ports(pods)
    _check_coordinator(pods)


def _check_given_once(pods: Workload) -> None:
    flags = pods.recipe or ()
    for name in ONCE:
        values = {value for (word, value) in _flags(flags) if word == name}
        if len(values) > 1:
            raise ValueError(
                f"the command of {pods.path} must have {name} once; got {_listed(sorted(values))}. Leave one out."
            )


def _flags(words: Any) -> list[tuple[str, str]]:
    return [
        (word.partition("=")[0], word.partition("=")[2] if "=" in word else after)
        for word, after in pairwise([*words, ""])
    ]


def _check_resources(pods: Workload) -> None:
    for name, wanted in pods.requests.items():
        limit, is_device = pods.limits.get(name), "/" in name
        if limit is None and not is_device:
            continue
        more = limit is not None and amount(wanted, name) > amount(limit, name)
        if more or (is_device and (limit is None or amount(wanted, name) != amount(limit, name))):
            rule = "the same" if is_device else "at most the limit"
            raise ValueError(
                f"{name} of {pods.path} must be {rule} in requests and limits; got {wanted} and {limit}. Make them equal."
            )
    memory = pods.limits.get("memory")
    for volume in pods.volumes:
        size = volume.get("emptyDir", {}).get("sizeLimit") if "emptyDir" in volume else None
        if size is None or memory is None or volume["emptyDir"].get("medium") != "Memory":
            continue
        if amount(size, "sizeLimit") >= amount(memory, "memory"):
            raise ValueError(
                f"memory of {pods.path} must be more than that of its volume {volume['name']}, which counts towards it; got "
                f"{memory} and {size}. Raise the memory, or lower the sizeLimit."
            )


def _check_devices(pods: Workload) -> None:
    if FAKE_DEVICES not in pods.variables:
        return
    gpus = sorted(filter(is_accelerator, {**pods.requests, **pods.limits}))
    if gpus:
        raise ValueError(
            f"pods have GPUs or fake devices; got {gpus[0]} and {FAKE_DEVICES} in {pods.path}. Leave one out."
        )
    number = whole(pods.variables[FAKE_DEVICES], FAKE_DEVICES)
    threads = pods.variables.get(THREADS)
    if threads is None or whole(threads, THREADS) < 2 * number:
        raise ValueError(
            f"{THREADS} must be twice {FAKE_DEVICES}, or collectives deadlock; got {threads or 'none'} and {number} in "
            f"{pods.path}. Write {2 * number}."
        )


def mesh_in(pods: Workload) -> dict[str, int]:
    """Returns the sizes of the mesh's axes that a recipe's command has; none of other programs."""
    given = {axis: pods.flag(f"--mesh.{axis}") for axis in AXES} if pods.recipe is not None else {}
    return {
        axis: whole(value, f"--mesh.{axis}") for axis, value in given.items() if value is not None
    }


def _check_mesh(pods: Workload) -> None:
    sizes, devices = mesh_in(pods), pods.devices
    if not sizes or devices is None or pods.num_pods is None:
        return
    each, kind = devices
    there, asked = each * pods.num_pods, math.prod(size for size in sizes.values() if size != -1)
    shown = ", ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    if not fills(sizes, there):
        raise ValueError(
            f"the mesh in the command of {pods.path} must have the devices of its pods; got {shown}, {asked} devices, and "
            f"{pods.num_pods} pods with {kind} {each}, {there} devices. Make them equal."
        )
    tensor = sizes.get("tensor", 1)
    if tensor > 1 and each % tensor:
        raise ValueError(
            f"the tensor axis must stay inside a pod; got --mesh.tensor {tensor} and {kind} {each} in {pods.path}. Correct "
            "one of them."
        )


def _check_volumes(pods: Workload) -> None:
    names = [volume["name"] for volume in pods.volumes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"the volumes of {pods.path} must have different names; got {name!r} twice. Leave one out, or rename it."
            )
    for volume in pods.volumes:
        if volume["name"] not in pods.mounted:
            raise ValueError(
                f"the volumes of {pods.path} must be mounted; got {volume['name']!r}, which no container mounts. Mount it, or "
                "leave it out."
            )
    paths = [mount["mountPath"] for mount in pods.mounts]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(
                f"a path may have one mount; got two at {path} in {pods.path}. Leave one out."
            )
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pods.volumes if _is_claim(volume)
    ]
    for claim in claims:
        if CACHE in pods.variables and claims.count(claim) > 1:
            raise ValueError(
                f"the claim with compiled programs, which the next start runs, must not be shared; got {claim} for two volumes "
                f"of {pods.path}. Name another one."
            )


def _is_claim(volume: Mapping[str, Any]) -> bool:
    return "persistentVolumeClaim" in volume


def _check_folders(pods: Workload) -> None:
    cache = pods.variables.get(CACHE)
    if cache is not None and not _is_temporary(cache) and pods.folder_of(cache) is None:
        raise ValueError(
            f"{CACHE} of {pods.path} must be in a volume; got {cache}, and {_mounts(pods)}. Make them equal."
        )
    if not pods.folders:  # the image may have all that the command names
        return
    out_dir = pods.flag("--out-dir") if pods.recipe is not None else None
    named = [("a folder in the command", path) for path in paths_in(pods, CHECKPOINTS)]
    if pods.served is not None and pods.served.startswith("/"):
        named.append(("the folder to serve", pods.served))
    if out_dir is not None and out_dir.startswith("/") and not _is_temporary(out_dir):
        named.append(("--out-dir", out_dir))
    for what, path in named:
        if pods.folder_of(path) is None:
            raise ValueError(
                f"{what} of {pods.path} must be in a volume; got {printable(path)}, and {_mounts(pods)}. Make them equal."
            )
    for flag in WRITTEN if pods.recipe is not None else ():
        _check_writable(pods, flag)


def _check_writable(pods: Workload, flag: str) -> None:
    """Raises ValueError if what the command of a recipe writes is in a volume to which it cannot write."""
    path = pods.flag(flag)
    mount = None if path is None else pods.folder_of(path)
    if path is None or mount is None:
        return
    volume = pods.volume_of(path)
    parts = [mount, *(each for each in volume.values() if isinstance(each, Mapping))]
    rule = f"{flag} of {pods.path} must be writable; got {printable(path)} in"
    if any(each.get("readOnly") for each in parts):
        raise ValueError(f"{rule} a volume with readOnly. Remove it.")
    for kind in (each for each in READ_ONLY if each in volume):
        raise ValueError(
            f"{rule} the volume {volume['name']}, whose {kind} is always read-only. Write a persistentVolumeClaim in its "
            "place, as `manifest --checkpoint-claim` does."
        )


def paths_in(pods: Workload, folder: str) -> list[str]:
    """Returns the words of a command, or values of its flags, that are paths in a folder."""
    values = [
        word.partition("=")[2] if word.startswith("--") and "=" in word else word
        for word in pods.words
    ]
    return [value for value in values if PurePosixPath(value).is_relative_to(folder)]


def _is_temporary(path: str) -> bool:
    return PurePosixPath(path).is_relative_to(TEMPORARY)


def _mounts(pods: Workload) -> str:
    return (
        f"mounts at {_listed(sorted(map(str, pods.folders)))}"
        if pods.folders
        else "no mount but shared memory"
    )


def _check_ports(pods: Workload) -> None:
    """Raises unless the port of metrics is one: in the annotation, in the container's ports and in the command."""
    flag, name, address = SERVER if pods.kind == "Deployment" else METRICS
    takes_flags = pods.kind == "Deployment" or pods.recipe is not None
    told = {SCRAPED_PORT: pods.annotations.get(SCRAPED_PORT)}
    if pods.ports is not None:
        told[f"containerPort {name}"] = next(
            (str(p["containerPort"]) for p in pods.ports if p.get("name") == name), None
        )
    if not any(told.values()):
        return
    if takes_flags:
        told[flag] = pods.flag(flag)
    if pods.annotations.get(SCRAPED_PATH, METRICS_PATH) != METRICS_PATH:
        raise ValueError(
            f"{SCRAPED_PATH} of {pods.path} must be {METRICS_PATH}, where the metrics are; got "
            f"{printable(pods.annotations[SCRAPED_PATH])}. Correct it."
        )
    needed = {key: value for key, value in told.items() if value or key != SCRAPED_PORT}
    if len({*needed.values()}) > 1:
        given = _listed([f"{key} {value or 'missing'}" for key, value in needed.items()])
        raise ValueError(
            f"the port of {pods.path} must be the same everywhere; got {given}. Make them equal."
        )
    listens = pods.flag(address) or "127.0.0.1"  # the default
    if takes_flags and listens.startswith(LOOPBACK):
        raise ValueError(
            f"the port of {pods.path} must be reached from other pods; got {address} {printable(listens)}. Give {address} "
            "0.0.0.0."
        )


def _check_coordinator(pods: Workload) -> None:
    ports = {
        name: pods.variables[name].rpartition(":")[2]
        for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS")
        if name in pods.variables
    }
    listed = {str(port["containerPort"]) for port in pods.ports or ()}
    if len(set(ports.values())) > 1:
        given = ", ".join(f"{name} {port}" for name, port in ports.items())
        raise ValueError(f"process 0 of {pods.path} has one port; got {given}. Make them equal.")
    for name, port in ports.items():
        if listed and port not in listed:
            raise ValueError(
                f"the port of {name} must be a containerPort of {pods.path}; got {port}, and {_listed(sorted(listed))}. Make "
                "them equal."
            )
    for name, port in _ports_of_program(pods).items():
        _check_port(port, name, pods)
        if port in ports.values():
            raise ValueError(
                f"{name} of {pods.path} must be another port than process 0's; got {port}, that of {', '.join(ports)} too. "
                "Choose 9090, say."
            )


def _ports_of_program(pods: Workload) -> dict[str, str]:
    """Returns the ports at which a program answers others than its processes, by where the manifest has them."""
    flag, name, _ = SERVER if pods.kind == "Deployment" else METRICS
    takes_flags = pods.served is not None or pods.recipe is not None
    found = {
        flag: pods.flag(flag) if takes_flags else None,
        SCRAPED_PORT: pods.annotations.get(SCRAPED_PORT),
    }
    found |= {
        f"containerPort {name}": str(port["containerPort"])
        for port in pods.ports or ()
        if port.get("name") == name
    }
    return {
        where: port for where, port in found.items() if port not in (None, "0") and "$(" not in port
    }


def _check_port(port: str, name: str, pods: Workload) -> None:
    least = LEAST_PORT if pods.user not in (None, ROOT) else 1
    if not least <= whole(port, name) < MOST_PORTS:
        why = ", since lower ones are for root" if least > 1 else ""
        raise ValueError(
            f"{name} of {pods.path} must be from {least} to {MOST_PORTS - 1}{why}; got {port}. Choose 9090, say."
        )


def _listed(values: list[str]) -> str:
    return printable(", ".join(values))


def check_exit_codes(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if a JobSet's failure policy names other exit codes than the rules of its Jobs."""
    jobs = [job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    rules = [
        rule
        for job in jobs
        for rule in job.get("podFailurePolicy", {}).get("rules", [])
        if "onExitCodes" in rule
    ]
    known = [sorted(rule["onExitCodes"]["values"]) for rule in rules]
    for rule in manifest["spec"].get("failurePolicy", {}).get("rules", []):
        for pattern in rule.get("onJobFailureMessagePatterns", []):
            codes = codes_in(pattern)
            if codes and codes not in known:
                raise ValueError(
                    f"the exit codes of failurePolicy must be those of a rule of podFailurePolicy; got {codes} and {known}. "
                    "Make them equal."
                )


def codes_in(pattern: str) -> list[int]:
    """Returns the exit codes in a pattern as `manifest` writes it; of another, none: it may be hostile, and is not run."""
    found = re.fullmatch(
        rf"{re.escape(BEFORE_CODES)}(\d{{1,3}}(?:\|\d{{1,3}})*){re.escape(AFTER_CODES)}",
        pattern,
        re.ASCII,
    )
    return sorted(map(int, found[1].split("|"))) if found else []


def check_grace(pods: Workload) -> None:
    """Raises ValueError if pods that serve are ended before they have answered the requests that they have."""
    given = pods.flag("--timeout-seconds")
    grace = USUAL_GRACE if pods.grace_seconds is None else pods.grace_seconds
    first = pods.pre_stop_seconds
    if given is not None and grace < first + amount(given, "--timeout-seconds"):
        beside = f", after {first} s of preStop" if first else ""
        raise ValueError(
            f"terminationGracePeriodSeconds of {pods.path} must be more than --timeout-seconds{beside}; got {grace} and "
            f"{given}. Raise it."
        )


def check_num_pods(pods: Workload) -> None:
    """Raises ValueError if a job has no pods: it would end as if it had trained."""
    if pods.kind != "Deployment" and pods.num_pods == 0:
        field = "numNodes" if pods.kind == "TrainJob" else "parallelism"
        raise ValueError(
            f"{field} of {pods.path} must be the number of processes, at least 1; got 0. Write their number, or suspend: true "
            "in spec for a job that shall wait."
        )


def check_probes(containers: Sequence[Mapping[str, Any]], *, is_served: bool) -> None:
    """Raises ValueError if a probe asks a port or a path that pods do not have, or by HTTPS: none would become ready.

    Args:
        containers: Those of a pod.
        is_served: Whether they run `jaxpar serve`.
    """
    ports = [port for each in containers for port in each.get("ports", [])]
    known = {port.get("name") for port in ports} | {port["containerPort"] for port in ports}
    asked = (
        (probe, each[probe]["httpGet"])
        for each in containers
        for probe in PROBES
        if "httpGet" in each.get(probe, {})
    )
    for probe, request in asked:
        port, path = request.get("port"), request.get("path", "/")
        if port is not None and port not in known:
            raise ValueError(
                f"{probe} must ask a named port of the container; got {port!r}. Correct it."
            )
        if is_served and path not in PROBES[probe]:
            raise ValueError(
                f"{probe} must ask for {' or '.join(PROBES[probe])}; got {path!r}. Correct it."
            )
        if is_served and request.get("scheme") == "HTTPS":
            raise ValueError(
                f"{probe} must ask by HTTP, which `jaxpar serve` speaks; got the scheme HTTPS. Leave it out."
            )
