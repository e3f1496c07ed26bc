"""The entry point: ``value_and_grad`` on a mesh, from data, pipeline and tensor parallelism."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.remat import forward_with_remat, with_remat
from jaxpar.data_parallel import accumulate, check_batch, check_sequences, reduce_gradients, split_microbatches
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, check_layer, is_stacked, num_layers
from jaxpar.loss_checks import check_leaves_of_x, check_loss, check_positions, check_sums_of_loss
from jaxpar.loss_sums import sums_of, with_float_sums
from jaxpar.mesh import CONTEXT, DATA, REPLICA, REPLICAS, STAGE, TENSOR, num_replicas
from jaxpar.parallel import Parallel, Pipeline, Remat, accepts_settings, check_equal_layers, check_kind, check_settings
from jaxpar.pipeline import (
    LayerLayout,
    MpmdExecutor,
    OverReplicas,
    Program,
    accumulate_pipelined,
    build_stage,
    check_layout,
    close_params,
    open_params,
    spmd_program,
    sum_over_stages,
)
from jaxpar.schedule import Schedule, make_schedule
from jaxpar.step_sharding import StepSharding, run_on_shards, shard_step
from jaxpar.traced_loss import TracedLoss, once_for_shapes, trace_loss
from jaxpar.trainable import Frozen, Trainable, accept_frozen, check_params, freeze, only_trained, with_trained
from jaxpar.zero import (
    ZeroShard,
    beside_sums,
    check_owned,
    gather_as_given,
    gathering_layers,
    reduce_and_shard,
    reduce_rest,
    reduced_or_added,
    reducing_layers,
    scatter_early,
    widen_shards,
)

Loss = Callable[[PyTree, PyTree], tuple]
ValueAndGrad = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
TraceLoss = Callable[[PyTree, PyTree], TracedLoss]


@accepts_settings
def value_and_grad(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    loss: Loss,
    mesh: Mesh | Parallel,
    pipeline: Pipeline | None = None,
    *,
    schedule: str | Schedule = "1f1b",
    num_microbatches: int = 1,
    num_chunks: int | None = None,
    remat: Remat = False,
    zero: int = 0,
    executor: Literal["spmd", "mpmd"] = "spmd",
    layout: LayerLayout | None = None,
    shardings: PyTree | None = None,
    overlap_grad_reduce: bool = False,
    grad_reduce_dtype: DTypeLike | None = None,
    mask_idle_ops: bool | Literal["auto"] | None = "auto",
    trainable: Trainable = None,
    has_aux: bool = False,
) -> ValueAndGrad:
    """Returns ``(params, batch) -> (loss, gradients)``, with the results of ``jax.value_and_grad`` on one device.

    Loss and gradients have the same dtypes as there. Losses, weights and gradients are added over microbatches, reduced over
    the mesh and divided in float32 or wider, and rounded to those dtypes at the end.

    Args:
        model: A LayeredModel, or with ``stage=1`` any pure function ``model(params, batch) -> outputs``.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``. The loss is the ratio of the two over the whole batch.
            Both are sums over the rows of one microbatch (``jnp.sum(errors), 1.0`` is refused). weight_sum must depend on the
            batch alone: its total is computed first, and the backward pass of each loss_sum starts from its inverse.
        mesh: A mesh from ``make_mesh``, or a ``Parallel``, which holds it with the settings of its own.
        pipeline: A ``Pipeline``, in place of its settings.
        schedule: As in ``Pipeline``, as are ``num_microbatches``, ``num_chunks``, ``remat``, ``executor`` and
            ``mask_idle_ops``.
        num_microbatches: As in ``Pipeline``.
        num_chunks: As in ``Pipeline``.
        remat: As in ``Pipeline``; False is "none", True "full".
        zero: As in ``Parallel``, as are ``layout``, ``shardings``, ``overlap_grad_reduce``, ``grad_reduce_dtype`` and
            ``trainable``.
        executor: As in ``Pipeline``.
        layout: As in ``Parallel``.
        shardings: As in ``Parallel``.
        overlap_grad_reduce: As in ``Parallel``.
        grad_reduce_dtype: As in ``Parallel``.
        mask_idle_ops: As in ``Pipeline``.
        trainable: As in ``Parallel``.
        has_aux: Whether the loss returns metrics too: ``(loss_sum, weight_sum, sums)``, where ``sums`` is a dict of scalars by
            name, each a sum over the rows, such as ``{"accuracy": number of right answers}``. The function then returns
            ``((loss, means), gradients)``, as ``jax.value_and_grad(has_aux=True)`` does: each mean is the sum over the whole
            batch divided by its weight, as the loss is, in float32 or wider (also with ``grad_reduce_dtype``). The sums are not
            differentiated. They are reduced with the loss, without further collectives; those of integers are exact.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range, or one that contradicts the objects; or, at a call and before anything is
            compiled, params or a batch that do not fit.

    **Collectives**: over the replicas one all-reduce a step, of gradients and sums together, for any number of microbatches
    (apart with ``grad_reduce_dtype``; one a stage with the mpmd executor; with ZeRO reduce-scatters over ``data`` and
    ``context``, and then one over ``replica``), and before it one of the weight, a single number; over ``tensor`` what XLA
    inserts for the shardings of the params; over ``context`` what the layers send (``context_parallel.py``); over ``stage`` one
    activation and one gradient for each boundary and microbatch, and the reduction of the gradients of ``outer``, a
    reduce-scatter if they are sharded over ``stage``.
    """
    check_kind(pipeline)  # a Pipeline has become its settings
    parallel = Parallel(
        mesh,  # pyright: ignore[reportArgumentType]  # a Parallel has become its settings
        shardings,
        zero=zero,
        trainable=trainable,
        layout=layout,
        overlap_grad_reduce=overlap_grad_reduce,
        grad_reduce_dtype=grad_reduce_dtype,
    )
    pipeline = Pipeline(
        schedule,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        executor=executor,
        remat=remat,
        mask_idle_ops=mask_idle_ops,
    )
    return with_settings(model, loss, parallel, pipeline, has_aux=has_aux)


def with_settings(
    model: LayeredModel | Callable, loss: Loss, parallel: Parallel, pipeline: Pipeline, *, has_aux: bool | None
) -> ValueAndGrad:
    """Returns ``value_and_grad``; with ``has_aux=None`` it trains nothing, and its value is what ``loss`` returns."""
    check_settings(model, parallel, pipeline)
    mesh, layout, trains = parallel.mesh, parallel.layout, has_aux is not None
    assert isinstance(mesh, Mesh), "a step runs on devices"
    layered = isinstance(model, LayeredModel)
    model = accept_frozen(model, parallel.trainable if trains else ())
    frozen = partial(freeze, trainable=parallel.trainable) if trains else partial(jax.tree.map, Frozen)
    shardings = None if parallel.shardings is None else frozen(open_params(parallel.shardings, layout))
    check, traced_loss = _checks(model, loss, mesh, pipeline, shardings, has_aux=has_aux)
    loss = with_float_sums(loss)
    shard = partial(
        shard_step,
        mesh=mesh,
        zero=parallel.zero,
        shardings=shardings,
        layered=layered,
        reduce_dtype=parallel.grad_reduce_dtype,
    )
    masks, overlaps = pipeline.masks(mesh), parallel.overlap_grad_reduce and any(mesh.shape[a] > 1 for a in REPLICAS)
    if mesh.shape[STAGE] == 1 or not isinstance(model, LayeredModel):
        run = _one_stage(model, loss, parallel, pipeline, shard, traced_loss)
        if trains and masks and mesh.shape[TENSOR] > 1 < pipeline.num_microbatches and isinstance(model, LayeredModel):
            run = _merging(model, loss, parallel, pipeline, overlaps, shard, traced_loss, run)
    else:
        schedule, remat = pipeline.table(mesh.shape[STAGE], masks=masks), pipeline.policy
        # With a policy layers store what it saves; under remat=True the schedule has an op R that recomputes.
        staged = model if isinstance(remat, bool) else model.wrap_layers(partial(jax.checkpoint, policy=remat))
        if pipeline.executor == "mpmd":
            return MpmdExecutor(
                staged,
                loss,
                mesh,
                schedule,
                layout,
                split=split_microbatches,
                reduce=reduce_gradients,
                reduce_dtype=parallel.grad_reduce_dtype,
                traced_loss=traced_loss,
                check=check,
                frozen=frozen,
            )
        program = spmd_program(schedule, masks=masks, overlaps=overlaps)
        run = _pipelined(staged, loss, program, parallel, shard, traced_loss)
    compiled = jax.jit(run)

    def value_and_grad_on_mesh(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss over the whole batch and its gradients, which have the structure of params."""
        params = frozen(open_params(params, layout))
        check(params, batch)
        value, grads = compiled(params, batch)
        return value, close_params(grads, layout)

    return value_and_grad_on_mesh


