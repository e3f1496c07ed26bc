"""Converts config.json to a TransformerConfig and back. Settings that are not modelled are refused by name."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.huggingface.folder import CONFIG
from jaxpar.huggingface.keys import KEYS, LLAMA_KEYS, NEUTRAL, ONLY, SLICED_SUMS, TOKENS
from jaxpar.huggingface.untrusted import brief, file_inside, read_json, shorten
from jaxpar.models.transformer import TransformerConfig
from jaxpar.runtime.printable import printable

MAX_SIZE = 2**24
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
            position.
    """
    path = file_inside(Path(folder), CONFIG, str(folder))
    given = read_json(path)
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise ValueError(
            f"model_type must be one of {', '.join(KEYS)}; got {brief(kind)} in {path}. Others are not modelled."
        )
    family, read = KEYS[kind], _Reader(given, KEYS[kind].defaults, path)
    _check_ignore(kind, ignore)
    _check_only(kind, given, path)
    _check_unmodelled(kind, given, ignore, path)
    fields: dict[str, Any] = {field: read.size(*keys) for field, keys in family.sizes.items()}
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields["num_kv_heads"] = None
    fields |= family.fixed
    fields |= {"tied": read.flag("tie_word_embeddings"), "norm_epsilon": read.positive(family.epsilon)}
    fields |= {"tokens": given.get(TOKENS), "ignored": _kept(kind, given, ignore)}
    if kind == "llama":
        fields |= _read_llama(read, fields)
    return replace(TransformerConfig(**fields), **changes)


def _keys_read(kind: str) -> set[str]:
    """Returns the keys that define the model."""
    family = KEYS[kind]
    found = {key for keys in family.sizes.values() for key in keys} | set(ONLY) | set(family.only)
    return found | {"model_type", "tie_word_embeddings", family.epsilon} | (LLAMA_KEYS if kind == "llama" else set())


def _check_ignore(kind: str, ignore: Sequence[str]) -> None:
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of keys; got {ignore!r}. Give ignore=({ignore!r},).")
    if wrong := sorted(_keys_read(kind).intersection(ignore)):
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
    known = _keys_read(kind) | NEUTRAL | family.neutral | set(family.dropouts)
    return found | {key: value for key, value in given.items() if key not in known and value is not None}


def _kept(kind: str, given: dict[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the ignored keys that are present, or that have an effect by default."""
    there = KEYS[kind].dropouts | given
    return {key: _or(there[key], KEYS[kind].dropouts.get(key)) for key in ignore if key in there}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _read_llama(read: "_Reader", fields: dict[str, Any]) -> dict[str, Any]:
    path = read.path
    head_dim, own = read.given.get("head_dim"), fields["embed_dim"] // fields["num_heads"]
    if head_dim not in (None, own):
        raise ValueError(
            f"head_dim of a llama must be hidden_size / num_attention_heads, {own}; got {brief(head_dim)} in {path}. Others "
            "are not modelled."
        )
    biases = tuple(read.flag(key, default=False) for key in ("attention_bias", "mlp_bias"))
    if len(set(biases)) > 1:
        raise ValueError(
            f"a llama must have all biases or none; got attention_bias={biases[0]}, mlp_bias={biases[1]} in {path}. Others are "
            "not modelled."
        )
    return {"biases": biases[0], "rope_theta": _read_rope(read)}


def _read_rope(read: "_Reader") -> float:
    """Returns the base of the wavelengths: a key at the top level up to transformers 4, in rope_parameters since."""
    theta, path = read.positive("rope_theta", default=10_000.0), read.path
    for key in ("rope_scaling", "rope_parameters"):
        rope = read.given.get(key)
        rope = {} if rope is None else rope
        if not isinstance(rope, dict):
            raise ValueError(f"{key} must be an object; got {brief(rope)} in {path}. Correct it.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        others = {name for name, value in rope.items() if value is not None} - {"rope_type", "type", "rope_theta"}
        if kind != "default" or others:
            raise ValueError(
                f"{key} must be of the type 'default': positions that are scaled are not modelled; got {brief(rope)} in {path}."
                " Choose a model of plain RoPE."
            )
        theta = _Reader(rope, {}, path).positive("rope_theta", default=theta)
    return theta


@dataclass(frozen=True)
class _Reader:
    """Reads values and checks their types."""

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    path: Path

    def size(self, *keys: str) -> int | None:
        """Returns a size, by the first of its keys that is present; all that are present must agree."""
        found = {key: self.given[key] for key in keys if self.given.get(key) is not None}
        for key, value in found.items():
            self._check(key, value, type(value) is int and 0 < value <= MAX_SIZE, f"an integer from 1 to {MAX_SIZE}")
        if len(set(found.values())) > 1:
            raise ValueError(f"keys of one meaning must agree; got {found} in {self.path}. Correct one.")
        if not found and keys[0] not in self.defaults:
            raise ValueError(f"config.json must have {keys[0]}; got nothing in {self.path}. Download it again.")
        return next(iter(found.values()), self.defaults.get(keys[0]))

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Returns a boolean."""
        return self._value(key, default, lambda value: isinstance(value, bool), "true or false")

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        right = lambda value: type(value) in (int, float) and 0 < value < 1e300
        return float(self._value(key, default, right, "a positive number"))

    def _value(self, key: str, default: Any, right: Callable[[Any], bool], rule: str) -> Any:
        value = self.given.get(key)
        value = self.defaults.get(key, default) if value is None else value
        self._check(key, value, right(value), rule)
        return value

    def _check(self, key: str, value: Any, right: bool, rule: str) -> None:
        if not right:
            raise ValueError(f"{key} must be {rule}; got {brief(value)} in {self.path}. Correct it.")


def family_of(config: TransformerConfig) -> str:
    """Returns the family of a model; raises ValueError if transformers has no such family."""
    kind = {"learned": "gpt2", "rope": "llama", "alibi": "bloom"}[config.positions]
    wanted = dict(KEYS[kind].fixed)
    wrong = {name: getattr(config, name) for name in wanted if getattr(config, name) != wanted[name]}
    if kind != "llama" and config.group_size > 1:
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


def config_json(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Returns the contents of a model's ``config.json``, for transformers 4 and above.

    Args:
        config: The model.
        dtype: NumPy's name for the dtype of its params.
    """
    kind = family_of(config)
    family = KEYS[kind]
    found: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # only the tokenizer knows them
    found |= dict.fromkeys(family.dropouts, 0.0) | dict(config.ignored)
    found |= {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype}
    found |= {keys[0]: getattr(config, field) for field, keys in family.sizes.items()}
    found |= {family.epsilon: config.norm_epsilon, "tie_word_embeddings": config.tied}
    if config.tokens is not None:
        found |= {TOKENS: config.tokens}
    if kind == "gpt2":
        found |= {"activation_function": "gelu_new"}
    if kind == "llama":
        found |= {"num_key_value_heads": config.kv_heads, "intermediate_size": config.hidden_dim, "hidden_act": "silu"}
        found |= {"head_dim": config.head_dim, "attention_bias": config.biases, "mlp_bias": config.biases}
        found |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    return found
