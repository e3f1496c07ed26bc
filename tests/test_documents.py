"""Several documents in a row for a kernel that is told where they lie: the numbers of documents that are parted by scores."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import documents
from jaxpar.data.batches import Mixture, RowSource
from jaxpar.documents import attend_in_documents, find_documents
from jaxpar.models import transformer
from jaxpar.params import init_params
from jaxpar.run import language_model
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from tests.support.oracle import assert_same
from tests.support.written_out import IN_DOCUMENTS, WRITTEN_OUT

ROWS, SEQ, HEADS, KV_HEADS, HEAD_DIM = 3, 12, 4, 2, 8
MOST = 6  # of SEGMENTS 5: no documents are behind the last one of a row
SEGMENTS = np.array(
    [[0] * 12, [3, 3, 1, 1, 1, 1, 3, 3, 3, 3, 3, 9], [0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]], np.int32
)


def test_documents_are_told_by_their_places_in_all_rows():
    found = find_documents(jnp.array([[0, 0, 0, 1, 1], [4, 4, 0, 4, 4]]), 3)
    np.testing.assert_array_equal(found.begins, [[0, 3, 5, 7], [8, 10, 10, 10]])
    np.testing.assert_array_equal(found.lengths, [[3, 2, 2], [1, 2, 0]])
    np.testing.assert_array_equal(found.of_tokens, [[0, 0, 0, 1, 1], [2, 2, 3, 4, 4]])


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(ROWS, SEQ, n, HEAD_DIM)), dtype)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def plain(q, k, v, window):
    """Causal attention with all scores."""
    index = np.arange(SEQ)
    behind = index[:, None] - index[None]
    numbers = np.cumsum(np.pad(np.diff(SEGMENTS) != 0, ((0, 0), (1, 0))), axis=1)
    seen = (behind >= 0) & (behind < (window or SEQ)) & (numbers[:, :, None] == numbers[:, None])
    k, v = (jnp.repeat(each, HEADS // KV_HEADS, axis=2) for each in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * HEAD_DIM**-0.5
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, where=seen[:, None]), v)


def with_grads(attend, q, k, v, ct):
    out, backward = jax.vjp(attend, q, k, v)
    return out, *backward(ct)


def told(kernel, window):
    places = find_documents(jnp.asarray(SEGMENTS), MOST)
    return lambda *qkv: attend_in_documents(kernel, HEAD_DIM**-0.5, window, *qkv, places)


class AsCudnn:
    """What cuDNN does with the packed layout: of flat arrays, by elements, with sums that are NaN where no token is."""

    @staticmethod
    def parts(q, k, places):
        lengths, of_keys, begins_q, begins_k = (np.asarray(each).reshape(-1) for each in places)
        np.testing.assert_array_equal(lengths, of_keys)
        for number, count in enumerate(lengths):
            first = [
                begins[number] // (each.shape[2] * HEAD_DIM)
                for begins, each in ((begins_q, q), (begins_k, k))
            ]
            if count:
                yield number, count, *(slice(at, at + count) for at in first)

    @staticmethod
    def flat(array):
        return np.asarray(array).reshape(ROWS * SEQ, -1, HEAD_DIM)

    @classmethod
    def weights(cls, q, k, of_q, of_k, scale, window):
        q, k = cls.flat(q)[of_q], np.repeat(cls.flat(k)[of_k], HEADS // KV_HEADS, axis=1)
        scores = np.einsum("thk,shk->hts", q, k) * scale
        behind = np.arange(len(q))[:, None] - np.arange(len(q))
        return np.where((behind >= 0) & (behind < (window or SEQ)), scores, -np.inf)

    @classmethod
    def forward(cls, q, k, v, scale, lengths, bias, places, window):
        assert lengths is None
        assert bias is None
        out, lse = (
            np.full((ROWS * SEQ, HEADS, HEAD_DIM), np.nan),
            np.full((ROWS * MOST, HEADS, SEQ), np.nan),
        )
        for number, count, of_q, of_k in cls.parts(q, k, places):
            scores = cls.weights(q, k, of_q, of_k, scale, window)
            lse[number, :, :count] = np.log(np.exp(scores).sum(-1))
            shares = np.exp(scores - lse[number, :, :count, None])
            out[of_q] = np.einsum(
                "hts,shk->thk", shares, np.repeat(cls.flat(v)[of_k], HEADS // KV_HEADS, axis=1)
            )
        return jnp.asarray(out.reshape(q.shape)), jnp.asarray(lse)

    @classmethod
    def backward(cls, q, k, v, out, lse, ct, scale, lengths, bias, places, window):
        grads = [np.full_like(cls.flat(each), np.nan) for each in (q, k, v)]
        wide = lambda each: np.repeat(each, HEADS // KV_HEADS, axis=1)
        narrow = lambda each: each.reshape(len(each), KV_HEADS, -1, HEAD_DIM).sum(2)
        for number, count, of_q, of_k in cls.parts(q, k, places):
            scores = cls.weights(q, k, of_q, of_k, scale, window)
            shares = np.exp(scores - np.asarray(lse)[number, :, :count, None])
            of_out, ours = cls.flat(ct)[of_q], cls.flat(out)[of_q]
            of_shares = np.einsum("thk,shk->hts", of_out, wide(cls.flat(v)[of_k]))
            of_scores = shares * (of_shares - np.sum(of_out * ours, -1).T[..., None]) * scale
            grads[0][of_q] = np.einsum("hts,shk->thk", of_scores, wide(cls.flat(k)[of_k]))
            grads[1][of_k] = narrow(np.einsum("hts,thk->shk", of_scores, cls.flat(q)[of_q]))
            grads[2][of_k] = narrow(np.einsum("hts,thk->shk", shares, of_out))
        return tuple(
            jnp.asarray(each.reshape(of.shape)) for each, of in zip(grads, (q, k, v), strict=True)
        )


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("kernel", ["written out", "cuDNN"])
def test_each_document_has_the_output_and_gradients_of_attention_that_is_parted_by_scores(
    x64, monkeypatch, window, kernel
):
    monkeypatch.setattr(documents._compat, "cudnn_attention", AsCudnn.forward)
    monkeypatch.setattr(documents._compat, "cudnn_attention_gradients", AsCudnn.backward)
    attend = told(IN_DOCUMENTS if kernel == "written out" else documents.CUDNN, window)
    compiled = (
        jax.jit if kernel == "written out" else lambda function: function
    )  # NumPy stands in for cuDNN
    want = jax.jit(partial(with_grads, partial(plain, window=window)))(*arrays())
    assert_same(list(compiled(partial(with_grads, attend))(*arrays())), list(want))


def attention(q, k, v, bias=None, window=None):
    raise AssertionError("documents are parted by a bias")


attention.kernel_of_documents = IN_DOCUMENTS
attention.kernel_of_chunks = WRITTEN_OUT

SHAPE = {
    "vocab_size": 32,
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 16,
}


def config_of(**changes):
    more = {"positions": "rope", "max_documents": 4, "compute_dtype": "float64"}
    return transformer.TransformerConfig(**SHAPE | more | changes)


def make_batch(seq=16, rows=8):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (rows, seq + 1)).astype(np.int32)
    segments = np.sort(rng.integers(0, 4, (rows, seq)), axis=1).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}


def loss(logits, batch):
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])


def make_params(config):
    init = lambda key: init_params(transformer.param_table(config), key, config.compute_dtype)
    return jax.jit(init)(jax.random.key(0))


def step_on(config, axes, batch, **settings):
    params = make_params(config)
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
    shardings = jaxpar.shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
    run = jaxpar.value_and_grad(
        transformer.make_model(config), loss, mesh, shardings=shardings, **settings
    )
    return jaxpar.fetch(
        jax.jit(run)(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("axes", "changes", "settings"),
    [
        pytest.param({"tensor": 2}, {"window": 5, "num_layers": 1}, {}, marks=pytest.mark.full),
        pytest.param(
            {"data": 2, "stage": 2, "tensor": 2},
            {},
            {"num_microbatches": 2, "schedule": "zb-h1", "remat": True},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"context": 2, "stage": 2},
            {"attention_over_context": "ulysses"},
            {"num_microbatches": 2, "schedule": "1f1b"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_step_whose_kernel_is_told_where_documents_lie_has_the_numbers_of_scores(
    x64, axes, changes, settings
):
    config, batch = config_of(**changes), make_batch()
    got = step_on(config_of(**changes, attention=attention), axes, batch, **settings)
    model = transformer.make_model(config_of(**changes, max_documents=None))
    mean = lambda params: jnp.divide(*loss(model.apply(params, batch), batch)[:2])
    want = jax.jit(jax.value_and_grad(mean))(make_params(config))
    assert_same(got, want, within=1e-12 if config.compute_dtype == "float64" else 1e-5)


def too_many(batch):
    """The batch with a fifth document in its last row, and the row before it with four."""
    segments = np.stack([*batch["segments"][:-2], np.arange(16) // 4, np.arange(16) // 4]).astype(
        np.int32
    )
    few = batch | {"segments": segments.copy()}
    segments[-1, 0] = 9
    return few, batch | {"segments": segments}


def test_a_row_of_more_documents_gives_nan_and_no_other_does():
    config = config_of(num_layers=1, compute_dtype="float32")
    model, params = transformer.make_model(config), make_params(config)
    logits = [jax.jit(model.apply)(params, each) for each in too_many(make_batch(rows=2))]
    assert [np.isnan(each).any((1, 2)).tolist() for each in logits] == [
        [False, False],
        [False, True],
    ]


@pytest.mark.full
def test_the_documents_of_a_row_are_counted_over_context():
    config = config_of(num_layers=1, compute_dtype="float32")
    values = [step_on(config, {"context": 2}, each)[0] for each in too_many(make_batch(rows=2))]
    assert np.isnan(values).tolist() == [False, True]


def test_one_document_is_not_several():
    with pytest.raises(ValueError, match=r"max_documents must be at least 2; got 1. Leave it out"):
        config_of(max_documents=1)


def traced_for(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), (jax.sharding.AxisType.Manual,), abstract_device=device
    )
    return jax.sharding.use_abstract_mesh(mesh)


def test_a_program_for_hopper_has_no_scores_and_no_bias():
    config = config_of(attention="cudnn", compute_dtype="bfloat16", window=64, max_documents=5)
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    array = lambda heads: jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16)

    def run(q, k, v, segments):
        with traced_for("NVIDIA H100 80GB HBM3"):
            places = transformer.attention.documents_of(config, segments)
            in_rows = jnp.arange(256)[None]
            attend = lambda *qkv: transformer.attention.attend(
                config, *qkv, in_rows, segments, documents=places
            )
            return with_grads(attend, q, k, v, q)

    traced = jax.jit(run).trace(array(4), array(2), array(2), segments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(__cudnn\$\w+)", text) == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    for setting in (
        r"PADDING_CAUSAL",
        r"max_seg_per_batch\\22: 5\b",
        r"sliding_window_length\\22: 64\b",
    ):
        assert len(re.findall(setting, text)) == 2, setting
    assert "256x256x" not in text


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("NVIDIA A100-SXM4-80GB", {}),
        (
            "NVIDIA H100 80GB HBM3",
            {"compute_dtype": "float32", "attention": jaxpar.flash_attention},
        ),
        ("NVIDIA H100 80GB HBM3", {"positions": "alibi"}),
        ("NVIDIA H100 80GB HBM3", {"max_documents": None}),
    ],
)
def test_what_cudnn_cannot_be_told_is_parted_by_a_bias(kind, changes):
    config = config_of(**{"attention": "cudnn", "compute_dtype": "bfloat16"} | changes)
    segments = jnp.zeros((1, 4), jnp.int32)
    with traced_for(kind):
        assert transformer.attention.documents_of(config, segments) is None
        told = config_of(compute_dtype="bfloat16", attention=jaxpar.flash_attention)
        assert (transformer.attention.documents_of(told, segments) is None) is ("H100" not in kind)


class Source(RowSource):
    def __init__(self, most):
        self.max_documents = most

    def __len__(self):
        return 1

    def take(self, rows):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("attention", "given", "known", "told"),
    [
        ("cudnn", None, (7, 9), 9),
        ("cudnn", None, (7, 65), None),
        ("cudnn", None, (7, None), None),
        ("cudnn", None, (1, 1), None),
        ("cudnn", 100, (7, None), 100),
        ("xla", 100, (7, 9), None),
    ],
)
def test_a_run_tells_the_kernel_of_documents_that_its_rows_know(
    capsys, attention, given, known, told
):
    config = config_of(attention=attention, compute_dtype="bfloat16", max_documents=None)
    found = language_model.with_documents(
        config, given, [Mixture([Source(each), Source(1)]) for each in known]
    )
    assert found.max_documents == told
    assert ("rows have up to 65 documents" in capsys.readouterr().out) is (65 in known)


def test_more_elements_than_cudnn_counts_are_refused():
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    q = shape(64, 8192, 32, 128)
    run = lambda q, segments: attend_in_documents(
        documents.CUDNN, 1.0, None, q, q, q, find_documents(segments, 4)
    )
    with pytest.raises(
        ValueError, match=r"a device must have fewer than 2\^31.*Use more microbatches"
    ):
        jax.eval_shape(run, q, shape(64, 8192, dtype=jnp.int32))
