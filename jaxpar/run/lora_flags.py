"""LoRA in the run of a language model: its flags, and what does not fit them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from jaxpar.checkpoint.export import load_save_file
from jaxpar.fields import check_at_least, check_positive
from jaxpar.layered_model import LAYERS, path_string
from jaxpar.models import lora, quantized, transformer
from jaxpar.models.transformer import TransformerConfig
from jaxpar.params import is_spec
from jaxpar.run.optimizers import OptimizerFlags

Target = Literal["w_qkv", "w_out", "w_up", "w_down"]


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    """Low-rank factors of layer weights, trained instead of the weights.

    Attributes:
        lora_rank: Train factors of this rank beside the weights of layers, and nothing else (LoRA); 8, say. None: train all
            weights.
        lora_targets: The weights that get factors, with peft's names: queries, keys and values (q_proj, k_proj, v_proj), the
            output of attention (o_proj), the MLP's first (gate_proj, up_proj) and its last one (down_proj), in this order.
        lora_alpha: Scales the product of the factors by --lora-alpha / --lora-rank. None: --lora-rank, a scale of 1.
        quantize: Hold the layers' weights, which are frozen, in nf4, of four bits, in nf4-dq, whose scales are in codes too, or
            in int8 or fp8, of eight; embedding, head and norms stay float32. None: in float32.
    """

    lora_rank: int | None = None
    lora_targets: tuple[Target, ...] = ("w_qkv", "w_out", "w_up", "w_down")
    lora_alpha: float | None = None
    quantize: quantized.Kind | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the saved one."""
        if self.lora_rank is None:
            return {}
        alpha = float(self.lora_rank if self.lora_alpha is None else self.lora_alpha)
        found = {
            "lora_rank": self.lora_rank,
            "lora_targets": sorted(self.lora_targets),
            "lora_alpha": alpha,
        }
        return found if self.quantize is None else found | {"quantize": self.quantize}


def check_lora(flags: LoraFlags, optimizer: OptimizerFlags, router_bias_rate: float | None) -> None:
    """Raises where a flag of LoRA is out of range, has no effect, or does not fit another; ImportError without the extra hf."""
    if flags.lora_rank is None:
        if flags.lora_targets != LoraFlags.lora_targets or flags.lora_alpha is not None:
            raise ValueError(
                "--lora-targets and --lora-alpha apply to --lora-rank; got one of them without it. Add --lora-rank 8, or leave "
                "it out."
            )
        if flags.quantize is not None:
            raise ValueError(
                f"--quantize is for weights that are frozen; got {flags.quantize} without --lora-rank, which trains all of "
                "them. Add --lora-rank 8, or leave it out."
            )
        return
    check_at_least(1, "Choose 8, say.", lora_rank=flags.lora_rank)
    check_distinct(flags.lora_targets)
    check_positive(f"Choose {2 * flags.lora_rank}, say.", lora_alpha=flags.lora_alpha)
    if optimizer.optimizer == "muon":
        raise ValueError(
            "--optimizer muon makes the updates of whole weights orthogonal; got it with --lora-rank, which trains factors of "
            "them. Choose --optimizer adamw."
        )
    if router_bias_rate is not None:
        raise ValueError(
            "--router-bias-rate updates the biases of routers; got it with --lora-rank, which trains factors alone. Leave out "
            "one of the two."
        )
    load_save_file()  # raises without the extra hf, before a run that must write adapters


def check_distinct(targets: Sequence[str]) -> None:
    """Raises ValueError unless targets are one or more, and each is there once."""
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(
            f"--lora-targets must name weights, each once; got {' '.join(targets) or 'none'}. Choose among "
            f"{' '.join(transformer.LAYER_WEIGHTS)}."
        )


def remark_on_frozen(flags: LoraFlags, init_from: Path | None) -> str:
    """Returns what to say of factors beside weights that nobody has trained; "" of others."""
    if flags.lora_rank is None or init_from is not None:
        return ""
    return (
        "--lora-rank without --init-from: the weights beside the factors are random and are not trained, so the adapters "
        "are of no use for another model"
    )


def check_targets(flags: LoraFlags, config: TransformerConfig) -> None:
    """Raises where a target is no weight of the model's layers, such as the MLP's where all of it are experts."""
    if flags.lora_rank is None:
        return
    there = _weights_of_layers(config)
    if missing := [name for name in flags.lora_targets if name not in there]:
        why = (
            ""
            if config.experts is None
            else f", whose {config.experts.count} experts a layer take no factors"
        )
        raise ValueError(
            f"--lora-targets must name weights of the model's layers; got {' '.join(missing)} for a model that has none of "
            f"{'this name' if len(missing) == 1 else 'these names'}{why}. Give --lora-targets "
            f"{' '.join(name for name in transformer.LAYER_WEIGHTS if name in there)}."
        )


def remark_on_targets(flags: LoraFlags, config: TransformerConfig) -> str:
    """Returns which of the targets the leading dense layers alone have, where the other layers have experts; "" if none."""
    if flags.lora_rank is None:
        return ""
    there = _weights_of_layers(config, stacked_alone=True)
    leading = [name for name in flags.lora_targets if name not in there]
    if not leading:
        return ""
    count = config.num_leading_layers
    layers = "leading dense layer" if count == 1 else f"{count} leading dense layers"
    get = "gets" if len(leading) == 1 else "get"
    return f"{', '.join(leading)} {get} factors in the {layers} alone, since experts take none"


def _weights_of_layers(config: TransformerConfig, *, stacked_alone: bool = False) -> set[str]:
    """Returns the names of the weights of all layers, or of those that are alike and follow the leading dense ones."""
    specs = jax.tree_util.tree_leaves_with_path(transformer.param_table(config), is_leaf=is_spec)
    paths = [path_string(path) for path, _ in specs]
    is_one = lambda path: path.startswith(f"{LAYERS}/") if stacked_alone else f"{LAYERS}/" in path
    return {path.split("/")[-1] for path in paths if is_one(path)}


def make_lora(flags: LoraFlags) -> lora.Lora | None:
    """Returns the LoRA that the flags ask for, if any."""
    if flags.lora_rank is None:
        return None
    targets = {name: transformer.LAYER_WEIGHTS[name] for name in flags.lora_targets}
    return lora.Lora(flags.lora_rank, targets, flags.lora_alpha)
