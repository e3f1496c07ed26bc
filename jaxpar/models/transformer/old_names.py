"""What the fields of ``Experts`` and ``Rope`` were called when they were fields of ``TransformerConfig``.

Until the release after 0.1 the old names still work, as keywords and as attributes, with a DeprecationWarning that says what to
write. Then this module goes, and the decorator of ``TransformerConfig`` with it.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

Config = TypeVar("Config")

EXPERTS = {
    "num_experts": "count",
    "experts_per_token": "per_token",
    "expert_dim": "mlp_dim",
    "num_shared_experts": "num_shared",
    "num_dense_layers": "num_dense_layers",
    "num_expert_groups": "num_groups",
    "groups_per_token": "groups_per_token",
    "router_score": "router_score",
    "router_bias": "router_bias",
    "normalized_routing": "normalized_routing",
    "routed_scaling_factor": "routed_scaling_factor",
    "balance_coefficient": "balance_coefficient",
    "z_coefficient": "z_coefficient",
    "capacity_factor": "capacity_factor",
    "expert_split": "split",
    "expert_products": "products",
    "expert_exchange": "exchange",
    "expert_buffer": "buffer",
}
ROPE = {"rope_theta": "theta", "rope_scaling": "scaling"}
# What may be between a user's line and this module; jaxtyping where a hook of its own checks types.
OWN_MODULES = ("jaxpar", "dataclasses", "jaxtyping")
# The group of each old name, and the name there.
MOVED = {old: ("experts", new) for old, new in EXPERTS.items()} | {
    old: ("rope", new) for old, new in ROPE.items()
}


def accepts_old_names(*, experts: type, rope: type) -> Callable[[type[Config]], type[Config]]:
    """Returns a decorator of a dataclass with the fields ``experts`` and ``rope``, which then takes the old names too.

    Args:
        experts: The class of ``experts``, which may be None.
        rope: The class of ``rope``.
    """

    def decorated(cls: type[Config]) -> type[Config]:
        new_init = cls.__init__

        @wraps(new_init)
        def init(self: Config, **given: Any) -> None:
            old = {name: given.pop(name) for name in MOVED if name in given}
            if old:
                groups = {}
                if _of_group("experts", old):
                    groups["experts"] = _experts(experts, given.get("experts"), old)
                if of_rope := _of_group("rope", old):
                    groups["rope"] = replace(given.get("rope", rope()), **of_rope)
                _warn(f"got {_arguments(old)}", f"Write {_arguments(groups)}")
                given |= groups
            new_init(self, **given)

        def getattr_old(self: Config, name: str) -> Any:
            if name not in MOVED:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
            group, new = MOVED[name]
            _warn(f"got a read of {name}", f"Read {group}.{new}")
            # Without experts their fields had their defaults, and the number of experts was None.
            return getattr(getattr(self, group) or experts, new, None)

        patched: Any = cls
        patched.__init__, patched.__getattr__ = init, getattr_old
        return cls

    return decorated


def _of_group(group: str, old: Mapping[str, Any]) -> dict[str, Any]:
    return {MOVED[name][1]: value for name, value in old.items() if MOVED[name][0] == group}


def _experts(kind: type, base: Any, old: Mapping[str, Any]) -> Any:
    """Returns experts as old keywords change them; None where they leave the number of experts out, or give None."""
    changes = _of_group("experts", old)
    if changes.get("count", base) is not None:
        return kind(**changes) if base is None else replace(base, **changes)
    for name, new in EXPERTS.items():
        if new in changes and base is None and changes[new] != getattr(kind, new, None):
            raise ValueError(
                f"{name} is for a model with experts; got {name}={changes[new]!r} and no experts. Give "
                f"experts=Experts(count=8, {new}={changes[new]!r}), say, or leave it out."
            )
    return None


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    """Returns a group as it is constructed, with the fields alone that are not their defaults."""
    if type(value).__name__ not in ("Experts", "Rope"):
        return repr(value)
    own = {each.name: getattr(value, each.name) for each in fields(value)}
    changed = {
        each.name: own[each.name] for each in fields(value) if own[each.name] != each.default
    }
    return f"{type(value).__name__}({_arguments(changed)})"


def _warn(got: str, remedy: str) -> None:
    """Warns in the line of a user's that calls this package, also through ``dataclasses.replace``."""
    level, frame = 2, sys._getframe(1)
    while (
        frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OWN_MODULES
    ):
        level, frame = level + 1, frame.f_back
    rule = "TransformerConfig has its experts as Experts and its rotary positions as Rope"
    warnings.warn(
        f"{rule}; {got}. {remedy}. The next release drops the old names.", DeprecationWarning, level
    )
