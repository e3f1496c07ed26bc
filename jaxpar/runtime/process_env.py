"""The run that this process belongs to, read from the environment variables of its launcher or cluster. Does not use JAX.

    started by          processes            this process               where process 0 listens
    jaxpar launch, us   JAX_NUM_PROCESSES    JAX_PROCESS_ID             JAX_COORDINATOR_ADDRESS
    Kubernetes          JAX_NUM_PROCESSES    JOB_COMPLETION_INDEX       JAX_COORDINATOR_ADDRESS
    SLURM               SLURM_NTASKS         SLURM_PROCID               first of SLURM_STEP_NODELIST
    Open MPI            OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK       the launcher's, in OMPI_MCA_orte_hnp_uri

Upper rows take precedence over lower ones. ``jax.distributed.initialize`` itself reads only JAX_COORDINATOR_ADDRESS of the
JAX_ variables in this table.
"""

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxpar.fields import near_name
from jaxpar.runtime.output import printable, tell

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LAUNCHERS = (
    *NAMES[1:],
    "JOB_COMPLETION_INDEX",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
)
TOKEN_VARIABLE = "JAXPAR_RUN_TOKEN"
TIMEOUT_VARIABLE = "JAXPAR_INITIALIZATION_TIMEOUT"
PREFIX = "JAXPAR_"
# All that jaxpar reads; those of its tests begin otherwise.
OWN_VARIABLES = (
    TOKEN_VARIABLE,
    *(TIMEOUT_VARIABLE, "JAXPAR_LOG_SECONDS", "JAXPAR_PROGRESS", "JAXPAR_RESUME"),
)
OF_TESTS = ("JAXPAR_TEST", "JAXPAR_FUZZ", "JAXPAR_CHAOS")
LAST_PORTS = (
    4096  # SLURM and Open MPI set no port: the job's number selects one of the highest ports
)


@dataclass(frozen=True)
class ProcessEnv:
    """The environment of one process in a run.

    Attributes:
        coordinator: ``host:port`` at which the other processes reach process 0.
        num_processes: The number of processes in the run.
        process_id: The number of this process, counted from 0.
        bind: ``host:port`` that process 0 listens on, if it differs from ``coordinator``.
        local_device_ids: The GPUs of its machine that this process may use; None: all.
        on_several_hosts: Whether the run is known to span machines.
        token: A secret that the processes of this run share; "": none.
    """

    coordinator: str
    num_processes: int
    process_id: int
    bind: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    on_several_hosts: bool = False
    token: str = field(default="", repr=False)


def read_process_env(environ: Mapping[str, str]) -> ProcessEnv | None:
    """Returns the process that the environment describes; None if it describes no run of several processes.

    Raises:
        ValueError: A variable is missing, misspelt or not a number, or the process number is outside the run.
    """
    check_own_variables(environ)
    given = _from_open_mpi(environ) | _from_slurm(environ) | _from_jax(environ)
    if not given:
        return None
    missing = [name for name in NAMES if name not in given]
    if missing:
        got = ", ".join(f"{name}={given[name]}" for name in NAMES if name in given)
        raise ValueError(
            f"a run of several processes needs {', '.join(NAMES)}; got {got} and no {' and no '.join(missing)}. Set what is "
            "missing, start processes by `python -m jaxpar launch`, or unset the rest to train in this process alone."
        )
    env = ProcessEnv(
        coordinator=_in_brackets(given["JAX_COORDINATOR_ADDRESS"], "JAX_COORDINATOR_ADDRESS"),
        num_processes=_number("JAX_NUM_PROCESSES", given),
        process_id=_number("JAX_PROCESS_ID", given),
        bind=environ.get("JAX_COORDINATOR_BIND_ADDRESS"),
        local_device_ids=_device_ids(environ, given),
        on_several_hosts=given.get("hosts", "1") != "1",
        token=environ.get(TOKEN_VARIABLE, ""),
    )
    check_process_env(env)
    return env


def check_own_variables(environ: Mapping[str, str]) -> None:
    """Raises ValueError for a variable of jaxpar's that is misspelt or no number, and tells once of others that begin so."""
    timeout_of(environ)
    by_name = {name.lower(): name for name in OWN_VARIABLES}
    others = {*environ} - {*OWN_VARIABLES, *_told}
    for name in sorted(
        name for name in others if name.upper().startswith("JAX") and not name.startswith(OF_TESTS)
    ):
        near = near_name(name, by_name) if len(name) > len(PREFIX) else None
        if near is not None:
            raise ValueError(
                f"variables that begin with {PREFIX} must be those that jaxpar reads; got {printable(name)}. Did you mean "
                f"{by_name[near]}?"
            )
        if name.startswith(PREFIX):
            _told.add(name)
            tell(
                f"{printable(name)} is ignored: the variables that jaxpar reads are {', '.join(OWN_VARIABLES)}"
            )


_told: set[str] = set()


def check_process_env(env: ProcessEnv) -> None:
    """Raises ValueError unless the process number is within the run, addresses are ``host:port`` and the token is printable."""
    if env.num_processes < 1 or not 0 <= env.process_id < env.num_processes:
        raise ValueError(
            "a process's number must be from 0 to one less than their count; got "
            f"JAX_PROCESS_ID={env.process_id}, JAX_NUM_PROCESSES={env.num_processes}. Count processes from 0."
        )
    for name, address in (
        ("JAX_COORDINATOR_ADDRESS", env.coordinator),
        ("JAX_COORDINATOR_BIND_ADDRESS", env.bind),
    ):
        if address is not None:
            split_address(address, name)
    if not re.fullmatch("[!-~]{0,256}", env.token):
        raise ValueError(
            f"{TOKEN_VARIABLE} must be at most 256 letters, digits and signs; got {len(env.token)} characters, or a space or "
            "another sign among them. Make one with `openssl rand -hex 16`."
        )


