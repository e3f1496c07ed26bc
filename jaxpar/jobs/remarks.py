"""Remarks on a manifest whose job can run but may not do what was meant: lost results, a slow network, unmet placement."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

from jaxpar.jobs.agreement import SCRAPED, SCRAPED_PORT, TEMPORARY, mesh_in, paths_in
from jaxpar.jobs.job import (
    CHECKPOINTS,
    INITS,
    LAUNCHERS,
    ROOT,
    flag_value,
    flag_values,
    num_words,
)
from jaxpar.jobs.job_sets import job_set_remarks
from jaxpar.jobs.placement import placement_remarks
from jaxpar.jobs.pods import BIND_VARIABLE, REFERENCE
from jaxpar.jobs.resource_remarks import hidden_devices, resource_remarks, unless_of_runtime
from jaxpar.jobs.restarts import restart_remarks
from jaxpar.jobs.selectors import monitor_remarks
from jaxpar.jobs.serving_remarks import service_remarks, serving_remarks
from jaxpar.jobs.shells import shell_remarks
from jaxpar.jobs.train_jobs import train_job_remarks
from jaxpar.jobs.workload import (
    USUAL_GRACE,
    Workload,
    workloads,
)
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.process_env import TIMEOUT_VARIABLE, TOKEN_VARIABLE
from jaxpar.runtime.supervise import RESUME_IF_ANY, RESUME_VARIABLE

INPUTS = ("--init-from", "--tokenizer", "--data")
UNTOLD = {  # what follows without a variable
    TOKEN_VARIABLE: "any program that reaches process 0 may join the run",
    TIMEOUT_VARIABLE: "processes wait 300 s for one another, with the time to pull the image",
    BIND_VARIABLE: "process 0 listens at all addresses of its pod",
}
OF_POD = "is deleted with its pod, and no other pod has it: a restarted run does not find its checkpoints"
NOT_KEPT = {  # volumes that are no place for results, and why
    "emptyDir": OF_POD,
    "ephemeral": OF_POD,
    "hostPath": "is a folder of a node: a pod on another node has another, unless all nodes mount one file system there",
}
UNHELD = {  # further folders that a recipe writes: what follows if no claim holds one, and how its name may end
    "--save-hf": ("the model is lost with the pods", "model"),
    "--token-cache": ("each start makes the tokens again, unless the image has them", "tokens"),
}
UNANSWERED = {  # what follows where a probe asks a run, of which process 0 alone answers, and only once it trains
    "startupProbe": "pods are ended while they start",
    "livenessProbe": "pods are ended while they start, and all but that of process 0 later",
    "readinessProbe": "all pods but that of process 0 are never ready",
}
# Fields that are others of each pod, also of one that replaces another; and parts of the names of those that number pods.
OF_EACH_POD = (
    *("metadata.name", "metadata.uid", "spec.nodeName"),
    *("status.podIP", "status.podIPs", "status.hostIP", "status.hostIPs"),
)
NUMBERS = ("completion-index", "pod-index")
NO_PATHS = ("recall",)  # a task for --data
OF_JAXPAR = "recipes/"  # the folder of its repository with scripts and data


def remarks(manifest: Mapping[str, Any]) -> list[str]:
    """Returns a line for each way in which the pods of a manifest may not do what was meant.

    Args:
        manifest: A manifest that ``check_manifest`` takes.
    """
    lines = [line for pods in workloads(manifest) for line in _of(pods)]
    return [
        *lines,
        *train_job_remarks(manifest),
        *restart_remarks(manifest),
        *job_set_remarks(manifest),
        *serving_remarks(manifest),
        *service_remarks(manifest),
        *monitor_remarks(manifest),
        *_suspended(manifest),
    ]


def _suspended(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line if a job waits for someone to start it."""
    if manifest.get("spec", {}).get("suspend") and not any(
        pods.is_queued for pods in workloads(manifest)
    ):
        yield "spec.suspend is true and there is no --queue: the job does not start. Leave it out, or name the queue"


