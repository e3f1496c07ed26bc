"""The keys of config.json that determine the wavelengths of rotary positions, and back.

Up to transformers 4 they are at the top level and in rope_scaling, since then in rope_parameters.

**Reference**: modeling_rope_utils.py of transformers 5.23.
"""

import math
from dataclasses import asdict, replace
from typing import Any

from jaxpar.huggingface.families import MAX_POSITIONS
from jaxpar.huggingface.folder import Reader, brief
from jaxpar.models.transformer import Rope, RopeScaling

# The keys by the way in which wavelengths are stretched.
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        "factor",
        _ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def read_rope(read: Reader, max_positions: int) -> Rope:
    """Returns the wavelengths that the keys determine.

    Args:
        read: The config.json.
        max_positions: The longest sequence of the model, in tokens.

    Raises:
        ValueError: A kind of scaling that is not modelled, a key of another kind, or two keys that disagree.
    """
    found = Rope(theta=read.positive("rope_theta", default=10_000.0))
    is_given = read.given.get("rope_theta") is not None
    thetas = {"rope_theta": found.theta} if is_given else {}
    scalings: dict[str, RopeScaling | None] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = read.given.get(key)
        rope = {} if rope is None else rope
        if not isinstance(rope, dict):
            raise ValueError(
                f"{key} must be an object; got {brief(rope)} in {read.path}. Correct it."
            )
        kind = rope.get("rope_type", rope.get("type", "default"))
        known = {
            "rope_type",
            "type",
            "rope_theta",
            *(_ROPE_KEYS.get(kind, ()) if isinstance(kind, str) else ()),
        }
        others = {name for name, value in rope.items() if value is not None} - known
        if rope.get("partial_rotary_factor") == 1:
            others -= {"partial_rotary_factor"}
        if not isinstance(kind, str) or kind not in _ROPE_KEYS or others:
            raise ValueError(
                f"{key} must be of a type in {', '.join(_ROPE_KEYS)}, with its own keys alone; got {brief(rope)} in "
                f"{read.path}. Others are not modelled."
            )
        of_rope = Reader(rope, {}, read.path)
        found = replace(found, theta=of_rope.positive("rope_theta", default=found.theta))
        if rope.get("rope_theta") is not None:
            thetas[f"rope_theta of {key}"] = found.theta
        if len(set(thetas.values())) > 1:
            raise ValueError(
                f"keys of one meaning must agree; got {thetas} in {read.path}. Correct one."
            )
        scaling = None if kind == "default" else _scaling(kind, of_rope, max_positions)
        if rope:
            scalings[key] = scaling
        if len(set(scalings.values())) > 1:
            both = {name: read.given[name] for name in scalings}
            raise ValueError(
                f"keys of one meaning must agree; got {brief(both)} in {read.path}. Leave one of the two out."
            )
        found = replace(found, scaling=scaling or found.scaling)
    return found


def _scaling(kind: str, read: Reader, max_positions: int) -> RopeScaling:
    has = lambda key: read.given.get(key) is not None
    original = read.size(_ORIGINAL) if kind in ("llama3", "yarn") and has(_ORIGINAL) else None
    own: dict[str, Any] = {
        "kind": kind,
        "original_positions": 1 if kind == "linear" else original or max_positions,
    }
    own["factor"] = read.positive("factor", default=max_positions / original if original else None)
    if kind == "llama3":
        own |= {key: read.positive(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        own |= {key: read.positive(key) for key in ("beta_fast", "beta_slow") if has(key)}
        own["truncate"] = read.flag("truncate", default=True)
        own["attention_factor"] = read.positive(
            "attention_factor", default=_magnitude(read, own["factor"])
        )
    return RopeScaling(**own)


def _magnitude(read: Reader, factor: float) -> float:
    """Returns YaRN's default scale of cos and sin."""
    of = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1
    if read.given.get("mscale") and read.given.get("mscale_all_dim"):
        return of(read.positive("mscale")) / of(read.positive("mscale_all_dim"))
    return of(1)


def rope_json(rope: Rope, max_positions: int) -> dict[str, Any]:
    """Returns the keys for config.json, as transformers 4 and 5 read them."""
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.scaling is not None:
        found["rope_scaling"] = _scaling_json(rope.scaling)
    if rope.scaling is None or rope.scaling.kind != "dynamic":
        return found
    # transformers has no other key for its original positions.
    original = rope.scaling.original_positions
    own = {} if max_positions == original else {MAX_POSITIONS: max_positions}
    return found | {"max_position_embeddings": original} | own


def _scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    """Returns the value of rope_scaling, as transformers 4 and 5 read it."""
    own = asdict(scaling) | {_ORIGINAL: scaling.original_positions}
    return {"rope_type": scaling.kind} | {
        key: own[key] for key in _ROPE_KEYS[scaling.kind] if key in own
    }
