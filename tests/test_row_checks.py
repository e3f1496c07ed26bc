"""Models that mix rows and losses that are no sums over rows are refused before anything is compiled; the others are taken."""

import contextlib
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpar
from jaxpar.context_parallel import (
    gather_sequence,
    heads_to_sequence,
    max_over_sequence,
    num_parts,
    places,
    sequence_to_heads,
    sum_over_sequence,
)
from jaxpar.mesh import abstract_mesh
from jaxpar.step.position_checks import check_positions
from jaxpar.step.purity import ImpureError, check_pure
from jaxpar.step.row_checks import check_rows
from tests.support.oracle import assert_same
from tests.support.tiers import quick

RNG = np.random.default_rng(0)
PARAMS = {
    "outer": {"w": RNG.normal(size=(3, 4)), "out": RNG.normal(size=(4, 2))},
    "layers": {"w": RNG.normal(size=(2, 4, 4)) / 2},
}
BATCH = {
    "x": RNG.normal(size=(16, 3)),
    "y": RNG.normal(size=(16, 2)),
    "number": np.arange(16, dtype=np.int32),
}
FEW = jax.tree.map(lambda a: a[:8], BATCH)


def loss(outputs, batch):
    loss_sum, weight_sum = jaxpar.losses.squared_error(outputs[0], batch["y"])
    return loss_sum + 0.1 * jnp.sum(outputs[1]), weight_sum


def model(
    layer, *, embed=lambda batch: jnp.zeros(()), change=lambda h, aux: h, head=lambda aux, h: aux
):
    """A model whose layers make ``aux`` of params, of ``aux`` and of h, and may change h by it."""
    return jaxpar.LayeredModel(
        lambda outer, batch: {"h": batch["x"] @ outer["w"], "aux": embed(batch)},
        lambda params, x: {
            "h": jnp.tanh(change(x["h"], x["aux"]) @ params["w"]),
            "aux": layer(params["w"], x["aux"], x["h"]),
        },
        lambda outer, x: (x["h"] @ outer["out"], head(x["aux"], x["h"])),
    )


def count_experts(aux, h, weight):
    return aux + jnp.zeros(4).at[jnp.argmax(h, axis=-1)].add(weight)


def over_rows(add):
    """A loop over the rows, which carries what it adds."""
    return lambda w, aux, h: jax.lax.scan(lambda aux, row: (add(aux, row), None), aux, h)[0]


def trips(h, limit):
    """How often each number is halved until it is below the limit."""
    halved = lambda a: jax.lax.while_loop(
        lambda s: s[0] > limit, lambda s: (s[0] / 2, s[1] + 1), (a, 0.0)
    )[1]
    return jax.vmap(halved)(jnp.abs(h).reshape(-1))


def noise(w, key, h):
    return jax.random.split(key)[0]


drop = lambda h, key: h * jax.random.bernoulli(key, 0.5, (4,))[None]
ignored = lambda aux, h: jnp.zeros(())

TAKEN = {
    "a sum": model(lambda w, aux, h: aux + jnp.sum(h**2)),
    "a mean times the rows": model(lambda w, aux, h: aux + jnp.mean(h**2) * len(h)),
    "a product that adds up rows": model(lambda w, aux, h: aux + jnp.einsum("bd,bd->", h, h) / 4),
    "a sum in a loop": model(
        lambda w, aux, h: jax.lax.fori_loop(0, 3, lambda i, a: a + i * jnp.sum(h), aux)
    ),
    "a sum in a branch": model(
        lambda w, aux, h: jax.lax.cond(w[0, 0] > -9, lambda: aux + jnp.sum(h), lambda: aux)
    ),
    "a sum in a while loop": model(
        lambda w, aux, h: jax.lax.while_loop(
            lambda s: s[0] < 3 + w[0, 0], lambda s: (s[0] + 1, s[1] + jnp.sum(h)), (0.0, aux)
        )[1]
    ),
    "a sum under jit, remat and of vmap": model(
        jax.checkpoint(jax.jit(lambda w, aux, h: aux + jnp.sum(jax.vmap(jax.nn.softmax)(h)))),
    ),
    "a sum of what a loop over rows makes": model(
        lambda w, aux, h: aux + jnp.sum(jax.lax.map(jnp.max, h))
    ),
    "a sum of numbers that each loop as long as they say": model(
        lambda w, aux, h: aux + jnp.sum(trips(h, 0.1))
    ),
    "a sum of what a loop over rows chooses": model(
        lambda w, aux, h: (
            aux
            + jnp.sum(jax.lax.map(lambda row: jax.lax.cond(row[0] > 0, jnp.sum, jnp.max, row), h))
        )
    ),
    "counts of experts": model(
        lambda w, aux, h: count_experts(aux, h, 1.0), embed=lambda batch: jnp.zeros(4)
    ),
    "a sum for each layer": model(
        lambda w, aux, h: (aux[0].at[aux[1]].set(jnp.sum(h)), aux[1] + 1),
        embed=lambda batch: (jnp.zeros(2), 0),
        head=lambda aux, h: aux[0],
    ),
    "a sum that a branch on rows passes on": model(
        lambda w, aux, h: jax.lax.cond(
            jnp.any(h > 0), lambda a: (h, a), lambda a: (2 * h, a), aux + jnp.sum(h)
        )[1]
    ),
    "a mean that is not read": model(lambda w, aux, h: aux + jnp.mean(h), head=ignored),
    "a mean that layers forget": model(
        lambda w, aux, h: jnp.zeros(()), embed=lambda batch: jnp.mean(batch["x"])
    ),
    "params that scale rows": model(
        lambda w, aux, h: aux + jnp.sum(w**2), change=lambda h, aux: h * (1 + aux), head=ignored
    ),
    "params for each row": model(
        lambda w, aux, h: aux + jnp.sum(w**2), head=lambda aux, h: aux * len(h)
    ),
    "a key that is one number": model(
        noise, embed=lambda batch: jax.random.key(0), change=drop, head=ignored
    ),
    "the shape of rows alone": model(lambda w, aux, h: aux + jnp.sum(jnp.zeros_like(h))),
    "the number of rows": model(lambda w, aux, h: aux + jnp.float32(len(h))),
}
REFUSED = {
    "a mean": model(lambda w, aux, h: aux + jnp.mean(h**2)),
    "a mean of products": model(lambda w, aux, h: aux + jnp.einsum("bd,bd->", h, h) / len(h)),
    "a mean by weights": model(
        lambda w, aux, h: aux + jnp.sum(h * jnp.full((len(h), 1), 1 / len(h)))
    ),
    "a mean by the sum of a mask": model(lambda w, aux, h: aux + jnp.sum(h) / jnp.sum(h > 0)),
    "a product of means": model(
        lambda w, aux, h: aux + jnp.sum(jax.nn.softmax(h).mean(0) * (h > 0).mean(0))
    ),
    "a mean in a loop": model(
        lambda w, aux, h: jax.lax.fori_loop(0, 3, lambda i, a: a + i * jnp.mean(h), aux)
    ),
    "a mean in a branch": model(
        lambda w, aux, h: jax.lax.cond(w[0, 0] > -9, lambda: aux + jnp.mean(h), lambda: aux)
    ),
    "a mean in a while loop": model(
        lambda w, aux, h: jax.lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + jnp.mean(h)), (0, aux)
        )[1]
    ),
    "a loop as long as a row says": model(
        lambda w, aux, h: jax.lax.while_loop(
            lambda s: s[0] < 9 + 9 * h[0, 0], lambda s: (s[0] + 1, s[1] + 1), (0, aux)
        )[1]
    ),
    "a sum of numbers that loop as long as the number of rows says": model(
        lambda w, aux, h: aux + jnp.sum(trips(h, 1 / len(h)))
    ),
    "a mean under remat": model(jax.checkpoint(lambda w, aux, h: aux + jnp.mean(h))),
    "shares of experts": model(
        lambda w, aux, h: count_experts(aux, h, 1 / len(h)), embed=lambda batch: jnp.zeros(4)
    ),
    "a maximum": model(lambda w, aux, h: aux + jnp.max(h)),
    "the last of a loop over rows": model(over_rows(lambda aux, row: aux * 0.5 + jnp.sum(row))),
    "a branch on a row": model(
        lambda w, aux, h: jax.lax.cond(h[0, 0] > 0, lambda: aux + jnp.sum(h), lambda: aux)
    ),
    "a sum that is squared": model(lambda w, aux, h: aux + jnp.sum(h), head=lambda aux, h: aux**2),
    "a sum that scales rows": model(
        lambda w, aux, h: aux + jnp.sum(h), change=lambda h, aux: h * (1 + aux), head=ignored
    ),
    "a sum beside a number": model(
        lambda w, aux, h: aux + jnp.sum(h), embed=lambda batch: jnp.ones(())
    ),
    "a mean of the batch": model(lambda w, aux, h: aux, embed=lambda batch: jnp.mean(batch["x"])),
    "a mean without a gradient": model(lambda w, aux, h: jax.lax.stop_gradient(aux + jnp.mean(h))),
    "a key of the first row": model(
        noise,
        embed=lambda batch: jax.random.fold_in(jax.random.key(0), batch["number"][0]),
        change=drop,
        head=ignored,
    ),
    "an integer of the first row": model(
        lambda w, aux, h: aux,
        embed=lambda batch: batch["number"][0],
        change=lambda h, aux: h * aux,
        head=ignored,
    ),
    "params that are added once": model(lambda w, aux, h: aux + jnp.sum(w**2)),
}
OF_X = r"(must treat each row of a batch on its own|must be sums over the rows).*; got .* at .*(test_row_checks|reductions)\.py"


