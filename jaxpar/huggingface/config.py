"""Converts config.json to a TransformerConfig and back. Settings that are not modelled are refused by name.

The keys of each family are in `families.json`.

**Reference**: the configuration classes of transformers 5.23. Keys of transformers 4 are read too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jaxpar.fields import arg, near_name
from jaxpar.huggingface.config_keys import (
    SLIDING,
    WINDOW_KEYS,
    check_keys,
    kinds_of_attention,
    read_keys,
)
from jaxpar.huggingface.families import (
    AUX_LOSS,
    DENSE_LAYERS,
    FAMILIES,
    HAS_AUX_LOSS,
    MAX_POSITIONS,
    REFUSED,
    ROUTER_BIAS,
    TOKENS,
    Family,
)
from jaxpar.huggingface.folder import (
    CONFIG,
    Reader,
    brief,
    check_no_adapters,
    file_inside,
    read_json,
    shorten,
)
from jaxpar.huggingface.rope import read_rope, rope_json
from jaxpar.models.transformer import Experts, TransformerConfig
from jaxpar.models.transformer.config import balance_of_aux_loss

# Fields that change no number of a forward pass in transformers, which have no key there: of Experts, and of the model.
NOT_IN_FOLDERS = (
    *("balance_coefficient", "z_coefficient", "capacity_factor"),
    *("split", "products", "exchange", "buffer"),
    *("kv_copies", "vocab_multiple", "compute_dtype", "attention", "attention_over_context"),
    "max_documents",
)
# Fields that a model of any family may have.
OF_EVERY_FAMILY = ("tied", "rope", "tokens", "ignored")


def read_config(
    folder: Path | str, *, ignore: Sequence[str] = (), **changes: Any
) -> TransformerConfig:
    """Returns the model that ``config.json`` in a folder describes.

    ``router_aux_loss_coef`` becomes the ``balance_coefficient`` of the same strength, which is not the same number
    (``balance_of_aux_loss``), and 0 where ``output_router_logits`` is not true: transformers then adds no such loss.

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
    kind, given = read_keys(path)
    if kind not in FAMILIES:
        why = f": {REFUSED[kind]}" if kind in REFUSED else ""
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}; got {brief(given.get('model_type'))} in {path}. Other model "
            f"types are not supported{why}."
        )
    family = FAMILIES[kind]
    read = Reader(given, family.defaults, path)
    check_keys(kind, read, ignore)
    found: dict[str, Any] = {
        field: read.size(*keys) for field, keys in family.sizes.items()
    } | family.fixed
    found |= {field: read.number(key) for field, key in family.numbers.items()}
    if found.get("num_kv_heads") == found["num_heads"]:
        found["num_kv_heads"] = None
    found |= {
        "tied": read.flag("tie_word_embeddings"),
        "tokens": given.get(TOKENS),
        "ignored": {key: given[key] for key in ignore if key in given},
    }
    if _is_relative(family):
        found |= _read_relative(family, read, found, ignore)
    if family.experts:
        found |= _read_experts(family, read, found)
    try:
        config = TransformerConfig(**found)
    except ValueError as error:
        raise ValueError(_in_their_words(str(error), family, path)) from error
    return replace(config, **changes)


def _in_their_words(message: str, family: Family, path: Path) -> str:
    """Returns the message about sizes that do not fit one another with the keys of a file, and its path.

    "num_heads must divide embed_dim; got num_heads=4, embed_dim=65. ..." names num_attention_heads and hidden_size.
    """
    keys = {field: keys[0] for field, keys in family.sizes.items()}
    named = re.sub(r"\b\w+\b", lambda word: keys.get(word[0], word[0]), message)
    got, stop, remedy = named.partition(". ")
    return f"{got} in {path}{stop}{remedy}"


def read_config_for(
    folder: Path, ignore_config_keys: Sequence[str], **changes: Any
) -> TransformerConfig:
    """Returns what ``read_config`` does, for a command whose flag names the keys to ignore, which must be there.

    Raises:
        ValueError: A key to ignore is not in the folder's ``config.json``; and as ``read_config``.
    """
    config = read_config(folder, ignore=ignore_config_keys, **changes)
    if absent := [key for key in ignore_config_keys if key not in config.ignored]:
        near = near_name(absent[0], read_json(folder / CONFIG))
        remedy = f"Did you mean {near}?" if near else "Leave them out."
        rule = f"{arg('ignore_config_keys')} must name keys of {folder / CONFIG}"
        raise ValueError(f"{rule}; got {shorten(absent)}, which it lacks. {remedy}")
    return config