def _of(pods: Workload) -> Iterator[str]:
    yield from _no_command(pods)
    yield from _launched(pods)
    yield from shell_remarks(pods)
    if pods.kind == "Deployment":
        yield from _unscraped(pods)
        yield from _deaf_to_signals(pods)
        yield from hidden_devices(pods)
        return
    yield from _of_recipe(pods) if pods.recipe is not None else _unheld_paths(pods)
    yield from _told_less(pods)
    yield from _may_not_write(pods)
    yield from _no_room_to_write(pods)
    yield from _no_time_to_save(pods)
    yield from _time_of_hook(pods)
    yield from _deaf_to_signals(pods)
    yield from _unknown_number(pods)
    yield from _endless(pods)
    yield from resource_remarks(pods)
    yield from placement_remarks(pods)


def _no_command(pods: Workload) -> Iterator[str]:
    """Yields a line if the image, or the runtime, says what is run."""
    if not pods.words or pods.words[0].startswith("-"):
        of = "the runtime's or the image's own" if pods.kind == "TrainJob" else "the image's own"
        yield f"{pods.path} has no command: {of} is run, of which nothing is checked. Write it as `manifest` does"


def _launched(pods: Workload) -> Iterator[str]:
    """Yields a line if the program of a pod starts processes, where each pod is told that it is one."""
    if begins := num_words(pods.program, LAUNCHERS):
        launcher = " ".join(pods.program[:begins])
        yield (
            f"the command of {pods.path} begins with {launcher}, which starts processes of its own: a pod is one process of "
            "the run, with all its GPUs. Give the program without it"
        )


def _of_recipe(pods: Workload) -> Iterator[str]:
    yield from _lost_results(pods)
    yield from trains_nothing(pods.words)
    yield from _of_random_weights(pods)
    yield from _starts_over(pods)
    if pods.variables.get(RESUME_VARIABLE) == RESUME_IF_ANY:
        yield from beside_resume(pods.words)
    yield from _unheld_inputs(pods)
    yield from _looked_for_elsewhere(pods)
    yield from _unscraped(pods)
    yield from _unanswered(pods)


def trains_nothing(command: Sequence[str]) -> Iterator[str]:
    """Yields a line if the command of a recipe ends before it trains."""
    given = [
        flag
        for flag in ("--dry-run", "--compile-for", "--predict")
        if flag in {word.partition("=")[0] for word in command}
    ]
    if given:
        yield (
            f"the command has {given[0]}: the job trains nothing, and ends as if it had. Leave {given[0]} out of the job, and "
            "run the recipe with it on this machine"
        )


def _of_random_weights(pods: Workload) -> Iterator[str]:
    """Yields a line if a run trains factors beside weights that nobody has trained, as a plan for a preset's name has them."""
    if pods.flag("--lora-rank") is not None and pods.flag("--init-from") is None:
        yield (
            "the command has --lora-rank and no --init-from: the weights beside the factors are random and are not trained, so "
            "the adapters are of no use for another model. Give --init-from with the folder of the model"
        )


def _starts_over(pods: Workload) -> Iterator[str]:
    """Yields a line if a restarted recipe would not resume: it refuses the folder of the run before it, and ends with 2."""
    value = pods.variables.get(RESUME_VARIABLE)
    if value != RESUME_IF_ANY and "--resume" not in pods.words:
        given = f"no {RESUME_VARIABLE}" if value is None else f"{RESUME_VARIABLE}={value}"
        yield (
            f"{pods.path} has {given}: a restarted run does not resume, and the first failure ends the job. Give the variable "
            f"the value {RESUME_IF_ANY}"
        )


