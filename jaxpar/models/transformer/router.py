"""The router of a layer with experts: which experts a token uses, with what weights, and the sums that keep experts in balance.

    x [b, t, d] --w_router--> logits [b, t, e] --softmax or sigmoid--> scores --+ bias, groups, top k--> experts [b, t, k]
                                                                          `--those of the chosen--> weights [b, t, k]

All of it is computed in float32 or wider, and the same on each shard of a tensor axis. Of equal scores the expert with the
lowest number is taken.

Padding (``padding.py``) has no expert: it is in no sum and no load, and takes no room.

The balance loss is one of each document. With f_e the share of its tokens that use expert e, times the number of experts and
over k, and P_e the mean of their scores for e, it is the sum of f_e P_e, 1 if all are equal (DeepSeek-V3, arXiv 2412.19437,
section 2.1.2). Each token has that of its document, so that a loss weighs it like the token's cross-entropy, and a batch has
the same loss however it is split into microbatches, replicas and rows. A balance loss of the whole batch (Fedus et al. 2021,
arXiv 2101.03961, section 2.2) is a product of two sums over rows, not a sum over rows, so the gradients of microbatches would
not add up to that of the batch. There is none here.

The bias balances without a loss (Wang et al. 2024, arXiv 2408.15664). It needs the load of each expert, which is the gradient
of the bias: a term of the loss whose value is 0 has it. So it is added over microbatches, stages and replicas like any
gradient, and what is recomputed does not count twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.backward.graph import trace
from jaxpar.context_parallel import gather_sequence, sum_over_sequence
from jaxpar.models.transformer.config import TransformerConfig
from jaxpar.models.transformer.padding import token_weights

# The gradient of a router's bias is the load of each expert times this power of two: far below the rounding of a gradient norm,
# so that neither norms nor clipping see it, and exact.
LOAD_SCALE = 2.0**-40
_OTHERS, _BIASES = "others", "router_biases"


class Routing(NamedTuple):
    """What a router chose.

    Attributes:
        experts: The experts of each token, ``num_experts`` for padding.
        weights: Their weights, 0 for padding.
        logits: The router's outputs for all experts.
        scores: Their softmax or sigmoid.
        real: Whether a token is not padding; None: all are real.
    """

    experts: Int[Array, "batch seq chosen"]
    weights: Float[Array, "batch seq chosen"]
    logits: Float[Array, "batch seq experts"]
    scores: Float[Array, "batch seq experts"]
    real: Bool[Array, "batch seq"] | None = None


class RouterSums(NamedTuple):
    """What routers add up from layer to layer, for padding 0.

    Attributes:
        balance: The balance losses of a token's document, summed over layers.
        z: The square of the logarithm of the router's normalizer for a token, summed over layers.
        tally: 0. Its gradients by the biases are the loads of the row, times ``LOAD_SCALE``.
        loads: The tokens of a row that use each expert of each layer: a layer drops the first entry and appends its own. Over
            ``context`` this and ``tally`` are of the positions of a device.
        dropped: The pairs of a token of the row and an expert that were dropped, over all layers.
    """

    balance: Float[Array, "batch seq"]
    z: Float[Array, "batch seq"]
    tally: Float[Array, " batch"]
    loads: Int[Array, "batch layers experts"]
    dropped: Int[Array, " batch"]

    @classmethod
    def zeros(cls, config: TransformerConfig, h: Float[Array, "batch seq embed"]) -> "RouterSums":
        """Returns those before the first layer."""
        wide = jnp.promote_types(h.dtype, jnp.float32)
        of_tokens = jnp.zeros(h.shape[:2], wide)
        loads = jnp.zeros((len(h), config.num_stacked_layers, config.num_experts or 0), jnp.int32)
        return cls(of_tokens, of_tokens, jnp.zeros(len(h), wide), loads, jnp.zeros(len(h), jnp.int32))

    def plus(
        self,
        config: TransformerConfig,
        params: PyTree,
        routing: Routing,
        dropped: Int[Array, " batch"],
        segments: Int[Array, "batch seq"] | None,
    ) -> "RouterSums":
        """Returns the sums after a layer with these params of its router."""
        chosen = _one_hot(routing.experts, routing.logits.shape[-1])
        loads = chosen.sum((1, 2), dtype=jnp.int32)
        tally = self.tally
        if config.router_bias:
            bias = params["bias"].astype(tally.dtype)
            tally = tally + LOAD_SCALE * (loads.astype(tally.dtype) @ (bias - jax.lax.stop_gradient(bias)))
        return RouterSums(
            balance=self.balance + balance_loss(config, routing, segments),
            z=self.z + _of_real(jnp.square(jax.nn.logsumexp(routing.logits, -1)), routing),
            tally=tally,
            loads=jnp.concatenate([self.loads[:, 1:], loads[:, None]], 1),
            dropped=self.dropped + dropped,
        )


def route(
    config: TransformerConfig,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
    real: Bool[Array, "batch seq"] | None = None,
) -> Routing:
    """Returns the experts of each token and their weights.

    Args:
        config: The model.
        params: The params under ``router`` of a layer.
        x: The normalized input.
        real: Whether a token is not padding; None: all are real.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # A GPU's default for float32 products would round the inputs to 10 bits.
    logits = jnp.einsum("btd,de->bte", x.astype(wide), params["w_router"].astype(wide), precision="highest")
    scores = jax.nn.softmax(logits, -1) if config.router_score == "softmax" else jax.nn.sigmoid(logits)
    appeal = scores if "bias" not in params else scores + params["bias"].astype(wide)[None, None]
    _, experts = jax.lax.top_k(_in_best_groups(config, jax.lax.stop_gradient(appeal)), config.experts_per_token)
    # A sum over all experts fuses; the gradient of a gather would be a scatter.
    weights = jnp.where(_one_hot(experts, scores.shape[-1]), scores[:, :, None], 0).sum(-1)
    if config.normalized_routing:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(wide).tiny)
    weights = weights * config.routed_scaling_factor
    if real is not None:
        experts = jnp.where(real[..., None], experts, scores.shape[-1])
        weights = jnp.where(real[..., None], weights, 0)
    return Routing(experts, weights, logits, scores, real)


