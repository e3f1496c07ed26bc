"""`python -m jaxpar manifest`: prints a job for Kubernetes or SLURM, from a plan or a mesh."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes

from jaxpar.commands.cli import call, check_size, foreign_flags_told, parse_json, read_file
from jaxpar.commands.program_flags import (
    check_program,
    check_served,
    check_variables,
    model_remarks,
)
from jaxpar.jobs import (
    Job,
    Serving,
    beside_resume,
    check_manifests,
    remarks,
    to_jobset,
    to_podmonitor,
    to_sbatch,
    to_service,
    to_trainjob,
    trains_nothing,
    unsaved,
    unused_gpus,
)
from jaxpar.jobs.check import in_lists, kind_of
from jaxpar.jobs.field_types import without_nulls
from jaxpar.jobs.flags import (
    OF_SERVICE,
    PlannedSettings,
    check_recipe,
    first_plan,
    plan_flags,
    plan_remarks,
    slow_step_remarks,
    unused_flags,
)
from jaxpar.jobs.job import (
    AXES,
    SERVED,
    CommonSettings,
    JobSettings,
    KubernetesSettings,
    Mesh,
    SlurmSettings,
    is_recipe,
    num_words,
)
from jaxpar.jobs.plain_scalars import check_plain_scalars, load_yaml, to_yaml
from jaxpar.jobs.service import ServiceSettings
from jaxpar.jobs.workload import workloads
from jaxpar.runtime.output import printable, printable_lines, tell
from jaxpar.runtime.program import split_command

MAX_YAML_LETTERS = 2**20  # Kubernetes accepts no more, and parsing is slow


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options.

    Attributes:
        kind: A Kubernetes JobSet, a Kubeflow TrainJob, or a SLURM batch script; the PodMonitor that finds its --metrics-port;
            or a Deployment and a Service of `jaxpar serve`.
        plan: The output of `python -m jaxpar plan --json`, whose first plan is used; - for standard input.
        check: A manifest to check, instead of printing one.
        schema: The API's schema, as JSON, to check against, such as `kubectl get crd jobsets.jobset.x-k8s.io -o json` writes.
        mesh: The mesh, if no plan is given.
        job: What every cluster is told.
        kubernetes: What Kubernetes is told.
        slurm: What SLURM is told.
        service: The pods of --kind service.
    """

    kind: Literal["jobset", "trainjob", "sbatch", "podmonitor", "service"] = "jobset"
    plan: Path | None = None
    check: Path | None = None
    schema: Path | None = None
    mesh: Mesh = field(default_factory=Mesh)
    job: OmitArgPrefixes[CommonSettings] = field(default_factory=CommonSettings)
    kubernetes: OmitArgPrefixes[KubernetesSettings] = field(default_factory=KubernetesSettings)
    slurm: OmitArgPrefixes[SlurmSettings] = field(default_factory=SlurmSettings)
    service: ServiceSettings = field(default_factory=ServiceSettings)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of a job, by name."""
        return vars(self.job) | vars(self.kubernetes) | vars(self.slurm)


def main(args: Sequence[str]) -> None:
    """Prints a job; ``args`` is the command line after ``manifest``: options, then the program to run and its flags."""
    options, command = split_command(args)

    def manifest(
        flags: Annotated[Flags, tyro.conf.arg(name=""), tyro.conf.UseAppendAction],
    ) -> None:
        """Prints a run as a job for a cluster: manifest --mesh.data 8 ... recipes/gpt.py --steps 1000.

        What a cluster needs beyond this, such as secrets and node selectors, is added with kustomize.
        """
        words = (
            word.partition("=")[0].replace("_", "-") for word in options if word.startswith("--")
        )
        _print(flags, command, {*words})

    with foreign_flags_told(manifest, options, "manifest"):
        call(manifest, options, "manifest")


def _print(flags: Flags, command: tuple[str, ...], given: Collection[str]) -> None:
    schema = (
        None
        if flags.schema is None
        else parse_json(read_file(flags.schema, "--schema"), "--schema")
    )
    if flags.check is not None:
        _check_alone(command, given)
        found = in_lists(read_yaml(read_file(flags.check, "--check"), "--check"))
        checked = check_manifests(found, schema)
        _check_programs(checked)
        told = [line for manifest in checked for line in remarks(manifest)]
        more = "; read what follows" if told else ""
        print(f"{printable(str(flags.check))}: no error found{more}", flush=True)
        others = sorted({kind_of(each) for each in found} - {kind_of(each) for each in checked})
        _tell([f"of kind {', '.join(others)} nothing is checked"] if others else [])
        _tell(told)
        return
    has_fake = flags.job.fake_devices_per_node > 0
    _tell(unused_flags(flags.kind, _settings_of(given), has_fake_devices=has_fake))
    # All flags of the job are taken, and checked if the command is there; of a PodMonitor its name and port alone are needed.
    is_job = flags.kind != "service" and (flags.kind != "podmonitor" or command)
    job: Any = make_job(flags, command, given) if is_job else JobSettings(**flags.settings)
    if is_job:
        _tell(check_program(job.command, job.added_flags(), _withheld(job, flags), job.num_devices))
    if flags.kind == "sbatch":
        print(to_sbatch(job), end="")
        if not job.fake_devices_per_node:
            _tell([*unused_gpus("the script", job.variables(), f"{job.gpus_per_node} GPUs a node")])
        of_command = chain.from_iterable(
            of(job.command) for of in (trains_nothing, unsaved, beside_resume)
        )
        _tell([*of_command] if is_recipe(job.command) else [])
        return
    if flags.kind == "service":
        shared = {name: flags.settings[name] for name in OF_SERVICE}
        serving = Serving(command=command, **shared, **vars(flags.service))
        check_served(serving.served)
        manifests = to_service(serving)
    else:
        manifests = [
            {"podmonitor": to_podmonitor, "jobset": to_jobset, "trainjob": to_trainjob}[flags.kind](
                job
            )
        ]
    check_manifests(manifests, schema)
    print(to_yaml(*manifests), end="")
    _tell([line for manifest in manifests for line in remarks(manifest)])


def _check_programs(manifests: Sequence[Any]) -> None:
    """Checks the variables of pods and the flags of their programs, as those of a job are before it is written."""
    for pods in (each for manifest in manifests for each in workloads(manifest)):
        check_variables(pods.variables)
        begins = num_words(pods.words, SERVED)
        if begins:
            check_served(pods.words[begins:])
        elif pods.words:
            _tell(check_program(pods.words, num_devices=pods.num_devices))


def _withheld(job: Job, flags: Flags) -> list[str]:
    """Returns the flags that a program of one's own does not get; of a plan's, a line of its own tells."""
    words = job.withheld_flags()
    is_told = lambda flag: flags.plan is not None and flag.startswith("--mesh.")
    return [
        word
        for pair in zip(words[::2], words[1::2], strict=True)
        if not is_told(pair[0])
        for word in pair
    ]


def _check_alone(command: Sequence[str], given: Collection[str]) -> None:
    """Raises ValueError if a manifest is checked and something else is asked for too."""
    others = [*sorted({*given} - {"--check", "--schema"}), *command[:1]]
    if others:
        raise ValueError(
            f"--check checks a file, and writes nothing; got {printable(' '.join(others))[:80]} too. Leave one of them out."
        )


def _settings_of(given: Collection[str]) -> set[str]:
    """Returns the names of the settings, or of their groups, that flags are of."""
    names = (flag.removeprefix("--").removeprefix("no-") for flag in given)
    return {name.partition(".")[0].replace("-", "_") for name in names}


def _tell(remarks: Sequence[str]) -> None:
    for remark in remarks:
        tell(printable_lines(remark))


def make_job(flags: Flags, command: tuple[str, ...], given: Collection[str] = ()) -> Job:
    """Returns the job that the flags describe, with the mesh and the settings of the plan if one is given.

    Args:
        flags: The flags.
        command: The program and its flags.
        given: The flags that the user has given.
    """
    if flags.plan is None:
        return Job(command=command, **vars(flags.mesh), **flags.settings)
    if of_mesh := sorted(word for word in given if word.startswith("--mesh.")):
        raise ValueError(
            f"a plan has its own mesh; got --plan {flags.plan}, and {' '.join(of_mesh)} too. Leave one out."
        )
    plan = first_plan(parse_json(read_file(flags.plan, "--plan"), "--plan"))
    of_recipe = is_recipe(command)
    if of_recipe:
        check_recipe(plan, command)
    settings = flags.settings | _nodes_of(plan, flags, given)
    _tell(
        [*plan_remarks(plan, command), *model_remarks(plan.own_model, command)] if command else []
    )
    job = Job(
        command=(*command, *plan_flags(plan, command)) if of_recipe else command,
        **{axis: getattr(plan, axis) for axis in AXES},
        **settings,
    )
    limits = {"grace_seconds": job.grace_seconds, "save_seconds": job.save_seconds}
    _tell(slow_step_remarks(plan, command, **limits) if command else [])
    return job


def _nodes_of(plan: PlannedSettings, flags: Flags, given: Collection[str]) -> dict[str, Any]:
    """Returns the GPUs of a node for which a plan was made; raises ValueError if the user wants others."""
    planned, wanted = plan.gpus_per_node, flags.job.gpus_per_node
    if planned is None:
        return {}
    if "--gpus-per-node" in given and wanted != planned:
        raise ValueError(
            f"a plan is for nodes with as many GPUs as it says; got {planned} in --plan {flags.plan}, and --gpus-per-node "
            f"{wanted}. Plan again with --gpus-per-node {wanted}, or leave it out."
        )
    return {"gpus_per_node": planned}


def read_yaml(text: str, flag: str) -> list[Any]:
    """Returns the documents of YAML (or of JSON, which is YAML) of bounded size, of plain values, without fields of none.

    Raises:
        ValueError: The text is not YAML, is too large or deep, or is not the same to every program; the message contains the
            flag that named its file.
    """
    yaml = load_yaml()
    if text.startswith("#!"):
        raise ValueError(
            f"{flag} must name a manifest for Kubernetes; got a script. Leave its check to sbatch."
        )
    if len(text) > MAX_YAML_LETTERS:
        raise ValueError(
            f"{flag} must name a manifest of at most {MAX_YAML_LETTERS} letters; got {len(text)}. Split it."
        )
    try:
        found = without_nulls(
            check_size([each for each in yaml.safe_load_all(text) if each is not None], flag)
        )
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = printable(" ".join(str(error).split()))
        raise ValueError(
            f"{flag} must be YAML, as `manifest` writes it; got other text: {why}. Write it again."
        ) from error
    check_plain_scalars(text, flag)
    return found
