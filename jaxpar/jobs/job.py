"""A job, independent of the cluster that runs it: a program on a mesh of complete nodes, one process per node."""

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import PurePosixPath
from typing import Any

from jaxpar import fields
from jaxpar.fields import arg
from jaxpar.jobs import forms
from jaxpar.runtime.launch import fake_devices
from jaxpar.runtime.process_env import NAMES

MAX_NAME = 63  # the limit of a host name's label
POD_SUFFIX = "-nodes-0-99999-abcde"  # of the name of a pod: its replicated job, its number and what Kubernetes adds
PORT = 6379
LEAST_PORT = 1024  # that needs no rights
AXES = ("replica", "data", "context", "stage", "tensor")
CHECKPOINTS = "/checkpoints"
COMPILED = "/compiled"
GPUS = "nvidia.com/gpu"  # the resource
ACCELERATORS = re.compile(
    r"[^/]+/(gpu|gpu\.shared|mig-.+|gaudi|tpu|i915|xe|neuron|neuroncore|neurondevice)"
)
ROOT, USER = 0, 1000  # the numbers of users of a pod
OWN_VARIABLES = (*NAMES, "JAX_COORDINATOR_BIND_ADDRESS", "JAX_COMPILATION_CACHE_DIR", "POD_IP")
INSTALLED = (
    ("jaxpar", "train"),
    ("python", "-m", "jaxpar", "train"),
)  # begin the command of a recipe that pip installed
SERVED = (
    ("jaxpar", "serve"),
    ("python", "-m", "jaxpar", "serve"),
)  # begin the command of a Service
LAUNCHERS = (
    *(("torchrun",), ("accelerate", "launch"), ("deepspeed",), ("mpirun",), ("mpiexec",)),
    *(("jaxpar", "launch"), ("python", "-m", "jaxpar", "launch")),
)
INITS = ("tini", "dumb-init", "catatonit")  # which take signals as process 1, and pass them on
AROUND = (
    *INITS,
    "env",
    "ionice",
    "nice",
    "nohup",
    "nsys",
    "numactl",
    "stdbuf",
    "taskset",
    "time",
    "timeout",
)
REMEDY = "Give such a value, and nothing else."
MAX_WORD = 2**16


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every cluster is told.

    Attributes:
        name: Name of the job: lower-case letters, digits and -.
        gpus_per_node: GPUs per node; a job uses complete nodes.
        fake_devices_per_node: CPU devices of a node in place of its GPUs, to rehearse a job on a cluster without GPUs; 0: none.
        cpus: CPU cores that a node's process is guaranteed; 0: not stated, and a pod without GPUs may get almost none.
        memory_gib: Memory of a node's process in GiB, with what it has in shared memory, beyond which it is ended; 0: not
            stated.
        env: A variable for each process, NAME=VALUE, such as NCCL_IB_HCA=mlx5. Give it once for each. Nothing in the value is
            expanded, such as $HOME or $(POD_IP).
        metrics_port: Port at which a recipe serves its metrics to Prometheus, with the annotations of a scrape; 0: none.
        save_seconds: How long a checkpoint takes to save, as measured: a drained node waits twice that plus 30 s.
        max_restarts: Number of restarts after failures; a drained node does not count.
        start_seconds: How long processes wait for one another to connect, which includes pulling images.
    """

    name: str = "jaxpar"
    gpus_per_node: forms.Count = 8
    fake_devices_per_node: forms.CountOrZero = 0
    cpus: forms.CountOrZero = 0
    memory_gib: forms.CountOrZero = 0
    env: tuple[forms.Variable, ...] = ()
    metrics_port: int = 0
    save_seconds: forms.Positive = 60.0
    max_restarts: forms.CountOrZero = 10
    start_seconds: forms.Count = 1800


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """What Kubernetes is told, and SLURM is not.

    Attributes:
        image: The container image.
        namespace: The namespace.
        queue: Kueue's LocalQueue, which admits all nodes or none.
        topology: A node label, such as a block's: all nodes are placed in as few of these as possible.
        replica_topology: A node label, such as a rack's: the nodes that hold the replicas of a stage (of each group of
            replicas), which communicate most, are placed in one of these.
        toleration: A taint on which pods may run, KEY=VALUE:EFFECT; without =VALUE any value, without :EFFECT any effect. Give
            it once for each taint.
        rdma: The resource of InfiniBand or RoCE that a device plugin offers, and how many of it a node has, as in rdma/ib=8.
            Without it NCCL uses TCP between nodes.
        checkpoint_claim: A PersistentVolumeClaim that all nodes can write to, mounted at /checkpoints.
        cache_claim: Another one, mounted at /compiled, for compiled programs, which the next start runs: let nothing else write
            to it.
        shm_gib: Shared memory of a node in GiB, which NCCL needs.
        run_as_user: The number of the user that pods run as, whatever the image says; 0: root. By default 1000; with rdma root,
            since others cannot have the right to lock memory.
    """

    image: forms.Image = ""
    namespace: forms.Namespace = ""
    queue: forms.Queue = ""
    topology: forms.NodeLabel = ""
    replica_topology: forms.NodeLabel = ""
    toleration: tuple[forms.Taint, ...] = ()
    rdma: forms.Resource = ""
    checkpoint_claim: forms.HostName = ""
    cache_claim: forms.HostName = ""
    shm_gib: forms.Count = 64
    run_as_user: forms.CountOrZero | None = None


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What SLURM is told, and Kubernetes is not.

    Attributes:
        hours: The time limit.
        partition: The partition.
        account: The account.
    """

    hours: forms.Positive = 24.0
    partition: forms.Partition = ""
    account: forms.Account = ""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The mesh, if no plan is given.

    Attributes:
        replica: Groups of replicas, such as nodes: ZeRO shards inside a group.
        data: Replicas, of each group.
        context: Devices that share each sequence.
        stage: Pipeline stages.
        tensor: Shards of each weight.
    """

    replica: forms.Count = 1
    data: forms.Count = 1
    context: forms.Count = 1
    stage: forms.Count = 1
    tensor: forms.Count = 1


@dataclass(frozen=True, kw_only=True)
class JobSettings(CommonSettings, KubernetesSettings, SlurmSettings):
    """The settings of a job, which are also the flags of `python -m jaxpar manifest`."""


@dataclass(frozen=True, kw_only=True)
class Job(JobSettings, Mesh):
    """A run on a cluster: its settings, its mesh, and these.

    Attributes:
        command: A script (``*.py``) or program, with its arguments.
        token: A secret that identifies the processes of the run, new for each job. Not used for SLURM, whose script generates
            one at each start.
    """

    command: tuple[str, ...]
    token: forms.Token = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __post_init__(self) -> None:
        check_job(self)

    @property
    def num_nodes(self) -> int:
        """The number of nodes, which is the number of processes."""
        return self.num_devices // self.devices_per_node

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(mesh_of(self).values())

    @property
    def devices_per_node(self) -> int:
        """The number of devices of a node, GPUs or fake ones."""
        return self.fake_devices_per_node or self.gpus_per_node

    @property
    def devices_per_stage(self) -> int:
        """The number of devices that hold a stage in a group of replicas, one after another in the order of the mesh."""
        return self.data * self.context * self.tensor

    @property
    def user(self) -> int:
        """The number of the user that a pod runs as."""
        usual = ROOT if self.rdma else USER
        return usual if self.run_as_user is None else self.run_as_user

    @property
    def capabilities(self) -> dict[str, list[str]]:
        """The rights that a container gives up and gets. A user other than root can use none that it gets."""
        if self.user != ROOT:
            return {"drop": ["ALL"]}
        return {"add": ["IPC_LOCK"]} if self.rdma else {}

    @property
    def grace_seconds(self) -> int:
        """The seconds from the signal to stop until the end: a save in progress, the last save, and a margin."""
        return math.ceil(2 * self.save_seconds) + 30

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that the user sets, and those of fake devices."""
        fake = fake_devices(self.fake_devices_per_node) if self.fake_devices_per_node else {}
        return fake | dict(each.split("=", 1) for each in self.env)

    def arguments(self) -> list[str]:
        """Returns the command line, with the flags that the job adds."""
        run = (
            ["python", "-u", *self.command]
            if self.command[0].endswith(".py")
            else list(self.command)
        )
        return [*run, *self.added_flags()]

    def added_flags(self) -> list[str]:
        """Returns the flags of the mesh and of the metrics that a recipe gets, unless it has its own."""
        return self._told_flags() if is_recipe(self.command) else []

    def withheld_flags(self) -> list[str]:
        """Returns the flags, but for an axis of 1, that a recipe would get and a program of one's own does not."""
        words = [] if is_recipe(self.command) else self._told_flags()
        pairs = zip(words[::2], words[1::2], strict=True)
        return [
            word
            for flag, value in pairs
            if not (flag.startswith("--mesh.") and value == "1")
            for word in (flag, value)
        ]

    def _told_flags(self) -> list[str]:
        told = {f"--mesh.{axis}": str(size) for axis, size in mesh_of(self).items()}
        if self.metrics_port:
            told |= {"--metrics-port": str(self.metrics_port), "--metrics-address": "0.0.0.0"}
        missing = {
            name: value for name, value in told.items() if flag_value(self.command, name) is None
        }
        return [word for pair in missing.items() for word in pair]