def _checks(
    model: LayeredModel | Callable,
    loss: Loss,
    mesh: Mesh,
    pipeline: Pipeline,
    shardings: PyTree | None,
    *,
    has_aux: bool | None,
) -> tuple[Callable[[PyTree, PyTree], None], TraceLoss]:
    """Returns the checks of params and a batch, and the traced loss for them. Both run once for each new set of shapes."""
    forward = model.apply if isinstance(model, LayeredModel) else model
    num_parts = num_replicas(mesh) * pipeline.num_microbatches
    of_floats = with_float_sums(loss)

    @once_for_shapes
    def traced_loss(params: PyTree, batch: PyTree) -> TracedLoss:
        traced = trace_loss(model, of_floats, mesh, pipeline.num_microbatches, pipeline.executor, params, batch)
        return replace(traced, is_mean=has_aux is not None)

    @once_for_shapes
    def check(params: PyTree, batch: PyTree) -> None:
        check_batch(batch, mesh.shape[DATA], pipeline.num_microbatches, replica=mesh.shape[REPLICA])
        check_sequences(batch, mesh)
        check_params(params)
        if isinstance(model, LayeredModel):
            num_layers(params)
            check_layer(model, params, batch)
        check_loss(loss, jax.eval_shape(forward, params, batch), batch, has_aux=has_aux)
        traced_loss(params, batch)
        check_leaves_of_x(model, of_floats, params, batch, num_parts)
        check_sums_of_loss(forward, loss, params, batch, num_parts)
        check_positions(model, loss, params, batch, mesh.shape[CONTEXT])
        check_owned(forward, params, batch, shardings, mesh)

    return check, traced_loss


