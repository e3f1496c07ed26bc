"""Reads a model's params from the tensors of its folder, directly onto a mesh.

    memory-mapped tensors --slice, cast--> one device's shard of one param --> that device

A host reads only the bytes that its own devices need, and holds one such shard at a time. Which tensors each param is in, and
the order of their dims, are data (`families.json`):

    transformer.h.{layer}.attn.c_attn.weight                      [embed, (qkv kv_heads head_dim)]  -> layers/attention/w_qkv
    transformer.h.{layer}.self_attention.query_key_value.weight   [(kv_heads qkv head_dim), embed]  [embed, kv_heads, qkv,
    model.layers.{layer}.self_attn.q_proj.weight, to its part qkv[:-2]                                           head_dim]
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.huggingface.config import family_of
from jaxpar.huggingface.families import FAMILIES
from jaxpar.huggingface.finite import cast, check_finite, is_finite, to_infinity, what_is_wrong
from jaxpar.huggingface.folder import FLOATS, open_folder, shorten
from jaxpar.huggingface.in_codes import holders_of, in_codes
from jaxpar.models.quantized import is_quantized
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.params import ParamSpec, is_spec
from jaxpar.runtime.coordination import check_agreement
from jaxpar.sharding import path_string

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint: a param or a part of it, or of one layer of it if layers are stacked.

    Attributes:
        name: The tensor's name, with ``{layer}`` for the number of a stacked layer.
        dims: Its dims and parts, as `families.py` describes them.
        spec: The param.
    """

    name: str
    dims: str
    spec: ParamSpec

    @cached_property
    def region(self) -> tuple[slice, ...]:
        """The index of the tensor's values in the param."""
        parts = {
            dim: slice(_end(start), _end(stop)) for dim, start, stop in _DIM.findall(self.dims)
        }
        region = []
        for dim, size in zip(self.spec.dims, self.spec.shape, strict=True):
            start, stop, _ = parts[dim].indices(size)
            region.append(slice(start, stop))
        return tuple(region)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        groups = map(names_of, split_dims(self.dims))
        return tuple(math.prod(map(self._sizes.__getitem__, group)) for group in groups)

    def to_param(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor with the param's dims, as a view of it."""
        flat = names_of(self.dims)
        apart = tensor.reshape([self._sizes[dim] for dim in flat])
        return apart.transpose([flat.index(dim) for dim in self.spec.dims])

    def to_tensor(self, param: np.ndarray) -> np.ndarray:
        """Returns the tensor that holds this part of a param, or all of it."""
        order = [self.spec.dims.index(dim) for dim in names_of(self.dims)]
        part = param[self.region].transpose(order)
        return np.ascontiguousarray(part).reshape(self.shape)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.spec.dims, sizes_of(self.region), strict=True))


_DIM = re.compile(r"(\w+)(?:\[(-?\d*):(-?\d*)\])?")


def _end(text: str) -> int | None:
    return int(text) if text else None


def sizes_of(index: Sequence[slice]) -> list[int]:
    """Returns the shape of a part of an array."""
    return [at.stop - at.start for at in index]


def split_dims(dims: str) -> list[str]:
    """Returns the text of each dim of a tensor.

    >>> split_dims("(kv_heads qkv[:-2]) embed")
    ['(kv_heads qkv[:-2])', 'embed']
    """
    return re.findall(r"\([^)]*\)|\S+", dims)


def names_of(dims: str) -> list[str]:
    """Returns the names of the param's dims in the text of a tensor's dims."""
    return [name for name, _, _ in _DIM.findall(dims)]


# The path of a param, one of its layers if it has any, and the piece that a tensor is of it.
ParamSlice = tuple[str, int | None, Piece]


def specs_of(config: TransformerConfig) -> dict[str, ParamSpec]:
    """Returns the ParamSpec of each param by its path, in the order of the tree's leaves."""
    table = param_table(replace(config, kv_copies=1))  # with copies some dims have other names
    leaves = jax.tree_util.tree_leaves_with_path(table, is_leaf=is_spec)
    return {path_string(path): spec for path, spec in leaves}


def pieces_of(config: TransformerConfig) -> dict[str, list[Piece]]:
    """Returns the pieces of each param of a model, by its path: experts have tensors of their own."""
    tensors = FAMILIES[family_of(config)].tensors
    pieces: dict[str, list[Piece]] = {}
    for path, spec in specs_of(config).items():
        layer, of = "{layer}", path
        if dense := re.fullmatch(r"outer/dense_layers/(\d+)/(.*)", path):
            layer, of = dense[1], f"layers/{dense[2]}"
        pieces[path] = []
        for name, dims in tensors[of].items():
            count = config.experts.count if config.experts and "{expert}" in name else 1
            for expert in range(count):
                own_name = name.format(layer=layer, expert=expert)
                own_dims = dims.format(
                    expert=expert, after=expert + 1, vocab_size=config.vocab_size
                )
                pieces[path].append(Piece(own_name, own_dims, spec))
    return pieces


