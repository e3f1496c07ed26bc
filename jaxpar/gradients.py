"""The entry point: ``value_and_grad`` on a mesh, from data, pipeline and tensor parallelism."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar._compat import Tracer, is_compile_only
from jaxpar.data_parallel import batch_specs
from jaxpar.fields import check_kind
from jaxpar.layered_model import LayeredModel
from jaxpar.mesh import STAGE, TENSOR
from jaxpar.pipeline import (
    LayerLayout,
    MpmdExecutor,
    check_permutes,
    close_params,
    open_params,
    spmd_program,
)
from jaxpar.runtime.distributed import check_joined
from jaxpar.schedule import Schedule
from jaxpar.sharding import check_batch_on
from jaxpar.step.checks import check_call
from jaxpar.step.plan import Loss, Step
from jaxpar.step.run import run_step
from jaxpar.step.settings import Parallel, Pipeline, Remat, accepts_settings, check_settings
from jaxpar.step.traced_loss import once_for_shapes
from jaxpar.trainable import Frozen, Trainable, accept_frozen, freeze

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
            compiled, params or a batch that do not fit; or once it is compiled, a step that would not end
            (``pipeline.check_permutes``).

    **Collectives**: over the replicas one all-reduce a step, of gradients and sums together, for any number of microbatches
    (apart with ``grad_reduce_dtype``; one a stage with the mpmd executor; on GPUs one a layer where the batch is not split;
    with ZeRO reduce-scatters over ``data`` and ``context``, and then one over ``replica``), and before it one of the
    weight, a single number; over ``tensor`` what XLA inserts for the shardings of the params; over ``context`` what the
    layers send (``context_parallel.py``); over ``stage`` one activation and one gradient for each boundary and microbatch,
    and the reduction of the gradients of ``outer``, a reduce-scatter if they are sharded over ``stage``.
    """
    assert isinstance(mesh, Parallel), "made of a mesh and its settings"
    assert isinstance(pipeline, Pipeline), "made of its settings"
    check_kind((bool,), "a bool", "Use True for a loss that returns further sums.", has_aux=has_aux)
    return with_settings(model, loss, mesh, pipeline, has_aux=has_aux)


def with_settings(
    model: LayeredModel | Callable,
    loss: Loss,
    parallel: Parallel,
    pipeline: Pipeline,
    *,
    has_aux: bool | None,
) -> ValueAndGrad:
    """Returns ``value_and_grad``; with ``has_aux=None`` it trains nothing, and its value is what ``loss`` returns."""
    if isinstance(parallel.mesh, Mesh) and not is_compile_only(parallel.mesh.devices.flat[0]):
        check_joined()
    check_settings(model, loss, parallel, pipeline)
    layout, trainable = parallel.layout, parallel.trainable
    frozen = partial(freeze, trainable=trainable)
    if has_aux is None:
        frozen, trainable = partial(jax.tree.map, Frozen), ()
    model = accept_frozen(model, trainable)
    shardings = parallel.shardings
    if shardings is not None:
        shardings = frozen(open_params(shardings, layout))
    step = Step(model, loss, parallel, pipeline, shardings, has_aux)
    if step.mesh.shape[STAGE] > 1:
        masks = pipeline.masks(step.mesh)
        schedule = pipeline.table(step.mesh.shape[STAGE], masks=masks)
        if pipeline.executor == "mpmd":
            return MpmdExecutor(
                step.storing(schedule),
                step.float_loss,
                step.mesh,
                schedule,
                layout,
                reduce_dtype=parallel.grad_reduce_dtype,
                traced_loss=step.traced_loss,
                check=once_for_shapes(partial(check_call, step)),
                frozen=frozen,
            )
        step = replace(step, program=spmd_program(schedule, masks=masks))
    run = jax.jit(partial(run_step, step))

    def prepared(params: PyTree, batch: PyTree) -> PyTree:
        params = frozen(open_params(params, layout))
        check(params, batch)
        check_batch_on(batch, step.mesh)
        return params

    def value_and_grad_on_mesh(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        value, grads = run(prepared(params, batch), batch)
        return value, close_params(grads, layout)

    check = once_for_shapes(partial(check_call, step))
    check_ends = once_for_shapes(
        lambda params, batch: _check_ends(step, run, prepared(params, batch), batch)
    )
    has_both = step.program is not None and step.mesh.shape[TENSOR] > 1
    return GradientsOnMesh(value_and_grad_on_mesh, check_ends if has_both else None, parallel)


@dataclass(frozen=True, eq=False)
class GradientsOnMesh:
    """``value_and_grad`` on a mesh: a call returns the loss over the whole batch, and gradients of the structure of params.

    Attributes:
        within_step: The same for a step that is checked as a whole, once it is compiled.
        check_ends: Raises for params and a batch whose step would not end; None without both ``stage`` and ``tensor``.
        parallel: Its settings.
    """

    within_step: ValueAndGrad
    check_ends: Callable[[PyTree, PyTree], None] | None
    parallel: Parallel

    __name__ = "value_and_grad_on_mesh"

    def __call__(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns (loss, gradients); with ``has_aux`` ((loss, means), gradients)."""
        if self.check_ends is not None:
            self.check_ends(params, batch)
        return self.within_step(params, batch)


def within_step(value_and_grad: ValueAndGrad) -> ValueAndGrad:
    """Returns ``value_and_grad`` for a step that is checked as a whole, once it is compiled."""
    is_ours = isinstance(value_and_grad, GradientsOnMesh)
    return value_and_grad.within_step if is_ours else value_and_grad


# Of XLA for CPUs, which then takes half as long: it inserts permutations before it optimizes.
_UNOPTIMIZED: dict[str, bool | str | int] = {"xla_backend_optimization_level": "0"}


def _check_ends(step: Step, run: jax.stages.Wrapped, params: PyTree, batch: PyTree) -> None:
    """Raises ValueError if compiled gradients would not end. Those of traced params are compiled for it alone."""
    if not step.plan(params, batch).skips_ops:
        return
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, batch))):
        check_permutes(run.lower(params, batch).compile())  # which the call reuses
        return
    if step.shardings is None:
        return
    of_batch = batch_specs(batch, step.mesh)
    of_batch = jax.tree.map(lambda spec: NamedSharding(step.mesh, spec), of_batch)
    shape = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    given = jax.tree.map(shape, (params, batch), (step.shardings, of_batch))
    check_permutes(run.lower(*given).compile(_UNOPTIMIZED))