def _of_real(values: Float[Array, "batch seq *dims"], routing: Routing) -> Array:
    """Returns the values of tokens with 0 for those that are padding."""
    if routing.real is None:
        return values
    real = routing.real.reshape(*routing.real.shape, *(1,) * (values.ndim - 2))
    return jnp.where(real, values, 0)


def _in_best_groups(config: TransformerConfig, appeal: Float[Array, "batch seq experts"]) -> Array:
    """Returns how good each expert is, with minus infinity for those of groups that a token does not use."""
    if config.groups_per_token == config.num_expert_groups:
        return appeal
    grouped = appeal.reshape(*appeal.shape[:2], config.num_expert_groups, -1)
    best = 2 if config.router_score == "sigmoid" and grouped.shape[-1] > 1 else 1
    _, groups = jax.lax.top_k(jax.lax.top_k(grouped, best)[0].sum(-1), config.groups_per_token)
    is_used = _one_hot(groups, config.num_expert_groups).any(2)
    return jnp.where(is_used[..., None], grouped, -jnp.inf).reshape(appeal.shape)


def _one_hot(chosen: Int[Array, "batch seq chosen"], count: int) -> Array:
    """Returns ``[batch, seq, chosen, count]``, whether each of ``count`` numbers is the chosen one."""
    return chosen[..., None] == jnp.arange(count, dtype=chosen.dtype)[None, None, None]


