"""Reads a model's params from the tensors of its folder, directly onto a mesh.

    memory-mapped tensors --slice, cast--> one device's shard of one param --> that device

A host reads only the bytes that its own devices need, and holds one such shard at a time.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.huggingface.config import family_of
from jaxpar.huggingface.folder import open_folder
from jaxpar.huggingface.tensor_file import FLOATS
from jaxpar.huggingface.tensor_names import HEAD, Family, Piece, family_of_names, specs_of, tensors_of
from jaxpar.huggingface.untrusted import shorten
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.params import ParamSpec, is_spec
from jaxpar.runtime.coordination import check_agreement

Index = tuple[slice, ...]
Tensors = dict[str, np.ndarray]


def read_params(
    folder: Path | str, config: TransformerConfig, shardings: PyTree | None = None, *, dtype: Any = "float32"
) -> PyTree:
    """Returns the params in a folder, with the structure of ``transformer.param_table(config)``; every process must call it.

    Args:
        folder: A folder as ``transformers`` writes it, of the model with or without its head.
        config: The model, from ``read_config``. Rows that ``vocab_multiple`` adds are zeros.
        shardings: A sharding for each param, or one for all; by default all params are on the first device.
        dtype: The dtype of the params, whatever that of the files: float32, which training needs, bfloat16 or float16.

    Raises:
        FileNotFoundError: The folder has no safetensors.
        ValueError: A file is damaged or foreign; a tensor is missing, unknown, of another shape or not floating-point; or a
            tied model has a head that differs from its embedding.
    """
    folder, specs = Path(folder), specs_of(config)
    dtype = check_dtype(dtype)
    family = family_of_names(family_of(config))
    tensors = _with_prefix(open_folder(folder), family)
    _check_tensors(tensors, config, family, folder)
    about = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}
    check_agreement("read a model", {"tensors": hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()})
    pieces = family.pieces(config)
    treedef = jax.tree.structure(param_table(config), is_leaf=is_spec)
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    is_one = isinstance(shardings, jax.sharding.Sharding)
    if not is_one and jax.tree.structure(shardings) != treedef:
        raise ValueError(
            f"shardings must have the structure of the params; got {jax.tree.structure(shardings)} for {treedef}. Make them "
            "with jaxpar.shardings_from_dims(transformer.param_table(config), mesh, rules)."
        )
    where = [shardings] * len(specs) if is_one else jax.tree.leaves(shardings)
    params = []
    for (path, spec), sharding in zip(specs.items(), where, strict=True):
        block = lambda index, path=path, spec=spec: read_block(tensors, pieces[path], spec, index, dtype)
        params.append(_on_devices(spec.full_shape, sharding, block))
    return treedef.unflatten(params)


def _on_devices(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, block: Callable[[Index], np.ndarray]
) -> jax.Array:
    """Puts each shard of an array on the devices that hold it, with one shard on the host at a time."""
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ends = tuple(at.indices(size)[:2] for at, size in zip(index or (), shape, strict=True))
        holders.setdefault(ends, []).append(device)
    parts = []
    for ends, devices in holders.items():
        host = block(tuple(slice(*at) for at in ends))
        parts += jax.block_until_ready([jax.device_put(host, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def read_block(tensors: Tensors, pieces: Sequence[Piece], spec: ParamSpec, index: Index, dtype: np.dtype) -> np.ndarray:
    """Returns a part of a param on the host; no other bytes are read.

    Args:
        tensors: The tensors, by name.
        pieces: The pieces of the param.
        spec: The param.
        index: The part to read; if layers are stacked, the first slice is over layers.
        dtype: The dtype of the result.
    """
    block = np.zeros([at.stop - at.start for at in index], dtype)
    is_stacked = spec.num_layers is not None
    layers, within = (range(index[0].start, index[0].stop), index[1:]) if is_stacked else ((0,), index)
    for i, layer in enumerate(layers):
        target = block[i] if is_stacked else block
        for piece in pieces:
            region = piece.region(spec)
            both = [slice(max(r.start, w.start), min(r.stop, w.stop)) for r, w in zip(region, within, strict=True)]
            if all(at.start < at.stop for at in both):
                source = piece.to_param(spec, tensors[piece.name.format(layer)])
                target[_relative(both, within)] = source[_relative(both, region)]
    return block


def _relative(index: Sequence[slice], to: Sequence[slice]) -> Index:
    return tuple(slice(at.start - base.start, at.stop - base.start) for at, base in zip(index, to, strict=True))


def _with_prefix(tensors: Tensors, family: Family) -> Tensors:
    """Returns the tensors under their names in a model with its head."""
    if any(name.startswith(family.prefix) for name in tensors):
        return tensors
    return {name if name == HEAD else family.prefix + name: tensor for name, tensor in tensors.items()}


def _check_tensors(tensors: Tensors, config: TransformerConfig, family: Family, folder: Path) -> None:
    specs = specs_of(config)
    if config.num_layers > len(tensors):  # else the names below could be unlimited
        raise ValueError(
            f"each layer of a model must have tensors; got num_layers={config.num_layers}, {len(tensors)} tensors in {folder}. "
            "Read the config of the same folder."
        )
    wanted = {name: piece.shape(specs[path]) for name, (path, _, piece) in tensors_of(config, family)}
    if missing := sorted(set(wanted) - set(tensors)):
        raise ValueError(
            f"a folder must hold every tensor of its model; got none for {shorten(missing)} in {folder}. Read the config of "
            "the same folder, or download it again."
        )
    known = re.compile(re.escape(family.prefix) + family.not_params)
    is_spare_head = lambda name: config.tied and name == HEAD
    if unknown := sorted(n for n in set(tensors) - set(wanted) if not known.fullmatch(n) and not is_spare_head(n)):
        raise ValueError(
            f"every tensor must belong to the model; got {shorten(unknown)} in {folder}, which are not in a "
            f"{family_of(config)}. Read the config of the same folder; another architecture is not modelled."
        )
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype not in FLOATS.values():
            raise ValueError(
                f"a tensor must be floats of the shape that the model has; got {tensor.dtype}{list(tensor.shape)} for {name!r} "
                f"in {folder}, where the model has {list(shape)}. Read the config of the same folder."
            )
    if config.tied and HEAD in tensors:
        _check_same(tensors[family.prefix + family.tokens], tensors[HEAD], folder)


def _check_same(tokens: np.ndarray, head: np.ndarray, folder: Path) -> None:
    rows = range(0, len(tokens), 1024)  # in blocks: these are the largest tensors
    is_same = tokens.shape == head.shape and tokens.dtype == head.dtype
    if not is_same or not all(np.array_equal(tokens[i : i + 1024], head[i : i + 1024]) for i in rows):
        raise ValueError(
            f"a tied model's head must be its embedding; got {HEAD!r} that differs in {folder}. Read the config with "
            "tied=False to keep both."
        )


def check_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of params; raises ValueError if safetensors, or JAX as configured, does not support it."""
    dtype = np.dtype(dtype)
    if dtype not in FLOATS.values() or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"params must be float32, bfloat16 or float16, or float64 where jax_enable_x64 is set; got {dtype}. Choose "
            "float32."
        )
    return dtype
