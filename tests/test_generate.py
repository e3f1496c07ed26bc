"""Text from a model: a cache gives the tokens that full passes give, on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.models import transformer
from jaxpar.models.transformer.generate import _extend, _first, round_up
from jaxpar.models.transformer.sampling import draw, keep_highest, keep_likeliest, make_sampling
from tests.support.tiers import quick
from tests.support.tiny_transformer import FAMILIES, THREE, make_params, shardings

NUM_TOKENS, LONGEST = 6, 14  # new ones, and those of the longest row with them
PROMPT = np.random.default_rng(0).integers(0, 16, (4, 5)).astype(np.int32)
CONFIGS = {
    family: dataclasses.replace(FAMILIES[family], max_positions=16, num_layers=2)
    for family in THREE
}
DRAWN = {"temperature": 0.7, "top_k": 5, "key": jax.random.key(1)}


def by_full_passes(
    config, params, *, temperature=0.0, top_k=None, key=None, apply=None, prompt=PROMPT
):
    """The same tokens with nothing kept: a whole pass over one padded length for each token."""
    apply = apply or jax.jit(transformer.make_model(config).apply)
    tokens = np.pad(prompt, ((0, 0), (0, LONGEST - prompt.shape[1])))
    for position in range(prompt.shape[1], prompt.shape[1] + NUM_TOKENS):
        scores = apply(params, {"tokens": tokens})[:, position - 1]
        if temperature == 0:
            tokens[:, position] = jnp.argmax(scores, axis=-1)
        else:
            scores = keep_highest(scores / temperature, top_k)
            tokens[:, position] = jax.random.categorical(jax.random.fold_in(key, position), scores)
    return tokens[:, : prompt.shape[1] + NUM_TOKENS]


@pytest.mark.parametrize("family", quick(THREE, "llama"))
def test_the_likeliest_tokens_are_those_of_full_passes(family):
    config = CONFIGS[family]
    params = make_params(config)
    got = transformer.generate(config, params, PROMPT, NUM_TOKENS)
    np.testing.assert_array_equal(got, by_full_passes(config, params))
    assert len(np.unique(np.asarray(got[:, 5:]))) > 2, "a model that says one thing tests nothing"


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt2", "bloom"))]
)
def test_in_float64_the_likeliest_tokens_are_those_of_full_passes(x64, family):
    config = dataclasses.replace(CONFIGS[family], num_layers=1, compute_dtype="float64")
    params = make_params(config)
    got = transformer.generate(config, params, PROMPT, NUM_TOKENS)
    np.testing.assert_array_equal(got, by_full_passes(config, params))
    assert got.dtype == jnp.int32


@pytest.mark.full
def test_with_64_bit_integers_tokens_are_drawn_and_streamed(x64):
    config = dataclasses.replace(CONFIGS["llama"], num_layers=1)
    params, how = make_params(config), DRAWN | {"top_p": 0.9}
    drawn = transformer.generate(config, params, ROWS, NUM_TOKENS, **how)
    new = zip(*transformer.stream(config, params, ROWS, NUM_TOKENS, **how), strict=True)
    assert [[*row, *tokens] for row, tokens in zip(ROWS, new, strict=True)] == [
        row.tolist() for row in drawn
    ]


@pytest.mark.full
def test_drawn_tokens_are_those_of_full_passes_with_the_same_key():
    config = CONFIGS["llama"]
    params = make_params(config)
    got = transformer.generate(config, params, PROMPT, NUM_TOKENS, **DRAWN)
    np.testing.assert_array_equal(got, by_full_passes(config, params, **DRAWN))
    assert not np.array_equal(got, transformer.generate(config, params, PROMPT, NUM_TOKENS))


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, DRAWN], ids=["likeliest", "drawn"])
def test_a_mesh_gives_the_tokens_of_one_device(options):
    config = CONFIGS["llama"]
    params, mesh = make_params(config), jaxpar.make_mesh(stage=2, tensor=4)
    want = transformer.generate(config, params, PROMPT, NUM_TOKENS, **options)
    on_mesh = jaxpar.shard(params, shardings(config, mesh))
    np.testing.assert_array_equal(
        transformer.generate(config, on_mesh, PROMPT, NUM_TOKENS, **options), want
    )


highest, likeliest = jax.jit(keep_highest, static_argnums=1), jax.jit(keep_likeliest)


def test_only_the_highest_scores_are_kept():
    scores = jnp.asarray([[1.0, 3.0, 2.0, 0.0], [5.0, 5.0, 4.0, 4.0]])
    kept = np.isfinite(np.asarray(highest(scores, 2)))
    np.testing.assert_array_equal(kept, [[False, True, True, False], [True, True, False, False]])
    np.testing.assert_array_equal(highest(scores, None), scores)
    np.testing.assert_array_equal(highest(scores, 9), scores)


def test_only_the_likeliest_scores_are_kept():
    scores = jnp.log(jnp.asarray([[0.1, 0.5, 0.15, 0.25], [0.25, 0.25, 0.25, 0.25]]))
    for top_p, want in (
        (0.4, [[1], [0, 1, 2, 3]]),
        (0.6, [[1, 3], [0, 1, 2, 3]]),
        (0.95, [[0, 1, 2, 3]] * 2),
    ):
        kept = np.isfinite(np.asarray(likeliest(scores, jnp.float32(top_p))))
        assert [np.flatnonzero(row).tolist() for row in kept] == want, top_p


def test_shares_of_probability_and_numbers_of_scores_at_their_limits():
    one, only = jnp.asarray([[2.0]]), jnp.asarray([[-jnp.inf, 3.0, -jnp.inf]])
    tied = jnp.asarray([[1.0, 1.0, 0.0]])
    for top_p in (1e-45, 1e-30, 0.5, 1.0):
        np.testing.assert_array_equal(likeliest(one, jnp.float32(top_p)), one)
        np.testing.assert_array_equal(likeliest(only, jnp.float32(top_p)), only)
        kept = np.isfinite(np.asarray(likeliest(tied, jnp.float32(top_p))))[0]
        assert kept.tolist() == [True, True, top_p == 1.0], top_p
    np.testing.assert_array_equal(highest(only, 2), only)


def drawn(scores, temperature, vocab_size=4, num_draws=64, **how):
    """The tokens that draws with many keys give, of a model of 4 tokens."""
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=vocab_size)
    make = lambda key: make_sampling(
        config, temperature, how.get("top_k"), how.get("top_p"), key=key, eos=(), pad=None
    )
    run = jax.jit(draw)
    samplings = [make(key) for key in jax.random.split(jax.random.key(0), num_draws)]
    return {int(run(each, scores, jnp.int32(0))[0]) for each in samplings}


@pytest.mark.full
def test_temperatures_and_shares_next_to_0_draw_the_likeliest_token():
    scores = jnp.asarray([[50.0, 60.0, -60.0, 10.0]])
    for temperature in (1e-3, 1e-37, 1e-45, 1e-300):
        assert drawn(scores, temperature, num_draws=4) == {1}, temperature
    for top_p in (1e-6, 1e-45, 1e-300):
        assert drawn(jnp.zeros((1, 4)).at[0, 2].set(0.1), 1.0, num_draws=4, top_p=top_p) == {2}, (
            top_p
        )


@pytest.mark.full
def test_high_temperatures_draw_every_token_of_the_vocabulary():
    """Rows beyond it have no scores: ``logits`` leaves them out."""
    scores = jnp.asarray([[1.0, 2.0, 3.0]], jnp.float16)
    for temperature in (1e6, 1e39, float("inf")):
        assert drawn(scores, temperature, vocab_size=3) == {0, 1, 2}, temperature


def test_scores_that_only_float64_holds_are_drawn_from(x64):
    assert drawn(jnp.asarray([[1e300, 2e300, -1e308, 0.0]]), 1.0, num_draws=4) == {1}


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_draws_no_token_at_any_temperature(score):
    for how in ({}, {"top_k": 2}, {"top_p": 0.5}):
        assert drawn(jnp.asarray([[1.0, 2.0, score, 0.0]]), 1.0, num_draws=1, **how) == {-1}


@pytest.mark.full
def test_the_least_share_of_probability_gives_the_likeliest_tokens():
    config = CONFIGS["llama"]
    params = make_params(config)
    got = transformer.generate(
        config, params, PROMPT, NUM_TOKENS, temperature=2.0, top_p=1e-6, key=jax.random.key(0)
    )
    np.testing.assert_array_equal(got, transformer.generate(config, params, PROMPT, NUM_TOKENS))


ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8]]


@pytest.mark.parametrize("family", quick(THREE, "llama"))
def test_a_row_among_longer_ones_is_continued_as_alone(family):
    config = CONFIGS[family]
    params = make_params(config)
    got = transformer.generate(config, params, ROWS, NUM_TOKENS)
    apply = jax.jit(transformer.make_model(config).apply)
    for row, found in zip(ROWS, got, strict=True):
        alone = by_full_passes(config, params, apply=apply, prompt=np.array([row]))
        np.testing.assert_array_equal(found, alone[0])


@pytest.mark.full
def test_a_row_ends_with_its_end_and_the_others_go_on():
    config = CONFIGS["llama"]
    params = make_params(config)
    whole = transformer.generate(config, params, ROWS, NUM_TOKENS)
    eos = [int(whole[0][len(ROWS[0]) + 1]), int(whole[2][len(ROWS[2])])]
    ends = [
        next((i for i, t in enumerate(row[len(p) :]) if t in eos), NUM_TOKENS)
        for p, row in zip(ROWS, whole, strict=True)
    ]
    assert len(set(ends)) > 1
    got = transformer.generate(config, params, ROWS, NUM_TOKENS, eos=eos)
    for prompt, row, one, end in zip(ROWS, whole, got, ends, strict=True):
        np.testing.assert_array_equal(one, row[: len(prompt) + end + 1])
    array = transformer.generate(config, params, [ROWS[0]], NUM_TOKENS, eos=eos, pad=7)
    assert array.shape == (1, len(ROWS[0]) + NUM_TOKENS)
    np.testing.assert_array_equal(array[0, : len(got[0])], got[0])
    assert (np.asarray(array[0, len(got[0]) :]) == 7).all()


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("options", [{}, DRAWN], ids=["likeliest", "drawn"])
def test_a_stream_gives_the_same_tokens_one_by_one(options):
    config = CONFIGS["llama"]
    params, mesh = make_params(config), jaxpar.make_mesh(stage=2, tensor=4)
    whole = transformer.generate(config, params, ROWS, NUM_TOKENS, **options)
    eos = int(whole[1][2])
    want = transformer.generate(config, params, ROWS, NUM_TOKENS, eos=eos, **options)
    got = list(
        transformer.stream(
            config,
            jaxpar.shard(params, shardings(config, mesh)),
            ROWS,
            NUM_TOKENS,
            eos=eos,
            **options,
        )
    )
    for i, (prompt, row) in enumerate(zip(ROWS, want, strict=True)):
        new = [tokens[i] for tokens in got]
        assert new == [*row[len(prompt) :].tolist(), *[None] * (len(got) - len(row) + len(prompt))]


@pytest.mark.full
def test_a_stream_ends_with_its_last_row_and_is_checked_at_once():
    config = CONFIGS["llama"]
    params = make_params(config)
    first = transformer.generate(config, params, [[1, 2]], 1)
    assert list(transformer.stream(config, params, [[1, 2]], 9, eos=int(first[0, 2]))) == [
        [int(first[0, 2])]
    ]
    with pytest.raises(ValueError, match="num_tokens must be at least 1; got 0"):
        transformer.stream(config, params, [[1, 2]], 0)


@pytest.mark.full
def test_prompts_of_many_lengths_share_a_few_programs():
    config = dataclasses.replace(CONFIGS["llama"], num_layers=1, norm_epsilon=3e-5)
    params = make_params(config)
    before = _first.plain._cache_size(), _extend.plain._cache_size()
    for length, num_tokens in ((1, 1), (3, 9), (7, 2), (12, 4), (15, 1)):
        transformer.generate(config, params, [[1] * length], num_tokens)
    assert (_first.plain._cache_size(), _extend.plain._cache_size()) == (
        before[0] + 1,
        before[1] + 1,
    )
    assert [round_up(n, None) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    assert round_up(17, 24) == 24


@pytest.mark.full
def test_rows_that_fill_up_the_vocabulary_are_never_drawn():
    config = dataclasses.replace(CONFIGS["gpt2"], vocab_size=3, vocab_multiple=64)
    hot = transformer.generate(
        config,
        make_params(config),
        PROMPT % 3,
        NUM_TOKENS,
        temperature=100.0,
        key=jax.random.key(0),
    )
    assert np.asarray(hot).max() < 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt": PROMPT[:, :0]},
            r"must be tokens \[batch, seq\], at least one a row; got shape \(4, 0\)",
        ),
        ({"prompt": PROMPT[0]}, r"must be tokens \[batch, seq\].*got shape \(5,\). Give rows"),
        ({"num_tokens": 0}, "num_tokens must be at least 1; got 0"),
        (
            {"num_tokens": 12},
            "has no more positions than its table; got a prompt of 5 and num_tokens=12, max_positions=16.*at most 11 tokens",
        ),
        ({"temperature": -1.0}, r"temperature must be 0 or more; got -1.0. 0 takes the likeliest"),
        ({"top_k": 0}, "top_k must be at least 1; got 0. Leave it out"),
        ({"top_p": 0.0}, "top_p must be from above 0 to 1; got 0.0. Leave it out"),
        (
            {"eos": 16},
            r"eos and pad must be from 0 to vocab_size - 1; got eos=\[16\], pad=None, vocab_size=16",
        ),
        ({"pad": -1}, r"eos and pad must be .* got eos=\[\], pad=-1"),
        (
            {"prompt": [[1], []]},
            r"must be tokens \[batch, seq\], at least one a row; got shape \(2, 0\)",
        ),
        ({"prompt": [[1], [2, 99]]}, "from 0 to vocab_size - 1; got tokens from 1 to 99"),
        (
            {"temperature": 1.0},
            r"needs a key; got temperature=1.0, key=None. Give jax.random.key\(0\)",
        ),
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
        (
            [[0, -1]],
            ValueError,
            f"from 0 to vocab_size - 1; got tokens from -1 to 0, vocab_size={VOCAB}",
        ),
        (
            [[2**32 + 1]],
            ValueError,
            "got tokens from 4294967297 to",
        ),  # its lower 32 bits are a token
        ([[0.5, 2.0]], TypeError, "tokens must be integers; got float"),
        ([[True]], TypeError, "tokens must be integers; got bool"),
    ],
)
def test_a_prompt_of_anything_but_tokens_of_the_vocabulary_is_refused(prompt, error, message):
    on_device = [] if np.max(prompt) > 2**31 else [jnp.asarray(prompt)]
    for given in (prompt, np.asarray(prompt), *on_device):
        with pytest.raises(error, match=message):
            transformer.generate(CONFIGS["gpt2"], PARAMS, given, NUM_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, DRAWN], ids=["likeliest", "drawn"])
def test_a_model_whose_scores_are_not_finite_gives_no_tokens(options):
    config = dataclasses.replace(CONFIGS["llama"], num_layers=1)
    params = make_params(config)
    params["outer"]["head"][0, 3] = np.inf  # one score of all
    with pytest.raises(
        FloatingPointError,
        match="scores must be finite for a token to be drawn; got some that are not",
    ):
        transformer.generate(config, params, PROMPT[:1], 2, **options)
    params["outer"]["head"][0, 3] = np.nan
    traced = jax.jit(lambda params: transformer.generate(config, params, PROMPT[:1], 2, **options))(
        params
    )
    np.testing.assert_array_equal(traced, [[*PROMPT[0], -1, -1]])


def test_a_prompt_as_long_as_the_table_can_only_be_cut():
    prompt = np.zeros((1, 16), np.int32)
    with pytest.raises(
        ValueError, match=r"a prompt of 16 and num_tokens=1, max_positions=16. Cut the prompt\.$"
    ):
        transformer.generate(CONFIGS["gpt2"], {}, prompt, 1)
