"""Each row once an epoch, in an order that follows from seed and step; padding that changes nothing."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.batches import (
    Origin,
    batch_rows,
    num_batches,
    pad_rows,
    round_up,
    samples_before,
    take_batch,
)


@given(
    num_rows=st.integers(1, 60),
    part=st.floats(0, 1),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_row_once(num_rows, part, seed, epoch):
    batch_size = max(1, round(part * num_rows))
    count = num_batches(num_rows, batch_size)
    rows = [
        batch_rows(num_rows, batch_size, seed=seed, step=epoch * count + i) for i in range(count)
    ]
    assert sorted(np.concatenate(rows)) == list(range(num_rows))
    assert all(len(part) == batch_size for part in rows[:-1])


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    orders = [tuple(batch_rows(20, 20, seed=seed, step=step)) for seed in (0, 1) for step in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(batch_rows(20, 20, seed=0, step=0))


def test_every_batch_has_one_shape_and_the_weight_of_its_rows():
    data = {"features": np.arange(47.0)[:, None] + 1, "target": np.arange(47) + 1}
    batches = [take_batch(data, 10, seed=3, step=step, multiple=8) for step in range(5)]
    assert {batch["features"].shape for batch in batches} == {(16, 1)}
    assert [batch["weight"].sum() for batch in batches] == [10, 10, 10, 10, 7]
    seen = np.concatenate([batch["target"][batch["weight"] == 1] for batch in batches])
    assert sorted(seen) == list(range(1, 48)), "none dropped, none doubled"
    assert all((batch["target"][batch["weight"] == 0] == 0).all() for batch in batches)


def test_padding_keeps_weights_and_dtypes():
    padded = pad_rows(
        {"x": np.array([5, 6], np.int8), "weight": np.array([2.0, 0.5], np.float32)}, 3
    )
    assert padded["x"].tolist() == [5, 6, 0]
    assert padded["weight"].tolist() == [2, 0.5, 0]
    assert (padded["x"].dtype, padded["weight"].dtype) == (np.int8, np.float32)


def test_padding_never_drops_rows():
    with pytest.raises(
        ValueError,
        match=re.escape("padding must not drop rows; got 3 rows to pad to 2. Give 3 or more."),
    ):
        pad_rows({"x": np.zeros(3)}, 2)


@pytest.mark.parametrize(("batch_size", "remedy"), [(0, "Choose 1,"), (48, "Choose 47,")])
def test_a_batch_has_at_least_a_row_and_at_most_all(batch_size, remedy):
    message = f"batch_size must be from 1 to the number of rows; got batch_size={batch_size}, 47 rows. {remedy}"
    with pytest.raises(ValueError, match=re.escape(message)):
        num_batches(47, batch_size)


def test_round_up_gives_the_next_multiple():
    assert [round_up(n, 8) for n in (1, 8, 47, 48)] == [8, 8, 48, 48]


@given(
    num_rows=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    before=st.integers(0, 30),
    seed=st.integers(0, 3),
)
def test_a_run_that_goes_on_with_another_batch_size_still_has_every_row_once_an_epoch(
    num_rows, sizes, before, seed
):
    first, second = (min(size, num_rows) for size in sizes)
    seen = [batch_rows(num_rows, first, seed=seed, step=step) for step in range(before)]
    origin = Origin(before, samples_before(num_rows, first, before))
    assert origin.samples == sum(map(len, seen)), "a position in samples is what was taken"
    step = before
    while sum(map(len, seen)) < 3 * num_rows:
        seen.append(batch_rows(num_rows, second, seed=seed, step=step, origin=origin))
        step += 1
    rows = np.concatenate(seen)
    for epoch in range(3):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert samples_before(num_rows, second, step, origin) == len(rows)


@given(
    num_rows=st.integers(1, 40),
    size=st.integers(1, 40),
    at=st.integers(0, 30),
    step=st.integers(0, 30),
)
def test_a_resume_with_the_same_batch_size_changes_no_batch(num_rows, size, at, step):
    size = min(size, num_rows)
    origin = Origin(at, samples_before(num_rows, size, at))
    resumed = batch_rows(num_rows, size, seed=0, step=at + step, origin=origin)
    np.testing.assert_array_equal(resumed, batch_rows(num_rows, size, seed=0, step=at + step))


@pytest.mark.parametrize(
    ("columns", "got"),
    [
        (
            {"x": np.ones((3, 2)), "y": np.ones(4)},
            "got x with 3, y with 4",
        ),  # the fourth y would never be read
        ({"x": np.ones((0, 2))}, "got x with 0"),
        ({"x": np.ones(3), "rate": np.float32(0.1)}, "got x with 3, rate with 0"),
        ({}, "got no columns"),
    ],
)
def test_columns_of_other_numbers_of_rows_are_refused(columns, got):
    with pytest.raises(
        ValueError, match=f"all columns must have the same number of rows, at least one; {got}"
    ):
        take_batch(columns, 2, seed=0, step=0)
    if got != "got x with 0":  # a process whose rows of a batch are all padding has none
        with pytest.raises(
            ValueError, match=f"all columns must have the same number of rows; {got}"
        ):
            pad_rows(columns, 8)


def test_a_process_of_no_rows_pads_none():
    padded = pad_rows({"x": np.ones((0, 2))}, 4)
    assert padded["x"].shape == (4, 2)
    np.testing.assert_array_equal(padded["weight"], np.zeros(4))


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        (np.zeros(4), {}, "data must be a dict of columns; got array"),
        ({"x": np.zeros(4)}, {"batch_size": 2.0}, "batch_size must be a whole number; got 2.0"),
        ({"x": np.zeros(4)}, {"step": True}, "step must be a whole number; got True"),
    ],
)
def test_a_batch_of_other_kinds_is_refused(data, given, message):
    with pytest.raises(TypeError, match=message):
        take_batch(data, **({"batch_size": 2, "seed": 0, "step": 0} | given))


def test_steps_are_counted_from_0():
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        take_batch({"x": np.zeros(4)}, 2, seed=0, step=-1)
