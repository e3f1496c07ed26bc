"""One stage: ``jax.vjp`` of one microbatch after another, whose losses and gradients are added.

Gradients are reduced over the replicas once they are complete, at ZeRO 2 and 3 with each microbatch (``zero.py``). With
``overlap_grad_reduce`` the last microbatch runs apart from the others, and the backward pass of each of its layers reduces that
layer's sums (``vjp_layers.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jaxtyping import PyTree

from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.padded_dims import keep_padding
from jaxpar.backward.remat import forward_with_remat, with_remat
from jaxpar.data_parallel import accumulate
from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.loss_sums import gradient_of_sum, sums_of
from jaxpar.step.plan import Step
from jaxpar.step.sharding import StepSharding
from jaxpar.step.vjp_layers import ReducingLayers, gathering_layers, wide_shards
from jaxpar.trainable import only_trained, with_trained

SumsAndGrads = tuple[PyTree, PyTree]  # ((loss_sum, further sums), gradients)


def accumulate_by_vjp(
    step: Step,
    sharding: StepSharding,
    params: PyTree,
    rows: PyTree,
    total_weight: jax.Array,
) -> SumsAndGrads:
    """Returns the sums over one replica's microbatches; call it under ``shard_map``.

    Args:
        step: The model and its settings.
        sharding: The shardings of its params.
        params: The params, with stacked layers as they are sharded.
        rows: One replica's rows.
        total_weight: The weight of the whole batch; gradients are those of loss_sum / total_weight.

    Returns:
        The sums, in float32 or wider. The caller reduces them over the replicas; with ``overlap_grad_reduce`` the gradients of
        layers are reduced already.
    """
    one_by_one = _OneByOne(step, sharding, params, total_weight)
    num_microbatches = step.pipeline.num_microbatches
    if step.parallel.overlap_grad_reduce:
        return one_by_one.reduced_in_last(rows, num_microbatches)
    return one_by_one.added(rows, num_microbatches)


@dataclass(frozen=True)
class _OneByOne:
    step: Step
    sharding: StepSharding
    params: PyTree
    total_weight: jax.Array

    def added(self, rows: PyTree, num_microbatches: int) -> SumsAndGrads:
        """Returns the sums over the microbatches."""
        model, params, zero = self.step.model, self.params, self.sharding.zero
        remat = self.step.pipeline.policy
        if zero.gathers_layers:
            model = gathering_layers(model, zero, again=remat is True)
            params = wide_shards(params, zero)
        outputs = forward_with_remat(model, remat, self.sharding.layer_shards)

        def of_trained(trained: PyTree, microbatch: PyTree) -> PyTree:
            return outputs(with_trained(params, trained), microbatch)

        def one(microbatch: PyTree) -> SumsAndGrads:
            sums, grads = self.grads(of_trained, only_trained(params), microbatch)
            if zero.gathers_layers:
                # The vjp of a layer that gathers its params has added their gradients.
                return sums, grads | {OUTER: zero[OUTER].add(grads[OUTER])}
            return sums, zero.add(grads)

        return accumulate(one, rows, num_microbatches)

    def reduced_in_last(self, rows: PyTree, num_microbatches: int) -> SumsAndGrads:
        """Returns the sums over the microbatches, of which the last has reduced the gradients of layers."""
        remat, shards = self.step.pipeline.policy, self.sharding.layer_shards
        model = with_remat(self.step.model, remat, shards)
        layers = ReducingLayers(model, self.sharding.zero, self.params)

        def one(microbatch: PyTree, earlier: PyTree | None = None) -> SumsAndGrads:
            trained = self.params | {LAYERS: layers.zeros(earlier)}
            outputs = partial(layers.outputs, earlier)
            sums, grads = self.grads(outputs, trained, microbatch)
            return sums, grads | {OUTER: self.sharding.zero[OUTER].add(grads[OUTER])}

        others, last = _before_last(rows, num_microbatches)
        if num_microbatches == 1:
            return one(last, layers.zeros(None))
        sums_of_others, earlier = accumulate(one, others, num_microbatches - 1)
        # Otherwise XLA may run the last forward pass first, and keep its residuals beside those of the loop.
        last, sums_of_others = jax.lax.optimization_barrier((last, sums_of_others))
        sums, grads = one(last, earlier[LAYERS])
        outer = _plus(earlier[OUTER], grads[OUTER])
        return _plus(sums_of_others, sums), grads | {OUTER: outer}

    def grads(
        self,
        outputs: Callable[[PyTree, PyTree], PyTree],
        trained: PyTree,
        microbatch: PyTree,
    ) -> SumsAndGrads:
        """Returns the sums of a microbatch and the gradients of ``trained``, of which and of rows ``outputs`` is a function."""
        loss = self.step.float_loss

        @partial(fold_transposes, run=keep_padding)
        def differentiate(
            trained: PyTree,
            rows: PyTree,
            total_weight: jax.Array,
        ) -> SumsAndGrads:
            loss_of = lambda trained: sums_of(loss, outputs(trained, rows), rows)
            loss_sum, vjp, further = jax.vjp(loss_of, trained, has_aux=True)
            (grads,) = vjp(gradient_of_sum(loss_sum, total_weight))
            return (loss_sum, further), grads

        return differentiate(trained, microbatch, self.total_weight)


def _before_last(rows: PyTree, num_microbatches: int) -> tuple[PyTree, PyTree]:
    """Returns the rows of all microbatches but the last, and those of the last."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    start = num_rows // num_microbatches * (num_microbatches - 1)
    others = jax.tree.map(lambda leaf: leaf[:start], rows)
    last = jax.tree.map(lambda leaf: leaf[start:], rows)
    return others, last


def _plus(totals: PyTree, more: PyTree) -> PyTree:
    """Returns totals with one more of each added, in the dtypes of the totals."""
    add = lambda total, one: total + one.astype(total.dtype)
    return jax.tree.map(add, totals, more)