def balance_loss(
    config: TransformerConfig, routing: Routing, segments: Int[Array, "batch seq"] | None = None
) -> Float[Array, "batch seq"]:
    """Returns the balance loss of each token's document, a row or a segment of it."""
    scores, count = routing.scores, routing.scores.shape[-1]
    shares = scores if config.router_score == "softmax" else scores / scores.sum(-1, keepdims=True)
    uses = _one_hot(routing.experts, count).any(2).astype(scores.dtype) * (count / config.experts_per_token)
    both = jnp.stack([uses, _of_real(shares, routing)], 2)
    real = jnp.ones(scores.shape[:2], scores.dtype) if routing.real is None else routing.real.astype(scores.dtype)
    if segments is None:
        sums = jnp.concatenate([both.sum(1).reshape(len(both), -1), real.sum(1, keepdims=True)], 1)
        sums = sum_over_sequence(sums)
        means = (sums[:, :-1] / jnp.maximum(sums[:, -1:], 1)).reshape(len(both), 2, count)
        of_row = (means[:, 0] * means[:, 1]).sum(-1)
        return _of_real(jnp.broadcast_to(of_row[:, None], scores.shape[:2]), routing)
    together = (segments[:, :, None] == gather_sequence(segments)[:, None, :]).astype(scores.dtype)
    together = together * gather_sequence(real)[:, None, :]
    together = together / jnp.maximum(together.sum(-1, keepdims=True), 1)
    # Experts are no heads, which a tensor axis may split.
    whole = gather_sequence(both.reshape(*both.shape[:2], 1, -1)).reshape(len(both), -1, *both.shape[2:])
    means = jnp.einsum("bts,bsie->btie", together, whole, precision="highest")
    return _of_real((means[:, :, 0] * means[:, :, 1]).sum(-1), routing)


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
    counts = _counts(_per_token(weights, outputs.sums.balance))
    return jnp.sum(jnp.where(counts[:, None, None], outputs.sums.loads, 0), 0)


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
        if not config.has_routing_losses:
            return loss(outputs, batch)
        logits, sums = outputs
        total, weight, *further = loss(logits, batch)
        per_token = _per_token(weights(batch), sums.balance)
        counts = _counts(per_token)
        per_token = _as_loss_weighs(per_token, loss, logits, batch)
        of_layers = lambda each: jnp.sum(jnp.where(per_token != 0, each * per_token, 0))
        balance, z = of_layers(sums.balance), of_layers(sums.z)
        tally = jnp.sum(jnp.where(counts, sums.tally, 0))
        total = total + config.balance_coefficient * balance + config.z_coefficient * z + tally
        if not metrics:
            return total, weight, *further
        of_rows = lambda each: jnp.sum(jnp.where(counts, each.astype(per_token.dtype) * per_token.sum(-1), 0))
        loads = sum_over_sequence(sums.loads)
        num_chosen = jnp.maximum(loads.sum(-1), 1)  # of each layer; the experts of a token are several
        own = {
            "balance_loss": balance / config.num_stacked_layers,
            "router_z_loss": z / config.num_stacked_layers,
            "expert_imbalance": of_rows((loads.max(-1) * loads.shape[-1] / num_chosen).mean(-1)),
            "dropped_experts": of_rows(sums.dropped / num_chosen.sum(-1)),
        }
        return total, weight, {**(further[0] if further else {}), **own}

    return with_routing


def _counts(per_token: Float[Array, "batch seq"]) -> Array:
    """Returns ``[batch]``, whether a row has a token of another weight than 0."""
    return sum_over_sequence(jnp.any(per_token != 0, -1).astype(jnp.int32)) > 0


def _per_token(weights: Any, like: Float[Array, "batch seq"]) -> Array:
    if weights is None:
        return jnp.ones_like(like)
    weights = jnp.asarray(weights).astype(like.dtype)
    return jnp.broadcast_to(weights.reshape(*weights.shape, *(1,) * (like.ndim - weights.ndim)), like.shape)


