"""Flags of an optimizer and its learning rate, and the optimizer that they ask for."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import cli
import jax
import numpy as np
import optax
import tyro
from optax import contrib
from shared_flags import may_change

MUON_RMS = (
    0.2  # of an update before the learning rate, as AdamW's is about (Liu et al. 2025, arXiv 2502.16982, section 2.2)
)
USED_BY = {
    "beta1": ("adamw", "muon"),
    "beta2": ("adamw", "muon"),
    "epsilon": ("adamw", "muon"),
    "weight_decay": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
}
MOST_WARMUP = 20  # steps, by default
CHANGE_NUMBERS = ("beta1", "beta2", "epsilon", "learning_rate_schedule", "final_learning_rate", "decay_steps")


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags(cli.SharedFlags):
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW; SGD with --momentum; or Muon for the weights of layers, with AdamW for embeddings, head, biases and norms."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=("--lr",))] = 3e-3
    """Highest learning rate, the factor of an update: it rises over the first steps, then follows --learning-rate-schedule."""
    learning_rate_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warmup the learning rate falls along a cosine or a line to the end of the run, stays constant, or stays and
    then falls along a line in the last --decay-steps (wsd: warmup, stable, decay)."""
    final_learning_rate: float | None = None
    """Learning rate at the end of the run. None: a tenth of --learning-rate."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises from 0. None: 20, or a tenth of --steps if that is less; with --resume, as many as
    in the saved run."""
    decay_steps: int | None = None
    """Steps at the end of the run in which wsd falls. None: a fifth of --steps, or those after the warmup if they are fewer."""
    beta1: float = 0.9
    """Decay per step of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay per step of AdamW's mean of squared gradients."""
    epsilon: float = 1e-8
    """Added to the root of AdamW's mean of squared gradients, and to norms in Muon."""
    momentum: float | None = None
    """Momentum of SGD or Muon; 0: plain SGD, which stores nothing beside the parameters. None: 0.9 for SGD, 0.95 for Muon."""
    weight_decay: float = 0.1
    """Weight decay of AdamW and Muon, on weights and embeddings, not on biases, norms and positions."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm."""


Flags = TypeVar("Flags", bound=OptimizerFlags)


def make_optimizer(flags: OptimizerFlags) -> optax.GradientTransformation:
    """Returns the optimizer that the flags ask for."""
    rate, momentum = learning_rate(flags), momentum_of(flags)
    if flags.optimizer == "sgd":
        return optax.sgd(rate, momentum=momentum or None)
    if flags.optimizer == "adamw":
        decay, eps = flags.weight_decay, flags.epsilon
        return optax.adamw(rate, b1=flags.beta1, b2=flags.beta2, eps=eps, weight_decay=decay, mask=is_weight)
    direction = contrib.muon(
        1.0,
        beta=momentum,
        eps=flags.epsilon,
        consistent_rms=MUON_RMS,
        muon_weight_dimension_numbers=matrices,
        adam_b1=flags.beta1,
        adam_b2=flags.beta2,
    )
    # The direction is one to subtract already, so that what it adds for weight decay is negative.
    return optax.chain(
        direction, optax.add_decayed_weights(-flags.weight_decay, is_weight), optax.scale_by_schedule(rate)
    )


def learning_rate(flags: OptimizerFlags) -> optax.Schedule:
    """Returns the learning rate of each step.

    **Reference**: cosine: Loshchilov and Hutter 2017, arXiv 1608.03983. wsd: Hu et al. 2024, arXiv 2404.06395, section 4.2.
    """
    highest, warmup, steps = flags.learning_rate, warmup_steps_of(flags), flags.steps
    final = highest / 10 if flags.final_learning_rate is None else flags.final_learning_rate
    if flags.learning_rate_schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, highest, warmup, steps, final)
    rising, constant = optax.linear_schedule(0.0, highest, warmup), optax.constant_schedule(highest)
    if flags.learning_rate_schedule == "constant":
        return optax.join_schedules([rising, constant], [warmup])
    if flags.learning_rate_schedule == "linear":
        return optax.join_schedules([rising, optax.linear_schedule(highest, final, steps - warmup)], [warmup])
    decay = decay_steps_of(flags)
    falling = optax.linear_schedule(highest, final, decay)
    return optax.join_schedules([rising, constant, falling], [warmup, steps - decay])