@pytest.mark.parametrize("name", TAKEN)
def test_a_leaf_that_is_the_same_or_a_sum_is_taken(name):
    check_rows(TAKEN[name], loss, PARAMS, BATCH, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_leaf_that_depends_on_how_rows_are_split_is_refused(name):
    with pytest.raises(ValueError, match=OF_X):
        check_rows(REFUSED[name], loss, PARAMS, BATCH, 4)


def total(model, *parts):
    return sum(float(loss(model.apply(PARAMS, part), part)[0]) for part in parts)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", quick([*TAKEN, *REFUSED], "params that are added once"))
def test_what_is_refused_does_change_with_the_split_and_what_is_taken_does_not(x64, name):
    model = (TAKEN | REFUSED)[name]
    parts = [
        jax.tree.map(lambda a, part=part: a[part], BATCH) for part in (slice(6), slice(6, None))
    ]
    differs = abs(total(model, *parts) / total(model, BATCH) - 1)
    assert differs > 1e-6 if name in REFUSED else differs < 1e-12


# --- in steps -------------------------------------------------------------------------------------------------------------

RUNS = {
    "microbatches": ({}, {"num_microbatches": 2}),
    "replicas": ({"data": 2}, {"overlap_grad_reduce": True}),
    "1f1b": ({"stage": 2}, {"num_microbatches": 2}),
    "mpmd": ({"stage": 2}, {"num_microbatches": 2, "executor": "mpmd"}),
}
BY_ROW = model(
    lambda w, aux, h: aux + jnp.mean(h**2, axis=-1), embed=lambda batch: jnp.zeros(len(batch["x"]))
)


@pytest.mark.parametrize("name", quick(RUNS, "replicas"))
def test_every_executor_refuses_a_mean_and_takes_a_number_for_each_row(x64, name):
    axes, settings = RUNS[name]
    mesh = jaxpar.make_mesh(**axes)
    with pytest.raises(ValueError, match=r"Make a term that is a mean a sum over rows"):
        jaxpar.value_and_grad(REFUSED["a mean"], loss, mesh, **settings)(PARAMS, BATCH)
    got = jaxpar.value_and_grad(BY_ROW, loss, mesh, **settings)(PARAMS, BATCH)
    mean = lambda params: jnp.divide(*loss(BY_ROW.apply(params, BATCH), BATCH))
    assert_same(got, jax.value_and_grad(mean)(PARAMS))


@pytest.mark.full
def test_one_part_splits_nothing_and_takes_all(x64):
    mean = REFUSED["a mean"]
    got = jaxpar.value_and_grad(mean, loss, jaxpar.make_mesh(stage=2))(PARAMS, BATCH)
    assert_same(
        got,
        jax.value_and_grad(lambda params: jnp.divide(*loss(mean.apply(params, BATCH), BATCH)))(
            PARAMS
        ),
    )


def in_layers_of_its_own(step):
    """A list of layers; x becomes another tree after the first."""
    first = lambda params, h: (h @ params["w"], jnp.zeros(()))
    return jaxpar.LayeredModel(
        lambda outer, batch: batch["x"] @ outer["w"],
        [first, lambda params, x: (jnp.tanh(x[0] @ params["w"]), step(x[1], x[0]))],
        lambda outer, x: (x[0] @ outer["out"], x[1]),
    )


def test_a_leaf_that_only_later_layers_have_is_checked():
    params = PARAMS | {"layers": [{"w": w} for w in PARAMS["layers"]["w"]]}
    check_rows(in_layers_of_its_own(lambda aux, h: aux + jnp.sum(h)), loss, params, BATCH, 2)
    with pytest.raises(ValueError, match="Make a term that is a mean a sum over rows"):
        check_rows(in_layers_of_its_own(lambda aux, h: aux + jnp.mean(h)), loss, params, BATCH, 2)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_that_draw_the_numbers_of_all_rows_at_once_are_told(kind):
    """JAX draws those of a batch of keys of XLA's generator from the first of them."""
    keys = jax.random.key_data(jax.random.split(jax.random.key(1, impl=kind), 64))

    def dropped(outer, batch):
        keys = jax.random.wrap_key_data(batch["keys"], impl=kind)
        own = jax.vmap(jax.random.split)(keys)[:, 1]
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(own)
        return jnp.where(kept, batch["x"], 0)

    model = jaxpar.LayeredModel(dropped, README_MODEL.layer, README_MODEL.head)
    told = pytest.warns(UserWarning, match=r"the numbers of a row depend on .* key<u?rbg>")
    with contextlib.nullcontext() if kind == "threefry2x32" else told:
        check_rows(model, plus(lambda o, b: 0), README, README_BATCH | {"keys": keys}, 8)


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean])
def test_a_model_that_takes_two_numbers_of_rows_only_is_checked_with_these(reduce):
    def of_known_rows(w, aux, h):
        assert len(h) in (4, 16)
        return aux + reduce(h)

    known = model(of_known_rows)
    if reduce is jnp.sum:
        check_rows(known, loss, PARAMS, BATCH, 4)
    else:
        with pytest.raises(ValueError, match="Make a term that is a mean a sum over rows"):
            check_rows(known, loss, PARAMS, BATCH, 4)


# --- the sums of a loss ---------------------------------------------------------------------------------------------------

WEIGHTS = {"w": RNG.normal(size=(3, 2)), "scale": np.float64(0.3)}
MASKED = BATCH | {"mask": np.where(np.arange(16) < 5, 1.0, np.arange(16) % 2)[:, None]}


def forward(params, batch):
    """Any function, with outputs that have no rows beside those that have."""
    return {
        "h": batch["x"] @ params["w"],
        "decay": jnp.sum(params["w"] ** 2),
        "scale": params["scale"],
    }


def squares(outputs, batch):
    return (outputs["h"] - batch["y"]) ** 2 * batch["mask"]


def number(batch):
    return jnp.float32(len(batch["y"]))


