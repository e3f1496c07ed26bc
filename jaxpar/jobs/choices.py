"""Fields of a manifest that take one of a few values, or a text of a form, which a schema made of Go's types does not have.

    tolerations:
    - {key: nvidia.com/gpu, operator: Exists, effect: NoShedule}    the API refuses it: effect

A field is found by its name and the field that it is in, since `operator` means another thing in each place. The forms are
those of a job's settings, in `forms.toml`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxpar.fields import near_name
from jaxpar.jobs import forms
from jaxpar.jobs.workload import QUEUE
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
# By the names of the fields around a field, from the outermost, and its own.
CHOICES: Mapping[tuple[str, ...], Collection[str]] = {
    ("tolerations", "effect"): ("", *EFFECTS),
    ("tolerations", "operator"): ("", *TOLERATES, *COMPARES),
    ("matchExpressions", "operator"): (*SELECTS, *COMPARES),
    ("onExitCodes", "operator"): ("In", "NotIn"),
    ("onPodConditions", "status"): ("True", "False", "Unknown"),
    ("podFailurePolicy", "rules", "action"): ("FailJob", "FailIndex", "Ignore", "Count"),
    ("failurePolicy", "rules", "action"): OF_JOB_SETS,
    ("seccompProfile", "type"): ("RuntimeDefault", "Unconfined", "Localhost"),
    ("runtimeRef", "kind"): ("ClusterTrainingRuntime", "TrainingRuntime"),
    ("runtimeRef", "apiGroup"): ("trainer.kubeflow.org",),
    ("httpGet", "scheme"): ("", "HTTP", "HTTPS"),
    ("strategy", "type"): ("Recreate", "RollingUpdate"),
    ("emptyDir", "medium"): ("", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"),
    ("restartPolicy",): ("Always", "OnFailure", "Never"),
    ("imagePullPolicy",): ("Always", "IfNotPresent", "Never"),
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
LABELS = ("labels", "matchLabels", "nodeSelector")
OF_USERS = ("annotations", *LABELS)  # whose fields have names of one's own
FORMS: Mapping[tuple[str, ...], str] = {
    ("metadata", "namespace"): "namespace",
    ("containers", "name"): "label",
    ("initContainers", "name"): "label",
    ("volumes", "name"): "label",
    ("replicatedJobs", "name"): "label",
    ("containers", "ports", "name"): "port_name",
    ("env", "name"): "variable_name",
    ("containers", "image"): "image",
    ("initContainers", "image"): "image",
    ("trainer", "image"): "image",
    ("runtimeRef", "name"): "named_host",
    ("podMetricsEndpoints", "interval"): "duration",
    ("podMetricsEndpoints", "scrapeTimeout"): "duration",
    ("subdomain",): "label",
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
    if around[-1:] == ("tolerations",):
        _check_toleration(part, path)
    for name, value in part.items():
        at, names = f"{path}.{name}".lstrip("."), (*around, str(name))
        _check_choice(value, at, names)
        _check_form(value, at, _of(FORMS, names))
        check_choices(value, at, names)


def _check_choice(value: Any, path: str, names: tuple[str, ...]) -> None:
    known = _of(CHOICES, names)
    if known is None or value is None or value in known:
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
