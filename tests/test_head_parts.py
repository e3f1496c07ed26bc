"""Which heads and losses are proven to be a sum over rows or over positions, so that all stages can share them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.backward.graph import trace
from jaxpar.models import transformer
from jaxpar.params import abstract_params
from jaxpar.pipeline import embed_and_head
from jaxpar.pipeline.head_parts import HeadParts, find_parts
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from tests.support.oracle import assert_same

ROWS, SEQ, EMBED, VOCAB, STAGES = 1, 16, 4, 8, 4
OUTER = [
    jax.ShapeDtypeStruct((EMBED, VOCAB), jnp.float32),
    jax.ShapeDtypeStruct((SEQ,), jnp.float32),
]
Y = jax.ShapeDtypeStruct((ROWS, SEQ, EMBED), jnp.float32)
BATCH = {
    "targets": jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32),
    "row_weight": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
}


def cross_entropy(outer, y, batch):
    return jaxpar.losses.softmax_cross_entropy(y[0] @ outer[0], batch["targets"])[0]


def parts_of(head, y=(Y,), batch=BATCH, stages=STAGES, shards=1):
    args = OUTER, list(y), batch
    return find_parts(head, trace(head, *args), *args, stages, shards)


def test_a_cross_entropy_is_a_sum_over_positions():
    assert parts_of(cross_entropy) == HeadParts(1, SEQ, STAGES, 1)
    assert parts_of(cross_entropy, shards=2) == HeadParts(1, SEQ, STAGES, 2)
    assert parts_of(cross_entropy, stages=3) is None, "3 does not divide the positions"
    assert parts_of(cross_entropy, shards=8) is None, "nor 32"


def test_rows_come_before_positions():
    rows = lambda shape: jax.ShapeDtypeStruct((STAGES, *shape.shape[1:]), shape.dtype)
    assert parts_of(
        cross_entropy, jax.tree.map(rows, (Y,)), jax.tree.map(rows, BATCH)
    ) == HeadParts(0, STAGES, STAGES, 1)


def weighted(outer, y, batch):
    """A weight of each row, the same for all its positions; a scale; a layer of products between."""
    nll = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", y[0], outer[0])).max(axis=-1)
    return 0.5 * jnp.sum(nll * batch["row_weight"][:, None]) + jnp.sum(jnp.square(y[0]))


def test_values_that_are_alike_at_all_positions_may_be_read():
    assert parts_of(weighted) == HeadParts(1, SEQ, STAGES, 1)


NOT_SUMS = {
    "a shift to the next position": lambda outer, y, _: jnp.sum(y[0][:, 1:] * y[0][:, :-1]),
    "a shift that keeps the size": lambda outer, y, _: jnp.sum(y[0] * jnp.roll(y[0], 1, axis=1)),
    "a mean": lambda outer, y, _: jnp.mean(y[0]),
    "a division by the number of positions before the sum": lambda outer, y, _: jnp.sum(
        y[0] / y[0].shape[1]
    ),
    "a term that is no sum": lambda outer, y, _: jnp.sum(y[0]) + jnp.sum(jnp.square(outer[0])),
    "a constant beside the sum": lambda outer, y, _: jnp.sum(y[0]) + 1.0,
    "the square of a sum": lambda outer, y, _: jnp.square(jnp.sum(y[0])),
    "a product of sums": lambda outer, y, _: jnp.sum(y[0]) * jnp.sum(y[0]),
    "a maximum": lambda outer, y, _: jnp.max(y[0]),
    "positions that are counted": lambda outer, y, _: jnp.sum(
        y[0] * jnp.arange(SEQ)[None, :, None]
    ),
    "positions counted by shape": lambda outer, y, _: jnp.sum(
        y[0] * jnp.arange(y[0].shape[1])[None, :, None]
    ),
    "a param for each position": lambda outer, y, _: jnp.sum(y[0] * outer[1][None, :, None]),
    "attention": lambda outer, y, _: jnp.sum(
        jax.nn.softmax(jnp.einsum("btd,bsd->bts", y[0], y[0]))
    ),
    "a running sum": lambda outer, y, _: jnp.sum(jnp.square(jnp.cumsum(y[0], axis=1))),
    "a sorted sequence": lambda outer, y, _: jnp.sum(jnp.sort(y[0], axis=1) * y[0]),
    "the reverse sequence": lambda outer, y, _: jnp.sum(y[0][:, ::-1] * y[0]),
    "positions joined with a dim": lambda outer, y, _: jnp.sum(y[0].reshape(ROWS, -1, 2)[..., 0]),
    "a normalisation over positions": lambda outer, y, _: jnp.sum(jax.nn.softmax(y[0], axis=1)),
    "the transpose of positions and a dim": lambda outer, y, _: jnp.sum(
        y[0] @ jnp.swapaxes(y[0], 1, 2)
    ),
    "a loss without positions": lambda outer, y, _: jnp.sum(outer[0]),
    "a side effect": lambda outer, y, _: (jax.debug.print("{}", y[0]), jnp.sum(y[0]))[1],
    "a draw": lambda outer, y, _: jnp.sum(y[0] * jax.random.normal(jax.random.key(0), y[0].shape)),
}


@pytest.mark.parametrize("head", NOT_SUMS.values(), ids=NOT_SUMS.keys())
def test_what_is_no_sum_over_positions_is_not_shared(head):
    assert parts_of(head) is None


def test_a_leaf_of_y_without_positions_ends_the_proof_if_it_is_read():
    scalar = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    assert parts_of(cross_entropy, (Y, scalar)) == HeadParts(1, SEQ, STAGES, 1)
    reads = lambda outer, y, batch: cross_entropy(outer, y, batch) * jnp.sum(y[1])
    assert parts_of(reads, (Y, scalar)) is None
    assert parts_of(cross_entropy, (Y, jax.ShapeDtypeStruct((), jnp.float32))) is None, (
        "its gradient is that of a part"
    )


def test_the_parts_of_a_microbatch_add_up_to_its_loss():
    rng = np.random.default_rng(0)
    values = lambda shape: jnp.asarray(rng.normal(size=shape.shape).astype(shape.dtype))
    outer, y = [values(shape) for shape in OUTER], values(Y)
    batch = {
        "targets": jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ))),
        "row_weight": values(BATCH["row_weight"]),
    }
    parts = HeadParts(1, SEQ, STAGES, 2)
    of = lambda stage: jax.tree.map(functools.partial(parts.of_stage, stage=stage), (y, batch))
    loss = jax.jit(cross_entropy)
    losses = [loss(outer, [own], rest) for own, rest in map(of, range(STAGES))]
    assert_same(sum(losses), loss(outer, [y], batch), within=1e-6)


@pytest.mark.parametrize("constrain", [None, jaxpar.sequence_parallel])
def test_the_head_of_a_transformer_is_shared(constrain):
    """The positions of a sequence, which sequence parallelism constrains, and its loss in shards of the vocabulary."""
    shape = transformer.preset("llama3.1-8b", compute_dtype="bfloat16", vocab_multiple=8)
    shape = dataclasses.replace(
        shape, num_layers=1, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=64
    )
    model = transformer.make_model(shape, **({} if constrain is None else {"constrain": constrain}))
    params = abstract_params(transformer.param_table(shape))
    leaves, tree = jax.tree.flatten(params["outer"])
    head = lambda outer, y, batch: jaxpar.losses.softmax_cross_entropy(
        model.head(jax.tree.unflatten(tree, outer), y[0]), batch["targets"]
    )[0]
    y = jax.ShapeDtypeStruct((1, 16, shape.embed_dim), jnp.bfloat16)
    with jax.set_mesh(jaxpar.make_mesh(tensor=2, data=4)):
        args = leaves, [y], {"targets": BATCH["targets"]}
        parts = find_parts(head, trace(head, *args), *args, 4, 2)
    assert parts == HeadParts(1, 16, 4, 2)


def draw_params(shape, dtype):
    """Params of a transformer on the host, where nothing is compiled."""
    rng, leaves = np.random.default_rng(0), abstract_params(transformer.param_table(shape))
    return jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(dtype), leaves)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_head_takes_what_it_only_casts_already_cast(tied):
    """A table that is also the embedding's stays as it is there: the embedding looks up its rows in float32."""
    sizes = {
        "num_layers": 1,
        "embed_dim": 8,
        "num_heads": 2,
        "num_kv_heads": 2,
        "mlp_dim": 8,
        "vocab_size": 16,
    }
    shape = dataclasses.replace(
        transformer.preset("llama3.1-8b", compute_dtype="bfloat16"), **sizes, tied=tied
    )
    model, outer = transformer.make_model(shape), draw_params(shape, np.float32)["outer"]
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    batch, y = (
        {"tokens": tokens, "targets": tokens},
        jax.random.normal(jax.random.key(1), (1, 8, 8), jnp.bfloat16),
    )
    loss = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])
    ends, leaves = embed_and_head.Ends(model, loss, outer, y, batch), jax.tree.leaves(outer)
    paths = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(outer)]
    dtypes = {paths[i]: dtype.name for i, dtype in ends.head_dtypes.items()}
    assert dtypes == {"tokens" if tied else "head": "bfloat16", "norm_out": "float32"}
    own = ends.read_by_head(leaves)
    cast = {i: leaf.astype(ends.head_dtypes[i]) for i, leaf in own.items()}
    head, embed = jax.jit(ends.head), jax.jit(model.embed)
    assert_same(head(cast, [y], batch, 8.0), head(own, [y], batch, 8.0), within=0)
    assert ends.embed_is_lookup
    assert_same(ends.embed(ends.read_by_embed(leaves), batch), [embed(outer, batch)], within=0)


