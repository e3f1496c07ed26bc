"""Packed documents: each target once, and the loss and gradients of documents in rows of their own, on every mesh."""

import dataclasses
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpar
from jaxpar.data.batches import pad_rows
from jaxpar.data.packing import IGNORED, Documents, PackedRows, fit, pack
from jaxpar.models import transformer
from jaxpar.models.transformer.layers import Stream
from jaxpar.models.transformer.span import Span
from jaxpar.tensor_parallel import sequence_parallel
from tests.support import tiny
from tests.support.oracle import assert_same
from tests.support.texts import make_documents
from tests.support.tiny_transformer import FAMILIES, SEQ, VOCAB, fused, jit, make_params, shardings


def targets_of(documents):
    """The (previous token, target) pairs to learn, of each document."""
    pairs = []
    for start, end in zip(documents.starts.tolist(), documents.ends.tolist(), strict=True):
        whole = documents.tokens[start:end].tolist()
        is_learned = (
            [1] * len(whole) if documents.learned is None else documents.learned[start:end].tolist()
        )
        pairs += [(whole[i], whole[i + 1]) for i in range(len(whole) - 1) if is_learned[i + 1]]
    return sorted(pairs)


# The rows.


@given(sizes=st.lists(st.integers(1, 9), max_size=60), more=st.integers(0, 5))
def test_no_row_overflows_and_items_that_fit_together_leave_little_room(sizes, more):
    capacity = 9 + more
    row_of = pack(np.array(sizes, np.int64), capacity)
    filled = np.bincount(row_of, weights=sizes) if sizes else np.zeros(0)
    assert (filled <= capacity).all()
    assert len(filled) == len(np.unique(row_of))
    if len(filled) > 1:
        assert len(filled) <= 1.25 * np.ceil(sum(sizes) / capacity) + 2, (
            "best fit is within 22% of the least"
        )


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    seq=st.integers(1, 9),
    learned=st.sampled_from([True, 0.3]),
    seed=st.integers(0, 99),
)
def test_every_target_of_every_document_is_in_the_rows_once(lengths, seq, learned, seed):
    documents = make_documents(np.random.default_rng(seed), lengths, learned=learned)
    wanted = targets_of(documents)
    if not wanted:
        with pytest.raises(
            ValueError, match="must have a token to learn after their first one; got none in"
        ):
            PackedRows(documents, seq, vocab_size=VOCAB)
        return
    packed = PackedRows(documents, seq, vocab_size=VOCAB)
    rows = packed.take(np.arange(len(packed)))
    is_target = rows["targets"] != IGNORED
    assert (
        sorted(
            zip(
                rows["tokens"][is_target].tolist(), rows["targets"][is_target].tolist(), strict=True
            )
        )
        == wanted
    )
    assert {column.shape for column in rows.values()} == {(len(packed), seq)}
    assert {column.dtype for column in rows.values()} == {np.dtype(np.int32)}
    assert (np.diff(rows["segments"], axis=1) >= 0).all()


def test_segments_are_documents_and_what_is_left_is_one_of_its_own():
    documents = make_documents(np.random.default_rng(0), [4, 3, 3])
    packed = PackedRows(documents, 6, vocab_size=VOCAB)
    rows = packed.take(np.arange(len(packed)))
    assert rows["segments"].tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]
    np.testing.assert_array_equal(
        rows["tokens"][0, :5], [*documents.tokens[:3], *documents.tokens[4:6]]
    )
    np.testing.assert_array_equal(rows["targets"][0, :3], documents.tokens[1:4])
    assert rows["targets"][0, 5] == IGNORED


