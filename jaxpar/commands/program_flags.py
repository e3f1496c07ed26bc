"""Checks the flags of the program that a job runs, by the recipe's own parser; nothing is trained.

Only recipes of jaxpar are loaded: a script of one's own would run. It may also be in the image alone, and not on this machine.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

from jaxpar.commands.cli import flag_names, list_flags
from jaxpar.commands.train import RECIPES, load, path_of, recipes
from jaxpar.fields import given_by, near_name
from jaxpar.jobs.job import INSTALLED, SERVED, is_python, num_words
from jaxpar.jobs.workload import fills, mesh_of_flags
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.output import printable, tell
from jaxpar.runtime.process_env import check_own_variables
from jaxpar.runtime.program import near_script
from jaxpar.runtime.supervise import is_restarted

HELP = ("-h", "--help")
JAXPAR = (("jaxpar",), ("python", "-m", "jaxpar"))
FOR_SHELLS = re.compile(
    r"\$\{?[A-Za-z_]|(^|=)~/"
)  # $NAME, ${NAME} and ~/, but not $(NAME) of Kubernetes
RUN_BY_PODS = ("train", "serve")


def check_program(
    command: Sequence[str],
    added: Sequence[str] = (),
    withheld: Sequence[str] = (),
    num_devices: int | None = None,
) -> list[str]:
    """Returns a line about what is not checked of a program, or not given to it, or seems wrong, if there is anything.

    Args:
        command: The program and its flags.
        added: The flags that its job adds.
        withheld: The flags that its job would add to those of a recipe.
        num_devices: The devices of its job; None: not known.

    Raises:
        ValueError: There is no such recipe or script, or a flag is out of range, or is none of the recipe's, or the recipe's
            mesh has other devices than the job.
        SystemExit: The recipe refuses a flag; it has said which.
    """
    name, own = _split(command)
    _check_word(name, command)
    path = _recipe_of(name, command)
    if path is None:
        is_elsewhere = name.endswith(".py") and not Path(name).is_file()
        what = "is not on this machine" if is_elsewhere else "is no recipe of jaxpar"
        gets = f", and it gets {' '.join(added)}" if added else ""
        gets = f", and it does not get {' '.join(withheld)}" if withheld else gets
        return [
            f"{name} {what}: its flags are not checked{gets}",
            *_other_mesh(name, command, num_devices),
        ]
    if {*HELP} & {*own}:
        raise ValueError(
            f"a job runs {name}; got a command that asks for its help. Leave {' and '.join(HELP)} out."
        )
    try:
        module = load(path)
    except ImportError as error:
        return [f"{name} cannot be loaded on this machine, and its flags are not checked: {error}"]
    _check_trains(module, name)
    _check_added(module, name, added)
    if other := _other_mesh(name, command, num_devices):
        raise ValueError(f"a recipe's mesh must have the devices of its job; got {other[0]}.")
    _parse(module, name, [*own, *added], num_devices)
    return [*_missed(module, name, withheld), *_for_shells(name, own)]


def _check_trains(module: Any, name: str) -> None:
    """Raises ValueError for a recipe that has a mesh and is no run, such as one that compiles a published layout."""
    from jaxpar.run.flags import RunFlags  # with JAX

    names = {each.name for each in fields(module.Config)}
    if "mesh" in names and not issubclass(module.Config, RunFlags):
        raise ValueError(
            f"a job runs a recipe that trains; got {name}, which computes on this machine and trains nothing. Run it here."
        )


def _for_shells(name: str, words: Sequence[str]) -> list[str]:
    """Returns a line if words have what a shell would replace: a job starts its program without one."""
    found = [
        word for word in words if FOR_SHELLS.search(word) and " " not in word
    ]  # a text may have a $
    if not found:
        return []
    return [
        f"{name} gets {printable(found[0])[:80]} as it is written: no shell reads the command of a job. Write the "
        "value itself"
    ]


def model_remarks(own_model: str | None, command: Sequence[str]) -> list[str]:
    """Returns a line if a plan is for a model of one's own, and its job runs a recipe, which trains another."""
    if own_model is None or not command:
        return []
    name, _ = _split(command)
    if _recipe_of(name, command) is None:
        return []
    return [
        f"the plan is for a model of your own, {printable(own_model)[:80]}, and {name} trains the model that its flags name. "
        "Memory and time that were planned are not those of this job: name the script that trains it, or plan for the recipe's"
    ]


