"""The rules of a TrainJob that are about several fields: those of Kubeflow's Trainer, and of what its runtime does.

    runtimePatches:
    - trainingRuntimeSpec: ... containers: [{name: node, env: ...}]    the webhook refuses it: variables belong to trainer.env

Reference:
    The webhook: pkg/runtime/framework/plugins/jobset of github.com/kubeflow/trainer. What the runtime sets: plugins/jax.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpar.jobs.job_sets import OWN_CONTROLLERS
from jaxpar.jobs.manifests import PARTS
from jaxpar.jobs.pods import check_references
from jaxpar.jobs.workload import CONTAINER_KINDS, NODE, patched_jobs, workloads
from jaxpar.runtime.process_env import NAMES

RUNTIME = PARTS["TrainJob"]["spec"]["runtimeRef"]["name"]
MANAGERS = (OWN_CONTROLLERS["TrainJob"], "kueue.x-k8s.io/multikueue")
OF_TRAINER = (NODE, "dataset-initializer", "model-initializer")  # whose variables no patch sets


def check_train_job(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if two parts of a TrainJob are at odds, so that Trainer refuses it or starts other processes."""
    spec = manifest["spec"]
    trainer, of_runtime = spec["trainer"], {"envFrom": []}  # variables that are on the cluster
    check_references([{**trainer, **of_runtime}], "spec.trainer")
    count = trainer.get("numNodes")
    told = {each["name"]: each.get("value") for each in trainer.get("env", [])}
    given = told.get("JAX_NUM_PROCESSES")
    if None not in (given, count) and given != str(count):
        raise ValueError(
            f"JAX_NUM_PROCESSES must be the number of pods; got {given}, numNodes {count}. Leave it out: the runtime sets it."
        )
    each = trainer.get("numProcPerNode", 1)
    if each not in (1, "1", "auto"):
        raise ValueError(
            f"numProcPerNode must be 1, since a pod is one process of the run, with all its GPUs; got {each}. Leave it out."
        )
    manager = spec.get("managedBy", MANAGERS[0])
    if manager not in MANAGERS:
        raise ValueError(
            f"managedBy of a TrainJob must be {' or '.join(MANAGERS)}; got {manager}. Leave it out."
        )
    _check_patches(spec)


def _check_patches(spec: Mapping[str, Any]) -> None:
    patches = spec.get("runtimePatches", [])
    managers = [patch["manager"] for patch in patches]
    for name in managers:
        if managers.count(name) > 1:
            raise ValueError(
                f"the patches of spec.runtimePatches must have different managers; got {name!r} twice. Write one patch."
            )
    pods = [
        job.get("template", {}).get("spec", {}).get("template", {}).get("spec", {})
        for patch in patches
        for job in patched_jobs(patch)
    ]
    for each in (each for pod in pods for kind in CONTAINER_KINDS for each in pod.get(kind, [])):
        if each.get("env") and each["name"] in OF_TRAINER:
            raise ValueError(
                f"the container {each['name']} of spec.runtimePatches must have no env, which Trainer refuses; got "
                f"{each['env'][0]['name']}. Write it in spec.trainer.env."
            )


def train_job_remarks(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each part that a TrainJob leaves to its runtime, or changes where its runtime may have none."""
    if manifest["kind"] != "TrainJob":
        return
    runtime, trainer = (
        manifest["spec"].get("runtimeRef", {}).get("name", RUNTIME),
        manifest["spec"]["trainer"],
    )
    if "jax" not in runtime:
        yield (
            f"spec.runtimeRef is {runtime}: a run needs the variables of Trainer's runtime for JAX. Name {RUNTIME}, or one of "
            "your own that sets them"
        )
    own = [each["name"] for each in trainer.get("env", []) if each["name"] in NAMES]
    if own and "jax" in runtime:
        yield (
            f"spec.trainer.env has {', '.join(own)}: Trainer's runtime for JAX writes its own values over these. Leave them out"
        )
    if "image" not in trainer:
        yield "spec.trainer has no image: that of the runtime is used, which may have neither jaxpar nor the program. Name it"
    for pods in workloads(manifest):
        for kind, names in (
            ("job", [pods.job] if pods.job else []),
            ("container", pods.containers),
        ):
            if names and NODE not in names:
                yield (
                    f"spec.runtimePatches changes the {kind} {names[0]}: in the runtimes of Trainer the {kind} that trains is "
                    f"{NODE}, which this does not change. Name it {NODE}"
                )
        if pods.missing_volumes:
            yield (
                f"spec.runtimePatches mounts {', '.join(pods.missing_volumes)} and has no such volumes: without those of the "
                "runtime the pods are refused. Add them to the volumes of the patch"
            )
