"""Mixtures: each source by its weight, each row once an epoch of its source, the same after a resume and on any processes."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpar
from jaxpar.data import batches
from jaxpar.data.batches import SAMPLES_PER_BLOCK, EachOnce, Mixture, Origin, RowSource, permuted


class Numbers(RowSource):
    """Rows that hold their source and number."""

    def __init__(self, source, count):
        self._source, self._count, self.num_read = source, count, 0

    def __len__(self):
        return self._count

    def take(self, rows):
        assert ((rows >= 0) & (rows < self._count)).all()
        self.num_read += len(rows)
        return {
            "tokens": np.stack(
                [np.full(len(rows), self._source, np.int32), rows.astype(np.int32)], axis=1
            )
        }

    def check(self):
        pass


def drawn(mixture, samples, *, batch_size=64, seed=0):
    steps = -(-samples // batch_size)
    rows = [mixture.batch(batch_size, seed=seed, step=step)["tokens"] for step in range(steps)]
    return np.concatenate(rows)[:samples]


@pytest.mark.full
@given(weights=st.lists(st.floats(0.05, 1), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_each_block_has_the_share_of_each_source(weights, seed):
    mixture = Mixture([Numbers(i, 50 + i) for i in range(len(weights))], weights)
    rows = drawn(mixture, 2 * SAMPLES_PER_BLOCK, batch_size=512, seed=seed)
    for block in np.split(rows, 2):
        shares = np.bincount(block[:, 0], minlength=len(weights)) / len(block)
        np.testing.assert_allclose(
            shares, np.array(weights) / sum(weights), atol=1 / SAMPLES_PER_BLOCK
        )
        np.testing.assert_allclose(shares, mixture.shares)


def test_each_source_has_its_rows_once_an_epoch_and_in_another_order_in_each():
    mixture = Mixture([Numbers(0, 100), Numbers(1, 7)], [3, 1])
    rows = drawn(mixture, 3000)
    for source, count in ((0, 100), (1, 7)):
        own = rows[rows[:, 0] == source, 1]
        epochs = own[: len(own) // count * count].reshape(-1, count)
        assert (np.sort(epochs, axis=1) == np.arange(count)).all()
        assert len(np.unique(epochs[:20], axis=0)) > 10


@pytest.mark.parametrize("weights", [None, [3, 1, 0.5], [1, 1, 1000]])
def test_rows_held_out_of_several_sources_are_each_read_once(weights):
    counts = (30, 7, 20)
    held_out = EachOnce(Mixture([Numbers(*each) for each in enumerate(counts)], weights))
    rows = np.concatenate([held_out.batch(8, seed=0, step=step)["tokens"] for step in range(8)])
    every = [[source, row] for source, count in enumerate(counts) for row in range(count)]
    real = rows[: sum(counts)]
    assert sorted(real.tolist()) == every, "the last batch has one row, and padding"
    again = [held_out.batch(19, seed=0, step=step)["tokens"] for step in range(3)]
    np.testing.assert_array_equal(np.concatenate(again), real, "whatever the size of a batch")


def test_the_first_rows_held_out_have_the_shares_of_the_sources():
    held_out = EachOnce(Mixture([Numbers(0, 900), Numbers(1, 900)], [3, 1]))
    first = held_out.rows(800, seed=0, step=0)
    assert np.bincount(first[:, 0]) == pytest.approx([600, 200], abs=30)


def test_without_weights_shares_are_those_of_the_rows():
    np.testing.assert_allclose(Mixture([Numbers(0, 300), Numbers(1, 100)]).shares, [0.75, 0.25])


def test_a_batch_depends_on_seed_and_step_alone_and_resumes_with_another_batch_size():
    make = lambda: Mixture([Numbers(0, 100), Numbers(1, 70)], [2, 1])
    first, again = make(), make()
    for step in (0, 63, 64, 100):
        got = first.batch(64, seed=3, step=step)["tokens"]
        np.testing.assert_array_equal(got, again.batch(64, seed=3, step=step)["tokens"])
    whole = drawn(first, 320, batch_size=32)
    origin = Origin(step=4, samples=first.samples_before(32, 4))
    resumed = [again.batch(48, seed=0, step=step, origin=origin)["tokens"] for step in (4, 5, 6, 7)]
    np.testing.assert_array_equal(
        np.concatenate(resumed), whole[128:], "no sample is left out or taken twice"
    )


@pytest.mark.parametrize(("weights", "message"), [
    ([1], r"one positive weight for each source; got \[1\] for 2 sources. Give 2, such as 1 1"),
    ([1, 0], r"one positive weight for each source; got \[1, 0\]"),
    ([1, float("nan")], "one positive weight for each source"),
    ([1e6, 1], r"at least 1/4096 of all weights; got .*choose a weight of 488.282 or more"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused(weights, message):
    sources = [Numbers(0, 10), Numbers(1, 10)]
    with pytest.raises(ValueError, match=message):
        Mixture(sources, weights)
    Mixture(sources, [1e6, 488.282])


@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    step=st.integers(0, 20),
    parts=st.sampled_from([1, 2, 4]),
)
def test_processes_read_disjoint_rows_that_make_the_whole_batch(num_rows, batch_size, step, parts):
    batch_size = min(batch_size, num_rows)
    source = Numbers(0, num_rows)
    whole = source.batch(batch_size, seed=1, step=step, multiple=8)
    size = len(whole["weight"])
    own = [
        source.batch(batch_size, seed=1, step=step, multiple=8, only=only)
        for only in np.split(np.arange(size), parts)
    ]
    for name, column in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in own]), column)


def test_a_process_reads_its_own_rows_only():
    source = Numbers(0, 1000)
    source.batch(64, seed=0, step=0, only=np.arange(16, 32))
    assert source.num_read == 16


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_local_rows_are_those_of_the_replicas_that_a_process_has_a_part_of(sizes):
    data, stage, tensor = sizes
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    np.testing.assert_array_equal(jaxpar.local_rows(16, mesh), np.arange(16))
    rows = jaxpar.shard_batch({"x": np.arange(16)}, mesh)["x"]
    for devices in (
        mesh.devices.reshape(-1)[:4],
        mesh.devices.reshape(-1)[4:],
        mesh.devices.reshape(-1)[3:4],
    ):
        held = {
            int(x)
            for shard in rows.addressable_shards
            if shard.device in set(devices)
            for x in np.asarray(shard.data)
        }
        assert jaxpar.local_rows(16, mesh, devices=devices).tolist() == sorted(held)


def test_own_rows_make_the_array_of_the_whole_batch():
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    whole = {"x": np.arange(32.0).reshape(16, 2), "key": jax.random.split(jax.random.key(0), 16)}
    got = jaxpar.shard_batch(whole, mesh, num_rows=16)
    want = jaxpar.shard_batch(whole, mesh)
    assert got["x"].sharding == want["x"].sharding
    for name in whole:
        np.testing.assert_array_equal(jaxpar.fetch(got)[name], jaxpar.fetch(want)[name])


def test_rows_that_are_not_this_process_s_are_refused():
    mesh = jaxpar.make_mesh(data=8)
    with pytest.raises(
        ValueError,
        match=r"got 8 rows, and 16 of num_rows=16 are held here. Give those of jaxpar.local_rows",
    ):
        jaxpar.shard_batch({"x": np.zeros(8)}, mesh, num_rows=16)
    with pytest.raises(
        ValueError, match=r"divisible by the data axis; got 12 rows, data=8\. Use 16 rows"
    ):
        jaxpar.local_rows(12, mesh)


@given(count=st.integers(1, 300), seed=st.integers(0, 5))
def test_the_order_of_many_rows_has_each_once_without_a_table(count, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MOST_PERMUTED", 0)
        rows = permuted(np.arange(count), count, (seed, 0))
        assert sorted(rows) == list(range(count))
        some = permuted(np.arange(count)[::3], count, (seed, 0))
        np.testing.assert_array_equal(some, rows[::3])


def test_the_order_of_a_trillion_rows_looks_like_chance():
    count = 10**12
    rows = permuted(np.arange(10_000), count, (0, 0))
    assert len(np.unique(rows)) == 10_000
    assert ((rows >= 0) & (rows < count)).all()
    np.testing.assert_allclose(rows.mean() / count, 0.5, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(rows[1:], rows[:-1])[0, 1], 0, atol=0.05)
    assert not np.array_equal(rows, permuted(np.arange(10_000), count, (0, 1)))
