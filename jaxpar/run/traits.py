"""What a run knows of itself beside its settings, by which one that resumes is compared with the saved one.

    optimizer    the numbers in its init and update, as they are traced: rates, decays, the steps of a schedule
    step         what else a step does with gradients: max_grad_norm, grad_reduce_dtype
    batch        shapes and dtypes of the batch that the step is compiled for
    versions     of JAX and optax: another version may write the same update with other numbers

What differs is printed, not refused, since a schedule may follow from the number of steps, which may change. The data, the
model and the loss are compared by the settings of a run alone: a run without any is told so.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from jaxpar.checkpoint.manifest import parts_of, plain_json
from jaxpar.fields import brief
from jaxpar.run.kept_numbers import describe, kept_numbers
from jaxpar.run.optimizer_numbers import (
    follow_steps,
    is_told,
    numbers_apart,
    numbers_of,
    other_numbers,
)
from jaxpar.runtime.coordination import check_agreement, check_same_program
from jaxpar.runtime.output import printable, version_of
from jaxpar.sharding import path_string
from jaxpar.step.settings import Parallel
from jaxpar.trainable import trained_part

SHOWN = 4
REMEDY = (
    'Give what the results depend on to Run as settings when a run begins, such as {"learning_rate": 0.001, "data": '
    '"rows.csv"}: a resume with other values is then refused.'
)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises TypeError for a setting that cannot be compared by its text.

    The text of an object has its address, which differs between processes, or nothing of what it holds, as a generator of
    random numbers has; that of a long array leaves out the middle.
    """
    if within := [name for name, value in settings.items() if _holds_itself(value)]:
        raise TypeError(
            "a setting must be a number, a text, or a list or dict of these; got one that holds itself: "
            f"{', '.join(within)}. Give the numbers and names that results depend on."
        )
    if wrong := {
        name: value
        for name, value in settings.items()
        if not all(map(_is_told_by_text, _parts(value)))
    }:
        raise TypeError(
            "a setting must be a number, a text, or a list or dict of these, which a run that resumes compares; got "
            f"{', '.join(f'{name}={brief(str(value))}' for name, value in wrong.items())}. Give its name, such as "
            f"{next(iter(wrong))}={getattr(next(iter(wrong.values())), '__name__', 'cosine')!r}, or a checksum."
        )
    if nan := [name for name, value in settings.items() if _has_nan(value)]:
        raise ValueError(
            f"a setting must be equal to itself, by which a run that resumes compares it; got {', '.join(nan)} with nan. Give "
            "None, or the number that was meant."
        )


def _parts(value: Any) -> Iterator[Any]:
    """Yields what a setting holds, in dicts, lists, dataclasses and namespaces."""
    parts = parts_of(value)
    value = value if parts is None else parts
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _parts(each)
    else:
        yield value


def _holds_itself(value: Any) -> bool:
    try:
        for _ in _parts(value):
            pass
    except RecursionError:
        return True
    return False


def _is_told_by_text(value: Any) -> bool:
    """Whether values of this kind that differ have other texts, in any process."""
    if isinstance(value, (np.ndarray, jax.Array)):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        return value.ndim == 0 and not is_key
    # One whose kind is compared by identity alone may have the text of its kind.
    has_value = value is None or isinstance(value, (type, Enum, PartitionSpec, Mesh, AbstractMesh))
    has_value |= type(value).__eq__ is not object.__eq__
    return has_value and re.search(r" at 0x[0-9a-fA-F]+>", str(value)) is None