def test_no_more_documents_are_in_a_row_than_the_model_is_told():
    documents = make_documents(
        np.random.default_rng(0), [7, 2, 2, 2, 2, 2, 2, 3]
    )  # of 6, 1 and 2 targets
    most_in = lambda rows: max(1 + np.count_nonzero(np.diff(rows["segments"]), axis=1))
    for told, found in ((None, 5), (4, 4), (3, 3), (2, 2)):
        packed = PackedRows(documents, 6, vocab_size=VOCAB, max_documents=told)
        rows = packed.take(np.arange(len(packed)))
        assert packed.max_documents == most_in(rows) == found
        assert np.count_nonzero(rows["targets"] != IGNORED) == 14
    with pytest.raises(
        ValueError,
        match=r"max_documents must be at least 2; got 1. A row has one document and padding",
    ):
        PackedRows(documents, 6, vocab_size=VOCAB, max_documents=1)


def test_rows_say_how_full_they_are_and_what_was_cut():
    documents = make_documents(np.random.default_rng(0), [4, 3, 3])
    assert (
        PackedRows(documents, 6, vocab_size=VOCAB).describe()
        == "3 documents in 2 rows of 6 tokens, 58.3% filled"
    )
    documents = make_documents(np.random.default_rng(0), [14, 7, 3])
    cut = "3 documents in 4 rows of 6 tokens, 87.5% filled; 1 are longer than a row and cut into pieces, each read without "
    assert PackedRows(documents, 6, vocab_size=VOCAB).describe() == cut + "those before it"


SEQ_OF_LONG_ROWS = 2**17


def peak_of_long_rows(path, num_tokens):
    """The most memory that is allocated at once for some batches of rows of 131,072 tokens, of a cache on disk, in bytes."""
    with path.open("wb") as file:
        file.truncate(2 * num_tokens)
    tokens = np.memmap(path, "<u2", mode="r")
    ends = np.unique(
        np.random.default_rng(0).integers(1, num_tokens, num_tokens // 2**16)
    )  # half a row, some much longer
    starts = np.concatenate([[0], ends[:-1]])
    tracemalloc.start()
    try:
        rows = PackedRows(
            Documents(tokens, starts, ends, None, str), SEQ_OF_LONG_ROWS, vocab_size=VOCAB
        )
        rows.check()
        assert "are longer than a row and cut" in rows.describe()
        for step in range(3):
            rows.batch(2, seed=0, step=step)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_the_host_does_not_grow_with_a_cache_of_long_documents(tmp_path):
    small, large = (peak_of_long_rows(tmp_path / f"{num}.bin", num * 2**20) for num in (4, 64))
    batch = 2 * 4 * 3 * SEQ_OF_LONG_ROWS
    assert large < 1.05 * small, f"{small:,} bytes for 4 million tokens, {large:,} for 64 million"
    assert large < 8 * batch, f"{large:,} bytes for batches of {batch:,}"


def test_a_batch_of_packed_rows_depends_on_seed_and_step_alone():
    documents = make_documents(np.random.default_rng(0), [5] * 40)
    first, again = (PackedRows(documents, 8, vocab_size=VOCAB) for _ in range(2))
    first.batch(4, seed=0, step=3)
    for name in ("tokens", "targets", "segments", "weight"):
        np.testing.assert_array_equal(
            first.batch(4, seed=0, step=7, multiple=8)[name],
            again.batch(4, seed=0, step=7, multiple=8)[name],
        )


@pytest.mark.parametrize(("policy", "num_left", "num_out"), [("drop", 2, 1), ("cut", 3, 0)])
def test_long_examples_with_a_prompt_are_dropped_or_cut_as_asked(policy, num_left, num_out):
    documents = make_documents(np.random.default_rng(0), [9, 4, 9])
    documents = dataclasses.replace(
        documents, learned=np.array([1] * 9 + [0, 0, 1, 1] + [0] * 4 + [1] * 5, np.uint8)
    )
    left, out = fit(documents, 5, policy)
    assert (len(left), out) == (num_left, num_out), (
        "the first document has no prompt, so it is cut into pieces"
    )


def test_long_examples_are_refused_with_their_place_and_the_seq_that_holds_them():
    documents = make_documents(np.random.default_rng(0), [4, 9, 12])
    documents = dataclasses.replace(
        documents, learned=np.tile(np.array([0, 0, 0, 1, 1], np.uint8), 5)
    )
    with pytest.raises(
        ValueError,
        match=r"got seq=5 and 2 longer examples, the first of 9 tokens in a.jsonl:2. Choose seq=11",
    ):
        fit(documents, 5, "refuse")
    assert len(fit(documents, 11, "refuse")[0]) == 3
    for policy in ("refuse", "drop"):
        with pytest.raises(ValueError, match=r"Choose seq=12[,.]"):
            fit(documents.take(np.array([1, 2])), 5, policy, multiple=4)
    with pytest.raises(ValueError, match=r"must be one of refuse, drop, cut; got \'shorten\'"):
        fit(documents, 5, "shorten")


def test_examples_that_are_all_too_long_are_not_dropped_to_nothing():
    learned = np.array([0, 0, 1, 0, 0, 1, 1], np.uint8)
    documents = Documents(np.arange(7), np.array([0, 3]), np.array([3, 7]), learned)
    assert (documents.num_learned, documents.take(np.array([0])).num_learned) == (3, 1)
    assert dataclasses.replace(documents, learned=None).num_learned is None, "all are"
    message = r"got seq=1 and 2 examples, which are all longer, from 3 tokens on. Choose seq=3\."
    with pytest.raises(ValueError, match=message):
        fit(documents, 1, "drop")
    assert len(fit(documents, 3, "drop")[0]) == 2


def test_documents_that_do_not_fit_the_model_are_refused():
    documents = make_documents(np.random.default_rng(0), [9, 4], vocab=50)
    with pytest.raises(
        ValueError, match=r"must be from 0 to below the model's vocab_size; got \d+, vocab_size=3"
    ):
        PackedRows(documents, 5, vocab_size=3).check()
    with pytest.raises(ValueError, match=r"seq must be positive; got 0\. Choose 1 or more"):
        PackedRows(documents, 0, vocab_size=50)


# The model.


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["targets"], batch["weight"])