TAKEN_LOSSES = {
    "a sum and a number": lambda o, b: (jnp.sum(squares(o, b)), number(b)),
    "a sum and its weights": lambda o, b: (jnp.sum(squares(o, b)), jnp.sum(b["mask"])),
    "two means": lambda o, b: (jnp.mean(squares(o, b)), jnp.mean(b["mask"])),
    "a mean and one": lambda o, b: (jnp.mean(squares(o, b)), 1.0),
    "a mean times the rows": lambda o, b: (jnp.mean(squares(o, b)) * len(b["y"]), number(b)),
    "params that scale": lambda o, b: (jnp.sum(squares(o, b)) * o["scale"], number(b)),
    "params in each row": lambda o, b: (jnp.sum(squares(o, b) + o["decay"]), number(b)),
    "params times the rows": lambda o, b: (
        jnp.sum(squares(o, b)) + o["decay"] * len(b["y"]),
        number(b),
    ),
    "a part of the batch": lambda o, b: (jnp.sum(squares(o, b)), jnp.float32(len(b["y"]) / 16)),
    "sums of integers": lambda o, b: (
        jnp.sum(squares(o, b)),
        number(b),
        {"n": jnp.sum(b["number"]), "a": len(b["y"])},
    ),
}
SUMS = "loss_sum and weight_sum must be sums over the rows"
FURTHER = "each sum of a loss must be one over the rows .*; got 'found', "
REFUSED_LOSSES = {
    "one": (
        lambda o, b: (jnp.sum(squares(o, b)), 1.0),
        f"{SUMS}.*loss_sum a sum over rows, and weight_sum the same for any number of rows. Return jnp.sum of the losses",
    ),
    "a mean": (
        lambda o, b: (jnp.mean(squares(o, b)), number(b)),
        f"{SUMS}.*a mean over rows, and .* a multiple of the",
    ),
    "a mean of weights": (
        lambda o, b: (jnp.sum(squares(o, b)), jnp.mean(b["mask"])),
        f"{SUMS}.*weight_sum a mean over",
    ),
    "a masked mean": (
        lambda o, b: (jnp.sum(squares(o, b)) / jnp.sum(b["mask"]), 1.0),
        f"{SUMS}.*loss_sum no sum over rows: it makes of a sum over rows what is no sum .*div at .*test_row_checks.py",
    ),
    "params once": (
        lambda o, b: (jnp.sum(squares(o, b)) + o["decay"], number(b)),
        f"{SUMS}.*it adds to a sum over rows what is none.* multiply a penalty of params by weight_sum",
    ),
    "a mean beside": (
        lambda o, b: (jnp.sum(squares(o, b)), number(b), {"found": jnp.mean(o["h"])}),
        f"{FURTHER}a mean over rows, and weight_sum, a multiple of the number of rows. Return jnp.sum of it",
    ),
    "a number beside": (
        lambda o, b: (jnp.sum(squares(o, b)), number(b), {"found": 0.1}),
        f"{FURTHER}the same for any",
    ),
    "a maximum beside": (
        lambda o, b: (jnp.sum(squares(o, b)), number(b), {"found": jnp.max(o["h"])}),
        f"{FURTHER}no sum over rows: a maximum over rows .reduce_max at",
    ),
}


@pytest.mark.parametrize("name", TAKEN_LOSSES)
def test_a_loss_that_returns_sums_is_taken(name):
    check_rows(forward, TAKEN_LOSSES[name], WEIGHTS, MASKED, 4)


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_a_loss_that_returns_other_than_sums_is_refused(name):
    refused, message = REFUSED_LOSSES[name]
    with pytest.raises(ValueError, match=message):
        check_rows(forward, refused, WEIGHTS, MASKED, 4)
    check_rows(forward, refused, WEIGHTS, MASKED, 1)


@pytest.mark.parametrize("name", [*TAKEN_LOSSES, *REFUSED_LOSSES])
def test_the_ratios_of_a_refused_loss_change_with_the_split_and_those_of_others_do_not(x64, name):
    given = TAKEN_LOSSES[name] if name in TAKEN_LOSSES else REFUSED_LOSSES[name][0]

    def ratios(*parts):
        made = [given(forward(WEIGHTS, part), part) for part in parts]
        loss_sum, weight_sum, *sums = jax.tree.map(lambda *each: sum(map(float, each)), *made)
        return np.array([total / weight_sum for total in (loss_sum, *jax.tree.leaves(sums))])

    halves = [
        jax.tree.map(lambda a, part=part: a[part], MASKED) for part in (slice(8), slice(8, None))
    ]
    differs = np.max(abs(ratios(*halves) / ratios(MASKED) - 1))
    assert differs > 1e-6 if name in REFUSED_LOSSES else differs < 1e-6


def test_a_step_checks_the_sums_of_its_loss_before_it_is_compiled():
    refused, message = REFUSED_LOSSES["one"]
    mesh = jaxpar.make_mesh(data=2)
    with pytest.raises(ValueError, match=message):
        jaxpar.value_and_grad(forward, refused, mesh)(WEIGHTS, MASKED)


# --- a loss that is a sum plus something of the batch -----------------------------------------------------------------

README = {"outer": RNG.normal(size=(8, 1)), "layers": RNG.normal(size=(3, 8, 8)) / 3}
README_BATCH = {
    "x": RNG.normal(size=(64, 8)),
    "y": RNG.normal(size=(64, 1)),
    "part": np.arange(64) % 4,
}
README_MODEL = jaxpar.LayeredModel(
    lambda outer, batch: batch["x"], lambda w, x: x + jnp.tanh(x @ w), lambda outer, x: x @ outer
)


def z(o):
    return jax.nn.logsumexp(o, axis=-1)


PLUS = {
    "a mean": lambda o, b: 5 * jnp.mean(o**2),
    "a z-loss that is a mean": lambda o, b: 10 * jnp.mean(z(o) ** 2),
    "a maximum": lambda o, b: jnp.max(jnp.abs(o)),
    "a deviation": lambda o, b: jnp.std(o),
    "a variance": lambda o, b: jnp.var(o),
    "a square of a sum": lambda o, b: jnp.sum(o) ** 2,
    "a logarithm of a sum": lambda o, b: jax.nn.logsumexp(o),
    "a penalty of the mean": lambda o, b: jnp.square(jnp.mean(o) - 0.5),
    "a contrast with the other rows": lambda o, b: -jnp.trace(jax.nn.log_softmax(o @ o.T)),
    "an entropy of the mean": lambda o, b: (
        -jnp.sum(jax.nn.softmax(o).mean(0) * jnp.log(jax.nn.softmax(o).mean(0)))
    ),
    "a number": lambda o, b: 0.1,
    "neighbours": lambda o, b: jnp.sum((o[1:] - o[:-1]) ** 2),
    "a mean of each class": lambda o, b: jnp.sum(
        (jnp.zeros(4).at[b["part"]].add(o[:, 0]) / jnp.zeros(4).at[b["part"]].add(1.0)) ** 2
    ),
    "a mean without a gradient": lambda o, b: jax.lax.stop_gradient(jnp.mean(o)),
}
RIGHT = {
    "a sum": lambda o, b: 5 * jnp.sum(o**2),
    "a z-loss": lambda o, b: 10 * jnp.sum(z(o) ** 2),
    "a mean of each row": lambda o, b: jnp.sum(jnp.mean(o**2, axis=-1)),
    "a maximum of each row": lambda o, b: jnp.sum(jnp.max(jnp.abs(o), axis=-1)),
    "a deviation of each row": lambda o, b: jnp.sum(jnp.std(o, axis=-1)),
    "a mean times the rows": lambda o, b: len(o) * jnp.mean(o),
    "a number for each row": lambda o, b: 0.1 * len(o),
    "a share of right rows": lambda o, b: jnp.sum(
        jnp.where(b["part"] == 1, jnp.log1p(o[:, 0] ** 2), 0)
    ),
}


def plus(term):
    def with_term(outputs, batch):
        loss_sum, weight_sum = jaxpar.losses.squared_error(outputs, batch["y"])
        return loss_sum + term(outputs, batch), weight_sum

    return with_term


