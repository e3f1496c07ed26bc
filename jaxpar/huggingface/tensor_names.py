"""The tensors of each param in a checkpoint, as plain data: names, and the order of dims.

    transformer.h.{}.attn.c_attn.weight  [embed, (qkv kv_heads head_dim)]          --> layers/attention/w_qkv
    transformer.h.{}.self_attention.query_key_value.weight                              [embed, kv_heads, qkv, head_dim]
                                         [(kv_heads qkv head_dim), embed]
    model.layers.{}.self_attn.q_proj.weight [(kv_heads qkv head_dim), embed]       --> its part qkv = 0 to the group's size

``{}`` is the number of a layer, dims in parentheses form one dim of the tensor, and their names are those of the param's
ParamSpec (`models/transformer/params.py`). GPT-2 stores weights as [in, out], like the params; Llama and BLOOM as [out, in].
Queries and keys need no permutation: Llama's RoPE, too, rotates the first half of a head against the second.

**Reference**: transformers 5.23, models/gpt2, bloom, llama, mistral, qwen2, qwen3 and olmo2;
tests/test_huggingface_live.py checks the maps against it.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.params import ParamSpec, is_spec
from jaxpar.sharding import path_string


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


HEAD = "lm_head.weight"


def _layer_norm(path: str, name: str) -> dict[str, Piece]:
    return {f"{path}/scale": Piece(f"{name}.weight", "embed"), f"{path}/shift": Piece(f"{name}.bias", "embed")}


def _gpt2(config: TransformerConfig) -> dict[str, Any]:
    del config
    layer = "transformer.h.{}."
    return {
        "outer/positions": Piece("transformer.wpe.weight", "positions embed"),
        **_layer_norm("outer/norm_out", "transformer.ln_f"),
        **_layer_norm("layers/norm_1", f"{layer}ln_1"),
        "layers/attention/w_qkv": Piece(f"{layer}attn.c_attn.weight", "embed (qkv kv_heads head_dim)"),
        "layers/attention/b_qkv": Piece(f"{layer}attn.c_attn.bias", "(qkv kv_heads head_dim)"),
        "layers/attention/w_out": Piece(f"{layer}attn.c_proj.weight", "(heads head_dim) embed"),
        "layers/attention/b_out": Piece(f"{layer}attn.c_proj.bias", "embed"),
        **_layer_norm("layers/norm_2", f"{layer}ln_2"),
        "layers/mlp/w_up": Piece(f"{layer}mlp.c_fc.weight", "embed (gate mlp)"),
        "layers/mlp/b_up": Piece(f"{layer}mlp.c_fc.bias", "(gate mlp)"),
        "layers/mlp/w_down": Piece(f"{layer}mlp.c_proj.weight", "mlp embed"),
        "layers/mlp/b_down": Piece(f"{layer}mlp.c_proj.bias", "embed"),
    }


def _bloom(config: TransformerConfig) -> dict[str, Any]:
    del config
    layer = "transformer.h.{}."
    return {
        **_layer_norm("outer/norm_in", "transformer.word_embeddings_layernorm"),
        **_layer_norm("outer/norm_out", "transformer.ln_f"),
        **_layer_norm("layers/norm_1", f"{layer}input_layernorm"),
        "layers/attention/w_qkv": Piece(
            f"{layer}self_attention.query_key_value.weight", "(kv_heads qkv head_dim) embed"
        ),
        "layers/attention/b_qkv": Piece(f"{layer}self_attention.query_key_value.bias", "(kv_heads qkv head_dim)"),
        "layers/attention/w_out": Piece(f"{layer}self_attention.dense.weight", "embed (heads head_dim)"),
        "layers/attention/b_out": Piece(f"{layer}self_attention.dense.bias", "embed"),
        **_layer_norm("layers/norm_2", f"{layer}post_attention_layernorm"),
        "layers/mlp/w_up": Piece(f"{layer}mlp.dense_h_to_4h.weight", "(gate mlp) embed"),
        "layers/mlp/b_up": Piece(f"{layer}mlp.dense_h_to_4h.bias", "(gate mlp)"),
        "layers/mlp/w_down": Piece(f"{layer}mlp.dense_4h_to_h.weight", "embed mlp"),
        "layers/mlp/b_down": Piece(f"{layer}mlp.dense_4h_to_h.bias", "embed"),
    }


def _llama(config: TransformerConfig) -> dict[str, Any]:
    """Returns the pieces of a Llama or of a relative: Mistral, Qwen2, Qwen3, OLMo 2."""
    layer, group = "model.layers.{}.", config.group_size
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    qkv = {"q": ("qkv", 0, group), "k": ("qkv", group, group + 1), "v": ("qkv", group + 1, group + 2)}
    gates = {"gate": ("gate", 0, 1), "up": ("gate", 1, 2)}
    after = "post_attention_layernorm"
    norms = ("input_layernorm", after) if config.norm_order == "pre" else (after, "post_feedforward_layernorm")
    pieces: dict[str, Any] = {
        "outer/norm_out/scale": Piece("model.norm.weight", "embed"),
        "layers/norm_1/scale": Piece(f"{layer}{norms[0]}.weight", "embed"),
        "layers/attention/w_qkv": tuple(
            Piece(f"{attention}{name}_proj.weight", "(kv_heads qkv head_dim) embed", part) for name, part in qkv.items()
        ),
        "layers/attention/w_out": Piece(f"{attention}o_proj.weight", "embed (heads head_dim)"),
        "layers/norm_2/scale": Piece(f"{layer}{norms[1]}.weight", "embed"),
        "layers/mlp/w_up": tuple(
            Piece(f"{mlp}{name}_proj.weight", "(gate mlp) embed", part) for name, part in gates.items()
        ),
        "layers/mlp/w_down": Piece(f"{mlp}down_proj.weight", "embed mlp"),
    }
    if config.qk_norm is not None:
        of = {"q": "(heads head_dim)", "k": "(kv_heads head_dim)"} if config.qk_norm == "width" else {}
        for name in ("q", "k"):
            piece = Piece(f"{attention}{name}_norm.weight", of.get(name, "head_dim"))
            pieces[f"layers/attention/norm_{name}/scale"] = piece
    if config.has_biases("qkv"):
        pieces["layers/attention/b_qkv"] = tuple(
            Piece(f"{attention}{name}_proj.bias", "(kv_heads qkv head_dim)", part) for name, part in qkv.items()
        )
    if config.has_biases("out"):
        pieces["layers/attention/b_out"] = Piece(f"{attention}o_proj.bias", "embed")
    if config.has_biases("mlp"):
        gate_biases = [Piece(f"{mlp}{name}_proj.bias", "(gate mlp)", part) for name, part in gates.items()]
        pieces |= {"layers/mlp/b_up": tuple(gate_biases), "layers/mlp/b_down": Piece(f"{mlp}down_proj.bias", "embed")}
    return pieces


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
    for layer in (None, *range(config.num_layers)):
        for path, spec in specs.items():
            if (spec.num_layers is None) == (layer is None):
                yield from ((piece.name.format(layer), (path, layer, piece)) for piece in pieces[path])