def packed_and_apart(seed, dtype):
    """The same documents packed in rows, filled up to 24 by rows of weight 0, and each in a row of its own."""
    rng = np.random.default_rng(seed)
    lengths = [SEQ + 1, 2, *rng.integers(2, SEQ + 2, 22).tolist()]
    documents = make_documents(rng, lengths, learned=0.7)
    packed = PackedRows(documents, SEQ, vocab_size=VOCAB)
    together = pad_rows(packed.take(np.arange(len(packed))), 24)
    together["weight"] = together["weight"].astype(dtype)
    rows = len(documents)
    apart = {
        "tokens": np.zeros((rows, SEQ), np.int32),
        "targets": np.full((rows, SEQ), IGNORED, np.int32),
    }
    for i, (start, end) in enumerate(
        zip(documents.starts.tolist(), documents.ends.tolist(), strict=True)
    ):
        count = end - start - 1
        apart["tokens"][i, :count] = documents.tokens[start : end - 1]
        is_target = documents.learned[start + 1 : end]
        apart["targets"][i, :count] = np.where(
            is_target, documents.tokens[start + 1 : end].astype(int), IGNORED
        )
    return together, apart | {"weight": np.ones(rows, dtype)}


def mean_and_grads(config):
    def mean(params, batch):
        total, weight = loss(transformer.make_model(config).apply(params, batch), batch)
        return total / weight

    return jit(jax.value_and_grad(mean))


SLOW = pytest.mark.slow


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["gpt2", pytest.param("llama", marks=SLOW), pytest.param("bloom", marks=SLOW)]
)
def test_packed_documents_have_the_loss_and_gradients_of_documents_apart(x64, family):
    """For a BLOOM also with a kernel that takes a bias alone; on a mesh, where each device runs it on its own heads."""
    seed = tiny.fresh_seed()
    config = dataclasses.replace(FAMILIES[family], compute_dtype="float64")
    together, apart = packed_and_apart(seed, np.float64)
    assert together["weight"].sum() < 24, "some documents share a row"
    params, run = make_params(config, seed=seed), mean_and_grads(config)
    wanted = run(params, apart)
    assert_same(run(params, together), wanted, message=f"seed {seed}")
    if family == "bloom":
        config = dataclasses.replace(
            config, attention=partial(jaxpar.flash_attention, kernel=fused)
        )
        assert_same(on_mesh(config, params, together, jaxpar.make_mesh(data=4, tensor=2)), wanted)