@pytest.mark.parametrize("name", PLUS)
def test_a_sum_plus_something_of_the_batch_is_refused(name):
    with pytest.raises(
        ValueError, match=f"{SUMS}.*got loss_sum no sum over rows: .* at .*test_row_checks.py"
    ):
        check_rows(README_MODEL, plus(PLUS[name]), README, README_BATCH, 8)


@pytest.mark.parametrize("name", RIGHT)
def test_a_sum_plus_a_sum_is_taken(name):
    check_rows(README_MODEL, plus(RIGHT[name]), README, README_BATCH, 8)


@pytest.mark.parametrize("num_parts", [2, 8, 32, 64])
def test_a_weight_with_a_least_value_is_refused_where_a_microbatch_has_fewer_rows(num_parts):
    loss = lambda o, b: (jnp.sum((o - b["y"]) ** 2), jnp.maximum(jnp.float32(len(o)), 20))
    if num_parts == 2:
        check_rows(README_MODEL, loss, README, README_BATCH, num_parts)
    else:
        with pytest.raises(
            ValueError, match=f"{SUMS}.*a sum over rows times what depends on their number"
        ):
            check_rows(README_MODEL, loss, README, README_BATCH, num_parts)


# --- layers that mix rows ---------------------------------------------------------------------------------------------


def of_row(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def of_batch(x):
    return (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1e-5)


def normed(norm, part):
    functions = {
        "embed": lambda outer, batch: batch["x"],
        "layer": lambda w, x: x + jnp.tanh(x @ w),
        "head": lambda outer, x: x @ outer,
    }
    plain = functions[part]
    return jaxpar.LayeredModel(**functions | {part: lambda params, x: norm(plain(params, x))})


@pytest.mark.parametrize("part", ["embed", "layer", "head"])
def test_a_part_that_normalizes_over_the_batch_is_refused_and_one_that_does_so_in_rows_is_taken(
    part,
):
    check_rows(normed(of_row, part), plus(lambda o, b: 0), README, README_BATCH, 8)
    message = f"{part} must treat each row of a batch on its own.*got one that mixes them.*sub at .*test_row_checks.py"
    for norm in (of_batch, lambda x: x - x.mean(0)):
        with jax.numpy_rank_promotion("allow"), pytest.raises(ValueError, match=message):
            check_rows(normed(norm, part), plus(lambda o, b: 0), README, README_BATCH, 8)


def test_a_plain_function_that_normalizes_over_the_batch_is_refused():
    model = normed(of_batch, "layer").apply
    with pytest.raises(ValueError, match="model must treat each row of a batch on its own"):
        check_rows(model, plus(lambda o, b: 0), README, README_BATCH, 8)


def test_rows_that_are_mixed_on_no_way_to_the_loss_are_taken():
    model = jaxpar.LayeredModel(
        lambda outer, batch: {"h": batch["x"], "seen": batch["x"]},
        lambda w, x: {"h": x["h"] + jnp.tanh(x["h"] @ w), "seen": of_batch(x["seen"])},
        lambda outer, x: x["h"] @ outer,
    )
    check_rows(model, plus(lambda o, b: 0), README, README_BATCH, 8)


# --- what is in doubt -------------------------------------------------------------------------------------------------


def by_part(outputs, batch):
    """Rows are sorted, and put back."""
    order = jnp.argsort(batch["part"])
    return outputs[order][jnp.argsort(order)]


def sorted_loss(treat):
    return lambda o, b: jaxpar.losses.squared_error(treat(o, b), b["y"])


def test_what_is_not_known_is_taken_with_one_warning_that_names_the_line():
    with pytest.warns(
        UserWarning, match="not known: loss: .* at .*test_row_checks.py.*jaxpar.check_split"
    ) as found:
        check_rows(README_MODEL, sorted_loss(by_part), README, README_BATCH, 8)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda o, b: jnp.sum(o[b["part"][0]]), "reads one row|moves rows|not known"),
        (lambda o, b: jnp.sum(o) + 1e-6, "a small number is added"),
        (
            lambda o, b: jnp.sum(jnp.where(len(o) > 8, o**2, o)),
            "which case is chosen depends on the number of rows",
        ),
    ],
)
def test_a_loss_that_may_be_wrong_is_taken_with_a_warning(term, message):
    with pytest.warns(UserWarning, match=f"not known: loss: .*{message}"):
        check_rows(README_MODEL, plus(term), README, README_BATCH, 8)


def test_a_weight_that_is_kept_from_0_is_taken_with_a_warning():
    loss = lambda o, b: (
        jnp.sum((o - b["y"]) ** 2),
        jnp.maximum(jnp.sum(b["part"] > 0), 1).astype(jnp.float32),
    )
    with pytest.warns(UserWarning, match="not known: loss: a sum over rows is kept from 0 .max at"):
        check_rows(README_MODEL, loss, README, README_BATCH, 8)


def test_a_weight_of_which_the_growth_with_the_rows_is_not_known_is_taken_with_a_warning():
    loss = lambda o, b: (jnp.sum((o - b["y"]) ** 2), jnp.cbrt(jnp.float32(len(o))))
    with pytest.warns(
        UserWarning,
        match="not known: loss: how weight_sum depends on the number of rows. It is taken",
    ):
        check_rows(README_MODEL, loss, README, README_BATCH, 8)


def test_what_needs_all_rows_is_to_be_put_into_the_batch():
    loss = lambda o, b: (jnp.sum((o - b["y"].mean(0)[None]) ** 2), jnp.float32(len(o)))
    with pytest.raises(
        ValueError,
        match="counts of classes or a mean to subtract, compute before the step and put into",
    ):
        check_rows(README_MODEL, loss, README, README_BATCH, 8)
    known = README_BATCH | {
        "mean": np.broadcast_to(README_BATCH["y"].mean(0), README_BATCH["y"].shape)
    }
    loss = lambda o, b: (jnp.sum((o - b["mean"]) ** 2), jnp.float32(len(o)))
    check_rows(README_MODEL, loss, README, known, 8)


def test_a_marked_function_is_taken_without_a_warning():
    check_rows(README_MODEL, sorted_loss(jaxpar.row_wise(by_part)), README, README_BATCH, 8)


def test_a_model_of_its_own_number_of_rows_alone_is_taken_with_a_warning():
    def embed(outer, batch):
        assert len(batch["x"]) in (1, 64)
        return batch["x"]

    model = jaxpar.LayeredModel(embed, README_MODEL.layer, README_MODEL.head)
    with pytest.warns(UserWarning, match="not known: model and loss take no 7 and no 64 rows"):
        check_rows(model, plus(lambda o, b: 0), README, README_BATCH, 64)


# --- with numbers -----------------------------------------------------------------------------------------------------


def test_a_step_of_the_readme_model_refuses_before_it_compiles_what_depends_on_the_split(x64):
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    params = README | {"layers": RNG.normal(size=(8, 8, 8)) / 3}
    for term, message in ((PLUS["a mean"], SUMS), (PLUS["a maximum"], SUMS)):
        step = jaxpar.value_and_grad(
            README_MODEL, plus(term), mesh, schedule="1f1b", num_microbatches=8
        )
        with pytest.raises(ValueError, match=message):
            step(params, README_BATCH)


# --- sequences that are split -----------------------------------------------------------------------------------------

SEQUENCES = {name: np.zeros((4, 8), np.int32) for name in ("tokens", "targets", "positions")}
TABLE = {"outer": RNG.normal(size=(16, 4)), "layers": RNG.normal(size=(2, 4, 4))}
LOOKUP = jaxpar.LayeredModel(
    lambda outer, batch: outer[batch["tokens"]],
    lambda w, x: x + jnp.tanh(x @ w),
    lambda outer, x: x @ outer.T,
)