def is_recipe(command: Sequence[str]) -> bool:
    """Returns whether a command is a script or an installed recipe, which take the flags of recipes."""
    return bool(command) and (command[0].endswith(".py") or num_words(command, INSTALLED) > 0)


def is_accelerator(resource: str) -> bool:
    """Returns whether a resource of Kubernetes is GPUs, parts of them or others like them, and so no network.

    >>> is_accelerator("nvidia.com/mig-1g.10gb"), is_accelerator("rdma/ib")
    (True, False)
    """
    return ACCELERATORS.fullmatch(resource) is not None


def is_python(word: str) -> bool:
    """Returns whether a word starts Python: python, python3.12 or /usr/bin/python3."""
    return re.fullmatch(r"python[\d.]*", PurePosixPath(word).name) is not None


def without_wrappers(command: Sequence[str]) -> Sequence[str]:
    """Returns a command without the programs around it, such as an init or a profiler.

    >>> without_wrappers(["timeout", "-k", "9", "3h", "nohup", "python", "-u", "train.py"])
    ['python', '-u', 'train.py']
    """
    is_wrapped = bool(command) and PurePosixPath(command[0]).name in AROUND
    programs = {"jaxpar", *(each[0] for each in LAUNCHERS)}
    is_program = lambda word: is_python(word) or PurePosixPath(word).name in programs
    begins = (at for at, word in enumerate(command) if is_program(word))
    return command[next(begins, 0) :] if is_wrapped else command


