"""Exports params for other programs: a safetensors file with a tensor for each path, or a tree that Orbax reads.

    export_safetensors("params.safetensors", state.params)       {"layers/w_up": [8, 64, 256], ...}
    export_orbax("params/", state.params)                        orbax.checkpoint: v1.load("params/")

Neither is specific to jaxpar: there is no manifest and no optimizer state, and layers are in canonical order. To write folders
that Hugging Face's transformers reads, use `jaxpar.huggingface`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.checkpoint import orbax_tree
from jaxpar.layered_model import is_layered
from jaxpar.pipeline import LayerLayout, open_params
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.output import needing_extra, write_atomically
from jaxpar.sharding import check_paths, fetch, path_string


def export_safetensors(
    path: Path | str,
    params: PyTree,
    *,
    layout: LayerLayout | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes params atomically as one safetensors file; every process must call it, the first one writes.

    Every process fetches all params to its host.

    Args:
        path: The file, which must not exist.
        params: Any tree of arrays; a leaf's name is its path, with slashes.
        layout: The layout that packed the params, if they are packed.
        metadata: Strings for the file's header.

    Raises:
        FileExistsError: ``path`` exists.
        TypeError: The params are packed and no layout is given, or the other way round.
        ValueError: Two params have the same path.
        ImportError: safetensors is not installed.
    """
    save_file, path = load_save_file(), Path(path)
    _check_free(path)
    open_params(params, layout)  # raises, before anything is fetched
    check_paths([path_string(where) for where, _ in jax.tree_util.tree_leaves_with_path(params)])
    leaves = jax.tree_util.tree_leaves_with_path(_canonical(fetch(params), layout))
    tensors = {
        path_string(where): np.ascontiguousarray(leaf).reshape(np.shape(leaf))
        for where, leaf in leaves
    }
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"format": "jaxpar", **(metadata or {})}
        write_atomically(path, lambda part: save_file(tensors, part, header), sync=True)
    exchange("export", True)


def export_orbax(path: Path | str, params: PyTree, *, layout: LayerLayout | None = None) -> None:
    """Writes params as a folder that ``orbax.checkpoint`` reads; every process must call it, and writes its shards.

    Args:
        path: The folder, which must not exist.
        params: Any tree of arrays.
        layout: The layout that packed the params, if they are packed.

    Raises:
        FileExistsError: ``path`` exists.
        TypeError: The params are packed and no layout is given, or the other way round.
    """
    path = Path(path).absolute()
    _check_free(path)
    open_params(params, layout)  # raises, before anything is written
    exchange("export", True)  # all processes must have checked before one starts to write
    orbax_tree.save_async(path, _canonical(params, layout))()


def _canonical(params: PyTree, layout: LayerLayout | None) -> PyTree:
    if layout is None or not is_layered(params):
        return params
    return layout.unpack_params(params)


def _check_free(path: Path) -> None:
    if path.exists():
        raise FileExistsError(
            f"an export must not replace anything; got {path}, which exists. Name another, or remove it."
        )


def load_save_file() -> Callable[..., None]:
    """Returns ``safetensors.numpy.save_file``; raises an ImportError with the remedy without the package."""
    with needing_extra("safetensors files need the package safetensors", "hf"):
        from safetensors.numpy import save_file
    return save_file
