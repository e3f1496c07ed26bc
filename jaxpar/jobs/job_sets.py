"""The rules of a JobSet and its Jobs that are about several fields: those of JobSet's webhook and of the API of Jobs.

    replicatedJobs:
    - {name: nodes, dependsOn: []}    the webhook refuses it: the first job has none before it

The rules of one field are in `choices.py` and `field_types.py`. What needs a feature that a cluster may not have is told.

Reference:
    The webhook: pkg/webhooks/jobset_webhook.go of github.com/kubernetes-sigs/jobset. Of Jobs: pkg/apis/batch/validation of
    github.com/kubernetes/kubernetes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.jobs import forms
from jaxpar.jobs.workload import CONTAINER_KINDS, claim_templates
from jaxpar.runtime.output import printable

MOST_RULES = 20  # of a podFailurePolicy
OWN_CONTROLLERS = {  # who has a job whose managedBy is this, or missing
    "JobSet": "jobset.sigs.k8s.io/jobset-controller",
    "TrainJob": "trainer.kubeflow.org/trainjob-controller",
}
ONE_JOB = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
SINGLE_PODS = ("backoffLimitPerIndex", "maxFailedIndexes")  # by which pods fail one by one
OF_CONTROLLER = ("manualSelector", "selector")  # by which a Job finds its pods


def check_job_set(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if two parts of a JobSet are at odds, so that JobSet's webhook or the API of Jobs refuses it."""
    spec = manifest["spec"]
    check_jobs(spec)
    _check_order(spec)
    _check_restarts_in_place(spec)
    _check_label_of_coordinator(manifest)
    _check_gang(spec)
    _check_claims(spec)
    for number, job in enumerate(spec["replicatedJobs"]):
        _check_job(job["template"]["spec"], f"spec.replicatedJobs.{number}")


def check_jobs(spec: Mapping[str, Any]) -> None:
    """Raises ValueError if a part of a JobSet names a job, or a pod of it, that the JobSet does not have.

    Args:
        spec: Of the JobSet.

    Reference:
        JobSet's webhook refuses it; two jobs of one name the schema.
    """
    jobs = spec["replicatedJobs"]
    names = [job["name"] for job in jobs]
    for number, job in enumerate(jobs):
        if job["name"] in names[:number]:
            raise ValueError(
                f"the jobs of spec.replicatedJobs must have different names; got {job['name']!r} twice. Rename one."
            )
        for each in job.get("dependsOn", []):
            place = f"dependsOn of spec.replicatedJobs.{number}"
            _check_named(each["name"], names[:number], place, "a job before it")
    rules = spec.get("failurePolicy", {}).get("rules", [])
    _check_names_of_rules(rules)
    for place, part in [
        ("spec.successPolicy", spec.get("successPolicy", {})),
        *((f"spec.failurePolicy.rules.{number}", rule) for number, rule in enumerate(rules)),
    ]:
        for name in part.get("targetReplicatedJobs", []):
            _check_named(name, names, f"targetReplicatedJobs of {place}", "a job of the file")
    if "coordinator" in spec:
        _check_coordinator(spec["coordinator"], jobs)


