"""What is read of two jaxprs: rows, sums over them with their growth, and operations that mix them, each by its rule."""

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.row_dependence import Kind, Reader, Span, Value, traced
from jaxpar.row_dependence.reader import SPECIAL
from jaxpar.row_dependence.rules import RULES

FEW, MANY, RATIO = 4, 16, 4.0
PARAM = jax.ShapeDtypeStruct((6,), jnp.float32)


def read(function):
    """The values of what a function of a param [6], of h [rows, 5, 6], y [rows] and tokens [rows, 5] returns."""
    given = [
        (
            PARAM,
            jax.ShapeDtypeStruct((rows, 5, 6), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows, 5), jnp.int32),
        )
        for rows in (FEW, MANY)
    ]
    jaxprs, _ = traced(function, *given)
    rows = Value(Kind.ROWS, span=Span(0, 0))
    return Reader(FEW, RATIO).read(*jaxprs, [Value(), rows, rows, rows])


def logsumexp_of_all(h):
    shift = jax.lax.stop_gradient(jnp.max(h))
    return jnp.log(jnp.sum(jnp.exp(h - shift)))


@jax.custom_vjp
def doubled(h):
    return 2 * h


doubled.defvjp(lambda h: (2 * h, None), lambda _, ct: (2 * ct,))