def beside_resume(command: Sequence[str]) -> Iterator[str]:
    """Yields a line for each flag of a recipe that does not do what was meant in a job, which resumes if it can.

    Args:
        command: The recipe and its flags.
    """
    resumes = f"{RESUME_VARIABLE}={RESUME_IF_ANY}, which a job sets,"
    if "--overwrite" in command:
        yield (
            f"the command has --overwrite: {resumes} goes on from the checkpoints in --out-dir and deletes none. Leave it out; "
            "for a new run name another --out-dir"
        )
    if "--resume" in command:
        yield (
            f"the command has --resume: in a folder without a checkpoint it ends with exit code {int(ExitCode.BAD_CONFIG)}, "
            f"after which nothing restarts it. Leave it out: {resumes} resumes if there is one"
        )


def _unscraped(pods: Workload) -> Iterator[str]:
    """Yields a line if metrics are served at a port of which the pods say nothing, or too little."""
    port = pods.flag("--metrics-port")
    if SCRAPED_PORT in pods.annotations and pods.annotations.get(SCRAPED) != "true":
        yield f"{pods.path} has {SCRAPED_PORT} and not {SCRAPED}: Prometheus does not find its metrics. Write it, with true"
    if port not in (None, "0") and SCRAPED_PORT not in pods.annotations:
        yield (
            f"the command has --metrics-port {port}, and the pods say nothing of it: Prometheus does not find it. Give "
            f"--metrics-port {port} before the script"
        )


def _unanswered(pods: Workload) -> Iterator[str]:
    """Yields a line for each probe by the network of a recipe: it answers at the port of metrics alone, on process 0."""
    for probe, what_follows in UNANSWERED.items():
        if probe in pods.handlers and "exec" not in pods.handlers[probe]:
            yield (
                f"{pods.path} has a {probe}: a run answers none but requests for metrics, on process 0 and once it trains, so "
                f"{what_follows}. Leave it out: a run that is stuck ends by itself, with exit code {int(ExitCode.STUCK)}"
            )


def _told_less(pods: Workload) -> Iterator[str]:
    """Yields a line for each variable that pods of a run lack, and could start without."""
    if (pods.num_pods or 1) == 1 or pods.told is None:
        return
    of_runtime = {BIND_VARIABLE} if pods.is_of_runtime else set()
    for name in (name for name in UNTOLD if name not in pods.told | of_runtime):
        yield f"{pods.path} has no {name}{unless_of_runtime(pods)}: {UNTOLD[name]}. Write it as `manifest` does"
    if (field := pods.fields.get(TOKEN_VARIABLE)) in OF_EACH_POD:
        yield (
            f"{TOKEN_VARIABLE} of {pods.path} is {field}, another of each pod: process 0 refuses the others, and the run does "
            "not start. Write it as `manifest` does"
        )


def _may_not_write(pods: Workload) -> Iterator[str]:
    """Yields a line if volumes may not be writable for the user of pods."""
    if pods.user not in (None, ROOT) and pods.folders and "fsGroup" not in pods.security:
        yield (
            f"{pods.path} has runAsUser {pods.user} and no fsGroup: its volumes may not be writable for this user. Write "
            f"fsGroup: {pods.user}"
        )


def _no_room_to_write(pods: Workload) -> Iterator[str]:
    """Yields a line if pods may write nowhere but in volumes, of which none is for temporary files."""
    places = {str(path) for path in pods.mounted_at}
    if pods.security.get("readOnlyRootFilesystem") and TEMPORARY not in places:
        yield (
            f"{pods.path} has readOnlyRootFilesystem and no volume at {TEMPORARY}, where Python and JAX write temporary files. "
            f"Mount an emptyDir at {TEMPORARY}"
        )


def _no_time_to_save(pods: Workload) -> Iterator[str]:
    """Yields a line if pods are ended sooner than `manifest` would ever write."""
    stated = pods.grace_seconds
    grace = USUAL_GRACE if stated is None else stated
    if grace <= USUAL_GRACE:
        unless = unless_of_runtime(pods) if stated is None else ""
        yield (
            f"terminationGracePeriodSeconds of {pods.path} is {grace}{unless}: a drained pod has no longer to save. Write "
            "twice the seconds of a save, and 30 more"
        )


