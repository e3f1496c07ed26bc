"""Batches to the data axis, and gradients summed over microbatches and replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar._compat import equations
from jaxpar.data import same_batch
from jaxpar.data_parallel import accumulate, check_batch, split_microbatches
from jaxpar.inspect import assert_collectives
from tests.support import tiny
from tests.support.covering import covering
from tests.support.oracle import assert_same
from tests.support.tiers import quick


def test_rows_are_split_over_data_and_whole_on_tensor():
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(8, 1)}
    x = jaxpar.shard_batch(batch, mesh)["x"]
    assert x.sharding.spec == PartitionSpec("data")
    rows = {shard.device.id: shard.data.ravel().tolist() for shard in x.addressable_shards}
    assert rows == {device: [device // 2 * 2.0, device // 2 * 2.0 + 1] for device in range(8)}


def test_prng_keys_can_be_rows():
    keys = jax.random.split(jax.random.key(0), 4)
    got = jaxpar.shard_batch({"key": keys}, jaxpar.make_mesh(data=4))["key"]
    np.testing.assert_array_equal(jaxpar.fetch(got), jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": np.ones(4), "rate": np.float32(1), "key": jax.random.key(0)},
            r"must have a leading dim, its rows; got none for key, rate. Repeat a value .* jax.random.split\(key",
        ),
        ({}, "must have a leading dim, its rows; got none for an empty batch"),
        (
            {"x": np.ones(4), "y": np.ones(5)},
            r"must have the same number of rows; got \{'x': 4, 'y': 5\}. Cut or pad",
        ),
        (
            np.ones(47),
            r"got 47 rows, data=4. Use 48 rows, or the next multiple of data times num_microbatches \(jaxpar.data",
        ),
        (np.ones((0, 3)), r"got 0 rows, data=4. Use 4 rows"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.shard_batch(batch, jaxpar.make_mesh(data=4))


def test_integers_that_jax_would_cut_and_texts_are_refused_by_name():
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    ids = np.array([0, 2**40])
    if not jax.config.jax_enable_x64:
        with pytest.raises(
            ValueError,
            match=r"must fit in int32, .*; got user from 0 to 1099511627776. Number them anew",
        ):
            jaxpar.shard_batch({"user": ids}, mesh)
    with pytest.raises(
        TypeError, match=r"must be numbers; got name of dtype <U1. Make numbers of it"
    ):
        jaxpar.shard_batch({"name": np.array(["a", "b"])}, mesh)
    assert jaxpar.shard_batch(np.array([0, 2**31 - 1]), mesh)[1] == 2**31 - 1


@pytest.mark.parametrize(
    ("values", "step"),
    [
        (1.7e9 + np.arange(8) * 3600.0, "128"),
        (np.array([1 + 1e-9, 1.0, np.nan]), "1.19209e-07"),
        (np.arange(8) * 3600.0, None),
        (np.array([1.7e9, 0.1]), None),
        (np.full(8, 1.7e9 + 1), None),
        (np.float32(1.7e9) + np.arange(8, dtype=np.float32) * 128, None),
        (np.array([np.nan, np.inf]), None),
        (np.zeros((8, 0)), None),
    ],
)
def test_floats_of_which_jax_makes_equal_ones_are_told_once(values, step, monkeypatch, capsys):
    monkeypatch.setattr(same_batch, "_rounded", set())
    for _ in range(2):
        same_batch.check_kept({"rows": {"time": values}})
    told = capsys.readouterr().err
    if step is None or jax.config.jax_enable_x64:
        assert told == ""
    else:
        assert told.count("\n") == 1
        assert "rows/time of a batch is float64, of which JAX makes float32" in told
        assert f"That has steps of {step} from" in told


def test_python_lists_are_refused_as_such_and_not_number_by_number():
    rows = {
        "x": [[1.0, 2.0], [3.0, 4.0]],
        "y": np.ones(2),
        "z": [1, 2],
        "pair": (np.ones(2), np.ones(2)),
    }
    message = (
        r"must have arrays, not Python lists; got lists of numbers in x, z\. Give numpy.asarray"
    )
    with pytest.raises(TypeError, match=message):
        jaxpar.shard_batch(rows, jaxpar.make_mesh(data=2))
    with pytest.raises(TypeError, match=message):  # jax.jit takes the numbers for arrays
        jax.eval_shape(lambda batch: check_batch(batch, 2), rows)
    assert check_batch({name: rows[name] for name in ("y", "pair")}, 2) == 2


def test_rows_must_be_divisible_by_replicas_times_microbatches():
    assert check_batch(np.ones((24, 2)), 4, 3) == 24
    with pytest.raises(
        ValueError,
        match=r"data axis times num_microbatches; got 28 rows, data=4, num_microbatches=3",
    ):
        check_batch(np.ones((28, 2)), 4, 3)


def test_a_replica_cuts_its_rows_in_their_order():
    assert split_microbatches(np.arange(6), 3).tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_accumulation_is_the_sum_over_all_rows(num_microbatches):
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    got = accumulate(
        lambda part: {"sum": part.sum(0), "n": jnp.float32(len(part))},
        jnp.asarray(rows),
        num_microbatches,
    )
    np.testing.assert_allclose(got["sum"], rows.sum(0), rtol=1e-5, atol=1e-6)
    assert got["n"] == 8


def test_bfloat16_is_accumulated_in_float32():
    ones = jnp.ones(512, jnp.bfloat16)  # in bfloat16 a running sum of ones stays at 256
    assert accumulate(lambda part: part.sum(), ones, 512) == 512


@pytest.mark.parametrize(
    ("tensor", "num_microbatches"), quick(covering([(1, 1), (1, 8), (2, 4)], (1, 2), (1, 4, 8)), 2)
)
def test_gradients_cross_the_data_axis_once_a_step(num_microbatches, tensor):
    mesh = jaxpar.make_mesh(data=4, tensor=tensor)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, num_microbatches=num_microbatches
    )
    params = tiny.on_mesh(mesh, tiny.make_params())
    own = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(params))
    scalars = 2 * 4  # the sum of weights, by itself, and the sum of losses
    over_data = {("all-reduce", "data"): (2, 2 * 3 * (own + scalars) // 4)}
    report = assert_collectives(
        jax.jit(value_and_grad),
        over_data,
        params,
        jaxpar.shard_batch(tiny.make_batch(), mesh),
        allow_others=True,
    )
    assert {each.axes for each in report.collectives} == {("data",)} | (
        {("tensor",)} if tensor > 1 else set()
    )
    assert report.count("all-reduce") == report.count(), (
        "no other kind of collective, none that moves rows"
    )


def test_on_one_replica_nothing_crosses_the_data_axis():
    mesh = jaxpar.make_mesh(data=1)
    value_and_grad = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, num_microbatches=4)
    batch = jaxpar.shard_batch(tiny.make_batch(), mesh)
    assert_collectives(jax.jit(value_and_grad), {}, tiny.on_mesh(mesh, tiny.make_params()), batch)


def test_the_shapes_of_a_batch_are_those_of_the_batch_on_the_mesh():
    mesh = jaxpar.make_mesh(data=4)
    batch = {
        "x": np.ones((8, 3)),
        "label": np.arange(8),
        "key": jax.random.split(jax.random.key(0), 8),
    }
    placed, shapes = jaxpar.shard_batch(batch, mesh), jaxpar.abstract_batch(batch, mesh)
    kinds = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)
    assert kinds(shapes) == kinds(placed)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert kinds(jaxpar.abstract_batch(shapes, mesh)) == kinds(shapes), "shapes alone will do"
    with pytest.raises(ValueError, match="the rows of a batch must be divisible by the data axis"):
        jaxpar.abstract_batch({"x": np.ones((6, 3))}, mesh)


# --- complex params, reduced in a given dtype ---------------------------------------------------------------------------


REDUCTIONS = ("psum", "psum_invariant", "reduce_scatter")
REDUCED_RUNS = {
    "plain": ((2, 1, 1), {}),
    "overlap": ((2, 1, 2), {"overlap_grad_reduce": True, "zero": 1}),
    "ZeRO 2 overlap": ((2, 1, 1), {"overlap_grad_reduce": True, "zero": 2}),
    "ZeRO 3": ((2, 1, 2), {"zero": 3}),
    "pipeline": ((2, 2, 1), {"mask_idle_ops": True}),
    "pipeline ZeRO 2": ((2, 2, 1), {"zero": 2}),
    "mpmd": ((2, 2, 1), {"executor": "mpmd"}),
}
ROTATING = jaxpar.LayeredModel(
    lambda outer, batch: batch["x"] * outer["phase"][None],
    lambda params, x: x @ params["w"] + 0.5j * x,
    lambda outer, x: (x * outer["phase"][None]).imag,
)


def rotating_loss(outputs, batch):
    return jnp.sum((outputs - batch["y"]) ** 2), jnp.sum(batch["weight"])


def rotating_params_and_batch():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (
        (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64) / 2
    )
    params = {"outer": {"phase": draw(4)}, "layers": {"w": draw(2, 4, 4)}}
    batch = {"x": draw(8, 4), "y": rng.normal(size=(8, 4)), "weight": rng.uniform(1, 2, 8)}
    return params, jax.tree.map(lambda a: a if np.iscomplexobj(a) else a.astype(np.float32), batch)


@functools.cache
def rotating_reference():
    """The loss and gradients of one device."""
    params, batch = rotating_params_and_batch()
    mean = lambda params: jnp.divide(*rotating_loss(ROTATING.apply(params, batch), batch))
    return jaxpar.fetch(jax.jit(jax.value_and_grad(mean))(params))


def rotating_step(run, dtype):
    (data, stage, tensor), settings = REDUCED_RUNS[run]
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    params, batch = rotating_params_and_batch()
    rules = {"layers/w": jaxpar.column_parallel(), "**": jaxpar.replicated()}
    shardings = jaxpar.shardings_from_paths(params, mesh, rules)
    step = jaxpar.value_and_grad(
        ROTATING,
        rotating_loss,
        mesh,
        num_microbatches=2,
        shardings=shardings,
        grad_reduce_dtype=dtype,
        **settings,
    )
    return step, jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)


@pytest.mark.few(2)
@pytest.mark.parametrize("run", quick(REDUCED_RUNS, "ZeRO 2 overlap"))
def test_complex_gradients_keep_both_parts_in_the_dtype_of_reductions(run):
    step, params, batch = rotating_step(run, jnp.float32)
    got, want = jaxpar.fetch(step(params, batch)), rotating_reference()
    assert min(np.abs(leaf.imag).max() for leaf in jax.tree.leaves(want[1])) > 0.1, (
        "both parts are there"
    )
    assert_same(got, want, within=1e-5)


@pytest.mark.parametrize(
    "run",
    [
        "plain",
        pytest.param("ZeRO 2 overlap", marks=pytest.mark.full),
        pytest.param("ZeRO 3", marks=pytest.mark.full),
        pytest.param("pipeline", marks=pytest.mark.full),
    ],
)
def test_complex_gradients_are_as_many_collectives_and_half_the_bytes_in_16_bits(run, monkeypatch):
    monkeypatch.setattr(
        "jaxpar.step.settings.check_reduce_dtype", lambda dtype, mesh: None
    )  # is not compiled

    def reduced(dtype):
        step, params, batch = rotating_step(run, dtype)
        found = [
            e
            for e in equations(jax.make_jaxpr(step)(params, batch))
            if e.primitive.name in REDUCTIONS
        ]
        axes_of = lambda e: jax.tree.leaves((e.params.get("axes"), e.params.get("axis_name")))
        over_data = [e for e in found if "data" in axes_of(e)]
        large = [v.aval for e in over_data for v in e.invars if v.aval.size > 1]
        return len(large), sum(aval.size * aval.dtype.itemsize for aval in large)

    (in_32, bytes_of_32), (in_16, bytes_of_16) = reduced(jnp.float32), reduced(jnp.bfloat16)
    assert in_16 > 0
    assert (in_16, 2 * bytes_of_16) == (in_32, bytes_of_32)
    assert reduced(None) == (in_32, bytes_of_32)
