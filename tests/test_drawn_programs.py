"""Programs drawn at random, which the checks of rows and of positions take without a word, have the numbers of the whole.

JAXPAR_FUZZ_CASES programs from JAXPAR_FUZZ_SEED, which the message of a failure names; by default some hundred, from a fresh
seed. Those that are refused or warned of are left out: most would be wrong.
"""

import os
import random
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import context_parallel
from jaxpar.step.row_checks import check_rows
from tests.support import tiny
from tests.support.fuzz import programs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:a model's outputs must")]

SEED = int(os.environ.get("JAXPAR_FUZZ_SEED", tiny.fresh_seed()))
CASES = os.environ.get("JAXPAR_FUZZ_CASES")
ROWS, SEQ, MOST_STEPS = 8, 8, 6
PARAMS = {"w": (6, 6), "b": (6,)}
REPLICATED = {"**": jaxpar.replicated()}


def _running_of_heads(a):
    if a.ndim < 3:
        raise TypeError("no dim of heads")
    of_heads = context_parallel.sequence_to_heads(a)
    return context_parallel.heads_to_sequence(jnp.cumsum(of_heads, axis=1))


SENT = {
    "gathered": context_parallel.gather_sequence,
    "added up": context_parallel.sum_over_sequence,
    "largest": context_parallel.max_over_sequence,
    "over the parts": lambda a: a / context_parallel.num_parts(),
    "by place": lambda a: (
        a + context_parallel.places(a.shape[1])[(None, ..., *[None] * (a.ndim - 2))]
    ),
    "running": _running_of_heads,
    "mean of all": lambda a: context_parallel.gather_sequence(a).mean(1, keepdims=True),
}
LOSSES = {
    "their number": lambda o, y: (jnp.sum(o), jnp.float64(y.size)),
    "their size": lambda o, y: (jnp.sum(o), jnp.float64(o.size)),
    "means": lambda o, y: (jnp.mean(o), jnp.mean(y**2)),
    "weights": lambda o, y: (jnp.sum(jnp.sin(o)), jnp.sum(y**2)),
    "one": lambda o, y: (jnp.mean(o), jnp.float64(1)),
}


def arrays_of(shapes, seed):
    rng = np.random.default_rng(seed)
    of = lambda name, shape: (
        rng.integers(0, 4, shape).astype(np.int32) if name == "t" else rng.normal(size=shape)
    )
    return {name: jnp.asarray(of(name, shape)) for name, shape in shapes.items()}


def abstract(shapes):
    dtype = lambda name: jnp.int32 if name == "t" else jnp.float64
    return [jax.ShapeDtypeStruct(shape, dtype(name)) for name, shape in shapes.items()]


def of_rows(rows):
    return {"x": (rows, 5, 6), "y": (rows,), "t": (rows, 5), "z": (rows, 6)}


def of_positions(seq):
    return {"x": (2, seq, 6), "y": (2, seq), "t": (2, seq), "h": (2, seq, 4, 2)}


def model_and_loss(rng, shapes, sent=None):
    """A random program as a model, and a loss; None if it sends nothing and should."""
    steps = programs.draw(rng, tuple(map(abstract, shapes)), rng.randint(1, MOST_STEPS), sent)
    name = rng.choice([*LOSSES])
    if sent and not any(step.name in sent for step in steps):
        return None
    columns = [each for each in shapes[0] if each not in PARAMS]

    def model(params, batch):
        arrays = [*(params[each] for each in PARAMS), *(batch[each] for each in columns)]
        return programs.run(steps, arrays) * params["b"][0]

    told = ", ".join(f"{step.name}{list(step.reads)}" for step in steps)
    return model, lambda o, batch: LOSSES[name](o, batch["y"]), f"{told}; {name}"


def assert_close(got, want, told):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9, err_msg=told)


def split_by_hand(sums, params, parts):
    """The loss and the gradients of parts of a batch, each with the cotangent of the whole."""
    weight = sum(sums(params, part)[1] for part in parts)
    losses, grads = [], []
    for part in parts:
        loss, pull = jax.vjp(lambda params, part=part: sums(params, part)[0], params)
        losses.append(loss)
        grads.append(pull((1 / weight).astype(loss.dtype))[0])
    return sum(losses) / weight, jax.tree.map(lambda *each: sum(each), *grads)


def taken(check):
    """What a check returns, and whether it took what it was given without a word."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            made = check()
        except (TypeError, ValueError):  # whole and local arrays that do not fit, or a refusal
            return None, False
    return made, not [each for each in found if "must depend on a param" not in str(each.message)]


def test_programs_of_rows_that_are_taken_have_the_numbers_of_all_rows(x64):
    counts, params = Counter(), arrays_of(PARAMS, 0)
    for number in range(int(CASES or 300)):
        rng = random.Random(f"{SEED} {number}")
        shapes = PARAMS | of_rows(ROWS), PARAMS | of_rows(ROWS // 2)
        model, loss, told = model_and_loss(rng, shapes)
        batch = arrays_of(of_rows(ROWS), number)
        _, is_taken = taken(
            lambda model=model, loss=loss, batch=batch: check_rows(model, loss, params, batch, 2)
        )
        counts[is_taken] += 1
        if not is_taken:
            continue
        sums = lambda params, batch, model=model, loss=loss: loss(model(params, batch), batch)
        parts = [{name: a[half] for name, a in batch.items()} for half in (slice(4), slice(4, 8))]
        whole = jax.jit(
            jax.value_and_grad(
                lambda params, sums=sums, batch=batch: jnp.divide(*sums(params, batch))
            )
        )
        got = jax.jit(lambda params, sums=sums, parts=parts: split_by_hand(sums, params, parts))(
            params
        )
        assert_close(got, whole(params), f"seed {SEED}, program {number}: {told}")
    assert min(counts[True], counts[False]) > 0.1 * counts.total(), counts


def test_programs_of_positions_that_are_taken_have_the_numbers_of_whole_sequences(x64):
    counts, params = Counter(), arrays_of(PARAMS, 0)
    mesh = jaxpar.make_mesh(context=2, devices=jax.devices()[:2])
    placed = jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, REPLICATED))
    for number in range(int(CASES or 150)):
        rng = random.Random(f"{SEED} {number}")
        shapes = PARAMS | of_positions(SEQ), PARAMS | of_positions(SEQ // 2)
        drawn = model_and_loss(rng, shapes, SENT)
        if drawn is None:
            continue
        model, loss, told = drawn
        batch = arrays_of(of_positions(SEQ), number)
        split = jaxpar.shard_batch(batch, mesh, sequences=["x", "y", "t", "h"])
        step = jax.jit(jaxpar.value_and_grad(model, loss, mesh))
        with tiny.signatures_unchecked():
            got, is_taken = taken(lambda step=step, split=split: step(placed, split))
        counts[is_taken] += 1
        if is_taken:
            whole = lambda params, model=model, loss=loss, batch=batch: jnp.divide(
                *loss(model(params, batch), batch)
            )
            wanted = jax.value_and_grad(whole)(params)
            assert_close(got, wanted, f"seed {SEED}, program {number}: {told}")
    assert min(counts[True], counts[False]) > 0.1 * counts.total(), counts
