"""Converts config.json to a TransformerConfig and back. Settings that are not modelled are refused by name."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.huggingface.config_keys import KEYS, NEUTRAL, ONLY, SLICED_SUMS, TOKENS
from jaxpar.huggingface.config_reader import Reader
from jaxpar.huggingface.folder import CONFIG, check_no_adapters
from jaxpar.huggingface.llama_family import is_relative, mixed_windows, read_relative, write_relative
from jaxpar.huggingface.untrusted import brief, file_inside, read_json, shorten
from jaxpar.models.transformer import TransformerConfig
from jaxpar.runtime.printable import printable

MAX_NAMED = 32  # keys that a message names


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
    path = file_inside(Path(folder), CONFIG, str(folder))
    given = read_json(path)
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(
            f"model_type must be one of {', '.join(KEYS)}; got {brief(kind)} in {path}. Others are not modelled."
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
    if is_relative(kind):
        fields |= read_relative(kind, read, fields, ignore)
    return replace(TransformerConfig(**fields), **changes)


def unmodelled_keys(folder: Path | str) -> tuple[str, ...]:
    """Returns the keys of a folder's config.json that ``read_config`` refuses unless they are ignored."""
    given = read_json(file_inside(Path(folder), CONFIG, str(folder)))
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
