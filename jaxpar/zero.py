"""ZeRO: shards optimizer state, gradients and params over ``data`` and ``context`` (Rajbhandari et al. 2020, arXiv 1910.02054).

    level   sharded              collectives over data and context together
    0       nothing              gradients: one all-reduce per step
    1       optimizer state      gradients: one reduce-scatter per step; params: one all-gather, after the update
    2       and gradients        layers: a reduce-scatter whenever gradients are computed, so sums are always sharded
    3       and params           layers: an all-gather before each use, a reduce-scatter in each backward pass; outer once

The devices of both axes hold the same params and add up their gradients, whether they have other rows or other parts of the
same rows. A param is sharded along its first dim that no other axis shards and that their number divides; a param without one
is replicated, which a run says at its start (``step_sharding.left_whole``). With a ``replica`` axis (HSDP) all this happens
inside each group of N such devices, and at the end of the step one all-reduce over ``replica`` adds up the shards of the
groups: 1 / N of the gradients' bytes leave a group, and no param.

A param whose own sharding names ``data`` is owned: each replica has its part for good, as of experts, to which layers send
rows. It is neither gathered nor reduced over ``data`` at any level, and sharded over ``context`` alone.

Each param has a ``ZeroShard``, which says this of it, in a tree like the params. ``gather`` and ``scatter`` follow it.

Gradients can also be reduced layer by layer, during the backward pass of earlier layers, with one stage:

    all microbatches but the last   gradients are added on each replica
    last microbatch, layer L        backward; reduction of L's gradients, including those of earlier microbatches
                     layer L-1      backward at the same time; reduction
                     ...
    at the end                      reduction of the gradients of outer, and of the loss

The traffic equals that of reductions at the end. It saves time if collectives overlap with computation: on GPUs, with the XLA
flags that ``jaxpar.initialize`` sets (Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
VLDB, section 3.2). A pipeline of several stages does not: its gradients are complete in the last tick alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import equations
from jaxpar.backward.partition import cut_of
from jaxpar.data_parallel import batch_specs, reduce_gradients
from jaxpar.dtypes import from_floats, to_floats, widen
from jaxpar.fields import arg
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers
from jaxpar.mesh import CONTEXT, DATA, OF_ZERO, REPLICA, REPLICAS, TENSOR, entry_axes
from jaxpar.shard_map import manual_over_data_and_stage, on_tensor_shards, tensor_part
from jaxpar.sharding import path_string
from jaxpar.trainable import is_frozen


@dataclass(frozen=True)
class ZeroShard:
    """How one param is sharded over ``data`` and ``context``.

    Attributes:
        dim: The dim that is sharded; None: the param, its gradient and its optimizer state are replicated.
        axes: The axes over which it is, those of one device left out; ``context`` alone for an owned param.
        tensor: Its PartitionSpec over ``tensor``.
        dtype: Its dtype.
        is_early: Whether its gradient is reduced whenever it is computed, not once a step: at levels 2 and 3 in stacked layers.
        is_param: Whether the param itself is sharded, and gathered where it is used: at level 3.
        reduce_dtype: The dtype in which its gradient is reduced; None: float32 or wider.
        owned: The dim that its own sharding puts over ``data``; None: none. A replica computes with its part, whose gradient is
            complete once it is summed over ``context``.
    """

    dim: int | None
    axes: tuple[str, ...]
    tensor: PartitionSpec
    dtype: Any
    is_early: bool
    is_param: bool
    reduce_dtype: Any = None
    owned: int | None = None

    @property
    def is_replicated(self) -> bool:
        """Whether every device of a group has its whole gradient."""
        return self.dim is None and self.owned is None

    def at_rest(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns ``spec`` with the axes on the dim that is sharded, and ``data`` on one that is owned."""
        return self._with(self._with(spec, self.owned, (DATA,)), self.dim, self.axes)

    def in_step(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns ``spec`` as ``at_rest`` if the param itself is sharded, else with ``data`` on a dim that is owned."""
        return self.at_rest(spec) if self.is_param else self._with(spec, self.owned, (DATA,))

    def _with(self, spec: PartitionSpec, dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
        if dim is None or set(axes) <= {axis for entry in spec for axis in entry_axes(entry)}:
            return spec
        entries = [*spec, *(None,) * (dim + 1 - len(spec))]
        entries[dim] = axes[0] if len(axes) == 1 else axes
        return PartitionSpec(*entries)

    def of_one_layer(self) -> "ZeroShard":
        """Returns that of one layer of a stack, without the leading dim."""
        less = lambda dim: None if dim is None else dim - 1
        return replace(self, dim=less(self.dim), tensor=PartitionSpec(*self.tensor[1:]), owned=less(self.owned))


def zero_shards(
    level: int, params: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh, *, stacked: bool, reduce_dtype: Any = None
) -> PyTree:
    """Returns the ZeroShard of each param.

    Args:
        level: The ZeRO level, 0 to 3.
        params: Arrays or ShapeDtypeStructs.
        specs: For each param a PartitionSpec; dims that it shards over other axes are not used.
        mesh: The mesh.
        stacked: Whether the params hold stacked layers, which are gathered and scattered one at a time.
        reduce_dtype: The dtype in which gradients are reduced; None: float32 or wider.
    """

    def shard(param: Any, spec: PartitionSpec, *, is_layer: bool = False) -> ZeroShard:
        owned = cut_of(spec, DATA)
        axes = tuple(axis for axis in OF_ZERO if mesh.shape[axis] > 1 and (axis != DATA or owned is None))
        dim = _dim_to_shard(param.shape, spec, mesh, axes) if level and axes else None
        is_early, is_param = is_layer and dim is not None and level >= 2, dim is not None and level == 3
        return ZeroShard(dim, axes, tensor_part(spec), param.dtype, is_early, is_param, reduce_dtype, owned)

    if not stacked:
        return jax.tree.map(shard, params, specs)
    layers = jax.tree.map(partial(shard, is_layer=True), params[LAYERS], specs[LAYERS])
    return {OUTER: jax.tree.map(shard, params[OUTER], specs[OUTER]), LAYERS: layers}


def check_owned(
    forward: Callable[[PyTree, PyTree], PyTree], params: PyTree, batch: PyTree, shardings: PyTree, mesh: Mesh
) -> None:
    """Raises for a model that sends nothing over ``data`` where it owns params, or over ``context``. Computes nothing.

    Args:
        forward: The model, ``(params, batch) -> outputs``.
        params: The params, in the model's order or packed.
        batch: The batch.
        shardings: The NamedShardings of the params, if they are known.
        mesh: The mesh.
    """
    found = jax.tree_util.tree_leaves_with_path(shardings)
    owned = [(path, leaf.spec) for path, leaf in found if cut_of(leaf.spec, DATA) is not None]
    needed = {DATA} if owned and mesh.shape[DATA] > 1 else set()
    needed |= {CONTEXT} if mesh.shape[CONTEXT] > 1 else set()
    if not needed:
        return
    shapes = jax.eval_shape(lambda *trees: trees, params, batch)
    as_owned = lambda leaf: PartitionSpec(*(DATA if DATA in entry_axes(entry) else None for entry in leaf.spec))
    of_params = PartitionSpec() if shardings is None else jax.tree.map(as_owned, shardings)
    in_specs = of_params, batch_specs(shapes[1], mesh)
    traced = lambda params, batch: (forward(params, batch), ())[1]
    on_shards = manual_over_data_and_stage(traced, mesh, in_specs=in_specs, out_specs=())
    for equation in equations(jax.make_jaxpr(on_shards)(*shapes)):
        over = [equation.params.get(name) or () for name in ("axis_name", "axes")]
        if equation.primitive.name != "axis_index":
            needed -= {axis for each in over for axis in ((each,) if isinstance(each, str) else each)}
    if CONTEXT in needed:
        raise ValueError(
            "each device has a part of every sequence, so layers must gather what they read of other positions; got "
            f"{arg(context=mesh.shape[CONTEXT])} and no collective over context in the model. Give attention the keys and "
            f"values of jaxpar.context_parallel.gather_sequence, or use {arg(context=1)}."
        )
    if DATA in needed:
        path, spec = owned[0]
        raise ValueError(
            "layers must send rows to the owner of a param that is sharded over data for good; got "
            f"{path_string(path)} of {spec} and no collective over data in the model. Write one, such as "
            'jax.lax.all_to_all(rows, "data", 0, 0), or leave data out of the rule: zero=3 shards params over it, and gathers '
            "them."
        )


def _dim_to_shard(
    shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh, axes: Sequence[str]
) -> int | None:
    free = {None} if mesh.shape[TENSOR] > 1 else {None, TENSOR}
    entries, parts = (*spec, *(None,) * (len(shape) - len(spec))), math.prod(mesh.shape[axis] for axis in axes)
    fitting = (dim for dim, size in enumerate(shape) if entries[dim] in free and size and size % parts == 0)
    return next(fitting, None)  # its shards are contiguous; of another dim XLA transposes what it gathers and scatters


def shardings_at_rest(params: PyTree, shardings: PyTree) -> PyTree:
    """Returns shardings of optimizer state (ZeRO 1 to 3) or of params (ZeRO 3): ``shardings`` with its axes on a dim of each.

    Args:
        params: Arrays or ShapeDtypeStructs.
        shardings: Their NamedShardings without ZeRO.
    """

    def at_rest(param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        shard = zero_shards(1, param, sharding.spec, sharding.mesh, stacked=False)
        return NamedSharding(sharding.mesh, shard.at_rest(sharding.spec))

    return jax.tree.map(at_rest, params, shardings)


# -- one param ---------------------------------------------------------------------------------------------------------


def gather(shard: ZeroShard, param: jax.Array) -> jax.Array:
    """Returns the whole param in its dtype. A shard may be wider, so that its gradient is not rounded before it is added.

    **Collectives**: an all-gather over ``shard.axes`` if the param is sharded, a reduce-scatter backward.
    """
    return _gather(shard, param) if shard.is_param else param


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(shard: ZeroShard, param: jax.Array) -> jax.Array:
    return gather_as_given(shard, param.astype(shard.dtype))


_gather.defvjp(
    lambda shard, param: (_gather(shard, param), jnp.zeros((), param.dtype)),
    lambda shard, like, grad: (scatter(shard, grad).astype(like.dtype),),
)


def gather_as_given(shard: ZeroShard, param: jax.Array) -> jax.Array:
    """Returns the whole param in the dtype that is given: it may be cast already.

    It is not to be differentiated: a pipeline computes gradients of gathered params and reduces them by ``scatter``.
    """
    dim = shard.dim
    if dim is None or not shard.is_param:
        return param
    return on_tensor_shards(lambda p: jax.lax.all_gather(p, shard.axes, axis=dim, tiled=True), param, shard.tensor)


def scatter(shard: ZeroShard, grad: jax.Array) -> jax.Array:
    """Returns this device's shard of the sum of a gradient over its group; a gradient that is not sharded as it is.

    **Collectives**: a reduce-scatter over ``shard.axes`` if it is sharded.
    """
    dim = shard.dim
    if dim is None:
        return grad
    reduce = lambda g: jax.lax.psum_scatter(g, shard.axes, scatter_dimension=dim, tiled=True)
    if shard.reduce_dtype is None:
        return on_tensor_shards(reduce, widen(grad), shard.tensor)
    return from_floats(on_tensor_shards(reduce, to_floats(grad, shard.reduce_dtype), shard.tensor), grad)


def scatter_early(shard: ZeroShard, grad: jax.Array) -> jax.Array:
    """Returns a gradient as it is added over microbatches."""
    return scatter(shard, grad) if shard.is_early else grad


# -- params and gradients ----------------------------------------------------------------------------------------------


def gather_once(params: PyTree, shards: PyTree) -> PyTree:
    """Returns params with all but stacked layers gathered, which a step does once for all microbatches."""
    return jax.tree.map(lambda param, shard: param if shard.is_early else gather(shard, param), params, shards)


def widen_shards(params: PyTree, shards: PyTree) -> PyTree:
    """Returns params with shards of stacked layers in float32 or wider, for ``gather``; frozen ones keep their dtype.

    Their gradients then are too, before they are added over microbatches.
    """

    def of(param: Any, shard: Any) -> Any:
        return widen(param) if not is_frozen(param) and shard.is_early and shard.is_param else param

    return jax.tree.map(of, params, shards, is_leaf=is_frozen)


def gathering_layers(model: LayeredModel | Callable, shards: PyTree, *, again: bool) -> LayeredModel | Callable:
    """Returns the model whose stacked layers gather their params.

    Args:
        model: The model; a plain function has no layers.
        shards: The ZeroShards of the params.
        again: Whether to wrap layers so that the backward pass gathers params again. ``min_cut_remat`` needs no wrapping, since
            it never stores values that depend on params alone.
    """
    gathers = any(shard.is_param and shard.is_early for shard in jax.tree.leaves(shards))
    if not gathers or not isinstance(model, LayeredModel):
        return model
    of_layer = jax.tree.map(ZeroShard.of_one_layer, shards[LAYERS])

    def wrap(layer: Callable) -> Callable:
        gathered = lambda params, x: layer(jax.tree.map(gather, of_layer, params), x)
        return jax.checkpoint(gathered, policy=_store_all_but_gathered) if again else gathered

    return model.wrap_layers(wrap)


def _store_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A ``jax.checkpoint`` policy that recomputes what ``gather`` returns, which is a shard_map beside ``tensor``."""
    return primitive.name not in ("all_gather", "shard_map")


def reduce_and_shard(loss_sums: PyTree, grads: PyTree, shards: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the loss and gradients reduced over the replicas, each gradient sharded as its ZeroShard says.

    Args:
        loss_sums: loss_sum and further sums, or None to reduce gradients alone.
        grads: The gradients.
        shards: Their ZeroShards.

    **Collectives**: one all-reduce over the replicas of the loss and the replicated gradients (two with a ``reduce_dtype``),
    and a reduce-scatter over ``data`` and ``context`` for each gradient that is sharded and not yet reduced. If any is sharded,
    the all-reduce is over ``data`` and ``context``, and one over ``replica`` of the loss and all gradients follows. Those of
    owned params are reduced over ``context`` in the same ways, in an all-reduce of their own where they are not sharded.
    """
    leaves, treedef = jax.tree.flatten(grads)
    each = jax.tree.leaves(shards)
    replicated = [shard.is_replicated for shard in each]
    owned = [shard.dim is None and not shard.is_replicated for shard in each]
    dtype = each[0].reduce_dtype if each else None
    loss_sums, leaves = _reduced(loss_sums, leaves, replicated, dtype, REPLICAS if all(replicated) else OF_ZERO)
    if not all(replicated):
        _, leaves = _reduced(None, leaves, owned, dtype, (CONTEXT,))
        leaves = [leaf if shard.is_early else scatter(shard, leaf) for leaf, shard in zip(leaves, each, strict=True)]
        loss_sums, leaves = _reduced(loss_sums, leaves, [True] * len(leaves), dtype, (REPLICA,))
    return loss_sums, jax.tree.unflatten(treedef, leaves)


def _reduced(
    loss_sums: PyTree, grads: list, which: Sequence[bool], dtype: Any, axes: Sequence[str]
) -> tuple[PyTree, list]:
    """Returns the loss and some gradients reduced over some axes: together, or apart if gradients are sent in another dtype."""
    some = [grad for grad, is_one in zip(grads, which, strict=True) if is_one]
    if dtype is None:
        loss_sums, some = reduce_gradients((loss_sums, some), axes=axes)
    else:
        loss_sums, some = reduce_gradients(loss_sums, axes=axes), reduce_gradients(some, dtype, axes)
    reduced = iter(some)
    return loss_sums, [next(reduced) if is_one else grad for grad, is_one in zip(grads, which, strict=True)]


def reduce_rest(loss_sums: PyTree, grads: PyTree, shards: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the loss and all gradients as ``reduce_and_shard`` does, for layers whose gradients are already so.

    **Collectives**: those of ``reduce_and_shard``, for ``outer`` alone.
    """
    loss_sums, outer = reduce_and_shard(loss_sums, grads[OUTER], shards[OUTER])
    return loss_sums, grads | {OUTER: outer}


# -- layer by layer ----------------------------------------------------------------------------------------------------


def reducing_layers(model: LayeredModel, shards: PyTree, params: PyTree) -> LayeredModel:
    """Returns the model whose layers reduce their gradients in their backward pass; for params from ``beside_sums``."""
    if is_stacked(params):
        of_layer = jax.tree.map(ZeroShard.of_one_layer, shards[LAYERS])
        return model.wrap_layers(partial(reduce_in_backward, shards=of_layer))
    layers = model.layers(num_layers(params))
    reducing = [reduce_in_backward(layer, each) for layer, each in zip(layers, shards[LAYERS], strict=True)]
    return LayeredModel(model.embed, reducing, model.head)


def beside_sums(layers: PyTree, earlier: PyTree | None, totals: PyTree) -> PyTree:
    """Returns layers whose params are beside the other inputs of ``reduce_in_backward``."""
    beside = lambda p, e, t: {"params": p, "earlier": e, "total": t}
    if isinstance(layers, list):
        return [beside(*each) for each in zip(layers, earlier or [None] * len(layers), totals, strict=True)]
    return beside(layers, earlier, totals)


def reduce_in_backward(layer: Callable[[PyTree, PyTree], PyTree], shards: PyTree) -> Callable[[PyTree, PyTree], PyTree]:
    """Returns a layer whose vjp reduces its gradients over the replicas, before earlier layers run backward.

    Its params are ``{"params": ..., "earlier": ..., "total": ...}``. ``earlier`` is the sum of the gradients of earlier
    microbatches, to which its own are added before the reduction, or None: they are then returned as they are added.
    ``total`` is not read; its cotangent is the result, which with ZeRO has other shapes than the params.

    **Collectives**: in its backward pass one all-reduce over the replicas, with ZeRO also a reduce-scatter for each gradient
    that is sharded.
    """

    @jax.custom_vjp
    def params_of(inputs: dict[str, PyTree]) -> PyTree:
        return inputs["params"]

    def backward(earlier: PyTree | None, grads: PyTree) -> tuple[dict[str, PyTree]]:
        total = reduced_or_added(shards, grads, earlier)
        return ({"params": None, "earlier": None, "total": total},)  # None: not differentiated

    params_of.defvjp(lambda inputs: (inputs["params"], inputs["earlier"]), backward)
    return lambda inputs, x: layer(params_of(inputs), x)


def reduced_or_added(shards: PyTree, grads: PyTree, earlier: PyTree | None) -> PyTree:
    """Returns gradients as they are added over microbatches, or with the sum of earlier ones, their total over the replicas."""
    grads = widen(jax.tree.map(scatter_early, shards, grads))
    return grads if earlier is None else reduce_and_shard(None, jax.tree.map(jnp.add, earlier, grads), shards)[1]
