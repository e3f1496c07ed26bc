"""A model for the planner: its functions and shapes, and both traced as graphs for a microbatch on one device.

A layer is split into ops (`jaxpar/backward/split.py`), and embedding, head and loss are ends (`pipeline/embed_and_head.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import PyTree

from jaxpar.backward.graph import Graph, trace
from jaxpar.backward.partition import ParamShards, shard_shape
from jaxpar.backward.remat import keep_products
from jaxpar.backward.split import SplitLayer, TracedLayer, trace_layer
from jaxpar.context_parallel import is_sequence, sequence_length
from jaxpar.fields import arg, check_at_least, check_kind
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, num_layers
from jaxpar.losses import softmax_cross_entropy
from jaxpar.mesh import CONTEXT, DATA, TENSOR, abstract_mesh, cut_of
from jaxpar.models import transformer
from jaxpar.models.lora import ADAPTERS, Lora, quantized_shardings
from jaxpar.models.lora import quantize as quantize_params
from jaxpar.models.quantized import is_quantized
from jaxpar.params import abstract_params, specs_from_dims
from jaxpar.pipeline.embed_and_head import Ends
from jaxpar.planner.fused import planned_attention
from jaxpar.planner.shape_checks import check_functions, check_params, check_parts
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.sharding import path_string, shardings_from_paths
from jaxpar.tensor_parallel import (
    EXPERT_RULES,
    EXPERTS_OVER_DATA,
    TRANSFORMER_RULES,
    flash_attention,
    split_copied_heads,
)
from jaxpar.tensor_parallel import sequence_parallel as constrain_sequence
from jaxpar.trainable import Trainable, accept_frozen, freeze, only_trained

MAX_SEQ = 2**13  # tokens of a row by default: few train at the longest sequences of a model


@dataclass(frozen=True)
class ModelShape:
    """A model's functions, shapes and sharding rules.

    Attributes:
        name: For messages.
        model: The functions; they are traced, never run.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``.
        params: ShapeDtypeStructs, in canonical order.
        rules: As for ``shardings_from_paths``.
        row: One row of a batch, ShapeDtypeStructs with a leading dim of 1.
        tokens_per_row: Tokens of a row, for rates.
        trainable: Patterns of the paths of the params that are trained, as for ``value_and_grad``; None: all.
        experts: The experts of a layer, if it has some.
        placements: The same model with its experts over each axis over which they may be.
        experts_per_token: The experts that a token uses.
        over_data: Whether the experts are over ``data``, so that layers are traced as on a device of that axis.
        num_leading: The layers that are part of the embedding.
        in_fp8: Whether layers multiply by some of their weights in FP8.
        depends_on: The mesh axes for whose sizes the functions ask, so that they are traced anew for each.
        remake: ``remake(seq=8192)`` and ``remake(attention="flash")`` return the same model with rows of another length or
            with another attention; None: neither can be chosen.
        cache: The traced ops, by number of rows and by the sizes of these axes.

    Raises:
        TypeError: The model is no LayeredModel, its layers are not stacked, or a param that is trained is no float.
        ValueError: An array of the row has no leading dim of 1. A plan raises it, or a TypeError, where the functions do not
            take the shapes of params and row, or the loss does not return two scalars.
    """

    name: str
    model: LayeredModel
    loss: Callable
    params: PyTree
    rules: Mapping[str, PartitionSpec]
    row: PyTree
    tokens_per_row: int = 1
    trainable: Trainable = None
    experts: int | None = None
    experts_per_token: int = 1
    placements: Mapping[str, "ModelShape"] = field(default_factory=dict)
    over_data: bool = False
    num_leading: int = 0
    in_fp8: bool = False
    depends_on: tuple[str, ...] = ()
    remake: Callable[..., "ModelShape"] | None = field(default=None, repr=False, compare=False)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_parts(self.model, self.row)
        check_params(self.frozen(self.params))

    @cached_property
    def num_layers(self) -> int:
        """Layers of the model."""
        return num_layers(self.params)

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params, is_leaf=is_quantized))

    @cached_property
    def num_trained(self) -> int:
        """Parameters that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(only_trained(self.frozen(self.params))))

    def frozen(self, tree: PyTree) -> PyTree:
        """Returns a tree of the structure of the params, in which those that are not trained are ``Frozen``."""
        return freeze(tree, self.trainable)

    def placed(self, experts: str | None) -> "ModelShape":
        """Returns the model with its experts over an axis; None: as it is."""
        return self.placements.get(experts or "", self)

    def batch(self, num_rows: int, context: int = 1) -> PyTree:
        """Returns the shapes of a batch of ``num_rows`` rows, of each of which a device has one of ``context`` parts."""

        def of(leaf: Any) -> jax.ShapeDtypeStruct:
            _, *dims = leaf.shape
            if is_sequence(leaf, self.seq):
                dims[0] //= context
            return jax.ShapeDtypeStruct((num_rows, *dims), leaf.dtype)

        return jax.tree.map(of, self.row)

    @property
    def seq(self) -> int:
        """Positions of a row; 0 for one that is no sequence."""
        return self.tokens_per_row if self.tokens_per_row > 1 else sequence_length(self.row)

    @property
    def sequences(self) -> list[str]:
        """The paths of the arrays of a row that have a value for each position."""
        leaves = jax.tree_util.tree_leaves_with_path(self.row)
        found = [path for path, leaf in leaves if is_sequence(leaf, self.seq)]
        return [path_string(path) or "batch" for path in found]

    def with_positions(self, num_positions: int) -> PyTree:
        """Returns the params with layers padded to ``num_positions``, as in a packed layout."""
        stack = lambda p: jax.ShapeDtypeStruct((num_positions, *p.shape[1:]), p.dtype)
        return self.params | {LAYERS: jax.tree.map(stack, self.params[LAYERS])}


