"""Which keys of a config.json a TransformerConfig models: the others are refused by name, unless they are ignored."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.fields import arg
from jaxpar.huggingface.families import FAMILIES, Family
from jaxpar.huggingface.folder import CONFIG, Reader, brief, file_inside, read_json, shorten
from jaxpar.runtime.output import printable

MAX_NAMED = 32  # keys that a message names
# With these BLOOM adds the products of each slice separately, as that many shards would, which rounds differently.
SLICED_SUMS = ("pretraining_tp", "slow_but_exact")
WINDOW_KEYS = ("use_sliding_window", "layer_types")
FULL, SLIDING = "full_attention", "sliding_attention"


def check_keys(kind: str, read: Reader, ignore: Sequence[str]) -> None:
    """Raises for keys that change a model in a way that is not modelled, and for those that cannot be ignored.

    Args:
        kind: The type of the model.
        read: The keys.
        ignore: Those to ignore.
    """
    _check_not_quantized(read)
    _check_ignore(kind, ignore)
    _check_only(kind, read)
    _check_layer_types(read)
    _check_attend_alike(kind, read, ignore)
    _check_unmodelled(kind, read, ignore)


def unmodelled_keys(folder: Path | str) -> tuple[str, ...]:
    """Returns the keys of a folder's config.json that ``read_config`` refuses unless they are ignored."""
    kind, given = read_keys(file_inside(folder, CONFIG))
    return tuple(_unmodelled(kind, given)) if kind in FAMILIES else ()


def dropout_keys(folder: Path | str) -> tuple[str, ...]:
    """Returns those of ``unmodelled_keys`` that change training alone."""
    kind, _ = read_keys(file_inside(folder, CONFIG))
    return tuple(key for key in unmodelled_keys(folder) if key in FAMILIES[kind].dropouts)


