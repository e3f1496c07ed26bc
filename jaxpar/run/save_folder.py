"""The folder of --save-hf: a run claims it before it trains, and at the end it writes over no model but its own.

    tuned/.lease/           the claim, as that of --out-dir, until the model is written
    tuned/.save_hf.json     until the model is whole: the number of the run that writes there, checksums of weights so far
    runs/a/save_hf.json     the folder, the steps and the number of this run, and then a checksum of the model that it wrote

A run that was killed while it wrote, or after it, is resumed with as many steps and writes its model anew.
"""

import secrets
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
from jaxtyping import PyTree

from jaxpar.checkpoint.manager import take_in_first_process
from jaxpar.fields import arg
from jaxpar.huggingface import export
from jaxpar.huggingface.dtypes import dtype_of
from jaxpar.huggingface.finite import OutOfRangeError
from jaxpar.huggingface.folder import CONFIG, read_json, write_json
from jaxpar.huggingface.from_codes import has_codes, layer_by_layer
from jaxpar.models.transformer import TransformerConfig
from jaxpar.run.flags import CommonFlags
from jaxpar.run.folder import CHECKPOINTS
from jaxpar.run.messages import say, stop
from jaxpar.run.model_files import checksum_of_file, checksum_of_model, merged
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.lease import Lease
from jaxpar.runtime.output import text_of
from jaxpar.runtime.uncaught import DISK_FAULTS

MARK = "save_hf.json"
PART_OF_SAFETENSORS = ".tmp"  # begins the name under which the library writes a file


class NotBegunError(OSError):
    """The first process cannot read or write what it notes of a model; every process raises it."""