def each(o, b):
    return -jnp.take_along_axis(jax.nn.log_softmax(o), b["targets"][..., None], axis=-1)[..., 0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, b: (jnp.sum(each(o, b)), jnp.float32(each(o, b).size)), ""),
        (lambda o, b: (jnp.sum(jnp.mean(each(o, b), axis=1)), jnp.float32(len(o))), ""),
        (
            lambda o, b: (jnp.sum(each(o, b)), jnp.float32(len(o))),
            "got loss_sum a sum over positions, and weight_sum the same for any number of positions",
        ),
        (
            lambda o, b: (jnp.sum(jnp.sum(each(o, b), axis=1) ** 2), jnp.float32(each(o, b).size)),
            "got loss_sum no sum over positions: it makes of a sum",
        ),
        (
            lambda o, b: (
                jnp.sum(each(o, b)) + jnp.sum(o[:, 1:] - o[:, :-1]),
                jnp.float32(each(o, b).size),
            ),
            "loss must treat each position on its own.*got a slice of 7 of 8 positions",
        ),
    ],
)
def test_a_loss_of_sequences_that_are_split_is_a_sum_over_positions(loss, message):
    if message:
        with pytest.raises(ValueError, match=message):
            check_positions(LOOKUP, loss, TABLE, SEQUENCES, abstract_mesh(context=2))
    check_positions(LOOKUP, loss, TABLE, SEQUENCES, abstract_mesh(context=1))
    if not message:
        check_positions(LOOKUP, loss, TABLE, SEQUENCES, abstract_mesh(context=2))


GATHERED = {"outer": {"table": TABLE["outer"]}, "layers": {"scale": jnp.ones((2, 1, 1, 1))}}


def gathering(change=lambda h: h, embed=lambda outer, batch: 0.0, head=lambda h: h):
    """A model that reads the mean of the whole sequence, and whose parts do something else beside it."""
    whole = lambda h: jnp.mean(gather_sequence(h), axis=1, keepdims=True)
    return jaxpar.LayeredModel(
        lambda outer, batch: outer["table"][batch["tokens"]] + embed(outer, batch),
        lambda params, h: change(h * params["scale"] + whole(h)),
        lambda outer, h: head(h) @ outer["table"].T,
    )


OF_TOKENS = lambda o, b: (jnp.sum(each(o, b)), jnp.float32(each(o, b).size))
of_pooled = lambda o, b: jnp.sum(
    jnp.mean(o[:, 0] ** 2, -1)
)  # of a head that pools: the same on all devices
CONV = {"dimension_numbers": ("NWC", "WIO", "NWC"), "window_strides": (1,), "padding": "SAME"}


def running(h):
    _, out = jax.lax.scan(
        lambda carry, x: (jnp.tanh(carry + x),) * 2, h[:, 0] * 0, h.swapaxes(0, 1)
    )
    return out.swapaxes(0, 1)


def of_pairs(pairs):
    """The arguments of a check whose loss is one of pairs of rows."""
    loss = lambda out, batch: (
        -jnp.sum(jax.nn.log_sigmoid(jnp.subtract(*pairs(out)))),
        jnp.float32(len(out) / 2),
    )
    model = lambda params, batch: batch["x"] @ params["w"]
    return model, loss, {"w": np.ones((3, 2))}, {"x": np.ones((16, 3))}


halves = lambda out: (out[: len(out) // 2], out[len(out) // 2 :])


def in_pairs(out):
    groups = out.reshape(-1, 2, out.shape[-1])
    return groups[:, 0], groups[:, 1]


neighbours = {
    "every second": lambda out: (out[::2], out[1::2]),
    "two of each group": lambda out: in_pairs(out),
}


@pytest.mark.parametrize("name", neighbours)
def test_pairs_of_neighbouring_rows_are_refused_where_a_microbatch_has_one_row(name):
    arguments = of_pairs(neighbours[name])
    check_rows(*arguments, 4)
    message = "microbatches of one row, and code that takes rows in groups: it .* at .*row_checks"
    with pytest.raises(ValueError, match=message):
        check_rows(*arguments, 16)


@pytest.mark.parametrize("num_parts", [8, 16])
def test_pairs_of_rows_of_two_halves_are_refused_for_any_size_of_a_microbatch(num_parts):
    with pytest.raises(ValueError, match="it makes one row of several"):
        check_rows(*of_pairs(halves), num_parts)


def test_a_squeeze_of_the_dim_of_rows_is_told_where_a_microbatch_has_one():
    squeezed = lambda o, b: (jnp.sum(jnp.squeeze(o) ** 2), jnp.float32(jnp.squeeze(o).shape[0]))
    kept = lambda o, b: (jnp.sum(jnp.squeeze(o[:, None], 1) ** 2), jnp.float32(len(o)))
    pairs = lambda params, batch: (
        (batch["x"][:, None] @ batch["x"][..., None])[:, 0] @ params["w"][:1]
    )
    model = lambda params, batch: batch["x"] @ params["w"]
    params, batch = {"w": jnp.ones((3, 2))}, {"x": jnp.ones((8, 3))}
    check_rows(pairs, kept, params, batch, 8)  # of which JAX's product squeezes a single one
    of_method = lambda o, b: (jnp.sum(o.squeeze() ** 2), jnp.float32(len(o.squeeze())))
    with pytest.warns(UserWarning, match=r"loss: it takes the dim of rows away"):
        check_rows(model, of_method, params, batch, 8)
    with pytest.warns(UserWarning, match=r"loss: it takes the dim of rows away .*\(squeeze at"):
        check_rows(model, squeezed, params, batch, 8)
    check_rows(model, squeezed, params, batch, 4)
    check_rows(model, kept, params, batch, 8)


def test_a_model_that_takes_rows_apart_but_no_odd_number_of_them_is_taken():
    model, loss, *trees = of_pairs(lambda out: (out, 0 * out))

    def of_even(params, batch):
        assert len(batch["x"]) == 1 or len(batch["x"]) % 2 == 0
        return model(params, batch)

    check_rows(of_even, loss, *trees, 16)


@pytest.mark.parametrize(
    "middle",
    [
        jnp.median,
        jnp.nanmedian,
        lambda e: jnp.quantile(e, 0.3),
        lambda e: jnp.sort(e)[len(e) // 2],
        lambda e: jnp.sum(jnp.sort(e)[: len(e) // 2]),
        lambda e: jnp.sum(jnp.abs(e - jnp.median(e))),
    ],
)
def test_a_middle_of_the_rows_is_refused(middle):
    of_rows = lambda o, b: middle(jnp.mean((o - b["y"]) ** 2, axis=-1))
    for loss in (plus(of_rows), lambda o, b: (of_rows(o, b), 1.0)):
        with pytest.raises(ValueError, match=r"it orders or adds up rows .sort at"):
            check_rows(README_MODEL, loss, README, README_BATCH, 8)


def test_a_loss_that_says_that_it_is_wrong_by_being_nan_is_taken():
    def loss(o, b):
        loss_sum, weight_sum = jaxpar.losses.squared_error(o, b["y"])
        return jnp.where(jnp.any(jnp.abs(o) > 9), jnp.nan, loss_sum), weight_sum

    check_rows(README_MODEL, loss, README, README_BATCH, 8)


def test_a_function_whose_forward_pass_calls_itself_is_read_a_few_times():
    """The form of JAX's own documentation: each reading of its derivative has it again."""
    traces = itertools.count()

    def through(x):
        next(traces)
        return jnp.round(x)

    straight = jax.custom_vjp(through)
    straight.defvjp(lambda x: (straight(x), None), lambda _, ct: (ct,))
    model = lambda params, batch: straight(straight(batch["x"] @ params["w"]))
    loss = lambda out, batch: (jnp.sum(out**2), jnp.float32(out.shape[0]))
    check_rows(model, loss, {"w": np.ones((3, 2))}, {"x": np.ones((16, 3))}, 2)
    assert next(traces) < 20


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"change": lambda h: h - h.mean(1, keepdims=True)},
            "layer must treat .*: a sum over positions reaches each position",
        ),
        (
            {"change": lambda h: h + jnp.roll(h, 1, axis=1)},
            r"layer must .*: it moves positions \(concatenate at .*test_row",
        ),
        (
            {"change": lambda h: h + jnp.cumsum(h, axis=1)},
            "layer must treat .*: it orders or adds up positions",
        ),
        (
            {"change": running},
            "layer must treat .*: it makes of a sum over positions|it carries one position to the next",
        ),
        ({"change": lambda h: h + jax.nn.softmax(h, axis=1)}, "layer must treat"),
        ({"head": lambda h: h + h[:, -1:]}, "head must treat .*: it makes one position of several"),
        (
            {"head": lambda h: h.mean(1, keepdims=True)},
            "got loss_sum no sum over positions: it makes of a sum over positions",
        ),
        ({"head": lambda h: h[:, -1:]}, "got loss_sum no sum over positions"),
        (
            {"head": lambda h: h + sum_over_sequence(h)},
            "head must treat .*: it joins positions of one device and others",
        ),
        ({"head": lambda h: h + sum_over_sequence(h.sum(1, keepdims=True))}, ""),
        (
            {"head": lambda h: h + sum_over_sequence(h.mean(1, keepdims=True))},
            "it adds positions and what depends",
        ),
        ({"head": lambda h: h + sum_over_sequence(h.mean(1, keepdims=True)) / num_parts()}, ""),
        ({"head": lambda h: h / max_over_sequence(jnp.abs(h).max(1, keepdims=True))}, ""),
        (
            {
                "change": lambda h: heads_to_sequence(
                    jnp.cumsum(sequence_to_heads(h[..., None]), axis=1)
                )[..., 0]
            },
            "",
        ),
        (
            {"embed": lambda outer, batch: outer["table"][places(batch["tokens"].shape[1])][None]},
            "",
        ),
        ({}, ""),
    ],
)
def test_a_model_that_mixes_the_positions_of_a_device_is_refused_though_it_gathers_others(
    parts, message
):
    found = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with found:
        check_positions(
            gathering(**parts), OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2)
        )


