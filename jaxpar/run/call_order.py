"""The order in which a loop calls the methods of its run: restore, compile, begin, log after every step."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxpar.fields import arg
from jaxpar.run.flags import RunFlags
from jaxpar.runtime.exit_codes import ExitCode

Made = TypeVar("Made")


class CallOrderError(RuntimeError):
    """A loop calls the methods of its run out of order; a restart would end in the same way."""

    exit_code = ExitCode.BAD_CONFIG


def check_called(rule: str, name: str, made: Made | None) -> Made:
    """Returns what the method that ``rule`` begins with has made; raises CallOrderError for None."""
    if made is None:
        method = rule.split()[0]
        raise CallOrderError(f"a run must {rule}; got no {name}. Call run.{method} first.")
    return made


class CallOrder:
    """Whether a run has begun, and how many of its steps are logged."""

    def __init__(self) -> None:
        self.num_logged: int | None = None  # with those before this run; None: it has not begun
        self.is_iterated = False
        self._first = 0
        self._is_told = self._is_told_of_time = False
        self._names: frozenset[str] | None = None  # of the metrics of the last step

    def begin(self, flags: RunFlags, first_step: int) -> None:
        """Notes that the run begins with a step; raises CallOrderError where its flags ask for no steps."""
        if flags.common.dry_run or flags.gpu.compile_for:
            name = "dry_run" if flags.common.dry_run else "compile_for"
            raise CallOrderError(
                f"a run with {arg(name)} trains nothing and writes nothing; got run.begin. Write before it "
                "`if run.is_dry: run.say_cost()`, and leave the run."
            )
        self.num_logged = self._first = first_step

    def begin_loop(self) -> None:
        """Notes that the steps of the run are iterated; raises CallOrderError if it has not begun."""
        self.check_begun()
        self.is_iterated = True

    def check_before_loop(self, method: str) -> None:
        """Raises CallOrderError if the steps of the run are iterated already."""
        if self.is_iterated:
            raise CallOrderError(
                f"run.{method} is for all steps, so it must be called before their loop; got it after run.steps. Call it once, "
                "before `for step in run.steps():`."
            )

    def remark_on_time(self, metrics: Iterable[str], *, is_left_out: bool) -> str:
        """Returns what to say of the first step whose metrics have more names than the step before; else "".

        Args:
            metrics: The names.
            is_left_out: Whether the time of an evaluation was left out of the step's.
        """
        before, self._names = self._names, frozenset(metrics)
        more = sorted(self._names - before) if before is not None else []
        if not more or is_left_out or self._is_told_of_time:
            return ""
        self._is_told_of_time = True
        return (
            f"a step has metrics that the one before had not: {', '.join(more)}. If an evaluation computes them, the times of "
            "both steps are wrong: write it as `with run.evaluation(metrics):`, which leaves its time out"
        )

    def check_state(self, step: int, done: int, say: Callable[[str], None]) -> None:
        """Raises CallOrderError if the first step of a loop is another number of the optimizer's; later such a number is told.

        Args:
            step: The step that is logged.
            done: The steps that its state has.
            say: Prints a message.
        """
        if done == step + 1:
            return
        if step == self._first:
            raise CallOrderError(
                "each step of run.steps must call the training step once, since checkpoints are named by the steps of their "
                f"state and a resume goes on from there; got a state of step {done} after step {step}. Call it once; several "
                "batches for one update are num_microbatches, and a second model has a run of its own."
            )
        if not self._is_told:
            self._is_told = True
            say(
                f"the state has {done} steps after {step + 1} of the loop, which did not call the training step once each: a "
                f"resume from its checkpoint goes on at step {done} of the loop. Train in every step: where a batch cannot be "
                "used, take the next one"
            )

    def check_begun(self) -> None:
        """Raises CallOrderError if the run has not begun."""
        check_called("begin before its steps", "state", self.num_logged)

    def check_next(self, step: int) -> None:
        """Raises CallOrderError before the run has begun, and for another step than the one to be logged next."""
        self.check_begun()
        if not self.is_iterated:
            raise CallOrderError(
                f"a run logs the steps of its own loop, the first one {self.num_logged}; got run.log before run.steps. "
                "Write `for step in run.steps():`, or `for step, batch in zip(run.steps(), batches):`."
            )
        if self.num_logged != step:
            raise CallOrderError(
                "a step must be logged once, by the number that run.steps yields, which checkpoints and metrics have; got "
                f"{step} for step {self.num_logged}. Call run.log(step, state, metrics)."
            )

    def count_logged(self) -> None:
        """Notes that a step was logged."""
        self.num_logged = 1 + (self.num_logged or 0)

    def check_logged(self, step: int) -> None:
        """Raises CallOrderError unless each step before this one was logged."""
        if self.num_logged != step:
            raise CallOrderError(
                "each step must be logged once, which also saves and stops a run; got "
                f"none for step {step}. Call run.log(step, state, metrics) at the end of each step."
            )
