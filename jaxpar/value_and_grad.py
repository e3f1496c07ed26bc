"""The entry point: ``value_and_grad`` on a mesh, from data, pipeline and tensor parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.remat import forward_with_remat
from jaxpar.data_parallel import accumulate, check_batch, reduce_gradients, split_microbatches
from jaxpar.data_parallel.overlap import accumulate_overlapping
from jaxpar.data_parallel.zero import gathering_layers, reduce_and_cut, reduce_layers, reduce_rest
from jaxpar.frozen import only_trained, with_trained
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, check_layer, num_layers
from jaxpar.loss_sums import sums_of, with_float_sums
from jaxpar.mesh import DATA, STAGE, check_mesh
from jaxpar.packed_layers import check_unpacked
from jaxpar.pipeline import (
    LayerLayout,
    MpmdExecutor,
    OverReplicas,
    Program,
    accumulate_pipelined,
    build_stage,
    check_layout,
    masks_idle_ops,
    on_packed,
    open_params,
    spmd_program,
    sum_over_stages,
)
from jaxpar.row_dependence import check_leaves_of_x, check_sums_of_loss
from jaxpar.schedule import Schedule, check_schedule_name, lockstep_form, make_schedule
from jaxpar.step_sharding import StepSharding
from jaxpar.traced_loss import TracedLoss, trace_loss
from jaxpar.trainable import Trainable, accept_frozen, check_trainable, freeze
from jaxpar.validation import (
    check_equal_layers,
    check_loss,
    check_one_stage,
    check_overlap_grad_reduce,
    check_params,
    check_reduce_dtype,
    check_schedule,
    check_settings,
    check_zero,
)

Loss = Callable[[PyTree, PyTree], tuple]
Remat = bool | Callable[..., bool]
ValueAndGrad = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
TraceLoss = Callable[[PyTree, PyTree], TracedLoss]


def value_and_grad(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    loss: Loss,
    mesh: Mesh,
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
    mask_idle_ops: bool | None = None,
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
        mesh: A mesh from ``make_mesh``. Params keep their shardings over ``tensor``; the rows of the batch are split over
            ``data``.
        schedule: The pipeline schedule: a name, or a table from ``make_schedule`` or of your own. A name gives the "fused" form
            for the spmd executor, whose stages run in lock-step (zb-v: the "unit" form), and the "published" form for the
            mpmd executor (``schedule/orders.py``). With one stage every schedule is plain gradient accumulation.
        num_microbatches: The number of microbatches into which each replica splits its rows.
        num_chunks: The number of chunks of layers on each stage; by default what the schedule needs.
        remat: False: store only activations that elementwise operations cannot recompute, found by a minimum cut
            (``backward/min_cut.py``). True: store only the input of each layer. Or a ``jax.checkpoint`` policy, which says
            what else may be recomputed.
        zero: The ZeRO level (``data_parallel/zero.py``). At 1 and above gradients are returned sharded over ``data``, as
            ``init_state(zero=...)`` shards the optimizer state; at 3 params are sharded too.
        executor: "spmd": one jitted program, on any number of hosts. "mpmd": one jitted program for each stage and kind of op,
            dispatched by one process in the order of the schedule, without lock-step. It is called directly, not under
            ``jax.jit``, and also takes layers that differ. With one stage the two are the same.
        layout: Which stage and chunk holds which layers. Layers of params and gradients are then packed by it
            (``LayerLayout.pack``); a layout in the model's order packs nothing. By default params and gradients are in the
            model's order and layers are spread evenly; if the order of the devices differs, weights move between stages in
            each step.
        shardings: The NamedShardings of the params, needed with a ``tensor`` axis for gradients to be sharded over ``data``
            (ZeRO) and ``stage`` (those of outer) along dims not sharded over ``tensor``. Without them outer's are replicated.
        overlap_grad_reduce: Reduce the gradients of each layer over ``data`` as soon as they are complete, during the backward
            pass of the last microbatch, so that communication overlaps with the backward pass of other layers. As many bytes,
            in one all-reduce a layer and one more (XLA may join those of a list of layers), with ZeRO in a reduce-scatter for
            each sharded gradient of a layer (at level 2 in each microbatch, as without it). In a pipeline each covers a layer
            of every chunk and runs in the last tick, if that is masked (``mask_idle_ops``); else nothing changes. It needs a
            LayeredModel, ``zero`` up to 2 (level 3 does so by itself) and, with several stages, the spmd executor. With one
            stage it takes the memory of the residuals of one more microbatch on GPUs.
        grad_reduce_dtype: The dtype in which gradients are reduced over ``data``, such as bfloat16 for half of the traffic and
            less precision. By default float32, or the gradients' own dtype if it is wider. XLA's CPU backend cannot reduce in
            16 bits. Complex gradients are reduced as their real and imaginary parts.
        mask_idle_ops: Whether an idle stage of a pipeline computes an op and discards the result, where that takes no longer,
            instead of skipping it; by default True on GPUs, where skipping makes the host wait. Ops with side effects, calls of
            the host or loops of unknown length are always skipped (``pipeline/control_flow.py``). For the spmd executor alone.
        trainable: Patterns of the paths of the params that are trained, as in ``shardings_from_paths``; None: all. The others
            are frozen: in their place the gradients have None, and none is computed, stored or reduced. ``init_state`` too.
        has_aux: Whether the loss returns metrics too: ``(loss_sum, weight_sum, sums)``, where ``sums`` is a dict of scalars by
            name, each a sum over the rows, such as ``{"accuracy": number of right answers}``. The function then returns
            ``((loss, means), gradients)``, as ``jax.value_and_grad(has_aux=True)`` does: each mean is the sum over the whole
            batch divided by its weight, as the loss is, in float32 or wider (also with ``grad_reduce_dtype``). The sums are not
            differentiated. They are reduced with the loss, without further collectives; those of integers are exact.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; or, at a call and before anything is compiled, params or a batch that do not fit.

    **Collectives**: over ``data`` one all-reduce a step, of gradients and sums together, for any number of microbatches (apart
    with ``grad_reduce_dtype``; one a stage with the mpmd executor; reduce-scatters for sharded gradients with ZeRO), and before
    it one of the weight, a single number; over ``tensor`` what XLA inserts for the shardings of the params; over ``stage`` one
    activation and one gradient for each boundary and microbatch, and the reduction of the gradients of ``outer``, a
    reduce-scatter if they are sharded over ``stage``.
    """
    check_mesh(mesh)
    check_settings(model, mesh, num_microbatches, num_chunks, remat, zero, executor)
    check_one_stage(layout, mesh)
    if not isinstance(schedule, Schedule):
        check_schedule_name(schedule)
    check_trainable(trainable)
    check_overlap_grad_reduce(overlap_grad_reduce, model, mesh, zero, executor, trainable)
    check_reduce_dtype(grad_reduce_dtype, mesh)
    model, frozen = accept_frozen(model, trainable), partial(freeze, trainable=trainable)
    forward = model.apply if isinstance(model, LayeredModel) else model
    check_result, check_sums = partial(check_loss, loss, has_aux=has_aux), partial(check_sums_of_loss, forward, loss)
    loss = with_float_sums(loss)
    traced_loss = partial(trace_loss, model, loss, mesh, num_microbatches, executor)

    def check(params: PyTree, batch: PyTree) -> None:
        check_unpacked(params, "Or give value_and_grad the layout= that packed them.")
        check_batch(batch, mesh.shape[DATA], num_microbatches)
        check_params(params)
        if isinstance(model, LayeredModel):
            num_layers(params)
            check_layer(model, params, batch)
        check_result(jax.eval_shape(forward, params, batch), batch)
        traced_loss(params, batch)
        check_leaves_of_x(model, loss, params, batch, mesh.shape[DATA] * num_microbatches)
        check_sums(params, batch, mesh.shape[DATA] * num_microbatches)

    check_zero(zero, mesh, executor, shardings)
    layered = isinstance(model, LayeredModel)
    opened = None if shardings is None else frozen(open_params(shardings, layout))
    sharding = partial(StepSharding, mesh, zero, opened, layered=layered, reduce_dtype=grad_reduce_dtype)
    if mesh.shape[STAGE] == 1 or not isinstance(model, LayeredModel):
        one_stage: Callable = accumulate_overlapping if overlap_grad_reduce else _accumulating
        return _checked(one_stage(model, loss, num_microbatches, remat, sharding, traced_loss), check, frozen)
    sizes = mesh.shape[STAGE], num_microbatches, num_chunks
    masks = masks_idle_ops(mesh) if mask_idle_ops is None else mask_idle_ops
    if isinstance(schedule, Schedule):
        check_schedule(schedule, *sizes, remat)
    else:
        form = "published" if executor == "mpmd" else lockstep_form(schedule)
        schedule = make_schedule(schedule, *sizes, form=form, remat=remat is True)
    # With a policy layers store what it saves; under remat=True the schedule has an op R that recomputes.
    staged = model if isinstance(remat, bool) else model.wrap_layers(partial(jax.checkpoint, policy=remat))
    if executor == "mpmd":
        return MpmdExecutor(
            staged,
            loss,
            mesh,
            schedule,
            layout,
            split=split_microbatches,
            reduce=reduce_gradients,
            reduce_dtype=grad_reduce_dtype,
            traced_loss=traced_loss,
            check=check,
            frozen=frozen,
        )
    program = spmd_program(schedule, masks=masks, overlaps=overlap_grad_reduce and mesh.shape[DATA] > 1)
    run = _pipelined(staged, loss, program, layout, sharding, traced_loss)
    return on_packed(_checked(run, check, frozen), layout)


