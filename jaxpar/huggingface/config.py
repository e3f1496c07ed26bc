"""Converts config.json to a TransformerConfig and back. Settings that are not modelled are refused by name.

The keys of Llama and its relatives (biases, width of a head, sliding windows) come last; those of RoPE are in `rope_keys.py`.

**Reference**: the configuration classes and modeling_rope_utils.py of transformers 5.23. Keys of transformers 4 are read too.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.huggingface.config_keys import (
    DENSE_LAYERS,
    KEYS,
    MAX_POSITIONS,
    NEUTRAL,
    ONLY,
    REFUSED,
    ROUTER_BIAS,
    ROUTER_KEYS,
    SLICED_SUMS,
    TOKENS,
)
from jaxpar.huggingface.folder import CONFIG, Reader, brief, check_no_adapters, file_inside, read_json, shorten
from jaxpar.huggingface.rope_keys import read_rope, scaling_json
from jaxpar.models.transformer import TransformerConfig
from jaxpar.models.transformer.config import EXPERT_DEFAULTS
from jaxpar.runtime.output import printable

MAX_NAMED = 32  # keys that a message names
_BIASES: dict[tuple[bool, bool], Any] = {
    (False, False): False,
    (True, True): True,
    (True, False): "attention",
    (False, True): "mlp",
}
# Fields of models with experts that change no number of a forward pass in transformers, which have no key there.
NOT_IN_FOLDERS = (
    *("balance_coefficient", "z_coefficient", "capacity_factor"),
    *("expert_split", "expert_products", "expert_exchange", "expert_buffer"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config(folder: Path | str, *, ignore: Sequence[str] = (), **changes: Any) -> TransformerConfig:
    """Returns the model that ``config.json`` in a folder describes.

    Args:
        folder: A folder as ``transformers`` writes it.
        ignore: Keys of ``config.json`` to ignore: settings that jaxpar does not support, such as dropout in training, or
            unknown keys. They are stored in ``ignored``, and ``write_model`` writes them back.
        **changes: Fields of the TransformerConfig to override: ``compute_dtype``, ``vocab_multiple``, ``attention``.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: It is damaged, or has settings that are not modelled: dropout, another architecture, activation or kind of
            position; or the folder has adapters in place of a model.
    """
    check_no_adapters(Path(folder))
    path = file_inside(folder, CONFIG)
    given = read_json(path)
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in KEYS:
        why = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        raise ValueError(
            f"model_type must be one of {', '.join(KEYS)}; got {brief(kind)} in {path}. Other model types are not "
            f"supported{why}."
        )
    family, read = KEYS[kind], Reader(given, KEYS[kind].defaults, path)
    _check_ignore(kind, ignore)
    _check_only(kind, given, path)
    _check_unmodelled(kind, given, ignore, path)
    fields: dict[str, Any] = {field: read.size(*keys) for field, keys in family.sizes.items()}
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields["num_kv_heads"] = None
    fields |= family.fixed
    fields |= {"tied": read.flag("tie_word_embeddings"), "norm_epsilon": read.positive(family.epsilon)}
    fields |= {"tokens": given.get(TOKENS), "ignored": _kept(kind, given, ignore)}
    fields |= {"router_bias": True} if given.get(ROUTER_BIAS) else {}
    if is_relative(kind):
        fields |= read_relative(kind, read, fields, ignore)
    return replace(TransformerConfig(**fields), **changes)


def unmodelled_keys(folder: Path | str) -> tuple[str, ...]:
    """Returns the keys of a folder's config.json that ``read_config`` refuses unless they are ignored."""
    given = read_json(file_inside(folder, CONFIG))
    kind = given.get("model_type")
    return tuple(_unmodelled(kind, given)) if isinstance(kind, str) and kind in KEYS else ()


def _keys_read(kind: str) -> set[str]:
    """Returns the keys that define the model."""
    family = KEYS[kind]
    found = {key for keys in family.sizes.values() for key in keys} | set(ONLY) | set(family.only)
    return found | {"model_type", "tie_word_embeddings", family.epsilon} | family.more


def _check_ignore(kind: str, ignore: Sequence[str]) -> None:
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of keys; got {ignore!r}. Give ignore=({ignore!r},).")
    if wrong := sorted(_keys_read(kind).intersection(ignore) - {"use_sliding_window", "layer_types"}):
        raise ValueError(
            f"a key that defines the model cannot be ignored; got {shorten(wrong)} for a {kind}. Leave it out of ignore."
        )


def _check_only(kind: str, given: dict[str, Any], path: Path) -> None:
    for key, allowed in (ONLY | KEYS[kind].only).items():
        value = given.get(key)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            raise ValueError(
                f"{key} of a {kind} must be {' or '.join(map(repr, allowed))}; got {brief(value)} in {path}. Others are not "
                "modelled."
            )


