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

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxpar.context_parallel import gather_sequence, sum_over_sequence
from jaxpar.models.transformer.config import Experts, TransformerConfig

# The gradient of a router's bias is the load of each expert times this power of two: far below the rounding of a gradient norm,
# so that neither norms nor clipping see it, and exact.
LOAD_SCALE = 2.0**-40
_OTHERS, _BIASES = "others", "router_biases"


Chosen = Int[Array, "batch seq chosen"]
Scores = Float[Array, "batch seq experts"]
Tokens = Float[Array, "batch seq"]
Both = Float[Array, "batch seq 2 experts"]


class Routing(NamedTuple):
    """What a router chose.

    Attributes:
        experts: The experts of each token; for padding the number of experts.
        weights: Their weights, 0 for padding.
        logits: The router's outputs for all experts.
        scores: Their softmax or sigmoid.
        real: Whether a token is not padding; None: all are real.
    """

    experts: Chosen
    weights: Float[Array, "batch seq chosen"]
    logits: Scores
    scores: Scores
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
        batch, seq, _ = h.shape
        of_tokens = jnp.zeros((batch, seq), wide)
        num_experts = 0 if config.experts is None else config.experts.count
        loads = jnp.zeros((batch, config.num_stacked_layers, num_experts), jnp.int32)
        tally = jnp.zeros(batch, wide)
        dropped = jnp.zeros(batch, jnp.int32)
        return cls(of_tokens, of_tokens, tally, loads, dropped)

    def plus(
        self,
        settings: Experts,
        params: PyTree,
        routing: Routing,
        dropped: Int[Array, " batch"],
        segments: Int[Array, "batch seq"] | None,
    ) -> "RouterSums":
        """Returns the sums after a layer with these params of its router."""
        num_experts = routing.logits.shape[-1]
        loads = _one_hot(routing.experts, num_experts).sum((1, 2), dtype=jnp.int32)
        tally = self.tally
        if settings.router_bias:
            bias = params["bias"].astype(tally.dtype)
            zero = bias - jax.lax.stop_gradient(bias)
            tally = tally + LOAD_SCALE * (loads.astype(tally.dtype) @ zero)
        z = jnp.square(jax.nn.logsumexp(routing.logits, -1))
        return RouterSums(
            balance=self.balance + balance_loss(settings, routing, segments),
            z=self.z + _of_real(z, routing),
            tally=tally,
            loads=jnp.concatenate([self.loads[:, 1:], loads[:, None]], 1),
            dropped=self.dropped + dropped,
        )


def route(
    settings: Experts,
    params: PyTree,
    x: Float[Array, "batch seq embed"],
    real: Bool[Array, "batch seq"] | None = None,
) -> Routing:
    """Returns the experts of each token and their weights.

    Args:
        settings: The experts of the model.
        params: The params under ``router`` of a layer.
        x: The normalized input.
        real: Whether a token is not padding; None: all are real.

    Raises:
        ValueError: The router is that of another number of experts, such as a part of one that is split over ``data``.
    """
    if (got := params["w_router"].shape[-1]) != settings.count:
        raise ValueError(
            f"a router must choose among all experts; got w_router {list(params['w_router'].shape)}, of {got}, and "
            f"count={settings.count}. Make the params from the table of this model, and leave data out of the router's rule."
        )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weight = params["w_router"].astype(wide)
    # A GPU's default for float32 products would round the inputs to 10 bits.
    logits = jnp.einsum("btd,de->bte", x.astype(wide), weight, precision="highest")
    if settings.router_score == "softmax":
        scores = jax.nn.softmax(logits, -1)
    else:
        scores = jax.nn.sigmoid(logits)
    experts = _best_experts(settings, params, scores)
    weights = _weights_of(settings, experts, scores)
    if real is not None:
        num_experts = scores.shape[-1]
        experts = jnp.where(real[..., None], experts, num_experts)
        weights = jnp.where(real[..., None], weights, 0)
    return Routing(experts, weights, logits, scores, real)


def _best_experts(settings: Experts, params: PyTree, scores: Scores) -> Chosen:
    """Returns the experts with the highest scores, to which the bias is added, if there is one."""
    appeal = scores
    if "bias" in params:
        bias = params["bias"].astype(scores.dtype)
        appeal = scores + bias[None, None]
    appeal = _in_best_groups(settings, jax.lax.stop_gradient(appeal))
    _, experts = jax.lax.top_k(appeal, settings.per_token)
    return experts


def _weights_of(settings: Experts, experts: Chosen, scores: Scores) -> Array:
    """Returns the scores of the chosen experts, normalized and scaled as the model has it."""
    # A sum over all experts fuses; the gradient of a gather would be a scatter.
    is_chosen = _one_hot(experts, scores.shape[-1])
    weights = jnp.where(is_chosen, scores[:, :, None], 0).sum(-1)
    if settings.normalized_routing:
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.maximum(total, jnp.finfo(scores.dtype).tiny)
    return weights * settings.routed_scaling_factor


def _of_real(values: Float[Array, "batch seq *dims"], routing: Routing) -> Array:
    """Returns the values of tokens with 0 for those that are padding."""
    if routing.real is None:
        return values
    trailing = (1,) * (values.ndim - 2)
    real = routing.real.reshape(*routing.real.shape, *trailing)
    return jnp.where(real, values, 0)


