"""The losses of a model's routers, added to a loss of its logits, and what routers did, for metrics.

    total = cross-entropy + balance_coefficient * balance + z_coefficient * z + tally

``router.py`` has the sums that these are made of, for each token, and ``tally``, which is 0 and has the loads as its gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxpar.backward.graph import trace
from jaxpar.context_parallel import sum_over_sequence
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.padding import token_weights
from jaxpar.models.transformer.router import RouterSums

Tokens = Float[Array, "batch seq"]


class RoutedLogits(NamedTuple):
    """The outputs of a model with experts that has losses of its routers, or drops tokens (``config.has_routing_losses``)."""

    logits: Float[Array, "batch seq vocab"]
    sums: RouterSums


def logits_of(outputs: PyTree) -> Array:
    """Returns the logits among a model's outputs, whether it has routing losses or not."""
    return outputs.logits if isinstance(outputs, RoutedLogits) else outputs


def loads_of(outputs: PyTree, weights: Any) -> Int[Array, "layers experts"] | None:
    """Returns the tokens that use each expert of each layer; None for a model whose outputs are logits alone.

    Args:
        outputs: The outputs of a model.
        weights: The weights of the tokens, ``[batch, seq]``: rows of weight 0, such as padding, do not count.
    """
    if not isinstance(outputs, RoutedLogits):
        return None
    sums = outputs.sums
    counts = _counts(_per_token(weights, sums.balance))
    of_rows = jnp.where(counts[:, None, None], sums.loads, 0)
    return jnp.sum(of_rows, 0)


def add_routing_losses(
    config: TransformerConfig,
    loss: Callable[..., tuple],
    *,
    weights: Callable[[PyTree], Any] = token_weights,
    metrics: bool = False,
) -> Callable[..., tuple]:
    """Returns a loss of a model's outputs, from one of its logits: the losses of its routers are added.

    A token's balance and z losses, sums over the layers, are weighed like its cross-entropy: those of a row have the weight
    that ``loss`` gives the row, which its tokens share by their ``weights``. So their means over a batch are those of its
    documents, however few of their tokens are learned. Rows of weight 0 count nowhere. For a model without such losses the
    result computes the same as ``loss``.

    Args:
        config: The model.
        loss: ``loss(logits, batch) -> (loss_sum, weight_sum)``, with further sums in a dict or without.
        weights: ``weights(batch)``: the weights of the tokens in ``loss``, ``[batch, seq]`` or ``[batch]``; None: 1 each.
            By default those of ``token_weights``. Give the same function to ``make_model``, which finds padding by it.
        metrics: Whether the loss returns further sums, for ``value_and_grad(..., has_aux=True)``: ``balance_loss`` and
            ``router_z_loss``, means over the layers, without their coefficients; ``expert_imbalance``, the load of the
            busiest expert of a row over the mean load; ``dropped_experts``, the share of tokens' experts that were dropped.
    """

    def with_routing(outputs: PyTree, batch: PyTree) -> tuple:
        experts = config.experts
        if experts is None or not config.has_routing_losses:
            return loss(outputs, batch)
        logits, sums = outputs
        total, weight, *further = loss(logits, batch)
        per_token = _per_token(weights(batch), sums.balance)
        counts = _counts(per_token)
        per_token = _as_loss_weighs(per_token, loss, logits, batch)
        balance = _weighed(per_token, sums.balance)
        z = _weighed(per_token, sums.z)
        tally = jnp.sum(jnp.where(counts, sums.tally, 0))
        total = total + experts.balance_coefficient * balance
        total = total + experts.z_coefficient * z + tally
        if not metrics:
            return total, weight, *further
        own = _metrics_of_loads(sums, counts, per_token)
        own["balance_loss"] = balance / config.num_stacked_layers
        own["router_z_loss"] = z / config.num_stacked_layers
        given = further[0] if further else {}
        return total, weight, {**given, **own}

    return with_routing


