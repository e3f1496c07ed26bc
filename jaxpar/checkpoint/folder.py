"""The folder of a run's checkpoints: what in it counts, how a save becomes a step, which steps stay. No JAX.

checkpoints/
    200/  300/        committed: each with a manifest.json
    saving-400/       a save on its way, or what a killed one left
    300.bad/          a damaged step that was saved again
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.checkpoint.files import fsync
from jaxpar.checkpoint.manifest import FILE_NAME, Manifest, read_manifest

STEP = re.compile(r"0|[1-9][0-9]{0,17}")
SAVING = re.compile(r"saving-[0-9]+(\..*)?")  # Orbax's own unfinished folders begin with the name that they are to get


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay, once a newer one is committed; the newest always does.

    Attributes:
        last: The newest so many.
        every: Beside these each step that this divides; 0: none.
        best: Beside these the one with the smallest metric of this name; a leading "-" asks for the largest. None: none.
    """

    last: int = 3
    every: int = 0
    best: str | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep must be at least 1; got {self.last}. Give the number of checkpoints that stay.")
        if self.every < 0:
            raise ValueError(f"keep_every must be 0 or more; got {self.every}. Give a number of steps, or 0 for none.")

    def choose(self, manifests: Sequence[Manifest]) -> set[int]:
        """Returns the steps that stay."""
        steps = sorted(manifest.step for manifest in manifests)
        stay = set(steps[-self.last :]) | {step for step in steps if self.every and step % self.every == 0}
        name, sign = (self.best or "").lstrip("-"), -1 if (self.best or "").startswith("-") else 1
        if measured := [manifest for manifest in manifests if name in manifest.metrics]:
            stay.add(min(measured, key=lambda manifest: (sign * manifest.metrics[name], -manifest.step)).step)
        return stay


class Folder:
    """What lies in the folder of a run's checkpoints.

    Args:
        path: The folder.
        check: Raises OSError where this run may write to it no more; called just before a save is made to count.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self.path, self._check = path, check

    def of(self, step: int) -> Path:
        """Returns the folder of a committed step."""
        return self.path / str(step)

    def saving(self, step: int) -> Path:
        """Returns the folder that a save of a step is written to."""
        return self.path / f"saving-{step}"

    def numbered(self) -> list[int]:
        """Returns the numbers that entries of the folder have for a name, in order, whatever these entries are."""
        return sorted(int(name) for name in self._names() if STEP.fullmatch(name))

    def committed(self) -> dict[int, Manifest]:
        """Returns the manifest of each step that has one in order, by step; no other file is read."""
        return {step: manifest for step in self.numbered() if isinstance(manifest := self.look(step), Manifest)}

    def look(self, step: int) -> Manifest | str:
        """Returns the manifest of a step, or what is wrong with it in words."""
        try:
            manifest = read_manifest(self.of(step))
        except (ValueError, OSError) as error:
            return str(error)
        return manifest if manifest.step == step else f"its manifest is that of step {manifest.step}"

    def unfinished(self) -> list[Path]:
        """Returns what killed saves left."""
        return sorted(self.path / name for name in self._names() if SAVING.fullmatch(name))

    def _names(self) -> list[str]:
        return os.listdir(self.path) if self.path.is_dir() else []

    def commit(self, manifest: Manifest) -> None:
        """Makes the finished save of a step a committed one: first its manifest, then, in one move, its name."""
        saving, final = self.saving(manifest.step), self.of(manifest.step)
        _sync_tree(saving)
        _write_durably(saving / FILE_NAME, manifest.render())
        fsync(saving)
        self._check()
        if final.is_symlink() or final.exists():
            aside = self.path / f"{manifest.step}.bad"
            remove(aside)
            final.rename(aside)
        saving.rename(final)
        fsync(self.path)

    def prune(self, keep: Keep) -> list[int]:
        """Deletes the steps that are not to stay, and returns them. What is no committed step is left alone."""
        committed = self.committed()
        gone = sorted(committed.keys() - keep.choose(list(committed.values())))
        for step in gone:
            going = self.saving(step).with_suffix(".gone")  # a step half deleted is no step
            remove(going)
            self.of(step).rename(going)
            remove(going)
        return gone


def has_steps(directory: Path) -> bool:
    """Returns whether a folder holds what goes by the name of a step, be it whole or not. Unfinished saves are none."""
    return bool(Folder(directory).numbered())


def _write_durably(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="ascii")
    fsync(part)
    part.rename(path)


def _sync_tree(folder: Path) -> None:
    for here, _, files in os.walk(folder):
        for name in files:
            fsync(Path(here) / name)
        fsync(Path(here))


def remove(path: Path, *, must: bool = True) -> None:
    """Deletes a file, a folder with all in it, or a link, which is not followed; unless it ``must``, as far as it can."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path, ignore_errors=not must)
