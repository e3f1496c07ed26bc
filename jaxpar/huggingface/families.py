"""The families of models in transformers, as data of `families.json`: keys of config.json, and the tensors of each param.

A family may be ``like`` one above it: objects, ``neutral`` and ``more`` add to those of that family, other values replace them.
A dim of a tensor is written as the dims of the param that form it, in parentheses if there are several, with the part of a dim
that the tensor holds in brackets:

    "layers/attention/w_qkv": {"model.layers.{layer}.self_attn.q_proj.weight": "(kv_heads qkv[:-2] head_dim) embed", ...}

The names of dims are those of the param's ParamSpec (`models/transformer/params.py`). GPT-2 stores weights as [in, out], like
the params; Llama and BLOOM as [out, in]. Queries and keys need no permutation: Llama's RoPE, too, rotates the first half of a
head against the second. Checkpoints do not have the rows that pad a vocabulary.

`config.py` refuses a key that is not in the tables, since any key may change the model. The three names of GELU in a GPT-2 are
of one function, computed in three ways.

**Reference**: the configuration classes of transformers 4 and 5, and published config.json files; models/gpt2, bloom, llama,
mistral, qwen2, qwen3, olmo2, granite, mixtral, qwen3_moe and olmoe of transformers 5.23; tests/test_huggingface_live.py checks
the tensors against them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = (
    "jaxpar_tokens"  # jaxpar's own key: transformers stores the kind of tokens with its tokenizers
)
# Another, of a run's own description: transformers has no bias of a router in these families.
ROUTER_BIAS = "jaxpar_router_bias"
# A loss that balances experts, and whether transformers adds it: only a model that returns its router's scores has it.
AUX_LOSS, HAS_AUX_LOSS = "router_aux_loss_coef", "output_router_logits"
# Another: max_positions, if max_position_embeddings is the length from which transformers stretches "dynamic" RoPE.
MAX_POSITIONS = "jaxpar_max_positions"
DENSE_LAYERS = "mlp_only_layers"  # the numbers of the layers without experts
# Types of models that are known and not modelled, and why.
REFUSED = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3"), "its attention is multi-head latent attention (MLA)"
)


@dataclass(frozen=True)
class Family:
    """A family's names for the fields of a TransformerConfig, its fixed settings, and its tensors.

    Attributes:
        architecture: The class in transformers of the model with its head.
        sizes: The key of each field, followed by other keys with the same meaning.
        numbers: The key of each field that is a positive number.
        defaults: The values of optional keys, as in transformers.
        fixed: Fields that are the same in every model of the family.
        only: Keys that may have only these values.
        dropouts: Keys of dropout rates, which jaxpar does not support, and their default values.
        neutral: Keys that do not affect the values of a forward pass: metadata, settings of tokenizers, trainers and samplers.
        more: Other keys that define the model, which `config.py` reads by name.
        every_layer_slides: Whether transformers 5 gives each layer the window, whatever keys say of layers, which 4 followed.
        biases: The values of ``biases`` other than False that the family has, if they are not fixed.
        experts: For a family with experts, the keys of fields of Experts that are sizes, as in ``sizes``.
        router: For experts, the key of each field of the router, and its default.
        prefix: The prefix of all tensors' names except the head's; checkpoints of the model without its head omit it.
        tensors: The tensors of each param that a model of the family may have, with their dims.
        not_params: A pattern for other tensors in some checkpoints: masks and tables that follow from the shape.
    """

    architecture: str
    sizes: dict[str, list[str]]
    numbers: dict[str, str]
    defaults: dict[str, Any]
    fixed: dict[str, Any]
    only: dict[str, list[Any]]
    dropouts: dict[str, float]
    neutral: frozenset[str]
    more: frozenset[str]
    biases: list[Any]
    experts: dict[str, list[str]]
    router: dict[str, tuple[str, Any]]
    prefix: str
    tensors: dict[str, dict[str, str]]
    not_params: str
    every_layer_slides: bool = False

    @property
    def keys(self) -> set[str]:
        """The keys that define a model."""
        found = {"model_type", "tie_word_embeddings", *self.numbers.values(), *self.only}
        found |= self.more
        found |= {ROUTER_BIAS, AUX_LOSS, HAS_AUX_LOSS} if self.experts else set()
        of_biases = (f"{each}_bias" for each in self.biases if each is not True)
        return found.union(*self.sizes.values(), *self.experts.values(), of_biases)


def _read_families() -> dict[str, Family]:
    tables: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("families.json").read_text()
    )
    for name, own in tables.items():
        own |= {key: frozenset(own[key]) for key in ("neutral", "more") if key in own}
        like = tables.get(own.pop("like", ""), {})
        adds = {
            key: like[key] | value
            for key, value in own.items()
            if isinstance(like.get(key), dict | frozenset)
        }
        tables[name] = like | own | adds
    return {name: Family(**table) for name, table in tables.items() if name != "every"}


FAMILIES = _read_families()