def _weighed(per_token: Tokens, values: Tokens) -> Float[Array, ""]:
    """Returns the weighted sum of what tokens have, where those of weight 0 may have anything."""
    return jnp.sum(jnp.where(per_token != 0, values * per_token, 0))


def _metrics_of_loads(sums: RouterSums, counts: Array, per_token: Tokens) -> dict[str, Array]:
    """Returns sums over rows, each times the row's weight, of how uneven its experts' loads are and of what it drops."""
    weights = per_token.sum(-1)
    loads = sum_over_sequence(sums.loads)
    num_chosen = jnp.maximum(loads.sum(-1), 1)  # of each layer; the experts of a token are several
    imbalance = loads.max(-1) * loads.shape[-1] / num_chosen
    imbalance = imbalance.mean(-1)
    dropped = sums.dropped / num_chosen.sum(-1)

    def of_rows(each: Array) -> Array:
        weighed = each.astype(per_token.dtype) * weights
        return jnp.sum(jnp.where(counts, weighed, 0))

    return {
        "expert_imbalance": of_rows(imbalance),
        "dropped_experts": of_rows(dropped),
    }


def _counts(per_token: Float[Array, "batch seq"]) -> Array:
    """Returns ``[batch]``, whether a row has a token of another weight than 0."""
    has_some = jnp.any(per_token != 0, -1)
    return sum_over_sequence(has_some.astype(jnp.int32)) > 0


def _per_token(weights: Any, like: Tokens) -> Array:
    if weights is None:
        return jnp.ones_like(like)
    weights = jnp.asarray(weights).astype(like.dtype)
    trailing = (1,) * (like.ndim - weights.ndim)
    weights = weights.reshape(*weights.shape, *trailing)
    return jnp.broadcast_to(weights, like.shape)


def _as_loss_weighs(per_token: Tokens, loss: Callable, logits: PyTree, batch: PyTree) -> Array:
    """Returns the weights of tokens, which add up to what ``loss`` weighs each row with."""
    try:
        wanted = weights_of_rows(loss, logits, batch).astype(per_token.dtype)
    except (TypeError, ValueError):
        # A number of rows is written into the loss, which then is not split.
        return per_token
    both = jnp.stack([wanted, per_token.sum(-1)])
    wanted, given = sum_over_sequence(both)
    has_some = given != 0
    divisor = jnp.where(has_some, given, 1)
    factors = jnp.where(has_some, wanted / divisor, 0)
    return per_token * factors[:, None]


def weights_of_rows(
    loss: Callable[..., tuple], outputs: PyTree, batch: PyTree
) -> Float[Array, " batch"]:
    """Returns the weight_sum of each row alone, of which that of the batch is the sum.

    Only the operations of weight_sum are repeated, none of those of the loss.
    """
    first, *_ = jax.tree.leaves(outputs)
    rows = jnp.shape(first)[:1]
    has_rows = lambda a: jnp.shape(a)[:1] == rows

    def as_given(a: Any) -> Array:
        array = jnp.asarray(a)
        return array[:, None] if has_rows(a) else array

    def of_one_row(a: Array) -> jax.ShapeDtypeStruct:
        shape = a.shape[1:] if has_rows(a) else a.shape
        return jax.ShapeDtypeStruct(shape, a.dtype)

    given = jax.tree.map(as_given, (outputs, batch))
    one_row = jax.tree.map(of_one_row, given)
    graph = trace(lambda outputs, batch: loss(outputs, batch)[1], *one_row)
    nodes = graph.needed(graph.outputs, ())

    def of_row(leaves: list) -> Array:
        values = dict(zip(graph.inputs, leaves, strict=True))
        (weight,) = graph.run(nodes, values, graph.outputs)
        return jnp.asarray(weight)

    leaves = jax.tree.leaves(given)
    in_axes = [0 if has_rows(leaf) else None for leaf in leaves]
    return jax.vmap(of_row, in_axes=(in_axes,), axis_size=rows[0])(leaves)