class SaveFolder:
    """The folder that a run writes its model to; every process must call its methods, and the first one writes.

    Args:
        path: The folder of --save-hf.
        flags: The flags of the run.
    """

    def __init__(self, path: Path, flags: CommonFlags) -> None:
        self.path, self._flags = path, flags
        self._there = path / f".{MARK}"
        self._lease = Lease(
            path,
            remedy=f"Give another folder ({arg('save_hf')}), or stop that run first.",
            is_kept=False,
        )

    def check(self) -> None:
        """Raises FolderTakenError if the folder has a model, but for that of this run, which is resumed."""
        if not self.is_begun():
            export.check_no_model(self.path)

    def claim(self) -> None:
        """Takes the folder for this run until its model is written.

        Raises:
            FolderTakenError: It has a model.
            HeldError: Another run will write its model there.
        """
        take_in_first_process(self._lease, say)
        self.check()  # again: another run may have written its model since

    def is_begun(self) -> bool:
        """Returns whether this run goes on, and what there is of a model in the folder is its own."""
        is_own = self._flags.resume and self._is_own()
        return exchange("model that was begun", is_own)[0]  # of the first process, which writes

    def check_room(self, config: TransformerConfig, *, described_by: Path | None) -> None:
        """Raises OSError if the disk of the folder has no room for the model.

        What a killed run has written there takes room until ``begin`` removes it.

        Args:
            config: The model.
            described_by: The folder with its description; None: a new one, in float32.
        """
        if not self.is_begun():
            dtype = None if described_by is None else dtype_of(described_by)
            export.check_room(self.path, config, dtype or "float32")

    def begin(self) -> None:
        """Notes that the model is written now, and removes what there is of the one that this run began before.

        Raises:
            FolderTakenError: The folder has another model.
            LostError: Another run has taken the folder.
            NotBegunError: The run's folder, or that of the model, cannot be written, or a note there cannot be read.
        """
        self.check()
        self._still_claimed()
        failed = None
        if jax.process_index() == 0:
            try:
                self._begin()
            except OSError as error:
                failed = error.errno, error.strerror, error.filename and str(error.filename)
            except Exception as error:  # such as a damaged note: the others wait for an answer
                failed = (text_of(error).rstrip("."),)
        if failed := exchange("model to begin", failed)[0]:
            raise NotBegunError(*failed)

    def _begin(self) -> None:
        mark = self._mark() | {"number": secrets.token_hex(8)}
        if self._flags.resume and self._is_own():
            mark["number"] = self._read(self._flags.out_dir / MARK)["number"]
            for path in self.path.iterdir():
                if export.is_of_model(path.name) or path.name.startswith(PART_OF_SAFETENSORS):
                    path.unlink()
        write_json(self._flags.out_dir / MARK, mark)
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self._there, {"number": mark["number"]})

    def note(self, name: str, path: Path) -> None:
        """Notes a file of weights as the run's own, before it gets its name; the first process calls it.

        Args:
            name: The name.
            path: The file, whole.

        Raises:
            OSError: The folder cannot be written.
        """
        noted = self._read(self._there)
        weights = noted.get("weights", {}) | {name: checksum_of_file(path, name)}
        write_json(self._there, noted | {"weights": weights})

    def end(self) -> None:
        """Notes which model was written, so that the run may write it anew, and gives the folder back."""
        if jax.process_index() != 0:
            return
        with suppress(OSError):  # the model is there; of a full disk the run has told
            if mark := self._read(self._flags.out_dir / MARK):
                mark["checksum"] = checksum_of_model(self.path)
                write_json(self._flags.out_dir / MARK, mark)
            self._there.unlink(missing_ok=True)
        self._lease.release()

    def save(
        self,
        config: TransformerConfig,
        params: PyTree,
        *,
        described_by: Path,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the model as transformers reads it, with the description in another folder.

        Its dtype is that of the description, or float32 if a weight is too large for that one: params may be nowhere else.

        Args:
            config: The model.
            params: Its params.
            described_by: The folder with its description.
            keep: Called where the folder takes no model, before the run ends with 74: saves the params elsewhere.

        Raises:
            OSError: The disk takes no model.
            SystemExit: The folder takes none, for another reason.
        """
        try:
            self.begin()
            self._write(config, params, described_by)
        except (OSError, export.FolderTakenError) as error:
            # In a run of several processes the first one writes, and all know these reasons.
            known = isinstance(error, (export.NoRoomError, export.FolderTakenError, NotBegunError))
            if known or jax.process_count() == 1:
                keep()
                if getattr(error, "errno", None) not in DISK_FAULTS:
                    self._end_unwritten(error)
            raise
        self.end()

    def save_at_least(
        self, config: TransformerConfig, params: PyTree, *, described_by: Path
    ) -> None:
        """Writes the model of a run whose last checkpoint could not be saved; says why, if it cannot be written either.

        Args:
            config: As for ``save``, as are the next two.
            params: Likewise.
            described_by: Likewise.
        """
        if jax.process_count() > 1:
            say(
                f"nor is there a model in {self.path}: several processes write none once a save has failed"
            )
            return
        try:
            # The disk of the run's folder is full, and that of the model may not be.
            with suppress(OSError):
                self.begin()
            self._write(config, params, described_by)
        except (OSError, ValueError) as error:
            say(f"nor could the model be written in {self.path}: {error}")
        else:
            self.end()

    def _end_unwritten(self, error: Exception) -> NoReturn:
        """Ends a run whose model was not written, and whose params a checkpoint has."""
        out_dir = self._flags.out_dir
        why = error.found if isinstance(error, export.FolderTakenError) else str(error)
        stop(
            ExitCode.NOT_SAVED,
            f"{why}: the model was not written. What was trained is saved in {out_dir / CHECKPOINTS}. Write it to a new "
            f"folder: python -m jaxpar export {shlex.quote(str(out_dir))} DIR.",
        )

    def _write(self, config: TransformerConfig, params: PyTree, described_by: Path) -> None:
        params, remark = layer_by_layer(params) if has_codes(params) else merged(params), ""
        write = partial(
            export.write_model, self.path, config, params, source=described_by, note=self.note
        )
        try:
            try:
                write()
            except OutOfRangeError as error:
                remark = f", as float32: {error}"
                write(dtype="float32")
        except BaseException:
            if jax.process_index() == 0 and not _has_part_of_model(self.path):
                self._there.unlink(missing_ok=True)
            raise
        say(f"written: {self.path}/, a model for transformers{remark}")

    def _still_claimed(self) -> None:
        lost = None
        if jax.process_index() == 0:
            try:
                self._lease.check()
            except OSError as error:
                lost = text_of(error)
        if lost := exchange("claim of the model's folder", lost)[0]:
            raise export.FolderTakenError(lost.rstrip("."), "")

    def _is_own(self) -> bool:
        mark = self._read(self._flags.out_dir / MARK)
        if not mark or any(mark.get(name) != value for name, value in self._mark().items()):
            return False
        noted = self._read(self._there)
        if noted or not (self.path / CONFIG).is_file():
            return noted.get("number", "") == mark.get("number") and self._has_only(noted)
        return checksum_of_model(self.path) == mark.get("checksum")

    def _has_only(self, noted: Mapping[str, Any]) -> bool:
        """Returns whether all weights in the folder are those noted: it may have been emptied since, but for hidden files."""
        there = [path for path in self.path.iterdir() if export.is_of_model(path.name)]
        weights = [path for path in there if path.suffix == ".safetensors"]
        own = noted.get("weights", {})
        is_own = all(checksum_of_file(path, path.name) == own.get(path.name) for path in weights)
        has_others = any(path.suffix == ".json" for path in there)  # written after the weights
        return is_own and bool(weights or not has_others)

    def _mark(self) -> dict[str, Any]:
        return {"folder": str(self.path.resolve()), "steps": self._flags.steps}

    def _read(self, path: Path) -> dict[str, Any]:
        return read_json(path) if path.exists() else {}


def _has_part_of_model(folder: Path) -> bool:
    return folder.is_dir() and any(export.is_of_model(path.name) for path in folder.iterdir())