def split_address(address: str, name: str = "an address") -> tuple[str, int]:
    """Returns host and port of ``host:port`` or ``[ipv6]:port``, also without the brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{name} must be host:port; got {address!r}. Write such as 10.0.0.1:1234.")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError as error:
            raise ValueError(
                f"{name} must have an IPv6 address before its last colon, and a port after it; got {address!r}. Write such as "
                "[fd00::2]:1234."
            ) from error
    return bare, int(port)


def _in_brackets(address: str, name: str) -> str:
    """Returns an address with the brackets around an IPv6 address without which JAX does not reach it."""
    host, port = split_address(address, name)
    return f"[{host}]:{port}" if ":" in host else address


def _number(name: str, given: Mapping[str, str]) -> int:
    try:
        return int(given[name])
    except ValueError:
        raise ValueError(
            f"{name} must be a number; got {given[name]!r}. Give such as {name}=1."
        ) from None


def _from_jax(environ: Mapping[str, str]) -> dict[str, str]:
    given = {name: environ[name] for name in NAMES if name in environ}
    if given and "JAX_PROCESS_ID" not in given and "JOB_COMPLETION_INDEX" in environ:
        given["JAX_PROCESS_ID"] = environ["JOB_COMPLETION_INDEX"]
    return given


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what ``srun`` sets for each task; a batch script outside ``srun`` has no SLURM_STEP_NODELIST and runs alone."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    if any(name not in environ for name in needed) or environ["SLURM_NTASKS"] == "1":
        return {}
    host = first_host(environ["SLURM_STEP_NODELIST"])
    given = {
        "JAX_COORDINATOR_ADDRESS": f"{host}:{_port(environ, _number('SLURM_JOB_ID', environ))}",
        "JAX_NUM_PROCESSES": environ["SLURM_NTASKS"],
        "JAX_PROCESS_ID": environ["SLURM_PROCID"],
        "hosts": environ.get("SLURM_STEP_NUM_NODES", "1"),
    }
    return given | _share_of_node(given, environ.get("SLURM_LOCALID"))


def remark_outside_srun(environ: Mapping[str, str]) -> str:
    """Returns what to say of a process in a job of several tasks that ``srun`` has not started; "" of any other."""
    num_tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" not in environ or num_tasks == "1" or "SLURM_STEP_NODELIST" in environ:
        return ""
    return (
        f"SLURM gives this job {num_tasks} tasks, and srun has not started this process, so it runs alone. To run in all of "
        "them, start it by srun"
    )


def _from_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    if environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1" or "OMPI_COMM_WORLD_RANK" not in environ:
        return {}
    size, here = environ["OMPI_COMM_WORLD_SIZE"], environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    hosts = str(-(-int(size) // max(int(here), 1)))
    given = {
        "JAX_NUM_PROCESSES": size,
        "JAX_PROCESS_ID": environ["OMPI_COMM_WORLD_RANK"],
        "hosts": hosts,
    }
    uri = environ.get(
        "OMPI_MCA_orte_hnp_uri", ""
    )  # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"; not in Open MPI 5
    if found := re.search(r"^(\d+)\.\d+;tcp6?://(\[?[^,:\]]+(?::[^,\]]*)?)", uri):
        host = found[2] + "]" if found[2].startswith("[") else found[2].split(":")[0]
        given["JAX_COORDINATOR_ADDRESS"] = f"{host}:{_port(environ, int(found[1]) // 4096)}"
    return given | _share_of_node(given, environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))


def _share_of_node(given: Mapping[str, str], local_id: str | None) -> dict[str, str]:
    """Assigns one GPU to each of several processes on a machine; a process that is alone on its machine uses all GPUs."""
    shares = local_id is not None and given["JAX_NUM_PROCESSES"] != given["hosts"]
    return {"local_device_ids": str(local_id)} if shares else {}


def _device_ids(environ: Mapping[str, str], given: Mapping[str, str]) -> tuple[int, ...] | None:
    ids = environ.get("JAX_LOCAL_DEVICE_IDS", given.get("local_device_ids", ""))
    try:
        return tuple(int(number) for number in ids.split(",")) if ids else None
    except ValueError:
        raise ValueError(
            f"JAX_LOCAL_DEVICE_IDS must be numbers; got {ids!r}. Write such as 0,1,2,3."
        ) from None


def _port(environ: Mapping[str, str], job: int) -> str:
    return environ.get("JAX_COORDINATOR_PORT", str(2**16 - LAST_PORTS + job % LAST_PORTS))


def first_host(node_list: str) -> str:
    """Returns the first host of SLURM's compressed node list.

    >>> first_host("node[007-015,20],login"), first_host("gpu1,gpu2")
    ('node007', 'gpu1')
    """
    found = re.match(r"([^,\[]*)(?:\[([^-,\]]*))?", node_list)
    return "" if found is None else found[1] + (found[2] or "")


def timeout_of(variables: Mapping[str, str]) -> float:
    """Returns the seconds that processes wait for one another to connect, by the variables of their environment.

    Raises:
        ValueError: They are no such number.
    """
    given = variables.get(TIMEOUT_VARIABLE, "300")
    rule = (
        f"{TIMEOUT_VARIABLE} must be a number of seconds above 0; got {given!r}. Give such as 300."
    )
    try:
        seconds = float(given)
    except ValueError:
        raise ValueError(rule) from None
    if not 0 < seconds < math.inf:  # else the process would say that others are missing
        raise ValueError(rule)
    return seconds
