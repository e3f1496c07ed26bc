"""Writes a model's params as a folder that transformers reads.

    one layer of one param --gathered, cast--> its tensors --> model-00001-of-00002.safetensors, ...

One layer of a param is gathered at a time, and the first process, which writes, holds the tensors of one file.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.huggingface.config import config_json, family_of
from jaxpar.huggingface.folder import CONFIG, INDEX, ONE_FILE
from jaxpar.huggingface.names import FAMILIES, ParamSlice, specs_of, tensors_of
from jaxpar.huggingface.params import check_dtype
from jaxpar.huggingface.untrusted import shorten
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.packed import check_unpacked
from jaxpar.params import ParamSpec, abstract_params
from jaxpar.runtime.coordination import exchange
from jaxpar.shard_map import take_layer
from jaxpar.sharding import fetch, path_string

WRITE_SECONDS = 3600.0  # for the last file to reach the disk, while the other processes wait


def write_model(
    folder: Path | str,
    config: TransformerConfig,
    params: PyTree,
    *,
    dtype: Any = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes params as a folder that ``transformers``' ``from_pretrained`` reads; every process must call it.

    It writes no tokenizer files: copy them from the original. ``config.json`` contains the keys that ``read_config`` ignored,
    unchanged. It is written last, so a folder that has one is complete.

    Args:
        folder: A folder without a model, created if needed; the first process writes to it.
        config: The model, of the family of GPT-2, Llama or BLOOM.
        params: Its params, on the host or on a mesh.
        dtype: The dtype to write; by default that of the params.
        max_file_bytes: If the tensors take more, they are distributed over several files. A file is larger than this only if
            it holds a single tensor.

    Raises:
        ImportError: The extra ``hf`` is not installed.
        TypeError: The params are packed for a pipeline.
        ValueError: The model is of none of the three families, the params are not its params, or the folder has a model.
    """
    folder, specs = Path(folder), specs_of(config)
    about = config_json(config, "")
    from jaxpar.checkpoint.export import load_save_file  # here, since it imports Orbax

    save_file, leaves = load_save_file(), _check_params(config, params)
    dtype = _check_one_dtype(leaves, dtype)
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be positive; got {max_file_bytes}. Leave it out for 5 GB.")
    _check_no_model(folder)
    files = _share_out(config, specs, dtype, max_file_bytes)
    is_first = jax.process_index() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
    for name, slices in files.items():
        tensors = {}
        for tensor, layer in _gather(leaves, slices):
            path, _, piece = slices[tensor]
            if is_first:
                tensors[tensor] = piece.to_tensor(specs[path], layer).astype(dtype)
        if is_first:
            _replace(folder / name, lambda path, tensors=tensors: save_file(tensors, path, {"format": "pt"}))
    if is_first:
        if len(files) > 1:
            _write_json(folder / INDEX, _index(files, specs, dtype))
        _write_json(folder / CONFIG, about | {"torch_dtype": dtype.name})
    exchange("model written", None, timeout_seconds=WRITE_SECONDS)


def _check_params(config: TransformerConfig, params: PyTree) -> dict[str, Any]:
    check_unpacked(params)
    found = {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    wanted = jax.tree_util.tree_leaves_with_path(abstract_params(param_table(config)))
    shapes = {path_string(path): leaf.shape for path, leaf in wanted}
    got = {path: np.shape(leaf) for path, leaf in found.items()}
    if got != shapes:
        wrong = sorted(path for path in {**got, **shapes} if got.get(path) != shapes.get(path))
        path = wrong[0]
        raise ValueError(
            f"params must be those of the model; got {got.get(path, 'none')} for {path}, where the model has "
            f"{shapes.get(path, 'none')}. Give the config that they were made with."
        )
    return {path: found[path] for path in shapes}


def _check_one_dtype(leaves: dict[str, Any], dtype: Any) -> np.dtype:
    own = {np.dtype(leaf.dtype) for leaf in leaves.values()}
    if dtype is None and len(own) > 1:
        raise ValueError(
            f"params must be of one dtype, or be written as one; got {', '.join(sorted(map(str, own)))}. Give dtype."
        )
    return check_dtype(own.pop() if dtype is None else dtype)


def _check_no_model(folder: Path) -> None:
    there = sorted(folder.iterdir()) if folder.exists() else []
    own = [path.name for path in there if path.name == CONFIG or ".safetensors" in path.name]
    if found := exchange("model to write", own)[0]:  # of the first process, which may be ahead of the others
        raise ValueError(
            f"a model is written to a folder without one; got {folder} with {shorten(found)}. Name another, or empty it."
        )


Files = dict[str, dict[str, ParamSlice]]


def _share_out(config: TransformerConfig, specs: dict[str, ParamSpec], dtype: np.dtype, max_file_bytes: int) -> Files:
    """Returns the tensors of each file, in the order of the layers."""
    parts: list[dict[str, ParamSlice]] = [{}]
    room = max_file_bytes
    for tensor, param_slice in tensors_of(config, FAMILIES[family_of(config)]):
        size = _num_bytes(param_slice, specs, dtype)
        if size > room and parts[-1]:
            parts.append({})
            room = max_file_bytes
        parts[-1][tensor] = param_slice
        room -= size
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _num_bytes(param_slice: ParamSlice, specs: dict[str, ParamSpec], dtype: np.dtype) -> int:
    path, _, piece = param_slice
    return int(np.prod(piece.shape(specs[path]), dtype=np.int64)) * dtype.itemsize


def _index(files: Files, specs: dict[str, ParamSpec], dtype: np.dtype) -> dict[str, Any]:
    size = sum(_num_bytes(param_slice, specs, dtype) for slices in files.values() for param_slice in slices.values())
    file_of = {tensor: name for name, slices in files.items() for tensor in slices}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}


def _gather(leaves: dict[str, Any], slices: dict[str, ParamSlice]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor's name and, on every host, its param, or one layer of the param if it has layers."""
    last: tuple[str, int | None] | None = None
    host = np.zeros(0)
    for tensor, (path, layer, _) in slices.items():
        if (path, layer) != last:
            leaf = leaves[path]
            if layer is not None:
                leaf = take_layer(leaf, layer) if isinstance(leaf, jax.Array) else leaf[layer]
            host, last = fetch(leaf), (path, layer)
        yield tensor, host


def _write_json(path: Path, found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=2, sort_keys=True) + "\n"
    _replace(path, lambda path: path.write_text(text))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    os.replace(partial, path)
