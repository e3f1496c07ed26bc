"""Flags of an optimizer and its learning rate, and the optimizer that they ask for."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import numpy as np
import optax

from jaxpar.fields import check_at_least, check_not_negative, check_positive, check_share
from jaxpar.run import muon
from jaxpar.run.flags import CommonFlags, RunFlags
from jaxpar.run.messages import say

USED_BY = dict.fromkeys(("beta1", "beta2", "epsilon", "weight_decay"), ("adamw", "muon")) | {
    "momentum": ("sgd", "muon")
}
MOST_WARMUP = 20  # steps, by default
CHANGE_NUMBERS = (
    "beta1",
    "beta2",
    "epsilon",
    "learning_rate_schedule",
    "final_learning_rate",
    "decay_steps",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """The optimizer and its learning rate.

    Attributes:
        optimizer: AdamW; SGD with --momentum; or Muon for the weights of layers, with AdamW for embeddings, head, routers,
            biases and norms.
        learning_rate_schedule: After the warmup the learning rate falls along a cosine or a line to the end of the run, stays
            constant, or stays and then falls along a line in the last --decay-steps (wsd: warmup, stable, decay).
        final_learning_rate: Learning rate at the end of the run, after the last step. None: a tenth of --learning-rate.
        warmup_steps: Steps in which the learning rate rises from 0. None: 20, or a tenth of --steps if that is less; as many
            as in the saved run with --resume.
        decay_steps: Steps at the end of the run over which wsd falls, the first from the full rate. None: a fifth
            of --steps, or those after the warmup if they are fewer.
        beta1: Decay per step of AdamW's mean of gradients.
        beta2: Decay per step of AdamW's mean of squared gradients.
        epsilon: Added to the root of AdamW's mean of squared gradients, and to norms in Muon.
        momentum: Momentum of SGD or Muon; 0: plain SGD, which stores nothing beside the parameters. None: 0.9 for SGD, 0.95 for
            Muon.
        weight_decay: Weight decay of AdamW and Muon, on weights and embeddings, not on biases, norms and positions.
        max_grad_norm: Gradients with a larger norm are scaled down to this norm.
    """

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    learning_rate_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    final_learning_rate: float | None = None
    warmup_steps: int | None = None
    decay_steps: int | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float | None = None
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OptimizedCommon(CommonFlags):
    """What most runs with such an optimizer are given.

    Attributes:
        learning_rate: Highest learning rate, the factor of an update: it rises over the first steps, then follows the schedule
            of --learning-rate-schedule.
    """

    learning_rate: float = 3e-3


class OptimizedFlags(RunFlags):
    """The base of the flags of a run with such an optimizer, which has these groups."""

    common: OptimizedCommon  # pyright: ignore[reportIncompatibleVariableOverride], it is frozen
    optimizer: OptimizerFlags


Flags = TypeVar("Flags", bound=OptimizedFlags)


def make_optimizer(flags: OptimizedFlags) -> optax.GradientTransformation:
    """Returns the optimizer that the flags ask for."""
    rate, momentum, own = learning_rate(flags), momentum_of(flags), flags.optimizer
    betas, decay = (own.beta1, own.beta2), own.weight_decay
    if own.optimizer == "sgd":
        return optax.sgd(rate, momentum=momentum or None)
    if own.optimizer == "adamw":
        return optax.adamw(rate, *betas, eps=own.epsilon, weight_decay=decay, mask=is_weight)
    directions: dict[Hashable, optax.GradientTransformation] = {
        "muon": muon.scale_by_muon(momentum, own.epsilon),
        "adam": optax.scale_by_adam(*betas, eps=own.epsilon),
    }
    return optax.chain(
        optax.partition(directions, muon.labels),
        optax.add_decayed_weights(decay, is_weight),
        optax.scale_by_learning_rate(rate),
    )


def learning_rate(flags: OptimizedFlags) -> optax.Schedule:
    """Returns the learning rate of each step.

    **Reference**: cosine: Loshchilov and Hutter 2017, arXiv 1608.03983. wsd: Hu et al. 2024, arXiv 2404.06395, section 4.2.
    """
    highest, warmup, steps = flags.common.learning_rate, warmup_steps_of(flags), flags.common.steps
    final = final_learning_rate_of(flags)
    constant, left, decay = optax.constant_schedule(highest), steps - warmup, decay_steps_of(flags)
    falling = lambda steps: optax.linear_schedule(highest, final, steps)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(highest, left, final / highest),
        "linear": lambda: falling(left),
        "constant": lambda: constant,
        "wsd": lambda: optax.join_schedules([constant, falling(decay)], [left - decay]),
    }[flags.optimizer.learning_rate_schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, highest, warmup), after()], [warmup])


def final_learning_rate_of(flags: OptimizedFlags) -> float:
    """Returns the learning rate at the end of the run, of a schedule that falls."""
    given = flags.optimizer.final_learning_rate
    return flags.common.learning_rate / 10 if given is None else given


def warmup_steps_of(flags: OptimizedFlags) -> int:
    """Returns the steps in which the learning rate rises."""
    given = flags.optimizer.warmup_steps
    return min(MOST_WARMUP, flags.common.steps // 10) if given is None else given


def decay_steps_of(flags: OptimizedFlags) -> int:
    """Returns the steps in which wsd falls."""
    usual = min(max(flags.common.steps // 5, 1), flags.common.steps - warmup_steps_of(flags))
    return usual if flags.optimizer.decay_steps is None else flags.optimizer.decay_steps


def momentum_of(flags: OptimizedFlags) -> float:
    """Returns the momentum of SGD or Muon."""
    given = flags.optimizer.momentum
    return given if given is not None else 0.95 if flags.optimizer.optimizer == "muon" else 0.9


def is_weight(params: dict) -> dict:
    """Returns for each parameter whether it is a weight or an embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: (
            _name(path).startswith(("w_", "lora_")) or _name(path) in ("tokens", "head")
        ),
        params,
    )


