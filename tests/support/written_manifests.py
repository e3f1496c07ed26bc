"""Manifests of each kind as `manifest` writes them, and edits by the names of their parts, for the tests of the check."""

import functools
import io
from contextlib import redirect_stdout
from typing import Any

import yaml

from jaxpar.commands.manifest import main

JOB = (
    *(
        "--image",
        "a:1",
        "--name",
        "gpt",
        "--mesh.data",
        "4",
        "--mesh.stage",
        "2",
        "--mesh.tensor",
        "2",
        "--queue",
        "q",
    ),
    *(
        "--replica-topology",
        "example.com/rack",
        "--memory-gib",
        "800",
        "--cpus",
        "8",
        "--rdma",
        "rdma/ib=8",
    ),
    *(
        "--checkpoint-claim",
        "runs",
        "--cache-claim",
        "programs",
        "--metrics-port",
        "9090",
        "--namespace",
        "lab",
    ),
    *(
        "recipes/gpt.py",
        "--out-dir",
        "/checkpoints/gpt",
        "--data",
        "/checkpoints/rows",
        "--checkpoint-every",
        "9",
    ),
)
FAKE = ("--image", "a:1", "--mesh.data", "8", "--fake-devices-per-node", "4", "recipes/gpt.py")
SERVED = (
    "--kind",
    "service",
    "--image",
    "a:1",
    "--name",
    "gpt",
    "--namespace",
    "lab",
    "--checkpoint-claim",
    "runs",
)
SERVED = (*SERVED, "--service.gpus", "1", "jaxpar", "serve", "/checkpoints/gpt")
MONITOR = ("--kind", "podmonitor", "--name", "gpt", "--namespace", "lab", "--metrics-port", "9090")
OWN = (
    "--image",
    "a:1",
    "--mesh.data",
    "8",
    "--checkpoint-claim",
    "runs",
    "mine",
    "/checkpoints/a",
    "--mesh.data",
    "3",
)
WRITTEN = {
    "jobset": [JOB],
    "trainjob": [("--kind", "trainjob", *JOB)],
    "fake": [FAKE],
    "service": [SERVED],
    "own": [OWN],
    "monitor": [MONITOR, JOB],
}
JOB_AT = "spec replicatedJobs 0 template spec"
PATCHED = "spec runtimePatches 0 trainingRuntimeSpec template spec replicatedJobs 0"
PATCH = f"{PATCHED} template spec template"
PLACES = {
    "jobset": {
        "job": JOB_AT,
        "pod": f"{JOB_AT} template spec",
        "notes": f"{JOB_AT} template metadata annotations",
    },
    "trainjob": {
        "main": "spec trainer",
        "pod": f"{PATCH} spec",
        "notes": f"{PATCH} metadata annotations",
    },
    "service": {"pod": "spec template spec", "notes": "spec template metadata annotations"},
}
PLACES |= {"fake": PLACES["jobset"], "own": PLACES["jobset"], "monitor": {}}
MAIN = {
    kind: {"main": f"{places.get('pod')} containers 0"} | places for kind, places in PLACES.items()
}
SCRAPED, SLICE = "prometheus.io/port", "kueue.x-k8s.io/podset-slice-size"
GPU, LIMITS, REQUESTS = "nvidia.com/gpu", "main resources limits", "main resources requests"
COORDINATOR, BOUND = (
    "main env JAX_COORDINATOR_ADDRESS value",
    "main env JAX_COORDINATOR_BIND_ADDRESS value",
)


@functools.cache
def written(kind: str) -> str:
    """Returns what `manifest` prints for a kind of ``WRITTEN``, in one file."""
    with redirect_stdout(io.StringIO()) as printed:
        for flags in WRITTEN[kind]:
            print("---")
            main(flags)
    return printed.getvalue()


def documents(kind: str) -> Any:
    """Returns its documents."""
    return yaml.safe_load_all(written(kind))


def edit(manifest: Any, kind: str, place: str, value: Any) -> None:
    """Sets a value, deletes it for None, or appends it for +. A name in a list is that of an item, or the word before one."""
    first, *rest = place.split(" ")
    *path, last = [*MAIN[kind].get(first, first).split(), *rest]
    part = manifest
    for key in path:
        part = part[index(part, key)]
    if last == "+":
        part.append(value)
    elif value is None:
        del part[index(part, last)]
    else:
        part[index(part, last)] = value


def index(part: Any, key: str) -> Any:
    if not isinstance(part, list):
        return key
    if key.isdigit():
        return int(key)
    return part.index(key) + 1 if key in part else [each.get("name") for each in part].index(key)
