"""The flags of LoRA: low-rank factors of layer weights, trained instead of the weights."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cli
import jax
from jaxtyping import PyTree

import jaxpar
from jaxpar.models import lora, transformer
from jaxpar.params import count_params

Target = Literal["w_qkv", "w_out", "w_up", "w_down"]


@dataclass(frozen=True, kw_only=True)
class LoraFlags:
    lora_rank: int | None = None
    """Train factors of this rank beside the weights of layers, and nothing else (LoRA); 8, say. None: train all weights."""
    lora_targets: tuple[Target, ...] = ("w_qkv", "w_out", "w_up", "w_down")
    """The weights that get factors: queries, keys and values, the output of attention, and the two of the MLP."""
    lora_alpha: float | None = None
    """Scales the product of the factors by --lora-alpha / --lora-rank. None: --lora-rank, a scale of 1."""


def check_lora(flags: Any) -> None:
    """Raises where a flag of LoRA is out of range, has no effect, or does not fit another; ImportError without the extra hf."""
    if flags.lora_rank is None:
        if flags.lora_targets != LoraFlags.lora_targets or flags.lora_alpha is not None:
            raise ValueError(
                "--lora-targets and --lora-alpha apply to --lora-rank; got one of them without it. Add --lora-rank 8, or leave "
                "it out."
            )
        return
    if flags.lora_rank < 1:
        raise ValueError(f"--lora-rank must be at least 1; got {flags.lora_rank}. Choose 8, say.")
    if not flags.lora_targets or len(set(flags.lora_targets)) < len(flags.lora_targets):
        raise ValueError(
            f"--lora-targets must name weights, each once; got {' '.join(flags.lora_targets) or 'none'}. Choose among "
            f"{' '.join(transformer.LAYER_WEIGHTS)}."
        )
    if flags.lora_alpha is not None and not 0 < flags.lora_alpha < math.inf:
        raise ValueError(f"--lora-alpha must be positive; got {flags.lora_alpha:g}. Choose {2 * flags.lora_rank}, say.")
    if flags.optimizer == "muon":
        raise ValueError(
            "--optimizer muon makes the updates of whole weights orthogonal; got it with --lora-rank, which trains factors of "
            "them. Choose --optimizer adamw."
        )
    from jaxpar.checkpoint.export import load_save_file

    load_save_file()  # raises without the extra hf, before a run that must write adapters


def make_lora(flags: LoraFlags) -> lora.Lora | None:
    """Returns the LoRA that the flags ask for, if any."""
    if flags.lora_rank is None:
        return None
    targets = {name: transformer.LAYER_WEIGHTS[name] for name in flags.lora_targets}
    return lora.Lora(flags.lora_rank, targets, flags.lora_alpha)


def trainable(lora_or_none: lora.Lora | None) -> tuple[str, ...] | None:
    """Returns the patterns of the params that are trained; None: all."""
    return None if lora_or_none is None else lora.ADAPTERS


def with_factors(lora_or_none: lora.Lora | None, key: PyTree, params: PyTree) -> PyTree:
    """Returns params with the factors of a new run."""
    return params if lora_or_none is None else lora_or_none.init(jax.random.fold_in(key, 1), params)


def num_factor_params(params: PyTree) -> int:
    """Returns the number of params in the factors of LoRA: 0 without LoRA."""
    leaves = jax.tree.leaves(params, is_leaf=lora.is_adapted)
    return sum(count_params((node.lora_a, node.lora_b)) for node in leaves if lora.is_adapted(node))


def merged(params: PyTree) -> PyTree:
    """Returns params on the mesh with the factors merged into the weights, which keep their shardings."""
    if not any(map(lora.is_adapted, jax.tree.leaves(params, is_leaf=lora.is_adapted))):
        return params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, lora.without_factors(params))
    return jax.jit(lora.merge, out_shardings=shardings)(params)


def save_adapters(flags: Any, shape: transformer.TransformerConfig, params: PyTree) -> None:
    """Writes the factors to adapter/ in --out-dir, if there are any."""
    if flags.lora_rank is None:
        return
    folder: Path = flags.out_dir / "adapter"
    base = None if flags.init_from is None else str(flags.init_from)
    jaxpar.huggingface.write_adapters(folder, shape, params, base=base)
    cli.say(f"written: {folder}/, adapters for peft")


def settings(flags: LoraFlags) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one."""
    if flags.lora_rank is None:
        return {}
    alpha = float(flags.lora_rank if flags.lora_alpha is None else flags.lora_alpha)
    return {"lora_rank": flags.lora_rank, "lora_targets": sorted(flags.lora_targets), "lora_alpha": alpha}
