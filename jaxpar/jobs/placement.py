"""Where pods are placed, and whether all start: what Kueue is told in the annotations of a job's pods.

    kueue.x-k8s.io/podset-slice-size: "2"    two pods hold the replicas of a stage, and are in one rack

Reference:
    The annotations and their rules: pkg/controller/jobframework/tas_validation.go of github.com/kubernetes-sigs/kueue.
"""

import math
from collections.abc import Iterator

from jaxpar.jobs import forms
from jaxpar.jobs.agreement import mesh_in
from jaxpar.jobs.workload import FAKE_DEVICES, Workload, whole
from jaxpar.runtime.output import printable

KUEUE = "kueue.x-k8s.io"
REQUIRED, PREFERRED, UNCONSTRAINED = (
    f"{KUEUE}/podset-{how}-topology" for how in ("required", "preferred", "unconstrained")
)
SLICE, SLICE_SIZE = f"{KUEUE}/podset-slice-required-topology", f"{KUEUE}/podset-slice-size"
LABELS = (REQUIRED, PREFERRED, SLICE)  # whose value is the label of a node


def check_placement(pods: Workload) -> None:
    """Raises ValueError if what Kueue is told of the places of pods is contradictory, or not what their mesh needs."""
    given = [name for name in (REQUIRED, PREFERRED, UNCONSTRAINED) if name in pods.annotations]
    if len(given) > 1:
        raise ValueError(
            f"pods must have one of {', '.join(given)}; got {len(given)} in {pods.path}. Leave all but one out."
        )
    for name in (name for name in LABELS if name in pods.annotations):
        value = pods.annotations[name]
        if forms.broken_rule("qualified", value):
            raise ValueError(
                f"{name} of {pods.path} must be the label of a node, as in example.com/rack; got "
                f"{printable(repr(value))[:80]}. Correct it."
            )
    _check_slices(pods)


def _check_slices(pods: Workload) -> None:
    label, size = pods.annotations.get(SLICE), pods.annotations.get(SLICE_SIZE)
    if (label is None) != (size is None):
        given = SLICE if size is None else SLICE_SIZE
        raise ValueError(
            f"{SLICE} and {SLICE_SIZE} need each other; got {given} alone in {pods.path}. Add the other, or leave it out."
        )
    if size is None:
        return
    if not 1 <= whole(size, SLICE_SIZE) <= (pods.num_pods or math.inf):
        raise ValueError(
            f"{SLICE_SIZE} must be from 1 to the number of pods, {pods.num_pods}; got {size} in {pods.path}. Correct it."
        )
    sizes, devices = mesh_in(pods), pods.devices
    if devices is None or not sizes or -1 in sizes.values():
        return
    of_stage = math.prod(sizes.get(axis, 1) for axis in ("data", "context", "tensor"))
    if whole(size, SLICE_SIZE) * devices[0] != of_stage:
        raise ValueError(
            f"{SLICE_SIZE} must be the pods of a stage, data x context x tensor devices; got {size} pods of {devices[0]}, and "
            f"{of_stage} devices a stage in {pods.path}. Make them equal."
        )


def placement_remarks(pods: Workload) -> Iterator[str]:
    """Yields a line if nothing sees to it that all pods with GPUs start, or that they are where they shall be."""
    is_placed = any(name.startswith(f"{KUEUE}/") for name in pods.annotations)
    if pods.node and (pods.num_pods or 1) > 1:
        yield (
            f"nodeName in {pods.path} puts all {pods.num_pods} pods on the node {printable(pods.node)[:80]}, past the "
            "scheduler: those for which it has no room fail. Leave it out, or choose nodes by nodeSelector"
        )
    if pods.is_queued:
        return
    if is_placed:
        yield (
            "--topology or --replica-topology, and no --queue: Kueue places the pods of jobs that it admits, and it admits "
            "those without a queue only if the cluster or the namespace has one for them. Else the pods are anywhere. Name the "
            "queue: --queue research"
        )
    elif (pods.num_pods or 1) > 1 and FAKE_DEVICES not in pods.variables:
        yield (
            f"{pods.num_pods} pods and no --queue: some may start, hold their GPUs and wait for the rest. Where the cluster "
            "has Kueue, which admits all or none, name its queue: --queue research"
        )