def on_mesh(config, params, batch, mesh, constrain=None, **settings):
    model = transformer.make_model(config, **({"constrain": constrain} if constrain else {}))
    run = jit(jaxpar.value_and_grad(model, loss, mesh, **settings))
    return run(jaxpar.shard(params, shardings(config, mesh)), jaxpar.shard_batch(batch, mesh))


@SLOW
def test_packed_documents_have_the_loss_of_documents_apart_in_float32():
    config = FAMILIES["llama"]
    together, apart = packed_and_apart(5, np.float32)
    params, run = make_params(config), mean_and_grads(config)
    (got, got_grads), (want, want_grads) = run(params, together), run(params, apart)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_same(got_grads, want_grads, within=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh_sizes", "schedule", "constrain"),
    [
        pytest.param("gpt2", (2, 2, 2), "zb-h1", None, marks=SLOW),
        ("llama", (2, 2, 2), "1f1b", sequence_parallel),
        pytest.param("bloom", (1, 4, 2), "zb-h1", None, marks=SLOW),
        pytest.param("llama", (4, 1, 2), "1f1b", None, marks=SLOW),
    ],
)
def test_packed_documents_have_that_loss_and_those_gradients_on_meshes(
    x64, family, mesh_sizes, schedule, constrain
):
    seed = tiny.fresh_seed()
    config = dataclasses.replace(FAMILIES[family], compute_dtype="float64")
    data, stage, tensor = mesh_sizes
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    together, apart = packed_and_apart(seed, np.float64)
    params = make_params(config, seed=seed)
    got = on_mesh(config, params, together, mesh, constrain, num_microbatches=2, schedule=schedule)
    assert_same(got, mean_and_grads(config)(params, apart), message=f"seed {seed}")


@SLOW
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-v"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_packed_documents_have_that_loss_in_every_schedule(x64, family, schedule):
    seed = tiny.fresh_seed()
    config = dataclasses.replace(FAMILIES[family], compute_dtype="float64")
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    together, apart = packed_and_apart(seed, np.float64)
    params = make_params(config, seed=seed)
    got = on_mesh(config, params, together, mesh, num_microbatches=4, schedule=schedule)
    assert_same(got, mean_and_grads(config)(params, apart), message=f"seed {seed}")


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [pytest.param("gpt2", marks=SLOW), pytest.param("llama", marks=SLOW), "bloom"]
)
def test_no_position_sees_another_document(family):
    """By gradients: each output depends on the inputs of its own document up to its position, and on none else."""
    config = FAMILIES[family]
    params, model = make_params(config), transformer.make_model(config)
    segments = jnp.asarray([[0, 0, 0, 1, 2, 2, 2, 3]])

    def outputs(h):
        x, _ = jax.lax.scan(
            lambda x, p: (model.layer(p, x), None),
            Stream(h[None], segments, None),
            params["layers"],
        )
        return model.head(params["outer"], x)[0].sum(-1)

    h = jnp.asarray(np.random.default_rng(0).normal(size=(SEQ, config.embed_dim)), jnp.float32)
    reached = jnp.abs(jit(jax.jacrev(outputs))(h)).sum(-1) > 0
    same = np.asarray(segments[0][:, None] == segments[0][None])
    np.testing.assert_array_equal(reached, np.tri(SEQ, dtype=bool) & same)


def test_positions_begin_anew_where_the_segment_changes():
    segments = jnp.asarray([[0, 0, 1, 1, 1, 4, 0, 0], [7, 7, 7, 7, 7, 7, 7, 7]])
    np.testing.assert_array_equal(
        Span.packed(segments).positions, [[0, 1, 0, 1, 2, 0, 0, 1], range(8)]
    )