def family_of(config: TransformerConfig) -> str:
    """Returns the type of a model in transformers; raises ValueError if transformers has none."""
    kinds = [
        kind for kind, family in FAMILIES.items() if family.fixed["positions"] == config.positions
    ]
    wanted = {kind: _mismatches(config, FAMILIES[kind]) for kind in kinds}
    has_others = lambda kind: bool(FAMILIES[kind].experts) != (config.experts is not None)
    kind = min(
        kinds, key=lambda kind: (has_others(kind), len(wanted[kind]))
    )  # the one that it is nearest to
    if wrong := wanted[kind]:
        raise ValueError(
            f"a model of positions={config.positions!r} must be like {kind} to be read or written; got "
            f"{', '.join(f'{name}={brief(got)}' for name, (got, _) in wrong.items())}. Choose "
            f"{', '.join(f'{name}={value!r}' for name, (_, value) in wrong.items())}, or keep it in a checkpoint of jaxpar."
        )
    return kind


def _mismatches(config: TransformerConfig, family: Family) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that differ from those of a family, with their values and those that they must have.

    A field that the family has no key for must have its default.
    """
    has_usual_head_dim = config.head_dim * config.num_heads == config.embed_dim
    can_be_told = {
        "biases": config.biases in (False, *family.biases),
        "experts": family.experts,
        "explicit_head_dim": "head_dim" in family.more or has_usual_head_dim,
        "mlp_dim": config.hidden_dim == 4 * config.embed_dim,
        "num_kv_heads": config.group_size == 1,
        "window": "sliding_window" in family.more,
    }
    told = {name for name, is_told in can_be_told.items() if is_told}
    told.update(family.sizes, family.numbers, family.fixed, OF_EVERY_FAMILY, NOT_IN_FOLDERS)
    defaults = {each.name: each.default for each in fields(config)} | {"biases": False}
    wanted = {name: value for name, value in defaults.items() if name not in told} | family.fixed
    pairs = {name: (getattr(config, name), value) for name, value in wanted.items()}
    if family.experts and config.experts is not None:
        pairs |= _pairs_of_experts(config.experts, family)
    return {name: (got, value) for name, (got, value) in pairs.items() if got != value}


def _pairs_of_experts(experts: Experts, family: Family) -> dict[str, tuple[Any, Any]]:
    """Returns the fields of Experts that a family has no keys for, with their values and their defaults."""
    own = {*family.experts, *family.router, *NOT_IN_FOLDERS}
    own |= {"num_dense_layers"} if DENSE_LAYERS in family.more else set()
    others = [each for each in fields(experts) if each.name not in own]
    return {f"experts.{each.name}": (getattr(experts, each.name), each.default) for each in others}


def config_json(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Returns the contents of a model's ``config.json``, for transformers 4 and above.

    Args:
        config: The model.
        dtype: NumPy's name for the dtype of its params.
    """
    kind = family_of(config)
    family = FAMILIES[kind]
    # Only the tokenizer knows them; a text of bytes ends with a zero byte.
    end = 0 if config.tokens == "bytes" else None
    found: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end}
    found |= dict.fromkeys(family.dropouts, 0.0)
    found |= {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype}
    found |= {keys[0]: getattr(config, field) for field, keys in family.sizes.items()}
    found |= {key: getattr(config, field) for field, key in family.numbers.items()}
    found["tie_word_embeddings"] = config.tied
    if config.tokens is not None:
        found |= {TOKENS: config.tokens}
    found |= {
        key: family.only[key][0]
        for key in ("activation_function", "hidden_act")
        if key in family.only
    }
    found |= (_relative_json(family, config) if _is_relative(family) else {}) | dict(config.ignored)
    return (
        found if config.experts is None else found | _experts_json(family, config, config.experts)
    )


def _is_relative(family: Family) -> bool:
    """Returns whether models of a family are relatives of Llama: they have RoPE, and so the keys below."""
    return family.fixed["positions"] == "rope"