def tensors_of(config: TransformerConfig) -> Iterator[tuple[str, ParamSlice]]:
    """Yields each tensor's name and the slice of a param that it holds: those outside layers, then layer by layer."""
    pieces = pieces_of(config)
    for layer in (None, *range(config.num_stacked_layers)):
        number = config.num_leading_layers + (layer or 0)
        for path, of_param in pieces.items():
            is_stacked = of_param[0].spec.num_layers is not None
            if is_stacked == (layer is None):
                continue
            for piece in of_param:
                yield piece.name.format(layer=number), (path, layer, piece)


Index = tuple[slice, ...]
Tensors = dict[str, np.ndarray]


def read_params(
    folder: Path | str,
    config: TransformerConfig,
    shardings: PyTree | None = None,
    *,
    dtype: Any = "float32",
) -> PyTree:
    """Returns the params in a folder, with the structure of ``transformer.param_table(config)``; every process must call it.

    Args:
        folder: A folder as ``transformers`` writes it, of the model with or without its head.
        config: The model, from ``read_config``. Rows that ``vocab_multiple`` adds are zeros.
        shardings: A sharding for each param, or one for all; by default all params are on the first device. Where it is a
            ``Quantized`` of shardings, the param is in codes, made layer by layer on the host.
        dtype: The dtype of the params, whatever that of the files: float32, which training needs, bfloat16 or float16.

    Raises:
        FileNotFoundError: The folder has no safetensors.
        ValueError: A file is damaged or foreign; a tensor is missing, unknown, of another shape or not floating-point; a weight
            is NaN, infinite, or too large for the dtype; or a tied model has a head that differs from its embedding.
    """
    folder, dtype = Path(folder), check_dtype(dtype)
    tensors = check_weights(folder, config)
    check_agreement("read a model", {"tensors": _digest(tensors)})
    treedef = jax.tree.structure(param_table(config), is_leaf=is_spec)
    params, wrong = [], {}
    each = _one_for_each(shardings, treedef)
    for (path, pieces), sharding in zip(pieces_of(config).items(), each, strict=True):

        def block(index: Index, path: str = path, pieces: list[Piece] = pieces) -> np.ndarray:
            found = read_block(tensors, pieces, index, dtype, config.num_leading_layers)
            if not is_finite(found):
                wrong.update(_not_finite(tensors, config, path, dtype))
            return found

        read = in_codes if is_quantized(sharding) else _on_devices
        params.append(read(pieces[0].spec.full_shape, sharding, block))
    check_finite(
        wrong, f"of {folder}", dtype, "The model is damaged: download it again, or name another."
    )
    return treedef.unflatten(params)


def check_weights(folder: Path | str, config: TransformerConfig) -> Tensors:
    """Returns the tensors of a folder, of which no numbers are read, with the names that the model has with its head.

    Raises:
        FileNotFoundError: The folder has no safetensors.
        ValueError: A file is damaged or foreign; a tensor is missing, unknown, of another shape or not floating-point.
    """
    folder = Path(folder)
    tensors = _with_prefix(open_folder(folder), FAMILIES[family_of(config)].prefix)
    _check_tensors(tensors, config, folder)
    return tensors


