"""The table of a transformer's params: shapes, names of dims, initializers.

    outer    tokens [vocab, embed]   positions [positions, embed]   norm_in   norm_out   head [embed, vocab]
    layers   attention  w_qkv [embed, kv_heads, qkv, head_dim]   w_out [heads, head_dim, embed]   norm_q   norm_k
             mlp        w_up [embed, gate, mlp]                  w_down [mlp, embed]
             norm_1   norm_2

With experts there are in place of mlp:

             router     w_router [embed, router]                 bias [router]
             experts    w_expert_gate, w_expert_up [experts, embed, expert_mlp]     w_expert_down [experts, expert_mlp, embed]
             shared     w_up [embed, gate, mlp]                  w_down [mlp, embed]

Leading layers without experts are a list, ``dense_layers``, under outer, where each has the params of a layer with an mlp.

The dim ``qkv`` holds the group of query heads of a key and value head, then its key, then its value. Sharding ``kv_heads``
therefore gives each shard complete groups, and the three projections are one product with one input gradient. ``gate`` has
size 2 for SwiGLU (gate, then up) and 1 for GELU. With ``kv_copies`` the first two dims of w_qkv that a tensor axis could split
have other names, ``copied_kv_heads`` and ``copied_head_dim``, and it is the second that the axis splits.

A tensor axis splits either ``experts`` or ``expert_mlp``. Gate and up of the experts are two weights, since a product reads its
weights whole: a slice of both together would be copied.

Initial values are those of GPT-2 (Radford et al. 2019, section 2.3): normal with standard deviation 0.02, divided for the
projections into the residual stream by the square root of the number of their additions.
"""

import jax
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS
from jaxpar.models.transformer.config import Experts, TransformerConfig
from jaxpar.params import ParamSpec, count_params, ones, stack_layers, zeros

_normal = jax.nn.initializers.normal(0.02)

# The weights of a layer, each with the number of its leading dims that its product sums over: for ``jaxpar.models.lora``.
LAYER_WEIGHTS = {"w_qkv": 1, "w_out": 2, "w_up": 1, "w_down": 1}


def param_table(config: TransformerConfig) -> PyTree:
    """Returns the table of a transformer's params, in a LayeredModel's tree."""
    vocab, embed = config.vocab_rows, config.embed_dim
    outer = {
        "tokens": ParamSpec((vocab, embed), ("vocab", "embed"), _normal),
        "norm_out": _norm(config),
    }
    if config.positions == "learned":
        outer["positions"] = ParamSpec(
            (config.max_positions, embed), ("positions", "embed"), _normal
        )
    if config.norm_embedding:
        outer["norm_in"] = _norm(config)
    if not config.tied:
        outer["head"] = ParamSpec((embed, vocab), ("embed", "vocab"), _normal)
    if config.num_leading_layers:
        dense = _layer(config, {"mlp": _mlp(config, config.hidden_dim)})
        outer["dense_layers"] = [dense] * config.num_leading_layers
    return {"outer": outer, "layers": stack_layers(layer_table(config), config.num_stacked_layers)}


def layer_table(config: TransformerConfig) -> PyTree:
    """Returns the table of one of the stacked layers."""
    if config.experts is None:
        return _layer(config, {"mlp": _mlp(config, config.hidden_dim)})
    return _layer(config, _experts(config, config.experts))


def num_active_params(config: TransformerConfig) -> int:
    """Returns the number of params that a token uses: all but the experts that it does not."""
    table = param_table(config)
    if config.experts is None:
        return count_params(table)
    of_experts = count_params(table[LAYERS]["experts"])
    return (
        count_params(table)
        - of_experts
        + of_experts // config.experts.count * config.experts.per_token
    )


def _layer(config: TransformerConfig, own: PyTree) -> PyTree:
    return {
        "norm_1": _norm(config),
        "attention": _attention(config),
        "norm_2": _norm(config),
        **own,
    }


def _norm(config: TransformerConfig) -> PyTree:
    scale = ParamSpec((config.embed_dim,), ("embed",), ones)
    shift = ParamSpec((config.embed_dim,), ("embed",), zeros)
    return {"scale": scale, "shift": shift} if config.norm == "layer" else {"scale": scale}


def _into_residual(config: TransformerConfig) -> jax.nn.initializers.Initializer:
    return jax.nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)


def _attention(config: TransformerConfig) -> PyTree:
    embed, heads, width = config.embed_dim, config.num_heads, config.head_dim
    qkv, copied = (
        (config.kv_heads, config.group_size + 2, width),
        "copied_" if config.kv_copies > 1 else "",
    )
    dims = (f"{copied}kv_heads", "qkv", f"{copied}head_dim")
    table: dict[str, PyTree] = {
        "w_qkv": ParamSpec((embed, *qkv), ("embed", *dims), _normal),
        "w_out": ParamSpec(
            (heads, width, embed), ("heads", "head_dim", "embed"), _into_residual(config)
        ),
    }
    if config.has_biases("qkv"):
        table["b_qkv"] = ParamSpec(qkv, dims, zeros)
    if config.has_biases("out"):
        table["b_out"] = ParamSpec((embed,), ("embed",), zeros)
    if config.qk_norm == "head":
        table |= {
            name: {"scale": ParamSpec((width,), ("head_dim",), ones)}
            for name in ("norm_q", "norm_k")
        }
    if config.qk_norm == "width":
        table["norm_q"] = {"scale": ParamSpec((heads, width), ("heads", "head_dim"), ones)}
        table["norm_k"] = {
            "scale": ParamSpec((config.kv_heads, width), (dims[0], "head_dim"), ones)
        }
    return table


def _experts(config: TransformerConfig, own: Experts) -> PyTree:
    # The router's dim has a name of its own: every shard chooses among all experts.
    router = {"w_router": ParamSpec((config.embed_dim, own.count), ("embed", "router"), _normal)}
    if own.router_bias:
        router["bias"] = ParamSpec((own.count,), ("router",), zeros)
    dims = ("experts", "embed", "expert_mlp")
    up = ParamSpec((own.count, config.embed_dim, config.expert_hidden_dim), dims, _normal)
    down = ParamSpec(
        (up.shape[0], *up.shape[:0:-1]), (dims[0], *dims[:0:-1]), _into_residual(config)
    )
    gate = {"w_expert_gate": up} if config.mlp == "swiglu" else {}
    table = {"router": router, "experts": gate | {"w_expert_up": up, "w_expert_down": down}}
    if own.num_shared:
        table["shared"] = _mlp(config, own.num_shared * config.expert_hidden_dim)
    return table


def _mlp(config: TransformerConfig, hidden: int) -> PyTree:
    embed, gate = config.embed_dim, 2 if config.mlp == "swiglu" else 1
    table = {
        "w_up": ParamSpec((embed, gate, hidden), ("embed", "gate", "mlp"), _normal),
        "w_down": ParamSpec((hidden, embed), ("mlp", "embed"), _into_residual(config)),
    }
    biases = {
        "b_up": ParamSpec((gate, hidden), ("gate", "mlp"), zeros),
        "b_down": ParamSpec((embed,), ("embed",), zeros),
    }
    return table | biases if config.has_biases("mlp") else table
