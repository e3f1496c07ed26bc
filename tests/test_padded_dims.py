"""A step computes with a padded vocabulary in place what a loss computes of the words alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.backward.graph import fold_transposes
from jaxpar.backward.padded_dims import keep_padding, without_padding
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import jit

WORDS, PADDED, ROWS, SEQ, EMBED = 5, 8, 2, 3, 4


def smoothed(logits, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, WORDS, dtype=logits.dtype), 0.1)
    return optax.softmax_cross_entropy(logits, targets).sum()


def to_uniform(logits, labels):
    return optax.losses.kl_divergence(
        jax.nn.log_softmax(logits), jnp.full(logits.shape, 1 / WORDS)
    ).sum()


def centered(logits, labels):
    shifted = logits - logits.mean(-1, keepdims=True)
    return jaxpar.losses.softmax_cross_entropy(shifted, labels)[0] + jnp.abs(shifted).sum()


def scores_of(logits, labels):
    best = jax.lax.stop_gradient(logits.max(-1))
    return (best * logits.argmax(-1) + logits.argmin(-1) * logits.min(-1)).sum()


def flat(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.reshape(-1, WORDS), labels.reshape(-1)
    ).sum()


def shifted(logits, labels):
    return jaxpar.losses.softmax_cross_entropy(logits[:, :-1] / 0.7, labels[:, 1:])[0]


def entropy(logits, labels):
    shares = jax.nn.softmax(logits)
    return -(shares * jnp.log(shares + 1e-9)).sum()


def counted(logits, labels):
    return jaxpar.losses.num_correct(logits, labels) + jnp.sum(jax.nn.logsumexp(logits, -1) ** 2)


LOSSES = {
    "cross-entropy": lambda logits, labels: jaxpar.losses.softmax_cross_entropy(logits, labels)[0],
    "label smoothing": smoothed,
    "mean log-softmax": lambda logits, labels: -jnp.sum(jnp.mean(jax.nn.log_softmax(logits), -1)),
    "divergence from uniform": to_uniform,
    "logits minus mean": centered,
    "soft cap": lambda logits, labels: jaxpar.losses.softmax_cross_entropy(
        jnp.tanh(logits), labels
    )[0],
    "largest and smallest": scores_of,
    "flattened": flat,
    "shifted and scaled": shifted,
    "entropy": entropy,
    "right ones and z": counted,
    "jitted": jax.jit(smoothed),
    "checkpointed": jax.checkpoint(smoothed),
    "sorted": lambda logits, labels: (jnp.sort(logits, -1) * jnp.arange(WORDS)[None, None]).sum(),
    "weighed words": lambda logits, labels: (logits * jnp.linspace(0, 1, WORDS)[None, None]).sum(),
    "transposed": lambda logits, labels: jax.nn.logsumexp(logits.swapaxes(1, 2), 1)[:, 1:].sum(),
}
SEES_WORDS = {"checkpointed", "sorted", "weighed words"}  # the last pads its weights


def job():
    rng = np.random.default_rng(0)
    weights, h = rng.normal(size=(EMBED, PADDED)), 3 * rng.normal(size=(ROWS, SEQ, EMBED))
    return weights, h, rng.integers(0, WORDS, (ROWS, SEQ)).astype(np.int32)


def gradients_of_all(head):
    """The loss by each function of the words that ``head`` returns, and its gradients."""

    def one(loss, weights, h, labels):
        return jax.value_and_grad(lambda *given: loss(head(*given), labels), (0, 1))(weights, h)

    return lambda *given: {name: one(loss, *given) for name, loss in LOSSES.items()}


product = partial(jnp.einsum, "dv,btd->btv")
padded = lambda weights, h: without_padding(product(weights, h), WORDS)


def test_losses_of_words_are_the_same_with_the_padding_in_place(x64):
    weights, h, labels = job()
    want = jit(gradients_of_all(product))(weights[:, :WORDS], h, labels)
    got = jit(fold_transposes(gradients_of_all(padded), keep_padding))(weights, h, labels)
    for name, (value, (of_weights, of_h)) in got.items():
        assert_same((value, (of_weights[:, :WORDS], of_h)), want[name], message=name)
        assert not np.any(of_weights[:, WORDS:]), f"the padding has no gradient: {name}"


@pytest.mark.parametrize("name", LOSSES)
def test_no_array_of_the_words_alone_is_made_where_entries_are_treated_alike(x64, name):
    def gradients(weights, h, labels):
        return jax.value_and_grad(lambda *given: LOSSES[name](padded(*given), labels), (0, 1))(
            weights, h
        )

    made = jax.make_jaxpr(fold_transposes(gradients, keep_padding))(*job())
    shapes = {v.aval.shape for each in made.eqns for v in each.outvars}
    assert any(WORDS in shape for shape in shapes) == (name in SEES_WORDS), shapes
