"""The entry point: ``value_and_grad`` on a mesh, from data, pipeline and tensor parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar._compat import EMPTY_ARRAYS_CRASH
from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.remat import forward_with_remat
from jaxpar.data_parallel import accumulate, check_batch, reduce_gradients, split_microbatches
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, check_layer, check_unpacked, is_stacked, num_layers
from jaxpar.loss_checks import check_leaves_of_x, check_loss, check_sums_of_loss
from jaxpar.loss_sums import sums_of, with_float_sums
from jaxpar.mesh import DATA, STAGE, TENSOR
from jaxpar.overlap import accumulate_overlapping
from jaxpar.parallel import Parallel, Pipeline, Remat, accepts_settings, check_equal_layers, check_settings
from jaxpar.pipeline import (
    LayerLayout,
    MpmdExecutor,
    OverReplicas,
    Program,
    accumulate_pipelined,
    build_stage,
    check_layout,
    on_packed,
    open_params,
    spmd_program,
    sum_over_stages,
)
from jaxpar.schedule import Schedule, make_schedule
from jaxpar.sharding import path_string
from jaxpar.step_sharding import StepSharding
from jaxpar.traced_loss import TracedLoss, trace_loss
from jaxpar.trainable import Trainable, accept_frozen, freeze, only_trained, with_trained
from jaxpar.zero import gathering_layers, reduce_and_cut, reduce_layers, reduce_rest

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

    **Collectives**: over ``data`` one all-reduce a step, of gradients and sums together, for any number of microbatches (apart
    with ``grad_reduce_dtype``; one a stage with the mpmd executor; reduce-scatters for sharded gradients with ZeRO), and before
    it one of the weight, a single number; over ``tensor`` what XLA inserts for the shardings of the params; over ``stage`` one
    activation and one gradient for each boundary and microbatch, and the reduction of the gradients of ``outer``, a
    reduce-scatter if they are sharded over ``stage``.
    """
    if pipeline is not None:
        raise TypeError(f"pipeline must be a jaxpar.Pipeline; got {pipeline!r}. Write jaxpar.Pipeline({pipeline!r}).")
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
    check_settings(model, parallel, pipeline)
    return _with_settings(model, loss, parallel, pipeline, has_aux=has_aux)


def _with_settings(
    model: LayeredModel | Callable, loss: Loss, parallel: Parallel, pipeline: Pipeline, *, has_aux: bool
) -> ValueAndGrad:
    mesh, zero, layout, trainable = parallel.mesh, parallel.zero, parallel.layout, parallel.trainable
    assert isinstance(mesh, Mesh), "a step runs on devices"
    num_microbatches, executor, remat = pipeline.num_microbatches, pipeline.executor, pipeline.policy
    model, frozen = accept_frozen(model, trainable), partial(freeze, trainable=trainable)
    forward = model.apply if isinstance(model, LayeredModel) else model
    check_result, check_sums = partial(check_loss, loss, has_aux=has_aux), partial(check_sums_of_loss, forward, loss)
    loss = with_float_sums(loss)
    traced_loss = partial(trace_loss, model, loss, mesh, num_microbatches, executor)

    def check(params: PyTree, batch: PyTree) -> None:
        check_unpacked(params, "Or give value_and_grad the layout= that packed them.")
        check_batch(batch, mesh.shape[DATA], num_microbatches)
        _check_params(params)
        if isinstance(model, LayeredModel):
            num_layers(params)
            check_layer(model, params, batch)
        check_result(jax.eval_shape(forward, params, batch), batch)
        traced_loss(params, batch)
        check_leaves_of_x(model, loss, params, batch, mesh.shape[DATA] * num_microbatches)
        check_sums(params, batch, mesh.shape[DATA] * num_microbatches)

    layered = isinstance(model, LayeredModel)
    opened = None if parallel.shardings is None else frozen(open_params(parallel.shardings, layout))
    sharding = partial(StepSharding, mesh, zero, opened, layered=layered, reduce_dtype=parallel.grad_reduce_dtype)
    masks, overlaps = pipeline.masks(mesh), parallel.overlap_grad_reduce and mesh.shape[DATA] > 1
    if mesh.shape[STAGE] == 1 or not isinstance(model, LayeredModel):
        one_stage: Callable = accumulate_overlapping if parallel.overlap_grad_reduce else _accumulating
        run = one_stage(model, loss, num_microbatches, remat, sharding, traced_loss)
        if masks and mesh.shape[TENSOR] > 1 and num_microbatches > 1 and isinstance(model, LayeredModel):
            run = _merging(model, loss, num_microbatches, remat, overlaps, sharding, traced_loss, run)
        return _checked(run, check, frozen)
    schedule = pipeline.table(mesh.shape[STAGE], masks=masks)
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
            reduce_dtype=parallel.grad_reduce_dtype,
            traced_loss=traced_loss,
            check=check,
            frozen=frozen,
        )
    program = spmd_program(schedule, masks=masks, overlaps=overlaps)
    run = _pipelined(staged, loss, program, layout, sharding, traced_loss)
    return on_packed(_checked(run, check, frozen), layout)


def _check_params(params: PyTree) -> None:
    """Raises for params that have no gradient, or that XLA cannot compile."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                "params must be floating-point or complex arrays, since each is given a gradient; got "
                f"{path_string(path)} of dtype {jnp.result_type(leaf)}. Put it into the batch, or close over it."
            )
        if EMPTY_ARRAYS_CRASH and jnp.size(leaf) == 0:
            raise ValueError(
                f"XLA as of JAX 0.11 crashes on sums of arrays without elements inside shard_map; got {path_string(path)} of "
                f"shape {jnp.shape(leaf)} with JAX {jax.__version__}. Leave it out of the params, or use JAX 0.10."
            )


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
    remat: bool | Callable[..., bool],
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


def _merging(
    model: LayeredModel,
    loss: Loss,
    num_microbatches: int,
    remat: bool | Callable[..., bool],
    overlaps: bool,
    sharding: Callable[[PyTree], StepSharding],
    traced_loss: TraceLoss,
    otherwise: ValueAndGrad,
) -> ValueAndGrad:
    """One stage with a ``tensor`` axis: F of one microbatch beside B of another, so that collectives run beside products.

    Layers that are not stacked run ``otherwise``.
    """
    if remat is not False:  # a layer that is recomputed in B, beside F
        model = model.wrap_layers(partial(jax.checkpoint, policy=None if remat is True else remat))
    program = spmd_program(make_schedule("1f1b", 1, num_microbatches, form="merged"), masks=True, overlaps=overlaps)
    run = _pipelined(model, loss, program, None, sharding, traced_loss)
    return lambda params, batch: (run if is_stacked(params) else otherwise)(params, batch)


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
