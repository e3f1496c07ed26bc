"""Fields of a manifest that take one of a few values, or a text of a form, which a schema made of Go's types does not have.

    tolerations:
    - {key: nvidia.com/gpu, operator: Exists, effect: NoShedule}    the API refuses it: effect

A field is found by its name and the field that it is in, since `operator` means another thing in each place. The forms are
those of a job's settings, in `forms.toml`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxpar.fields import near_name
from jaxpar.jobs import forms
from jaxpar.jobs.workload import CONTAINER_KINDS, QUEUE, amount
from jaxpar.runtime.output import printable

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
TOLERATES = ("Exists", "Equal")
SELECTS = ("In", "NotIn", "Exists", "DoesNotExist")
COMPARES = ("Gt", "Lt")  # of labels of nodes
OF_JOB_SETS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
OF_FAILED_JOBS = (  # as JobSet's webhook lists them
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
# By the names of the fields around a field, from the outermost, and its own.
CHOICES: Mapping[tuple[str, ...], Collection[str]] = {
    ("tolerations", "effect"): ("", *EFFECTS),
    ("tolerations", "operator"): ("", *TOLERATES, *COMPARES),
    ("matchExpressions", "operator"): (*SELECTS, *COMPARES),
    ("onExitCodes", "operator"): ("In", "NotIn"),
    ("onPodConditions", "status"): ("True", "False", "Unknown"),
    ("podFailurePolicy", "rules", "action"): ("FailJob", "FailIndex", "Ignore", "Count"),
    ("failurePolicy", "rules", "action"): OF_JOB_SETS,
    ("failurePolicy", "rules", "onJobFailureReasons"): OF_FAILED_JOBS,
    ("seccompProfile", "type"): ("RuntimeDefault", "Unconfined", "Localhost"),
    ("runtimeRef", "kind"): ("ClusterTrainingRuntime", "TrainingRuntime"),
    ("runtimeRef", "apiGroup"): ("trainer.kubeflow.org",),
    ("httpGet", "scheme"): ("", "HTTP", "HTTPS"),
    ("strategy", "type"): ("Recreate", "RollingUpdate"),
    ("spec", "type"): ("", "ClusterIP", "NodePort", "LoadBalancer"),  # of a Service with pods
    ("successPolicy", "operator"): ("All", "Any"),
    ("dependsOn", "status"): ("Ready", "Complete"),
    ("emptyDir", "medium"): ("", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"),
    ("restartPolicy",): ("Always", "OnFailure", "Never"),
    ("imagePullPolicy",): ("Always", "IfNotPresent", "Never"),
    ("externalTrafficPolicy",): ("Cluster", "Local"),
    ("internalTrafficPolicy",): ("Cluster", "Local"),
    ("sessionAffinity",): ("ClientIP", "None"),
    ("dnsPolicy",): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    ("fsGroupChangePolicy",): ("OnRootMismatch", "Always"),
    ("podReplacementPolicy",): ("TerminatingOrFailed", "Failed"),
    ("preemptionPolicy",): ("PreemptLowerPriority", "Never"),
    ("protocol",): ("TCP", "UDP", "SCTP"),
    ("restartStrategy",): ("Recreate", "BlockingRecreate", "InPlaceRestart"),
    ("startupPolicyOrder",): ("AnyOrder", "InOrder"),
    ("terminationMessagePolicy",): ("File", "FallbackToLogsOnError"),
    ("whenUnsatisfiable",): ("DoNotSchedule", "ScheduleAnyway"),
}
ADMIN = "CAP_SYS_ADMIN"  # as the API compares it
MOST_CORES, LEAST_BYTES = 10_000, 2**20
LABELS = ("labels", "matchLabels", "nodeSelector")
OF_USERS = ("annotations", *LABELS)  # whose fields have names of one's own
FORMS: Mapping[tuple[str, ...], str] = {
    ("metadata", "namespace"): "namespace",
    ("containers", "name"): "label",
    ("initContainers", "name"): "label",
    ("volumes", "name"): "label",
    ("replicatedJobs", "name"): "label",
    ("failurePolicy", "rules", "name"): "rule_name",
    ("containers", "ports", "name"): "port_name",
    ("env", "name"): "variable_name",
    ("containers", "image"): "image",
    ("initContainers", "image"): "image",
    ("trainer", "image"): "image",
    ("runtimeRef", "name"): "named_host",
    ("volumes", "image", "reference"): "image",
    ("volumeMounts", "subPath"): "relative_path",
    ("volumeMounts", "subPathExpr"): "relative_path",
    ("podMetricsEndpoints", "interval"): "duration",
    ("podMetricsEndpoints", "scrapeTimeout"): "duration",
    ("network", "subdomain"): "service_label",
    ("subdomain",): "label",
    ("groupName",): "service_label",
    ("managedBy",): "controller",
    ("runtimePatches", "manager"): "manager",
    ("storageUri",): "uri",
    ("volumeClaimPolicies", "templates", "metadata", "name"): "named_host",
    ("claimName",): "host_name",
    ("serviceAccountName",): "host_name",
    ("priorityClassName",): "host_name",
}
# What an empty text must be, where the form is also that of a setting that may be left out.
NEEDED = {
    "image": "must name a container image; got none. Give one that has jaxpar.",
    "claimName": "must name a PersistentVolumeClaim; got none. Name it, or leave its volume out.",
}


def check_choices(part: Any, path: str = "", around: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a field of a manifest that takes one of a few values, or a text of a form, has another one."""
    if isinstance(part, list):
        for number, each in enumerate(part):
            check_choices(each, f"{path}.{number}".lstrip("."), around)
    if not isinstance(part, Mapping):
        return
    if around[-1:] in [(name,) for name in OF_USERS]:
        _check_names(part, path, is_label=around[-1] in LABELS)
        return
    for name in around[-1:]:
        if name in TOGETHER:
            TOGETHER[name](part, path)
    _check_pod(part, path)
    for name, value in part.items():
        at, names = f"{path}.{name}".lstrip("."), (*around, str(name))
        _check_choice(value, at, names)
        _check_form(value, at, _of(FORMS, names))
        check_choices(value, at, names)