def test_a_loss_of_the_last_position_of_each_device_is_refused():
    plain = gathering()
    head = lambda outer, h: {"logits": h @ outer["table"].T, "last": h[:, -1]}
    model = jaxpar.LayeredModel(plain.embed, plain.layer, head)
    loss = lambda o, b: (jnp.sum(o["last"] ** 2), jnp.float32(len(o["last"])))
    with pytest.raises(
        ValueError, match="no sum over positions: a sum over some positions of each device"
    ):
        check_positions(model, loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, False)], ids=["a chunk", "two chunks"])
def test_groups_of_neighbouring_positions_must_be_in_one_of_the_chunks_of_a_device(size, fits):
    """Of 8 positions each of two devices has two chunks of 2."""
    model = gathering()
    in_groups = lambda o, b: jnp.sum(each(o, b).reshape(len(o), -1, size).mean(-1) ** 2) * size
    loss = lambda o, b: (in_groups(o, b), jnp.float32(each(o, b).size))
    message = "it groups positions of two parts of a sequence"
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=message):
        check_positions(model, loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize(
    "numbered",
    [
        lambda table, seq: table[jnp.arange(seq)],
        lambda table, seq: table[:seq],
        lambda table, seq: table.reshape(seq, -1)[:, :1] + table[:1],
    ],
    ids=["an index", "a slice", "another shape"],
)
def test_positions_that_are_counted_on_a_device_are_told(numbered):
    model = gathering(
        embed=lambda outer, batch: numbered(outer["table"], batch["tokens"].shape[1])[None]
    )
    with pytest.warns(
        UserWarning,
        match="on which a device has: embed: it depends on the place of a position in its device",
    ):
        check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


IN_DOUBT = {
    "a first token": ({"change": lambda h: h.at[:, 0].add(1.0)}, "layer: it .* position"),
    "tokens that are counted": (
        {
            "embed": lambda outer, batch: outer["table"][
                jnp.cumsum(batch["tokens"] != 0, 1) % len(outer["table"])
            ]
        },
        "embed: it orders or adds up positions",
    ),
    "a convolution": (
        {
            "change": lambda h: jax.lax.conv_general_dilated(
                h, jnp.ones((3, 4, 4)), (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
            )
        },
        "layer: a convolution along positions",
    ),
    "a scan": (
        {"change": lambda h: jax.lax.associative_scan(jnp.add, h, axis=1)},
        "layer: another program for another number of positions",
    ),
}


@pytest.mark.parametrize("name", IN_DOUBT)
def test_what_may_mix_the_positions_of_a_device_is_told(name):
    parts, message = IN_DOUBT[name]
    with pytest.warns(UserWarning, match=f"on which a device has: {message}"):
        check_positions(
            gathering(**parts), OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2)
        )


def test_a_loss_of_the_last_place_on_a_device_is_told():
    is_last = lambda o: jnp.arange(o.shape[1]) == o.shape[1] - 1
    loss = lambda o, b: (jnp.sum(o * is_last(o)[None, :, None]), jnp.float32(each(o, b).size))
    with pytest.warns(UserWarning, match="on which a device has: loss: .* place"):
        check_positions(gathering(), loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize(
    "by_place",
    [
        lambda table, seq: table[:seq],
        lambda table, seq: table[jnp.arange(seq)],
        lambda table, seq: table[:1] * jax.random.normal(jax.random.key(0), (seq, 1)),
        lambda table, seq: jax.lax.fori_loop(0, seq, lambda _, row: jnp.tanh(row), table[0]),
    ],
    ids=["a slice", "an index", "noise", "trips"],
)
@pytest.mark.parametrize(
    "joined", [jnp.add, jnp.multiply, lambda loss_sum, term: term], ids=["added", "times", "alone"]
)
def test_params_that_a_loss_reads_by_the_places_of_a_device_are_told(by_place, joined):
    plain = gathering()
    head = lambda outer, h: (plain.head(outer, h), by_place(outer["table"], h.shape[1]))
    model = jaxpar.LayeredModel(plain.embed, plain.layer, head)

    def loss(o, b):
        loss_sum, weight_sum = OF_TOKENS(o[0], b)
        return joined(loss_sum, jnp.sum(o[1] ** 2)), weight_sum

    told = "a number beside a sum over pos|depends on the number of devices|how loss_sum depends"
    with pytest.warns(UserWarning, match=f"on which a device has: .*({told})"):
        check_positions(model, loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


def of_heads(slopes):
    """A layer that gives each position a mean over earlier ones, times a number that belongs to its head."""

    def change(h):
        heads = sequence_to_heads(h.reshape(*h.shape[:2], 2, 2))
        mixed = jnp.cumsum(heads, axis=1) * slopes(h, heads.shape[2])[None, None, :, None]
        return heads_to_sequence(mixed).reshape(h.shape)

    return gathering(change=change)


@pytest.mark.parametrize(
    "slopes",
    [lambda h, count: 0.5 ** jnp.arange(count), lambda h, count: jnp.array([2, 1] * 3)[:count]],
    ids=["an index", "a slice"],
)
def test_what_belongs_to_the_heads_of_a_device_and_is_counted_on_it_is_told(slopes):
    with pytest.warns(UserWarning, match="layer: it depends on the place of a head"):
        check_positions(of_heads(slopes), OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


def test_what_belongs_to_heads_is_sent_with_them():
    def slopes(h, count):
        every = jnp.broadcast_to(jnp.array([0.5, 0.25])[:, None], (*h.shape[:2], 2, 1))
        return sequence_to_heads(every)[0, 0, :, 0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_positions(of_heads(slopes), OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


def test_a_model_that_takes_no_other_number_of_devices_is_told_that_it_was_not_read():
    model = of_heads(lambda h, count: jnp.array([0.5, 0.25])[:count])
    with pytest.warns(UserWarning, match="takes no context=4. It is taken to be right"):
        check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


counted = lambda h: jnp.sin(jnp.arange(h.shape[1]))[None, :, None]
SENT = {
    "gathered beside its place": (
        lambda h: gather_sequence(h + counted(h)).mean(1, keepdims=True),
        "it depends on the place of a position in its device",
    ),
    "places gathered": (
        lambda h: gather_sequence(counted(h)).mean(1, keepdims=True),
        "it joins what depends on the place of a position in its device",
    ),
    "the largest beside its place": (
        lambda h: max_over_sequence((h * counted(h)).max(1, keepdims=True)),
        "it depends on the place of a position in its device",
    ),
    "the largest of means": (
        lambda h: max_over_sequence(h.mean(1, keepdims=True)),
        "it takes the largest of what each device has added up",
    ),
    "gathered twice": (
        lambda h: gather_sequence(gather_sequence(h)).mean(1, keepdims=True),
        "it joins what is the same on all devices",
    ),
    "gathered along another dim": (
        lambda h: gather_sequence(h[None]).mean(1),
        "it joins the positions of all devices, and others of each",
    ),
    "the largest of others, exchanged": (
        lambda h: heads_to_sequence(sequence_to_heads(max_over_sequence(h)[..., None]))[..., 0],
        "it joins over the devices what mixes the positions of each",
    ),
    "exchanged beside its place": (
        lambda h: heads_to_sequence(
            jnp.cumsum(sequence_to_heads((h + counted(h))[..., None]), axis=1)
        )[..., 0],
        "it depends on the place of a position in its device",
    ),
    "numbered as those of a device": (
        lambda h: (gather_sequence(h) * places(8)[None, :, None]).mean(1, keepdims=True),
        "it numbers positions as those of a device, and others than it has, where jnp.arange numbers all",
    ),
}


@pytest.mark.parametrize("name", SENT)
def test_what_depends_on_the_device_and_is_sent_to_all_is_told(name):
    """Such a value is the same on all devices, and another one than on one device."""
    change, message = SENT[name]
    model = gathering(change=lambda h: h + change(h))
    with pytest.warns(UserWarning, match=f"which a device has: layer: {message}"):
        check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize("is_divided", [True, False], ids=["a mean", "a sum of means"])
def test_a_pooled_mean_that_is_not_divided_by_the_number_of_devices_is_told(is_divided):
    model = gathering()
    mean = lambda h: sum_over_sequence(h.mean(1)) / (num_parts() if is_divided else 1)
    pooled = jaxpar.LayeredModel(
        model.embed, model.layer, lambda outer, h: jnp.tanh(mean(h)) @ outer["table"].T
    )
    loss = lambda o, b: (
        -jnp.sum(jax.nn.log_softmax(o)[:, 0]) / num_parts(),
        jnp.float32(len(o)) / num_parts(),
    )
    told = pytest.warns(UserWarning, match="head: it depends on the number of devices")
    with contextlib.nullcontext() if is_divided else told:
        check_positions(pooled, loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize("stops_before", [True, False])
def test_a_maximum_of_the_sequence_cancels_wherever_its_gradient_is_stopped(stops_before):
    stop = jax.lax.stop_gradient

    def change(h):
        own = h.max(1, keepdims=True)
        highest = max_over_sequence(stop(own)) if stops_before else stop(max_over_sequence(own))
        weights = jnp.exp(h - highest)
        return weights / sum_over_sequence(weights.sum(1, keepdims=True))

    model = gathering(change=change)
    check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


def test_an_odd_number_of_positions_is_no_part_of_a_sequence():
    change = lambda h: h + gather_sequence(h.mean(1, keepdims=True)).mean(1, keepdims=True)
    mesh = jaxpar.make_mesh(context=2, devices=jax.devices()[:2])
    step = jaxpar.value_and_grad(gathering(change=change), OF_TOKENS, mesh)
    with pytest.raises(ValueError, match=r"which are two chunks; got \(.*, 1, .*\), with an odd"):
        jax.eval_shape(step, GATHERED, SEQUENCES)


@pytest.mark.parametrize("is_of_all", [True, False], ids=["of the sequence", "of a device"])
def test_a_maximum_of_one_device_that_sums_over_devices_do_not_cancel_is_told(is_of_all):
    """Of a softmax over the sequence: the sums of devices that take off other maxima do not belong together."""

    def head(outer, h):
        own = h.max(1, keepdims=True)
        weights = jnp.exp(h - jax.lax.stop_gradient(max_over_sequence(own) if is_of_all else own))
        over = lambda a: sum_over_sequence(a.sum(1))
        return (over(weights * h) / over(weights)) @ outer["table"].T

    model = gathering()
    pooled = jaxpar.LayeredModel(model.embed, model.layer, head)
    loss = lambda o, b: (
        -jnp.sum(jax.nn.log_softmax(o)[:, 0]) / num_parts(),
        jnp.float32(len(o)) / num_parts(),
    )
    told = pytest.warns(UserWarning, match="head: a maximum over positions is taken to cancel")
    with contextlib.nullcontext() if is_of_all else told:
        check_positions(pooled, loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (lambda o, b: jnp.sum(each(o, b) > 1), ""),
        (lambda o, b: jnp.float32(len(o)), "the same for any number of positions"),
        (lambda o, b: jnp.float32(len(o)) / num_parts(), ""),
        (lambda o, b: jnp.sum(jnp.exp(each(o, b).mean(1))), "no sum over positions"),
        (lambda o, b: jnp.sum(each(o, b).max(1)), "no sum over positions"),
    ],
    ids=["a count", "rows", "rows divided", "of a mean of each device", "the largest of a device"],
)
def test_further_sums_of_a_loss_are_sums_over_positions_too(further, message):
    loss = lambda o, b: (*OF_TOKENS(o, b), {"more": further(o, b)})
    with (
        pytest.raises(ValueError, match=f"'more', {message}")
        if message
        else contextlib.nullcontext()
    ):
        check_positions(gathering(), loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            of_pooled,
            "no sum over positions: it adds to a sum .* divide what is the same on all devices",
        ),
        (lambda o, b: of_pooled(o, b) / num_parts(), ""),
    ],
)
def test_what_is_the_same_on_all_devices_is_added_once_to_a_sum_over_positions(term, message):
    pooled = lambda h: sum_over_sequence(h.sum(1, keepdims=True))
    model = gathering()
    both = jaxpar.LayeredModel(
        model.embed, model.layer, lambda outer, h: (model.head(outer, h), pooled(h))
    )
    loss = lambda o, b: (OF_TOKENS(o[0], b)[0] + term(o[1], b), OF_TOKENS(o[0], b)[1])
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_positions(both, loss, GATHERED, SEQUENCES, abstract_mesh(context=2))


def test_a_model_that_is_traced_with_other_numbers_each_time_is_told_so_and_not_that_it_mixes_rows():
    traces = itertools.count(1)
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    model = lambda params, batch: batch["x"] * params["w"] + next(traces)
    loss = lambda outputs, batch: (jnp.sum(outputs), jnp.float32(len(outputs)))
    batch = {"x": np.ones((8, 1), np.float32)}
    with pytest.raises(
        ImpureError,
        match=r"must be pure functions, .* second trace, \d+ and then \d+\. Put what changes",
    ):
        jax.eval_shape(jaxpar.value_and_grad(model, loss, mesh), {"w": jnp.ones((1, 1))}, batch)


@pytest.mark.parametrize("of_loss", [False, True])
def test_an_array_of_all_rows_that_a_function_closes_over_is_told_to_belong_in_the_batch(of_loss):
    of_rows = np.ones((8, 1), np.float32)
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    model = lambda params, batch: batch["x"] * params["w"] + (0 if of_loss else of_rows)
    loss = lambda o, batch: (jnp.sum(o * (of_rows if of_loss else 1)), jnp.float32(len(o)))
    step = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)
    with pytest.raises((TypeError, ValueError), match="ncompatible shapes") as raised:
        jax.eval_shape(step, {"w": jnp.ones((1, 1))}, {"x": of_rows})
    (note,) = raised.value.__notes__[:1]
    assert "one of the 4 parts of a batch" in note
    assert "here 2 of 8 rows" in note


@pytest.mark.parametrize(
    "of_all_rows",
    [
        lambda x: x.reshape(8, 1),
        lambda x: jnp.concatenate([x, np.ones((8, 1), np.float32)], axis=1),
        lambda x: jnp.einsum("bd,bd->bd", x, np.ones((8, 1), np.float32)),
        lambda x: jaxpar.losses.squared_error(x, jnp.ones((8, 1)))[0],
    ],
)
def test_what_takes_all_rows_alone_is_told_that_it_is_given_a_part(of_all_rows):
    """Of errors with other words than those of JAX about shapes, also of the package's own."""
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    model = lambda params, batch: batch["x"] * params["w"]
    loss = lambda o, batch: (jnp.sum(of_all_rows(o)), jnp.float32(len(o)))
    step = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)
    with pytest.raises((TypeError, ValueError)) as raised:
        jax.eval_shape(step, {"w": jnp.ones((1, 1))}, {"x": np.ones((8, 1), np.float32)})
    assert any("here 2 of 8 rows" in note for note in raised.value.__notes__)


def test_an_error_for_all_rows_too_is_not_blamed_on_the_parts():
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    model = lambda params, batch: batch["x"] * params["w"] + jnp.ones((7, 1))
    step = jaxpar.value_and_grad(model, lambda o, _: (jnp.sum(o), 1.0), mesh, num_microbatches=2)
    with pytest.raises((TypeError, ValueError)) as raised:
        jax.eval_shape(step, {"w": jnp.ones((1, 1))}, {"x": np.ones((8, 1), np.float32)})
    assert not any("parts of a batch" in note for note in getattr(raised.value, "__notes__", ()))


KEYS = list(jax.random.split(jax.random.key(5), 40))
TABLES = [np.array([[np.nan, 1.0 + n]], np.float32) for n in range(40)]
COUNTED = {
    "a key": (
        lambda h, n: h * jax.random.bernoulli(jax.random.key(n), 0.7, (1, 2)),
        r"other numbers in a second trace, \d+ and then \d+\.",
    ),
    "a key of a list": (
        lambda h, n: h * jax.random.bernoulli(KEYS[n], 0.7, (1, 2)),
        r"other numbers in a second trace, [\d.e+]+ and then [\d.e+]+\.",
    ),
    "numbers behind others that are none": (
        lambda h, n: h + jnp.where(TABLES[n] > 0, TABLES[n], 0.0),
        r"other numbers in a second trace, [1-9]\d* and then [1-9]\d*\.",
    ),
    "an operation": (
        lambda h, n: (jnp.tanh, jnp.sin)[n % 2](h),
        r"other operations in a second trace, (sin|tanh) and then (sin|tanh)\.",
    ),
    "an input": (
        lambda h, n: (jnp.tanh(h), jnp.sin(h))[n % 2],
        r"other values for the result in a second trace\.",
    ),
    "an input in a loop": (
        lambda h, n: jax.lax.fori_loop(0, 2, lambda i, x: (x, h)[n % 2] + (h, x)[n % 2] * x, h),
        r"other values for \w+ in a second trace\.",
    ),
    "one more operation": (
        lambda h, n: h if n % 2 else jnp.tanh(h),
        r"other operations in a second trace, (the result|tanh) and then (the result|tanh)\.",
    ),
    "a slice": (
        lambda h, n: h[:, n % 2 : n % 2 + 1],
        r"other settings of slice in a second trace, .*\(0, [01]\) and then .*\(0, [01]\)\.",
    ),
    "a dtype": (
        lambda h, n: h.astype((jnp.float16, jnp.bfloat16)[n % 2]).astype(h.dtype),
        r"other settings of convert_element_type in a second trace, new_dtype=",
    ),
    "the second number of an array in a jitted function": (
        lambda h, n: jax.jit(lambda x: x + np.array([[0.0, n]], np.float32))(h),
        r"other numbers in a second trace, [1-9]\d* and then [1-9]\d*\.",
    ),
    "a derivative of its own": (
        lambda h, n: with_gradient_times(n)(h),
        r"other numbers in a second trace, \d+ and then \d+\.",
    ),
}


def with_gradient_times(n):
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (g * n,))
    return twice


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        *((name, lambda model: model) for name in COUNTED),
        ("a key", jax.jit),  # whose trace JAX keeps
        ("a key", jax.checkpoint),
    ],
)
@pytest.mark.parametrize("data", [1, 2])
def test_a_model_that_does_something_else_in_each_trace_is_refused_on_one_device_too(
    name, wrap, data
):
    """What is chosen by a counter is not read where the rows are checked, and is another on each mesh."""
    of_count, message = COUNTED[name]
    traces = itertools.count(1)
    mesh = jaxpar.make_mesh(data=data, devices=jax.devices()[:data])
    model = wrap(lambda params, batch: of_count(batch["x"] * params["w"], next(traces)))
    loss = lambda outputs, batch: (jnp.sum(outputs), jnp.float32(len(outputs)))
    batch = {"x": np.ones((8, 2), np.float32)}
    with pytest.raises(ImpureError, match=message):
        jax.eval_shape(jaxpar.value_and_grad(model, loss, mesh), {"w": jnp.ones((1, 2))}, batch)