def transformer_shape(
    config: str | transformer.TransformerConfig,
    *,
    seq: int | None = None,
    param_dtype: Any = jnp.float32,
    lora: Lora | None = None,
    quantize: str | None = None,
    sequence_parallel: bool = False,
    experts: str | None = None,
    is_planned: bool = True,
    **changes: Any,
) -> ModelShape:
    """Returns the shapes of a transformer that learns to predict the next token.

    Args:
        config: A preset's name, or a configuration. A preset with a 16-bit ``compute_dtype`` has ``flash_attention``, as the
            recipes on GPUs.
        seq: Tokens of a row; by default the model's ``max_positions``, at most 8,192.
        param_dtype: Dtype of the params between steps.
        lora: The factors that are trained in place of the params; None: the params are trained.
        quantize: The codes in which the weights of layers are beside ``lora``, such as "nf4"; None: they are params as others.
        sequence_parallel: Whether activations between pairs of column and row splits are sharded over ``tensor``.
        experts: The axis over which experts are: "tensor", as their ``split`` says, or "data". None: ``plan`` tries both.
        is_planned: Whether ``planned_attention`` stands for fused kernels, which no machine without a GPU can trace. False:
            the shapes are those to compile for GPUs.
        **changes: Fields of the configuration to change. Unless they are among these, a preset's ``compute_dtype`` is bfloat16
            and its vocabulary is padded to a multiple of 128 (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Raises:
        TypeError: ``config`` is neither a name nor a configuration.
        ValueError: A model without such a preset; flash attention of another dtype than one of 16 bits; rows of no token;
            ``quantize`` without ``lora``, or of a model with experts.
    """
    kinds, rule = (str, transformer.TransformerConfig), "a preset's name or a TransformerConfig"
    check_kind(kinds, rule, "Describe a model of your own as a ModelShape.", config=config)
    name = config if isinstance(config, str) else "transformer"
    if isinstance(config, str):
        config = transformer.preset(
            config, **({"compute_dtype": jnp.bfloat16, "vocab_multiple": 128} | changes)
        )
        if "attention" not in changes and jnp.dtype(config.compute_dtype).itemsize == 2:
            config = replace(config, attention=flash_attention)
    if config.attention is flash_attention and jnp.dtype(config.compute_dtype).itemsize != 2:
        raise ValueError(
            f"flash attention is a kernel for 16 bits; got {arg(attention='flash')} and a compute_dtype of "
            f'{jnp.dtype(config.compute_dtype).name}. Choose {arg(attention="xla")}, or compute_dtype="bfloat16" in the '
            "TransformerConfig."
        )
    if is_planned and config.attention in ("cudnn", flash_attention):
        config = replace(config, attention=planned_attention)
    given: dict[str, Any] = {
        "seq": seq,
        "param_dtype": param_dtype,
        "lora": lora,
        "quantize": quantize,
        "sequence_parallel": sequence_parallel,
        "is_planned": is_planned,
    }
    remake = partial(_remake, config, experts=experts, **given)
    if config.experts is not None and experts is None:
        axes = (TENSOR, DATA)
        placements = {axis: transformer_shape(config, experts=axis, **given) for axis in axes}
        return replace(placements[TENSOR], name=name, placements=placements, remake=remake)
    rules, constrain = (
        TRANSFORMER_RULES,
        constrain_sequence if sequence_parallel else split_copied_heads,
    )
    if config.experts is not None:
        # On GPUs experts have a kernel of their own, which is traced here too.
        over = EXPERTS_OVER_DATA if experts == DATA else EXPERT_RULES[config.experts.split]
        if config.experts.products == "auto" and config.experts.capacity_factor is None:
            config = config.with_experts(products="tiles")
        rules = rules | over
    table = transformer.param_table(config)
    specs = jax.tree_util.tree_leaves_with_path(
        specs_from_dims(table, rules), is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
    seq = min(config.max_positions, MAX_SEQ) if seq is None else seq
    check_at_least(1, seq=seq)
    if quantize is not None and (lora is None or config.experts is not None):
        raise ValueError(
            f"weights in codes are beside factors of LoRA, in a model without experts; got {arg(quantize=quantize)}, "
            f"{'a model with experts' if lora is not None else 'no factors'}. Leave it out"
            f"{'' if lora is not None else f', or give {arg(lora_rank=8)}'}."
        )
    tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    shape = ModelShape(
        name=name,
        model=transformer.make_model(config, constrain=constrain),
        loss=transformer.add_routing_losses(
            config, lambda logits, batch: softmax_cross_entropy(logits, batch["targets"])
        ),
        params=abstract_params(table, param_dtype),
        rules={path_string(path): spec for path, spec in specs},
        row={"tokens": tokens, "targets": tokens},
        tokens_per_row=seq,
        experts=None if config.experts is None else config.experts.count,
        experts_per_token=1 if config.experts is None else config.experts.per_token,
        over_data=config.experts is not None and experts == DATA,
        num_leading=config.num_leading_layers,
        in_fp8=config.products == "fp8",
        depends_on=(TENSOR,) if sequence_parallel or config.experts is not None else (),
        remake=remake,
    )
    return shape if lora is None else _with_factors(shape, lora, quantize)


def _remake(
    config: transformer.TransformerConfig, *, attention: str | None = None, **settings: Any
) -> ModelShape:
    """Returns the shapes of a transformer, with ``flash_attention`` where ``attention`` is "flash"."""
    if attention == "flash":
        config = replace(config, attention=flash_attention)
    return transformer_shape(config, **settings)


def _with_factors(shape: ModelShape, lora: Lora, kind: str | None) -> ModelShape:
    """Returns a model with the factors of LoRA, of which nothing else is trained, beside weights in codes of a kind."""
    shardings = lora.shardings(shardings_from_paths(shape.params, abstract_mesh(), shape.rules))
    params = jax.eval_shape(lora.init, jax.random.key(0), shape.params)
    if kind is not None:
        in_codes = partial(quantize_params, kind=kind, weights=transformer.LAYER_WEIGHTS)
        params = jax.eval_shape(in_codes, params)
        shardings = quantized_shardings(params, shardings)
    specs = [
        (path_string(path), each.spec)
        for path, each in jax.tree_util.tree_leaves_with_path(shardings)
    ]
    # A rule describes one layer, without the leading dim.
    rules = {
        path: PartitionSpec(*spec[1:]) if path.startswith(f"{LAYERS}/") else spec
        for path, spec in specs
    }
    return replace(shape, params=params, rules=rules, trainable=ADAPTERS, cache={})


def _with_owned(shape: ModelShape, mesh: AbstractMesh) -> PyTree:
    """Returns the params of a model with the part of its experts that a device has."""
    shardings = shardings_from_paths(shape.params, mesh, shape.rules)
    of = lambda leaf, sharding: shard_shape(leaf, cut_of(sharding.spec, DATA), mesh.shape[DATA])
    return shape.frozen(jax.tree.map(of, shape.params, shardings))


def _on_a_device(make: Callable[[], Any], mesh: AbstractMesh) -> Any:
    """Returns the result of ``make``, which traces functions, called where a step calls them: on one device of a mesh."""
    made = []

    def on_a_device() -> jax.Array:
        made.append(make())
        return jnp.zeros(())

    jax.eval_shape(
        manual_over_data_and_stage(on_a_device, mesh, in_specs=(), out_specs=PartitionSpec())
    )
    return made[0]


@dataclass(frozen=True)
class TracedEnds:
    """Embedding and head, with the outer params that each of their graphs reads, and the activations between them."""

    x: PyTree
    ends: Ends
    graphs: Mapping[str, tuple[Any, list[int]]]


class Traced:
    """The functions of a model, traced for microbatches of ``num_rows`` rows on one device of a mesh; cached in the model."""

    def __init__(self, shape: ModelShape, num_rows: int, mesh: AbstractMesh) -> None:
        context, data = mesh.shape[CONTEXT], mesh.shape[DATA]
        self._shape, self._mesh = shape, abstract_mesh(data=data, tensor=mesh.shape[TENSOR])
        model = accept_frozen(shape.model, shape.trainable)
        assert isinstance(model, LayeredModel)
        self._batch, self._model = shape.batch(num_rows, context), model
        self._params = shape.frozen(shape.params) if data == 1 else _with_owned(shape, mesh)
        self._key = num_rows, context, data, *(mesh.shape[axis] for axis in shape.depends_on)

    @property
    def ends(self) -> TracedEnds:
        """Embedding, its backward pass, and the head with the loss."""
        return self._cached("ends", self._trace_ends)

    def split(self, keeps_products: bool, shards: ParamShards) -> SplitLayer:
        """A layer, split into ops."""
        traced: TracedLayer = self._cached(
            ("layer", keeps_products), lambda: self._trace_layer(keeps_products)
        )
        return self._cached(("split", keeps_products, shards), lambda: traced.split(shards))

    def part_of_head(self, num_stages: int, num_shards: int) -> tuple[Graph, list[int]] | None:
        """The graph of a stage's part of the head and the outer params that it reads; None if the stages do not share it."""
        ends, sizes = self.ends, (num_stages, num_shards)
        return self._cached(
            ("part of head", *sizes), lambda: self._trace_part_of_head(ends, *sizes)
        )

    def _cached(self, what: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of ``make``, which is called where a step calls the model: over the shards of all axes."""
        cache, key = self._shape.cache, (what, self._key)
        if key not in cache:
            cache[key] = _on_a_device(make, self._mesh) if self._shape.depends_on else make()
        return cache[key]

    def _trace_layer(self, keeps_products: bool) -> TracedLayer:
        one_layer = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), self._params[LAYERS]
        )
        layer = self._model.layers(1)[0]
        layer = jax.checkpoint(layer, policy=keep_products) if keeps_products else layer
        return trace_layer(layer, one_layer, self.ends.x)

    def _trace_ends(self) -> TracedEnds:
        outer, batch = self._params[OUTER], self._batch
        check_functions(self._model, self._shape.loss, self._params, batch)
        x = jax.eval_shape(self._model.embed, outer, batch)
        ends = Ends(self._model, self._shape.loss, outer, x, batch)
        embed = ends.read_by_embed(jax.tree.leaves(outer))
        floats = [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        graphs = {
            "embed": (trace(ends.embed, embed, batch), ends.embed_reads),
            "embed_back": (trace(ends.embed_backward, embed, batch, floats), ends.embed_reads),
            "head": self._trace_head(ends, x, batch),
        }
        return TracedEnds(x, ends, graphs)

    def _trace_part_of_head(
        self, traced: TracedEnds, *sizes: int
    ) -> tuple[Graph, list[int]] | None:
        whole = traced.x, self._batch
        if (parts := traced.ends.parts_for(*whole, *sizes)) is None:
            return None
        of_stage = lambda a: jax.eval_shape(partial(parts.of_stage, stage=jnp.int32(0)), a)
        return self._trace_head(traced.ends, *jax.tree.map(of_stage, whole))

    def _trace_head(self, ends: Ends, x: PyTree, batch: PyTree) -> tuple[Graph, list[int]]:
        weight = jax.ShapeDtypeStruct((), jnp.float32)
        read = ends.read_by_head(jax.tree.leaves(self._params[OUTER]))
        return trace(ends.head, read, jax.tree.leaves(x), batch, weight), ends.head_reads