def _time_of_hook(pods: Workload) -> Iterator[str]:
    """Yields a line if a hook takes its time from that in which a run saves."""
    if "preStop" in pods.handlers:
        seconds = pods.pre_stop_seconds
        takes = f"its {seconds} s are" if seconds else "its time is"
        yield (
            f"{pods.path} has lifecycle.preStop: SIGTERM, at which a run saves, comes after it, and {takes} part of "
            "terminationGracePeriodSeconds. Leave it out"
        )


def _deaf_to_signals(pods: Workload) -> Iterator[str]:
    """Yields a line if the program is process 1 of its pod, to which the kernel does not send SIGTERM by default."""
    is_first = (
        pods.shares_processes is False and PurePosixPath([*pods.words, ""][0]).name not in INITS
    )
    if is_first:
        yield (
            f"{pods.path} has no shareProcessNamespace: a pod that is drained while it starts, or waits for others, does not "
            "hear SIGTERM, and uses up its grace period. Write true"
        )


def _unknown_number(pods: Workload) -> Iterator[str]:
    """Yields a line if a manifest leaves the number of pods to its runtime, where the mesh needs a certain one."""
    if pods.num_pods is None and mesh_in(pods):
        yield f"{pods.path} has no numNodes: the runtime's number of nodes may not be that of the mesh in the command"


def _lost_results(pods: Workload) -> Iterator[str]:
    """Yields a line for each way in which a recipe loses its work with its pods."""
    folder = pods.flag("--out-dir")
    given, place = (
        "no --out-dir" if folder is None else f"--out-dir {folder}",
        f"{CHECKPOINTS}/{pods.name}",
    )
    if not pods.folders:
        yield (
            f"the command has {given} and there is no --checkpoint-claim: results and checkpoints are lost with the pods. "
            f"Name a claim, --checkpoint-claim runs, and a folder in it, --out-dir {place}"
        )
        return
    if folder is None or pods.folder_of(folder) is None:
        mounts = " and ".join(sorted(map(str, pods.folders)))
        yield (
            f"the command has {given} and the claim is mounted at {mounts}: results and checkpoints are lost with the pods. "
            f"Give it a folder there, such as --out-dir {place}"
        )
    volume = {} if folder is None else pods.volume_of(folder)
    for kind in NOT_KEPT.keys() & volume.keys():
        yield (
            f"--out-dir {folder} is in the volume {volume['name']}, whose {kind} {NOT_KEPT[kind]}. Name a claim that all pods "
            "can write to, as --checkpoint-claim does"
        )
    for flag, (what_follows, name) in UNHELD.items():
        path = pods.flag(flag)
        if path is not None and pods.folder_of(path) is None:
            yield (
                f"the command has {flag} {path}, which no claim holds: {what_follows}. Give it a folder there, such as "
                f"{flag} {place}-{name}"
            )
    yield from _folders_apart(pods)
    yield from unsaved(pods.words)


def _folders_apart(pods: Workload) -> Iterator[str]:
    """Yields a line for each variable by which the pods of a run have different folders for its results."""
    folder = pods.flag("--out-dir") or ""
    mounted = (pods.folder_of(folder) or {}).get("subPathExpr", "")
    same = f"Write the same for all, such as --out-dir {CHECKPOINTS}/{pods.name}"
    for where, text, remedy in (
        ("--out-dir", folder, same),
        ("subPathExpr", mounted, "Leave it out, or write subPath"),
    ):
        for name, of in _fields_in(text, pods):
            if of in OF_EACH_POD or (pods.num_pods != 1 and any(each in of for each in NUMBERS)):
                yield (
                    f"{where} {text} has $({name}), {of}, which differs between pods: they write to different folders, and a "
                    f"restarted run does not find whole checkpoints. {remedy}"
                )


