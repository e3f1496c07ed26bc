"""The planner's view of a model: its functions and shapes, without values. A preset by name, or a model of your own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, LayeredModel, num_layers
from jaxpar.losses import softmax_cross_entropy
from jaxpar.mesh import abstract_mesh
from jaxpar.models import transformer
from jaxpar.models.lora import ADAPTERS, Lora
from jaxpar.params import abstract_params, specs_from_dims
from jaxpar.sharding import path_string, shardings_from_paths
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from jaxpar.trainable import Trainable, accept_frozen, freeze, only_trained


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
        cache: The traced ops, by number of rows.
    """

    name: str
    model: LayeredModel
    loss: Callable
    params: PyTree
    rules: Mapping[str, PartitionSpec]
    row: PyTree
    tokens_per_row: int = 1
    trainable: Trainable = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def num_layers(self) -> int:
        """Layers of the model."""
        return num_layers(self.params)

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @cached_property
    def num_trained(self) -> int:
        """Parameters that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(only_trained(self.frozen(self.params))))

    @property
    def model_of_frozen(self) -> LayeredModel:
        """The model as a function of params of which some are ``Frozen``."""
        model = accept_frozen(self.model, self.trainable)
        assert isinstance(model, LayeredModel)
        return model

    def frozen(self, tree: PyTree) -> PyTree:
        """Returns a tree of the structure of the params, in which those that are not trained are ``Frozen``."""
        return freeze(tree, self.trainable)

    def batch(self, num_rows: int) -> PyTree:
        """Returns the shapes of a batch of ``num_rows`` rows."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), a.dtype), self.row)

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
    **changes: Any,
) -> ModelShape:
    """Returns the shapes of a transformer that learns to predict the next token.

    Args:
        config: A preset's name, or a configuration.
        seq: Tokens of a row; by default the model's ``max_positions``.
        param_dtype: Dtype of the params between steps.
        lora: The factors that are trained in place of the params; None: the params are trained.
        **changes: Fields of the configuration to change. Unless they are among these, a preset's ``compute_dtype`` is bfloat16
            and its vocabulary is padded to a multiple of 128 (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
    """
    name = config if isinstance(config, str) else "transformer"
    if isinstance(config, str):
        config = transformer.preset(config, **({"compute_dtype": jnp.bfloat16, "vocab_multiple": 128} | changes))
    table = transformer.param_table(config)
    specs = jax.tree_util.tree_leaves_with_path(
        specs_from_dims(table, TRANSFORMER_RULES), is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
    seq = seq or config.max_positions
    tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    shape = ModelShape(
        name=name,
        model=transformer.make_model(config),
        loss=lambda outputs, batch: softmax_cross_entropy(outputs, batch["targets"]),
        params=abstract_params(table, param_dtype),
        rules={path_string(path): spec for path, spec in specs},
        row={"tokens": tokens, "targets": tokens},
        tokens_per_row=seq,
    )
    return shape if lora is None else _with_factors(shape, lora)


def _with_factors(shape: ModelShape, lora: Lora) -> ModelShape:
    """Returns a model with the factors of LoRA, of which nothing else is trained."""
    shardings = lora.shardings(shardings_from_paths(shape.params, abstract_mesh(), shape.rules))
    specs = [(path_string(path), each.spec) for path, each in jax.tree_util.tree_leaves_with_path(shardings)]
    # A rule describes one layer, without the leading dim.
    rules = {path: PartitionSpec(*spec[1:]) if path.startswith(f"{LAYERS}/") else spec for path, spec in specs}
    params = jax.eval_shape(lora.init, jax.random.key(0), shape.params)
    return replace(shape, params=params, rules=rules, trainable=ADAPTERS, cache={})
