"""Rotary positions: the published formulas, and "dynamic" scaling by the length of each document or row alone."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.models import transformer
from jaxpar.models.transformer import Rope, RopeScaling
from jaxpar.models.transformer.advance import advance
from jaxpar.models.transformer.attention import unconstrained
from jaxpar.models.transformer.cache import empty_cache
from jaxpar.models.transformer.layers import logits
from jaxpar.models.transformer.rope import frequencies, rotate
from jaxpar.models.transformer.span import Span
from tests.support import tiny
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import FAMILIES, VOCAB, jit, loss, make_params, shardings

SCALED = {
    "linear": RopeScaling(kind="linear", factor=5.0),
    "dynamic": RopeScaling(kind="dynamic", factor=3.3, original_positions=5),
    "llama3": RopeScaling(
        kind="llama3", factor=8.0, original_positions=300, low_freq_factor=1.5, high_freq_factor=6.0
    ),
    "yarn": RopeScaling(
        kind="yarn", factor=4.0, original_positions=300, beta_fast=20.0, attention_factor=1.2
    ),
    "yarn-whole": RopeScaling(
        kind="yarn", factor=4.0, original_positions=300, beta_slow=2.0, truncate=False
    ),
}
DYNAMIC = dataclasses.replace(
    FAMILIES["llama"],
    num_heads=4,
    num_kv_heads=2,
    num_layers=2,
    rope=Rope(theta=100.0, scaling=SCALED["dynamic"]),
)


def published(theta, scaling, head_dim, length):
    """Frequencies, pair by pair, as the papers and the Llama 3.1 model card have them."""
    found = []
    for i in range(head_dim // 2):
        plain = theta ** (-2 * i / head_dim)
        rotations = scaling.original_positions * plain / (2 * math.pi)
        if scaling.kind == "linear":
            found.append(plain / scaling.factor)
        elif scaling.kind == "dynamic":
            longest = max(length, scaling.original_positions)
            alpha = scaling.factor * longest / scaling.original_positions - (scaling.factor - 1)
            found.append((theta * alpha ** (head_dim / (head_dim - 2))) ** (-2 * i / head_dim))
        elif scaling.kind == "llama3":
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = (rotations - low) / (high - low)
            between = (1 - smooth) * plain / scaling.factor + smooth * plain
            found.append(
                plain
                if rotations > high
                else plain / scaling.factor
                if rotations < low
                else between
            )
        else:
            pair_of = lambda b: (
                head_dim
                * math.log(scaling.original_positions / (b * 2 * math.pi))
                / 2
                / math.log(theta)
            )
            start, end = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
            start, end = (math.floor(start), math.ceil(end)) if scaling.truncate else (start, end)
            ramp = min(max((i - max(start, 0)) / (min(end, head_dim - 1) - max(start, 0)), 0), 1)
            found.append((1 - ramp) * plain + ramp * plain / scaling.factor)
    return np.array(found)


@pytest.mark.parametrize("name", SCALED)
def test_rotations_far_beyond_the_original_positions_are_those_of_the_published_formula(x64, name):
    scaling, positions = SCALED[name], np.array([[0, 1, 299, 300, 4_000, 131_071]])
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 16))
    for theta in (1e4, 5e5):
        turns = published(theta, scaling, 16, 131_072)
        by_formula = x[..., :8] + 1j * x[..., 8:]
        by_formula = (
            by_formula
            * np.exp(1j * positions[:, :, None] * turns)[:, :, None]
            * scaling.attention_factor
        )
        want = np.concatenate([by_formula.real, by_formula.imag], -1)
        for lengths in (131_072, jnp.full((1, 6), 131_072, jnp.int32)):
            found = frequencies(16, Rope(theta=theta, scaling=scaling), lengths)
            rotated = rotate(
                jnp.asarray(x), jnp.asarray(positions), found, scaling.attention_factor
            )
            np.testing.assert_allclose(rotated, want, rtol=0, atol=1e-9)


def test_dynamic_frequencies_up_to_the_original_positions_are_the_plain_ones_bit_for_bit():
    plain, rope = frequencies(16, Rope(), 1), Rope(scaling=SCALED["dynamic"])
    np.testing.assert_array_equal(frequencies(16, rope, 5), plain)
    of_rows = frequencies(16, rope, jnp.asarray([[1, 5], [6, 7]], jnp.int32))
    np.testing.assert_array_equal(of_rows[0], np.stack([plain, plain]).astype(np.float32))
    assert (np.asarray(of_rows[1, :, 1:]) < plain[1:].astype(np.float32)).all()


# Rows of a document longer than the original positions, of documents of one token, and of padding alone.
SEGMENTS = np.array([[1] * 9 + [2] + [3] * 6, [1] * 6 + [2] + [1] * 9, [0] * 16, [0] * 16])


def documents_of(segments):
    """The runs of equal numbers in each row: row, first, end."""
    for row, numbers in enumerate(segments):
        at = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        yield from ((row, first, end) for first, end in itertools.pairwise(at))


def make_packed(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCAB, SEGMENTS.shape).astype(np.int32),
        "targets": rng.integers(0, VOCAB, SEGMENTS.shape).astype(np.int32),
        "segments": SEGMENTS.astype(np.int32),
        "weight": rng.uniform(0, 2, len(SEGMENTS)),
    }


@pytest.mark.full
@pytest.mark.parametrize("family", ["dynamic", pytest.param("bloom", marks=pytest.mark.slow)])
def test_each_document_of_a_packed_row_has_the_logits_that_it_has_alone(x64, family):
    own = DYNAMIC if family == "dynamic" else FAMILIES[family]
    config = dataclasses.replace(own, num_layers=1, compute_dtype="float64")
    params, batch, apply = (
        make_params(config),
        make_packed(),
        jit(transformer.make_model(config).apply),
    )
    together = apply(params, {"tokens": batch["tokens"], "segments": batch["segments"]})
    for row, first, end in documents_of(SEGMENTS):
        alone = apply(params, {"tokens": batch["tokens"][row : row + 1, first:end]})
        np.testing.assert_allclose(together[row, first:end], alone[0], rtol=0, atol=1e-12)


@pytest.mark.full
def test_packed_documents_have_the_loss_and_gradients_of_one_device_on_a_mesh(x64):
    """There each row is a microbatch of its own, with another longest document."""
    config, seed = dataclasses.replace(DYNAMIC, compute_dtype="float64"), tiny.fresh_seed()
    params, batch = make_params(config, seed=seed), make_packed(seed)
    model, mesh = (
        transformer.make_model(config),
        jaxpar.make_mesh(data=2, tensor=2, devices=jax.devices()[:4]),
    )

    def mean(params):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    run = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)
    got = jit(run)(jaxpar.shard(params, shardings(config, mesh)), jaxpar.shard_batch(batch, mesh))
    assert_same(got, jit(jax.value_and_grad(mean))(params), message=f"seed {seed}")


@pytest.mark.full
def test_generated_rows_are_rotated_by_their_own_lengths_and_keys_keep_their_rotation(x64):
    """As transformers continues each row alone: by one pass in which each token has the length at which its key was made."""
    config = dataclasses.replace(DYNAMIC, compute_dtype="float64")
    params, rows, num_tokens = make_params(config), [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8]], 8
    got = transformer.generate(config, params, rows, num_tokens)
    assert len(np.unique(np.concatenate(got))) > 8, "a model that says one thing tests nothing"

    @jax.jit
    def scores_of(tokens, lengths):
        span = Span(jnp.arange(16)[None], lengths)
        h, _ = advance(config, params, tokens, span, empty_cache(config, 1, 16))
        return logits(config, params["outer"], h, unconstrained)

    for row, found in zip(rows, got, strict=True):
        np.testing.assert_array_equal(
            found, transformer.generate(config, params, [row], num_tokens)[0]
        )
        tokens = np.pad(found, (0, 16 - len(found)))[None]
        lengths = np.maximum(np.arange(16) + 1, len(row))[None]
        likeliest = np.asarray(scores_of(tokens, lengths))[0].argmax(-1)
        np.testing.assert_array_equal(likeliest[len(row) - 1 : len(found) - 1], found[len(row) :])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "linear", "original_positions": 8},
            "own fields alone, factor; got original_positions=8. Leave out",
        ),
        (
            {"kind": "dynamic", "attention_factor": 1.5},
            "a 'dynamic' rope scaling must have its own fields alone, factor, original_positions; got attention_factor=1.5",
        ),
        (
            {"kind": "llama3", "beta_fast": 8.0, "truncate": False},
            "got beta_fast=8.0, truncate=False. Leave out beta_fast",
        ),
        ({"kind": "yarn", "beta_slow": float("nan")}, "beta_slow must be positive; got nan"),
        (
            {"kind": "linear", "factor": float("inf")},
            "factor must be at least 1 and finite; got inf",
        ),
        (
            {"kind": "dynamic", "original_positions": 0},
            "original_positions must be at least 1; got 0. Give the length",
        ),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**{"factor": 2.0} | fields)


def test_dynamic_scaling_of_a_single_pair_is_refused():
    with pytest.raises(
        ValueError,
        match=r"needs two pairs or more, so head_dim must be 4 or more; got 2\. Choose fewer",
    ):
        dataclasses.replace(FAMILIES["llama"], rope=Rope(scaling=SCALED["dynamic"]))
