"""Attention of two chunks to a whole sequence, by parts that are merged: the numbers of plain attention, and its gradients."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.documents import find_documents
from jaxpar.models.transformer.flash_chunks import Kernel, as_rows, chunked_causal_attention
from tests.support import tiny
from tests.support.covering import covering
from tests.support.oracle import assert_same
from tests.support.written_out import WRITTEN_OUT

ROWS, CHUNK, KV_HEADS, HEAD_DIM = 2, 3, 2, 4


@pytest.fixture
def rng():
    return np.random.default_rng(tiny.fresh_seed())


def plain(q, k, v, scale, segments=None):
    """Causal attention with all scores."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bthgk,bshk->bhgts", grouped, k) * scale
    seen = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None, None, None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])[:, None, None]
    return jnp.einsum("bhgts,bshk->bthgk", jax.nn.softmax(scores, where=seen), v).reshape(q.shape)


def arrays(rng, size, group, dtype=np.float64):
    """Queries, keys, values of whole sequences, and a cotangent of the output."""
    seq = 2 * size * CHUNK
    heads = (KV_HEADS * group, KV_HEADS, KV_HEADS, KV_HEADS * group)
    return [rng.normal(size=(ROWS, seq, number, HEAD_DIM)).astype(dtype) for number in heads]


def documents(rng, size, mean):
    """The document of each position of rows, of ``mean`` positions each."""
    return np.cumsum(rng.random((ROWS, 2 * size * CHUNK)) < 1 / mean, axis=1, dtype=np.int32)


def chunks_of(whole, index, size):
    """The chunks of one device of a context axis."""
    chunks = np.split(whole, 2 * size, axis=1)
    return np.concatenate([chunks[index], chunks[-1 - index]], axis=1)


def in_order(by_device, size):
    """The chunks of all devices, in the order of the sequence."""
    own = np if isinstance(by_device, np.ndarray) else jnp  # NumPy compiles nothing
    chunks = own.split(by_device, 2 * size, axis=1)
    return own.concatenate(chunks[::2] + chunks[:0:-2], axis=1)


@partial(jax.jit, static_argnums=4)
def expected(q, k, v, ct, scale, segments=None):
    out, backward = jax.vjp(partial(plain, scale=scale, segments=segments), q, k, v)
    return out, *backward(ct)


@cache
def on_device(size, scale, kernel, most=None):
    """The output and gradients of one of ``size`` devices as a program, with its index traced.

    With ``most`` the kernel is told where documents lie.
    """

    @jax.jit
    def run(index, q, own, whole, ct, of_own, segments):
        how = {"chunk_of_context": (index, size), "scale": scale, "kernel": kernel}
        how |= {} if segments is None else {"segments": (of_own, segments)}
        how |= {} if most is None else {"documents": find_documents(as_rows(of_own), most)}
        attend = partial(chunked_causal_attention, **how)
        out, backward = jax.vjp(attend, q, own, whole)
        return out, *backward(ct)

    return run


def found(q, k, v, ct, *, size, scale, segments=None, kernel=WRITTEN_OUT, most=None):
    """The output and gradients for whole sequences, of which each device computes a part."""
    run = on_device(size, scale, kernel, most)
    local = lambda whole: [
        None if whole is None else chunks_of(whole, index, size) for index in range(size)
    ]
    own = zip(local(k), local(v), strict=True)
    each = [
        run(index, q, own, (k, v), ct, of_own, segments)
        for index, q, own, ct, of_own in zip(
            range(size), local(q), own, local(ct), local(segments), strict=True
        )
    ]
    outs, dqs, d_own, d_whole = zip(*jax.device_get(each), strict=True)
    whole_of = lambda parts: in_order(np.concatenate(parts, axis=1), size)
    by_array = zip(zip(*d_own, strict=True), zip(*d_whole, strict=True), strict=True)
    return whole_of(outs), whole_of(dqs), *(whole_of(own) + sum(whole) for own, whole in by_array)