def _check_names_of_rules(rules: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError where two rules of a failurePolicy have one name; the webhook gives one to those without."""
    names = [rule.get("name") or f"failurePolicyRule{at}" for at, rule in enumerate(rules)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(
                f"the rules of spec.failurePolicy must have different names; got {name!r} twice. Rename one."
            )


def _check_named(name: str, known: Sequence[str], place: str, rule: str) -> None:
    if name not in known:
        there = ", ".join(known)
        remedy = f"Write one of {there}, or leave it out." if known else "Leave it out."
        raise ValueError(
            f"{place} must name {rule}, {there or 'of which there is none'}; got {name!r}. {remedy}"
        )


def _check_coordinator(coordinator: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> None:
    by_name = {job["name"]: job for job in jobs}
    name, place = coordinator["replicatedJob"], "spec.coordinator"
    _check_named(name, [*by_name], f"replicatedJob of {place}", "a job of the file")
    replicas = by_name[name].get("replicas", 1)
    pods = by_name[name]["template"]["spec"].get("completions") or 1
    for field, count, of in (("jobIndex", replicas, "replicas"), ("podIndex", pods, "pods")):
        if coordinator.get(field, 0) >= count:
            raise ValueError(
                f"{field} of {place} must be below {count}, the number of {of}; got {coordinator[field]}. Leave it out for "
                "the first."
            )


def _check_order(spec: Mapping[str, Any]) -> None:
    """Raises ValueError if the first job waits for others, or jobs wait for one another in two ways."""
    waiting = [n for n, job in enumerate(spec["replicatedJobs"]) if "dependsOn" in job]
    if 0 in waiting:
        raise ValueError(
            "dependsOn of spec.replicatedJobs.0, the first job, must be missing; got an empty one. Leave it out."
        )
    if waiting and spec.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder":
        raise ValueError(
            f"a JobSet may have dependsOn or startupPolicy InOrder; got both, dependsOn in spec.replicatedJobs.{waiting[0]}. "
            "Leave startupPolicy out."
        )


def _check_restarts_in_place(spec: Mapping[str, Any]) -> None:
    if spec.get("failurePolicy", {}).get("restartStrategy") == "InPlaceRestart":
        raise ValueError(
            "restartStrategy of spec.failurePolicy must make new pods, Recreate or BlockingRecreate; got InPlaceRestart, which "
            "needs another backoffLimit than 0, by which a pod would be restarted alone. Leave it out."
        )


def _check_label_of_coordinator(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if the address of the coordinator, which its pods get as a label, is none that a label takes."""
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    if "coordinator" not in spec:
        return
    given = spec["coordinator"]
    indices = f"{given.get('jobIndex', 0)}-{given.get('podIndex', 0)}"
    subdomain = spec.get("network", {}).get("subdomain") or name
    label = f"{name}-{given['replicatedJob']}-{indices}.{subdomain}"
    if broken := forms.broken_rule("label_value", label):
        raise ValueError(
            f"the coordinator's address, which is a label of its pods, must be at most {broken[1]} long; got {label!r}, "
            f"{len(label)}. Shorten metadata.name or network.subdomain, or leave spec.coordinator out."
        )


def _check_gang(spec: Mapping[str, Any]) -> None:
    """Raises ValueError if a JobSet is to start with another number of pods than it has: all of them are one run."""
    gang = spec.get("scheduling", {}).get("schedulingPolicy", {}).get("gang", {})
    counts = [
        job.get("replicas", 1) * job["template"]["spec"].get("parallelism", 1)
        for job in spec["replicatedJobs"]
    ]
    if gang.get("minCount", sum(counts)) != sum(counts):
        raise ValueError(
            f"minCount of spec.scheduling must be the number of pods, {sum(counts)}, which wait for one another; got "
            f"{gang['minCount']}. Leave it out."
        )


def _check_claims(spec: Mapping[str, Any]) -> None:
    """Raises ValueError unless each claim of volumeClaimPolicies has a name of its own that a container mounts."""
    pods = [job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]]
    volumes = [volume["name"] for pod in pods for volume in pod.get("volumes", [])]
    containers = [each for pod in pods for kind in CONTAINER_KINDS for each in pod.get(kind, [])]
    mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
    names = [template["metadata"]["name"] for template in claim_templates(spec)]
    for name in names:
        if names.count(name) > 1 or name in volumes:
            raise ValueError(
                f"the claims of spec.volumeClaimPolicies and the volumes of pods must have different names; got {name!r} "
                "twice. Rename one."
            )
        if name not in mounted:
            raise ValueError(
                f"the claims of spec.volumeClaimPolicies must be mounted; got {name!r}, which no container mounts. Mount it, "
                "or leave it out."
            )


