"""The keys of Llama and its relatives, Mistral, Qwen2, Qwen3 and OLMo 2: biases, width of a head, RoPE and sliding windows.

**Reference**: the configuration classes and modeling_rope_utils.py of transformers 5.23. Keys of transformers 4 are read too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.huggingface.config_keys import KEYS, MAX_POSITIONS
from jaxpar.huggingface.config_reader import Reader
from jaxpar.huggingface.untrusted import brief
from jaxpar.models.transformer import RopeScaling, TransformerConfig

_BIASES: dict[tuple[bool, bool], Any] = {
    (False, False): False,
    (True, True): True,
    (True, False): "attention",
    (False, True): "mlp",
}
_POSITIONS, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


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
    return found | _read_rope(read, fields["max_positions"])


def _read_rope(read: Reader, max_positions: int) -> dict[str, Any]:
    """Returns base and scaling: keys at the top level and rope_scaling up to transformers 4, rope_parameters since."""
    found = {"rope_theta": read.positive("rope_theta", default=10_000.0), "rope_scaling": None}
    for key in ("rope_scaling", "rope_parameters"):
        rope = read.given.get(key)
        rope = {} if rope is None else rope
        if not isinstance(rope, dict):
            raise ValueError(f"{key} must be an object; got {brief(rope)} in {read.path}. Correct it.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        known = {"rope_type", "type", "rope_theta", *(_ROPE_KEYS.get(kind, ()) if isinstance(kind, str) else ())}
        others = {name for name, value in rope.items() if value is not None} - known
        if rope.get("partial_rotary_factor") == 1:
            others -= {"partial_rotary_factor"}
        if not isinstance(kind, str) or kind not in _ROPE_KEYS or others:
            raise ValueError(
                f"{key} must be of a type in {', '.join(_ROPE_KEYS)}, with its own keys alone; got {brief(rope)} in "
                f"{read.path}. Others are not modelled."
            )
        of_rope = Reader(rope, {}, read.path)
        found["rope_theta"] = of_rope.positive("rope_theta", default=found["rope_theta"])
        if kind != "default":
            found["rope_scaling"] = _scaling(kind, of_rope, max_positions)
    return found


def _scaling(kind: str, read: Reader, max_positions: int) -> RopeScaling:
    has = lambda key: read.given.get(key) is not None
    original = read.size(_ORIGINAL) if kind in ("llama3", "yarn") and has(_ORIGINAL) else None
    own: dict[str, Any] = {"kind": kind, "original_positions": 1 if kind == "linear" else original or max_positions}
    own["factor"] = read.positive("factor", default=max_positions / original if original else None)
    if kind == "llama3":
        own |= {key: read.positive(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        own |= {key: read.positive(key) for key in ("beta_fast", "beta_slow") if has(key)}
        own["truncate"] = read.flag("truncate", default=True)
        own["attention_factor"] = read.positive("attention_factor", default=_magnitude(read, own["factor"]))
    return RopeScaling(**own)


def _magnitude(read: Reader, factor: float) -> float:
    """Returns YaRN's default scale of cos and sin."""
    of = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1
    if read.given.get("mscale") and read.given.get("mscale_all_dim"):
        return of(read.positive("mscale")) / of(read.positive("mscale_all_dim"))
    return of(1)


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
    found["rope_scaling"] = None if scaling is None else _scaling_json(scaling)
    if scaling is not None and scaling.kind == "dynamic":  # transformers has no other key for its original positions
        found[_POSITIONS] = scaling.original_positions
        found |= {} if config.max_positions == scaling.original_positions else {MAX_POSITIONS: config.max_positions}
    more = KEYS[kind].more
    biases = {"attention_bias": config.has_biases("out"), "mlp_bias": config.has_biases("mlp")}
    found |= {key: value for key, value in biases.items() if key in more}
    if "sliding_window" in more:
        found["sliding_window"] = config.window
    if "use_sliding_window" in more:
        is_on = config.window is not None
        found |= {"use_sliding_window": is_on, "max_window_layers": 0 if is_on else config.num_layers}
    return found


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    own = {
        "factor": scaling.factor,
        _ORIGINAL: scaling.original_positions,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "attention_factor": scaling.attention_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    return {"rope_type": scaling.kind} | {key: own[key] for key in _ROPE_KEYS[scaling.kind] if key in own}