def read_keys(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the type of a model, "" if it is none, and the keys of its config.json, with dropout that it has by default."""
    given = read_json(path)
    kind = given.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    dropouts = FAMILIES[kind].dropouts if kind in FAMILIES else {}
    return kind, dropouts | {
        key: value for key, value in given.items() if value is not None or key not in dropouts
    }


def _check_not_quantized(read: Reader) -> None:
    """Raises for weights that are integers of another program already."""
    if found := read.given.get("quantization_config"):
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise ValueError(
            f"the weights of a model's folder must not be quantised; got a quantization_config, {brief(method or found)}, in "
            f"{read.path}. Name the folder that it was made from; {arg(quantize='nf4')} beside {arg('lora_rank')} trains it in "
            "four bits."
        )


def _check_ignore(kind: str, ignore: Sequence[str]) -> None:
    if isinstance(ignore, str):
        raise TypeError(
            f"ignore must be a sequence of keys; got {ignore!r}. Give ignore=({ignore!r},)."
        )
    if wrong := sorted(FAMILIES[kind].keys.intersection(ignore).difference(WINDOW_KEYS)):
        raise ValueError(
            f"a key that defines the model cannot be ignored; got {shorten(wrong)} for {kind}. Leave it out of ignore."
        )


def _check_only(kind: str, read: Reader) -> None:
    for key, allowed in FAMILIES[kind].only.items():
        value = read.given.get(key)
        if value is not None and not any(
            value == one and type(value) is type(one) for one in allowed
        ):
            raise ValueError(
                f"{key} of {kind} must be {' or '.join(map(repr, allowed))}; got {brief(value)} in {read.path}. Others are "
                "not modelled."
            )


def _check_layer_types(read: Reader) -> None:
    """Raises for layers of a kind that is not modelled, which cannot be ignored: they have other params."""
    given = read.given.get("layer_types") or []
    kinds = given if isinstance(given, list) else [given]
    if wrong := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        layers = [number for number, kind in enumerate(kinds) if kind == wrong[0]]
        raise ValueError(
            f"layer_types must be a list of {FULL} or {SLIDING}, whose layers are modelled; got {brief(wrong[0])} for layers "
            f"{shorten(layers)} of {len(kinds)} in {read.path}. Choose a model without such layers."
        )


def _check_attend_alike(kind: str, read: Reader, ignore: Sequence[str]) -> None:
    """Raises where some layers have a window and others have none, unless the window is to be ignored."""
    key = _key_of_windows(FAMILIES[kind], read.given)
    if key is None or {*WINDOW_KEYS}.intersection(ignore):
        return
    cause = (
        "layer_types" if isinstance(read.given.get("layer_types"), list) else "max_window_layers"
    )
    size = read.given.get("sliding_window", FAMILIES[kind].defaults.get("sliding_window"))
    raise ValueError(
        f"the layers of {kind} must all attend within a window, or all without one; got some of each, by "
        f"{cause}={brief(read.given.get(cause))}, in {read.path}. The window, {brief(size)} tokens, changes nothing in "
        f"sequences that are no longer: for these ignore it, by {_ignoring([*ignore, key])}."
    )


def _key_of_windows(family: Family, given: Mapping[str, Any]) -> str | None:
    """Returns the key by which the windows of some layers are ignored; None where all layers attend alike."""
    if len(kinds_of_attention(family, given)) == 1:
        return None
    return next(key for key in WINDOW_KEYS if key in family.more)


def _check_unmodelled(kind: str, read: Reader, ignore: Sequence[str]) -> None:
    refused = {
        key: value for key, value in _unmodelled(kind, read.given).items() if key not in ignore
    }
    if not refused:
        return
    got = ", ".join(
        f"{printable(key[:80])}={brief(value)}" for key, value in list(refused.items())[:3]
    )
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    names = [*ignore, *refused]
    remedy = (
        f"give {_ignoring(names)}"
        if len(names) <= MAX_NAMED and all(len(name) <= 80 and name.isprintable() for name in names)
        else "name them in ignore"
    )
    raise ValueError(
        f"every key of {kind}'s config.json must be known and modelled, since any may change the model or its training, as "
        f"dropout would; got {got}{more} in {read.path}. To ignore them, {remedy}: write_model writes them back unchanged."
    )


def _ignoring(names: Sequence[str]) -> str:
    """Returns how keys are ignored, in a program and in a command."""
    return f"ignore={tuple(names)!r}, or --ignore-config-keys {shlex.join(names)}"


def _unmodelled(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not modelled, by key: dropout, sums in another order, and unknown keys."""
    family = FAMILIES[kind]
    shares = {key: given[key] for key in family.dropouts}
    found = {
        key: share for key, share in shares.items() if type(share) not in (int, float) or share != 0
    }
    if (
        kind == "bloom"
        and given.get("slow_but_exact")
        and given.get("pretraining_tp") not in (None, 1)
    ):
        found |= {key: given[key] for key in SLICED_SUMS}
    if key := _key_of_windows(family, given):
        found[key] = given.get(key)
    known = family.keys | family.neutral | set(family.dropouts)
    return found | {
        key: value for key, value in given.items() if key not in known and value is not None
    }


def kinds_of_attention(family: Family, given: Mapping[str, Any]) -> set[str]:
    """Returns the kinds of attention of a model's layers. Only those of one kind are modelled."""
    if "sliding_window" not in family.more or given.get("sliding_window", "default") is None:
        return {FULL}
    if "use_sliding_window" in family.more and given.get("use_sliding_window") is not True:
        return {FULL}
    told = _kinds_by_layer(family, given)
    return told | {SLIDING} if family.every_layer_slides or not told else told


def _kinds_by_layer(family: Family, given: Mapping[str, Any]) -> set[str]:
    """Returns the kinds that keys name for the layers of a model with a window; none if no key does."""
    if isinstance(types := given.get("layer_types"), list):
        return set(map(str, types))
    default = None if family.every_layer_slides else 28
    layers, whole = given.get("num_hidden_layers"), given.get("max_window_layers", default)
    if "max_window_layers" not in family.more or type(layers) is not int or type(whole) is not int:
        return set()
    return {FULL if layer < whole else SLIDING for layer in (0, layers - 1)}