def _read_relative(
    family: Family, read: Reader, sizes: Mapping[str, Any], ignore: Sequence[str]
) -> dict[str, Any]:
    """Returns the fields of a TransformerConfig that only Llama and its relatives have.

    Args:
        family: The family of the model.
        read: Its config.json.
        sizes: The sizes that were already read.
        ignore: Keys to ignore.
    """
    if "use_sliding_window" in family.more:
        read.flag("use_sliding_window", default=False)
    has_window = kinds_of_attention(family, read.given) == {SLIDING} and not set(
        WINDOW_KEYS
    ).intersection(ignore)
    found: dict[str, Any] = {"window": read.size("sliding_window") if has_window else None}
    if family.biases:
        own = [
            each
            for each in family.biases
            if each is not True and read.flag(f"{each}_bias", default=False)
        ]
        found["biases"] = True if len(own) == 2 else own[0] if own else False
    head_dim = (
        family.defaults.get("head_dim")
        if read.given.get("head_dim") is None
        else read.size("head_dim")
    )
    if head_dim is not None and head_dim * sizes["num_heads"] != sizes["embed_dim"]:
        found["explicit_head_dim"] = head_dim
    if read.given.get(MAX_POSITIONS) is not None:
        found["max_positions"] = read.size(MAX_POSITIONS)
    return found | {"rope": read_rope(read, sizes["max_positions"])}


def beyond_positions(config: TransformerConfig, seq: int, folder: Path | str, flag: str) -> str:
    """Returns what to say of rows that are longer than the sequences that a folder's model was trained for; "" if none are.

    RoPE has no last position: such a model computes, and its numbers may be poor. A learned table is refused elsewhere.

    Args:
        config: The model.
        seq: Tokens of a row.
        folder: Its folder.
        flag: The flag that gives ``seq``.
    """
    most = config.max_positions
    if config.positions != "rope" or seq <= most:
        return ""
    return f"{flag} {seq} is longer than the {most} positions that {folder} was trained for (max_position_embeddings)"


def _read_experts(family: Family, read: Reader, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the experts, and the keys there that have no effect: also the balance loss's, where transformers adds none."""
    own: dict[str, Any] = {field: read.size(*keys) for field, keys in family.experts.items()}
    for field, (key, default) in family.router.items():
        own[field] = (read.flag if isinstance(default, bool) else read.share)(key, default=default)
    if DENSE_LAYERS in family.more:
        own["num_dense_layers"] = _num_dense_layers(read, sizes["num_layers"])
    experts = Experts(**own, router_bias=read.flag(ROUTER_BIAS, default=False))
    coefficient = read.share(AUX_LOSS, default=0.0)
    if not read.flag(HAS_AUX_LOSS, default=False):
        unused = {AUX_LOSS: coefficient} if AUX_LOSS in read.given else {}
        return {"experts": experts, "ignored": sizes["ignored"] | unused}
    num_layers = sizes["num_layers"] - experts.num_dense_layers
    balance = balance_of_aux_loss(coefficient, experts.per_token, num_layers)
    return {"experts": replace(experts, balance_coefficient=balance)}


def _experts_json(family: Family, config: TransformerConfig, experts: Experts) -> dict[str, Any]:
    """Returns the keys for config.json that only models with experts have."""
    found = {keys[0]: getattr(experts, field) for field, keys in family.experts.items()}
    found |= {key: getattr(experts, field) for field, (key, _) in family.router.items()}
    optional = {
        "moe_intermediate_size": config.expert_hidden_dim,
        DENSE_LAYERS: [*range(experts.num_dense_layers)],
    }
    found |= {key: value for key, value in optional.items() if key in family.keys}
    if experts.balance_coefficient:
        return found | {AUX_LOSS: config.router_aux_loss_coef, HAS_AUX_LOSS: True}
    unused = config.ignored.get(AUX_LOSS, family.defaults[AUX_LOSS])
    return found | {AUX_LOSS: unused, HAS_AUX_LOSS: False}


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


def _relative_json(family: Family, config: TransformerConfig) -> dict[str, Any]:
    """Returns the keys for config.json that only Llama and its relatives have, as transformers 4 and 5 read them."""
    found: dict[str, Any] = {
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden_dim,
    }
    if config.explicit_head_dim is not None or "head_dim" in family.defaults:
        found["head_dim"] = config.head_dim
    found |= rope_json(config.rope, config.max_positions)
    is_on = config.window is not None
    optional = {
        "attention_bias": config.has_biases("out"),
        "mlp_bias": config.has_biases("mlp"),
        "sliding_window": config.window,
        "use_sliding_window": is_on,
        "max_window_layers": 0 if is_on else config.num_layers,
        "attention_multiplier": config.attention_multiplier or config.head_dim**-0.5,
    }
    return found | {key: value for key, value in optional.items() if key in family.keys}
