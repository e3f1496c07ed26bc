"""Checks of a ModelShape that somebody has written: what it is made of, and that its functions fit one another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxpar._compat import source_line
from jaxpar.backward.partition import Partition
from jaxpar.layered_model import LAYERS, OUTER, LayeredModel, check_layer, shapes_of
from jaxpar.runtime.uncaught import is_raised_by_jaxpar
from jaxpar.sharding import path_string
from jaxpar.step.loss_checks import check_loss
from jaxpar.trainable import only_trained

SHOWN = 8  # arrays of params or of a row
OF_FUNCTIONS = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError)


def check_parts(model: object, row: PyTree) -> None:
    """Raises TypeError for a model without layers, and ValueError for a row that is not a batch of one row."""
    if not isinstance(model, LayeredModel):
        raise TypeError(
            "the model of a ModelShape must be a LayeredModel, of which a plan counts the layers; got a "
            f"{type(model).__name__}. Write jaxpar.LayeredModel(embed, layer, head)."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(row):
        shape = getattr(leaf, "shape", None)
        if shape is None or shape[:1] != (1,):
            got = type(leaf).__name__ if shape is None else f"shape {list(shape)}"
            raise ValueError(
                "row of a ModelShape must be a batch of one row, whose arrays have a leading dim of 1; got "
                f"{path_string(path) or 'row'} of {got}. Write jax.ShapeDtypeStruct((1, *shape), dtype)."
            )


def check_params(params: PyTree) -> None:
    """Raises TypeError for layers that are not stacked, and for numbers among the params that are trained."""
    if isinstance(params, dict) and isinstance(params.get(LAYERS), list):
        raise TypeError(
            "the layers of a ModelShape must be stacked along a leading dim, since a plan traces one for all; got a list of "
            f"{len(params[LAYERS])}. Give each array of a layer a leading dim of that many layers."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(only_trained(params)):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                "params must be floating-point or complex arrays, since each is given a gradient; got "
                f"{path_string(path)} of dtype {dtype}. Put it into the row, or leave it out of trainable."
            )


def check_functions(model: LayeredModel, loss: Callable, params: PyTree, batch: PyTree) -> None:
    """Raises ValueError or TypeError unless the functions and the loss take the params, a batch, and one another's values."""
    outer, layers = params[OUTER], params[LAYERS]
    of_one = lambda tree: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree
    )
    with _function("embed", outer=outer, batch=batch):
        x = shapes_of(model.embed, outer, batch, of="embed")
    with _function("layer", layer=of_one(layers), x=x):
        check_layer(model, params, batch)
    with _function("head", outer=outer, x=x):
        outputs = shapes_of(model.head, outer, x, of="head")
    with _function("loss", outputs=outputs, batch=batch):
        check_loss(loss, outputs, batch, has_aux=None)


def check_trips(part: Partition) -> None:
    """Raises ValueError if it is not known how often a loop of a function runs."""
    for node in part.graph.nodes:
        for body in part.bodies.get(node.first, ()):
            if body.trips is None:
                at = source_line(node.equation)
                raise ValueError(
                    "a plan must know how often a loop of the model runs; got a jax.lax.while_loop that ends by what it "
                    f"computes{at and ', at ' + at}. Write it as a jax.lax.fori_loop of as many trips as are planned for."
                )
            check_trips(body.part)


@contextmanager
def _function(name: str, **given: PyTree) -> Iterator[None]:
    """Names the function of a ModelShape whose error the ``with`` block raises, and what it was given."""
    try:
        yield
    except OF_FUNCTIONS as error:
        if is_raised_by_jaxpar(error.__traceback__) and "; got " in str(error):
            raise
        told = "; ".join(f"{arg} {_shapes(tree)}" for arg, tree in given.items())
        why = (str(error).splitlines() or [""])[0][:300]
        raise ValueError(
            f"{name} of a ModelShape must take the shapes that it has; got {type(error).__name__}: {why}, for {told}. Correct "
            f"{name}, or the params and row that the ModelShape has."
        ) from error


def _shapes(tree: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shown = [
        f"{path_string(path)} {leaf.dtype}{list(leaf.shape)}".strip()
        for path, leaf in leaves[:SHOWN]
    ]
    return ", ".join(shown) + (f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else "")