ROWS = {
    "a norm of each row": lambda p, h, y, t: h - h.mean((1, 2), keepdims=True),
    "a softmax": lambda p, h, y, t: jax.nn.softmax(h),
    "params in each row": lambda p, h, y, t: h * p[None, None] + jnp.sum(p**2),
    "a convolution of params in each row": lambda p, h, y, t: (
        h
        + jax.lax.conv(
            jnp.broadcast_to(jnp.outer(p[:5], p), h.shape), jnp.ones((5, 5, 1)) * p[0], (1,), "SAME"
        )
    ),
    "a convolution of a product in each row": lambda p, h, y, t: (
        h
        + jax.lax.conv(
            jnp.broadcast_to(jnp.outer(p[:5], p), h.shape) @ jnp.outer(p, p),
            jnp.ones((5, 5, 1)) * p[0],
            (1,),
            "SAME",
        )
    ),
    "attention": lambda p, h, y, t: jnp.einsum(
        "bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h)), h
    ),
    "heads that are merged and parted": lambda p, h, y, t: (
        h.reshape(-1, 5, 2, 3).swapaxes(1, 2).reshape(-1, 3)
    ),
    "rows beside rows": lambda p, h, y, t: jnp.concatenate([h, 2 * h]),
    "rows that are cut and joined": lambda p, h, y, t: jnp.concatenate(
        [h[: len(h) // 2], h[len(h) // 2 :]]
    ),
    "rows in another place": lambda p, h, y, t: jnp.moveaxis(h, 0, 1) @ p,
    "a lookup": lambda p, h, y, t: p[t],
    "an element of each row": lambda p, h, y, t: jnp.take_along_axis(h, t[..., None], axis=2),
    "each row at its own index": lambda p, h, y, t: h[jnp.arange(len(h)), t[:, 0]],
    "a write into each row": lambda p, h, y, t: h.at[jnp.arange(len(h)), t[:, 0]].set(0),
    "the largest of each row": lambda p, h, y, t: jax.lax.top_k(h, 2)[0] + jnp.sort(h)[..., :2],
    "a convolution": lambda p, h, y, t: jax.lax.conv_general_dilated(
        h, jnp.ones((3, 6, 2)), (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
    ),
    "a loop over positions": lambda p, h, y, t: jax.lax.scan(
        lambda c, x: (c + x, c), h[:, 0], h.swapaxes(0, 1)
    )[1],
    "a loop over rows": lambda p, h, y, t: jax.lax.map(lambda row: jnp.cumsum(row, 0) @ p, h),
    "groups of rows in a loop": lambda p, h, y, t: jax.lax.map(
        lambda row: row @ p, h, batch_size=2
    ),
    "a vmap": lambda p, h, y, t: jax.vmap(lambda row, weight: weight * jnp.outer(p, row.mean(0)))(
        h, y
    ),
    "a branch for each row": lambda p, h, y, t: jax.lax.map(
        lambda r: jax.lax.cond(r[0, 0] > 0, jnp.sin, jnp.cos, r), h
    ),
    "a maximum that shifts": lambda p, h, y, t: jnp.exp(h - jax.lax.stop_gradient(h.max())),
    "a solution for each row": lambda p, h, y, t: jnp.linalg.solve(
        jnp.outer(p, p) + jnp.eye(6), h.reshape(-1, 6).T
    ),
    "a gradient": lambda p, h, y, t: jax.grad(lambda h: jnp.sum(jnp.sin(h @ p)))(h),
    "a function with a derivative of its own": lambda p, h, y, t: doubled(
        jax.checkpoint(jnp.tanh)(h)
    ),
    "noise of keys of rows": lambda p, h, y, t: jax.vmap(
        lambda seed: jax.random.normal(jax.random.fold_in(jax.random.key(0), seed), (6,))
    )(t[:, 0]),
    "a mask of positions": lambda p, h, y, t: jnp.where(
        jnp.tril(jnp.ones((5, 5), bool))[None], h[..., :5], -jnp.inf
    ),
    "slices of one number": lambda p, h, y, t: (
        h * jnp.ones(20)[: len(h), None, None]
        + jnp.zeros(len(h)).at[0].set(0)[:, None, None]
        + jnp.cumsum(jnp.zeros(len(h)))[:, None, None]
    ),
    "a table of features in each row": lambda p, h, y, t: (
        h + jnp.pad(jnp.broadcast_to(p[:3], (len(h), 3)), ((0, 0), (3, 0)))[:, None]
    ),
    "a number that is cut": lambda p, h, y, t: jnp.concatenate(
        [h, h * jnp.broadcast_to(p[0], (2 * len(h),))[: len(h), None, None]]
    ),
    "a loop that each row leaves by itself": lambda p, h, y, t: jax.vmap(
        lambda row: jax.lax.while_loop(lambda r: jnp.abs(r).max() > 0.1, lambda r: r / 2, row)
    )(h),
    "a loop that rows which are done are kept from": lambda p, h, y, t: halved(
        h, lambda r, big: jnp.where(big[:, None, None], r / 2, r)
    ),
    "an interpolation": lambda p, h, y, t: jnp.interp(h, jnp.linspace(-1, 1, 6), jnp.sort(p)),
    "halves that are computed alike": lambda p, h, y, t: jnp.concatenate(
        [jnp.tanh(half @ p)[..., None] * half for half in (h[: len(h) // 2], h[len(h) // 2 :])]
    ),
    "ones and zeros beside two views": lambda p, h, y, t: (
        jnp.concatenate([h, jnp.sin(h)])
        * jnp.concatenate([jnp.ones(len(h)), jnp.zeros(len(h))])[:, None, None]
    ),
    "a table in each row": lambda p, h, y, t: h.reshape(-1, 6) * jnp.tile(p[:5], len(h))[:, None],
    "views that are counted": lambda p, h, y, t: (
        jnp.concatenate([h, 2 * h]) * jnp.repeat(jnp.array([[1.0, 2.0]]), len(h))[:, None, None]
    ),
    "two views of one encoder": lambda p, h, y, t: (
        lambda views: views[0] * jax.lax.stop_gradient(views[1])
    )(jnp.split(jnp.tanh(jnp.concatenate([h, h + 1]) @ p), 2)),
    "a bias in halves": lambda p, h, y, t: (h.reshape(2, -1, 5, 6) + p[None, None, None]).reshape(
        h.shape
    ),
    "a loop that some rows leave, or all after some trips": lambda p, h, y, t: jax.lax.while_loop(
        lambda c: jnp.any(~c[1]) & (c[0] < 9),
        lambda c: (
            c[0] + 1,
            c[1] | (c[2][:, 0, 0] < 0.1),
            jnp.where(c[1][:, None, None], c[2], c[2] / 2),
        ),
        (0, y > 1, h),
    )[2],
    "a column that a row chooses": lambda p, h, y, t: jax.vmap(lambda row, at: row.at[at].set(0))(
        h[:, 0], t[:, 0]
    ),
    "a row that is turned by its own number": lambda p, h, y, t: jax.lax.map(
        lambda x: jnp.roll(x[0], x[1][0]), (h[:, 0], t)
    ),
    "each row at its own index and a column": lambda p, h, y, t: (
        h[:, 0].at[jnp.arange(len(h)), 0].add(1)
    ),
    "a write at each position": lambda p, h, y, t: jax.lax.scan(
        lambda c, at: (jax.lax.dynamic_update_slice(c, 2 * h[:, :1], (0, at, 0)), None),
        0 * h,
        jnp.arange(5),
    )[0],
    "a read at each position": lambda p, h, y, t: jax.lax.scan(
        lambda c, at: (c.at[:, at].set(2 * h[:, at]), None), 0 * h, jnp.arange(5)
    )[0],
    "a write into each row of a loop": lambda p, h, y, t: jax.lax.map(
        lambda x: x[0].at[2].set(x[1]).at[x[2][0]].add(x[1]), (h[:, 0], y, t)
    ),
    "layers by an index": lambda p, h, y, t: jax.lax.scan(
        lambda c, at: (jnp.tanh(c @ jnp.outer(p, p)[None].repeat(2, 0)[at]), None),
        h,
        jnp.arange(2),
    )[0],
    "as many trips as a row says": lambda p, h, y, t: jax.vmap(trips_of)(h, t[:, 0]),
    "as many trips of each position": lambda p, h, y, t: jax.vmap(trips_of, (1, 0))(
        h, jnp.arange(5)
    ),
    "halves with one param of several": lambda p, h, y, t: halves_with(
        lambda x, _: x * p[None, 2:3], h
    ),
    "halves with their weights": lambda p, h, y, t: jnp.concatenate(
        [a * b[:, None, None] for a, b in zip(jnp.split(h, 2), jnp.split(y, 2), strict=True)]
    ),
    "chunks in a loop": lambda p, h, y, t: jax.lax.map(lambda x: x @ p, chunks_of(h)),
    "chunks with a copy of params": lambda p, h, y, t: in_chunks(
        lambda w, x: x * w, jnp.broadcast_to(p, (2, 1, 6)), h
    ),
    "chunks with their labels": lambda p, h, y, t: jax.lax.map(
        lambda x: jnp.take_along_axis(*x, 1), (chunks_of(h), t.reshape(2, -1, 5))
    ),
    "a column of halves": lambda p, h, y, t: chunks_of(h).at[:, :, 0].set(p[0]),
    "labels of halves": lambda p, h, y, t: jnp.take_along_axis(
        chunks_of(h), t.reshape(2, -1, 5), 2
    ),
    "kept from 0": lambda p, h, y, t: (
        h / jnp.maximum(jnp.linalg.norm(h, axis=-1, keepdims=True), 1e-6)
    ),
}
SUMS = {
    "a sum": (lambda p, h, y, t: jnp.sum(h), 1),
    "a sum of means": (lambda p, h, y, t: jnp.sum(h.mean((1, 2)) * y), 1),
    "a mean": (lambda p, h, y, t: jnp.mean(h), 1 / RATIO),
    "a mean times the rows": (lambda p, h, y, t: jnp.mean(h) * len(h), 1),
    "a sum times the rows": (lambda p, h, y, t: jnp.sum(h) * len(h), RATIO),
    "a mean that is less than one": (lambda p, h, y, t: jnp.sum(h) / (len(h) - 1), 3 / 15),
    "a product that adds up rows": (lambda p, h, y, t: jnp.einsum("btd,b,d->", h, y, p), 1),
    "a sum for each class": (lambda p, h, y, t: jnp.zeros(9).at[t].add(h[..., 0]), 1),
    "a sum and penalties for each row": (lambda p, h, y, t: jnp.sum(h) + len(h) * jnp.sum(p), 1),
    "a sum in a loop over rows": (
        lambda p, h, y, t: jax.lax.scan(lambda c, r: (c + jnp.sin(r @ p), None), p[:5], h)[0],
        None,
    ),
    "a sum in chunks of rows": (
        lambda p, h, y, t: jax.lax.scan(
            lambda c, r: (c + jnp.sum(jnp.sin(r)), None), 0.0, h[:, 0].reshape(2, -1, 6)
        )[0],
        1,
    ),
    "a sum of squares of sums of rows": (lambda p, h, y, t: jnp.sum(h.sum((1, 2)) ** 2), 1),
    "a sum for each class in a loop": (
        lambda p, h, y, t: jax.lax.scan(
            lambda c, x: (c.at[x[1]].add(x[0]), None), jnp.zeros(9), (y, t[:, 0])
        )[0],
        1,
    ),
    "the first of each pair": (
        lambda p, h, y, t: jnp.sum(jnp.stack([y, 2 * y], 1).ravel()[::2]),
        1,
    ),
    "pairs beside pairs": (
        lambda p, h, y, t: jnp.sum(jnp.concatenate([y.reshape(-1, 2), y.reshape(-1, 2) ** 2], 1)),
        1,
    ),
    "the square of a norm": (lambda p, h, y, t: jnp.linalg.norm(h.reshape(-1)) ** 2, 1),
    "a number of right answers": (lambda p, h, y, t: jnp.sum(jnp.argmax(h, -1) == t), 1),
}
MIXED = {
    "a norm of the batch": lambda p, h, y, t: (
        (h - h.mean(0, keepdims=True)) / (h.std(0, keepdims=True) + 1e-5)
    ),
    "a softmax over rows": lambda p, h, y, t: jax.nn.softmax(y),
    "all pairs": lambda p, h, y, t: jnp.einsum("btd,ctd->bc", h, h),
    "the next row": lambda p, h, y, t: h + jnp.roll(h, 1, axis=0),
    "the first row": lambda p, h, y, t: h - h[:1],
    "a row of a number": lambda p, h, y, t: h * jnp.take(h, 2, axis=0)[None],
    "rows in another order": lambda p, h, y, t: h + h[::-1],
    "sorted rows": lambda p, h, y, t: jnp.sort(y),
    "a sum so far": lambda p, h, y, t: jnp.cumsum(y),
    "a row for its number": lambda p, h, y, t: h / len(h) + jnp.sin(y / len(y))[:, None, None],
    "a maximum": lambda p, h, y, t: jnp.max(h),
    "a deviation": lambda p, h, y, t: jnp.std(h),
    "a logarithm of a sum": lambda p, h, y, t: logsumexp_of_all(h),
    "a square of a sum": lambda p, h, y, t: jnp.sum(h) ** 2,
    "a product of means": lambda p, h, y, t: jnp.sum(h.mean(0) * jax.nn.softmax(h).mean(0)),
    "a sum and a mean": lambda p, h, y, t: jnp.sum(h) + jnp.mean(y),
    "a sum and a number": lambda p, h, y, t: jnp.sum(h) + jnp.sum(p**2),
    "a ratio of sums": lambda p, h, y, t: jnp.sum(h) / jnp.sum(y),
    "a last row of a loop": lambda p, h, y, t: jax.lax.scan(
        lambda c, r: (0.5 * c + r.sum(), None), 0.0, h
    )[0],
    "a row that the one before it changes": lambda p, h, y, t: jax.lax.scan(
        lambda c, r: (r, r - c), h[0], h
    )[1],
}


@pytest.mark.parametrize("name", ROWS)
def test_what_treats_rows_apart_has_rows_without_a_doubt(name):
    (found,) = read(ROWS[name])
    assert (found.kind, found.growth, str(found.why)) == (Kind.ROWS, 1, "")


@pytest.mark.parametrize("name", [name for name, (_, growth) in SUMS.items() if growth is not None])
def test_a_sum_over_rows_has_the_ratio_of_the_factors_beside_it(name):
    function, growth = SUMS[name]
    (found,) = read(function)
    assert (found.kind, str(found.why)) == (Kind.SUM, "")
    assert found.growth == pytest.approx(growth)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_proved_to_and_its_line_is_named(name):
    found = max(read(MIXED[name]), key=lambda value: value.kind)
    assert found.kind is Kind.MIXED
    assert "test_row_dependence.py" in str(found.why) or "site-packages" in str(found.why)


NUMBERS = {name: function for name, (function, growth) in SUMS.items() if growth} | ROWS | MIXED


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name in NUMBERS if name != "a maximum that shifts"]
)  # it cancels later
def test_values_agree_with_numbers(x64, name):
    """Rows are those of the parts, sums are the sum of theirs times the factor, and what is mixed is neither."""
    rng = np.random.default_rng(0)
    p, h, y = rng.normal(size=6), rng.normal(size=(MANY, 5, 6)), rng.normal(size=MANY)
    t = rng.integers(0, 5, (MANY, 5))
    function = jax.jit(lambda *given: jax.tree.leaves(NUMBERS[name](*given))[-1])
    whole = function(p, h, y, t)
    parts = [function(p, *(a[i : i + FEW] for a in (h, y, t))) for i in range(0, MANY, FEW)]
    if name in ROWS:  # of whatever dim
        np.testing.assert_allclose(np.sort(np.ravel(parts)), np.sort(np.ravel(whole)))
    elif name in SUMS:
        np.testing.assert_allclose(sum(parts) * SUMS[name][1], whole)
    else:
        made = np.ravel(sum(parts) if whole.shape == parts[0].shape else parts)
        assert made.size != whole.size or not np.allclose(made, np.ravel(whole))


def test_constants_grow_as_they_are_computed_from_the_number_of_rows():
    (number,) = read(lambda p, h, y, t: jnp.maximum(jnp.float32(len(h)), 8.0) * 3)
    assert (number.kind, number.number) == (Kind.FREE, (24, 48))
    assert number.growth == 2


def test_a_loop_over_rows_that_starts_from_params_adds_them_once():
    (found,) = read(SUMS["a sum in a loop over rows"][0])
    assert found.kind is Kind.MIXED
    assert "a mean or a number (scan at" in str(found.why)


# --- doubts and marks -------------------------------------------------------------------------------------------------


def halved(h, halve, goes_on=jnp.any):
    """Rows that are halved while some are large."""
    are_big = lambda r: jnp.abs(r).max((1, 2)) > 0.1
    trip = lambda r: halve(r, are_big(r))
    return jax.lax.while_loop(lambda r: goes_on(are_big(r)), trip, h)


def test_a_mask_that_no_trip_changes_ends_no_rows_trips():
    held = lambda mask: lambda r, big: jnp.where(mask, r / 2, r)
    for mask in (lambda h, t: t[..., None] > 0, lambda h, t: jnp.arange(h.shape[2]) > 2):
        (found,) = read(lambda p, h, y, t, mask=mask: halved(h, held(mask(h, t))))
        assert "test_row_dependence.py" in found.why.line


def test_as_many_trips_as_there_are_rows_are_a_doubt():
    (found,) = read(lambda p, h, y, t: jax.lax.fori_loop(0, len(h), lambda i, c: c * 0.9, h))
    assert found.why.what == "the number of trips depends on the number of rows"


@pytest.mark.parametrize("goes_on", [jnp.any, lambda big: big.sum() > 1, lambda big: ~(~big).all()])
def test_a_loop_of_as_many_trips_as_the_largest_row_needs_is_a_doubt(goes_on):
    (found,) = read(lambda p, h, y, t: halved(h, lambda r, big: r / 2, goes_on))
    assert found.kind is Kind.ROWS
    assert "test_row_dependence.py" in found.why.line


def by_token(h, t):
    """Rows in the order of their first token, and back."""
    order = jnp.argsort(t[:, 0])
    return jnp.tanh(h[order])[jnp.argsort(order)]


def test_integers_that_order_rows_are_a_doubt_with_its_line_and_no_proof():
    (found,) = read(lambda p, h, y, t: by_token(h, t))
    assert found.kind is Kind.ROWS
    assert "test_row_dependence.py" in str(found.why)


def test_a_function_that_is_marked_as_row_wise_is_taken_without_a_doubt():
    (found,) = read(lambda p, h, y, t: jaxpar.row_wise(by_token)(h, t))
    assert (found.kind, str(found.why)) == (Kind.ROWS, "")


def test_a_marked_function_computes_the_same_and_may_close_over_anything():
    h, t, name = jnp.arange(8.0).reshape(4, 2), jnp.array([[2], [1], [3], [0]]), "a constant"
    marked = jaxpar.row_wise(lambda h, *, t: by_token(h, t) if name else None)
    np.testing.assert_allclose(marked(h, t=t), jnp.tanh(h), rtol=1e-6)
    grad = jax.grad(lambda h: jnp.sum(marked(h, t=t) ** 2))
    np.testing.assert_allclose(grad(h), 2 * jnp.tanh(h) / jnp.cosh(h) ** 2, atol=1e-5)


def test_another_program_for_another_number_of_rows_is_a_doubt():
    (found,) = read(lambda p, h, y, t: h * 2 if len(h) == FEW else h + h)
    assert found.kind is Kind.ROWS
    assert found.why.what.startswith("another program")
    assert "test_row_dependence.py" in str(found.why), "the line of the first other operation"


BY_THEIR_NUMBER = {
    "a write into rows": lambda p, h, y, t: h.at[jnp.arange(len(h)), t[:, 0]].set(h[:, 0] / len(h)),
    "rows beside rows": lambda p, h, y, t: jnp.concatenate([h, h / len(h)]),
    "the square of a gradient of a mean": lambda p, h, y, t: (
        jax.grad(lambda h: jnp.mean(jnp.take_along_axis(h, t[..., None], axis=2)))(h) ** 2
    ),
    "a difference to a maximum": lambda p, h, y, t: jnp.exp(h / len(h) - h.max()),
}


@pytest.mark.parametrize("name", BY_THEIR_NUMBER)
def test_rows_that_depend_on_their_number_are_found_where_they_are_written_or_joined(name):
    (found,) = read(BY_THEIR_NUMBER[name])
    assert found.kind is Kind.MIXED, found


def by_index(h):
    return jnp.arange(len(h))


def mask_of(h):
    """A mask that is drawn from one key for all rows: those of each microbatch get the mask of the first."""
    return jax.random.bernoulli(jax.random.key(3), 0.9, h.shape)


def double_or_keep(is_first, row):
    return jax.lax.cond(is_first, lambda row: row * 2, lambda row: row, row)


def table_of(p):
    """A table that has more entries than there are rows."""
    return jnp.outer(jnp.arange(20.0), p)


BY_PLACE = {
    "dropout": lambda p, h, y, t: jnp.where(mask_of(h), h / 0.9, 0),
    "a product with a mask": lambda p, h, y, t: h * mask_of(h),
    "weights chosen by a mask": lambda p, h, y, t: h * jnp.where(mask_of(h), 1.0, 0.5),
    "a draw for each row": lambda p, h, y, t: jnp.where(mask_of(h[:, :1, :1]), h, 0),
    "one of three cases": lambda p, h, y, t: jax.lax.select_n(
        jnp.broadcast_to(by_index(h)[:, None, None] % 3, h.shape), h, h * 2, h * 3
    ),
    "a branch under vmap": lambda p, h, y, t: jax.vmap(double_or_keep)(by_index(h) == 0, h),
    "a branch in a loop": lambda p, h, y, t: jax.lax.map(
        lambda each: double_or_keep(each[0] == 0, each[1]), (by_index(h), h)
    ),
    "a mask of NumPy": lambda p, h, y, t: jnp.where((np.arange(len(h)) == 0)[:, None, None], h, 0),
    "a triangle": lambda p, h, y, t: jnp.triu(h[:, 0]),
    "a slice of a table": lambda p, h, y, t: h + table_of(p)[: len(h), None],
    "a table that is cut": lambda p, h, y, t: (
        h * jnp.outer(jnp.arange(32.0), p).reshape(len(h), -1)[:, :1, None]
    ),
    "a slice from an index": lambda p, h, y, t: (
        h + jax.lax.dynamic_slice_in_dim(table_of(p), p[0].astype(int), len(h))[:, None]
    ),
    "a slice for each key": lambda p, h, y, t: (
        h
        + jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(table_of(p), at, len(h)))(
            jnp.arange(5)
        ).sum(0)[:, None]
    ),
    "a table that is padded": lambda p, h, y, t: h * jnp.pad(p[:3], (0, len(h) - 3))[:, None, None],
    "a table and zeros": lambda p, h, y, t: (
        h * jnp.concatenate([p[:3], jnp.zeros(len(h) - 3)])[:, None, None]
    ),
    "a number that is written": lambda p, h, y, t: (
        h * jnp.zeros(len(h)).at[0].set(1.0)[:, None, None]
    ),
    "a slice that is written": lambda p, h, y, t: (
        h * jax.lax.dynamic_update_slice(jnp.ones(len(h)), p[:3], (0,))[:, None, None]
    ),
    "numbers that are counted": lambda p, h, y, t: h * jnp.cumsum(jnp.ones(len(h)))[:, None, None],
    "numbers that a loop counts": lambda p, h, y, t: (
        h * jax.lax.scan(lambda c, _: (c + p[0], c), 0.0, None, length=len(h))[1][:, None, None]
    ),
    "the first row apart": lambda p, h, y, t: jnp.concatenate([h[:1] * 2, h[1:]]),
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_rows_that_are_treated_by_their_places_are_a_doubt_with_its_line(name):
    (found,) = read(BY_PLACE[name])
    assert found.kind is Kind.ROWS
    assert found.place
    assert "place" in str(found.why)
    assert "test_row_dependence.py" in str(found.why)


OF_ITSELF = {
    "read": lambda h, n: h[jnp.arange(n)],
    "read from the end": lambda h, n: h[jnp.arange(n) - n],
    "read with an element": lambda h, n: h[jnp.arange(n)[:, None], jnp.arange(5)[None]],
    "written": lambda h, n: h.at[jnp.arange(n)].multiply(2),
    "added up": lambda h, n: jax.ops.segment_sum(h, jnp.arange(n), n),
}
OF_OTHERS = {
    "the next": lambda h, n: h[(jnp.arange(n) + 1) % n],
    "the last first": lambda h, n: h[jnp.flip(jnp.arange(n))],
    "twice each": lambda h, n: h[jnp.arange(n) // 2],
    "up to a number": lambda h, n: h[jnp.minimum(jnp.arange(n), 2)],
    "a half": lambda h, n: h[jnp.arange(n // 2)],
    # In the smaller number of rows each is at its own index.
    "a permutation of NumPy": lambda h, n: h[np.roll(np.arange(n), n // FEW - 1)],
    "up to a number of NumPy": lambda h, n: h[np.minimum(np.arange(n), FEW - 1)],
    "every other written": lambda h, n: h.at[::2].multiply(2),
    "a half written": lambda h, n: h.at[jnp.arange(n // 2)].set(0),
    # Indices without a sign do not count from the end, so JAX leaves them as they are.
    "a half, without a sign": lambda h, n: h[jnp.arange(n // 2, dtype=jnp.uint32)],
    "a half written, without a sign": lambda h, n: h.at[jnp.arange(n // 2, dtype=jnp.uint32)].set(
        0
    ),
    "the next written": lambda h, n: h.at[(jnp.arange(n) + 1) % n].add(h),
    "pairs added up": lambda h, n: jax.ops.segment_sum(h, jnp.arange(n) // 2, n),
}


@pytest.mark.parametrize("name", OF_ITSELF)
def test_a_row_may_be_read_and_written_at_its_own_index(name):
    (found,) = read(lambda p, h, y, t: OF_ITSELF[name](h, len(h)))
    assert found.kind is Kind.ROWS
    assert not found.why


@pytest.mark.parametrize("name", OF_OTHERS)
def test_rows_at_the_indices_of_others_are_mixed_or_a_doubt(name):
    (found,) = read(lambda p, h, y, t: OF_OTHERS[name](h, len(h)))
    assert found.kind is Kind.MIXED or found.why


def test_another_operand_for_another_number_of_rows_is_told_with_its_line():
    (found,) = read(OF_OTHER_ROWS["another of two values"])
    assert found.why.operation == "another operand"
    assert "test_row_dependence.py" in found.why.line


def test_numbers_that_are_written_into_some_rows_are_a_doubt():
    write = lambda p, h, y, t: jax.lax.dynamic_update_slice(h, jnp.zeros((1, 5, 6)), (0, 0, 0))
    (found,) = read(write)
    assert found.why.what.startswith("it writes some rows")


def test_a_power_of_the_number_of_rows_is_a_number():
    square = lambda p, h, y, t: jnp.float32(len(h)) ** 2
    (found,) = read(square)
    assert found.growth == RATIO**2


def with_derivative(backward):
    function = jax.custom_vjp(lambda p, h: h * p[None, None])
    function.defvjp(
        lambda p, h: (h * p[None, None], h), lambda h, ct: (jnp.sum(ct * h, (0, 1)), backward(ct))
    )
    return lambda p, h, y, t: function(p, h)


def fails(ct):
    raise NotImplementedError


OWN = {
    "clipped": (jnp.tanh, ""),
    "a norm of each row": (lambda ct: ct / jnp.linalg.norm(ct, axis=(1, 2), keepdims=True), ""),
    "a norm of all": (
        lambda ct: ct / jnp.linalg.norm(ct),
        "its own derivative mixes rows: it makes of a sum",
    ),
    "without its mean": (
        lambda ct: ct - ct.mean(0, keepdims=True),
        "its own derivative mixes rows: a sum over rows reaches each row",
    ),
    "none": (fails, "its own derivative cannot be traced"),
    "by their number": (
        lambda ct: ct / len(ct),
        "its own derivative depends on the number of rows",
    ),
    "in as many trips as the largest needs": (
        lambda ct: halved(ct, lambda c, big: c / 2),
        "its own derivative: a maximum over rows",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_derivative_of_its_own_that_mixes_rows_puts_a_function_in_doubt(name):
    backward, why = OWN[name]
    (found,) = read(with_derivative(backward))
    assert found.kind is Kind.ROWS
    assert found.why.what.startswith(why) if why else not found.why


@pytest.mark.parametrize("name", [name for name in OWN if name != "none"])
def test_a_rule_of_tangents_that_mixes_rows_puts_a_function_in_doubt(name):
    rule, why = OWN[name]
    function = jax.custom_jvp(lambda h: 2 * h)
    tangent = lambda t, h: 2 * t * jax.lax.stop_gradient(rule(h))  # linear in t, as JAX wants it
    function.defjvp(lambda of, to: (2 * of[0], tangent(to[0], of[0])))
    (found,) = read(lambda p, h, y, t: function(h))
    assert found.kind is Kind.ROWS
    if why:
        assert "its own derivative" in found.why.what
        assert "test_row_dependence.py" in found.why.line
    else:
        assert not found.why


def test_a_forward_pass_of_its_own_that_mixes_rows_puts_a_function_in_doubt():
    centred = jax.custom_vjp(lambda h: h - h.mean((1, 2), keepdims=True))
    centred.defvjp(lambda h: (h - h.mean(0, keepdims=True), None), lambda _, ct: (ct,))
    (found,) = read(lambda p, h, y, t: centred(h))
    assert found.kind is Kind.ROWS
    assert "forward pass, where it is differentiated, mixes rows" in found.why.what
    assert "test_row_dependence.py" in found.why.line


def test_params_in_each_row_have_a_gradient_in_each_by_a_derivative_of_its_own():
    product = jax.custom_vjp(lambda x, w: x * w[None, None])
    product.defvjp(
        lambda x, w: (product(x, w), (x, w)),
        lambda kept, ct: (ct * kept[1][None, None], jnp.einsum("btd,btd->d", kept[0], ct)),
    )
    in_rows = lambda p, h: jnp.broadcast_to(p[None, None], h.shape)
    (found,) = read(lambda p, h, y, t: h + product(in_rows(p, h), p))
    assert found.kind is Kind.ROWS
    assert not found.why


def test_a_sum_with_a_derivative_of_its_own_that_mixes_rows_is_in_doubt():
    total = jax.custom_vjp(lambda h: jnp.sum(h))
    total.defvjp(lambda h: (jnp.sum(h), h), lambda h, ct: (ct * h / jnp.linalg.norm(h),))
    (found,) = read(lambda p, h, y, t: total(h))
    assert found.kind is Kind.SUM
    assert "derivative mixes rows" in str(found.why)


def of_a_param(backward):
    function = jax.custom_vjp(lambda p: 1 * p)
    function.defvjp(lambda p: (1 * p, p), lambda p, ct: (backward(ct, p),))
    return lambda p, h, y, t: h * function(p)[None, None]


OF_PARAMS = {
    "scaled": (lambda ct, p: 0.1 * ct, ""),
    "by the param": (lambda ct, p: ct * jax.nn.sigmoid(p), ""),
    "added up": (lambda ct, p: jnp.flip(jnp.cumsum(ct)), ""),
    "none": (lambda ct, p: jnp.zeros_like(ct), ""),
    "clipped": (lambda ct, p: jnp.clip(ct, -1, 1), "it makes of a sum over rows what is no sum"),
    "a norm": (lambda ct, p: ct / jnp.linalg.norm(ct), "it makes of a sum over rows what is no"),
    "decay": (lambda ct, p: ct + 0.01 * p, "it adds to a sum over rows what is none"),
    "a constant": (lambda ct, p: jnp.ones_like(ct), "the gradient of what depends on no row"),
    "a new value": (lambda ct, p: p + 1, "the gradient of what depends on no row"),
}


@pytest.mark.parametrize("name", OF_PARAMS)
def test_a_gradient_of_a_param_by_its_own_derivative_is_a_sum_over_rows_or_told(name):
    backward, why = OF_PARAMS[name]
    (found,) = read(of_a_param(backward))
    assert found.kind is Kind.ROWS
    assert why in found.why.what if why else not found.why


def test_a_doubt_about_a_param_goes_through_branches_and_loops():
    clip = jax.custom_vjp(lambda p: 1 * p)
    clip.defvjp(lambda p: (1 * p, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    ways = {
        "cond": lambda p: jax.lax.cond(p[0] > 0, clip, lambda p: p, p),
        "scan": lambda p: jax.lax.scan(lambda c, _: (clip(c), None), p, length=2)[0],
        "while": lambda p: jax.lax.while_loop(lambda c: c[0] > 9, clip, p),
    }
    for name, way in ways.items():
        (found,) = read(lambda p, h, y, t, way=way: h * way(p)[None, None])
        assert "its own derivative mixes rows" in found.why.what, name


def delayed(h):
    """A value that a loop hands on ten times before it is read, made of the mean of all rows."""
    centred = h - h.mean(0, keepdims=True)
    trip = lambda c, _: ((centred, *c[:-1]), None)
    return jax.lax.scan(trip, (0 * h,) * 10, None, length=12)[0][-1]


def until_small(h, choice):
    """Rows that trips change while some row is large, each by another choice than that."""
    goes_on = lambda c: jnp.any(jnp.abs(c[1]).max((1, 2)) > 0.1)
    trip = lambda c: (c[0] + 1, jnp.where(choice(c)[:, None, None], c[1] * 0.7, c[1]))
    return jax.lax.while_loop(goes_on, trip, (0, h))[1]


def each_of(h):
    return jnp.sum(h, (1, 2))


OF_OTHER_ROWS = {
    "labels by halves": lambda p, h, y, t: (
        y - jnp.concatenate([jnp.ones(len(h) // 2), jnp.zeros(len(h) // 2)])
    ),
    "signs of halves": lambda p, h, y, t: y * jnp.repeat(jnp.array([1.0, -1.0]), len(h) // 2),
    "a table by place": lambda p, h, y, t: y * jnp.tile(p[:3], len(h))[: len(h)],
    "a stack by place": lambda p, h, y, t: (
        y * jnp.stack([jnp.zeros(len(h) // 2), jnp.ones(len(h) // 2)]).ravel()
    ),
    "means of halves": lambda p, h, y, t: y.reshape(2, -1).mean(1) @ p[:2],
    "halves with signs": lambda p, h, y, t: y.reshape(2, -1) * p[:2, None],
    "params of halves": lambda p, h, y, t: jnp.einsum(
        "gbi,gij->gbj", h[:, 0].reshape(2, -1, 6), jnp.outer(p, p).reshape(2, 6, 3)
    ),
    "a half that is doubled": lambda p, h, y, t: jnp.concatenate(
        [2 * h[: len(h) // 2], h[len(h) // 2 :]]
    ),
    "neighbours that are multiplied": lambda p, h, y, t: jnp.vdot(h[1:], h[:-1]),
    "halves that are multiplied": lambda p, h, y, t: jnp.vdot(h[: len(h) // 2], h[len(h) // 2 :]),
    "one row in a product": lambda p, h, y, t: h[0, 0] @ p,
    "classes of some": lambda p, h, y, t: (
        jnp.zeros(9).at[t[: len(h) // 2, 0]].add(y[: len(h) // 2])
    ),
    "a loop over some": lambda p, h, y, t: jax.lax.scan(
        lambda c, x: (c + x, None), 0.0, y[: len(h) // 2]
    )[0],
    "all pairs of a row": lambda p, h, y, t: jnp.sum(jnp.ones(len(h))[None] * y[:, None]),
    "a product over all pairs": lambda p, h, y, t: (
        (y[:, None] * jnp.ones(len(h))[None]) @ jnp.ones(len(h))
    ),
    "columns that other rows choose": lambda p, h, y, t: h[:, 0].at[:, t[:, 0]].multiply(2.0),
    "columns that other rows write": lambda p, h, y, t: (
        jnp.zeros((len(h), 6)).at[:, t[:, 0]].set(y)
    ),
    "rows dealt out": lambda p, h, y, t: h[jnp.arange(len(h)).reshape(2, -1).T.ravel()],
    "each row twice": lambda p, h, y, t: h[jnp.repeat(jnp.arange(len(h) // 2), 2)],
    "the last row first": lambda p, h, y, t: h[len(h) - jnp.arange(len(h))],
    "indices past the end": lambda p, h, y, t: h[jnp.arange(len(h)) + len(h)],
    "integers of some places": lambda p, h, y, t: jnp.sum(
        jnp.where(jnp.arange(len(h)) < 3, t[:, 0], 0)
    ),
    "sums of halves": lambda p, h, y, t: (
        jax.ops.segment_sum(y, jnp.arange(len(h)) // (len(h) // 2), 2) @ p[:2]
    ),
    "the last index": lambda p, h, y, t: y / jnp.arange(1.0, len(h) + 1)[-1],
    "the largest index": lambda p, h, y, t: y * jnp.max(jnp.arange(len(h))),
    "a count": lambda p, h, y, t: y * jnp.cumsum(jnp.ones(len(h)))[-1],
    "a product of numbers": lambda p, h, y, t: y * jnp.prod(jnp.full(len(h), p[0])),
    "a part of a table": lambda p, h, y, t: y * table_of(p)[: len(h)].max(),
    "as many trips of a number": lambda p, h, y, t: (
        y * jax.lax.fori_loop(0, len(h), lambda i, c: c * 0.9, 1.0)
    ),
    "a draw by their number": lambda p, h, y, t: y * jax.random.normal(jax.random.key(len(h))),
    "a large table by their number": lambda p, h, y, t: (
        h @ jnp.asarray(np.full((6, 1000), 1 / len(h)))
    ),
    "a quotient of counts": lambda p, h, y, t: jnp.sum(y) / jax.lax.div(len(h), 3),
    "a power": lambda p, h, y, t: y ** len(h),
    "an element by their number": lambda p, h, y, t: h[:, 0, len(h) // 4],
    "an element of a table": lambda p, h, y, t: y * p[len(h) // 4],
    "another param": lambda p, h, y, t: y * (p[0] if len(h) > FEW else p[1]),
    "another of two values": lambda p, h, y, t: y * (jnp.sin(p[0]), jnp.cos(p[0]))[len(h) > FEW],
    "a delay": lambda p, h, y, t: delayed(h),
    "rows in columns": lambda p, h, y, t: h[:, 0].reshape(6, len(h)).sum(1) ** 2,
    "every third of views": lambda p, h, y, t: jnp.concatenate([y, 2 * y])[::3],
    "trips by another bound": lambda p, h, y, t: until_small(
        h, lambda c: jnp.abs(c[1]).max((1, 2)) > 0.01
    ),
    "trips by their number": lambda p, h, y, t: until_small(
        h, lambda c: (c[0] < 5) & (each_of(c[1]) > -9)
    ),
    "NaN by a mean": lambda p, h, y, t: jnp.nansum(jnp.where(h.mean(0) > 0, h, jnp.nan) ** 2),
    "windows of rows": lambda p, h, y, t: jax.vmap(
        lambda at: jax.lax.dynamic_slice_in_dim(h, at, 2)
    )(jnp.array([0, 1])),
    "every other row of windows": lambda p, h, y, t: jax.lax.reduce_window(
        h, -jnp.inf, jax.lax.max, (1, 1, 2), (2, 1, 2), "VALID"
    ),
    "one less than their elements": lambda p, h, y, t: jnp.sum(h) / (h.size * 100 - 1),
    "whether there are some": lambda p, h, y, t: jnp.sum(t).astype(bool),
    "a sum of integers that is cut": lambda p, h, y, t: jax.lax.div(jnp.sum(t), 4),
}
signs_of = lambda h: jnp.broadcast_to(jnp.array([1.0, -1.0])[None, :, None], (3, 2, len(h) // 2))
halves_of = lambda y: y.reshape(2, -1)
scan_rows = lambda trip, start, rows: jax.lax.scan(lambda c, x: (trip(c, x), None), start, rows)[0]


def decayed(number_of_trips, base):
    for _ in range(number_of_trips):
        base = base * 0.9
    return base


@jax.custom_jvp
def itself(p):
    return p


TABLE = jnp.arange(1.0, 40.0)
OF_OTHER_ROWS |= {
    "noise in a loop": lambda p, h, y, t: (
        y + jax.lax.map(jax.random.normal, jax.random.split(jax.random.key(0), len(y)))
    ),
    "weights in a loop": lambda p, h, y, t: (
        y * jax.lax.map(lambda i: 1 / (i + 1.0), jnp.arange(len(y)))
    ),
    "a run with resets": lambda p, h, y, t: scan_rows(
        lambda c, x: jnp.where(x > 0, c + x, 0), 0.0, y
    ),
    "a sum of sums so far": lambda p, h, y, t: scan_rows(
        lambda c, x: (c[0] + x, c[1] + c[0]), (0.0, 0.0), y
    )[1],
    "twice what is carried": lambda p, h, y, t: scan_rows(lambda c, x: c + c + x, 0.0, y),
    "a sum that is turned": lambda p, h, y, t: scan_rows(
        lambda c, x: jnp.roll(c, 1) + x, jnp.zeros(6), h[:, 0]
    ),
    "a sum that is cut": lambda p, h, y, t: scan_rows(
        lambda c, x: c.at[0].set(0) + x, jnp.zeros(6), h[:, 0]
    ),
    "a sum that is taken away": lambda p, h, y, t: scan_rows(lambda c, x: x - c, 0.0, y),
    "signs that are multiplied": lambda p, h, y, t: halves_of(y) * signs_of(y).prod(0),
    "signs that are all above zero": lambda p, h, y, t: jnp.where(
        (signs_of(y) > 0).all(0), halves_of(y), 0
    ),
    "signs of a loop": lambda p, h, y, t: jax.lax.scan(
        lambda c, s: (c + jnp.sum(halves_of(y) * s), None), 0.0, signs_of(y)
    )[0],
    "sums at the places of halves": lambda p, h, y, t: jax.ops.segment_sum(
        y, jnp.repeat(jnp.arange(2), len(y) // 2), 2
    ),
    "a column by halves": lambda p, h, y, t: (
        h[:, 0].at[:, 0].set(jnp.repeat(jnp.array([1.0, -1.0]), len(h) // 2))
    ),
    "sums of chunks with signs": lambda p, h, y, t: (
        jax.lax.map(jnp.sum, halves_of(y)) @ jnp.array([1.0, -1.0])
    ),
    "a function of the sum of a chunk": lambda p, h, y, t: jax.lax.scan(
        lambda c, r: (c + jnp.tanh(jnp.sum(r)), None), 0.0, halves_of(y)
    )[0],
    "halves in a product": lambda p, h, y, t: jnp.vdot(
        halves_of(y), jnp.broadcast_to(p[:2, None], (2, len(y) // 2))
    ),
    "a count of a class": lambda p, h, y, t: (
        y / jax.ops.segment_sum(jnp.ones(len(y)), jnp.zeros(len(y), int), 1)[0]
    ),
    "a logarithm of a count": lambda p, h, y, t: y * jax.lax.cumlogsumexp(jnp.zeros(len(y)))[-1],
    "a spectrum of ones": lambda p, h, y, t: y * jnp.fft.fft(jnp.ones(len(y))).real,
    "another program of numbers": lambda p, h, y, t: (
        y * jax.jit(decayed, static_argnums=0)(len(y), p[0])
    ),
    "a table at their number": lambda p, h, y, t: y * TABLE[jnp.asarray(len(y))],
    "a table at a place in their number": lambda p, h, y, t: (
        y * TABLE[jnp.searchsorted(jnp.array([6, 9]), len(y))]
    ),
    "a table by a choice": lambda p, h, y, t: y * TABLE[jnp.where(jnp.asarray(len(y)) > 9, 0, 1)],
    "a column at their number": lambda p, h, y, t: jnp.take(h[:, 0], jnp.asarray(len(h) // 4), 1),
    "as many of the largest": lambda p, h, y, t: jax.lax.top_k(h[:, 0], len(h) // 4)[0].mean(-1),
    "as many columns": lambda p, h, y, t: jnp.split(h[:, 0], [len(h) // 4], axis=1)[0].mean(-1),
    "NaN by place": lambda p, h, y, t: jnp.nansum(jnp.where(jnp.arange(len(y)) < 2, jnp.nan, y)),
    "trips while two masks have some": lambda p, h, y, t: jax.lax.while_loop(
        lambda h: jnp.any(h[:, 0, 0] > 0.1) & jnp.any(h[:, 0, 1] > 0.1),
        lambda h: jnp.where((h[:, 0, 0] > 0.1)[:, None, None], h * 0.7, h),
        h,
    ),
    "a bound that falls": lambda p, h, y, t: jax.lax.while_loop(
        lambda c: jnp.any(c[0] > c[1]),
        lambda c: (jnp.where(c[0] > c[1], 0.95 * c[0], c[0]), c[1] * 0.8),
        (y, 1.0),
    )[0],
    "halves by two functions of one text": lambda p, h, y, t: jnp.concatenate(
        [
            jax.jit(lambda x, by=by: x * np.asarray(by))(half)
            for by, half in (
                (np.array([[1.0, 2.0]]), h[: len(h) // 2, 0, :2]),
                (np.array([[3.0, 1.0]]), h[len(h) // 2 :, 0, :2]),
            )
        ]
    ),
    "columns of a scope": lambda p, h, y, t: jax.named_scope("enc->dec")(
        lambda: h[:, 0, : len(h) // 4].mean(-1)
    )(),
}
halve_large = lambda h: jnp.where(h > 0.1, h * 0.7, h)
while_large = lambda y, goes_on, follow, start: jax.lax.while_loop(
    lambda c: jnp.any(c[0] > 0.1) & goes_on(c[1]),
    lambda c: (halve_large(c[0]), follow(c[0], c[1])),
    (y, start),
)[0]
OF_OTHER_ROWS |= {
    "trips while no row diverges": lambda p, h, y, t: while_large(
        y, lambda ok: ok, lambda y, ok: ok & jnp.all(y > 0.3), True
    ),
    "trips of a budget of all rows": lambda p, h, y, t: while_large(
        y, lambda used: used < 20, lambda y, used: used + jnp.sum(y > 0.1), 0
    ),
    "trips up to the longest row": lambda p, h, y, t: while_large(
        y, lambda i: i < jnp.max(t), lambda y, i: i + 1, 0
    ),
    "noise in a sum so far": lambda p, h, y, t: scan_rows(
        lambda c, x: c + x[0] + jax.random.normal(x[1]),
        0.0,
        (y, jax.random.split(jax.random.key(0), len(y))),
    ),
    "a penalty of the first trip": lambda p, h, y, t: scan_rows(
        lambda c, x: c + x[0] + (x[1] == 0) * 0.5, 0.0, (y, jnp.arange(len(y)))
    ),
    "a product of means": lambda p, h, y, t: jnp.sum(jnp.prod(h / len(h), -1)),
    "means times means": lambda p, h, y, t: (
        (h[:, 0] / len(h)).at[:, 0].multiply(h[:, 0, 1] / len(h))
    ),
    "windows of their number": lambda p, h, y, t: jax.lax.reduce_window(
        h[:, 0], 0.0, jax.lax.add, (1, len(h) // 4), (1, 1), [(0, 0), (0, len(h) // 4 - 1)]
    ),
    "padding of their number": lambda p, h, y, t: jax.lax.conv_general_dilated(
        h[:, :1], jnp.ones((1, 1, 2)), (1,), [(len(h) // 4, 4 - len(h) // 4)]
    ),
}
of_row = lambda h: jnp.arange(len(h)) % 3
params_of = lambda p: jnp.stack([jnp.outer(p, p), jnp.outer(p, jnp.sin(p))])  # [2, 6, 6]
chunks_of = lambda h: h[:, 0].reshape(2, -1, 6)
in_chunks = lambda f, p, h: jax.lax.map(lambda each: f(*each), (p, chunks_of(h)))
in_rows = lambda f, h: jax.lax.map(lambda each: f(*each), (h[:, 0], jnp.arange(len(h))))
by_half = lambda h: jnp.broadcast_to(jnp.arange(2)[:, None], (2, len(h) // 2))


def trips_of(row, number):
    return jax.lax.fori_loop(0, number, lambda i, c: jnp.tanh(c), row)


def halves_with(treat, h):
    """Each half of rows by itself, with the number of the half."""
    n = len(h) // 2
    return jnp.concatenate([treat(h[:n, 0], 0), treat(h[n:, 0], 1)])


OF_OTHER_ROWS |= {
    # at indices that depend on the place of a row
    "a column by place": lambda p, h, y, t: jax.vmap(lambda row, at: row.at[at].set(0))(
        h[:, 0], of_row(h)
    ),
    "one more by place": lambda p, h, y, t: jax.vmap(lambda row, at: row.at[at].add(1))(
        h[:, 0], of_row(h)
    ),
    "columns in a loop": lambda p, h, y, t: in_rows(lambda row, at: row[at % 3], h),
    "columns in a sum of a loop": lambda p, h, y, t: scan_rows(
        lambda c, x: c + x[0][x[1] % 3], 0.0, (h[:, 0], jnp.arange(len(h)))
    ),
    "columns by keys": lambda p, h, y, t: jax.lax.map(
        lambda x: x[0][jax.random.randint(x[1], (), 0, 3)],
        (h[:, 0], jax.random.split(jax.random.key(0), len(h))),
    ),
    "rows that are turned": lambda p, h, y, t: in_rows(jnp.roll, h),
    "a slice in a loop": lambda p, h, y, t: in_rows(
        lambda row, at: jax.lax.dynamic_update_slice(row, p[:1], (at % 3,)), h
    ),
    "a write in a loop": lambda p, h, y, t: in_rows(lambda row, at: row.at[at % 3].set(0), h),
    "a param in a loop": lambda p, h, y, t: in_rows(lambda row, at: row * p[at % 3], h),
    "a write into params": lambda p, h, y, t: in_rows(
        lambda row, at: row * jax.lax.dynamic_update_slice(p, p[:1], (at % 3,)), h
    ),
    "a sum of a table": lambda p, h, y, t: jax.lax.map(
        lambda x: x[0] * x[1].sum(), (y, jnp.outer(jnp.arange(1.0, len(y) + 1), p))
    ),
    "classes by place in a loop": lambda p, h, y, t: scan_rows(
        lambda c, x: c.at[x[1]].add(x[0]), jnp.zeros(3), (y, of_row(h))
    ),
    "sums at other places": lambda p, h, y, t: scan_rows(
        lambda c, x: jnp.zeros(6).at[(jnp.arange(6) + 1) % 6].add(c) + x, jnp.zeros(6), h[:, 0]
    ),
    "a sum that is written": lambda p, h, y, t: scan_rows(
        lambda c, x: (x * 0).at[1].add(c[0]), jnp.zeros(6), h[:, 0]
    ),
    "what the last row of a loop writes": lambda p, h, y, t: scan_rows(
        lambda c, x: c.at[x[1]].set(x[0]), jnp.zeros(9), (y, t[:, 0])
    ),
    "a sum that is scaled": lambda p, h, y, t: scan_rows(
        lambda c, x: c.at[x[1]].multiply(x[0]), jnp.zeros(9), (y, t[:, 0])
    ),
    # as many trips as the place says
    "trips by place": lambda p, h, y, t: jax.vmap(trips_of)(h, jnp.arange(len(h))),
    "trips that are drawn": lambda p, h, y, t: jax.vmap(trips_of)(
        h, jax.random.randint(jax.random.key(0), (len(h),), 1, 6)
    ),
    "trips by half": lambda p, h, y, t: jax.vmap(trips_of)(chunks_of(h), jnp.array([1, 2])),
    "trips in a loop": lambda p, h, y, t: in_rows(trips_of, h),
    "trips that are counted": lambda p, h, y, t: (
        y
        * jax.vmap(
            lambda n: jax.lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] / 2), (0, 1.0)
            )[1]
        )(of_row(h))
    ),
    # halves with params of their own
    "halves by a stack": lambda p, h, y, t: (lambda w: halves_with(lambda x, at: x @ w[at], h))(
        params_of(p)
    ),
    "halves by parts of params": lambda p, h, y, t: halves_with(
        lambda x, at: x * p[None, at : at + 1], h
    ),
    "halves by keys": lambda p, h, y, t: (
        lambda keys: halves_with(lambda x, at: x * jax.random.normal(keys[at]), h)
    )(jax.random.split(jax.random.key(0), 2)),
    "four parts": lambda p, h, y, t: jnp.concatenate(
        [part * p[at] for at, part in enumerate(jnp.split(h, 4))]
    ),
    "halves by other columns": lambda p, h, y, t: halves_with(
        lambda x, at: x[:, : 6 - 3 * at : 2 - at], h
    ),
    # chunks in a loop
    "chunks with params": lambda p, h, y, t: in_chunks(lambda w, x: x @ w, params_of(p), h),
    "chunks with sums of params": lambda p, h, y, t: in_chunks(
        lambda w, x: x * w.sum(), params_of(p), h
    ),
    "chunks with an index": lambda p, h, y, t: in_chunks(
        lambda at, x: x @ params_of(p)[at], jnp.arange(2), h
    ),
    "chunks with keys": lambda p, h, y, t: in_chunks(
        lambda key, x: x * jax.random.normal(key), jax.random.split(jax.random.key(0), 2), h
    ),
    "chunks with branches": lambda p, h, y, t: in_chunks(
        lambda at, x: jax.lax.cond(at == 0, jnp.sin, jnp.cos, x), jnp.arange(2), h
    ),
    "chunks that are left out": lambda p, h, y, t: in_chunks(
        lambda is_kept, x: jnp.where(is_kept, x, 0), jnp.array([True, False]), h
    ),
    # groups of rows
    "every other of a half": lambda p, h, y, t: jnp.sum(y[: len(y) // 2 : 2]),
    "the first of pairs of a half": lambda p, h, y, t: jnp.sum(
        jnp.stack([y, 2 * y], 1).ravel()[: len(y) : 2]
    ),
    "every other of four": lambda p, h, y, t: jnp.sum(y[:4:2]),
    "pairs that are turned": lambda p, h, y, t: jnp.sum(
        jnp.roll(y.reshape(-1, 2), 1, 1).ravel()[: len(y) // 2]
    ),
    "halves side by side": lambda p, h, y, t: jnp.sum(
        jnp.concatenate([halves_of(y), 2 * halves_of(y)], 1).ravel()[: len(y)]
    ),
    # at indices that are others for each half
    "an element by half": lambda p, h, y, t: jnp.take_along_axis(
        chunks_of(h), by_half(h)[..., None], 2
    ),
    "an element that is put by half": lambda p, h, y, t: jax.vmap(
        jax.vmap(lambda row, at: row.at[at].set(0))
    )(chunks_of(h), by_half(h)),
    "a half that is written": lambda p, h, y, t: chunks_of(h).at[0].set(p),
    "another number in each half": lambda p, h, y, t: (
        chunks_of(h).at[..., 0].set(jnp.broadcast_to(p[:2, None], (2, len(h) // 2)))
    ),
}
OWN_GROWTH = (
    "a product of means",
    "one less than their elements",
    "a quotient of counts",
    "all pairs of a row",
)


largest_of = lambda y: jax.lax.stop_gradient(jnp.max(y))
BY_LARGEST = {
    "a quotient": lambda p, h, y, t: jnp.sum(y) / largest_of(y),
    "a product": lambda p, h, y, t: jnp.sum(y) * largest_of(y),
    "a range": lambda p, h, y, t: jnp.sum(y) / jax.lax.stop_gradient(jnp.ptp(y)),
    "a product with params": lambda p, h, y, t: h * (largest_of(y) * p[:3] @ p[3:]),
    "a product with a sum": lambda p, h, y, t: jnp.vdot(h.sum((0, 1)), largest_of(y) * p),
    "random numbers": lambda p, h, y, t: (
        y * jax.random.gamma(jax.random.key(0), largest_of(jnp.abs(y)))
    ),
    "an operation without a rule": lambda p, h, y, t: (
        y * jnp.linalg.qr(largest_of(y) * jnp.outer(p, p))[0][0, 0]
    ),
}


@pytest.mark.parametrize("name", BY_LARGEST)
def test_a_maximum_of_all_rows_is_taken_to_cancel_and_no_operation_hides_it(name):
    (found,) = read(BY_LARGEST[name])
    assert found.assumed.what.startswith("a maximum over rows is taken to cancel"), found


def test_an_index_of_the_largest_grows_with_no_element():
    (found,) = read(lambda p, h, y, t: jnp.argmax(h / len(h), -1))
    assert found.growth == 1


@pytest.mark.parametrize("name", OF_OTHER_ROWS)
def test_what_other_rows_or_their_number_change_is_refused_or_a_doubt(name):
    (found,) = read(OF_OTHER_ROWS[name])
    is_known = found.kind is not Kind.MIXED and not found.why and found.growth is not None
    if name in OWN_GROWTH:  # neither a sum nor a mean
        assert found.growth not in (pytest.approx(1, rel=1e-6), pytest.approx(1 / RATIO, rel=1e-6))
    else:
        assert not is_known or (found.kind is Kind.ROWS and found.growth != 1), found


# --- the table --------------------------------------------------------------------------------------------------------

# Primitives of JAX without a rule: what they make of rows is a doubt.
WITHOUT_RULE = {
    "collectives, of which a model has none outside a step": {"ragged_all_to_all"},
    "tokens and references": {"after_all", "create_token", "get", "swap"},
    "calls, which are read as such": {
        *(
            "call",
            "closed_call",
            "core_call",
            "custom_jvp_call",
            "custom_vjp_call",
            "eval_jaxpr",
            "jit",
            "remat2",
        ),
    },
    "of derivatives and of other operations alone": {"custom_lin", "empty2"},
    "functions of a user": {"reduce"},
    "rare": {"rng_bit_generator", "rng_uniform", "select_and_scatter", "tridiagonal_solve"},
}


def test_every_primitive_of_jax_has_a_rule_or_is_listed_as_one_without():
    module = jax.extend.core.primitives
    names = {getattr(module, name).name for name in dir(module) if name.endswith("_p")}
    missing = names - set(RULES) - set(SPECIAL)
    assert missing <= set().union(*WITHOUT_RULE.values()), (
        "a new primitive needs a rule, or a line in the list"
    )


def test_every_rule_is_that_of_one_kind_of_operation():
    assert set(RULES).isdisjoint(SPECIAL)
    assert set().union(*WITHOUT_RULE.values()).isdisjoint(RULES)
