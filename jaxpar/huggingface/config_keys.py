"""The keys of config.json for each family, as plain data: their meaning here, and which of them have no effect.

`config.py` refuses a key that is in no table, since any key may change the model.

**Reference**: the configuration classes of transformers 4 and 5, and published config.json files.
"""

from dataclasses import dataclass
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class FamilyKeys:
    """A family's names for the fields of a TransformerConfig, and its fixed settings.

    Attributes:
        architecture: The class in transformers of the model with its head.
        sizes: The key of each field, followed by other keys with the same meaning.
        epsilon: The key of ``norm_epsilon``.
        defaults: The values of optional keys, as in transformers.
        fixed: Fields that are the same in every model of the family.
        only: Keys that may have only these values.
        dropouts: Keys of dropout rates, which jaxpar does not support, and their default values.
        neutral: Keys that do not affect the values of a forward pass.
        more: Other keys that define the model, which `read_relative` reads.
        biases: The values of ``biases`` other than False that the family has, if they are not fixed.
    """

    architecture: str
    sizes: dict[str, tuple[str, ...]]
    epsilon: str
    defaults: dict[str, Any]
    fixed: dict[str, Any]
    only: dict[str, tuple[Any, ...]]
    dropouts: dict[str, float]
    neutral: frozenset[str]
    more: frozenset[str] = frozenset()
    biases: tuple[Any, ...] = ()


_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # one function, three ways to compute it
NEUTRAL = _words(
    # Metadata, and the settings of tokenizers, trainers and samplers.
    "_name_or_path architectures model_type dtype torch_dtype transformers_version use_cache initializer_range return_dict "
    "output_attentions output_hidden_states torchscript problem_type id2label label2id num_labels finetuning_task "
    "task_specific_params tokenizer_class prefix bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id "
    "decoder_start_token_id max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens gradient_checkpointing "
    "chunk_size_feed_forward attn_implementation pretraining_tp _num_labels eos_token_ids output_past xla_device "
    "_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _commit_hash transformers.js_config "
    "unsloth_fixed unsloth_version"
)
TOKENS = "jaxpar_tokens"  # jaxpar's own key: transformers stores the kind of tokens with its tokenizers
# Another, of a run's own description: transformers has no bias of a router in these families.
ROUTER_BIAS = "jaxpar_router_bias"
# Another: max_positions, if max_position_embeddings is the length from which transformers stretches "dynamic" RoPE.
MAX_POSITIONS = "jaxpar_max_positions"
ONLY: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "tf_legacy_loss": (False, True),
    "use_bfloat16": (False, True),
    "use_mrope": (False,),
    TOKENS: ("bytes",),
    ROUTER_BIAS: (True,),
}

# Of families with experts: the key of each field of the router, and its default in transformers.
ROUTER_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "mixtral": {"balance_coefficient": ("router_aux_loss_coef", 0.001)},
    "qwen3_moe": {
        "balance_coefficient": ("router_aux_loss_coef", 0.001),
        "normalized_routing": ("norm_topk_prob", False),
    },
    "olmoe": {
        "balance_coefficient": ("router_aux_loss_coef", 0.01),
        "normalized_routing": ("norm_topk_prob", False),
    },
}
DENSE_LAYERS = "mlp_only_layers"  # the numbers of the layers without experts
_NO_EXPERTS = {"num_experts": None}
_LAYER_NORMS = {"norm": "layer", "norm_order": "pre", "qk_norm": None, "mlp": "gelu", "biases": True, **_NO_EXPERTS}
_WINDOWS = "use_sliding_window sliding_window max_window_layers layer_types"


def _relative(
    architecture: str,
    defaults: dict[str, Any] | None = None,
    fixed: dict[str, Any] | None = None,
    *,
    more: str,
    biases: tuple[Any, ...] = (),
    experts: dict[str, tuple[str, ...]] | None = None,
    only: dict[str, tuple[Any, ...]] | None = None,
) -> FamilyKeys:
    """Returns the keys of Llama or a family of the same block.

    Args:
        architecture: The class in transformers.
        defaults: Defaults other than Llama's.
        fixed: Fixed settings other than Llama's.
        more: Other keys that define the model, beside those of all relatives.
        biases: As in FamilyKeys.
        experts: The keys of the sizes of experts, in a family that has them.
        only: Keys that may have only these values, beside those of all relatives.
    """
    return FamilyKeys(
        architecture=architecture,
        sizes={
            "vocab_size": ("vocab_size",),
            "num_layers": ("num_hidden_layers",),
            "embed_dim": ("hidden_size",),
            "num_heads": ("num_attention_heads",),
            "num_kv_heads": ("num_key_value_heads",),
            "mlp_dim": ("intermediate_size",),
            "max_positions": ("max_position_embeddings",),
            **(experts or {}),
        },
        epsilon="rms_norm_eps",
        defaults={
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            **(defaults or {}),
        },
        fixed={
            "norm": "rms",
            "norm_order": "pre",
            "qk_norm": None,
            "positions": "rope",
            "mlp": "swiglu",
            "norm_embedding": False,
            **({} if experts else _NO_EXPERTS),
            **(fixed or {}),
        },
        only={
            "hidden_act": ("silu", "swish"),
            "rope_interleaved": (False,),
            "is_llama_config": (True,),
            **(only or {}),
        },
        dropouts={"attention_dropout": 0.0},
        neutral=frozenset(["max_sequence_length"]),
        more=_words(more) | _words("head_dim rope_theta rope_scaling rope_parameters") | {MAX_POSITIONS},
        biases=biases,
    )


