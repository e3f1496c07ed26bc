"""No loss depends on the rows that pad a vocabulary, nor on the axis that they make divide it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import transformer
from jaxpar.pipeline.embed_and_head import Ends
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import FAMILIES, jit, make_batch, make_params, shardings
from tests.support.tiny_transformer import loss as cross_entropy

WORDS = 13
FULL, SLOW = pytest.mark.full, pytest.mark.slow


def smoothed(logits, targets):
    labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype), 0.1)
    return optax.softmax_cross_entropy(logits, labels)


def to_uniform(logits, targets):
    uniform = jnp.full(logits.shape, 1 / logits.shape[-1], logits.dtype)
    return optax.losses.kl_divergence(jax.nn.log_softmax(logits), uniform)


def of_centered(logits, targets):
    shifted = logits - logits.mean(-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(shifted, targets) + jnp.square(
        shifted
    ).mean(-1)


LOSSES = {
    "label smoothing": smoothed,
    "mean log-softmax": lambda logits, targets: -jnp.mean(jax.nn.log_softmax(logits), -1),
    "divergence from uniform": to_uniform,
    "logits minus mean": of_centered,
    "soft cap": lambda logits, targets: smoothed(jnp.tanh(logits), targets),
    "z": lambda logits, targets: jnp.square(jax.nn.logsumexp(logits, -1)),
    "sorted": lambda logits, targets: jnp.square(jnp.sort(logits, -1)[..., :3]).sum(-1),
}


def all_losses(logits, batch):
    """The sum of them, that of jaxpar's own cross-entropy, and each alone."""
    assert logits.shape[-1] == WORDS
    of_each = {name: loss(logits, batch["targets"]) for name, loss in LOSSES.items()}
    sums = {name: jnp.sum(each * batch["weight"]) for name, each in of_each.items()}
    own, weight = cross_entropy(logits, batch)
    right = jaxpar.losses.num_correct(logits, batch["targets"], batch["weight"])
    return own + sum(sums.values()), weight, sums | {"right": right}


def job(family, multiple):
    changes = {
        "vocab_size": WORDS,
        "vocab_multiple": multiple,
        "compute_dtype": "float64",
        "num_layers": 2,
    }
    config = dataclasses.replace(FAMILIES[family], **changes)
    params, batch = make_params(config, dtype=np.float64), make_batch(dtype=np.float64)
    return config, params, {name: c if name == "weight" else c % WORDS for name, c in batch.items()}


def of_words(params):
    """Params without the rows that pad the vocabulary."""
    cut = {"tokens": lambda a: a[:WORDS], "head": lambda a: a[:, :WORDS]}
    return params | {
        "outer": {name: cut.get(name, lambda a: a)(leaf) for name, leaf in params["outer"].items()}
    }


def reference(family, params, batch):
    """The loss, its parts and gradients on one device, of the words alone."""
    config, _, _ = job(family, 1)

    def mean(params):
        total, weight, sums = all_losses(transformer.make_model(config).apply(params, batch), batch)
        return total / weight, {name: value / weight for name, value in sums.items()}

    return jit(jax.value_and_grad(mean, has_aux=True))(of_words(params))


def step_of(config, axes, **how):
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
    where = shardings(config, mesh)
    model = transformer.make_model(config)
    run = jaxpar.value_and_grad(model, all_losses, mesh, shardings=where, has_aux=True, **how)
    return run if how.get("executor") == "mpmd" else jit(run), mesh, where


THREE = {"data": 2, "stage": 2, "tensor": 2}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "multiple", "axes", "how"),
    [
        pytest.param("llama-tied", 16, {"tensor": 2}, {}, marks=FULL),
        pytest.param("llama-tied", 16, THREE, {"schedule": "1f1b"}, marks=SLOW),
        pytest.param("llama-tied", 16, {"tensor": 4}, {}, marks=SLOW),
        pytest.param("llama", 8, {"stage": 2, "tensor": 4}, {"schedule": "zb-h1"}, marks=SLOW),
        pytest.param(
            "llama",
            32,
            {"stage": 2, "tensor": 4},
            {"schedule": "1f1b", "mask_idle_ops": True},
            marks=FULL,
        ),
        pytest.param("gpt2", 64, {"tensor": 2}, {}, marks=SLOW),
        pytest.param("gpt2-untied", 24, {}, {}, marks=FULL),
        pytest.param(
            "bloom",
            14,
            {"stage": 2, "tensor": 2},
            {"schedule": "gpipe", "executor": "mpmd"},
            marks=FULL,
        ),
    ],
)
def test_losses_of_logits_and_their_gradients_are_those_of_the_words_on_one_device(
    x64, family, multiple, axes, how
):
    config, params, batch = job(family, multiple)
    run, mesh, where = step_of(config, axes, num_microbatches=2, **how)
    value, grads = run(jaxpar.shard(params, where), jaxpar.shard_batch(batch, mesh))
    got = jaxpar.fetch((value, grads))
    assert_same((got[0], of_words(got[1])), reference(family, params, batch))
    for name in ("tokens", "head"):
        of_name = np.moveaxis(got[1]["outer"].get(name, np.zeros((0, 0))), name == "head", 0)
        assert not of_name[WORDS:].any(), "no gradient of what pads the vocabulary"


@pytest.mark.full
def test_a_padded_vocabulary_is_sent_no_further_than_one_that_the_axis_divides(x64):
    config, params, batch = job("llama", 16)
    found = []
    for each in (config, dataclasses.replace(config, vocab_size=16)):
        mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
        where = shardings(each, mesh)
        run = jaxpar.value_and_grad(
            transformer.make_model(each), cross_entropy, mesh, shardings=where, num_microbatches=2
        )
        report = jaxpar.inspect_step(
            jit(run), jaxpar.shard(params, where), jaxpar.shard_batch(batch, mesh)
        )
        found.append(
            sorted((c.kind, str(c.axes), c.times, c.payload_bytes) for c in report.collectives)
        )
    assert found[0] == found[1]


def test_a_model_gives_the_words_of_its_vocabulary_alone():
    config, params, batch = job("gpt2", 8)
    with jax.enable_x64(True):
        logits = jax.eval_shape(transformer.make_model(config).apply, params, batch)
    assert logits.shape == (*batch["tokens"].shape, WORDS)


def test_stages_share_the_head_of_a_padded_vocabulary():
    config, params, batch = job("llama", 16)
    with jax.enable_x64(True):
        model = transformer.make_model(config)
        y = jax.eval_shape(model.embed, params["outer"], batch)
        ends = Ends(model, cross_entropy, params["outer"], y, batch, num_stages=2)
    assert ends.parts is not None
