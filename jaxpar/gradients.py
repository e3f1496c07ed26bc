"""The entry point: ``value_and_grad`` on a mesh, from data, pipeline and tensor parallelism."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar._compat import is_compile_only
from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.padded_dims import keep_padding
from jaxpar.backward.remat import forward_with_remat, with_remat
from jaxpar.data_parallel import accumulate, check_batch, check_sequences, split_microbatches
from jaxpar.fields import check_kind
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, is_stacked, num_layers, output_shapes
from jaxpar.loss_checks import check_loss
from jaxpar.loss_sums import sums_of, with_float_sums
from jaxpar.mesh import CONTEXT, DATA, REPLICA, REPLICAS, STAGE, TENSOR, num_replicas
from jaxpar.parallel import Parallel, Pipeline, Remat, accepts_settings, check_equal_layers, check_settings
from jaxpar.pipeline import (
    LayerLayout,
    MpmdExecutor,
    Program,
    accumulate_pipelined,
    build_stage,
    close_params,
    fitting_layout,
    one_stage,
    open_params,
    spmd_program,
    sum_over_stages,
)
from jaxpar.position_checks import check_owned, check_positions
from jaxpar.row_checks import check_rows
from jaxpar.runtime.distributed import check_joined
from jaxpar.schedule import Schedule, make_schedule
from jaxpar.sharding import check_batch_on, check_same_tree
from jaxpar.step_sharding import StepSharding, run_on_shards, shard_step
from jaxpar.traced_loss import TracedLoss, once_for_shapes, trace_loss
from jaxpar.trainable import Frozen, Trainable, accept_frozen, check_params, freeze, only_trained, with_trained
from jaxpar.zero_layers import beside_sums, gathering_layers, reduced_or_added, reducing_layers, wide_shards

Loss = Callable[[PyTree, PyTree], tuple]
ValueAndGrad = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


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
            Both are sums over the rows of one microbatch: ``jnp.sum(errors), 1.0`` is refused, as is a term that is a mean
            over rows. What cannot be proved is taken with a warning (``row_checks.py``). weight_sum must depend on the
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
        NotJoinedError: A launcher or cluster has started this process as one of several, and ``initialize`` was not called.
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
    assert isinstance(mesh, Parallel), "made of a mesh and its settings"
    assert isinstance(pipeline, Pipeline), "made of its settings"
    check_kind((bool,), "a bool", "Use True for a loss that returns further sums.", has_aux=has_aux)
    return with_settings(model, loss, mesh, pipeline, has_aux=has_aux)


def with_settings(
    model: LayeredModel | Callable, loss: Loss, parallel: Parallel, pipeline: Pipeline, *, has_aux: bool | None
) -> ValueAndGrad:
    """Returns ``value_and_grad``; with ``has_aux=None`` it trains nothing, and its value is what ``loss`` returns."""
    if isinstance(parallel.mesh, Mesh) and not is_compile_only(parallel.mesh.devices.flat[0]):
        check_joined()
    check_settings(model, loss, parallel, pipeline)
    mesh, layout, trains = parallel.mesh, parallel.layout, has_aux is not None
    assert isinstance(mesh, Mesh), "check_settings takes no other"
    model = accept_frozen(model, parallel.trainable if trains else ())
    frozen = partial(freeze, trainable=parallel.trainable) if trains else partial(jax.tree.map, Frozen)
    shardings = None if parallel.shardings is None else frozen(open_params(parallel.shardings, layout))
    step = _Step(model, loss, mesh, parallel, pipeline, shardings, has_aux)
    masks, run = pipeline.masks(mesh), step.one_stage
    if isinstance(model, LayeredModel) and mesh.shape[STAGE] > 1:
        schedule = pipeline.table(mesh.shape[STAGE], masks=masks)
        if pipeline.executor == "mpmd":
            return MpmdExecutor(
                _storing(model, pipeline, schedule),
                step.float_loss,
                mesh,
                schedule,
                layout,
                reduce_dtype=parallel.grad_reduce_dtype,
                traced_loss=step.traced_loss,
                check=step.check,
                frozen=frozen,
            )
        run = partial(step.pipelined, spmd_program(schedule, masks=masks))
    elif isinstance(model, LayeredModel) and trains and masks and pipeline.num_microbatches > 1:
        run = step.microbatches_of_one_stage
    compiled = jax.jit(run)

    def value_and_grad_on_mesh(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss over the whole batch and its gradients, which have the structure of params."""
        params = frozen(open_params(params, layout))
        step.check(params, batch)
        check_batch_on(batch, step.mesh)
        value, grads = compiled(params, batch)
        return value, close_params(grads, layout)

    return value_and_grad_on_mesh


def _form_on_one_stage(parallel: Parallel, params: PyTree) -> str | None:
    """Returns the form of 1F1B for the microbatches of one stage, where idle ops are masked; None: plain accumulation."""
    if not is_stacked(params):
        return None
    if parallel.mesh.shape[TENSOR] > 1:
        return "merged"  # F of one microbatch beside B of another, so that collectives run beside products
    return "fused" if one_stage.takes(parallel.zero, num_layers(params)) else None