def _check_unmodelled(kind: str, given: dict[str, Any], ignore: Sequence[str], path: Path) -> None:
    refused = {key: value for key, value in _unmodelled(kind, given).items() if key not in ignore}
    if not refused:
        return
    got = ", ".join(f"{printable(key[:80])}={brief(value)}" for key, value in list(refused.items())[:3])
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    names = [*ignore, *refused]
    remedy = (
        f"give ignore={tuple(names)!r}, or recipes/gpt.py --ignore-config-keys {shlex.join(names)}"
        if len(names) <= MAX_NAMED and all(len(name) <= 80 and name.isprintable() for name in names)
        else "name them in ignore"
    )
    raise ValueError(
        f"every key of a {kind}'s config.json must be known and modelled, since any may change the model or its training, as "
        f"dropout would; got {got}{more} in {path}. To ignore them, {remedy}: write_model writes them back unchanged."
    )


def _unmodelled(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not modelled, by key: dropout, sums in another order, and unknown keys."""
    family = KEYS[kind]
    dropouts = {key: _or(given.get(key), default) for key, default in family.dropouts.items()}
    found = {key: share for key, share in dropouts.items() if type(share) not in (int, float) or share != 0}
    if kind == "bloom" and given.get("slow_but_exact") and _or(given.get("pretraining_tp"), 1) != 1:
        found |= {key: given[key] for key in SLICED_SUMS}
    found |= mixed_windows(kind, given) if is_relative(kind) else {}
    known = _keys_read(kind) | NEUTRAL | family.neutral | set(family.dropouts)
    return found | {key: value for key, value in given.items() if key not in known and value is not None}


def _kept(kind: str, given: dict[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the ignored keys that are present, or that have an effect by default."""
    there = KEYS[kind].dropouts | given
    return {key: _or(there[key], KEYS[kind].dropouts.get(key)) for key in ignore if key in there}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def family_of(config: TransformerConfig) -> str:
    """Returns the type of a model in transformers; raises ValueError if transformers has none."""
    kind = {"learned": "gpt2", "rope": _relative_of(config), "alibi": "bloom"}[config.positions]
    wanted = dict(KEYS[kind].fixed)
    if kind in ("gpt2", "bloom"):
        wanted |= {"explicit_head_dim": None} if config.head_dim * config.num_heads != config.embed_dim else {}
    if "biases" not in wanted and config.biases not in (False, *(KEYS[kind].biases)):
        wanted["biases"] = False
    if "sliding_window" not in KEYS[kind].more:
        wanted["window"] = None
    if config.num_experts is not None:
        own = {*KEYS[kind].sizes, *ROUTER_KEYS.get(kind, {}), *NOT_IN_FOLDERS}
        own |= {"num_dense_layers"} if DENSE_LAYERS in KEYS[kind].more else set()
        wanted |= {name: default for name, default in EXPERT_DEFAULTS.items() if name not in own} | wanted
    wrong = {name: getattr(config, name) for name in wanted if getattr(config, name) != wanted[name]}
    if not is_relative(kind) and config.group_size > 1:
        wrong["num_kv_heads"] = config.num_kv_heads
    if kind == "bloom" and config.hidden_dim != 4 * config.embed_dim:
        wrong["mlp_dim"] = config.mlp_dim
    if wrong:
        raise ValueError(
            f"a model of positions={config.positions!r} must be a {kind} to be read or written; got "
            f"{', '.join(f'{name}={value!r}' for name, value in wrong.items())}. Choose "
            f"{', '.join(f'{name}={wanted.get(name)!r}' for name in wrong)}, or keep it in a checkpoint of jaxpar."
        )
    return kind


def _relative_of(config: TransformerConfig) -> str:
    """Returns the type of a model with RoPE: that of the family whose options it has."""
    if config.num_experts is not None:
        return {"head": "qwen3_moe", "width": "olmoe", None: "mixtral"}[config.qk_norm]
    if config.norm_order == "post" or config.qk_norm == "width":
        return "olmo2"
    if config.qk_norm == "head":
        return "qwen3"
    if config.biases == "qkv":
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def config_json(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Returns the contents of a model's ``config.json``, for transformers 4 and above.

    Args:
        config: The model.
        dtype: NumPy's name for the dtype of its params.
    """
    kind = family_of(config)
    family = KEYS[kind]
    found: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # only the tokenizer knows them
    found |= dict.fromkeys(family.dropouts, 0.0)
    found |= {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype}
    found |= {keys[0]: getattr(config, field) for field, keys in family.sizes.items()}
    found |= {family.epsilon: config.norm_epsilon, "tie_word_embeddings": config.tied}
    if config.tokens is not None:
        found |= {TOKENS: config.tokens}
    if kind == "gpt2":
        found |= {"activation_function": "gelu_new"}
    return found | (write_relative(kind, config) if is_relative(kind) else {}) | dict(config.ignored)


def is_relative(kind: str) -> bool:
    """Returns whether a model of this type has RoPE, and so the keys of this module."""
    return KEYS[kind].fixed["positions"] == "rope"


def read_relative(kind: str, read: Reader, fields: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a TransformerConfig that this module's keys determine.

    Args:
        kind: The type of the model.
        read: Its config.json.
        fields: The sizes that were already read.
        ignore: Keys to ignore.
    """
    is_ignored = mixed_windows(kind, read.given) or {"use_sliding_window", "layer_types"}.intersection(ignore)
    found: dict[str, Any] = {"window": None if is_ignored else _window(kind, read)}
    if "biases" not in KEYS[kind].fixed:
        has = lambda key: key in KEYS[kind].more and read.flag(key, default=False)
        found["biases"] = _BIASES[has("attention_bias"), has("mlp_bias")]
    head_dim = read.size("head_dim") if read.given.get("head_dim") is not None else KEYS[kind].defaults.get("head_dim")
    if head_dim is not None and head_dim * fields["num_heads"] != fields["embed_dim"]:
        found["explicit_head_dim"] = head_dim
    if read.given.get(MAX_POSITIONS) is not None:
        found["max_positions"] = read.size(MAX_POSITIONS)
    for field, (key, default) in ROUTER_KEYS.get(kind, {}).items():
        found[field] = (
            read.flag(key, default=default) if isinstance(default, bool) else read.share(key, default=default)
        )
    if DENSE_LAYERS in KEYS[kind].more:
        found["num_dense_layers"] = _num_dense_layers(read, fields["num_layers"])
    return found | read_rope(read, fields["max_positions"])


def _num_dense_layers(read: Reader, num_layers: int) -> int:
    given = read.given.get(DENSE_LAYERS) or []
    is_read = isinstance(given, list) and all(type(each) is int for each in given)
    found = sorted({each for each in given if 0 <= each < num_layers}) if is_read else [0]
    if not is_read or found != [*range(len(found))] or len(found) == num_layers:
        raise ValueError(
            f"the layers without experts must be the first ones, and some must have experts; got {DENSE_LAYERS}={brief(given)} "
            f"for {num_layers} layers in {read.path}. Others are not modelled."
        )
    return len(found)


def _window(kind: str, read: Reader) -> int | None:
    given, more = read.given, KEYS[kind].more
    if "sliding_window" not in more or ("sliding_window" in given and given["sliding_window"] is None):
        return None
    if "use_sliding_window" in more and not read.flag("use_sliding_window", default=False):
        return None
    return read.size("sliding_window") if _SLIDING in _layer_types(kind, given) else None


def mixed_windows(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key that gives a window to some layers and not to others, which is not modelled, and its value."""
    more = KEYS[kind].more
    is_on = given.get("use_sliding_window") is True if "use_sliding_window" in more else True
    if not is_on or ("sliding_window" in given and given["sliding_window"] is None):
        return {}
    key = "use_sliding_window" if "use_sliding_window" in more else "layer_types"
    return {key: given.get(key)} if len(set(_layer_types(kind, given))) > 1 else {}


def _layer_types(kind: str, given: Mapping[str, Any]) -> list[str]:
    """Returns the kind of attention of each layer; all of one kind unless the model says otherwise."""
    if isinstance(types := given.get("layer_types"), list):
        return [str(each) for each in types]
    layers, whole = given.get("num_hidden_layers"), given.get("max_window_layers", 28)
    if "max_window_layers" not in KEYS[kind].more or type(layers) is not int or type(whole) is not int:
        return [_SLIDING]
    return [_FULL] * (whole > 0 and layers > 0) + [_SLIDING] * (layers > whole)


def write_relative(kind: str, config: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of this module for a model's config.json, as transformers 4 and 5 read them."""
    found: dict[str, Any] = {"num_key_value_heads": config.kv_heads, "intermediate_size": config.hidden_dim}
    found |= {"hidden_act": "silu", "rope_theta": config.rope_theta}
    if config.explicit_head_dim is not None or "head_dim" in KEYS[kind].defaults:
        found["head_dim"] = config.head_dim
    scaling = config.rope_scaling
    found["rope_scaling"] = None if scaling is None else scaling_json(scaling)
    if scaling is not None and scaling.kind == "dynamic":  # transformers has no other key for its original positions
        found["max_position_embeddings"] = scaling.original_positions
        found |= {} if config.max_positions == scaling.original_positions else {MAX_POSITIONS: config.max_positions}
    found |= {key: getattr(config, field) for field, (key, _) in ROUTER_KEYS.get(kind, {}).items()}
    if "expert_dim" in KEYS[kind].sizes:
        found["moe_intermediate_size"] = config.expert_hidden_dim
    more = KEYS[kind].more
    if DENSE_LAYERS in more:
        found[DENSE_LAYERS] = [*range(config.num_dense_layers)]
    biases = {"attention_bias": config.has_biases("out"), "mlp_bias": config.has_biases("mlp")}
    found |= {key: value for key, value in biases.items() if key in more}
    if "sliding_window" in more:
        found["sliding_window"] = config.window
    if "use_sliding_window" in more:
        is_on = config.window is not None
        found |= {"use_sliding_window": is_on, "max_window_layers": 0 if is_on else config.num_layers}
    return found