def _name(path: tuple) -> str:
    return path[-1].key


def check_optimizer(flags: OptimizedFlags) -> None:
    """Raises where a flag of the optimizer is out of range, or has no effect."""
    warmup = warmup_steps_of(flags)
    check_at_least(0, warmup_steps=warmup)
    if warmup >= flags.common.steps:
        fewer = f"{_chosen(flags, 'warmup_steps', flags.common.steps // 10)}, or "
        whole = "; --steps is at least those that the run has done" if flags.common.resume else ""
        raise ValueError(
            f"--warmup-steps must be less than --steps; got {warmup} and {flags.common.steps}. Choose "
            f"{fewer}--steps {warmup + 1} or more{whole}."
        )
    _check_values(flags)
    for name, optimizers in USED_BY.items():
        if flags.optimizer.optimizer not in optimizers and _is_given(flags, name):
            raise ValueError(
                f"--{name.replace('_', '-')} applies to --optimizer {' and '.join(optimizers)}; got --optimizer "
                f"{flags.optimizer.optimizer}. Leave it out, or choose --optimizer {optimizers[0]}."
            )
    _check_schedule(flags)


def _check_values(flags: OptimizedFlags) -> None:
    own = flags.optimizer
    check_positive("Choose such as 0.003.", learning_rate=flags.common.learning_rate)
    check_positive("Choose 1, say, or 1e9 to scale nothing down.", max_grad_norm=own.max_grad_norm)
    check_share("0 is plain SGD.", momentum=own.momentum)
    check_share("Choose 0.9, say.", beta1=own.beta1)
    check_share("Choose 0.95, say.", beta2=own.beta2)
    check_positive("Choose 1e-8, say.", epsilon=own.epsilon)
    check_not_negative("Choose 0.1, say, or 0 for none.", weight_decay=own.weight_decay)


def _check_schedule(flags: OptimizedFlags) -> None:
    final, schedule = flags.optimizer.final_learning_rate, flags.optimizer.learning_rate_schedule
    if final is not None and schedule == "constant":
        raise ValueError(
            f"--final-learning-rate applies to schedules that fall; got {final:g} with --learning-rate-schedule constant. "
            "Leave it out, or choose --learning-rate-schedule linear."
        )
    if final is not None and not 0 <= final <= flags.common.learning_rate:
        raise ValueError(
            f"--final-learning-rate must be from 0 to --learning-rate; got {final:g} and {flags.common.learning_rate:g}. "
            f"Choose {flags.common.learning_rate / 10:g}, say."
        )
    if flags.optimizer.decay_steps is not None and schedule != "wsd":
        raise ValueError(
            f"--decay-steps applies to --learning-rate-schedule wsd; got {schedule}. Leave it out, or choose "
            "--learning-rate-schedule wsd."
        )
    most = flags.common.steps - warmup_steps_of(flags)
    if schedule == "wsd" and not 1 <= decay_steps_of(flags) <= most:
        raise ValueError(
            "--decay-steps must be from 1 to the --steps after the warmup; got "
            f"{decay_steps_of(flags)}, and {most} steps after it. Choose "
            f"{_chosen(flags, 'decay_steps', max(most // 5, 1))}."
        )