def check_variables(variables: Mapping[str, str]) -> None:
    """Raises ValueError if an environment has a variable at which a run would end: misspelt, or with such a value.

    Args:
        variables: Those of a pod; one in which Kubernetes puts the value of another is not checked.
    """
    from jaxpar.run.flags import log_seconds  # with JAX

    plain = {name: value for name, value in variables.items() if "$(" not in value}
    check_own_variables(plain)
    is_restarted(plain)
    log_seconds(None, plain)


def check_served(args: Sequence[str]) -> None:
    """Exits if `jaxpar serve` refuses a flag; it has said which.

    Args:
        args: The command line after ``serve``.
    """
    from jaxpar.commands.runs import check_serve

    if {*HELP} & {*args}:
        raise ValueError(
            "a Service runs jaxpar serve; got a command that asks for its help. Leave --help out."
        )
    _refused_told("jaxpar serve", lambda: check_serve(args))


def _refused_told(name: str, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except SystemExit as end:
        if end.code == ExitCode.BAD_CONFIG:
            tell(f"error: {name} would refuse these flags")
        raise


def _split(command: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the recipe's name, the script or the program of a command, and the flags that follow it."""
    begins = num_words(command, INSTALLED)
    if begins:
        return "".join(command[begins : begins + 1]), list(command[begins + 1 :])
    scripts = [position for position, word in enumerate(command) if word.endswith(".py")]
    at = scripts[0] if scripts and (is_python(command[0]) or scripts[0] == 0) else 0
    return command[at], list(command[at + 1 :])


def _check_word(name: str, command: Sequence[str]) -> None:
    """Raises ValueError if a program is no word of its own, is a folder, or is to be written otherwise."""
    if num_words(command, SERVED):
        raise ValueError(
            "a job ends and a server does not; got jaxpar serve. Write it with --kind service."
        )
    if ".py " in name:
        raise ValueError(
            f"a program and its flags are words of their own; got {printable(name)[:80]!r} as one. Leave the quotes out."
        )
    _check_jaxpar(command)
    if (
        len(PurePosixPath(name).parts) == 1
        and name in RECIPES
        and not num_words(command, INSTALLED)
    ):
        raise ValueError(
            f"a recipe is started by jaxpar train; got {name} alone. Write jaxpar train {name}, or ./{name} for a program of "
            "your own."
        )
    if name and Path(name).is_dir():
        raise ValueError(
            f"a job runs a script or a program; got the folder {name}. Name a script in it."
        )


def _check_jaxpar(command: Sequence[str]) -> None:
    """Raises ValueError if a command misspells one of jaxpar's that pods run."""
    begins = num_words(command, JAXPAR)
    given = "".join(command[begins : begins + 1])
    near = near_name(given, RUN_BY_PODS) if begins else None
    if near and near != given:
        raise ValueError(
            f"pods run jaxpar {' or jaxpar '.join(RUN_BY_PODS)}; got {printable(given)[:80]}. Write {near}."
        )


def _recipe_of(name: str, command: Sequence[str]) -> Path | None:
    """Returns the script of the recipe that a command runs; None if it is none of jaxpar's."""
    if num_words(command, INSTALLED):
        return path_of(name)
    ours = recipes() / PurePosixPath(name).name
    given = Path(name)
    if given.is_file():
        is_ours = ours.is_file() and given.read_bytes() == ours.read_bytes()
        return ours if is_ours else None
    if given.parent.name == "recipes" and ours.is_file():  # in the image
        return ours
    near = (
        near_script(ours if given.parent.name == "recipes" else given)
        if name.endswith(".py")
        else None
    )
    if near is not None:
        raise ValueError(
            f"the script must exist; got {given}. Did you mean {given.parent / near.name}?"
        )
    return None


def _check_added(module: ModuleType, name: str, added: Sequence[str]) -> None:
    """Raises ValueError if a recipe does not take the flags that its job adds."""
    known = {flag for _, flag, _ in list_flags(module.Config)}
    unknown = [word for word in added if word.startswith("--") and word not in known]
    if unknown:
        raise ValueError(
            f"a job gives its recipe the mesh and the port of metrics; got {name}, which does not take {unknown[0]}. Write it "
            f"as a program, which gets only its own flags: python {recipes().name}/{Path(name).stem.replace('-', '_')}.py"
        )


def _other_mesh(name: str, command: Sequence[str], num_devices: int | None) -> list[str]:
    """Returns a line if the mesh in the command of a program has other devices than its job."""
    sizes = mesh_of_flags(command)
    if num_devices is None or not sizes or fills(sizes, num_devices):
        return []
    shown = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    asked = "another number of" if -1 in sizes.values() else math.prod(sizes.values())
    return [
        f"{shown} in the command of {name}, {asked} devices, and a job of {num_devices}: give both one mesh, or the program "
        "--mesh.data -1, if that is its flag, for all devices of the job"
    ]


def _missed(module: ModuleType, name: str, withheld: Sequence[str]) -> list[str]:
    """Returns a line if a recipe takes flags that its job does not give, since it is written as a program of one's own."""
    known = {flag for _, flag, _ in list_flags(module.Config)}
    if not {*withheld} & known:
        return []
    return [
        f"written after python, {name} gets its own flags alone, and not {' '.join(withheld)}: write {name} without python, or "
        "add them"
    ]


def _parse(module: ModuleType, name: str, args: Sequence[str], num_devices: int | None) -> None:
    from jaxpar.commands import recipe  # with JAX
    from jaxpar.run import RunFlags

    flags = _refused_told(
        name, lambda: recipe.parse(module.main, module.Config, args, program=name)
    )
    recipe.check_numbers(flags)
    if isinstance(flags, RunFlags):
        _check_run(flags, name)
        with given_by(flag_names(type(flags))):
            _check_rows(flags, num_devices)
            _check_settings(module, flags)


def _check_settings(module: ModuleType, flags: Any) -> None:
    """Raises ValueError if a recipe refuses its flags without data and devices, by its function ``check_settings``."""
    check = getattr(module, "check_settings", None)
    if check is None:
        return
    with suppress(ImportError):  # of a package that the image has
        check(flags)


def _check_run(flags: Any, name: str) -> None:
    """Raises ValueError if a run would train on the CPUs of its pods, or its model is none."""
    from jaxpar.run.language_model import ModelFlags, check_config, check_origin

    if flags.common.fake_devices:
        raise ValueError(
            f"a job trains on its nodes' devices; got --fake-devices {flags.common.fake_devices} for {name}. Leave it out; to "
            "rehearse a job without GPUs, give --fake-devices-per-node before the script."
        )
    own = getattr(flags, "recipe", None)
    if isinstance(own, ModelFlags):
        check_origin(own)
        if own.init_from is None:  # a folder is in the image or on the volume
            check_config(own, flags.data.seq)


def _check_rows(flags: Any, num_devices: int | None) -> None:
    """Raises ValueError if a step of a recipe has too few rows for the microbatches of all replicas."""
    from jaxpar.mesh import resolve_sizes  # with JAX
    from jaxpar.run.batches import check_microbatches
    from jaxpar.run.language_data import DataFlags, in_rows

    sizes = dict(vars(flags.mesh))
    if -1 in sizes.values() and num_devices is None:
        return
    mesh = SimpleNamespace(
        shape=sizes if num_devices is None else resolve_sizes(sizes, num_devices)
    )
    data = getattr(flags, "data", None)
    flags = in_rows(flags, mesh) if isinstance(data, DataFlags) else flags
    own = flags.data if isinstance(data, DataFlags) else getattr(flags, "recipe", None)
    if own is not None and hasattr(own, "num_microbatches"):
        most = sys.maxsize  # rows to learn from, of which the machine with the data knows
        check_microbatches(flags, own.num_microbatches, most, mesh, keeps_mesh=True)
