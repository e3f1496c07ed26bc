"""The checks of params and a batch before a step is compiled for them: of each, and of what model and loss make of both."""

import warnings
from collections.abc import Sequence

import jax
from jaxtyping import PyTree

from jaxpar.data.batches import WEIGHT
from jaxpar.data_parallel import check_batch, check_sequences
from jaxpar.layered_model import LayeredModel, num_layers, output_shapes
from jaxpar.mesh import DATA, REPLICA, num_replicas
from jaxpar.sharding import check_same_tree, path_string
from jaxpar.step.loss_checks import check_loss
from jaxpar.step.plan import Step
from jaxpar.step.position_checks import check_collectives, check_positions
from jaxpar.step.row_checks import check_rows, num_rows_of, resized, shapes_of
from jaxpar.trainable import check_params, is_frozen

SHOWN = 4
OF_PADDING = (
    f"a loss should multiply by {WEIGHT!r} of a batch, which is 0 for rows of padding (jaxpar.data.batches.pad_rows); got a "
    "model and a loss that do not read it, so such rows count, if there are any. Multiply by it."
)


def check_call(step: Step, params: PyTree, batch: PyTree) -> None:
    """Raises for params or a batch that do not fit a step."""
    model, loss, mesh = step.model, step.loss, step.mesh
    is_layered = isinstance(model, LayeredModel)
    num_microbatches = step.pipeline.num_microbatches
    check_batch(batch, mesh.shape[DATA], num_microbatches, replica=mesh.shape[REPLICA])
    check_sequences(batch, mesh)
    check_params(params)
    if step.shardings is not None:
        check_same_tree(step.shardings, params)
    if is_layered:
        num_layers(params)
    check_loss(loss, output_shapes(model, params, batch), batch, has_aux=step.has_aux)
    traced = step.traced_loss(params, batch)  # refuses what cannot run on the mesh
    if step.trains:
        _check_reads_some(params, traced.unread)
    check_rows(model, loss, params, batch, num_replicas(mesh) * num_microbatches)
    check_positions(model, loss, params, batch, mesh, step.shardings)
    forward = model.apply if is_layered else model
    microbatch = resized(shapes_of(batch), num_rows_of(batch) // num_microbatches)
    check_collectives(forward, loss, params, microbatch, step.shardings, mesh)
    if step.trains:
        _warn_of_unread(params, traced.unread)
    if WEIGHT in traced.unread_of_batch:
        warnings.warn(OF_PADDING, stacklevel=2)


def _check_reads_some(params: PyTree, unread: Sequence[int]) -> None:
    """Raises if the outputs depend on no param."""
    if unread and len(unread) == len(jax.tree.leaves(params, is_leaf=is_frozen)):
        raise ValueError(
            "a model's outputs must depend on its params; got outputs that depend on none of them, such as numbers of "
            "NumPy, so that nothing would be trained. Compute them from the params that the model is given."
        )


def _warn_of_unread(params: PyTree, unread: Sequence[int]) -> None:
    """Warns of params that are trained and that the outputs do not depend on."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_frozen)
    unread_leaves = [leaves[index] for index in unread]
    has_values = lambda leaf: not is_frozen(leaf) and getattr(leaf, "size", 1) > 0
    names = [path_string(path) for path, leaf in unread_leaves if has_values(leaf)]
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        warnings.warn(
            f"a model's outputs must depend on a param to train it; got none that depends on {', '.join(names[:SHOWN])}{more}, "
            "whose gradient is 0. Use it in the model, or leave it out of the params.",
            stacklevel=2,
        )
