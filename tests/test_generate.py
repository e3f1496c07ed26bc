"""Text from a model: a cache gives the tokens that full passes give, on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_transformer import FAMILIES, THREE, make_params, shardings

import jaxpar
from jaxpar.models import transformer
from jaxpar.models.transformer.generate import keep_highest

NUM_TOKENS = 6
PROMPT = np.random.default_rng(0).integers(0, 16, (4, 5)).astype(np.int32)
CONFIGS = {family: dataclasses.replace(FAMILIES[family], max_positions=16, num_layers=2) for family in THREE}
DRAWN = {"temperature": 0.7, "top_k": 5, "key": jax.random.key(1)}


def by_full_passes(config, params, *, temperature=0.0, top_k=None, key=None):
    """The same tokens with nothing kept: a whole pass over one padded length for each token."""
    apply = jax.jit(transformer.make_model(config).apply)
    tokens = np.pad(PROMPT, ((0, 0), (0, NUM_TOKENS)))
    for position in range(PROMPT.shape[1], tokens.shape[1]):
        scores = apply(params, {"tokens": tokens})[:, position - 1]
        if temperature == 0:
            tokens[:, position] = jnp.argmax(scores, axis=-1)
        else:
            scores = keep_highest(scores / temperature, top_k)
            tokens[:, position] = jax.random.categorical(jax.random.fold_in(key, position), scores)
    return tokens


@pytest.mark.parametrize("family", THREE)
def test_the_likeliest_tokens_are_those_of_full_passes(family):
    config = CONFIGS[family]
    params = make_params(config)
    got = transformer.generate(config, params, PROMPT, NUM_TOKENS)
    np.testing.assert_array_equal(got, by_full_passes(config, params))
    assert len(np.unique(np.asarray(got[:, 5:]))) > 2, "a model that says one thing tests nothing"


def test_drawn_tokens_are_those_of_full_passes_with_the_same_key():
    config = CONFIGS["llama"]
    params = make_params(config)
    got = transformer.generate(config, params, PROMPT, NUM_TOKENS, **DRAWN)
    np.testing.assert_array_equal(got, by_full_passes(config, params, **DRAWN))
    assert not np.array_equal(got, transformer.generate(config, params, PROMPT, NUM_TOKENS))


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["likeliest", "drawn"])
def test_a_mesh_gives_the_tokens_of_one_device(options):
    config = CONFIGS["llama"]
    params, mesh = make_params(config), jaxpar.make_mesh(stage=2, tensor=4)
    want = transformer.generate(config, params, PROMPT, NUM_TOKENS, **options)
    on_mesh = jaxpar.shard(params, shardings(config, mesh))
    np.testing.assert_array_equal(transformer.generate(config, on_mesh, PROMPT, NUM_TOKENS, **options), want)


def test_only_the_highest_scores_are_kept():
    scores = jnp.asarray([[1.0, 3.0, 2.0, 0.0], [5.0, 5.0, 4.0, 4.0]])
    kept = np.isfinite(np.asarray(keep_highest(scores, 2)))
    np.testing.assert_array_equal(kept, [[False, True, True, False], [True, True, False, False]])
    np.testing.assert_array_equal(keep_highest(scores, None), scores)
    np.testing.assert_array_equal(keep_highest(scores, 9), scores)


def test_rows_that_fill_up_the_vocabulary_are_never_drawn():
    config = dataclasses.replace(CONFIGS["gpt2"], vocab_size=3, vocab_multiple=64)
    hot = transformer.generate(
        config, make_params(config), PROMPT % 3, NUM_TOKENS, temperature=100.0, key=jax.random.key(0)
    )
    assert np.asarray(hot).max() < 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": PROMPT[:, :0]}, r"must be tokens \[batch, seq\], at least one a row; got shape \(4, 0\)"),
        ({"prompt": PROMPT[0]}, r"must be tokens \[batch, seq\].*got shape \(5,\). Give rows"),
        ({"num_tokens": 0}, "num_tokens must be positive; got 0"),
        (
            {"num_tokens": 12},
            "has no more positions than its table; got a prompt of 5 and num_tokens=12, max_positions=16.*at most 11 tokens",
        ),
        ({"temperature": -1.0}, r"temperature must be 0 or more; got -1.0. 0 takes the likeliest"),
        ({"top_k": 0}, "top_k must be positive; got 0. Leave it out"),
        ({"temperature": 1.0}, r"needs a key; got temperature=1.0, key=None. Give jax.random.key\(0\)"),
    ],
)
def test_what_cannot_be_generated_is_refused(changes, message):
    arguments = {"prompt": PROMPT, "num_tokens": NUM_TOKENS} | changes
    with pytest.raises(ValueError, match=message):
        transformer.generate(CONFIGS["gpt2"], {}, **arguments)


VOCAB, PARAMS = CONFIGS["gpt2"].vocab_size, make_params(CONFIGS["gpt2"])


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (
            [[1, VOCAB, 2]],
            ValueError,
            f"from 0 to vocab_size - 1; got tokens from 1 to {VOCAB}, vocab_size={VOCAB}. Give",
        ),
        ([[0, -1]], ValueError, f"from 0 to vocab_size - 1; got tokens from -1 to 0, vocab_size={VOCAB}"),
        ([[2**32 + 1]], ValueError, "got tokens from 4294967297 to"),  # its lower 32 bits are a token
        ([[0.5, 2.0]], TypeError, "tokens must be integers; got float"),
        ([[True]], TypeError, "tokens must be integers; got bool"),
    ],
)
def test_a_prompt_of_anything_but_tokens_of_the_vocabulary_is_refused(prompt, error, message):
    on_device = [] if np.max(prompt) > 2**31 else [jnp.asarray(prompt)]
    for given in (prompt, np.asarray(prompt), *on_device):
        with pytest.raises(error, match=message):
            transformer.generate(CONFIGS["gpt2"], PARAMS, given, NUM_TOKENS)


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["likeliest", "drawn"])
def test_a_model_whose_scores_are_not_finite_gives_no_tokens(options):
    config = dataclasses.replace(CONFIGS["llama"], num_layers=1)
    params = make_params(config)
    params["outer"]["head"][0, 3] = np.inf  # one score of all
    with pytest.raises(
        FloatingPointError, match="scores must be finite for a token to be drawn; got some that are not"
    ):
        transformer.generate(config, params, PROMPT[:1], 2, **options)
    params["outer"]["head"][0, 3] = np.nan
    traced = jax.jit(lambda params: transformer.generate(config, params, PROMPT[:1], 2, **options))(params)
    np.testing.assert_array_equal(traced, [[*PROMPT[0], -1, -1]])


def test_a_prompt_as_long_as_the_table_can_only_be_cut():
    prompt = np.zeros((1, 16), np.int32)
    with pytest.raises(ValueError, match=r"a prompt of 16 and num_tokens=1, max_positions=16. Cut the prompt\.$"):
        transformer.generate(CONFIGS["gpt2"], {}, prompt, 1)
