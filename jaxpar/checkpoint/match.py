"""Checks that a checkpoint belongs to the run that restores it: same config, same arrays. Errors name the differences."""

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar.checkpoint.manifest import ArrayRecord
from jaxpar.runtime.printable import printable
from jaxpar.sharding import path_string


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config as plain JSON values; values that JSON does not support become strings."""
    return json.loads(json.dumps(dict(config), default=str, allow_nan=False))


def check_config(
    config: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, where: str, allow: Collection[str] = ()
) -> None:
    """Raises ValueError if a run's config differs from the saved one, except in the names in ``allow``."""
    if config is None or saved is None:
        return
    now = plain_json(config)
    names = [name for name in {**saved, **now} if now.get(name) != saved.get(name) and name not in allow]
    if names:
        flags = shlex.join(map(printable, names))
        got = ", ".join(f"{printable(name)}={now.get(name)!r} (saved: {saved.get(name)!r})" for name in names)
        raise ValueError(
            f"a run must continue with the config that it was saved with; got {got} for {where}. "
            f"Give the saved values, allow these to change (--allow-change {flags}, or allow={names} of restore), or "
            "start a run in another folder."
        )


def check_arrays_match(saved: Mapping[str, ArrayRecord], target: PyTree, where: str, *, cast: bool = False) -> PyTree:
    """Returns ``target`` with the saved dtypes; raises ValueError if the saved arrays do not match it.

    Args:
        saved: The arrays of the manifest, by path.
        target: ShapeDtypeStructs.
        where: The checkpoint, for the message.
        cast: Whether floating-point arrays may differ in dtype.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(target)
    wanted = {path_string(path): leaf for path, leaf in leaves}
    for path in {**wanted, **saved}:
        want, have = _say_array(wanted.get(path)), _say_array(saved.get(path))
        if want != have and not (cast and _differ_in_float(wanted.get(path), saved.get(path))):
            raise ValueError(
                f"a checkpoint must hold the arrays of the target, with their shapes and dtypes; got {want} for "
                f"{printable(path)}, saved {printable(have)}, in {where}. Use the model and optimizer that it was saved with."
            )
    stored = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(saved[path].dtype), sharding=leaf.sharding)
        for path, leaf in wanted.items()
    ]
    return jax.tree.unflatten(treedef, stored)


def _say_array(array: Any) -> str:
    return "none" if array is None else f"{array.dtype}{list(array.shape)}"


def _differ_in_float(want: Any, have: ArrayRecord | None) -> bool:
    if want is None or have is None or tuple(want.shape) != have.shape:
        return False
    return have.dtype in _FLOATS and str(want.dtype) in _FLOATS


_FLOATS = ("float64", "float32", "float16", "bfloat16")