KEYS = {
    "gpt2": FamilyKeys(
        architecture="GPT2LMHeadModel",
        sizes={
            "vocab_size": ("vocab_size",),
            "num_layers": ("n_layer", "num_hidden_layers"),
            "embed_dim": ("n_embd", "hidden_size"),
            "num_heads": ("n_head", "num_attention_heads"),
            "mlp_dim": ("n_inner",),
            "max_positions": ("n_positions", "max_position_embeddings"),
        },
        epsilon="layer_norm_epsilon",
        defaults={"n_inner": None, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        fixed=_LAYER_NORMS | {"positions": "learned", "norm_embedding": False},
        only={
            "activation_function": _TANH_GELU,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        dropouts={"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
        neutral=_words(
            "n_ctx predict_special_tokens reorder_and_upcast_attn summary_activation summary_first_dropout "
            "summary_proj_to_labels summary_type summary_use_proj"
        ),
    ),
    "llama": _relative("LlamaForCausalLM", more="attention_bias mlp_bias", biases=(True, "attention", "mlp")),
    "mistral": _relative(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        {"biases": False},
        more="sliding_window layer_types",
    ),
    "qwen2": _relative(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
        {"biases": "qkv"},
        more=_WINDOWS,
    ),
    "qwen3": _relative(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
        {"qk_norm": "head"},
        more=f"attention_bias {_WINDOWS}",
        biases=("attention",),
    ),
    "olmo2": _relative(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        {"qk_norm": "width", "norm_order": "post"},
        more="attention_bias",
        biases=("attention",),
    ),
    "mixtral": _relative(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        {"biases": False, "normalized_routing": True},
        more="sliding_window layer_types router_aux_loss_coef",
        experts={"num_experts": ("num_local_experts", "num_experts"), "experts_per_token": ("num_experts_per_tok",)},
        only={"router_jitter_noise": (0.0, 0), "output_router_logits": (False, True)},
    ),
    "qwen3_moe": _relative(
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "head_dim": None,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"qk_norm": "head"},
        more=f"attention_bias {_WINDOWS} router_aux_loss_coef norm_topk_prob {DENSE_LAYERS}",
        biases=("attention",),
        experts={
            "num_experts": ("num_experts", "num_local_experts"),
            "experts_per_token": ("num_experts_per_tok",),
            "expert_dim": ("moe_intermediate_size",),
        },
        only={"decoder_sparse_step": (1,), "output_router_logits": (False, True)},
    ),
    "olmoe": _relative(
        "OlmoeForCausalLM",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        {"qk_norm": "width"},
        more="attention_bias router_aux_loss_coef norm_topk_prob",
        biases=("attention",),
        experts={
            "num_experts": ("num_experts", "num_local_experts"),
            "experts_per_token": ("num_experts_per_tok",),
        },
        only={"output_router_logits": (False, True)},
    ),
    "bloom": FamilyKeys(
        architecture="BloomForCausalLM",
        sizes={
            "vocab_size": ("vocab_size",),
            "num_layers": ("n_layer", "num_hidden_layers"),
            "embed_dim": ("hidden_size", "n_embed", "n_embd"),
            "num_heads": ("n_head", "num_attention_heads"),
            "max_positions": ("seq_length",),
        },
        epsilon="layer_norm_epsilon",
        defaults={"seq_length": 2048, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        fixed=_LAYER_NORMS | {"positions": "alibi", "norm_embedding": True},
        only={"apply_residual_connection_post_layernorm": (False,), "n_inner": (None,)},
        dropouts={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        neutral=_words(
            "slow_but_exact attention_softmax_in_fp32 bias_dropout_fusion "
            "masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv"
        ),
    ),
}
# Types of models that are known and not modelled, and why.
REFUSED = {
    "deepseek_v2": "its attention is multi-head latent attention (MLA)",
    "deepseek_v3": "its attention is multi-head latent attention (MLA)",
}
# With these BLOOM adds the products of each slice separately, as that many shards would, which rounds differently.
SLICED_SUMS = ("pretraining_tp", "slow_but_exact")
