"""Scores with a cache are those of full passes, in the form for GPUs too, and the cache is written in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.layered_model import OUTER
from jaxpar.models import transformer
from jaxpar.models.transformer.advance import _copies, advance
from jaxpar.models.transformer.attention import unconstrained
from jaxpar.models.transformer.cache import empty_cache
from jaxpar.models.transformer.generate import _extend, _first
from jaxpar.models.transformer.layers import logits
from jaxpar.models.transformer.sampling import make_sampling
from jaxpar.models.transformer.span import Span
from jaxpar.params import abstract_params
from tests.support.tiers import quick
from tests.support.tiny_experts import config_of
from tests.support.tiny_transformer import FAMILIES, SWITCHES, VOCAB, jit, make_params

STEPS, SEQ = 4, 12
LENGTHS = np.array([[7], [1], [3]], np.int32)  # of the prompts, of which the first is the longest
FIVE = {
    "num_layers": 5,
    "max_positions": SEQ,
    "compute_dtype": "float64",
}  # a trip of four layers, and one left
CONFIGS = {
    **{name: dataclasses.replace(config, **FIVE) for name, config in FAMILIES.items()},
    **{
        name: dataclasses.replace(FAMILIES["llama"], **FIVE, **SWITCHES[name])
        for name in ("qwen3", "olmo2")
    },
    "window": dataclasses.replace(FAMILIES["llama"], **FIVE, window=3),
    "copies of heads": dataclasses.replace(FAMILIES["llama"], **FIVE, kv_copies=2),
    **{name: config_of(name, **FIVE) for name in ("mixtral", "deepseek")},
}


@pytest.fixture
def for_gpus(request, monkeypatch):
    """The form of a step that is compiled for GPUs, on those of the tests."""
    monkeypatch.setattr("jaxpar.models.transformer.advance.on_gpus", lambda: request.param)
    return request.param


def scores_with_a_cache(config, params, tokens, lengths):
    """Scores [steps, batch, vocab] of the tokens after the prompts, one position a row at a time."""

    def step(cache, ahead):
        positions = lengths + ahead
        given = jnp.take_along_axis(tokens, positions, axis=1)
        h, cache = advance(
            config, params, given, Span(positions, positions + 1, is_start=False), cache
        )
        return cache, logits(config, params[OUTER], h, unconstrained)[:, 0]

    longest = int(LENGTHS.max())
    cache = empty_cache(config, len(tokens), SEQ)
    _, cache = advance(
        config, params, tokens[:, :longest], Span(jnp.arange(longest)[None], lengths), cache
    )
    return jax.lax.scan(step, cache, jnp.arange(STEPS))[1]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("for_gpus", "rows"), quick([(True, 3), (True, 1), (False, 3)], 0), indirect=["for_gpus"]
)
@pytest.mark.parametrize("name", quick(CONFIGS, "llama"))
def test_scores_of_each_step_are_those_of_a_full_pass(x64, for_gpus, name, rows):
    config = CONFIGS[name]
    params, lengths = make_params(config), LENGTHS[:rows]
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ)).astype(np.int32)
    found = jit(lambda *args: scores_with_a_cache(config, *args))(params, tokens, lengths)
    full = jit(transformer.make_model(config).apply)(params, {"tokens": tokens})
    full = np.asarray(transformer.logits_of(full))
    want = [full[np.arange(rows), lengths[:, 0] + ahead] for ahead in range(STEPS)]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)


def test_a_few_rows_are_copied_until_a_product_has_eight():
    assert [rows * _copies(rows) for rows in (1, 2, 3, 4, 6, 8, 9)] == [8, 8, 24, 8, 24, 8, 9]


def compiled_step(config, rows, length):
    """The compiled program of the steps of greedy generation, and the bytes of its cache."""
    params = abstract_params(transformer.param_table(config))
    sampling = make_sampling(config, 0.0, None, None, key=None, eos=())
    prompts = (
        jax.ShapeDtypeStruct((rows, length // 2), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    state = jax.eval_shape(
        lambda *args: _first.plain(config, (length, 16), *args, sampling), params, *prompts
    )
    both = state.cache.both
    return _extend.plain.lower(
        config, params, state, sampling, 4
    ).compile(), both.size * both.dtype.itemsize


def test_no_step_copies_the_cache():
    config = dataclasses.replace(FAMILIES["llama"], num_layers=12)
    compiled, num_bytes = compiled_step(config, 2, 4096)
    assert compiled.memory_analysis().temp_size_in_bytes < num_bytes / 4