def _in_best_groups(settings: Experts, appeal: Scores) -> Array:
    """Returns how good each expert is, with minus infinity for those of groups that a token does not use."""
    count = settings.num_groups
    if settings.groups_per_token == count:
        return appeal
    batch, seq, _ = appeal.shape
    grouped = appeal.reshape(batch, seq, count, -1)
    is_pair = settings.router_score == "sigmoid" and grouped.shape[-1] > 1
    of_best, _ = jax.lax.top_k(grouped, 2 if is_pair else 1)
    _, groups = jax.lax.top_k(of_best.sum(-1), settings.groups_per_token)
    is_used = _one_hot(groups, count).any(2)
    appeal_of_used = jnp.where(is_used[..., None], grouped, -jnp.inf)
    return appeal_of_used.reshape(appeal.shape)


def _one_hot(chosen: Chosen, count: int) -> Array:
    """Returns ``[batch, seq, chosen, count]``, whether each of ``count`` numbers is the chosen one."""
    numbers = jnp.arange(count, dtype=chosen.dtype)
    return chosen[..., None] == numbers[None, None, None]


def balance_loss(
    settings: Experts, routing: Routing, segments: Int[Array, "batch seq"] | None = None
) -> Tokens:
    """Returns the balance loss of each token's document, a row or a segment of it."""
    uses, shares = _uses_and_shares(settings, routing)
    both = jnp.stack([uses, shares], 2)
    tokens = both.shape[:2]
    if routing.real is None:
        real = jnp.ones(tokens, both.dtype)
    else:
        real = routing.real.astype(both.dtype)
    if segments is None:
        f, p = _means_of_rows(both, real)
        of_rows = (f * p).sum(-1)
        of_tokens = jnp.broadcast_to(of_rows[:, None], tokens)
    else:
        f, p = _means_of_segments(both, real, segments)
        of_tokens = (f * p).sum(-1)
    return _of_real(of_tokens, routing)


def _uses_and_shares(settings: Experts, routing: Routing) -> tuple[Scores, Scores]:
    """Returns for each token and expert what its f_e and P_e are the means of."""
    scores = routing.scores
    num_experts = scores.shape[-1]
    is_chosen = _one_hot(routing.experts, num_experts).any(2)
    uses = is_chosen.astype(scores.dtype) * (num_experts / settings.per_token)
    if settings.router_score != "softmax":
        scores = scores / scores.sum(-1, keepdims=True)
    return uses, _of_real(scores, routing)


def _means_of_rows(both: Both, real: Tokens) -> tuple[Array, Array]:
    """Returns the means of both over the real tokens of each row, ``[batch, experts]`` each."""
    rows, _, _, num_experts = both.shape
    sums = both.sum(1).reshape(rows, -1)
    counts = real.sum(1, keepdims=True)
    own = jnp.concatenate([sums, counts], 1)
    whole = sum_over_sequence(own)
    sums, counts = whole[:, :-1], whole[:, -1:]
    means = sums / jnp.maximum(counts, 1)
    means = means.reshape(rows, 2, num_experts)
    return means[:, 0], means[:, 1]


def _means_of_segments(
    both: Both, real: Tokens, segments: Int[Array, "batch seq"]
) -> tuple[Scores, Scores]:
    """Returns the means of both over the real tokens of each token's segment."""
    batch, seq, *others = both.shape
    is_same = segments[:, :, None] == gather_sequence(segments)[:, None, :]
    weights = is_same.astype(both.dtype) * gather_sequence(real)[:, None, :]
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.maximum(total, 1)
    # Experts are no heads, which a tensor axis may split.
    as_one_head = both.reshape(batch, seq, 1, -1)
    whole = gather_sequence(as_one_head).reshape(batch, -1, *others)
    means = jnp.einsum("bts,bsie->btie", weights, whole, precision="highest")
    return means[:, :, 0], means[:, :, 1]


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
        raise ValueError(
            f"the rate of the biases must be 0 or more; got {rate}. Choose such as 0.001."
        )

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        return jax.tree.map(towards_mean, updates), state

    def towards_mean(loads: Float[Array, "*layers experts"]) -> Array:
        mean = loads.mean(-1, keepdims=True)
        # A load that is the mean must not move its bias by the rounding of the sums, which depends on the mesh.
        distance = jnp.abs(mean - loads)
        is_mean = distance <= 1024 * jnp.finfo(loads.dtype).eps * mean
        change = jnp.where(is_mean, 0, rate * jnp.sign(mean - loads))
        return change.astype(loads.dtype)

    biases = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.partition({_OTHERS: optimizer, _BIASES: biases}, _labels)


def expert_loads(grads: PyTree) -> PyTree:
    """Returns the loads in gradients of routers' biases: the tokens of each expert, over the weight of the batch.

    Args:
        grads: The gradient of a bias, or a tree of them. With weights of 1 the loads of a layer add up to ``per_token``.
    """
    return jax.tree.map(lambda g: g / LOAD_SCALE, grads)


def _labels(params: PyTree) -> PyTree:
    def label(path: tuple, _: object) -> str:
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        return _BIASES if names[-2:] == ["router", "bias"] else _OTHERS

    return jax.tree_util.tree_map_with_path(label, params)
