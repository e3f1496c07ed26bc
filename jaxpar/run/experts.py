"""Flags of a language model's experts: where they lie, how much room they have, and how they are kept busy."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxpar.models.transformer import TransformerConfig
from jaxpar.tensor_parallel import EXPERT_RULES, EXPERTS_OVER_DATA


@dataclass(frozen=True, kw_only=True)
class ExpertFlags:
    """The experts of a model that has some."""

    expert_split: Literal["experts", "expert_mlp"] = "experts"
    """What --mesh.tensor splits in a model with experts: their number, or the hidden width of each."""
    experts: Literal["tensor", "data"] = "tensor"
    """The axis over which the experts of a model are divided: --mesh.tensor, as --expert-split says; or --mesh.data, whose
    replicas send each other rows, and --mesh.tensor splits their hidden width."""
    expert_buffer: float | None = None
    """With --experts data, a replica has room for this many times the rows of its own tokens, and a step in which one gets more
    is skipped. None: for all rows that it can get."""
    router_bias_rate: float | None = None
    """After each step the bias of an expert with fewer tokens than the mean rises by this, and that of one with more falls;
    0.001, say. None: no biases."""

    @property
    def of_model(self) -> dict[str, Any]:
        """The fields of a TransformerConfig with experts."""
        router_bias = self.router_bias_rate is not None
        return {"expert_split": self.expert_split, "expert_buffer": self.expert_buffer, "router_bias": router_bias}

    @property
    def rules(self) -> dict[str, str | None]:
        """The axes of the dims of experts."""
        return EXPERTS_OVER_DATA if self.experts == "data" else EXPERT_RULES[self.expert_split]


def check_experts(flags: ExpertFlags, config: TransformerConfig, named: str, *, is_new: bool) -> None:
    """Raises where a flag of experts has no effect, or does not fit another.

    Args:
        flags: The flags.
        config: The model.
        named: The flag that names it.
        is_new: Whether it begins without given weights.
    """
    given = "--experts data" if flags.experts == "data" else "--router-bias-rate"
    if config.num_experts is None and (flags.experts == "data" or flags.router_bias_rate is not None):
        raise ValueError(
            f"{given} is for a model with experts; got {named}. Leave it out, or choose --model moe-bytes."
        )
    if flags.expert_buffer is not None and flags.experts != "data":
        raise ValueError(
            f"--expert-buffer applies to --experts data; got {flags.expert_buffer:g} with --experts {flags.experts}. Add "
            "--experts data, or leave it out."
        )
    if flags.router_bias_rate is None:
        return
    if not is_new:
        raise ValueError(
            "a model of transformers has no biases for --router-bias-rate; got it with --init-from. Leave out one of the two."
        )
    if not 0 <= flags.router_bias_rate < math.inf:
        raise ValueError(f"--router-bias-rate must be 0 or more; got {flags.router_bias_rate:g}. Choose 0.001, say.")