def warmup_steps_of(flags: OptimizerFlags) -> int:
    """Returns the steps in which the learning rate rises."""
    return min(MOST_WARMUP, flags.steps // 10) if flags.warmup_steps is None else flags.warmup_steps


def decay_steps_of(flags: OptimizerFlags) -> int:
    """Returns the steps in which wsd falls."""
    usual = min(max(flags.steps // 5, 1), flags.steps - warmup_steps_of(flags))
    return usual if flags.decay_steps is None else flags.decay_steps


def momentum_of(flags: OptimizerFlags) -> float:
    """Returns the momentum of SGD or Muon."""
    return {"muon": 0.95}.get(flags.optimizer, 0.9) if flags.momentum is None else flags.momentum


def is_weight(params: dict) -> dict:
    """Returns for each parameter whether it is a weight or an embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _name(path).startswith(("w_", "lora_")) or _name(path) in ("tokens", "head"), params
    )


# Dims of the inputs and outputs of a transformer's weights (jaxpar/models/transformer/params.py), after the dim of layers. The
# others number matrices: queries, keys and values are matrices of their own, as are gate and up.
MATRICES = {"w_qkv": ((1,), (2, 4)), "w_out": ((1, 2), (3,)), "w_up": ((1,), (3,)), "w_down": ((1,), (2,))}
MATRICES |= dict.fromkeys(("w_expert_gate", "w_expert_up", "w_expert_down"), ((2,), (3,)))


def matrices(params: Any) -> Any:
    """Returns for each parameter which of its dims make the matrices that Muon orthogonalizes; None: AdamW updates it."""

    def dims(path: tuple, _: Any) -> contrib.MuonDimensionNumbers | None:
        found = MATRICES.get(_name(path))
        return None if found is None else contrib.MuonDimensionNumbers(*found)

    return jax.tree_util.tree_map_with_path(dims, params)


def _name(path: tuple) -> str:
    return path[-1].key


def check_optimizer(flags: OptimizerFlags) -> None:
    """Raises where a flag of the optimizer is out of range, or has no effect."""
    warmup = warmup_steps_of(flags)
    if warmup < 0:
        raise ValueError(f"--warmup-steps must be at least 0; got {warmup}. Choose 0 or more.")
    if warmup >= flags.steps:
        raise ValueError(
            f"--warmup-steps must be less than --steps; got {warmup} and {flags.steps}. Choose "
            f"{_chosen(flags, 'warmup_steps', flags.steps // 10)}, or --steps {warmup + 1} or more."
        )
    _check_values(flags)
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerFlags)}
    for name, optimizers in USED_BY.items():
        if flags.optimizer not in optimizers and getattr(flags, name) != defaults[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} applies to --optimizer {' and '.join(optimizers)}; got --optimizer "
                f"{flags.optimizer}. Leave it out, or choose --optimizer {optimizers[0]}."
            )
    _check_schedule(flags)


def _check_values(flags: OptimizerFlags) -> None:
    if not 0 < flags.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be positive; got {flags.learning_rate:g}. Choose such as 0.003.")
    if not 0 < flags.max_grad_norm < math.inf:
        raise ValueError(
            f"--max-grad-norm must be positive; got {flags.max_grad_norm:g}. Choose 1, say, or 1e9 to scale nothing down."
        )
    if not 0 <= momentum_of(flags) < 1:
        raise ValueError(f"--momentum must be from 0 to less than 1; got {flags.momentum:g}. 0 is plain SGD.")
    for name, usual in (("beta1", 0.9), ("beta2", 0.95)):
        if not 0 <= getattr(flags, name) < 1:
            raise ValueError(
                f"--{name} must be from 0 to less than 1; got {getattr(flags, name):g}. Choose {usual}, say."
            )
    if not 0 < flags.epsilon < math.inf:
        raise ValueError(f"--epsilon must be positive; got {flags.epsilon:g}. Choose 1e-8, say.")
    if not 0 <= flags.weight_decay < math.inf:
        raise ValueError(
            f"--weight-decay must be 0 or more; got {flags.weight_decay:g}. Choose 0.1, say, or 0 for none."
        )


def _check_schedule(flags: OptimizerFlags) -> None:
    final, schedule = flags.final_learning_rate, flags.learning_rate_schedule
    if final is not None and schedule == "constant":
        raise ValueError(
            f"--final-learning-rate applies to schedules that fall; got {final:g} with --learning-rate-schedule constant. "
            "Leave it out, or choose --learning-rate-schedule linear."
        )
    if final is not None and not 0 <= final <= flags.learning_rate:
        raise ValueError(
            f"--final-learning-rate must be from 0 to --learning-rate; got {final:g} and {flags.learning_rate:g}. Choose "
            f"{flags.learning_rate / 10:g}, say."
        )
    if flags.decay_steps is not None and schedule != "wsd":
        raise ValueError(
            f"--decay-steps applies to --learning-rate-schedule wsd; got {schedule}. Leave it out, or choose "
            "--learning-rate-schedule wsd."
        )
    most = flags.steps - warmup_steps_of(flags)
    if schedule == "wsd" and not 1 <= decay_steps_of(flags) <= most:
        raise ValueError(
            "--decay-steps must be from 1 to the --steps after the warmup; got "
            f"{decay_steps_of(flags)}, and {most} steps after it. Choose "
            f"{_chosen(flags, 'decay_steps', max(most // 5, 1))}."
        )


def _chosen(flags: OptimizerFlags, name: str, value: int) -> str:
    """Returns the flags that set a setting, which a run to resume takes only where --allow-change names it."""
    chosen = f"--{name.replace('_', '-')} {value}"
    return chosen if may_change(flags, name) else f"{chosen} --allow-change {' '.join((*flags.allow_change, name))}"


def settings(flags: OptimizerFlags) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one; those added later only where they are set."""
    names = ("optimizer", "learning_rate", "weight_decay", "max_grad_norm")
    found = {name: getattr(flags, name) for name in names} | {"warmup_steps": warmup_steps_of(flags)}
    if flags.optimizer in USED_BY["momentum"]:
        found["momentum"] = momentum_of(flags)
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerFlags)}
    return found | {name: getattr(flags, name) for name in CHANGE_NUMBERS if getattr(flags, name) != defaults[name]}


def with_saved_warmup(flags: Flags, saved: Mapping[str, Any]) -> Flags:
    """Returns the flags of a run to resume, with the warmup of the saved run where --warmup-steps is not given.

    Args:
        flags: The flags.
        saved: The ``settings`` of the saved run; empty for a new run.
    """
    if flags.warmup_steps is not None or "warmup_steps" not in saved:
        return flags
    return dataclasses.replace(flags, warmup_steps=saved["warmup_steps"])


def say_new_rate(flags: OptimizerFlags, saved: Mapping[str, Any], step: int) -> None:
    """Prints how the learning rate goes on in a run that resumes with another number of steps.

    Args:
        flags: The flags.
        saved: The settings of the saved run, with its ``steps``.
        step: The step to resume from.
    """
    if saved.get("steps") in (None, flags.steps):
        return
    rates = [learning_rate(dataclasses.replace(flags, steps=steps))(step) for steps in (saved["steps"], flags.steps)]
    before, now = (f"{np.asarray(rate).item():.3g}" for rate in rates)
    at = f"{now} at step {step}" + ("" if now == before else f" instead of {before}")
    cli.say(
        f"the run has --steps {flags.steps} now, and had {saved['steps']} when it was saved: from here on the learning rate "
        f"follows the {flags.learning_rate_schedule} schedule of {flags.steps} steps, {at}"
    )