def _checked(
    run: ValueAndGrad, check: Callable[[PyTree, PyTree], None], frozen: Callable[[PyTree], PyTree]
) -> ValueAndGrad:
    """Returns ``run`` jitted; it marks frozen params and checks its arguments first."""
    compiled, checked = jax.jit(run), set()

    def value_and_grad_on_mesh(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss over the whole batch and its gradients, which have the structure of params."""
        params = frozen(params)
        leaves, tree = jax.tree.flatten((params, batch))
        kind = (tree, *((jnp.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves))
        if kind not in checked:
            check(params, batch)
            checked.add(kind)
        return compiled(params, batch)

    return value_and_grad_on_mesh


def _accumulating(
    model: LayeredModel | Callable,
    loss: Loss,
    num_microbatches: int,
    remat: Remat,
    sharding: Callable[[PyTree], StepSharding],
    traced_loss: TraceLoss,
) -> ValueAndGrad:
    """One stage: the sum of the vjps of the microbatches."""

    def run(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        own = sharding(params)
        gathering = gathering_layers(model, own.cuts, again=remat is True) if isinstance(model, LayeredModel) else model
        outputs = forward_with_remat(gathering, remat, own.layer_shards)

        def sums(params: PyTree, batch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
            @fold_transposes
            def differentiate(params: PyTree, microbatch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
                loss_of = lambda trained: sums_of(loss, outputs(with_trained(params, trained), microbatch), microbatch)
                loss_sum, vjp, further = jax.vjp(loss_of, only_trained(params), has_aux=True)
                return (loss_sum, further), vjp(jnp.reciprocal(total_weight).astype(loss_sum.dtype))[0]

            def one_microbatch(microbatch: PyTree) -> tuple[PyTree, PyTree]:
                loss_sums, grads = differentiate(params, microbatch, total_weight)
                return loss_sums, own.grad_cuts.scatter_layers(grads)

            params = own.cuts.widen_layers(params)
            return partial(reduce_and_cut, cuts=own.grad_cuts)(*accumulate(one_microbatch, batch, num_microbatches))

        return own.over_replicas(sums, params, batch, traced_loss(params, batch))

    return run


def _pipelined(
    model: LayeredModel,
    loss: Loss,
    program: Program,
    layout: LayerLayout | None,
    sharding: Callable[[PyTree], StepSharding],
    traced_loss: TraceLoss,
) -> ValueAndGrad:
    """Several stages: one loop over the ticks of each segment of the program."""
    schedule = program.schedule

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
        own = sharding(packed)

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
                    gather_layer=own.cuts.gather_shards,
                    scatter_layer=own.grad_cuts.scatter_layer,
                    reduce_layers=partial(reduce_layers, cuts=own.grad_cuts),
                    is_late=own.cuts.level == 3 or (program.overlaps and own.cuts.level == 2),
                ),
                layer_shards=own.layer_shards,
                outer_specs=own.cuts.tensor[OUTER],
            )
            loss_sum, grads = sum_over_stages(*accumulate_pipelined(stage, params), own.taken)
            return (reduce_rest if stage.program.reduces else reduce_and_cut)(loss_sum, grads, own.grad_cuts)

        value, grads = own.over_replicas(sums, packed, batch, traced_loss(canonical, batch))
        return value, grads if layout else grads | {LAYERS: own_layout.in_canonical_order(grads[LAYERS])}

    return run