def _has_nan(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    return (
        any(map(_has_nan, value))
        if isinstance(value, (list, tuple))
        else bool(np.all(value != value))
    )


class Traits:
    """The traits of a run.

    Args:
        settings: The settings of the run, which are compared on their own.
        say: Prints a message.
        steps: The number of steps of the run.

    Attributes:
        settings: The settings as plain JSON, as a checkpoint has them and processes compare them.
    """

    def __init__(
        self, settings: Mapping[str, Any], say: Callable[[str], None], *, steps: int
    ) -> None:
        _check_settings(settings)
        self._steps = steps
        self.settings, self._say = plain_json(settings), say
        self._saved: Mapping[str, Any] = {}
        self._optimizer: Callable[[], dict[str, Any] | None] = lambda: None
        self._kept: Callable[[PyTree], dict[str, tuple[Any, Any]]] = lambda opt_state: {}
        self._batch: dict[str, str] | None = None
        self._step: dict[str, Any] = {}
        self._found: dict[str, Any] | None = None

    def take_state(self, target: PyTree, *init_state: Any, **where: Any) -> None:
        """Takes the state of the run and the arguments that ``jaxpar.init_state`` has made it of."""
        given = dict(zip(("init_fn", "key", "optimizer", "mesh"), init_state, strict=False)) | where
        parallel = given["mesh"]
        trainable = parallel.trainable if isinstance(parallel, Parallel) else given.get("trainable")
        self._take_reduction(parallel)
        params = trained_part(target.params, trainable)
        self._optimizer = lambda: numbers_of(given["optimizer"], params)
        self._kept = lambda opt_state: kept_numbers(given["optimizer"], params, opt_state)

    def _take_reduction(self, parallel: Any) -> None:
        dtype = getattr(parallel, "grad_reduce_dtype", None)
        self._step["grad_reduce_dtype"] = None if dtype is None else np.dtype(dtype).name

    def take_step(self, train_step: Any) -> None:
        """Takes the training step; prints how it differs from that of the saved run, if it does."""
        norm = getattr(train_step, "max_grad_norm", None)
        self._step["max_grad_norm"] = None if norm is None else float(norm)
        if parallel := getattr(train_step, "parallel", None):
            self._take_reduction(parallel)  # value_and_grad may have it as a keyword
        saved = self._saved.get("step")
        if isinstance(saved, Mapping):
            apart = [
                f"{name}={value}, saved {saved.get(name)}"
                for name, value in self._step.items()
                if value != saved.get(name)
            ]
            if apart:
                told = printable(", ".join(apart))
                self._say(f"the step is not that of the saved run: {told}.{self._remedy()}")

    def take_batch(self, batch: PyTree) -> None:
        """Takes the batch that the step is compiled for; prints how it differs from that of the saved run, if it does."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        self._batch = {
            path_string(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
        }
        saved = self._saved.get("batch")
        if isinstance(saved, Mapping) and (apart := self._apart(saved, self._batch)):
            self._say(f"a batch is not what it was in the saved run: {apart}.{self._remedy()}")

    def check_same_program(self, program: str) -> None:
        """Raises ValueError unless all processes have the same program and optimizer, with the numbers that differ.

        Args:
            program: The text of the step before it is compiled.
        """
        numbers = (self._optimizer() or {}).get("numbers", [])
        given = {"optimizer, by the numbers in its update": ", ".join(numbers)}
        check_agreement("train", given, "Start all with the same code and flags.")
        check_same_program("train", program)

    def as_json(self) -> dict[str, Any]:
        """Returns the traits, for a checkpoint."""
        if self._found is None:
            self._found = {
                "optimizer": self._optimizer(),
                "step": self._step,
                "batch": self._batch,
                "steps": self._steps,
                "versions": _versions(),
            }
        return self._found

    def compare(
        self, saved: Mapping[str, Any] | None, settings: Mapping[str, Any], opt_state: PyTree = None
    ) -> None:
        """Takes the traits of the saved run, and prints which differ, and which cannot be compared.

        Args:
            saved: The traits.
            settings: The settings of the saved run.
            opt_state: The optimizer's state that is restored.
        """
        kept = self._kept(opt_state)
        if kept:
            self._say(describe(kept, opt_state))
        self._saved = saved or {}
        then, now = self._saved.get("optimizer"), self._optimizer()
        is_same_software = self._saved.get("versions") == _versions()
        is_compared = isinstance(then, Mapping) and now is not None and is_same_software
        is_apart = (
            isinstance(then, Mapping)
            and now is not None
            and any(then.get(name, now[name]) != now[name] for name in ("checksum", "updates"))
        )
        if (
            isinstance(then, Mapping)
            and now is not None
            and is_compared
            and is_apart
            and not is_told(then, now, kept)
        ):
            self._say(
                "the optimizer is not that of the saved run: "
                f"{other_numbers(then, now)}{self._why(settings, then, now)}.{self._remedy()}"
            )
        if not self.settings:
            numbers = "" if is_compared else "the numbers of the optimizer, "
            self._say(
                f"not compared with the saved run, since Run has no settings: {numbers}the data, the model and the loss. "
                f"{REMEDY}"
            )

    def _remedy(self) -> str:
        """Returns the advice to give settings, where the run has none."""
        return "" if self.settings else f" {REMEDY}"

    def _why(
        self, settings: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]
    ) -> str:
        """Returns why an optimizer may be another one: other settings, or a schedule made of the number of steps."""
        steps = self._saved.get("steps")
        new, old = numbers_apart(then, now)
        is_length = isinstance(steps, int) and follow_steps(new, old, steps, self._steps)
        own = {name: value for name, value in self.settings.items() if name != "steps"}
        compared = own if is_length else self.settings
        if is_length and len(new) == len(old) == 1:
            compared = {}  # nothing else is another number
        changed = [name for name, value in compared.items() if settings.get(name, value) != value]
        others = f", as may be since other settings are: {', '.join(changed)}" if changed else ""
        if not is_length:
            return others
        return (
            f"{others}. The run has steps={self._steps} now, and had steps={steps}: a schedule of the learning rate that is "
            f"made of the number of steps has another length from here on. To keep the saved one, make it of {steps} steps"
        )

    def _apart(self, saved: Mapping[str, Any], batch: Mapping[str, str]) -> str:
        """Returns the arrays of a batch that differ, without the number of rows where the settings have the size of a batch.

        ``positions`` that one of the runs alone has are no difference: with a context axis ``shard_batch`` adds them.
        """
        of_row = lambda text: (
            "".join(text.partition("[")[:2]) + text.partition("[")[2].partition(", ")[2]
        )
        shown = of_row if "batch_size" in self.settings else str
        apart = [
            f"{name} {batch.get(name, 'none')}, saved {saved.get(name, 'none')}"
            for name in {**batch, **saved}
            if name != "positions" or (name in batch and name in saved)
            if shown(batch.get(name, "")) != shown(str(saved.get(name, "")))
        ]
        return printable(", ".join(apart[:SHOWN]))


def _versions() -> dict[str, str | None]:
    return {name: version_of(name) for name in ("jax", "optax")}