def nan_where_it_may(kernel):
    """A kernel that returns NaN wherever its contract leaves open what it returns, and everywhere if it is given no keys."""

    def first(array, number):
        return (jnp.arange(array.shape[1])[None] < number[:, None])[:, :, None, None]

    def forward(q, k, v, scale, lengths, bias):
        out, lse = kernel.forward(q, k, v, scale, lengths, bias)
        if lengths is None:
            return out, lse
        known = first(q, lengths[0]) & jnp.all(jnp.asarray(lengths) > 0)
        return jnp.where(known, out, jnp.nan), jnp.where(known[:, None, :, 0, 0], lse, jnp.nan)

    def backward(q, k, v, out, lse, ct, scale, lengths, bias):
        dq, dk, dv = kernel.backward(q, k, v, out, lse, ct, scale, lengths, bias)
        if lengths is None:
            return dq, dk, dv
        seen = first(k, lengths[1])
        return tuple(
            jnp.where(known, each, jnp.nan)
            for known, each in ((first(q, lengths[0]), dq), (seen, dk), (seen, dv))
        )

    return Kernel(forward, backward)


SIZES, GROUPS, SCALES = (1, 2, 4), (1, 3), (0.5, 8.0)
FEW = [(1, 3, 0.5), (2, 1, 8.0), (4, 3, 0.5), (4, 1, 0.5)]


@pytest.mark.full
@pytest.mark.parametrize(("size", "group", "scale"), covering(FEW, SIZES, GROUPS, SCALES))
def test_merged_parts_have_the_output_and_gradients_of_whole_attention(
    x64, rng, size, group, scale
):
    given = arrays(rng, size, group)
    assert_same(found(*given, size=size, scale=scale), expected(*given, scale))


# A mean of 1: each position is a document; of 100: most rows are one.
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("mean", [pytest.param(1, marks=pytest.mark.full), 2, 5, 100])
def test_documents_in_a_row_do_not_see_one_another(x64, rng, size, mean):
    given, segments = arrays(rng, size, 2), documents(rng, size, mean)
    want = expected(*given, 0.5, segments)
    for most in (None, CHUNK):
        got = found(*given, size=size, scale=0.5, segments=segments, most=most)
        # A lone key has a weight of 1, so gradients of scores are 0 but for rounding, which has no relative size.
        assert_same(got, want, floor=1.0)


@pytest.mark.full
@pytest.mark.parametrize("mean", [None, 4], ids=["whole rows", "documents"])
def test_what_a_kernel_returns_for_what_sees_nothing_is_not_read(x64, rng, mean):
    given, segments = arrays(rng, 2, 2), None if mean is None else documents(rng, 2, mean)
    got = found(*given, size=2, scale=0.5, segments=segments, kernel=nan_where_it_may(WRITTEN_OUT))
    assert_same(got, expected(*given, 0.5, segments))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mean", "most"),
    [(None, None), (5, None), (5, CHUNK)],
    ids=["whole rows", "a bias", "documents"],
)
def test_devices_that_gather_keys_have_the_output_and_gradients_of_whole_attention(
    x64, rng, mean, most
):
    size = 4
    given, segments = arrays(rng, size, 2), None if mean is None else documents(rng, size, mean)
    mesh = jaxpar.make_mesh(context=size, devices=jax.devices()[:size])
    spec = PartitionSpec(None, "context")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def on_device(q, k, v, ct, segments):
        whole = lambda x: in_order(jax.lax.all_gather(x, "context", axis=1, tiled=True), size)

        def attend(q, k, v):
            chunk_of_context = jax.lax.axis_index("context"), size
            numbers = None if segments is None else (segments, whole(segments))
            settings = {
                "chunk_of_context": chunk_of_context,
                "segments": numbers,
                "kernel": WRITTEN_OUT,
            }
            settings |= (
                {} if most is None else {"documents": find_documents(as_rows(segments), most)}
            )
            return chunked_causal_attention(q, (k, v), (whole(k), whole(v)), scale=0.5, **settings)

        out, backward = jax.vjp(attend, q, k, v)
        return out, *backward(ct)

    by_device = lambda x: (
        None if x is None else np.concatenate([chunks_of(x, c, size) for c in range(size)], axis=1)
    )
    got = [
        in_order(x, size) for x in jax.device_get(on_device(*map(by_device, (*given, segments))))
    ]
    assert_same(got, list(expected(*given, 0.5, segments)))


