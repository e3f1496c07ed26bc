"""The metric that says which checkpoint is the best, and that a run may end early: it has not improved for long."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxpar.checkpoint import CheckpointManager
from jaxpar.fields import arg, near_name
from jaxpar.metrics.lines import OF_EVALUATION
from jaxpar.run.flags import RunFlags
from jaxpar.runtime.coordination import OF_ALL_ROWS, check_agreement
from jaxpar.runtime.meetings import meet


class EarlyStop:
    """Counts evaluations in a row that did not improve a metric, which must be the same on all processes.

    Args:
        metric: The name of the metric, of which smaller is better; with "-" before it, larger. Steps without it do not count.
        patience: The evaluations in a row after which a run ends, at least 1.
    """

    def __init__(self, metric: str, patience: int) -> None:
        self.metric, self.patience = metric.removeprefix("-"), patience
        self._sign = -1.0 if metric.startswith("-") else 1.0
        self._best, self._num_worse = np.inf, 0

    def after(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether the run may end after a step with these metrics; every process must call it.

        A value that is NaN is no improvement.

        Raises:
            NotTogetherError: Another process has passed the step without the metric.
            ValueError: The metric differs between processes, of which one would end while the others wait for it.
        """
        if self.metric not in metrics:
            return False
        rule = f"all processes must give run.log the metric {self.metric} in the same steps"
        meet("early stop", rule, f"Add it to the metrics of each. {OF_ALL_ROWS}")
        value = self._sign * float(np.asarray(metrics[self.metric]).item())
        found = {self.metric: repr(self._sign * value)}
        check_agreement("count an evaluation", found, OF_ALL_ROWS)
        self._num_worse = 0 if value < self._best else self._num_worse + 1
        self._best = value if value < self._best else self._best
        return self._num_worse >= self.patience

    def describe(self) -> str:
        """Returns why a run ends."""
        in_a_row = f"{self.patience} evaluations in a row"
        if np.isinf(self._best):
            return f"{in_a_row} whose {self.metric} is not finite"
        return f"{in_a_row} without a better {self.metric} than {self._sign * self._best:.6g}"


def without_best(
    keep_best: str | None, names: Collection[str], checkpoints: CheckpointManager
) -> str:
    """Returns what to say after steps of which none is the best by the metric of keep_best; "" if one is.

    Args:
        keep_best: The metric.
        names: The metrics that steps had.
        checkpoints: Those of the run.
    """
    best = (keep_best or "").removeprefix("-")
    if not best or not names:
        return ""
    if best in names:
        if not checkpoints.steps() or checkpoints.best() is not None:
            return ""
        return (
            f"no checkpoint has a finite {best}, so none is kept as the best by {arg(keep_best=keep_best)}: the steps that "
            "were saved lack it, or it is NaN or infinite there"
        )
    return (
        f"no step had the metric {best} of {arg(keep_best=keep_best)}, so none was the best and none ended the run early. The "
        f"steps had {', '.join(sorted(names))}: name one of these, or add {best} to the metrics before run.log"
    )


def check_best_is_saved(
    flags: RunFlags, eval_every: int, names: Collection[str], of_steps: Collection[str] = ()
) -> None:
    """Raises ValueError where checkpoints would lack the metric that --keep-best chooses them by.

    Args:
        flags: The flags of the run.
        eval_every: The steps between two evaluations, whose metrics have names that begin with ``OF_EVALUATION``.
        names: These names.
        of_steps: All other metrics that steps may have; none: they are not known.
    """
    best, every = flags.checkpoint.keep_best or "", flags.common.checkpoint_every
    name = best.removeprefix("-")
    if not name or name in of_steps or not (of_steps or name.startswith(OF_EVALUATION)):
        return
    if name not in names:
        near = near_name(name, (*names, *of_steps))
        others = ", ".join(of_steps) or "a metric of each step"
        remedy = (
            f"Did you mean {near}?" if near else f"Choose from {', '.join(names)}, or {others}."
        )
        raise ValueError(f"{arg('keep_best')} must name a metric of the run; got {name}. {remedy}")
    if flags.checkpoint.checkpoint_minutes:
        raise ValueError(
            f"{arg(keep_best=best)} needs checkpoints of steps with an evaluation; got {arg('checkpoint_minutes')}, which "
            f"saves at any step. Choose {arg(checkpoint_every=eval_every)} instead."
        )
    if every % eval_every:
        raise ValueError(
            f"{arg(keep_best=best)} needs checkpoints of steps with an evaluation; got {arg(checkpoint_every=every)} and "
            f"{arg(eval_every=eval_every)}. Choose {arg(checkpoint_every=-(-every // eval_every) * eval_every)}, or "
            f"{arg(eval_every=every)}."
        )


def left_early(done: int, flags: RunFlags, latest: int | None) -> str:
    """Returns what to say of a loop that was left before the last step, without an error.

    Args:
        done: The number of steps that were logged.
        flags: The flags of the run.
        latest: The step of the newest checkpoint; None: there is none.
    """
    common, minutes = flags.common, flags.checkpoint.checkpoint_minutes
    kept = (
        "there is no checkpoint"
        if latest is None
        else f"the newest checkpoint is that of step {latest}"
    )
    lost = ", so none has what followed it" if latest and latest < done else ""
    fewer = f", or choose {arg(steps=done)}" if done else ""
    saves = (
        ""
        if common.checkpoint_every or minutes
        else f", which {arg(checkpoint_every=100)} makes it save"
    )
    return (
        f"the loop was left after step {done} of {common.steps}, by break or return, or since what it reads beside "
        f"run.steps() has ended; {kept}{lost}. To end a run by a rule of yours, call run.end_early(reason) before run.log, "
        f"in place of break: that step is the last one{saves or ', and is saved'}. If batches ran out, read them again "
        f"from the first{fewer}."
    )
