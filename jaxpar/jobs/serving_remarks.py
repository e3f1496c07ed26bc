"""Remarks on pods that serve a model by `jaxpar serve`: what they lack to find it, to start and to end."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from jaxpar.jobs.job import CHECKPOINTS, flag_values
from jaxpar.jobs.workload import Workload, amount, workloads
from jaxpar.runtime.host_names import ANY

UNPROBED = {  # what happens without a probe
    "startupProbe": "one that takes long to start is ended by its livenessProbe",
    "livenessProbe": "one that hangs is not started again",
    "readinessProbe": "requests reach one that is still loading its model, and get 503",
}
UNREQUESTED = {  # what happens without a request
    "cpu": "where its node is busy a pod gets almost no cores, and its probes fail",
    "memory": "none is kept for a pod, which is the first to be ended where its node runs out of it",
}
EMPTY = frozenset({"emptyDir", "ephemeral"})  # volumes that are made with their pod
LEAST_START = 300  # seconds


def serving_remarks(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each way in which the pods of a Deployment may not serve as was meant."""
    if manifest["kind"] != "Deployment":
        return
    if manifest["spec"].get("replicas") == 0:
        yield "spec.replicas is 0: there are no pods, and requests reach none. Write 1, unless something else starts them"
    for pods in workloads(manifest):
        yield from _unheld_folder(pods)
        yield from _unrequested(pods)
        if pods.served:
            yield from _unnamed(pods)
            yield from _unprobed(manifest["spec"]["template"]["spec"]["containers"])


def service_remarks(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each port of a headless Service that clients do not reach: its name is that of the pods themselves."""
    spec = manifest["spec"]
    if manifest["kind"] != "Service" or spec.get("clusterIP") != "None":
        return
    for port in spec["ports"]:
        target = port.get("targetPort", port["port"])
        if target != port["port"]:
            yield (
                f"spec.clusterIP is None: clients reach the pods themselves, at their own ports, and port {port['port']} is "
                f"not mapped to {target}. Leave clusterIP out"
            )


def _unheld_folder(pods: Workload) -> Iterator[str]:
    """Yields a line if the folder that is served is in no volume."""
    folder = pods.served or ""
    volume = pods.volume_of(folder)
    if EMPTY.intersection(volume) and volume["name"] not in pods.filled:
        yield (
            f"the folder to serve is {folder}, in the volume {volume['name']}, which is empty when a pod starts, and no other "
            "container writes to it. Name a claim, or add an init container that fills it"
        )
    if pods.folder_of(folder) is not None:
        return
    mounts = " and ".join(sorted(map(str, pods.folders)))
    claim = f"the claim is mounted at {mounts}" if mounts else "there is no --checkpoint-claim"
    name = PurePosixPath(folder).name
    yield (
        f"the folder to serve is {folder} and {claim}: it must be in the image. If it is on a volume, name its claim, and give "
        f"the folder below {CHECKPOINTS}: --checkpoint-claim runs ... jaxpar serve {CHECKPOINTS}/{name}"
    )


def _unnamed(pods: Workload) -> Iterator[str]:
    """Yields a line if pods refuse the requests that other pods of their cluster send to the Service."""
    given = flag_values(pods.words, "--allowed-hosts")
    own = [name for name in given if name.partition(".")[0] == pods.name]
    if given and not own and ANY not in given:
        yield (
            f"--allowed-hosts has {', '.join(given)} and not {pods.name}, the name of the Service: requests from inside the "
            f"cluster get 421. If there are any, add --allowed-hosts {pods.name}"
        )


def _unrequested(pods: Workload) -> Iterator[str]:
    """Yields a line for what is not kept for pods."""
    given = {**pods.requests, **pods.limits}  # the API takes a limit for a request that is missing
    as_written = "as `manifest --kind service` does"
    if not given:
        yield (
            f"{pods.path} requests no resources: a pod gets no GPU, and neither cores nor memory are kept for it. Write them "
            f"{as_written}"
        )
        return
    for name, what_follows in UNREQUESTED.items():
        if not amount(given.get(name, 0), name):
            yield f"{pods.path} requests no {name}: {what_follows}. Write it {as_written}"


def _unprobed(containers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each probe or hook that pods which serve do not have, or that ends them while they start."""
    missing = [probe for probe in UNPROBED if not any(probe in each for each in containers)]
    for probe in missing:
        yield f"the pods have no {probe}: {UNPROBED[probe]}. Write it as `manifest --kind service` does"
    for probe in (each["startupProbe"] for each in containers if "startupProbe" in each):
        period, failures = probe.get("periodSeconds") or 10, probe.get("failureThreshold") or 3
        seconds = period * failures  # those of the API where there is none, or 0
        if seconds < LEAST_START:
            yield (
                f"startupProbe ends a pod that has not loaded its model after {seconds} s. Raise its failureThreshold, 180, say"
            )
    if not any("preStop" in each.get("lifecycle", {}) for each in containers):
        yield (
            "the pods have no lifecycle.preStop: requests that arrive while a pod is stopped are refused. Write it as "
            "`manifest --kind service` does"
        )
