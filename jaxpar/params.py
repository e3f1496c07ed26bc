"""Tables of parameters: one ParamSpec per parameter, which defines its shape, initial values and sharding.

    {"w": ParamSpec((784, 128), ("embed", "mlp"), lecun_normal), "b": ParamSpec((128,), ("mlp",), zeros)}

``dims`` are names chosen by the model, which does not depend on a mesh. Rules such as ``{"mlp": "tensor"}`` map dims to axes.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.fields import check_at_least, check_kind, check_positive
from jaxpar.layered_model import check_unpacked, path_string

Init = Callable[[PyTree, tuple[int, ...], Any], PyTree]

zeros: Init = jax.nn.initializers.zeros
ones: Init = jax.nn.initializers.ones
lecun_normal: Init = jax.nn.initializers.lecun_normal()
he_normal: Init = jax.nn.initializers.he_normal()


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
        shape: The shape of one layer's array, or of the array if it is not stacked.
        dims: The name of each dim.
        init: ``init(key, shape, dtype) -> array``, an initializer of ``jax.nn.initializers``.
        num_layers: If not None, the number of layers stacked along a leading dim "layers", each initialized on its own.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Init = zeros
    num_layers: int | None = None

    def __post_init__(self) -> None:
        check_kind(
            (tuple,),
            "a tuple",
            'Write such as (784, 128) and ("embed", "mlp").',
            shape=self.shape,
            dims=self.dims,
        )
        for size in self.shape:
            check_kind((Integral,), "of integers", "Convert it.", shape=size)
            check_at_least(0, shape=size)
        if len(self.shape) != len(self.dims):
            raise ValueError(
                f"a ParamSpec must name each dim; got shape {self.shape} and dims {self.dims}. Give one name an extent."
            )

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the array, including the leading dim of stacked layers."""
        return self.shape if self.num_layers is None else (self.num_layers, *self.shape)


def is_spec(node: object) -> bool:
    """Returns whether a node of a table is a ParamSpec."""
    return isinstance(node, ParamSpec)


def stack_layers(table: PyTree, num_layers: int) -> PyTree:
    """Returns the table of ``num_layers`` layers, stacked along a leading dim, from that of one layer."""
    check_positive("Give a model at least one layer.", num_layers=num_layers)
    return jax.tree.map(
        lambda s: ParamSpec(s.shape, s.dims, s.init, num_layers), table, is_leaf=is_spec
    )


def abstract_params(table: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """Returns the tree of ShapeDtypeStructs that the table describes."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.full_shape, dtype), table, is_leaf=is_spec)


def init_params(table: PyTree, key: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """Returns initial values for a table. Those of a parameter depend only on the key and on its path."""

    def init(path: tuple, spec: ParamSpec) -> PyTree:
        param_key = jax.random.fold_in(key, zlib.crc32(path_string(path).encode()) & 0x7FFFFFFF)
        if spec.num_layers is None:
            return spec.init(param_key, spec.shape, dtype)
        return jax.vmap(lambda k: spec.init(k, spec.shape, dtype))(
            jax.random.split(param_key, spec.num_layers)
        )

    return jax.tree_util.tree_map_with_path(init, table, is_leaf=is_spec)


def specs_from_dims(table: PyTree, rules: Mapping[str, str | None]) -> PyTree:
    """Returns a PartitionSpec for each parameter of a table; for stacked layers, that of one layer.

    Args:
        table: ParamSpecs.
        rules: The axis of each dim, None for a dim that is not sharded. Every dim of the table must have a rule. Rules for
            other dims are ignored, so one set of rules can serve several models.

    Raises:
        ValueError: A dim without a rule.
    """
    dims = {dim for spec in jax.tree.leaves(table, is_leaf=is_spec) for dim in spec.dims}
    if not dims <= set(rules):
        raise ValueError(
            f"rules must name each dim of the params; got no rule for {sorted(dims - set(rules))} in {sorted(rules)}. "
            "Map a dim that is not split to None."
        )
    return jax.tree.map(
        lambda s: PartitionSpec(*(rules[dim] for dim in s.dims)), table, is_leaf=is_spec
    )


def count_params(table: PyTree) -> int:
    """Returns the number of elements in a table or a tree of arrays; raises for packed layers, which contain padding."""
    check_unpacked(table)
    return sum(
        math.prod(x.full_shape if is_spec(x) else x.shape)
        for x in jax.tree.leaves(table, is_leaf=is_spec)
    )