def _one_stage(
    model: LayeredModel | Callable,
    loss: Loss,
    parallel: Parallel,
    pipeline: Pipeline,
    shard: Callable[[PyTree], StepSharding],
    traced_loss: TraceLoss,
) -> ValueAndGrad:
    """One stage: the sum of the vjps of the microbatches."""
    mesh, remat, num_microbatches = parallel.mesh, pipeline.policy, pipeline.num_microbatches
    assert isinstance(mesh, Mesh), "a step runs on devices"

    def run(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        sharding = shard(params)
        of_grads = sharding.zero_of_grads

        def sums(params: PyTree, batch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            params = widen_shards(params, sharding.zero)
            gathering = gathering_layers(model, sharding.zero, again=remat is True)
            outputs = forward_with_remat(gathering, remat, sharding.layer_shards)

            def one_microbatch(microbatch: PyTree) -> tuple[PyTree, PyTree]:
                params_of, trained = partial(with_trained, params), only_trained(params)
                loss_sums, grads = _loss_and_grads(loss, outputs, params_of, trained, microbatch, total_weight)
                scattered = lambda z, grad: grad if z.is_param else scatter_early(z, grad)
                return loss_sums, jax.tree.map(scattered, of_grads, grads)

            loss_sums, grads = accumulate(one_microbatch, batch, num_microbatches)
            return reduce_and_shard(loss_sums, grads, of_grads)

        def sums_overlapping(params: PyTree, batch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            assert isinstance(model, LayeredModel), "its layers reduce their gradients"
            rematerialised = with_remat(model, remat, sharding.layer_shards)
            outputs = reducing_layers(rematerialised, of_grads, params).apply

            def zeros(earlier: PyTree | None) -> PyTree:
                like = jax.eval_shape(partial(reduced_or_added, of_grads[LAYERS]), params[LAYERS], earlier)
                return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

            def one_microbatch(microbatch: PyTree, earlier: PyTree | None = None) -> tuple[PyTree, PyTree]:
                beside = lambda totals: beside_sums(params[LAYERS], earlier, totals)
                params_of = lambda trained: trained | {LAYERS: beside(trained[LAYERS])}
                trained = {OUTER: params[OUTER], LAYERS: zeros(earlier)}
                return _loss_and_grads(loss, outputs, params_of, trained, microbatch, total_weight)

            at = jax.tree.leaves(batch)[0].shape[0] // num_microbatches * (num_microbatches - 1)
            first, last = (jax.tree.map(lambda a, part=part: a[part], batch) for part in (slice(at), slice(at, None)))
            if num_microbatches == 1:
                return reduce_rest(*one_microbatch(last, zeros(None)), of_grads)
            earlier_loss, earlier = accumulate(one_microbatch, first, num_microbatches - 1)
            # Otherwise XLA may run the last forward pass first, and keep its residuals beside those of the loop.
            last, earlier_loss = jax.lax.optimization_barrier((last, earlier_loss))
            loss_sums, grads = one_microbatch(last, earlier[LAYERS])
            added = partial(jax.tree.map, lambda total, last: total + last.astype(total.dtype))
            total = grads | {OUTER: added(earlier[OUTER], grads[OUTER])}
            return reduce_rest(added(earlier_loss, loss_sums), total, of_grads)

        in_use = sums_overlapping if parallel.overlap_grad_reduce else sums
        return run_on_shards(in_use, sharding, params, batch, traced_loss(params, batch), mesh)

    return run


def _merging(
    model: LayeredModel,
    loss: Loss,
    parallel: Parallel,
    pipeline: Pipeline,
    overlaps: bool,
    shard: Callable[[PyTree], StepSharding],
    traced_loss: TraceLoss,
    otherwise: ValueAndGrad,
) -> ValueAndGrad:
    """One stage with a ``tensor`` axis: F of one microbatch beside B of another, so that collectives run beside products.

    Layers that are not stacked run ``otherwise``.
    """
    remat = pipeline.policy
    if remat is not False:  # a layer that is recomputed in B, beside F
        model = model.wrap_layers(partial(jax.checkpoint, policy=None if remat is True else remat))
    schedule = make_schedule("1f1b", 1, pipeline.num_microbatches, form="merged")
    program = spmd_program(schedule, masks=True, overlaps=overlaps)
    run = _pipelined(model, loss, program, parallel, shard, traced_loss)
    return lambda params, batch: (run if is_stacked(params) else otherwise)(params, batch)


def _loss_and_grads(
    loss: Loss,
    outputs: Callable[[PyTree, PyTree], PyTree],
    params_of: Callable[[PyTree], PyTree],
    trained: PyTree,
    microbatch: PyTree,
    total_weight: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns ((loss_sum, further sums), gradients) of a microbatch, of loss_sum / total_weight for ``trained``."""

    @fold_transposes
    def differentiate(trained: PyTree, microbatch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
        loss_of = lambda trained: sums_of(loss, outputs(params_of(trained), microbatch), microbatch)
        loss_sum, vjp, further = jax.vjp(loss_of, trained, has_aux=True)
        return (loss_sum, further), vjp(jnp.reciprocal(total_weight).astype(loss_sum.dtype))[0]

    return differentiate(trained, microbatch, total_weight)


def _pipelined(
    model: LayeredModel,
    loss: Loss,
    program: Program,
    parallel: Parallel,
    shard: Callable[[PyTree], StepSharding],
    traced_loss: TraceLoss,
) -> ValueAndGrad:
    """Several stages: one loop over the ticks of each segment of the program."""
    schedule, mesh, layout = program.schedule, parallel.mesh, parallel.layout
    assert isinstance(mesh, Mesh), "a step runs on devices"
    is_late = parallel.zero == 3 or (program.overlaps and parallel.zero == 2)

    def run(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        check_equal_layers(params[LAYERS])
        own_layout = layout or LayerLayout(
            num_layers(params), schedule.num_stages, schedule.num_chunks, placement=schedule.placement
        )
        check_layout(own_layout, schedule, num_layers(params), is_packed=layout is not None)
        packed = params if layout else params | {LAYERS: own_layout.in_packed_order(params[LAYERS])}
        canonical = (
            params | {LAYERS: jax.eval_shape(own_layout.in_canonical_order, params[LAYERS])} if layout else params
        )
        sharding = shard(packed)
        of_grads = sharding.zero_of_grads
        of_layer, of_layer_grads = (
            jax.tree.map(ZeroShard.of_one_layer, zero[LAYERS]) for zero in (sharding.zero, of_grads)
        )

        def sums(params: PyTree, batch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            stage = build_stage(
                model,
                loss,
                program,
                own_layout,
                params,
                microbatches=split_microbatches(batch, schedule.num_microbatches),
                total_weight=total_weight,
                over_replicas=OverReplicas(
                    gather_layer=partial(jax.tree.map, gather_as_given, of_layer),
                    scatter_layer=partial(jax.tree.map, scatter_early, of_layer_grads),
                    reduce_layers=lambda layers: reduce_and_shard(None, layers, of_grads[LAYERS])[1],
                    is_late=is_late,
                ),
                layer_shards=sharding.layer_shards,
                outer_specs=jax.tree.map(lambda zero: zero.tensor, sharding.zero[OUTER]),
            )
            loss_sum, grads = sum_over_stages(*accumulate_pipelined(stage, params), sharding.replica_grads)
            return (reduce_rest if stage.program.reduces else reduce_and_shard)(loss_sum, grads, of_grads)

        value, grads = run_on_shards(sums, sharding, packed, batch, traced_loss(canonical, batch), mesh)
        return value, grads if layout else grads | {LAYERS: own_layout.in_canonical_order(grads[LAYERS])}

    return run