def _mean(model, loss):
    def mean(params, batch):
        loss_sum, weight_sum = loss(model.apply(params, batch), batch)
        return loss_sum / weight_sum

    return mean


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "settings", "num_blocks"),
    [
        ((2, 2, 2), {"constrain": jaxpar.sequence_parallel}, 2),
        pytest.param((1, 4, 2), {"constrain": jaxpar.sequence_parallel}, 2, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), {}, 1, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_shared_head_equal_one_device_in_float64(
    x64, monkeypatch, axes, settings, num_blocks
):
    """One row a microbatch, so that the stages share positions, which sequence parallelism alone shards over tensor."""
    found, find = [], embed_and_head.find_parts
    monkeypatch.setattr(
        embed_and_head, "find_parts", lambda *args: found.append(find(*args)) or found[-1]
    )
    shape = transformer.preset("llama3.1-8b", compute_dtype="float64", vocab_multiple=8)
    sizes = {
        "num_layers": 4,
        "embed_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 16,
        "vocab_size": 64,
    }
    shape = dataclasses.replace(shape, **sizes).for_tensor(2)
    params = draw_params(shape, np.float64)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 64, (4, SEQ)) for name in ("tokens", "targets")}
    loss = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])
    data, stage, tensor = axes
    mesh = jaxpar.make_mesh(
        data=data, stage=stage, tensor=tensor, devices=jax.devices()[: data * stage * tensor]
    )
    shardings = jaxpar.shardings_from_dims(transformer.param_table(shape), mesh, TRANSFORMER_RULES)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(shape, **settings),
        loss,
        mesh,
        num_microbatches=4 // data,
        shardings=shardings,
        mask_idle_ops=True,
    )
    got = jax.jit(value_and_grad)(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    assert_same(
        got, jax.jit(jax.value_and_grad(_mean(transformer.make_model(shape), loss)))(params, batch)
    )
    assert set(found) == {HeadParts(1, SEQ, stage, num_blocks)}
