"""The training step of a choice, compiled: what the compiler says of a plan."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.backward.remat import keep_products
from jaxpar.data_parallel import abstract_batch
from jaxpar.gradients import value_and_grad
from jaxpar.inspect import StepReport, inspect_step
from jaxpar.layered_model import LAYERS
from jaxpar.pipeline import masks_idle_ops, spmd_program
from jaxpar.planner.choice import Choice
from jaxpar.planner.model_shape import ModelShape
from jaxpar.sharding import shardings_from_paths
from jaxpar.train import Optimizer, TrainState, abstract_state, make_train_step


def compile_choice(
    shape: ModelShape, choice: Choice, mesh: Mesh, optimizer: Optimizer, batch_size: int
) -> tuple[TrainState, StepReport]:
    """Returns the state of a training step, as ShapeDtypeStructs, and the report of the compiled step. Nothing is run.

    Args:
        shape: The model.
        choice: Mesh axes and settings.
        mesh: A mesh of the choice's axes, also of devices for the compiler alone.
        optimizer: The optimizer.
        batch_size: Rows of a step, over all replicas.
    """
    layout = choice.layout(shape.num_layers)
    packed = shape.with_positions(layout.num_positions)
    packed = packed | {LAYERS: layout.as_packed(packed[LAYERS])}
    shardings = shardings_from_paths(packed, mesh, shape.rules)
    zeros = lambda key: jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), packed)
    state = abstract_state(
        zeros, jax.random.key(0), optimizer, mesh, shardings, zero=choice.zero, trainable=shape.trainable
    )
    of_mesh = value_and_grad(
        shape.model,
        shape.loss,
        mesh,
        schedule=choice.schedule,
        num_microbatches=choice.num_microbatches,
        num_chunks=choice.num_chunks,
        remat=keep_products if choice.remat == "dots" else choice.remat is True,
        zero=choice.zero,
        layout=layout if choice.stage > 1 else None,
        shardings=shardings,
        trainable=shape.trainable,
    )
    batch = abstract_batch(shape.batch(batch_size), mesh)
    shares = {}
    if choice.stage > 1:
        table = choice.table(choice.num_microbatches)
        shares = spmd_program(table, masks=masks_idle_ops(mesh)).branch_shares()
    with jax.numpy_rank_promotion("allow"):
        step = make_train_step(of_mesh, optimizer).lower(state, batch).compile()
    return state, inspect_step(step, mesh=mesh, branch_shares=shares)