def _storing(model: LayeredModel, pipeline: Pipeline, schedule: Schedule) -> LayeredModel:
    """Returns the model whose layers store what ``remat`` saves, unless the schedule has an op R that recomputes the rest."""
    remat = pipeline.policy
    if remat is False or (remat is True and schedule.recomputes):
        return model
    return model.wrap_layers(partial(jax.checkpoint, policy=None if remat is True else remat))


@dataclass(frozen=True, eq=False)
class _Step:
    """The step of a model with its settings. Its methods are the functions ``(params, batch) -> (value, gradients)``.

    Attributes:
        model: The model, a LayeredModel or with one stage a function, of params of which some may be frozen.
        loss: The loss.
        mesh: The mesh.
        parallel: Where arrays live.
        pipeline: What runs when.
        shardings: Those of ``parallel``, with frozen params marked and layers in packed order.
        has_aux: As for ``value_and_grad``; None: the step trains nothing.
    """

    model: Any
    loss: Loss
    mesh: Mesh
    parallel: Parallel
    pipeline: Pipeline
    shardings: PyTree | None
    has_aux: bool | None

    @cached_property
    def float_loss(self) -> Loss:
        """The loss, whose sums are floats."""
        return with_float_sums(self.loss)

    @cached_property
    def traced_loss(self) -> Callable[[PyTree, PyTree], TracedLoss]:
        """The traced loss for params in the model's order and a batch, traced once for each new set of shapes."""
        num_microbatches, executor = self.pipeline.num_microbatches, self.pipeline.executor
        trace = partial(trace_loss, self.model, self.float_loss, self.mesh, num_microbatches, executor)
        return once_for_shapes(lambda *given: replace(trace(*given), is_mean=self.has_aux is not None))

    @cached_property
    def check(self) -> Callable[[PyTree, PyTree], None]:
        """Raises for params or a batch that do not fit, once for each new set of shapes."""
        model, loss, mesh, num_microbatches = self.model, self.loss, self.mesh, self.pipeline.num_microbatches
        forward = model.apply if isinstance(model, LayeredModel) else model

        def check(params: PyTree, batch: PyTree) -> None:
            check_batch(batch, mesh.shape[DATA], num_microbatches, replica=mesh.shape[REPLICA])
            check_sequences(batch, mesh)
            check_params(params)
            if self.shardings is not None:
                check_same_tree(self.shardings, params)
            if isinstance(model, LayeredModel):
                num_layers(params)
            check_loss(loss, output_shapes(model, params, batch), batch, has_aux=self.has_aux)
            if not self.traced_loss(params, batch).reads_params and self.has_aux is not None:
                raise ValueError(
                    "a model's outputs must depend on its params; got outputs that depend on none of them, such as numbers of "
                    "NumPy, so that nothing would be trained. Compute them from the params that the model is given."
                )
            check_rows(model, loss, params, batch, num_replicas(mesh) * num_microbatches)
            check_positions(model, loss, params, batch, mesh.shape[CONTEXT])
            check_owned(forward, params, batch, self.shardings, mesh)

        return once_for_shapes(check)

    def one_stage(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """One stage: the sum of the vjps of the microbatches."""
        sharding = self._sharding(params)
        sums = partial(self._sums_overlapping if self.parallel.overlap_grad_reduce else self._sums, sharding)
        return run_on_shards(sums, sharding, params, batch, self.traced_loss(params, batch), self.mesh)

    def microbatches_of_one_stage(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """One stage and several microbatches, where idle ops are masked."""
        form = _form_on_one_stage(self.parallel, params)
        if form is None:
            return self.one_stage(params, batch)
        # At ZeRO 2 every microbatch has reduced its layers' gradients, but for those over replica.
        left = REPLICAS if self.parallel.zero < 2 else (REPLICA,)
        overlaps = self.parallel.overlap_grad_reduce and any(self.mesh.shape[axis] > 1 for axis in left)
        schedule = make_schedule("1f1b", 1, self.pipeline.num_microbatches, form=form)
        return self.pipelined(spmd_program(schedule, masks=True, overlaps=overlaps), params, batch)

    def _sharding(self, params: PyTree) -> StepSharding:
        return shard_step(params, self.parallel, self.shardings, layered=isinstance(self.model, LayeredModel))

    def _sums(
        self, sharding: StepSharding, params: PyTree, batch: PyTree, total_weight: jax.Array
    ) -> tuple[PyTree, PyTree]:
        zero, remat, model = sharding.zero, self.pipeline.policy, self.model
        if zero.gathers_layers:
            model = gathering_layers(model, zero, again=remat is True)
            params = wide_shards(params, zero)
        outputs = forward_with_remat(model, remat, sharding.layer_shards)

        def one_microbatch(microbatch: PyTree) -> tuple[PyTree, PyTree]:
            params_of, trained = partial(with_trained, params), only_trained(params)
            loss_sums, grads = _loss_and_grads(self.float_loss, outputs, params_of, trained, microbatch, total_weight)
            # The vjp of a layer that gathers its params has added their gradients.
            return loss_sums, grads if zero.gathers_layers else zero.add(grads)

        loss_sums, grads = accumulate(one_microbatch, batch, self.pipeline.num_microbatches)
        return zero.finish(loss_sums, grads)

    def _sums_overlapping(
        self, sharding: StepSharding, params: PyTree, batch: PyTree, total_weight: jax.Array
    ) -> tuple[PyTree, PyTree]:
        zero, num_microbatches = sharding.zero, self.pipeline.num_microbatches
        rematerialised = with_remat(self.model, self.pipeline.policy, sharding.layer_shards)
        outputs = reducing_layers(rematerialised, zero, params).apply

        def zeros(earlier: PyTree | None) -> PyTree:
            like = jax.eval_shape(partial(reduced_or_added, zero[LAYERS]), params[LAYERS], earlier)
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

        def one_microbatch(microbatch: PyTree, earlier: PyTree | None = None) -> tuple[PyTree, PyTree]:
            beside = lambda totals: beside_sums(params[LAYERS], earlier, totals)
            params_of = lambda trained: trained | {LAYERS: beside(trained[LAYERS])}
            trained = {OUTER: params[OUTER], LAYERS: zeros(earlier)}
            return _loss_and_grads(self.float_loss, outputs, params_of, trained, microbatch, total_weight)

        at = jax.tree.leaves(batch)[0].shape[0] // num_microbatches * (num_microbatches - 1)
        first, last = (jax.tree.map(lambda a, part=part: a[part], batch) for part in (slice(at), slice(at, None)))
        if num_microbatches == 1:
            return zero.finish_outer(*one_microbatch(last, zeros(None)))
        earlier_loss, earlier = accumulate(one_microbatch, first, num_microbatches - 1)
        # Otherwise XLA may run the last forward pass first, and keep its residuals beside those of the loop.
        last, earlier_loss = jax.lax.optimization_barrier((last, earlier_loss))
        loss_sums, grads = one_microbatch(last, earlier[LAYERS])
        added = partial(jax.tree.map, lambda total, last: total + last.astype(total.dtype))
        total = grads | {OUTER: added(earlier[OUTER], grads[OUTER])}
        return zero.finish_outer(added(earlier_loss, loss_sums), total)

    def pipelined(self, program: Program, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Several stages, or one with a merged schedule: one loop over the ticks of each segment of the program."""
        check_equal_layers(params[LAYERS])
        layout, canonical = fitting_layout(self.parallel.layout, program.schedule, params)
        is_packed = self.parallel.layout is not None
        packed = params if is_packed else params | {LAYERS: layout.in_packed_order(params[LAYERS])}
        sharding = self._sharding(packed)
        sums = partial(self._sums_of_pipeline, program, layout, sharding)
        value, grads = run_on_shards(sums, sharding, packed, batch, self.traced_loss(canonical, batch), self.mesh)
        return value, grads if is_packed else grads | {LAYERS: layout.in_canonical_order(grads[LAYERS])}

    def _sums_of_pipeline(
        self,
        program: Program,
        layout: LayerLayout,
        sharding: StepSharding,
        params: PyTree,
        batch: PyTree,
        total_weight: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        zero = sharding.zero
        stage = build_stage(
            _storing(self.model, self.pipeline, program.schedule),
            self.float_loss,
            program,
            layout,
            params,
            microbatches=split_microbatches(batch, program.schedule.num_microbatches),
            total_weight=total_weight,
            zero=zero[LAYERS],
            layer_shards=sharding.layer_shards,
            outer_specs=jax.tree.map(lambda shard: shard.tensor, zero.shards[OUTER]),
        )
        loss_sums, grads = sum_over_stages(*accumulate_pipelined(stage, params), sharding.replica_grads)
        finish = zero.finish_outer if stage.program.reduces else zero.finish
        return finish(loss_sums, grads)


def _loss_and_grads(
    loss: Loss,
    outputs: Callable[[PyTree, PyTree], PyTree],
    params_of: Callable[[PyTree], PyTree],
    trained: PyTree,
    microbatch: PyTree,
    total_weight: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns ((loss_sum, further sums), gradients) of a microbatch, of loss_sum / total_weight for ``trained``."""

    @partial(fold_transposes, run=keep_padding)
    def differentiate(trained: PyTree, microbatch: PyTree, total_weight: jax.Array) -> tuple[PyTree, PyTree]:
        loss_of = lambda trained: sums_of(loss, outputs(params_of(trained), microbatch), microbatch)
        loss_sum, vjp, further = jax.vjp(loss_of, trained, has_aux=True)
        return (loss_sum, further), vjp(jnp.reciprocal(total_weight).astype(loss_sum.dtype))[0]

    return differentiate(trained, microbatch, total_weight)
