"""The SPMD executor: a loop over the ticks of a Program, in which each stage runs its own row of the tables (``stage.py``)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.layered_model import LAYERS, OUTER
from jaxpar.mesh import STAGE
from jaxpar.pipeline.program import NONE, Program, Segment
from jaxpar.pipeline.stage import Stage, State
from jaxpar.trainable import only_trained


def masks_idle_ops(mesh: Mesh) -> bool:
    """Returns whether programs for a mesh mask the ops of idle stages: on GPUs, where a branch makes the host wait."""
    return mesh.devices.flat[0].platform == "gpu"


def accumulate_pipelined(stage: Stage) -> tuple[PyTree, PyTree]:
    """Returns one stage's ((loss_sum, further sums), gradients) over its replica's microbatches; call it under ``shard_map``.

    Losses and gradients are added, and returned, in float32 or wider.

    Returns:
        This stage's contribution. The caller sums the sums and the gradients of outer over the stages
        (``sum_over_stages``); the gradients of layers are complete, and if the program reduces, reduced over the replicas.

    **Collectives**: over ``stage`` at most two collective-permutes a tick, of one activation each. For each microbatch and
    chunk a stage sends one activation to the next stage and one cotangent to the previous one.
    """
    index = jax.lax.axis_index(STAGE)
    names, table = _table(stage.program)

    def tick(segment: Segment, number: jax.Array, state: State) -> State:
        row = jax.lax.dynamic_slice(table, (jnp.int32(number), index, jnp.int32(0)), (1, 1, len(names)))[0, 0]
        return stage.tick(segment, number, state, dict(zip(names, row, strict=True)))

    state = stage.first_state()
    for segment in stage.program.segments:
        if segment.reduces:  # one tick; with ZeRO 1 gradients have another shape after it
            state = tick(segment, jnp.int32(segment.start), state)
        else:
            state = jax.lax.fori_loop(segment.start, segment.stop, partial(tick, segment), state)
    grads = {
        OUTER: only_trained(jax.tree.unflatten(stage.outer_tree, state["outer_grads"])),
        LAYERS: jax.tree.unflatten(stage.layer_tree, state["layer_grads"]),
    }
    return state["loss"], grads


def _table(program: Program) -> tuple[list[str], jax.Array]:
    """The tables as one constant ``[num_ticks, num_stages, columns]``. Messages that no op reads go to a spare inbox slot."""
    spare = program.num_slots["inbox"]
    inbox = ("right", "left", "in", "out", "ct")
    columns = {
        name: np.where(table == NONE, spare, table) if name.split("_")[-1] in inbox else np.maximum(table, 0)
        for name, table in program.tables.items()
    }
    return list(columns), jnp.asarray(np.stack([t.T for t in columns.values()], axis=-1))
