"""The plan of a step: for params of given shapes what computes their gradients, and how arrays are sharded meanwhile.

    stages   idle ops are    microbatches           a Program of
    several  either          run in a pipeline      the schedule
    one      masked (GPUs)   run in turn            1f1b in its form "fused": F and B of one, then of the next
    one      masked          overlap, with tensor   1f1b in its form "merged": F of one beside B of another
    one      skipped (CPUs)  are differentiated     none: ``microbatches.py`` takes ``jax.vjp`` of each

Also differentiated are layers in a list, a function without layers, one microbatch with ``tensor``, and what ``one_stage.py``
does not take.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, LayeredModel, is_stacked, num_layers
from jaxpar.loss_sums import with_float_sums
from jaxpar.mesh import REPLICA, REPLICAS, TENSOR
from jaxpar.pipeline import LayerLayout, Program, fitting_layout, one_stage, spmd_program
from jaxpar.schedule import Schedule, make_schedule
from jaxpar.step.settings import Parallel, Pipeline, check_equal_layers
from jaxpar.step.sharding import StepSharding, shard_step
from jaxpar.step.traced_loss import TracedLoss, once_for_shapes, trace_loss

Loss = Callable[[PyTree, PyTree], tuple]


@dataclass(frozen=True)
class StepPlan:
    """How a step computes the gradients of params of given shapes.

    Attributes:
        program: What each stage runs in each tick; None: microbatches are differentiated one after another.
        layout: Which stage of the program holds which layers; None: without a program.
        is_packed: Whether params are given, and gradients returned, in the order of the layout.
        sharding: The shardings of params and gradients during the step.
        traced: The traced loss.
    """

    program: Program | None
    layout: LayerLayout | None
    is_packed: bool
    sharding: StepSharding
    traced: TracedLoss

    @property
    def skips_ops(self) -> bool:
        """Whether some stages may run ops that others skip."""
        if self.program is None or self.layout is None:
            return False
        is_masked = all(segment.masked for segment in self.program.segments)
        return not (is_masked and self.layout.is_even and self.traced.is_maskable)

    def pack(self, params: PyTree) -> PyTree:
        """Returns params with layers in the order of the program's stages."""
        if self.layout is None or self.is_packed:
            return params
        return params | {LAYERS: self.layout.in_packed_order(params[LAYERS])}

    def unpack(self, grads: PyTree) -> PyTree:
        """Returns gradients with layers in the order of the params that were given."""
        if self.layout is None or self.is_packed:
            return grads
        return grads | {LAYERS: self.layout.in_canonical_order(grads[LAYERS])}


@dataclass(frozen=True, eq=False)
class Step:
    """A model with its loss and settings, of which ``plan`` makes the plan of a step.

    Attributes:
        model: The model, a LayeredModel or with one stage a function, of params of which some may be frozen.
        loss: The loss.
        parallel: Where arrays live.
        pipeline: What runs when.
        shardings: Those of ``parallel``, with frozen params marked and layers in packed order.
        has_aux: As for ``value_and_grad``; None: the step trains nothing.
        program: What several stages run in each tick; None with one stage, and for the mpmd executor.
    """

    model: Any
    loss: Loss
    parallel: Parallel
    pipeline: Pipeline
    shardings: PyTree | None
    has_aux: bool | None
    program: Program | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        assert isinstance(self.parallel.mesh, Mesh), "check_settings takes no other"
        return self.parallel.mesh

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return self.has_aux is not None

    @cached_property
    def float_loss(self) -> Loss:
        """The loss, whose sums are floats."""
        return with_float_sums(self.loss)

    @cached_property
    def traced_loss(self) -> Callable[[PyTree, PyTree], TracedLoss]:
        """The traced loss for params in the model's order and a batch, traced once for each new set of shapes."""
        num_microbatches, executor = self.pipeline.num_microbatches, self.pipeline.executor
        trace = partial(
            trace_loss, self.model, self.float_loss, self.mesh, num_microbatches, executor
        )
        return once_for_shapes(lambda *given: replace(trace(*given), is_mean=self.trains))

    def storing(self, schedule: Schedule) -> LayeredModel:
        """Returns the model whose layers store what ``remat`` saves, unless the schedule has an op R for the rest."""
        remat = self.pipeline.policy
        if remat is False or (remat is True and schedule.recomputes):
            return self.model
        policy = None if remat is True else remat
        return self.model.wrap_layers(partial(jax.checkpoint, policy=policy))

    def plan(self, params: PyTree, batch: PyTree) -> StepPlan:
        """Returns the plan for params, whose layers are in the order of the layout if there is one, and a batch."""
        program = self.program or self._program_of_one_stage(params)
        is_packed = self.parallel.layout is not None
        layout, canonical = None, params
        if program is not None:
            check_equal_layers(params[LAYERS])
            layout, canonical = fitting_layout(self.parallel.layout, program.schedule, params)
        packed = params
        if layout is not None and not is_packed:
            shapes = jax.eval_shape(layout.in_packed_order, params[LAYERS])
            packed = params | {LAYERS: shapes}
        is_layered = isinstance(self.model, LayeredModel)
        sharding = shard_step(packed, self.parallel, self.shardings, layered=is_layered)
        traced = self.traced_loss(canonical, batch)
        return StepPlan(program, layout, is_packed, sharding, traced)

    def _program_of_one_stage(self, params: PyTree) -> Program | None:
        form = self._form_on_one_stage(params)
        if form is None:
            return None
        schedule = make_schedule("1f1b", 1, self.pipeline.num_microbatches, form=form)
        return spmd_program(schedule, masks=True, overlaps=self._has_reductions_left())

    def _form_on_one_stage(self, params: PyTree) -> str | None:
        """The form of 1f1b for the microbatches of one stage; None: they are differentiated one after another."""
        if not self.trains or not self.pipeline.masks(self.mesh):
            return None
        if not isinstance(self.model, LayeredModel) or not is_stacked(params):
            return None
        num_microbatches = self.pipeline.num_microbatches
        if self.mesh.shape[TENSOR] > 1:
            # F of one beside B of another, so that collectives run beside products.
            return "merged" if num_microbatches > 1 else None
        takes = one_stage.takes(self.parallel.zero, num_layers(params), num_microbatches)
        return "fused" if takes else None

    def _has_reductions_left(self) -> bool:
        """Whether the last microbatch is to reduce the layers' gradients beside its backward pass, and there is need.

        If it is the only one, it does so unasked: layers are compiled once, as they are otherwise.
        """
        zero, axes = self.parallel.zero, self.mesh.shape
        # At ZeRO 2 every microbatch has reduced them, but for those over replica.
        left = REPLICAS if zero < 2 else (REPLICA,)
        if not any(axes[axis] > 1 for axis in left):
            return False
        return self.parallel.overlap_grad_reduce or (
            zero < 2 and self.pipeline.num_microbatches == 1
        )
