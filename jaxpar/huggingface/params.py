"""Reads a model's params from the tensors of its folder, directly onto a mesh; and which tensors each param is in.

    memory-mapped tensors --slice, cast--> one device's shard of one param --> that device

A host reads only the bytes that its own devices need, and holds one such shard at a time. The tensors of each param are plain
data, names and the order of dims:

    transformer.h.{}.attn.c_attn.weight  [embed, (qkv kv_heads head_dim)]          --> layers/attention/w_qkv
    transformer.h.{}.self_attention.query_key_value.weight                              [embed, kv_heads, qkv, head_dim]
                                         [(kv_heads qkv head_dim), embed]
    model.layers.{}.self_attn.q_proj.weight [(kv_heads qkv head_dim), embed]       --> its part qkv = 0 to the group's size

``{}`` is the number of a layer, dims in parentheses form one dim of the tensor, and their names are those of the param's
ParamSpec (`models/transformer/params.py`). GPT-2 stores weights as [in, out], like the params; Llama and BLOOM as [out, in].
Queries and keys need no permutation: Llama's RoPE, too, rotates the first half of a head against the second.

**Reference**: transformers 5.23, models/gpt2, bloom, llama, mistral, qwen2, qwen3, olmo2, mixtral, qwen3_moe and
olmoe; tests/test_huggingface_live.py checks the maps against it.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.huggingface.config import family_of
from jaxpar.huggingface.folder import FLOATS, open_folder, shorten
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.params import ParamSpec, is_spec
from jaxpar.runtime.coordination import check_agreement
from jaxpar.sharding import path_string

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint: a param or a part of it, or of one layer of it if layers are stacked.

    Attributes:
        name: The tensor's name.
        dims: Its dims.
        part: ``(dim, start, stop)``: the part of one of the param's dims that the tensor holds; None: all of the param.
    """

    name: str
    dims: str
    part: tuple[str, int, int] | None = None

    def region(self, spec: ParamSpec) -> tuple[slice, ...]:
        """Returns the index of the tensor's values in the param."""
        whole = dict(zip(spec.dims, spec.shape, strict=True))
        dim, start, stop = self.part or (None, 0, 0)
        return tuple(slice(start, stop) if name == dim else slice(0, size) for name, size in whole.items())

    def shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """Returns the tensor's shape."""
        sizes = self._sizes(spec)
        return tuple(math.prod(sizes[dim] for dim in group) for group in self.groups())

    def to_param(self, spec: ParamSpec, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor with the param's dims, as a view of it."""
        flat, sizes = [dim for group in self.groups() for dim in group], self._sizes(spec)
        return tensor.reshape([sizes[dim] for dim in flat]).transpose([flat.index(dim) for dim in spec.dims])

    def to_tensor(self, spec: ParamSpec, param: np.ndarray) -> np.ndarray:
        """Returns the tensor that holds this part of a param, or all of it."""
        flat = [dim for group in self.groups() for dim in group]
        part = param[self.region(spec)].transpose([spec.dims.index(dim) for dim in flat])
        return np.ascontiguousarray(part).reshape(self.shape(spec))

    def groups(self) -> list[list[str]]:
        """Returns the param's dims in each dim of the tensor."""
        return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", self.dims)]

    def _sizes(self, spec: ParamSpec) -> dict[str, int]:
        return {dim: at.stop - at.start for dim, at in zip(spec.dims, self.region(spec), strict=True)}


Pieces = dict[str, tuple[Piece, ...]]


@dataclass(frozen=True)
class Family:
    """The format of the checkpoints of one family of models.

    Attributes:
        prefix: The prefix of all names except the head's; checkpoints of the model without its head omit it.
        tokens: The name of the embedding.
        make_pieces: Returns the pieces of every param except tokens and head, by path.
        not_params: A pattern for other tensors in some checkpoints: masks and tables that follow from the shape.
    """

    prefix: str
    tokens: str
    make_pieces: Callable[[TransformerConfig], dict[str, Any]]
    not_params: str = r"(?!)"

    def pieces(self, config: TransformerConfig) -> Pieces:
        """Returns the pieces of every param of the model, by its path."""
        vocab = ("vocab", 0, config.vocab_size)  # checkpoints do not have the rows that pad the table
        found = {"outer/tokens": Piece(self.prefix + self.tokens, "vocab embed", vocab)} | self.make_pieces(config)
        if not config.tied:
            found["outer/head"] = Piece(HEAD, "vocab embed", vocab)
        return {path: one if isinstance(one, tuple) else (one,) for path, one in found.items()}


def _layer_norm(path: str, name: str) -> dict[str, Piece]:
    return {f"{path}/scale": Piece(f"{name}.weight", "embed"), f"{path}/shift": Piece(f"{name}.bias", "embed")}


def _linear(path: str, tensor: str, dims: str, out: str) -> dict[str, Piece]:
    """Returns the pieces of a weight, w_*, whose dims are ``dims``, and of its bias, b_*, whose dims are ``out``."""
    return {path.format("w"): Piece(f"{tensor}.weight", dims), path.format("b"): Piece(f"{tensor}.bias", out)}


def _gpt2(config: TransformerConfig) -> dict[str, Any]:
    del config
    layer, qkv = "transformer.h.{}.", "(qkv kv_heads head_dim)"
    return {
        "outer/positions": Piece("transformer.wpe.weight", "positions embed"),
        **_layer_norm("outer/norm_out", "transformer.ln_f"),
        **_layer_norm("layers/norm_1", f"{layer}ln_1"),
        **_linear("layers/attention/{}_qkv", f"{layer}attn.c_attn", f"embed {qkv}", qkv),
        **_linear("layers/attention/{}_out", f"{layer}attn.c_proj", "(heads head_dim) embed", "embed"),
        **_layer_norm("layers/norm_2", f"{layer}ln_2"),
        **_linear("layers/mlp/{}_up", f"{layer}mlp.c_fc", "embed (gate mlp)", "(gate mlp)"),
        **_linear("layers/mlp/{}_down", f"{layer}mlp.c_proj", "mlp embed", "embed"),
    }


def _bloom(config: TransformerConfig) -> dict[str, Any]:
    del config
    layer, qkv = "transformer.h.{}.", "(kv_heads qkv head_dim)"
    return {
        **_layer_norm("outer/norm_in", "transformer.word_embeddings_layernorm"),
        **_layer_norm("outer/norm_out", "transformer.ln_f"),
        **_layer_norm("layers/norm_1", f"{layer}input_layernorm"),
        **_linear("layers/attention/{}_qkv", f"{layer}self_attention.query_key_value", f"{qkv} embed", qkv),
        **_linear("layers/attention/{}_out", f"{layer}self_attention.dense", "embed (heads head_dim)", "embed"),
        **_layer_norm("layers/norm_2", f"{layer}post_attention_layernorm"),
        **_linear("layers/mlp/{}_up", f"{layer}mlp.dense_h_to_4h", "(gate mlp) embed", "(gate mlp)"),
        **_linear("layers/mlp/{}_down", f"{layer}mlp.dense_4h_to_h", "embed mlp", "embed"),
    }


def _llama(config: TransformerConfig) -> dict[str, Any]:
    """Returns the pieces of a Llama or of a relative: Mistral, Qwen2, Qwen3, OLMo 2, Mixtral, Qwen3-MoE, OLMoE."""
    layers = {"layers": _llama_layer(config, "model.layers.{}.", config.num_experts)}
    for i in range(config.num_dense_layers):
        layers[f"outer/dense_layers/{i}"] = _llama_layer(config, f"model.layers.{i}.", None)
    of_layers = {f"{where}/{path}": piece for where, pieces in layers.items() for path, piece in pieces.items()}
    return {"outer/norm_out/scale": Piece("model.norm.weight", "embed")} | of_layers


def _llama_layer(config: TransformerConfig, layer: str, num_experts: int | None) -> dict[str, Any]:
    """Returns the pieces of the layers whose tensors' names begin with ``layer``."""
    group = config.group_size
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    qkv = {"q": ("qkv", 0, group), "k": ("qkv", group, group + 1), "v": ("qkv", group + 1, group + 2)}
    gates = {"gate": ("gate", 0, 1), "up": ("gate", 1, 2)}
    after = "post_attention_layernorm"
    norms = ("input_layernorm", after) if config.norm_order == "pre" else (after, "post_feedforward_layernorm")
    pieces: dict[str, Any] = {
        "norm_1/scale": Piece(f"{layer}{norms[0]}.weight", "embed"),
        "attention/w_qkv": tuple(
            Piece(f"{attention}{name}_proj.weight", "(kv_heads qkv head_dim) embed", part) for name, part in qkv.items()
        ),
        "attention/w_out": Piece(f"{attention}o_proj.weight", "embed (heads head_dim)"),
        "norm_2/scale": Piece(f"{layer}{norms[1]}.weight", "embed"),
    }
    if num_experts is not None:
        pieces |= _experts(config, num_experts, layer)
    else:
        pieces["mlp/w_up"] = tuple(
            Piece(f"{mlp}{name}_proj.weight", "(gate mlp) embed", part) for name, part in gates.items()
        )
        pieces["mlp/w_down"] = Piece(f"{mlp}down_proj.weight", "embed mlp")
    if config.qk_norm is not None:
        of = {"q": "(heads head_dim)", "k": "(kv_heads head_dim)"} if config.qk_norm == "width" else {}
        for name in ("q", "k"):
            piece = Piece(f"{attention}{name}_norm.weight", of.get(name, "head_dim"))
            pieces[f"attention/norm_{name}/scale"] = piece
    if config.has_biases("qkv"):
        pieces["attention/b_qkv"] = tuple(
            Piece(f"{attention}{name}_proj.bias", "(kv_heads qkv head_dim)", part) for name, part in qkv.items()
        )
    if config.has_biases("out"):
        pieces["attention/b_out"] = Piece(f"{attention}o_proj.bias", "embed")
    if config.has_biases("mlp"):
        gate_biases = [Piece(f"{mlp}{name}_proj.bias", "(gate mlp)", part) for name, part in gates.items()]
        pieces |= {"mlp/b_up": tuple(gate_biases), "mlp/b_down": Piece(f"{mlp}down_proj.bias", "embed")}
    return pieces


def _experts(config: TransformerConfig, num_experts: int, layer: str) -> dict[str, Any]:
    """Returns the pieces of a router and its experts, each of which has tensors of its own."""
    is_mixtral = config.qk_norm is None
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    block = f"{layer}block_sparse_moe." if is_mixtral else f"{layer}mlp."
    found: dict[str, Any] = {"router/w_router": Piece(f"{block}gate.weight", "router embed")}
    for path, name in zip(("w_expert_gate", "w_expert_up", "w_expert_down"), names, strict=True):
        dims = "(experts embed) expert_mlp" if path == "w_expert_down" else "(experts expert_mlp) embed"
        found[f"experts/{path}"] = tuple(
            Piece(f"{block}experts.{e}.{name}.weight", dims, ("experts", e, e + 1)) for e in range(num_experts)
        )
    return found


_FAMILIES = {
    "gpt2": Family("transformer.", "wte.weight", _gpt2, r"h\.[0-9]+\.attn\.(bias|masked_bias)"),
    "llama": Family("model.", "embed_tokens.weight", _llama, r"layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq"),
    "bloom": Family("transformer.", "word_embeddings.weight", _bloom),
}


def family_of_names(kind: str) -> Family:
    """Returns the format of the checkpoints of a type of model: relatives of Llama share one."""
    return _FAMILIES.get(kind, _FAMILIES["llama"])


# The path of a param, one of its layers if it has any, and the piece that a tensor is of it.
ParamSlice = tuple[str, int | None, Piece]


def specs_of(config: TransformerConfig) -> dict[str, ParamSpec]:
    """Returns the ParamSpec of each param by its path, in the order of the tree's leaves."""
    table = param_table(replace(config, kv_copies=1))  # with copies some dims have other names
    leaves = jax.tree_util.tree_leaves_with_path(table, is_leaf=is_spec)
    return {path_string(path): spec for path, spec in leaves}


def tensors_of(config: TransformerConfig, family: Family) -> Iterator[tuple[str, ParamSlice]]:
    """Yields each tensor's name and the slice of a param that it holds: those outside layers, then layer by layer."""
    specs, pieces = specs_of(config), family.pieces(config)
    for layer in (None, *range(config.num_stacked_layers)):
        number = config.num_dense_layers + (layer or 0)
        for path, spec in specs.items():
            if (spec.num_layers is None) == (layer is None):
                yield from ((piece.name.format(number), (path, layer, piece)) for piece in pieces[path])


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
    pieces, first = family.pieces(config), config.num_dense_layers
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
        block = lambda index, path=path, spec=spec: read_block(tensors, pieces[path], spec, index, dtype, first)
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


def read_block(
    tensors: Tensors, pieces: Sequence[Piece], spec: ParamSpec, index: Index, dtype: np.dtype, first: int = 0
) -> np.ndarray:
    """Returns a part of a param on the host; no other bytes are read.

    Args:
        tensors: The tensors, by name.
        pieces: The pieces of the param.
        spec: The param.
        index: The part to read; if layers are stacked, the first slice is over layers.
        dtype: The dtype of the result.
        first: The number of the first stacked layer in the names of tensors.
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
                source = piece.to_param(spec, tensors[piece.name.format(first + layer)])
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
    for each, count in (("layer", config.num_layers), ("expert", config.num_experts or 0)):
        if count > len(tensors):  # else the names below could be unlimited
            raise ValueError(
                f"each {each} of a model must have tensors; got num_{each}s={count}, {len(tensors)} tensors in {folder}. "
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


def check_dtype(dtype: Any, what: str = "params") -> np.dtype:
    """Returns the dtype of params; raises ValueError if safetensors, or JAX as configured, does not support it."""
    with suppress(TypeError):  # of a name that is no dtype
        dtype = np.dtype(dtype)
    if dtype not in FLOATS.values() or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{what} must be float32, bfloat16 or float16, or float64 where jax_enable_x64 is set; got {dtype}. Choose "
            "float32."
        )
    return dtype