def _check_job(spec: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if pods of a Job would end one by one, or it has fields that the API refuses beside others."""
    for name in (name for name in SINGLE_PODS if spec.get(name) is not None):
        raise ValueError(
            f"pods of {path} are restarted together, not alone; got {name} {spec[name]}. Leave it out."
        )
    for name in (name for name in OF_CONTROLLER if spec.get(name)):
        raise ValueError(
            f"{name} of {path} must be missing, since the Job finds its pods by a label that it gives them; got it. Leave it "
            "out."
        )
    if "podFailurePolicy" not in spec:
        return
    replaced = spec.get("podReplacementPolicy", "Failed")
    if replaced != "Failed":
        raise ValueError(
            f"podReplacementPolicy of {path} must be Failed beside podFailurePolicy; got {replaced}. Leave it out."
        )
    rules = spec["podFailurePolicy"]["rules"]
    if len(rules) > MOST_RULES:
        raise ValueError(
            f"podFailurePolicy of {path} must have at most {MOST_RULES} rules; got {len(rules)}. Write several exit codes in "
            "one."
        )
    for number, rule in enumerate(rules):
        _check_rule(rule, f"{path}.podFailurePolicy.rules.{number}")


def _check_rule(rule: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a rule about pods that fail is none that the API of Jobs takes, or ends a pod alone."""
    if rule["action"] == "FailIndex":
        raise ValueError(
            f"action of {path} must end all pods, since they are restarted together; got FailIndex. Write FailJob."
        )
    given = [name for name in ("onExitCodes", "onPodConditions") if rule.get(name)]
    if len(given) != 1:
        raise ValueError(
            f"{path} must have onExitCodes or onPodConditions; got {'both' if given else 'none'}. Write one of the two."
        )
    codes = rule.get("onExitCodes", {})
    values = codes.get("values", [0])
    if not values or values != sorted({*values}):
        raise ValueError(
            f"the exit codes of {path} must be in ascending order, each once; got {values}. Sort them."
        )
    if codes.get("operator") == "In" and 0 in values:
        raise ValueError(
            f"the exit codes of {path} must be those of failures; got 0, by which a pod succeeds. Leave it out."
        )


def job_set_remarks(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each part of a JobSet that does nothing without a feature of its cluster, or ends a run too early."""
    kind, spec = manifest["kind"], manifest["spec"]
    own = OWN_CONTROLLERS.get(kind, "")
    manager = spec.get("managedBy", own)
    if own and manager != own:
        yield (
            f"spec.managedBy is {printable(manager)}: the controller of {kind}s leaves the job to it, and without it no pod "
            "starts. Leave it out, unless the cluster has it"
        )
    if kind != "JobSet":
        return
    if "scheduling" in spec:
        yield _needs("spec.scheduling", "JobSetWorkloadAwareSchedulingAPI", "Leave it out")
    rules = spec.get("failurePolicy", {}).get("rules", [])
    for number, rule in enumerate(rules):
        if rule["action"] in ONE_JOB:
            wanted = rule["action"].replace("RestartJob", "RestartJobSet")
            what = f"{rule['action']} in spec.failurePolicy.rules.{number}"
            yield _needs(what, "RestartJob", f"Write {wanted}")
    if spec.get("ttlSecondsAfterFinished") == 0:
        yield (
            "spec.ttlSecondsAfterFinished is 0: the JobSet is deleted as it ends, with its pods, their logs and why it failed. "
            "Write such as 86400"
        )
    for number, job in enumerate(spec["replicatedJobs"]):
        yield from _of_ended_job(job["template"]["spec"], f"spec.replicatedJobs.{number}")
    for policy in spec.get("volumeClaimPolicies", []):
        if policy.get("retentionPolicy", {}).get("whenDeleted", "Delete") != "Retain":
            names = ", ".join(each["metadata"]["name"] for each in policy["templates"])
            yield (
                f"spec.volumeClaimPolicies deletes {names} with the JobSet, and what is in it. Write retentionPolicy: "
                "{whenDeleted: Retain}"
            )


def _needs(what: str, gate: str, remedy: str) -> str:
    return (
        f"{what} needs the feature gate {gate} of JobSet's controller, without which the cluster refuses it. {remedy}, unless "
        "it is on"
    )


def _of_ended_job(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    if spec.get("successPolicy"):
        yield (
            f"successPolicy of {path} ends the other pods once some have succeeded, also while they save. Leave it out"
        )
    if "ttlSecondsAfterFinished" in spec:
        yield (
            f"ttlSecondsAfterFinished of {path} deletes a Job that has ended, which its JobSet may make and train again. Write "
            "it in spec of the JobSet"
        )