@pytest.mark.full
def test_sums_of_16_bit_floats_are_in_float32(rng):
    given = arrays(rng, 2, 2, jnp.bfloat16)
    got = found(*given, size=2, scale=0.5)
    assert {each.dtype for each in got} == {jnp.dtype(jnp.bfloat16)}
    wide = [each.astype(np.float32) for each in given]
    assert_same([each.astype(np.float32) for each in got], list(expected(*wide, 0.5)), within=2e-2)


@pytest.mark.full
def test_the_scale_is_by_head_dim_unless_it_is_given(x64, rng):
    q, k, v, _ = arrays(rng, 1, 1)
    attend = partial(chunked_causal_attention, chunk_of_context=(0, 1), kernel=WRITTEN_OUT)
    found, told = (
        jax.jit(partial(attend, **how))(q, (k, v), (k, v))
        for how in ({}, {"scale": HEAD_DIM**-0.5})
    )
    np.testing.assert_array_equal(found, told)


@pytest.mark.parametrize(
    ("queries", "keys", "dtype", "head_dim", "message"),
    [
        (
            6,
            18,
            "bfloat16",
            8,
            "got 6 queries of 18 positions, C=2. Gather the keys of all devices",
        ),
        (5, 10, "bfloat16", 8, "choose a sequence that 4 divides"),
        (6, 12, "float32", 8, 'got float32, head_dim=8. Use attention="xla"'),
        (6, 12, "bfloat16", 12, "got bfloat16, head_dim=12"),
        (6, 12, "float16", 264, "got float16, head_dim=264"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(queries, keys, dtype, head_dim, message):
    q, k = (jax.ShapeDtypeStruct((1, seq, 2, head_dim), dtype) for seq in (queries, keys))
    attend = partial(chunked_causal_attention, chunk_of_context=(0, 2))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(attend, q, (q, q), (k, k))


@pytest.mark.parametrize("how", ["whole rows", "a bias", "documents"])
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.full), "float16"])
def test_on_gpus_all_parts_are_cudnns(dtype, how):
    array = lambda seq, *dims, dtype=dtype: jax.ShapeDtypeStruct((2, seq, *dims), dtype)
    q, own, whole = array(256, 4, 64), array(256, 2, 64), array(512, 2, 64)
    segments = (
        None if how == "whole rows" else (array(256, dtype="int32"), array(512, dtype="int32"))
    )

    def run(index, q, own, whole, segments):
        given = {"segments": segments} | (
            {"documents": find_documents(as_rows(segments[0]), 5)} if how == "documents" else {}
        )
        out, backward = jax.vjp(
            partial(chunked_causal_attention, chunk_of_context=(index, 2), **given), q, own, whole
        )
        return backward(out)

    traced = jax.jit(run).trace(
        jax.ShapeDtypeStruct((), jnp.int32), q, (own, own), (whole, whole), segments
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r"custom_call @(__cudnn\$\w+)", text)
    own_part = "__cudnn$fmhaScaleBiasSoftmax" if how == "a bias" else "__cudnn$fmhaSoftmax"
    names = [own_part, "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmax"]
    assert kernels == [*names, *(f"{name}Backward" for name in names)]
    assert text.count("PADDING_CAUSAL") == (2 if how == "documents" else 0)
    assert "dot_general" not in text
