"""The published transformers by name, and small ones for a laptop, from ``presets.toml``."""

import re
import tomllib
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxpar.models.transformer.config import Experts, TransformerConfig, balance_of_aux_loss
from jaxpar.models.transformer.rope import Rope, RopeScaling

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

# Published models whose blocks are others, and what is missing.
REFUSED = {
    "deepseek-v3": "multi-head latent attention (MLA), DeepSeek's own, is not among the transformer's kinds of attention",
}


MOST_PARTS = 12  # of a name that is looked for
MANY_LETTERS = 3  # of the beginning of a name, which fewer do not tell


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model or family: its own, and those of the family that it is like, also within a group."""
    if "like" not in given:
        return given
    found = dict(_fields(_TABLE["families"][given["like"]]))
    for name, value in given.items():
        found[name] = found.get(name, {}) | value if isinstance(value, dict) else value
    del found["like"]
    return found


def _config(given: dict[str, Any]) -> TransformerConfig:
    shape = _fields(given)
    if "rope" in shape:
        shape["rope"] = _rope(shape["rope"])
    if "experts" in shape:
        shape["experts"] = _experts(shape["experts"], shape["num_layers"])
    return TransformerConfig(**shape)


def _rope(given: dict[str, Any]) -> Rope:
    own = dict(given)
    if "scaling" in own:
        own["scaling"] = RopeScaling(**own["scaling"])
    return Rope(**own)


def _experts(given: dict[str, Any], num_layers: int) -> Experts:
    own = dict(given)
    coefficient = own.pop("router_aux_loss_coef", None)
    experts = Experts(**own)
    if coefficient is None:
        return experts
    balance = balance_of_aux_loss(
        coefficient, experts.per_token, num_layers - experts.num_dense_layers
    )
    return replace(experts, balance_coefficient=balance)


PRESETS = {name: _config(given) for name, given in _TABLE["models"].items()}


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Returns a published config by its name, with some fields changed.

    Args:
        name: One of ``PRESETS``.
        **changes: Fields of ``TransformerConfig`` to change, such as ``compute_dtype`` or ``vocab_multiple``. Those of its
            experts are changed by ``with_experts``.
    """
    if name not in PRESETS:
        why = REFUSED.get(name, "there is no transformer of this name")
        near = "" if name in REFUSED else _near(name)
        raise ValueError(f"{why}; got {name!r}. {near}Choose from {', '.join(PRESETS)}.")
    return replace(PRESETS[name], **changes)


def _near(name: str) -> str:
    """Returns a question for the preset that a name of a hub or a misspelt one means; "" if there is none.

    >>> _near("meta-llama/Llama-3.1-8B"), _near("t5")
    ("Did you mean 'llama3.1-8b'? ", '')
    >>> _near("llama3-8b-instruct"), _near("unsloth/Meta-Llama-3-8B-bnb-4bit"), _near("olmoe")
    ("Did you mean 'llama3-8b'? ", "Did you mean 'llama3-8b'? ", "Did you mean 'olmoe-1b-7b'? ")
    """
    plain = lambda text: re.sub(r"[^a-z0-9.]", "", text.lower())
    known = {plain(each): each for each in PRESETS}
    own, *inner = map(plain, _spans(name.rpartition("/")[2]))
    near = get_close_matches(own, known, 1, cutoff=0.8)
    for part in inner:
        near = near or get_close_matches(part, known, 1, cutoff=0.9)
    longer = [each for each in known if len(own) > MANY_LETTERS and each.startswith(own)]
    near = near or longer
    return f"Did you mean {known[near[0]]!r}? " if near else ""


def _spans(name: str) -> list[str]:
    """Returns a name and its parts, the longest first: without "-instruct", "-hf" or "Meta-", say."""
    parts = re.split("[-_:]", name)[:MOST_PARTS]
    ends = range(len(parts) + 1)
    spans = ["".join(parts[start:end]) for start in ends for end in ends if start < end]
    return [name, *sorted(spans, key=len, reverse=True)]
