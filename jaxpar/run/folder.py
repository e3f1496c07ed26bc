"""The files that a run writes into --out-dir. A new run refuses those of an earlier one; --overwrite deletes them.

Only files that a run writes are deleted. All others stay, and so do links to folders and what they lead to.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxpar.checkpoint import delete_steps, has_steps
from jaxpar.fields import arg, switch
from jaxpar.huggingface.export import OF_MODEL, OF_TOKENIZER
from jaxpar.huggingface.folder import CONFIG
from jaxpar.metrics.log import foreign_config, read_metrics
from jaxpar.run.flags import RunFlags, check_out_dir, own_values
from jaxpar.runtime.supervise import RESUME_IF_ANY, RESUME_VARIABLE, is_restarted

CHECKPOINTS = "checkpoints"
PICTURES, _OTHERS = json.loads(Path(__file__).with_name("own_files.json").read_text()).values()
OWN_FILES = (*_OTHERS, *PICTURES, *(f"model/{name}" for name in (CONFIG, *OF_MODEL, *OF_TOKENIZER)))

Flags = TypeVar("Flags", bound=RunFlags)


def own_files(out_dir: Path) -> Iterator[Path]:
    """Yields the files in ``--out-dir`` that a run writes, except checkpoints."""
    for pattern in OWN_FILES:
        for path in sorted(out_dir.glob(pattern)):
            above = path.relative_to(out_dir).parents
            if path.is_file() and not any(
                (out_dir / folder).is_symlink() for folder in above if folder != Path()
            ):
                yield path


def results(out_dir: Path) -> list[str]:
    """Returns the names of an earlier run's results in ``--out-dir``, without its checkpoints; none if it did no step."""
    lines = read_metrics(out_dir / "metrics.jsonl")
    pictures = [path.name for pattern in PICTURES for path in sorted(out_dir.glob(pattern))]
    return [f"metrics.jsonl of {len(lines)} steps"] * bool(lines) + pictures


def check_new(out_dir: Path, *, overwrite: bool) -> None:
    """Raises ValueError unless ``--out-dir`` can be written to and has no earlier run, or the flag --overwrite deletes it."""
    check_out_dir(out_dir)
    check_own_config(out_dir)
    found = [f"{CHECKPOINTS}/"] * has_steps(out_dir / CHECKPOINTS) + results(out_dir)
    if found and not overwrite:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise ValueError(
            f"a new run needs a folder without results; got {shown} in {out_dir}. Choose another {arg('out_dir')}, or "
            f"add {switch('overwrite')}, which deletes the earlier run."
        )


def check_own_config(out_dir: Path) -> None:
    """Raises ValueError if ``--out-dir`` has a config.json that is no run's, such as a model's, which a run would replace."""
    if what := foreign_config(out_dir):
        raise ValueError(
            f"{arg('out_dir')} must be a folder of runs, since a run writes its flags to {CONFIG}; got {out_dir} with a "
            f"{CONFIG}, {what}. Name another folder, such as {out_dir / 'run'}."
        )


def check_apart(
    out_dir: Path, data: Iterable[Path], save_hf: Path | None, token_cache: Path | None = None
) -> None:
    """Raises ValueError if a run would write among the files that it reads, or its model among its own files.

    Args:
        out_dir: The folder of the run.
        data: The files and folders of --data.
        save_hf: The folder of --save-hf, if any.
        token_cache: That of --token-cache, if any.
    """
    folders = {"out_dir": out_dir, "save_hf": save_hf, "token_cache": token_cache}
    for flag, path in ((arg(name), path) for name, path in folders.items() if path is not None):
        for folder in (each for each in data if each.is_dir()):
            if path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(
                    f"{flag} must be outside of the folder of {arg('data files')}, all of whose files are learned; got {path} "
                    f"in {folder}. Name another, or move the text to a folder of its own."
                )
    own = {Path(name).parts[0] for name in (*OWN_FILES, f"{CHECKPOINTS}/") if "/" in name}
    taken = [out_dir, *(out_dir / name for name in sorted(own))]
    if save_hf is not None and save_hf.resolve() in [each.resolve() for each in taken]:
        raise ValueError(
            f"{arg('save_hf')} must be a folder of its own; got {save_hf}, where the run writes other files. Choose "
            f"{out_dir / 'tuned'}, say."
        )


def is_of(out_dir: Path, flags: Mapping[str, Any]) -> bool:
    """Returns whether the run in ``--out-dir`` had these flags, except those that all runs share but --steps and --seed."""
    try:
        saved = json.loads((out_dir / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(saved, dict) and own_values(saved) == own_values(flags)


def delete_run(out_dir: Path) -> None:
    """Deletes the files in ``--out-dir`` that a run writes, checkpoints too, and the folders that are empty then."""
    files = list(own_files(out_dir))
    for path in files:
        path.unlink()
    if not (out_dir / CHECKPOINTS).is_symlink():
        delete_steps(out_dir / CHECKPOINTS)
    inside = {
        out_dir / folder
        for path in files
        for folder in path.relative_to(out_dir).parents
        if folder != Path()
    }
    for folder in sorted(inside, key=lambda path: len(path.parts), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def make_new(out_dir: Path, *, overwrite: bool) -> None:
    """Makes ``--out-dir``, with ``overwrite`` without the files of an earlier run."""
    if overwrite:
        delete_run(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)


def has_run(out_dir: Path) -> bool:
    """Returns whether ``--out-dir`` has results or checkpoints of an earlier run."""
    return bool(results(out_dir)) or has_steps(out_dir / CHECKPOINTS)


def resumed_if_restarted(flags: Flags, say: Callable[[str], None] = lambda message: None) -> Flags:
    """Returns the flags of this start: a run that was restarted goes on from its checkpoints, and deletes none.

    Args:
        flags: The flags as they were given.
        say: Prints that one of them has no effect.
    """
    if is_restarted() and has_steps(flags.common.out_dir / CHECKPOINTS):
        if flags.common.overwrite:
            say(
                f"{switch('overwrite')} has no effect: {RESUME_VARIABLE}={RESUME_IF_ANY} goes on from the checkpoints in "
                f"{flags.common.out_dir}. To begin a new run, choose another {arg('out_dir')}"
            )
        return flags.replace(resume=True, overwrite=False)
    return flags
