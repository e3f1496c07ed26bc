"""How weights are split over the tensor axis, and what the splits cost."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.inspect import assert_collectives, inspect_step
from tests.support import tiny
from tests.support.oracle import assert_same


def test_a_column_parallel_weight_is_split_by_its_last_dim():
    assert jaxpar.column_parallel() == PartitionSpec(None, "tensor")
    assert jaxpar.column_parallel(ndim=1) == PartitionSpec("tensor")
    assert jaxpar.column_parallel(ndim=3) == PartitionSpec(None, None, "tensor")


def test_a_row_parallel_weight_is_split_by_its_first_dim():
    assert jaxpar.row_parallel() == PartitionSpec("tensor", None)
    assert jaxpar.row_parallel(ndim=3) == PartitionSpec("tensor", None, None)


def test_an_embedding_is_split_by_its_vocabulary_wherever_that_stands():
    assert jaxpar.vocab_parallel() == PartitionSpec("tensor", None)
    assert jaxpar.vocab_parallel(vocab_dim=1) == PartitionSpec(None, "tensor")


@pytest.mark.parametrize("spec", [jaxpar.column_parallel, jaxpar.row_parallel])
def test_a_weight_without_dims_is_refused(spec):
    with pytest.raises(
        ValueError,
        match=r"must have at least one dim; got ndim=0. Use jaxpar.replicated\(\) for scalars",
    ):
        spec(ndim=0)


def test_a_vocabulary_in_a_third_dim_is_refused():
    with pytest.raises(
        ValueError, match=r"vocab_dim must be 0 or 1; got 2. Use 0 for \[vocab, embed\], 1 for"
    ):
        jaxpar.vocab_parallel(vocab_dim=2)


@pytest.fixture(scope="module")
def on_tensor():
    mesh = jaxpar.make_mesh(tensor=4)
    return mesh, tiny.on_mesh(mesh, tiny.make_params()), jaxpar.shard_batch(tiny.make_batch(), mesh)


ACTIVATION_BYTES = tiny.NUM_ROWS * 8 * 4  # of one layer, float32
ONE_ALL_REDUCE = 2 * 3 * ACTIVATION_BYTES // 4


def test_a_column_row_pair_costs_one_all_reduce_forward(on_tensor):
    _, params, batch = on_tensor
    runs = tiny.NUM_LAYERS
    assert_collectives(
        jax.jit(tiny.MODEL.apply),
        {("all-reduce", "tensor"): (runs, runs * ONE_ALL_REDUCE)},
        params,
        batch,
    )


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_column_row_pair_costs_one_all_reduce_forward_and_one_backward(
    on_tensor, num_microbatches
):
    mesh, params, batch = on_tensor
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, num_microbatches=num_microbatches
    )
    runs = 2 * tiny.NUM_LAYERS * num_microbatches
    moved = 2 * tiny.NUM_LAYERS * ONE_ALL_REDUCE  # of the whole batch, in however many parts
    assert_collectives(
        jax.jit(value_and_grad), {("all-reduce", "tensor"): (runs, moved)}, params, batch
    )


def test_a_weight_that_is_split_is_never_gathered(on_tensor):
    mesh, params, batch = on_tensor
    report = inspect_step(
        jax.jit(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh)), params, batch
    )
    assert report.count("all-gather") == 0
    assert report.count("all-to-all") == 0


def test_on_one_shard_nothing_crosses_the_tensor_axis():
    mesh = jaxpar.make_mesh(data=2)
    value_and_grad = jax.jit(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh))
    params, batch = (
        tiny.on_mesh(mesh, tiny.make_params()),
        jaxpar.shard_batch(tiny.make_batch(), mesh),
    )
    assert inspect_step(value_and_grad, params, batch).select(axis="tensor") == ()


@pytest.mark.parametrize("vocab_dim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_vocabulary_parallel_embedding_gives_the_numbers_of_a_whole_one(vocab_dim):
    mesh = jaxpar.make_mesh(data=2, tensor=4)
    rng = np.random.default_rng(0)
    shape = (16, 3) if vocab_dim == 0 else (3, 16)
    params = {"w": rng.normal(size=shape).astype(np.float32)}
    batch = {
        "token": rng.integers(0, 16, 8).astype(np.int32),
        "x": rng.normal(size=(8, 3)).astype(np.float32),
    }

    def apply(params, batch):
        return params["w"][batch["token"]] if vocab_dim == 0 else batch["x"] @ params["w"]

    def loss(outputs, batch):
        return jaxpar.losses.squared_error(outputs, outputs * 0 + 1)

    def mean(params):
        total, weight = loss(apply(params, batch), batch)
        return total / weight

    rules = {"w": jaxpar.vocab_parallel(vocab_dim=vocab_dim)}
    shardings = jaxpar.shardings_from_paths(params, mesh, rules)
    batch_on_mesh = jaxpar.shard_batch(batch, mesh)
    value_and_grad = jax.jit(
        jaxpar.value_and_grad(apply, loss, mesh), out_shardings=(None, shardings)
    )
    report = inspect_step(value_and_grad, jaxpar.shard(params, shardings), batch_on_mesh)
    got = value_and_grad(jaxpar.shard(params, shardings), batch_on_mesh)
    assert_same(got, jax.jit(jax.value_and_grad(mean))(params), within=1e-5)
    own_gradients_and_sums = 16 * 3 * 4 // 4 + 2 * 4
    assert report.bytes_moved("all-reduce", "data") == own_gradients_and_sums, (
        "a device should reduce its own part alone"
    )
