"""Checkpointing, preemption and hang detection for a training loop that you write.

    with Guard(checkpoints, num_steps=1000, save_every=100) as guard:
        for step in range(start, 1000):
            state, metrics = train_step(state, batch_of(step))
            guard.after_step(step + 1, state, metrics)

In a run of several processes, all processes save and stop after the same step. One that leaves the loop earlier than the
others, or ends its program, is named by them, and all end within seconds.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NoReturn

import jax
import numpy as np

from jaxpar.checkpoint import CheckpointManager, DivergedError, NotFiniteError
from jaxpar.checkpoint.checksums import diverged_replicas
from jaxpar.checkpoint.manager import say
from jaxpar.checkpoint.state import as_numbers
from jaxpar.fields import switch
from jaxpar.runtime.coordination import AgreedStep, code_of_exit, follow, is_peer_lost
from jaxpar.runtime.endings import leaves_with, will_end_with
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.lease import HeldError
from jaxpar.runtime.output import tell
from jaxpar.runtime.preemption import StopSignals
from jaxpar.runtime.supervise import Progress
from jaxpar.runtime.uncaught import exit_code_of
from jaxpar.runtime.watchdog import Budgets, Watchdog
from jaxpar.train import TrainState

SAVE, LOST, END = "save", "lost", "end: "  # requests between processes, beside signals
# Where the first loss of a run is not finite, no update has been made that a smaller learning rate could have made smaller.
AT_FIRST = (
    "The loss of the first step was not finite, before any update, so the learning rate is not the cause: look at the labels "
    "and ids, which must be from 0 to the vocabulary's size - 1, at the inputs, at masks and weights, of which a batch must "
    "have one that is not 0, and at the initial params. Where replicas own experts, Experts(buffer) or --expert-buffer may be "
    "too small: a replica that gets more rows makes the loss NaN."
)

AT_FIRST_OF_GRADIENTS = (
    "The loss of the first step was finite and its gradients were not, before any update of this run, so the learning rate is "
    "not the cause: look at what has no finite derivative, such as a norm of zeros, and in float16 at the loss scale, which a "
    "skipped step leaves as it is (docs/optimizers.md, float16)."
)

AFTER_RESUME = "No step since the resume has made an update, so its learning rate is not the cause."
OF_ROWS = "If it ends so again, look at the rows of these steps: inputs, masks and weights must be finite."


class Guard:
    """Saves, stops and watches a loop of training steps inside a ``with`` block.

    It prints the reason and raises SystemExit with a code of ``jaxpar.runtime.exit_codes``: 75 it was asked to stop, and saved;
    86 too many steps in a row were not finite; 74 the newest state could not be saved; 70 devices disagree, or a process is
    gone or has left the loop; 2 another run writes to the folder of the checkpoints, which this run owns inside the ``with``
    block. A phase that exceeds its budget ends the process with 124. Without checkpoints SIGTERM and Ctrl-C keep their usual
    handlers.

    Args:
        checkpoints: Where states are saved; None: nowhere.
        num_steps: The last step of the run. It is saved if ``save_every`` or ``save_minutes`` is set.
        save_every: Steps between two saves; 0: none by steps. A save that is due after a step which was not finite, and changed
            nothing, is made after the next step that is. A run that is asked to stop saves in any case, as does its last step.
        save_minutes: Minutes between two saves; 0: none by time.
        compare_every: Steps between two comparisons of the replicas of the state, beside those of
            the saves; 0: none. After a fault of a device its replica differs, unnoticed. A
            comparison waits for the step and reads once, on each device, the arrays that have
            replicas. What ZeRO shards has a single copy, so there is nothing to compare it with.
        max_skipped: The number of steps in a row with gradients that were not finite, and hence without an update, that ends
            the run; 0: no limit. Unless it is 0, a run all of whose steps were such steps ends in the same way.
        budgets: Seconds that each phase may take.
        about: ``about(step)`` returns the keyword arguments of ``CheckpointManager.save_async`` that are saved with the state.
        remedy: The advice in the message about steps that are not finite, or a function that returns it, given whether there
            is a checkpoint to continue from; where the first loss of a run was not finite, the advice is to look at the data
            and the initial params, and where no step since a resume was, at the checkpoint.
        before_save: Called before a save, for example to write metrics of the steps that it includes.
        at_end: ``at_end(step, state, metrics)``, called after the step that ``end_early`` makes the last one, before its save.
        at_stop: Called once the state is saved in a run that was asked to stop, for example to plot results.
        say: Prints a message; by default to standard error of the first process.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager | None = None,
        *,
        num_steps: int,
        save_every: int = 0,
        save_minutes: float = 0.0,
        compare_every: int = 0,
        max_skipped: int = 10,
        budgets: Budgets | None = None,
        about: Callable[[int], Mapping[str, Any]] = lambda step: {},
        remedy: str | Callable[[bool], str] = "Choose a smaller learning rate.",
        before_save: Callable[[], None] = lambda: None,
        at_end: Callable[[int, TrainState, Mapping[str, Any]], None] = lambda *of_step: None,
        at_stop: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = say,
    ) -> None:
        self._saves = checkpoints
        self._num_steps, self._save_every, self._save_seconds = (
            num_steps,
            save_every,
            60 * save_minutes,
        )
        self._compare_every = compare_every
        self._max_skipped, self._num_skipped = max_skipped, 0
        self._num_done, self._has_told_skip = 0, False
        self._first_loss: Any = None  # of the run, unless it was resumed
        self._is_first, self._is_resumed = True, False
        self._has_updated = False  # by a step since this start
        self._is_save_due = False  # once a step is finite
        self._about, self._remedy, self._say = about, remedy, say
        self._before_save, self._at_end, self._at_stop = before_save, at_end, at_stop
        self._watchdog = Watchdog(budgets or Budgets())
        self._agreed = AgreedStep(num_steps)
        self._progress = Progress.from_environment(jax.process_index())
        self._before: jax.Array | None = None  # whether the previous step was skipped
        self.ended: str | None = None  # why the loop ends before its last step
        self._resources = ExitStack()

    def __enter__(self) -> "Guard":
        if self._saves is not None:
            self._own(self._saves)
        self._resources.enter_context(self._watchdog)
        self._resources.enter_context(self._agreed)
        if self._saves is not None:
            self._resources.enter_context(StopSignals(self._ask_to_stop))
        self._saved_at = time.monotonic()
        self._watchdog.begin("step")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if kind is None or issubclass(kind, (SystemExit, GeneratorExit)):
            self._agreed.leave(code_of_exit(error))
        elif error is not None:
            self._tell_error(error)
        try:
            if kind is None:
                self._count_skipped()
                if self._num_skipped:
                    self._end_skipped()
                self._close()
            elif issubclass(kind, Exception):
                self._finish_save()
        finally:
            self._resources.__exit__(kind, error, trace)
        if error is not None and is_peer_lost(error):
            code, told = follow(error)
            if told:
                tell(told)
            self._end(code)

    def _tell_error(self, error: BaseException) -> None:
        """Tells the other processes of an error that ends the loop, since the script may do much before it ends."""
        if jax.process_count() == 1:
            return
        if is_peer_lost(error):  # which this process has not caused
            self._agreed.withdraw()
            return
        code = exit_code_of(error)
        leaves_with(code, error)
        self._agreed.leave(code, type(error).__name__)

    def _ask_to_stop(self, signal: str) -> None:
        self._agreed.ask(signal)
        if signal == "SIGINT":  # SIGTERM is of a cluster, which has a bound of its own
            self._watchdog.hurry(signal)

    def _own(self, checkpoints: CheckpointManager) -> None:
        """Takes the lease of the folder; ends the run if another one holds it, now or later."""
        try:
            if checkpoints.own():
                self._resources.callback(checkpoints.disown)
        except HeldError as error:
            self._end(ExitCode.BAD_CONFIG, f"error: {error}")
        checkpoints.lease.when_lost = lambda: self._agreed.ask(LOST)

    def _end_lost(self, checkpoints: CheckpointManager) -> NoReturn:
        with self._watchdog.phase("save"):
            checkpoints.wait()  # for the save in progress, which is refused
        self._end(
            ExitCode.NOT_SAVED, f"error: {checkpoints.lease.lost}. Begin again in another folder."
        )

    def end_at(self, step: int) -> None:
        """Makes a step the last one of the run, which is saved as the last one is; call it before ``after_step``."""
        self._num_steps = step

    def end_early(self, reason: str) -> None:
        """Makes the step that ends next the last one of the run; of several processes any may call it.

        They agree on a step. ``ended`` is the reason from the ``after_step`` of that step on, and all must leave the loop.
        """
        self._agreed.ask(f"{END}{reason}")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Applies the budget of ``name`` (evaluation, save or compile) to a ``with`` block."""
        return self._watchdog.phase(name)

    def before_step(self, step: int) -> None:
        """Notes that a step begins; without it a process takes longer to find out that another one has left the loop.

        Args:
            step: The step, counted from 0.
        """
        self._agreed.begin(step)

    def leave_loop(self) -> None:
        """Tells the other processes that this one leaves the loop, before the ``with`` block ends and the code is known."""
        self._agreed.leave(is_known=False)

    def after_step(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        """Saves or stops if due; every process must call it after every step, before the state is donated.

        Args:
            step: The number of steps done.
            state: The state after them.
            metrics: The metrics of the last step. "skipped" is read one step later, so that nothing waits for it.
        """
        self._watchdog.begin("step", str(step + 1))
        self._progress.done(step)
        self._count_skipped()
        self._num_done, self._before = step, metrics.get("skipped")
        if self._is_first:
            self._is_first, self._is_resumed = False, step > 1
            self._first_loss = None if self._is_resumed else metrics.get("loss")
        if 0 < self._save_seconds <= time.monotonic() - self._saved_at and jax.process_index() == 0:
            self._saved_at = time.monotonic()
            self._agreed.ask(SAVE)
        asked = self._agreed.after(step)
        if asked == LOST and self._saves is not None:
            self._end_lost(self._saves)
        if asked is not None and asked.startswith(END):
            is_early = step < self._num_steps
            self.ended, self._num_steps, asked = asked.removeprefix(END), step, None
            if is_early:
                self._at_end(step, state, metrics)
        if self._saves is not None and self._is_to_save(step, asked, metrics):
            self._save(self._saves, step, state, metrics)
            if asked not in (None, SAVE):
                self._close()
                if step < self._num_steps:
                    self._stop(self._saves, step, asked)
        elif self._is_to_compare(step):
            self._compare(step, state)

    def _is_to_save(self, step: int, asked: str | None, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a save is due now: one after a skipped step waits, since no later step may change that state."""
        is_due = asked is not None or self._is_save_due or self._is_due(step)
        is_last = asked not in (None, SAVE) or step == self._num_steps
        self._is_save_due = is_due and not is_last and _was_skipped(metrics.get("skipped"))
        return is_due and not self._is_save_due

    def _is_to_compare(self, step: int) -> bool:
        every = self._compare_every
        return every > 0 and (step % every == 0 or step == self._num_steps > every)

    def _compare(self, step: int, state: TrainState) -> None:
        """Ends the run if the replicas of the state differ."""
        if diverged := diverged_replicas(as_numbers(state)):
            self._end(
                ExitCode.PEER_LOST,
                "error: devices that hold the same part of an array must hold the same values; got "
                f"different ones in {diverged} at step {step}. {self._last_good()} Resume from a "
                "checkpoint, or begin again; a device may compute wrongly.",
            )

    def _is_due(self, step: int) -> bool:
        is_last = step == self._num_steps and bool(self._save_every or self._save_seconds)
        return is_last or (self._save_every > 0 and step % self._save_every == 0)

    def _stop(self, checkpoints: CheckpointManager, step: int, asked: str) -> NoReturn:
        self._say(
            f"{asked}: saved step {step}; go on with {switch('resume')}, which reads it from {checkpoints.directory}"
        )
        with self._watchdog.phase("evaluation"):
            self._at_stop()
        raise SystemExit(int(ExitCode.PREEMPTED))

    def _count_skipped(self) -> None:
        skipped, self._before = self._before, None
        if not _was_skipped(skipped):
            self._num_skipped = 0 if skipped is not None else self._num_skipped
            self._has_updated |= skipped is not None
            return
        self._num_skipped += 1
        if not self._has_told_skip:
            self._has_told_skip = True
            self._say(
                f"step {self._num_done} changed nothing, since its loss or gradients were not finite; the metrics, where it "
                f"is step {self._num_done - 1}, count further ones"
            )
        if self._num_skipped == self._max_skipped:
            self._end_not_finite()

    def _end_skipped(self) -> None:
        """Ends a run that no step has changed; says of another one that its last steps have not."""
        if self._max_skipped and not self._has_updated:
            self._end_not_finite()
        last = "step" if self._num_skipped == 1 else f"{self._num_skipped} steps"
        self._say(
            f"the last {last} changed nothing, since loss or gradients were not finite: the state is the one before"
        )

    def _end_not_finite(self) -> None:
        saved, has_good = self._saved_before(self._num_done - self._num_skipped)
        self._end(
            ExitCode.NOT_FINITE,
            f"error: {self._num_skipped} consecutive steps had a loss or gradients that were not finite, and were skipped. "
            f"{saved} {self._advice_on_gradients(has_good=has_good)}",
        )

    def _saved_before(self, last: int) -> tuple[str, bool]:
        """Returns what to say of the checkpoints, and whether one is good: of a step before the ``last`` that was finite.

        The state after that step is the one from which the next step was not finite, and neither need it be after a resume.
        """
        steps = () if self._saves is None else self._saves.steps()
        good = [step for step in steps if step < last]
        rest = [str(step) for step in steps if step >= last]
        if self._saves is None or not rest:
            return self._last_good(), bool(good)
        which = "Checkpoint" if len(rest) == 1 else "Checkpoints"
        told = (
            f"{which} {' and '.join(rest)}: the state from which these steps were not finite, so that those after a resume "
            "may not be either"
        )
        if not good:
            return f"{told}. There is no earlier one.", False
        renamed = ", ".join(f"{step} to {step}.abandoned" for step in rest)
        return (
            f"{told}. In {self._saves.directory} rename {renamed}: a resume then reads the checkpoint of step {good[-1]}, "
            "which is intact."
        ), True

    def _advice_on_gradients(self, *, has_good: bool) -> str:
        first = self._first_loss
        if self._has_updated or first is None or not np.isfinite(first):
            return self._advice(has_good=has_good)
        return AT_FIRST_OF_GRADIENTS

    def _advice(self, *, has_good: bool = True) -> str:
        if self._is_resumed and not self._has_updated:
            go_on = "Resume again" if has_good else f"Begin again with {switch('overwrite')}"
            return f"{AFTER_RESUME} {go_on}. {OF_ROWS}"
        if self._has_updated or self._first_loss is None or np.isfinite(self._first_loss):
            return self._remedy if isinstance(self._remedy, str) else self._remedy(has_good)
        return AT_FIRST

    def _last_good(self) -> str:
        latest = None if self._saves is None else self._saves.latest()
        return (
            "Nothing was saved."
            if latest is None
            else f"The checkpoint of step {latest} is intact."
        )

    def _save(
        self,
        checkpoints: CheckpointManager,
        step: int,
        state: TrainState,
        metrics: Mapping[str, Any],
    ) -> None:
        self._before_save()
        with self._watchdog.phase("save", f"of step {step}"):
            try:
                checkpoints.save_async(state, metrics=metrics, **self._about(step))
            except NotFiniteError as error:
                told = f"{error.found} {AT_FIRST}" if self._advice() == AT_FIRST else error
                self._end(ExitCode.NOT_FINITE, f"error: {told}")
            except DivergedError as error:
                self._end(ExitCode.PEER_LOST, f"error: {error}")
        self._watchdog.beside("save", f"of step {step}", lambda: checkpoints.saving is None)
        self._saved_at = time.monotonic()

    def _finish_save(self) -> None:
        """Waits for the save in progress of a run that an error ends; one of several processes would wait for the others."""
        if self._saves is None or jax.process_count() > 1:
            return
        with suppress(Exception), self._watchdog.phase("save"):
            self._saves.wait()

    def _close(self) -> None:
        """Waits for the last save; ends the run if it failed."""
        if self._saves is None:
            return
        with self._watchdog.phase("save"):
            self._saves.wait()
            lost = self._saves.lost()
        problems = self._saves.failures[-3:] if self._saves.is_behind else []
        if lost is not None:
            problems.append(f"step {lost}: it was saved, but no longer exists")
        if problems:
            latest = self._saves.latest()
            go_on = (
                f"There is no checkpoint. Make room, then begin again with {switch('overwrite')}."
                if latest is None
                else f"The newest checkpoint is that of step {latest}. Make room, then go on from it with {switch('resume')}."
            )
            self._end(
                ExitCode.NOT_SAVED,
                f"error: the final state was not saved: {'; '.join(problems)}. {go_on}",
            )

    def _end(self, code: int, message: str = "") -> NoReturn:
        if message:
            self._say(message)
        will_end_with(code)
        raise SystemExit(int(code))


def _was_skipped(skipped: Any) -> bool:
    """Returns whether a step changed nothing, by its metric "skipped", if it has one; waits for the step."""
    return skipped is not None and bool(np.asarray(skipped))
