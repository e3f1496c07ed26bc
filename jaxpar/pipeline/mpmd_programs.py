"""The programs of a stage for the MPMD executor: its ops, and what runs once a step, as jitted functions.

An op is manual over ``data``: each replica computes on its own rows and adds its own gradients, which are reduced over ``data``
once per step. Values that differ between replicas have a leading dim for ``data``; ``tensor`` is automatic.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar import fp8
from jaxpar.data_parallel import reduce_gradients
from jaxpar.devices import are_gpus
from jaxpar.dtypes import is_float, wide_dtype
from jaxpar.mesh import DATA, num_replicas, spec_of_rows
from jaxpar.pipeline.mpmd_params import without
from jaxpar.pipeline.mpmd_stages import Given, Results, Values, VirtualStage
from jaxpar.shard_map import manual_over_data_and_stage

Op = Callable[..., Results]

WHOLE = PartitionSpec()


def jit_params(
    virtual_stages: Sequence[VirtualStage],
    split: Callable[[PyTree], list],
) -> Callable[[PyTree], list]:
    """Returns the jitted function of the params of a stage's layers, in the dtypes in which its ops compute.

    Args:
        virtual_stages: The virtual stages of the stage.
        split: The params of each layer from those of the stage.
    """
    layers = [layer for virtual_stage in virtual_stages for layer in virtual_stage.layers]

    def cast(params: PyTree) -> list:
        of_layers = zip(layers, split(params), strict=True)
        return [layer.cast(own) for layer, own in of_layers]

    return jax.jit(cast)


def jit_op(
    virtual_stage: VirtualStage,
    kind: str,
    mesh: Mesh,
    sums: Values,
    axes: frozenset[str],
) -> Op:
    """Returns an op of a virtual stage as a jitted function of (sums, whole, rows, own), which donates the sums.

    Args:
        virtual_stage: The virtual stage.
        kind: F, R, B or W.
        mesh: The mesh of its stage.
        sums: The shapes, dtypes and shardings of the sums of its stage.
        axes: The mesh axes over which it is manual.
    """

    def one_replica(sums: Values, whole: Values, rows: PyTree, own: Values) -> Results:
        own = own_of(own)
        given = Given(sums, whole, rows, own)
        made, sums = virtual_stage.run(kind, given)
        return of_all(made), sums

    one_replica.__name__ = f"{kind}_on_stage_{virtual_stage.stage}"  # the name in profiles
    each = spec_of_rows(mesh)
    specs = each, WHOLE, each, each
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=specs, out_specs=each, axes=axes)
    changed = virtual_stage.values_of(sums, virtual_stage.changes(kind))
    of_results = None, _shardings(changed)
    jitted = jax.jit(run, donate_argnums=0, out_shardings=of_results)
    return _checked(jitted) if are_gpus(mesh) else jitted


def _checked(op: jax.stages.Wrapped) -> Op:
    """Returns an op for GPUs that at its first call raises ValueError where XLA took products in FP8 back to 16 bits."""
    is_checked = False

    def run(*given: Any) -> Results:
        nonlocal is_checked
        if not is_checked:
            traced = op.trace(*given)
            if asked := fp8.num_asked(traced.jaxpr):
                compiled = traced.lower().compile()  # the call below reuses it
                fp8.check_products(compiled.as_text(), asked)
            is_checked = True
        return op(*given)

    return run


def jit_weight(
    mesh: Mesh,
    traced: Any,
) -> Callable[[PyTree], jax.Array]:
    """Returns the jitted function of the weight of the whole batch, replicated on the devices of a stage."""

    def one_replica(rows: PyTree) -> jax.Array:
        return reduce_gradients(traced.weight_of_rows(rows))

    specs, axes = (spec_of_rows(mesh),), traced.manual_axes
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=specs, out_specs=WHOLE, axes=axes)
    return jax.jit(run)


def jit_value(
    mesh: Mesh,
    traced: Any,
) -> Callable[[PyTree, jax.Array], PyTree]:
    """Returns the jitted function that reduces the sums of the loss over the replicas and divides them by the weight."""

    def one_replica(sums: PyTree, total_weight: jax.Array) -> PyTree:
        reduced = reduce_gradients(own_of(sums))
        return traced.value(reduced, total_weight)

    specs = spec_of_rows(mesh), WHOLE
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=specs, out_specs=WHOLE)
    return jax.jit(run)


def jit_grads(
    mesh: Mesh,
    like: Values,
    stack: Callable[[list], PyTree],
    reduce_dtype: Any,
) -> Callable[[Values], Values]:
    """Returns the jitted function that reduces a stage's sums over the replicas to gradients, in the dtypes of the params.

    Args:
        mesh: The mesh of the stage.
        like: The shapes, dtypes and shardings of the gradients.
        stack: The gradients of the stage's layers from the sums of each layer.
        reduce_dtype: The dtype in which they are reduced; None: float32 or wider.
    """

    def one_replica(sums: Values) -> Values:
        own = own_of(sums)
        own["layers"] = stack(own["layers"])
        as_param = lambda grad, param: grad.astype(param.dtype)
        return jax.tree.map(as_param, reduce_gradients(own, reduce_dtype), like)

    specs = (spec_of_rows(mesh),)
    run = manual_over_data_and_stage(one_replica, mesh, in_specs=specs, out_specs=WHOLE)
    return jax.jit(run, out_shardings=_shardings(like))


def sum_like(mesh: Mesh, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of a sum of gradients over microbatches, with a leading dim of replicas, in float32 or wider."""
    spec = () if like.sharding is None else without(like.sharding.spec, DATA)
    spec = PartitionSpec(*spec_of_rows(mesh), *spec)
    sharding = NamedSharding(mesh, spec)
    dtype = wide_dtype(like.dtype) if is_float(like) else like.dtype
    shape = num_replicas(mesh), *like.shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def jit_zeros(like: Values) -> Callable[[], Values]:
    """Returns the jitted function that returns zeros of the given shapes, dtypes and shardings."""

    def zeros() -> Values:
        empty = lambda a: jnp.zeros(a.shape, a.dtype)
        return jax.tree.map(empty, like)

    return jax.jit(zeros, out_shardings=_shardings(like))


def _shardings(like: Values) -> Values:
    return jax.tree.map(lambda a: a.sharding, like)


def own_of(tree: PyTree) -> PyTree:
    """Returns the arrays of one replica without their leading dim."""
    return jax.tree.map(lambda a: a.reshape(a.shape[1:]), tree)


def of_all(tree: PyTree) -> PyTree:
    """Returns the arrays of one replica with a leading dim, along which ``shard_map`` concatenates the replicas."""
    return jax.tree.map(lambda a: a[None], tree)
