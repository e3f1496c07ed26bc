"""What a JobSet does when a pod ends, by its failure policies, told where it is not what `manifest` writes.

`manifests.py` has the table of what it writes. What another pattern matches is not known, and it is told.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpar.jobs.agreement import AFTER_CODES, BEFORE_CODES, codes_in
from jaxpar.runtime.exit_codes import FINAL_CODES, ExitCode
from jaxpar.runtime.output import printable

FAILS, COUNTS, RESTARTS = "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"
LIKE = {"RestartJob": COUNTS, "RestartJobAndIgnoreMaxRestarts": RESTARTS}
DOES = {
    FAILS: "nothing restarts the job",
    COUNTS: "the restart counts towards maxRestarts",
    RESTARTS: "the job restarts without a limit",
}
TAKEN_AWAY = None  # in place of an exit code, of a pod that ends with its node
ENDS = (  # how a pod may end, and what `manifest` has a JobSet do then
    (
        f"a run that was asked to stop and has saved (exit code {int(ExitCode.PREEMPTED)})",
        ExitCode.PREEMPTED,
        RESTARTS,
    ),
    ("a drained node", TAKEN_AWAY, RESTARTS),
    (
        f"a failure such as a lost process (exit code {int(ExitCode.PEER_LOST)})",
        ExitCode.PEER_LOST,
        COUNTS,
    ),
)
IGNORED = "Ignore"
DEADLINE = "activeDeadlineSeconds"
REMEDY = "Write failurePolicy and podFailurePolicy as `manifest` does"


def restart_remarks(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each way in which the restarts of a JobSet are not those that `manifest` writes."""
    yield from _deadlines(manifest)
    if manifest["kind"] != "JobSet":
        return
    policy = manifest["spec"].get("failurePolicy")
    if not policy:
        yield f"spec has no failurePolicy: the first failure, and the first drained node, ends the job. {REMEDY}"
        return
    if not policy.get("maxRestarts"):
        has = "maxRestarts: 0" if "maxRestarts" in policy else "no maxRestarts"
        yield f"spec.failurePolicy has {has}: the first failure ends the job. Write such as 10"
    yield from _unknown_patterns(policy)
    for job in manifest["spec"]["replicatedJobs"]:
        yield from _of_job(policy, job)


def _deadlines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each time limit of a job, which a run that is not complete then does not survive."""
    spec = manifest["spec"]
    limited = [("spec", spec)] if manifest["kind"] == "TrainJob" else []
    if manifest["kind"] == "JobSet":
        for number, each in enumerate(spec["replicatedJobs"]):
            job, path = each["template"]["spec"], f"spec.replicatedJobs.{number}"
            limited += [(path, job), (f"the pods of {path}", job["template"]["spec"])]
    for path, part in limited:
        if (seconds := part.get(DEADLINE)) is not None:
            yield (
                f"{DEADLINE} of {path} is {seconds}: a run that takes longer is ended {seconds / 3600:.3g} h after its start, "
                "which counts as a failure. Leave it out, unless the run is always shorter"
            )


def _unknown_patterns(policy: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each pattern of which it is not known what it matches."""
    patterns = [
        each
        for rule in policy.get("rules", [])
        for each in rule.get("onJobFailureMessagePatterns") or []
    ]
    written = f"{BEFORE_CODES}{'|'.join(str(int(code)) for code in FINAL_CODES)}{AFTER_CODES}"
    for pattern in (each for each in patterns if not codes_in(each)):
        yield (
            f"spec.failurePolicy has the pattern {printable(repr(pattern))[:160]}: which exit codes it matches is not checked, "
            f"and if it never matches, a run that would end the same way restarts for ever. Write {written!r}"
        )


def _of_job(policy: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[str]:
    rules = job["template"]["spec"].get("podFailurePolicy", {}).get("rules", [])
    for rule in (rule for rule in rules if rule.get("action") == IGNORED):
        codes = rule.get("onExitCodes")
        given = f"exit codes {codes['operator']} {codes['values']}" if codes else "a drained node"
        yield (
            f"podFailurePolicy has {IGNORED} for {given}: the pod is then replaced alone, though the others have lost it and "
            f"end too, which counts towards maxRestarts. Write FailJob"
        )
    again = [
        str(int(code)) for code in FINAL_CODES if answer(policy, job, code) in (COUNTS, RESTARTS)
    ]
    if again:
        yield (
            f"exit codes {', '.join(again)} restart the job, though a run that ends with them would end so again, or needs "
            f"inspection first. {REMEDY}"
        )
    for action, what_it_does in DOES.items():
        ends = [
            end
            for end, code, wanted in ENDS
            if action != wanted and answer(policy, job, code) == action
        ]
        if ends:
            yield f"after {' and after '.join(ends)} {what_it_does}. {REMEDY}"


def answer(policy: Mapping[str, Any], job: Mapping[str, Any], code: int | None) -> str | None:
    """Returns the action of a JobSet when a pod of a job ends with an exit code, or is taken away; None: it is not known.

    Args:
        policy: The failure policy of the JobSet.
        job: One of its replicated jobs.
        code: The exit code, or ``TAKEN_AWAY``.
    """
    rules = job["template"]["spec"].get("podFailurePolicy", {}).get("rules", [])
    action = next((rule.get("action") for rule in rules if _is_of(rule, code)), "Count")
    if action not in ("FailJob", "Count"):
        return None
    reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
    for rule in policy.get("rules", []):
        if reason not in (rule.get("onJobFailureReasons") or [reason]):
            continue
        if job["name"] not in (rule.get("targetReplicatedJobs") or [job["name"]]):
            continue
        patterns = rule.get("onJobFailureMessagePatterns") or []
        if not all(map(codes_in, patterns)):
            return None
        if not patterns or any(code in codes_in(pattern) for pattern in patterns):
            return LIKE.get(rule.get("action"), rule.get("action"))
    return COUNTS


def _is_of(rule: Mapping[str, Any], code: int | None) -> bool:
    if code is TAKEN_AWAY:
        conditions = rule.get("onPodConditions", [])
        wanted = ("DisruptionTarget", "True")  # the API's default of a status
        return any(
            (each.get("type"), each.get("status") or "True") == wanted for each in conditions
        )
    codes = rule.get("onExitCodes")
    return codes is not None and (code in codes.get("values", [])) == (
        codes.get("operator") == "In"
    )
