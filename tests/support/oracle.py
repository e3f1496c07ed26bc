"""The comparison that all tests share: two trees are the same, or the failure names each leaf that differs.

The rules are checked in this order, and the first that is broken is reported, with every leaf that breaks it: one tree
structure, the same shapes, the same dtypes, finite numbers, and only then the distance. Nothing is broadcast or promoted;
a test that holds float32 against float64 casts what it wants itself (``cast``). Nothing here imports jaxpar, so that the
comparison does not depend on the code under test.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Pair(NamedTuple):
    """The leaves of two trees at one path."""

    path: str
    got: Any
    want: Any


def assert_same(got, want, *, within: float = 1e-12, floor: float = 0.0, message: str = "") -> None:
    """Fails unless each leaf of ``got`` lies within a relative L2 distance of the leaf of ``want`` at the same path.

    Leaves that hold no floats must be equal. A leaf that is zero in ``want`` must be zero in ``got`` too, unless a ``floor``
    is given: the distance is then relative to the norm of ``want`` or to the floor, whichever is larger.
    """
    __tracebackhide__ = True

    def told(got: np.ndarray, want: np.ndarray) -> str | None:
        far = _distance(got, want, floor)
        return (
            None
            if far <= within
            else f"relative L2 distance {far:.3g}, {_largest_difference(got, want)}"
        )

    _check(f"must be the same within {within:g}", _comparable(got, want, message), told, message)


def assert_same_bits(got, want, *, message: str = "") -> None:
    """Fails unless the two trees are the same to the last bit, and finite."""
    __tracebackhide__ = True
    told = lambda got, want: (
        None if got.tobytes() == want.tobytes() else _largest_difference(got, want)
    )
    _check("must be the same to the last bit", _comparable(got, want, message), told, message)


def distance(got, want, *, floor: float = 0.0, message: str = "") -> float:
    """The largest relative L2 distance over the leaves, of trees that may differ in nothing else."""
    __tracebackhide__ = True
    return float(
        np.max([_distance(pair.got, pair.want, floor) for pair in _comparable(got, want, message)])
    )


def cast(tree, dtype):
    """The tree with its floats in another dtype: what a test wants of numbers that are kept so."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(dtype) if _is_float(leaf) else leaf, tree
    )


def _comparable(got, want, message: str = "") -> list[Pair]:
    """The leaves of both trees on the host, once structure, shapes, dtypes and finiteness are checked."""
    __tracebackhide__ = True
    pairs = _paired(got, want, message)
    _check(
        "must have the same shapes",
        pairs,
        lambda got, want: _differing(np.shape(got), np.shape(want)),
        message,
    )
    _check(
        "must have the same dtypes",
        pairs,
        lambda got, want: _differing(_dtype(got), _dtype(want)),
        message,
    )
    pairs = [Pair(path, _on_host(got), _on_host(want)) for path, got, want in pairs]
    _check("must be finite", pairs, _not_finite, message)
    return pairs


def _check(
    rule: str, pairs: list[Pair], told: Callable[[Any, Any], str | None], message: str
) -> None:
    """Fails with every leaf about which there is something to tell."""
    __tracebackhide__ = True
    _fail_with(
        rule, [f"{path}: {text}" for path, got, want in pairs if (text := told(got, want))], message
    )


def _fail_with(rule: str, lines: list[str], message: str) -> None:
    __tracebackhide__ = True
    if lines:
        prefix = f"{message}: " if message else ""
        raise AssertionError("\n  ".join([f"{prefix}got and want {rule}", *lines]))


def _paired(got, want, message: str) -> list[Pair]:
    __tracebackhide__ = True
    (of_got, structure), (of_want, wanted) = _flat(got), _flat(want)
    if structure != wanted:
        of_got, of_want = dict(of_got), dict(of_want)
        lines = [f"{path}: missing in got" for path in of_want if path not in of_got]
        lines += [f"{path}: in got alone" for path in of_got if path not in of_want]
        _fail_with(
            "must have the same tree structure",
            lines or [f"got {structure}", f"want {wanted}"],
            message,
        )
    if not of_want:
        _fail_with("must have leaves, or nothing is compared", [f"got {structure}"], message)
    return [
        Pair(path, leaf, wanted) for (path, leaf), (_, wanted) in zip(of_got, of_want, strict=True)
    ]


def _flat(tree) -> tuple[list[tuple[str, Any]], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path) or "the whole", leaf) for path, leaf in leaves], structure


def _differing(got, want) -> str | None:
    return None if got == want else f"got {got}, want {want}"


def _dtype(leaf) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _on_host(leaf) -> np.ndarray:
    array = np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key) else leaf
    )
    if array.dtype == object:
        raise TypeError(
            f"a leaf must be an array or a number; got {type(leaf).__name__}. Compare it by itself."
        )
    return array


def _is_float(leaf) -> bool:
    return jnp.issubdtype(_dtype(leaf), np.inexact)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(
        np.complex128 if jnp.issubdtype(array.dtype, np.complexfloating) else np.float64
    )


def _not_finite(got: np.ndarray, want: np.ndarray) -> str | None:
    if not _is_float(want):
        return None
    counts = {"got": np.sum(~np.isfinite(_wide(got))), "want": np.sum(~np.isfinite(_wide(want)))}
    told = [
        f"{count} of {want.size} numbers of {which} are not"
        for which, count in counts.items()
        if count
    ]
    return ", ".join(told)


def _distance(got: np.ndarray, want: np.ndarray, floor: float) -> float:
    """The relative L2 distance; of leaves without floats 0 or infinity."""
    if not _is_float(want):
        return 0.0 if got.tobytes() == want.tobytes() else np.inf
    got, want = _wide(got), _wide(want)
    largest = max(np.abs(want).max(initial=0), floor)
    if largest == 0:
        return np.inf if got.any() else 0.0
    with np.errstate(
        all="ignore"
    ):  # scaled before they are squared, so that no norm vanishes; overflows are far enough
        norms = [np.linalg.norm((array / largest).ravel()) for array in (got - want, want)]
    return float(norms[0] / max(norms[1], floor / largest))


def _largest_difference(got: np.ndarray, want: np.ndarray) -> str:
    with np.errstate(all="ignore"):
        apart = np.abs(_wide(got) - _wide(want)) if _is_float(want) else got != want
    if not apart.any():
        return "in the signs of zeros"
    at = tuple(map(int, np.unravel_index(np.argmax(apart), want.shape)))
    return f"most at {at}: got {got[at]}, want {want[at]}"
