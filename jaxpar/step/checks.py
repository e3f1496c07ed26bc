"""The checks of params and a batch before a step is compiled for them: of each, and of what model and loss make of both."""

from jaxtyping import PyTree

from jaxpar.data_parallel import check_batch, check_sequences
from jaxpar.layered_model import LayeredModel, num_layers, output_shapes
from jaxpar.mesh import CONTEXT, DATA, REPLICA, num_replicas
from jaxpar.sharding import check_same_tree
from jaxpar.step.loss_checks import check_loss
from jaxpar.step.plan import Step
from jaxpar.step.position_checks import check_owned, check_positions
from jaxpar.step.row_checks import check_rows
from jaxpar.trainable import check_params


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
    if step.trains and not traced.reads_params:
        raise ValueError(
            "a model's outputs must depend on its params; got outputs that depend on none of them, such as numbers of "
            "NumPy, so that nothing would be trained. Compute them from the params that the model is given."
        )
    check_rows(model, loss, params, batch, num_replicas(mesh) * num_microbatches)
    check_positions(model, loss, params, batch, mesh.shape[CONTEXT])
    forward = model.apply if is_layered else model
    check_owned(forward, params, batch, step.shardings, mesh)
