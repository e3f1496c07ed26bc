"""Fields of a manifest that take one of a few values, which a schema made of Go's types does not have.

    tolerations:
    - {key: nvidia.com/gpu, operator: Exists, effect: NoShedule}    the API refuses it: effect

A field is found by its name and the field that it is in, since `operator` means another thing in each place.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxpar.fields import near_name
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
    ("podFailurePolicy", "rules", "action"): ("FailJob", "FailIndex", "Ignore", "Count"),
    ("failurePolicy", "rules", "action"): OF_JOB_SETS,
    ("seccompProfile", "type"): ("RuntimeDefault", "Unconfined", "Localhost"),
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
OF_USERS = ("annotations", "labels", "matchLabels", "nodeSelector")  # whose fields have names of one's own


def check_choices(part: Any, path: str = "", around: tuple[str, ...] = ()) -> None:
    """Raises ValueError if a field of a manifest that takes one of a few values has another one."""
    if isinstance(part, list):
        for number, each in enumerate(part):
            check_choices(each, f"{path}.{number}".lstrip("."), around)
    if not isinstance(part, Mapping) or around[-1:] in [(name,) for name in OF_USERS]:
        return
    if around[-1:] == ("tolerations",):
        _check_toleration(part, path)
    for name, value in part.items():
        at, names = f"{path}.{name}".lstrip("."), (*around, str(name))
        _check_choice(value, at, names)
        check_choices(value, at, names)


def _check_choice(value: Any, path: str, names: tuple[str, ...]) -> None:
    known = next((known for end, known in CHOICES.items() if names[-len(end) :] == end), None)
    if known is None or value is None or value in known:
        return
    named = {each.lower(): each for each in known if each}
    near = near_name(value, named)
    remedy = f"Did you mean {named[near]}?" if near else "Write one of these, or leave it out."
    raise ValueError(f"{path} must be {', '.join(named.values())}; got {printable(repr(value))[:80]}. {remedy}")


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
