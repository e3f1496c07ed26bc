"""Parameter servers that do not wait: the order of pushes, the bound that holds, and what staleness costs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.collectives import simulate_pushes, train_with_stale_gradients
from tests.support.one_axis import numbers
from tests.support.oracle import assert_same

WORKERS = 4
speeds = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6)


@given(speeds, st.integers(0, 5))
@settings(max_examples=60)
def test_no_worker_is_further_ahead_than_the_bound(seconds, bound):
    done = [0] * len(seconds)
    for push in simulate_pushes(seconds, 60, bound=bound):
        assert push.clock == done[push.worker], "a worker's gradients come in order"
        assert push.clock - min(done) <= bound, "it began no gradient that the bound forbids"
        done[push.worker] += 1


@given(speeds, st.integers(0, 5))
@settings(max_examples=60)
def test_a_gradient_knows_all_that_is_older_than_the_bound(seconds, bound):
    """Stale-synchronous parallel's promise: at clock c all pushes of clocks before c - bound are in the parameters."""
    pushes = simulate_pushes(seconds, 60, bound=bound)
    for number, push in enumerate(pushes):
        assert push.staleness == number - push.version
        assert all(other.clock >= push.clock - bound for other in pushes[push.version : number])


def test_equal_workers_without_a_bound_are_as_stale_as_there_are_others():
    assert [push.staleness for push in simulate_pushes([1.0] * 4, 12)] == [0, 1, 2, 3] * 3


def test_waiting_costs_the_fast_ones_their_time():
    last = {
        bound: simulate_pushes([1.0, 1.0, 4.0], 90, bound=bound)[-1].seconds
        for bound in (0, 3, None)
    }
    assert last[0] == 120, "synchronous: every round takes as long as the slowest"
    assert last[None] == 40
    assert last[None] <= last[3] < last[0]


def regression(worker, clock, params):
    """The gradient of a quarter of the rows, which is the worker's."""
    rows, targets = (
        jnp.asarray(numbers(40, 3)),
        jnp.asarray(numbers(40, 3) @ np.array([1.0, -2.0, 0.5])),
    )
    own = (
        jax.lax.dynamic_slice_in_dim(rows, worker * 10, 10),
        jax.lax.dynamic_slice_in_dim(targets, worker * 10, 10),
    )
    return jax.grad(lambda p: jnp.mean(jnp.square(own[0] @ p - own[1])))(params)


def run(bound, learning_rate=0.1, num_pushes=160, seconds=(1.0, 1.1, 1.3, 4.0)):
    pushes = simulate_pushes(seconds, num_pushes, bound=bound)
    apply = lambda params, grads: params - learning_rate / WORKERS * grads
    gradient = lambda params, worker, clock: regression(worker, clock, params)
    watch = lambda params: jnp.sum(jnp.square(params - jnp.array([1.0, -2.0, 0.5])))
    return train_with_stale_gradients(gradient, apply, jnp.zeros(3), pushes, watch=watch)


def test_bound_0_is_synchronous_training(x64):
    params = jnp.zeros(3)
    for _ in range(5):
        grads = [regression(worker, 0, params) for worker in range(WORKERS)]
        params = params - 0.1 * sum(grads) / WORKERS
    trained, _ = run(0, num_pushes=5 * WORKERS)
    assert_same(trained, params)


@pytest.mark.parametrize("bound", [0, 3, None])
def test_stale_gradients_still_converge_at_a_small_learning_rate(x64, bound):
    _, errors = run(bound)
    assert errors[-1] < 1e-2 * errors[0]


def test_after_as_many_gradients_stale_ones_are_further_from_the_optimum(x64):
    fresh, stale = (
        run(bound, learning_rate=0.45, seconds=(1.0, 1.0, 1.0, 12.0))[1] for bound in (0, None)
    )
    assert stale[-1] > 100 * fresh[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(simulate_pushes, [], 1), "each worker must take some time"),
        (
            partial(simulate_pushes, [1.0, 0.0], 1),
            r"each worker must take some time for a gradient; got \[1.0, 0.0\]",
        ),
        (partial(simulate_pushes, [1.0], 1, bound=-1), "bound must be 0 or more; got 1 and -1"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
