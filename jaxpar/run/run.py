"""A run around a training loop: its folder and lease, checkpoints, metrics, report, and the guard that stops and watches it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import optax

import jaxpar
from jaxpar.checkpoint.state import check_canonical
from jaxpar.data.batches import Origin
from jaxpar.data.same_batch import check_on_mesh, check_same_since
from jaxpar.fields import arg
from jaxpar.guard import Guard
from jaxpar.metrics.exporters import Watcher
from jaxpar.metrics.log import MetricsLog, check_names, copy_shared
from jaxpar.pipeline import check_permutes
from jaxpar.planner import cluster, roofline
from jaxpar.planner.compiled import inspect_pipeline
from jaxpar.report import ReportWriter, step_data
from jaxpar.run import folder
from jaxpar.run.arguments import check_arguments, check_call, lowered
from jaxpar.run.call_order import CallOrder, check_called
from jaxpar.run.compiled_step import CompiledStep
from jaxpar.run.early_stop import EarlyStop, left_early, without_best
from jaxpar.run.flags import RunFlags, check_run_flags
from jaxpar.run.learning_rate import rate_after, remark_on_rate
from jaxpar.run.messages import (
    checks,
    forget_devices,
    phase,
    remark_on_first_step,
    say,
    say_devices,
    spared,
    stop,
)
from jaxpar.run.pace import pace
from jaxpar.run.start import (
    advice_on_finite_steps,
    check_processes,
    first_state,
    idle_changes,
    left_whole_lines,
    open_checkpoints,
    state_left_whole,
    without_saves,
    write_config,
)
from jaxpar.run.traits import Traits
from jaxpar.run.watchers import open_watchers
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.watchdog import Watchdog
from jaxpar.schedule import Schedule
from jaxpar.sharding import check_not_donated

Callback = Callable[[int, jaxpar.TrainState, Mapping[str, Any]], object]


class Run(AbstractContextManager["Run"]):
    """A run in ``--out-dir``, which it owns from its construction to the end of the ``with`` block.

    Its methods are called in the order of the loop in ``jaxpar.run``: ``restore`` and ``compile`` write nothing, and ``begin``
    deletes an earlier run with --overwrite. When the loop ends, the last save is committed and metrics.jsonl and report.html
    are complete. Where the loop must end early, ``run.log`` raises SystemExit with a code of ``jaxpar.runtime.exit_codes``, as
    ``jaxpar.guard.Guard`` says.

    Args:
        flags: The run's flags, such as ``BasicFlags.of(out_dir=Path("runs/mine"), steps=1000, checkpoint_every=100)``.
        mesh: Its mesh.
        settings: The settings that the results depend on: with --resume they must equal the saved ones, except for names in
            ``--allow-change``, and ``steps``: a run may be made longer or shorter. Beside them a resume compares the params
            and the optimizer's state by structure, shapes and dtypes, which must be the saved ones, and the numbers in the
            optimizer's update, max_grad_norm and the shapes of a batch, of which it prints those that differ. It cannot compare
            the data, the model and the loss: without settings it says so. Give a name or a checksum of the data here.
        items_per_step: The items that a step processes, for the rate in metrics.jsonl; None: the rate is that of steps.
        items: Their name, as in ``rows_per_second``.
        flops_per_step: Useful operations of a step on all devices together, for the MFU.
        schedule: The schedule of its pipeline, if it has one.
        has_evaluations: Whether evaluations add metrics, which --keep-best may name: it is checked at the first one.
        learning_rate: The optimizer's schedule or number, to be logged. One in its state (inject_hyperparams) must agree.
        samples: ``samples(step)``: the position in the data after that many steps, which is ``origin.samples`` after a resume.
        remedy: What to choose if steps are not finite.
        draw: Draws the pictures of a run that is asked to stop.
        say: Prints a message; by default on standard output of the first process.

    Raises:
        FileNotFoundError: There is nothing to --resume.
        HeldError: Another run writes to ``--out-dir``.
        ValueError: A flag is out of range, JAX cannot use the GPUs of this machine, the run to resume is past --steps, or a
            new run would overwrite an earlier one without --overwrite.
    """

    def __init__(
        self,
        flags: RunFlags,
        mesh: jax.sharding.Mesh,
        settings: Mapping[str, Any] | None = None,
        *,
        items_per_step: float | None = None,
        items: str = "rows",
        flops_per_step: float | None = None,
        schedule: Schedule | None = None,
        has_evaluations: bool = True,
        learning_rate: optax.ScalarOrSchedule | None = None,
        samples: Callable[[int], int] = lambda step: 0,
        remedy: str = "Choose a smaller learning rate.",
        draw: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = say,
    ) -> None:
        check_arguments(
            flags, settings, items_per_step, learning_rate, samples=samples, draw=draw, say=say
        )
        check_run_flags(flags)
        flags, keep = folder.resumed_if_restarted(flags, say), flags.checkpoint
        self.flags, self.mesh, self.schedule = flags, mesh, schedule
        self.out_dir, self.is_dry = flags.common.out_dir, flags.common.dry_run
        self.origin, self.saved = Origin(), dict[str, Any]()
        self.target: Any = None
        self._traits = Traits(settings or {}, say, steps=flags.common.steps)
        self._settings = self._traits.settings
        rate = (1, "steps") if items_per_step is None else (items_per_step, items)
        self._rate: dict[str, Any] = {"items_per_step": rate[0], "items": rate[1]}
        self._flops_per_step = flops_per_step
        self._samples, self._remedy, self._draw, self._say = samples, remedy, draw, say
        self._watchers: list[Watcher] = []
        self._state: jaxpar.TrainState | None = None
        self._compiled: jax.stages.Compiled | None = None
        self._has_all_metrics = not has_evaluations
        self._read: dict[str, Callable[[], Any]] = {}
        self._learning_rate = None if learning_rate is None else rate_after(learning_rate)
        self._calls: list[tuple[int, Callback]] = []
        self._early_stop = (
            EarlyStop(keep.keep_best, keep.patience) if keep.keep_best and keep.patience else None
        )
        self._is_over, self._seconds, self._order = False, 0.0, CallOrder()
        self._named, self._resources = (
            set[str](),
            ExitStack(),
        )  # the metrics of this run's steps, and what it closes
        self.checkpoints = open_checkpoints(flags, mesh)
        say_devices(say, compile_for=flags.gpu.compile_for)

    @property
    def first_step(self) -> int:
        """The step at which this run begins; not 0 with --resume."""
        return self.origin.step

    @property
    def seconds(self) -> float:
        """The seconds of this run's steps and evaluations, those until now while it trains."""
        return self._seconds or time.perf_counter() - self._began

    def restore(self, *init_state: Any, **where: Any) -> None:
        """With --resume, restores the newest undamaged checkpoint; ``first_step`` and ``origin`` then say where it is.

        Args:
            *init_state: The arguments of ``jaxpar.init_state``, such as a ``jaxpar.Parallel``: ``begin`` makes the state of a
                new run with them.
            **where: Its keyword arguments.

        Raises:
            BadCheckpointError: No checkpoint is intact.
            ValueError: The checkpoint was saved with other settings, or has other params; no state of this optimizer could be
                saved, whose layers are packed.
        """
        self.target = jaxpar.abstract_state(*init_state, **where)
        check_canonical(self.target)
        self._traits.take_state(self.target, *init_state, **where)
        self._init = lambda: jaxpar.init_state(*init_state, **where)
        for line in left_whole_lines(self.target.params, init_state):
            self._say(line)
        for line in state_left_whole(self.target, init_state):
            self._say(line)
        if not self.flags.common.resume:
            return
        allowed = ("steps", *self.flags.checkpoint.allow_change)
        with Watchdog(self.flags.budget) as watchdog, watchdog.phase("save"):
            self._state = self.checkpoints.restore(
                self.target, config=self._settings, allow=allowed
            )
        manifest = self.checkpoints.manifest(int(jaxpar.fetch(self._state.step)))
        saved_on = ", ".join(f"{axis}={size}" for axis, size in manifest.mesh.items())
        over = (
            ", the last one, so no step is left" if manifest.step == self.flags.common.steps else ""
        )
        self._say(f"resumed from step {manifest.step}, saved on {saved_on}{over}")
        self.origin, self.saved = (
            Origin(manifest.step, manifest.samples or 0),
            dict(manifest.config or {}),
        )
        self._traits.compare(manifest.traits, self.saved, self._state.opt_state)
        if told := idle_changes(allowed[1:], {**self.saved, **self._settings}):
            self._say(told)

    def compile(self, train_step: Any, batch: Any) -> jax.stages.Compiled:
        """Returns the training step compiled, and prints the time, which no step's time includes.

        Every later batch must have the shapes and shardings of this one, as those of ``jaxpar.shard_batch`` do. In a run of
        several processes all must have the same flags, settings, data (``must_agree``) and program; otherwise they would wait
        for one another forever, or train on different rows. Metrics are served from here on, since compiling can take minutes.

        Args:
            train_step: What ``jaxpar.make_train_step`` returns.
            batch: A batch on the mesh, or its shapes from ``jaxpar.abstract_batch``.

        Raises:
            ConfigError: The processes do not agree; the message says on what, and which of them differ.
        """
        check_called("restore before it compiles", "state", self.target)
        check_on_mesh(batch, self.mesh)
        self._watchers = open_watchers(
            self.flags,
            self._say,
            num_saves=lambda: self.checkpoints.num_saved,
            flops_per_step=self._flops_per_step,
        )
        self._traits.take_step(train_step)
        self._traits.take_batch(batch)
        start = time.perf_counter()
        with (
            phase("compiling", then="preparing the first step"),
            Watchdog(self.flags.budget) as watchdog,
            watchdog.phase("compile"),
        ):
            check_processes(self.mesh, self.flags, self._settings, self._read)
            step = lowered(train_step, self.target, batch)
            if jax.process_count() > 1:
                with checks():
                    self._traits.check_same_program(step.as_text())
            self._compiled = CompiledStep(step.compile(), batch, self.mesh)
            with checks():
                check_permutes(self._compiled)
        self._say(f"compiled in {time.perf_counter() - start:.1f} s{self._compiled.unread()}")
        return self._compiled

    def must_agree(self, name: str, value: Callable[[], Any]) -> None:
        """Adds what ``compile`` compares between the processes of a run, such as a checksum of data that each of them reads.

        Args:
            name: What it is, for the message.
            value: Returns it as plain JSON; called in a run of several processes alone.
        """
        self._read[name] = value

    def say_cost(self) -> None:
        """Prints the cost of the step on each device: collectives by mesh axis, memory, FLOPs; for GPUs also its roofline."""
        report = inspect_pipeline(self._step(), self.mesh, self.schedule)
        self._say(report.render())
        if self.flags.gpu.compile_for:
            self._say(
                "\n"
                + roofline(
                    report, cluster(self.flags.gpu.compile_for, *self.flags.gpu.shape)
                ).render()
            )

    def begin(self, make_state: Callable[[], jaxpar.TrainState] | None = None) -> jaxpar.TrainState:
        """Returns the first state, new or restored, once the folder is prepared: --overwrite, config.json.

        Args:
            make_state: Makes the state of a new run in place of ``jaxpar.init_state``, whose arguments ``restore`` was given.

        Raises:
            ConfigError: The processes of a new run have made different params.
            LostError: Another run has taken the folder.
        """
        compiled, shared = (
            self._step(),
            {"schedule": self.schedule, "num_steps": self.flags.common.steps},
        )
        self._order.begin(self.flags, self.first_step)
        self.checkpoints.check_about(**self._about(self.first_step, is_first=True))
        self._watchers.append(
            ReportWriter(
                self.out_dir, lambda: step_data(compiled, self.target, self.mesh, **shared)
            )
        )
        state = first_state(make_state or self._init) if self._state is None else self._state
        self.checkpoints.lease.is_begun = True
        self._state = None  # the first step donates it
        if (
            self.flags.common.overwrite
            and jax.process_index() == 0
            and folder.has_run(self.out_dir)
        ):
            self.checkpoints.lease.check()
            folder.delete_run(self.out_dir)
            self._say(f"deleted: the earlier run in {self.out_dir}")
        write_config(self.flags, self.mesh)
        if told := without_saves(self.flags, self.first_step):
            self._say(told)
        return state

    def _step(self) -> jax.stages.Compiled:
        return check_called("compile its step before it begins", "step", self._compiled)

    def steps(self, *, if_not_saved: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Yields the steps that are left, guarded and logged; raises CallOrderError where one was not logged.

        Args:
            if_not_saved: Called where the checkpoint of the last step could not be saved, before the run ends with 74: the
                state is nowhere else.
        """
        self._order.begin_loop()
        self.checkpoints.check_about(**self._about(self.first_step))
        common, checkpoint = self.flags.common, self.flags.checkpoint
        first = {"first_step": self.first_step, "watchers": self._watchers}
        self._log = self._resources.enter_context(
            MetricsLog(self.out_dir, common.steps, **self._rate, **first)
        )
        self._guard = self._resources.enter_context(
            Guard(
                self.checkpoints,
                num_steps=common.steps,
                save_every=common.checkpoint_every,
                save_minutes=checkpoint.checkpoint_minutes,
                compare_every=checkpoint.compare_every,
                max_skipped=checkpoint.max_skipped,
                budgets=self.flags.budget,
                about=self._about,
                before_save=self._before_save,
                at_end=lambda step, *of_step: self._call(step - 1, *of_step, at_end=True),
                at_stop=self._draw_what_there_is,
                remedy=lambda has_checkpoint: advice_on_finite_steps(
                    self._remedy, self._settings, has_checkpoint=has_checkpoint
                ),
            )
        )
        self._began = time.perf_counter()
        try:
            for step in range(self.first_step, common.steps):
                self._guard.before_step(step)
                yield step
                self._order.check_logged(step + 1)
                if self._is_over:
                    break
            if told := without_best(checkpoint.keep_best, self._named, self.checkpoints):
                self._say(told)
            check_same_since()
        except GeneratorExit:  # a break
            self._guard.leave_loop()
            raise
        try:
            self._resources.close()
        except SystemExit as ended:
            if ended.code == ExitCode.NOT_SAVED:
                if_not_saved()
            raise
        self._seconds = self.seconds

    def _about(self, step: int, *, is_first: bool = False) -> dict[str, Any]:
        """Returns what is saved with the state after so many steps; ``is_first``: the samples are not asked for yet."""
        return {
            "key": jax.random.key(self.flags.common.seed),
            "config": self._settings,
            "samples": 0 if is_first else self._samples(step),
            "traits": self._traits.as_json(),
        }

    def keep(self, state: jaxpar.TrainState) -> None:
        """Saves the state after the last step if no checkpoint has it, as where a model made of it could not be written.

        Every process must call it.

        Args:
            state: The state, not donated.

        Raises:
            OSError: The checkpoint could not be written.
        """
        step = int(jaxpar.fetch(state.step))
        if self.checkpoints.latest() != step:
            self.checkpoints.save(state, **self._about(step))
            self._say(f"saved step {step} in {self.checkpoints.directory}")

    def _before_save(self) -> None:
        check_same_since()
        self._log.flush()

    def log(self, step: int, state: jaxpar.TrainState, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of a step, then saves or stops if due; every process must call it after every step.

        Args:
            step: The step, counted from 0.
            state: The state after it, before it is donated.
            metrics: What the train step returned, and others, which may be numbers of ``state``.
        """
        self._order.check_next(step)
        check_not_donated(state)
        # What follows may wait for this step, whose time the step before would be given.
        self._log.flush(metrics)
        metrics = copy_shared(metrics, state)
        best = (self.flags.checkpoint.keep_best or "").removeprefix("-")
        self._named |= {*metrics}
        if self._has_all_metrics and best and best not in metrics:
            self.checkpoints.wait()  # a save in progress would be lost
            message = f"{arg('keep_best')} must name a metric of the run; got {best}. Choose from {', '.join(metrics)}."
            stop(ExitCode.BAD_CONFIG, message)
        if told := self._order.remark_on_time(metrics, is_left_out=self._has_all_metrics):
            self._say(told)
        self._has_all_metrics = False  # steps without an evaluation have fewer
        if step == self.first_step or self.is_due(
            step, self.flags.common.checkpoint_every or self.flags.common.steps
        ):
            self._order.check_state(step, int(jaxpar.fetch(state.step)), self._say)
        if step == self.first_step and (told := remark_on_first_step(metrics)):
            self._say(told)
        self._call(step, state, metrics)
        if self._learning_rate is not None:
            check_names(metrics, ("learning_rate",))
            rate = self._learning_rate(step, state, metrics)
            metrics = {**metrics, "learning_rate": rate}
            if step == self.first_step and (told := remark_on_rate(state.opt_state, rate)):
                self._say(told)
        self._log.log(step, metrics)
        self._order.count_logged()
        self._end_early(step + 1, state, metrics)
        self._guard.after_step(step + 1, state, metrics)
        if self._guard.ended is not None:
            self._end_loop(step + 1, self._guard.ended)

    def every(self, num_steps: int, call: "Callback") -> None:
        """Has a function called every so many steps and after the last one, early or not: ``call(step, state, metrics)``.

        ``step`` counts the steps done, ``state`` is the one after them, which the next step donates. It is called in every
        process, when the metrics of the step are computed; its time counts for no step, and it has the budget of an evaluation.

        Raises:
            CallOrderError: The steps are iterated already.
        """
        check_call(num_steps, call)
        self._order.check_before_loop("every")
        self._calls.append((num_steps, call))

    def _call(
        self,
        step: int,
        state: jaxpar.TrainState,
        metrics: Mapping[str, Any],
        *,
        at_end: bool = False,
    ) -> None:
        """Calls what is due after a step, or all else at the step that an early end makes the last one."""
        for every, call in self._calls:
            if self.is_due(step, every) != at_end:
                with self._log.pause(metrics), self._guard.phase("evaluation"):
                    call(step + 1, state, metrics)

    def _end_early(self, step: int, state: jaxpar.TrainState, metrics: Mapping[str, Any]) -> None:
        if (
            self._early_stop is not None
            and self._early_stop.after(metrics)
            and step < self.flags.common.steps
        ):
            self._guard.end_at(step)
            self._call(step - 1, state, metrics, at_end=True)
            self._end_loop(step, self._early_stop.describe())

    def _end_loop(self, step: int, why: str) -> None:
        self._is_over = True
        self._say(f"ended early at step {step}: {why}")

    def end_early(self, reason: str) -> None:
        """Ends the loop after the step that is logged next, which is saved as the last one of a run is; call it before ``log``.

        In a run of several processes one of them may call it, or all: they end together, after a step that follows within a
        second.

        Args:
            reason: Why, for the message.
        """
        self._order.check_begun()
        self._guard.end_early(reason)

    def is_due(self, step: int, every: int) -> bool:
        """Returns whether something is due after a step: every so many steps, and after the last one."""
        return (step + 1) % every == 0 or step + 1 == self.flags.common.steps

    @contextmanager
    def evaluation(self, metrics: Mapping[str, Any]) -> Iterator[None]:
        """Excludes an evaluation in the ``with`` block from the step's time, and gives it a budget of its own.

        Args:
            metrics: What the train step returned; call it before ``log``.
        """
        with self._log.pause(metrics), self._guard.phase("evaluation"):
            yield
        self._has_all_metrics = True

    def say_pace(self) -> None:
        """Prints the time of this run's steps after the last one, if there were any."""
        if told := pace(self.out_dir, self.first_step, self.seconds, **self._rate):
            self._say(told)

    def say_skipped(self, state: jaxpar.TrainState) -> None:
        """Prints how many steps changed nothing, if any."""
        if skipped := int(jaxpar.fetch(state.num_skipped)):
            self._say(
                f"{skipped} steps changed nothing, since their loss or gradients were not finite"
            )

    def __exit__(self, *error: Any) -> None:
        self._resources.__exit__(*error)
        done = self.flags.common.steps if error[0] or self._is_over else self._order.num_logged
        if done is not None and done < self.flags.common.steps:
            self._say(left_early(done, self.flags, self.checkpoints.latest()))
        self.checkpoints.disown()
        forget_devices()

    def _draw_what_there_is(self) -> None:
        with spared(
            f"a picture in {self.out_dir}"
        ):  # the state is saved, which the exit code reports
            self._draw()