def _digest(tensors: Tensors) -> str:
    """Returns a digest of the names, dtypes and shapes of tensors."""
    about = sorted(
        (name, f"{tensor.dtype}{list(tensor.shape)}") for name, tensor in tensors.items()
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _one_for_each(shardings: PyTree | None, treedef: Any) -> list[Any]:
    """Returns the sharding of each param, from those of ``read_params``."""
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(shardings, jax.sharding.Sharding):
        return [shardings] * treedef.num_leaves
    each, structure = jax.tree.flatten(shardings, is_leaf=is_quantized)
    if structure != treedef:
        raise ValueError(
            f"shardings must have the structure of the params; got {jax.tree.structure(shardings)} for {treedef}. Make them "
            "with jaxpar.shardings_from_dims(transformer.param_table(config), mesh, rules)."
        )
    return each


def _not_finite(
    tensors: Tensors,
    config: TransformerConfig,
    path: str,
    dtype: np.dtype,
) -> dict[str, tuple[str, bool]]:
    """Returns what is wrong with each tensor of a param that is not finite as a dtype."""
    wrong = {}
    for name, (param, _, _) in tensors_of(config):
        if param == path and not is_finite(cast(tensors[name], dtype)):
            wrong[name] = what_is_wrong(tensors[name], dtype)
    return wrong


def _on_devices(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    block: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Puts each shard of an array on the devices that hold it, with one shard on the host at a time."""
    parts = []
    for ends, devices in holders_of(shape, sharding).items():
        host = block(tuple(slice(*at) for at in ends))
        own = [jax.device_put(host, device) for device in devices]
        parts += jax.block_until_ready(own)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def read_block(
    tensors: Tensors,
    pieces: Sequence[Piece],
    index: Index,
    dtype: np.dtype,
    first: int = 0,
) -> np.ndarray:
    """Returns a part of a param on the host; no other bytes are read.

    Args:
        tensors: The tensors, by name.
        pieces: The pieces of the param.
        index: The part to read; if layers are stacked, the first slice is over layers.
        dtype: The dtype of the result.
        first: The number of the first stacked layer in the names of tensors.
    """
    block = np.zeros(sizes_of(index), dtype)
    if pieces[0].spec.num_layers is None:
        _fill(block, tensors, pieces, index, first)
        return block
    stacked, *within = index
    for target, layer in zip(block, range(stacked.start, stacked.stop), strict=True):
        _fill(target, tensors, pieces, within, first + layer)
    return block


def _fill(
    target: np.ndarray,
    tensors: Tensors,
    pieces: Sequence[Piece],
    within: Sequence[slice],
    layer: int,
) -> None:
    """Writes a part of one layer of a param.

    A piece is copied where its region and the part meet, of which each of the two counts from its own start:

        param     0 1 2 3 4 5 6 7
        within        2 3 4 5        target: [2:4]
        region            4 5 6 7    source: [0:2]
    """
    for piece in pieces:
        both = []
        for region, part in zip(piece.region, within, strict=True):
            both.append(slice(max(region.start, part.start), min(region.stop, part.stop)))
        if min(sizes_of(both), default=1) < 1:
            continue
        source = piece.to_param(tensors[piece.name.format(layer=layer)])
        with to_infinity():
            target[_relative(both, within)] = source[_relative(both, piece.region)]


def _relative(index: Sequence[slice], to: Sequence[slice]) -> Index:
    relative = []
    for at, base in zip(index, to, strict=True):
        relative.append(slice(at.start - base.start, at.stop - base.start))
    return tuple(relative)


def _with_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """Returns the tensors under their names in a model with its head."""
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name == HEAD else prefix + name: tensor for name, tensor in tensors.items()}


def _check_tensors(tensors: Tensors, config: TransformerConfig, folder: Path) -> None:
    num_experts = 0 if config.experts is None else config.experts.count
    for each, count in (("layer", config.num_layers), ("expert", num_experts)):
        if count > len(tensors):  # else the names below could be unlimited
            raise ValueError(
                f"each {each} of a model must have tensors; got num_{each}s={count}, {len(tensors)} tensors in {folder}. "
                "Read the config of the same folder."
            )
    wanted = {name: piece.shape for name, (_, _, piece) in tensors_of(config)}
    if missing := sorted(wanted.keys() - tensors.keys()):
        like = next((name for name in sorted(tensors) if name.endswith(f".{missing[0]}")), None)
        there = "" if like is None else f", which has {like}"
        remedy = (
            "Read the config of the same folder, or download it again."
            if like is None
            else "Save the model itself, without the wrapper that adds to its names: that of torch.compile is _orig_mod, and "
            "peft's is merged by merge_and_unload()."
        )
        raise ValueError(
            f"a folder must hold every tensor of its model; got none for {shorten(missing)} in {folder}{there}. {remedy}"
        )
    kind = family_of(config)
    known = re.compile(FAMILIES[kind].not_params)
    others = tensors.keys() - wanted.keys()
    if config.tied:
        others -= {HEAD}
    if unknown := sorted(name for name in others if not known.fullmatch(name)):
        raise ValueError(
            f"every tensor must belong to the model; got {shorten(unknown)} in {folder}, which are not in {kind}. Read the "
            "config of the same folder; another architecture is not modelled."
        )
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype not in FLOATS.values():
            raise ValueError(
                f"a tensor must be floats of the shape that the model has; got {tensor.dtype}{list(tensor.shape)} for {name!r} "
                f"in {folder}, where the model has {list(shape)}. Read the config of the same folder."
            )
    if config.tied and HEAD in tensors:
        _check_same(tensors[pieces_of(config)["outer/tokens"][0].name], tensors[HEAD], folder)


def _check_same(tokens: np.ndarray, head: np.ndarray, folder: Path) -> None:
    is_same = tokens.shape == head.shape and tokens.dtype == head.dtype
    blocks = [
        slice(start, start + 1024) for start in range(0, len(tokens), 1024)
    ]  # these are the largest tensors
    if not is_same or not all(np.array_equal(tokens[rows], head[rows]) for rows in blocks):
        raise ValueError(
            f"a tied model's head must be its embedding; got {HEAD!r} that differs in {folder}. To keep both, write "
            f'"tie_word_embeddings": false in {folder}/config.json, or read the config with tied=False.'
        )


def check_dtype(dtype: Any, what: str = "params") -> np.dtype:
    """Returns the dtype of params; raises ValueError if safetensors, or JAX as configured, does not support it."""
    with suppress(TypeError):  # of a name that is no dtype
        dtype = np.dtype(dtype)
    is_known = dtype in FLOATS.values()
    if not is_known or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{what} must be float32, bfloat16 or float16, or float64 where jax_enable_x64 is set; got {dtype}. Choose "
            "float32."
        )
    return dtype