def test_numbers_that_are_the_same_in_each_trace_are_pure():
    key, table = jax.random.key(0), np.array([[np.nan, 1.0]], np.float32)
    names = itertools.count()

    def model(params, batch):
        named = checkpoint_name(batch["x"], f"block {next(names)}")  # which changes no number
        return named * params["w"] + table + jax.random.normal(key, (1, 2))

    loss = lambda outputs, batch: (jnp.sum(outputs), jnp.float32(len(outputs)))
    check_pure(model, loss, {"w": jnp.ones((1, 2))}, {"x": np.ones((8, 2), np.float32)})


BY_DEVICE = {
    "counted by the device": lambda h: h * (1.0 + jax.lax.axis_index("context")),
    "gathered in the order of the devices": lambda h: (
        h + jax.lax.all_gather(h, "context", axis=1, tiled=True)[:, -1:]
    ),
}


@pytest.mark.parametrize("name", BY_DEVICE)
def test_positions_that_are_numbered_by_their_device_are_told(name):
    is_split = lambda: "context" in jax.sharding.get_abstract_mesh().manual_axes
    model = gathering(change=lambda h: BY_DEVICE[name](h) if is_split() else h)
    with pytest.warns(UserWarning, match="which a device has: layer: it .* device"):
        check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))


PREFIXED = {
    "concatenate": lambda h: jnp.concatenate(
        [jnp.ones_like(h, shape=(len(h), 2, h.shape[2])), h], 1
    ),
    "pad": lambda h: jnp.pad(h, ((0, 0), (2, 0), (0, 0)), constant_values=1.0),
}


@pytest.mark.parametrize("name", PREFIXED)
def test_a_prefix_that_each_device_gathers_with_its_positions_is_told(name):
    """Keys of a prefix before the gathered ones are right; gathered with them there is a prefix of each device."""
    prefixed = PREFIXED[name]
    seen_by = lambda h, seen: h + jax.nn.softmax(h @ seen.mT) @ seen
    model = gathering(change=lambda h: seen_by(h, gather_sequence(prefixed(h))))
    with pytest.warns(UserWarning, match="which a device has: layer: it joins .* (at|and other) "):
        check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))
    model = gathering(change=lambda h: seen_by(h, prefixed(gather_sequence(h))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_positions(model, OF_TOKENS, GATHERED, SEQUENCES, abstract_mesh(context=2))
