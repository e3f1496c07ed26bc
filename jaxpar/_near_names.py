"""Errors for attributes that a module does not have, with the name that is meant and where it is."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import ModuleType

# What other libraries and textbooks call it, by our names.
OTHER_NAMES = {
    "squared_error": ("mse", "mseloss", "meansquarederror", "l2loss"),
    "softmax_cross_entropy": (
        "crossentropyloss",
        "nllloss",
        "softmaxcrossentropywithintegerlabels",
    ),
    "value_and_grad": ("grad",),
    "make_train_step": ("trainstep", "makestep"),
    "make_mesh": ("mesh", "devicemesh", "createmesh"),
}
CUTOFF = 0.72  # of difflib's ratio


def public_names(module: ModuleType) -> list[str]:
    """Returns the names that a module has for users: ``__all__``, or else what it defines itself."""
    listed = vars(module).get("__all__")
    own = lambda value: getattr(value, "__module__", None) == module.__name__
    return sorted(
        listed
        or (name for name, value in vars(module).items() if not name.startswith("_") and own(value))
    )


def no_attribute(module: str, name: str, places: Mapping[str, str]) -> AttributeError:
    """Returns the error of a module without an attribute; it names the nearest of the known names.

    Args:
        module: The module's name.
        name: The attribute.
        places: For each known name, where it is, such as ``jaxpar.losses.squared_error``.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # looked for by other programs, not by people
        return AttributeError(message)
    plain = lambda text: text.lower().replace("_", "")
    meant = {plain(known): known for known in places}
    meant |= {
        other: known for known, others in OTHER_NAMES.items() if known in places for other in others
    }
    near = get_close_matches(plain(name), sorted(meant), 1, CUTOFF)
    return AttributeError(f"{message}. Did you mean {places[meant[near[0]]]}?" if near else message)
