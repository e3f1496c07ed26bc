"""`python -m jaxpar manifest`: a job for Kubernetes or SLURM, from a plan or a mesh, on standard output."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tyro

from jaxpar.commands.cli import check_size, parse_json, read_file
from jaxpar.jobs import Job, check_manifest, to_jobset, to_sbatch, to_trainjob
from jaxpar.jobs.job import AXES
from jaxpar.jobs.plan import first_plan, plan_flags
from jaxpar.runtime.launch import split_command
from jaxpar.runtime.printable import printable

MAX_YAML_LETTERS = 2**20  # Kubernetes takes no more, and reading is slow
OWN_FIELDS = ("command", "token", *AXES)  # of a job, that no option gives


@dataclass(frozen=True)
class Mesh:
    """The mesh, without a plan."""

    data: int = 1
    """Replicas."""
    stage: int = 1
    """Pipeline stages."""
    tensor: int = 1
    """Shards of each weight."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options."""

    name: str = "jaxpar"
    """Of the job: lower-case letters, digits and -."""
    kind: Literal["jobset", "trainjob", "sbatch"] = "jobset"
    """A Kubernetes JobSet, a Kubeflow TrainJob, or a SLURM batch script."""
    plan: Path | None = None
    """What `python -m jaxpar plan --json` has written, whose first plan is taken; - for standard input."""
    mesh: Mesh = field(default_factory=Mesh)
    gpus_per_node: int = 8
    """What a node has; a job takes whole nodes."""
    image: str = ""
    """The container image, for Kubernetes."""
    namespace: str = ""
    """Kubernetes' namespace."""
    queue: str = ""
    """Kueue's LocalQueue, which admits all nodes or none."""
    topology: str = ""
    """A node label, such as a block's: all nodes in as few of these as can be."""
    replica_topology: str = ""
    """A node label, such as a rack's: the nodes of each data replica in one of these."""
    checkpoint_claim: str = ""
    """A PersistentVolumeClaim that all nodes can write, mounted at /checkpoints."""
    shm_gib: int = 64
    """Shared memory of a node."""
    save_seconds: float = 60.0
    """How long a checkpoint takes to save, as measured; a node that is drained waits for it."""
    max_restarts: int = 10
    """New starts after failures; a node taken away does not count."""
    start_seconds: int = 1800
    """How long processes wait for one another to come."""
    hours: float = 24.0
    """SLURM's time limit."""
    partition: str = ""
    """SLURM's partition."""
    account: str = ""
    """SLURM's account."""
    check: Path | None = None
    """A manifest to check, in place of writing one."""
    schema: Path | None = None
    """The API's schema, as JSON, to check against."""


def main(args: Sequence[str]) -> None:
    """Writes a run as a job for a cluster to standard output: manifest --mesh.data 8 ... recipes/gpt.py --steps 1000.

    Args:
        args: The command line after ``manifest``: options, then the program to run and its flags.
    """
    options, command = split_command(args)
    flags = tyro.cli(Flags, args=options, prog="python -m jaxpar manifest", description=main.__doc__)
    schema = None if flags.schema is None else parse_json(read_file(flags.schema, "--schema"), "--schema")
    if flags.check is not None:
        check_manifest(read_yaml(read_file(flags.check, "--check"), "--check"), schema)
        print(f"{printable(str(flags.check))}: nothing wrong found")
        return
    job = make_job(flags, command)
    if flags.kind == "sbatch":
        print(to_sbatch(job), end="")
        return
    manifest = (to_jobset if flags.kind == "jobset" else to_trainjob)(job)
    check_manifest(manifest, schema)
    print(to_yaml(manifest), end="")


def make_job(flags: Flags, command: tuple[str, ...]) -> Job:
    """Returns the job that the flags ask for, on the mesh and with the settings of the plan if one is given."""
    shared = {f.name: getattr(flags, f.name) for f in fields(Job) if f.name not in OWN_FIELDS}
    if flags.plan is None:
        return Job(command=command, **{axis: getattr(flags.mesh, axis) for axis in AXES}, **shared)
    if flags.mesh != Mesh():
        raise ValueError(f"a plan has its own mesh; got --plan {flags.plan} and --mesh too. Leave one out.")
    plan = first_plan(parse_json(read_file(flags.plan, "--plan"), "--plan"))
    is_recipe = bool(command) and command[0].endswith(".py")
    if is_recipe and plan["stage"] > 1 and plan.get("executor", "spmd") != "spmd":
        raise ValueError(
            f"recipes run a pipeline with executor=spmd; got a plan for executor={plan['executor']}, which ranks as if stages "
            "ran freely. Plan again with --executor spmd."
        )
    return Job(
        command=(*command, *plan_flags(plan, command)) if is_recipe else command,
        **{axis: plan[axis] for axis in AXES},
        **shared,
    )


def read_yaml(text: str, flag: str) -> Any:
    """Returns what YAML (or JSON, which is YAML) says, of a bounded size; never more than plain values.

    Raises:
        ValueError: It is no YAML, or too large or deep; the message has the flag that named its file.
    """
    yaml = _yaml()
    if len(text) > MAX_YAML_LETTERS:
        raise ValueError(
            f"{flag} must name a manifest of at most {MAX_YAML_LETTERS} letters; got {len(text)}. Split it."
        )
    try:
        return check_size(yaml.safe_load(text), flag)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = printable(" ".join(str(error).split()))
        raise ValueError(
            f"{flag} must be YAML, as `manifest` writes it; got other text: {why}. Write it anew."
        ) from error


def to_yaml(manifest: dict[str, Any]) -> str:
    """Returns a manifest as YAML, in its own order."""
    return _yaml().safe_dump(manifest, sort_keys=False, width=120)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("writing YAML needs the package pyyaml; got none. Install jaxpar[kubernetes].") from error
    return yaml