def _check_choice(value: Any, path: str, names: tuple[str, ...]) -> None:
    known = _of(CHOICES, names)
    if known is None or value is None:
        return
    if isinstance(value, list):
        for number, each in enumerate(value):
            _check_choice(each, f"{path}.{number}", names)
        return
    if value in known:
        return
    named = {each.lower(): each for each in known if each}
    near = near_name(value, named)
    remedy = f"Did you mean {named[near]}?" if near else "Write one of these, or leave it out."
    raise ValueError(
        f"{path} must be {', '.join(named.values())}; got {printable(repr(value))[:80]}. {remedy}"
    )


def _of(table: Mapping[tuple[str, ...], Any], names: tuple[str, ...]) -> Any:
    return next((found for end, found in table.items() if names[-len(end) :] == end), None)


def _check_names(part: Mapping[str, Any], path: str, *, is_label: bool) -> None:
    """Raises ValueError unless labels, or annotations, have names that the API takes, and labels such values."""
    for name, value in part.items():
        _check_form(name, f"the name of a field of {path}", "qualified")
        if is_label:
            _check_form(value, f"{path}.{name}", "queue" if name == QUEUE else "label_value")


def _check_form(value: Any, what: str, form: str | None) -> None:
    if form is None or not isinstance(value, str):
        return
    needed = NEEDED.get(what.rpartition(".")[2])
    if needed and not value:
        raise ValueError(f"{what} {needed}")
    if broken := forms.broken_rule(form, value):
        rule, most = broken
        raise ValueError(
            f"{what} must be {rule}, at most {most} long; got {printable(repr(value))[:80]}. Correct it."
        )


def _check_toleration(toleration: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a toleration has a value where it takes any, or names no taint."""
    operator = toleration.get("operator") or "Equal"  # the API's default
    value, key = toleration.get("value"), toleration.get("key")
    if operator == "Exists" and value:
        raise ValueError(
            f"{path} must have no value, since its operator Exists takes any; got {printable(repr(value))[:80]}. "
            "Leave it out, or write the operator Equal."
        )
    if operator == "Equal" and not key:
        raise ValueError(
            f"{path} must have the key of a taint; got none, which the operator Exists alone allows. "
            "Name it, such as nvidia.com/gpu."
        )


def _check_rights(security: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a security context gives rights that it forbids to get."""
    added = security.get("capabilities", {}).get("add", [])
    given = ["privileged: true"] if security.get("privileged") else []
    given += [f"{ADMIN} in capabilities.add"] if ADMIN in added else []
    if given and security.get("allowPrivilegeEscalation") is False:
        raise ValueError(
            f"{path} may not have allowPrivilegeEscalation: false beside {' and '.join(given)}, which allows it; got both. "
            "Leave allowPrivilegeEscalation out."
        )


def _check_part_of_volume(mount: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a mount names two parts of its volume."""
    if mount.get("subPath") and mount.get("subPathExpr"):
        raise ValueError(
            f"{path} may have subPath or subPathExpr; got both. Leave one of them out."
        )


def _check_resources(resources: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if a resource has an amount that the API refuses, or that no node has or no program can use."""
    for name, value in resources.items():
        size, got = amount(value, f"{path}.{name}"), printable(repr(value))[:80]
        if "/" in name and not size.is_integer():
            raise ValueError(
                f"{path}.{name} must be a whole number, since a device is not divided; got {got}. Write such as 8."
            )
        if name == "cpu" and size > MOST_CORES:
            raise ValueError(
                f"{path}.cpu must be a number of cores, at most {MOST_CORES}; got {got}, {size:.3g}. Write it without a unit, "
                "such as 96."
            )
        if name == "memory" and 0 < size < LEAST_BYTES:
            raise ValueError(
                f"{path}.memory must be at least 1Mi, since no container starts with less; got {got}, {size:.3g} bytes. Write "
                "its unit, such as 800Gi."
            )


def _check_pod(pod: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if two containers of a pod, initContainers among them, have one name, or it asks no nameserver."""
    if pod.get("dnsPolicy") == "None" and not pod.get("dnsConfig", {}).get("nameservers"):
        raise ValueError(
            f"{path} with dnsPolicy None must have nameservers in dnsConfig; got none. Write dnsPolicy: "
            "ClusterFirstWithHostNet, or the nameservers."
        )
    if pod.get("hostPID") and pod.get("shareProcessNamespace"):
        raise ValueError(
            f"{path} may have hostPID or shareProcessNamespace; got both. Leave hostPID out."
        )
    names = [each["name"] for kind in CONTAINER_KINDS for each in pod.get(kind, [])]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"the containers and initContainers of {path} must have different names; got {name!r} twice. Rename one."
            )


# What is checked of the fields of an object, or of each object of a list, together.
TOGETHER: Mapping[str, Callable[[Mapping[str, Any], str], None]] = {
    "tolerations": _check_toleration,
    "securityContext": _check_rights,
    "volumeMounts": _check_part_of_volume,
    "requests": _check_resources,
    "limits": _check_resources,
}
