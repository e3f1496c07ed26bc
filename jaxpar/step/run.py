"""A step on each shard of the mesh: the weight of the batch, the sums of each replica, and their reduction.

total weight                  one all-reduce of a number
params, but stacked layers    gathered (ZeRO 3)
losses and gradients          of the replica's microbatches, by the plan's program or by ``jax.vjp``
                              summed over the stages of a pipeline
                              reduced over the replicas (``zero.py``)
"""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar.data_parallel import batch_specs, reduce_gradients, split_microbatches
from jaxpar.layered_model import OUTER
from jaxpar.pipeline import accumulate_pipelined, build_stage, sum_over_stages
from jaxpar.shard_map import manual_over_data_and_stage
from jaxpar.step.microbatches import accumulate_by_vjp
from jaxpar.step.plan import Step, StepPlan
from jaxpar.trainable import only_trained


def run_step(step: Step, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the value of a step and its gradients, for global arrays or tracers of them."""
    plan = step.plan(params, batch)
    zero, traced = plan.sharding.zero, plan.traced
    dtypes = only_trained(jax.tree.map(lambda param: param.dtype, params))

    def one_shard(params: PyTree, rows: PyTree) -> tuple[PyTree, PyTree]:
        total_weight = reduce_gradients(traced.weight_of_rows(rows))
        whole = zero.fetch_once(params)
        totals, grads = _reduced_sums(step, plan, whole, rows, total_weight)
        value = traced.value(totals, total_weight)
        return value, jax.tree.map(lambda grad, dtype: grad.astype(dtype), grads, dtypes)

    run = manual_over_data_and_stage(
        one_shard,
        step.mesh,
        in_specs=(plan.sharding.params, batch_specs(batch, step.mesh)),
        out_specs=(PartitionSpec(), plan.sharding.grads),
        axes=traced.manual_axes,
    )
    value, grads = run(plan.pack(params), batch)
    return value, plan.unpack(grads)


def _reduced_sums(
    step: Step,
    plan: StepPlan,
    params: PyTree,
    rows: PyTree,
    total_weight: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns ((loss_sum, further sums), gradients) over all replicas, each gradient sharded as its ZeroShard says."""
    zero = plan.sharding.zero
    if plan.program is None:
        sums, grads = accumulate_by_vjp(step, plan.sharding, params, rows, total_weight)
        has_reduced_layers = step.parallel.overlap_grad_reduce
    else:
        sums, grads, has_reduced_layers = _run_pipeline(step, plan, params, rows, total_weight)
    finish = zero.finish_outer if has_reduced_layers else zero.finish
    return finish(sums, grads)


def _run_pipeline(
    step: Step,
    plan: StepPlan,
    params: PyTree,
    rows: PyTree,
    total_weight: jax.Array,
) -> tuple[PyTree, PyTree, bool]:
    """Returns one replica's sums and gradients, and whether those of layers are reduced over the replicas already."""
    program, layout, sharding = plan.program, plan.layout, plan.sharding
    assert program is not None, "it is a pipeline's plan"
    assert layout is not None, "a program has a layout"
    stage = build_stage(
        step.storing(program.schedule),
        step.float_loss,
        program,
        layout,
        params,
        microbatches=split_microbatches(rows, program.schedule.num_microbatches),
        total_weight=total_weight,
        zero=sharding.zero,
        layer_shards=sharding.layer_shards,
        outer_specs=jax.tree.map(lambda shard: shard.tensor, sharding.zero.shards[OUTER]),
    )
    of_stage = accumulate_pipelined(stage, params)
    sums, grads = sum_over_stages(*of_stage, sharding.replica_grads)
    return sums, grads, stage.program.reduces