def _as_loss_weighs(per_token: Float[Array, "batch seq"], loss: Callable, logits: PyTree, batch: PyTree) -> Array:
    """Returns the weights of tokens, which add up to what ``loss`` weighs each row with."""
    try:
        wanted = weights_of_rows(loss, logits, batch).astype(per_token.dtype)
    except (TypeError, ValueError):  # a number of rows is written into the loss, which then is not split
        return per_token
    wanted, given = sum_over_sequence(jnp.stack([wanted, per_token.sum(-1)]))
    factors = jnp.where(given != 0, wanted / jnp.where(given != 0, given, 1), 0)
    return per_token * factors[:, None]


def weights_of_rows(loss: Callable[..., tuple], outputs: PyTree, batch: PyTree) -> Float[Array, " batch"]:
    """Returns the weight_sum of each row alone, of which that of the batch is the sum.

    Only the operations of weight_sum are repeated, none of those of the loss.
    """
    rows = jnp.shape(jax.tree.leaves(outputs)[0])[:1]
    has_rows = lambda a: jnp.shape(a)[:1] == rows
    given = jax.tree.map(lambda a: jnp.asarray(a)[:, None] if has_rows(a) else jnp.asarray(a), (outputs, batch))
    one_row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:] if has_rows(a) else a.shape, a.dtype), given)
    graph = trace(lambda outputs, batch: loss(outputs, batch)[1], *one_row)
    nodes = graph.needed(graph.outputs, ())

    def of_row(leaves: list) -> Array:
        values = dict(zip(graph.inputs, leaves, strict=True))
        return jnp.asarray(graph.run(nodes, values, graph.outputs)[0])

    leaves = jax.tree.leaves(given)
    in_axes = [0 if has_rows(leaf) else None for leaf in leaves]
    return jax.vmap(of_row, in_axes=(in_axes,), axis_size=rows[0])(leaves)


# The optimizer of biases -----------------------------------------------------------------------------------------------------


def balance_experts(
    optimizer: optax.GradientTransformation, rate: float = 1e-3
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates the biases of routers by the loads of their experts, and all else by ``optimizer``.

    After each step the bias of an expert that got fewer tokens than the mean rises by a fixed rate, and that of one with more
    falls. No other optimizer should update them: Adam would divide their gradient, the load, by its own size.

    Biases get no weight decay and no state. Where they are frozen they have no gradient, and are left alone.

    Args:
        optimizer: For the other params.
        rate: By how much a bias rises or falls in a step; DeepSeek-V3 takes 0.001, and 0 at the end of training.

    Raises:
        ValueError: The rate is negative.
    """
    if not rate >= 0:
        raise ValueError(f"the rate of the biases must be 0 or more; got {rate}. Choose such as 0.001.")

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        return jax.tree.map(towards_mean, updates), state

    def towards_mean(loads: Float[Array, "*layers experts"]) -> Array:
        mean = loads.mean(-1, keepdims=True)
        # A load that is the mean must not move its bias by the rounding of the sums, which depends on the mesh.
        is_mean = jnp.abs(mean - loads) <= 1024 * jnp.finfo(loads.dtype).eps * mean
        return jnp.where(is_mean, 0, rate * jnp.sign(mean - loads)).astype(loads.dtype)

    biases = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.partition({_OTHERS: optimizer, _BIASES: biases}, _labels)


def expert_loads(grads: PyTree) -> PyTree:
    """Returns the loads in gradients of routers' biases: the tokens of each expert, over the weight of the batch.

    Args:
        grads: The gradient of a bias, or a tree of them. With weights of 1 the loads of a layer add up to experts_per_token.
    """
    return jax.tree.map(lambda g: g / LOAD_SCALE, grads)


def _labels(params: PyTree) -> PyTree:
    def label(path: tuple, _: object) -> str:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return _BIASES if names[-2:] == ["router", "bias"] else _OTHERS

    return jax.tree_util.tree_map_with_path(label, params)