def num_words(command: Sequence[str], programs: Sequence[tuple[str, ...]]) -> int:
    """Returns how many words of a command start one of some programs, whatever the path and version of Python; 0: it is none.

    >>> num_words(("/usr/bin/python3", "-m", "jaxpar", "train", "gpt"), INSTALLED)
    4
    """
    if not command:
        return 0
    name = "python" if is_python(command[0]) else PurePosixPath(command[0]).name
    words = (name, *command[1:])
    return next((len(each) for each in programs if words[: len(each)] == each), 0)


def flag_value(command: Sequence[str], name: str) -> str | None:
    """Returns the value that a command line gives to a flag, the last one if it is given twice; None if it is not given.

    >>> flag_value(("gpt.py", "--steps", "9", "--mesh.data=8"), "--mesh.data")
    '8'
    """
    found = None
    for word, after in pairwise([*command, ""]):
        if word.split("=")[0] == name:
            found = word.partition("=")[2] if "=" in word else after
    return found


def flag_values(command: Sequence[str], name: str) -> list[str]:
    """Returns all values that a command line gives to a flag, the last time that it is given.

    >>> flag_values(("gpt.py", "--layers", "2", "3", "--steps", "9"), "--layers")
    ['2', '3']
    """
    found: list[str] = []
    for position, word in enumerate(command):
        if word.split("=")[0] == name:
            after = takewhile(lambda each: not each.startswith("--"), command[position + 1 :])
            found = [word.partition("=")[2]] if "=" in word else list(after)
    return found


def check_settings(settings: JobSettings) -> None:
    """Raises ValueError unless the settings that need neither a mesh nor a command are well-formed."""
    fields.check(settings, REMEDY, gives_default=True)
    port, cache = settings.metrics_port, settings.cache_claim
    if port and (not LEAST_PORT <= port < 2**16 or port == PORT):
        raise ValueError(
            f"{arg('metrics_port')} must be from {LEAST_PORT} to 65535, since lower ones are for root, and not {PORT}, process "
            f"0's own; got {port}. Choose 9090, say."
        )
    if cache and cache == settings.checkpoint_claim:
        raise ValueError(
            f"{arg('cache_claim')} holds programs that the next start runs, and must not be shared; got {cache} for both "
            "claims. Name another one, or leave it out."
        )
    if is_accelerator(settings.rdma.partition("=")[0]):
        raise ValueError(
            f"{arg('rdma')} names a resource beside the GPUs; got {settings.rdma}. Name that of the RDMA plugin; "
            f"{arg('gpus_per_node')} is the number of GPUs."
        )
    check_environment(settings.env)
    check_name(settings.name)


