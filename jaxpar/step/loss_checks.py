"""The check of what a loss returns: two scalars, and with ``has_aux`` a dict of further ones; and a ``value_and_grad`` a pair.

Whether they are sums over rows, ``row_checks.py`` checks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.fields import brief
from jaxpar.layered_model import names_no_axis


def check_loss(loss: Callable, outputs: PyTree, batch: PyTree, *, has_aux: bool | None) -> None:
    """Raises unless ``loss`` returns two real scalars, and with ``has_aux`` a dict of further ones; None takes arrays too."""
    found = []
    with names_no_axis("loss"):
        jax.eval_shape(
            lambda *given: found.append(jax.tree.map(_abstract, loss(*given))), outputs, batch
        )
    (given,) = found
    count = len(given) if isinstance(given, tuple) else 1
    if count not in ((2, 3) if has_aux is None else (2 + has_aux,)) or (
        count == 2 and isinstance(given[1], dict)
    ):
        form = (
            "(loss_sum, weight_sum, sums) with has_aux=True"
            if has_aux
            else "(loss_sum, weight_sum)"
        )
        remedy = _remedy(given, count, has_aux)
        raise TypeError(
            f"loss must return the tuple {form}; got {jax.tree.map(_Told, given)}. {remedy}"
        )
    for name, value in zip(("loss_sum", "weight_sum"), given[:2], strict=True):
        if not hasattr(value, "dtype"):
            raise TypeError(
                f"loss must return two scalars; got {jax.tree.map(_Told, value)} for {name}. Return jnp.sum of "
                + (
                    "the losses of the rows."
                    if name == "loss_sum"
                    else "their weights, or their number as a float."
                )
            )
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            remedy = f"Sum it: jnp.sum({name})." if shape else f"Cast it: jnp.float32({name})."
            if jnp.issubdtype(dtype, jnp.complexfloating):
                remedy = "Sum real numbers: of a complex difference its jnp.abs(...) ** 2, say."
            raise ValueError(
                f"loss must return floating-point scalars; got {name} {dtype}{list(shape)}. {remedy}"
            )
    if count == 3:
        _check_sums(given[2], are_scalars=bool(has_aux))


def _remedy(given: PyTree, count: int, has_aux: bool | None) -> str:
    """What a loss should return in place of ``given``."""
    if count == 2 and isinstance(given[1], dict):
        sums = ", ".join(f'"{name}": {name}_sum' for name in given[1])
        return (
            f"Write: return loss_sum, weight_sum, {{{sums}}}, each a sum over the rows that loss is given, not a mean, and "
            "pass has_aux=True to value_and_grad."
        )
    if count == 3 and not has_aux:
        return "Pass has_aux=True to value_and_grad for the sums of the third, a dict, or leave it out."
    if count == 2:
        return "Return a dict of further sums too, or leave has_aux out."
    return (
        "Return the sum of the losses of the rows that it is given, one microbatch, and what to divide it by, such as the "
        "number of these rows."
    )


def _check_sums(sums: PyTree, *, are_scalars: bool) -> None:
    if not isinstance(sums, dict) or not all(isinstance(name, str) for name in sums):
        raise TypeError(
            "with has_aux=True the third value of loss must be a dict of sums by name; got "
            f'{jax.tree.map(_Told, sums)}. Write such as {{"accuracy": jnp.sum(is_right)}}.'
        )
    for name, value in sums.items() if are_scalars else ():
        if getattr(value, "shape", ()) != ():
            raise ValueError(
                f"each sum of a loss must be a scalar; got {name!r} {_Told(value)}. Sum it over the rows: jnp.sum({name}); "
                "give the numbers of several classes a name each."
            )
        dtype = getattr(value, "dtype", None)
        is_real = dtype is not None and any(
            jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, bool)
        )
        if not is_real:
            raise TypeError(
                f"each sum of a loss must be a float, an integer or a boolean; got {name!r} {jax.tree.map(_Told, value)}. "
                "Leave it out, or return its numbers, each by a name of its own."
            )


def pair_of(returned: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what a function of the form of ``value_and_grad`` has returned; raises TypeError unless that is a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        got = (
            f"a tuple of {len(returned)}"
            if isinstance(returned, tuple)
            else type(returned).__name__
        )
        raise TypeError(
            f"value_and_grad must return a loss and the gradients, a pair; got {got}. Make it with jaxpar.value_and_grad, or "
            "with jax.value_and_grad."
        )
    return returned


def _abstract(leaf: Any) -> Any:
    """The shape and dtype of an array or a number; other leaves are unchanged."""
    is_number = isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) if is_number else leaf


class _Told(str):
    """A leaf as messages print it: float32[32]."""

    def __new__(cls, leaf: Any) -> "_Told":
        is_array = isinstance(leaf, jax.ShapeDtypeStruct)
        return super().__new__(
            cls, f"{leaf.dtype}{list(leaf.shape)}" if is_array else brief(repr(leaf))
        )

    __repr__ = str.__str__