def _fields_in(text: str, pods: Workload) -> Iterator[tuple[str, str]]:
    """Yields the variables from fields of a pod that a text has, also by way of others, and the fields."""
    for name in REFERENCE.findall(text):
        if name in pods.fields:
            yield name, pods.fields[name]
        else:
            yield from _fields_in(pods.variables.get(name, ""), pods)


def unsaved(command: Sequence[str]) -> Iterator[str]:
    """Yields a line if the command of a recipe has no checkpoints, without which a failure costs all work.

    Args:
        command: The recipe and its flags.
    """
    every = flag_value(command, "--checkpoint-every")
    steps, minutes = flag_value(command, "--steps"), flag_value(command, "--checkpoint-minutes")
    if every in (None, "0") and minutes in (None, "0"):
        has = "no --checkpoint-every" if every is None else "--checkpoint-every 0"
        yield (
            f"the command has {has}: a recipe then saves only when asked to stop, and after a failure it begins again. "
            f"Give it such as --checkpoint-every {_such_as(steps)}"
        )
    # A run of one step ends with the only one that it could save before its end.
    elif minutes in (None, "0") and _number(every) >= _number(steps) > 1:
        yield (
            f"the command has --checkpoint-every {every} and --steps {steps}: a recipe then saves only at its end or when "
            f"asked to stop, and after a failure it begins again. Give it such as --checkpoint-every {_such_as(steps)}"
        )


def _such_as(steps: str | None) -> int:
    """Returns a number of steps between two checkpoints that saves one before the end of so many, if they are given."""
    return min(500, max(_number(steps) // 2, 1)) if steps else 500


def _number(text: str | None) -> int:
    """Returns a number of steps; 0: it is not given, or is none."""
    return int(text) if text is not None and text.isdecimal() else 0


def _unheld_inputs(pods: Workload) -> Iterator[str]:
    """Yields a line if a recipe reads files or folders that are in no volume, and not among those of jaxpar."""
    given = [(flag, path) for flag in INPUTS for path in flag_values(pods.words, flag)]
    is_there = lambda path: path in NO_PATHS or path.startswith(OF_JAXPAR) or pods.folder_of(path)
    if without := [(flag, path) for flag, path in given if not is_there(path)]:
        named = ", ".join(f"{flag} {path}" for flag, path in without)
        place = f"{CHECKPOINTS}/{PurePosixPath(without[0][1]).name}"
        yield (
            f"the recipe reads {named}, which no claim holds: it must be in the image. "
            f"If it is on a volume, name its claim, and give the path there: {without[0][0]} {place}"
        )


def _looked_for_elsewhere(pods: Workload) -> Iterator[str]:
    """Yields a line if the command names files of jaxpar, which are in the image, by paths that lead into a volume."""
    named = [word for word in pods.words if normpath(word).startswith(OF_JAXPAR)]
    is_moved = pods.working_dir and pods.folder_of(pods.working_dir) is not None
    if named and is_moved:
        yield (
            f"{pods.path} has workingDir {pods.working_dir}, in a volume, and the command names {named[0]}, which is looked "
            "for there and not in the image. Give its whole path in the image, or leave workingDir out"
        )


def _unheld_paths(pods: Workload) -> Iterator[str]:
    """Yields a line if a program of one's own names the folder of the claim, and there is none."""
    named = paths_in(pods, CHECKPOINTS)
    if named and not pods.folders:
        yield (
            f"the command names {named[0]} and there is no --checkpoint-claim: what is written there is lost with the "
            "pods. Name a claim: --checkpoint-claim runs"
        )


def _endless(pods: Workload) -> Iterator[str]:
    """Yields a line if a pod has containers that may not end with the run."""
    others = [name for name in pods.containers if name != "train"]
    if "train" in pods.containers and others:
        yield (
            f"{pods.path} has the container {others[0]} beside the run: the pod ends when all containers do, and the job waits "
            "for it. Make it an init container with restartPolicy Always"
        )