def check_job(job: Job) -> None:
    """Raises ValueError unless a cluster could run the job and all its values are well-formed."""
    check_settings(job)
    check_command(job.command)
    if not job.command:
        raise ValueError(
            "a job needs a command; got none. Give a script and its flags after the options: recipes/gpt.py"
        )
    if is_recipe(job.command):
        _check_given_once(job)
    _check_nodes(job)


def _check_given_once(job: Job) -> None:
    """Raises ValueError if the recipe's own flags contradict the job: pods and ports are those of the job."""
    for axis in AXES:
        ours, own = str(getattr(job, axis)), flag_value(job.command, f"--mesh.{axis}")
        if own not in (None, ours, "-1"):  # -1: all devices of the job
            raise ValueError(
                f"the recipe's mesh must be that of the job; got {arg(**{axis: ours})}, and --mesh.{axis} {own} for the "
                "recipe. Give the mesh once, before the recipe, which gets it from the job."
            )
    own = flag_value(job.command, "--metrics-port")
    if job.metrics_port and own not in (None, str(job.metrics_port)):
        raise ValueError(
            f"the recipe's port of metrics must be that of the job; got --metrics-port {job.metrics_port}, and {own} for the "
            "recipe. Leave the second out."
        )


def _check_nodes(job: Job) -> None:
    got = arg(**mesh_of(job))
    devices, of_node = job.num_devices, job.devices_per_node
    kind, flag = (
        ("fake devices", "--fake-devices-per-node")
        if job.fake_devices_per_node
        else ("GPUs", "--gpus-per-node")
    )
    if of_node % job.tensor:
        fits = ", ".join(str(n) for n in range(1, of_node + 1) if of_node % n == 0)
        raise ValueError(
            f"the tensor axis must stay inside a node; got {arg(tensor=job.tensor)}, {of_node} {kind} a node. Choose "
            f"{arg('tensor')} from {fits}."
        )
    if devices % of_node:
        example = f", such as {arg(data=of_node)}" if devices == 1 else ""
        raise ValueError(
            f"the mesh must fill its nodes; got {got}, {devices} {kind} on nodes of {of_node}. Choose a mesh of "
            f"{math.ceil(devices / of_node) * of_node}{example}, or give the actual {flag}."
        )
    if job.replica_topology and job.devices_per_stage % of_node:
        raise ValueError(
            f"{arg('replica_topology')} needs stages on whole nodes; got {got}: {job.devices_per_stage} {kind} a stage on "
            f"nodes of {of_node}. Leave it out: stages that share nodes have their replicas close to one another already."
        )


def mesh_of(settings: Any) -> dict[str, int]:
    """Returns the sizes of the mesh of a job or a plan, without a ``replica`` or ``context`` of 1."""
    sizes = {axis: getattr(settings, axis) for axis in AXES}
    return {
        axis: size for axis, size in sizes.items() if axis not in ("replica", "context") or size > 1
    }


def check_environment(env: Sequence[str]) -> None:
    """Raises ValueError if variables are given twice, or are those that a job sets itself."""
    names = [each.partition("=")[0] for each in env]
    for name in names:
        if name in OWN_VARIABLES or name.startswith("JAXPAR_"):
            raise ValueError(
                f"{arg('env')} may not have the variables that a job sets itself; got {name}. Leave it out."
            )
        if names.count(name) > 1:
            raise ValueError(
                f"{arg('env')} must have each variable once; got {name} twice. Leave one out."
            )


def check_name(name: str, of: str = "a job", suffix: str = POD_SUFFIX) -> None:
    """Raises ValueError unless it may be the name of a job, whose pods' names are that name and a suffix.

    Reference:
        JobSet's webhook refuses a JobSet whose pods would have names longer than a host name's label.
    """
    most = MAX_NAME - len(suffix)
    if not forms.DNS_LABEL.fullmatch(name) or not name[0].isalpha() or len(name) > most:
        raise ValueError(
            f"{of}'s name must be lower-case letters, digits and -, a letter first, and at most {most} long; got "
            f"{name[:80]!r}. Choose such as gpt-1."
        )


def check_command(command: Sequence[Any]) -> None:
    """Raises ValueError unless each word of a command is a printable string of limited length."""
    for word in command:
        if not isinstance(word, str) or not word.isprintable() or len(word) > MAX_WORD:
            raise ValueError(
                f"the words of a command must be text without line ends and control characters, at most {MAX_WORD} long; got "
                f"{fields.shown(word)}. Put it into a file, and name that."
            )