def _chosen(flags: OptimizedFlags, name: str, value: int) -> str:
    """Returns the flags that set a setting, which a run to resume takes only where --allow-change names it."""
    chosen = f"--{name.replace('_', '-')} {value}"
    allowed = (
        ""
        if flags.may_change(name)
        else f" --allow-change {' '.join((*flags.checkpoint.allow_change, name))}"
    )
    return f"{chosen}{allowed}"


def settings(flags: OptimizedFlags) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one; those added later only where they are set."""
    names = ("optimizer", "weight_decay", "max_grad_norm")
    found = {"learning_rate": flags.common.learning_rate} | {
        name: getattr(flags.optimizer, name) for name in names
    }
    found["warmup_steps"] = warmup_steps_of(flags)
    if flags.optimizer.optimizer in USED_BY["momentum"]:
        found["momentum"] = momentum_of(flags)
    changed = [name for name in CHANGE_NUMBERS if _is_given(flags, name)]
    if math.isclose(final_learning_rate_of(flags), flags.common.learning_rate / 10):
        changed = [name for name in changed if name != "final_learning_rate"]
    return found | {name: getattr(flags.optimizer, name) for name in changed}


def _is_given(flags: OptimizedFlags, name: str) -> bool:
    return getattr(flags.optimizer, name) != getattr(OptimizerFlags, name)


def with_saved_warmup(flags: Flags, saved: Mapping[str, Any]) -> Flags:
    """Returns the flags of a run to resume, with the warmup of the saved run where --warmup-steps is not given.

    Args:
        flags: The flags.
        saved: The ``settings`` of the saved run; empty for a new run.
    """
    if flags.optimizer.warmup_steps is not None or "warmup_steps" not in saved:
        return flags
    return flags.replace(warmup_steps=saved["warmup_steps"])


def check_saved(flags: OptimizedFlags, saved: Mapping[str, Any]) -> None:
    """Raises where a run with ``saved`` settings would go on with another optimizer, of which its checkpoints have no state."""
    now, was = flags.optimizer.optimizer, saved.get("optimizer")
    if was in (None, now):
        return
    raise ValueError(
        "a run goes on with the optimizer whose state its checkpoints have; got "
        f"--optimizer {now}, and it was saved with {was}. Give --optimizer {was}. To go on from its weights with another one, "
        f"write them by python -m jaxpar export {flags.common.out_dir} FOLDER, and begin a run with --init-from FOLDER."
    )


def _as_saved(flags: Flags, saved: Mapping[str, Any]) -> Flags:
    """Returns the flags with the learning rate of the saved run."""
    own = {
        name: getattr(OptimizerFlags, name) for name in CHANGE_NUMBERS
    }  # those that were given are among the settings
    names = ("steps", "learning_rate", "warmup_steps", *CHANGE_NUMBERS)
    return flags.replace(**own | {name: saved[name] for name in names if name in saved})


def say_new_rate(flags: OptimizedFlags, saved: Mapping[str, Any], step: int) -> None:
    """Prints how the learning rate goes on in a run that resumes with another number of steps.

    Args:
        flags: The flags.
        saved: The settings of the saved run, with its ``steps``.
        step: The step to resume from.
    """
    if saved.get("steps") in (None, flags.common.steps):
        return
    rates = [learning_rate(each)(step) for each in (_as_saved(flags, saved), flags)]
    before, now = (f"{np.asarray(rate).item():.3g}" for rate in rates)
    at = f"{now} at step {step}" + ("" if now == before else f" instead of {before}")
    say(
        f"the run has --steps {flags.common.steps} now, and had {saved['steps']} when it was saved: from here on the "
        f"learning rate follows the {flags.optimizer.learning_rate_schedule} schedule of {flags.common.steps} steps, {at}"
    )
